"""Commands generated from the dataclasses of their options (`vaerdict.options`)."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Annotated, Any, get_args

import typer

from vaerdict.options import Option, options_of


def with_options(*kinds: type, after: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command that takes ``**options`` an option for every field of the dataclasses.

    The options follow the parameter `after` of the command.
    """

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        signature = inspect.signature(command, eval_str=True)
        own = [p for p in signature.parameters.values() if p.kind is not inspect.Parameter.VAR_KEYWORD]
        added = [_parameter(option) for kind in kinds for option in options_of(kind)]
        place = [p.name for p in own].index(after) + 1
        parameters = [p.replace(kind=p.KEYWORD_ONLY) for p in (*own[:place], *added, *own[place:])]
        command.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
        command.__annotations__ = {p.name: p.annotation for p in parameters}
        return command

    return decorate


def _parameter(option: Option) -> inspect.Parameter:
    """The option as typer wants it; a tuple of names is given as NAME,NAME,..."""
    kind, default, help = option.kind, option.default, option.help
    if kind == tuple[str, ...]:
        kind, default, help = str | None, None, f"{help} NAME,NAME,..."
    bounds: dict[str, Any] = {} if option.minimum is None else {"min": option.minimum}
    declared: Any = typer.Option(option.flag, help=help, rich_help_panel=option.panel, **bounds)
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


def option_names(message: str, *kinds: type, **flags: str) -> str:
    """A message that names options of the command in place of parameters: ``--batch-key=`` for ``batch_key=``.

    `flags` are those of further parameters.
    """
    for kind in kinds:
        flags |= {option.name: option.flag.split("/")[0] for option in options_of(kind)}
    for name, flag in flags.items():
        end = r"\b" if "_" in name else "(?==)"  # without an underscore it may be a word
        message = re.sub(rf"(?<![\w-]){name}{end}", flag, message)
    return message


@contextmanager
def naming_options(*kinds: type, **flags: str) -> Iterator[None]:
    """Errors that were foreseen name options of the command; see `option_names`."""
    from vaerdict.core import VaerdictError

    try:
        yield
    except VaerdictError as error:
        raise type(error)(option_names(str(error), *kinds, **flags)) from error
