"""Benchmarks: speeds as ratios against peers timed in the same run, and what each rung of the ladder is worth."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from vaerdict.core import Progress, SettingError, silent
from vaerdict.experiments.runner import hardware, versions

BENCHMARKS = ("psis", "ppca", "samplers", "ladder", "counts", "de")


def run(name: str, *, quick: bool = False, progress: Progress = silent) -> dict[str, Any]:
    """Run one benchmark and return its rows with the machine and versions they hold for."""
    if name not in BENCHMARKS:
        raise SettingError(f"no benchmark {name!r}; choose one of {', '.join(BENCHMARKS)}.")
    rows = import_module(f"vaerdict.benchmarks.{name}").run(quick=quick, progress=progress)
    return {"benchmark": name, "quick": quick, "hardware": hardware(), "versions": versions(), "rows": rows}
