r"""How much each cell of a group counts in each joint draw: all the same, a Bayesian bootstrap, or one cell alone.

A cell's weights depend on the seed and on the cell, not on which other cells are looked at with it or in what order.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from vaerdict.core import SettingError
from vaerdict.noise import seeded

_WEIGHTS, _PICKS = 1, 2  # streams of randomness apart from each other, and from a cell's particles


class Weighting(Protocol):
    """Weights of some cells of a group, one set a joint draw."""

    def __call__(self, cells: Tensor, group: Tensor, n_draws: int, seed: int, /) -> Tensor:
        """Weights, up to a factor common to the group, of `cells`, all of them in `group`.

        Shapes: ``cells (c,), group (n,) -> (draws, c)``.
        """
        ...


def stream_seeds(seed: int, stream: int, n: int) -> tuple[int, ...]:
    """Seeds for n units of one stream of randomness; those of the first units do not depend on n."""
    return _seeds(seed, stream, 1 << max(0, n - 1).bit_length())[:n]


@lru_cache(maxsize=8)  # asked for again with every few cells, they would take longer than the cells
def _seeds(seed: int, stream: int, n: int) -> tuple[int, ...]:
    return tuple((np.random.SeedSequence([seed, stream]).generate_state(n, np.uint64) >> np.uint64(1)).tolist())


@dataclass(frozen=True)
class Equal:
    """Every cell the same in every draw: the cells at hand are the population."""

    def __call__(self, cells: Tensor, group: Tensor, n_draws: int, seed: int, /) -> Tensor:
        """Ones."""
        return torch.ones(n_draws, len(cells))


@dataclass(frozen=True, eq=False)
class Bootstrap:
    r"""Bayesian bootstrap: the cells, or the `replicates` they come from, are a sample of the population.

    The weights of the n units are :math:`\mathrm{Dirichlet}(\alpha, \dots, \alpha)` with :math:`\alpha = 1 - 2/n`. With
    Rubin's :math:`\alpha = 1` the variance of a mean would be short by the factor (n - 1)/(n + 1); so it is that of the
    usual standard error on average. It matters for few units only, and needs three.

    `replicates` ``(cells,)`` names the unit, such as the donor, of every cell. Every unit then counts the same, however
    many cells it gave. Reference: Rubin (1981), The Bayesian bootstrap, Annals of Statistics 9(1).
    """

    replicates: Tensor | None = field(default=None, repr=False)

    def __call__(self, cells: Tensor, group: Tensor, n_draws: int, seed: int, /) -> Tensor:
        """Gamma weights, those of a unit shared out evenly among its cells."""
        of = torch.arange(int(group.max()) + 1) if self.replicates is None else self.replicates
        units, size = of[group].unique(return_counts=True)
        if len(units) < 3:
            raise SettingError(
                f"a bootstrap of {len(units)} {'cells' if self.replicates is None else 'replicates'} shows no spread; "
                "it needs at least three in every group."
            )
        mine, place = of[cells].unique(return_inverse=True)
        seeds = stream_seeds(seed, _WEIGHTS, int(units.max()) + 1)
        concentration = torch.full((n_draws,), 1 - 2 / len(units))
        drawn = [torch._standard_gamma(concentration, generator=seeded(seeds[u])) for u in mine.tolist()]
        share = size[torch.searchsorted(units, mine)]
        return (torch.stack(drawn, 1) / share)[:, place]


@dataclass(frozen=True)
class OneCell:
    """A single random cell in each draw: what a comparison of random pairs of cells looks at."""

    def __call__(self, cells: Tensor, group: Tensor, n_draws: int, seed: int, /) -> Tensor:
        """One for the cell picked in a draw, zero for the others."""
        picks = seeded(stream_seeds(seed, _PICKS, int(group[0]) + 1)[-1])
        picked = group[torch.randint(len(group), (n_draws,), generator=picks)]
        return (picked[:, None] == cells).float()
