"""From splits to a word: how often and how much calls were false, with error, test and sentence."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from scipy import stats

from vaerdict.de.calibration.compare import NULL, SPIKE

Row = Mapping[str, Any]

RATE = 0.01
"""The false-alarm rate of each test behind a word."""

FEWEST_SPLITS = 5
"""With fewer, nothing good is said."""

INTERVAL = 0.9
"""The probability of the intervals in the table of genes."""

METHODS = {"model": "reported", "raw": "plain bootstrap"}
"""The methods as files name them, and as words do."""

_COMPARED = (
    "Reported is what `vaerdict de` reports; the plain bootstrap draws the replicates of the raw counts again, without "
    "a law of their dispersion and without shrinkage, and is there to compare with."
)
_REPORTED = "model"

TOO_MANY, CALIBRATED, CONSERVATIVE = "too many false", "calibrated", "conservative"
COMPATIBLE, OPEN = "compatible", "not resolved"
_WIDTHS = {-1: "too narrow", 0: "as they say", 1: "wide"}

FAR = 2.0
"""How many times the target the achieved FDR must be shown to lie below, to be called calibrated."""

RULE = (
    "Too many false: of splits without any change more than the target's share have a discovery (exact binomial test), "
    "or with planted changes the mean share of false discoveries over splits is above the target (t-test). "
    "Conservative: that mean is below the target. Calibrated: it is neither, and below twice the target. All tests are "
    "one-sided at a false-alarm rate of 1 %; the error is that over random splits of these cells, and never taken for "
    "less than that of as many independent discoveries. Otherwise nothing is resolved; fewer than five splits never "
    "show that all is well."
)


class Mean(NamedTuple):
    """A mean with its standard error over n splits, NaN for fewer than two."""

    value: float
    se: float
    n: int


def mean_of(values: Iterable[float | None]) -> Mean | None:
    """The mean of what is there; None of nothing."""
    there = [v for v in values if v is not None]
    if not there:
        return None
    n, mean = len(there), math.fsum(there) / len(there)
    spread = math.sqrt(math.fsum((v - mean) ** 2 for v in there) / (n - 1)) if n > 1 else math.nan
    return Mean(mean, spread / math.sqrt(n), n)


def side(mean: Mean, target: float, n_events: int) -> int:
    """1 where the mean is above the target, -1 where below, by one-sided t-tests at `RATE` each; else 0.

    The error is never taken for less than that of `n_events` independent events of the target's probability.
    """
    if mean.n < 2 or not n_events:
        return 0
    error = max(mean.se, math.sqrt(target * (1 - target) / n_events))
    score, limit = (mean.value - target) / error, float(stats.t.isf(RATE, mean.n - 1))
    return int(score > limit) - int(score < -limit)


# ------------------------------------------------------------------------------------------------------ summaries
def null_summary(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """For each method, kind of replicates and level: splits with any discovery, and discoveries a split."""
    found = []
    for (replicates, method, level), some in grouped(_of(rows, NULL), "replicates", "method", "level").items():
        n, hit = len(some), sum(row["n_called"] > 0 for row in some)
        interval = stats.binomtest(hit, n).proportion_ci(0.95, method="exact")
        mean = mean_of(row["n_called"] for row in some)
        assert mean is not None
        p_value = float(stats.binom.sf(hit - 1, n, level))
        found.append(
            {
                "replicates": replicates,
                "method": method,
                "level": level,
                "splits": n,
                "splits_with_any": hit,
                "share": hit / n,
                "share_low": float(interval.low),
                "share_high": float(interval.high),
                "discoveries": mean.value,
                "discoveries_se": mean.se,
                "n_genes": some[0]["n_genes"],
                "p_value": p_value,
                "word": TOO_MANY if p_value <= RATE else COMPATIBLE if n >= FEWEST_SPLITS else OPEN,
            }
        )
    return found


def spike_summary(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """For each method and level: achieved and stated FDR, power, and the word on them."""
    found = []
    for (replicates, method, level), some in grouped(_of(rows, SPIKE), "replicates", "method", "level").items():
        fdp, n_called = mean_of(row["fdp"] for row in some), sum(row["n_called"] for row in some)
        tpr = mean_of(row["tpr"] for row in some)
        assert fdp is not None
        found.append(
            {
                "replicates": replicates,
                "method": method,
                "level": level,
                "splits": len(some),
                "fdp": fdp.value,
                "fdp_se": fdp.se,
                "expected_fdr": sum(row["expected_fdr"] for row in some) / len(some),
                "tpr": None if tpr is None else tpr.value,
                "tpr_se": None if tpr is None else tpr.se,
                "called": n_called / len(some),
                "true": sum(row["n_true"] for row in some) / len(some),
                "word": _word(fdp, level, n_called),
            }
        )
    return found


def _word(fdp: Mean, level: float, n_called: int) -> str:
    """The rule of `RULE` for changes that were planted."""
    here = side(fdp, level, n_called)
    if here > 0:
        return TOO_MANY
    if fdp.n < FEWEST_SPLITS:
        return OPEN
    if here < 0:
        return CONSERVATIVE
    known = side(fdp, min(FAR * level, 1.0), n_called) < 0
    return CALIBRATED if known else OPEN


def interval_summary(wholes: Sequence[Row], bins: Sequence[Row]) -> list[dict[str, Any]]:
    """Coverage of the intervals reported, in all and by expression, with and without changes."""
    found = []
    for (kind, replicates, method), some in grouped(wholes, "kind", "replicates", "method").items():
        mean = mean_of(row.get("coverage") for row in some)
        if mean is None or method != _REPORTED:
            continue
        mine = [row for row in bins if (row["kind"], row["replicates"]) == (kind, replicates)]
        classes = [_bin(part) for part in grouped(mine, "bin").values()]
        row = {"kind": kind, "replicates": replicates, "splits": mean.n, "coverage": mean.value, "coverage_se": mean.se}
        where = side(mean, INTERVAL, sum(part["n"] for part in classes))
        found.append(
            {**row, "word": _WIDTHS[where] if where or mean.n >= FEWEST_SPLITS else OPEN, "by_expression": classes}
        )
    return found


def _bin(rows: Sequence[Row]) -> dict[str, Any]:
    mean = mean_of(row["coverage"] for row in rows)
    assert mean is not None
    expression = sum(row["expression"] for row in rows) / len(rows)
    genes = sum(row["n"] for row in rows)
    return {"bin": rows[0]["bin"], "expression": expression, "coverage": mean.value, "coverage_se": mean.se, "n": genes}


def mae_summary(wholes: Sequence[Row]) -> list[dict[str, Any]]:
    """FDR MAE of each method where changes were planted."""
    found = []
    for (method,), some in grouped(_of(wholes, SPIKE), "method").items():
        mean = mean_of(row["fdr_mae"] for row in some)
        found += [{"method": method, "fdr_mae": mean.value, "fdr_mae_se": mean.se, "splits": mean.n}] if mean else []
    return found


def effect_summary(effects: Sequence[Row]) -> list[dict[str, Any]]:
    """For each method and planted size: the share of genes called, and by how much estimates fall short."""
    found = []
    for (method, size), some in grouped(_of(effects, SPIKE), "method", "size").items():
        n = sum(row["n"] for row in some)
        short = mean_of(row["short"] for row in some)
        assert short is not None
        called = sum(row["called"] for row in some) / n
        found.append(
            {"method": method, "size": size, "n": n, "called": called, "short": short.value, "short_se": short.se}
        )
    return found


def _of(rows: Iterable[Row], kind: str) -> list[Row]:
    return [row for row in rows if row["kind"] == kind]


def grouped(rows: Iterable[Row], *keys: str) -> dict[tuple[Any, ...], list[Row]]:
    """Rows by their values of `keys`, in order of first appearance."""
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault(tuple(row[key] for key in keys), []).append(row)
    return groups


# ------------------------------------------------------------------------------------------------------ words
def verdict(
    null: Sequence[Row], spikes: Sequence[Row], intervals: Sequence[Row], *, level: float, replicates: str
) -> dict[str, Any]:
    """One word for the analysis asked for, and sentences, the most important first."""
    here = [row for row in (*null, *spikes) if row["level"] == level]
    ours = [row["word"] for row in here if (row["method"], row["replicates"]) == (_REPORTED, replicates)]
    word = TOO_MANY if TOO_MANY in ours else ours[-1] if spikes else OPEN
    first, later = [], []  # what was asked for comes first
    for row in (*here, *intervals):
        asked = (row.get("method", _REPORTED), row["replicates"]) == (_REPORTED, replicates)
        (first if asked else later).append(_words(row))
    return {
        "word": word,
        "replicates": replicates,
        "words": [_HEADLINES[word].format(level=level), *first, *later, _COMPARED],
        "rule": RULE,
    }


_HEADLINES = {
    TOO_MANY: "Too many false discoveries: on these data an FDR of {level:.0%} does not mean what it says.",
    CALIBRATED: "Calibrated: on these data an FDR of {level:.0%} means what it says, within a factor of two.",
    CONSERVATIVE: "Conservative: on these data fewer of the genes called are false than an FDR of {level:.0%} allows.",
    OPEN: "Not resolved: no excess of false discoveries shows at an FDR of {level:.0%}, but splits or calls are too "
    "few to say more.",
}
_WHAT = {NULL: "Nothing changed", SPIKE: "Changes planted"}


def _words(row: Row) -> str:
    return _coverage_words(row) if "coverage" in row else _spike_words(row) if "fdp" in row else _null_words(row)


def _who(row: Row) -> str:
    return f"{METHODS[row.get('method', _REPORTED)]}, {row['replicates']} as replicates"


def _null_words(row: Row) -> str:
    return (
        f"{_WHAT[NULL]}, {_who(row)}: {row['splits_with_any']} of {row['splits']} splits have a discovery (95 % "
        f"interval {row['share_low']:.0%} to {row['share_high']:.0%}; the target allows {row['level']:.0%}), on "
        f"average {row['discoveries']:.2f}{_error(row['discoveries_se'])} of {row['n_genes']} genes: {row['word']}."
    )


def _spike_words(row: Row) -> str:
    power = "" if row["tpr"] is None else f"; {row['tpr']:.0%} of the changed genes are found"
    return (
        f"{_WHAT[SPIKE]}, {_who(row)}: {100 * row['fdp']:.1f} %{_error(100 * row['fdp_se'])} of the genes called are "
        f"false, the target allows {row['level']:.0%}{power}: {row['word']}."
    )


def _coverage_words(row: Row) -> str:
    return (
        f"{_WHAT[row['kind']]}, {_who(row)}: {INTERVAL:.0%} intervals hold the true LFC "
        f"for {100 * row['coverage']:.1f} %{_error(100 * row['coverage_se'])} of genes: {row['word']}."
    )


def _error(se: float) -> str:
    return "" if math.isnan(se) else f" (se {se:.2f})"
