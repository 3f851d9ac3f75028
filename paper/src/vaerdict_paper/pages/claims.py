"""Claims, their evidence, and verdicts whose error rate is controlled over a whole page."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from scipy import special

from vaerdict.core import SettingError
from vaerdict.report.records import Row
from vaerdict.report.tables import Pick, number
from vaerdict_paper.pages.seed_statistics import BySeed, Summary, difference, summarise, where

FEWEST_SEEDS = 3
"""With fewer seeds nothing is decided."""

ERROR_RATE = 0.05
"""The expected share of wrong verdicts among those of a page."""

RULE = (
    "A claim holds if each of its differences is shown to lie on the claimed side of zero, and does not hold if one is "
    "shown to lie on the other side. Differences are paired by seed and tested in both directions by t tests with "
    "n \N{MINUS SIGN} 1 degrees of freedom: a claim holds by the largest of its p-values, and does not hold by the "
    "smallest times their number. A difference that is the same in all seeds is tested by its signs. The procedure of "
    "Benjamini and Hochberg covers all claims of this run: of the "
    f"verdicts that a claim holds or does not hold, at most {ERROR_RATE:.0%} are expected to be wrong, if differences "
    "between seeds are normal and tests that depend on each other do so positively. What is shown neither way is not "
    "resolved, with intervals at the confidence at which a single one on the other side of zero would have refuted the "
    "claim. Fewer than three seeds, or a seed whose number is not finite, are too few to say anything."
)


ADDED = "Data sets were added after a first look at five, which the p-values do not account for."
"""For pages on which that was so."""


class ClaimVerdict(StrEnum):
    """What the rows say about a claim."""

    HOLDS = "holds"
    FAILS = "does not hold"
    UNRESOLVED = "not resolved"
    TOO_FEW = "too few seeds to say"
    NOT_RUN = "not run"


_VERBS = {
    ClaimVerdict.HOLDS: ("holds", "hold"),
    ClaimVerdict.FAILS: ("does not hold", "do not hold"),
    ClaimVerdict.UNRESOLVED: ("is not resolved", "are not resolved"),
    ClaimVerdict.TOO_FEW: ("has too few seeds to say", "have too few seeds to say"),
    ClaimVerdict.NOT_RUN: ("was not run", "were not run"),
}


@dataclass(frozen=True)
class Evidence:
    """A difference, and where the claim puts it.

    Parameters
    ----------
    what
        The difference in words.
    difference
        Its mean and spread; None if it was not run.
    sign
        The side of zero on which the claim puts it: +1 or -1, or 0 for within `margin` of zero.
    digits
        Digits in print.
    published
        The published value, if there is one.
    over
        What the standard error is taken over; if empty, the difference is exact.
    margin
        How far from zero counts as equal; fixed before the run. Only for the sign 0.
    """

    what: str
    difference: Summary | None
    sign: int
    digits: int = 3
    published: float | None = None
    over: str = "seeds"
    margin: float | None = None

    def __post_init__(self) -> None:
        if self.sign not in (-1, 0, 1) or (self.sign == 0) != (self.margin is not None):
            raise SettingError(f"sign={self.sign} with margin={self.margin}; use +1 or -1, or 0 with a margin.")

    @property
    def decidable(self) -> bool:
        """Whether it was run with enough seeds, all of which are finite, or is exact."""
        gap = self.difference
        return gap is not None and (not self.over or (gap.n >= FEWEST_SEEDS and not gap.missing))

    @property
    def p_values(self) -> tuple[float, float]:
        """One-sided p-values for the claimed side and for the opposite one; both 1 if nothing can be decided."""
        if not self.decidable:
            return 1.0, 1.0
        if self.margin is not None:  # two one-sided tests each way
            inside = max(self._p_above(-self.margin), self._p_below(self.margin))
            outside = 2 * min(self._p_above(self.margin), self._p_below(-self.margin))
            return inside, min(1.0, outside)
        above, below = self._p_above(0.0), self._p_below(0.0)
        return (above, below) if self.sign > 0 else (below, above)

    @property
    def p(self) -> float:
        """The p-value of either side."""
        return min(1.0, 2 * min(self.p_values))

    def _p_above(self, level: float) -> float:
        """The p-value for a true difference above `level`."""
        return self._tail(self._moments()[0] - level)

    def _p_below(self, level: float) -> float:
        """The p-value for a true difference below `level`."""
        return self._tail(level - self._moments()[0])

    def _tail(self, gap: float) -> float:
        """The probability of at least this gap if the true one is zero: by t, without any spread by the sign test."""
        _, scale, n = self._moments()
        if not self.over:
            return float(gap <= 0)
        if not scale:
            return 0.5**n if gap > 0 else 1.0
        return float(special.stdtr(n - 1, -gap / scale))

    def _moments(self) -> tuple[float, float, int]:
        assert self.difference is not None
        return self.difference.mean, self.difference.se or 0.0, self.difference.n

    def interval(self, coverage: float) -> tuple[float, float]:
        """The t interval of the difference."""
        mean, scale, n = self._moments()
        reach = scale * float(special.stdtrit(n - 1, (1 + coverage) / 2)) if scale else 0.0
        return mean - reach, mean + reach

    def described(self, coverage: float | None = None) -> str:
        """The difference with its standard error, and its interval of a coverage or else its p-value."""
        if self.difference is None:
            return f"{self.what}: not in this run"
        published = "" if self.published is None else number(self.published, self.digits, signed=True)
        asides = [
            f"margin {number(self.margin, self.digits)}" if self.margin is not None else "",
            f"published {published}" if published else "",
        ]
        aside = "".join(f"; {text}" for text in asides if text)
        return f"{self.what}: {number(self.difference.mean, self.digits, signed=True)} ({self._error(coverage)}{aside})"

    def _error(self, coverage: float | None) -> str:
        if not self.over:
            return "exact"
        _, scale, n = self._moments()
        if n == 1:
            return f"one {self.over.removesuffix('s')}"
        missing = self.difference.missing if self.difference is not None else 0
        error = f"se {number(scale, self.digits)}, {n} {self.over}{f', {missing} not finite' if missing else ''}"
        if not self.decidable:
            return error
        if coverage is None:
            return f"{error}, p {_p_text(self.p)}"
        if not scale:
            return f"{error}, the same in all"
        low, high = (number(end, self.digits, signed=True) for end in self.interval(coverage))
        return f"{error}, {100 * coverage:.3g}% interval {low} to {high}"


def _p_text(p: float) -> str:
    return "< 0.0001" if p < 1e-4 else f"= {p:.2g}"


@dataclass(frozen=True)
class Claim:
    """A sentence with all the evidence that it must pass. `judged` gives the verdict."""

    text: str
    evidence: Sequence[Evidence]
    note: str = ""

    @property
    def exact(self) -> bool:
        """Whether no evidence is random."""
        return all(not evidence.over for evidence in self.evidence)

    @property
    def p_values(self) -> tuple[float, float]:
        """One-sided p-values for the claim and against it.

        The claim needs all of its evidence (intersection-union test: the largest p-value). It is refuted by any, with
        Bonferroni's correction.
        """
        pairs = [evidence.p_values for evidence in self.evidence] or [(1.0, 1.0)]
        return max(p for p, _ in pairs), min(1.0, len(pairs) * min(q for _, q in pairs))

    @property
    def n_against(self) -> int:
        """How many pieces of evidence each refute the claim, with Bonferroni's correction."""
        return sum(len(self.evidence) * evidence.p_values[1] <= ERROR_RATE / 2 for evidence in self.evidence)


