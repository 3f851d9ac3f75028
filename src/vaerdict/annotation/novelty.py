"""Which query cells are of no known type: conformal units, and the test that permits to state a rate."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy import stats

from vaerdict.core import Progress
from vaerdict.selective import (
    ConformalUnits,
    Exchangeability,
    conformal_p_values,
    exchangeability,
    fewest_novel,
    q_values,
)

_MOSTLY = 0.5  # share of a type's query cells that are called: more, and the whole type counts as different
_AUDIT_CELLS = 3000  # reference cells of the audit
_AUDIT_TYPE = 60  # of each type at least, where there are so many
_AUDIT_REPEATS = 2
_ROUNDING = 1e-9
_SAME_SHARES = 0.01  # p-value above which types count as equally frequent in query and calibration


@dataclass(frozen=True, eq=False)
class Novelty:
    """What was found of the cells of one batch of the query.

    ``weighted`` says whether types are so differently frequent in query and calibration that calibration cells were
    weighted by the ratio of their shares. ``promised`` says whether the rate is stated; p, q and calls are NaN and
    False where it is not, and ``score`` is then that of units after the known types were moved onto the query.
    Calibration cells of the query are not judged: their numbers are NaN too.

    Shapes: ``score, p, q, novel, unit, predicted (cells,)``.
    """

    score: np.ndarray
    p: np.ndarray
    q: np.ndarray
    novel: np.ndarray
    unit: np.ndarray
    predicted: np.ndarray
    gate: Exchangeability
    n_calibration: int
    n_judged: int
    fewest: int
    weighted: bool

    @property
    def promised(self) -> bool:
        """Whether calibration and query cells passed the test of exchangeability."""
        return self.gate.passed

    @property
    def callable(self) -> bool:
        """Whether there are as many cells as a call needs; calibration cells of the query do not count."""
        return self.fewest <= self.n_judged


def at_most(q: Any, fdr: float) -> Any:
    """Where q-values are at most a rate, up to rounding; False where NaN. Shapes: ``(n,) -> (n,)``."""
    return q <= fdr * (1 + _ROUNDING)


def find_novel_cells(
    reference: np.ndarray,
    types: np.ndarray,
    query: np.ndarray,
    *,
    calibration: np.ndarray | None = None,
    fdr: float,
    level: float,
    seed: int,
) -> Novelty:
    """Judge the query cells of a batch by reference cells, or by those of its own cells whose type is known.

    Half of the reference cells of each type, drawn at random, say what is known; the others calibrate. With
    `calibration`, all reference cells say what is known and the marked query cells calibrate.

    Parameters
    ----------
    reference, query
        Features of both, ``(n, d)`` and ``(m, d)``.
    types
        Types of the reference cells, ``(n,)``.
    calibration
        Which query cells have a known type, ``(m,)`` bool.
    fdr
        Largest expected share of false calls.
    level
        Level of the test of exchangeability.
    seed
        Seed of everything random.
    """
    rng = np.random.default_rng(seed)
    judged = np.ones(len(query), dtype=bool) if calibration is None else ~calibration
    if calibration is None:
        half = _half(types, rng)
        known, known_types, calibrating = reference[half], types[half], reference[~half]
    else:
        known, known_types, calibrating = reference, types, query[calibration]
    align, n = calibration is not None, len(calibrating)
    order = rng.permutation(n + int(judged.sum()))
    place = np.argsort(order)
    pool = np.concatenate([calibrating, query[judged]])
    units = ConformalUnits(align=align, seed=seed).judge(known, known_types, pool[order])
    score, unit, predicted = units.score[place], units.unit[place], units.predicted[place]
    p, weighted, n_effective = conformal_p_values(score[:n], score[n:]), False, float(n)
    called = _called(score, q_values(p), n, fdr)
    weight = _weights(predicted, called, n)
    if weight is not None:
        p, weighted = conformal_p_values(score[:n], score[n:], calibration_weight=weight[:n], weight=weight[n:]), True
        n_effective = float(weight[:n].sum() / weight[n:].min())  # the smallest p-value is 1 / (1 + this)
    q = q_values(p)
    called = _called(score, q, n, fdr)
    gate = _gate(pool, predicted, called, n, level, seed)
    if not gate.passed:
        if not align:
            units = ConformalUnits(align=True, seed=seed).judge(reference, types, query)
            score, unit, predicted, n = units.score, units.unit, units.predicted, 0
        p, q = np.full(len(p), np.nan), np.full(len(p), np.nan)

    def spread(values: np.ndarray, missing: Any) -> np.ndarray:
        out = np.full(len(query), missing, dtype=values.dtype)
        out[judged] = values
        return out

    return Novelty(
        score=spread(score[n:], np.nan),
        p=spread(p, np.nan),
        q=spread(q, np.nan),
        novel=spread(at_most(q, fdr), False),
        unit=spread(unit[n:], -1),
        predicted=spread(predicted[n:].astype(object), None),
        gate=gate,
        n_calibration=len(calibrating),
        n_judged=int(judged.sum()),
        fewest=fewest_novel(int(judged.sum()), n_effective, fdr),
        weighted=weighted,
    )


def _weights(predicted: np.ndarray, called: np.ndarray, n: int) -> np.ndarray | None:
    """Ratio of the shares of predicted types in query and calibration; None where they do not differ clearly.

    Cells that look novel are left out. Shapes: ``(pool,), (pool,) -> (pool,)``.
    """
    names, code = np.unique(predicted, return_inverse=True)
    from_query = np.arange(len(predicted)) >= n
    sides = (code[rows & ~called] for rows in (~from_query, from_query))
    count = 0.5 + np.stack([np.bincount(side, minlength=len(names)) for side in sides])
    expected = count.sum(1, keepdims=True) * count.sum(0) / count.sum()
    chi_square = ((count - expected) ** 2 / expected).sum()
    if len(names) < 2 or stats.chi2.sf(chi_square, len(names) - 1) > _SAME_SHARES:
        return None
    share = count / count.sum(1, keepdims=True)
    return (share[1] / share[0])[code]


def _half(types: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Half of the cells of each type, at random, the odd one in or out by chance. Shapes: ``(n,) -> (n,)`` bool."""
    chosen = np.zeros(len(types), dtype=bool)
    for name in np.unique(types):
        rows = rng.permutation(np.flatnonzero(types == name))
        chosen[rows[: (len(rows) + int(rng.integers(2))) // 2]] = True
    return chosen


def _called(score: np.ndarray, q: np.ndarray, n: int, fdr: float) -> np.ndarray:
    """Cells of the pool that look as novel as a query cell that is called. Shapes: ``(pool,), (query,) -> (pool,)``."""
    novel = at_most(q, fdr)
    return score >= (score[n:][novel].min() if novel.any() else np.inf)


def _gate(
    pool: np.ndarray, predicted: np.ndarray, called: np.ndarray, n: int, level: float, seed: int
) -> Exchangeability:
    """Compare calibration with query cells within predicted types.

    Cells that are called novel differ, and rightly so. They are left out of their predicted type, unless they are most
    of its query cells: then the type counts as different.
    """
    from_query = np.arange(len(pool)) >= n
    kept = ~called
    for name in np.unique(predicted):
        rows = predicted == name
        if called[rows & from_query].mean() > _MOSTLY if (rows & from_query).any() else False:
            kept |= rows
    left, right = kept & ~from_query, kept & from_query
    if not left.any() or not right.any():
        return Exchangeability(np.nan, np.nan, level, ())
    return exchangeability(
        pool[left], pool[right], predicted[left], predicted[right], level=level, novel_groups=0, seed=seed
    )


# --------------------------------------------------------------------------------------------------------- audit
def audit_types(
    reference: np.ndarray, types: np.ndarray, *, fdr: float, seed: int, progress: Progress
) -> list[dict[str, Any]]:
    """Would a type have been found had it been absent? Every type is left out of the reference in turn.

    The other reference cells are cut into three: known, calibration and query, to which all cells of the type are
    added. ``found`` is the share of them that is called at `fdr`, ``false`` the share of false calls, ``fewest`` the
    smallest number of cells that could have been called. Shapes: ``(n, d), (n,)``.
    """
    rng = np.random.default_rng([seed, 1])
    rows = _sampled(types, rng)
    reference, types = reference[rows], types[rows]
    names, records = np.unique(types), []
    for number, name in enumerate(names):
        others, absent = rng.permutation(np.flatnonzero(types != name)), np.flatnonzero(types == name)
        known, calibrating, rest = np.array_split(others, 3)
        pool = np.concatenate([calibrating, rest, absent])
        order = rng.permutation(len(pool))
        score = np.empty(len(pool))
        score[order] = ConformalUnits(repeats=_AUDIT_REPEATS, seed=seed)(
            reference[known], types[known], reference[pool[order]]
        )
        n = len(calibrating)
        novel = at_most(q_values(conformal_p_values(score[:n], score[n:])), fdr)
        n_true = int(novel[len(rest) :].sum())
        records.append(
            {
                "type": str(name),
                "n_cells": len(absent),
                "found": n_true / len(absent),
                "false": float(novel.sum() - n_true) / max(1, int(novel.sum())),
                "fewest": fewest_novel(len(novel), n, fdr),
            }
        )
        progress(number + 1, len(names), "types left out")
    return records


def _sampled(types: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Rows for the audit: all, or a random part with enough of every type. Shapes: ``(n,) -> (k,)``."""
    if len(types) <= _AUDIT_CELLS:
        return np.arange(len(types))
    order = rng.permutation(len(types))
    enough = [order[types[order] == name][:_AUDIT_TYPE] for name in np.unique(types)]
    return np.unique(np.concatenate([order[:_AUDIT_CELLS], *enough]))
