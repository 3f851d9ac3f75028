"""A report as data: words first, then sections of text, claims, tables and pictures; as Markdown and plain text."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from vaerdict.report import tables
from vaerdict.report.claims import Claim
from vaerdict.report.tables import Table, markdown_text

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Picture:
    """A figure still to be drawn, with the words for those who do not see it."""

    name: str
    caption: str
    alt: str
    draw: Callable[[], Figure]


@dataclass(frozen=True)
class Live:
    """Markup that the document's own script brings to life; only a page shows it."""

    html: str


Block = str | Table | Picture | Live | Sequence[Claim]
"""A paragraph, a table, a picture, something to touch or a list of claims."""


@dataclass(frozen=True)
class Section:
    """Blocks under a heading."""

    heading: str
    blocks: Sequence[Block]


@dataclass(frozen=True)
class Document:
    """A whole report. `summary` is the verdict in words, `manifest` what produced the results.

    `style` and `script` are added to the page's own, for its live blocks.
    """

    title: str
    summary: Sequence[str]
    sections: Sequence[Section]
    manifest: dict[str, Any] | None = field(default=None)
    style: str = ""
    script: str = ""

    def pictures(self) -> list[Picture]:
        """All pictures, in order."""
        return [block for section in self.sections for block in section.blocks if isinstance(block, Picture)]


def slug(name: str) -> str:
    """A name as part of a file name or of an id: letters, digits and hyphens alone."""
    return re.sub(r"[^0-9A-Za-z]+", "-", name).strip("-")[:60] or "unnamed"


def markdown(document: Document) -> str:
    """The summary, the claims and the tables that are not details, for a README."""
    blocks = [block for section in document.sections for block in section.blocks]
    parts = [_markdown_block(block) for block in blocks]
    return "\n\n".join([*map(markdown_text, document.summary), *filter(None, parts)])


def brief(document: Document) -> str:
    """The summary, the first claims with their verdicts alone, and the first table that is no detail, in Markdown.

    The table stands folded where there are claims to read instead.
    """
    blocks = [block for section in document.sections for block in section.blocks]
    claims = next((b for b in blocks if not isinstance(b, (str, Picture, Live, Table)) and b), ())
    table = next((b for b in blocks if isinstance(b, Table) and not b.detail), None)
    verdicts = "\n".join(f"- **{c.word}**: {markdown_text(c.text)}" for c in claims)
    shown = "" if table is None else tables.markdown(table, folded=bool(claims))
    return "\n\n".join(filter(None, [*map(markdown_text, document.summary), verdicts, shown]))


def _markdown_block(block: Block) -> str:
    if isinstance(block, (str, Picture, Live)):
        return ""
    if isinstance(block, Table):
        return "" if block.detail else tables.markdown(block)
    lines = [
        f"| {markdown_text(c.text)} | **{c.word}** | {'<br>'.join(map(markdown_text, _sentences(c)))} |" for c in block
    ]
    return "\n".join(["| claim | verdict | evidence |", "|---|---|---|", *lines]) if lines else ""


def text(document: Document, most: int | None = None) -> str:
    """The summary, the claims and the tables that are not details, for a terminal; of at `most` so many sections."""
    blocks = [block for section in document.sections[:most] for block in section.blocks]
    parts = [_plain_block(block) for block in blocks]
    return tables.printable("\n\n".join([document.title, *document.summary, *filter(None, parts)]))


def _plain_block(block: Block) -> str:
    if isinstance(block, (str, Picture, Live)):
        return ""
    if isinstance(block, Table):
        return "" if block.detail else tables.plain(block)
    return "\n".join(
        f"{claim.word.upper()}: {claim.text}" + "".join(f"\n    {s}" for s in _sentences(claim)) for claim in block
    )


def _sentences(claim: Claim) -> list[str]:
    return [*(evidence.sentence for evidence in claim.evidence), *([claim.note] if claim.note else [])]
