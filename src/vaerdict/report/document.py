"""A report as data: a summary, then sections of text, statements, tables and pictures; as Markdown and plain text."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from vaerdict.report import tables
from vaerdict.report.tables import Table, markdown_text

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Picture:
    """A figure to be drawn, with the text for readers who do not see it."""

    name: str
    caption: str
    alt: str
    draw: Callable[[], Figure]


@dataclass(frozen=True)
class Live:
    """Interactive markup driven by the document's own script; only a page shows it."""

    html: str


class Statement(Protocol):
    """A sentence with a verdict and the lines of evidence behind it.

    `tone` is ``good``, ``bad`` or ``open``: the colour and symbol of the verdict's badge.
    """

    @property
    def text(self) -> str:
        """The sentence."""
        ...

    @property
    def verdict(self) -> str:
        """A few words on whether it is true."""
        ...

    @property
    def tone(self) -> str:
        """How the verdict is shown."""
        ...

    @property
    def lines(self) -> Sequence[str]:
        """The evidence."""
        ...


class Finding(NamedTuple):
    """A `Statement` of a report."""

    text: str
    verdict: str
    tone: str
    lines: Sequence[str]


TONES = {"OK": "good", "CAUTION": "open", "REFUSE": "bad"}
"""How the names of verdicts are shown."""

Block = str | Table | Picture | Live | Sequence[Statement]
"""A paragraph, a table, a picture, interactive markup or a list of statements."""


@dataclass(frozen=True)
class Section:
    """Blocks under a heading; a `folded` one shows its heading alone until it is opened."""

    heading: str
    blocks: Sequence[Block]
    folded: bool = False


@dataclass(frozen=True)
class Document:
    """A whole report. `summary` holds the main findings in sentences, `manifest` what produced the results.

    `tone` is ``bad`` where the summary says that the results are not to be used, which its colour shows. `style` and
    `script` are appended to those of the page, for its interactive blocks, and `menu` to its side menu.
    """

    title: str
    summary: Sequence[str]
    sections: Sequence[Section]
    manifest: dict[str, Any] | None = field(default=None)
    style: str = ""
    script: str = ""
    menu: Live = Live("")
    tone: str = ""

    def pictures(self) -> list[Picture]:
        """All pictures, in order of appearance."""
        return [block for block in _blocks(self.sections) if isinstance(block, Picture)]


def present(sections: Sequence[tuple[str, Sequence[Block | None]]]) -> list[Section]:
    """Sections from headings and blocks; blocks that are None or empty are left out, and so are empty sections."""
    nonempty = [(heading, [block for block in blocks if block]) for heading, blocks in sections]
    return [Section(heading, blocks) for heading, blocks in nonempty if blocks]


def slug(name: str) -> str:
    """A name as part of a file name or an id: letters, digits and hyphens only."""
    return re.sub(r"[^0-9A-Za-z]+", "-", name).strip("-")[:60] or "unnamed"


def markdown(document: Document) -> str:
    """The summary, the statements and the tables that are not details."""
    parts = [_markdown_block(block) for block in _blocks(document.sections)]
    return "\n\n".join([*map(markdown_text, document.summary), *filter(None, parts)])


def brief(document: Document) -> str:
    """The summary, the first statements with their verdicts, and the first table that is no detail, in Markdown.

    The table is folded if there are statements.
    """
    blocks = _blocks(document.sections)
    statements = next((b for b in blocks if not isinstance(b, (str, Picture, Live, Table)) and b), ())
    table = next((b for b in blocks if isinstance(b, Table) and not b.detail), None)
    verdicts = "\n".join(f"- **{s.verdict}**: {markdown_text(s.text)}" for s in statements)
    shown = "" if table is None else tables.markdown(table, folded=bool(statements))
    return "\n\n".join(filter(None, [*map(markdown_text, document.summary), verdicts, shown]))


def text(document: Document, n_sections: int | None = None) -> str:
    """The summary, the statements and the tables that are not details, for a terminal; all sections by default."""
    parts = [_plain_block(block) for block in _blocks(document.sections[:n_sections])]
    return tables.printable("\n\n".join([document.title, *document.summary, *filter(None, parts)]))


def _blocks(sections: Sequence[Section]) -> list[Block]:
    return [block for section in sections for block in section.blocks]


def _markdown_block(block: Block) -> str:
    if isinstance(block, (str, Picture, Live)):
        return ""
    if isinstance(block, Table):
        return "" if block.detail else tables.markdown(block)
    rows = [
        f"| {markdown_text(s.text)} | **{s.verdict}** | {'<br>'.join(map(markdown_text, s.lines))} |" for s in block
    ]
    return "\n".join(["| claim | verdict | evidence |", "|---|---|---|", *rows]) if rows else ""


def _plain_block(block: Block) -> str:
    if isinstance(block, (str, Picture, Live)):
        return ""
    if isinstance(block, Table):
        return "" if block.detail else tables.plain(block)
    return "\n".join(f"{s.verdict.upper()}: {s.text}" + "".join(f"\n    {line}" for line in s.lines) for s in block)
