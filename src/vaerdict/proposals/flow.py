"""Conditional normalising flows as approximate posteriors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.func import functional_call

from vaerdict.core import floating
from vaerdict.distributions import Noise
from vaerdict.noise import Source, global_state_from
from vaerdict.optional import require
from vaerdict.proposals.families import Trainable, center_and_spread


@dataclass(frozen=True)
class SplineFlow:
    """Conditional neural spline flows (zuko; extra ``flows``)."""

    transforms: int = 3

    @property
    def suffix(self) -> str:
        """What follows the name of the objective in tables."""
        return "-flow"

    def make(self, x: Tensor, d: int, *, hidden: Sequence[int], generator: torch.Generator) -> Flow:
        """Create an untrained proposal; see `Family.make`."""
        flows = require("zuko.flows", "flows")
        with global_state_from(generator):
            flow = flows.NSF(d, context=x.shape[-1], transforms=self.transforms, hidden_features=tuple(hidden))
        return Flow(flow, d, *center_and_spread(x)).to(floating(x[:1]))


class Flow(Trainable):
    """A conditional normalising flow as proposal."""

    def __init__(self, flow: nn.Module, d: int, center: Tensor, spread: Tensor) -> None:
        super().__init__()
        self.flow, self.d = _FlowMap(flow), d
        self.center, self.spread = nn.Buffer(center), nn.Buffer(spread)

    def forward(self, x: Tensor) -> FlowConditional:
        """The distribution of latents given x."""
        return FlowConditional(self, (x - self.center) / self.spread)


class _FlowMap(nn.Module):
    """A flow that is evaluated inside `forward`.

    The distributions of zuko are lazy. Evaluated later, they would read their parameters after `functional_call` has
    restored the original ones.
    """

    def __init__(self, flow: nn.Module) -> None:
        super().__init__()
        self.flow = flow

    def forward(self, context: Tensor, value: Tensor, inverse: bool) -> Tensor:
        q = self.flow(context)
        return q.transform.inv(value) if inverse else q.log_prob(value)


@dataclass(frozen=True, eq=False)
class FlowConditional:
    """A flow conditioned on observations; if `stopped`, it is evaluated with detached parameters."""

    owner: Flow
    context: Tensor
    stopped: bool = False

    def noise(self, k: int, source: Source) -> Noise:
        """Base noise for k particles of each observation."""
        return Noise(source.normal(k, self.context.shape[:-1], self.owner.d, like=self.context))

    def transform(self, noise: Noise) -> Tensor:
        """Particles from base noise. Shapes: ``-> (K, *batch, d)``."""
        return self._evaluate(noise.normal, inverse=True)

    def log_prob(self, z: Tensor) -> Tensor:
        """Log-density at z. Shapes: ``(K, *batch, d) -> (K, *batch)``."""
        return self._evaluate(z, inverse=False)

    def detach(self) -> FlowConditional:
        """The same flow with no gradient in its parameters."""
        return FlowConditional(self.owner, self.context, stopped=True)

    def _evaluate(self, value: Tensor, *, inverse: bool) -> Tensor:
        flow = self.owner.flow
        parameters = {name: p.detach() if self.stopped else p for name, p in flow.named_parameters()}
        return functional_call(flow, parameters, (self.context, value, inverse))
