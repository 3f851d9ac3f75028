"""Well-behaved posteriors: one region without long tails, or several that overlap."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.distributions import ExpTransform, Gamma, Independent, TransformedDistribution, Uniform
from torch.nn import functional as F

from vaerdict_paper.benchmarks.verdicts.questions import (
    N_OBS,
    Likelihood,
    Target,
    first_square,
    generator_of,
    log_normal_density,
    normal,
    normal_prior,
    oblique,
    uniform,
)

GROUP = "benign"


def targets(seed: int) -> list[Target]:
    """All targets of the group."""
    return [
        conjugate("Gaussian, 1-d", seed, 1, noise=0.8),
        conjugate("Gaussian, 5-d", seed, 5, noise=0.8),
        conjugate("Gaussian, correlated, 30-d", seed, 30, noise=1.0, condition=30.0),
        conjugate("Gaussian far from the prior, 2-d", seed, 2, noise=0.3, distance=7.0),
        ring("ring, 2-d", seed, width=0.4, group=GROUP),
        half_space("half-space, 2-d", seed),
        laplace("Laplace noise, 2-d", seed),
        relu("ReLU, 2-d", seed),
        box("box, 4-d", seed),
        logistic("logistic regression, 2-d", seed),
        student_noise("Student-t noise, 2-d", seed),
        fourfold("four-fold symmetry, 2-d", seed),
        poisson("Poisson rates, 10-d", seed),
    ]


def linear_gaussian(x: Tensor, z: Tensor, a: Tensor, noise: float) -> Tensor:
    """Log-likelihood of x = A z + noise."""
    return log_normal_density(x - z @ a.mT, noise)


def conjugate(name: str, seed: int, d: int, noise: float, condition: float = 2.0, distance: float = 0.0) -> Target:
    """A linear-Gaussian model; the observations move the posterior by about its own standard deviation."""
    g = generator_of(seed, name)
    left, right = (torch.linalg.qr(normal(g, d, d))[0] for _ in range(2))
    a = left @ torch.diag(torch.logspace(-0.5, 0.5, d, condition, dtype=torch.float64)) @ right
    root = torch.linalg.cholesky(torch.linalg.inv(torch.eye(d, dtype=a.dtype) + a.mT @ a / noise**2))
    centre = F.normalize(normal(g, d), dim=0) * max(distance, d**0.5)
    x = (centre + normal(g, N_OBS, d) @ root.mT) @ a.mT
    loc = x @ a @ (root @ root.mT) / noise**2

    def sample(n: int, g: torch.Generator) -> Tensor:
        return loc + normal(g, n, N_OBS, d) @ root.mT

    model = Likelihood(normal_prior(d), linear_gaussian, {"a": a, "noise": noise})
    return Target(GROUP, name, model, x, sample)


def radius(x: Tensor, z: Tensor, width: float) -> Tensor:
    """Log-likelihood of x = |z| + noise."""
    return log_normal_density(x - torch.linalg.vector_norm(z, dim=-1, keepdim=True), width)


def cosine(z: Tensor) -> Tensor:
    """Cosine of the angle to a direction between the axes."""
    return oblique(z) / torch.linalg.vector_norm(z, dim=-1)


def ring(name: str, seed: int, width: float, group: str) -> Target:
    """The distance from the origin is measured."""
    x = uniform(generator_of(seed, name), 1.5, 3.0, N_OBS, 1)
    model = Likelihood(normal_prior(2, 2.0, 0.4), radius, {"width": width})
    return Target(group, name, model, x, box=((-6, 6),) * 2, product=first_square, tail=cosine)


def above_line(x: Tensor, z: Tensor, slope: float, noise: float) -> Tensor:
    """Log-likelihood of x = z + noise, zero below a line through the origin."""
    inside = z[..., 1] > slope * z[..., 0]
    return torch.where(inside, log_normal_density(x - z, noise), -torch.inf)


def half_space(name: str, seed: int) -> Target:
    """A normal posterior that is cut off by a line."""
    g = generator_of(seed, name)
    slope = uniform(g, -1, 1, 1).item()
    model = Likelihood(normal_prior(2), above_line, {"slope": slope, "noise": 0.7})
    return Target(GROUP, name, model, 0.7 * normal(g, N_OBS, 2), box=((-6, 6),) * 2)


def linear_laplace(x: Tensor, z: Tensor, a: Tensor, scale: float) -> Tensor:
    """Log-likelihood of x = A z + Laplace noise."""
    return -(x - z @ a.mT).abs().sum(-1) / scale


def laplace(name: str, seed: int) -> Target:
    """Four linear measurements with Laplace noise: the posterior density has kinks."""
    g = generator_of(seed, name)
    a = normal(g, 4, 2)
    x = (normal(g, 2) + 0.3 * normal(g, N_OBS, 2)) @ a.mT + 0.3 * normal(g, N_OBS, 4)
    return Target(
        GROUP, name, Likelihood(normal_prior(2), linear_laplace, {"a": a, "scale": 0.5}), x, box=((-7, 7),) * 2
    )


def rectified(x: Tensor, z: Tensor, a: Tensor, noise: float) -> Tensor:
    """Log-likelihood of x = max(A z, 0) + noise."""
    return log_normal_density(x - F.relu(z @ a.mT), noise)


def relu(name: str, seed: int) -> Target:
    """A layer of five ReLUs whose outputs are measured."""
    g = generator_of(seed, name)
    a = normal(g, 5, 2)
    x = F.relu(0.7 * normal(g, N_OBS, 2) @ a.mT) + 0.6 * normal(g, N_OBS, 5)
    return Target(GROUP, name, Likelihood(normal_prior(2), rectified, {"a": a, "noise": 0.6}), x, box=((-7, 7),) * 2)


def direct(x: Tensor, z: Tensor, noise: float) -> Tensor:
    """Log-likelihood of x = z + noise."""
    return log_normal_density(x - z, noise)


def box(name: str, seed: int) -> Target:
    """Uniform priors; the posterior of some latents is pressed against the walls."""
    g = generator_of(seed, name)
    d, noise = 4, 0.3
    x = uniform(g, -0.8, 0.8, d) + 0.5 * noise * normal(g, N_OBS, d)
    prior = Independent(Uniform(torch.full((d,), -1.0).double(), 1.0, validate_args=False), 1, validate_args=False)

    def sample(n: int, g: torch.Generator) -> Tensor:
        low, high = torch.special.ndtr((-1 - x) / noise), torch.special.ndtr((1 - x) / noise)
        return x + noise * torch.special.ndtri(low + (high - low) * uniform(g, 0, 1, n, N_OBS, d))

    return Target(GROUP, name, Likelihood(prior, direct, {"noise": noise}), x, sample)


def labels(x: Tensor, z: Tensor, a: Tensor) -> Tensor:
    """Log-likelihood of binary labels x with logits A z."""
    logits = z @ a.mT
    return (x * logits - F.softplus(logits)).sum(-1)


def logistic(name: str, seed: int) -> Target:
    """Logistic regression on twenty labels."""
    g = generator_of(seed, name)
    a = torch.stack([torch.ones(20, dtype=torch.float64), normal(g, 20)], -1)
    x = torch.bernoulli(torch.sigmoid((torch.tensor([0.3, 1.0]) + 0.3 * normal(g, N_OBS, 2)) @ a.mT), generator=g)
    return Target(GROUP, name, Likelihood(normal_prior(2, 2.0), labels, {"a": a}), x, box=((-12, 12),) * 2)


def location_scale(x: Tensor, z: Tensor, df: float) -> Tensor:
    """Log-likelihood of a Student-t sample with location z_1 and log-scale z_2."""
    standardised = (x - z[..., :1]) * (-z[..., 1:]).exp()
    return (-z[..., 1:] - (df + 1) / 2 * torch.log1p(standardised.square() / df)).sum(-1)


def student_noise(name: str, seed: int) -> Target:
    """Location and log-scale of fifteen numbers with Student-t noise."""
    g = generator_of(seed, name)
    df = 5.0
    chi = torch._standard_gamma(torch.full((N_OBS, 15), df / 2).double(), generator=g) * 2
    x = uniform(g, -0.3, 0.3, N_OBS, 1) + normal(g, N_OBS, 15) * (df / chi).sqrt()
    return Target(GROUP, name, Likelihood(normal_prior(2), location_scale, {"df": df}), x, box=((-5, 5), (-4, 4)))


def moduli(x: Tensor, z: Tensor, noise: float) -> Tensor:
    """Log-likelihood of x = |z| + noise, latent by latent."""
    return log_normal_density(x - z.abs(), noise)


def fourfold(name: str, seed: int) -> Target:
    """The moduli of two latents are measured, so that four regions are equally probable; they overlap."""
    x = uniform(generator_of(seed, name), 0.6, 1.4, N_OBS, 2)
    model = Likelihood(normal_prior(2, 1.5), moduli, {"noise": 0.5})
    return Target(GROUP, name, model, x, box=((-7, 7),) * 2, product=first_square)


def log_rates(x: Tensor, z: Tensor) -> Tensor:
    """Log-likelihood of Poisson counts with log-rates z."""
    return (x * z - z.exp()).sum(-1)


def poisson(name: str, seed: int) -> Target:
    """Poisson counts with gamma-distributed rates, of which z is the logarithm."""
    g = generator_of(seed, name)
    d, shape, rate = 10, 2.0, 0.5
    x = torch.poisson(uniform(g, 2, 6, d).expand(N_OBS, d).contiguous(), generator=g)
    rates = Gamma(torch.full((d,), shape).double(), torch.tensor(rate).double())
    prior = Independent(TransformedDistribution(rates, [ExpTransform().inv]), 1)

    def sample(n: int, g: torch.Generator) -> Tensor:
        return torch._standard_gamma((shape + x).expand(n, N_OBS, d).contiguous(), generator=g).log() - math.log(
            rate + 1
        )

    return Target(GROUP, name, Likelihood(prior, log_rates), x, sample)
