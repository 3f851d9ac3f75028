"""The tables of README and docs are what the result files render."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest

from vaerdict.core import DataError
from vaerdict_paper.pages import headline

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
FILES = (
    "ppca/results.json",
    "mnist/results.json",
    "mnist-best/results.json",
    "calibrate-pbmc3k/results.json",
    "bench/de-methods.json",
    "bench/novel-cells.json",
    "bench/prior.json",
)


@pytest.fixture
def results(tmp_path) -> Path:
    """A copy of the result files."""
    for name in FILES:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(headline.RESULTS / name, tmp_path / name)
    return tmp_path


def test_the_readme_shows_what_the_files_render(tmp_path):
    page = Path(shutil.copy(README, tmp_path))
    assert headline.update_headline(page)
    assert page.read_text() == README.read_text(), "run `make readme`"


def test_a_row_asks_answers_with_numbers_and_names_a_command():
    rows = headline.headline_table().splitlines()[2:]
    assert 5 <= len(rows) <= 7
    for row in rows:
        question, answer, command = re.split(r"(?<!\\)\|", row)[1:-1]
        assert question.strip().endswith("?")
        assert len(re.findall(r"\d", answer)) >= 4
        assert re.fullmatch(r" `vaerdict \w+ .+` ", command)


def test_numbers_follow_the_files(results):
    before = headline.headline_table(results)
    path = results / "calibrate-pbmc3k" / "results.json"
    run = json.loads(path.read_text())
    for row in run["spikes"]:
        row["fdp"] = 0.123
    path.write_text(json.dumps(run))
    after = headline.headline_table(results)
    assert "12.3% (se" in after
    assert [a != b for a, b in zip(before.splitlines(), after.splitlines(), strict=True)].count(True) == 1


def test_runs_on_the_same_cells_are_one_of_the_independent_groups():
    rows = [{"cells": "a", "found": 0.1}] * 9 + [{"cells": "b", "found": 0.3}]
    assert headline._percent(rows, "found", "cells") == "20±10.0%"
    assert headline._percent(rows * 5, "found", "cells") == "20±10.0%"


def test_copies_and_priors_from_wrong_cells_change_nothing(results):
    """The counts alone give the same answer whatever the other cells are, and wrong kinds show what is not expected."""
    before = headline.headline_table(results)
    path = results / "bench" / "prior.json"
    run = json.loads(path.read_text())
    for row in run["rows"]:
        if row.get("others") == "wrong kinds":
            row["tpr"] = 1.0
    path.write_text(json.dumps(run))
    assert headline.headline_table(results) == before


def test_a_file_without_the_rows_is_refused(results):
    path = results / "mnist-best" / "results.json"
    run = json.loads(path.read_text())
    path.write_text(json.dumps(run | {"cross": [row for row in run["cross"] if row["proposal"] != "MIS"]}))
    with pytest.raises(DataError, match="no row of the results has"):
        headline.headline_table(results)
    path.unlink()
    with pytest.raises(DataError, match="cannot be read"):
        headline.headline_table(results)


def test_pages_without_markers_are_left_alone_and_unclosed_ones_refused(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("text\n")
    assert not headline.update_headline(page)
    assert page.read_text() == "text\n"
    page.write_text(f"{headline.CLOSING}\n{headline.OPENING}\n")
    with pytest.raises(DataError, match="exactly one"):
        headline.update_headline(page)
