"""Real cells for the learned prior: those compared, those that tell the truth, and others, without overlap."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import combinations
from typing import Any, NamedTuple

import numpy as np
from scipy import sparse

from vaerdict.de.calibration.halves import deal, kept_shares, thinned
from vaerdict_paper.benchmarks.de_methods.cells import GLIOBLASTOMA, KANG, PBMC, read_cells

FIRST, SECOND, OTHER = "first", "second", "other"
OTHER_KINDS, SAME_KINDS, WRONG_KINDS = "other kinds", "same kinds", "wrong kinds"
"""Cells that are not compared: all of other kinds, also unlabelled ones of the kinds compared, only unrelated kinds."""

BATCHES, SAMPLES, PAIRS = "batch_key", "sample_key", "pair_by"

GIVEN = 1 / 3
"""Share of the cells left over of the kinds compared that is unlabelled; the others tell the truth."""


class Cells(NamedTuple):
    """Cells, their side (`FIRST`, `SECOND` or `OTHER`), and their sample or patient where there are any.

    `role` says what these are to an analysis: `BATCHES`, `SAMPLES` or `PAIRS`; None where they play no part.

    Shapes: ``counts (cells, genes)`` sparse, ``side, unit (cells,)``.
    """

    counts: Any
    side: np.ndarray
    unit: np.ndarray | None = None
    role: str | None = None


class Case(NamedTuple):
    """The cells of an analysis, other cells that tell its truth, and the exact truth where it is known.

    Where nothing differs there is no truth. Shapes: ``exact (genes,)``, log2 fold changes.
    """

    analysed: Cells
    truth: Cells | None = None
    exact: np.ndarray | None = None


class _Source(NamedTuple):
    """A file of cells. Shapes: ``counts (cells, genes)`` sparse, others ``(cells,)``."""

    counts: Any
    types: np.ndarray
    condition: np.ndarray
    patient: np.ndarray

    def chosen(self, types: Sequence[str], condition: str | None = None) -> np.ndarray:
        """A mask of cells. Shapes: ``-> (cells,)`` bool."""
        return np.isin(self.types, types) & (True if condition is None else self.condition == condition)


Labels = tuple[tuple[str, ...], str | None]
"""Types of cells, and their condition."""


class _Contrast(NamedTuple):
    """A contrast within a file: the labels of both sides, and the types that are unrelated to them."""

    file: str
    first: Labels
    second: Labels
    unrelated: tuple[str, ...] = ()


_MONOCYTES, _CD4 = ("CD14+ Monocytes",), ("CD4 T cells",)
_T, _CD8 = ("Naive CD4 T", "Memory CD4 T"), ("CD8 T",)
KANG_MONOCYTES, KANG_CD4 = "Kang, CD14+ monocytes, stimulated v control", "Kang, CD4 T, stimulated v control"
PBMC_T, PBMC_MONOCYTES = "PBMC 3k, CD4 v CD8 T", "PBMC 3k, CD14+ v FCGR3A+ monocytes"

CONTRASTS: Mapping[str, _Contrast] = {
    KANG_MONOCYTES: _Contrast(KANG, (_MONOCYTES, "stim"), (_MONOCYTES, "ctrl")),
    KANG_CD4: _Contrast(KANG, (_CD4, "stim"), (_CD4, "ctrl")),
    PBMC_T: _Contrast(PBMC, (_T, None), (_CD8, None), ("B", "DC", "Platelet")),
    PBMC_MONOCYTES: _Contrast(PBMC, (("CD14+ Mono",), None), (("FCGR3A+ Mono",), None), (*_T, *_CD8, "B", "NK")),
}

ONE_PATIENT, TWO_PATIENTS, PAIRED = (
    "glioblastoma, panobinostat v control, one patient",
    "glioblastoma, panobinostat v control, two patients",
    "glioblastoma, panobinostat v control, three pairs of samples",
)
PATIENTS: Mapping[str, tuple[int, str | None]] = {
    ONE_PATIENT: (1, None),
    TWO_PATIENTS: (2, BATCHES),
    PAIRED: (3, PAIRS),
}
"""Number of patients, and what they are to the analysis."""

HOMOGENEOUS: Mapping[str, tuple[str, Sequence[Labels]]] = {
    "PBMC 3k, naive CD4 T": (PBMC, [(("Naive CD4 T",), None)]),
    "PBMC 3k, B": (PBMC, [(("B",), None)]),
    "Kang, control CD14+ monocytes": (KANG, [(_MONOCYTES, "ctrl")]),
}
MIXED: Mapping[str, tuple[str, Sequence[Labels]]] = {
    "PBMC 3k, CD4 and CD8 T": (PBMC, [(_T, None), (_CD8, None)]),
    "PBMC 3k, CD14+ and FCGR3A+ monocytes": (PBMC, [(("CD14+ Mono",), None), (("FCGR3A+ Mono",), None)]),
    "PBMC 3k, B and NK": (PBMC, [(("B",), None), (("NK",), None)]),
    "Kang, stimulated and control CD14+ monocytes": (KANG, [(_MONOCYTES, "stim"), (_MONOCYTES, "ctrl")]),
}
"""Populations of which both sides are random draws: one kind, or two in equal parts as far as there are cells."""


@lru_cache(maxsize=1)
def _read(file: str) -> _Source:
    """The cells of a file that have a type."""
    adata = read_cells(file)
    obs, none = adata.obs.astype(str), np.full(adata.n_obs, "all")
    types = obs["cell_type"].to_numpy() if "cell_type" in obs else none
    condition = obs["condition"].to_numpy() if "condition" in obs else none
    patient = obs["patient_id"].to_numpy() if "patient_id" in obs else none
    if "sample" in obs:  # of Kang: the condition and the donor, such as stim101
        patient = obs["sample"].str[-3:].to_numpy()
    typed = types != "unassigned"
    return _Source(sparse.csr_matrix(adata.X[typed]), types[typed], condition[typed], patient[typed])


# ------------------------------------------------------------------------------------------------- real contrasts
def contrast(data: str, others: str, n: int, rng: np.random.Generator) -> Case:
    """A contrast of `CONTRASTS`, n cells a side, donors in equal parts.

    The cells compared, and those that tell the truth, are the same whichever others there are.
    """
    asked = CONTRASTS[data]
    source = _read(asked.file)
    given: list[np.ndarray] = []
    compared, truth = [], []
    for labels in (asked.first, asked.second):
        pool = np.flatnonzero(source.chosen(*labels))
        cells, rest = _dealt(pool, source.patient, n, rng)
        unlabelled, rest = _dealt(rest, source.patient, round(GIVEN * len(rest)) if asked.unrelated else 0, rng)
        compared.append(cells)
        truth.append(rest)
        given.append(unlabelled)
    other = np.flatnonzero(_others(source, asked, others))
    if others == SAME_KINDS:
        other = np.concatenate([other, *given])
    return Case(_cells(source, compared, other), _cells(source, truth))


def _others(source: _Source, asked: _Contrast, others: str) -> np.ndarray:
    if others == WRONG_KINDS:
        return source.chosen(asked.unrelated)
    return ~source.chosen((*asked.first[0], *asked.second[0]))


def patients(data: str, n: int, seed: int, rng: np.random.Generator) -> Case:
    """A design of `PATIENTS` with n cells a side, or a sample in pairs; the cells of other patients are not compared.

    The truth is that of the same patients, with their cells as replicates.
    """
    source, (k, role) = _read(GLIOBLASTOMA), PATIENTS[data]
    ways = list(combinations(sorted(set(source.patient)), k))
    own = np.isin(source.patient, ways[seed % len(ways)])
    n_side = n * k if role == PAIRS else n
    parts = [
        _dealt(np.flatnonzero(own & (source.condition == condition)), source.patient, n_side, rng)
        for condition in ("panobinostat", "ctrl")
    ]
    compared, truth = zip(*parts, strict=True)
    analysed = _cells(source, compared, np.flatnonzero(~own), role)
    return Case(analysed, _cells(source, truth, role=None if k == 1 else BATCHES))


def _dealt(pool: np.ndarray, stratum: np.ndarray, n: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Some n cells of a pool, strata in equal parts, and the others. Shapes: ``pool (m,)``, ``stratum (cells,)``."""
    if not n:
        return pool[:0], pool
    first = deal(stratum[pool], rng, n / len(pool))
    return pool[first], pool[~first]


