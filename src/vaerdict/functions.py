"""Functions of the user's as modules, and checks of what they return."""

from __future__ import annotations

import copy
import functools
import inspect
import types
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor, nn

from vaerdict.core import SettingError

_REPEATED = 0.01  # relative difference above which two log-densities of the same observation differ


def as_module(function: Callable[..., Any]) -> nn.Module:
    """A function as a module whose submodules are the networks that it uses; a module is returned unchanged."""
    return function if isinstance(function, nn.Module) else Function(function)


class Function(nn.Module):
    """A function as a module, so that the networks it uses are put in evaluation mode with others."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function, self.networks = function, nn.ModuleList(used_modules(function))

    def forward(self, *arguments: Any, **named: Any) -> Any:
        """Call the function."""
        return self.function(*arguments, **named)

    def __deepcopy__(self, memo: dict[int, Any]) -> Function:
        if self.networks and isinstance(self.function, types.FunctionType):
            raise SettingError(
                f"the function {self.function.__qualname__} uses networks that are not copied with it, so that a copy "
                "cannot be trained; pass a module, or a method of one."
            )
        new = type(self).__new__(type(self))
        memo[id(self)] = new
        new.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return new


def used_modules(function: Any) -> list[nn.Module]:
    """The modules that a function uses: its own, those of its object, and those that its code names."""
    return list(dict.fromkeys(_used_modules(function, depth=3)))


def _used_modules(thing: Any, depth: int) -> Iterator[nn.Module]:
    if isinstance(thing, nn.Module):
        yield thing
        return
    parts: list[Any] = []
    if depth == 0 or isinstance(thing, (type, types.ModuleType, Tensor)):
        return
    if isinstance(thing, functools.partial):
        parts = [thing.func, *thing.args, *thing.keywords.values()]
    elif isinstance(thing, types.MethodType):
        parts = [thing.__self__]
    elif isinstance(thing, types.FunctionType):
        names = inspect.getclosurevars(thing)
        parts = [*names.nonlocals.values(), *names.globals.values()]
        # of functions that it calls, those of the same file; others are of libraries
        parts = [p for p in parts if getattr(p, "__globals__", thing.__globals__) is thing.__globals__]
    elif hasattr(thing, "__dict__"):
        parts = list(vars(thing).values())
    for part in parts:
        yield from _used_modules(part, depth - 1)


# ---------------------------------------------------------------------------------------------------------- checks
def called(name: str, function: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
    """Call a function of the user's; where it fails, say for which shapes."""
    try:
        return function(*arguments, **named)
    except (TypeError, RuntimeError, ValueError, IndexError) as error:
        parts = [shown(t) for t in arguments] + [f"{key}={shown(t)}" for key, t in named.items()]
        reason = " ".join(str(error).split())[:200]
        raise SettingError(f"{name} failed on {', '.join(parts)}: {reason}") from error


def shown(value: Any) -> str:
    """A value in a message: the shape of a tensor, the items of a tuple, else the type."""
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    if isinstance(value, (tuple, list)) and len(value) < 5:
        return f"a {type(value).__name__} of {', '.join(map(shown, value)) or 'nothing'}"
    return f"a {type(value).__name__}"


def check_finite(what: str, t: Tensor) -> None:
    """Raise if values ``(n, ...)`` are NaN or infinite, with their number and the first rows."""
    finite = t.isfinite()
    if bool(finite.all()):
        return
    rows = (~finite).reshape(len(t), -1).any(-1).nonzero().flatten().tolist()
    at = ", ".join(map(str, rows[:5])) + (", ..." if len(rows) > 5 else "")
    raise SettingError(
        f"{what} holds {int((~finite).sum())} non-finite values of {t.numel()}, for {len(rows)} of {len(t)} "
        f"observations (at {at}); train it again, or leave these observations out."
    )


def check_repeatable(name: str, first: Tensor, again: Tensor) -> None:
    """Raise if two log-densities of the same observations ``(n,)`` differ by more than rounding."""
    difference = (first - again).abs() / (1 + first.abs())
    if bool((difference > _REPEATED).any()):
        raise SettingError(
            f"{name} gives another output when the same observations are asked again with fewer others (log-densities "
            f"differ by up to {(first - again).abs().max():.2g}): dropout or batch norm in training mode, or sampling "
            "inside; call .eval() on its networks, and let it return a distribution rather than a draw."
        )
