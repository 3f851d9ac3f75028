"""How often the verdict of ``vaerdict de`` sees that fold changes are relative to genes that changed.

Fold changes are differences from a centre, the largest set of genes with about the same change. The truth has the
change of genes that do not change on the same scale. A centre is wrong if it is farther from it than the verdict
allows (`vaerdict.de.verdict.most_shift`), and doubted if the verdict calls it unsure. Cells are those of the paper's
simulators, in which most genes change, and real cells of one kind with changes planted in some of the genes, of one
direction or of both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from scipy import sparse

from vaerdict.core import DataError, Progress, silent
from vaerdict.datasets.genes import CountData, appendix, donors, graded, released, section5
from vaerdict.de.verdict import most_shift
from vaerdict.tasks import Skipped, Task, run_tasks
from vaerdict_paper.benchmarks.de_methods import DELTA, asked, listed, places, rounded, scores
from vaerdict_paper.benchmarks.de_methods.cells import KINDS, Split, fits, split_cells
from vaerdict_paper.experiments.genes_contrasts import Sides

PACKAGES = ("anndata",)
RESUMABLE = True

SIMULATORS: dict[str, Callable[[int], CountData]] = {
    "appendix": appendix,
    "released": released,
    "graded": graded,
    "section5": section5,
    "donors": donors,
}
SIMULATED, PLANTED = "simulated", "planted"
SEEDS, FIRST_SEED = 20, 4100  # of simulated data sets, none of which the verdict was built on
PLANTINGS = 10
SIZES: dict[str, tuple[str, ...]] = {SIMULATED: ("all", "50", "20"), PLANTED: ("200", "50")}

SHARES = (0.1, 0.3, 0.5, 0.7)
"""Shares of all genes whose change is planted."""

DIRECTIONS = {"as many up as down": 0.5, "three up for one down": 0.75, "all up": 1.0}
"""The share of the planted changes that are up."""

_LEAST, _MOST = 0.5, 2.0  # planted |LFC|


def run(*, quick: bool = False, progress: Progress = silent, out: Path | None = None) -> Iterator[dict[str, Any]]:
    """One row per list of genes.

    ``off`` is the distance of the centre from the change of unchanged genes, in log2 units, ``wrong`` whether it is
    more than the verdict allows, ``doubted`` whether the verdict doubts the centre. ``fdp`` and ``tpr`` are those of
    the genes called at 5 %, ``coverage`` that of 90 % intervals, by changes relative to the unchanged genes.
    """
    with TemporaryDirectory() as temporary:
        done = run_tasks(work, tasks(quick=quick), out or Path(temporary), workers=1, progress=progress)
    for result in done.results:
        yield from result["rows"]


def tasks(*, quick: bool = False) -> list[Task]:
    """Every simulated data set, and every plan of changes in real cells of every kind."""
    seeds, plantings, shares = (1, 1, SHARES[1:3]) if quick else (SEEDS, PLANTINGS, SHARES)
    simulated = [
        {"stage": SIMULATED, "data": name, "seed": FIRST_SEED + seed} for name in SIMULATORS for seed in range(seeds)
    ]
    planted = [
        {"stage": PLANTED, "data": kind, "share": share, "direction": direction, "seed": seed}
        for kind in KINDS
        for share in shares
        for direction in DIRECTIONS
        for seed in range(plantings)
    ]
    return [*simulated, *planted]


def work(task: Task) -> dict[str, Any]:
    """Ask `vaerdict.differential_expression` about the cells of one task, of every size."""
    names = {key: task.get(key) for key in ("stage", "data", "share", "direction", "seed")}
    try:
        splits = list(_simulated(task) if task["stage"] == SIMULATED else _planted(task))
    except DataError as error:
        raise Skipped(str(error)) from error
    return {"rows": [{**names, "size": size, **measured(s, task["seed"])} for size, s in splits]}


def measured(split: Split, seed: int) -> dict[str, Any]:
    """The metrics of the list of one comparison, and whether its centre is wrong and is doubted."""
    result, _ = asked(split, seed)
    called, order = listed(result)
    genes = places(result)  # genes that no cell of the kind has have no change at all
    shift = float(np.median((split.truth - split.lfc)[genes]))
    off = abs(result.results["contrasts"][0]["centre"] - shift)
    truth = split.truth[genes] - shift
    low, high = (result.table[name].to_numpy(dtype=np.float64) for name in ("lfc_low", "lfc_high"))
    row = {
        "off": off,
        "wrong": off > most_shift(DELTA),
        "doubted": result.verdict["centre"] == "unsure",
        "n_called": int(called.sum()),
        **scores(called, order, np.abs(truth) >= DELTA),
        "coverage": float(((low <= truth) & (truth <= high)).mean()),
    }
    return rounded(row)


def _simulated(task: Task) -> Iterator[tuple[str, Split]]:
    """The cells of two states, all or few of them; donors, which are replicates, with all of their cells."""
    data = SIMULATORS[task["data"]](task["seed"])
    for size in SIZES[SIMULATED] if data.donors is None else SIZES[SIMULATED][:1]:
        sides = Sides.of(data, None if size == "all" else int(size), seed=task["seed"])
        samples = None if data.donors is None else np.array([f"donor {i}" for i in data.donors[sides.cells].tolist()])
        lfc, truth = (data.lfc(*sides.states, proportions=p).double().numpy() for p in (False, True))
        counts = sparse.csr_matrix(data.counts[sides.cells].numpy())
        yield size, Split(counts, sides.labels.numpy() == 0, samples, lfc, truth)


def _planted(task: Task) -> Iterator[tuple[str, Split]]:
    """Random sides of real cells with changes planted between them."""
    kind, share, up = task["data"], task["share"], DIRECTIONS[task["direction"]]
    for size in SIZES[PLANTED]:
        if fits(kind, size):
            rng = np.random.default_rng([task["seed"], *f"{kind} {share} {task['direction']} {size}".encode()])
            yield size, split_cells(kind, size, rng, partial(one_sided, share=share, up=up))


def one_sided(expression: np.ndarray, rng: np.random.Generator, *, share: float, up: float) -> np.ndarray:
    """Changes of a share of the genes, of which the share `up` is positive. Shapes: ``(genes,) -> (genes,)``."""
    n = len(expression)
    size = rng.uniform(_LEAST, _MOST, n) * np.where(rng.random(n) < up, 1.0, -1.0)
    return np.where(rng.random(n) < share, size, 0.0)
