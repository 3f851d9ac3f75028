"""Counts and labels from an AnnData: read a few cells at a time, and refused with the remedy where they are unusable.

All genes are in memory for `BLOCK` cells at a time. Of the genes chosen the non-zero counts are kept, eight bytes each;
where those of a backed file would take more than `MEMORY` bytes, its rows are read again when they are needed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from functools import lru_cache
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
import torch
from scipy import sparse
from torch import Tensor

from vaerdict.core import DataError, SettingError
from vaerdict.de.sums import CellGroups, CountSums
from vaerdict.de.variable_genes import Blocks, GeneSums, most_variable
from vaerdict.optional import isolated, require
from vaerdict.training.data import Rows, sparse_rows

K = TypeVar("K")

BLOCK = 2048
"""Cells read together."""

MEMORY = 2**27
"""Bytes of counts of a backed file that are kept in memory at most."""

_DENSE = 2**23  # counts of a dense matrix read together
_SCATTERED = 4  # rows so many times farther apart than neighbours are read one by one
_LARGEST_LOG = 20.0  # no logarithm of a count, or of a count per ten thousand, is larger
_SHOWN = 8
_BLOCK = {"cpu": 256, "cuda": 16384}
_CHUNK = {"cpu": 2**21, "cuda": 2**26}


def block_size(device: torch.device) -> int:
    """How many cells are worked on together: enough to keep the device busy, few enough to stay small when dense."""
    return _BLOCK.get(device.type, _BLOCK["cpu"])


def chunk_size(device: torch.device) -> int:
    """How many numbers, draws x cells x genes, are in memory at a time."""
    return _CHUNK.get(device.type, _CHUNK["cpu"])


@dataclass(frozen=True, eq=False)
class StoredCounts:
    """Counts of some cells and genes of a file, read on demand.

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
    """Observations on disk: counts, followed by covariates such as batches, which are in memory.

    Shapes: ``covariates (cells, columns)``, sparse.
    """

    counts: StoredCounts
    covariates: Any
    device: torch.device

    @property
    def n(self) -> int:
        """Number of observations."""
        return len(self.counts.cells)

    def take(self, index: Tensor) -> Tensor:
        """The observations at `index`, dense and on the device. Shapes: ``(size,) -> (size, p)``."""
        rows = index.cpu().numpy()
        both = sparse.hstack([self.counts.read(rows), self.covariates[rows]], format="csr")
        return torch.from_numpy(both.toarray()).to(self.device)

    def select(self, index: Tensor) -> StoredRows:
        """The observations at `index` alone."""
        rows = index.cpu().numpy()
        return StoredRows(replace(self.counts, cells=self.counts.cells[rows]), self.covariates[rows], self.device)


@dataclass(frozen=True, eq=False)
class Counts:
    """Counts of some cells and genes, and which rows of the file they are; `digest` is a hash of the counts.

    Shapes: ``matrix (cells, genes)``, sparse rows of float32 or `StoredCounts`; ``cells (cells,)``,
    ``totals (cells,)``.
    """

    matrix: Any
    genes: list[str]
    cells: np.ndarray
    totals: np.ndarray
    digest: str

    def tensor(self) -> Tensor:
        """The counts, dense. Shapes: ``-> (cells, genes)``."""
        return self.rows(torch.device("cpu")).take(torch.arange(len(self.cells)))

    def rows(self, device: torch.device, covariates: Tensor | None = None) -> Rows:
        """The cells as observations, the counts followed by the covariates ``(cells, columns)`` where there are any."""
        none = np.zeros((len(self.cells), 0), np.float32)
        columns = sparse.csr_matrix(none if covariates is None else covariates.numpy())
        if isinstance(self.matrix, StoredCounts):
            return StoredRows(self.matrix, columns, device)
        return sparse_rows(
            self.matrix if covariates is None else sparse.hstack([self.matrix, columns], format="csr"), device
        )


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
    """A column of obs as text, None where a value is missing; `role` is the parameter that named it.

    Whole numbers are written without a point, also where missing values made them floats. Shapes: ``-> (cells,)``.
    """
    if key not in adata.obs:
        names = [str(name) for name in adata.obs.columns]
        raise SettingError(f"{role}={key!r} is no column of obs{_closest(key, names)}; there are {listed(names)}.")
    values = adata.obs[key]
    texts = {value: label(value) for value in values.dropna().unique()}
    return values.astype(object).map(texts).to_numpy(dtype=object, na_value=None)


