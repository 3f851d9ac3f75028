"""Adam on all parameters of a stack at once, and training steps replayed as CUDA graphs.

The parameters are one matrix with a row per member. One optimiser step is then a handful of operations whatever the
network, and everything that is done per member (learning rates, freezing, snapshots, checkpoints) indexes rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from vaerdict.training.parallel import SINGLE, RankGroup

Step = Callable[..., Tensor]
"""A step that takes tensors, changes state in place and returns a tensor, without synchronising with the host."""

_WARM_UPS = 3


_ALIGNED = 4  # matrix products on a GPU are several times slower if a matrix does not begin at a multiple of 16 bytes


class FlatParameters:
    """Rebinds a module's trainable parameters as views of one matrix ``values (members, size)``.

    The first axis of each parameter of a stacked module is the member; a module that is not stacked has one member.
    Behind each parameter up to three zeros fill its columns to a multiple of four. The attribute ``rates`` of a
    module, or of one inside it, maps names of its parameters to factors on their learning rate.
    """

    def __init__(self, module: nn.Module, members: int) -> None:
        named = {name: p for name, p in module.named_parameters() if p.requires_grad}
        self.parameters = list(named.values())
        rows = [p.detach().reshape(members, -1) for p in self.parameters]
        self.padding = [row.new_zeros(members, -row.shape[1] % _ALIGNED) for row in rows]
        self.values = self._joined(rows) if rows else torch.zeros(members, 0)
        start = 0
        for parameter, row, padding in zip(self.parameters, rows, self.padding, strict=True):
            end = start + row.shape[1]
            parameter.data = self.values[:, start:end].view(parameter.shape)
            start = end + padding.shape[1]
        rates = {
            f"{inside}.{name}".removeprefix("."): factor
            for inside, part in module.named_modules()
            for name, factor in getattr(part, "rates", {}).items()
        }
        self.rates = self._rate_factors(rates, list(named))

    def __len__(self) -> int:
        return self.values.shape[1]

    def gradient(self, losses: Tensor) -> Tensor:
        """Gradient of each member's loss in its parameters. Shapes: ``(members,) -> (members, size)``."""
        return self.flatten(torch.autograd.grad(losses.sum(), self.parameters, allow_unused=True))

    def flatten(self, gradients: Sequence[Tensor | None]) -> Tensor:
        """Gradients of the parameters as one matrix, zero where there is none. Shapes: ``-> (members, size)``."""
        filled = (torch.zeros_like(p) if g is None else g for p, g in zip(self.parameters, gradients, strict=True))
        return self._joined([g.reshape(self.values.shape[0], -1) for g in filled])

    def _joined(self, rows: Sequence[Tensor]) -> Tensor:
        """The columns of all parameters, each followed by its padding."""
        return torch.cat([part for pair in zip(rows, self.padding, strict=True) for part in pair], 1)

    def _rate_factors(self, rates: Mapping[str, float], names: Sequence[str]) -> Tensor | None:
        """The learning-rate factor of every parameter, or None where all are one. Shapes: ``-> (1, size)``."""
        if not any(name in rates for name in names):
            return None
        factors = [
            self.values.new_full((len(self.values), p.numel() // len(self.values)), rates.get(name, 1.0))
            for name, p in zip(names, self.parameters, strict=True)
        ]
        return self._joined(factors)[:1]


class Adam:
    """Adam (Kingma & Ba, 2015) on `FlatParameters`, with a learning rate and a step count per member.

    Each step averages gradients over the ranks of `group`.
    """

    def __init__(
        self,
        flat: FlatParameters,
        lr: float,
        *,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        group: RankGroup = SINGLE,
    ) -> None:
        self.flat, self.betas, self.eps, self.group = flat, betas, eps, group
        members = flat.values.shape[0]
        self.lr = torch.full((members, 1), lr, dtype=flat.values.dtype, device=flat.values.device)
        self.steps = torch.zeros_like(self.lr, dtype=torch.float64)
        self.first, self.second = torch.zeros_like(flat.values), torch.zeros_like(flat.values)

    @torch.no_grad()
    def step(self, gradient: Tensor, mask: Tensor | None = None) -> None:
        """Update the members in `mask`; parameters, moments and step counts of the others do not change.

        Shapes: ``gradient (members, size)``, ``mask (members,)``.
        """
        b1, b2 = self.betas
        gradient = self.group.mean(gradient)
        before = None if mask is None or bool(mask.all()) else [t.clone() for t in self.tensors()]
        self.steps += 1
        self.first.lerp_(gradient, 1 - b1)
        self.second.mul_(b2).addcmul_(gradient, gradient, value=1 - b2)
        # in float32 the first step's 1 - b2 would be wrong in its fifth digit
        unbiased = [(1 - b**self.steps).to(gradient.dtype) for b in self.betas]
        first, second = self.first / unbiased[0], self.second / unbiased[1]
        lr = self.lr if self.flat.rates is None else self.lr * self.flat.rates
        self.flat.values.addcmul_(first / (second.sqrt() + self.eps), lr, value=-1)
        if before is not None and mask is not None:
            for tensor, old in zip(self.tensors(), before, strict=True):
                tensor.copy_(torch.where(mask[:, None], tensor, old))

    def state(self) -> dict[str, Tensor]:
        """Everything needed to resume, by name."""
        return {
            "values": self.flat.values,
            "first": self.first,
            "second": self.second,
            "steps": self.steps,
            "lr": self.lr,
        }

    def load(self, state: dict[str, Tensor]) -> None:
        """Copy a saved `state` into this optimiser."""
        for name, tensor in self.state().items():
            tensor.copy_(state[name])

    def tensors(self) -> list[Tensor]:
        """Every tensor that a step changes."""
        return [self.flat.values, self.first, self.second, self.steps]


def make_graphed_step(
    step: Step, example: Sequence[Tensor], generators: Sequence[torch.Generator], state: list[Tensor]
) -> Step:
    """The step recorded once as a CUDA graph and replayed; the step itself if `example` is not on a GPU.

    Parameters
    ----------
    step
        The function to record.
    example
        Arguments of the shapes and types of every later call.
    generators
        All generators that the step draws from.
    state
        All tensors that the step changes in place. Warm-up and recording run the step for real; the state and the
        generators are restored afterwards.

    Returns
    -------
    A function with the signature of `step`. Every call returns the same tensor with new values.
    """
    if example[0].device.type != "cuda":
        return step
    values, seeds = [t.clone() for t in state], [g.get_state() for g in generators]
    inputs = [t.clone() for t in example]
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(_WARM_UPS):
            step(*inputs)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    for generator in generators:
        graph.register_generator_state(generator)
    with torch.cuda.graph(graph):
        output = step(*inputs)
    with torch.no_grad():
        for tensor, old in zip(state, values, strict=True):
            tensor.copy_(old)
    for generator, seed in zip(generators, seeds, strict=True):
        generator.set_state(seed)

    def replay(*arguments: Tensor) -> Tensor:
        for target, value in zip(inputs, arguments, strict=True):
            target.copy_(value)
        graph.replay()
        return output

    return replay


@contextmanager
def allow_tf32(device: torch.device) -> Iterator[None]:
    """A context in which matrix products on a GPU use TF32 (ten bits of mantissa, float32 range)."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = device.type == "cuda" or before
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before
