"""Tables as data: columns that know how to print, rows of plain values, rendered to HTML, Markdown and plain text."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Any, NamedTuple

from vaerdict.report.summary import Row, Summary, mean_of, number

ABSENT = "\N{EN DASH}"
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")


class Value(NamedTuple):
    """A number with the spread printed after it, a remark, and whether it is the best of its kind."""

    value: float
    spread: float | None = None
    remark: str = ""
    best: bool = False


@dataclass(frozen=True)
class Column:
    """How the values under one heading print: `scale` times the number, to so many digits."""

    key: str
    title: str
    digits: int = 2
    scale: float = 1.0
    signed: bool = False

    def text(self, cell: Any) -> str:
        """The cell as it is printed."""
        if cell is None:
            return ABSENT
        if isinstance(cell, Value):
            spread = "" if cell.spread is None else f" ± {self._number(cell.spread)}"
            return f"{self._number(cell.value, self.signed)}{spread}{cell.remark}"
        return self._number(cell, self.signed) if isinstance(cell, float) else str(cell)

    def _number(self, value: float, signed: bool = False) -> str:
        return number(value * self.scale, self.digits, signed=signed)


@dataclass(frozen=True)
class Table:
    """Rows under headings with a caption; the first column names the row.

    A `detail` stands folded on the page and is left out of the README.
    """

    name: str
    caption: str
    columns: Sequence[Column]
    rows: Sequence[dict[str, Any]]
    note: str = ""
    detail: bool = False

    def texts(self) -> list[list[str]]:
        """Every cell as text, one list a row."""
        return [[column.text(row.get(column.key)) for column in self.columns] for row in self.rows]


def cell(summary: Summary | None) -> Value | None:
    """Mean ± standard deviation, with the count where some values were missing."""
    if summary is None:
        return None
    remark = f" ({summary.missing} missing)" if summary.missing else ""
    return Value(summary.mean, summary.sd, remark)


def cells(rows: Sequence[Row], columns: Iterable[Column]) -> dict[str, Value | None]:
    """Every column's key over seeds, as cells of one row."""
    return {column.key: cell(mean_of(rows, column.key)) for column in columns}


def mark(cells: dict[str, Any], pick: Callable[[Iterable[float]], float] = min) -> dict[str, Any]:
    """The cells with the best number among them marked."""
    numbers = {key: value.value for key, value in cells.items() if isinstance(value, Value)}
    if len(numbers) < 2:
        return cells
    best = pick(numbers.values())
    return {key: v._replace(best=numbers[key] == best) if key in numbers else v for key, v in cells.items()}


def mark_column(
    rows: Sequence[dict[str, Any]], key: str, pick: Callable[[Iterable[float]], float] = min
) -> list[dict[str, Any]]:
    """The rows with the best number under `key` marked."""
    marked = mark({str(index): row.get(key) for index, row in enumerate(rows)}, pick)
    return [{**row, key: marked[str(index)]} for index, row in enumerate(rows)]


@dataclass(frozen=True)
class _Grid:
    """The printed cells with their widths, for plain text."""

    header: list[str]
    rows: list[list[str]]
    widths: list[int] = field(init=False)

    def __post_init__(self) -> None:
        columns = zip(self.header, *self.rows, strict=True)
        object.__setattr__(self, "widths", [max(map(len, column)) for column in columns])

    def line(self, texts: list[str]) -> str:
        first, *rest = [
            t.ljust(w) if i == 0 else t.rjust(w) for i, (t, w) in enumerate(zip(texts, self.widths, strict=True))
        ]
        return "  ".join([first, *rest]).rstrip()


def plain(table: Table) -> str:
    """The table as aligned text; a star marks the best."""
    starred = [
        [text + "*" * is_best(row.get(column.key)) for text, column in zip(texts, table.columns, strict=True)]
        for texts, row in zip(table.texts(), table.rows, strict=True)
    ]
    grid = _Grid([column.title for column in table.columns], starred)
    rule = "-" * len(grid.line(["-" * w for w in grid.widths]))
    lines = [table.caption, "", grid.line(grid.header), rule, *map(grid.line, grid.rows)]
    return "\n".join([*lines, *([table.note] if table.note else [])])


def markdown(table: Table, *, folded: bool = False) -> str:
    """The table in GitHub's Markdown, the best in bold; `folded` it shows its caption until it is clicked."""
    header = [column.title for column in table.columns]
    align = ["---", *(["---:"] * (len(header) - 1))]
    body = [
        [f"**{_pipe(t)}**" if is_best(row.get(c.key)) else _pipe(t) for t, c in zip(texts, table.columns, strict=True)]
        for texts, row in zip(table.texts(), table.rows, strict=True)
    ]
    lines = ["| " + " | ".join(cells) + " |" for cells in ([_pipe(h) for h in header], align, *body)]
    note = ["", f"<sub>{markdown_text(table.note)}</sub>"] if table.note else []
    if folded:
        title = f"<details><summary>{escape(printable(table.caption), quote=False)}</summary>"
        return "\n".join([title, "", *lines, *note, "", "</details>"])
    return "\n".join([f"**{markdown_text(table.caption)}**", "", *lines, *note])


def printable(text: str) -> str:
    """The text with control characters replaced, so that neither a terminal nor a browser obeys them."""
    return _CONTROL.sub("\ufffd", text)


def markdown_text(text: str) -> str:
    """Text that Markdown will print as it is."""
    text = escape(" ".join(printable(text).split()), quote=False)
    for mark_ in ("\\", "`", "*", "_", "[", "]"):
        text = text.replace(mark_, "\\" + mark_)
    return text


def _pipe(text: str) -> str:
    return markdown_text(text).replace("|", "\\|")


def is_best(cell: Any) -> bool:
    """Whether a cell is marked."""
    return isinstance(cell, Value) and cell.best
