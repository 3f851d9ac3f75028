"""One split: halves of a group compared as the user would, and how many of the genes called are false."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vaerdict.de.analysis import differential_expression
from vaerdict.de.calibration.splits import deal, kept_shares, planted, thinned, true_lfc
from vaerdict.decisions import discoveries, expected_fdr, ranking
from vaerdict.optional import isolated, require
from vaerdict.tasks import Task

NULL, SPIKE = "null", "spike"
LEVELS = (0.01, 0.05, 0.1, 0.2)
"""False discovery rates at which genes are called, beside the one asked for."""

METHODS = {"model": ("prob_de", "lfc_mean"), "raw": ("raw_prob_de", "raw_lfc")}
"""The columns of the table of genes that each method calls by."""

FIRST, SECOND = "first half", "second half"
BINS = 5
"""Classes of expression, of as many genes each, in which coverage is measured."""


def split_work(path: str, task: Task) -> dict[str, Any]:
    """Compare the halves of one split of the cells stored at `path`: unchanged ones, or ones with changes planted."""
    cells, rng = _stored(path, task["data"]), np.random.default_rng(task["entropy"])
    half = halves(cells.obs, task, rng)
    return (_unchanged if task["stage"] == NULL else _spiked)(cells, half, task, rng)


@lru_cache(maxsize=1)
def _stored(path: str, _digest: str) -> Any:
    with isolated(0):
        return require("anndata", "bio").read_h5ad(path)


def halves(obs: Any, task: Task, rng: np.random.Generator) -> np.ndarray:
    """0 for cells of the first half, 1 for those of the second, -1 for other groups'. Shapes: ``-> (cells,)``."""
    mine = np.flatnonzero((obs["group"] == task["group"]).to_numpy())
    half = np.full(len(obs), -1)
    if task["first"] is None:
        strata = obs.iloc[mine][["within", "balance"]].astype(str).agg("\0".join, axis=1).to_numpy()
        half[mine] = np.where(deal(strata, rng, task["settings"]["share"]), 0, 1)
        return half
    owners = obs["sample"].iloc[mine]
    half[mine] = np.where(owners.isin(task["first"]), 0, 1)
    half[mine[owners.isna().to_numpy()]] = -1
    return half


def _unchanged(cells: Any, half: np.ndarray, task: Task, _: np.random.Generator) -> dict[str, Any]:
    """No gene changed: all calls are false. Where samples were split, also with cells as replicates."""
    kinds = ["samples", "cells"] if task["settings"]["sample_key"] else ["cells"]
    found: dict[str, Any] = {}
    for kind in kinds:
        table = _compared(cells.X, cells.obs, half, task, samples=kind == "samples").table
        nothing = np.zeros(len(table))
        for key, rows in _measured(table, nothing, nothing, task, kind).items():
            found[key] = found.get(key, []) + rows
    return found


def _spiked(cells: Any, half: np.ndarray, task: Task, rng: np.random.Generator) -> dict[str, Any]:
    """Changes are planted between the halves: calls of genes that changed by less than delta are false."""
    settings, mine = task["settings"], half >= 0
    samples = settings["sample_key"] is not None
    lfc = planted(np.asarray(cells.X[mine].mean(0)).ravel(), settings["analysis"]["delta"], rng)
    kept = kept_shares(lfc)
    result = _compared(thinned(cells.X, half, kept, rng), cells.obs, half, task, samples=samples)
    truth, genes = _truth(cells, mine, kept, result, task), result.table["gene"].to_numpy().astype(int)
    return _measured(result.table, lfc[genes], truth, task, "samples" if samples else "cells")


def _measured(table: Any, size: np.ndarray, truth: np.ndarray, task: Task, replicates: str) -> dict[str, Any]:
    """Everything that is measured of one comparison, a list of rows for each kind of measure."""
    names = {"kind": task["stage"], "group": task["group"], "split": task["seed"], "replicates": replicates}
    analysis = task["settings"]["analysis"]
    changed = torch.from_numpy(np.abs(truth) >= analysis["delta"])
    rows, wholes, effects = [], [], []
    for method in METHODS:
        prob, lfc = _columns(table, method)
        named = {**names, "method": method}
        rows += [{**named, **row} for row in calls(prob, lfc, changed, sorted({*LEVELS, analysis["level"]}))]
        wholes.append({**named, "fdr_mae": fdr_mae(prob, lfc, changed)})
        called = discoveries(prob, analysis["level"], ties=lfc.abs()).numpy()
        effects += [{**named, **row} for row in by_size(size, truth, lfc.numpy(), called)]
    wholes[0]["coverage"], bins = covered(table, truth)
    return {"rows": rows, "wholes": wholes, "effects": effects, "bins": [{**names, **row} for row in bins]}


