r"""Novel rows with a false discovery rate: conformal p-values against held-out rows of known classes.

Three sets of rows are needed. The *known* rows, with their classes, define what is known. The *calibration* rows are of
known classes too, and nothing was fitted on them. The *query* rows may be novel. Every row of calibration and query
gets a score, large where it looks novel, and the p-value of a query row is the share of calibration rows that score at
least as high. The list of rows with an adjusted p-value of at most alpha has an expected share of false calls (FDR) of
at most alpha, in finite samples and for any score, if

- the calibration rows and those query rows that are not novel are exchangeable: drawn from one distribution, measured
  alike (`vaerdict.selective.exchangeability` tests this);
- the score treats calibration and query rows alike. `find_novel` ensures it: a score sees them mixed and shuffled.

The bound is on the mean over repetitions of calibration and query. The share of false calls in a single list may be
larger, and nothing is promised about how many novel rows are found.

References: Vovk, Gammerman and Shafer (2005), Algorithmic learning in a random world; Bates, Candes, Lei, Romano and
Sesia (2023), Testing for outliers with conformal p-values; Marandon, Lei, Mary and Roquain (2024), Adaptive novelty
detection with false discovery rate guarantee (AdaDetect).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
from scipy import linalg, stats

from vaerdict.core import DataError, SettingError, ShapeError, check_count
from vaerdict.optional import require

_CHUNK = 2**22  # distances held at a time
_MIN_SHRINKAGE = 1e-3  # keeps the covariance of constant features invertible
_TOLERANCE = 1e-9  # relative rounding error of q-values


# ------------------------------------------------------------------------------------------------ p-values
def conformal_p_values(
    calibration: np.ndarray,
    score: np.ndarray,
    *,
    calibration_group: np.ndarray | None = None,
    group: np.ndarray | None = None,
    calibration_weight: np.ndarray | None = None,
    weight: np.ndarray | None = None,
) -> np.ndarray:
    r"""Conformal p-values :math:`p_j = (1 + \#\{i : s_i \ge s_j\}) / (n + 1)` of scores against calibration scores.

    If the score of a query row and the n calibration scores are exchangeable, :math:`P(p_j \le t) \le t` for every t,
    over both. With groups (Mondrian), a row is compared with the calibration rows of its own group, and the statement
    holds within each group. The group of a row must follow from the row by one rule for calibration and query rows
    alike, for example its predicted class. A row whose group has no calibration row has p = 1.

    With weights, :math:`p_j = (w_j + \sum_{i : s_i \ge s_j} w_i) / (w_j + \sum_i w_i)`, and the statement holds if the
    known query rows have a density w times that of the calibration rows, for example where the shares of classes
    differ and w is their ratio.

    Parameters
    ----------
    calibration
        Scores of rows of known classes on which nothing was fitted, ``(n,)``; larger is more novel.
    score
        Scores of the query rows, ``(m,)``.
    calibration_group, group
        Groups of both, ``(n,)`` and ``(m,)``; None for one group.
    calibration_weight, weight
        Density ratios of both, ``(n,)`` and ``(m,)``, up to a common factor; None for one.

    Returns
    -------
    ndarray
        P-values in [1 / (n + 1), 1], ``(m,)``.

    References
    ----------
    Vovk, Gammerman and Shafer (2005), Algorithmic learning in a random world, chapters 2 and 4; Tibshirani, Foygel
    Barber, Candes and Ramdas (2019), Conformal prediction under covariate shift.

    Examples
    --------
    >>> conformal_p_values(np.arange(9.0), np.array([100.0, 8.0, -1.0])).tolist()
    [0.1, 0.2, 1.0]
    """
    calibration, score = _check_scores(calibration, "calibration"), _check_scores(score, "score")
    for name, pair in (("group", (calibration_group, group)), ("weight", (calibration_weight, weight))):
        if (pair[0] is None) != (pair[1] is None):
            raise SettingError(f"calibration_{name}= and {name}= belong together; give both or neither.")
    ones = np.ones(len(calibration)), np.ones(len(score))
    calibration_weight = _check_weights(ones[0] if calibration_weight is None else calibration_weight, len(calibration))
    weight = _check_weights(ones[1] if weight is None else weight, len(score))
    if calibration_group is None or group is None:
        order = np.argsort(calibration)
        below = np.concatenate([[0.0], np.cumsum(calibration_weight[order])])
        as_large = below[-1] - below[np.searchsorted(calibration[order], score, side="left")]
        return (weight + as_large) / (weight + below[-1])
    calibration_group = check_groups(calibration_group, len(calibration), "calibration_group")
    group = check_groups(group, len(score), "group")
    p = np.ones(len(score))
    for name in np.unique(group):
        rows = group == name
        others = calibration_group == name
        p[rows] = conformal_p_values(
            calibration[others], score[rows], calibration_weight=calibration_weight[others], weight=weight[rows]
        )
    return p


def q_values(p: np.ndarray) -> np.ndarray:
    """Adjusted p-values of Benjamini and Hochberg (1995): the smallest FDR at which each row is called.

    For conformal p-values of one calibration set the FDR is bounded although they depend on each other (Bates et al.,
    2023, theorem 2). Shapes: ``(m,) -> (m,)``.

    >>> q_values(np.array([0.01, 0.02, 0.9])).round(2).tolist()
    [0.03, 0.03, 0.9]
    """
    p = _check_scores(p, "p")
    if ((p < 0) | (p > 1)).any():
        raise DataError(f"p-values reach from {p.min():g} to {p.max():g}; they must lie in [0, 1].")
    return np.asarray(stats.false_discovery_control(p)) if len(p) else p


def fewest_novel(n_query: int, n_calibration: float, fdr: float) -> int:
    r"""Smallest number of rows that can be called: :math:`\lceil m / (\alpha (n + 1)) \rceil` of m query rows.

    The smallest p-value is 1 / (n + 1), so that fewer rows never reach a q-value of `fdr`. If this exceeds `n_query`,
    no row can be called; more calibration rows are then needed.

    >>> fewest_novel(1000, 499, 0.1)
    20
    """
    n_rows = n_query / (_check_fdr(fdr) * (n_calibration + 1))
    return max(1, math.ceil(n_rows * (1 - _TOLERANCE)))


class Novelty(NamedTuple):
    """Which query rows are novel, at a false discovery rate.

    ``p`` are conformal p-values, ``q`` their adjusted values, ``novel`` marks the rows with q of at most the FDR asked
    for, ``score`` and ``calibration_score`` are the novelty scores. Fewer than ``fewest`` rows could not have been
    called (`fewest_novel`).

    Shapes: ``p, q, novel, score (n_query,)``, ``calibration_score (n_calibration,)``.
    """

    p: np.ndarray
    q: np.ndarray
    novel: np.ndarray
    score: np.ndarray
    calibration_score: np.ndarray
    fewest: int


def find_novel(
    score: NoveltyScore,
    known: np.ndarray,
    classes: np.ndarray,
    calibration: np.ndarray,
    query: np.ndarray,
    *,
    fdr: float = 0.1,
    seed: int = 0,
) -> Novelty:
    """Call query rows novel, with an expected share of false calls of at most `fdr`.

    The bound holds if calibration rows and the query rows that are not novel are exchangeable given the known rows and
    the novel rows. It is on the mean of the share of false calls, not on that of every list. Calibration and query
    rows are mixed and shuffled before `score` sees them, so that it cannot treat them differently, and learned scores
    keep the bound (AdaDetect).

    Parameters
    ----------
    score
        A `NoveltyScore`: `NearestNeighbours`, `NearestClass`, `Learned`, `from_function(f)` or your own.
    known
        Rows of known classes, ``(n_known, features)``.
    classes
        Their classes, ``(n_known,)``.
    calibration
        Other rows of known classes, ``(n_calibration, features)``, drawn without regard to class as query rows are.
    query
        Rows that may be novel, ``(n_query, features)``.
    fdr
        Largest expected share of false calls.
    seed
        Seed of the shuffle.

    Returns
    -------
    Novelty
        P-values, q-values, calls and scores.

    References
    ----------
    Marandon, Lei, Mary and Roquain (2024), Adaptive novelty detection with false discovery rate guarantee.

    Examples
    --------
    >>> rng = np.random.default_rng(0)
    >>> rows = rng.normal(size=(300, 2))
    >>> query = np.concatenate([rng.normal(size=(50, 2)), rng.normal(8, 1, (50, 2))])
    >>> found = find_novel(NearestNeighbours(), rows[:100], np.zeros(100), rows[100:], query)
    >>> int(found.novel[50:].sum()), found.fewest
    (50, 5)
    """
    fewest = fewest_novel(len(query), len(calibration), fdr)
    known, calibration, query = check_rows(known=known, calibration=calibration, query=query)
    classes = check_groups(classes, len(known), "classes")
    order = np.random.default_rng(seed).permutation(len(calibration) + len(query))
    pool_score = np.empty(len(order))
    pool_score[order] = _check_pool(score(known, classes, np.concatenate([calibration, query])[order]), len(order))
    calibration_score, query_score = np.split(pool_score, [len(calibration)])
    p = conformal_p_values(calibration_score, query_score)
    q = q_values(p)
    return Novelty(p, q, q <= fdr * (1 + _TOLERANCE), query_score, calibration_score, fewest)


# ------------------------------------------------------------------------------------------------ scores
class NoveltyScore(Protocol):
    """A score of rows that is large where they look novel.

    ``pool`` holds calibration and query rows, mixed and shuffled, so that a score cannot tell one from the other. It
    may learn from the whole pool.
    """

    def __call__(self, known: np.ndarray, classes: np.ndarray, pool: np.ndarray, /) -> np.ndarray:
        """Scores of the pool. Shapes: ``(n_known, d), (n_known,), (n_pool, d) -> (n_pool,)``."""
        ...


@dataclass(frozen=True)
class NearestNeighbours:
    """Mean Euclidean distance to the `k` nearest known rows, in features standardised by the known rows."""

    k: int = 1

    def __post_init__(self) -> None:
        check_count(self.k)

    def __call__(self, known: np.ndarray, classes: np.ndarray, pool: np.ndarray, /) -> np.ndarray:
        """Shapes: ``(n_known, d), (n_known,), (n_pool, d) -> (n_pool,)``."""
        if len(known) < self.k:
            raise DataError(f"k={self.k} nearest neighbours of {len(known)} known rows; give k={len(known)} or less.")
        known, pool = _standardised(known, pool)
        squared_norm = (known**2).sum(1)
        score = np.empty(len(pool))
        step = max(1, _CHUNK // max(len(known), self.k * known.shape[1]))
        for rows in (slice(start, start + step) for start in range(0, len(pool), step)):
            by_distance = squared_norm - 2 * pool[rows] @ known.T  # up to a constant per row, and to rounding
            nearest = np.argpartition(by_distance, self.k - 1, axis=1)[:, : self.k]
            score[rows] = np.linalg.norm(pool[rows, None] - known[nearest], axis=-1).mean(1)
        return score


@dataclass(frozen=True)
class NearestClass:
    """Mahalanobis distance to the mean of the nearest class.

    The covariance within classes is common to all of them and shrunken towards a multiple of the identity by the
    formula of Ledoit and Wolf (2004), in features standardised by the known rows.
    """

    def __call__(self, known: np.ndarray, classes: np.ndarray, pool: np.ndarray, /) -> np.ndarray:
        """Shapes: ``(n_known, d), (n_known,), (n_pool, d) -> (n_pool,)``."""
        return class_distances(known, classes, pool).min(1)


def class_distances(known: np.ndarray, classes: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """Distances to the means of all classes, in sorted order, as `NearestClass` measures them.

    Shapes: ``(n_known, d), (n_known,), (n, d) -> (n, classes)``.
    """
    known, rows = _standardised(known, rows)
    names, code = np.unique(classes, return_inverse=True)
    mean = np.stack([known[code == c].mean(0) for c in range(len(names))])
    factor = linalg.cholesky(_shrunken_covariance(known - mean[code]), lower=True)
    white_mean, white_rows = (linalg.solve_triangular(factor, part.T, lower=True).T for part in (mean, rows))
    return np.stack([np.linalg.norm(white_rows - m, axis=1) for m in white_mean], 1)


@dataclass(frozen=True)
class Learned:
    """Score of a classifier that tells the pool from the known rows (AdaDetect): novel rows are in the pool only.

    The pool is cut into `folds`. The rows of one fold are scored by a classifier fitted on the known rows and the other
    folds; with one fold, all rows are scored by the classifier fitted on them. `classifier` is any classifier of
    scikit-learn (extra `sklearn`), by default a random forest of 200 trees. A random state of None is set to `seed`.

    Reference: Marandon, Lei, Mary and Roquain (2024), Adaptive novelty detection with false discovery rate guarantee.
    """

    classifier: Any = None
    folds: int = 5
    seed: int = 0

    def __post_init__(self) -> None:
        check_count(self.folds, name="folds")

    def __call__(self, known: np.ndarray, classes: np.ndarray, pool: np.ndarray, /) -> np.ndarray:
        """Shapes: ``(n_known, d), (n_known,), (n_pool, d) -> (n_pool,)``."""
        if len(pool) <= self.folds > 1:
            raise DataError(f"folds={self.folds} for a pool of {len(pool)} rows; give more rows, or fewer folds.")
        classifier, clone = self._classifier(), require("sklearn.base", "sklearn").clone
        fold = np.arange(len(pool)) % self.folds
        score = np.empty(len(pool))
        for f in range(self.folds):
            others = pool[fold != f] if self.folds > 1 else pool
            from_pool = np.repeat([0, 1], [len(known), len(others)])
            fitted = clone(classifier).fit(np.concatenate([known, others]), from_pool)
            rows = pool[fold == f]
            proba = getattr(fitted, "predict_proba", None)
            score[fold == f] = fitted.decision_function(rows) if proba is None else proba(rows)[:, 1]
        return score

    def _classifier(self) -> Any:
        if self.classifier is None:
            forest = require("sklearn.ensemble", "sklearn").RandomForestClassifier
            return forest(200, min_samples_leaf=3, random_state=self.seed)
        classifier = require("sklearn.base", "sklearn").clone(self.classifier)
        states = [name for name, value in classifier.get_params().items() if value is None]
        return classifier.set_params(**{name: self.seed for name in states if name.endswith("random_state")})


def from_function(function: Callable[[np.ndarray], np.ndarray]) -> NoveltyScore:
    """A `NoveltyScore` of a function of rows alone, ``(n, features) -> (n,)``, large where they look novel.

    Nothing it depends on may have been fitted on calibration rows, unless on query rows in the same way.
    """
    return lambda known, classes, pool: function(pool)


def _standardised(known: np.ndarray, pool: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Both, centred and scaled by the known rows; features that are constant there are not scaled."""
    center, spread = known.mean(0), known.std(0)
    scale = np.where(spread > 1e-12 * (1 + np.abs(center)), spread, 1.0)
    return (known - center) / scale, (pool - center) / scale


