"""Counts and labels from an AnnData: read a few cells at a time, and refused with the remedy where they are unusable.

All genes are in memory for `BLOCK` cells at a time. Of the genes chosen the non-zero counts are kept, eight bytes each;
where those of a backed file would take more than `MEMORY` bytes, its rows are read again when they are needed.
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
    """Counts of some cells and genes, which rows of the file they are, and how the genes were chosen.

    `digest` is a hash of the counts; `ids` are the var_names of genes that the table calls otherwise.

    Shapes: ``matrix (cells, genes)``, sparse rows of float32 or `StoredCounts`; ``cells (cells,)``,
    ``totals (cells,)``.
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
        raise SettingError(f"{role}={key!r} is no column of obs{_closest(key, names)}; there are {_listed(names)}.")
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
            f"{role}={name!r} is no group of {column!r}{_closest(group, groups)}; there are {_listed(groups)}."
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

    Cells without any count in the genes chosen are left out with a warning. Genes of the same name (see `gene_names`)
    get a suffix.

    Parameters
    ----------
    adata
        AnnData of raw counts, in memory or backed.
    rows, groups
        The cells of the file to read, in rising order, and the number of each cell's group, negative for none.
        Shapes: ``(cells,)``.
    layer
        Layer of raw counts; X by default.
    min_cells
        Least number of cells of a group in which a gene must be seen.
    n_top_genes
        Number of most variable genes; None for all.
    keep_genes
        Genes that need not be among the most variable.
    gene_symbols
        Column of var with the names of genes.
    """
    if adata.n_obs == 0 or adata.n_vars == 0:
        raise DataError(f"the data hold {adata.n_obs} cells and {adata.n_vars} genes; both are needed.")
    source, name, warnings = _source(adata, layer), f"layer {layer!r}" if layer else "X", []
    names = gene_names(adata, gene_symbols, warnings)
    required = _columns_of(keep_genes, names)
    blocks = partial(_blocks, source, rows)
    seen, sums = _first_pass((_checked(block, name, adata) for block in blocks()), groups, adata.n_vars)
    genes = np.flatnonzero(seen >= min_cells)
    if len(genes) < 2:
        raise DataError(
            f"{len(genes)} genes are seen in at least {min_cells} cells of a group; at least two are needed: "
            "lower min_cells or give more cells."
        )
    rare = [names[g] for g in required if g not in genes]
    if rare:
        warnings.append(f"seen in fewer than {min_cells} cells of a group and not compared: {_listed(rare)}.")
    genes, how = _variable(sums, genes, len(rows), blocks, n_top_genes, required)
    selection = f"{len(genes)} of {adata.n_vars} genes: seen in at least {min_cells} cells of a group{how}"
    path = _file_to_reread(adata, source)
    matrix, totals, digest = _collected((block[:, genes] for block in blocks()), most=None if path is None else MEMORY)
    counted = totals > 0
    if not counted.all():
        warnings.append(
            f"{int((~counted).sum())} of {len(counted)} cells have no counts in the genes compared; left out."
        )
    if matrix is None:
        matrix = StoredCounts(str(path), layer, rows[counted], genes)
    elif not counted.all():
        matrix = matrix[counted]
    ids = None if gene_symbols is None else [str(name) for name in adata.var_names[genes]]
    return Counts(matrix, [names[g] for g in genes], rows[counted], totals[counted], selection, digest, warnings, ids)


def from_matrix(matrix: Any, genes: list[str], cells: np.ndarray, selection: str) -> Counts:
    """Counts of all cells and genes of a matrix. Shapes: ``matrix (cells, genes)``, sparse rows."""
    collected, totals, digest = _collected([matrix], most=None)
    return Counts(collected, genes, cells, totals, selection, digest)


def count_blocks(adata: Any, layer: str | None, rows: np.ndarray, size: int) -> Iterator[Any]:
    """Counts of all genes, `size` cells at a time and checked, at `rows` in rising order. Shapes: ``-> (size, genes)``.

    Sparse rows of float64 without explicit zeros.
    """
    source, name = _source(adata, layer), f"layer {layer!r}" if layer else "X"
    for start in range(0, len(rows), size):
        yield _checked(_rows(source, rows[start : start + size]), name, adata)


def _file_to_reread(adata: Any, source: Any) -> str | None:
    """The file to read rows from again, None where there is none or it is slow at that, as compressed columns are."""
    on_disk = getattr(adata, "isbacked", False) and not adata.is_view and getattr(source, "format", "csr") == "csr"
    return str(adata.filename) if on_disk else None


def _first_pass(blocks: Iterable[Any], groups: np.ndarray, n_genes: int) -> tuple[np.ndarray, GeneSums]:
    """The most cells of a group that each gene is seen in, and sums over all cells. Shapes: ``-> (genes,)``."""
    seen = np.zeros((int(groups.max(initial=0)) + 1, n_genes), dtype=np.int64)
    sums, start = GeneSums(np.zeros(n_genes), np.zeros(n_genes)), 0
    for block in blocks:
        sums = sums.plus(GeneSums.of(block))
        labels = groups[start : start + block.shape[0]]
        for group in np.unique(labels[labels >= 0]):
            seen[group] += block[labels == group].getnnz(0)
        start += block.shape[0]
    return seen.max(0), sums


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
            raise DataError(f"the data have no X; name a layer of counts, there are {_listed(list(adata.layers))}.")
        return _by_rows(adata.X)
    if layer not in adata.layers:
        names = [str(name) for name in adata.layers]
        raise SettingError(f"layer={layer!r} is not there{_closest(layer, names)}; there are {_listed(names)}.")
    return _by_rows(adata.layers[layer])


def _by_rows(matrix: Any) -> Any:
    return matrix.tocsr() if sparse.issparse(matrix) and matrix.format != "csr" else matrix


def _blocks(source: Any, rows: np.ndarray) -> Iterator[Any]:
    """Sparse rows of float64, a block of cells at a time; blocks of a dense matrix are smaller."""
    dense = not hasattr(source, "format")
    size = min(BLOCK, max(1, _DENSE // source.shape[1])) if dense else BLOCK
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
    layers = [str(layer) for layer in adata.layers if name != f"layer {layer!r}"]
    hints = [f"name a layer of raw counts (there are {_listed(layers)})"] if layers else []
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
            f"gene_symbols={symbols!r} is no column of var{_closest(symbols, names)}; there are {_listed(names)}."
        )
    values = adata.var[symbols].astype(object)
    return _unique(values.where(values.notna(), adata.var_names), warnings)


def _columns_of(genes: Sequence[str], names: list[str]) -> np.ndarray:
    """The columns of the genes named by `keep_genes`; unknown ones are refused. Shapes: ``-> (n,)``."""
    place = {name: i for i, name in enumerate(names)}
    unknown = [gene for gene in dict.fromkeys(map(str, genes)) if gene not in place]
    if unknown:
        listed = ", ".join(f"{gene!r}{_closest(gene, names)}" for gene in unknown[:_SHOWN])
        raise SettingError(f"keep_genes names {len(unknown)} genes that are not there: {listed}.")
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


def _variable(
    sums: GeneSums, genes: np.ndarray, n: int, blocks: Any, n_top: int | None, required: np.ndarray
) -> tuple[np.ndarray, str]:
    """The most variable genes and the required ones, in the order of the file, and how they were chosen.

    All genes stay where the choice cannot be made.
    """
    if n_top is None or len(genes) <= n_top:
        return genes, ""
    require("skmisc.loess", "bio")
    try:
        variable = most_variable(sums.take(genes), n, lambda: (block[:, genes] for block in blocks()), n_top)
    except Exception as error:  # its curve fails in many ways on few or odd cells
        return genes, f"; all of them, because the choice of variable genes failed ({type(error).__name__}: {error})"
    chosen = np.union1d(genes[variable], np.intersect1d(required, genes))
    extra = f" and {len(chosen) - len(variable)} asked for" if len(chosen) > len(variable) else ""
    return chosen, f", and of those the {len(variable)} most variable (seurat_v3){extra}"
