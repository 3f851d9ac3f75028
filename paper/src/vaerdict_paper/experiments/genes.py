"""Section 5 of the paper: differential expression with controlled false discovery rates on simulated counts.

Every seed has its own data set. A task trains one model on one data set and measures all that is asked of it: its
evidence, contrasts of many and of few cells with every kind of uncertainty, and every proposal for it. Rivals compare
the same cells. They need packages of their own; their tasks are skipped where these are not installed, and the same
command adds them once they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from importlib.util import find_spec
from typing import Any, ClassVar

from torch import Tensor

from vaerdict.core import SettingError
from vaerdict.tasks import Skipped, Task
from vaerdict_paper.experiments.genes_arms import ARMS, donor_arm, floors
from vaerdict_paper.experiments.genes_contrasts import contrasts
from vaerdict_paper.experiments.genes_fit import PROPOSALS, Problem, Training
from vaerdict_paper.experiments.genes_measure import DELTA, averaged
from vaerdict_paper.experiments.genes_models import Measures, measure_model
from vaerdict_paper.experiments.rivals import COUNTS, IMPORTANCE, TESTS, packages, rival_rows

SECTION5, GRADED = "section5", "graded"
RIVALS = ["scvi-uniform", "scvi-means", "scvi-means-centred", *TESTS, COUNTS]
"""Rivals on the simulators of the paper; on the others those that train no model."""

DONOR_RIVALS = [*TESTS, "wilcoxon+lfc, cells", COUNTS]
"""Tests of donors, and the test of their cells that is common."""


@dataclass(frozen=True)
class Preset:
    """How much of the experiment to run, and which of its stages.

    A task trains one small model. Many cores are therefore faster than a GPU, which is used on request only.

    Section 5 has ten times as many cells: training takes four times as many per step, and refits are left out. AIS
    takes minutes per model and the importance mode of scvi-tools as long as its training; both have fewer seeds. Only
    `one_model` is measured by AIS, on graded changes and on donors.
    """

    on_cores: ClassVar[bool] = True

    stages: tuple[str, ...] = ("section5", "models", "graded", "donors", "floors", "rivals")
    simulators: tuple[str, ...] = ("appendix", "released")
    other_simulators: tuple[str, ...] = (GRADED, SECTION5)
    models: tuple[str, ...] = PROPOSALS
    seeds: int = 5
    training: Training = field(default_factory=Training)
    n_draws: int = 200
    khat_draws: int = 1000
    refits: int = 6
    subsets: int = 4
    ais_cells: int = 50
    ais_seeds: int = 3
    section5_seeds: int = 5
    section5_cells: int = 10_000
    section5_epochs: int = 40
    section5_proposal_epochs: int = 5
    importance_seeds: int = 3
    one_model: str = "VAE"
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
        stages=("models", "graded", "donors", "floors"),
        other_simulators=(GRADED,),
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
        "section5": lambda: _on_models("section5", (SECTION5,), preset.models, min(n, preset.section5_seeds), preset),
        "models": lambda: _on_models("models", preset.simulators, preset.models, n, preset),
        "graded": lambda: _on_models("graded", (GRADED,), (preset.one_model,), n, preset),
        "donors": lambda: _donors(preset),
        "floors": lambda: _floors(preset, n),
        "rivals": lambda: _rivals(preset, n),
    }
    unknown = [stage for stage in preset.stages if stage not in makers]
    if unknown:
        raise SettingError(f"no stage {', '.join(unknown)}; there are {', '.join(makers)}.")
    return [task for stage in preset.stages for task in makers[stage]()]


def _on_models(
    stage: str, simulators: tuple[str, ...], models: tuple[str, ...], seeds: int, preset: Preset
) -> list[Task]:
    return [
        {"stage": stage, "simulator": simulator, "seed": seed, "model": model, "preset": preset.stored()}
        for seed in range(seeds)
        for simulator in simulators
        for model in models
    ]


def _donors(preset: Preset) -> list[Task]:
    sizes = {"null": preset.null_sets, "effect": preset.effect_sets}
    return [
        {"stage": "donors", "arm": arm, "set": i, "preset": preset.stored()}
        for arm, n in sizes.items()
        for i in range(n)
    ]


def _data_sets(preset: Preset, seeds: int) -> list[tuple[str, int]]:
    """Simulators and seeds of all data sets that models are compared on, but the donors."""
    most = {SECTION5: preset.section5_seeds}
    names = (*preset.simulators, *preset.other_simulators)
    return [(name, seed) for name in names for seed in range(min(seeds, most.get(name, seeds)))]


def _floors(preset: Preset, seeds: int) -> list[Task]:
    return [
        {"stage": "floors", "simulator": simulator, "seed": seed, "preset": preset.stored()}
        for simulator, seed in _data_sets(preset, seeds)
    ]


def _rivals(preset: Preset, seeds: int) -> list[Task]:
    """Tasks that hold all their settings, so that they are the same under every preset."""
    simulated = [
        {"stage": "rivals", "simulator": simulator, "seed": seed, "names": _rival_names(simulator, seed, preset)}
        for simulator, seed in _data_sets(preset, seeds)
    ]
    sizes = {"subsets": preset.subsets, "cells": preset.section5_cells}
    from_donors = [
        {"stage": "rivals", "simulator": "donors", "arm": arm, "set": i, "names": DONOR_RIVALS}
        for arm, n in (("null", preset.null_sets), ("effect", preset.effect_sets))
        for i in range(n)
    ]
    return [
        *({**task, **(sizes if task["simulator"] == SECTION5 else {"subsets": preset.subsets})} for task in simulated),
        *({**task, "cells": preset.donor_cells} for task in from_donors),
    ]


def _rival_names(simulator: str, seed: int, preset: Preset) -> list[str]:
    if simulator not in preset.simulators:
        return [*TESTS, COUNTS]
    return [*RIVALS, IMPORTANCE] if seed < preset.importance_seeds else RIVALS


def data(preset: Preset, seeds: Sequence[int]) -> Iterator[Tensor]:
    """The counts of every data set that models are compared on, for the hash in the manifest."""
    return (_problem(name, seed, preset).data.counts for name, seed in _data_sets(preset, len(seeds)))


# ------------------------------------------------------------------------------------------------------ work
def work(task: Task) -> dict[str, Any]:
    """Do one task (see `tasks`)."""
    stages: dict[str, Callable[[Task], dict[str, Any]]] = {
        "section5": _section5,
        "models": _models,
        "graded": _graded,
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


def _problem(simulator: str, seed: int, preset: Preset) -> Problem:
    sizes = {"n_cells": preset.section5_cells} if simulator == SECTION5 else {}
    return Problem.of(simulator, seed, **sizes)


def _problem_of(task: Task, preset: Preset) -> Problem:
    return _problem(task["simulator"], task["seed"], preset)


def _measures(preset: Preset) -> Measures:
    return Measures(preset.n_draws, preset.khat_draws, preset.refits, preset.subsets)


def _models(task: Task) -> dict[str, Any]:
    preset = preset_of(task)
    with_ais = task["seed"] < preset.ais_seeds and task["model"] == preset.one_model
    asked = replace(_measures(preset), ais_cells=preset.ais_cells if with_ais else 0)
    return measure_model(_problem_of(task, preset), task["model"], preset.training, asked)


def _graded(task: Task) -> dict[str, Any]:
    """Changes near delta: every kind of uncertainty, by refined proposals alone."""
    preset = preset_of(task)
    asked = replace(_measures(preset), proposals=False)
    return measure_model(_problem_of(task, preset), task["model"], preset.training, asked)


def _section5(task: Task) -> dict[str, Any]:
    """Five types of cells, two of which are compared; no refits."""
    preset = preset_of(task)
    training, asked = preset.training, replace(_measures(preset), refits=0)
    longer = replace(training, batch_size=4 * training.batch_size, epochs=preset.section5_epochs)
    shorter = replace(training, proposal_epochs=preset.section5_proposal_epochs)
    return measure_model(_problem_of(task, preset), task["model"], longer, asked, training_of_proposals=shorter)


def _floor_rows(task: Task) -> dict[str, Any]:
    preset = preset_of(task)
    return floors(_problem_of(task, preset), subsets=preset.subsets)


def _donor_arm(task: Task) -> dict[str, Any]:
    preset = preset_of(task)
    sizes = {"n_draws": preset.n_draws, "n_cells": preset.donor_cells}
    return donor_arm(task["set"], task["arm"], preset.one_model, preset.training, **sizes)


def _rival_rows(task: Task) -> dict[str, Any]:
    missing = [package for package in packages(task["names"]) if not _installed(package)]
    if missing:
        raise Skipped(f"the rivals {', '.join(task['names'])} need {', '.join(missing)}; install the extra `rivals`.")
    arm, seed = task.get("arm"), int(task["set"] if "set" in task else task["seed"])
    sizes = {"n_cells": task["cells"]} if "cells" in task else {}
    problem = Problem.of(task["simulator"], seed, **sizes, **({} if arm is None else {"null": ARMS[arm]}))
    compared = contrasts(problem.data, seed, task["subsets"] if arm is None else 0)
    rows = rival_rows(compared, delta=DELTA, names=task["names"], seed=seed)
    rows = [{**row, **problem.labels, "delta": DELTA} for row in rows]
    if arm is None:
        return {"cross": averaged(rows, "model", "n_cells", "estimand", "seed")}
    return {"donors": [{**row, "arm": arm} for row in rows]}


def _installed(package: str) -> bool:
    return find_spec(package) is not None
