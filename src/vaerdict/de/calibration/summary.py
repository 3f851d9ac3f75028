"""From splits to a verdict: how often and how much calls were false, with standard errors, tests and messages."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from scipy import stats

from vaerdict.de.calibration.task import NULL, REPORTED, SPIKE
from vaerdict.de.effects import INTERVAL
from vaerdict.report.records import Row, grouped

RATE = 0.01
"""The false-alarm rate of each test behind a verdict."""

FEWEST_SPLITS = 5
"""With fewer splits no favourable verdict is given."""

KIND_NAMES = {NULL: "nothing changed", SPIKE: "changes planted"}

TOO_MANY, CALIBRATED, CONSERVATIVE = "too many false", "calibrated", "conservative"
COMPATIBLE, OPEN = "compatible", "not resolved"
_WIDTHS = {-1: "too narrow", 0: "as stated", 1: "wide"}

FAR = 2.0
"""The FDR is called calibrated where the achieved FDR is shown to lie below so many times the target."""

RULE = (
    "Too many false: the share of unchanged splits with a discovery exceeds the target (exact binomial test), or the "
    "mean share of false discoveries over splits with planted changes does (t-test). Conservative: that mean is below "
    "the target. Calibrated: it is neither, and is below twice the target. Otherwise, and with fewer than five splits, "
    "nothing is resolved. All tests are one-sided with a false-alarm rate of 1 %. The standard error is that over "
    "random splits of these cells, and at least that of as many independent discoveries."
)
_COMPARED = (
    "Reported is what `vaerdict de` reports. The other methods are tests of the same cells and genes, each judged by "
    "its own question. {questions}"
)
_HEADLINES = {
    TOO_MANY: "Too many false discoveries: on these data an FDR of {level:.0%} does not mean what it says.",
    CALIBRATED: "Calibrated: on these data an FDR of {level:.0%} means what it says, within a factor of two.",
    CONSERVATIVE: "Conservative: on these data fewer of the genes called are false than an FDR of {level:.0%} allows.",
    OPEN: "Not resolved: no excess of false discoveries shows at an FDR of {level:.0%}, but splits or calls are too "
    "few to say more.",
}


class Mean(NamedTuple):
    """A mean with its standard error over n splits, NaN for fewer than two."""

    value: float
    se: float
    n: int


def mean_of(values: Iterable[float | None]) -> Mean | None:
    """The mean of the values that are not None; None without any."""
    present = [v for v in values if v is not None]
    if not present:
        return None
    n, mean = len(present), math.fsum(present) / len(present)
    spread = math.sqrt(math.fsum((v - mean) ** 2 for v in present) / (n - 1)) if n > 1 else math.nan
    return Mean(mean, spread / math.sqrt(n), n)


def significant_direction(mean: Mean, target: float, n_events: int) -> int:
    """1 where the mean is above the target, -1 where it is below, by one-sided t-tests at `RATE` each; otherwise 0.

    The standard error is at least that of `n_events` independent events with the probability of the target.
    """
    if mean.n < 2 or not n_events:
        return 0
    error = max(mean.se, math.sqrt(target * (1 - target) / n_events))
    score, limit = (mean.value - target) / error, float(stats.t.isf(RATE, mean.n - 1))
    return int(score > limit) - int(score < -limit)


# ------------------------------------------------------------------------------------------------------ summaries
def null_summary(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """For each method, kind of replicates and level: splits with any discovery, and discoveries per split."""
    summaries = []
    for (replicates, method, level), splits in grouped(_of(rows, NULL), "replicates", "method", "level").items():
        n, n_any = len(splits), sum(row["n_called"] > 0 for row in splits)
        interval = stats.binomtest(n_any, n).proportion_ci(0.95, method="exact")
        mean = mean_of(row["n_called"] for row in splits)
        assert mean is not None
        p_value = float(stats.binom.sf(n_any - 1, n, level))
        summaries.append(
            {
                "replicates": replicates,
                "method": method,
                "question": splits[0].get("question"),
                "level": level,
                "splits": n,
                "splits_with_any": n_any,
                "share": n_any / n,
                "share_low": float(interval.low),
                "share_high": float(interval.high),
                "discoveries": mean.value,
                "discoveries_se": mean.se,
                "n_genes": splits[0]["n_genes"],
                "p_value": p_value,
                "verdict": TOO_MANY if p_value <= RATE else COMPATIBLE if n >= FEWEST_SPLITS else OPEN,
            }
        )
    return summaries


def spike_summary(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """For each method and level: achieved and stated FDR, power, and the verdict on them."""
    summaries = []
    for (replicates, method, level), splits in grouped(_of(rows, SPIKE), "replicates", "method", "level").items():
        fdp, n_called = mean_of(row["fdp"] for row in splits), sum(row["n_called"] for row in splits)
        tpr, stated = mean_of(row["tpr"] for row in splits), mean_of(row["expected_fdr"] for row in splits)
        assert fdp is not None
        summaries.append(
            {
                "replicates": replicates,
                "method": method,
                "question": splits[0].get("question"),
                "level": level,
                "splits": len(splits),
                "fdp": fdp.value,
                "fdp_se": fdp.se,
                "expected_fdr": None if stated is None else stated.value,
                "tpr": None if tpr is None else tpr.value,
                "tpr_se": None if tpr is None else tpr.se,
                "called": n_called / len(splits),
                "true": sum(row["n_true"] for row in splits) / len(splits),
                "verdict": _spike_verdict(fdp, level, n_called),
            }
        )
    return summaries


def _spike_verdict(fdp: Mean, level: float, n_called: int) -> str:
    """The verdict by `RULE` where changes were planted."""
    direction = significant_direction(fdp, level, n_called)
    if direction > 0:
        return TOO_MANY
    if fdp.n < FEWEST_SPLITS:
        return OPEN
    if direction < 0:
        return CONSERVATIVE
    return CALIBRATED if significant_direction(fdp, min(FAR * level, 1.0), n_called) < 0 else OPEN


def interval_summary(overall: Sequence[Row], bins: Sequence[Row]) -> list[dict[str, Any]]:
    """Coverage of the reported intervals, of all genes and by expression, with and without changes."""
    summaries = []
    for (kind, replicates, method), splits in grouped(overall, "kind", "replicates", "method").items():
        mean = mean_of(row.get("coverage") for row in splits)
        if mean is None or method != REPORTED:
            continue
        rows = [row for row in bins if (row["kind"], row["replicates"]) == (kind, replicates)]
        classes = [_bin(part) for part in grouped(rows, "bin").values()]
        direction = significant_direction(mean, INTERVAL, sum(part["n"] for part in classes))
        resolved = direction or mean.n >= FEWEST_SPLITS
        summaries.append(
            {
                "kind": kind,
                "replicates": replicates,
                "splits": mean.n,
                "coverage": mean.value,
                "coverage_se": mean.se,
                "verdict": _WIDTHS[direction] if resolved else OPEN,
                "by_expression": classes,
            }
        )
    return summaries


def _bin(rows: Sequence[Row]) -> dict[str, Any]:
    mean = mean_of(row["coverage"] for row in rows)
    assert mean is not None
    expression, genes = sum(row["expression"] for row in rows) / len(rows), sum(row["n"] for row in rows)
    return {"bin": rows[0]["bin"], "expression": expression, "coverage": mean.value, "coverage_se": mean.se, "n": genes}


def mae_summary(overall: Sequence[Row]) -> list[dict[str, Any]]:
    """FDR MAE of each method where changes were planted."""
    means = {
        m: mean_of(row["fdr_mae"] for row in rows) for (m,), rows in grouped(_of(overall, SPIKE), "method").items()
    }
    return [
        {"method": method, "fdr_mae": mean.value, "fdr_mae_se": mean.se, "splits": mean.n}
        for method, mean in means.items()
        if mean is not None
    ]


def effect_summary(effects: Sequence[Row]) -> list[dict[str, Any]]:
    """For each method and planted size: the share of genes called, and by how much estimates fall short."""
    summaries = []
    for (method, size), rows in grouped(_of(effects, SPIKE), "method", "size").items():
        n, short = sum(row["n"] for row in rows), mean_of(row["short"] for row in rows)
        called = sum(row["called"] for row in rows) / n
        falls_short = {"short": short and short.value, "short_se": short and short.se}
        summaries.append({"method": method, "size": size, "n": n, "called": called, **falls_short})
    return summaries


def _of(rows: Iterable[Row], kind: str) -> list[Row]:
    return [row for row in rows if row["kind"] == kind]


# ------------------------------------------------------------------------------------------------------ the verdict
def verdict(
    null: Sequence[Row], spikes: Sequence[Row], intervals: Sequence[Row], *, level: float, replicates: str
) -> dict[str, Any]:
    """The verdict on the analysis asked for, and messages, the most important first.

    Parameters
    ----------
    null, spikes, intervals : sequence of records
        What `null_summary`, `spike_summary` and `interval_summary` return.
    level : float
        The FDR asked for.
    replicates : {"cells", "samples"}
        The replicates of the analysis.

    Returns
    -------
    dict
        `fdr`, the verdict on the false discovery rate, `replicates`, `messages` and the `rule` of the verdict.
    """
    rows = [row for row in (*null, *spikes) if row["level"] == level]
    outcomes = [row["verdict"] for row in rows if (row["method"], row["replicates"]) == (REPORTED, replicates)]
    fdr = TOO_MANY if TOO_MANY in outcomes else outcomes[-1] if spikes else OPEN
    first, later = [], []  # the analysis asked for comes first
    for row in (*rows, *intervals):
        asked_for = (row.get("method", REPORTED), row["replicates"]) == (REPORTED, replicates)
        (first if asked_for else later).append(_message(row))
    messages = [_HEADLINES[fdr].format(level=level), *first, *later, *_compared(rows)]
    return {"fdr": fdr, "replicates": replicates, "messages": messages, "rule": RULE}


def _compared(rows: Sequence[Row]) -> list[str]:
    """What the other methods are, where there are any."""
    methods = {row["method"]: row["question"] for row in rows if row["method"] != REPORTED}
    by_question = {q: ", ".join(m for m in methods if methods[m] == q) for q in dict.fromkeys(methods.values())}
    questions = " ".join(f"{question.capitalize()}: {names}." for question, names in by_question.items())
    return [_COMPARED.format(questions=questions)] if methods else []


def _message(row: Row) -> str:
    kind = row.get("kind", SPIKE if "fdp" in row else NULL)
    method = row.get("method", REPORTED)
    start = f"{KIND_NAMES[kind].capitalize()}, {method}, {row['replicates']} as replicates: "
    if "coverage" in row:
        return (
            f"{start}{INTERVAL:.0%} intervals cover the true LFC for {100 * row['coverage']:.1f} %"
            f"{_error(100 * row['coverage_se'])} of genes: {row['verdict']}."
        )
    if kind == NULL:
        return (
            f"{start}{row['splits_with_any']} of {row['splits']} splits have a discovery (95 % interval "
            f"{row['share_low']:.0%} to {row['share_high']:.0%}; the target allows {row['level']:.0%}), on average "
            f"{row['discoveries']:.2f}{_error(row['discoveries_se'])} of {row['n_genes']} genes: {row['verdict']}."
        )
    power = "" if row["tpr"] is None else f"; {row['tpr']:.0%} of the changed genes are found"
    return (
        f"{start}{100 * row['fdp']:.1f} %{_error(100 * row['fdp_se'])} of the genes called are false, the target "
        f"allows {row['level']:.0%}{power}: {row['verdict']}."
    )


def _error(se: float) -> str:
    return "" if math.isnan(se) else f" (se {se:.2f})"
