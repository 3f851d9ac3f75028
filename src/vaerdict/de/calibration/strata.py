"""Genes in strata, by expression and by size of the change: what is called, what of it is false, what is covered."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from vaerdict.de.columns import CALIBRATE, TableColumn

ALL, CHANGED, EXPRESSION, SIZE = "all", "changed", "expression", "size"
"""What genes are stratified by: not at all, those changed by delta, expression, and the size of the planted change."""

CLASSES = 5
"""Strata of expression, with equal numbers of genes."""

MEASURES = (
    TableColumn("called", "share of the genes that is called"),
    TableColumn("fdp", "share of the calls in the stratum that is false; none where all genes changed or none did"),
    TableColumn("fdr_part", "false calls of the stratum as a share of all calls; these add up to the achieved FDR"),
    TableColumn("tpr", "share of the changed genes that is called"),
    TableColumn("coverage", "share of the intervals that cover the true LFC; of `vaerdict de` only"),
    TableColumn("short", "by how much estimates of changed genes fall short of the true |LFC|; of `vaerdict de` only"),
)
"""What is measured in every stratum of every split."""

STRATA = (
    *(column for column in CALIBRATE if column.name in ("kind", "method", "question", "replicates")),
    TableColumn("by", "what the stratum is of: all, changed (by delta or more), expression, or size (of the change)"),
    TableColumn("stratum", "number of the stratum, from low to high"),
    TableColumn("value", "share of all molecules of its median gene (expression), or |LFC| planted (size)"),
    TableColumn("splits", "number of splits"),
    TableColumn("n_genes", "genes per split"),
    TableColumn("n_true", "genes per split that changed: at all, or by at least delta, as the question is"),
    TableColumn("n_called", "genes called per split, at the FDR asked for"),
    *MEASURES,
)
"""The fields of `strata` in results.json, means over splits. Every measure has its standard error, such as `fdp_se`."""


class Stratum(NamedTuple):
    """Genes that have something in common. Shapes: ``genes (n,)``, rows of the table."""

    by: str
    stratum: int
    value: float | None
    genes: np.ndarray


class Intervals(NamedTuple):
    """Whether the interval of each gene covers the truth, and the truth minus the estimate. Shapes: ``(rows,)``."""

    covering: np.ndarray
    error: np.ndarray


def stratify(expression: np.ndarray, size: np.ndarray, truth: np.ndarray, delta: float) -> list[Stratum]:
    """All genes, those that changed by delta, and strata by expression and by the size planted; none is empty.

    Shapes: ``(rows,)`` each.
    """
    sizes, order = np.abs(size).round(6), np.argsort(expression, kind="stable")
    classes = np.array_split(order, min(CLASSES, len(order)))
    strata = [
        Stratum(ALL, 0, None, np.arange(len(size))),
        Stratum(CHANGED, 0, delta, np.flatnonzero(np.abs(truth) >= delta)),
        *(Stratum(EXPRESSION, i, float(np.median(expression[c])), c) for i, c in enumerate(classes)),
        *(Stratum(SIZE, i, float(s), np.flatnonzero(sizes == s)) for i, s in enumerate(np.unique(sizes))),
    ]
    return [stratum for stratum in strata if len(stratum.genes)]


def counted(called: np.ndarray, changed: np.ndarray) -> dict[str, Any]:
    """Numbers of calls and of false ones among them; an empty list has none. Shapes: ``(genes,)`` bool."""
    n_true, n, n_false = int(changed.sum()), int(called.sum()), int((called & ~changed).sum())
    return {
        "n_genes": len(changed),
        "n_true": n_true,
        "n_unchanged": len(changed) - n_true,
        "n_called": n,
        "n_false": n_false,
        "fdp": n_false / max(n, 1),
        "tpr": (n - n_false) / n_true if n_true else None,
    }


def by_stratum(
    strata: Sequence[Stratum],
    called: np.ndarray,
    changed: np.ndarray,
    size: np.ndarray,
    intervals: Intervals | None = None,
) -> list[dict[str, Any]]:
    """What is measured in each stratum of one split. Shapes: ``called, changed (rows,)`` bool, ``size (rows,)``."""
    n_called, rows = max(int(called.sum()), 1), []
    for stratum in strata:
        genes, row = stratum.genes, counted(called[stratum.genes], changed[stratum.genes])
        mixed, moved = 0 < row["n_true"] < row["n_genes"], genes[size[genes] != 0]
        measures = {
            "called": row["n_called"] / row["n_genes"],
            "fdp": row["fdp"] if mixed else None,
            "fdr_part": row["n_false"] / n_called,
            "coverage": None if intervals is None else float(intervals.covering[genes].mean()),
            "short": None,
        }
        if intervals is not None and len(moved):
            measures["short"] = float((np.sign(size) * intervals.error)[moved].mean())
        rows.append({"by": stratum.by, "stratum": stratum.stratum, "value": stratum.value, **row, **measures})
    return rows
