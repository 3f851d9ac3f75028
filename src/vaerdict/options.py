"""Options said once: a dataclass whose fields carry their meaning gives Python signatures, commands and documentation.

Nothing here imports torch, so that ``--help`` is instant.
"""

from __future__ import annotations

import functools
import inspect
import math
import operator
import textwrap
from collections.abc import Callable, Iterable, Iterator
from dataclasses import MISSING, Field, field, fields
from typing import Any, NamedTuple, TypeVar, cast, get_args, get_type_hints

F = TypeVar("F", bound=Callable[..., Any])

_HELP, _FLAG, _MINIMUM, _PANEL = "help", "flag", "minimum", "panel"


class Option(NamedTuple):
    """An option as a command and the documentation show it."""

    name: str
    flag: str
    kind: Any
    default: Any
    help: str
    minimum: float | None
    panel: str | None

    @property
    def shown_default(self) -> str:
        """The default as text, empty for none."""
        return "" if self.default is None or self.default is False or self.default == () else str(self.default)


def option(
    default: Any, help: str, *, flag: str | None = None, minimum: float | None = None, panel: str | None = None
) -> Any:
    """A dataclass field with its meaning.

    Parameters
    ----------
    default
        The default, for the function and the command.
    help
        What the option means, in one sentence.
    flag
        Its name on the command line, where that differs from the field's.
    minimum
        The least value that the command accepts.
    panel
        The heading under which the help of the command lists it.
    """
    return field(default=default, metadata={_HELP: help, _FLAG: flag, _MINIMUM: minimum, _PANEL: panel})


def options_of(kind: type) -> list[Option]:
    """The options of a dataclass, in order."""
    hints = get_type_hints(kind)
    return [_option(entry, hints[entry.name]) for entry in fields(kind) if _HELP in entry.metadata]


def _option(entry: Field[Any], kind: Any) -> Option:
    flag = entry.metadata[_FLAG] or "--" + entry.name.replace("_", "-")
    default, metadata = None if entry.default is MISSING else entry.default, entry.metadata
    return Option(entry.name, flag, kind, default, metadata[_HELP], metadata[_MINIMUM], metadata[_PANEL])


def normalise(options: Any) -> None:
    """Give the fields of a frozen dataclass of options their types, or raise a `SettingError`.

    Numbers of numpy become Python's, a sequence of names becomes a tuple, and the least values are enforced.
    """
    for each in options_of(type(options)):
        object.__setattr__(options, each.name, _typed(each, getattr(options, each.name)))


def _typed(each: Option, value: Any) -> Any:
    from vaerdict.core import SettingError

    if get_args(each.kind) == (str, ...):
        return () if value is None else (value,) if isinstance(value, str) else tuple(map(str, value))
    kinds = get_args(each.kind) or (each.kind,)
    if value is None and type(None) in kinds:
        return None
    convert: Any = bool if bool in kinds else operator.index if int in kinds else float if float in kinds else None
    try:
        value = value if convert is None else convert(value)
    except (TypeError, ValueError):
        what = "a whole number" if int in kinds else "a number"
        raise SettingError(f"{each.name}={value!r} must be {what}.") from None
    if float in kinds and not math.isfinite(value):
        raise SettingError(f"{each.name}={value} must be finite.")
    if each.minimum is not None and value < each.minimum:
        raise SettingError(f"{each.name}={value}: at least {each.minimum:g} is needed.")
    return value


def accepts(*kinds: type) -> Callable[[F], F]:
    """Give a function that takes ``**options`` the signature of the options, and list them in its docstring.

    The docstring says ``{options}`` where the list belongs, at the indentation of its Parameters section.
    """

    def decorate(function: F) -> F:
        chosen = [each for kind in kinds for each in options_of(kind)]
        own = [p for p in inspect.signature(function).parameters.values() if p.kind is not p.VAR_KEYWORD]
        added = [
            inspect.Parameter(o.name, inspect.Parameter.KEYWORD_ONLY, default=o.default, annotation=_spelled(o.kind))
            for o in chosen
        ]
        signature = inspect.signature(function).replace(parameters=[*own, *added])

        @functools.wraps(function)
        def checked(*args: Any, **keywords: Any) -> Any:
            try:
                signature.bind(*args, **keywords)
            except TypeError as error:
                raise TypeError(f"{function.__name__}() {error}") from None
            return function(*args, **keywords)

        checked.__signature__ = signature  # type: ignore[attr-defined]
        checked.__doc__ = _documented(function.__doc__ or "", chosen)
        return cast("F", checked)

    return decorate


def _documented(doc: str, chosen: Iterable[Option]) -> str:
    line = next((line for line in doc.splitlines() if line.strip() == "{options}"), None)
    if line is None:
        return doc
    margin = line[: len(line) - len(line.lstrip())]
    return doc.replace(line, "\n".join(_lines(chosen, margin)))


def _lines(chosen: Iterable[Option], margin: str) -> Iterator[str]:
    for each in chosen:
        yield f"{margin}{each.name} : {_spelled(each.kind)}, default {each.default!r}"
        yield from textwrap.wrap(
            each.help, 120, initial_indent=f"{margin}    ", subsequent_indent=f"{margin}    ", break_on_hyphens=False
        )


def _spelled(kind: Any) -> str:
    return kind.__name__ if isinstance(kind, type) and not getattr(kind, "__args__", None) else str(kind)


def option_table(*kinds: type) -> str:
    """The options as a Markdown table, for the documentation."""
    rows = [f"| `{o.name}` | `{o.flag}` | {o.shown_default} | {o.help} |" for kind in kinds for o in options_of(kind)]
    return "\n".join(["| parameter | option | default | meaning |", "|---|---|---|---|", *rows])
