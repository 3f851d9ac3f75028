"""The parameters of a stack as one matrix, a row a member, and Adam on it.

One matrix makes the optimiser a handful of operations whatever the network, and makes everything that is done member
by member (learning rates, freezing, snapshots, checkpoints) indexing of rows.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn


class Flat:
    """Rebinds a module's trainable parameters as views of one matrix ``(members, size)``.

    In a stack each parameter's first axis is the member; a module that is not stacked has one member.
    """

    def __init__(self, module: nn.Module, members: int) -> None:
        self.parameters = [p for p in module.parameters() if p.requires_grad]
        rows = [p.detach().reshape(members, -1) for p in self.parameters]
        self.values = torch.cat(rows, 1) if rows else torch.zeros(members, 0)
        start = 0
        for parameter, row in zip(self.parameters, rows, strict=True):
            end = start + row.shape[1]
            parameter.data = self.values[:, start:end].view(parameter.shape)
            start = end

    def __len__(self) -> int:
        return self.values.shape[1]

    def gradient(self, losses: Tensor) -> Tensor:
        """Gradient of each member's loss in its own parameters. Shapes: ``(members,) -> (members, size)``."""
        grads = torch.autograd.grad(losses.sum(), self.parameters, allow_unused=True)
        filled: Iterable[Tensor] = (
            torch.zeros_like(p) if g is None else g for p, g in zip(self.parameters, grads, strict=True)
        )
        return torch.cat([g.reshape(self.values.shape[0], -1) for g in filled], 1)


class Adam:
    """Adam (Kingma & Ba, 2015) on a `Flat`, with one learning rate and one step count a member."""

    def __init__(self, flat: Flat, lr: float, *, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8) -> None:
        self.flat, self.betas, self.eps = flat, betas, eps
        members = flat.values.shape[0]
        self.lr = torch.full((members, 1), lr, dtype=flat.values.dtype, device=flat.values.device)
        self.steps = torch.zeros_like(self.lr, dtype=torch.float64)
        self.first, self.second = torch.zeros_like(flat.values), torch.zeros_like(flat.values)

    @torch.no_grad()
    def step(self, gradient: Tensor, only: Tensor | None = None) -> None:
        """Descend; members left out of `only` ``(members,)``, and all that is remembered of them, do not change."""
        b1, b2 = self.betas
        kept = None if only is None or bool(only.all()) else [t.clone() for t in self._tensors()]
        self.steps += 1
        self.first.lerp_(gradient, 1 - b1)
        self.second.mul_(b2).addcmul_(gradient, gradient, value=1 - b2)
        # in float32 the first step's 1 - b2 would be wrong in its fifth digit
        unbiased = [(1 - b**self.steps).to(gradient.dtype) for b in self.betas]
        first, second = self.first / unbiased[0], self.second / unbiased[1]
        self.flat.values.addcmul_(first / (second.sqrt() + self.eps), self.lr, value=-1)
        if kept is not None and only is not None:
            for tensor, old in zip(self._tensors(), kept, strict=True):
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

    def _tensors(self) -> list[Tensor]:
        return [self.flat.values, self.first, self.second, self.steps]
