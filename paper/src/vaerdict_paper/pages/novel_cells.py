"""Tables of the benchmark of novel cells."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from vaerdict.report.document import Block
from vaerdict.report.records import Row, grouped
from vaerdict.report.tables import Column, Table, Value
from vaerdict_paper.pages.seed_statistics import summarise

OURS = "vaerdict"
_RULES = {
    OURS: "FDR 10 %",
    "AdaDetect, random forest": "FDR 10 %",
    "logistic regression": "max p < 0.5",
    "kNN vote": "max share < 0.8",
    "scANVI": "max p < 0.8",
}
_NOTE = (
    "Every type is hidden from the reference in turn; the share of novel cells is that of the query. Reference: 60 % "
    "of the known cells, half of which calibrate where a method has a rate. FDP: share of known cells among those "
    "called novel, zero if none is. vaerdict is the whole of `vaerdict.annotate`: where its test refuses the rate, "
    "also by chance at a level of 10 %, nothing is called, and the power counts as zero. AUROC is that of the score, "
    "where not refused. scANVI: one split of each type, 60 epochs of SCVI and 30 of SCANVI on reference and query "
    "together, fewer than its default of 400. Mean ± standard error over hidden types, of one type over runs."
)


def tables(result: Row, machine: str) -> list[Block]:
    """Hidden types by method and by type, the gate, calibration in the query, and cost."""
    stages = {stage: rows for (stage,), rows in grouped(result["rows"], "stage").items()}
    made = [
        _hidden(stages.get("hidden", []), machine),
        _types(stages.get("hidden", []), machine),
        _gate(stages.get("gate", []), machine),
        _calibrated(stages.get("calibrated", []), machine),
        _cost(stages.get("cost", []), machine),
    ]
    return [table for table in made if table.rows]


def _hidden(rows: Sequence[Row], machine: str) -> Table:
    body = []
    for (data, share, method), part in grouped(rows, "data", "share", "method").items():
        body.append(
            {
                **{"data": data, "share": share, "method": method, "rule": _RULES[method], "runs": len(part)},
                "fdp": _mean(part, "fdp"),
                "any": sum(row["n_called"] > 0 for row in part) / len(part),
                "power": _mean(part, "power"),
                "auroc": _mean(part, "auroc"),
                "refused": _mean(part, "refused"),
                "answered": _mean([row for row in part if not row.get("refused")], "power"),
            }
        )
    body.sort(key=lambda row: (row["data"] != "PBMC 3k", row["share"], list(_RULES).index(row["method"])))
    columns = [
        *(Column("data", "cells"), Column("share", "novel, %", 0, 100), Column("method", "method")),
        *(Column("rule", "rule"), Column("runs", "runs"), Column("fdp", "FDP, %", 1, 100)),
        *(Column("any", "runs with a call, %", 0, 100), Column("power", "novel cells called, %", 1, 100)),
        *(Column("answered", "where not refused, %", 1, 100), Column("auroc", "AUROC", 3)),
        Column("refused", "rate refused, %", 0, 100),
    ]
    return Table("novel-cells", f"Hidden types of cells ({machine}).", columns, body, _NOTE)


def _types(rows: Sequence[Row], machine: str) -> Table:
    ours = [row for row in rows if row["method"] == OURS and row["share"] and not row["refused"]]
    body = [
        {
            **{"data": data, "type": design},
            **{
                f"{key} {share}": _mean(rows, key) for (share,), rows in grouped(part, "share").items() for key in _KEYS
            },
        }
        for (data, design), part in grouped(ours, "data", "design").items()
    ]
    shares = sorted({row["share"] for row in ours})
    columns = [Column("data", "cells"), Column("type", "hidden type")]
    for share in shares:
        columns += [
            Column(f"power {share}", f"called, %, at {share:.0%} novel", 0, 100),
            Column(f"fdp {share}", "FDP, %", 1, 100),
        ]
    return Table(
        "novel-cells-types", f"The same by hidden type, vaerdict where not refused ({machine}).", columns, body
    )


_KEYS = ("power", "fdp")


def _gate(rows: Sequence[Row], machine: str) -> Table:
    body = [
        {
            **{"data": data, "design": design, "runs": len(part), "refused": _mean(part, "refused")},
            "auroc": _median([row["gate_auroc"] for row in part if row["gate_auroc"] is not None]),
            "any": sum(row["n_called"] > 0 for row in part),
        }
        for (data, design), part in grouped(rows, "data", "design").items()
    ]
    columns = [
        *(Column("data", "cells"), Column("design", "reference to query"), Column("runs", "runs")),
        *(Column("refused", "rate refused, %", 0, 100), Column("auroc", "median AUROC within types", 2)),
        Column("any", "runs with a (false) novel call"),
    ]
    note = "Nothing is novel. The level of the test is 10 %: exchangeable cells are refused in so many runs."
    return Table("novel-cells-gate", f"The test of exchangeability ({machine}).", columns, body, note)


def _calibrated(rows: Sequence[Row], machine: str) -> Table:
    body = [
        {
            **{"part": part, "share": share, "runs": len(each), "fdp": _mean(each, "fdp")},
            **{"power": _mean(each, "power"), "refused": _mean(each, "refused"), "fewest": _mean(each, "fewest")},
            "n_novel": _mean(each, "n_novel"),
        }
        for (part, share), each in grouped(rows, "part", "share").items()
    ]
    columns = [
        *(Column("part", "query cells that calibrate, % of known", 0, 100), Column("share", "novel, %", 0, 100)),
        *(Column("runs", "runs"), Column("fdp", "FDP, %", 1, 100), Column("power", "novel cells called, %", 1, 100)),
        *(Column("refused", "rate refused, %", 0, 100), Column("n_novel", "novel cells", 0)),
        Column("fewest", "fewest that can be called", 0),
    ]
    title = f"Kang: control cells as reference, stimulated cells as query, calibrated in the query ({machine})."
    return Table("novel-cells-calibrated", title, columns, body)


def _cost(rows: Sequence[Row], machine: str) -> Table:
    columns = [
        *(Column("design", "cells x genes"), Column("seconds", "seconds", 1), Column("peak_gb", "peak memory, GB", 2)),
    ]
    note = "The command on two files of simulated counts, half of the cells in each, with audit and page; 2 CPU cores."
    return Table(
        "novel-cells-cost", f"Cost of `vaerdict annotate` ({machine}).", columns, [dict(row) for row in rows], note
    )


def sentences(result: Row) -> Iterator[str]:
    """The rate and power of ours for each data set and share of novel cells."""
    ours = [row for row in result["rows"] if row["stage"] == "hidden" and row["method"] == OURS]
    for (data, share), part in grouped(ours, "data", "share").items():
        fdp = _mean(part, "fdp")
        found = _mean([row for row in part if not row["refused"]], "power")
        called = f", {found.value:.0%} of the novel cells called where the rate is not refused" if found else ""
        assert fdp is not None
        yield f"{data}, {share:.0%} novel cells, FDR 10%: FDP {fdp.value:.1%}{called} ({len(part)} runs)."


def _mean(rows: Sequence[Row], key: str) -> Value | None:
    """The mean with its standard error over designs (hidden types), or over the runs of a single one."""
    by_design = [summarise(row.get(key) for row in part) for part in grouped(rows, "design").values()]
    means = [summary.mean for summary in by_design if summary is not None]
    summary = summarise(means if len(means) > 1 else (row.get(key) for row in rows))
    return None if summary is None else Value(summary.mean, summary.se)


def _median(values: Sequence[float]) -> float | None:
    return sorted(values)[len(values) // 2] if values else None