def label(value: Any) -> str:
    """A value as text, whole numbers without a point."""
    return str(int(value)) if isinstance(value, (float, np.floating)) and float(value).is_integer() else str(value)


def check_group(name: str, labels: np.ndarray, *, role: str, column: str) -> str:
    """The group as it is spelled in the labels; an unknown one is refused with the list of groups."""
    groups, group = sorted({label for label in labels if label is not None}), label(name)
    if group not in groups:
        raise SettingError(
            f"{role}={name!r} is no group of {column!r}{_closest(group, groups)}; there are {listed(groups)}."
        )
    return group


def one_hot(labels: np.ndarray, *, role: str) -> tuple[Tensor, list[str]]:
    """A column for each batch, none where there is one batch only. Shapes: ``(cells,) -> (cells, batches)``."""
    missing = sum(label is None for label in labels)
    if missing:
        raise DataError(f"{missing} of {len(labels)} cells have no {role}; label them or remove them first.")
    names = sorted(set(labels))
    if len(names) < 2:
        return torch.zeros(len(labels), 0), []
    return torch.from_numpy((labels[:, None] == np.array(names, dtype=object)).astype(np.float32)), names


def _closest(name: str, names: list[str]) -> str:
    spelled = {other.lower(): other for other in names}
    matches = get_close_matches(name.lower(), list(spelled), 1)
    return f" (did you mean {spelled[matches[0]]!r}?)" if matches else ""


def listed(names: list[str]) -> str:
    """The first of some names, and how many more there are."""
    shown = ", ".join(names[:_SHOWN]) if names else "none"
    return shown + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")


# ------------------------------------------------------------------------------------------------------ counts
class Scan(NamedTuple, Generic[K]):
    """What one pass over cells shows of all genes: sums by group, totals of cells, and a hash of the counts.

    Shapes: ``totals (cells,)``.
    """

    sums: CountSums[K]
    genes: GeneSums
    totals: np.ndarray
    digest: str


def scan(blocks: Iterable[Any], groups: CellGroups[K], n_genes: int) -> Scan[K]:
    """Read all cells once, some at a time. Shapes: ``blocks (c, genes)``, sparse rows."""
    totals, sha, sums = [], hashlib.sha256(), GeneSums(np.zeros(n_genes), np.zeros(n_genes))

    def noted() -> Iterator[Any]:
        nonlocal sums
        for block in blocks:
            block.sort_indices()
            for array in (block.data.astype(np.float32), block.indices, block.indptr):
                sha.update(np.ascontiguousarray(array).tobytes())
            totals.append(np.asarray(block.sum(1), dtype=np.float64).ravel())
            sums = sums.plus(GeneSums.of(block))
            yield block

    grouped = groups.sums(noted(), n_genes)
    return Scan(grouped, sums, np.concatenate(totals) if totals else np.zeros(0), sha.hexdigest())


def read_counts(adata: Any, rows: np.ndarray, genes: np.ndarray, *, layer: str | None = None) -> Counts:
    """Counts of cells and genes that were scanned; cells without any count in these genes are left out.

    Shapes: ``rows (cells,)`` and ``genes (genes,)``, in rising order.
    """
    source = _source(adata, layer)
    path = _file_to_reread(adata, source)
    blocks = (block[:, genes] for block in _blocks(source, rows))
    matrix, totals, digest = _collected(blocks, most=None if path is None else MEMORY)
    counted = totals > 0
    if matrix is None:
        matrix = StoredCounts(str(path), layer, rows[counted], genes)
    elif not counted.all():
        matrix = matrix[counted]
    return Counts(matrix, [str(name) for name in adata.var_names[genes]], rows[counted], totals[counted], digest)


