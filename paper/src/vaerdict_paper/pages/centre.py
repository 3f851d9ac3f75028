"""The table of the benchmark of the centre of fold changes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from vaerdict.report.document import Block
from vaerdict.report.records import Row, grouped
from vaerdict.report.tables import Column, Table, number
from vaerdict_paper.benchmarks.centre import SIMULATED
from vaerdict_paper.pages.seed_statistics import cell, summarise

_COLUMNS = (
    *(Column("data", "cells"), Column("changed", "genes changed"), Column("size", "cells a side")),
    *(Column("lists", "lists"), Column("wrong", "wrong centres"), Column("seen", "of these doubted")),
    *(Column("falsely", "right ones doubted"), Column("off", "centre off by", 2)),
    *(Column("fdp", "FDP, %", 1, 100), Column("fdp_kept", "FDP of lists not doubted, %", 1, 100)),
    *(Column("called_kept", "their genes", 0), Column("tpr_kept", "found by them, %", 1, 100)),
    Column("coverage_kept", "their 90 % intervals cover, %", 1, 100),
)
_HALF = 0.5  # of the genes
_NOTE = (
    "Target FDR 5 %, delta 0.5. Off: distance of the centre from the change of the genes that do not change, in log2 "
    "units. Wrong: by more than half of delta, which is what the verdict asks about. Doubted: the verdict calls the "
    "centre unsure. The planted changes are between 0.5 and 2 log2 units. Mean ± sd over lists."
)


def tables(result: Row, machine: str) -> list[Block]:
    """One row per data set, changes and number of cells."""
    body = [
        {"data": data, "changed": _changed(rows[0]), "size": size, **_summary(rows)}
        for (data, _, _, size), rows in grouped(result["rows"], "data", "share", "direction", "size").items()
    ]
    caption = f"The centre of fold changes, and what the verdict of vaerdict de says of it ({machine})."
    return [Table("centre", caption, _COLUMNS, body, _NOTE)]


def _summary(rows: Sequence[Row]) -> dict[str, Any]:
    kept = [row for row in rows if not row["doubted"]]
    means = {"off": "off", "fdp": "fdp"}
    means_kept = {"fdp_kept": "fdp", "called_kept": "n_called", "tpr_kept": "tpr", "coverage_kept": "coverage"}
    return {
        **_counts(rows),
        **{name: cell(summarise(row[key] for row in rows)) for name, key in means.items()},
        **{name: cell(summarise(row[key] for row in kept)) for name, key in means_kept.items()},
    }


def _counts(rows: Sequence[Row]) -> dict[str, int]:
    wrong = [row for row in rows if row["wrong"]]
    seen = sum(row["doubted"] for row in wrong)
    falsely = sum(row["doubted"] for row in rows) - seen
    return {"lists": len(rows), "wrong": len(wrong), "seen": seen, "falsely": falsely}


def sentences(result: Row) -> Iterator[str]:
    """How many wrong centres are doubted, and the FDP with and without the lists that are."""
    groups: dict[str, list[Row]] = {}
    for row in result["rows"]:
        groups.setdefault(_group(row), []).append(row)
    for name, rows in groups.items():
        n, kept = _counts(rows), [row["fdp"] for row in rows if not row["doubted"]]
        right = n["lists"] - n["wrong"]
        yield (
            f"{name}: the verdict doubts {n['seen']} of {n['wrong']} wrong centres and {n['falsely']} of {right} right "
            f"ones. The mean FDP is {_percent([row['fdp'] for row in rows])} of all lists, {_percent(kept)} of those "
            "not doubted."
        )


def _group(row: Row) -> str:
    if row["stage"] == SIMULATED:
        return f"Simulators, {'all cells' if row['size'] == 'all' else 'few cells'}"
    if row["share"] <= _HALF:
        return "Real cells, changes planted in at most half of the genes"
    return f"Real cells, changes planted in {row['share']:.0%} of the genes, {row['direction']}"


def _changed(row: Row) -> str:
    return "by the simulator" if row["share"] is None else f"{row['share']:.0%}, {row['direction']}"


def _percent(values: Sequence[float]) -> str:
    mean = summarise(values)
    return "none" if mean is None else f"{number(100 * mean.mean, 1)}%"
