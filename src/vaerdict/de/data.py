"""Counts and labels out of an AnnData: looked at a few cells at a time, and refused with the remedy where unusable.

All genes are in memory for `BLOCK` cells at a time. Of the genes chosen the non-zero counts are kept, eight bytes each;
where those of a backed file would take more than `HELD` bytes, none are, and its rows are read again when asked for.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy import sparse
from torch import Tensor

from vaerdict.core import DataError, SettingError
from vaerdict.de.variable_genes import GeneSums, most_variable
from vaerdict.optional import isolated, require
from vaerdict.training.data import Rows, sparse_rows

BLOCK = 2048
"""Cells read together."""

HELD = 2**27
"""Bytes of counts of a backed file that are kept in memory at most."""

_DENSE = 2**23  # counts of a dense matrix read together
_SCATTERED = 4  # rows so many times farther apart than neighbours are read one by one
_LARGEST_LOG = 20.0  # no logarithm of a count, or of a count per ten thousand, is larger
_SHOWN = 8


@dataclass(frozen=True, eq=False)
class Stored:
    """Counts of some cells and genes of a file, read when asked for.

    Shapes: ``cells (cells,)`` and ``genes (genes,)``, rows and columns of the file.
    """

    path: str
    layer: str | None
    cells: np.ndarray
    genes: np.ndarray

    def read(self, index: np.ndarray) -> Any:
        """Sparse rows of the cells at `index`, in any order. Shapes: ``(c,) -> (c, genes)``."""
        cells, place = np.unique(self.cells[index], return_inverse=True)
        source = _opened(self.path, self.layer, Path(self.path).stat().st_mtime_ns)
        return _rows(source, cells)[:, self.genes].astype(np.float32)[place]


@lru_cache(maxsize=2)
def _opened(path: str, layer: str | None, _changed: int) -> Any:
    """The matrix on disk, opened once however many blocks of it are read."""
    return _source(open_data(path), layer)


@dataclass(frozen=True, eq=False)
class StoredRows:
    """Observations on disk: counts and behind them more columns, such as batches, kept in memory.

    Shapes: ``more (cells, columns)``, sparse.
    """

    stored: Stored
    more: Any
    device: torch.device

    @property
    def n(self) -> int:
        """How many there are."""
        return len(self.stored.cells)

    def take(self, index: Tensor) -> Tensor:
        """The observations at `index`, dense and on the device. Shapes: ``(size,) -> (size, p)``."""
        rows = index.cpu().numpy()
        both = sparse.hstack([self.stored.read(rows), self.more[rows]], format="csr")
        return torch.from_numpy(both.toarray()).to(self.device)

    def select(self, index: Tensor) -> StoredRows:
        """Those at `index` alone."""
        rows = index.cpu().numpy()
        return StoredRows(replace(self.stored, cells=self.stored.cells[rows]), self.more[rows], self.device)


@dataclass(frozen=True, eq=False)
class Counts:
    """Counts of some cells and genes: the rows of the file they are, what was left out, and how genes were chosen.

    `digest` tells counts apart; `ids` are the var_names of genes that the table calls otherwise.

    Shapes: ``matrix (cells, genes)``, sparse rows of float32 or `Stored`; ``cells (cells,)``, ``totals (cells,)``.
    """

    matrix: Any
    genes: list[str]
    cells: np.ndarray
    totals: np.ndarray
    selection: str
    digest: str
    warnings: list[str] = field(default_factory=list)
    ids: list[str] | None = None

    def tensor(self) -> Tensor:
        """The counts, dense. Shapes: ``-> (cells, genes)``."""
        return self.rows(torch.device("cpu")).take(torch.arange(len(self.cells)))

    def rows(self, device: torch.device, more: Tensor | None = None) -> Rows:
        """The cells as observations, with more columns ``(cells, columns)`` behind the counts where given."""
        behind = sparse.csr_matrix(np.zeros((len(self.cells), 0), np.float32) if more is None else more.numpy())
        if isinstance(self.matrix, Stored):
            return StoredRows(self.matrix, behind, device)
        matrix = self.matrix if more is None else sparse.hstack([self.matrix, behind], format="csr")
        return sparse_rows(matrix, device)


def open_data(path: str | Path) -> Any:
    """An AnnData file, its matrix left on disk."""
    path, anndata = Path(path), require("anndata", "bio")
    if not path.is_file():
        raise DataError(f"{path} does not exist or is no file.")
    if path.stat().st_size == 0:
        raise DataError(f"{path} is empty (0 bytes); copy or download it again.")
    try:
        with isolated(0):
            return anndata.read_h5ad(path, backed="r")
    except Exception as error:  # h5py and anndata raise many kinds
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise DataError(
            f"{path} cannot be read as .h5ad ({reason}); it may be cut short or of another format: copy it again."
        ) from error


# ------------------------------------------------------------------------------------------------------ labels
def column(adata: Any, key: str, *, role: str) -> np.ndarray:
    """A column of obs as text, None where it is missing; `role` is the argument that named it.

    Whole numbers are written without a point, also where missing ones made them floats. Shapes: ``-> (cells,)``.
    """
    if key not in adata.obs:
        there = [str(name) for name in adata.obs.columns]
        raise SettingError(f"{role}={key!r} is no column of obs{_closest(key, there)}; there are {_listed(there)}.")
    values = adata.obs[key]
    names = {value: label(value) for value in values.dropna().unique()}
    return values.astype(object).map(names).to_numpy(dtype=object, na_value=None)


def label(value: Any) -> str:
    """A value as text, whole numbers without a point."""
    return str(int(value)) if isinstance(value, (float, np.floating)) and float(value).is_integer() else str(value)


def check_group(name: str, labels: np.ndarray, *, role: str, column: str) -> str:
    """The group as it is spelled in the labels, else an error that names those there are."""
    there, wanted = sorted({label for label in labels if label is not None}), label(name)
    if wanted not in there:
        raise SettingError(
            f"{role}={name!r} is no group of {column!r}{_closest(wanted, there)}; there are {_listed(there)}."
        )
    return wanted


def one_hot(labels: np.ndarray, *, role: str) -> tuple[Tensor, list[str]]:
    """A column for each batch, none where there is one batch only. Shapes: ``(cells,) -> (cells, batches)``."""
    missing = sum(label is None for label in labels)
    if missing:
        raise DataError(f"{missing} of {len(labels)} cells have no {role}; label them or take them out first.")
    names = sorted(set(labels))
    if len(names) < 2:
        return torch.zeros(len(labels), 0), []
    return torch.from_numpy((labels[:, None] == np.array(names, dtype=object)).astype(np.float32)), names


def _closest(name: str, there: list[str]) -> str:
    spelled = {other.lower(): other for other in there}
    found = get_close_matches(name.lower(), list(spelled), 1)
    return f" (did you mean {spelled[found[0]]!r}?)" if found else ""


def _listed(names: list[str]) -> str:
    shown = ", ".join(names[:_SHOWN]) if names else "none"
    return shown + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")


# ------------------------------------------------------------------------------------------------------ counts
def read_counts(
    adata: Any,
    rows: np.ndarray,
    groups: np.ndarray,
    *,
    layer: str | None = None,
    min_cells: int = 3,
    n_top_genes: int | None = 2000,
    keep_genes: Sequence[str] = (),
    gene_symbols: str | None = None,
) -> Counts:
    """Counts of cells, of genes seen in at least `min_cells` cells of a group and, of these, the most variable.

    `rows` are the cells of the file, and `groups` ``(rows,)`` numbers the group of each, negative for none. Those of
    `keep_genes` need not be variable. Cells without any count in the genes that are kept are left out, and said so;
    genes of one name (see `gene_names`) are told apart by a suffix.
    """
    if adata.n_obs == 0 or adata.n_vars == 0:
        raise DataError(f"the data hold {adata.n_obs} cells and {adata.n_vars} genes; both are needed.")
    source, name, warnings = _source(adata, layer), f"layer {layer!r}" if layer else "X", []
    names = gene_names(adata, gene_symbols, warnings)
    asked = _asked(keep_genes, names)
    blocks = partial(_blocks, source, rows)
    seen, sums = _looked_at((_checked(block, name, adata) for block in blocks()), groups, adata.n_vars)
    kept = np.flatnonzero(seen >= min_cells)
    if len(kept) < 2:
        raise DataError(
            f"{len(kept)} genes are seen in at least {min_cells} cells of a group; at least two are needed to compare: "
            "lower min_cells or give more cells."
        )
    rare = [names[g] for g in asked if g not in kept]
    if rare:
        warnings.append(f"seen in fewer than {min_cells} cells of a group and not compared: {_listed(rare)}.")
    kept, how = _variable(sums, kept, len(rows), blocks, n_top_genes, asked)
    selection = f"{len(kept)} of {adata.n_vars} genes: seen in at least {min_cells} cells of a group{how}"
    path = _reread(adata, source)
    matrix, totals, digest = _kept((block[:, kept] for block in blocks()), held=None if path is None else HELD)
    full = totals > 0
    if not full.all():
        warnings.append(f"{int((~full).sum())} of {len(full)} cells have no counts in the genes compared; left out.")
    if matrix is None:
        matrix = Stored(str(path), layer, rows[full], kept)
    elif not full.all():
        matrix = matrix[full]
    ids = None if gene_symbols is None else [str(name) for name in adata.var_names[kept]]
    return Counts(matrix, [names[g] for g in kept], rows[full], totals[full], selection, digest, warnings, ids)


def whole(matrix: Any, genes: list[str], cells: np.ndarray, selection: str) -> Counts:
    """Counts that are at hand, all of them. Shapes: ``matrix (cells, genes)``, sparse rows."""
    kept, totals, digest = _kept([matrix], held=None)
    return Counts(kept, genes, cells, totals, selection, digest)


def _reread(adata: Any, source: Any) -> str | None:
    """The file to read rows from again, None where there is none or it is slow at that, as columns are."""
    on_disk = getattr(adata, "isbacked", False) and not adata.is_view and getattr(source, "format", "csr") == "csr"
    return str(adata.filename) if on_disk else None


def _looked_at(blocks: Iterable[Any], groups: np.ndarray, n_genes: int) -> tuple[np.ndarray, GeneSums]:
    """The most cells of a group that each gene is seen in, and sums over all cells. Shapes: ``-> (genes,)``."""
    seen = np.zeros((int(groups.max(initial=0)) + 1, n_genes), dtype=np.int64)
    sums, start = GeneSums(np.zeros(n_genes), np.zeros(n_genes)), 0
    for block in blocks:
        sums = sums.plus(GeneSums.of(block))
        mine = groups[start : start + block.shape[0]]
        for group in np.unique(mine[mine >= 0]):
            seen[group] += block[mine == group].getnnz(0)
        start += block.shape[0]
    return seen.max(0), sums


def _kept(blocks: Iterable[Any], held: int | None) -> tuple[Any, np.ndarray, str]:
    """All blocks together, or none where they take more than `held` bytes; every cell's total, and a digest."""
    parts, totals, size, sha = [], [], 0, hashlib.sha256()
    for block in blocks:
        block = block.astype(np.float32)
        block.sort_indices()
        for array in (block.data, block.indices, block.indptr):
            sha.update(np.ascontiguousarray(array).tobytes())
        totals.append(np.asarray(block.sum(1), dtype=np.float64).ravel())
        size += block.data.nbytes + block.indices.nbytes
        parts = [] if held is not None and size > held else [*parts, block]
    matrix = None if held is not None and size > held else sparse.vstack(parts, format="csr")
    return matrix, np.concatenate(totals), sha.hexdigest()


