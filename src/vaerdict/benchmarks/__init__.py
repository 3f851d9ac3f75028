"""Benchmarks: every speed is a ratio against a peer timed in the same run."""

from __future__ import annotations

import os
import platform
from importlib import import_module, metadata
from typing import Any

import torch

from vaerdict.core import Progress, SettingError, silent

BENCHMARKS = ("psis", "ppca", "samplers", "ladder")


def run(name: str, *, quick: bool = False, progress: Progress = silent) -> dict[str, Any]:
    """Run one benchmark and return its rows with the machine and versions they hold for."""
    if name not in BENCHMARKS:
        raise SettingError(f"no benchmark {name!r}; choose one of {', '.join(BENCHMARKS)}.")
    rows = import_module(f"vaerdict.benchmarks.{name}").run(quick=quick, progress=progress)
    accelerator = f", {torch.cuda.get_device_name()}" if torch.cuda.is_available() else ""
    return {
        "benchmark": name,
        "quick": quick,
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, {torch.get_num_threads()} threads{accelerator}",
        "versions": {"python": platform.python_version(), **{p: metadata.version(p) for p in ("vaerdict", "torch")}},
        "rows": rows,
    }
