"""Pieces of work, some at a time, each result written whole, so that a killed run goes on where it was."""

from __future__ import annotations

import hashlib
import json
import logging
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from vaerdict.core import Progress, SettingError, silent
from vaerdict.engines import Engine, Local
from vaerdict.io import write_json

log = logging.getLogger(__name__)

Task = dict[str, Any]
"""What one piece of work needs to know: JSON values only, so that it can be named, stored and sent."""

Work = Callable[[Task], dict[str, Any]]
"""A module-level function that does one task and returns JSON values."""


class Skipped(Exception):
    """Raised by work that cannot be done on this machine; nothing is stored, so that --resume does it where it can."""


@dataclass(frozen=True)
class Run:
    """What came of the tasks: results in the order given, the seconds each took, and the names of those skipped."""

    results: list[dict[str, Any]]
    seconds: dict[str, float]
    skipped: list[str] = field(default_factory=list)


def run_tasks(
    work: Work,
    tasks: Sequence[Task],
    out: Path,
    *,
    resume: bool,
    workers: int | None = None,
    engine: Engine | None = None,
    progress: Progress = silent,
) -> Run:
    """Do every task by `engine`, by default in `workers` processes (one a core), and return results in the order given.

    Finished tasks lie in ``out/parts``. With `resume` they are kept; without, a folder that holds any is refused, so
    that no run silently mixes with another.
    """
    parts = out / "parts"
    parts.mkdir(parents=True, exist_ok=True)
    paths = [parts / f"{task_name(task)}.json" for task in tasks]
    if not resume and any(parts.glob("*.json")):
        raise SettingError(f"{out} already holds parts of a run; continue it with --resume, or choose another --out.")
    todo = [(task, path) for task, path in zip(tasks, paths, strict=True) if not path.exists()]
    before = len(tasks) - len(todo)
    progress(before, len(tasks), "tasks")
    finished = (engine or Local(workers)).map(partial(_timed, work), [task for task, _ in todo])
    with closing(finished):
        for done, (place, came) in enumerate(finished, before + 1):
            _keep(*todo[place], came)
            progress(done, len(tasks), "tasks")
    stored = [json.loads(path.read_text()) for path in paths if path.exists()]
    skipped = [path.stem for path in paths if not path.exists()]
    return Run([s["result"] for s in stored], {task_name(s["task"]): s["seconds"] for s in stored}, skipped)


def _timed(work: Work, task: Task) -> dict[str, Any]:
    started = time.perf_counter()
    try:
        result = work(task)
    except Skipped as reason:
        return {"skipped": str(reason)}
    return {"result": result, "seconds": time.perf_counter() - started}


def _keep(task: Task, path: Path, came: dict[str, Any]) -> None:
    """Store what came of a task; here and not in the worker, which may be on a machine with other disks."""
    if "skipped" in came:
        log.info("skipped %s: %s", task_name(task), came["skipped"])
    else:
        write_json(path, {"task": task, **came})


def task_name(task: Task) -> str:
    """A readable file name for a task, with a hash of all of it so that other settings never collide."""
    digest = hashlib.sha256(json.dumps(task, sort_keys=True).encode()).hexdigest()[:8]
    words = [str(task[key]) for key in ("stage", "k", "seed") if key in task]
    return "-".join([*words, digest])