def _source(adata: Any, layer: str | None) -> Any:
    if layer is None:
        if adata.X is None:
            raise DataError(f"the data have no X; name a layer of counts, there are {_listed(list(adata.layers))}.")
        return _by_rows(adata.X)
    if layer not in adata.layers:
        there = [str(name) for name in adata.layers]
        raise SettingError(f"layer={layer!r} is not there{_closest(layer, there)}; there are {_listed(there)}.")
    return _by_rows(adata.layers[layer])


def _by_rows(matrix: Any) -> Any:
    return matrix.tocsr() if sparse.issparse(matrix) and matrix.format != "csr" else matrix


def _blocks(source: Any, rows: np.ndarray) -> Iterator[Any]:
    """Sparse rows of float64, some cells at a time, fewer where they come dense."""
    dense = not hasattr(source, "format")
    size = min(BLOCK, max(1, _DENSE // source.shape[1])) if dense else BLOCK
    for start in range(0, len(rows), size):
        yield _rows(source, rows[start : start + size])


def _rows(source: Any, rows: np.ndarray) -> Any:
    """Sparse rows of float64, without explicit zeros; `rows` rise, and where they are near each other those between
    are read too: from a file one long read is far quicker than many short ones."""
    first, last = (int(rows[0]), int(rows[-1]) + 1) if len(rows) else (0, 0)
    near = last - first <= _SCATTERED * len(rows)
    block = source[first:last] if near else source[rows]
    found: Any = sparse.csr_matrix(block if sparse.issparse(block) else np.asarray(block)).astype(np.float64)
    found = found[rows - first] if near and last - first > len(rows) else found
    found.eliminate_zeros()
    return found


def _checked(block: Any, name: str, adata: Any) -> Any:
    """The block in float32 if it holds counts, else an error that says what it holds instead."""
    values = block.data
    if not np.isfinite(values).all():
        bad = int((~np.isfinite(values)).sum())
        raise DataError(f"{name} holds {bad} values that are NaN or infinite; raw counts are whole numbers: mend them.")
    if len(values) and values.min() < 0:
        raise DataError(
            f"{name} holds negative values (down to {values.min():g}), as scaled data do; {_remedy(name, adata)}"
        )
    odd = values != np.round(values)
    if odd.any():
        raise DataError(f"{name} {_not_counts(block, float(values[odd][0]))}; {_remedy(name, adata)}")
    return block


def _not_counts(block: Any, example: float) -> str:
    """In words, what non-integer values are: log-normalised, normalised, or unknown."""
    logged = block.copy()
    if block.data.max() < _LARGEST_LOG:
        np.expm1(block.data, out=logged.data)
        if _constant(logged):
            return f"holds log-normalised values (exp(x) - 1 sums to {_total(logged):g} in every cell), not counts"
    if _constant(block):
        return f"holds normalised values (they sum to {_total(block):g} in every cell), not counts"
    return f"holds values that are no whole numbers, such as {example:g}"


def _constant(block: Any) -> bool:
    totals = np.asarray(block.sum(1)).ravel()
    totals = totals[totals > 0]
    return len(totals) > 1 and bool(np.ptp(totals) < 0.01 * totals.mean())


def _total(block: Any) -> float:
    return round(float(np.median(np.asarray(block.sum(1)).ravel())), 1)


def _remedy(name: str, adata: Any) -> str:
    layers = [str(layer) for layer in adata.layers if name != f"layer {layer!r}"]
    hints = [f"name a layer of raw counts (there are {_listed(layers)})"] if layers else []
    hints += ["use adata.raw.to_adata()"] if getattr(adata, "raw", None) is not None else []
    return f"{' or '.join(hints)}." if hints else "start from the raw counts."


def gene_names(adata: Any, symbols: str | None, warnings: list[str]) -> list[str]:
    """What genes are called in the table: var_names, or a column of var where it has a value; none comes twice."""
    if symbols is None:
        return _unique(adata.var_names, warnings)
    if symbols not in adata.var:
        there = [str(name) for name in adata.var.columns]
        raise SettingError(
            f"gene_symbols={symbols!r} is no column of var{_closest(symbols, there)}; there are {_listed(there)}."
        )
    found = adata.var[symbols].astype(object)
    return _unique(found.where(found.notna(), adata.var_names), warnings)


def _asked(genes: Sequence[str], names: list[str]) -> np.ndarray:
    """The columns of genes that are to be kept, an error for those that are not there. Shapes: ``-> (asked,)``."""
    place = {name: i for i, name in enumerate(names)}
    unknown = [gene for gene in dict.fromkeys(map(str, genes)) if gene not in place]
    if unknown:
        told = ", ".join(f"{gene!r}{_closest(gene, names)}" for gene in unknown[:_SHOWN])
        raise SettingError(f"keep_genes names {len(unknown)} genes that are not there: {told}.")
    return np.array(sorted({place[str(gene)] for gene in genes}), dtype=int)


def _unique(names: Any, warnings: list[str]) -> list[str]:
    """Names of which none comes twice: a second gene of a name gets the suffix -1, a third -2."""
    taken, out, repeated = set(map(str, names)), [], 0
    seen: set[str] = set()
    for name in map(str, names):
        fresh, n = name, 0
        while fresh in seen or (n and fresh in taken):
            n += 1
            fresh = f"{name}-{n}"
        repeated += n > 0
        seen.add(fresh)
        out.append(fresh)
    if repeated:
        warnings.append(f"{repeated} genes had the name of another; they now end in -1, -2 and so on.")
    return out


def _variable(
    sums: GeneSums, kept: np.ndarray, n: int, blocks: Any, n_top: int | None, asked: np.ndarray
) -> tuple[np.ndarray, str]:
    """Of the genes kept the most variable and those asked for, in the order of the file; and how it went.

    All are where the choice cannot be made.
    """
    if n_top is None or len(kept) <= n_top:
        return kept, ""
    require("skmisc.loess", "bio")
    try:
        chosen = most_variable(sums.take(kept), n, lambda: (block[:, kept] for block in blocks()), n_top)
    except Exception as error:  # its curve fails in many ways on few or odd cells
        return kept, f"; all of them, for the choice of variable genes failed ({type(error).__name__}: {error})"
    both = np.union1d(kept[chosen], np.intersect1d(asked, kept))
    more = f" and {len(both) - len(chosen)} asked for" if len(both) > len(chosen) else ""
    return both, f", and of those the {len(chosen)} most variable (seurat_v3){more}"
