r"""Conformal units: rows are judged by the company they keep.

Known rows and pool (calibration and query, mixed) are clustered together. A cluster, called a unit, in which pool rows
outnumber known rows more than they usually do is not explained by the known classes. The score of a row is

.. math:: s = \frac1B \sum_{b=1}^B \Bigl[\log\frac{m_{u_b} + 1}{n_{u_b} + N/M} - \log\frac MN - r_{c(u_b)}\Bigr]

over B clusterings, with :math:`m_u` of M pool rows and :math:`n_u` of N known rows in its unit u: an estimate of a log
density ratio, as in AdaDetect, by counting. :math:`r_c` is the median of the log ratios around known rows of class c
and c(u) the class predicted for most rows of u, so that a class that is more frequent in the query than among the known
rows is not novel for that. Averaging over clusterings resolves ties within a unit.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from vaerdict.core import SettingError, check_count
from vaerdict.optional import isolated, require
from vaerdict.selective.novelty import class_distances

MAX_UNITS = 1000
"""Largest number of units of a clustering; with more rows units grow."""

_FIT_ROWS = 20_000  # rows on which centres of units are fitted
_ITERATIONS = 30
_ALIGNMENTS = 5  # rounds of predicting classes and estimating shifts
_COMMON_ROWS = 20  # rows that the common shift is worth against that of a class


class Units(NamedTuple):
    """Scores of pool rows, the units of known and pool rows in one of the clusterings, and predicted classes.

    Shapes: ``score (n_pool,)``; ``known_unit, predicted_known (n_known,)``; ``unit, predicted (n_pool,)``.
    """

    score: np.ndarray
    unit: np.ndarray
    known_unit: np.ndarray
    predicted: np.ndarray
    predicted_known: np.ndarray


@dataclass(frozen=True)
class ConformalUnits:
    """Novelty score of rows by the log ratio of pool to known rows in their clusters.

    `sizes` are mean numbers of rows per unit; every size is used in `repeats` clusterings by k-means (extra `sklearn`).
    With `align` the known rows of each class are first moved onto the pool rows predicted to be of that class, for
    known rows that were measured differently: the shift of a class is a difference of medians, shrunken towards the
    median shift of all classes.
    """

    sizes: tuple[int, ...] = (15, 30, 60)
    repeats: int = 4
    align: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        check_count(self.repeats, name="repeats")
        if not self.sizes or min(self.sizes) < 2:
            raise SettingError(f"sizes={self.sizes} of units must be at least 2 rows each.")

    def __call__(self, known: np.ndarray, classes: np.ndarray, pool: np.ndarray, /) -> np.ndarray:
        """Shapes: ``(n_known, d), (n_known,), (n_pool, d) -> (n_pool,)``."""
        return self.judge(known, classes, pool).score

    def judge(self, known: np.ndarray, classes: np.ndarray, pool: np.ndarray) -> Units:
        """Scores with the units they are from. Shapes: as for the score."""
        names, code = np.unique(classes, return_inverse=True)
        known = _aligned(known, code, pool) if self.align else known
        rows, n_known = np.concatenate([known, pool]), len(known)
        predicted = class_distances(known, code, rows).argmin(1)
        score, shown = np.zeros(len(pool)), np.zeros(len(rows), dtype=int)
        for size in self.sizes:
            n_units = min(len(rows) // size, MAX_UNITS * min(self.sizes) // size)
            for repeat in range(self.repeats):
                unit = _clustered(rows, max(2, n_units), seed=(1000 * self.seed + repeat) % 2**32)
                score += _log_ratio(unit, predicted, n_known, len(names))[unit[n_known:]]
                if size == self.sizes[len(self.sizes) // 2] and repeat == 0:
                    shown = unit
        return Units(
            score / (len(self.sizes) * self.repeats),
            shown[n_known:],
            shown[:n_known],
            names[predicted[n_known:]],
            names[predicted[:n_known]],
        )


def _log_ratio(unit: np.ndarray, predicted: np.ndarray, n_known: int, n_classes: int) -> np.ndarray:
    """Log ratio of pool to known rows in every unit, less what is usual in its class. Shapes: ``-> (units,)``."""
    n_units, share = int(unit.max()) + 1, (len(unit) - n_known) / n_known
    from_known, from_pool = (np.bincount(part, minlength=n_units) for part in np.split(unit, [n_known]))
    ratio = np.log((from_pool + 1) / (from_known + 1 / share)) - np.log(share)
    votes = np.zeros((n_units, n_classes))
    np.add.at(votes, (unit, predicted), 1)
    around_known, of_known = ratio[unit[:n_known]], predicted[:n_known]
    usual = [np.median(around_known[of_known == c]) if (of_known == c).any() else 0.0 for c in range(n_classes)]
    return ratio - np.array(usual)[votes.argmax(1)]


def _clustered(rows: np.ndarray, n_units: int, seed: int) -> np.ndarray:
    """The unit of each row by k-means, fitted on a random part where rows are many. Shapes: ``(n, d) -> (n,)``."""
    cluster, rng = require("sklearn.cluster", "sklearn"), np.random.default_rng(seed)
    fitted_on = rows if len(rows) <= _FIT_ROWS else rows[rng.permutation(len(rows))[:_FIT_ROWS]]
    with isolated(0):  # too few distinct rows are a warning there, and harmless here
        means = cluster.KMeans(n_units, n_init=1, max_iter=_ITERATIONS, random_state=seed).fit(fitted_on)
        return means.labels_.astype(int) if fitted_on is rows else means.predict(rows).astype(int)


def _aligned(known: np.ndarray, code: np.ndarray, pool: np.ndarray) -> np.ndarray:
    """Known rows moved onto the pool, class by class. Shapes: ``(n, d), (n,), (m, d) -> (n, d)``.

    Of the rows predicted to be of a class the nearer half counts, so that it is not moved onto a novel one.
    """
    center = np.stack([np.median(known[code == c], 0) for c in range(code.max() + 1)])
    shift = np.zeros_like(center)
    for step in range(_ALIGNMENTS):
        distance = class_distances(known + shift[code], code, pool)
        predicted, nearest = distance.argmin(1), distance.min(1)
        found, n = center + shift, np.zeros((len(center), 1))
        for c in np.unique(predicted):
            rows = predicted == c
            inner = rows & (nearest <= np.median(nearest[rows]))
            found[c], n[c] = np.median(pool[inner], 0), inner.sum()
        common = np.median((found - center)[n[:, 0] > 0], 0)
        shift = (n * (found - center) + _COMMON_ROWS * common) / (n + _COMMON_ROWS) if step else common + 0 * center
    return known + shift[code]
