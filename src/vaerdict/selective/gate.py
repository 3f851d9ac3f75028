r"""Whether query rows are exchangeable with reference rows of the same predicted class: a permutation test.

Conformal rates (`vaerdict.selective.find_novel`) hold only if calibration rows and the known rows of the query are
exchangeable. A shift between laboratories, donors or conditions moves rows of every class, and a classifier can then
tell reference from query within classes. Novel rows change the few classes they are mistaken for, and a different
composition changes none. Hence the half of the classes that differ most does not count.
"""

from __future__ import annotations

from itertools import combinations
from typing import Any, NamedTuple

import numpy as np

from vaerdict.core import SettingError, check_count
from vaerdict.selective.novelty import check_groups, check_rows

MIN_ROWS = 10
"""Smallest number of rows on both sides of a group that takes part in the test."""

_MAX_ROWS = 500  # rows on each side of a group that are used
_FOLDS = 5
_RIDGE = 0.3  # penalty per row, in units of the variance of a standardised feature


class GroupAuroc(NamedTuple):
    """Cross-validated AUROC of query against reference rows of one group; NaN where the group is too small."""

    group: Any
    n_reference: int
    n_query: int
    auroc: float


class Exchangeability(NamedTuple):
    """Result of `exchangeability`: the p-value, the median AUROC over groups, and the AUROC of each group.

    ``p_value`` and ``median_auroc`` are NaN where no group is large enough.
    """

    p_value: float
    median_auroc: float
    level: float
    groups: tuple[GroupAuroc, ...]

    @property
    def passed(self) -> bool:
        """Whether the test was possible and found no difference at ``level``."""
        return self.p_value > self.level

    @property
    def left_out(self) -> tuple[GroupAuroc, ...]:
        """The groups with fewer than ten rows on either side."""
        return tuple(g for g in self.groups if np.isnan(g.auroc))

    @property
    def message(self) -> str:
        """The verdict with its numbers, the groups that differ most and those left out."""
        tested = sorted((g for g in self.groups if not np.isnan(g.auroc)), key=lambda g: -g.auroc)
        small = ", ".join(f"{g.group} ({g.n_reference} and {g.n_query})" for g in self.left_out)
        if not tested:
            return f"not tested: no group has {MIN_ROWS} rows in both reference and query ({small})."
        numbers = f"median AUROC {self.median_auroc:.2f} over {len(tested)} groups, p = {self.p_value:.2g}"
        largest = ", ".join(f"{g.group} {g.auroc:.2f}" for g in tested[:3])
        verdict = "no difference found" if self.passed else "reference and query differ within groups"
        left_out = f" Too small, left out (rows of reference and query): {small}." if small else ""
        return f"{verdict} ({numbers}; largest: {largest}).{left_out}"


def exchangeability(
    reference: np.ndarray,
    query: np.ndarray,
    reference_group: np.ndarray,
    query_group: np.ndarray,
    *,
    level: float = 0.05,
    n_permutations: int = 999,
    novel_groups: int = 1,
    seed: int = 0,
) -> Exchangeability:
    """Test whether reference and query rows are exchangeable within groups.

    In each group a ridge discriminant of the features and their squares tells query from reference rows, and is
    measured by its AUROC within five folds of cross-validation, standardised by random permutations of the marks within
    the group. The statistic is the mean over the half of the groups in which it is smallest. Permutations give its
    p-value.

    If the rows of each group are exchangeable, in all groups but `novel_groups` of them, the test fails with
    probability at most `level`. In the others the rows may differ in any way, as they do where rows of a novel class
    are mistaken for a known one; at most half of the groups count as such. Shares of groups may differ between
    reference and query. A test that passes does not prove exchangeability: small groups show large shifts only.

    Parameters
    ----------
    reference
        Rows of known classes on which the rule that gives the groups was not fitted, ``(n_reference, features)``.
    query
        Rows that may be novel, ``(n_query, features)``.
    reference_group, query_group
        Groups given by one rule to both, usually the predicted class, ``(n_reference,)`` and ``(n_query,)``. Groups
        with fewer than 10 rows on either side are left out; at most 500 rows, drawn at random, are used on each side.
    level
        Largest probability of failing where the rows are exchangeable.
    n_permutations
        Number of permutations.
    novel_groups
        Number of groups in which rows may differ.
    seed
        Seed of folds, permutations and rows drawn.

    Returns
    -------
    Exchangeability
        Whether the test passed, with its numbers for each group. It has not passed if no group is large enough.

    Examples
    --------
    >>> rng = np.random.default_rng(0)
    >>> rows, group = rng.normal(size=(400, 3)), np.tile(["a", "b"], 200)
    >>> exchangeability(rows[:200], rows[200:], group[:200], group[200:]).passed
    True
    >>> exchangeability(rows[:200], rows[200:] + 1, group[:200], group[200:]).passed
    False
    """
    if not 1 / (check_count(n_permutations, name="n_permutations") + 1) <= level < 1:
        raise SettingError(
            f"level={level} must lie in [1 / (n_permutations + 1), 1), here [{1 / (n_permutations + 1):.2g}, 1)."
        )
    if novel_groups < 0:
        raise SettingError(f"novel_groups={novel_groups} must not be negative.")
    reference, query = check_rows(reference=reference, query=query)
    reference_group = check_groups(reference_group, len(reference), "reference_group")
    query_group = check_groups(query_group, len(query), "query_group")
    rng = np.random.default_rng(seed)
    groups, aurocs = [], []
    for name in np.union1d(reference_group, query_group):
        sides = reference[reference_group == name], query[query_group == name]
        sizes = len(sides[0]), len(sides[1])
        if min(sizes) >= MIN_ROWS:
            aurocs.append(_permuted_aurocs(*sides, n_permutations, rng))
        groups.append(GroupAuroc(name, *sizes, float(aurocs[-1][0]) if min(sizes) >= MIN_ROWS else np.nan))
    if not aurocs:
        return Exchangeability(np.nan, np.nan, level, tuple(groups))
    permuted = np.stack(aurocs, 1)
    return Exchangeability(_p_value(permuted, novel_groups), float(np.median(permuted[0])), level, tuple(groups))


