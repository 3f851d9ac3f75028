"""Commands generated from the dataclasses of their options (`vaerdict.options`)."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable
from typing import Annotated, Any, get_args

import typer
from typer.models import OptionInfo

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


def option_names(message: str, command: Callable[..., Any]) -> str:
    """A message that names options of the command in place of parameters: ``--batch-key=`` for ``batch_key=``.

    A parameter is recognised by its underscore or the ``=`` after it; without these it may be a word.
    """
    for name, flag in _flags(command).items():
        on, off = flag.split("/")[0], flag.split("/")[-1]
        message = re.sub(rf"(?<![\w-]){name}=(True\b|(?![\w'\"\[(.-]))", on, message)
        message = re.sub(rf"(?<![\w-]){name}=False\b", off, message)
        end = r"\b" if "_" in name else "(?==)"
        message = re.sub(rf"(?<![\w-]){name}{end}", on, message)
    return message


def _flags(command: Callable[..., Any]) -> dict[str, str]:
    """The option of every parameter of a command, and of the parameters that its arguments are passed on as."""
    flags: dict[str, str] = {}
    for name, parameter in inspect.signature(command, eval_str=True).parameters.items():
        declared = [each for each in getattr(parameter.annotation, "__metadata__", ()) if isinstance(each, OptionInfo)]
        if declared:
            named = [declared[0].default, *(declared[0].param_decls or ())]  # typer takes the first for the default
            spelled = [flag for flag in named if isinstance(flag, str) and flag.startswith("--")]
            flags[name] = spelled[0] if spelled else "--" + name.replace("_", "-")
    if "groups" in flags:
        flags |= dict.fromkeys(("group_a", "group_b", "pairs"), flags["groups"])
    return flags


def naming_options(command: Callable[..., None]) -> Callable[..., None]:
    """The command, whose errors that were foreseen name its options; see `option_names`."""

    @functools.wraps(command)
    def run(*args: Any, **options: Any) -> None:
        from vaerdict.core import VaerdictError

        try:
            command(*args, **options)
        except VaerdictError as error:
            raise type(error)(option_names(str(error), command)) from error

    return run