def _cells(
    source: _Source, sides: Sequence[np.ndarray], other: Sequence[int] | np.ndarray = (), role: str | None = None
) -> Cells:
    rows = np.concatenate([*sides, np.asarray(other, dtype=int)])
    side = np.repeat([FIRST, SECOND, OTHER], [*map(len, sides), len(other)])
    return Cells(source.counts[rows], side, None if role is None else source.patient[rows], role)


# --------------------------------------------------------------------------------------------- nothing differs
def null(data: str, n: int, rng: np.random.Generator) -> Case | None:
    """Random sides of n cells from one population; None where there are not enough cells."""
    file, labels = (HOMOGENEOUS | MIXED)[data]  # type: ignore[operator]
    source = _read(file)
    pools = [rng.permutation(np.flatnonzero(source.chosen(*each))) for each in labels]
    if sum(map(len, pools)) < 2 * n:
        return None
    order = np.concatenate([np.arange(len(pool)) for pool in pools])
    drawn = np.concatenate(pools)[np.argsort(order, kind="stable")][: 2 * n]  # of each in turn
    stratum = source.patient if len(labels) == 1 else np.full(len(source.types), "all")
    first = deal(stratum[drawn], rng)
    types = [name for own, _ in labels for name in own]
    return Case(_cells(source, (drawn[first], drawn[~first]), np.flatnonzero(~source.chosen(types))))


# ------------------------------------------------------------------------------------------------ changes undone
def undone(cells: Cells, lfc: np.ndarray, rng: np.random.Generator) -> Cells:
    """The cells with changes of some genes removed: the higher side is thinned by the true fold change.

    Other cells stay as they are. Shapes: ``lfc (genes,)``, zero for genes that stay.
    """
    half = np.select([cells.side == FIRST, cells.side == SECOND], [0, 1], -1)
    return cells._replace(counts=thinned(cells.counts, half, kept_shares(-lfc), rng))
