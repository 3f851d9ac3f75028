r"""The weight of each cell of a group in each joint draw: equal, a Bayesian bootstrap, or one cell alone.

The weights of a cell depend on the seed and on the cell, not on which other cells are in its block.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from vaerdict.core import SettingError
from vaerdict.noise import KeyedNoise

PARTICLES, WEIGHTS, PICKS, MEANS, CHECKS = range(5)
"""Independent streams of randomness: what the noise of a cell is used for."""

Weights = Callable[[Tensor], Tensor]
"""Weights of some cells of a group, up to a common factor. Shapes: ``(c,) -> (draws, c)``."""


class Weighting(Protocol):
    """A way to weight the cells of a group, one set of weights per joint draw."""

    def of(self, group: Tensor, n_draws: int, seed: int, /) -> Weights:
        """The function that gives the weights of cells of a group. Shapes: ``group (n,)``."""
        ...


@dataclass(frozen=True)
class Equal:
    """Equal weights in every draw: the cells are the whole population."""

    def of(self, group: Tensor, n_draws: int, seed: int, /) -> Weights:
        """Ones."""
        return partial(_ones, n_draws)


def _ones(n_draws: int, cells: Tensor) -> Tensor:
    return torch.ones(n_draws, len(cells), device=cells.device)


@dataclass(frozen=True, eq=False)
class Bootstrap:
    r"""Bayesian bootstrap: the cells, or the `replicates` they come from, are a sample of the population.

    The weights of the n units are :math:`\mathrm{Dirichlet}(\alpha, \dots, \alpha)` with :math:`\alpha = 1 - 2/n`. With
    Rubin's :math:`\alpha = 1` the variance of a mean would be short by the factor (n - 1)/(n + 1); so it is that of the
    usual standard error on average. It matters for few units only, and needs three.

    `replicates` ``(cells,)`` names the unit, such as the donor, of every cell. Units then have equal weights, whatever
    their numbers of cells. Reference: Rubin (1981), The Bayesian bootstrap, Annals of Statistics 9(1).
    """

    replicates: Tensor | None = field(default=None, repr=False)

    def of(self, group: Tensor, n_draws: int, seed: int, /) -> Weights:
        """Gamma weights; those of a unit are divided evenly among its cells."""
        size = None if self.replicates is None else torch.bincount(self.replicates[group])
        n = len(group) if size is None else int((size > 0).sum())
        if n < 3:
            raise SettingError(
                f"a bootstrap of {n} {'cells' if self.replicates is None else 'replicates'} shows no spread; "
                "it needs at least three in every group."
            )
        return partial(_gammas, torch.full((), 1 - 2 / n), n_draws, seed, self.replicates, size)


def _gammas(
    concentration: Tensor, n_draws: int, seed: int, replicates: Tensor | None, size: Tensor | None, cells: Tensor
) -> Tensor:
    """Weights of cells from their units'. Shapes: ``cells (c,)``, ``size (units,) -> (draws, c)``."""
    if replicates is None or size is None:
        return _of_units(concentration, n_draws, seed, cells)
    units, place = replicates.to(cells.device)[cells].unique(return_inverse=True)
    return (_of_units(concentration, n_draws, seed, units) / size.to(cells.device)[units])[:, place]


def _of_units(concentration: Tensor, n_draws: int, seed: int, units: Tensor) -> Tensor:
    return KeyedNoise(seed, WEIGHTS, units).gamma(n_draws, units.shape, concentration).squeeze(-1)


@dataclass(frozen=True)
class OneCell:
    """A single random cell in each draw, for comparisons of random pairs of cells."""

    def of(self, group: Tensor, n_draws: int, seed: int, /) -> Weights:
        """One for the cell picked in a draw, zero for the others."""
        u = KeyedNoise(seed, PICKS, group[:1]).uniform(n_draws, (1,), 1, like=torch.zeros((), dtype=torch.float64))
        return partial(_picked, group[(u.flatten() * len(group)).long()])


def _picked(picks: Tensor, cells: Tensor) -> Tensor:
    return (picks.to(cells.device)[:, None] == cells).float()
