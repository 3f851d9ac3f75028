"""The page on where each table, figure and claim of the paper is: its links lead somewhere and its titles exist."""

from __future__ import annotations

import re
from functools import cache
from html import unescape
from pathlib import Path

import pytest

import vaerdict_paper

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "results" / "coverage.md"
TOKENS = re.compile(r"\]\((?P<link>[^)#]+)(?:#[^)]*)?\)|\*(?P<title>[^*]+)\*|`(?P<path>paper/[^`]+)`")


@cache
def rendered(page: Path) -> str:
    return unescape(page.read_text(encoding="utf-8")).replace("\\", "")


@cache
def code() -> str:
    """The code of all pages, with each string that continues on the next line joined."""
    pages = Path(vaerdict_paper.__file__).parent / "pages"
    source = "\n".join(path.read_text(encoding="utf-8") for path in sorted(pages.glob("*.py")))
    return re.sub(r'"\s*\n\s*f?"', "", source)


def rows(content: str) -> list[tuple[str, str]]:
    """The two cells of every row that is neither a heading nor a rule."""
    cells = [line.strip("| ").split(" | ") for line in content.splitlines() if line.startswith("| ")]
    assert all(len(row) == 2 for row in cells), "a row has two cells"
    return [(item, here) for item, here in cells if item != "in the paper"]


def problems(here: str) -> list[str]:
    """What a cell names and the repository does not have."""
    found, page = [], PAGE
    for token in TOKENS.finditer(here):
        if token["link"]:
            page = (PAGE.parent / token["link"]).resolve()
            found += [] if page.is_file() else [f"no file {token['link']}"]
        elif token["path"]:
            found += [] if (ROOT / token["path"]).is_file() else [f"no file {token['path']}"]
        elif page == PAGE or not (page.is_file() and (token["title"] in rendered(page) or token["title"] in code())):
            found.append(f"no title {token['title']!r} in {page.name}")
    return found


@pytest.mark.parametrize(("item", "here"), rows(PAGE.read_text(encoding="utf-8")))
def test_what_the_page_names_exists(item, here):
    assert not problems(here), item
    assert any(token["link"] or token["path"] for token in TOKENS.finditer(here)), f"{item}: no link"


def test_a_title_or_file_that_does_not_exist_is_found():
    assert problems("[pPCA](ppca.md): *Models trained with 5 particles*") == []
    assert problems("[pPCA](ppca.md): *Models trained with 6 particles*") == [
        "no title 'Models trained with 6 particles' in ppca.md"
    ]
    assert problems("[pPCA](nothing.md), `paper/nothing.py`") == ["no file nothing.md", "no file paper/nothing.py"]
    assert problems("*The VAE underestimates the variance*") != []  # without a page


def test_every_page_of_an_experiment_is_named():
    named = {token["link"] for _, here in rows(PAGE.read_text(encoding="utf-8")) for token in TOKENS.finditer(here)}
    experiments = {"ppca.md", "bivariate.md", "mnist.md", "genes.md", "audit.md"}
    assert experiments <= named
