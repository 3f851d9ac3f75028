"""Commands generated from the dataclasses of their options (`vaerdict.options`)."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Annotated, Any, get_args

import typer

from vaerdict.options import Option, options_of


def with_options(*kinds: type) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command that takes ``**options`` an option for every field of the dataclasses.

    The options stand where ``**options`` does: after the parameters of the command that have no default, before those
    that have one.
    """

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        signature = inspect.signature(command, eval_str=True)
        own = [p for p in signature.parameters.values() if p.kind is not inspect.Parameter.VAR_KEYWORD]
        added = [_parameter(option) for kind in kinds for option in options_of(kind)]
        names = {p.name for p in own}
        required = [p for p in own if p.default is inspect.Parameter.empty]
        optional = [p for p in own if p.default is not inspect.Parameter.empty]
        parameters = [*required, *(p for p in added if p.name not in names), *optional]
        parameters = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in parameters]
        command.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
        command.__annotations__ = {p.name: p.annotation for p in parameters}
        return command

    return decorate


def _parameter(option: Option) -> inspect.Parameter:
    """The option as typer wants it; a tuple of names is given as NAME,NAME,..."""
    kind, default, help = option.kind, option.default, option.help
    if kind == tuple[str, ...]:
        kind, default, help = str | None, None, f"{help} NAME,NAME,..."
    bounds = {} if option.minimum is None else {"min": option.minimum}
    declared: Any = typer.Option(option.flag, help=help, **bounds)
    return inspect.Parameter(
        option.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind, declared]
    )


def parsed(values: dict[str, Any], *kinds: type) -> dict[str, Any]:
    """The options among the values of a command, as the dataclasses want them."""
    chosen = {option.name: option for kind in kinds for option in options_of(kind)}
    return {name: _parsed(value, chosen[name]) for name, value in values.items() if name in chosen}


def _parsed(value: Any, option: Option) -> Any:
    if get_args(option.kind) == (str, ...):
        return tuple(name.strip() for name in (value or "").split(",") if name.strip())
    return value
