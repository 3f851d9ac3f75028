"""From splits to a verdict: how often and how much calls were false, with standard errors, tests and messages."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from scipy import stats

from vaerdict.de.calibration.strata import ALL, CHANGED, MEASURES, SIZE
from vaerdict.de.calibration.task import MIXED, NULL, REPORTED, SPIKE, UNDONE
from vaerdict.de.effects import INTERVAL
from vaerdict.report.records import Row, grouped

RATE = 0.01
"""The false-alarm rate of each test behind a verdict."""

FEWEST_SPLITS = 5
"""With fewer splits no favourable verdict is given."""

KIND_NAMES = {
    NULL: "nothing changed",
    MIXED: "nothing changed, groups mixed",
    SPIKE: "changes planted",
    UNDONE: "changes undone",
}

TOO_MANY, CALIBRATED, CONSERVATIVE = "too many false", "calibrated", "conservative"
COMPATIBLE, OPEN = "compatible", "not resolved"
_ANALYSIS = ("kind", "replicates")
_WIDTHS = {-1: "too narrow", 0: "as stated", 1: "wide"}

FAR = 2.0
"""The FDR is called calibrated where the achieved FDR is shown to lie below so many times the target."""

RULE = (
    "Too many false: the share of unchanged splits with a discovery exceeds the target (exact binomial test), or the "
    "mean share of false discoveries over splits with planted changes does (t-test). Where groups were mixed and where "
    "changes were undone the same tests can show too many false; genes whose change was undone are only some of those "
    "that can be false. Conservative: the mean share with planted changes is below the target. Calibrated: it is "
    "neither, and is below twice the target. Otherwise, and with fewer than five splits, nothing is resolved. All "
    "tests are one-sided with a false-alarm rate of 1 %. The standard error is that over random splits of these cells, "
    "and at least that of as many independent discoveries. Where cell types are compared one by one, each with its own "
    "FDR, a split of each type counts."
)
_COMPARED = (
    "Reported is what `vaerdict de` reports. The other methods are tests of the same cells and genes, each judged by "
    "its own question. {questions}"
)
_WORDS = {
    TOO_MANY: "Too many false discoveries",
    CALIBRATED: "Calibrated",
    CONSERVATIVE: "Conservative",
    OPEN: "Not resolved, because splits or calls are too few",
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
def null_summary(rows: Sequence[Row], kind: str = NULL) -> list[dict[str, Any]]:
    """For each method, kind of replicates and level: splits with any discovery, and discoveries per split.

    `kind` is that of the splits in which nothing changed: of one group, or of groups mixed.
    """
    summaries = []
    for (replicates, method, level), splits in grouped(_of(rows, kind), "replicates", "method", "level").items():
        n, n_any = len(splits), sum(row["n_called"] > 0 for row in splits)
        interval = stats.binomtest(n_any, n).proportion_ci(0.95, method="exact")
        mean = mean_of(row["n_called"] for row in splits)
        assert mean is not None
        p_value = float(stats.binom.sf(n_any - 1, n, level))
        summaries.append(
            {
                "kind": kind,
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
                "kind": SPIKE,
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


def undone_summary(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """For each method and level: the share of the undone genes that is called, and their share of all calls.

    Their share of all calls is a lower bound of the false discovery proportion.
    """
    summaries = []
    for (replicates, method, level), splits in grouped(_of(rows, UNDONE), "replicates", "method", "level").items():
        called = mean_of(row["n_false"] / row["n_unchanged"] if row["n_unchanged"] else None for row in splits)
        of_calls, n_called = mean_of(row["fdp"] for row in splits), sum(row["n_called"] for row in splits)
        assert of_calls is not None
        too_many = significant_direction(of_calls, level, n_called) > 0
        resolved = len(splits) >= FEWEST_SPLITS and n_called and called is not None
        summaries.append(
            {
                "kind": UNDONE,
                "replicates": replicates,
                "method": method,
                "question": splits[0].get("question"),
                "level": level,
                "splits": len(splits),
                "undone": sum(row["n_unchanged"] for row in splits) / len(splits),
                "share_called": None if called is None else called.value,
                "share_called_se": None if called is None else called.se,
                "share_of_calls": of_calls.value,
                "share_of_calls_se": of_calls.se,
                "called": n_called / len(splits),
                "verdict": TOO_MANY if too_many else COMPATIBLE if resolved else OPEN,
            }
        )
    return summaries


def strata_summary(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """For each method and stratum: the measures with their standard errors over splits, and numbers of genes."""
    summaries = []
    keys = ("kind", "replicates", "method", "by", "stratum")
    for stratum, splits in grouped(rows, *keys).items():
        numbers = {key: mean_of(row[key] for row in splits) for key in ("value", "n_genes", "n_true", "n_called")}
        summary = dict(zip(keys, stratum, strict=True)) | {"question": splits[0].get("question")}
        summary |= {"splits": len(splits)} | {key: mean and mean.value for key, mean in numbers.items()}
        for key in (measure.name for measure in MEASURES):
            mean = mean_of(row[key] for row in splits)
            summary |= {key: mean and mean.value, f"{key}_se": mean and mean.se}
        summaries.append(summary)
    return summaries


def interval_summary(strata: Sequence[Row]) -> list[dict[str, Any]]:
    """Coverage of the reported intervals, of all genes and of those that changed, with and without changes.

    `strata` is what `strata_summary` returns.
    """
    summaries = []
    for (kind, replicates), rows in grouped([row for row in strata if row["method"] == REPORTED], *_ANALYSIS).items():
        everything = next(row for row in rows if row["by"] == ALL)
        changed: Row = next((row for row in rows if row["by"] == CHANGED), {})
        mean = Mean(everything["coverage"], everything["coverage_se"], everything["splits"])
        direction = significant_direction(mean, INTERVAL, round(everything["n_genes"] * mean.n))
        resolved = direction or mean.n >= FEWEST_SPLITS
        summaries.append(
            {
                "kind": kind,
                "replicates": replicates,
                "splits": mean.n,
                "n_genes": everything["n_genes"],
                "coverage": mean.value,
                "coverage_se": mean.se,
                "verdict": _WIDTHS[direction] if resolved else OPEN,
                "n_changed": changed.get("n_genes"),
                "coverage_changed": changed.get("coverage"),
                "coverage_changed_se": changed.get("coverage_se"),
            }
        )
    return summaries


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


def _of(rows: Iterable[Row], kind: str) -> list[Row]:
    return [row for row in rows if row["kind"] == kind]


# ------------------------------------------------------------------------------------------------------ the verdict
def verdict(
    null: Sequence[Row],
    spikes: Sequence[Row],
    strata: Sequence[Row],
    *,
    mixed: Sequence[Row] = (),
    undone: Sequence[Row] = (),
    level: float,
    delta: float,
    replicates: str,
    shrinkage: bool = True,
) -> dict[str, Any]:
    """The verdict on the analysis asked for, and messages, the most important first.

    Parameters
    ----------
    null, spikes, strata : sequence of records
        What `null_summary`, `spike_summary` and `strata_summary` return.
    mixed, undone : sequence of records
        What `null_summary` of groups mixed and `undone_summary` return, where these were asked for.
    level, delta : float
        The FDR asked for, and the least change of interest.
    replicates : {"cells", "samples"}
        The replicates of the analysis.
    shrinkage : bool
        Whether its intervals are shrunken.

    Returns
    -------
    dict
        `fdr`, the verdict on the false discovery rate, `achieved_fdr` and `power` (None where nothing was planted),
        `replicates`, `messages` and the `rule` of the verdict.
    """
    rows = [row for row in (*null, *mixed, *spikes, *undone) if row["level"] == level]
    mine = [row for row in rows if (row["method"], row["replicates"]) == (REPORTED, replicates)]
    asked_for: dict[str, Row] = {row["kind"]: row for row in mine}
    planted: Row = asked_for.get(SPIKE, {})
    wrong = any(row["verdict"] == TOO_MANY for row in mine)
    fdr = TOO_MANY if wrong else planted.get("verdict", OPEN)
    sizes = [row for row in strata if (row["kind"], row["by"]) == (SPIKE, SIZE) and row["value"] >= delta]
    sizes = [row for row in sizes if (row["method"], row["replicates"]) == (REPORTED, replicates)]
    first, later = [], []  # the analysis asked for comes first
    for row in (*rows, *interval_summary(strata)):
        reported = (row.get("method", REPORTED), row["replicates"]) == (REPORTED, replicates)
        (first if reported else later).append(_message(row, delta, shrinkage=shrinkage))
    return {
        "fdr": fdr,
        "achieved_fdr": planted.get("fdp"),
        "power": planted.get("tpr"),
        "replicates": replicates,
        "messages": [_headline(fdr, asked_for, sizes, level, delta), *first, *later, *_compared(rows)],
        "rule": RULE,
    }


def _headline(fdr: str, rows: Mapping[str, Row], sizes: Sequence[Row], level: float, delta: float) -> str:
    """The verdict in one line: what the FDR means here, and how many of the changed genes are found, by size.

    `rows` are the summaries of the analysis asked for, by kind.
    """
    null, mixed, planted, undone = (rows.get(kind) for kind in (NULL, MIXED, SPIKE, UNDONE))
    rate = []
    if planted is not None:
        meaning = f"an FDR of {level:.0%} means {_share(planted, 'fdp')} false here"
        rate = [meaning if planted["called"] else f"no gene is called at an FDR of {level:.0%}"]
    if null is not None:
        rate += [f"{null['splits_with_any']} of {null['splits']} splits where nothing changed have a discovery"]
    if mixed is not None:
        rate += [f"{mixed['splits_with_any']} of {mixed['splits']} splits of mixed groups have a discovery"]
    if undone is not None and undone["share_called"] is not None:
        called, of_calls = _share(undone, "share_called"), 100 * undone["share_of_calls"]
        rate += [f"{called} of the genes whose change was undone are called ({of_calls:.1f} % of the calls)"]
    if planted is None or planted["tpr"] is None:
        power = "No change was planted, so that nothing is known about power."
    else:
        ends = [*sizes[:1], *sizes[1:][-1:]]  # the smallest and the largest
        found = " and ".join(f"{_share(row, 'tpr')} of those that changed by {row['value']:g}" for row in ends)
        power = f"Of the genes that changed by {delta:g} or more {_share(planted, 'tpr')} are found"
        power += f": {found}." if found else "."
    return f"{_WORDS[fdr]}: {', and '.join([', '.join(rate[:-1]), *rate[-1:]] if rate[1:] else rate)}. {power}"


def _share(row: Row, key: str) -> str:
    """A share in percent, with its standard error where there is one."""
    se = row[f"{key}_se"]
    return f"{100 * row[key]:.1f} %{_error(math.nan if se is None else 100 * se)}"


def _compared(rows: Sequence[Row]) -> list[str]:
    """What the other methods are, where there are any."""
    methods = {row["method"]: row["question"] for row in rows if row["method"] != REPORTED}
    by_question = {q: ", ".join(m for m in methods if methods[m] == q) for q in dict.fromkeys(methods.values())}
    questions = " ".join(f"{question.capitalize()}: {names}." for question, names in by_question.items())
    return [_COMPARED.format(questions=questions)] if methods else []


def _message(row: Row, delta: float, *, shrinkage: bool) -> str:
    method = row.get("method", REPORTED)
    start = f"{KIND_NAMES[row['kind']].capitalize()}, {method}, {row['replicates']} as replicates: "
    if "coverage" in row:
        covered = f"{INTERVAL:.0%} intervals cover the true LFC for {_share(row, 'coverage')} of all genes"
        return f"{start}{covered}: {row['verdict']}.{changed_coverage(row, delta, shrinkage=shrinkage)}"
    if row["kind"] == UNDONE:
        if row["share_called"] is None:
            return f"{start}no gene clearly differs between the groups, so that none was undone: {row['verdict']}."
        return (
            f"{start}{_share(row, 'share_called')} of the genes whose change was undone are called; they are "
            f"{_share(row, 'share_of_calls')} of all calls, the target allows {row['level']:.0%} false calls in all: "
            f"{row['verdict']}."
        )
    if row["kind"] in (NULL, MIXED):
        return (
            f"{start}{row['splits_with_any']} of {row['splits']} splits have a discovery (95 % interval "
            f"{row['share_low']:.0%} to {row['share_high']:.0%}; the target allows {row['level']:.0%}), on average "
            f"{row['discoveries']:.2f}{_error(row['discoveries_se'])} of {row['n_genes']} genes: {row['verdict']}."
        )
    power = "" if row["tpr"] is None else f"; {_share(row, 'tpr')} of the changed genes are found"
    return (
        f"{start}{_share(row, 'fdp')} of the genes called are false, the target allows {row['level']:.0%}{power}: "
        f"{row['verdict']}."
    )


def changed_coverage(row: Row, delta: float, *, shrinkage: bool) -> str:
    """What the intervals cover of the genes that changed, from a row of `interval_summary`; empty where none did."""
    if row["coverage_changed"] is None:
        return ""
    kind = "shrunken towards no change, as the estimates are," if shrinkage else "not shrunken,"
    covered = f"{_share(row, 'coverage_changed')} of the genes that changed by {delta:g} or more"
    return f" The intervals are {kind} and cover the true LFC for {covered}."


def _error(se: float) -> str:
    return "" if math.isnan(se) else f" (se {se:.2f})"
