"""Differential expression on simulated cells whose truth is known: what `vaerdict demo` shows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from vaerdict.core import Progress, silent
from vaerdict.datasets.genes import CountData, donors
from vaerdict.de import DEResult, all_pairs, differential_expression
from vaerdict.optional import require

N_CELLS, N_GENES = 1000, 250
N_LABELLED = 40
"""Number of cells of each type that have a label; a prior is learned from the others."""

TYPES = {"type 1": 12, "type 2": 6, "type 3": 1}
"""The cell types and their relative sizes; the last is rare, so that its intervals are wider."""


def run(
    *,
    seed: int = 0,
    n_labelled: int | None = None,
    device: str = "cpu",
    progress: Progress = silent,
    out: str | Path | None = None,
    force: bool = False,
) -> DEResult:
    """Compare every pair of simulated cell types, of which few cells are labelled, with the truth beside the answer.

    What genes go together is learned from the cells without a label.

    A model is trained beside them, by one objective and with half of the usual draws to be short, and compared with the
    counts.

    Parameters
    ----------
    seed
        Seed of the simulation and of the analysis.
    n_labelled
        Number of labelled cells of each type; `N_LABELLED` by default.
    device
        Where the model is trained.
    progress
        Called with the work done, the total and its name.
    out, force
        A folder for the results, and whether to replace the run that it holds.
    """
    data = donors(
        seed, n_cells=N_CELLS, n_genes=N_GENES, n_donors=(1,) * 3, group_weights=tuple(TYPES.values()), donor_sd=0.0
    )
    result = differential_expression(
        _anndata(data, seed, n_labelled or N_LABELLED),
        "cell_type",
        pairs=all_pairs(list(TYPES)),
        n_top_genes=None,
        check_model=True,
        objectives=("IWAE",),
        n_draws=250,
        seed=seed,
        device=device,
        progress=progress,
        out=out,
        force=force,
    )
    result = result.with_truth(_truth(data, result))
    if out is not None:
        result.save(out)
    return result


def _anndata(data: CountData, seed: int, n_labelled: int) -> Any:
    anndata, pandas = require("anndata", "bio"), require("pandas", "bio")
    order, labels = np.random.default_rng([seed, 1]).permutation(N_CELLS), np.full(N_CELLS, None, dtype=object)
    for number, name in enumerate(TYPES):
        labels[order[data.labels.numpy()[order] == number][:n_labelled]] = name
    obs = pandas.DataFrame({"cell_type": labels}, index=[f"cell-{i:04d}" for i in range(N_CELLS)])
    var = pandas.DataFrame(index=[f"gene-{i:03d}" for i in range(N_GENES)])
    return anndata.AnnData(data.counts.numpy(), obs=obs, var=var)


def _truth(data: CountData, result: DEResult) -> dict[str, dict[str, float]]:
    """True changes of mean expression, which the centred scale gives relative to the genes that do not change."""
    types, truth = list(TYPES), {}
    for contrast in result.results["contrasts"]:
        a, b = (types.index(contrast[side]) for side in ("group_a", "group_b"))
        genes = result.table.loc[result.table["contrast"] == contrast["name"], "gene"]
        change = data.lfc(a, b)[[int(gene.removeprefix("gene-")) for gene in genes]]
        truth[contrast["name"]] = dict(zip(genes, change.tolist(), strict=True))
    return truth
