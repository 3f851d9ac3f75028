"""Differential expression from an AnnData to a table of genes: what users call."""

from __future__ import annotations

import time
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from vaerdict.core import Progress, silent
from vaerdict.de import analysis, data, tables
from vaerdict.de.analysis import Analysis, SideCounts
from vaerdict.de.contrasts import Labels, pairs_to_compare
from vaerdict.de.effects import ESTIMANDS, INTERVAL, Effect
from vaerdict.de.options import DEOptions, Pair
from vaerdict.de.result import DEResult, kept_draws
from vaerdict.de.shrinkage import posterior_draws
from vaerdict.de.splitting import cluster_warnings, with_testing_layer
from vaerdict.de.stage_cache import StageCache
from vaerdict.de.verdict import verdict
from vaerdict.engines import Engine, started
from vaerdict.io import check_folder
from vaerdict.optional import require
from vaerdict.options import accepts


@accepts(DEOptions)
def differential_expression(
    adata: Any,
    groupby: str,
    group_a: str | None = None,
    group_b: str | None = None,
    *,
    pairs: Sequence[Pair] | None = None,
    model: Any = None,
    device: str = "cpu",
    engine: Engine | None = None,
    progress: Progress = silent,
    out: str | Path | None = None,
    **options: Any,
) -> DEResult:
    """Find the genes that differ between groups of cells, with a calibrated false discovery rate.

    Genes are called from the raw counts: a quasi-likelihood per gene, over-dispersed between cells or samples, with
    adaptive shrinkage across genes. A gene is differentially expressed where its |log2 fold change| is at least
    `delta`. No model is trained unless one is asked for (`check_model`, `borrow`, ``scale="pair"``, or `model`).

    Parameters
    ----------
    adata
        AnnData of raw counts, in memory or backed, or the path of an .h5ad file.
    groupby
        Column of obs that holds the groups.
    group_a, group_b
        The groups to compare, the first over the second. Without `group_b`, `group_a` against all other cells; without
        both, every group against all other cells.
    pairs
        Several pairs of groups in place of `group_a` and `group_b`; None stands for all other cells.
    model
        A fitted scvi-tools model (SCVI or LinearSCVI) to compare with the counts, or the folder it was saved to.
        Counts are compared within its registered batches unless `batch_key` names others.
    device
        Where a model is trained and used: ``"cpu"`` or ``"cuda"``.
    engine
        What blocks of cells are worked on by: threads of this process by default, or any of `vaerdict.engines`. The
        table does not depend on it.
    progress
        Called with the work done, the total and its name.
    out
        A folder for the results. Finished stages of a model are stored there too, and a run that was stopped goes on.
    {options}

    Returns
    -------
    DEResult
        The table of genes, its verdict, and how to save, plot and export them.

    Raises
    ------
    SettingError, DataError
        If an option, a name or the data cannot be used; the message says what to do.

    Notes
    -----
    Memory is bounded. Counts of a backed file are kept as long as the non-zero ones of the genes compared take at most
    128 MB, and are read again otherwise; a `layer` is in memory whole. At most 10,000 cells are dense while models
    train, and 256 cells per worker otherwise.

    Examples
    --------
    >>> result = differential_expression(adata, "cell_type", "B", "CD14+ Mono")  # doctest: +SKIP
    >>> result.discoveries().head()  # doctest: +SKIP
    >>> result.report("de")  # doctest: +SKIP
    """
    adata = data.open_data(adata) if isinstance(adata, (str, Path)) else adata
    settings = with_testing_layer(adata, DEOptions(groupby=groupby, **options))
    settings.check_training(has_model=model is not None)
    check_folder(out, "de")
    scvi, model_name = None, None
    if model is not None:
        from vaerdict.de.model.stage import as_scvi

        adata = adata.to_memory() if getattr(adata, "isbacked", False) else adata
        scvi, model_name = as_scvi(model, adata), _name(model)
    labels = _labels(adata, settings)
    if scvi is not None and settings.batch_key is None:
        labels = replace(labels, batch=scvi.batches(adata))
    settings = replace(settings, pairs=tuple(pairs_to_compare(labels, group_a, group_b, pairs)))
    how = {"model_name": model_name, "device": device, "engine": engine, "progress": progress}
    with started(engine):
        result = _run(adata, settings, labels, scvi, None if out is None else Path(out), how)
    if out is not None:
        result.save(out)
    return result


def _name(model: Any) -> str:
    return Path(model).name if isinstance(model, (str, Path)) else type(model).__name__


def _labels(adata: Any, options: DEOptions) -> Labels:
    keys = {"within": options.within, "sample_key": options.sample_key, "batch_key": options.batch_key}
    columns = (None if key is None else data.column(adata, key, role=role) for role, key in keys.items())
    return Labels(options.groupby, data.column(adata, options.groupby, role="groupby"), *columns)


