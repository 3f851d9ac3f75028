"""The data that all stages of an analysis share: the cells read, the contrasts, and the counts of every side."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
from scipy import sparse
from torch import Tensor

from vaerdict.core import Progress, silent
from vaerdict.de import data
from vaerdict.de.contrasts import FEWEST_IN_BATCH, Contrast, Labels, Side, compared_cells, contrasts, rows_to_read
from vaerdict.de.counts_likelihood import (
    GroupProportions,
    LfcLikelihood,
    cells_likelihood,
    group_proportions,
    paired_likelihood,
    samples_likelihood,
)
from vaerdict.de.options import DEOptions
from vaerdict.engines import Engine
from vaerdict.models.scvi import Scvi
from vaerdict.training.data import Rows, sparse_rows

OTHER_CELLS = 2000
"""Where fewer cells are compared, others at random are read up to this many: they show which genes vary."""

MOST_TRAINING = 10_000
"""Number of cells that models are trained on at most; of more, these many at random."""

Stratum = tuple[str, int | None, str | None]
"""A side of a contrast, or its cells of a batch, of a sample, or of both."""


@dataclass(frozen=True, eq=False)
class Analysis:
    """One analysis: its options, the cells read from the file, and the contrasts between some of them.

    `labels` are of all cells of the file; `place` are the cells compared among those read, ``(compared,)``; `rows` are
    the observations of all cells read, the counts followed by one-hot batches or the covariates of a given model.
    """

    options: DEOptions
    labels: Labels
    scvi: Scvi | None
    counts: data.Counts
    rows: Rows
    n_batches: int
    place: np.ndarray
    contrasts: list[Contrast]
    warnings: list[str]
    model_name: str | None = None
    device: str = "cpu"
    engine: Engine | None = None
    progress: Progress = field(default=silent, repr=False)

    @property
    def n_genes(self) -> int:
        """Number of genes compared."""
        return len(self.counts.genes)

    @property
    def file_rows(self) -> np.ndarray:
        """The rows of the file of the cells compared. Shapes: ``-> (compared,)``."""
        return self.counts.cells[self.place]

    @cached_property
    def read_labels(self) -> Labels:
        """Labels of the cells read."""
        return self.labels.take(self.counts.cells)

    @cached_property
    def compared(self) -> Rows:
        """Observations of the cells compared, which the indices of contrasts refer to."""
        return self.rows if len(self.place) == self.rows.n else self.rows.select(torch.from_numpy(self.place))

    @cached_property
    def digest(self) -> str:
        """A hash of the counts, genes and labels that are used."""
        sha, labels = hashlib.sha256(self.counts.digest.encode()), self.read_labels
        sha.update(np.ascontiguousarray(self.counts.cells).tobytes())
        for names in (self.counts.genes, labels.group, labels.within, labels.sample, labels.batch):
            sha.update("\0".join(map(str, [] if names is None else names)).encode())
        return sha.hexdigest()

    def side_counts(self) -> SideCounts:
        """The counts of every side of the contrasts, in one pass over the cells compared."""
        batches = self._batches()
        strata = _strata(self.contrasts, batches)
        return SideCounts(group_proportions(self.compared, self.n_genes, strata), len(batches))

    def _batches(self) -> list[Tensor]:
        """Masks of the cells of each batch; one batch of all where none are named. Shapes: ``(compared,)`` each."""
        if self.labels.batch is None:
            return [torch.ones(len(self.place), dtype=torch.bool)]
        batch = self.labels.batch[self.file_rows]
        return [torch.from_numpy((batch == name).astype(bool)) for name in sorted(set(batch) - {None})]


class SideCounts(NamedTuple):
    """Proportions of the genes by side, batch and sample."""

    proportions: Mapping[Stratum, GroupProportions]
    n_batches: int

    def side(self, side: Side) -> GroupProportions:
        """The proportions in all cells of a side."""
        return self.proportions[side.name, None, None]

    def likelihood(self, contrast: Contrast) -> LfcLikelihood:
        """The likelihood of a contrast, by cells, by samples, or by samples that have cells on both sides."""
        a, b = contrast.a, contrast.b
        if not a.samples:
            pairs = [(self._parts(a, i), self._parts(b, i)) for i in range(self.n_batches)]
            return cells_likelihood([(x[0], y[0]) for x, y in pairs if x and y])
        if contrast.paired:
            samples = sorted(a.samples)
            return paired_likelihood(
                [(self.proportions[a.name, None, s], self.proportions[b.name, None, s]) for s in samples]
            )
        sides = [tuple(self._parts(side, i, *sorted(side.samples)) for side in (a, b)) for i in range(self.n_batches)]
        return samples_likelihood([(x, y) for x, y in sides if x and y])

    def _parts(self, side: Side, batch: int, *samples: str) -> list[GroupProportions]:
        """The side in a batch, or those of its samples that are in it."""
        names: list[Stratum] = [(side.name, batch, sample) for sample in samples or (None,)]
        return [self.proportions[name] for name in names if name in self.proportions]


def _strata(contrasts: Sequence[Contrast], batches: Sequence[Tensor]) -> dict[Stratum, Tensor]:
    """Sets of at least two cells whose proportions are needed. Shapes: ``batches (compared,)`` masks."""
    strata: dict[Stratum, Tensor] = {}
    for side in (side for c in contrasts for side in (c.a, c.b)):
        strata[side.name, None, None] = side.cells
        strata |= {(side.name, None, sample): cells for sample, cells in side.samples.items()}
        for i, mask in enumerate(batches):
            strata[side.name, i, None] = side.cells[mask[side.cells]]
            strata |= {(side.name, i, sample): cells[mask[cells]] for sample, cells in side.samples.items()}
    return {name: cells for name, cells in strata.items() if len(cells) >= FEWEST_IN_BATCH}


# ------------------------------------------------------------------------------------------------------ reading
def read(adata: Any, options: DEOptions, labels: Labels, scvi: Scvi | None, **how: Any) -> Analysis:
    """Read the counts of the cells compared, and of some others; `how` are the other fields of `Analysis`."""
    warnings: list[str] = []
    wanted = contrasts(labels, options.pairs, warnings)
    device = torch.device(how.get("device", "cpu"))
    if scvi is not None:
        counts, rows = _cells_of_model(scvi, adata, wanted, options.gene_symbols, device)
        n_batches = 0
    else:
        counts, rows, n_batches = _cells(adata, options, labels, wanted, device)
    read_labels = labels.take(counts.cells)
    place = compared_cells(contrasts(read_labels, options.pairs, []))
    made = contrasts(read_labels.take(place), options.pairs, [])
    lost = {c.name for c in wanted} - {c.name for c in made}
    warnings += [f"left out: {name}, because too few of its cells have counts." for name in sorted(lost)]
    return Analysis(options, labels, scvi, counts, rows, n_batches, place, made, warnings, **how)


def _cells(
    adata: Any, options: DEOptions, labels: Labels, wanted: Sequence[Contrast], device: torch.device
) -> tuple[data.Counts, Rows, int]:
    """Counts of the cells compared and of others, with one-hot batches behind them, and the number of batches."""
    unlabelled = np.array([label is None for label in labels.group]) if options.borrow else None
    most = MOST_TRAINING if options.borrow else OTHER_CELLS
    rows = rows_to_read(wanted, adata.n_obs, most, options.seed, unlabelled)
    counts = data.read_counts(
        adata,
        rows,
        _group_numbers(labels.group[rows], wanted),
        layer=options.layer,
        min_cells=options.min_cells,
        n_top_genes=options.n_top_genes,
        keep_genes=options.keep_genes,
        gene_symbols=options.gene_symbols,
    )
    if labels.batch is None:
        return counts, counts.rows(device), 0
    one_hot, names = data.one_hot(labels.batch[counts.cells], role="batch_key")
    return counts, counts.rows(device, one_hot), len(names)


def _group_numbers(labels: np.ndarray, wanted: Sequence[Contrast]) -> np.ndarray:
    """A number for each group that is compared, negative for cells of others. Shapes: ``(cells,) -> (cells,)``."""
    rest = any(c.rest for c in wanted)
    names = sorted({g for c in wanted for g in (c.group_a, c.group_b)} | set(labels if rest else ()) - {None})
    number = {name: i for i, name in enumerate(names)}
    return np.array([number.get(label, -1) for label in labels])


def _cells_of_model(
    model: Scvi, adata: Any, wanted: Sequence[Contrast], symbols: str | None, device: torch.device
) -> tuple[data.Counts, Rows]:
    """The cells compared as a given model takes them: all its genes, followed by its covariates."""
    rows, n_genes = rows_to_read(wanted, adata.n_obs, 0, 0), model.columns["X"]
    blocks = np.array_split(rows, -(-len(rows) // data.BLOCK))
    matrix: Any = sparse.vstack(
        [sparse.csr_matrix(model.observations(adata, block).cpu().numpy()) for block in blocks], format="csr"
    )
    warnings: list[str] = []
    genes, ids = data.gene_names(adata, symbols, warnings), [str(name) for name in adata.var_names]
    counts = data.from_matrix(matrix[:, :n_genes], genes, rows, f"all {n_genes} of the model")
    model.to(device)
    return replace(counts, ids=ids if symbols else None, warnings=warnings), sparse_rows(matrix, device)
