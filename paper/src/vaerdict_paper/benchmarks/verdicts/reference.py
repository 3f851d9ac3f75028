"""Posterior draws for models without closed form: an importance sampler that shares no code with what it checks.

Particles are tempered from the prior to the posterior by random-walk Metropolis steps. A mixture of Student-t
distributions is fitted to them, and draws from it, with some from the prior, are weighted. The mixture is fitted again
to the weighted draws until the last, large set is drawn.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

LogDensity = Callable[[Tensor], Tensor]
"""Shapes: ``(n, d) -> (n)``."""

N_PARTICLES, N_FIT, N_FINAL = 4000, 40_000, 400_000
_COMPONENTS, _DF, _INFLATE, _PRIOR_SHARE = 12, 7.0, 1.2, 0.03
_STEPS = 8  # Metropolis steps per temperature
_SURVIVORS = 0.6  # effective share of the particles from one temperature to the next


def reference(log_joint: LogDensity, d: int, g: torch.Generator, n: int = N_FINAL) -> tuple[Tensor, Tensor]:
    """Weighted draws from a posterior whose prior is standard normal. Shapes: ``-> (n, d), (n)``."""
    z = tempered(log_joint, d, g)
    log_w = z.new_zeros(len(z))
    for size in (N_FIT, N_FIT, n):
        q = fit(z, log_w, g)
        z = q.draw(size, g)
        log_w = log_joint(z) - q.log_prob(z)
    return z, log_w


def tempered(log_joint: LogDensity, d: int, g: torch.Generator) -> Tensor:
    """Particles moved from the prior to the posterior. Shapes: ``-> (N_PARTICLES, d)``."""
    z = _normal(g, N_PARTICLES, d)
    log_lik, power = log_joint(z) - _log_prior(z), 0.0
    while power < 1:
        step = _next_step(log_lik, 1 - power)
        power = 1.0 if step >= 1 - power else power + step
        index = torch.multinomial((step * log_lik).softmax(0), len(z), replacement=True, generator=g)
        z, log_lik = z[index], log_lik[index]
        root = torch.linalg.cholesky(torch.cov(z.mT).reshape(d, d) + 1e-9 * torch.eye(d, dtype=z.dtype))
        scale = 2.38 / d**0.5
        for _ in range(_STEPS if power < 1 else 5 * _STEPS):
            proposal = z + scale * _normal(g, *z.shape) @ root.mT
            new = log_joint(proposal) - _log_prior(proposal)
            log_ratio = power * (new - log_lik) + _log_prior(proposal) - _log_prior(z)
            accept = torch.rand(len(z), generator=g, dtype=z.dtype).log() < log_ratio
            z, log_lik = torch.where(accept[:, None], proposal, z), torch.where(accept, new, log_lik)
            scale *= math.exp(accept.double().mean().item() - 0.25)
    return z


def _next_step(log_lik: Tensor, most: float) -> float:
    """The largest step of the power, by bisection, that leaves enough effective particles."""
    low, high = 0.0, most
    for _ in range(50):
        middle = (low + high) / 2
        weights = (middle * log_lik).softmax(0)
        low, high = (middle, high) if 1 / weights.square().sum() > _SURVIVORS * len(weights) else (low, middle)
    return max(low, 1e-6)


class Mixture(NamedTuple):
    """Student-t distributions with a share of the standard normal prior.

    Shapes: ``weight (C), loc (C, d), root (C, d, d)``.
    """

    weight: Tensor
    loc: Tensor
    root: Tensor

    def draw(self, n: int, g: torch.Generator) -> Tensor:
        """Draw points. Shapes: ``-> (n, d)``."""
        d = self.loc.shape[-1]
        component = torch.multinomial(self.weight, n, replacement=True, generator=g)
        chi = 2 * torch._standard_gamma(torch.full((n, 1), _DF / 2, dtype=self.loc.dtype), generator=g)
        eps = _normal(g, n, d)
        z = self.loc[component] + (self.root[component] @ eps[..., None]).squeeze(-1) * (_DF / chi).sqrt()
        from_prior = torch.rand(n, 1, generator=g, dtype=z.dtype) < _PRIOR_SHARE
        return torch.where(from_prior, eps, z)

    def log_prob(self, z: Tensor) -> Tensor:
        """Log-density. Shapes: ``(n, d) -> (n)``."""
        d = z.shape[-1]
        square, log_det = _squares(z, self.loc, self.root)
        constant = math.lgamma((_DF + d) / 2) - math.lgamma(_DF / 2) - 0.5 * d * math.log(_DF * math.pi)
        parts = self.weight.log() + constant - log_det - (_DF + d) / 2 * torch.log1p(square / _DF)
        mixed = math.log(1 - _PRIOR_SHARE) + torch.logsumexp(parts, -1)
        return torch.logaddexp(mixed, math.log(_PRIOR_SHARE) + _log_prior(z))


def fit(z: Tensor, log_w: Tensor, g: torch.Generator) -> Mixture:
    """A mixture fitted to weighted draws by expectation maximisation for normals, then widened."""
    d, weights = z.shape[-1], log_w.softmax(0)
    loc = z[torch.multinomial(weights, _COMPONENTS, generator=g)]
    centred = z - weights @ z
    cov = (centred.mT * weights) @ centred + 1e-9 * torch.eye(d, dtype=z.dtype)
    cov, share = cov.expand(_COMPONENTS, d, d), torch.full((_COMPONENTS,), 1 / _COMPONENTS, dtype=z.dtype)
    ridge = 1e-3 * cov[0] / _COMPONENTS
    for _ in range(30):
        square, log_det = _squares(z, loc, torch.linalg.cholesky(cov))
        resp = weights[:, None] * torch.softmax(share.log() - log_det - 0.5 * square, -1)
        mass = resp.sum(0).clamp_min(1e-12)
        share, loc = mass / mass.sum(), (resp.mT @ z) / mass[:, None]
        delta = z - loc[:, None]
        cov = (delta * resp.mT[..., None]).mT @ delta / mass[:, None, None] + ridge
    return Mixture(share, loc, torch.linalg.cholesky(_INFLATE * cov))


def _squares(z: Tensor, loc: Tensor, root: Tensor) -> tuple[Tensor, Tensor]:
    """Squared Mahalanobis lengths and log-determinants of the roots. Shapes: ``-> (n, C), (C)``."""
    standardised = torch.linalg.solve_triangular(root, (z - loc[:, None]).mT, upper=False)
    return standardised.square().sum(-2).mT, root.diagonal(dim1=-2, dim2=-1).log().sum(-1)


def _log_prior(z: Tensor) -> Tensor:
    return -0.5 * (z.square() + math.log(2 * math.pi)).sum(-1)


def _normal(g: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=g, dtype=torch.float64)
