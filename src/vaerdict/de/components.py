"""Principal components of log-normalised counts."""

from __future__ import annotations

from typing import Any

import numpy as np
from scipy import sparse

from vaerdict.core import DataError
from vaerdict.optional import isolated, require

_CLIP = 10.0  # standard deviations of a gene
_LEAST_SD = 0.05  # a gene that varies less is not blown up


def principal_components(counts: Any, totals: np.ndarray, n_components: int, *, seed: int) -> np.ndarray:
    """Components of log(1 + counts per median total), genes scaled to unit variance.

    No label is used and all cells are treated alike, so that cells that are exchangeable before are so afterwards.
    Shapes: ``counts (cells, genes)`` sparse, ``totals (cells,)``, ``-> (cells, n_components)``.
    """
    n_components = min(n_components, min(counts.shape) - 1)
    if n_components < 2:
        raise DataError(f"{counts.shape[0]} cells and {counts.shape[1]} genes are too few for principal components.")
    normalised, sd = log_normalised(counts, totals)
    scaled = normalised @ sparse.diags(1 / np.maximum(sd, _LEAST_SD))
    scaled.data.clip(max=_CLIP, out=scaled.data)
    decomposition = require("sklearn.decomposition", "bio")
    with isolated(seed):
        return decomposition.PCA(n_components, svd_solver="arpack", random_state=seed).fit_transform(scaled.tocsr())


def log_normalised(counts: Any, totals: np.ndarray) -> tuple[Any, np.ndarray]:
    """Log(1 + counts per median total), and the standard deviation of every gene.

    Shapes: ``counts (cells, genes)`` sparse, ``totals (cells,)``, ``-> (cells, genes)`` sparse, ``(genes,)``.
    """
    normalised = sparse.csr_matrix(sparse.diags(np.median(totals) / totals) @ counts, dtype=np.float64)
    np.log1p(normalised.data, out=normalised.data)
    mean = np.asarray(normalised.mean(0)).ravel()
    variance = np.asarray(normalised.multiply(normalised).mean(0)).ravel() - mean**2
    return normalised, np.sqrt(np.maximum(variance, 0))
