"""Result files, written whole or not at all, and what produced them: settings, versions, hardware."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from vaerdict import __version__


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
