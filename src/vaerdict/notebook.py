"""What notebooks show of results: small HTML with every text escaped, and matplotlib axes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import TYPE_CHECKING, Any

from vaerdict.optional import require

if TYPE_CHECKING:
    from matplotlib.axes import Axes

GOOD, WARNING, BAD, GREY = "#0072b2", "#e69f00", "#d55e00", "#7f8a93"
"""Colours that colour-blind readers can tell apart, and one that is readable on white and on black."""

_MOST_ROWS = 10
_LONGEST = 60  # letters of a name


def axes_or_new(ax: Axes | None) -> Axes:
    """The axes given, or those of a new figure."""
    if ax is not None:
        return ax
    return require("matplotlib.pyplot", "plot").subplots(layout="constrained")[1]


def short(text: object) -> str:
    """A name cut to a length that fits a line."""
    name = str(text)
    return name if len(name) <= _LONGEST else name[: _LONGEST - 1] + "…"


def html(title: str, sentences: Sequence[str], rows: Sequence[Mapping[str, Any]], notes: Sequence[str] = ()) -> str:
    """A title, sentences, the first rows of a table, and notes that are folded."""
    parts = [f"<strong>{_text(title)}</strong>", *(f"<div>{_text(sentence)}</div>" for sentence in sentences)]
    if rows:
        head = "".join(f"<th>{_text(name)}</th>" for name in rows[0])
        body = "".join(
            "<tr>" + "".join(f"<td>{_text(value)}</td>" for value in row.values()) + "</tr>"
            for row in rows[:_MOST_ROWS]
        )
        parts.append(f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>")
    if len(rows) > _MOST_ROWS:
        parts.append(f"<div>and {len(rows) - _MOST_ROWS:,} more</div>")
    if notes:
        listed = "".join(f"<li>{_text(note)}</li>" for note in notes)
        parts.append(f"<details><summary>{len(notes)} notes</summary><ul>{listed}</ul></details>")
    return "<div>" + "".join(parts) + "</div>"


def _text(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.3g}"
    return escape(value if isinstance(value, str) else short(value), quote=True)


def counted(n: int, what: str) -> str:
    """A number with its noun.

    >>> counted(1, "gene"), counted(2000, "gene")
    ('1 gene', '2,000 genes')
    """
    return f"{n:,} {what}{'' if n == 1 else 's'}"
