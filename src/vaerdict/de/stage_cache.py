"""Finished stages of a run on disk, so that one that was stopped goes on and ends in the same numbers."""

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


@dataclass(frozen=True)
class Parts:
    """A folder of finished stages, or none, in which case nothing is stored."""

    folder: Path | None = None

    @classmethod
    def of(cls, out: Path | None, fingerprint: Mapping[str, Any]) -> Parts:
        """The parts below `out`; those of another run are refused."""
        if out is None:
            return cls()
        folder, known = out / "parts", out / "parts" / "run.json"
        wanted = json.loads(json.dumps(fingerprint))
        if known.exists():
            found = json.loads(known.read_text())
            other = sorted(key for key in wanted.keys() | found.keys() if wanted.get(key) != found.get(key))
            if other:
                raise SettingError(
                    f"{out} holds a run that differs in {', '.join(other)}; choose another folder, or delete {folder}."
                )
        write_json(known, wanted)
        return cls(folder)

    def below(self, name: str) -> Path | None:
        """A folder for a stage that keeps its own books."""
        return None if self.folder is None else self.folder / name

    def stage(self, name: str, make: Callable[[], dict[str, Tensor]]) -> dict[str, Tensor]:
        """The tensors of a stage: those stored, else those made, which are then stored."""
        path = None if self.folder is None else self.folder / name
        if path is not None and file_of(path).exists():
            tensors, notes = read_checkpoint(path)
            return {key: tensors[str(i)] for i, key in enumerate(notes["names"])}
        made = make()
        if path is not None:
            # names of groups are the user's: they travel as notes, for not every text is a name of a tensor
            save_checkpoint(path, {str(i): t for i, t in enumerate(made.values())}, {"names": list(made)})
        return made
