"""The cells that the page shows: their groups, a map of them, and counts of the leading genes, in one small file."""

from __future__ import annotations

import importlib.util
import json
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from scipy import sparse
from torch import Tensor

from vaerdict.core import DataError
from vaerdict.de.analysis import Analysis, GeneChoice
from vaerdict.de.components import log_normalised, principal_components
from vaerdict.io import replacing
from vaerdict.optional import isolated, require

FILE = "cells.npz"
"""The file of a run directory that holds the cells shown."""

MOST_CELLS, MOST_GENES = 4000, 240
"""Cells at most, of large groups some at random; genes about, the leading ones of each contrast and direction."""

_FEWEST_GENES = 5  # of each contrast and direction, however many contrasts there are
_FEWEST_MAPPED = 200  # of fewer cells a map by UMAP says little, and principal components are shown
_COMPONENTS, _VARIABLE = 20, 2000
_SEEN = 3  # cells in which a gene of the principal components is seen


@dataclass(frozen=True, eq=False)
class ShownCells:
    """Some of the `n_compared` cells compared, with counts of some genes.

    `sides` has 1 where a cell is of the first group of a contrast and 2 where of the second; `group` and `sample` are
    places in the lists of names, -1 without one. `place` is the map, None where none can be made, and `map_name` says
    what it is. Shapes: ``rows (n,)`` of the data, ``sides (contrasts, n)``, ``totals (n,)``, ``counts (n, genes)``
    sparse columns, ``place (n, 2)``, ``khat (n,)``.
    """

    rows: np.ndarray
    contrasts: list[str]
    sides: np.ndarray
    groups: list[str]
    group: np.ndarray
    samples: list[str]
    sample: np.ndarray
    totals: np.ndarray
    genes: list[str]
    n_compared: int
    counts: Any
    map_name: str
    place: np.ndarray | None
    khat: np.ndarray | None

    def save(self, path: Path) -> None:
        """Write the file, the same bytes for the same cells."""
        texts = ("contrasts", "groups", "samples", "genes", "map_name", "n_compared")
        arrays = {name: getattr(self, name) for name in ("rows", "sides", "group", "sample", "totals", "place", "khat")}
        arrays |= {f"counts_{name}": getattr(self.counts, name) for name in ("data", "indices", "indptr")}
        arrays["texts"] = np.frombuffer(json.dumps({name: getattr(self, name) for name in texts}).encode(), np.uint8)
        with replacing(path) as partial, partial.open("wb") as file:
            np.savez_compressed(file, **{name: array for name, array in arrays.items() if array is not None})

    @classmethod
    def load(cls, path: Path) -> ShownCells | None:
        """Read the file, None where there is none."""
        try:
            with path.open("rb") as stored, np.load(stored, allow_pickle=False) as file:
                arrays = dict(file)
            texts = json.loads(arrays.pop("texts").tobytes())
            parts = [arrays.pop(f"counts_{name}") for name in ("data", "indices", "indptr")]
            counts = sparse.csc_matrix(tuple(parts), shape=(len(arrays["rows"]), len(texts["genes"])))
            return cls(**{"place": None, "khat": None, "counts": counts} | texts | arrays)
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError, zipfile.BadZipFile) as error:
            raise DataError(f"{path} cannot be read ({error}); run `vaerdict de` again.") from error


def cells_to_show(
    cells: Analysis,
    tables: Sequence[Mapping[str, Tensor]],
    choices: Sequence[GeneChoice],
    latent: np.ndarray | None,
    khat: np.ndarray | None,
) -> ShownCells:
    """The cells that the page shows, whose counts are read again.

    Parameters
    ----------
    cells
        The analysis.
    tables
        The columns of the table of each contrast.
    choices
        The genes of each contrast.
    latent, khat
        Posterior means of the latents and k-hat of each of the cells compared, where a model ran.

    Returns
    -------
    ShownCells
        At most `MOST_CELLS` of them, and the leading genes.
    """
    labels = cells.labels.take(cells.cells)
    index = _some_cells(labels.group, cells.options.seed)
    rows, genes = cells.cells[index], _leading_genes(cells, tables, choices)
    counts = sparse.csr_matrix(sparse.vstack(list(cells.source.blocks(rows)), format="csr"))
    totals = cells.scan.totals[index]
    group, groups = _codes(labels.group[index])
    sample, samples = _codes(np.full(len(index), None) if labels.sample is None else labels.sample[index])
    sides = np.zeros((len(cells.contrasts), len(cells.cells)), np.int8)
    for row, contrast in zip(sides, cells.contrasts, strict=True):
        row[contrast.a.cells.numpy()], row[contrast.b.cells.numpy()] = 1, 2
    chosen = None if latent is None else latent[index]
    name, place = _map(counts, totals, chosen, cells.options.seed, umap=not cells.options.quick)
    leading = sparse.csc_matrix(counts[:, genes])
    leading.data = leading.data.astype(np.uint32)
    return ShownCells(
        rows=rows,
        contrasts=[contrast.name for contrast in cells.contrasts],
        sides=sides[:, index],
        groups=groups,
        group=group,
        samples=samples,
        sample=sample,
        totals=totals.round().astype(np.uint32),
        genes=[cells.source.names[g] for g in genes],
        n_compared=len(cells.cells),
        counts=leading,
        map_name=name,
        place=place,
        khat=None if khat is None else khat[index].astype(np.float32),
    )


