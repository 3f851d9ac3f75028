"""What tells one run from another: a checkpoint is taken up only by the run that wrote it."""

from __future__ import annotations

from dataclasses import asdict, fields, is_dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import Tensor

from vaerdict.core import SettingError
from vaerdict.training.checkpoint import digest
from vaerdict.training.data import Observations
from vaerdict.training.stacks import Stack

if TYPE_CHECKING:
    from vaerdict.training.loop import Settings


def fingerprint(stack: Stack, x: Observations, x_valid: Observations, settings: Settings) -> dict[str, object]:
    """What a checkpoint must agree on with the run that takes it up, the members' starting points included."""
    recipes = [m.recipe for m in stack.members]
    kept = {k: v for k, v in vars(settings).items() if k not in ("compile", "graphs")}
    return {
        "members": [m.name for m in stack.members],
        "objectives": [f"{stable_name(r.theta)}, {r.phi.name}, {stable_name(r.phi.fn)}" for r in recipes],
        "annealing": [[r.annealing(i / 16) for i in range(17)] if r.annealing else None for r in recipes],
        "lagging": None if recipes[0].lagging is None else asdict(recipes[0].lagging),
        "start": digest([*stack.model.state_dict().values(), *stack.proposal.state_dict().values()]),
        "data": digest([*x.tensors(), *x_valid.tensors()]),
        "rates": None if stack.theta.flat.rates is None else digest([stack.theta.flat.rates]),
        "device": stack.device.type,
        "learn_model": stack.learn_model,
        **({"ranks": stack.group.size} if stack.group.size > 1 else {}),
        "settings": kept | {"score": stable_name(settings.score)},
    }


def stable_name(value: Any) -> str:
    """A name that is the same in every process, and another for what computes something else; refused if there is none.

    Functions go by module and name, partial functions and values by what they hold too.
    """
    if isinstance(value, partial):
        given = [*map(stable_name, value.args), *(f"{k}={stable_name(v)}" for k, v in value.keywords.items())]
        return f"{stable_name(value.func)}({', '.join(given)})"
    if isinstance(value, Tensor):
        return digest([value])
    if isinstance(value, (tuple, list)):
        return f"[{', '.join(map(stable_name, value))}]"
    if hasattr(value, "__qualname__") and "<lambda>" not in value.__qualname__ and not _bound(value):
        return f"{value.__module__}.{value.__qualname__}"
    if is_dataclass(value) and not isinstance(value, type):
        held = ", ".join(f"{f.name}={stable_name(getattr(value, f.name))}" for f in fields(value))
        return f"{stable_name(type(value))}({held})"
    if "<" in repr(value):  # as in <function <lambda> at 0x7f...>
        raise SettingError(
            f"{value!r} has no name that a checkpoint could know it by; write it as a function of a module, or as a "
            "functools.partial of one, or train without checkpoint."
        )
    return repr(value)


def _bound(function: Any) -> bool:
    """Whether a function holds values that its name does not tell: those of a closure, or of an object."""
    return bool(getattr(function, "__closure__", None)) or getattr(function, "__self__", None) is not None
