"""Run an experiment's units, some at a time, each result written whole, so that a killed run goes on where it was."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import metadata
from multiprocessing import get_context, parent_process
from pathlib import Path
from typing import Any

import torch

from vaerdict import __version__
from vaerdict.core import Progress, SettingError, silent

Unit = dict[str, Any]
"""What one piece of work needs to know: JSON values only, so that it can be named, stored and sent."""

Work = Callable[[Unit], dict[str, Any]]
"""A module-level function that does one unit and returns JSON values."""


@dataclass(frozen=True)
class Run:
    """What came of the units: their results in the order given, and the seconds each took."""

    results: list[dict[str, Any]]
    seconds: dict[str, float]


def run_units(
    work: Work,
    units: Sequence[Unit],
    out: Path,
    *,
    resume: bool,
    workers: int | None = None,
    progress: Progress = silent,
) -> Run:
    """Do every unit, in `workers` processes (one a core by default), and return the results in the order given.

    Finished units lie in ``out/parts``. With `resume` they are kept; without, a folder that holds any is refused, so
    that no run silently mixes with another.
    """
    parts = out / "parts"
    parts.mkdir(parents=True, exist_ok=True)
    paths = [parts / f"{unit_name(unit)}.json" for unit in units]
    if not resume and any(parts.glob("*.json")):
        raise SettingError(f"{out} already holds parts of a run; continue it with --resume, or choose another --out.")
    todo = [(unit, path) for unit, path in zip(units, paths, strict=True) if not path.exists()]
    progress(len(units) - len(todo), len(units), "units")
    workers = min(workers or os.cpu_count() or 1, len(todo))
    if workers <= 1:
        for done, (unit, path) in enumerate(todo, len(units) - len(todo) + 1):
            with _one_thread():
                _do(work, unit, path)
            progress(done, len(units), "units")
    else:
        _in_processes(work, todo, workers, len(units), progress)
    stored = [json.loads(path.read_text()) for path in paths]
    return Run([s["result"] for s in stored], {unit_name(s["unit"]): s["seconds"] for s in stored})


def _in_processes(work: Work, todo: list[tuple[Unit, Path]], workers: int, total: int, progress: Progress) -> None:
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn"), initializer=_enter_worker) as pool:
        pending = {pool.submit(_do, work, unit, path) for unit, path in todo}
        try:
            while pending:
                finished, pending = wait(pending, return_when=FIRST_COMPLETED)
                for future in finished:
                    future.result()
                progress(total - len(pending), total, "units")
        except BaseException:
            pool.shutdown(cancel_futures=True)  # or leaving the pool would first do all that is left
            raise


@contextmanager
def _one_thread() -> Iterator[None]:
    """As in a worker: how sums are split over threads must not change a result."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _enter_worker() -> None:
    """One thread a worker; and a worker whose parent was killed goes too, instead of working on for nobody."""
    torch.set_num_threads(1)
    threading.Thread(target=_leave_with_parent, daemon=True).start()


def _leave_with_parent() -> None:
    parent = parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _do(work: Work, unit: Unit, path: Path) -> None:
    started = time.perf_counter()
    result = work(unit)
    write_json(path, {"unit": unit, "result": result, "seconds": time.perf_counter() - started})


def unit_name(unit: Unit) -> str:
    """A readable file name for a unit, with a hash of all of it so that other settings never collide."""
    digest = hashlib.sha256(json.dumps(unit, sort_keys=True).encode()).hexdigest()[:8]
    words = [str(unit[key]) for key in ("stage", "k", "seed") if key in unit]
    return "-".join([*words, digest])


def write_json(path: Path, value: Any) -> None:
    """Write JSON whole or not at all; numbers that are not finite become null."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    partial.write_text(json.dumps(finite(value), indent=1, allow_nan=False) + "\n")
    os.replace(partial, path)


def finite(value: Any) -> Any:
    """The same value with numbers that are not finite replaced by None, as JSON needs."""
    if isinstance(value, float):
        return value if value == value and abs(value) != float("inf") else None
    if isinstance(value, dict):
        return {str(k): finite(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(v) for v in value]
    return value


def manifest(
    settings: dict[str, Any], seconds: dict[str, float], *, data: torch.Tensor | None = None
) -> dict[str, Any]:
    """What produced a result: command, settings, versions, data hash, hardware, seconds."""
    return {
        "command": ["vaerdict", *sys.argv[1:]],
        "settings": settings,
        "versions": versions(),
        "hardware": hardware(),
        "data_sha256": None if data is None else hashlib.sha256(data.contiguous().numpy().tobytes()).hexdigest(),
        "seconds": seconds,
    }


def versions() -> dict[str, str]:
    """Of Python, of this package and of what its numbers come from."""
    others = {name: metadata.version(name) for name in ("torch", "numpy", "scipy")}
    return {"python": platform.python_version(), "vaerdict": __version__, **others}


def hardware() -> dict[str, Any]:
    """What the numbers were computed on."""
    return {
        "machine": platform.machine(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "accelerator": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
    }
