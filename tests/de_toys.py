"""Simulated groups of cells for tests of the likelihood of counts."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from vaerdict.de.model import Proposed
from vaerdict.de.sums import GroupSums
from vaerdict.distributions import Diagonal, Elliptical, StandardNormal


def simulated(
    generator: torch.Generator, lfc: Tensor, counts: float = 40.0, cells: tuple[int, int] = (200, 200)
) -> tuple[GroupSums, GroupSums]:
    """Groups of cells with Poisson counts, about `counts` for two hundred cells, in libraries of 1,000."""
    level = counts * (0.7 * torch.randn(len(lfc), generator=generator, dtype=torch.float64)).exp() / 200
    sides = []
    for n, sign in zip(cells, (0.5, -0.5), strict=True):
        rate = level * torch.exp2(sign * lfc)
        sides.append(sums_of(torch.poisson(rate.expand(n, -1), generator=generator), torch.full((n,), 1000.0)))
    return sides[0], sides[1]


def sums_of(x: Tensor, library: Tensor) -> GroupSums:
    """The sums over cells of dense counts. Shapes: ``x (cells, genes)``, ``library (cells,)``."""
    x, library = x.double(), library.double()
    seen = (x > 0).double().sum(0)
    return GroupSums(
        x.sum(0), x.square().sum(0), library @ x, seen, library.sum(), library.square().sum(), len(library)
    )


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
