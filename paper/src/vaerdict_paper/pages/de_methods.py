"""Tables of the benchmark of methods of differential expression."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from vaerdict.report.document import Block
from vaerdict.report.records import Row, grouped
from vaerdict.report.tables import Column, Table
from vaerdict_paper.pages.seed_statistics import cell, summarise

_PLANTED = (
    Column("n_true", "changed genes", 0),
    Column("n_called", "called", 1),
    Column("fdp", "FDP, %", 1, 100),
    Column("tpr", "found, %", 1, 100),
    Column("tpr_matched", "found at an FDP of 5 %, %", 1, 100),
    Column("auprc", "average precision", 3),
    Column("fdp_delta", "FDP by delta, %", 1, 100),
    Column("tpr_delta", "found by delta, %", 1, 100),
    Column("tpr_matched_delta", "found at an FDP of 5 % by delta, %", 1, 100),
    Column("auprc_delta", "average precision by delta", 3),
    Column("coverage", "90 % intervals cover, %", 1, 100),
    Column("coverage_changed", "of changed genes, %", 1, 100),
    Column("seconds", "seconds", 2),
)
_NOTE = (
    "Target FDR 5 %, delta 0.5. All methods have the same cells and genes. Changed genes, FDP and those found are by "
    "the question of a method: any change, or one beyond delta; columns by delta are by changes of at least delta for "
    "all. Found at an FDP of 5 %: in the longest beginning of a method's ranking whose realised FDP is at most 5 %. "
    "Mean ± sd over splits. DESeq2 tests cells in the first splits only."
)


def tables(result: Row, machine: str) -> list[Block]:
    """False calls where nothing changed, one row per design, and the metrics of planted changes by method."""
    rows = result["rows"]
    made = [_null([row for row in rows if row["stage"] == "null"], machine)]
    made.append(_planted([row for row in rows if row["stage"] == "planted"], machine))
    return [table for table in made if table.rows]


def _null(rows: Sequence[Row], machine: str) -> Table:
    methods = list(dict.fromkeys(row["method"] for row in rows))
    body = []
    for (data, design), splits in grouped(rows, "data", "design").items():
        by_method = {method: _false_calls(part) for (method,), part in grouped(splits, "method").items()}
        about = {"data": data, "design": design, "replicates": splits[0]["replicates"]}
        body.append({**about, "n_genes": max(row["n_genes"] for row in splits), **by_method})
    columns = [
        *(Column("data", "cells"), Column("design", "sides"), Column("replicates", "replicates")),
        Column("n_genes", "genes"),
        *(Column(method, method) for method in methods),
    ]
    note = "Splits with any discovery of all splits, and in brackets the mean number of genes called; all are false."
    return Table("de-methods-null", f"Nothing changed, target FDR 5 % ({machine}).", columns, body, note)


def _false_calls(rows: Sequence[Row]) -> str:
    called = [row["n_called"] for row in rows]
    return f"{sum(map(bool, called))} of {len(called)} ({sum(called) / len(called):.1f})"


def _planted(rows: Sequence[Row], machine: str) -> Table:
    body: list[dict[str, Any]] = []
    for (data, design, method), part in grouped(rows, "data", "design", "method").items():
        about = {"data": data, "design": design, "method": method, "question": part[0]["question"], "splits": len(part)}
        body.append(about | {c.key: cell(summarise(row.get(c.key) for row in part)) for c in _PLANTED})
    columns = [
        *(Column("data", "cells"), Column("design", "sides"), Column("method", "method")),
        *(Column("question", "question"), Column("splits", "splits"), *_PLANTED),
    ]
    return Table("de-methods-planted", f"Changes planted by thinning ({machine}).", columns, body, _NOTE)


def sentences(result: Row) -> Iterator[str]:
    """How many of all splits without any change have a discovery, by method."""
    null = [row for row in result["rows"] if row["stage"] == "null"]
    counts = [
        f"{method} in {sum(row['n_called'] > 0 for row in part)} of {len(part)}"
        for (method,), part in grouped(null, "method").items()
    ]
    if counts:
        yield f"Where nothing changed, a discovery at an FDR of 5% is made by {', '.join(counts)} splits."
