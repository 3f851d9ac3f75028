"""Optional dependencies: imports that name the extra to install, and calls that leave the process as it was."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from importlib import import_module
from typing import Any

import numpy as np
import torch

from vaerdict.core import SettingError
from vaerdict.noise import global_state_from, seeded

_VERBOSE = ("lightning.pytorch", "pytorch_lightning", "scvi")


@contextmanager
def isolated(seed: int) -> Iterator[None]:
    """Run code of another library with global random states seeded by `seed`, and restore them at the end.

    Warnings and log messages are suppressed. The number of torch threads, which numba changes, is restored too.
    """
    state = np.random.get_state()  # noqa: NPY002
    with ExitStack() as undo:
        undo.callback(np.random.set_state, state)
        undo.callback(torch.set_num_threads, torch.get_num_threads())
        undo.enter_context(global_state_from(seeded(seed)))
        np.random.seed(seed)  # noqa: NPY002
        undo.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        for logger in map(logging.getLogger, _VERBOSE):
            undo.callback(logger.setLevel, logger.level)
            logger.setLevel(logging.ERROR)
        yield


def require(name: str, extra: str, *, distribution: str = "vaerdict") -> Any:
    """Import a module, or raise a `SettingError` that names the extra to install.

    >>> require("no_such_module", "plot")
    Traceback (most recent call last):
    vaerdict.core.SettingError: this needs no_such_module; install it with `pip install 'vaerdict[plot]'`.
    """
    try:
        return import_module(name)
    except ImportError as error:
        package = name.split(".")[0]
        raise SettingError(f"this needs {package}; install it with `pip install '{distribution}[{extra}]'`.") from error


def exact_floats() -> dict[str, str]:
    """The option with which pandas' ``read_csv`` reads numbers as they were written; from 3.1 on it always does."""
    release = require("pandas", "bio").__version__.split(".")
    return {"float_precision": "round_trip"} if tuple(map(int, release[:2])) < (3, 1) else {}
