r"""The geometric annealing path from a start to the posterior, temperature schedules along it, and its states.

:math:`\log \pi_t(z) = (1-t) \log q_0(z \mid x) + t \log p(x, z)` for :math:`t \in [0, 1]`. The density is normalised at
t = 0 and is the posterior times the evidence at t = 1.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from vaerdict.core import (
    Draws,
    Model,
    Proposal,
    SettingError,
    ShapeError,
    check_count,
    check_log_joint,
    prepared,
    restricted,
)
from vaerdict.noise import Randomness, draws_of


class PathState(NamedTuple):
    """Particles with log-density and gradient at both ends of the path, from which those at any temperature follow.

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
        """Gradient of `log_density` in z. Shapes: ``-> (K, *batch, d)``."""
        t = t.to(self.z.dtype).unsqueeze(-1)
        return (1 - t) * self.grad_q + t * self.grad_p

    def log_increment(self, t_from: Tensor, t_to: Tensor) -> Tensor:
        r"""Log-weight :math:`\log \pi_{t'}(z) - \log \pi_t(z)` of a change of temperature, in double precision."""
        step = t_to - t_from
        # without a change the weight is one, also where p is zero and the difference infinite
        return torch.where(step == 0, 0.0, step * (self.log_p - self.log_q).double())


@dataclass(frozen=True)
class AnnealingPath:
    """The path for fixed observations. Shapes: ``x (*batch, p)``; observations are along the last batch axis."""

    model: Model
    initial: Proposal
    x: Tensor

    @cached_property
    def prepared_x(self) -> Any:
        """The first argument of ``model.log_joint``."""
        with torch.no_grad():
            return prepared(self.model, self.x)

    def draw(self, k: int, *, generator: Randomness) -> Draws:
        """Draw k starting points for each observation."""
        draws = draws_of(self.initial, self.x, k, generator)
        if not isinstance(draws.z, Tensor):
            raise ShapeError(
                f"the start draws latents as {type(draws.z).__name__}; samplers move one tensor (K, *batch, d): "
                "sum out discrete latents and concatenate the others in the model."
            )
        return Draws(draws.z.detach(), draws.log_q.detach())

    def evaluate(self, z: Tensor) -> PathState:
        """Log-densities and gradients of both ends at z: one gradient evaluation."""
        z = z.detach().requires_grad_()
        with torch.enable_grad():
            log_q = self.initial.log_prob(z, self.x)
            log_p = check_log_joint(self.model.log_joint(self.prepared_x, z), log_q, z)
        return PathState(z.detach(), log_q.detach(), log_p.detach(), _gradient(log_q, z), _gradient(log_p, z))

    def select(self, index: Tensor) -> AnnealingPath:
        """The path for the observations at `index` of the last batch axis."""
        return AnnealingPath(self.model, restricted(self.initial, index), self.x.index_select(-2, index))


def _gradient(value: Tensor, z: Tensor) -> Tensor:
    """Gradient of value in z; zero if it does not depend on z, as for a flat start."""
    if not value.requires_grad:
        return torch.zeros_like(z)
    return torch.autograd.grad(value, z, torch.ones_like(value), allow_unused=True, materialize_grads=True)[0]


def check_batch(x: Tensor) -> Tensor:
    """Return observations that samplers accept, else raise."""
    if x.dim() < 2 or x.shape[-2] == 0:
        raise ShapeError(f"x has shape {tuple(x.shape)}; expected (*batch, n, p); a single observation is x[None].")
    return x


# ------------------------------------------------------------------------------------------------------ schedules
def linear_schedule(n: int) -> Tensor:
    r"""Temperatures of n equal steps, :math:`t_i = i / n`. Shapes: ``-> (n + 1,)``."""
    return torch.linspace(0, 1, check_count(n, name="n") + 1, dtype=torch.float64)


def sigmoid_schedule(n: int, sharpness: float = 4.0) -> Tensor:
    r"""Temperatures with small steps at both ends: :math:`\sigma(\delta(2i/n - 1))` rescaled (Wu et al., 2016)."""
    s = torch.sigmoid(sharpness * (2 * linear_schedule(n) - 1))
    t = (s - s[0]) / (s[-1] - s[0])
    t[-1] = 1.0
    return t


def geometric_schedule(n: int, first: float = 1e-4) -> Tensor:
    r"""Temperatures of equal ratios after a first step to `first`, for a start much wider than the posterior."""
    if not 0 < first < 1:
        raise SettingError(f"first={first} must lie strictly between 0 and 1.")
    exponents = linear_schedule(n - 1) if check_count(n, name="n") > 1 else linear_schedule(1)[1:]
    return torch.cat([torch.zeros(1, dtype=torch.float64), first ** (1 - exponents)])


def as_schedule(temperatures: int | Tensor) -> Tensor:
    """The schedule itself, or the sigmoid schedule with that many transitions."""
    if isinstance(temperatures, int):
        return sigmoid_schedule(check_count(temperatures, name="temperatures"))
    t = temperatures.detach().double().cpu()
    if t.dim() != 1 or len(t) < 2 or t[0] != 0 or t[-1] != 1 or not (t.diff() > 0).all():
        raise SettingError(
            "a temperature schedule must increase strictly from 0 to 1; use vaerdict.samplers.sigmoid_schedule(500), "
            "linear_schedule(500) or geometric_schedule(500)."
        )
    return t
