"""Tasks whose results are stored one by one, so that a run that was stopped can be resumed."""

from __future__ import annotations

import hashlib
import json
import logging
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from vaerdict.core import Progress, silent
from vaerdict.engines import Engine, Local
from vaerdict.io import commit, hardware, versions, write_json

log = logging.getLogger(__name__)

Task = dict[str, Any]
"""The arguments of one task: JSON values only, so that it can be named, stored and sent."""

Work = Callable[[Task], dict[str, Any]]
"""A module-level function that does one task and returns JSON values."""


class Skipped(Exception):
    """Raised by work that cannot be done on this machine. Nothing is stored: the same run can do it elsewhere."""


@dataclass(frozen=True)
class TaskResults:
    """Results in the order of the tasks, seconds by name of the task, the names of skipped tasks, commits, machines.

    `commits` lists every commit whose code did a task (see `vaerdict.io.commit`), `machines` the hardware and versions
    that did it. A run that was resumed after a change of the code, or on another machine, has several.
    """

    results: list[dict[str, Any]]
    seconds: dict[str, float]
    skipped: list[str] = field(default_factory=list)
    commits: list[dict[str, Any] | None] = field(default_factory=list)
    machines: list[dict[str, Any]] = field(default_factory=list)


def run_tasks(
    work: Work,
    tasks: Sequence[Task],
    out: Path,
    *,
    workers: int | None = None,
    engine: Engine | None = None,
    progress: Progress = silent,
) -> TaskResults:
    """Do every task that has no stored result, store its result in ``out/tasks``, and return all results.

    Parameters
    ----------
    work
        The function that does one task.
    tasks
        The arguments of each call.
    out
        Folder of the run.
    workers
        Number of processes, by default one per core.
    engine
        Where the tasks are done, by default ``Local(workers)``.
    progress
        Called after each task.

    Returns
    -------
    TaskResults
        Results in the order of the tasks, which do not depend on the engine.

    Examples
    --------
    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     run_tasks(lambda task: {"twice": 2 * task["seed"]}, [{"seed": 3}], Path(folder)).results
    [{'twice': 6}]
    """
    folder = out / "tasks"
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"{task_name(task)}.json" for task in tasks]
    pending = [(task, path) for task, path in zip(tasks, paths, strict=True) if not path.exists()]
    n_stored = len(tasks) - len(pending)
    progress(n_stored, len(tasks), "tasks")
    code = commit()
    outcomes = (engine or Local(workers)).map(partial(_timed, work), [task for task, _ in pending])
    with closing(outcomes):
        for n_done, (i, outcome) in enumerate(outcomes, n_stored + 1):
            _store(*pending[i], {**outcome, "commit": code})
            progress(n_done, len(tasks), "tasks")
    records = [json.loads(path.read_text()) for path in paths if path.exists()]
    skipped = [path.stem for path in paths if not path.exists()]
    seconds = {task_name(record["task"]): record["seconds"] for record in records}
    commits = _distinct(record.get("commit") for record in records)
    machines = _distinct(record["machine"] for record in records if "machine" in record)
    return TaskResults([record["result"] for record in records], seconds, skipped, commits, machines)


def _distinct(values: Iterable[Any]) -> list[Any]:
    """The values without repetitions, in the order of their first occurrence."""
    kept: list[Any] = []
    for value in values:
        if value not in kept:
            kept.append(value)
    return kept


def _timed(work: Work, task: Task) -> dict[str, Any]:
    started = time.perf_counter()
    try:
        result = work(task)
    except Skipped as reason:
        return {"skipped": str(reason)}
    seconds = time.perf_counter() - started
    return {"result": result, "seconds": seconds, "machine": {"hardware": hardware(), "versions": versions()}}


def _store(task: Task, path: Path, outcome: dict[str, Any]) -> None:
    """Store a result. The worker does not do it, because it may run on a machine with other disks."""
    if "skipped" in outcome:
        log.info("skipped %s: %s", task_name(task), outcome["skipped"])
    else:
        write_json(path, {"task": task, **outcome})


def task_name(task: Task) -> str:
    """A readable file name for a task, with a hash of all its arguments.

    >>> task_name({"stage": "grid", "seed": 3})
    'grid-3-3f08db25'
    """
    digest = hashlib.sha256(json.dumps(task, sort_keys=True).encode()).hexdigest()[:8]
    values = [str(task[key]) for key in ("stage", "k", "seed") if key in task]
    return "-".join([*values, digest])