@dataclass(frozen=True)
class Judgement:
    """A claim with its verdict; a `vaerdict.report.document.Statement`.

    Parameters
    ----------
    claim
        The claim.
    p
        Its p-value, adjusted for all claims of the page.
    n_claims
        The number of these claims; exact ones are not counted.
    level
        The p-value below which a claim that is not resolved would have been.
    """

    claim: Claim
    p: float
    n_claims: int
    level: float

    @property
    def text(self) -> str:
        """The sentence."""
        return self.claim.text

    @property
    def verdict(self) -> ClaimVerdict:
        """Whether the claim is shown, refuted, or neither and why."""
        towards, against = self.claim.p_values
        if self.p <= ERROR_RATE:
            return ClaimVerdict.HOLDS if towards < against else ClaimVerdict.FAILS
        if not self.claim.evidence or any(evidence.difference is None for evidence in self.claim.evidence):
            return ClaimVerdict.NOT_RUN
        decidable = all(evidence.decidable for evidence in self.claim.evidence)
        return ClaimVerdict.UNRESOLVED if decidable else ClaimVerdict.TOO_FEW

    @property
    def tone(self) -> str:
        """How the verdict is shown."""
        return {ClaimVerdict.HOLDS: "good", ClaimVerdict.FAILS: "bad"}.get(self.verdict, "open")

    @property
    def lines(self) -> list[str]:
        """The evidence in sentences, the adjusted p-value, and the note."""
        unresolved = self.verdict is ClaimVerdict.UNRESOLVED
        coverage = 1 - self.level / len(self.claim.evidence) if unresolved else None
        lines = [evidence.described(coverage) for evidence in self.claim.evidence]
        if self.verdict is ClaimVerdict.FAILS and len(self.claim.evidence) > 1:
            lines.append(f"Refuted by {self.claim.n_against} of its {len(self.claim.evidence)} differences.")
        if not self.claim.exact and any(evidence.decidable for evidence in self.claim.evidence):
            lines.append(f"Adjusted for the {self.n_claims} claims of this run: p {_p_text(self.p)}.")
        return [*lines, self.claim.note] if self.claim.note else lines


