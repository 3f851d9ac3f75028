"""Group averages of expression, one for each joint draw of all cells, in one pass and in bounded memory.

A joint draw is one latent for every cell, resampled from the cell's weighted particles, and one set of cell weights.
Cells are worked on a few at a time; what is kept is a sum for each group, draw and gene.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from vaerdict import diagnostics
from vaerdict.core import Progress, SettingError, check_count, silent
from vaerdict.de.cells import CellPosterior, moved
from vaerdict.de.weighting import Bootstrap, Weighting, stream_seeds
from vaerdict.noise import seeded
from vaerdict.samplers.resampling import systematic

CHUNK = 2**21
"""Numbers of draws x cells x genes spread out at a time; the answer does not depend on it."""

_PARTICLES = 0  # the stream of randomness of a cell's particles


@dataclass(frozen=True, eq=False)
class Population:
    """A group of cells and how they are averaged: by which weights, and by mean or median.

    Shapes: ``cells (n,)``, indices into the cells of a posterior.
    """

    cells: Tensor
    weighting: Weighting = field(default_factory=Bootstrap)
    median: bool = False

    def weights(self, cells: Tensor, n_draws: int, seed: int) -> Tensor:
        """Weights of any cells, zero for those outside. Shapes: ``(c,) -> (draws, c)``."""
        inside = torch.isin(cells, self.cells)
        out = torch.zeros(n_draws, len(cells))
        if inside.any():
            out[:, inside] = self.weighting(cells[inside], self.cells, n_draws, seed)
        return out


class Averages(NamedTuple):
    """Average expression of each population in each joint draw, and how well the cells behind it were sampled.

    Shapes: ``expression {name: (draws, genes)}``, ``khat`` and ``ess`` ``(cells,)``, NaN for cells in no population.
    """

    expression: dict[str, Tensor]
    khat: Tensor
    ess: Tensor


@torch.no_grad()
def averages(
    posterior: CellPosterior,
    populations: Mapping[str, Population],
    n_draws: int,
    *,
    seed: int,
    chunk: int = CHUNK,
    progress: Progress = silent,
) -> Averages:
    """Average normalised expression of several populations for `n_draws` joint draws, in one pass over the cells.

    Each cell gets `n_draws` particles, Pareto-smoothed and resampled systematically into as many draws of equal weight
    in random order. What a cell draws depends on `seed`, its index and its group alone. A population averaged by its
    median also keeps the latents of its cells, and spreads out the genes of one draw at a time.
    """
    check_count(n_draws, name="n_draws")
    cells = _all_cells(posterior, populations)
    khat, ess = torch.full((2, posterior.n_cells), torch.nan, dtype=torch.float64)
    means = {name: population for name, population in populations.items() if not population.median}
    sums, kept, done = _Sums(means, n_draws, seed), [], 0
    for part, z, khat[part], ess[part] in _drawn(posterior, cells, n_draws, seed, chunk):
        if means:
            sums.add(part, posterior.expression(z))
        kept += [z] if len(means) < len(populations) else []
        progress(done := done + len(part), len(cells), "cells")
    found = sums.means()
    for name in populations.keys() - means.keys():
        found[name] = _median(posterior, populations[name], cells, torch.cat(kept, 1), seed)
    return Averages({name: found[name] for name in populations}, khat, ess)


@torch.no_grad()
def fixed_averages(
    expression: Tensor, populations: Mapping[str, Population], n_draws: int, *, seed: int, chunk: int = CHUNK
) -> dict[str, Tensor]:
    """The same of expression that is known, such as raw proportions: only the cells' weights vary between draws.

    Shapes: ``expression (cells, genes) -> {name: (draws, genes)}``.
    """
    sums = _Sums(populations, check_count(n_draws, name="n_draws"), seed)
    for part in torch.arange(len(expression)).split(max(1, chunk // n_draws)):
        sums.add(part, expression[part])
    return sums.means()


class _Sums:
    """Weighted sums of expression and of the weights, for each population and draw, in double precision."""

    def __init__(self, populations: Mapping[str, Population], n_draws: int, seed: int) -> None:
        self.populations, self.n_draws, self.seed = populations, n_draws, seed
        self.total: dict[str, Tensor] = {}
        self.mass: dict[str, Tensor] = {}

    def add(self, cells: Tensor, expression: Tensor) -> None:
        """Add some cells. Shapes: ``cells (c,)``, ``expression (draws, c, genes)``, or ``(c, genes)`` where fixed."""
        for name, population in self.populations.items():
            if not torch.isin(cells, population.cells).any():
                continue
            weight = population.weights(cells, self.n_draws, self.seed).to(expression)
            fixed = expression.dim() == 2
            part = weight @ expression if fixed else (weight.unsqueeze(1) @ expression).squeeze(1)
            self.total[name] = self.total.get(name, 0) + part.double()
            self.mass[name] = self.mass.get(name, 0) + weight.double().sum(1, keepdim=True)

    def means(self) -> dict[str, Tensor]:
        """The averages. Shapes: ``{name: (draws, genes)}``."""
        return {name: self.total[name] / self.mass[name] for name in self.total}


def _all_cells(posterior: CellPosterior, populations: Mapping[str, Population]) -> Tensor:
    """Every cell of any population, once."""
    if not populations:
        raise SettingError("no population to average; name at least one group of cells.")
    for name, population in populations.items():
        found = population.cells
        if not len(found) or int(found.min()) < 0 or int(found.max()) >= posterior.n_cells:
            raise SettingError(f"population {name!r} must name some of the cells 0 to {posterior.n_cells - 1}.")
    return torch.cat([population.cells for population in populations.values()]).unique()


def _drawn(
    posterior: CellPosterior, cells: Tensor, n: int, seed: int, chunk: int
) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor]]:
    """Some cells at a time: which, their resampled latents ``(n, c, d)``, k-hat and effective sample size ``(c,)``."""
    seeds = stream_seeds(seed, _PARTICLES, posterior.n_cells)
    n_genes = posterior.expression(posterior.particles(cells[:1], n, [seeded(0)]).z[:1]).shape[-1]
    for part in cells.split(max(1, chunk // (n * n_genes))):
        generators = [seeded(seeds[cell]) for cell in part.tolist()]
        z, log_w = posterior.particles(part, n, generators)
        smooth, khat = diagnostics.psis(log_w.double())
        drawn = moved(posterior, _resampled(z, smooth, generators), part, seed)
        yield part, drawn, khat, diagnostics.ess(log_w)


def _resampled(z: Tensor, log_w: Tensor, generators: list[torch.Generator]) -> Tensor:
    """Latents of equal weight in random order: cells are independent, so their draws must not be sorted alike."""
    uniform = torch.stack([torch.rand(len(z) + 1, generator=g, dtype=torch.float64) for g in generators], 1)
    index = systematic(log_w, uniform[0].to(log_w.device))
    index = index.gather(0, uniform[1:].argsort(0).to(index.device))
    return z.gather(0, index.unsqueeze(-1).expand_as(z))


def _median(posterior: CellPosterior, population: Population, cells: Tensor, z: Tensor, seed: int) -> Tensor:
    """Weighted median over a population's cells, draw by draw. Shapes: ``z (draws, cells, d) -> (draws, genes)``."""
    place = torch.searchsorted(cells, population.cells)
    weight = population.weights(population.cells, len(z), seed).double()
    return torch.cat(
        [_weighted_median(posterior.expression(z[s : s + 1, place])[0], weight[s])[None] for s in range(len(z))]
    )


def _weighted_median(values: Tensor, weight: Tensor) -> Tensor:
    """The value at which half of the weight is reached. Shapes: ``(cells, genes), (cells,) -> (genes,)``."""
    ranked, order = values.double().sort(0)
    reached = weight[order].cumsum(0) >= 0.5 * weight.sum()
    return ranked.gather(0, reached.int().argmax(0, keepdim=True))[0]
