"""Small models with known evidence, and initial proposals, for the tests of samplers."""

from __future__ import annotations

import math

import torch
from scipy import integrate, stats
from torch import Tensor

from vaerdict.core import Draws
from vaerdict.distributions import Elliptical, StandardNormal
from vaerdict.models.ppca import PPCA

DOUBLE = torch.float64
LOG_2PI = math.log(2 * math.pi)


class Poisson:
    """z ~ N(0, 1), x ~ Poisson(exp(z + 1)): a skewed posterior; weights of annealing from the prior are bounded."""

    prior = StandardNormal(1)

    def __init__(self) -> None:
        self.rows = 0
        self.max_rows = 0

    def prepare(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x[..., 0], torch.lgamma(x[..., 0] + 1)

    def log_joint(self, prepared: tuple[Tensor, Tensor], z: Tensor) -> Tensor:
        x, constant = prepared
        self.rows += z[..., 0].numel()
        self.max_rows = max(self.max_rows, z[..., 0].numel())
        log_rate = z[..., 0] + 1
        return x * log_rate - log_rate.exp() - constant + self.prior.log_prob(z)

    def log_evidence(self, x: Tensor) -> Tensor:
        return _quadrature(lambda z, v: stats.poisson.pmf(v, math.exp(z + 1)) * stats.norm.pdf(z), x)


class Gumbel:
    """z ~ N(0, 1), x ~ Gumbel(z, 0.3): skewed the other way."""

    prior = StandardNormal(1)

    def log_joint(self, x: Tensor, z: Tensor) -> Tensor:
        u = (x[..., 0] - z[..., 0]) / 0.3
        return -u - torch.exp(-u) - math.log(0.3) + self.prior.log_prob(z)

    def log_evidence(self, x: Tensor) -> Tensor:
        return _quadrature(lambda z, v: stats.gumbel_r.pdf(v, z, 0.3) * stats.norm.pdf(z), x)


class Bimodal:
    """z ~ N(0, I_2), x ~ N(z_1^2 + 0.3 z_1 + z_2 / 2, 0.3^2): two uneven, curved modes."""

    prior = StandardNormal(2)

    def log_joint(self, x: Tensor, z: Tensor) -> Tensor:
        mean = z[..., 0].square() + 0.3 * z[..., 0] + 0.5 * z[..., 1]
        log_lik = -0.5 * ((x[..., 0] - mean) / 0.3).square() - math.log(0.3) - 0.5 * LOG_2PI
        return log_lik + self.prior.log_prob(z)

    def log_evidence(self, x: Tensor) -> Tensor:
        sd = math.sqrt(0.3**2 + 0.5**2)
        return _quadrature(lambda z, v: stats.norm.pdf(v, z * z + 0.3 * z, sd) * stats.norm.pdf(z), x)


class Banana:
    """z ~ N(0, I_2), x ~ N(3 z_2 - z_1^2, sd^2): a posterior along a parabola; x holds the value and the sd."""

    prior = StandardNormal(2)

    def __init__(self) -> None:
        self.rows = 0

    def log_joint(self, x: Tensor, z: Tensor) -> Tensor:
        self.rows += z[..., 0].numel()
        score = (x[..., 0] - 3 * z[..., 1] + z[..., 0].square()) / x[..., 1]
        return -0.5 * (score.square() + LOG_2PI) - x[..., 1].log() + self.prior.log_prob(z)

    def moments(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Log-evidence, and the posterior mean of z_1^2. Shapes: ``(n, 2) -> (n,), (n,)``."""
        z = torch.linspace(-9, 9, 20_001, dtype=DOUBLE)[:, None]
        variance = 9 + x[:, 1].square()
        log_p = -0.5 * ((x[:, 0] + z.square()).square() / variance + z.square()) - 0.5 * variance.log() - LOG_2PI
        log_mass = log_p + math.log(18 / 20_000)
        return log_mass.logsumexp(0), (log_mass.softmax(0) * z.square()).sum(0)


def _quadrature(density, x: Tensor) -> Tensor:
    points = [-2.0, -1.0, 0.0, 1.0, 2.0]
    values = [integrate.quad(density, -9, 9, args=(v,), points=points, limit=200)[0] for v in x[:, 0].tolist()]
    return torch.tensor(values, dtype=DOUBLE).log()


def linear_gaussian() -> PPCA:
    weight = torch.tensor([[1.0, 0.4], [-0.3, 0.8], [0.5, 0.5]], dtype=DOUBLE)
    return PPCA(weight, torch.tensor([0.5, 0.7, 0.4], dtype=DOUBLE), torch.tensor([0.2, 0.0, -0.5], dtype=DOUBLE))


CASES = {
    "linear-gaussian": (linear_gaussian(), [[1.0, -0.5, 0.3], [-2.0, 1.0, 0.0], [0.2, 0.1, -0.6]]),
    "poisson": (Poisson(), [[0.0], [3.0], [12.0]]),
    "gumbel": (Gumbel(), [[-1.0], [0.4], [2.0]]),
    "bimodal": (Bimodal(), [[0.0], [1.0], [2.5]]),
}


class Bound:
    """A proposal made for fixed observations, without `select`."""

    def __init__(self, q: Elliptical) -> None:
        self.q = q

    def draw(self, x: Tensor, k: int, *, generator) -> Draws:
        return self.q.draw(x, k, generator=generator)

    def log_prob(self, z: Tensor, x: Tensor) -> Tensor:
        return self.q.log_prob(z)


class Selectable(Bound):
    """A proposal made for fixed observations, with `select`."""

    def select(self, index: Tensor) -> Selectable:
        return Selectable(self.q.select(index))


class Everywhere:
    """One distribution for all observations."""

    def __init__(self, q: Elliptical) -> None:
        self.q = q

    def draw(self, x: Tensor, k: int, *, generator) -> Draws:
        z = self.q.loc + self.q.root.apply(torch.randn(k, *x.shape[:-1], 1, generator=generator, dtype=x.dtype))
        return Draws(z, self.q.log_prob(z))

    def log_prob(self, z: Tensor, x: Tensor) -> Tensor:
        return self.q.log_prob(z)


class Nominal(Everywhere):
    """A mixture whose draws have the density of the nominal shares instead of the realised ones."""

    def draw(self, x: Tensor, k: int, *, generator) -> Draws:
        z = self.q.draw(x, k, generator=generator).z
        return Draws(z, self.q.log_prob(z, x))

    def log_prob(self, z: Tensor, x: Tensor) -> Tensor:
        return self.q.log_prob(z, x)
