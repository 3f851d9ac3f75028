"""Section 5 of the paper: differential expression with controlled false discovery rates on simulated counts.

Every seed has its own data set. A task trains one model on one data set; tasks of stage `grid` fit every proposal for
it, those of stage `few` compare few cells with every kind of uncertainty, and both train the same model from the same
seed. Rivals need packages of their own; their tasks are skipped where these are not installed, and the same command
adds them once they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from importlib.util import find_spec
from typing import Any, ClassVar

from torch import Tensor

from vaerdict.core import SettingError
from vaerdict.datasets.genes import SIMULATORS
from vaerdict.tasks import Skipped, Task
from vaerdict_paper.experiments.genes_arms import ARMS, donor_arm, few, floors
from vaerdict_paper.experiments.genes_fit import PROPOSALS, Problem, Training
from vaerdict_paper.experiments.genes_grid import grid
from vaerdict_paper.experiments.genes_measure import DELTA
from vaerdict_paper.experiments.rivals import TESTS, packages, rival_rows

SECTION5, SECTION5_EPOCHS = "section5", 80
RIVAL_SETS: tuple[tuple[tuple[str, ...], tuple[int | None, ...]], ...] = (
    (("scvi-uniform", "scvi-means", "scvi-means-centred", *TESTS), (None, 50, 20)),
    (("scvi-importance",), (None,)),
)
"""Rivals that share a task, and their numbers of cells per group; the importance mode takes minutes per contrast."""

DONOR_RIVALS = [*TESTS, "wilcoxon+lfc, cells"]
"""Tests of donors, and the test of their cells that is common."""


@dataclass(frozen=True)
class Preset:
    """How much of the experiment to run, and which of its stages.

    A task trains one small model. Many cores are therefore faster than a GPU, which is used on request only.
    """

    on_cores: ClassVar[bool] = True

    stages: tuple[str, ...] = ("section5", "grid", "few", "donors", "floors", "rivals")
    simulators: tuple[str, ...] = ("appendix", "released")
    models: tuple[str, ...] = PROPOSALS
    seeds: int = 5
    training: Training = field(default_factory=Training)
    n_draws: int = 200
    khat_draws: int = 1000
    refits: int = 6
    subsets: int = 4
    ais_cells: int = 20
    ais_seeds: int = 3
    section5_seeds: int = 2
    section5_cells: int = 10_000
    donor_model: str = "VAE"
    null_sets: int = 24
    effect_sets: int = 5
    donor_cells: int = 2000
    device: str = "cpu"

    def stored(self) -> dict[str, Any]:
        """The preset as it is stored in tasks; without the device if it is the CPU, which keeps the names of tasks."""
        fields = asdict(self)
        del fields["training"]["device"]
        return {name: value for name, value in fields.items() if name != "device" or value != "cpu"}


PRESETS = {
    "paper": Preset(),
    "rivals": Preset(stages=("rivals",)),
    "quick": Preset(
        stages=("grid", "few", "donors", "floors"),
        models=("VAE", "IWAE"),
        seeds=1,
        training=Training(n_particles=10, epochs=60, proposal_epochs=20, refit_epochs=10),
        refits=3,
        subsets=2,
        ais_cells=4,
        null_sets=2,
        effect_sets=1,
        donor_cells=500,
    ),
}


# ----------------------------------------------------------------------------------------------------- tasks
def tasks(preset: Preset, seeds: int | None = None) -> list[Task]:
    """All tasks of the experiment, the longest first so that all workers end together."""
    n = seeds or preset.seeds
    makers = {
        "section5": lambda: _on_models("section5", (SECTION5,), min(n, preset.section5_seeds), preset),
        "grid": lambda: _on_models("grid", preset.simulators, n, preset),
        "few": lambda: _on_models("few", preset.simulators, n, preset),
        "donors": lambda: _donors(preset),
        "floors": lambda: _floors(preset, n),
        "rivals": lambda: _rivals(preset, n),
    }
    unknown = [stage for stage in preset.stages if stage not in makers]
    if unknown:
        raise SettingError(f"no stage {', '.join(unknown)}; there are {', '.join(makers)}.")
    return [task for stage in preset.stages for task in makers[stage]()]


def _on_models(stage: str, simulators: tuple[str, ...], seeds: int, preset: Preset) -> list[Task]:
    return [
        {"stage": stage, "simulator": simulator, "seed": seed, "model": model, "preset": preset.stored()}
        for seed in range(seeds)
        for simulator in simulators
        for model in preset.models
    ]


def _donors(preset: Preset) -> list[Task]:
    sizes = {"null": preset.null_sets, "effect": preset.effect_sets}
    return [
        {"stage": "donors", "arm": arm, "set": i, "preset": preset.stored()}
        for arm, n in sizes.items()
        for i in range(n)
    ]


def _floors(preset: Preset, seeds: int) -> list[Task]:
    simulators = (*preset.simulators, *((SECTION5,) if "section5" in preset.stages else ()))
    return [
        {"stage": "floors", "simulator": simulator, "seed": seed, "preset": preset.stored()}
        for simulator in simulators
        for seed in range(min(seeds, preset.section5_seeds) if simulator == SECTION5 else seeds)
    ]


def _rivals(preset: Preset, seeds: int) -> list[Task]:
    """Tasks that hold all their settings, so that they are the same under every preset."""
    simulated = [
        {"stage": "rivals", "simulator": simulator, "seed": seed, "names": list(names), "n_cells": list(n_cells)}
        for names, n_cells in RIVAL_SETS
        for simulator in preset.simulators
        for seed in range(seeds)
    ]
    from_donors = [
        {"stage": "rivals", "simulator": "donors", "arm": arm, "set": i, "names": DONOR_RIVALS}
        for arm, n in (("null", preset.null_sets), ("effect", preset.effect_sets))
        for i in range(n)
    ]
    return [*simulated, *({**task, "n_cells": [None], "cells": preset.donor_cells} for task in from_donors)]


def data(preset: Preset, seeds: Sequence[int]) -> Iterator[Tensor]:
    """The counts of every data set that models are compared on, for the hash in the manifest."""
    return (SIMULATORS[simulator](seed).counts for simulator in preset.simulators for seed in seeds)


# ------------------------------------------------------------------------------------------------------ work
def work(task: Task) -> dict[str, Any]:
    """Do one task (see `tasks`)."""
    stages: dict[str, Callable[[Task], dict[str, Any]]] = {
        "section5": _section5,
        "grid": _grid,
        "few": _few,
        "donors": _donor_arm,
        "floors": _floor_rows,
        "rivals": _rival_rows,
    }
    return stages[task["stage"]](task)


def preset_of(task: Task) -> Preset:
    """The preset a task was made from."""
    stored: dict[str, Any] = task["preset"]
    fields = {name: tuple(v) if isinstance(v, list) else v for name, v in stored.items()}
    training = Training(**stored["training"], device=stored.get("device", "cpu"))
    return Preset(**{**fields, "training": training})


def _problem(task: Task, preset: Preset) -> Problem:
    sizes = {"n_cells": preset.section5_cells} if task["simulator"] == SECTION5 else {}
    return Problem.of(task["simulator"], task["seed"], **sizes)


def _grid(task: Task) -> dict[str, Any]:
    preset = preset_of(task)
    ais_cells = preset.ais_cells if task["seed"] < preset.ais_seeds else 0
    sizes = {"n_draws": preset.n_draws, "khat_draws": preset.khat_draws, "ais_cells": ais_cells}
    return grid(_problem(task, preset), task["model"], preset.training, **sizes)


def _few(task: Task) -> dict[str, Any]:
    preset = preset_of(task)
    sizes = {"n_draws": preset.n_draws, "refits": preset.refits, "subsets": preset.subsets}
    return few(_problem(task, preset), task["model"], preset.training, **sizes)


def _section5(task: Task) -> dict[str, Any]:
    """Five types of cells: the evidence of the model, and two of the types compared; no refits."""
    preset = preset_of(task)
    epochs = min(preset.training.epochs, SECTION5_EPOCHS)
    training = replace(preset.training, batch_size=4 * preset.training.batch_size, epochs=epochs)
    sizes = {"n_draws": preset.n_draws, "khat_draws": preset.khat_draws, "refits": 0, "subsets": preset.subsets}
    return few(_problem(task, preset), task["model"], training, **sizes)


def _floor_rows(task: Task) -> dict[str, Any]:
    preset = preset_of(task)
    return floors(_problem(task, preset), subsets=preset.subsets)


def _donor_arm(task: Task) -> dict[str, Any]:
    preset = preset_of(task)
    sizes = {"n_draws": preset.n_draws, "n_cells": preset.donor_cells}
    return donor_arm(task["set"], task["arm"], preset.donor_model, preset.training, **sizes)


def _rival_rows(task: Task) -> dict[str, Any]:
    missing = [package for package in packages(task["names"]) if not _installed(package)]
    if missing:
        raise Skipped(f"the rivals {', '.join(task['names'])} need {', '.join(missing)}; install the extra `rivals`.")
    arm, seed = task.get("arm"), int(task["set"] if "set" in task else task["seed"])
    sizes = {} if arm is None else {"null": ARMS[arm], "n_cells": task["cells"]}
    problem = Problem.of(task["simulator"], seed, **sizes)
    rows = rival_rows(problem.data, delta=DELTA, names=task["names"], seed=seed, n_cells=task["n_cells"])
    rows = [{**row, **problem.labels, "delta": DELTA} for row in rows]
    if arm is None:
        return {"cross": rows}
    return {"donors": [{**row, "arm": arm} for row in rows]}


def _installed(package: str) -> bool:
    return find_spec(package) is not None
