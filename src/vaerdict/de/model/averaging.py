"""Average expression of groups of cells in joint draws, in one pass over the cells and in bounded memory.

Cells are worked on a block at a time, and spread out over genes a few draws of a block at a time. What a cell draws
depends on the seed, its index and its group alone, so that averages depend neither on blocks nor on the engine.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from vaerdict import diagnostics
from vaerdict.core import Progress, SettingError, check_count, log_normalise, silent
from vaerdict.de.data import block_size, chunk_size
from vaerdict.de.model.cell_weights import PARTICLES, Bootstrap, Weighting, Weights
from vaerdict.de.model.posterior import CellPosterior, Filled, default_engine, moved
from vaerdict.engines import Engine, LazySequence, ordered_results
from vaerdict.noise import KeyedNoise
from vaerdict.samplers import systematic
from vaerdict.training.data import Rows, SharedRows


@dataclass(frozen=True, eq=False)
class Population:
    """A group of cells and the weights that they are averaged by.

    Shapes: ``cells (n,)``, indices into the cells of a posterior.
    """

    cells: Tensor
    weighting: Weighting = field(default_factory=Bootstrap)


class Averages(NamedTuple):
    """Average expression of each population in each joint draw, and how well the cells behind it were sampled.

    `latent` are the posterior means of the cells' latents, given the means of their prior.

    Shapes: ``expression {name: (draws, genes)}``, ``khat`` and ``ess`` ``(cells,)``, ``latent (cells, d)``, NaN for
    cells in no population.
    """

    expression: dict[str, Tensor]
    khat: Tensor
    ess: Tensor
    latent: Tensor


class Support(NamedTuple):
    """How well the cells of a group were sampled: medians of k-hat and of ESS, and the share of reliable cells."""

    n_cells: int
    khat: float
    ess: float
    share_ok: float


def support(khat: Tensor, ess: Tensor, n_draws: int) -> Support:
    """How well the cells of a group were sampled. Shapes: ``khat (n,)``, ``ess (n,)``."""
    ok = diagnostics.verdict(khat, ess, n_draws) == diagnostics.Verdict.OK
    return Support(len(khat), khat.nanmedian().item(), ess.median().item(), ok.double().mean().item())


@torch.no_grad()
def averages(
    posterior: CellPosterior,
    populations: Mapping[str, Population],
    n_draws: int,
    *,
    seed: int,
    block: int | None = None,
    chunk: int | None = None,
    engine: Engine | None = None,
    progress: Progress = silent,
) -> Averages:
    """Average normalised expression of several populations in joint draws, in one pass over the cells.

    Each cell gets `n_draws` particles, Pareto-smoothed and resampled systematically into as many draws of equal weight
    in random order. The sums of a block are ``populations x draws x genes`` numbers and are added in order: engines
    give the same averages to the last bit, other blocks up to rounding, which now and then makes a draw take a
    neighbouring particle.

    Parameters
    ----------
    posterior
        The posterior of every cell's latent.
    populations
        The groups of cells to average.
    n_draws
        Number of joint draws.
    seed
        Seed of particles and weights; what a cell draws depends on it and on the cell's index.
    block, chunk
        Cells per item of the engine, and numbers (draws x cells x genes) in memory at a time; by default both suit the
        device.
    engine
        What works on blocks: threads of this process by default.
    progress
        Called with the cells done, their number and a name.

    Returns
    -------
    Averages
        Expression of each population, ``(draws, genes)``, and k-hat, ESS and latent of every cell.
    """
    check_count(n_draws, name="n_draws")
    cells = _all_cells(posterior.n_cells, populations)
    weights = _prepared(populations, posterior.n_cells, n_draws, seed)
    work = partial(_worked, weights, n_draws, seed, chunk or chunk_size(posterior.device))
    size = block_size(posterior.device) if block is None else check_count(block, name="block")
    items = LazySequence(cells.split(size), lambda block: (block, posterior.select(block)))
    sums, filled, done = _Sums(), Filled(posterior.n_cells), 0
    for part in ordered_results((engine or default_engine(posterior.device)).map(work, items)):
        sums.add(part.sums)
        filled.put(cells[done : done + len(part.khat)], (part.khat, part.ess, part.latent))
        progress(done := done + len(part.khat), len(cells), "cells")
    khat, ess, latent = filled.columns
    expression = sums.means()
    return Averages({name: expression[name] for name in populations}, khat, ess, latent)


@torch.no_grad()
def fixed_averages(
    expression: Tensor | Rows,
    populations: Mapping[str, Population],
    n_draws: int,
    *,
    seed: int,
    n_genes: int | None = None,
    block: int | None = None,
    engine: Engine | None = None,
) -> dict[str, Tensor]:
    """Averages of fixed expression, such as proportions of counts: only the cells' weights vary between draws.

    Parameters
    ----------
    expression
        Expression ``(cells, genes)``, or `Rows` of counts whose first `n_genes` columns are turned into proportions.
    populations
        The groups of cells to average.
    n_draws, seed
        Number of joint draws and seed of the weights.
    n_genes
        Number of genes of `Rows`.
    block, engine
        As for `averages`.

    Returns
    -------
    dict
        The averages by population, ``(draws, genes)`` each.
    """
    rows = SharedRows(expression) if isinstance(expression, Tensor) else expression
    weights = _prepared(populations, rows.n, check_count(n_draws, name="n_draws"), seed)
    work = partial(_weighed, weights, None if isinstance(expression, Tensor) else n_genes)
    size = block_size(rows.device) if block is None else check_count(block, name="block")
    items = LazySequence(torch.arange(rows.n).split(size), lambda block: (block, rows.select(block)))
    sums = _Sums()
    for part in ordered_results((engine or default_engine(rows.device)).map(work, items)):
        sums.add(part)
    return sums.means()


# ---------------------------------------------------------------------------------------------------- one block
class _Sum(NamedTuple):
    """Weighted sums of expression, and of the weights. Shapes: ``total (draws, genes)``, ``mass (draws, 1)``."""

    total: Tensor
    mass: Tensor


class _Block(NamedTuple):
    """The results of a block of cells. Shapes: ``khat``, ``ess`` ``(c,)``, ``latent (c, d)``."""

    sums: dict[str, _Sum]
    khat: Tensor
    ess: Tensor
    latent: Tensor


@torch.no_grad()
def _worked(
    weights: Mapping[str, _Weighed], n: int, seed: int, chunk: int, item: tuple[Tensor, CellPosterior]
) -> _Block:
    """Refine, draw, compute weights, resample and average the cells of one block."""
    cells, posterior = item[0].to(item[1].device), item[1]
    source = KeyedNoise(seed, PARTICLES, cells)
    z, log_w = posterior.particles(n, source)
    smooth, khat = diagnostics.psis(log_w.double())
    latent = (log_normalise(smooth).exp().unsqueeze(-1) * z).sum(0).to(z)
    drawn = moved(posterior, _resampled(z, smooth, source), seed)
    of_block = {name: weight(cells) for name, weight in weights.items() if weight.touches(cells)}
    sums = _summed(posterior, drawn, of_block, chunk) if of_block else {}
    return _Block(sums, khat.cpu(), diagnostics.ess(log_w).cpu(), latent.cpu())


def _summed(posterior: CellPosterior, z: Tensor, weights: Mapping[str, Tensor], chunk: int) -> dict[str, _Sum]:
    """Weighted sums over the cells of every population at once, some draws at a time."""
    weight = torch.stack(list(weights.values()), 1).to(z)
    n_genes = posterior.expression(z[:1, :1]).shape[-1]
    draws = max(1, chunk // (n_genes * z.shape[1]))
    pairs = zip(weight.split(draws), z.split(draws), strict=True)
    total = torch.cat([(w @ posterior.expression(part)).cpu() for w, part in pairs])
    mass = weight.sum(-1, keepdim=True).cpu()
    return {name: _Sum(total[:, i], mass[:, i]) for i, name in enumerate(weights)}


@torch.no_grad()
def _weighed(weights: Mapping[str, _Weighed], n_genes: int | None, item: tuple[Tensor, Rows]) -> dict[str, _Sum]:
    """Weighted sums of the rows of one block, of counts as proportions."""
    cells, x = item[0].to(item[1].device), item[1].take(torch.arange(item[1].n))
    if n_genes is not None:
        x = x[:, :n_genes] / x[:, :n_genes].sum(-1, keepdim=True)
    of_block = {name: weight(cells).to(x) for name, weight in weights.items() if weight.touches(cells)}
    return {name: _Sum((w @ x).cpu(), w.sum(1, keepdim=True).cpu()) for name, w in of_block.items()}


def _resampled(z: Tensor, log_w: Tensor, source: KeyedNoise) -> Tensor:
    """Latents of equal weight in random order: cells are independent, so their draws must not be sorted alike."""
    uniform = source.uniform(len(z) + 1, z.shape[1:2], 1, like=log_w).squeeze(-1)
    index = systematic(log_w, uniform[0]).gather(0, uniform[1:].argsort(0))
    return z.gather(0, index.unsqueeze(-1).expand_as(z))


# ---------------------------------------------------------------------------------------------------- all blocks
class _Sums:
    """Sums of expression and weights over the blocks, for each population and draw, in double precision."""

    def __init__(self) -> None:
        self.sums: dict[str, _Sum] = {}

    def add(self, more: Mapping[str, _Sum]) -> None:
        """Add the sums of a block."""
        for name, one in more.items():
            if name not in self.sums:
                self.sums[name] = _Sum(one.total.double(), one.mass.double())
            else:
                self.sums[name].total.add_(one.total)
                self.sums[name].mass.add_(one.mass)

    def means(self) -> dict[str, Tensor]:
        """The averages. Shapes: ``{name: (draws, genes)}``."""
        return {name: one.total / one.mass for name, one in self.sums.items()}


@dataclass(frozen=True, eq=False)
class _Weighed:
    """The weights of any cells in a population, zero for those outside. Shapes: ``inside (all cells,)``."""

    inside: Tensor
    weights: Weights
    n_draws: int

    def touches(self, cells: Tensor) -> bool:
        """Whether any of these cells is in it."""
        return bool(self.inside[cells.cpu()].any())

    def __call__(self, cells: Tensor) -> Tensor:
        """Shapes: ``(c,) -> (draws, c)``."""
        inside = self.inside[cells.cpu()].to(cells.device)
        out = torch.zeros(self.n_draws, len(cells), device=cells.device)
        out[:, inside] = self.weights(cells[inside])
        return out


def _prepared(populations: Mapping[str, Population], n_cells: int, n_draws: int, seed: int) -> dict[str, _Weighed]:
    def weighed(population: Population) -> _Weighed:
        inside = torch.zeros(n_cells, dtype=torch.bool)
        inside[population.cells] = True
        return _Weighed(inside, population.weighting.of(population.cells, n_draws, seed), n_draws)

    return {name: weighed(population) for name, population in populations.items()}


def _all_cells(n_cells: int, populations: Mapping[str, Population]) -> Tensor:
    """The cells of all populations."""
    if not populations:
        raise SettingError("no population to average; name at least one group of cells.")
    for name, population in populations.items():
        cells = population.cells
        if not len(cells) or int(cells.min()) < 0 or int(cells.max()) >= n_cells:
            raise SettingError(f"population {name!r} must name some of the cells 0 to {n_cells - 1}.")
    return torch.cat([population.cells for population in populations.values()]).unique()
