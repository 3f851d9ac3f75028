r"""The geometric path from a start to the posterior, and particles that carry both of its ends.

:math:`\log \pi_t(z) = (1-t) \log q_0(z \mid x) + t \log p(x, z)` for :math:`t \in [0, 1]`: normalised at t = 0, and at
t = 1 the posterior times the evidence.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from vaerdict.core import Draws, Model, Proposal, ShapeError, prepared, restricted
from vaerdict.noise import Randomness


class State(NamedTuple):
    """Particles with log-density and gradient at both ends of the path, so that a new temperature costs nothing.

    Shapes: ``z, grad_q, grad_p (K, *batch, d)``, ``log_q, log_p (K, *batch)``; temperatures ``()`` or ``(*batch)``.
    """

    z: Tensor
    log_q: Tensor
    log_p: Tensor
    grad_q: Tensor
    grad_p: Tensor

    def log_density(self, t: Tensor) -> Tensor:
        """Unnormalised log-density at temperature t. Shapes: ``-> (K, *batch)``."""
        t = t.to(self.z.dtype)
        return (1 - t) * self.log_q + t * self.log_p

    def gradient(self, t: Tensor) -> Tensor:
        """Gradient in z of `log_density`. Shapes: ``-> (K, *batch, d)``."""
        t = t.to(self.z.dtype).unsqueeze(-1)
        return (1 - t) * self.grad_q + t * self.grad_p

    def log_increment(self, t_from: Tensor, t_to: Tensor) -> Tensor:
        r"""Log-weight of going between temperatures, :math:`\log \pi_{t'}(z) - \log \pi_t(z)`, in double precision."""
        step = t_to - t_from
        # a temperature that stays gives weight one, also where p is zero and the difference infinite
        return torch.where(step == 0, 0.0, step * (self.log_p - self.log_q).double())


@dataclass(frozen=True)
class Path:
    """The path for given observations. Shapes: ``x (*batch, p)``; observations lie along the last batch axis."""

    model: Model
    initial: Proposal
    x: Tensor

    @cached_property
    def given(self) -> Any:
        """What the model wants in place of x."""
        with torch.no_grad():
            return prepared(self.model, self.x)

    def draw(self, k: int, *, generator: Randomness) -> Draws:
        """Draw k starting points for each observation."""
        draws = self.initial.draw(self.x, k, generator=generator)
        if not isinstance(draws.z, Tensor):
            raise ShapeError(
                f"the start draws latents as {type(draws.z).__name__}; samplers move one tensor (K, *batch, d): "
                "sum out discrete latents and concatenate the others in the model."
            )
        return Draws(draws.z.detach(), draws.log_q.detach())

    def evaluate(self, z: Tensor) -> State:
        """Log-densities of both ends at z and their gradients: one gradient evaluation."""
        z = z.detach().requires_grad_()
        with torch.enable_grad():
            log_q = self.initial.log_prob(z, self.x)
            log_p = self.model.log_joint(self.given, z)
        self._check(z, log_q, log_p)
        return State(z.detach(), log_q.detach(), log_p.detach(), _gradient(log_q, z), _gradient(log_p, z))

    def select(self, index: Tensor) -> Path:
        """The path for some of the observations."""
        return Path(self.model, restricted(self.initial, index), self.x.index_select(-2, index))

    def _check(self, z: Tensor, log_q: Tensor, log_p: Tensor) -> None:
        if log_q.shape == z.shape[:-1] == log_p.shape:
            return
        raise ShapeError(
            f"latents of shape {tuple(z.shape)} should get log-densities of shape {tuple(z.shape[:-1])}; "
            f"the start gives {tuple(log_q.shape)}, the model {tuple(log_p.shape)}. A start made for fixed "
            "observations must offer select(index), which keeps those at the given places of the last batch axis."
        )


def _gradient(value: Tensor, z: Tensor) -> Tensor:
    """Gradient of value in z, zero where it does not depend on z (a flat start)."""
    if not value.requires_grad:
        return torch.zeros_like(z)
    return torch.autograd.grad(value, z, torch.ones_like(value), allow_unused=True, materialize_grads=True)[0]


def check_batch(x: Tensor) -> Tensor:
    """Return observations that samplers can be given, else raise."""
    if x.dim() < 2 or x.shape[-2] == 0:
        raise ShapeError(f"x has shape {tuple(x.shape)}; expected (*batch, n, p); a single observation is x[None].")
    return x
