"""Reading result files: JSON records, checked, with errors that name what is wrong with a file."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from vaerdict.core import DataError, VaerdictError

Row = Mapping[str, Any]
"""One record of a result file."""


def read_record(path: Path) -> dict[str, Any]:
    """Read a JSON record; an unusable file raises `DataError` with the reason."""
    try:
        value = json.loads(path.read_bytes())
    except FileNotFoundError as error:
        raise DataError(f"{path} does not exist; give the directory of a finished run.") from error
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}.") from error
    except ValueError as error:  # not JSON, or not UTF-8
        raise DataError(
            f"{path} is not complete JSON ({error}); the run was interrupted or the file is damaged: run it again."
        ) from error
    if not isinstance(value, dict):
        raise DataError(f"{path} holds a {type(value).__name__}, not a record; it was not written by this program.")
    return value


def read_run(run_dir: Path) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """The results of a run directory, and its manifest if there is one."""
    manifest = run_dir / "manifest.json"
    return read_record(run_dir / "results.json"), read_record(manifest) if manifest.exists() else None


def rows_of(results: Row, name: str, *required: str) -> list[Row]:
    """The list of rows called `name`, empty if absent; every row must have the `required` keys."""
    rows = results.get(name, [])
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise DataError(f"{name!r} in results.json is not a list of records; the file was not written by this program.")
    for index, row in enumerate(rows):
        absent = [key for key in required if key not in row]
        if absent:
            raise DataError(
                f"record {index} of {name!r} in results.json lacks {', '.join(absent)}; run the experiment again."
            )
    return rows


def grouped(rows: Iterable[Row], *keys: str) -> dict[tuple[Any, ...], list[Row]]:
    """Rows by their values of `keys`, in order of first appearance."""
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault(tuple(row.get(key) for key in keys), []).append(row)
    return groups


@contextmanager
def well_formed(run_dir: Path) -> Iterator[None]:
    """Raise `DataError` naming results.json where its records lack what the enclosed code needs."""
    try:
        yield
    except VaerdictError:
        raise
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        path = run_dir / "results.json"
        raise DataError(
            f"{path} lacks something that its report needs ({error!r}); run the experiment again."
        ) from error
