"""The posterior of every cell's latent: by a model with a proposal, or by particles that were drawn before."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from vaerdict.core import Progress, Proposal, ShapeError, check_count, check_log_weights, prepared, restricted, silent
from vaerdict.de.data import block_size, chunk_size
from vaerdict.de.model.group_prior import Expressing, GroupedModel, GroupMeans, Levels, levels
from vaerdict.distributions import Elliptical, Triangular
from vaerdict.engines import Engine, LazySequence, Threads, ordered_results
from vaerdict.noise import Randomness
from vaerdict.proposals import check_latent, defensive
from vaerdict.refinement import refine
from vaerdict.training.data import Rows, SharedRows

_INFLATE = 1.1
_BYTES = {"cpu": 2**28, "cuda": 2**33}


class Particles(NamedTuple):
    """Latents of cells with their log-weights. Shapes: ``z (n, cells, d)``, ``log_w (n, cells)``."""

    z: Tensor
    log_w: Tensor


class CellPosterior(Protocol):
    """Weighted particles of every cell's latent, and the expression that they imply."""

    @property
    def n_cells(self) -> int:
        """Number of cells."""
        ...

    @property
    def device(self) -> torch.device:
        """Where particles are drawn."""
        ...

    def select(self, cells: Tensor, /) -> CellPosterior:
        """The posterior of some cells alone, small enough to be sent. Shapes: ``cells (c,)``."""
        ...

    def particles(self, n: int, generator: Randomness, /) -> Particles:
        """Particles of all cells. Shapes: ``-> z (n, cells, d)``."""
        ...

    def expression(self, z: Tensor, /) -> Tensor:
        """Normalised expression. Shapes: ``(n, c, d) -> (n, c, genes)``."""
        ...


def moved(posterior: CellPosterior, z: Tensor, seed: int) -> Tensor:
    """Joint draws of the latents with the uncertainty that cells share, where the posterior has a method ``moved``.

    Shapes: ``z (n, cells, d)``, as z.
    """
    move = getattr(posterior, "moved", None)
    return z if move is None else move(z, seed)


