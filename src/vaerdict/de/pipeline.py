"""Differential expression from an AnnData to a table of genes: what users call."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from functools import cache as cached
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from vaerdict.core import Progress, SettingError, silent
from vaerdict.de import analysis, data, tables
from vaerdict.de.analysis import Analysis, GeneChoice
from vaerdict.de.cells import cells_to_show
from vaerdict.de.contrasts import Contrast, Labels, pairs_to_compare
from vaerdict.de.effects import (
    ESTIMANDS,
    INTERVAL,
    GeneTable,
    node_values,
    summarise_draws,
    summarise_posterior,
)
from vaerdict.de.options import DEOptions, Pair
from vaerdict.de.result import DEResult
from vaerdict.de.shrinkage import (
    WIDTHS,
    LfcPosterior,
    NodeLikelihood,
    PosteriorOfChange,
    balance_of,
    centre_of,
    fit_shares,
    well_known,
)
from vaerdict.de.splitting import cluster_warnings, with_testing_layer
from vaerdict.de.stage_cache import FORMAT, StageCache
from vaerdict.de.verdict import most_shift, verdict
from vaerdict.engines import Engine, started
from vaerdict.optional import require
from vaerdict.options import accepts
from vaerdict.runs import RunFolder

_WIDE_PRIOR = torch.eye(len(WIDTHS), dtype=torch.float64)[-1]
"""Without shrinkage: the widest normal alone, which hardly moves a gene. Of a gene that is unseen in a group the
likelihood does not fall on one side, and a flat prior would leave its interval without an end."""


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
    force: bool = False,
    **options: Any,
) -> DEResult:
    """Find the genes that differ between groups of cells, with a calibrated false discovery rate.

    All expressed genes are tested from the raw counts: a negative binomial likelihood per gene, with dispersions
    between cells or samples moderated across genes, and adaptive shrinkage of fold changes. Where cells of the file are
    not compared, these show which genes go together, and the other genes tell what a gene with few counts probably does
    (`prior`). A gene is differentially expressed where its absolute log2 fold change is at least `delta`. No model is
    trained or used unless one is asked for (`check_model`, ``prior="model"``, ``scale="pair"``, or `model`).

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
        A fitted scvi-tools model (SCVI or LinearSCVI) to compare with the counts, or the folder it was saved to. With
        ``prior="model"`` it also predicts fold changes; then it should not have seen the cells compared. Counts are
        compared within its registered batches unless `batch_key` names others.
    device
        Where a model is trained and used: ``"cpu"`` or ``"cuda"``.
    engine
        What blocks of cells are worked on by: threads of this process by default, or any of `vaerdict.engines`. The
        table does not depend on it.
    progress
        Called with the work done, the total and its name.
    out
        A folder for the results. Finished stages of a model are stored there too, and a run that was stopped goes on.
        A folder that holds another run or other files is refused.
    force
        Whether to replace the run that `out` holds, or to write beside the files there.
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
    Memory is bounded: the cells of a backed file are read once, 2,048 at a time, and a `layer` is in memory whole. At
    most 10,000 cells are dense while a model trains, and 256 cells per worker otherwise.

    Examples
    --------
    >>> result = differential_expression(adata, "cell_type", "B", "CD14+ Mono")  # doctest: +SKIP
    >>> result.discoveries().head()  # doctest: +SKIP
    >>> result.report("de")  # doctest: +SKIP
    """
    adata = data.open_data(adata) if isinstance(adata, (str, Path)) else adata
    settings = with_testing_layer(adata, DEOptions(groupby=groupby, **options))
    settings.check_training(has_model=model is not None)
    folder = RunFolder.of(out, "de", force=force)
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
        result = _run(adata, settings, labels, scvi, folder, how)
    if out is not None:
        result.save(out)
    return result


def _name(model: Any) -> str:
    return Path(model).name if isinstance(model, (str, Path)) else type(model).__name__


def _labels(adata: Any, options: DEOptions) -> Labels:
    keys = {"within": options.within, "sample_key": options.sample_key, "batch_key": options.batch_key}
    within, sample, batch = (None if k is None else data.column(adata, k, role=role) for role, k in keys.items())
    group = data.column(adata, options.groupby, role="groupby")
    if options.pair_by is None:
        return Labels(options.groupby, group, within, sample, batch)
    pair = data.column(adata, options.pair_by, role="pair_by")
    owners = (
        {} if sample is None else {s: {p for p, own in zip(pair, sample, strict=True) if own == s} for s in set(sample)}
    )
    shared = sorted(str(s) for s, pairs in owners.items() if s is not None and len(pairs) > 1)
    if shared:
        raise SettingError(
            f"sample {shared[0]!r} has several values of {options.pair_by!r}; samples must lie within pairs."
        )
    return Labels(options.groupby, group, within, pair, batch, by_pairs=True)


# ------------------------------------------------------------------------------------------------------- stages
def _run(adata: Any, options: DEOptions, labels: Labels, scvi: Any, folder: RunFolder, how: dict[str, Any]) -> DEResult:
    """All stages of an analysis."""
    timer = _Timer()
    with timer("reading"):
        cells = analysis.read(adata, options, labels, scvi, **how)
    settings = asdict(options) | {"model": how["model_name"]}
    folder.claim({"settings": settings, "data": cells.digest, "model": _digest(scvi), "format": FORMAT})
    cache = StageCache(folder.below("stages"))
    model = None
    if scvi is not None or options.trains_model:
        from vaerdict.de.model.stage import run_model

        with timer("model"):
            model = run_model(cells, cache)
    with timer("comparing"):
        choices = [cells.genes(contrast) for contrast in cells.contrasts]
        compared = _compared(cells, choices, model)
        both = zip(cells.contrasts, compared, choices, strict=True)
        called = tables.call_genes([tables.gene_table(cells, c, s.summary, g.tested) for c, s, g in both], options)
        called = tables.with_prior(called, [each.prior for each in compared], options)
        rows = [
            tables.contrast_row(contrast, table, genes, options) | each.record | tables.prior_row(each.learned, table)
            for contrast, table, genes, each in zip(cells.contrasts, called, choices, compared, strict=True)
        ]
        extra = [{} for _ in called] if model is None else model.columns
        table = tables.frame(cells, [a | b for a, b in zip(called, extra, strict=True)], choices)
    record = None if model is None else model.record
    results = {
        "experiment": "de",
        "settings": settings,
        "seed": options.seed,
        "seconds": timer.seconds,
        "scale": options.scale,
        "scale_meaning": ESTIMANDS[options.scale].target,
        "interval": INTERVAL,
        "shrinkage": options.shrinkage,
        "genes_tested": cells.selection,
        "verdict": verdict(rows, replicates="samples" if labels.sample is not None else "cells", model=record),
        "contrasts": rows,
        "model": record,
        "truth": None,
        "warnings": _warnings(cells),
    }
    obs, latent = _obs(adata, cells), None if model is None else model.latent
    shown = partial(cells_to_show, cells, called, choices, latent, None if model is None else model.khat)
    left_out = tables.not_tested(cells, choices)
    return DEResult(table, results, left_out, obs, cells.cells, latent, cells.digest, cached(shown))


class _Compared(NamedTuple):
    """The fold changes of a contrast, what its counts alone and its prior say, and what results.json says of them."""

    summary: GeneTable
    prior: tables.ByPrior | None
    record: dict[str, Any]
    learned: dict[str, Any] | None = None


def _compared(cells: Analysis, choices: Sequence[GeneChoice], model: Any) -> list[_Compared]:
    """The fold changes of every contrast: by the counts and, where there is one, the prior; of pairs by the model."""
    options = cells.options
    if ESTIMANDS[options.scale].pairs:
        nothing: dict[str, Any] = {"share_contradicted": None}
        return [_Compared(summarise_draws(effect, delta=options.delta), None, nothing) for effect in model.effects]
    compared = []
    for number, (contrast, genes) in enumerate(zip(cells.contrasts, choices, strict=True)):
        cells.progress(number, len(choices), "contrasts compared")
        compared.append(_by_counts(cells, contrast, genes, model and partial(model.share_contradicted, number)))
    cells.progress(len(choices), len(choices), "contrasts compared")
    return compared


def _by_counts(
    cells: Analysis, contrast: Contrast, genes: GeneChoice, contradicted: Callable[[NodeLikelihood], float] | None
) -> _Compared:
    """The posteriors of a contrast; centre and shares are those of all expressed genes, whichever are tested."""
    options, estimand = cells.options, ESTIMANDS[cells.options.scale]
    used = np.union1d(genes.expressed, genes.tested)
    likelihood = cells.likelihood(contrast, used)
    expressed, tested = (torch.from_numpy(np.searchsorted(used, part)) for part in (genes.expressed, genes.tested))
    centre = centre_of(likelihood.mode[expressed], likelihood.error[expressed])
    exact = node_values(centre, estimand, options.delta)
    at_nodes = NodeLikelihood.of(likelihood, centre, exact)
    shares = fit_shares(at_nodes.take(expressed))
    at_nodes = at_nodes.take(tested)
    record = {
        "share_contradicted": contradicted and contradicted(at_nodes),
        "centre": centre,
        "balance": _balance(likelihood.mode[expressed], likelihood.error[expressed], centre, options.delta)
        if estimand.centred
        else None,
    }
    unshrunken = None if options.shrinkage else LfcPosterior(at_nodes, _WIDE_PRIOR)

    def summarised(posterior: PosteriorOfChange) -> GeneTable:
        return summarise_posterior(posterior, unshrunken or posterior, centre, estimand, options.delta)

    counts = summarised(LfcPosterior(at_nodes, shares))
    if options.prior == "none":
        return _Compared(counts, None, record)
    from vaerdict.de.prior.stage import learn_prior

    learned, of_prior = learn_prior(cells, contrast, used, likelihood, centre, shares, exact)
    if learned is None:
        return _Compared(counts, None, record, of_prior)
    predicted = learned.mean[tested] + (0.0 if estimand.centred else centre)
    by_prior = tables.ByPrior(counts, predicted)
    return _Compared(summarised(learned.posterior(tested)), by_prior, record, of_prior)


def _balance(mode: torch.Tensor, error: torch.Tensor, centre: float, delta: float) -> dict[str, Any]:
    """How far from the centre changes balance, whether that is surely near, and how many well-known genes lie there."""
    balance, balance_error = balance_of(mode, error, centre)
    shift, known = balance - centre, mode[well_known(error)] - centre
    n_about_centre, n_about = (int(((known - c).abs() <= most_shift(delta)).sum()) for c in (0.0, shift))
    return {
        "shift": shift,
        "near": abs(shift) + 2 * balance_error <= most_shift(delta),
        "n_genes": len(known),
        "n_about": n_about,
        "n_about_centre": n_about_centre,
    }


def _digest(scvi: Any) -> str | None:
    """A hash of the weights of a given model."""
    from vaerdict.training.checkpoint import digest

    return None if scvi is None else digest(scvi.state_dict().values())


def _obs(adata: Any, cells: Analysis) -> Any:
    """The labels that were used of the cells compared, as a pandas data frame."""
    pandas, options, labels = require("pandas", "bio"), cells.options, cells.labels.take(cells.cells)
    keys = (options.groupby, options.within, options.pair_by or options.sample_key, options.batch_key)
    named = zip(keys, (labels.group, labels.within, labels.sample, labels.batch), strict=True)
    columns = {key: pandas.Categorical(values) for key, values in named if key is not None}
    return pandas.DataFrame(columns, index=adata.obs_names[cells.cells].astype(str))


def _warnings(cells: Analysis) -> list[str]:
    options, labels = cells.options, cells.labels
    columns = {options.groupby: labels.group, options.within: labels.within}
    missing = {key: sum(label is None for label in values) for key, values in columns.items() if values is not None}
    lost = [f"{n} cells have no {key} and were not compared." for key, n in missing.items() if n]
    clusters = [] if options.clustered else cluster_warnings(options.groupby, labels.group)
    return [*lost, *clusters, *cells.warnings]


class _Timer:
    """Seconds by stage."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, stage: str) -> Iterator[None]:
        started = time.perf_counter()
        yield
        self.seconds[stage] = time.perf_counter() - started
