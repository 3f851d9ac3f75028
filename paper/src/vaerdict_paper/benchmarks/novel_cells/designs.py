"""References and queries made of real cells: a type hidden, another composition, donors, conditions, patients."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from scipy import sparse

from vaerdict.optional import isolated, require
from vaerdict_paper.benchmarks.de_methods.cells import GLIOBLASTOMA, KANG, PBMC, read_cells

PBMC_TYPES, KANG_STATES, KANG_TYPES, PATIENTS = "PBMC 3k", "Kang, types x conditions", "Kang", "glioblastoma"
"""Data sets: types of PBMC, types of Kang in two conditions as ten states, its types, conditions of glioblastoma."""

FEWEST_HIDDEN = 30
"""Cells of a type at least."""

REFERENCE = 0.6
"""Share of the cells of known types that are the reference."""


class Cells(NamedTuple):
    """Cells of a data set. Shapes: ``counts (cells, genes)`` sparse, all others ``(cells,)``."""

    counts: Any
    types: np.ndarray
    sample: np.ndarray
    condition: np.ndarray


class Design(NamedTuple):
    """Rows of reference and query, which query cells are novel, and which calibrate. Shapes: ``(n,)``, ``(m,)``."""

    reference: np.ndarray
    query: np.ndarray
    novel: np.ndarray
    calibration: np.ndarray | None = None


@lru_cache(maxsize=2)
def cells_of(data: str) -> Cells:
    """The cells of a data set, those without a type, or of one with fewer than `FEWEST_HIDDEN` cells, left out."""
    file = {PBMC_TYPES: PBMC, KANG_STATES: KANG, KANG_TYPES: KANG, PATIENTS: GLIOBLASTOMA}[data]
    obs, counts = (lambda adata: (adata.obs.astype(str), sparse.csr_matrix(adata.X)))(read_cells(file))
    if data == PATIENTS:
        return Cells(counts, *(obs[key].to_numpy() for key in ("condition", "patient_id", "condition")))
    size = obs["cell_type"].map(obs["cell_type"].value_counts())
    kept = ((obs["cell_type"] != "unassigned") & (size >= FEWEST_HIDDEN)).to_numpy()
    obs, none = obs[kept], np.full(int(kept.sum()), "all")
    condition = obs["condition"].to_numpy() if "condition" in obs else none
    types = obs["cell_type"].to_numpy()
    types = np.array([f"{t} {c}" for t, c in zip(types, condition, strict=True)]) if data == KANG_STATES else types
    return Cells(counts[kept], types, obs["sample"].to_numpy() if "sample" in obs else none, condition)


def hidden_types(data: str) -> list[str]:
    """The types that are hidden in turn."""
    return [str(name) for name in np.unique(cells_of(data).types)]


def hide(cells: Cells, hidden: str, share: float, rng: np.random.Generator) -> Design:
    """A random reference without a type, and a query of which `share` is of it; fewer known cells where it is rare."""
    known = rng.permutation(np.flatnonzero(cells.types != hidden))
    novel = rng.permutation(np.flatnonzero(cells.types == hidden))
    reference, rest = np.split(known, [int(REFERENCE * len(known))])
    n_novel = min(len(novel), round(share / (1 - share) * len(rest)))
    if share:
        rest = rest[: round(n_novel * (1 - share) / share)]
    return Design(reference, np.concatenate([rest, novel[:n_novel]]), np.arange(len(rest) + n_novel) >= len(rest))


def compose(cells: Cells, rng: np.random.Generator) -> Design:
    """A random reference, and a query with other shares of types: each is thinned at random."""
    order = rng.permutation(len(cells.types))
    reference, rest = np.split(order, [int(REFERENCE * len(order))])
    names = np.unique(cells.types)
    weight = dict(zip(names, rng.gamma(0.7, size=len(names)), strict=True))
    kept = np.array([weight[t] for t in cells.types[rest]]) / max(weight.values())
    query = rest[rng.random(len(rest)) < np.maximum(kept, 0.02)]
    return Design(reference, query, np.zeros(len(query), dtype=bool))


def between(reference: np.ndarray, query: np.ndarray) -> Design:
    """Two sets of cells, nothing hidden. Shapes: ``(cells,)`` bool each."""
    return Design(np.flatnonzero(reference), np.flatnonzero(query), np.zeros(int(query.sum()), dtype=bool))


def calibrated(cells: Cells, hidden: str, share: float, part: float, rng: np.random.Generator) -> Design:
    """Control cells without a type as reference, stimulated ones as query; `part` of its known cells calibrate."""
    known = rng.permutation(np.flatnonzero((cells.condition == "stim") & (cells.types != hidden)))
    novel = rng.permutation(np.flatnonzero((cells.condition == "stim") & (cells.types == hidden)))
    n_calibration = round(part * len(known))
    n_novel = min(len(novel), round(share / (1 - share) * (len(known) - n_calibration)))
    query = np.concatenate([known, novel[:n_novel]])
    place = np.arange(len(query))
    reference = np.flatnonzero((cells.condition == "ctrl") & (cells.types != hidden))
    return Design(reference, query, place >= len(known), place < n_calibration)


def as_anndata(cells: Cells, rows: np.ndarray, **columns: Any) -> Any:
    """An AnnData of some cells, with their types as ``cell_type`` and further columns of obs."""
    pandas, anndata = require("pandas", "bio"), require("anndata", "bio")
    index = [f"c{i}" for i in range(len(rows))]
    obs = pandas.DataFrame({"cell_type": cells.types[rows].astype(str), **columns}, index=index)
    var = pandas.DataFrame(index=[f"g{i}" for i in range(cells.counts.shape[1])])
    with isolated(0):
        return anndata.AnnData(cells.counts[rows], obs=obs, var=var)