def from_matrix(matrix: Any, genes: list[str], cells: np.ndarray) -> Counts:
    """Counts of all cells and genes of a matrix. Shapes: ``matrix (cells, genes)``, sparse rows."""
    collected, totals, digest = _collected([matrix], most=None)
    return Counts(collected, genes, cells, totals, digest)


def count_blocks(adata: Any, layer: str | None, rows: np.ndarray, size: int | None = None) -> Iterator[Any]:
    """Counts of all genes, `size` cells at a time and checked, at `rows` in rising order. Shapes: ``-> (size, genes)``.

    Sparse rows of float64 without explicit zeros. By default there are `BLOCK` cells, fewer of a dense matrix.
    """
    if adata.n_obs == 0 or adata.n_vars == 0:
        raise DataError(f"the data hold {adata.n_obs} cells and {adata.n_vars} genes; both are needed.")
    name = f"layer {layer!r}" if layer else "X"
    for block in _blocks(_source(adata, layer), rows, size):
        yield _checked(block, name, adata)


def _file_to_reread(adata: Any, source: Any) -> str | None:
    """The file to read rows from again, None where there is none or it is slow at that, as compressed columns are."""
    on_disk = getattr(adata, "isbacked", False) and not adata.is_view and getattr(source, "format", "csr") == "csr"
    return str(adata.filename) if on_disk else None


def _collected(blocks: Iterable[Any], most: int | None) -> tuple[Any, np.ndarray, str]:
    """All blocks in one matrix, or none where they take more than `most` bytes; totals of cells, and a hash."""
    parts, totals, size, sha = [], [], 0, hashlib.sha256()
    for block in blocks:
        block = block.astype(np.float32)
        block.sort_indices()
        for array in (block.data, block.indices, block.indptr):
            sha.update(np.ascontiguousarray(array).tobytes())
        totals.append(np.asarray(block.sum(1), dtype=np.float64).ravel())
        size += block.data.nbytes + block.indices.nbytes
        parts = [] if most is not None and size > most else [*parts, block]
    matrix = None if most is not None and size > most else sparse.vstack(parts, format="csr")
    return matrix, np.concatenate(totals), sha.hexdigest()


def _source(adata: Any, layer: str | None) -> Any:
    if layer is None:
        if adata.X is None:
            raise DataError(f"the data have no X; name a layer of counts, there are {listed(_layers(adata))}.")
        return _by_rows(adata.X)
    if layer not in adata.layers:
        names = _layers(adata)
        raise SettingError(f"layer={layer!r} is not there{_closest(layer, names)}; there are {listed(names)}.")
    return _by_rows(adata.layers[layer])


def _layers(adata: Any) -> list[str]:
    return [str(name) for name in adata.layers if name is not None]  # anndata 0.13 lists X as None


def _by_rows(matrix: Any) -> Any:
    return matrix.tocsr() if sparse.issparse(matrix) and matrix.format != "csr" else matrix