def judged(*groups: Sequence[Claim]) -> tuple[list[Judgement], ...]:
    """The verdicts on all claims of a page, group by group.

    A page passes all of its claims at once. The procedure of Benjamini and Hochberg on p-values that count both
    directions controls the share of wrong verdicts, wrong directions included (Benjamini and Yekutieli, 2005). Claims
    without any decidable evidence are not counted, nor are exact ones, which cannot be wrong.
    """
    claims = [claim for group in groups for claim in group]
    tested = [i for i, claim in enumerate(claims) if not claim.exact and any(e.decidable for e in claim.evidence)]
    p = {i: min(1.0, 2 * min(claim.p_values)) for i, claim in enumerate(claims)}
    m, smallest = len(tested), 1.0
    for rank, i in reversed(list(enumerate(sorted(tested, key=lambda i: p[i]), 1))):
        smallest = p[i] = min(smallest, p[i] * m / rank)
    n_resolved = sum(p[i] <= ERROR_RATE for i in tested)
    level = ERROR_RATE * (n_resolved + 1) / max(m, n_resolved + 1)
    judgements = iter([Judgement(claim, p[i], m, level) for i, claim in enumerate(claims)])
    return tuple([next(judgements) for _ in group] for group in groups)


def tally(judgements: Sequence[Judgement]) -> str:
    """How many claims hold, do not hold and are not resolved, as text."""
    counts = Counter(judgement.verdict for judgement in judgements)
    parts = [f"{counts[verdict]} {verbs[counts[verdict] != 1]}" for verdict, verbs in _VERBS.items() if counts[verdict]]
    return " and ".join([", ".join(parts[:-1]), parts[-1]] if len(parts) > 1 else parts) or "none could be examined"


# ----------------------------------------------------------------------------------- comparisons paired by seed
Scores = Mapping[str, BySeed]
"""A score by name, then by seed."""


def paired_evidence(
    what: str,
    scores: Scores,
    a: str,
    b: str,
    sign: int,
    digits: int = 3,
    levels: Mapping[str, float] | None = None,
) -> Evidence:
    """The difference a - b of two scores paired by seed as evidence, with that of the published `levels`."""
    levels = levels or {}
    published = levels[a] - levels[b] if a in levels and b in levels else None
    gap = difference(scores.get(a, {}), scores.get(b, {}))
    return Evidence(f"{what}, {a} minus {b}", gap, sign, digits, published)


def rival_evidence(
    what: str, by_model: Mapping[str, Scores], name: str, rivals: Sequence[str], sign: int, digits: int = 3
) -> list[Evidence]:
    """One difference of `name` from each rival other than itself, averaged over models within each seed.

    `by_model` has the scores of the proposals on each fixed model; only models with both are compared.
    """
    return [
        Evidence(f"{what}, {name} minus {rival}", summarise(_mean_gap(by_model, name, rival)), sign, digits)
        for rival in rivals
        if rival != name
    ]


def _mean_gap(by_model: Mapping[str, Scores], a: str, b: str) -> list[float]:
    """a - b averaged over the models that have both, in every seed that these share."""
    pairs = [(scores[a], scores[b]) for scores in by_model.values() if scores.get(a) and scores.get(b)]
    seeds = set.intersection(*({*x} & {*y} for x, y in pairs)) if pairs else set()
    return [sum(x[seed] - y[seed] for x, y in pairs) / len(pairs) for seed in sorted(seeds)]


def best_of(scores: Scores, pick: Pick = min) -> str | None:
    """The name with the best mean over seeds; `pick` is `min` or `max`."""
    means = {name: mean.mean for name, values in scores.items() if (mean := summarise(values.values()))}
    return pick(means, key=means.__getitem__, default=None)


def selected_models(rows: Sequence[Row], key: str) -> dict[Any, str]:
    """The model of highest `key` in each seed."""
    rows = [row for row in rows if row.get(key) is not None and math.isfinite(row[key])]
    seeds = dict.fromkeys(row["seed"] for row in rows)
    return {seed: max(where(rows, seed=seed), key=lambda row: row[key])["model"] for seed in seeds}


def selection_counts(selected: Mapping[Any, str]) -> str:
    """How often each model was selected: ``IWAE 4 times, WW once``."""
    counts = Counter(selected.values()).most_common()
    return ", ".join(f"{name} {n} times" if n > 1 else f"{name} once" for name, n in counts)
