"""The parameters of a stack as one matrix, a row a member, and Adam on it.

One matrix makes the optimiser a handful of operations whatever the network, and makes everything that is done member
by member (learning rates, freezing, snapshots, checkpoints) indexing of rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from vaerdict.training.parallel import ALONE, Group


class Flat:
    """Rebinds a module's trainable parameters as views of one matrix ``(members, size)``.

    In a stack each parameter's first axis is the member; a module that is not stacked has one member. A module may say
    in ``rates`` that some of its parameters, by name, learn so many times faster than the rest.
    """

    def __init__(self, module: nn.Module, members: int) -> None:
        named = {name: p for name, p in module.named_parameters() if p.requires_grad}
        self.parameters = list(named.values())
        rows = [p.detach().reshape(members, -1) for p in self.parameters]
        self.values = torch.cat(rows, 1) if rows else torch.zeros(members, 0)
        start = 0
        for parameter, row in zip(self.parameters, rows, strict=True):
            end = start + row.shape[1]
            parameter.data = self.values[:, start:end].view(parameter.shape)
            start = end
        self.rates = self._row_of(getattr(module, "rates", {}), list(named))

    def __len__(self) -> int:
        return self.values.shape[1]

    def gradient(self, losses: Tensor) -> Tensor:
        """Gradient of each member's loss in its own parameters. Shapes: ``(members,) -> (members, size)``."""
        return self.row(torch.autograd.grad(losses.sum(), self.parameters, allow_unused=True))

    def row(self, gradients: Sequence[Tensor | None]) -> Tensor:
        """Gradients of the parameters, zero where there is none, as one matrix. Shapes: ``-> (members, size)``."""
        filled = (torch.zeros_like(p) if g is None else g for p, g in zip(self.parameters, gradients, strict=True))
        return torch.cat([g.reshape(self.values.shape[0], -1) for g in filled], 1)

    def _row_of(self, rates: Mapping[str, float], names: Sequence[str]) -> Tensor | None:
        """A factor on the learning rate of every parameter, or None where all are one. Shapes: ``-> (1, size)``."""
        if not any(name in rates for name in names):
            return None
        members = self.values.shape[0]
        parts = [
            self.values.new_full((p.numel() // members,), rates.get(name, 1.0))
            for name, p in zip(names, self.parameters, strict=True)
        ]
        return torch.cat(parts)[None]


class Adam:
    """Adam (Kingma & Ba, 2015) on a `Flat`, with one learning rate and one step count a member.

    Each step descends the mean of the gradients that the ranks of `group` bring.
    """

    def __init__(
        self,
        flat: Flat,
        lr: float,
        *,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        group: Group = ALONE,
    ) -> None:
        self.flat, self.betas, self.eps, self.group = flat, betas, eps, group
        members = flat.values.shape[0]
        self.lr = torch.full((members, 1), lr, dtype=flat.values.dtype, device=flat.values.device)
        self.steps = torch.zeros_like(self.lr, dtype=torch.float64)
        self.first, self.second = torch.zeros_like(flat.values), torch.zeros_like(flat.values)

    @torch.no_grad()
    def step(self, gradient: Tensor, only: Tensor | None = None) -> None:
        """Descend; members left out of `only` ``(members,)``, and all that is remembered of them, do not change."""
        b1, b2 = self.betas
        gradient = self.group.mean(gradient)
        kept = None if only is None or bool(only.all()) else [t.clone() for t in self.tensors()]
        self.steps += 1
        self.first.lerp_(gradient, 1 - b1)
        self.second.mul_(b2).addcmul_(gradient, gradient, value=1 - b2)
        # in float32 the first step's 1 - b2 would be wrong in its fifth digit
        unbiased = [(1 - b**self.steps).to(gradient.dtype) for b in self.betas]
        first, second = self.first / unbiased[0], self.second / unbiased[1]
        lr = self.lr if self.flat.rates is None else self.lr * self.flat.rates
        self.flat.values.addcmul_(first / (second.sqrt() + self.eps), lr, value=-1)
        if kept is not None and only is not None:
            for tensor, old in zip(self.tensors(), kept, strict=True):
                tensor.copy_(torch.where(only[:, None], tensor, old))

    def state(self) -> dict[str, Tensor]:
        """Everything needed to go on as if never stopped."""
        return {
            "values": self.flat.values,
            "first": self.first,
            "second": self.second,
            "steps": self.steps,
            "lr": self.lr,
        }

    def load(self, state: dict[str, Tensor]) -> None:
        """Take up a saved `state` in place."""
        for name, tensor in self.state().items():
            tensor.copy_(state[name])

    def tensors(self) -> list[Tensor]:
        """Every tensor a step changes."""
        return [self.flat.values, self.first, self.second, self.steps]
