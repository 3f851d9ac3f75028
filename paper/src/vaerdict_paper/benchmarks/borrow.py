"""The gain from unlabelled cells: few labelled cells of three simulated types, by their counts and with `borrow`.

The data are those of `vaerdict demo` at other seeds: a thousand cells with known truth, of which some of each type have
a label. Both answers are those of `vaerdict de`, without and with ``--borrow``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from vaerdict import demo
from vaerdict.core import Progress, silent
from vaerdict.de import DEResult
from vaerdict.de.metrics import measure

PACKAGES = ("anndata",)
FIRST = 100  # first seed; those of the demo were seen during its development
LABELLED = (15, 40)

_MEASURED = ("fdp", "tpr", "coverage", "error", "by_model")


def run(*, quick: bool = False, progress: Progress = silent) -> Iterator[dict[str, Any]]:
    """One row per number of labelled cells and answer: means over data sets with their standard errors.

    ``fdp`` and ``tpr`` are of the genes called at 5 % in a contrast, ``coverage`` is that of the 90 % intervals,
    ``error`` the root mean square error of the fold changes, each averaged over the three contrasts of a data set.
    """
    n = 2 if quick else 8
    cases = [(labelled, borrow) for labelled in LABELLED for borrow in (False, True)]
    for done, (labelled, borrow) in enumerate(cases):
        rows = []
        for i in range(n):
            progress(done * n + i, len(cases) * n, "data sets")
            rows.append(_measured(demo.run(seed=FIRST + i, borrow=borrow, n_labelled=labelled)))
        yield {"labelled": labelled, "answer": "borrow" if borrow else "counts", "datasets": n, **_averaged(rows)}
    progress(len(cases) * n, len(cases) * n, "data sets")


def _measured(result: DEResult) -> dict[str, float]:
    parts = [_contrast(result, row) for row in result.results["contrasts"]]
    return {key: sum(part[key] for part in parts) / len(parts) for key in _MEASURED}


def _contrast(result: DEResult, row: dict[str, Any]) -> dict[str, float]:
    table: Any = result.table[result.table["contrast"] == row["name"]]
    truth = torch.tensor([result.results["truth"][row["name"]][gene] for gene in table["gene"]])
    prob, lfc, low, high = (torch.tensor(table[c].to_numpy()) for c in ("prob_de", "lfc_mean", "lfc_low", "lfc_high"))
    metrics = measure(prob, lfc, truth, row["delta"])
    return {
        "fdp": metrics["fdp"],
        "tpr": metrics["tpr"],
        "coverage": ((low <= truth) & (truth <= high)).double().mean().item(),
        "error": (lfc - truth).square().mean().sqrt().item(),
        "by_model": row["share_by_model"],
    }


def _averaged(rows: Sequence[dict[str, float]]) -> dict[str, float]:
    values = torch.tensor([[row[key] for key in _MEASURED] for row in rows], dtype=torch.float64)
    errors = values.std(0) / len(rows) ** 0.5
    means = zip(_MEASURED, values.mean(0).tolist(), errors.tolist(), strict=True)
    return {k: v for key, mean, se in means for k, v in ((key, mean), (f"{key}_se", se))}