def _shrunken_covariance(residual: np.ndarray) -> np.ndarray:
    """Covariance of rows with mean zero, shrunken towards its mean variance. Shapes: ``(n, d) -> (d, d)``."""
    n, d = residual.shape
    sample = residual.T @ residual / n
    variance = np.trace(sample) / d
    if variance == 0:
        return np.eye(d)
    distance = (sample**2).sum() - d * variance**2
    noise = (((residual**2).sum(1) ** 2).mean() - (sample**2).sum()) / n
    share = float(np.clip(noise / distance, _MIN_SHRINKAGE, 1)) if distance > 0 else 1.0
    return (1 - share) * sample + share * variance * np.eye(d)


# ------------------------------------------------------------------------------------------------ checks
def check_rows(**arrays: np.ndarray) -> list[np.ndarray]:
    """Return named arrays ``(rows, features)`` as doubles if they are finite and fit each other, else raise."""
    checked = {name: np.asarray(rows, dtype=np.float64) for name, rows in arrays.items()}
    for name, rows in checked.items():
        if rows.ndim != 2 or not rows.size:
            raise ShapeError(f"{name} has shape {rows.shape}; expected (rows, features), at least one of each.")
        if not np.isfinite(rows).all():
            raise DataError(f"{name} holds {(~np.isfinite(rows)).sum()} values that are not finite; impute them first.")
    widths = {name: rows.shape[1] for name, rows in checked.items()}
    if len(set(widths.values())) > 1:
        shown = ", ".join(f"{name} {width}" for name, width in widths.items())
        raise ShapeError(f"the numbers of features differ ({shown}); give the same features in the same order.")
    return list(checked.values())


