"""The benchmark of novel cells: its designs, measures, rows and tables."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import sparse

pytest.importorskip("anndata")
pytest.importorskip("sklearn")

from vaerdict.report import text
from vaerdict.report.tables import Value
from vaerdict_paper.benchmarks import novel_cells
from vaerdict_paper.benchmarks.novel_cells import designs
from vaerdict_paper.benchmarks.novel_cells.designs import Cells
from vaerdict_paper.pages import bench
from vaerdict_paper.pages import novel_cells as page

TYPES = np.array(["a", "b", "c"])


@pytest.fixture
def cells() -> Cells:
    """Three types of 120 cells each, of two conditions and two donors, with marker genes."""
    rng = np.random.default_rng(0)
    code = np.arange(360) % 3
    rate = np.tile(rng.gamma(2, 1, 60), (3, 1))
    for c in range(3):
        rate[c, 10 * c : 10 * c + 10] *= 6
    counts = sparse.csr_matrix(rng.poisson(rate[code]).astype(np.float32))
    condition = np.where(np.arange(360) % 2, "stim", "ctrl")
    sample = np.array([f"{c}10{i // 3 % 2}" for i, c in enumerate(condition)])
    return Cells(counts, TYPES[code], sample, condition)


def test_a_hidden_type_is_not_in_the_reference_and_has_its_share_of_the_query(cells):
    for share in (0.0, 0.05, 0.25):
        design = designs.hide(cells, "b", share, np.random.default_rng(1))
        assert "b" not in cells.types[design.reference]
        assert (cells.types[design.query] == "b").tolist() == design.novel.tolist()
        assert design.novel.mean() == pytest.approx(share, abs=0.01)
        assert not set(design.reference) & set(design.query)


def test_calibration_cells_are_known_cells_of_the_query(cells):
    design = designs.calibrated(cells, "c", 0.25, 0.1, np.random.default_rng(2))
    assert set(cells.condition[design.reference]) == {"ctrl"}
    assert set(cells.condition[design.query]) == {"stim"}
    assert design.calibration is not None
    assert not (design.calibration & design.novel).any()
    assert design.calibration.sum() == round(0.1 * (~design.novel).sum())


def test_another_composition_hides_nothing(cells):
    design = designs.compose(cells, np.random.default_rng(3))
    assert not design.novel.any()
    shares = [np.bincount(np.searchsorted(TYPES, cells.types[rows])) for rows in (design.reference, design.query)]
    assert (shares[1] / shares[1].sum()).max() > (shares[0] / shares[0].sum()).max() + 0.05


def test_every_method_is_asked(cells, monkeypatch):
    monkeypatch.setattr(designs, "cells_of", lambda data: cells)
    task = {"stage": "hidden", "data": designs.KANG_STATES, "design": "a", "share": 0.25, "seed": 0}
    rows = novel_cells.work(task)["rows"]
    methods = [row["method"] for row in rows]
    assert methods == ["vaerdict", "AdaDetect, random forest", "logistic regression", "kNN vote"]
    ours = rows[0]
    assert ours["refused"] or (ours["power"] > 0.5 and ours["fdp"] < 0.5)
    assert ours["accuracy"] > 0.9
    many = novel_cells.work({**task, "seed": novel_cells.RIVAL_SEEDS})["rows"]
    assert [row["method"] for row in many] == ["vaerdict"]
    gate = novel_cells.work({**task, "stage": "gate", "design": "control to stimulated", "share": 0.0})["rows"]
    assert (gate[0]["n_novel"], gate[0]["power"]) == (0, None)
    calibrated = novel_cells.work({**task, "stage": "calibrated", "part": 0.3})["rows"][0]
    assert calibrated["n_calibration"] == 36
    result = {"benchmark": "novel-cells", "hardware": {"threads": 1, "cores": 2}, "versions": {"torch": "2"}}
    page = text(bench.document([{**result, "rows": [*rows, *gate, calibrated]}]))
    for shown in ("AdaDetect, random forest", "control to stimulated", "fewest that can be called"):
        assert shown in page


def test_measures_by_hand():
    called, novel = np.array([True, True, False, False]), np.array([True, False, True, False])
    row = novel_cells._measured(called, np.array([4.0, 3.0, 2.0, 1.0]), novel)
    assert row == {"n_called": 2, "fdp": 0.5, "power": 0.5, "auroc": 0.75}
    nothing = novel_cells._measured(called, np.full(4, np.nan), np.zeros(4, dtype=bool))
    assert nothing == {"n_called": 2, "fdp": 1.0, "power": None, "auroc": None}


def test_cost_is_that_of_the_command(monkeypatch):
    row = novel_cells.cost(400, 200)
    assert 0 < row["seconds"] < 300
    assert 0.1 < row["peak_gb"] < 20


def test_errors_are_over_hidden_types_whose_runs_share_their_cells():
    runs = [{"design": design, "power": power} for design, power in (("B", 0.2), ("NK", 0.6)) for _ in range(9)]
    assert page._mean(runs, "power") == Value(pytest.approx(0.4), pytest.approx(0.2))
    assert page._mean([{"design": "B", "power": p} for p in (0.1, 0.3, None)], "power") == Value(
        pytest.approx(0.2), pytest.approx(0.1)
    )
    assert page._mean([{"design": "B", "power": None}], "power") is None
