"""Hidden classes of tables: how well methods rank query rows of a class that no label names, and which they call.

Every class of a table is hidden in turn. Training has few labels and unlabelled rows, which contain the hidden class;
query rows are new. Methods with a calibrated rule call rows at an FDR of 10 %, the others by their customary rule.
Scores of a fitted M1+M2 are measured for the first seeds only. The settings of diffusion, which is the default of
`vaerdict.SelectiveClassifier`, were chosen on digits and breast cancer.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch

from vaerdict.core import DataError, Progress, silent
from vaerdict.optional import isolated
from vaerdict.selective import auroc, average_precision
from vaerdict.tasks import Skipped, Task, run_tasks
from vaerdict_paper.benchmarks.novelty.tables import (
    CANCER,
    DESIGNS,
    MNIST,
    WINE,
    Answer,
    Problem,
    problem,
    table,
)

PACKAGES = ("sklearn", "h5py")
RESUMABLE = True

SEEDS, MODEL_SEEDS = 10, 3
SCORES, MODEL = "scores", "model"
_MEASURES = ("auroc", "average_precision", "fdp", "power", "n_called", "seconds")


def run(
    *,
    quick: bool = False,
    progress: Progress = silent,
    out: Path | None = None,
    workers: int | None = None,
) -> Iterator[dict[str, Any]]:
    """One row per table, number of labels, hidden class and method: means over seeds, with standard errors of some.

    ``auroc`` and ``average_precision`` are of the ranking of query rows, ``fdp`` is the share of rows of known classes
    among those called by the ``rule`` (zero if there are none), ``power`` the share of hidden rows that are called.
    """
    todo = tasks(quick=quick)
    with TemporaryDirectory() as temporary:
        folder = Path(temporary) if out is None else out
        done = run_tasks(work, todo, folder, workers=workers, progress=progress)
    rows: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for result in done.results:
        for row in result["rows"]:
            rows.setdefault((row["data"], row["labels"], row["hidden"], row["method"]), []).append(row)
    for part in rows.values():
        yield averaged(part)


def tasks(*, quick: bool = False) -> list[Task]:
    """Every class of every table hidden with every seed, the longest tasks first."""
    names = [MNIST, *(name for name in DESIGNS if name != MNIST)]
    made = [
        {"stage": stage, "data": data, "labels": labels, "hidden": hidden, "seed": seed}
        for stage, seeds in ((MODEL, MODEL_SEEDS), (SCORES, SEEDS))
        for data in names
        for labels in DESIGNS[data].labels
        for hidden in range(DESIGNS[data].classes)
        for seed in range(seeds)
    ]
    return [task for task in made if task["seed"] == 0 and task["data"] in (WINE, CANCER)] if quick else made


def work(task: Task) -> dict[str, Any]:
    """Judge one problem by every method, or by every score of one fitted model."""
    try:
        given = problem(task["data"], task["labels"], task["hidden"], task["seed"])
    except DataError as error:
        raise Skipped(str(error)) from error
    from vaerdict_paper.benchmarks.novelty import methods, model  # which need scikit-learn

    about = {"data": task["data"], "labels": task["labels"], "hidden": table(task["data"])[2][task["hidden"]]}
    about |= {"n_query": len(given.hidden), "n_hidden": int(given.hidden.sum())}
    rows = []
    with isolated(task["seed"]):
        for name, judge in (model if task["stage"] == MODEL else methods).answers(given):
            started = time.perf_counter()
            answer = judge()
            if answer is not None:
                seconds = time.perf_counter() - started
                rows.append({**about, "method": name, **measured(answer, given), "seconds": seconds})
    return {"rows": rows}


def measured(answer: Answer, given: Problem) -> dict[str, Any]:
    """AUROC and average precision of the ranking, and FDP and power of the calls; None where no row is hidden."""
    hidden, called = given.hidden, answer.called
    some = bool(hidden.any())
    score, novel = torch.from_numpy(answer.score), torch.from_numpy(hidden)
    return {
        "rule": answer.rule,
        "auroc": float(auroc(score, novel)) if some else None,
        "average_precision": float(average_precision(score, novel)) if some else None,
        "n_called": int(called.sum()),
        "fdp": float((called & ~hidden).sum() / max(1, called.sum())),
        "power": float((called & hidden).sum() / hidden.sum()) if some else None,
    }


def averaged(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Means over seeds; for AUROC, average precision, FDP and power also their standard errors (``_se``)."""
    about = {key: rows[0][key] for key in ("data", "labels", "hidden", "method", "rule")}
    about |= {"seeds": len(rows), "n_hidden": _rounded(np.mean([row["n_hidden"] for row in rows]))}
    for key in _MEASURES:
        values = [row[key] for row in rows if row[key] is not None]
        about[key] = _rounded(np.mean(values)) if values else None
        if key not in ("n_called", "seconds"):
            about[f"{key}_se"] = _rounded(np.std(values, ddof=1) / len(values) ** 0.5) if len(values) > 1 else None
    return about


def _rounded(value: Any) -> float:
    return float(f"{value:.4g}")
