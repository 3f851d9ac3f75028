r"""Sums over groups of cells, from which everything about counts follows: one pass over the cells, all genes at once.

A cell has counts :math:`x_{ig}` and the library :math:`N_i`, its counts over all genes of the file, tested or not. The
rate of a gene in a group is :math:`m_g = \sum_i x_{ig} / \sum_i N_i`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
import torch
from scipy import sparse
from torch import Tensor

K = TypeVar("K")


class GroupSums(NamedTuple):
    r"""Sums over the cells of a group: :math:`\sum x`, :math:`\sum x^2`, :math:`\sum x N`, cells in which x > 0.

    `library` and `library_squares` are :math:`\sum N` and :math:`\sum N^2`, of the cells that have counts, whose number
    is `n_cells`. Shapes: ``(genes,)``; the libraries and their squares ``()`` or, where adjusted for covariates,
    ``(genes,)``.
    """

    total: Tensor
    squares: Tensor
    cross: Tensor
    seen: Tensor
    library: Tensor
    library_squares: Tensor
    n_cells: int

    @property
    def rate(self) -> Tensor:
        """Share of the group's counts that is the gene's. Shapes: ``-> (genes,)``."""
        return self.total / self.library

    @property
    def deviations(self) -> Tensor:
        r"""An unbiased :math:`\sum_i (x_i - m N_i)^2`. Shapes: ``-> (genes,)``."""
        rate = self.rate
        squares = self.squares - 2 * rate * self.cross + rate.square() * self.library_squares
        return squares.clamp_min(0) * self.n_cells / max(1, self.n_cells - 1)

    def take(self, genes: Tensor) -> GroupSums:
        """Those of some genes."""
        parts = {name: getattr(self, name) for name in self._fields if name != "n_cells"}
        return self._replace(**{name: part[genes] if part.dim() else part for name, part in parts.items()})


@dataclass(frozen=True, eq=False)
class CountSums(Generic[K]):
    """Sums of every group of cells that is needed, kept for sets of cells that no group divides.

    Shapes: ``groups (names, sets)`` bool, ``sums (4, sets, genes)``, ``libraries (3, sets)``: number of cells with
    counts, sum of their libraries, and of their squares.
    """

    names: Mapping[K, int]
    groups: np.ndarray
    sums: np.ndarray
    libraries: np.ndarray

    def __contains__(self, name: object) -> bool:
        return name in self.names

    def n_cells(self, name: K) -> int:
        """Number of cells of a group that have counts."""
        return int(self.libraries[0, self.groups[self.names[name]]].sum())

    def __getitem__(self, name: K) -> GroupSums:
        chosen = np.flatnonzero(self.groups[self.names[name]])
        total, squares, cross, seen = (torch.from_numpy(part[chosen].sum(0)) for part in self.sums)
        n, library, library_squares = self.libraries[:, chosen].sum(1)
        return GroupSums(total, squares, cross, seen, torch.tensor(library), torch.tensor(library_squares), int(n))


@dataclass(frozen=True, eq=False)
class CellGroups(Generic[K]):
    """Groups of cells that may overlap. Shapes: ``members (n,)`` each, rows among `n_cells`."""

    members: Mapping[K, np.ndarray]
    n_cells: int

    @cached_property
    def _sets(self) -> tuple[np.ndarray, np.ndarray]:
        """Which groups hold each set of cells, ``(names, sets)``, and the set of each cell, ``(cells,)``."""
        if not self.members:
            return np.zeros((0, 1), dtype=bool), np.zeros(self.n_cells, dtype=int)
        inside = np.zeros((len(self.members), self.n_cells), dtype=bool)
        for row, cells in zip(inside, self.members.values(), strict=True):
            row[cells] = True
        packed = np.packbits(inside, axis=0)
        _, first, number = np.unique(packed, axis=1, return_index=True, return_inverse=True)
        return inside[:, first], number.ravel()

    def sums(self, blocks: Iterable[Any], n_genes: int) -> CountSums[K]:
        """The sums of all groups, from all cells some at a time. Shapes: ``blocks (c, genes)``, sparse rows."""
        groups, number = self._sets
        sums, libraries = np.zeros((4, groups.shape[1], n_genes)), np.zeros((3, groups.shape[1]))
        start = 0
        for block in blocks:
            place = number[start : start + block.shape[0]]
            start += block.shape[0]
            library = np.asarray(block.sum(1), dtype=np.float64).ravel()
            parts = (block, _with(block, block.data**2), _scaled(block, library), _with(block, block.data > 0))
            belongs = _indicator(place, groups.shape[1])
            for total, part in zip(sums, parts, strict=True):
                _add(total, belongs @ part)
            counted = (library > 0).astype(np.float64)
            libraries += np.stack([belongs @ values for values in (counted, library, library**2)])
        return CountSums({name: i for i, name in enumerate(self.members)}, groups, sums, libraries)

    def crossed(self, blocks: Iterable[Any], library: np.ndarray, n_genes: int) -> dict[K, Tensor]:
        """Sums of counts times libraries in groups that do not overlap, from counts that were scaled beforehand.

        Shapes: ``library (cells,)``, ``-> (genes,)`` each.
        """
        groups, number = self._sets
        total, start = np.zeros((groups.shape[1], n_genes)), 0
        for block in blocks:
            rows = slice(start, start + block.shape[0])
            start += block.shape[0]
            _add(total, _indicator(number[rows], groups.shape[1]) @ _scaled(block, library[rows]))
        return {name: torch.from_numpy(total[row].sum(0)) for name, row in zip(self.members, groups, strict=True)}


def _indicator(place: np.ndarray, n: int) -> Any:
    """One row per set with ones at its cells. Shapes: ``(c,) -> (n, c)``, sparse."""
    return sparse.csr_matrix((np.ones(len(place)), (place, np.arange(len(place)))), shape=(n, len(place)))


def _with(block: Any, data: np.ndarray) -> Any:
    """The block with other values at its non-zero counts."""
    return sparse.csr_matrix((data.astype(np.float64), block.indices, block.indptr), shape=block.shape)


def _scaled(block: Any, factor: np.ndarray) -> Any:
    """The block with every row times its factor. Shapes: ``factor (c,)``."""
    return _with(block, block.data * np.repeat(factor, np.diff(block.indptr)))


def _add(total: np.ndarray, part: Any) -> None:
    """Add a sparse matrix of few rows to a dense one."""
    rows = np.repeat(np.arange(part.shape[0]), np.diff(part.indptr))
    np.add.at(total, (rows, part.indices), part.data)
