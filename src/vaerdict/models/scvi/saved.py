"""Saved scvi-tools models, read without running code from their file.

scvi-tools writes ``model.pt`` with pickle and reads it with ``torch.load(weights_only=False)``, which runs whatever the
file asks for. Here the file is first read by torch's restricted unpickler, which knows tensors, containers and arrays,
and nothing else. What it returns is written to a temporary file, and that file is given to scvi-tools: the original is
never unpickled otherwise.
"""

from __future__ import annotations

import pickle
import re
import tempfile
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np
import torch

from vaerdict.core import DataError
from vaerdict.optional import isolated, require

_FILE = "model.pt"
_HISTORY = re.compile(r"history_$")  # tables of the training, which nothing here needs
_PYRO = "pyro_param_store"  # scvi-tools saves what other programs of the process left there, with every model
_BLANKS = ("pandas.", "pyarrow.lib.", "torch.distributions.constraints.")  # texts of pandas 3 are Arrow arrays
_NUMPY = ("numpy._core", "numpy.core")  # in NumPy 2 and 1


def load_scvi(folder: str | Path, adata: Any) -> Any:
    """The model that scvi-tools' ``model.save()`` wrote to a folder, with these data.

    Parameters
    ----------
    folder
        Folder with the file ``model.pt``.
    adata
        AnnData with the registered fields of the model.

    Raises
    ------
    DataError
        If there is no such file, if it holds anything but numbers, texts and tables, if it is of a class that
        scvi-tools does not have, or if the data do not fit.
    """
    folder, scvi = Path(folder), require("scvi", "scvi")
    saved = read_scvi(folder)
    name = str(saved["attr_dict"]["registry_"]["model_name"])
    kind = getattr(scvi.model, name, None) or getattr(require("scvi.external", "scvi"), name, None)
    if not (isinstance(kind, type) and issubclass(kind, scvi.model.base.BaseModelClass)):
        raise DataError(f"{folder / _FILE} is of class {name!r}, which is no model of scvi-tools {scvi.__version__}.")
    if saved["attr_dict"]["registry_"].get("setup_method_name") == "setup_mudata" and not hasattr(adata, "mod"):
        raise DataError(f"{folder} is of a {name} of a MuData; an AnnData (.h5ad) does not have its modalities.")
    try:
        with isolated(0), tempfile.TemporaryDirectory() as copy:
            torch.save(saved, Path(copy) / _FILE)
            return kind.load(copy, adata=adata, accelerator="cpu")
    except Exception as error:  # scvi-tools raises many kinds for data that do not fit
        raise DataError(f"{folder} cannot be loaded with these data ({_first_line(error)}).") from error


def read_scvi(folder: str | Path) -> dict[str, Any]:
    """What the file of a saved model holds, without the history of its training; no code from it is run."""
    path = Path(folder) / _FILE
    if not path.is_file():
        raise DataError(f"{folder} holds no {_FILE}; name a folder written by scvi-tools' model.save().")
    try:
        needed = torch.serialization.get_unsafe_globals_in_checkpoint(path)
        allowed = _plain_data(needed)
        with torch.serialization.safe_globals(allowed):
            saved = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise DataError(
            f"{path} is refused: to unpickle it could run code ({_first_line(error)}). A saved model of scvi-tools "
            "holds numbers, texts and tables only."
        ) from error
    except (RuntimeError, OSError, EOFError, ValueError, TypeError, AttributeError, KeyError, BadZipFile) as error:
        raise DataError(f"{path} is cut short, or not written by torch.save ({_first_line(error)}).") from error
    _check_model(saved, path)
    attributes = saved["attr_dict"]
    saved["attr_dict"] = {key: value for key, value in attributes.items() if not _HISTORY.search(key)}
    saved["model_state_dict"].pop(_PYRO, None)
    return saved


class _Table:
    """Takes the place of tables of pandas, of their parts and of constraints, whose contents are not read."""

    def __init__(self, *_: Any) -> None:
        pass

    def __setstate__(self, _: Any) -> None:
        pass

    def __reduce__(self) -> Any:
        raise pickle.PicklingError("the model holds tables besides the history of its training")


def _dict(*_: Any) -> dict[Any, Any]:
    """A dictionary in place of one with defaults, which the restricted unpickler cannot fill."""
    return {}


def _plain_data(needed: list[str]) -> list[Any]:
    """What a file may construct: arrays of NumPy, containers, and blanks for the training's history and for Pyro."""
    multiarray: Any = np._core.multiarray if hasattr(np, "_core") else np.core.multiarray  # type: ignore[attr-defined]
    arrays = [(getattr(multiarray, f), f"{m}.multiarray.{f}") for m in _NUMPY for f in ("_reconstruct", "scalar")]
    dtypes = [getattr(np.dtypes, name) for name in dir(np.dtypes) if name.endswith("DType")]
    allowed = [dict, bytes, (_dict, "collections.defaultdict"), np.dtype, np.ndarray, *dtypes, *arrays]
    names = {name for name in needed if name.startswith(_BLANKS) or name == "builtins.slice"}
    foreign = set(needed) - names - {_name(item) for item in allowed}
    if foreign:
        raise pickle.UnpicklingError(f"it asks for {', '.join(sorted(foreign)[:5])}")
    return [*allowed, _Table, *((_Table, name) for name in sorted(names))]


def _name(item: Any) -> str:
    return item[1] if isinstance(item, tuple) else f"{item.__module__}.{item.__qualname__}"


def _check_model(saved: Any, path: Path) -> None:
    attributes = saved.get("attr_dict") if isinstance(saved, dict) else None
    registry = attributes.get("registry_") if isinstance(attributes, dict) else None
    if not isinstance(registry, dict) or "model_name" not in registry or "model_state_dict" not in saved:
        raise DataError(f"{path} is no model of scvi-tools 1.x; name a folder written by its model.save().")


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0].rstrip(".") if str(error) else type(error).__name__
