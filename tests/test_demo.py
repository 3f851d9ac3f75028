"""The demonstration on simulated cells: a smaller one here, at its own size among the slow tests."""

from __future__ import annotations

import csv
import json

import numpy as np
import pytest

from vaerdict import demo
from vaerdict.datasets.genes import donors
from vaerdict.de.cells import ShownCells
from vaerdict.de.page.document import from_run
from vaerdict.de.page.truth import OVERALL
from vaerdict.report.tables import Table

pytest.importorskip("anndata")


@pytest.fixture
def small(monkeypatch):
    """Few cells and genes, so that it takes seconds."""
    for name, value in {"N_CELLS": 150, "N_GENES": 30, "TYPES": {"x": 3, "y": 2, "z": 2}}.items():
        monkeypatch.setattr(demo, name, value)


def test_demo_puts_the_truth_of_the_simulation_beside_the_answer(small, command, tmp_path):
    out_dir = tmp_path / "demo"
    code, out, err = command("demo", "--out", out_dir, "--device", "cpu", "--seed", 3)
    assert (code, err) == (0, "")
    parts = ("The data were simulated", "calls are made", "The answer against the truth", "Genes called", "Inference")
    assert [out.index(part) for part in parts] == sorted(out.index(part) for part in parts)
    assert {
        "de.csv",
        "de.parquet",
        "results.json",
        "manifest.json",
        "latent.h5ad",
        "cells.npz",
        "not_tested.csv",
        "report.html",
    } <= {path.name for path in out_dir.iterdir()}
    results = json.loads((out_dir / "results.json").read_text())
    shown = ShownCells.load(out_dir / "cells.npz")
    assert shown is not None
    assert shown.khat is not None  # of the model, one for each cell
    assert shown.khat.shape == (len(shown.rows),)
    assert shown.map_name.endswith("latents of the model")
    data = donors(3, n_cells=150, n_genes=30, n_donors=(1, 1, 1), group_weights=(3, 2, 2), donor_sd=0.0)
    assert list(results["truth"]) == ["x vs y", "x vs z", "y vs z"]
    for (name, truth), (a, b) in zip(results["truth"].items(), [(0, 1), (0, 2), (1, 2)], strict=True):
        change = (data.level[a] - data.level[b]).numpy()
        assert list(truth.values()) == pytest.approx(change, abs=1e-6), name
        assert list(truth) == [f"gene-{i:03d}" for i in range(30)]
    with (out_dir / "de.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    pairs = [(float(row["lfc_mean"]), results["truth"][row["contrast"]][row["gene"]]) for row in rows]
    assert np.corrcoef(np.array(pairs).T)[0, 1] > 0.8  # the same direction, gene by gene
    again = demo.run(seed=3)
    assert again.table.to_csv(index=False) == (out_dir / "de.csv").read_text()
    assert again.results["truth"] == results["truth"]


@pytest.mark.slow
def test_the_demo_is_right(command, tmp_path):
    """Loose limits: the share of false ones among 500 calls at an FDR of 5 % has a standard error of about 1 %."""
    assert command("demo", "--out", tmp_path, "--device", "cpu")[0] == 0
    table = next(b for s in from_run(tmp_path).sections for b in s.blocks if isinstance(b, Table) and b.name == "truth")
    row = next(row for row in table.rows if row["name"] == OVERALL)
    assert row["fdp"] < 0.08
    assert row["tpr"] > 0.9
    assert 0.8 < row["coverage"] < 0.98
