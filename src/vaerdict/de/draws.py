"""Joint draws of the fold changes, kept compactly for those who want more of the posterior than a table."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from zipfile import BadZipFile

import numpy as np

from vaerdict.core import DataError
from vaerdict.de.effects import Effect

MOST_DRAWS, MOST_NUMBERS = 500, 2**25
"""Draws that are kept at most of each gene, and numbers over all contrasts: 128 MB in single precision."""


def kept(effects: Sequence[Effect], most: int = MOST_NUMBERS) -> np.ndarray:
    """The first draws of every contrast in single precision, as many as `most` numbers allow but one at least.

    Draws are exchangeable, so that the first are as good as any. Genes and contrasts are drawn apart, but on the scale
    of single cells, where a draw of all genes is of one pair of cells.

    Shapes: ``-> (contrasts, draws, genes)``.
    """
    draws, genes = effects[0].lfc.shape
    n = min(draws, MOST_DRAWS, max(1, most // (len(effects) * genes)))
    return np.stack([effect.lfc[:n].float().cpu().numpy() for effect in effects])


def write_draws(path: Path, lfc: np.ndarray, contrasts: Sequence[str], genes: Sequence[str]) -> None:
    """Write draws and the names of their axes as plain numpy arrays."""
    with path.open("wb") as file:  # given a name, numpy would change its ending
        np.savez(file, lfc=lfc, contrast=np.array(contrasts, dtype=str), gene=np.array(genes, dtype=str))


def read_draws(path: Path) -> np.ndarray:
    """The draws that `write_draws` wrote. Shapes: ``-> (contrasts, draws, genes)``."""
    try:
        with path.open("rb") as raw, np.load(raw, allow_pickle=False) as file:
            return file["lfc"]
    except (OSError, ValueError, KeyError, EOFError, BadZipFile) as error:
        raise DataError(f"{path} is missing or damaged ({error}); run `vaerdict de` again.") from error
