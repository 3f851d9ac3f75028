"""Public names of a package, imported when they are first used: the stub beside ``__init__`` is their only list."""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any


def attach(package: str, file: str) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """``__getattr__``, ``__dir__`` and ``__all__`` of a package whose stub imports its public names.

    >>> __getattr__, __dir__, names = attach("vaerdict", __file__.replace("_lazy", "__init__"))
    >>> "expect" in names
    True
    """
    stub = ast.parse(Path(file).with_suffix(".pyi").read_text(encoding="utf-8"))
    imports = [node for node in stub.body if isinstance(node, ast.ImportFrom)]
    sources = {alias.name: str(node.module) for node in imports for alias in node.names}
    names = sorted(sources)

    def get(name: str) -> Any:
        source = sources.get(name, package)
        value = _submodule(package, name) if source == package else getattr(import_module(source), name)
        setattr(sys.modules[package], name, value)
        return value

    return get, lambda: sorted({*names, *vars(sys.modules[package])}), names


def _submodule(package: str, name: str) -> Any:
    """The module of that name in a package, as an attribute of it."""
    try:
        return import_module(f"{package}.{name}")
    except ModuleNotFoundError as error:
        if error.name != f"{package}.{name}":
            raise
        raise AttributeError(f"module {package!r} has no attribute {name!r}") from None
