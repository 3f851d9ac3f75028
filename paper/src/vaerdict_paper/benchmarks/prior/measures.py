r"""Calls judged by the truth: exactly, or by cells that were not compared.

Other cells tell a gene's fold change with an error. A call is *surely false* ("hard") where their 90 % interval, by the
counts alone and without shrinkage, lies within (-delta, delta) or on the other side of zero. The *expected* share of
false calls ("soft") averages the probability, by the shrunken posterior of these cells, that the fold change is not
beyond delta on the side called. The first is at most the share of false calls, up to the error of the intervals; the
second is above it where the truth is uncertain.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

LEVEL = 0.05
LOOSER = (0.05, 0.075, 0.1, 0.15, 0.2, 0.25, 0.3, 0.4, 0.5)
"""Levels at which genes are called by the counts alone."""

Z = 1.6449  # of a 90 % interval


class Truth(NamedTuple):
    """What other cells tell: fold changes with 90 % intervals, and probabilities beyond delta. Shapes: ``(genes,)``.

    NaN for genes that they do not show.
    """

    lfc: np.ndarray
    low: np.ndarray
    high: np.ndarray
    up: np.ndarray
    down: np.ndarray

    @property
    def error(self) -> np.ndarray:
        """Shapes: ``-> (genes,)``."""
        return (self.high - self.low) / (2 * Z)

    def changed(self, delta: float) -> np.ndarray:
        """The genes whose interval is beyond delta. Shapes: ``-> (genes,)`` bool."""
        return (self.low >= delta) | (self.high <= -delta)

    def take(self, genes: np.ndarray) -> Truth:
        """That of some genes."""
        return Truth(*(part[genes] for part in self))

    @classmethod
    def exactly(cls, lfc: np.ndarray, delta: float) -> Truth:
        """A truth without error."""
        return cls(lfc, lfc, lfc, (lfc >= delta).astype(float), (lfc <= -delta).astype(float))


class Answer(NamedTuple):
    """The answer of a method about some genes: calls, directions, q-values, and a ranking by evidence.

    Intervals are None where a method has none. Shapes: ``order (genes,)`` indices, others ``(genes,)``.
    """

    genes: np.ndarray
    called: np.ndarray
    lfc: np.ndarray
    q: np.ndarray
    order: np.ndarray
    interval: tuple[np.ndarray, np.ndarray] | None = None

    def take(self, kept: np.ndarray) -> Answer:
        """That of the genes of a mask. Shapes: ``kept (genes,)`` bool."""
        number = np.cumsum(kept) - 1
        interval = None if self.interval is None else (self.interval[0][kept], self.interval[1][kept])
        order = number[self.order[kept[self.order]]]
        return Answer(self.genes[kept], self.called[kept], self.lfc[kept], self.q[kept], order, interval)


def judged(answer: Answer, truth: Truth, delta: float) -> dict[str, Any]:
    """Every measure of the genes whose truth is told.

    ``fdp_hard`` and ``fdp_soft`` are shares of false calls, ``tpr`` the share of changed genes called on their side,
    ``tpr_matched`` that in the longest beginning of the ranking with a hard share of at most 5 %, ``auprc`` average
    precision over genes that are changed or surely false, and ``coverage`` that of the 90 % intervals.
    """
    answer = answer.take(np.isfinite(truth.lfc[answer.genes]))
    truth = truth.take(answer.genes)
    hit, false, expected = _verdicts(answer, truth, delta)
    n_true = int(truth.changed(delta).sum())
    row = {"n_genes": len(hit), "n_true": n_true, **_called(answer.called, hit, false, expected, n_true)}
    hits, wrong = hit[answer.order].cumsum(), false[answer.order].cumsum()
    longest = np.flatnonzero(wrong <= LEVEL * np.arange(1, len(hit) + 1))
    precision = hits / np.maximum(hits + wrong, 1)
    row["tpr_matched"] = hits[longest[-1]] / n_true if n_true and len(longest) else 0.0 if n_true else None
    row["auprc"] = (precision * hit[answer.order]).sum() / n_true if n_true else None
    return row if answer.interval is None else {**row, "coverage": _coverage(answer, truth)}


def at_looser_levels(answer: Answer, truth: Truth, delta: float) -> list[dict[str, Any]]:
    """The measures of the genes whose q-value is at most each of `LOOSER`."""
    answer = answer.take(np.isfinite(truth.lfc[answer.genes]))
    truth = truth.take(answer.genes)
    verdicts, n_true = _verdicts(answer, truth, delta), int(truth.changed(delta).sum())
    return [{"level": level, **_called(answer.q <= level, *verdicts, n_true)} for level in LOOSER]


def _verdicts(answer: Answer, truth: Truth, delta: float) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Of a call of each gene: whether it is a hit, whether it is surely false, and its probability of being false."""
    up = answer.lfc > 0
    opposite = np.where(up, truth.high < 0, truth.low > 0)
    false = ((truth.low > -delta) & (truth.high < delta)) | opposite
    hit = truth.changed(delta) & np.where(up, truth.lfc > 0, truth.lfc < 0)
    return hit, false, 1 - np.where(up, truth.up, truth.down)


def _called(
    called: np.ndarray, hit: np.ndarray, false: np.ndarray, expected: np.ndarray, n_true: int
) -> dict[str, Any]:
    n = int(called.sum())
    return {
        "n_called": n,
        "fdp_hard": int((called & false).sum()) / max(n, 1),
        "fdp_soft": float(expected[called].sum()) / max(n, 1),
        "tpr": int((called & hit).sum()) / n_true if n_true else None,
    }


def _coverage(answer: Answer, truth: Truth) -> float:
    """Share of the truths within the intervals, which are widened by the error of the truth."""
    assert answer.interval is not None
    low, high = answer.interval
    middle, error = 0.5 * (low + high), Z * truth.error
    below, above = (np.hypot(middle - low, error), np.hypot(high - middle, error))
    return float(((middle - below <= truth.lfc) & (truth.lfc <= middle + above)).mean())
