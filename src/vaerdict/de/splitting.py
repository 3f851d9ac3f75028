r"""Counts split into two independent parts: one to find groups of cells in, the other to test them with.

Groups that were found by clustering differ in the counts that they were found in, even where all cells are of one kind.
A count of a gene with mean :math:`\mu` and dispersion :math:`\phi` (variance :math:`\mu + \phi \mu^2`) is split by

.. math:: p \sim \mathrm{Beta}(\varepsilon / \phi, (1 - \varepsilon) / \phi), \qquad
          y \sim \mathrm{Binomial}(x, p),

for the share :math:`\varepsilon`. If x is negative binomial, y and x - y are independent negative binomials. With
another dispersion :math:`\phi'`, whatever the distribution of x,

.. math:: \mathrm{cov}(y, x - y) = \varepsilon (1 - \varepsilon) \mu^2 (\phi - \phi') / (1 + \phi').

Binomial thinning (:math:`\phi' = 0`) leaves parts of over-dispersed counts positively correlated. A dispersion over all
kinds of cells is too large for genes that differ between kinds, and their parts are negatively correlated within a
kind. Therefore dispersions are measured within small clusters of similar cells. Similar cells are found by the other
half of the genes, because clusters of a gene's own counts would hide part of its dispersion.

References: Neufeld et al. (2024), Data thinning for convolution-closed distributions, JMLR 25(57); Neufeld et al.
(2023), Negative binomial count splitting for single-cell RNA sequencing data, arXiv:2307.12985.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from scipy import sparse
from scipy.sparse.linalg import svds

from vaerdict.core import DataError, SettingError
from vaerdict.de import data
from vaerdict.de.options import DEOptions

CLUSTERING, TESTING = "clustering", "testing"
"""The layers of the two parts."""

RECORD = "split_counts"
"""The entry of uns that tells how the counts were split, and the column of var with the dispersions."""

MOST_CELLS = 5000
"""Cells that dispersions are measured in at most; of more, these many at random."""

CELLS_TOGETHER = 30
"""Mean number of cells of the clusters within which dispersions are measured."""

_BLOCK = 256  # cells thinned with one stream of random numbers
_COMPONENTS = 15  # in which similar cells are found
_MOST_GENES = 1000  # of a half, the most variable, by which they are found
_ITERATIONS = 20  # of k-means
_WINDOW = 200  # genes of similar abundance that a trend is averaged over


def split_counts(
    adata: Any,
    *,
    layer: str | None = None,
    share: float = 0.5,
    dispersion: float | Sequence[float] | np.ndarray | None = None,
    seed: int = 0,
) -> None:
    """Split raw counts into two independent parts, the layers ``clustering`` and ``testing`` of `adata`.

    Cluster the cells by the first and compare the clusters by the second, with ``clustered=True`` of
    `differential_expression`. The parts add up to the counts. They are independent given a cell's kind and sequencing
    depth, as far as its counts are negative binomial with the dispersions of the column ``split_counts`` of var; with
    the right variance of a gene alone, they are uncorrelated. Differences that several genes share, such as those
    between kinds of cells or phases of the cell cycle, are in both parts.

    Parameters
    ----------
    adata
        AnnData of raw counts, in memory or backed, with at least two cells. It gets two layers of sparse rows, a column
        of var and an entry of uns.
    layer
        Layer of raw counts; X by default.
    share
        Expected share of each count in the part for clustering.
    dispersion
        Dispersion of the counts of every gene within a kind of cells, variance = mean + dispersion * mean^2: one
        number, or an array of shape ``(genes,)``. 0 is for Poisson counts, which are split by binomial thinning. By
        default dispersions are estimated from at most 5,000 cells, moderated across genes.
    seed
        Seed of the random numbers; the same seed gives the same parts.

    Raises
    ------
    SettingError, DataError
        If an option or the data cannot be used; the message says what to do.

    Notes
    -----
    Beside the two layers, and once more while these are put together, the counts of at most 5,000 cells are in memory.

    Examples
    --------
    >>> split_counts(adata)  # doctest: +SKIP
    >>> differential_expression(adata, "leiden", clustered=True)  # doctest: +SKIP
    """
    if not 0 < share < 1:
        raise SettingError(f"share={share} of the counts for clustering must lie strictly between 0 and 1.")
    if adata.n_obs < 2 or adata.n_vars == 0:
        raise DataError(f"the data hold {adata.n_obs} cells and {adata.n_vars} genes; both are needed to split counts.")
    if dispersion is None:
        rows = np.sort(np.random.default_rng([seed, 1]).permutation(adata.n_obs)[:MOST_CELLS])
        blocks = data.count_blocks(adata, layer, rows, _BLOCK)
        phi = estimated_dispersions(sparse.vstack(list(blocks), format="csr"), seed=seed)
    else:
        phi = _given(dispersion, adata.n_vars)
    blocks = data.count_blocks(adata, layer, np.arange(adata.n_obs), _BLOCK)
    parts = [
        _thinned(block, share, phi, np.random.default_rng([seed, 2, number])) for number, block in enumerate(blocks)
    ]
    first, second = (sparse.vstack(side, format="csr") for side in zip(*parts, strict=True))
    adata.layers[CLUSTERING], adata.layers[TESTING] = first, second
    adata.var[RECORD] = phi
    adata.uns[RECORD] = {
        "method": "negative binomial" if phi.any() else "Poisson",
        "layer": layer or "X",
        "share": float(share),
        "seed": int(seed),
        "cells": int(adata.n_obs),
        "genes": int(adata.n_vars),
        "digest": _digest(adata),
    }


def _given(dispersion: Any, n_genes: int) -> np.ndarray:
    values = np.asarray(dispersion, dtype=np.float64)
    if values.shape not in ((), (n_genes,)):
        raise SettingError(f"dispersion has shape {values.shape}; give one number or one for each of {n_genes} genes.")
    if not (np.isfinite(values) & (values >= 0)).all():
        raise SettingError("dispersion holds values that are negative or not finite; 0 is for Poisson counts.")
    return np.broadcast_to(values, n_genes).copy()


def _thinned(block: Any, share: float, phi: np.ndarray, rng: np.random.Generator) -> tuple[Any, Any]:
    """Both parts of some cells. Shapes: ``block (c, genes)`` and ``phi (genes,) -> (c, genes)``, sparse rows."""
    block.sort_indices()
    size = phi[block.indices]
    over, p = size > 0, np.full(len(size), share)
    p[over] = rng.beta(share / size[over], (1 - share) / size[over])
    first = rng.binomial(block.data.astype(np.int64), p)
    return _part(block, first), _part(block, block.data - first)


def _part(block: Any, values: np.ndarray) -> Any:
    part = sparse.csr_matrix((values.astype(np.float32), block.indices.copy(), block.indptr.copy()), block.shape)
    part.eliminate_zeros()
    return part


# -------------------------------------------------------------------------------------------------- dispersions
def estimated_dispersions(counts: Any, *, seed: int = 0, cells_together: int = CELLS_TOGETHER) -> np.ndarray:
    """Dispersions of the genes within kinds of cells, moderated across genes.

    Shapes: ``counts (cells, genes)``, sparse rows of float64, ``-> (genes,)``.
    """
    counts = counts[np.asarray(counts.sum(1)).ravel() > 0]
    n, n_genes = counts.shape
    if n < 2:
        return np.zeros(n_genes)
    totals = np.asarray(counts.sum(1)).ravel()
    rng = np.random.default_rng([seed, 3])
    half = rng.permutation(n_genes) % 2 == 0
    pairs, squares = np.zeros(n_genes), np.zeros(n_genes)
    for genes, others in ((half, ~half), (~half, half)):
        similar = _similar_cells(counts[:, others], totals, n // cells_together, rng)
        pairs[genes], squares[genes] = _factorial_moments(counts[:, genes], totals, similar)
    return _moderated(pairs, squares, n)


def _similar_cells(counts: Any, totals: np.ndarray, n_clusters: int, rng: np.random.Generator) -> np.ndarray:
    """The number of each cell's cluster, by k-means on singular vectors. Shapes: ``(cells, genes) -> (cells,)``."""
    scaled = sparse.diags(np.median(totals) / totals) @ counts
    scaled.data = np.log1p(scaled.data)
    mean = np.asarray(scaled.mean(0)).ravel()
    variance = np.asarray(scaled.multiply(scaled).mean(0)).ravel() - mean**2
    scaled = scaled[:, np.sort(np.argsort(-variance, kind="stable")[:_MOST_GENES])]
    k = min(_COMPONENTS, min(scaled.shape) - 1)
    if n_clusters < 2 or k < 1 or not scaled.nnz:
        return np.zeros(counts.shape[0], dtype=int)
    u, s, _ = svds(scaled, k=k, v0=rng.normal(size=min(scaled.shape)))
    return _k_means(u * s, n_clusters, rng)


