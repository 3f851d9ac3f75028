"""Finished stages of a run on disk, so that a run that was stopped goes on and ends in the same numbers."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from vaerdict.core import SettingError
from vaerdict.io import write_json
from vaerdict.training.checkpoint import file_of, read_checkpoint, save_checkpoint

_FORMAT = 4  # how finished stages are stored; those of another format are refused


@dataclass(frozen=True)
class StageCache:
    """A folder of finished stages, or none, in which case nothing is stored."""

    folder: Path | None = None

    @classmethod
    def of(cls, out: Path | None, fingerprint: Mapping[str, Any]) -> StageCache:
        """The cache of a run into `out`; that of another run is refused."""
        if out is None:
            return cls()
        folder, path = out / "stages", out / "stages" / "run.json"
        expected = json.loads(json.dumps({**fingerprint, "format": _FORMAT}))
        if path.exists():
            stored = json.loads(path.read_text())
            differing = sorted(key for key in expected.keys() | stored.keys() if expected.get(key) != stored.get(key))
            if differing:
                raise SettingError(
                    f"{out} holds a run that differs in {', '.join(differing)}; choose another folder, or delete "
                    f"{folder}."
                )
        write_json(path, expected)
        return cls(folder)

    def below(self, name: str) -> Path | None:
        """A folder for a stage that stores its own progress."""
        return None if self.folder is None else self.folder / name

    def stage(self, name: str, make: Callable[[], dict[str, Tensor]]) -> dict[str, Tensor]:
        """The tensors of a stage: those stored, else those that `make` returns, which are then stored."""
        path = None if self.folder is None else self.folder / name
        if path is not None and file_of(path).exists():
            tensors, notes = read_checkpoint(path)
            return {key: tensors[str(i)] for i, key in enumerate(notes["names"])}
        tensors = make()
        if path is not None:
            # names of groups are the user's and not every text can name a tensor: they are stored as notes
            save_checkpoint(path, {str(i): t for i, t in enumerate(tensors.values())}, {"names": list(tensors)})
        return tensors
