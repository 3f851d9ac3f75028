"""Simulated groups of cells for tests of the likelihood of counts."""

from __future__ import annotations

import torch

from vaerdict.de.counts_likelihood import GroupProportions


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
