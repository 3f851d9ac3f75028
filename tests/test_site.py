"""The documentation site is built without warnings; what it shows is at hand offline, and its pages can be reached."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote

import pytest

pytest.importorskip("sphinx_book_theme")
pytest.importorskip("myst_nb")

DOCS = Path(__file__).parent.parent / "docs"
FETCHED = ("script", "link", "img", "iframe", "source")


class Links(HTMLParser):
    """Targets of links, what the page loads, and the anchors of a page."""

    def __init__(self, page: Path) -> None:
        super().__init__()
        self.links: list[str] = []
        self.loaded: list[str] = []
        self.anchors: set[str] = set()
        self.feed(page.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value or "" for name, value in attrs}
        self.anchors.add(values.get("id", ""))
        target = values.get("src") or values.get("href") or ""
        if tag in FETCHED and values.get("rel") not in ("canonical", "author"):
            self.loaded.append(target)
        elif tag == "a" and target:
            self.links.append(target)


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> dict[Path, Links]:
    """The pages of the site, built as by `make docs`."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "sphinx", "--quiet", "--fail-on-warning", "--keep-going", str(DOCS), str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr
    return {page: Links(page) for page in folder.rglob("*.html") if "_static" not in page.parts}


def test_every_page_is_built(site):
    sources = [*DOCS.glob("*.md"), *DOCS.glob("results/*.md"), *DOCS.glob("tutorials/*.ipynb"), DOCS / "api.rst"]
    names = {page.as_posix() for page in site}
    missing = [s for s in sources if not any(n.endswith(f"{s.relative_to(DOCS).with_suffix('')}.html") for n in names)]
    assert not missing


def test_nothing_is_fetched(site):
    remote = {(page.name, target) for page, links in site.items() for target in links.loaded if "//" in target}
    assert not remote


def test_links_within_the_site_lead_somewhere(site):
    broken = []
    for page, links in site.items():
        for target in (*links.links, *links.loaded):
            path, _, anchor = unquote(target.split("?")[0]).partition("#")
            if re.match(r"[a-z]+:", target):
                continue
            there = (page.parent / path).resolve() if path else page
            if not there.exists() or (anchor and there in site and anchor not in site[there].anchors):
                broken.append((page.name, target))
    assert not broken


def test_notebooks_show_their_stored_outputs(site):
    pages = [page for page in site if page.parent.name == "tutorials"]
    assert len(pages) == len(list(DOCS.glob("tutorials/*.ipynb")))
    assert all(any("_images" in target for target in site[page].loaded) for page in pages)
