"""Result files that are written completely or not at all, and the manifest of what produced them."""

from __future__ import annotations

import errno
import hashlib
import json
import math
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import Any

from vaerdict import __version__

_PARTIAL = "partial-"  # a prefix, because some writers choose the format by the suffix
_LEAST_FREE = 2**16  # bytes; with less the disk is taken to be full
_SOURCES = ("*.py", "*.pyi", "*.toml", "*.js", "*.css")


@contextmanager
def replacing(path: str | Path) -> Iterator[Path]:
    """A temporary path that replaces `path` when the block ends, and is removed if the block raises.

    Writers that have errors of their own for a full disk raise an `OSError` as others do.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{_PARTIAL}{path.name}")
    try:
        yield partial
        os.replace(partial, path)
    except Exception as error:
        full = os.strerror(errno.ENOSPC)
        if full in str(error) or shutil.disk_usage(path.parent).free < _LEAST_FREE:
            raise OSError(errno.ENOSPC, full, str(path)) from error
        raise
    finally:
        partial.unlink(missing_ok=True)


def is_partial(path: Path) -> bool:
    """Whether a process that was killed left this file unfinished."""
    return path.name.startswith(_PARTIAL)


def write_text(path: Path, content: str | bytes) -> Path:
    """Write a file completely or not at all; returns its path."""
    with replacing(path) as partial:
        partial.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def write_json(path: Path, value: Any) -> None:
    """Write JSON completely or not at all; numbers that are not finite become null."""
    write_text(path, dumps(value))


def dumps(value: Any) -> str:
    """Compact JSON with one line per entry of the outermost object, and per row of a table in it.

    >>> print(dumps({"seeds": [0, 1], "models": [{"model": "VAE", "khat": float("nan")}]}), end="")
    {
    "seeds": [0, 1],
    "models": [
     {"model": "VAE", "khat": null}
    ]
    }
    """
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
    """The same value with non-finite numbers replaced by None, which JSON writes as null."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
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
    """The command line of this process, with the program by its name instead of its path.

    Examples are ``vaerdict de ...``, ``python -m vaerdict de ...``, ``python script.py ...``, ``python`` for an
    interactive session, and ``jupyter`` for a notebook.
    """
    program, *arguments = sys.argv or [""]
    path = Path(program)
    if path.name == "ipykernel_launcher.py":
        return ["jupyter"]  # its arguments are the connection file of the kernel
    if path.name == "__main__.py":
        return ["python", "-m", path.parent.name, *arguments]
    if program in ("", "-c"):
        return ["python", *(["-c", "..."] if program else []), *arguments]
    return [*(["python"] if path.suffix == ".py" else []), path.name, *arguments]


def commit(source: str | Path = __file__) -> dict[str, Any] | None:
    """The git commit of a source file and whether any sources differ from it; None if the file is not tracked."""
    source = Path(source)
    try:
        _git(source.parent, "ls-files", "--error-unmatch", source.name)
        root = Path(_git(source.parent, "rev-parse", "--show-toplevel"))
        return {"sha": _git(root, "rev-parse", "HEAD"), "dirty": bool(_git(root, "status", "-s", "--", *_SOURCES))}
    except (OSError, subprocess.SubprocessError):
        return None


def _git(folder: Path, *arguments: str) -> str:
    git = ["git", "-C", str(folder), *arguments]
    return subprocess.run(git, capture_output=True, text=True, check=True, timeout=10).stdout.strip()


def versions() -> dict[str, str]:
    """Versions of Python, of this package and of its numerical dependencies."""
    others = {name: metadata.version(name) for name in ("torch", "numpy", "scipy")}
    return {"python": platform.python_version(), "vaerdict": __version__, **others}


def hardware() -> dict[str, Any]:
    """The machine that computed the result."""
    import torch

    return {
        "machine": platform.machine(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "accelerator": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
    }


def sha256(path: str | Path) -> str:
    """The SHA-256 hash of a file."""
    with Path(path).open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