def _permuted_aurocs(reference: np.ndarray, query: np.ndarray, n: int, rng: np.random.Generator) -> np.ndarray:
    """AUROC of the given marks and of n permutations of them. Shapes: ``-> (n + 1,)``.

    Folds and marks are drawn without regard to each other, so that the given marks are one permutation of many.
    Predictions are linear in the marks: one matrix per fold serves all permutations.
    """
    sides = [rng.permutation(rows)[:_MAX_ROWS] for rows in (reference, query)]
    order = rng.permutation(len(sides[0]) + len(sides[1]))
    features = _features(np.concatenate(sides)[order])
    mark = np.repeat([0.0, 1.0], [len(rows) for rows in sides])[order]
    marks = np.stack([mark, *(rng.permutation(mark) for _ in range(n))], 1)
    n_above, n_pairs = np.zeros(n + 1), np.zeros(n + 1)
    fold = np.arange(len(mark)) % _FOLDS
    for f in range(_FOLDS):
        test = fold == f
        prediction = _ridge(features[~test], features[test], marks[~test])
        ranked = np.take_along_axis(marks[test], prediction.argsort(0), 0)
        n_query = ranked.sum(0)
        n_above += ((np.arange(len(ranked)) + 1) @ ranked) - n_query * (n_query + 1) / 2
        n_pairs += n_query * (len(ranked) - n_query)
    return np.where(n_pairs > 0, n_above / np.maximum(n_pairs, 1), 0.5)


def _features(rows: np.ndarray) -> np.ndarray:
    """Standardised features and their standardised squares, zero where constant. Shapes: ``(n, d) -> (n, 2d)``."""

    def standardised(x: np.ndarray) -> np.ndarray:
        center, spread = x.mean(0), x.std(0)
        return (x - center) / np.where(spread > 1e-12 * (1 + np.abs(center)), spread, np.inf)

    linear = standardised(rows)
    return np.concatenate([linear, standardised(linear**2)], 1)


def _ridge(train: np.ndarray, test: np.ndarray, target: np.ndarray) -> np.ndarray:
    """Predictions of ridge regressions. Shapes: ``(n, d), (m, d), (n, targets) -> (m, targets)``."""
    n, d = train.shape
    target = target - target.mean(0)
    if d <= n:
        return test @ np.linalg.solve(train.T @ train + _RIDGE * n * np.eye(d), train.T @ target)
    return test @ train.T @ np.linalg.solve(train @ train.T + _RIDGE * n * np.eye(n), target)


def _p_value(auroc: np.ndarray, novel_groups: int) -> float:
    """P-value of the first row, the others being permutations. Shapes: ``(n + 1, groups)``.

    A group whose rows differ adds at most a value above all others. The permutations are therefore compared with such
    a value in place of that group; which group it is, is not known, so the largest p-value counts.
    """
    spread, n_groups = auroc.std(0), auroc.shape[1]
    standardised, lower = (auroc - auroc.mean(0)) / np.where(spread > 0, spread, 1), (n_groups + 1) // 2
    statistic = np.sort(standardised[0])[:lower].mean()
    n_remaining = n_groups - min(novel_groups, n_groups // 2)
    p_values = []
    for remaining in combinations(range(n_groups), n_remaining):
        permuted = np.sort(standardised[1:, remaining], 1)[:, :lower].mean(1)
        p_values.append((1 + (permuted >= statistic - 1e-12).sum()) / len(auroc))
    return float(max(p_values))