@dataclass(frozen=True, eq=False)
class Proposed:
    """The posterior of a fitted model at cells x, by a proposal; without weights, the proposal stands in for it.

    Particles are drawn given the mean of each cell's prior; `moved` adds the uncertainty of these means.

    Shapes: ``x (cells, genes)``.
    """

    model: Expressing
    x: Tensor
    proposal: Proposal
    weighted: bool = True
    means: GroupMeans | None = None

    @property
    def n_cells(self) -> int:
        """Number of cells."""
        return len(self.x)

    @property
    def device(self) -> torch.device:
        """The device of the data."""
        return self.x.device

    def select(self, cells: Tensor, /) -> Proposed:
        """The posterior of some cells alone."""
        means = None if self.means is None else self.means.select(cells)
        return replace(self, x=self.x[cells], proposal=restricted(self.proposal, cells), means=means)

    @torch.no_grad()
    def particles(self, n: int, generator: Randomness, /) -> Particles:
        """Draw from the proposal and compute log-weights, some particles at a time."""
        z, log_q = check_latent(self.proposal.draw(self.x, n, generator=generator), self.model.prior)
        if not self.weighted:
            return Particles(z, torch.zeros_like(log_q))
        prepared_x = prepared(self.model, self.x)
        parts = z.split(max(1, chunk_size(self.device) // self.x.numel()))
        log_p = torch.cat([self.model.log_joint(prepared_x, part) for part in parts])
        return Particles(z, check_log_weights(log_p - log_q))

    def moved(self, z: Tensor, seed: int, /) -> Tensor:
        """Joint draws with the uncertainty of the groups' means. Shapes: ``z (n, cells, d)``, as z."""
        return z if self.means is None else z + self.means.moves(len(z), seed)

    @torch.no_grad()
    def expression(self, z: Tensor, /) -> Tensor:
        """Normalised expression by the model."""
        return self.model.expression(z)


@dataclass(frozen=True, eq=False)
class Given:
    """Particles that were drawn before, such as those of annealed importance sampling.

    Shapes: ``z (n, cells, d)``, ``log_w (n, cells)``.
    """

    model: Expressing
    z: Tensor
    log_w: Tensor

    @property
    def n_cells(self) -> int:
        """Number of cells."""
        return self.log_w.shape[1]

    @property
    def device(self) -> torch.device:
        """The device of the particles."""
        return self.z.device

    def select(self, cells: Tensor, /) -> Given:
        """The particles of some cells alone."""
        return replace(self, z=self.z[:, cells], log_w=self.log_w[:, cells])

    def particles(self, n: int, generator: Randomness, /) -> Particles:
        """All particles: n must be their number."""
        if n != len(self.log_w):
            raise ShapeError(f"n={n} particles were asked for, but there are {len(self.log_w)}; ask for as many.")
        return Particles(self.z, self.log_w)

    @torch.no_grad()
    def expression(self, z: Tensor, /) -> Tensor:
        """Normalised expression by the model."""
        return self.model.expression(z)


# --------------------------------------------------------------------------------------------- refined for each cell
class Modes(NamedTuple):
    """The mode of each cell's posterior under the common prior, and the curvature there.

    Shapes: ``loc (cells, d)``, ``tril (cells, d, d)``, the root of the inverse curvature times 1.1.
    """

    loc: Tensor
    tril: Tensor

    def select(self, cells: Tensor) -> Modes:
        """The modes of some cells."""
        return Modes(self.loc[cells], self.tril[cells])

    def elliptical(self, device: torch.device) -> Elliptical:
        """As normal distributions on a device."""
        return Elliptical(self.loc.to(device), Triangular(self.tril.to(device)))


@dataclass(frozen=True, eq=False)
class Streamed:
    """The posterior at cells whose counts are read and refined when their particles are drawn.

    Used a block at a time, it never holds the genes of more cells than that. With groups d + d^2 numbers are kept per
    cell, none without.
    """

    model: Expressing
    rows: Rows
    start: Tensor | Proposal
    prior_share: float = 0.05
    labels: Tensor | None = None
    modes: Modes | None = None
    levels: Levels | None = None

    @property
    def n_cells(self) -> int:
        """Number of cells."""
        return self.rows.n

    @property
    def device(self) -> torch.device:
        """The device of the data."""
        return self.rows.device

    def select(self, cells: Tensor, /) -> Streamed:
        """The posterior of some cells alone."""
        return replace(
            self,
            rows=self.rows.select(cells),
            start=_start(self.start, cells),
            labels=None if self.labels is None else self.labels[cells],
            modes=None if self.modes is None else self.modes.select(cells),
        )

    @cached_property
    def proposed(self) -> Proposed:
        """The posterior of all cells at once, by a Student-t fitted to each cell and a defensive share of the prior."""
        x = self.rows.take(torch.arange(self.n_cells))
        if self.modes is None or self.labels is None or self.levels is None:
            return self._fitted(self.model, x, self.start, None)
        local = self.modes.elliptical(x.device)
        covariance = local.root.covariance() / _INFLATE**2
        means = self.levels.of(self.labels.to(x.device), covariance)
        start = local.loc + (covariance @ means.mean.unsqueeze(-1)).squeeze(-1)
        return self._fitted(GroupedModel(self.model), torch.cat([x, means.mean], -1), start, means)

    def particles(self, n: int, generator: Randomness, /) -> Particles:
        """Refine, draw and compute log-weights."""
        return self.proposed.particles(n, generator)

    def moved(self, z: Tensor, seed: int, /) -> Tensor:
        """Joint draws with the uncertainty of the groups' means. Shapes: ``z (n, cells, d)``, as z."""
        return self.proposed.moved(z, seed)

    @torch.no_grad()
    def expression(self, z: Tensor, /) -> Tensor:
        """Normalised expression by the model."""
        return self.model.expression(z)

    def _fitted(self, model: Expressing, x: Tensor, start: Tensor | Proposal, means: GroupMeans | None) -> Proposed:
        q = _refined(model, x, start)
        return Proposed(model, x, defensive({"REFINED": q}, model.prior, self.prior_share), means=means)


def streamed(
    model: Expressing,
    rows: Rows,
    start: Tensor | Proposal,
    *,
    labels: Tensor | None = None,
    modes: Modes | None = None,
    prior_share: float = 0.05,
    block: int | None = None,
    engine: Engine | None = None,
    progress: Progress = silent,
) -> Streamed:
    """The posterior at cells by a Student-t fitted to each cell, with a defensive share of the prior, block by block.

    Parameters
    ----------
    model
        A model of counts with an expression.
    rows
        The observations of the cells.
    start
        An encoder, or locations ``(cells, d)``, to start the search for modes from.
    labels
        A number for each cell's group ``(cells,)``, negative for none: the prior then has a mean of its own in each
        group (`vaerdict.de.model.group_prior`). Where donors are the replicates, each needs a label of its own: about a
        mean they share, donors look more alike than they are.
    modes
        The modes under the model's own prior, found in a first pass over the cells by default.
    prior_share
        Share of the prior in the mixture that particles are drawn from.
    block, engine, progress
        How that first pass is done.

    Returns
    -------
    Streamed
        The posterior, computed when particles are drawn.
    """
    if labels is None:
        return Streamed(model, rows, start, prior_share)
    modes = modes or find_modes(model, rows, start, block=block, engine=engine, progress=progress)
    group_levels = levels(modes.elliptical(torch.device("cpu")), _INFLATE, labels.cpu())
    return Streamed(model, rows, start, prior_share, labels, modes, group_levels)


def refined(
    model: Expressing,
    x: Tensor,
    start: Tensor | Proposal,
    *,
    labels: Tensor | None = None,
    prior_share: float = 0.05,
) -> Proposed:
    """The posterior at cells x as by `streamed`, whose parameters these are, all cells at once.

    Shapes: ``x (cells, genes)``, ``start (cells, d)``, ``labels (cells,)``.
    """
    return streamed(model, SharedRows(x), start, labels=labels, prior_share=prior_share, block=len(x)).proposed


def find_modes(
    model: Expressing,
    rows: Rows,
    start: Tensor | Proposal,
    *,
    block: int | None = None,
    engine: Engine | None = None,
    progress: Progress = silent,
) -> Modes:
    """The modes of all cells under the model's own prior, block by block, in the host's memory."""
    size = block_size(rows.device) if block is None else check_count(block, name="block")
    items = LazySequence(torch.arange(rows.n).split(size), lambda cells: (rows.select(cells), _start(start, cells)))
    filled, done = Filled(rows.n), 0
    for part in ordered_results((engine or default_engine(rows.device)).map(partial(_modes, model), items)):
        filled.put(slice(done, done := done + len(part.loc)), part)
        progress(done, rows.n, "cells refined")
    return Modes(*filled.columns)


class Filled:
    """Values of every cell, filled in block by block: many small tensors would fragment the memory.

    Shapes: ``columns (n, *)`` each, NaN where nothing was put.
    """

    def __init__(self, n: int) -> None:
        self.n, self.columns = n, list[Tensor]()

    def put(self, place: Tensor | slice, part: Iterable[Tensor]) -> None:
        """Put the values of some cells in their places. Shapes: ``(c, *)`` each."""
        part = list(part)
        self.columns = self.columns or [t.new_full((self.n, *t.shape[1:]), torch.nan) for t in part]
        for column, values in zip(self.columns, part, strict=True):
            column[place] = values


def _modes(model: Expressing, item: tuple[Rows, Tensor | Proposal]) -> Modes:
    rows, start = item
    q = _refined(model, rows.take(torch.arange(rows.n)), start)
    assert isinstance(q.root, Triangular)
    return Modes(q.loc.cpu(), q.root.tril.cpu())


def _refined(model: Expressing, x: Tensor, start: Tensor | Proposal) -> Elliptical:
    start = start.to(x) if isinstance(start, Tensor) else start
    return refine(model, x, start, inflate=_INFLATE, max_bytes=_BYTES.get(x.device.type, _BYTES["cpu"])).distribution


def _start(start: Tensor | Proposal, cells: Tensor) -> Tensor | Proposal:
    return start[cells] if isinstance(start, Tensor) else restricted(start, cells)


def default_engine(device: torch.device) -> Engine:
    """As many threads of this process as torch may use; a single one with a GPU."""
    return Threads(torch.get_num_threads() if device.type == "cpu" else 1)
