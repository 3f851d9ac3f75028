"""Counts and labels out of an AnnData: looked at a few cells at a time, and refused with the remedy where unusable.

At no time is more than the non-zero counts of the cells asked for in memory, and `_BLOCK` cells of all genes of a dense
or backed file.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy import sparse
from torch import Tensor

from vaerdict.core import DataError, SettingError
from vaerdict.foreign import contained, needed

_BLOCK = 2048  # cells looked at together
_LARGEST_LOG = 20.0  # no logarithm of a count, or of a count per ten thousand, is larger
_SHOWN = 8


@dataclass(frozen=True, eq=False)
class Counts:
    """Counts of some cells and genes: the rows of the file they are, what was left out, and how genes were chosen.

    Shapes: ``matrix (cells, genes)``, sparse rows of float32; ``cells (cells,)``.
    """

    matrix: Any
    genes: list[str]
    cells: np.ndarray
    selection: str
    warnings: list[str] = field(default_factory=list)

    def tensor(self) -> Tensor:
        """The counts, dense. Shapes: ``-> (cells, genes)``."""
        return torch.from_numpy(self.matrix.toarray())


def open_data(path: str | Path) -> Any:
    """An AnnData file, its matrix left on disk."""
    path, anndata = Path(path), needed("anndata", "bio")
    if not path.is_file():
        raise DataError(f"{path} does not exist or is no file.")
    if path.stat().st_size == 0:
        raise DataError(f"{path} is empty (0 bytes); copy or download it again.")
    try:
        with contained(0):
            return anndata.read_h5ad(path, backed="r")
    except Exception as error:  # h5py and anndata raise many kinds
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise DataError(
            f"{path} cannot be read as .h5ad ({reason}); it may be cut short or of another format: copy it again."
        ) from error


# ------------------------------------------------------------------------------------------------------ labels
def column(adata: Any, key: str, *, role: str) -> np.ndarray:
    """A column of obs as text, None where it is missing; `role` is the argument that named it.

    Shapes: ``-> (cells,)``.
    """
    if key not in adata.obs:
        there = [str(name) for name in adata.obs.columns]
        raise SettingError(f"{role}={key!r} is no column of obs{_closest(key, there)}; there are {_listed(there)}.")
    values = adata.obs[key]
    out = values.astype(str).to_numpy(dtype=object)
    out[values.isna().to_numpy()] = None
    return out


def check_group(name: str, labels: np.ndarray, *, role: str, column: str) -> str:
    """The group as it is spelled in the labels, else an error that names those there are."""
    there = sorted({label for label in labels if label is not None})
    if str(name) not in there:
        raise SettingError(
            f"{role}={name!r} is no group of {column!r}{_closest(str(name), there)}; there are {_listed(there)}."
        )
    return str(name)


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
    found = get_close_matches(name, there, 1)
    return f" (did you mean {found[0]!r}?)" if found else ""


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
) -> Counts:
    """Counts of cells, of genes seen in at least `min_cells` cells of a group and, of these, the most variable.

    `rows` are the cells of the file, and `groups` ``(rows,)`` numbers the group of each, negative for none. Cells
    without any count in the genes that are kept are left out, and said so; genes of one name are told apart by a
    suffix.
    """
    if adata.n_obs == 0 or adata.n_vars == 0:
        raise DataError(f"the data hold {adata.n_obs} cells and {adata.n_vars} genes; both are needed.")
    source, name, warnings = _source(adata, layer), f"layer {layer!r}" if layer else "X", []
    whole: Any = sparse.vstack([_checked(block, name, adata) for block in _blocks(source, rows)], format="csr")
    seen = np.zeros(adata.n_vars, dtype=np.int64)
    for group in np.unique(groups[groups >= 0]):
        seen = np.maximum(seen, whole[groups == group].getnnz(0))
    kept = np.flatnonzero(seen >= min_cells)
    if len(kept) < 2:
        raise DataError(
            f"{len(kept)} genes are seen in at least {min_cells} cells of a group; at least two are needed to compare: "
            "lower min_cells or give more cells."
        )
    genes = _unique(adata.var_names, warnings)
    matrix = whole[:, kept]
    chosen, selection = _variable(matrix, n_top_genes)
    matrix, kept = matrix[:, chosen], kept[chosen]
    full = np.asarray(matrix.sum(1)).ravel() > 0
    if not full.all():
        warnings.append(f"{int((~full).sum())} of {len(full)} cells have no counts in the genes compared; left out.")
    selection = f"{len(kept)} of {adata.n_vars} genes: seen in at least {min_cells} cells of a group{selection}"
    matrix = matrix[full]
    matrix.sort_indices()
    return Counts(matrix, [genes[g] for g in kept], rows[full], selection, warnings)


def _source(adata: Any, layer: str | None) -> Any:
    if layer is None:
        if adata.X is None:
            raise DataError(f"the data have no X; name a layer of counts, there are {_listed(list(adata.layers))}.")
        return adata.X
    if layer not in adata.layers:
        there = [str(name) for name in adata.layers]
        raise SettingError(f"layer={layer!r} is not there{_closest(layer, there)}; there are {_listed(there)}.")
    return adata.layers[layer]


def _blocks(source: Any, rows: np.ndarray) -> Iterator[Any]:
    """Sparse rows of float64, some cells at a time; files want their rows in rising order."""
    if sparse.issparse(source) and source.format != "csr":
        source = source.tocsr()
    for start in range(0, len(rows), _BLOCK):
        block = source[rows[start : start + _BLOCK]]
        block = block if sparse.issparse(block) else np.asarray(block)
        yield sparse.csr_matrix(block, dtype=np.float64)


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
    block.eliminate_zeros()
    return block.astype(np.float32)


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


def _variable(matrix: Any, n_top: int | None) -> tuple[np.ndarray, str]:
    """The most variable genes by scanpy's seurat_v3, in the order of the file; all where that cannot be had."""
    every = np.arange(matrix.shape[1])
    if n_top is None or len(every) <= n_top:
        return every, ""
    scanpy, anndata = needed("scanpy", "bio"), needed("anndata", "bio")
    try:
        with contained(0):
            held = anndata.AnnData(matrix.copy())
            found = scanpy.pp.highly_variable_genes(held, flavor="seurat_v3", n_top_genes=n_top, inplace=False)
    except Exception as error:  # its loess fails in many ways on few or odd cells
        return every, f"; all of them, for the choice of variable genes failed ({type(error).__name__}: {error})"
    chosen = np.flatnonzero(found["highly_variable"].to_numpy())
    return chosen, f", and of those the {len(chosen)} most variable (seurat_v3)"
