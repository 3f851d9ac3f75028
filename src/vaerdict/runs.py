"""The folder of a run: whose it is, what it may replace, and whether a stopped run can go on in it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

from vaerdict.core import SettingError
from vaerdict.io import finite, is_partial, write_json

RUN = "run.json"
"""The file that says whose run a folder holds, written before anything else."""

_WRITTEN = (
    *(RUN, "results.json", "manifest.json", "report.html", "figures", "stages", "tasks", "inputs"),
    *("de.csv", "de.parquet", "not_tested.csv", "latent.h5ad", "calibrate.csv", "cells.csv", "cells.parquet"),
    *("annotated.h5ad", "cells.npz", "audit.csv", "audit.md"),
)
"""What commands write, which a run that replaces another removes."""

_REMEDY = "choose another out=, or replace it with force=True."
_SHOWN = 3  # names or settings listed in a message


@dataclass(frozen=True)
class RunFolder:
    """A folder for the results of a run, or none.

    A run is started by `claim`. The same run again goes on with what is stored there; a run of other data or settings
    is refused unless `force` replaces what the folder holds.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as out:
    ...     RunFolder.of(out, "de").claim({"data": "a", "settings": {"delta": 0.5}})
    ...     RunFolder.of(out, "de").claim({"data": "a", "settings": {"delta": 0.5}})
    ...     try:
    ...         RunFolder.of(out, "de").claim({"data": "a", "settings": {"delta": 1.0}})
    ...     except SettingError as error:
    ...         print(str(error).replace(out, "out"))
    out holds an unfinished run with other settings (delta=0.5); choose another out=, or replace it with force=True.
    """

    path: Path | None
    experiment: str
    force: bool = False

    @classmethod
    def of(cls, out: str | Path | None, experiment: str, *, force: bool = False) -> RunFolder:
        """The folder, which is refused if it cannot be written or holds anything but a run of this experiment."""
        if out is None:
            return cls(None, experiment, force)
        path = Path(out)
        _check_writable(path)
        if not force:
            _check_experiment(path, experiment, _REMEDY)
            _check_foreign(path)
        return cls(path, experiment, force)

    def claim(self, identity: Mapping[str, Any]) -> None:
        """Mark the folder as that of a run, or refuse it if it holds another; `identity` tells runs apart."""
        if self.path is None:
            return
        mine = _as_json({"experiment": self.experiment, **identity})
        if self.force:
            _remove_run(self.path)
        elif _experiment(self.path) is not None:
            _check_same(self.path, _read(self.path / RUN), mine)
        write_json(self.path / RUN, mine)

    def below(self, name: str) -> Path | None:
        """The path of something in the folder; None where there is no folder."""
        return None if self.path is None else self.path / name


def prepare_save(out: str | Path, experiment: str, settings: Mapping[str, Any], data: str | None) -> Path:
    """The folder that results are about to be saved to by hand; one of another experiment is refused.

    If the folder holds a run of other data or settings, it is no longer marked as that run's.
    """
    path = Path(out)
    _check_experiment(path, experiment, "choose another folder.")
    stored = _read(path / RUN)
    if stored is not None:
        theirs, ours = stored.get("settings") or {}, _as_json(settings)
        if stored.get("data") != data or any(ours[key] != theirs[key] for key in ours.keys() & theirs.keys()):
            (path / RUN).unlink()
    return path


def _as_json(value: Any) -> Any:
    """A value as it is read back from JSON."""
    return json.loads(json.dumps(finite(value)))


def _check_experiment(path: Path, experiment: str, remedy: str) -> None:
    stored = _experiment(path)
    if stored is not None and stored != experiment:
        raise SettingError(f"{path} holds results of {stored!r}, not of {experiment!r}; {remedy}")


def _check_writable(path: Path) -> None:
    """Raise what writing below the folder would raise, before anything is computed."""
    place = path
    while not place.exists() and place != place.parent:
        place = place.parent
    try:
        TemporaryFile(dir=place).close()
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(place)) from error


def _check_foreign(path: Path) -> None:
    if not path.exists() or _experiment(path) is not None:
        return
    names = sorted(entry.name for entry in path.iterdir() if not is_partial(entry))
    if names:
        more = ", ..." if len(names) > _SHOWN else ""
        raise SettingError(
            f"{path} holds files of no run ({', '.join(names[:_SHOWN])}{more}); choose another out=, or write beside "
            "them with force=True."
        )


def _check_same(path: Path, stored: dict[str, Any] | None, mine: dict[str, Any]) -> None:
    state = "a finished run" if (path / "results.json").exists() else "an unfinished run"
    if stored is None:
        raise SettingError(f"{path} holds {state} that does not say of which data and settings; {_REMEDY}")
    if stored == mine:
        return
    keys = sorted((stored.keys() | mine.keys()) - {"experiment", "settings"})
    parts = [f"of other {key}" for key in keys if stored.get(key) != mine.get(key)]
    theirs, ours = (record.get("settings") or {} for record in (stored, mine))
    if theirs != ours:
        differing = [f"{key}={value!r}" for key, value in theirs.items() if key in ours and ours[key] != value]
        listed = ", ".join([*differing[:_SHOWN], *(["..."] if len(differing) > _SHOWN else [])])
        parts.append(f"with other settings ({listed})" if listed else "with other settings")
    raise SettingError(f"{path} holds {state} {' and '.join(parts)}; {_REMEDY}")


def _experiment(path: Path) -> str | None:
    """The experiment whose run a folder holds; None for a folder without one."""
    for name in (RUN, "results.json"):
        experiment = (_read(path / name) or {}).get("experiment")
        if isinstance(experiment, str):
            return experiment
    return None


def _read(path: Path) -> dict[str, Any] | None:
    """A JSON record; None where there is none."""
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return None
    return value if isinstance(value, dict) else None


def _remove_run(path: Path) -> None:
    """Remove what a run wrote; files of a folder that holds no run are left."""
    if _experiment(path) is None:
        return
    for name in reversed(_WRITTEN):  # what marks the folder comes last
        entry = path / name
        if entry.is_dir():
            shutil.rmtree(entry)
        else:
            entry.unlink(missing_ok=True)
