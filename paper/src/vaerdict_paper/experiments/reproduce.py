"""From an experiment's name to a run directory: tasks, results.json, manifest.json."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from vaerdict.core import Progress, SettingError, silent
from vaerdict.datasets import linear_gaussian
from vaerdict.engines import Engine
from vaerdict.io import manifest, write_json
from vaerdict.tasks import Run, Task, run_tasks

EXPERIMENTS = ("bivariate", "ppca", "mnist", "genes", "audit")
"""What `reproduce` can run, the audit of the released code among them."""


@dataclass(frozen=True)
class Experiment:
    """An experiment's module, seen through the three names every one of them has, and `data` where it simulates any."""

    name: str
    presets: dict[str, Any]
    tasks: Callable[[Any, int | None], list[Task]]
    work: Callable[[Task], dict[str, Any]]
    data: Callable[[Any], torch.Tensor | None]


def experiment(name: str) -> Experiment:
    """The experiment of that name; an unknown one is refused with the list."""
    if name not in EXPERIMENTS:
        raise SettingError(f"no experiment {name!r}; choose one of {', '.join(EXPERIMENTS)}.")
    module = import_module(f"vaerdict_paper.experiments.{name}")
    return Experiment(name, module.PRESETS, module.tasks, module.work, getattr(module, "data", _data))


def reproduce(
    name: str,
    preset: str,
    out: Path,
    *,
    seeds: int | None = None,
    resume: bool = False,
    workers: int | None = None,
    device: str | None = None,
    engine: Engine | None = None,
    progress: Progress = silent,
) -> dict[str, Any]:
    """Run an experiment into `out` and return its results, which are the same however often it was stopped and resumed.

    Units are done by `engine`, by default in `workers` processes. Only ``seconds`` differs between runs.
    """
    chosen = experiment(name)
    if preset not in chosen.presets:
        raise SettingError(f"no preset {preset!r} of {name}; choose one of {', '.join(chosen.presets)}.")
    settings = chosen.presets[preset]
    if seeds is not None and hasattr(settings, "seeds"):
        settings = replace(settings, seeds=seeds)
    if device is not None and hasattr(settings, "device"):
        settings = replace(settings, device=_chosen(device, settings))
    tasks = chosen.tasks(settings, seeds)
    if getattr(settings, "device", "cpu") != "cpu":
        workers = 1  # one process has the accelerator to itself
    run = run_tasks(chosen.work, tasks, out, resume=resume, workers=workers, engine=engine, progress=progress)
    results = {
        "experiment": name,
        "preset": preset,
        "settings": asdict(settings),
        "seeds": _seeds(settings, tasks),
        "seconds": run.seconds,
        **({"skipped": run.skipped} if run.skipped else {}),
        **_merged(run),
    }
    write_json(out / "results.json", results)
    digest = _digest(chosen.data(settings))
    write_json(out / "manifest.json", manifest(asdict(settings), run.seconds, data_sha256=digest))
    return results


def _chosen(device: str, settings: Any) -> str:
    """What ``auto`` stands for: a GPU where there is one, unless the experiment says that it is better off on cores."""
    if device != "auto":
        return device
    return "cuda" if torch.cuda.is_available() and not getattr(settings, "on_cores", False) else "cpu"


def _seeds(settings: Any, tasks: list[Task]) -> list[int]:
    """Every seed of the run; where a task works on all of them at once, those of its settings."""
    return sorted({task["seed"] for task in tasks if "seed" in task}) or list(range(getattr(settings, "seeds", 0)))


def _merged(run: Run) -> dict[str, Any]:
    """Lists of the tasks' results one after the other; single values as they are."""
    merged: dict[str, Any] = {}
    for result in run.results:
        for key, value in result.items():
            merged[key] = merged.get(key, []) + value if isinstance(value, list) else value
    return merged


def _data(settings: Any) -> torch.Tensor | None:
    """All training data an experiment simulates, for the manifest's hash."""
    if not hasattr(settings, "data_seed") or not hasattr(settings, "seeds"):
        return None
    every = range(settings.data_seed, settings.data_seed + settings.seeds)
    return torch.cat([linear_gaussian(seed, loadings=settings.loadings).x_train for seed in every])


def _digest(data: torch.Tensor | None) -> str | None:
    return None if data is None else hashlib.sha256(data.contiguous().numpy().tobytes()).hexdigest()
