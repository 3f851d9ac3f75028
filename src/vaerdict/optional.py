"""Other people's libraries: imported when needed, and run without what they do to the process."""

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

_CHATTY = ("lightning.pytorch", "pytorch_lightning", "scvi")


@contextmanager
def isolated(seed: int) -> Iterator[None]:
    """Run another library's code and put back what it changes: its global randomness is from `seed`, its warnings and
    chatter are kept in, and torch keeps its threads, which numba sets for the whole process."""
    state = np.random.get_state()  # noqa: NPY002
    with ExitStack() as undo:
        undo.callback(np.random.set_state, state)
        undo.callback(torch.set_num_threads, torch.get_num_threads())
        undo.enter_context(global_state_from(seeded(seed)))
        np.random.seed(seed)  # noqa: NPY002
        undo.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        for logger in map(logging.getLogger, _CHATTY):
            undo.callback(logger.setLevel, logger.level)
            logger.setLevel(logging.ERROR)
        yield


def require(name: str, extra: str) -> Any:
    """The module of that name, or a `SettingError` that names the extra to install."""
    try:
        return import_module(name)
    except ImportError as error:
        package = name.split(".")[0]
        raise SettingError(f"this needs {package}; install it with `pip install vaerdict[{extra}]`.") from error
