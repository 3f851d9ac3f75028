"""The outline of an HTML page, and the check that its elements are closed."""

from __future__ import annotations

from collections import Counter
from html.parser import HTMLParser

from vaerdict.report.document import Document
from vaerdict.report.page import page


class Outline(HTMLParser):
    """Tags, attributes, the text outside of style, script and the side menu, and the content of every script."""

    VOID = ("meta", "br", "input")
    MENU = ("html", "body", "nav", "details")

    def __init__(self, source: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: Counter[str] = Counter()
        self.attributes: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.scripts: list[str] = []
        self.feed(source)
        self.close()
        assert self.open == [], f"left open: {self.open}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags[tag] += 1
        self.attributes.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags[tag] += 1
        self.attributes.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] == "script":
            self.scripts.append(data)
        elif self.open and self.open[-1] != "style" and tuple(self.open[:4]) != self.MENU:
            self.text += data

    def count(self, *names: str) -> int:
        return sum(self.tags[name] for name in names)


def outline(document: Document) -> Outline:
    """The page of a document without its drawn figures, which take time."""
    return Outline(page(document, {picture.name: "" for picture in document.pictures()}))
