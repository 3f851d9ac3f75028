"""Helpers for tests of reports: a run directory from a record, and the outline of a page."""

from __future__ import annotations

import json
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

NASTY = "<script>alert('x')</script> \"&\" $\\frac$ 名前 a|b `c` \x07"
"""A name that must be printed literally."""


def run_in(folder: Path, results: Any, manifest: Any = None) -> Path:
    """A run directory with these results."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "results.json").write_text(json.dumps(results))
    if manifest is not None:
        (folder / "manifest.json").write_text(json.dumps(manifest))
    return folder


class Outline(HTMLParser):
    """Tags of a page, which must be closed in order, their attributes, and the text outside of style and script."""

    VOID = ("meta", "br")

    def __init__(self, source: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: Counter[str] = Counter()
        self.attributes: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(source)
        self.close()
        assert self.open == [], f"left open: {self.open}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_startendtag(tag, attrs)
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags[tag] += 1
        self.attributes.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] not in ("style", "script"):
            self.text += data


def outline(page: Path) -> tuple[Outline, str]:
    """The outline and the source of a page."""
    source = page.read_text(encoding="utf-8")
    return Outline(source), source
