"""A target is a posterior with a known answer: models, observations, and the four questions asked of each of them."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributions import Distribution, Independent, Normal, StudentT

from vaerdict.core import prepared

Functional = Callable[[Tensor], Tensor]
"""A function of the latent. Shapes: ``(K, *batch, d) -> (K, *batch)``."""

Sampler = Callable[[int, torch.Generator], Tensor]
"""Independent draws from the posterior of each observation. Shapes: ``n -> (n, n_obs, d)``."""

N_OBS = 6


@dataclass(frozen=True, eq=False)
class Likelihood:
    """A model by its prior and log-likelihood ``log_density(x, z, **parameters)``."""

    prior: Any
    log_density: Callable[..., Tensor]
    parameters: Mapping[str, Any] = field(default_factory=dict)

    def log_joint(self, x: Tensor, z: Tensor) -> Tensor:
        """Log p(x, z). Shapes: ``(*batch, p), (K, *batch, d) -> (K, *batch)``."""
        return self.prior.log_prob(z) + self.log_density(x, z, **self.parameters)


@dataclass(frozen=True, eq=False)
class Joint(Likelihood):
    """A model by its joint density as a whole; the likelihood is what the prior leaves of it."""

    def log_joint(self, x: Tensor, z: Tensor) -> Tensor:
        """Log p(x, z). Shapes: ``(*batch, p), (K, *batch, d) -> (K, *batch)``."""
        return self.log_density(x, z, **self.parameters)


def first(z: Tensor) -> Tensor:
    """The first latent."""
    return z[..., 0]


def first_square(z: Tensor) -> Tensor:
    """The square of the first latent."""
    return z[..., 0].square()


def first_product(z: Tensor) -> Tensor:
    """The product of the first two latents, or the square of a single one."""
    return z[..., 0] * z[..., min(1, z.shape[-1] - 1)]


def oblique(z: Tensor) -> Tensor:
    """A sum of all latents whose weights fall off slowly."""
    return z @ (0.8 ** torch.arange(z.shape[-1], dtype=z.dtype))


@dataclass(frozen=True, eq=False)
class Target:
    """A posterior with known expectations for several observations.

    Parameters
    ----------
    group, name
        Where it belongs and what it is called.
    model
        Any object with ``log_joint(x, z)`` and ``prior``.
    x
        Observations, ``(n_obs, p)``.
    sample
        Exact draws; without, the truth is computed by quadrature over `box`.
    box
        Lower and upper limits that hold the posterior of one or two latents.
    mean, product, score, tail
        Expectations are asked of the first two functionals, probabilities to exceed a threshold of the others.
    proposals
        Passed to ``vaerdict.expect``.
    reference
        Log-weighted draws of one observation by a method of its own; instead of `sample` and `box`.
    """

    group: str
    name: str
    model: Any
    x: Tensor
    sample: Sampler | None = None
    box: tuple[tuple[float, float], ...] = ()
    mean: Functional = first
    product: Functional = first_product
    score: Functional = oblique
    tail: Functional = oblique
    proposals: Any = None
    reference: Callable[[int], tuple[Tensor, Tensor]] | None = None


class Question(NamedTuple):
    """A functional with its posterior expectation for each observation.

    `gold_error` is the standard error of `truth`, or the difference between two resolutions of a quadrature.

    Shapes: ``truth, gold_error (n_obs)``.
    """

    name: str
    f: Functional
    tolerance: float
    truth: Tensor
    gold_error: Tensor

    def of(self, n: int) -> Question:
        """The question for the first n observations."""
        return self._replace(truth=self.truth[:n], gold_error=self.gold_error[:n])


def exceeds(score: Functional, threshold: float) -> Functional:
    """The indicator of a score above a threshold."""
    return lambda z: (score(z) > threshold).to(z.dtype)


def generator_of(seed: int, name: str) -> torch.Generator:
    """The source of the parameters of a target, which does not depend on the other targets."""
    return torch.Generator().manual_seed(zlib.crc32(f"{seed} {name}".encode()))


def normal(g: torch.Generator, *shape: int) -> Tensor:
    """Standard normal numbers in double precision."""
    return torch.randn(*shape, generator=g, dtype=torch.float64)


def uniform(g: torch.Generator, low: float, high: float, *shape: int) -> Tensor:
    """Uniform numbers in double precision."""
    return low + (high - low) * torch.rand(*shape, generator=g, dtype=torch.float64)


def normal_prior(d: int, scale: float | Tensor = 1.0, loc: float = 0.0) -> Distribution:
    """Independent normals."""
    return Independent(Normal(torch.full((d,), loc).double(), torch.as_tensor(scale).double().expand(d)), 1)


def student_prior(d: int, df: float, scale: float) -> Distribution:
    """Independent Student-t variables."""
    return Independent(StudentT(df, torch.zeros(d).double(), torch.full((d,), scale).double()), 1)


def log_normal_density(value: Tensor, scale: float | Tensor) -> Tensor:
    """Log-density of independent centred normals, without the constant, summed over the last axis."""
    return -0.5 * (value / scale).square().sum(-1)


def log_joint(model: Any, x: Tensor, z: Tensor) -> Tensor:
    """Log p(x, z) of one observation, some points at a time. Shapes: ``x (1, p), z (n, d) -> (n)``."""
    with torch.no_grad():
        x = prepared(model, x)
        return torch.cat([model.log_joint(x, part.unsqueeze(1)).squeeze(1) for part in z.split(50_000)])
