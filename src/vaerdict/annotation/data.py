"""Counts of reference and query for the genes they share, read a few cells at a time."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from scipy import sparse

from vaerdict.annotation.options import AnnotateOptions
from vaerdict.core import DataError, Progress, SettingError, VaerdictError
from vaerdict.de import data
from vaerdict.de.variable_genes import GeneSums, most_variable

FEWEST_GENES = 50
"""Least number of shared genes."""

FEWEST_CELLS = 5
"""Least number of reference cells of a type."""

_SHOWN = 3
_EXPRESSED = 3  # cells in which a gene is seen at least


class SharedGenes(NamedTuple):
    """Genes of both files: their names, and their columns in each. Shapes: ``(genes,)`` each."""

    names: np.ndarray
    reference: np.ndarray
    query: np.ndarray


@dataclass(frozen=True, eq=False)
class Cells:
    """Cells of one file with counts: rows of the file, counts of the genes chosen, totals over all shared genes.

    Shapes: ``rows, totals (cells,)``, ``counts (cells, genes)`` sparse.
    """

    rows: np.ndarray
    counts: Any
    totals: np.ndarray


class Pair(NamedTuple):
    """Reference and query, which genes were used of how many shared ones, and a hash of the counts."""

    reference: Cells
    query: Cells
    n_shared: int
    n_genes: int
    digest: str


def opened(source: Any) -> Any:
    """An AnnData, opened from disk where a path is given."""
    return data.open_data(source) if isinstance(source, (str, Path)) else source


def types_in(file: Any, column: str, *, role: str) -> np.ndarray:
    """The types in a column of obs, None where it is missing or blank. Shapes: ``-> (cells,)``."""
    types = data.column(file, column, role=role)
    types[[t is not None and not t.strip() for t in types]] = None
    return types


def types_of(reference: Any, column: str, warnings: list[str]) -> np.ndarray:
    """The types of the reference cells, None where they have none. Shapes: ``-> (cells,)``."""
    types = types_in(reference, column, role="labels")
    labelled = np.array([t is not None for t in types])
    if not labelled.any():
        raise DataError(f"no cell of the reference has a label in {column!r}; label some cells first.")
    if not labelled.all():
        warnings.append(f"{int((~labelled).sum())} reference cells without a label were left out.")
    names = np.unique(types[labelled].astype(str))
    if len(names) < 2:
        raise DataError(f"labels={column!r} names one type only, {str(names[0])!r}; at least two are needed.")
    check_sizes(types, names)
    return types


def check_sizes(types: np.ndarray, names: np.ndarray, which: str = "reference cells") -> None:
    """Refuse types with few cells, or none, among the cells given. Shapes: ``(cells,), (types,)``."""
    count = {str(name): int((types == name).sum()) for name in names}
    few = ", ".join(f"{name!r} ({n})" for name, n in count.items() if n < FEWEST_CELLS)
    if few:
        raise DataError(
            f"these types have fewer than {FEWEST_CELLS} {which}: {few}; remove the cells, or give them the label of a "
            "larger type."
        )


def shared_genes(reference: Any, query: Any, symbols: str | None) -> SharedGenes:
    """The genes that both files name; of genes with one name in a file the first is used."""
    if symbols is not None and symbols not in reference.var and symbols not in query.var:
        names = [str(name) for name in query.var.columns]
        raise SettingError(
            f"gene_symbols={symbols!r} is a column of var in neither file; there are {data.listed(names)}."
        )
    places = [_places(_names(file, symbols)) for file in (reference, query)]
    names = [name for name in places[0] if name in places[1]]
    if len(names) < FEWEST_GENES:
        raise DataError(_unshared(reference, query, len(names), symbols))
    columns = (np.array([place[name] for name in names]) for place in places)
    return SharedGenes(np.array(names, dtype=object), *columns)


def _names(file: Any, symbols: str | None) -> list[str]:
    """Names of genes: var_names, or a column of var where it has a value."""
    if symbols is None or symbols not in file.var:
        return [str(name) for name in file.var_names]
    values = file.var[symbols].astype(object)
    return [str(name) for name in values.where(values.notna(), file.var_names)]


def _places(names: list[str]) -> dict[str, int]:
    return {name: i for i, name in reversed(list(enumerate(names)))} if names else {}


def _unshared(reference: Any, query: Any, n: int, symbols: str | None) -> str:
    """Why the genes do not match, with the column that would help where there is one."""
    shown = [", ".join(_names(file, symbols)[:_SHOWN]) or "none" for file in (reference, query)]
    message = f"reference and query share {n} genes (reference: {shown[0]}; query: {shown[1]})"
    best, remedy = n, ""
    for file, other, which in ((reference, query, "reference"), (query, reference, "query")):
        there = set(_names(other, None))
        for column in map(str, file.var.columns):
            shared = len(there & set(map(str, file.var[column])))
            if shared > max(best, FEWEST_GENES):
                best = shared
                remedy = f"; column {column!r} of the {which} matches {shared} of them: name it as gene_symbols"
    return message + (remedy or "; name them alike, as symbols or as ids") + "."


def read(
    reference: Any, query: Any, rows: np.ndarray, genes: SharedGenes, options: AnnotateOptions, progress: Progress
) -> Pair:
    """The counts of the most variable shared genes. Shapes: ``rows (cells,)``, the reference cells with a label.

    Cells without any count are left out. The genes are chosen on all cells of both files together.
    """
    files = (_Source("reference", reference, rows, genes.reference, options.layer),)
    files += (_Source("query", query, np.arange(query.n_obs), genes.query, options.layer),)
    sha, sums, seen = hashlib.sha256(), GeneSums(*np.zeros((2, len(genes.names)))), np.zeros(len(genes.names))
    totals: list[np.ndarray] = []
    for number, file in enumerate(files):
        parts = []
        for block in file.blocks():
            sha.update(np.ascontiguousarray(block.data.astype(np.float32)).tobytes() + block.indices.tobytes())
            parts.append(np.asarray(block.sum(1), dtype=np.float64).ravel())
            sums, seen = sums.plus(GeneSums.of(block)), seen + np.bincount(block.indices, minlength=len(seen))
        totals.append(np.concatenate(parts) if parts else np.zeros(0))
        progress(number + 1, 4, "files read")
    for which, total in zip(("reference", "query"), totals, strict=True):
        if not (total > 0).any():
            raise DataError(f"no cell of the {which} has a count in a shared gene; there is nothing to compare.")
    chosen = _chosen(files, sums, seen, sum(map(len, totals)), options.n_top_genes)
    sides = []
    for number, (file, total) in enumerate(zip(files, totals, strict=True)):
        counted = total > 0
        counts: Any = sparse.vstack([block[:, chosen].astype(np.float32) for block in file.blocks()], format="csr")
        sides.append(Cells(file.rows[counted], counts[counted], total[counted]))
        progress(number + 3, 4, "files read")
    return Pair(*sides, n_shared=len(genes.names), n_genes=len(chosen), digest=sha.hexdigest())


@dataclass(frozen=True, eq=False)
class _Source:
    """Rows and columns of one file. Shapes: ``rows (cells,)``, ``genes (genes,)``."""

    name: str
    file: Any
    rows: np.ndarray
    genes: np.ndarray
    layer: str | None

    def blocks(self) -> Iterator[Any]:
        """Counts of the genes, some cells at a time. Shapes: ``-> (c, genes)``, sparse rows."""
        blocks = data.count_blocks(self.file, self.layer, self.rows)
        while True:
            try:
                block = next(blocks, None)
            except VaerdictError as error:
                raise type(error)(f"{self.name}: {error}") from error
            if block is None:
                return
            part = block[:, self.genes]
            part.sort_indices()
            yield part


def _chosen(files: tuple[_Source, ...], sums: GeneSums, seen: np.ndarray, n: int, n_top: int) -> np.ndarray:
    """The most variable of the expressed genes, all of them where the choice cannot be made."""
    genes = np.flatnonzero(seen >= _EXPRESSED)
    if len(genes) < 2:
        raise DataError(f"{len(genes)} shared genes are seen in {_EXPRESSED} cells or more; at least two are needed.")
    if len(genes) <= n_top:
        return genes
    try:
        chosen = most_variable(
            sums.take(genes), n, lambda: (block[:, genes] for file in files for block in file.blocks()), n_top
        )
    except ValueError:  # the curve of variances fails on few or odd cells
        return genes
    return genes[chosen]
