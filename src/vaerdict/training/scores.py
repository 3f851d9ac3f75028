r"""What training must raise on held-out data.

The bound by a member's own encoder scores the encoder as much as the model: where the encoder is poor, a better model
may show a lower bound. `RefinedBound` gives every held-out observation a proposal of its own (Newton steps from the
encoder's answer, then a Student-t of the curvature there), so that what is left is close to the evidence itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from vaerdict.core import Model, Proposal, check_count, evaluating, log_mean_exp, prepared
from vaerdict.diagnostics import ess, khat
from vaerdict.distributions import Elliptical
from vaerdict.noise import Randomness
from vaerdict.refinement import refine
from vaerdict.training.data import Observations
from vaerdict.training.stacks import Stack

_ROWS = 2**15  # particles x observations drawn at a time
_NUMBERS = {"cpu": 2**22, "cuda": 2**28}  # particles x observations x features weighed at a time


class Score(Protocol):
    """A held-out score; its `repr` must say everything about it, for checkpoints are compared by it."""

    def __call__(self, stack: Stack, x: Observations, k: int, /) -> Tensor:
        """The score of each member with k particles. Shapes: ``-> (members,)``."""
        ...


@dataclass(frozen=True)
class OwnBound:
    """The IWELBO by each member's own proposal; of proposals for a fixed model the log effective sample size."""

    def __call__(self, stack: Stack, x: Observations, k: int) -> Tensor:
        """The score of each member."""
        return stack.score(x, k)


@dataclass(frozen=True)
class RefinedBound:
    """The IWELBO by a proposal refined for each of the first `n_observations`, in `n_steps` Newton steps at most.

    It does not depend on how good the encoder is, so that proposals for a fixed model are scored by `OwnBound`.
    """

    n_observations: int = 128
    n_steps: int = 15

    def __post_init__(self) -> None:
        check_count(self.n_observations, name="n_observations")
        check_count(self.n_steps, name="n_steps")

    def __call__(self, stack: Stack, x: Observations, k: int) -> Tensor:
        """The score of each member."""
        if not stack.learn_model:
            return stack.score(x, k)
        batch = x.block(slice(self.n_observations), stack.n_stacked)
        with evaluating(stack.model, stack.proposal):
            q = refine(stack.density, batch, stack.proposal, n_steps=self.n_steps, axis=batch.dim() - 2).distribution
            log_w = _log_weights(stack.density, batch, q, k, stack.same_noise("held out"))
        return log_mean_exp(log_w).mean(-1).reshape(-1)


class RefinedEvidence(NamedTuple):
    """Log-evidence by refined proposals, and how far it can be trusted. Shapes: ``(*batch)``, `ess` in draws."""

    log_evidence: Tensor
    khat: Tensor
    ess: Tensor


def refined_evidence(
    model: Model,
    x: Tensor,
    start: Tensor | Proposal,
    n: int = 1000,
    *,
    generator: Randomness,
    df: float | None = 10.0,
    inflate: float = 1.1,
    n_steps: int = 50,
) -> RefinedEvidence:
    """The IWELBO of n draws with a proposal refined for each observation from `start`: a score of the model alone.

    Shapes: ``x (n, p)``, ``start (n, d)`` or a proposal.
    """
    q = refine(model, x, start, df=df, inflate=inflate, n_steps=n_steps, generator=generator).distribution
    parts = []
    for rows in torch.arange(x.shape[0], device=x.device).split(max(1, _ROWS // check_count(n, name="n"))):
        log_w = _log_weights(model, x[rows], q.select(rows), n, generator)
        parts.append((log_mean_exp(log_w), khat(log_w), ess(log_w)))
    return RefinedEvidence(*(torch.cat(column) for column in zip(*parts, strict=True)))


@torch.no_grad()
def _log_weights(model: Model, x: Tensor, q: Elliptical, k: int, generator: Randomness) -> Tensor:
    z, log_q = q.draw(x, k, generator=generator)
    given, most = prepared(model, x), _NUMBERS.get(x.device.type, _NUMBERS["cpu"])
    size = max(1, most // x.numel())
    return (torch.cat([model.log_joint(given, part) for part in z.split(size)]) - log_q).double()
