"""Where data files are looked for. The project carries no third-party data."""

from __future__ import annotations

import os
from pathlib import Path

from vaerdict.core import DataError


def data_folder() -> Path:
    """The folder named by ``VAERDICT_DATA``, else ``vaerdict`` in the user's cache folder."""
    if named := os.environ.get("VAERDICT_DATA"):
        return Path(named).expanduser()
    cache = os.environ.get("XDG_CACHE_HOME")
    return (Path(cache) if cache else Path.home() / ".cache") / "vaerdict"


def find_data(name: str, *, source: str) -> Path:
    """The file `name` of the data folder; where it is absent, an error says so and names its public `source`."""
    path = data_folder() / name
    if not path.is_file():
        raise DataError(
            f"{path} is not there; get it from {source} and put it there, "
            f"or set VAERDICT_DATA to the folder that holds {name}."
        )
    return path
