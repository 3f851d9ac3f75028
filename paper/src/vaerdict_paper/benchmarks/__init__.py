"""Benchmarks: speeds as ratios to peers timed in the same run, costs as a function of size, and their limits."""

from __future__ import annotations

import platform
import shutil
from collections.abc import Callable
from datetime import UTC, datetime
from importlib import import_module, metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from vaerdict.core import Progress, SettingError, silent
from vaerdict.io import command, commit, hardware, versions, write_json
from vaerdict.report.records import read_record

BENCHMARKS = (
    "psis",
    "ppca",
    "samplers",
    "escalation",
    "verdicts",
    "counts",
    "de",
    "de-scale",
    "de-methods",
    "centre",
    "prior",
    "clustered",
    "novelty",
    "novel-cells",
    "scaling",
    "gpu",
    "million",
)

Save = Callable[[dict[str, Any]], None]
"""Receives the result so far after every row, for a run that may be interrupted."""


def run(
    name: str,
    *,
    quick: bool = False,
    progress: Progress = silent,
    save: Save | None = None,
    folder: Path | None = None,
) -> dict[str, Any]:
    """Run one benchmark and return its rows with what produced them: command, commit, date, machine and versions.

    Parameters
    ----------
    name
        The benchmark, of `BENCHMARKS`.
    quick
        Whether smaller sizes are measured.
    progress
        Called with the work done, the total and its name.
    save
        Receives the result so far after every row; its ``complete`` is then false.
    folder
        Where a benchmark of many tasks stores those that are finished, in a folder of its name; a later call goes on.
    """
    module = _module(name)
    about = {"benchmark": name, "quick": quick} | provenance(_peers(module))
    rows: list[dict[str, Any]] = []
    stored = {"out": None if folder is None else folder / name}
    for row in module.run(quick=quick, progress=progress, **stored if getattr(module, "RESUMABLE", False) else {}):
        rows.append(row)
        if save is not None:
            save({**about, "complete": False, "rows": rows})
    return {**about, "complete": True, "rows": rows}


def provenance(peers: dict[str, str] | None = None) -> dict[str, Any]:
    """What produces a result: command, commit, date, versions of packages and `peers`, and the machine."""
    return {
        "command": command(),
        "commit": commit(),
        "measured": datetime.now(UTC).date().isoformat(),
        "hardware": hardware() | {"processor": _processor()},
        "versions": versions() | (peers or {}),
    }


def _processor() -> str:
    """The name of the processor."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.is_file() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def finished(folder: Path, name: str, *, quick: bool, force: bool) -> dict[str, Any] | None:
    """The finished result ``NAME.json`` of a folder; None where there is none, or where `force` measures again.

    A result of other sizes is refused.
    """
    path, result = folder / f"{name}.json", None
    if force:
        shutil.rmtree(folder / name, ignore_errors=True)
    elif path.is_file():
        result = read_record(path)
        if result.get("quick") is not quick:
            sizes = "smaller sizes (--quick)" if result.get("quick") else "full sizes"
            raise SettingError(f"{path} was measured at {sizes}; choose another --out, or replace it with --force.")
    return result if result is not None and result.get("complete") else None


def write_result(folder: Path, name: str, result: dict[str, Any]) -> None:
    """Write a result to ``NAME.json`` of a folder of benchmarks."""
    write_json(folder / f"{name}.json", result)
    mark(folder)


def mark(folder: Path) -> None:
    """Write the ``results.json`` by which a folder of benchmarks is recognised."""
    write_json(folder / "results.json", {"experiment": "bench"})


def is_installed(package: str) -> bool:
    """Whether a package can be imported."""
    return find_spec(package) is not None


def unavailable(name: str) -> str | None:
    """Why a benchmark cannot run here (a package or device is missing); None if it can."""
    module = _module(name)
    missing = [package for package in getattr(module, "PACKAGES", ()) if not is_installed(package)]
    if missing:
        return f"needs {', '.join(missing)}"
    if getattr(module, "NEEDS_CUDA", False) and not torch.cuda.is_available():
        return "needs a CUDA device, and torch sees none"
    return None


def _module(name: str) -> Any:
    if name not in BENCHMARKS:
        raise SettingError(f"no benchmark {name!r}; choose one of {', '.join(BENCHMARKS)}, or all.")
    module = name.replace("-", "_")
    return import_module(f"vaerdict_paper.benchmarks.{module}")


def _peers(module: Any) -> dict[str, str]:
    """The versions of the packages that a benchmark compares with."""
    packages: list[str] = [*getattr(module, "PACKAGES", ()), *getattr(module, "PEERS", ())]
    return {p: metadata.version(_DISTRIBUTIONS.get(p, p)) for p in packages if is_installed(p)}


_DISTRIBUTIONS = {"scvi": "scvi-tools", "sklearn": "scikit-learn"}
"""Distributions whose name differs from that of their package."""
