"""The data that all stages of an analysis share: the cells read, the contrasts, and the counts of every side."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
from scipy import sparse
from torch import Tensor

from vaerdict.core import DataError, Progress, SettingError, VaerdictError, silent
from vaerdict.de import data
from vaerdict.de.contrasts import (
    FEWEST_IN_BATCH,
    Contrast,
    Labels,
    Side,
    compared_cells,
    contrasts,
    others_at_random,
    rows_to_read,
)
from vaerdict.de.counts_likelihood import (
    LfcLikelihood,
    SampleDesign,
    cells_likelihood,
    paired_likelihood,
    samples_likelihood,
)
from vaerdict.de.design import Covariates, adjusted, fit_cell_effects, scaled_by_effects
from vaerdict.de.options import ENOUGH_CELLS, FEWEST_GENES, FEWEST_SEEN, MODEL_GENES, SHARE_SEEN, DEOptions
from vaerdict.de.sums import CellGroups, GroupSums
from vaerdict.engines import Engine
from vaerdict.models.scvi import Scvi
from vaerdict.training.data import Rows, sparse_rows

OTHER_CELLS = 2000
"""Where fewer cells are compared, others at random are read up to this many: they show which genes vary."""

MOST_TRAINING = 10_000
"""Number of cells that models are trained on at most; of more, these many at random."""

MOST_OTHER = 10_000
"""Cells that are not compared from which a prior is learned at most; of more, these many at random."""

Stratum = tuple[str, str | None, str | None]
"""A side of a contrast, or its cells of a batch, of a sample, or of both."""


class ModelCells(NamedTuple):
    """The cells and genes of a model: counts, and observations with one-hot batches or the covariates of a given model.

    `place` are the cells compared among them. Shapes: ``genes (n,)`` columns of the file, ``place (compared,)``.
    """

    counts: data.Counts
    rows: Rows
    n_batches: int
    genes: np.ndarray
    place: np.ndarray


class GeneChoice(NamedTuple):
    """Genes of a contrast, as columns of the file: those expressed, those tested, and the cells they are seen in.

    Shapes: ``expressed (e,)``, ``tested (t,)``, ``seen (all genes,)``; `least` is the number of cells needed.
    """

    expressed: np.ndarray
    tested: np.ndarray
    seen: np.ndarray
    least: int


@dataclass(frozen=True, eq=False)
class Analysis:
    """One analysis: its options, the cells compared, the contrasts between them, and sums of the counts of all genes.

    `labels` are of all cells of the file; `cells` are the rows of the cells compared, ``(compared,)``, to which the
    indices of contrasts refer; `source` reads their counts again.
    """

    options: DEOptions
    labels: Labels
    scvi: Scvi | None
    source: Source
    scan: data.Scan[Stratum]
    cells: np.ndarray
    contrasts: list[Contrast]
    covariates: Covariates
    selection: str
    chosen: np.ndarray | None
    warnings: list[str]
    modelled: ModelCells | None
    model_name: str | None = None
    device: str = "cpu"
    engine: Engine | None = None
    progress: Progress = field(default=silent, repr=False)

    # --------------------------------------------------------------------------------------------- of a model
    @property
    def model_cells(self) -> ModelCells:
        """The cells and genes of the model, which there is."""
        assert self.modelled is not None
        return self.modelled

    @property
    def rows(self) -> Rows:
        """Observations of all cells that the model reads."""
        return self.model_cells.rows

    @property
    def n_genes(self) -> int:
        """Number of genes of the model."""
        return len(self.model_cells.genes)

    @property
    def n_batches(self) -> int:
        """Number of batches that the model knows."""
        return self.model_cells.n_batches

    @property
    def place(self) -> np.ndarray:
        """The cells compared among those that the model reads. Shapes: ``-> (compared,)``."""
        return self.model_cells.place

    @cached_property
    def read_labels(self) -> Labels:
        """Labels of the cells that the model reads."""
        return self.labels.take(self.model_cells.counts.cells)

    @cached_property
    def compared(self) -> Rows:
        """Observations of the cells compared, which the indices of contrasts refer to."""
        place = self.model_cells.place
        return self.rows if len(place) == self.rows.n else self.rows.select(torch.from_numpy(place))

    # -------------------------------------------------------------------------------------------- of the counts
    @cached_property
    def digest(self) -> str:
        """A hash of the counts, genes and labels that are used."""
        sha, labels = hashlib.sha256(self.scan.digest.encode()), self.labels.take(self.cells)
        sha.update(np.ascontiguousarray(self.cells).tobytes())
        sha.update(np.ascontiguousarray(self.covariates.values[self.cells]).tobytes())
        for names in (self.source.names, labels.group, labels.within, labels.sample, labels.batch):
            sha.update("\0".join(map(str, [] if names is None else names)).encode())
        return sha.hexdigest()

    def side(self, side: Side) -> GroupSums:
        """The sums over all cells of a side."""
        return self.scan.sums[side.name, None, None]

    def others(self, contrast: Contrast) -> np.ndarray:
        """Rows of the file that are not compared in a contrast, at most `MOST_OTHER`. Shapes: ``-> (n,)``."""
        compared = self.cells[torch.cat([contrast.a.cells, contrast.b.cells]).numpy()]
        return others_at_random(compared, len(self.labels.group), MOST_OTHER, self.options.seed)

    def genes(self, contrast: Contrast) -> GeneChoice:
        """The genes of a contrast: which are expressed is asked of both sides together, whatever their labels."""
        a, b = self.side(contrast.a), self.side(contrast.b)
        seen, fewest = (a.seen + b.seen).numpy(), min(a.n_cells, b.n_cells)
        least = self.options.min_cells or max(FEWEST_SEEN, min(ENOUGH_CELLS, round(SHARE_SEEN * fewest)))
        expressed = np.flatnonzero(seen >= least)
        if self.modelled is not None:
            return GeneChoice(expressed, self.modelled.genes, seen, least)
        tested = expressed if self.chosen is None else np.intersect1d(expressed, self.chosen)
        if len(tested) < FEWEST_GENES:
            raise DataError(
                f"{len(tested)} genes are seen in at least {least} of the cells of {contrast.name}; at least "
                f"{FEWEST_GENES} are needed: choose min_cells= below {least}, or compare groups of more cells."
            )
        return GeneChoice(expressed, tested, seen, least)

    def likelihood(self, contrast: Contrast, genes: np.ndarray) -> LfcLikelihood:
        """The likelihood of some genes, by cells, by samples, or by samples that have cells on both sides."""
        a, b, columns = contrast.a, contrast.b, torch.from_numpy(genes)
        if contrast.paired:
            names = sorted(a.samples)
            return paired_likelihood([(self.sums(a, None, s, columns), self.sums(b, None, s, columns)) for s in names])
        if a.samples:
            units, design = self._sample_design(contrast)
            return samples_likelihood([self.scan.sums[unit].take(columns) for unit in units], design)
        pairs = [
            (self.sums(a, batch, None, columns), self.sums(b, batch, None, columns)) for batch in self.batches(a, b)
        ]
        if not self.covariates.names:
            return cells_likelihood(pairs)
        return self._adjusted_likelihood(contrast, genes, pairs)

    def sums(self, side: Side, batch: str | None, sample: str | None, genes: Tensor) -> GroupSums:
        """The sums over the cells of a side, of its batch and sample, of some genes."""
        return self.scan.sums[side.name, batch, sample].take(genes)

    def batches(self, a: Side, b: Side) -> list[str | None]:
        """The batches that hold enough cells of both sides."""
        return [name for name in self._names if name is None or all(self._enough(side, name) for side in (a, b))]

    @cached_property
    def _names(self) -> Sequence[str | None]:
        """The names of all batches; one of all cells where none are named."""
        return [None] if self.labels.batch is None else sorted(set(self.labels.batch[self.cells]) - {None})

    def _enough(self, side: Side, batch: str | None, sample: str | None = None) -> bool:
        name = (side.name, batch, sample)
        return name in self.scan.sums and self.scan.sums.n_cells(name) >= FEWEST_IN_BATCH

    def check_covariates(self, contrast: Contrast) -> None:
        """Refuse covariates that a contrast cannot be adjusted for."""
        if not self.covariates.names:
            return
        if contrast.paired:
            raise SettingError(
                f"all samples of {contrast.name} have cells on both sides and are pairs, which leave nothing to adjust "
                "that is the same in a pair; leave covariates out."
            )
        self._sample_design(contrast) if contrast.a.samples else self._cell_design(contrast)

    def _sample_design(self, contrast: Contrast) -> tuple[list[Stratum], SampleDesign]:
        """The samples compared, in each batch that holds samples of both sides, and their design."""
        units, batches, first, values = list[Stratum](), [], [], []
        sides = (contrast.a, contrast.b)
        held = [[[s for s in sorted(side.samples) if self._enough(side, b, s)] for side in sides] for b in self._names]
        both = [(batch, samples) for batch, samples in zip(self._names, held, strict=True) if all(samples)]
        for number, (batch, samples) in enumerate(both):
            for side, sample in ((side, s) for side, own in zip(sides, samples, strict=True) for s in own):
                units.append((side.name, batch, sample))
                batches.append(number)
                first.append(side is contrast.a)
                values.append(self.covariates.values[self.cells[self.members(side, batch, sample)]].mean(0))
        design = SampleDesign(torch.tensor(batches), torch.tensor(first), torch.from_numpy(np.array(values)))
        if not self.covariates.names:
            return units, design
        weight = torch.ones(len(units), dtype=torch.float64)
        columns, _ = self.covariates.check(contrast.name, design.covariates, design.first, design.batch, weight)
        return units, replace(design, covariates=columns)

    def members(self, side: Side, batch: str | None, sample: str | None) -> np.ndarray:
        """The cells of a side, of its batch and sample. Shapes: ``-> (n,)`` indices of the cells compared."""
        cells = (side.cells if sample is None else side.samples[sample]).numpy()
        return cells if batch is None else cells[self.labels.batch[self.cells[cells]] == batch]  # type: ignore[index]

    def _adjusted_likelihood(
        self, contrast: Contrast, genes: np.ndarray, pairs: Sequence[tuple[GroupSums, GroupSums]]
    ) -> LfcLikelihood:
        """With cells as replicates and covariates: libraries adjusted for their effects on each gene."""
        cells, number, values, left = self._cell_design(contrast)
        library, n_strata = torch.from_numpy(self.scan.totals[cells]), 2 * len(pairs)
        totals = torch.stack([part.total for pair in pairs for part in pair])
        weighted = sum(
            (torch.from_numpy(block[:, genes].T @ values[start : start + block.shape[0]].numpy()))
            for start, block in _starts(self.source.blocks(self.cells[cells]))
        )
        assert isinstance(weighted, Tensor)
        effects = fit_cell_effects(totals, weighted, values, library, number)
        groups = CellGroups({i: np.flatnonzero(number == i) for i in range(n_strata)}, len(cells))
        cross = groups.crossed(
            scaled_by_effects(self.source.blocks(self.cells[cells]), genes, effects), library.numpy(), len(genes)
        )
        parts = [
            adjusted(part, effects, torch.from_numpy(groups.members[i]), library, cross[i])
            for i, part in enumerate(part for pair in pairs for part in pair)
        ]
        return cells_likelihood(list(zip(parts[::2], parts[1::2], strict=True)), left)

    def _cell_design(self, contrast: Contrast) -> tuple[np.ndarray, Tensor, Tensor, float]:
        """The cells compared in the order of the file, the number of each one's side and batch, and covariates.

        Shapes: ``-> (n,), (n,), (n, columns)``, and the share of the information that the covariates leave.
        """
        members = [
            self.members(side, batch, None)
            for batch in self.batches(contrast.a, contrast.b)
            for side in (contrast.a, contrast.b)
        ]
        order, stratum = np.concatenate(members), np.repeat(np.arange(len(members)), list(map(len, members)))
        rows = np.argsort(order)
        cells, number = order[rows], torch.from_numpy(stratum[rows])
        values = torch.from_numpy(self.covariates.values[self.cells[cells]])
        library = torch.from_numpy(self.scan.totals[cells])
        return cells, number, *self.covariates.check(contrast.name, values, number % 2 == 0, number // 2, library)


def _reported(blocks: Iterator[Any], n_cells: int, progress: Progress) -> Iterator[Any]:
    """The blocks, with the number of cells read so far reported."""
    for start, block in _starts(blocks):
        yield block
        progress(start + block.shape[0], n_cells, "cells read")


def _starts(blocks: Iterator[Any]) -> Iterator[tuple[int, Any]]:
    start = 0
    for block in blocks:
        yield start, block
        start += block.shape[0]


def _strata(contrasts: Sequence[Contrast], batch: np.ndarray | None) -> dict[Stratum, np.ndarray]:
    """The sets of cells whose sums are needed. Shapes: ``batch (cells,)`` labels of the cells compared."""
    strata: dict[Stratum, np.ndarray] = {}
    for side in (side for c in contrasts for side in (c.a, c.b)):
        parts = {None: side.cells.numpy()} | {sample: cells.numpy() for sample, cells in side.samples.items()}
        strata |= {(side.name, None, sample): cells for sample, cells in parts.items()}
        for name in [] if batch is None else sorted(set(batch[side.cells.numpy()]) - {None}):
            strata |= {(side.name, name, sample): cells[batch[cells] == name] for sample, cells in parts.items()}  # type: ignore[index]
    return strata


# ------------------------------------------------------------------------------------------------------ reading
@dataclass(frozen=True, eq=False)
class Source:
    """Where counts are read from: a file or data set, or the observations of a given model; `names` of all genes.

    `ids` are the var_names of genes that the table calls otherwise.
    """

    adata: Any
    layer: str | None
    names: list[str]
    ids: list[str] | None
    model: Scvi | None = None

    def blocks(self, rows: np.ndarray) -> Iterator[Any]:
        """Counts of all genes at rows of the file in rising order, some cells at a time."""
        if self.model is None:
            yield from data.count_blocks(self.adata, self.layer, rows)
            return
        for block in self.observations(rows):
            yield block[:, : self.model.columns["X"]].astype(np.float64)

    def observations(self, rows: np.ndarray) -> Iterator[Any]:
        """Rows as the given model takes them: all its genes, followed by its covariates."""
        assert self.model is not None
        for start in range(0, len(rows), data.BLOCK):
            observed = self.model.observations(self.adata, rows[start : start + data.BLOCK])
            yield sparse.csr_matrix(observed.cpu().numpy())

    def counts_of(self, rows: np.ndarray, genes: np.ndarray) -> Any:
        """Counts of some genes at rows of the file in rising order. Shapes: ``-> (cells, genes)``, sparse."""
        return sparse.vstack([block[:, genes] for block in self.blocks(rows)], format="csr")


def read(adata: Any, options: DEOptions, labels: Labels, scvi: Scvi | None, **how: Any) -> Analysis:
    """Read the counts of the cells compared once; `how` are the other fields of `Analysis`."""
    warnings: list[str] = []
    covariates = Covariates.read(adata, options.covariates)
    wanted = contrasts(labels, options.pairs, warnings)
    device = torch.device(how.get("device", "cpu"))
    names = data.gene_names(adata, options.gene_symbols, warnings)
    ids = None if options.gene_symbols is None else [str(name) for name in adata.var_names]
    source = Source(adata, options.layer, names, ids, scvi)
    cells = compared_cells(wanted)
    made = contrasts(labels.take(cells), options.pairs, [])
    batch = None if labels.batch is None else labels.batch[cells]
    missing = 0 if batch is None else sum(name is None for name in batch)
    if missing:
        raise DataError(f"{missing} of {len(cells)} cells have no batch_key; label them or remove them first.")
    groups = CellGroups(_strata(made, batch), len(cells))
    blocks = _reported(source.blocks(cells), len(cells), how.get("progress", silent))
    scanned = data.scan(blocks, groups, len(names))
    counted = scanned.totals > 0
    if not counted.all():
        warnings.append(f"{int((~counted).sum())} of {len(cells)} cells have no counts; left out.")
        cells, kept = cells[counted], contrasts(labels.take(cells[counted]), options.pairs, [], " with counts")
        lost = {c.name for c in made} - {c.name for c in kept}
        warnings += [f"left out: {name}, because too few of its cells have counts." for name in sorted(lost)]
        made, scanned = kept, scanned._replace(totals=scanned.totals[counted])
    has_model = scvi is not None or options.trains_model
    base = Analysis(options, labels, scvi, source, scanned, cells, made, covariates, "", None, warnings, None, **how)
    return _with_genes(_estimable(base), has_model, device)


def _estimable(base: Analysis) -> Analysis:
    """The analysis with the contrasts that can be estimated; the others are left out with a warning."""
    made: list[Contrast] = []
    errors: list[VaerdictError] = []
    for contrast in base.contrasts:
        try:
            base.genes(contrast)
            base.check_covariates(contrast)
            made.append(contrast)
        except VaerdictError as error:
            errors.append(error)
    if not made:
        raise errors[0]
    base.warnings.extend(f"left out: {error}" for error in errors)
    return replace(base, contrasts=made)


def _with_genes(base: Analysis, has_model: bool, device: torch.device) -> Analysis:
    """The analysis with the genes to test chosen, and with what a model reads where there is one."""
    options, source, scvi = base.options, base.source, base.scvi
    choices = [base.genes(contrast) for contrast in base.contrasts]
    expressed, least = np.unique(np.concatenate([c.expressed for c in choices])), sorted({c.least for c in choices})
    required = data.columns_of(options.keep_genes, source.names)
    rare = [source.names[g] for g in required if g not in expressed]
    needed = " to ".join(str(n) for n in dict.fromkeys((least[0], least[-1])))
    if rare:
        base.warnings.append(f"seen in fewer than {needed} of the cells compared and not tested: {data.listed(rare)}.")
    selection = f"{len(expressed)} of {len(source.names)} genes: seen in at least {needed} of the cells compared"
    if scvi is not None:
        every = np.arange(len(source.names))
        scvi.to(device)
        given: Any = sparse.vstack(list(source.observations(base.cells)), format="csr")
        counts = data.from_matrix(given[:, : len(every)], source.names, base.cells)
        modelled = ModelCells(counts, sparse_rows(given, device), 0, every, np.arange(len(base.cells)))
        return replace(base, selection=f"all {len(every)} of the model", modelled=modelled)
    n_top = options.n_top_genes or (MODEL_GENES if has_model else None)
    if n_top is None:
        return replace(base, selection=selection)
    rows, scanned = _rows_for_choice(base)
    chosen, how = data.variable_genes(scanned, expressed, lambda: source.blocks(rows), n_top)
    chosen = np.union1d(chosen, np.intersect1d(required, expressed))
    selection = selection.replace(f"{len(expressed)} of", f"{len(chosen)} of", 1) + how
    if not has_model:
        return replace(base, selection=selection, chosen=chosen)
    return replace(base, selection=selection, modelled=_model_cells(base, rows, chosen, device))


def _rows_for_choice(base: Analysis) -> tuple[np.ndarray, data.Scan[Any]]:
    """The rows of the cells compared and of others, which show what varies and which a model learns from."""
    rows = rows_to_read(base.cells, len(base.labels.group), OTHER_CELLS, base.options.seed)
    if len(rows) == len(base.cells):
        return rows, base.scan
    nothing = CellGroups[str]({}, len(rows))
    return rows, data.scan(base.source.blocks(rows), nothing, len(base.source.names))


def _model_cells(base: Analysis, rows: np.ndarray, genes: np.ndarray, device: torch.device) -> ModelCells:
    """Counts of a model's cells and genes with one-hot batches behind them.

    Cells without counts in these genes are left out of the training, and of the comparison.
    """
    counts = data.read_counts(base.source.adata, rows, genes, layer=base.options.layer)
    lost = np.setdiff1d(base.cells, counts.cells)
    if len(lost):
        raise DataError(
            f"{len(lost)} of the cells compared have no counts in the {len(genes)} genes of the model; give more genes "
            "(n_top_genes), or remove these cells."
        )
    place = np.searchsorted(counts.cells, base.cells)
    if base.labels.batch is None:
        return ModelCells(counts, counts.rows(device), 0, genes, place)
    one_hot, names = data.one_hot(base.labels.batch[counts.cells], role="batch_key")
    return ModelCells(counts, counts.rows(device, one_hot), len(names), genes, place)
