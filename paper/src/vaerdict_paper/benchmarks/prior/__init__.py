"""What the learned prior of differential expression gains and costs: real cells, simulations, and cells that do not
differ.

Ours is `vaerdict.differential_expression` of all expressed genes with each prior; the other tests have the same cells
and genes. On real cells the truth is told by cells that are not compared (`measures`); in simulations it is known too.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from vaerdict.core import DataError, Progress, silent
from vaerdict.de.rivals import ANY_CHANGE, BEYOND_DELTA
from vaerdict.tasks import Skipped, Task, run_tasks
from vaerdict_paper.benchmarks.prior import designs, simulated
from vaerdict_paper.benchmarks.prior.designs import OTHER_KINDS, SAME_KINDS, WRONG_KINDS, Case
from vaerdict_paper.benchmarks.prior.measures import Answer, Truth, at_looser_levels, judged
from vaerdict_paper.benchmarks.prior.methods import COUNTS, DELTA, MODEL, PROFILE, answer_of, ours, tested, truth_of

PACKAGES, PEERS = ("anndata", "sklearn"), ("scanpy", "edgepython")
RESUMABLE = True
WORKERS: int | None = None
"""Processes: one per core. Costs are measured by one."""

CONTRAST, NULL, UNDONE, COST = "contrast", "null", "undone", "cost"
CHEAP, TRAINED, TESTED = "counts and profile", "model", "tests"
"""Methods that are asked in one task."""

REPETITIONS, NULLS, COSTS = 10, 20, 3
SIZES, NULL_SIZES = (15, 50), (15, 50, 200)  # cells a side
SHARE_UNDONE = 0.1  # of the changed genes
PAIRED_CELLS = 50  # of each sample

_UNDONE = (
    (designs.KANG_MONOCYTES, OTHER_KINDS),
    (designs.KANG_CD4, OTHER_KINDS),
    (designs.PBMC_T, OTHER_KINDS),
    (designs.PBMC_T, SAME_KINDS),
    (designs.PBMC_MONOCYTES, OTHER_KINDS),
)
_COSTS = (designs.KANG_MONOCYTES, designs.PBMC_T)
_OTHER_PATIENTS = "other patients"
_PRIOR_COLUMNS = ("kind", "used", "correlation", "slope", "share_following", "n_by_prior", "n_counts")


def run(*, quick: bool = False, progress: Progress = silent, out: Path | None = None) -> Iterator[dict[str, Any]]:
    """One row per design, number of cells, repetition and method, with the measures of `measures.judged`.

    Measures that end in ``_exact`` are by the exact truth of simulations; ``fdp_any_exact`` is the share of calls of
    genes that do not change at all. ``undone`` is the number of genes whose change was removed, ``undone_called`` that
    of those called. ``looser`` has the measures of the counts at other levels.
    """
    todo = tasks(quick=quick)
    with TemporaryDirectory() as temporary:
        folder = Path(temporary) if out is None else out
        several = [task for task in todo if task["stage"] != COST]
        done = run_tasks(work, several, folder, workers=WORKERS, progress=progress).results
        timed = [task for task in todo if task["stage"] == COST]
        done += run_tasks(work, timed, folder / "cost", workers=1, progress=progress).results
    for result in done:
        yield from result["rows"]


# ------------------------------------------------------------------------------------------------------ the tasks
def tasks(*, quick: bool = False) -> list[Task]:
    """Every repetition of every design: first what is fast, then the trained models, then the costs."""
    cases = [(CONTRAST, *case, REPETITIONS) for case in _contrasts()]
    kinds = (*designs.HOMOGENEOUS, *designs.MIXED)
    cases += [(NULL, data, OTHER_KINDS, n, NULLS) for data in kinds for n in NULL_SIZES]
    cases += [(UNDONE, *case, n, REPETITIONS) for case in _UNDONE for n in SIZES]
    cases += [(COST, data, OTHER_KINDS, max(SIZES), COSTS) for data in _COSTS]
    if quick:
        cases = [(*case[:4], 2) for case in cases if case[1] in _QUICK and (case[3] == min(SIZES) or case[0] == COST)]
    return [
        {"stage": stage, "data": data, "others": others, "n": n, "methods": methods, "seed": seed}
        for methods in (CHEAP, TESTED, TRAINED)
        for stage, data, others, n, repetitions in cases
        for seed in range(repetitions)
        if _asked(stage, data, others, methods)
    ]


_QUICK = (designs.KANG_MONOCYTES, designs.PBMC_T, simulated.MODULES, "PBMC 3k, B and NK")


def _contrasts() -> Iterator[tuple[str, str, int]]:
    """Data, other cells, and cells a side."""
    for data, asked in designs.CONTRASTS.items():
        for others in (OTHER_KINDS, SAME_KINDS) if asked.unrelated else (OTHER_KINDS,):
            yield from ((data, others, n) for n in SIZES)
        if asked.unrelated:
            yield data, WRONG_KINDS, min(SIZES)
    for data in designs.PATIENTS:
        sizes = (PAIRED_CELLS,) if data == designs.PAIRED else SIZES
        yield from ((data, _OTHER_PATIENTS, n) for n in sizes)
    for data, choices in simulated.OTHERS.items():
        yield from ((data, others, n) for others in choices for n in SIZES)


def _asked(stage: str, data: str, others: str, methods: str) -> bool:
    """Whether methods are asked: tests do not see other cells, and are judged once where these alone differ."""
    first = simulated.OTHERS.get(data, (_OTHER_PATIENTS if data in designs.PATIENTS else OTHER_KINDS,))[0]
    return methods != TESTED or (stage == CONTRAST and others == first)


def work(task: Task) -> dict[str, Any]:
    """The rows of the methods of one task."""
    try:
        case = _case(task)
    except DataError as error:
        raise Skipped(str(error)) from error
    if case is None:  # too few cells
        return {"rows": []}
    names = {key: task[key] for key in ("stage", "data", "others", "n", "seed")}
    return {"rows": [_rounded({**names, **row}) for row in _STAGES[task["stage"]](case, task)]}


def _case(task: Task) -> Case | None:
    stage, data, others, n, seed = (task[key] for key in ("stage", "data", "others", "n", "seed"))
    rng = np.random.default_rng([seed, *f"{stage} {data} {n}".encode()])  # the same cells for all methods and others
    if stage == NULL:
        return designs.null(data, n, rng)
    if data in designs.CONTRASTS:
        return designs.contrast(data, others, n, rng)
    if data in designs.PATIENTS:
        return designs.patients(data, n, seed, rng)
    return simulated.SIMULATED[data](others, n, rng)


def _rounded(row: dict[str, Any]) -> dict[str, Any]:
    """The row with five significant digits, which keeps the file of results small."""
    return {key: _short(value) for key, value in row.items()}


def _short(value: Any) -> Any:
    if isinstance(value, list):
        return [_rounded(item) for item in value]
    return float(f"{value:.5g}") if isinstance(value, float) else value


# ------------------------------------------------------------------------------------------------------ the stages
def _priors(task: Task) -> tuple[str, ...]:
    return (MODEL,) if task["methods"] == TRAINED else (COUNTS, PROFILE)


def _contrast(case: Case, task: Task) -> Iterator[dict[str, Any]]:
    """A row for each method, judged by the cells that tell the truth, and by the exact truth where it is known."""
    assert case.truth is not None
    truth = truth_of(case.truth, task["seed"])
    exact = None if case.exact is None else Truth.exactly(case.exact, DELTA)
    if task["methods"] == TESTED:
        genes = answer_of(ours(case.analysed, COUNTS, task["seed"])[0]).genes
        for name, question, seconds, answer in tested(case.analysed, genes, task["seed"]):
            row = {"method": name, "question": question, **_judged(answer, truth, exact), "seconds": seconds}
            if exact is not None and question == ANY_CHANGE:
                unchanged = exact.lfc[answer.genes] == 0
                n = int(answer.called.sum())
                row["fdp_any_exact"] = int((answer.called & unchanged).sum()) / max(n, 1)
            yield row
        return
    for prior in _priors(task):
        result, seconds = ours(case.analysed, prior, task["seed"])
        answer = answer_of(result)
        row = {"method": prior, "question": BEYOND_DELTA, **_judged(answer, truth, exact), "seconds": seconds}
        if prior == COUNTS:
            row["looser"] = at_looser_levels(answer, truth, DELTA)
        yield row | _prior(result) | _by_prior(result, answer, truth)


def _judged(answer: Answer, truth: Truth, exact: Truth | None) -> dict[str, Any]:
    row = judged(answer, truth, DELTA)
    if exact is None:
        return row
    known = judged(answer, exact, DELTA)
    known["fdp"] = known.pop("fdp_hard")
    del known["fdp_soft"], known["n_called"]
    return row | {f"{key}_exact": value for key, value in known.items()}


def _prior(result: Any) -> dict[str, Any]:
    """How good the predictions were, and how many genes are called thanks to them."""
    prior = result.results["contrasts"][0].get("prior") or {}
    return {f"prior_{key}": prior[key] for key in _PRIOR_COLUMNS if key in prior}


def _by_prior(result: Any, answer: Answer, truth: Truth) -> dict[str, Any]:
    """The hard and soft share of false calls among the genes called thanks to the prior alone."""
    if "by_prior" not in result.table:
        return {}
    moved = judged(answer._replace(called=result.table["by_prior"].to_numpy(dtype=bool)), truth, DELTA)
    if not moved["n_called"]:
        return {}
    return {f"by_prior_{key}": moved[key] for key in ("fdp_hard", "fdp_soft")}


def _null(case: Case, task: Task) -> Iterator[dict[str, Any]]:
    """Every call is false."""
    for prior in _priors(task):
        result, seconds = ours(case.analysed, prior, task["seed"])
        answer = answer_of(result)
        called = {"n_genes": len(answer.genes), "n_called": int(answer.called.sum())}
        yield {"method": prior, **called, "seconds": seconds, **_prior(result)}


def _undone(case: Case, task: Task) -> Iterator[dict[str, Any]]:
    """The changes of some changed genes are thinned away in the cells compared, while those of their module stay."""
    assert case.truth is not None
    truth = truth_of(case.truth, task["seed"])
    rng = np.random.default_rng([task["seed"], *b"undone"])
    chosen = truth.changed(DELTA) & (rng.random(len(truth.lfc)) < SHARE_UNDONE)
    cells = designs.undone(case.analysed, np.where(chosen, truth.lfc, 0.0), rng)
    for prior in _priors(task):
        result, seconds = ours(cells, prior, task["seed"])
        answer = answer_of(result)
        removed, n = chosen[answer.genes], int(answer.called.sum())
        called = int((removed & answer.called).sum())
        row = {"method": prior, "n_called": n, "undone": int(removed.sum()), "undone_called": called}
        yield {**row, "seconds": seconds, **_prior(result)}


def _cost(case: Case, task: Task) -> Iterator[dict[str, Any]]:
    """Seconds of each prior, one after the other."""
    for prior in _priors(task):
        result, seconds = ours(case.analysed, prior, task["seed"])
        yield {"method": prior, "n_genes": len(result.table), "n_other": _n_other(case), "seconds": seconds}


def _n_other(case: Case) -> int:
    return int((case.analysed.side == designs.OTHER).sum())


_STAGES = {CONTRAST: _contrast, NULL: _null, UNDONE: _undone, COST: _cost}
