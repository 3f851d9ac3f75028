"""Tables as data: columns that know how to print, rows of plain values, rendered to Markdown and plain text."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any, NamedTuple

ABSENT = "\N{EN DASH}"
LONGEST_NAME = 120
"""Letters of a name, or of a word, that are shown at most."""

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")
_LONG = re.compile(rf"(\S{{{LONGEST_NAME}}})\S{{{LONGEST_NAME},}}")  # paths in a command are shorter

Pick = Callable[..., Any]
"""`min` or `max`: which value is the best."""


class Value(NamedTuple):
    """A number with the spread printed after it, a remark, and whether it is the best of its kind."""

    value: float
    spread: float | None = None
    remark: str = ""
    best: bool = False


@dataclass(frozen=True)
class Column:
    """How values print: `scale` times the number, to `digits` decimals, to two significant digits where None."""

    key: str
    title: str
    digits: int | None = 2
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

    A `detail` is collapsed on the page and left out of Markdown and plain text.
    """

    name: str
    caption: str
    columns: Sequence[Column]
    rows: Sequence[dict[str, Any]]
    note: str = ""
    detail: bool = False

    def cells(self) -> list[list[tuple[str, bool]]]:
        """The text of every cell and whether it is the best of its kind, one list per row."""
        return [[(c.text(value := row.get(c.key)), is_best(value)) for c in self.columns] for row in self.rows]


def mark(cells: dict[str, Any], pick: Pick = min) -> dict[str, Any]:
    """The cells with the best number among them marked."""
    numbers = {key: value.value for key, value in cells.items() if isinstance(value, Value)}
    if len(numbers) < 2:
        return cells
    best = pick(numbers.values())
    return {key: v._replace(best=numbers[key] == best) if key in numbers else v for key, v in cells.items()}


def mark_column(rows: Sequence[dict[str, Any]], key: str, pick: Pick = min) -> list[dict[str, Any]]:
    """The rows with the best number under `key` marked."""
    marked = mark({str(index): row.get(key) for index, row in enumerate(rows)}, pick)
    return [{**row, key: marked[str(index)]} for index, row in enumerate(rows)]


def is_best(cell: Any) -> bool:
    """Whether a cell is marked as the best of its kind."""
    return isinstance(cell, Value) and cell.best


def number(value: float, digits: int | None, *, signed: bool = False) -> str:
    """A number in print, with a true minus sign; two significant digits where `digits` is None."""
    form = ".2g" if digits is None else f".{digits}f"
    return f"{value:{'+' if signed else ''}{form}}".replace("-", "\N{MINUS SIGN}")


# --------------------------------------------------------------------------------------------------------- forms
def plain(table: Table) -> str:
    """The table as aligned text; a star marks the best."""
    header = [column.title for column in table.columns]
    body = [[text + "*" * best for text, best in row] for row in table.cells()]
    widths = [max(map(len, column)) for column in zip(header, *body, strict=True)]
    rule = "-" * (sum(widths) + 2 * (len(widths) - 1))
    lines = [table.caption, "", _aligned(header, widths), rule, *(_aligned(row, widths) for row in body)]
    return "\n".join([*lines, *([table.note] if table.note else [])])


def _aligned(texts: Sequence[str], widths: Iterable[int]) -> str:
    """One line of text; the first column is aligned to the left, the others to the right."""
    padded = [t.rjust(w) if i else t.ljust(w) for i, (t, w) in enumerate(zip(texts, widths, strict=True))]
    return "  ".join(padded).rstrip()


def markdown(table: Table, *, folded: bool = False) -> str:
    """The table in GitHub's Markdown, the best in bold; `folded` it shows its caption until it is clicked."""
    header = [_pipe(column.title) for column in table.columns]
    align = ["---", *(["---:"] * (len(header) - 1))]
    body = [[f"**{_pipe(text)}**" if best else _pipe(text) for text, best in row] for row in table.cells()]
    lines = ["| " + " | ".join(cells) + " |" for cells in (header, align, *body)]
    note = ["", f"<sub>{markdown_text(table.note)}</sub>"] if table.note else []
    if folded:
        title = f"<details><summary>{escape(printable(table.caption), quote=False)}</summary>"
        return "\n".join([title, "", *lines, *note, "", "</details>"])
    return "\n".join([f"**{markdown_text(table.caption)}**", "", *lines, *note])


def printable(text: str) -> str:
    """The text with control characters replaced, so that no terminal or browser acts on them, and endless words cut."""
    return _LONG.sub(r"\1…", _CONTROL.sub("\ufffd", text))


def clipped(name: str) -> str:
    """A name as it is shown: printable, and cut if it is long."""
    name = printable(name)
    return name if len(name) <= LONGEST_NAME else name[: LONGEST_NAME - 1] + "…"


def markdown_text(text: str) -> str:
    """Text that Markdown prints literally."""
    text = escape(" ".join(printable(text).split()), quote=False)
    for character in ("\\", "`", "*", "_", "[", "]"):
        text = text.replace(character, "\\" + character)
    return text


def _pipe(text: str) -> str:
    return markdown_text(text).replace("|", "\\|")
