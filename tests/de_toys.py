"""Simulated cells for tests of the likelihood of counts, and a model whose posterior is known."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from vaerdict.de.model import Proposed
from vaerdict.de.sums import GroupSums
from vaerdict.distributions import Diagonal, Elliptical, StandardNormal

LIBRARY = 5000.0


def group_sums(x: Tensor, library: Tensor) -> GroupSums:
    """The sums over cells of a group. Shapes: ``x (cells, genes)``, ``library (cells,)``."""
    cross, seen = (x * library.unsqueeze(-1)).sum(0), (x > 0).double().sum(0)
    return GroupSums(x.sum(0), x.square().sum(0), cross, seen, library.sum(), library.square().sum(), len(x))


def libraries(generator: torch.Generator, n: int) -> Tensor:
    """Libraries that differ by a third, `LIBRARY` on average. Shapes: ``-> (n,)``."""
    return LIBRARY * torch.exp(0.3 * torch.randn(n, generator=generator, dtype=torch.float64) - 0.045)


def gamma(generator: torch.Generator, variance: Tensor) -> Tensor:
    """Gamma variates of mean one and this variance. Shapes: ``(...) -> (...)``."""
    return torch._standard_gamma(1 / variance, generator=generator) * variance


def counts(generator: torch.Generator, rate: Tensor, library: Tensor, alpha: Tensor) -> Tensor:
    """Negative binomial counts. Shapes: ``rate (genes,)`` or ``(cells, genes)``, ``alpha (genes,)``."""
    mean = rate * library.unsqueeze(-1)
    return torch.poisson(mean * gamma(generator, alpha.expand_as(mean).contiguous()), generator=generator)


def cells(generator: torch.Generator, rate: Tensor, n: int, alpha: Tensor) -> GroupSums:
    """Cells of negative binomial counts in libraries of their own, which hold genes beside these."""
    library = libraries(generator, n)
    return group_sums(counts(generator, rate, library, alpha), library)


def rates(generator: torch.Generator, n: int, per_cell: float = 0.5) -> Tensor:
    """Rates of genes, apart by a factor of e^1.2, with about `per_cell` counts in a cell. Shapes: ``-> (n,)``."""
    return per_cell / LIBRARY * torch.exp(1.2 * torch.randn(n, generator=generator, dtype=torch.float64))


def planted(generator: torch.Generator, n: int, share: float = 0.3, sd: float = 1.0) -> Tensor:
    """Fold changes of which a share is not zero. Shapes: ``-> (n,)``."""
    some = torch.rand(n, generator=generator) < share
    return torch.where(some, sd * torch.randn(n, generator=generator, dtype=torch.float64), 0.0)


NOISE_SD = 0.5


@dataclass(frozen=True)
class Powers:
    """Latents with a Gaussian posterior, x = z + noise, and expression 2^z: fold changes are differences of latents."""

    d: int

    @property
    def prior(self) -> StandardNormal:
        return StandardNormal(self.d)

    def log_joint(self, x: Tensor, z: Tensor) -> Tensor:
        return self.prior.log_prob(z) - 0.5 * ((x - z) / NOISE_SD).square().sum(-1)

    def expression(self, z: Tensor) -> Tensor:
        return torch.exp2(z)

    def posterior(self, x: Tensor) -> tuple[Tensor, float]:
        """Mean and standard deviation of each latent."""
        shrink = 1 / (1 + NOISE_SD**2)
        return shrink * x, math.sqrt(shrink) * NOISE_SD

    def exact(self, x: Tensor, inflate: float = 1.0) -> Elliptical:
        loc, sd = self.posterior(x)
        return Elliptical(loc, Diagonal(torch.full_like(loc, sd * inflate)))


def wide(x: Tensor, inflate: float = 1.5) -> Proposed:
    """Weights are bounded."""
    model = Powers(x.shape[1])
    return Proposed(model, x, model.exact(x, inflate))
