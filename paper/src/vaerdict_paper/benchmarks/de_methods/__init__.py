"""Methods of differential expression on the same cells: false calls where nothing changed, power where changes are.

Ours is `vaerdict.differential_expression` of all expressed genes, with its defaults; the others are those of
`vaerdict.de.rivals`. All have the genes that ours tests, and library sizes over all genes. Where nothing changed every
call is false. Planted changes (`vaerdict.de.calibration.halves`) are the truth of the others: by the question that a
method answers, any change or one beyond delta, and once more with delta for all.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch

import vaerdict as vd
from vaerdict.core import DataError, Progress, silent
from vaerdict.de.calibration.halves import planted
from vaerdict.de.metrics import measure_ranked
from vaerdict.de.result import DEResult
from vaerdict.de.rivals import ANY_CHANGE, BEYOND_DELTA, RIVALS, Comparison, rival_answers
from vaerdict.optional import isolated, require
from vaerdict.tasks import Skipped, Task, run_tasks
from vaerdict_paper.benchmarks.de_methods import cells
from vaerdict_paper.benchmarks.de_methods.cells import CONTROLS, DONORS, GLIOMA, KINDS, PERMUTED, Split

PACKAGES = ("anndata", "scanpy", "pydeseq2", "edgepython")
RESUMABLE = True

DELTA, LEVEL, INTERVAL = 0.5, 0.05, 0.9
NULL, PLANTED = "null", "planted"
OURS = "vaerdict"
ON_CELLS = "wilcoxon, cells"
"""Wilcoxon's test of the cells of samples, which is common though cells of one sample are no replicates."""

SPLITS, PLANTINGS, DESEQ2_ON_CELLS = 20, 10, 3
"""Splits where nothing changed, and with changes, per design; and those in which DESeq2, which is slow, tests cells."""

SIZES = {NULL: ("20", "100", "all", "1:9"), PLANTED: ("15", "50", "200")}
DONOR_DESIGNS = ("4v4", "8v8")


def run(*, quick: bool = False, progress: Progress = silent, out: Path | None = None) -> Iterator[dict[str, Any]]:
    """One row per data set, design, split and method.

    ``n_called`` are the genes called at 5 %. Where changes are planted, ``fdp``, ``tpr`` and ``auprc`` (average
    precision) are by the question of the method, and ``tpr_matched`` is the share of changed genes in the longest
    beginning of its ranking with a realised FDP of at most 5 %; those that end in ``_delta`` are by changes of at least
    delta for all methods. ``coverage`` is that of our 90 % intervals, of all genes and of the changed ones.
    """
    todo = tasks(quick=quick)
    with TemporaryDirectory() as temporary:
        folder = Path(temporary) if out is None else out
        done = run_tasks(work, todo, folder, workers=1, progress=progress)
    for result in done.results:
        yield from result["rows"]


def tasks(*, quick: bool = False) -> list[Task]:
    """Every split of every design."""
    designs = [(stage, kind, size) for stage, sizes in SIZES.items() for kind in KINDS for size in sizes]
    designs += [(NULL, GLIOMA, CONTROLS), (NULL, GLIOMA, PERMUTED)]
    designs += [(stage, DONORS, size) for stage in (NULL, PLANTED) for size in DONOR_DESIGNS]
    if quick:
        designs = [
            d for d in designs if d[1] != "PBMC 3k, B" and d[2] in ("20", "1:9", "50", CONTROLS, PERMUTED, "4v4")
        ]
    splits = {NULL: 2, PLANTED: 1} if quick else {NULL: SPLITS, PLANTED: PLANTINGS}
    return [
        {"stage": stage, "data": data, "design": design, "seed": seed}
        for stage, data, design in designs
        for seed in range(splits[stage])
    ]


def work(task: Task) -> dict[str, Any]:
    """Ask every method about one split."""
    try:
        split = _split(task)
    except DataError as error:
        raise Skipped(str(error)) from error
    if split is None:  # the data have no such split
        return {"rows": []}
    names = {key: task[key] for key in ("stage", "data", "design", "seed")}
    return {"rows": [{**names, **row} for row in compared(split, task)]}


def _split(task: Task) -> Split | None:
    data, design, change = task["data"], task["design"], plant if task["stage"] == PLANTED else None
    rng = np.random.default_rng([task["seed"], *f"{task['stage']} {data} {design}".encode()])
    if data == GLIOMA:
        return cells.split_glioblastoma(design, task["seed"])
    if data == DONORS:
        return cells.split_donors(int(design.split("v")[0]), rng, change)
    return cells.split_cells(data, design, rng, change) if cells.fits(data, design) else None