def _blocks(source: Any, rows: np.ndarray, size: int | None = None) -> Iterator[Any]:
    """Sparse rows of float64, a block of cells at a time; blocks of a dense matrix are smaller."""
    dense = not hasattr(source, "format")
    size = size or (min(BLOCK, max(1, _DENSE // source.shape[1])) if dense else BLOCK)
    for start in range(0, len(rows), size):
        yield _rows(source, rows[start : start + size])


def _rows(source: Any, rows: np.ndarray) -> Any:
    """Sparse rows of float64, without explicit zeros, at `rows` in rising order.

    Where rows are near each other those between are read too: one long read from a file is much faster than many
    short ones.
    """
    first, last = (int(rows[0]), int(rows[-1]) + 1) if len(rows) else (0, 0)
    near = last - first <= _SCATTERED * len(rows)
    block = source[first:last] if near else source[rows]
    counts: Any = sparse.csr_matrix(block if sparse.issparse(block) else np.asarray(block)).astype(np.float64)
    counts = counts[rows - first] if near and last - first > len(rows) else counts
    counts.eliminate_zeros()
    return counts


def _checked(block: Any, name: str, adata: Any) -> Any:
    """The block if it holds counts, else an error that says what it holds instead."""
    values = block.data
    if not np.isfinite(values).all():
        bad = int((~np.isfinite(values)).sum())
        raise DataError(
            f"{name} holds {bad} values that are NaN or infinite; raw counts are whole numbers: repair them."
        )
    if len(values) and values.min() < 0:
        raise DataError(
            f"{name} holds negative values (down to {values.min():g}), as scaled data do; {_remedy(name, adata)}"
        )
    fractional = values != np.round(values)
    if fractional.any():
        raise DataError(f"{name} {_not_counts(block, float(values[fractional][0]))}; {_remedy(name, adata)}")
    return block


def _not_counts(block: Any, example: float) -> str:
    """What values that are no whole numbers are: log-normalised, normalised, or unknown."""
    unlogged = block.copy()
    if block.data.max() < _LARGEST_LOG:
        np.expm1(block.data, out=unlogged.data)
        if _constant(unlogged):
            return f"holds log-normalised values (exp(x) - 1 sums to {_total(unlogged):g} in every cell), not counts"
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
    layers = [layer for layer in _layers(adata) if name != f"layer {layer!r}"]
    hints = [f"name a layer of raw counts (there are {listed(layers)})"] if layers else []
    hints += ["use adata.raw.to_adata()"] if getattr(adata, "raw", None) is not None else []
    return f"{' or '.join(hints)}." if hints else "start from the raw counts."


# ------------------------------------------------------------------------------------------------------- genes
def gene_names(adata: Any, symbols: str | None, warnings: list[str]) -> list[str]:
    """Unique names of genes for the table: var_names, or a column of var where it has a value."""
    if symbols is None:
        return _unique(adata.var_names, warnings)
    if symbols not in adata.var:
        names = [str(name) for name in adata.var.columns]
        raise SettingError(
            f"gene_symbols={symbols!r} is no column of var{_closest(symbols, names)}; there are {listed(names)}."
        )
    values = adata.var[symbols].astype(object)
    return _unique(values.where(values.notna(), adata.var_names), warnings)


def columns_of(genes: Sequence[str], names: list[str]) -> np.ndarray:
    """The columns of the genes named by `keep_genes`; unknown ones are refused. Shapes: ``-> (n,)``."""
    place = {name: i for i, name in enumerate(names)}
    unknown = [gene for gene in dict.fromkeys(map(str, genes)) if gene not in place]
    if unknown:
        shown = ", ".join(f"{gene!r}{_closest(gene, names)}" for gene in unknown[:_SHOWN])
        raise SettingError(f"keep_genes names {len(unknown)} genes that are not there: {shown}.")
    return np.array(sorted({place[str(gene)] for gene in genes}), dtype=int)


def _unique(names: Any, warnings: list[str]) -> list[str]:
    """Names without repeats: a second gene of a name gets the suffix -1, a third -2."""
    taken, unique, repeated = set(map(str, names)), [], 0
    seen: set[str] = set()
    for name in map(str, names):
        fresh, n = name, 0
        while fresh in seen or (n and fresh in taken):
            n += 1
            fresh = f"{name}-{n}"
        repeated += n > 0
        seen.add(fresh)
        unique.append(fresh)
    if repeated:
        warnings.append(f"{repeated} genes had the name of another; they now end in -1, -2 and so on.")
    return unique


def variable_genes(scanned: Scan[Any], genes: np.ndarray, blocks: Blocks, n_top: int) -> tuple[np.ndarray, str]:
    """The most variable of some genes, and how they were chosen; all of them where the choice cannot be made.

    Shapes: ``genes (n,) -> (n_top,)``.
    """
    if len(genes) <= n_top:
        return genes, ""
    require("skmisc.loess", "bio")
    n = len(scanned.totals)
    try:
        chosen = most_variable(scanned.genes.take(genes), n, lambda: (block[:, genes] for block in blocks()), n_top)
    except Exception as error:  # its curve fails in many ways on few or odd cells
        return genes, f"; all of them, because the choice of variable genes failed ({type(error).__name__}: {error})"
    return genes[chosen], f", and of those the {n_top} most variable (seurat_v3)"
