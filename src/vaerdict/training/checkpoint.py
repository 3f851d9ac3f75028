"""Checkpoints: tensors in safetensors, the rest in JSON, written whole or not at all, loaded without running code."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Iterable
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vaerdict.core import SettingError
from vaerdict.io import replacing

log = logging.getLogger(__name__)


def digest(tensors: Iterable[Tensor]) -> str:
    """A hash of shapes, types and every bit of some tensors."""
    sha = hashlib.sha256()
    for tensor in tensors:
        sha.update(f"{tuple(tensor.shape)} {tensor.dtype}".encode())
        sha.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return sha.hexdigest()


def file_of(path: Path) -> Path:
    """Where a checkpoint called `path` lies: ``.safetensors`` is appended to the name, whatever dots it has."""
    return path if path.suffix == ".safetensors" else path.with_name(f"{path.name}.safetensors")


def save_checkpoint(path: Path, tensors: dict[str, Tensor], notes: dict[str, Any]) -> None:
    """Write ``path.safetensors``; the notes travel in its header, so that both are replaced in one stroke."""
    save_file = _safetensors("torch").save_file

    target = file_of(path)
    contiguous = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    with replacing(target) as partial:
        save_file(contiguous, partial, {"notes": json.dumps(notes)})


def load_checkpoint(path: Path, fingerprint: dict[str, Any]) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
    """The tensors and notes of a checkpoint, None where there is none; one of another run is refused."""
    target = file_of(path)
    if not target.exists():
        return None
    tensors, notes = read_checkpoint(path)
    if json.loads(json.dumps(fingerprint)) != notes.get("fingerprint"):
        raise SettingError(
            f"{target} belongs to another run (members, data or settings differ); choose another folder or delete it."
        )
    log.info("resuming %s at epoch %d", target, notes["course"]["epoch"])
    return tensors, notes


def read_checkpoint(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors and notes of ``path.safetensors``."""
    safetensors = _safetensors()
    target = file_of(path)
    try:
        with safetensors.safe_open(target, "pt") as file:
            notes = json.loads((file.metadata() or {})["notes"])
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (safetensors.SafetensorError, KeyError, json.JSONDecodeError, OSError) as error:
        raise SettingError(f"{target} is no checkpoint of vaerdict ({error}); delete it to start anew.") from error
    return tensors, notes


def _safetensors(part: str = "") -> Any:
    try:
        return import_module(f"safetensors.{part}" if part else "safetensors")
    except ImportError as error:
        raise SettingError("checkpoints need safetensors; install it with `pip install safetensors`.") from error