def _some_cells(group: np.ndarray, seed: int) -> np.ndarray:
    """All cells of small groups and equally many of the others, at random. Shapes: ``(cells,) -> (n,)``, rising."""
    _, codes, sizes = np.unique(_codes(group)[0], return_inverse=True, return_counts=True)
    left, quota = MOST_CELLS, np.zeros_like(sizes)
    for rank, number in enumerate(np.argsort(sizes, kind="stable")):
        quota[number] = min(sizes[number], left // (len(sizes) - rank))
        left -= quota[number]
    order = np.random.default_rng([seed, 3]).permutation(len(group))
    chosen = [order[codes[order] == number][:most] for number, most in enumerate(quota)]
    return np.sort(np.concatenate(chosen))


def _codes(values: np.ndarray) -> tuple[np.ndarray, list[str]]:
    """Values as places in the list of their names, -1 for None. Shapes: ``(n,) -> (n,)``."""
    names = sorted(set(values) - {None})
    place = {name: i for i, name in enumerate(names)} | {None: -1}
    return np.array([place[value] for value in values], np.int32), names


def _leading_genes(
    cells: Analysis, tables: Sequence[Mapping[str, Tensor]], choices: Sequence[GeneChoice]
) -> np.ndarray:
    """The genes of smallest q in each contrast and direction, and those asked for, as columns of the data."""
    n = max(_FEWEST_GENES, MOST_GENES // (2 * len(tables)))
    asked = set(cells.options.keep_genes)
    chosen = {i for i, name in enumerate(cells.source.names) if name in asked}
    for table, genes in zip(tables, choices, strict=True):
        lfc = table["lfc_mean"].numpy()
        order = np.lexsort((-np.abs(lfc), table["q_value"].numpy()))
        for side in (lfc[order] > 0, lfc[order] < 0):
            chosen |= set(genes.tested[order[side][:n]].tolist())
    return np.array(sorted(chosen), int)


# ------------------------------------------------------------------------------------------------------- the map
def _map(
    counts: Any, totals: np.ndarray, latent: np.ndarray | None, seed: int, *, umap: bool = True
) -> tuple[str, np.ndarray | None]:
    """What the map is, and the place of every cell on it: by UMAP, which takes seconds, where scanpy is installed.

    Shapes: ``counts (n, genes)``, ``latent (n, d)``.
    """
    name, space = "latents of the model", latent
    if space is None:
        name, space = "principal components", _components(counts, totals, seed)
    if space is None or space.shape[1] < 2:
        return "", None
    if umap and space.shape[1] > 2 and len(space) >= _FEWEST_MAPPED and _has_umap():
        return f"UMAP of {name}", _umap(space, seed)
    first = space if space.shape[1] == 2 or latent is None else _axes(space)
    return f"first two {name}" if latent is None else f"two main axes of the {name}", first[:, :2].astype(np.float32)


def _components(counts: Any, totals: np.ndarray, seed: int) -> np.ndarray | None:
    """Principal components of the most variable genes; None where cells or genes are too few, or without sklearn."""
    seen = np.flatnonzero(counts.getnnz(0) >= _SEEN)
    if importlib.util.find_spec("sklearn") is None or min(len(seen), len(totals)) < 4:
        return None
    _, sd = log_normalised(counts[:, seen], totals)
    variable = np.sort(seen[np.argsort(-sd, kind="stable")[:_VARIABLE]])
    return principal_components(counts[:, variable], totals, _COMPONENTS, seed=seed)


def _axes(space: np.ndarray) -> np.ndarray:
    """The two directions of most variance. Shapes: ``(n, d) -> (n, 2)``."""
    centred = space - space.mean(0)
    left, size, _ = np.linalg.svd(centred, full_matrices=False)
    return left[:, :2] * size[:2]


def _has_umap() -> bool:
    return all(importlib.util.find_spec(name) is not None for name in ("scanpy", "umap"))


def _umap(space: np.ndarray, seed: int) -> np.ndarray:
    """Shapes: ``(n, d) -> (n, 2)``."""
    with isolated(seed):
        anndata, scanpy = require("anndata", "bio"), require("scanpy", "rivals")
        cells = anndata.AnnData(space.astype(np.float32))
        scanpy.pp.neighbors(cells, use_rep="X", random_state=seed, transformer="sklearn")
        scanpy.tl.umap(cells, random_state=seed)
    return np.asarray(cells.obsm["X_umap"], np.float32)