# ------------------------------------------------------------------------------------------------------- stages
def _run(adata: Any, options: DEOptions, labels: Labels, scvi: Any, out: Path | None, how: dict[str, Any]) -> DEResult:
    """All stages of an analysis."""
    timer = _Timer()
    with timer("reading"):
        cells = analysis.read(adata, options, labels, scvi, **how)
    settings = asdict(options) | {"model": how["model_name"]}
    cache = StageCache.of(out, {"settings": settings, "data": cells.digest, "model": _digest(scvi)})
    with timer("counting"):
        counts = cells.side_counts()
    model = None
    if scvi is not None or options.trains_model:
        from vaerdict.de.model.stage import run_model

        with timer("model"):
            model = run_model(cells, cache)
    with timer("comparing"):
        effects, shares = _effects(cells, counts, model)
        made = [
            tables.gene_table(c, effect, counts, options) for c, effect in zip(cells.contrasts, effects, strict=True)
        ]
        called = tables.call_genes(made, options.level)
        rows = [
            tables.contrast_row(contrast, effect, table, options) | share
            for contrast, effect, table, share in zip(cells.contrasts, effects, called, shares, strict=True)
        ]
        extra = model.columns if model is not None else [{} for _ in cells.contrasts]
        table = tables.frame(
            cells.contrasts, [a | b for a, b in zip(called, extra, strict=True)], cells.counts.genes, cells.counts.ids
        )
    record = None if model is None else model.record
    results = {
        "experiment": "de",
        "settings": settings,
        "seed": options.seed,
        "seconds": timer.seconds,
        "scale": options.scale,
        "scale_meaning": ESTIMANDS[options.scale].target,
        "interval": INTERVAL,
        "genes_tested": cells.counts.selection,
        "verdict": verdict(rows, replicates="samples" if options.sample_key else "cells", model=record),
        "contrasts": rows,
        "model": record,
        "truth": None,
        "warnings": _warnings(cells),
    }
    obs, latent = _obs(adata, cells), None if model is None else model.latent
    return DEResult(table, results, obs, cells.file_rows, latent, cells.digest, kept_draws(effects))


def _effects(cells: Analysis, counts: SideCounts, model: Any) -> tuple[list[Effect], list[dict[str, Any]]]:
    """Draws of the fold changes of every contrast by whoever decides its genes, and the shares of the model."""
    options = cells.options
    if ESTIMANDS[options.scale].pairs:
        shares: list[dict[str, Any]] = [{"share_by_model": None, "share_contradicted": None} for _ in cells.contrasts]
        return model.effects, shares
    effects, shares = [], []
    for number, contrast in enumerate(cells.contrasts):
        likelihood, by_model, contradicted = counts.likelihood(contrast), 0.0, None
        if model is not None:
            likelihood, by_model, contradicted = model.combine(cells, number, likelihood)
        # contrasts that share a group must not share their noise
        seed = zlib.crc32(f"{options.seed} {contrast.name}".encode())
        lfc = ESTIMANDS[options.scale].of(posterior_draws(likelihood, options.draws, seed=seed))
        effects.append(Effect(lfc, torch.full_like(lfc[0], float(options.draws))))
        shares.append({"share_by_model": by_model, "share_contradicted": contradicted})
    return effects, shares


def _digest(scvi: Any) -> str | None:
    """A hash of the weights of a given model."""
    from vaerdict.training.checkpoint import digest

    return None if scvi is None else digest(scvi.state_dict().values())


def _obs(adata: Any, cells: Analysis) -> Any:
    """The labels that were used of the cells compared, as a pandas data frame."""
    pandas, options, labels = require("pandas", "bio"), cells.options, cells.labels.take(cells.file_rows)
    keys = (options.groupby, options.within, options.sample_key, options.batch_key)
    named = zip(keys, (labels.group, labels.within, labels.sample, labels.batch), strict=True)
    columns = {key: pandas.Categorical(values) for key, values in named if key is not None}
    return pandas.DataFrame(columns, index=adata.obs_names[cells.file_rows].astype(str))


def _warnings(cells: Analysis) -> list[str]:
    options, labels = cells.options, cells.labels
    columns = {options.groupby: labels.group, options.within: labels.within}
    missing = {key: sum(label is None for label in values) for key, values in columns.items() if values is not None}
    lost = [f"{n} cells have no {key} and were not compared." for key, n in missing.items() if n]
    clusters = [] if options.clustered else cluster_warnings(options.groupby, labels.group)
    return [*lost, *clusters, *cells.counts.warnings, *cells.warnings]


class _Timer:
    """Seconds by stage."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, stage: str) -> Iterator[None]:
        started = time.perf_counter()
        yield
        self.seconds[stage] = time.perf_counter() - started
