r"""Novel rows by diffusion: how little of the labelled rows reaches a row through its neighbours.

Every row, labelled, unlabelled or query, is a node of a graph of nearest neighbours, with weights

.. math:: w_{ij} = \exp(-\lVert x_i - x_j\rVert^2 / (r_i r_j)), \qquad r_i: \text{distance to the k-th neighbour}.

A random walk that starts at row i moves along the weights, ends where it is with probability `restart` at every step,
and is lost with probability proportional to `leak` where all neighbours are far away. The reach of labelled rows is the
probability that the walk ends at one of them,

.. math:: f = A 1_\text{labelled}, \qquad A = \rho (I - (1 - \rho) P)^{-1},
          \qquad P_{ij} = w_{ij} / (\ell + \sum_k w_{ik}).

A cluster without labelled rows has a small reach, however close it is in distance, and so has a row far from all
others. Unlabelled rows of training make clusters visible that few query rows alone would not show.

Reach is linear in the labels. Therefore every labelled row can serve twice, as a source and, with its own label taken
away, for calibration (`find_novel_by_diffusion`), and no label is held out.

References: Zhou, Bousquet, Lal, Weston and Scholkopf (2004), Learning with local and global consistency; Lee, Popov and
Ren (2025), Full-conformal novelty detection; Wang and Ramdas (2022), False discovery rate control with e-values.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from scipy import sparse

from vaerdict.core import DataError, SettingError, check_count
from vaerdict.selective.novelty import Novelty, check_rows, fewest_novel

_CHUNK = 2**24  # distances held at a time
_COLUMNS = 64  # sources solved for at a time, which fit into the cache
_ACCURACY = 1e-8  # of reach, relative to its largest value
_TOLERANCE = 1e-9  # relative rounding error of e-values


@dataclass(frozen=True)
class Diffusion:
    """Minus the reach of the known rows, through a graph of known, unlabelled and pool rows: a `NoveltyScore`.

    Parameters
    ----------
    unlabelled
        Further rows of the graph, which may be of any class, ``(n, features)``; calibration rows must not be among
        them.
    neighbours
        Number of neighbours of each row.
    restart
        Probability with which the walk ends at each step.
    leak
        Weight with which the walk is lost at each step; the weight of a neighbour at distance zero is one.
    standardise
        Whether features are standardised, by all rows together.

    Notes
    -----
    The defaults were chosen on scikit-learn's digits and breast cancer, with every class hidden in turn.

    Examples
    --------
    >>> rng = np.random.default_rng(0)
    >>> known, pool = rng.normal(size=(50, 2)), np.concatenate([rng.normal(size=(20, 2)), rng.normal(6, 1, (20, 2))])
    >>> score = Diffusion()(known, np.zeros(50), pool)
    >>> bool(score[20:].min() > score[:20].max())
    True
    """

    unlabelled: np.ndarray | None = None
    neighbours: int = 10
    restart: float = 0.1
    leak: float = 0.5
    standardise: bool = True

    def __post_init__(self) -> None:
        check_count(self.neighbours, name="neighbours")
        if not 0 < self.restart < 1 or self.leak < 0:
            raise SettingError(
                f"restart={self.restart} must lie strictly between 0 and 1, and leak={self.leak} must not be negative."
            )

    def __call__(self, known: np.ndarray, classes: np.ndarray, pool: np.ndarray, /) -> np.ndarray:
        """Shapes: ``(n_known, d), (n_known,), (n_pool, d) -> (n_pool,)``."""
        walk = self.walk(known, pool)
        return -walk.reach(np.ones(len(known)), np.arange(len(known)))[-len(pool) :]

    def walk(self, known: np.ndarray, pool: np.ndarray) -> Walk:
        """The walk on the graph of known, unlabelled and pool rows, in this order."""
        rows = np.concatenate([known, *([] if self.unlabelled is None else [self.unlabelled]), pool])
        if len(rows) <= self.neighbours:
            raise DataError(f"neighbours={self.neighbours} of {len(rows)} rows; give more rows, or fewer neighbours.")
        if self.standardise:
            center, spread = rows.mean(0), rows.std(0)
            rows = (rows - center) / np.where(spread > 1e-12 * (1 + np.abs(center)), spread, 1.0)
        weight = neighbour_weights(rows, self.neighbours)
        return Walk(weight, np.asarray(weight.sum(1)).ravel() + self.leak, self.restart)


def find_novel_by_diffusion(
    labelled: np.ndarray, query: np.ndarray, *, diffusion: Diffusion | None = None, fdr: float = 0.1
) -> Novelty:
    r"""Call query rows novel by `Diffusion`, with an FDR of at most `fdr` and without held-out labels.

    Beside query row j, the reach of labelled row i is :math:`f_i^{(j)} = \sum_{l \ne i} A_{il} + A_{ij}` (its own label
    is taken away, j has one), and that of j is :math:`f_j = \sum_l A_{jl}`: both are judged by the other n rows of the
    same n + 1. If j is exchangeable with the labelled rows, the full conformal p-value
    :math:`p_j = (1 + \#\{i : f_i^{(j)} \le f_j\}) / (n + 1)` satisfies :math:`P(p_j \le t) \le t`, and

    .. math:: e_j = (n + 1)\, 1\{f_j \le t_j\} / \#\{a : f_a^{(j)} \le t_j\}, \quad a \text{ one of these } n + 1,

    has a mean of at most one for every threshold :math:`t_j` that treats the n + 1 rows alike. Ours is the largest with
    an estimated FDR of at most `fdr`. The list by e-values (e-BH) has an FDR of at most `fdr`, in finite samples and
    whatever the dependence of query rows, if the labelled rows and those query rows that are not novel are exchangeable
    given the novel and the unlabelled rows.

    Parameters
    ----------
    labelled
        Rows of known classes, ``(n_labelled, features)``, drawn without regard to class.
    query
        Rows that may be novel, ``(n_query, features)``.
    diffusion
        The graph with its unlabelled rows; ``Diffusion()`` by default.
    fdr
        Largest expected share of false calls.

    Returns
    -------
    Novelty
        ``p`` are the full conformal p-values, ``q`` the smallest FDR at which the e-values call a row, ``score`` minus
        the reach of query rows, ``calibration_score`` that of labelled rows without their own label.

    References
    ----------
    Lee, Popov and Ren (2025), Full-conformal novelty detection.

    Examples
    --------
    >>> rng = np.random.default_rng(0)
    >>> query = np.concatenate([rng.normal(size=(50, 2)), rng.normal(8, 1, (50, 2))])
    >>> found = find_novel_by_diffusion(rng.normal(size=(100, 2)), query)
    >>> int(found.novel[50:].sum()), found.fewest
    (50, 10)
    """
    n, m = len(labelled), len(query)
    fewest = fewest_novel(m, n, fdr)
    labelled, query = check_rows(labelled=labelled, query=query)
    walk = (diffusion or Diffusion()).walk(labelled, query)
    source, query_rows = np.arange(n), len(walk.degree) - m + np.arange(m)
    to_labelled = walk.reach(np.eye(n), source)
    reach, own = to_labelled[query_rows].sum(1), to_labelled[source]
    np.fill_diagonal(own, 0)
    from_query = to_labelled[query_rows] * walk.degree[query_rows, None] / walk.degree[source]  # (m, n): A_ij
    beside = own.sum(1) + from_query
    p = (1 + (beside <= reach[:, None]).sum(1)) / (n + 1)
    e = np.zeros(m)
    likely = np.flatnonzero(p <= fdr)  # the others have f_j > t_j
    to_likely = walk.reach(np.eye(len(likely)), query_rows[likely])[query_rows]
    for column, j in enumerate(likely):
        others = np.delete(reach + to_likely[:, column], j)
        e[j] = _e_value(reach[j], beside[j], others, fdr)
    q = _e_adjusted(e)
    return Novelty(p, q, q <= fdr * (1 + _TOLERANCE), -reach, -own.sum(1), fewest)


def _e_value(reach: float, beside: np.ndarray, others: np.ndarray, fdr: float) -> float:
    """The e-value of one query row, from its reach, that of the labelled rows and that of the other query rows."""
    n, m = len(beside), len(others) + 1
    known, others = np.sort(np.append(beside, reach)), np.sort(others)
    thresholds = np.concatenate([known, others])
    n_known = np.searchsorted(known, thresholds, side="right")
    n_called = 1 + np.searchsorted(others, thresholds, side="right")
    accepted = m * np.maximum(n_known, 1) <= fdr * (1 + _TOLERANCE) * (n + 1) * n_called
    threshold = thresholds[accepted].max(initial=-math.inf)
    return (n + 1) / np.searchsorted(known, threshold, side="right") if reach <= threshold else 0.0


def _e_adjusted(e: np.ndarray) -> np.ndarray:
    r"""Smallest level at which e-BH calls each row: :math:`\min_{k \ge \mathrm{rank}} m / (k e_{(k)})`, at most one."""
    order = np.argsort(-e, kind="stable")
    with np.errstate(divide="ignore"):
        level = len(e) / (np.arange(1, len(e) + 1) * e[order])
    q = np.empty(len(e))
    q[order] = np.minimum(np.minimum.accumulate(level[::-1])[::-1], 1)
    return q


# ------------------------------------------------------------------------------------------------ the graph
@dataclass(frozen=True, eq=False)
class Walk:
    """The random walk on a graph with symmetric weights ``(n, n)``; ``degree`` is their sum with the leak, ``(n,)``."""

    weight: sparse.csr_matrix
    degree: np.ndarray
    restart: float

    def reach(self, source: np.ndarray, rows: np.ndarray) -> np.ndarray:
        r"""Solve :math:`f = (1 - \rho) P f + \rho s` for the sources s of `rows`, zero elsewhere.

        Shapes: ``(k,), (k,) -> (n,)``, or ``(k, columns), (k,) -> (n, columns)``.
        """
        root = np.sqrt(self.degree)
        scaled = sparse.diags(1 / root) @ self.weight @ sparse.diags(1 / root)
        columns = np.atleast_2d(source.T).T
        reach = np.empty((len(root), columns.shape[1]))
        for start in range(0, columns.shape[1], _COLUMNS):
            block = slice(start, start + _COLUMNS)
            right = np.zeros((len(root), columns[:, block].shape[1]))
            right[rows] = self.restart * root[rows, None] * columns[:, block]
            reach[:, block] = self._solve(scaled, right) / root[:, None]
        return reach.reshape(len(root), *source.shape[1:])

    def _solve(self, scaled: sparse.csr_matrix, residual: np.ndarray) -> np.ndarray:
        r"""Chebyshev iteration for :math:`I - (1 - \rho) D^{-1/2} W D^{-1/2}`, with eigenvalues in [rho, 2 - rho]."""
        solution, step = np.zeros_like(residual), np.zeros_like(residual)
        half_width, alpha, beta = 1 - self.restart, 1.0, 0.0
        for i in range(self._n_steps()):
            step = residual + beta * step
            solution += alpha * step
            residual -= alpha * (step - half_width * (scaled @ step))
            beta = (half_width * alpha) ** 2 / (2 if i == 0 else 4)
            alpha = 1 / (1 - beta / alpha)
        return solution

    def _n_steps(self) -> int:
        root = math.sqrt(self.restart / (2 - self.restart))  # of the ratio of the extreme eigenvalues
        return math.ceil(math.log(_ACCURACY / 2) / math.log((1 - root) / (1 + root)))


def neighbour_weights(rows: np.ndarray, k: int) -> sparse.csr_matrix:
    """Symmetric weights between each row and its k nearest others. Shapes: ``(n, d) -> (n, n)`` sparse."""
    index, distance = _nearest(rows, k)
    radius = distance[:, -1]
    product = radius[:, None] * radius[index]
    weight = np.exp(-(distance**2) / np.where(product > 0, product, 1)) * ((product > 0) | (distance == 0))
    starts = np.arange(0, k * len(rows) + 1, k)
    made = sparse.csr_matrix((weight.ravel(), index.ravel(), starts), shape=(len(rows), len(rows)))
    return made.maximum(made.T).tocsr()


def _nearest(rows: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
    """The k nearest other rows, nearest first, and their Euclidean distances. Shapes: ``(n, d) -> (n, k), (n, k)``."""
    n, squared_norm = len(rows), (rows**2).sum(1)
    index, distance = np.empty((n, k), dtype=np.int64), np.empty((n, k))
    step = max(1, _CHUNK // max(n, k * rows.shape[1]))
    for start in range(0, n, step):
        chunk = np.arange(start, min(start + step, n))
        by_distance = squared_norm - 2 * rows[chunk] @ rows.T  # up to a constant per row, and to rounding
        by_distance[np.arange(len(chunk)), chunk] = np.inf
        nearest = np.argpartition(by_distance, k - 1, axis=1)[:, :k]
        exact = np.linalg.norm(rows[chunk, None] - rows[nearest], axis=-1)
        order = np.argsort(exact, axis=1)
        index[chunk] = np.take_along_axis(nearest, order, axis=1)
        distance[chunk] = np.take_along_axis(exact, order, axis=1)
    return index, distance
