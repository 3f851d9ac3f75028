"""Result files, written whole or not at all, and the manifest of what produced them."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import Any

from vaerdict import __version__

_SOURCES = ("*.py", "*.pyi", "*.toml", "*.js", "*.css")


@contextmanager
def replacing(path: str | Path) -> Iterator[Path]:
    """A temporary path that takes the place of `path` when the block ends, and is removed if the block fails."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"partial-{path.name}")
    try:
        yield partial
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def write_text(path: Path, content: str | bytes) -> Path:
    """Write a file whole or not at all; returns its path."""
    with replacing(path) as partial:
        partial.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def write_json(path: Path, value: Any) -> None:
    """Write JSON whole or not at all; numbers that are not finite become null."""
    write_text(path, dumps(value))


def dumps(value: Any) -> str:
    """Compact JSON: a line for each entry of the outermost record, and for each row of a table in it."""
    value = finite(value)
    if not isinstance(value, dict):
        return _line(value) + "\n"
    return "{\n" + ",\n".join(f"{_line(key)}: {_entry(entry)}" for key, entry in value.items()) + "\n}\n"


def _entry(value: Any) -> str:
    if isinstance(value, list) and value and isinstance(value[0], dict):
        return "[\n" + ",\n".join(f" {_line(row)}" for row in value) + "\n]"
    return _line(value)


def _line(value: Any) -> str:
    return json.dumps(value, allow_nan=False)


def finite(value: Any) -> Any:
    """The same value with numbers that are not finite replaced by None, as JSON needs."""
    if isinstance(value, float):
        return value if value == value and abs(value) != float("inf") else None
    if isinstance(value, dict):
        return {str(k): finite(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(v) for v in value]
    return value


# ------------------------------------------------------------------------------------------------------ manifest
def manifest(settings: dict[str, Any], seconds: dict[str, float], *, data_sha256: str | None) -> dict[str, Any]:
    """What produced a result: command, commit, settings, versions, data hash, hardware, seconds per stage."""
    return {
        "command": command(),
        "commit": commit(),
        "settings": settings,
        "versions": versions(),
        "hardware": hardware(),
        "data_sha256": data_sha256,
        "seconds": seconds,
    }


def command() -> list[str]:
    """The command line of this process, the program by its name alone."""
    program = Path(sys.argv[0])
    name = program.parent.name if program.name == "__main__.py" else program.name
    return [name or "python", *sys.argv[1:]]


def commit() -> dict[str, Any] | None:
    """The commit that this package runs from and whether its sources differ from it; None outside a checkout."""
    here = Path(__file__).parent
    try:
        _git(here, "ls-files", "--error-unmatch", Path(__file__).name)
        root = Path(_git(here, "rev-parse", "--show-toplevel"))
        return {"sha": _git(root, "rev-parse", "HEAD"), "dirty": bool(_git(root, "status", "-s", "--", *_SOURCES))}
    except (OSError, subprocess.SubprocessError):
        return None


def _git(folder: Path, *words: str) -> str:
    done = subprocess.run(["git", "-C", str(folder), *words], capture_output=True, text=True, check=True, timeout=10)
    return done.stdout.strip()


def versions() -> dict[str, str]:
    """Versions of Python, of this package and of the packages that its numbers come from."""
    others = {name: metadata.version(name) for name in ("torch", "numpy", "scipy")}
    return {"python": platform.python_version(), "vaerdict": __version__, **others}


def hardware() -> dict[str, Any]:
    """The machine that the numbers were computed on."""
    import torch

    return {
        "machine": platform.machine(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "accelerator": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
    }


def sha256(path: str | Path) -> str:
    """The hash of a file's content."""
    with Path(path).open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
