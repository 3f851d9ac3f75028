"""Simulated groups of cells for tests of the likelihood of counts."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from vaerdict.de.counts_likelihood import GroupProportions
from vaerdict.de.model import Proposed
from vaerdict.distributions import Diagonal, Elliptical, StandardNormal


def simulated(
    generator: torch.Generator, lfc: torch.Tensor, counts: float = 40.0, cells: tuple[int, int] = (200, 200)
) -> tuple[GroupProportions, GroupProportions]:
    """Groups whose means are worth Poisson counts, about `counts` for two hundred cells, in libraries of 1,000."""
    level = counts * (0.7 * torch.randn(len(lfc), generator=generator, dtype=torch.float64)).exp() / 200
    library, sides = 1000.0, []
    for n, sign in zip(cells, (0.5, -0.5), strict=True):
        drawn = torch.poisson(n * level * torch.exp2(sign * lfc), generator=generator)
        mean = drawn / (n * library)
        sides.append(GroupProportions(mean, mean / library, 1 / library, n))
    return sides[0], sides[1]


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