def _compared(counts: Any, obs: Any, half: np.ndarray, task: Task, *, samples: bool) -> Any:
    """The comparison of the halves, with the settings of the user's analysis."""
    pandas, anndata, settings = require("pandas", "bio"), require("anndata", "bio"), task["settings"]
    # cells of other groups keep a label, as in the user's analysis: without one they would pass for cells alike
    others = [None if pandas.isna(group) else f"of {group}" for group in obs["group"]]
    names = [other if h < 0 else (FIRST, SECOND)[h] for h, other in zip(half, others, strict=True)]
    labels = obs.assign(half=pandas.Categorical(names))
    genes = pandas.DataFrame(index=[str(i) for i in range(counts.shape[1])])
    return differential_expression(
        anndata.AnnData(counts, obs=labels, var=genes),
        "half",
        FIRST,
        SECOND,
        within=settings["within"] and "within",
        sample_key="sample" if samples else None,
        batch_key=settings["batch_key"] and "batch",
        seed=task["analysis_seed"],
        **settings["analysis"],
    )


def _truth(cells: Any, mine: np.ndarray, kept: np.ndarray, result: Any, task: Task) -> np.ndarray:
    """What changed by how much, for the rows of the table, on its scale. Shapes: ``-> (rows,)``."""
    settings, table = task["settings"], result.table
    truth, contrast = np.zeros(len(table)), table["contrast"].to_numpy()
    for row in result.results["contrasts"]:
        some = contrast == row["name"]
        genes = table["gene"].to_numpy()[some].astype(int)
        inside = mine if row["within"] is None else mine & (cells.obs["within"] == row["within"]).to_numpy()
        owners = cells.obs["sample"].to_numpy()[inside] if settings["sample_key"] else None
        centred = settings["analysis"]["scale"] == "centred"
        truth[some] = true_lfc(cells.X[inside][:, genes], kept[:, genes], owners, centred=centred)
    return truth


# ------------------------------------------------------------------------------------------------------ measures
def calls(prob: Tensor, lfc: Tensor, changed: Tensor, levels: Sequence[float]) -> list[dict[str, Any]]:
    """The genes called at each level, and the false ones of them; an empty list of genes holds none.

    Shapes: all ``(genes,)``.
    """
    n_true, rows = int(changed.sum()), []
    for level in levels:
        called = discoveries(prob, level, ties=lfc.abs())
        n, wrong = int(called.sum()), int((called & ~changed).sum())
        rows.append(
            {
                "level": level,
                "n_genes": len(prob),
                "n_true": n_true,
                "n_called": n,
                "n_false": wrong,
                "fdp": wrong / max(n, 1),
                "tpr": (n - wrong) / n_true if n_true else None,
                "expected_fdr": (1 - prob[called]).mean().item() if n else 0.0,
            }
        )
    return rows


def fdr_mae(prob: Tensor, lfc: Tensor, changed: Tensor) -> float:
    r"""Mean distance in percent of false and stated shares, :math:`\tfrac1G \sum_k |\mathrm{FDP}_k - \mathrm{FDR}_k|`.

    Shapes: all ``(genes,)``.
    """
    false = (~changed)[ranking(prob, lfc.abs())].double()
    fdp = false.cumsum(0) / torch.arange(1, len(false) + 1)
    return 100 * (fdp - expected_fdr(prob)).abs().mean().item()


def covered(table: Any, truth: np.ndarray) -> tuple[float, list[dict[str, Any]]]:
    """The share of intervals that hold the truth: of all genes, and by expression from low to high."""
    inside = ((table["lfc_low"] <= truth) & (truth <= table["lfc_high"])).to_numpy()
    expression = ((table["mean_a"] + table["mean_b"]) / 2).to_numpy()
    parts = np.array_split(np.argsort(expression, kind="stable"), min(BINS, len(table)))
    bins = [
        {"bin": i, "expression": float(np.median(expression[p])), "coverage": float(inside[p].mean()), "n": len(p)}
        for i, p in enumerate(parts)
    ]
    return float(inside.mean()), bins


def by_size(size: np.ndarray, truth: np.ndarray, lfc: np.ndarray, called: np.ndarray) -> list[dict[str, Any]]:
    """For genes of each planted \\|LFC\\|: how many, how many called, and by how much the estimate falls short of it.

    Shapes: all ``(genes,)``.
    """
    size, short = np.abs(size).round(6), np.sign(size) * (truth - lfc)
    return [
        {
            "size": float(s),
            "n": int(there.sum()),
            "called": int(called[there].sum()),
            "short": float(short[there].mean()),
        }
        for s in np.unique(size)
        for there in [size == s]
    ]


def _columns(table: Any, method: str) -> tuple[Tensor, Tensor]:
    prob, lfc = (torch.from_numpy(table[name].to_numpy(dtype=np.float64)) for name in METHODS[method])
    return prob, lfc