def plant(expression: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """The changes of `vaerdict calibrate`, of `DELTA`. Shapes: ``(genes,) -> (genes,)``."""
    return planted(expression, DELTA, rng)


# ------------------------------------------------------------------------------------------------------ the methods
def compared(split: Split, task: Task) -> Iterator[dict[str, Any]]:
    """A row for each method."""
    result, seconds = asked(split, task["seed"])
    table, genes = result.table, places(result)
    truth = split.truth[genes] - np.median(split.truth[genes])
    truths = {BEYOND_DELTA: np.abs(truth) >= DELTA, ANY_CHANGE: split.lfc[genes] != 0}
    called, order = listed(result)
    covered = ((table["lfc_low"] <= truth) & (truth <= table["lfc_high"])).to_numpy()
    changed, coverage = truths[BEYOND_DELTA], {}
    if task["stage"] == PLANTED:
        coverage = {"coverage": covered.mean(), "coverage_changed": covered[changed].mean()}
    replicates = "cells" if split.samples is None else "samples"
    shared = {"replicates": replicates, "n_genes": len(genes)}
    row = {"method": OURS, "question": BEYOND_DELTA, **shared, "seconds": seconds}
    yield rounded({**row, **_measured(called, order, truths, BEYOND_DELTA, task), **coverage})
    for name, question, answer in _theirs(split, genes, task):
        row = {"method": name, "question": question, **shared, "seconds": answer.seconds}
        yield rounded({**row, **_measured(answer.called(LEVEL), answer.ranking(), truths, question, task)})


def asked(split: Split, seed: int) -> tuple[DEResult, float]:
    """What `vaerdict.differential_expression` says of all expressed genes, with its defaults, and its seconds."""
    pandas, anndata = require("pandas", "bio"), require("anndata", "bio")
    names = [f"g{i}" for i in range(split.counts.shape[1])]
    obs = {"side": pandas.Categorical(np.where(split.first, "first", "second"))}
    samples = {} if split.samples is None else {"sample": pandas.Categorical(split.samples)}
    rows = [f"c{i}" for i in range(len(split.first))]
    with isolated(seed):
        adata = anndata.AnnData(
            split.counts, obs=pandas.DataFrame(obs | samples, index=rows), var=pandas.DataFrame(index=names)
        )
        started = time.perf_counter()
        result = vd.differential_expression(
            adata,
            "side",
            "first",
            "second",
            sample_key="sample" if samples else None,
            delta=DELTA,
            level=LEVEL,
            n_top_genes=0,
            seed=seed,
        )
        return result, time.perf_counter() - started


def listed(result: DEResult) -> tuple[np.ndarray, np.ndarray]:
    """Which rows of the table are called, and all rows from the most certain on. Shapes: ``(rows,)`` each."""
    q, prob, lfc = (result.table[name].to_numpy(dtype=np.float64) for name in ("q_value", "prob_de", "lfc_mean"))
    return result.table["is_de"].to_numpy(dtype=bool), np.lexsort([-np.abs(lfc), -prob, q])


def places(result: DEResult) -> np.ndarray:
    """The place of each gene of the table among those of the cells that `asked` was about. Shapes: ``(rows,)``."""
    return np.array([int(name[1:]) for name in result.table["gene"]])


def _theirs(split: Split, genes: np.ndarray, task: Task) -> Iterator[tuple[str, str, Any]]:
    """Name, question and answer of each rival on the same genes."""
    names = list(RIVALS)
    if split.samples is None and task["seed"] >= DESEQ2_ON_CELLS:
        names = [name for name in names if not name.startswith("deseq2")]
    totals = np.asarray(split.counts.sum(1)).ravel()
    made = Comparison(split.counts[:, genes], split.first, DELTA, split.samples, totals=totals)
    for name, answer in rival_answers(made, names, seed=task["seed"]).items():
        yield name, RIVALS[name].question, answer
    if split.samples is not None:
        answer = rival_answers(made._replace(samples=None), ["wilcoxon"], seed=task["seed"])["wilcoxon"]
        yield ON_CELLS, ANY_CHANGE, answer


# ------------------------------------------------------------------------------------------------------ measures
def _measured(
    called: np.ndarray, order: np.ndarray, truths: dict[str, np.ndarray], question: str, task: Task
) -> dict[str, Any]:
    row: dict[str, Any] = {"n_called": int(called.sum())}
    if task["stage"] == PLANTED:
        row |= scores(called, order, truths[question])
        row |= {f"{key}_delta": value for key, value in scores(called, order, truths[BEYOND_DELTA]).items()}
    return row


def scores(called: np.ndarray, order: np.ndarray, changed: np.ndarray) -> dict[str, Any]:
    """Realised FDP and TPR of the genes called, TPR at a realised FDP of 5 %, and average precision.

    Shapes: ``called, changed (genes,)`` bool, ``order (genes,)`` indices.
    """
    n_true, n, hits = int(changed.sum()), int(called.sum()), changed[order].cumsum()
    fdp = 1 - hits / np.arange(1, len(order) + 1)
    longest = np.flatnonzero(fdp <= LEVEL)
    ranked = measure_ranked(*map(torch.from_numpy, (order, np.full(len(order), np.nan), changed)))
    return {
        "n_true": n_true,
        "fdp": int((called & ~changed).sum()) / max(n, 1),
        "tpr": int((called & changed).sum()) / n_true if n_true else None,
        "tpr_matched": (hits[longest[-1]] if len(longest) else 0) / n_true if n_true else None,
        "auprc": ranked["auprc"] if n_true else None,
    }


def rounded(row: dict[str, Any]) -> dict[str, Any]:
    """The row with five significant digits, which keeps the file of results small."""
    return {key: float(f"{value:.5g}") if isinstance(value, float) else value for key, value in row.items()}
