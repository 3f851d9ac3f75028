"""The task of one split: compare the halves as the user would, and count the false calls."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vaerdict.de.calibration.halves import deal, kept_shares, planted, thinned, true_lfc
from vaerdict.de.data import column, gene_names
from vaerdict.de.metrics import measure
from vaerdict.de.pipeline import differential_expression
from vaerdict.decisions import discoveries
from vaerdict.optional import isolated, require
from vaerdict.tasks import Task

NULL, SPIKE = "null", "spike"
LEVELS = (0.01, 0.05, 0.1, 0.2)
"""False discovery rates at which genes are called, besides the one asked for."""

REPORTED, NAIVE = "reported", "naive"
METHODS = {REPORTED: ("prob_de", "lfc_mean"), NAIVE: ("naive_prob_de", "naive_lfc")}
"""The columns of the table of genes that each method calls by."""

HALF, FIRST, SECOND = "vaerdict half", "first half", "second half"
"""The column of obs that names the halves, and their names."""

BINS = 5
"""Classes of expression, with equal numbers of genes, in which coverage is measured."""


def split_work(path: str, task: Task) -> dict[str, Any]:
    """Compare the halves of one split of the cells stored at `path`, unchanged or with changes planted.

    `task` names the `group` that is split, its samples in the `first` half (None where cells are split), the `entropy`
    of the split and the `analysis_seed`; `options` are those of `differential_expression`.
    """
    cells, rng = _stored(path, task["data"]), np.random.default_rng(task["entropy"])
    half = halves(cells, task, rng)
    return _unchanged(cells, half, task) if task["stage"] == NULL else _spiked(cells, half, task, rng)


@lru_cache(maxsize=1)
def _stored(path: str, _digest: str) -> Any:
    with isolated(0):
        return require("anndata", "bio").read_h5ad(path)


def halves(cells: Any, task: Task, rng: np.random.Generator) -> np.ndarray:
    """0 for cells of the first half, 1 for the second, -1 for cells of other groups. Shapes: ``-> (cells,)``."""
    members = np.flatnonzero(column(cells, task["groupby"], role="groupby") == task["group"])
    half = np.full(cells.n_obs, -1)
    if task["first"] is None:
        keys = {"within": task["options"]["within"], "balance": task["balance"]}
        labels = [column(cells, key, role=role)[members] for role, key in keys.items() if key is not None]
        strata = ["\0".join(map(str, cell)) for cell in zip(*labels, strict=True)] or [""] * len(members)
        half[members] = np.where(deal(np.array(strata, dtype=object), rng, task["share"]), 0, 1)
        return half
    owners = column(cells, task["options"]["sample_key"], role="sample_key")[members]
    half[members] = [-1 if owner is None else 0 if owner in task["first"] else 1 for owner in owners]
    return half


def _unchanged(cells: Any, half: np.ndarray, task: Task) -> dict[str, Any]:
    """No gene changed: all calls are false. Where samples were split, also with cells as replicates."""
    measures: dict[str, Any] = {}
    for replicates in ["samples", "cells"] if task["options"]["sample_key"] else ["cells"]:
        table = _compared(cells.X, cells, half, task, samples=replicates == "samples").table
        zero = np.zeros(len(table))
        for key, rows in _measured(table, zero, zero, task, replicates).items():
            measures[key] = measures.get(key, []) + rows
    return measures


def _spiked(cells: Any, half: np.ndarray, task: Task, rng: np.random.Generator) -> dict[str, Any]:
    """Changes are planted between the halves: calls of genes that changed by less than delta are false."""
    members, samples = half >= 0, task["options"]["sample_key"] is not None
    lfc = planted(np.asarray(cells.X[members].mean(0)).ravel(), task["options"]["delta"], rng)
    shares = kept_shares(lfc)
    result = _compared(thinned(cells.X, half, shares, rng), cells, half, task, samples=samples)
    place = {name: i for i, name in enumerate(gene_names(cells, task["options"]["gene_symbols"], []))}
    genes = np.array([place[gene] for gene in result.table["gene"]])
    truth = _truth(cells, members, shares, result, genes, task["options"])
    return _measured(result.table, lfc[genes], truth, task, "samples" if samples else "cells")


def _compared(counts: Any, cells: Any, half: np.ndarray, task: Task, *, samples: bool) -> Any:
    """The comparison of the halves with the options of the analysis and a naive bootstrap beside it."""
    pandas, anndata, obs = require("pandas", "bio"), require("anndata", "bio"), cells.obs
    # cells of other groups keep a label, as in the analysis itself: those without one may be of the kinds compared
    labels = column(cells, task["groupby"], role="groupby")
    others = [None if label is None else f"of {label}" for label in labels]
    names = [other if h < 0 else (FIRST, SECOND)[h] for h, other in zip(half, others, strict=True)]
    layers = {} if task["model_layer"] is None else {task["model_layer"]: counts}
    options = task["options"] if samples else task["options"] | {"sample_key": None}
    return differential_expression(
        anndata.AnnData(counts, obs=obs.assign(**{HALF: pandas.Categorical(names)}), var=cells.var, layers=layers),
        HALF,
        FIRST,
        SECOND,
        model=task["model"],
        device=task["device"],
        **options | {"layer": None, "clustered": False, "seed": task["analysis_seed"], "naive_bootstrap": True},
    )


def _truth(
    cells: Any, members: np.ndarray, shares: np.ndarray, result: Any, genes: np.ndarray, options: dict[str, Any]
) -> np.ndarray:
    """The true fold changes of the rows of the table, on its scale. Shapes: ``genes (rows,) -> (rows,)``."""
    truth, contrast = np.zeros(len(genes)), result.table["contrast"].to_numpy()
    for row in result.results["contrasts"]:
        rows = contrast == row["name"]
        inside = members
        if row["within"] is not None:
            inside = members & (column(cells, options["within"], role="within") == row["within"])
        owners = column(cells, options["sample_key"], role="sample_key")[inside] if options["sample_key"] else None
        counts, centred = cells.X[inside][:, genes[rows]], options["scale"] == "centred"
        truth[rows] = true_lfc(counts, shares[:, genes[rows]], owners, centred=centred)
    return truth


# ------------------------------------------------------------------------------------------------------ measures
def _measured(table: Any, size: np.ndarray, truth: np.ndarray, task: Task, replicates: str) -> dict[str, Any]:
    """Everything that is measured of one comparison: a list of rows for each kind of measure.

    Shapes: ``size (rows,)`` the changes planted and ``truth (rows,)`` those that resulted.
    """
    names = {"kind": task["stage"], "group": task["group"], "split": task["seed"], "replicates": replicates}
    delta, level = task["options"]["delta"], task["options"]["level"]
    changed = torch.from_numpy(np.abs(truth) >= delta)
    rows, overall, effects = [], [], []
    for method, columns in METHODS.items():
        prob, lfc = (torch.from_numpy(table[name].to_numpy(dtype=np.float64)) for name in columns)
        named = {**names, "method": method}
        rows += [{**named, **row} for row in calls(prob, lfc, changed, sorted({*LEVELS, level}))]
        overall.append({**named, "fdr_mae": measure(prob, lfc, torch.from_numpy(truth), delta)["fdr_mae"]})
        called = discoveries(prob, level, ties=lfc.abs()).numpy()
        effects += [{**named, **row} for row in by_size(size, truth, lfc.numpy(), called)]
    overall[0]["coverage"], bins = covered(table, truth)
    return {"rows": rows, "overall": overall, "effects": effects, "bins": [{**names, **row} for row in bins]}


def calls(prob: Tensor, lfc: Tensor, changed: Tensor, levels: Sequence[float]) -> list[dict[str, Any]]:
    """The numbers of genes called at each level and of the false ones among them; an empty list has none.

    Shapes: all ``(genes,)``.
    """
    n_true, rows = int(changed.sum()), []
    for level in levels:
        called = discoveries(prob, level, ties=lfc.abs())
        n, n_false = int(called.sum()), int((called & ~changed).sum())
        rows.append(
            {
                "level": level,
                "n_genes": len(prob),
                "n_true": n_true,
                "n_called": n,
                "n_false": n_false,
                "fdp": n_false / max(n, 1),
                "tpr": (n - n_false) / n_true if n_true else None,
                "expected_fdr": (1 - prob[called]).mean().item() if n else 0.0,
            }
        )
    return rows


def covered(table: Any, truth: np.ndarray) -> tuple[float, list[dict[str, Any]]]:
    """The share of intervals that cover the truth: of all genes, and by expression from low to high."""
    inside = ((table["lfc_low"] <= truth) & (truth <= table["lfc_high"])).to_numpy()
    expression = ((table["mean_a"] + table["mean_b"]) / 2).to_numpy()
    classes = np.array_split(np.argsort(expression, kind="stable"), min(BINS, len(table)))
    bins = [
        {"bin": i, "expression": float(np.median(expression[c])), "coverage": float(inside[c].mean()), "n": len(c)}
        for i, c in enumerate(classes)
    ]
    return float(inside.mean()), bins


def by_size(size: np.ndarray, truth: np.ndarray, lfc: np.ndarray, called: np.ndarray) -> list[dict[str, Any]]:
    """For each planted \\|LFC\\|: numbers of genes and of calls, and by how much estimates fall short of the truth.

    Shapes: all ``(genes,)``.
    """
    size, short = np.abs(size).round(6), np.sign(size) * (truth - lfc)
    return [
        {"size": float(s), "n": int(mask.sum()), "called": int(called[mask].sum()), "short": float(short[mask].mean())}
        for s in np.unique(size)
        for mask in [size == s]
    ]
