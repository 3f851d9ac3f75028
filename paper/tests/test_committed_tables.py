"""Tables of README and docs: rebuilt between their markers, and those in the repository are current."""

from __future__ import annotations

from pathlib import Path

import pytest

from page_checks import run_in
from vaerdict.core import DataError
from vaerdict.report import load, markdown
from vaerdict_paper.pages.render import update_tables

ROOT = Path(__file__).parents[2]
PAGES = [
    path for path in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))) if "<!-- results:" in path.read_text()
]
BIVARIATE = {
    "experiment": "bivariate",
    "preset": "quick",
    "settings": {"n_scramblings": 4},
    "panels": [
        {
            "stage": "approximation",
            "loading": "moderate",
            "means": None,
            "seed": 0,
            "posterior": {"covariance": [[1.0, 0.6], [0.6, 1.0]], "correlation": 0.6},
            "proposals": [
                {
                    "proposal": q,
                    "covariance": [[v, 0], [0, v]],
                    "variance_ratio": [v, v],
                    "a_norm": 1 / v,
                    "a_norm_se": 0,
                }
                for q, v in (("VAE", 0.5), ("WW", 1.0), ("CHI", 1.3))
            ],
        }
    ],
}


@pytest.mark.parametrize("page", PAGES, ids=[str(path.relative_to(ROOT)) for path in PAGES])
def test_committed_tables_are_current(page, tmp_path):
    copy = tmp_path / page.name
    copy.write_bytes(page.read_bytes())
    assert update_tables(copy, ROOT / "paper" / "results")
    assert copy.read_bytes() == page.read_bytes(), f"run `make readme` to render the tables of {page.name} again"


def test_some_page_shows_the_results():
    assert PAGES


def test_tables_are_rebuilt_between_their_markers(tmp_path):
    run = run_in(tmp_path / "results" / "bivariate", BIVARIATE)
    page = tmp_path / "README.md"
    page.write_text(
        "# Title ü\n<!-- results:bivariate -->\nstale\n<!-- /results:bivariate -->\nafter\n", encoding="utf-8"
    )
    assert update_tables(page, tmp_path / "results") == ["bivariate"]
    first = page.read_text(encoding="utf-8")
    assert first.startswith("# Title ü\n<!-- results:bivariate -->\n\nOf the 2 claims")
    assert first.endswith("<!-- /results:bivariate -->\nafter\n")
    assert markdown(load(run)) in first
    assert "stale" not in first
    update_tables(page, tmp_path / "results")
    assert page.read_text(encoding="utf-8") == first


def test_a_brief_marker_has_verdicts_without_their_evidence(tmp_path):
    run_in(tmp_path / "results" / "bivariate", BIVARIATE)
    page = tmp_path / "README.md"
    page.write_text("<!-- results:bivariate/brief --><!-- /results:bivariate/brief -->")
    assert update_tables(page, tmp_path / "results") == ["bivariate/brief"]
    brief = page.read_text(encoding="utf-8")
    assert "- **holds**: The VAE underestimates the variance." in brief
    assert "(exact)" not in brief


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("<!-- results:bivariate -->", "exactly one"),
        ("<!-- /results:bivariate --> <!-- results:bivariate -->", "exactly one"),
        ("<!-- results:bivariate --><!-- results:bivariate --><!-- /results:bivariate -->", "exactly one"),
        ("<!-- results:genes --><!-- /results:genes -->", "does not exist"),
    ],
)
def test_a_page_that_cannot_be_rebuilt_is_left_unchanged(tmp_path, content, message):
    run_in(tmp_path / "bivariate", BIVARIATE)
    page = tmp_path / "README.md"
    page.write_text(content)
    with pytest.raises(DataError, match=message):
        update_tables(page, tmp_path)
    assert page.read_text() == content
    with pytest.raises(DataError, match="does not exist"):
        update_tables(tmp_path / "none.md", tmp_path)


def test_a_page_can_show_one_benchmark(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("<!-- results:bench/psis -->\n<!-- /results:bench/psis -->\n", encoding="utf-8")
    update_tables(page, ROOT / "paper" / "results")
    tables = page.read_text(encoding="utf-8")
    assert "psis 2000x5000" in tables
    assert "samplers" not in tables
    page.write_text("<!-- results:bench/nothing -->\n<!-- /results:bench/nothing -->\n", encoding="utf-8")
    with pytest.raises(DataError, match="no result file is of the benchmark 'nothing'"):
        update_tables(page, ROOT / "paper" / "results")