def _k_means(points: np.ndarray, k: int, rng: np.random.Generator) -> np.ndarray:
    """Lloyd's algorithm from k of the points. Shapes: ``(n, d) -> (n,)``."""
    centres = points[rng.choice(len(points), k, replace=False)]
    nearest = np.zeros(len(points), dtype=int)
    for _ in range(_ITERATIONS):
        nearest = np.argmin((centres**2).sum(1) - 2 * points @ centres.T, axis=1)
        sizes = np.bincount(nearest, minlength=k)
        sums = np.stack([np.bincount(nearest, column, k) for column in points.T], axis=1)
        centres = np.where(sizes[:, None] > 0, sums / np.maximum(sizes, 1)[:, None], centres)
    return np.unique(nearest, return_inverse=True)[1]


def _factorial_moments(counts: Any, totals: np.ndarray, cluster: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    r"""Sums over cells of x (x - 1), and what they are expected to be of Poisson counts, :math:`\sum \mu^2`.

    The mean of a cell is the share of its cluster times the counts of all other genes in the cell; the square of that
    share is estimated by pairs of different cells. Shapes: ``counts (cells, genes) -> (genes,)`` twice.
    """
    member: Any = sparse.csr_matrix((np.ones(len(cluster)), (cluster, np.arange(len(cluster)))))
    squared = counts.multiply(counts).tocsr()
    x, xx = (np.asarray((member @ part).todense()) for part in (counts, squared))
    xt = np.asarray((member @ sparse.diags(totals) @ counts).todense())
    t, tt = member @ totals, member @ totals**2
    others, others_squared = t[:, None] - x, tt[:, None] - 2 * xt + xx
    of_pairs = others**2 - others_squared
    usable = (np.asarray(member.sum(1)) > 1) & (of_pairs > 0)
    expected = np.divide((x**2 - xx) * others_squared, of_pairs, out=np.zeros_like(x), where=usable)
    return np.where(usable, xx - x, 0).sum(0), expected.sum(0)


def _moderated(pairs: np.ndarray, squares: np.ndarray, n: int) -> np.ndarray:
    """The ratio of both moments less one, moved towards its trend on abundance by empirical Bayes.

    Dispersions are spread about the trend by a factor common to all genes. Shapes: ``(genes,) -> (genes,)``.
    """
    phi, seen = np.zeros(len(pairs)), np.flatnonzero(squares > 0)
    if not len(seen):
        return phi
    seen = seen[np.argsort(squares[seen], kind="stable")]
    pairs, squares = pairs[seen], squares[seen]
    ratio, trend = pairs / squares - 1, np.maximum(_windowed(pairs) / _windowed(squares) - 1, 0)
    error, spread = _sampling_variance(trend, np.sqrt(squares / n), n), 0.0
    weight = 1 / error
    if (weight * trend**2).sum() > 0:
        spread = max(0.0, (weight * ((ratio - trend) ** 2 - error)).sum() / (weight * trend**2).sum())
    own = spread * trend**2 / (spread * trend**2 + error)
    phi[seen] = np.maximum(trend + own * (ratio - trend), 0)
    return phi


def _windowed(values: np.ndarray) -> np.ndarray:
    """Sums over the `_WINDOW` neighbours of each value, fewer at the ends. Shapes: ``(n,) -> (n,)``."""
    total, place = np.concatenate([[0.0], np.cumsum(values)]), np.arange(len(values))
    low, high = np.maximum(place - _WINDOW // 2, 0), np.minimum(place + _WINDOW // 2 + 1, len(values))
    return total[high] - total[low]


def _sampling_variance(phi: np.ndarray, mean: np.ndarray, n: int) -> np.ndarray:
    r"""The variance of :math:`\sum x (x - 1) / \sum \hat\mu^2` of n negative binomial counts.

    That of :math:`x (x - 1) - 2 (1 + \phi) \mu x` by factorial moments. Shapes: ``(genes,) -> (genes,)``.
    """
    m2, m3 = mean**2 * (1 + phi), mean**3 * (1 + phi) * (1 + 2 * phi)
    m4, slope = mean * m3 * (1 + 3 * phi), 2 * (1 + phi) * mean
    of_pairs, of_mean = m4 + 4 * m3 + 2 * m2 - m2**2, mean + phi * mean**2
    return (of_pairs + slope**2 * of_mean - 2 * slope * (m3 + 2 * m2 - mean * m2)) / (n * mean**4)


# ----------------------------------------------------------------------------------------------------- in use
def with_testing_layer(adata: Any, options: DEOptions) -> DEOptions:
    """The options with the layer that clusters are tested with; unchanged where groups are not said to be clusters.

    Refused where `split_counts` did not write that layer, or it was changed since. Cells and genes may have been left
    out since.
    """
    if not options.clustered:
        return options
    if options.layer not in (None, TESTING):
        raise SettingError(f"clustered=True tests layer {TESTING!r}; leave layer={options.layer!r} out, or clustered.")
    record = adata.uns.get(RECORD)
    if record is None or TESTING not in adata.layers:
        raise SettingError(
            "clustered=True needs counts that were split; call vd.split_counts(adata), cluster the cells by layer "
            f"{CLUSTERING!r}, and compare the clusters again."
        )
    size, written = (adata.n_obs, adata.n_vars), (int(record["cells"]), int(record["genes"]))
    as_written = size != written or _digest(adata) == record["digest"]
    if not as_written or size[0] > written[0] or size[1] > written[1]:
        raise DataError(
            f"layer {TESTING!r} is not the one that vd.split_counts wrote; call it again, cluster the cells by layer "
            f"{CLUSTERING!r}, and compare these clusters."
        )
    return replace(options, layer=TESTING)


def _digest(adata: Any) -> str:
    """A hash of the counts to test with, dense or sparse."""
    values, genes, sizes = (hashlib.sha256() for _ in range(3))
    for block in data.count_blocks(adata, TESTING, np.arange(adata.n_obs), _BLOCK):
        block.sort_indices()
        for sha, array in ((values, block.data), (genes, block.indices), (sizes, np.diff(block.indptr))):
            sha.update(array.astype(np.int64).tobytes())
    return hashlib.sha256(b"".join(sha.digest() for sha in (values, genes, sizes))).hexdigest()


_CLUSTERS = re.compile(
    r"leiden|louvain|cluster|k[_ -]?means|phenograph|snn_res|h?dbscan|hclust|walktrap", re.IGNORECASE
)
_FEWEST_NUMBERS = 3  # groups 0 and 1 may as well be a condition


def cluster_warnings(column: str, labels: np.ndarray) -> list[str]:
    """One sentence where groups look like clusters by the name of their column or by their numbers, else none.

    Shapes: ``labels (cells,)`` of text, None where missing.
    """
    groups = {label for label in labels if label is not None}
    numbered = any(groups == {str(i + first) for i in range(len(groups))} for first in (0, 1))
    if not _CLUSTERS.search(column) and not (numbered and len(groups) >= _FEWEST_NUMBERS):
        return []
    return [
        f"groups of {column!r} look like clusters: if they were found in these counts, genes are called that do not "
        "differ, unless the counts are split first (vd.split_counts, then --clustered)."
    ]
