"""Claims and the evidence on them: a two-standard-error rule over seeds, in words."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from vaerdict.report.summary import Summary, number

FEWEST_SEEDS = 3
"""With fewer, a standard error says nothing."""

RULE = (
    "A claim holds when its difference lies more than two standard errors over seeds on the claimed side of zero, does "
    "not hold when it lies as far on the other side, and is otherwise not resolved; fewer than three seeds resolve "
    "nothing. Differences are paired by seed; on pPCA every seed has a data set of its own. With five seeds a "
    "difference of truly zero is called one way or the other about one time in nine."
)


class Word(StrEnum):
    """What the rows say of a claim."""

    HOLDS = "holds"
    FAILS = "does not hold"
    OPEN = "not resolved"
    ABSENT = "not run"


@dataclass(frozen=True)
class Evidence:
    """A difference, the side of zero on which the claim puts it, and the published value if there is one.

    `over` names what its standard error is taken over; an empty word says that the difference is exact.
    """

    what: str
    difference: Summary | None
    sign: int
    digits: int = 3
    published: float | None = None
    over: str = "seeds"

    @property
    def word(self) -> Word:
        """The two-standard-error rule."""
        if self.difference is None:
            return Word.ABSENT
        towards, se = self.sign * self.difference.mean, self.difference.se if self.over else 0.0
        if se is None or (self.over and self.difference.n < FEWEST_SEEDS):
            return Word.OPEN
        return Word.HOLDS if towards > 2 * se else Word.FAILS if towards < -2 * se else Word.OPEN

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
    """A statement with all the evidence that it must pass."""

    text: str
    evidence: Sequence[Evidence]
    note: str = ""

    @property
    def word(self) -> Word:
        """Holds if all evidence does; does not hold if any fails."""
        words = {evidence.word for evidence in self.evidence} or {Word.ABSENT}
        if Word.FAILS in words:
            return Word.FAILS
        return words.pop() if len(words) == 1 else Word.OPEN


def tally(claims: Sequence[Claim]) -> str:
    """How many claims hold, fail and stay open, in words."""
    parts = [_counted(word, sum(claim.word is word for claim in claims)) for word in _VERBS]
    said = [part for part in parts if part]
    return " and ".join([", ".join(said[:-1]), said[-1]] if len(said) > 1 else said) or "none could be examined"


_VERBS = {
    Word.HOLDS: ("holds", "hold"),
    Word.FAILS: ("does not hold", "do not hold"),
    Word.OPEN: ("is not resolved", "are not resolved"),
    Word.ABSENT: ("was not run", "were not run"),
}


def _counted(word: Word, n: int) -> str:
    return f"{n} {_VERBS[word][n != 1]}" if n else ""
