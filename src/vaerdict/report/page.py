"""One self-contained web page from a document: it opens offline, loads nothing, and escapes every string."""

from __future__ import annotations

import base64
import hashlib
import html
from collections.abc import Mapping, Sequence
from importlib.resources import files
from typing import Any

from vaerdict.report.document import Block, Document, Live, Picture, Section, Statement, slug
from vaerdict.report.tables import Column, Table, Value, is_best, printable

_SYMBOLS = {"good": "✓", "bad": "✗", "open": "?"}


def page(document: Document, drawings: Mapping[str, str]) -> str:
    """The page as HTML. `drawings` holds the SVG of each picture by the picture's name."""
    ids = _ids([section.heading for section in document.sections])
    sections = "\n".join(
        _section(section, name, drawings) for section, name in zip(document.sections, ids, strict=True)
    )
    summary = "\n".join(f"<p>{text(sentence)}</p>" for sentence in document.summary)
    script = "\n".join(filter(None, (_asset("page.js"), document.script)))
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{_policy(script)}">
<title>{text(document.title)}</title>
<style>{_asset("page.css")}{document.style}</style>
</head>
<body>
{_menu(document, ids)}<main>
<h1>{text(document.title)}</h1>
<section class="{" ".join(filter(None, ("summary", document.tone)))}" aria-label="Summary">
{summary}
</section>
{sections}
{_manifest(document.manifest)}
</main>
<script>{script}</script>
</body>
</html>
"""


def _asset(name: str) -> str:
    return (files("vaerdict.report") / name).read_text(encoding="utf-8").strip()


def text(value: Any) -> str:
    """Any value as text that HTML prints literally; control characters become the replacement character."""
    return html.escape(printable(str(value)), quote=True)


def _policy(script: str) -> str:
    """Content security policy: nothing is loaded, images are part of the page, only this script runs."""
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return f"default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"


def _ids(headings: Sequence[str]) -> list[str]:
    """An id for each section, by its heading and, where two are alike, its number."""
    slugs = [slug(heading).lower() for heading in headings]
    return [f"section-{name}" + (f"-{i}" if slugs.count(name) > 1 else "") for i, name in enumerate(slugs)]


def _menu(document: Document, ids: Sequence[str]) -> str:
    """The side menu, on pages with several sections; the script folds it on narrow screens."""
    if len(ids) < 2:
        return ""
    both = zip(document.sections, ids, strict=True)
    links = "\n".join(f'<li><a href="#{name}">{text(section.heading)}</a></li>' for section, name in both)
    return (
        f'<nav class="menu" aria-label="Contents"><details open>\n<summary>Contents</summary>\n<ul>\n{links}\n</ul>\n'
        f"{document.menu.html}</details></nav>\n"
    )


def _section(section: Section, name: str, drawings: Mapping[str, str]) -> str:
    blocks, heading = "\n".join(_block(block, drawings) for block in section.blocks), text(section.heading)
    if section.folded:
        inner = f"<details>\n<summary><h2>{heading}</h2></summary>\n{blocks}\n</details>"
        return f'<section id="{name}" class="folded">\n{inner}\n</section>'
    return f'<section id="{name}">\n<h2>{heading}</h2>\n{blocks}\n</section>'


def _block(block: Block, drawings: Mapping[str, str]) -> str:
    if isinstance(block, str):
        return f"<p>{text(block)}</p>"
    if isinstance(block, Table):
        return _table(block)
    if isinstance(block, Live):
        return block.html
    if isinstance(block, Picture):
        caption = f"<figcaption>{text(block.caption)}</figcaption>"
        return f'<figure class="picture">\n{caption}\n{drawings[block.name]}\n</figure>'
    return '<ul class="statements">\n' + "\n".join(map(_statement, block)) + "\n</ul>"


def _statement(statement: Statement) -> str:
    symbol = f'<span aria-hidden="true">{_SYMBOLS[statement.tone]}</span>'
    badge = f'<span class="verdict {statement.tone}">{symbol} {text(statement.verdict)}</span>'
    evidence = "".join(f'<p class="evidence">{text(line)}</p>' for line in statement.lines)
    return f"<li><p>{badge} {text(statement.text)}</p>{evidence}</li>"


def _table(table: Table) -> str:
    name = f"table-{slug(table.name)}"
    head = "".join(_heading(column, table) for column in table.columns)
    body = "\n".join(_table_row(row, table) for row in table.rows)
    note = f'<p class="note">{text(table.note)}</p>' if table.note else ""
    inner = (
        f'<div class="scroll" role="region" tabindex="0" aria-labelledby="{name}">\n<table class="sortable">\n'
        f"<thead><tr>{head}</tr></thead>\n<tbody>\n{body}\n</tbody>\n</table>\n</div>\n{note}"
    )
    if table.detail:
        return f'<details>\n<summary id="{name}">{text(table.caption)}</summary>\n{inner}\n</details>'
    return f'<figure>\n<figcaption id="{name}">{text(table.caption)}</figcaption>\n{inner}\n</figure>'


def _heading(column: Column, table: Table) -> str:
    kind = ' class="text"' if any(isinstance(row.get(column.key), str) for row in table.rows) else ""
    return f'<th scope="col"{kind}>{text(column.title)}</th>'


def _table_row(row: dict[str, Any], table: Table) -> str:
    first, *rest = table.columns
    cells = "".join(_cell(row.get(column.key), column) for column in rest)
    name = row.get(first.key)
    return f'<tr><th scope="row" data-v="{text(_sort_key(name))}">{text(first.text(name))}</th>{cells}</tr>'


def _cell(cell: Any, column: Column) -> str:
    kind = ' class="best"' if is_best(cell) else ' class="text"' if isinstance(cell, str) else ""
    return f'<td{kind} data-v="{text(_sort_key(cell))}">{text(column.text(cell))}</td>'


def _sort_key(cell: Any) -> Any:
    """The value that the column is sorted by."""
    return "" if cell is None else cell.value if isinstance(cell, Value) else cell


def _manifest(manifest: dict[str, Any] | None) -> str:
    if manifest is None:
        return '<p class="note">These results have no manifest.json, so what produced them is not known.</p>'
    rows = [{"what": key, "value": flat(value)} for key, value in manifest.items()]
    columns = (Column("what", "item"), Column("value", "value"))
    return _table(Table("manifest", "What produced these results", columns, rows, detail=True))


def flat(value: Any) -> str:
    """A setting, possibly nested, in one line."""
    if isinstance(value, dict):
        return ", ".join(f"{key} {flat(part)}" for key, part in value.items())
    if isinstance(value, list):
        return " ".join(map(flat, value))
    return f"{value:.4g}" if isinstance(value, float) else "none" if value is None else str(value)
