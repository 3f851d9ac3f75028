"""Checkpoints of tensors and JSON notes in one safetensors file, and fingerprints that tell runs apart.

Files are replaced atomically, and loading one runs no code. A training run resumes only from its own checkpoint, which
is recognised by the fingerprint of members, data and settings.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Iterable
from dataclasses import asdict, fields, is_dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from vaerdict.core import SettingError
from vaerdict.io import replacing

if TYPE_CHECKING:
    from vaerdict.training.data import Observations
    from vaerdict.training.loop import Settings
    from vaerdict.training.stacks import Stack

log = logging.getLogger(__name__)


def digest(tensors: Iterable[Tensor]) -> str:
    """A hash of the shapes, types and values of tensors."""
    sha = hashlib.sha256()
    for tensor in tensors:
        sha.update(f"{tuple(tensor.shape)} {tensor.dtype}".encode())
        sha.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return sha.hexdigest()


def file_of(path: Path) -> Path:
    """The file of a checkpoint called `path`: ``.safetensors`` is appended to the name, whatever dots it has."""
    return path if path.suffix == ".safetensors" else path.with_name(f"{path.name}.safetensors")


def save_checkpoint(path: Path, tensors: dict[str, Tensor], notes: dict[str, Any]) -> None:
    """Write ``path.safetensors``, with the notes in its header."""
    save_file = _safetensors("torch").save_file
    contiguous = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    with replacing(file_of(path)) as partial_file:
        save_file(contiguous, partial_file, {"notes": json.dumps(notes)})


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


# ------------------------------------------------------------------------------------------------- training runs
def save_stack(stack: Stack, best: list[Tensor], path: Path, notes: dict[str, Any]) -> None:
    """Write everything that training of a stack needs to resume, the generators of all ranks included."""
    tensors = {f"theta.{k}": v for k, v in stack.theta.state().items()} | {
        f"phi.{k}": v for k, v in stack.phi.state().items()
    }
    tensors |= {f"best.{i}": row for i, row in enumerate(best)}
    tensors |= {f"buffer.{name}": buffer.clone() for name, buffer in stack.buffers().items()}
    of_ranks = stack.group.gather([g.get_state() for g in stack.every_generator()])
    tensors |= {f"generator.{i}": state for i, state in enumerate(state for states in of_ranks for state in states)}
    if stack.group.rank == 0:
        save_checkpoint(path, tensors, notes)


def load_checkpoint(path: Path, fingerprint: dict[str, Any]) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
    """The tensors and notes of a run's checkpoint, or None if there is none; raises if it is of another run."""
    target = file_of(path)
    if not target.exists():
        return None
    tensors, notes = read_checkpoint(path)
    if json.loads(json.dumps(fingerprint)) != notes.get("fingerprint"):
        raise SettingError(
            f"{target} belongs to another run (members, data, settings or version differ); choose another folder "
            "or delete it."
        )
    log.info("resuming %s at epoch %d", target, notes["state"]["epoch"])
    return tensors, notes


def restore_stack(stack: Stack, best: list[Tensor], tensors: dict[str, Tensor]) -> None:
    """Copy the tensors written by `save_stack` into a stack."""
    stack.theta.load({k.removeprefix("theta."): v for k, v in tensors.items() if k.startswith("theta.")})
    stack.phi.load({k.removeprefix("phi."): v for k, v in tensors.items() if k.startswith("phi.")})
    for i, row in enumerate(best):
        row.copy_(tensors[f"best.{i}"])
    for name, buffer in stack.buffers().items():
        buffer.copy_(tensors[f"buffer.{name}"])
    generators = stack.every_generator()
    for i, generator in enumerate(generators, stack.group.rank * len(generators)):
        generator.set_state(tensors[f"generator.{i}"].cpu())


def fingerprint(stack: Stack, x: Observations, x_valid: Observations, settings: Settings) -> dict[str, object]:
    """Everything that a checkpoint and the run that resumes from it must agree on, initial parameters included."""
    recipes = [m.recipe for m in stack.members]
    compared = {k: v for k, v in vars(settings).items() if k not in ("compile", "graphs")}
    return {
        "members": [m.name for m in stack.members],
        "objectives": [f"{stable_name(r.theta)}, {r.phi.name}, {stable_name(r.phi.fn)}" for r in recipes],
        "annealing": [[r.annealing(i / 16) for i in range(17)] if r.annealing else None for r in recipes],
        "lagging": None if recipes[0].lagging is None else asdict(recipes[0].lagging),
        "start": digest([*stack.model.state_dict().values(), *stack.proposal.state_dict().values()]),
        "data": digest([*x.tensors(), *x_valid.tensors()]),
        "columns": [len(part.flat) for part in (stack.theta, stack.phi)],  # padded, which older versions did not do
        "rates": None if stack.theta.flat.rates is None else digest([stack.theta.flat.rates]),
        "device": stack.device.type,
        "learn_model": stack.learn_model,
        **({"ranks": stack.group.size} if stack.group.size > 1 else {}),
        "settings": compared | {"score": stable_name(settings.score)},
    }


def stable_name(value: Any) -> str:
    """A name that is equal in all processes and different for different computations; raises if there is none.

    Functions are named by module and qualified name; partial functions and dataclasses also by the values they hold.
    """
    if isinstance(value, partial):
        arguments = [*map(stable_name, value.args), *(f"{k}={stable_name(v)}" for k, v in value.keywords.items())]
        return f"{stable_name(value.func)}({', '.join(arguments)})"
    if isinstance(value, Tensor):
        return digest([value])
    if isinstance(value, (tuple, list)):
        return f"[{', '.join(map(stable_name, value))}]"
    if hasattr(value, "__qualname__") and "<lambda>" not in value.__qualname__ and not _bound(value):
        return f"{value.__module__}.{value.__qualname__}"
    if is_dataclass(value) and not isinstance(value, type):
        arguments = ", ".join(f"{f.name}={stable_name(getattr(value, f.name))}" for f in fields(value))
        return f"{stable_name(type(value))}({arguments})"
    if "<" in repr(value):  # as in <function <lambda> at 0x7f...>
        raise SettingError(
            f"{value!r} has no name that a checkpoint could know it by; write it as a function of a module, or as a "
            "functools.partial of one, or train without checkpoint."
        )
    return repr(value)


def _bound(function: Any) -> bool:
    """Whether a function holds values that its name does not show: those of a closure, or of an object."""
    return bool(getattr(function, "__closure__", None)) or getattr(function, "__self__", None) is not None