def _check_scores(score: np.ndarray, name: str) -> np.ndarray:
    score = np.asarray(score, dtype=np.float64)
    if score.ndim != 1:
        raise ShapeError(f"{name} has shape {score.shape}; expected one number per row.")
    if np.isnan(score).any():
        raise DataError(f"{np.isnan(score).sum()} of {len(score)} values of {name} are NaN; they cannot be ranked.")
    return score


def _check_weights(weight: np.ndarray, n: int) -> np.ndarray:
    weight = check_groups(np.asarray(weight, dtype=np.float64), n, "weight")
    if not (np.isfinite(weight) & (weight > 0)).all():
        raise DataError("weights must be positive and finite.")
    return weight


def _check_pool(score: np.ndarray, n: int) -> np.ndarray:
    score = _check_scores(score, "the novelty score")
    if len(score) != n:
        raise ShapeError(f"the novelty score returned {len(score)} numbers for {n} rows; it must return one per row.")
    return score


def check_groups(group: np.ndarray, n: int, name: str) -> np.ndarray:
    """Return `group` as an array if it holds one value for each of n rows, else raise."""
    group = np.asarray(group)
    if group.shape != (n,):
        raise ShapeError(f"{name} has shape {group.shape} for {n} rows; give one per row.")
    return group


def _check_fdr(fdr: float) -> float:
    if not 0 < fdr < 1:
        raise SettingError(f"fdr={fdr} must lie strictly between 0 and 1: the expected share of false novel calls.")
    return fdr
