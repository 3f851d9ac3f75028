"""Claims and their evidence: a two-standard-error rule over seeds, and comparisons paired by seed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from vaerdict.report.records import Row
from vaerdict.report.tables import Pick, number
from vaerdict_paper.pages.seed_statistics import BySeed, Summary, difference, summarise, where

FEWEST_SEEDS = 3
"""With fewer seeds a standard error is meaningless."""

RULE = (
    "A claim holds when its difference lies more than two standard errors over seeds on the claimed side of zero, does "
    "not hold when it lies as far on the other side, and is otherwise not resolved; fewer than three seeds resolve "
    "nothing. Differences are paired by seed; on pPCA every seed has its own data set. With five seeds, a true "
    "difference of zero is resolved one way or the other about one time in nine."
)
FAVOURED = "The rival is the best on the average of these seeds, which favours it a little."


class ClaimVerdict(StrEnum):
    """What the rows say about a claim."""

    HOLDS = "holds"
    FAILS = "does not hold"
    UNRESOLVED = "not resolved"
    NOT_RUN = "not run"


_VERBS = {
    ClaimVerdict.HOLDS: ("holds", "hold"),
    ClaimVerdict.FAILS: ("does not hold", "do not hold"),
    ClaimVerdict.UNRESOLVED: ("is not resolved", "are not resolved"),
    ClaimVerdict.NOT_RUN: ("was not run", "were not run"),
}


@dataclass(frozen=True)
class Evidence:
    """A difference, the side of zero on which the claim puts it, and the published value if there is one.

    `over` names what the standard error is taken over; if empty, the difference is exact.
    """

    what: str
    difference: Summary | None
    sign: int
    digits: int = 3
    published: float | None = None
    over: str = "seeds"

    @property
    def verdict(self) -> ClaimVerdict:
        """The two-standard-error rule."""
        if self.difference is None:
            return ClaimVerdict.NOT_RUN
        towards, se = self.sign * self.difference.mean, self.difference.se if self.over else 0.0
        if se is None or (self.over and self.difference.n < FEWEST_SEEDS):
            return ClaimVerdict.UNRESOLVED
        if towards > 2 * se:
            return ClaimVerdict.HOLDS
        return ClaimVerdict.FAILS if towards < -2 * se else ClaimVerdict.UNRESOLVED

    @property
    def sentence(self) -> str:
        """The difference with its standard error."""
        if self.difference is None:
            return f"{self.what}: not in this run"
        se, n = self.difference.se, self.difference.n
        error = f"one {self.over.removesuffix('s')}" if se is None else f"se {number(se, self.digits)}, {n} {self.over}"
        error = error if self.over else "exact"
        aside = "" if self.published is None else f"; published {number(self.published, self.digits, signed=True)}"
        return f"{self.what}: {number(self.difference.mean, self.digits, signed=True)} ({error}{aside})"


@dataclass(frozen=True)
class Claim:
    """A sentence with all the evidence that it must pass; a `vaerdict.report.document.Statement`."""

    text: str
    evidence: Sequence[Evidence]
    note: str = ""

    @property
    def verdict(self) -> ClaimVerdict:
        """Holds if all evidence does; does not hold if any fails."""
        verdicts = {evidence.verdict for evidence in self.evidence} or {ClaimVerdict.NOT_RUN}
        if ClaimVerdict.FAILS in verdicts:
            return ClaimVerdict.FAILS
        return verdicts.pop() if len(verdicts) == 1 else ClaimVerdict.UNRESOLVED

    @property
    def tone(self) -> str:
        """How the verdict is shown."""
        return {ClaimVerdict.HOLDS: "good", ClaimVerdict.FAILS: "bad"}.get(self.verdict, "open")

    @property
    def lines(self) -> list[str]:
        """The evidence in sentences, then the note."""
        return [*(evidence.sentence for evidence in self.evidence), *([self.note] if self.note else [])]


def tally(claims: Sequence[Claim]) -> str:
    """How many claims hold, do not hold and are not resolved, as text."""
    counts = {verdict: sum(claim.verdict is verdict for claim in claims) for verdict in _VERBS}
    parts = [f"{n} {_VERBS[verdict][n != 1]}" for verdict, n in counts.items() if n]
    return " and ".join([", ".join(parts[:-1]), parts[-1]] if len(parts) > 1 else parts) or "none could be examined"


# ----------------------------------------------------------------------------------- comparisons paired by seed
Scores = Mapping[str, BySeed]
"""A score by name, then by seed."""

Gaps = Mapping[str, tuple[str | None, dict[Any, float]]]
"""By model: its best rival, and the difference from it in each seed."""


def best_of(scores: Scores, pick: Pick = min) -> str | None:
    """The name with the best mean over seeds; `pick` is `min` or `max`."""
    means = {name: mean.mean for name, values in scores.items() if (mean := summarise(values.values()))}
    return pick(means, key=means.__getitem__, default=None)


def against_best(
    scores: Scores, name: str, rivals: Sequence[str], pick: Pick = min
) -> tuple[str | None, dict[Any, float]]:
    """The best rival's name, and `name` minus it in each seed."""
    rival = best_of({q: scores[q] for q in rivals if q in scores}, pick)
    if rival is None or name not in scores:
        return None, {}
    return rival, {seed: value - scores[rival][seed] for seed, value in scores[name].items() if seed in scores[rival]}


def mean_gap(gaps: Gaps) -> Summary | None:
    """Differences averaged over models within each seed, then over seeds."""
    values = [by_seed for _, by_seed in gaps.values() if by_seed]
    seeds = set.intersection(*map(set, values)) if values else set()
    return summarise(sum(by_seed[seed] for by_seed in values) / len(values) for seed in sorted(seeds))


def rival_names(gaps: Gaps) -> str:
    """The best rival on each model in brackets: `` (IWAE on VAE, CHI on WW)``."""
    names = [f"{rival} on {model}" for model, (rival, _) in gaps.items() if rival]
    return f" ({', '.join(names)})" if names else ""


def selected_models(rows: Sequence[Row], key: str) -> dict[Any, str]:
    """The model of highest `key` in each seed."""
    rows = [row for row in rows if row.get(key) is not None]
    seeds = dict.fromkeys(row["seed"] for row in rows)
    return {seed: max(where(rows, seed=seed), key=lambda row: row[key])["model"] for seed in seeds}


def selection_counts(selected: Mapping[Any, str]) -> str:
    """How often each model was selected: ``IWAE 4 times, WW once``."""
    counts = Counter(selected.values()).most_common()
    return ", ".join(f"{name} {n} times" if n > 1 else f"{name} once" for name, n in counts)


def paired_evidence(
    what: str,
    scores: Scores,
    a: str,
    b: str | None,
    sign: int,
    digits: int = 3,
    levels: Mapping[str, float] | None = None,
) -> Evidence:
    """The difference a - b of two scores paired by seed as evidence, with that of the published `levels`.

    `b` is None if there is no rival; then the evidence is absent.
    """
    levels, b_name = levels or {}, b or "the best other"
    published = levels[a] - levels[b_name] if a in levels and b_name in levels else None
    gap = difference(scores.get(a, {}), scores.get(b_name, {}))
    return Evidence(f"{what}, {a} minus {b_name}", gap, sign, digits, published)
