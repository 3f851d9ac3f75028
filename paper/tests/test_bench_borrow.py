from __future__ import annotations

import pytest

from vaerdict import demo
from vaerdict_paper.benchmarks import borrow
from vaerdict_paper.pages import bench

pytest.importorskip("anndata")


@pytest.fixture
def rows(monkeypatch):
    for name, value in {"N_CELLS": 300, "N_GENES": 40, "TYPES": {"x": 3, "y": 2, "z": 2}}.items():
        monkeypatch.setattr(demo, name, value)
    monkeypatch.setattr(borrow, "LABELLED", (12,))
    return list(borrow.run(quick=True))


def test_both_answers_are_measured_on_the_same_data(rows):
    counts, borrowed = rows
    assert [row["answer"] for row in rows] == ["counts", "borrow"]
    assert counts["by_model"] == 0 < borrowed["by_model"]
    for row in rows:
        assert (row["labelled"], row["datasets"]) == (12, 2)
        assert 0.5 < row["coverage"] <= 1
        assert row["fdp_se"] >= 0
    assert borrowed["error"] < counts["error"]


def test_means_have_standard_errors():
    row = borrow._averaged([dict.fromkeys(borrow._MEASURED, value) for value in (0.1, 0.3)])
    assert row["fdp"] == pytest.approx(0.2)
    assert row["fdp_se"] == pytest.approx(0.1)


def test_the_summary_has_standard_errors():
    row = {"labelled": 15, "tpr": 0.5, "tpr_se": 0.02, "fdp": 0.03, "fdp_se": 0.01, "answer": "counts"}
    about = {"benchmark": "borrow", "hardware": {"threads": 1, "cores": 2}, "versions": {"torch": "2"}}
    sentence = bench.document([{**about, "rows": [row, {**row, "answer": "borrow", "tpr": 0.9}]}]).summary[-1]
    assert "50.0% (se 2.0%) of the changes are found with an FDP of 3.0% (se 1.0%) by the counts" in sentence
    assert "90.0% (se 2.0%)" in sentence
