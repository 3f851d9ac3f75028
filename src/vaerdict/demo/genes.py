"""Differential expression on simulated cells whose truth is known: what `vaerdict demo` shows."""

from __future__ import annotations

from typing import Any

import numpy as np

from vaerdict.core import Progress, silent
from vaerdict.datasets.genes import CountData, donors
from vaerdict.de import DEResult, all_pairs, differential_expression
from vaerdict.optional import require

N_CELLS, N_GENES = 1000, 250
N_LABELLED = 40
"""Cells of each type that someone has named; the others are there for the model to learn from."""

TYPES = {"type 1": 12, "type 2": 6, "type 3": 1}
"""The cell types and their shares; the last is rare, so that its intervals are visibly wider."""


def run(
    *,
    seed: int = 0,
    borrow: bool = True,
    n_labelled: int | None = None,
    device: str = "cpu",
    progress: Progress = silent,
) -> DEResult:
    """Compare every pair of simulated cell types, few cells of which are labelled, with the truth beside the answer.

    One objective and half of the usual draws are what keeps it short; early stopping and the three refits are those of
    any analysis.
    """
    data = donors(seed, n_cells=N_CELLS, n_genes=N_GENES, n_donors=(1,) * 3, shares=tuple(TYPES.values()), donor_sd=0.0)
    found = differential_expression(
        _anndata(data, seed, n_labelled or N_LABELLED),
        "cell_type",
        pairs=all_pairs(list(TYPES)),
        n_top_genes=None,
        borrow=borrow,
        objectives=["IWAE"],
        n_draws=250,
        seed=seed,
        device=device,
        progress=progress,
    )
    return found.with_truth(_truth(data, found))


def _anndata(data: CountData, seed: int, n_labelled: int) -> Any:
    anndata, pandas = require("anndata", "bio"), require("pandas", "bio")
    order, labels = np.random.default_rng([seed, 1]).permutation(N_CELLS), np.full(N_CELLS, None, dtype=object)
    for number, name in enumerate(TYPES):
        labels[order[data.labels.numpy()[order] == number][:n_labelled]] = name
    obs = pandas.DataFrame({"cell_type": labels})
    obs.index = [f"cell-{i:04d}" for i in range(N_CELLS)]
    var = pandas.DataFrame(index=[f"gene-{i:03d}" for i in range(N_GENES)])
    return anndata.AnnData(data.counts.numpy(), obs=obs, var=var)


def _truth(data: CountData, found: DEResult) -> dict[str, dict[str, float]]:
    """True changes of mean expression, relative to the median gene of those compared as the centred scale has them."""
    place, truth = list(TYPES), {}
    for contrast in found.results["contrasts"]:
        a, b = (place.index(contrast[side]) for side in ("group_a", "group_b"))
        rows = found.table[found.table["contrast"] == contrast["name"]]
        number = [int(gene.removeprefix("gene-")) for gene in rows["gene"]]
        change = data.lfc(a, b)[number].double()
        truth[contrast["name"]] = dict(zip(rows["gene"], (change - change.quantile(0.5)).tolist(), strict=True))
    return truth
