"""Finished stages of a run on disk, so that a run that was stopped goes on and ends in the same numbers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from vaerdict.training.checkpoint import file_of, read_checkpoint, save_checkpoint

FORMAT = 4
"""How finished stages are stored; a run with those of another format cannot go on."""


@dataclass(frozen=True)
class StageCache:
    """A folder of finished stages, or none, in which case nothing is stored."""

    folder: Path | None = None

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
