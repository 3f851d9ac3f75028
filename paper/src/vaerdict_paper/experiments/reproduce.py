"""Running experiments: from a name and a preset to a run directory with results.json and manifest.json."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import asdict, replace
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from vaerdict.core import Progress, SettingError, silent
from vaerdict.engines import Engine
from vaerdict.io import manifest, write_json
from vaerdict.runs import RunFolder
from vaerdict.tasks import Task, TaskResults, run_tasks

EXPERIMENTS = ("bivariate", "ppca", "mnist", "genes", "audit")
"""The experiments, including the audit of the released code."""


def experiment(name: str) -> ModuleType:
    """The module of an experiment, with `PRESETS`, `tasks`, `work` and `data`."""
    if name not in EXPERIMENTS:
        raise SettingError(f"no experiment {name!r}; choose one of {', '.join(EXPERIMENTS)}.")
    return import_module(f"vaerdict_paper.experiments.{name}")


def reproduce(
    name: str,
    preset: str,
    out: Path,
    *,
    seeds: int | None = None,
    force: bool = False,
    workers: int | None = None,
    device: str | None = None,
    engine: Engine | None = None,
    progress: Progress = silent,
) -> dict[str, Any]:
    """Run an experiment into a directory.

    Parameters
    ----------
    name, preset
        The experiment and one of its presets.
    out
        The run directory. A run there that was stopped goes on; another run, or other files, are refused.
    seeds
        The number of seeds, if not that of the preset.
    force
        Whether to replace the run that `out` holds, or to write beside the files there.
    workers
        The number of processes; by default one per core, on an accelerator one.
    device
        The device of training, ``auto`` for a GPU if there is one and the experiment profits from it.
    engine
        Where tasks run; local processes by default.
    progress
        Called after every task.

    Returns
    -------
    dict
        The results. They do not depend on interruptions; only ``seconds`` differ between runs.
    """
    module = experiment(name)
    if preset not in module.PRESETS:
        raise SettingError(f"no preset {preset!r} of {name}; choose one of {', '.join(module.PRESETS)}.")
    settings = module.PRESETS[preset]
    if seeds is not None and hasattr(settings, "seeds"):
        settings = replace(settings, seeds=seeds)
    elif seeds is not None and hasattr(settings, "with_seeds"):
        settings = settings.with_seeds(seeds)
    if device is not None and hasattr(settings, "device"):
        settings = replace(settings, device=_device(device, settings))
    tasks = module.tasks(settings, seeds)
    if getattr(settings, "device", "cpu") != "cpu":
        workers = workers or 1  # several processes share an accelerator on request only
    RunFolder.of(out, name, force=force).claim({"preset": preset, "seeds": seeds, "settings": asdict(settings)})
    run = run_tasks(module.work, tasks, out, workers=workers, engine=engine, progress=progress)
    all_seeds = _seeds(settings, tasks)
    results = {
        "experiment": name,
        "preset": preset,
        "settings": asdict(settings),
        "seeds": all_seeds,
        "seconds": run.seconds,
        **({"skipped": run.skipped} if run.skipped else {}),
        **_merged(run),
    }
    digest = _sha256(module.data(settings, all_seeds))
    made = manifest(asdict(settings), run.seconds, data_sha256=digest)
    write_json(out / "manifest.json", made | {"task_commits": run.commits, "task_machines": run.machines})
    write_json(out / "results.json", results)
    return results


def _device(device: str, settings: Any) -> str:
    """Resolve ``auto``: a GPU if there is one, unless the experiment is faster on CPU cores."""
    if device != "auto":
        return device
    return "cuda" if torch.cuda.is_available() and not getattr(settings, "on_cores", False) else "cpu"


def _seeds(settings: Any, tasks: list[Task]) -> list[int]:
    """The seeds of all tasks, or those of the settings if a task covers several."""
    return sorted({task["seed"] for task in tasks if "seed" in task}) or list(range(getattr(settings, "seeds", 0)))


def _merged(run: TaskResults) -> dict[str, Any]:
    """The results of all tasks: lists concatenated, other values as they are."""
    merged: dict[str, Any] = {}
    for result in run.results:
        for key, value in result.items():
            merged[key] = merged.get(key, []) + value if isinstance(value, list) else value
    return merged


def _sha256(data: Iterable[Tensor | bytes]) -> str:
    """The hash of all data of an experiment, in order."""
    digest = hashlib.sha256()
    for part in data:
        digest.update(part if isinstance(part, bytes) else part.contiguous().numpy().tobytes())
    return digest.hexdigest()
