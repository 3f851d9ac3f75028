"""Benchmarks: speeds as ratios against peers timed in the same run, costs as they grow, and what bounds them."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module, metadata
from importlib.util import find_spec
from typing import Any

import torch

from vaerdict.core import Progress, SettingError, silent
from vaerdict.io import hardware, versions

BENCHMARKS = ("psis", "ppca", "samplers", "ladder", "counts", "de", "borrow", "scaling", "gpu", "million")

Keep = Callable[[dict[str, Any]], None]
"""Is given the result so far after every row, for a run that may be cut short."""


def run(name: str, *, quick: bool = False, progress: Progress = silent, keep: Keep | None = None) -> dict[str, Any]:
    """Run one benchmark and return its rows with the machine and versions they hold for.

    ``complete`` is false in what `keep` is given before the last row.
    """
    module = _module(name)
    about = {"benchmark": name, "quick": quick, "hardware": hardware(), "versions": versions() | _peers(module)}
    rows: list[dict[str, Any]] = []
    for row in module.run(quick=quick, progress=progress):
        rows.append(row)
        if keep is not None:
            keep({**about, "complete": False, "rows": rows})
    return {**about, "complete": True, "rows": rows}


def unfit(name: str) -> str | None:
    """Why a benchmark cannot run here as it is meant to (a package or device is missing); None where it can."""
    module = _module(name)
    missing = [package for package in getattr(module, "PACKAGES", ()) if find_spec(package) is None]
    if missing:
        return f"needs {', '.join(missing)}"
    if getattr(module, "NEEDS_CUDA", False) and not torch.cuda.is_available():
        return "is about a CUDA device, and torch sees none"
    return None


def _module(name: str) -> Any:
    if name not in BENCHMARKS:
        raise SettingError(f"no benchmark {name!r}; choose one of {', '.join(BENCHMARKS)}, or all.")
    return import_module(f"vaerdict_paper.benchmarks.{name}")


def _peers(module: Any) -> dict[str, str]:
    """The versions of what a benchmark compares with."""
    packages: list[str] = [*getattr(module, "PACKAGES", ()), *getattr(module, "PEERS", ())]
    return {p: metadata.version(_DISTRIBUTIONS.get(p, p)) for p in packages if find_spec(p) is not None}


_DISTRIBUTIONS = {"scvi": "scvi-tools"}
"""Where a package is published by another name than it is imported by."""
