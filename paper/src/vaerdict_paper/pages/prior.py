"""Tables of the benchmark of the learned prior of differential expression."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from vaerdict.report.document import Block
from vaerdict.report.records import Row, grouped
from vaerdict.report.tables import Column, Table, Value
from vaerdict_paper.pages.seed_statistics import summarise

COUNTS, LOOSER, PROFILE, MODEL = "none", "looser", "profile", "model"
_NAMES = {
    COUNTS: "counts",
    LOOSER: "counts, looser level",
    PROFILE: "prior: profile",
    MODEL: "prior: model",
    "wilcoxon": "Wilcoxon",
    "edger": "edgeR QL",
    "edger-treat": "edgeR glmTreat",
}
"""Methods in the order of the tables."""

MIXED = " and "
"""Names of mixed populations name two kinds."""

_CASE = (
    Column("data", "cells"),
    Column("others", "not compared"),
    Column("n", "cells a side"),
    Column("method", "called by"),
    Column("runs", "runs"),
)
_CONTRAST = (
    Column("n_true", "changed genes", 0),
    Column("n_called", "called", 1),
    Column("fdp_hard", "false, hard, %", 1, 100),
    Column("fdp_soft", "false, soft, %", 1, 100),
    Column("tpr", "found, %", 1, 100),
    Column("tpr_matched", "found at an FDP of 5 %, %", 1, 100),
    Column("auprc", "average precision", 3),
    Column("coverage", "90 % intervals cover, %", 1, 100),
)
_EXACT = (
    Column("n_true_exact", "changed genes", 0),
    Column("n_called", "called", 1),
    Column("fdp_hard", "false, hard, %", 1, 100),
    Column("fdp_exact", "false, %", 1, 100),
    Column("fdp_soft", "false, soft, %", 1, 100),
    Column("fdp_any_exact", "unchanged, %", 1, 100),
    Column("tpr_exact", "found, %", 1, 100),
    Column("tpr_matched_exact", "found at an FDP of 5 %, %", 1, 100),
    Column("auprc_exact", "average precision", 3),
    Column("coverage_exact", "90 % intervals cover, %", 1, 100),
)
_PREDICTIONS = (
    Column("prior_used", "used, %", 0, 100),
    Column("prior_correlation", "correlation", 2),
    Column("prior_share_following", "genes that follow, %", 0, 100),
    Column("prior_n_counts", "called by the counts", 1),
    Column("prior_n_by_prior", "by the prior alone", 1),
    Column("by_prior_fdp_hard", "of these false, hard, %", 1, 100),
    Column("by_prior_fdp_soft", "soft, %", 1, 100),
)
_NOTE = (
    "Target FDR 5 %, delta 0.5. Cells compared, cells that tell the truth and cells not compared do not overlap. False "
    "calls, hard: the 90 % interval of the truth lies within delta or on the other side of zero; soft: mean "
    "probability, by the shrunken posterior of the cells that tell the truth, that the fold change is not beyond delta "
    "on the side called. Changed genes: the interval lies beyond delta; found: called on their side. Found at an FDP "
    "of 5 %: in the longest beginning of the ranking with a hard share of at most 5 %. Average precision: of changed "
    "genes among these and surely false ones. Intervals are widened by the error of the truth. Looser level: that at "
    "which the counts have the mean hard share of the profile; absent where theirs is not smaller at 5 %. Wilcoxon "
    "and edgeR QL answer whether a gene changed at all and are judged by delta here. Tests see the cells compared "
    "alone. Mean ± standard error."
)


def tables(result: Row, machine: str) -> list[Block]:
    """Contrasts, those with an exact truth, predictions, populations that do not differ, undone changes, and cost."""
    stages = {stage: rows for (stage,), rows in grouped(result["rows"], "stage").items()}
    contrasts = stages.get("contrast", [])
    exact = [row for row in contrasts if "fdp_exact" in row]
    made = [
        Table("prior", f"Contrasts ({machine}).", (*_CASE, *_CONTRAST), _contrasts(contrasts), _NOTE),
        _exact(exact, machine),
        _predictions(contrasts, machine),
        _null(stages.get("null", []), machine),
        _undone(stages.get("undone", []), machine),
        _cost(stages.get("cost", []), machine),
    ]
    return [table for table in made if table.rows]


def _mean(rows: Sequence[Row], key: str) -> Value | None:
    """The mean with its standard error."""
    summary = summarise(row.get(key) for row in rows)
    return None if summary is None else Value(summary.mean, summary.se)


def _body(rows: Sequence[Row], columns: Sequence[Column]) -> list[dict[str, Any]]:
    """A row per case and method, in the order of `_NAMES`."""
    body = []
    for (data, others, n), case in grouped(rows, "data", "others", "n").items():
        by_method = {method: part for (method,), part in grouped(case, "method").items()}
        for method in (name for name in _NAMES if name in by_method):
            part = by_method[method]
            about = {"data": data, "others": others, "n": n, "method": _NAMES[method], "runs": len(part)}
            body.append(about | {c.key: _mean(part, c.key) for c in columns})
    return body


# ------------------------------------------------------------------------------------------------------ contrasts
def _contrasts(rows: Sequence[Row]) -> list[dict[str, Any]]:
    body = []
    for case in grouped(rows, "data", "others", "n").values():
        made = _body(case, _CONTRAST)
        looser = looser_level(case)
        body += [*made[:1], looser, *made[1:]] if looser else made
    return body


def looser_level(case: Sequence[Row]) -> dict[str, Any] | None:
    """The counts at the level at which their mean hard share of false calls is that of the profile, by interpolation.

    None where it is larger already at the nominal level.
    """
    counts, profile = ([row for row in case if row["method"] == method] for method in (COUNTS, PROFILE))
    by_level = grouped((at for row in counts for at in row["looser"]), "level")
    levels = [level for (level,) in by_level]
    means = {key: [_number(part, key) for part in by_level.values()] for key in _AT_LEVELS}
    hard = np.maximum.accumulate(means["fdp_hard"])
    wanted = _number(profile, "fdp_hard")
    number = int(np.searchsorted(hard, wanted, side="right"))  # NaN is the largest
    if not profile or not number:
        return None
    level = levels[-1]
    if number < len(levels):
        level = float(np.interp(wanted, hard[number - 1 : number + 1], levels[number - 1 : number + 1]))
    row = {key: counts[0][key] for key in ("data", "others", "n")}
    row |= {"method": f"{_NAMES[LOOSER]} ({level:.1%})", "runs": len(counts), "n_true": _mean(counts, "n_true")}
    return row | {key: float(np.interp(level, levels, values)) for key, values in means.items()}


_AT_LEVELS = ("n_called", "fdp_hard", "fdp_soft", "tpr")


def _number(rows: Sequence[Row], key: str) -> float:
    """The mean, NaN where there is none."""
    summary = summarise(row.get(key) for row in rows)
    return math.nan if summary is None else summary.mean


def _exact(rows: Sequence[Row], machine: str) -> Table:
    note = (
        "False, found and covered are by the exact truth; hard and soft shares by simulated cells that tell it, as on "
        "real cells: they should lie on both sides of the exact share. Unchanged: share of the calls of tests of any "
        "change whose gene does not change at all. Mean ± standard error."
    )
    return Table(
        "prior-exact", f"Simulations, whose truth is known ({machine}).", (*_CASE, *_EXACT), _body(rows, _EXACT), note
    )


def _predictions(rows: Sequence[Row], machine: str) -> Table:
    predicted = [row for row in rows if "prior_used" in row]
    note = (
        "Correlation: cross-fitted, of the fold changes by the counts with the predictions. Genes that "
        "follow: learned share. Mean ± standard error."
    )
    return Table(
        "prior-predictions",
        f"How good the predictions are ({machine}).",
        (*_CASE, *_PREDICTIONS),
        _body(predicted, _PREDICTIONS),
        note,
    )


# ------------------------------------------------------------------------------------- nothing differs, undone, cost
def _null(rows: Sequence[Row], machine: str) -> Table:
    body = []
    for (data, n), case in grouped(rows, "data", "n").items():
        by_method = {m: _false_calls(part) for (m,), part in grouped(case, "method").items()}
        body.append({"data": data, "population": _population(data), "n": n, **by_method})
    columns = [Column("data", "cells"), Column("population", "population"), Column("n", "cells a side")]
    columns += [Column(m, _NAMES[m]) for m in (COUNTS, PROFILE, MODEL) if any(m in row for row in body)]
    note = (
        "Both sides are random cells of one population. Splits with any call of all splits, and in brackets the mean "
        "number of genes called; all are false. Not compared: cells of other types."
    )
    return Table("prior-null", f"Nothing differs, target FDR 5 % ({machine}).", columns, body, note)


def _population(data: str) -> str:
    return "mixed" if MIXED in data else "one kind"


def _false_calls(rows: Sequence[Row]) -> str:
    called = [row["n_called"] for row in rows]
    return f"{sum(map(bool, called))} of {len(called)} ({sum(called) / len(called):.2f})"


def _undone(rows: Sequence[Row], machine: str) -> Table:
    body = []
    for row, part in zip(_body(rows, ()), _parts(rows), strict=True):
        undone, called, every = (sum(r[key] for r in part) for key in ("undone", "undone_called", "n_called"))
        body.append(
            row | {"undone": undone / len(part), "share": called / max(undone, 1), "of_calls": called / max(every, 1)}
        )
    columns = (
        *_CASE,
        Column("undone", "changes undone", 1),
        Column("share", "of these called, %", 1, 100),
        Column("of_calls", "share of all calls, %", 2, 100),
    )
    note = (
        "In the cells compared the side with more counts of a tenth of the changed genes is thinned to the truth's "
        "ratio, while other genes of their programmes, and all cells not compared, stay as they are. Shares are of "
        "sums over runs."
    )
    return Table("prior-undone", f"Changes undone ({machine}).", columns, body, note)


def _parts(rows: Sequence[Row]) -> Iterator[Sequence[Row]]:
    """The rows behind each row of `_body`."""
    for case in grouped(rows, "data", "others", "n").values():
        by_method = grouped(case, "method")
        yield from (by_method[name,] for name in _NAMES if (name,) in by_method)


def _cost(rows: Sequence[Row], machine: str) -> Table:
    columns = (
        *_CASE,
        Column("n_genes", "genes", 0),
        Column("n_other", "cells not compared", 0),
        Column("seconds", "seconds", 2),
    )
    note = "Seconds of `vaerdict.differential_expression`, one thread, one after the other. Mean ± standard error."
    return Table("prior-cost", f"Cost ({machine}).", columns, _body(rows, columns[-3:]), note)


# ------------------------------------------------------------------------------------------------------ sentences
USUAL = ("other kinds", "other patients")
"""The cells that are not compared in the usual setting: not of the kinds compared, nor chosen to be unrelated."""


def sentences(result: Row) -> Iterator[str]:
    """Real contrasts, populations that do not differ, and undone changes, by prior."""
    stages = {stage: rows for (stage,), rows in grouped(result["rows"], "stage").items()}
    real = [row for row in stages.get("contrast", []) if "fdp_exact" not in row and row["others"] in USUAL]
    for (n,), part in sorted(grouped(real, "n").items()):
        parts = [
            f"{_NAMES[method]} {_percent(rows, 'tpr')} with a hard FDP of {_percent(rows, 'fdp_hard')}"
            for method in (COUNTS, PROFILE, MODEL)
            if (rows := [row for row in part if row["method"] == method])
        ]
        others = " or ".join(USUAL)
        yield f"Real contrasts of {n} cells a side beside {others}, found at an FDR of 5%: {', '.join(parts)}."
    null = stages.get("null", [])
    for (population,), part in grouped(
        [{**row, "population": _population(row["data"])} for row in null], "population"
    ).items():
        counts = [
            f"{_NAMES[method]} {sum(row['n_called'] > 0 for row in rows)} of {len(rows)}"
            for (method,), rows in grouped(part, "method").items()
        ]
        yield f"Splits of {population} cells in which nothing differs, with a call: {', '.join(counts)}."
    undone = [
        f"{_NAMES[method]} {sum(r['undone_called'] for r in rows) / max(sum(r['n_called'] for r in rows), 1):.1%}"
        for (method,), rows in grouped(stages.get("undone", []), "method").items()
    ]
    if undone:
        yield f"Share of genes whose change was undone among all calls: {', '.join(undone)}."


def _percent(rows: Sequence[Row], key: str) -> str:
    return f"{_number(rows, key):.1%}"
