"""A page for any result file of rows: every list of records as a table, mean ± sd over seeds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from vaerdict.report.document import Document, Section
from vaerdict.report.summary import Row, grouped, mean_of, rows_of
from vaerdict.report.tables import Column, Table, cell


def document(results: dict[str, Any], manifest: dict[str, Any] | None) -> Document:
    """The report on an experiment that has no page of its own."""
    lists = [
        name for name, value in results.items() if isinstance(value, list) and value and isinstance(value[0], dict)
    ]
    sections = [Section(name.capitalize(), [table(name, rows_of(results, name))]) for name in lists]
    n = len(results.get("seeds") or [])
    words = f"All that was measured, mean ± sd over {n} seeds." if n > 1 else "All that was measured."
    return Document(f"{results['experiment'].capitalize()}", [words], sections, manifest)


def table(name: str, rows: Sequence[Row]) -> Table:
    """Rows that agree in all their words and whole numbers, their other numbers averaged over seeds."""
    keys = [key for key in dict.fromkeys(key for row in rows for key in row) if key != "seed"]
    measured = [key for key in keys if any(isinstance(row.get(key), float) for row in rows)]
    names = [
        key for key in keys if key not in measured and not any(isinstance(row.get(key), (list, dict)) for row in rows)
    ]
    body = [
        {**dict(zip(names, group, strict=True)), **{key: cell(mean_of(part, key)) for key in measured}}
        for group, part in grouped(rows, *names).items()
    ]
    columns = [
        *(Column(key, key.replace("_", " ")) for key in names),
        *(Column(key, key.replace("_", " "), 4) for key in measured),
    ]
    return Table(name, f"{name.capitalize()}, {len(rows)} rows.", columns, body)
