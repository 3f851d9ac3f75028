"""Differential expression from an AnnData to a table of genes: what users call."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from vaerdict.core import Progress, silent
from vaerdict.de import contrasts as plan
from vaerdict.de import data as inputs
from vaerdict.de.model.fitting import FULL, QUICK, Effort
from vaerdict.de.pipeline import Options, Run
from vaerdict.de.result import DEResult
from vaerdict.engines import Engine, started
from vaerdict.models.adapters import ScviModel, from_scvi


def differential_expression(
    adata: Any,
    groupby: str,
    group_a: str | None = None,
    group_b: str | None = None,
    *,
    pairs: Sequence[plan.Pair] | None = None,
    layer: str | None = None,
    batch_key: str | None = None,
    sample_key: str | None = None,
    within: str | None = None,
    delta: float = 0.5,
    level: float = 0.05,
    scale: str = "centred",
    min_cells: int = 3,
    n_top_genes: int | None = 2000,
    keep_genes: Sequence[str] | None = None,
    gene_symbols: str | None = None,
    borrow: bool = False,
    objectives: Sequence[str] | None = None,
    refits: int | None = None,
    n_draws: int | None = None,
    quick: bool = False,
    seed: int = 0,
    device: str = "cpu",
    engine: Engine | None = None,
    progress: Progress = silent,
    model: Any = None,
    out: str | Path | None = None,
) -> DEResult:
    """Which genes differ between groups of cells, with a false discovery rate that means something.

    `adata` is an AnnData of raw counts, in memory or backed, or the path of one. Group a of the column `groupby` is
    compared with group b, or with all others; without groups every group with the rest; `pairs` lists several. `within`
    names a column of types in each of which the comparison is made, and `sample_key` one of samples, which then are the
    replicates in place of cells. A gene is differentially expressed where its |log2 fold change| is at least `delta`;
    `level` is the FDR of the genes called, over all contrasts. The `scale` is "centred" (changes relative to the median
    gene), "proportion", or "pair" (single cells, as in scvi-tools).

    Compared are genes seen in at least `min_cells` cells of a group: the `n_top_genes` most variable of them (0 or None
    for all), and those of `keep_genes`. `gene_symbols` names a column of var whose values stand in the table for
    var_names, which are then in its column ``gene_id``.

    The counts decide, over-dispersed as they are between cells or samples and shrunk by what all genes show; a model is
    held against them and gives the latents. Models are trained by `objectives` (VAE and IWAE; any of VAE, IWAE, WW,
    CHI), on `device`, and the one with the best refined held-out evidence is kept; or `model` is a fitted scvi-tools
    model, within whose registered batches the counts are compared unless `batch_key` names others. With `borrow` cells
    without a label are taken to be of the kinds compared: where few cells are labelled the model, which learns from up
    to 10,000, may then know more of a gene than their counts, and decides it (`vaerdict.de.shrinkage`); `refits` (3; 0
    with `quick`) bootstrap refits let its error into the intervals. With `out`, a folder, finished stages are stored
    and a run that was stopped goes on there; the results are written there too. The same seed gives the same table.

    Blocks of cells are refined and averaged by the `engine`: threads of this process by default, or any of
    `vaerdict.engines`, which all give the same table. Memory: the counts of a backed file are kept as long as the
    non-zero ones of the genes chosen take no more than 128 MB, and are else read again block by block; dense are 10,000
    cells while models train, and 256 cells for each worker afterwards; of each cell some 500 bytes are kept. Layers are
    not left on disk: a `layer` is in memory whole.
    """
    adata = inputs.open_data(adata) if isinstance(adata, (str, Path)) else adata
    given = None if model is None else _wrapped(model)
    adata = adata.to_memory() if given is not None and getattr(adata, "isbacked", False) else adata
    labels = _labels(adata, groupby, within, sample_key, batch_key)
    if given is not None and batch_key is None:
        labels = replace(labels, batch=given.batches(adata))
    options = Options(
        groupby=groupby,
        pairs=tuple(plan.asked(labels, group_a, group_b, pairs)),
        layer=layer,
        batch_key=batch_key,
        sample_key=sample_key,
        within=within,
        delta=delta,
        level=level,
        scale=scale,
        min_cells=min_cells,
        n_top_genes=n_top_genes or None,
        quick=quick,
        effort=_effort(quick, objectives, refits if model is None else 0, n_draws),
        seed=seed,
        model=None if model is None else type(model).__name__,
        borrow=borrow,
        keep_genes=tuple(keep_genes or ()),
        gene_symbols=gene_symbols,
    )
    folder = None if out is None else Path(out)
    with started(engine):
        result = Run(adata, options, labels, given, device, folder, progress, engine).result()
    if out is not None:
        result.save(out)
    return result


def _labels(adata: Any, groupby: str, within: str | None, sample_key: str | None, batch_key: str | None) -> plan.Labels:
    keys = {"within": within, "sample_key": sample_key, "batch_key": batch_key}
    found = (None if key is None else inputs.column(adata, key, role=role) for role, key in keys.items())
    return plan.Labels(groupby, inputs.column(adata, groupby, role="groupby"), *found)


def _effort(quick: bool, objectives: Sequence[str] | None, refits: int | None, n_draws: int | None) -> Effort:
    """How much to do: all of it or a first look, and what was asked for otherwise."""
    asked = {"recipes": objectives and tuple(objectives), "refits": refits, "n_draws": n_draws}
    return replace(QUICK if quick else FULL, **{k: v for k, v in asked.items() if v is not None})


def _wrapped(model: Any) -> ScviModel:
    return model if isinstance(model, ScviModel) else from_scvi(model)
