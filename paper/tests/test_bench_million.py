from __future__ import annotations

import pytest
import torch

from vaerdict_paper.benchmarks import million

CPU = torch.device("cpu")


def test_the_simulated_groups_differ_as_the_truth_says():
    data = million.simulate(6000, 60, device=CPU, seed=1)
    x = data.rows.take(torch.arange(6000))
    assert data.rows.n == 6000
    assert (x.sum(-1) > 0).all()
    share = x / x.sum(-1, keepdim=True)
    lfc = share[1::2].mean(0).log2() - share[::2].mean(0).log2()
    torch.testing.assert_close(lfc - lfc[data.lfc == 0].median(), data.lfc, atol=0.25, rtol=0.1)
    assert 0.05 < (data.lfc.abs() >= million.DELTA).double().mean() < 0.3


def test_other_cells_have_the_same_genes_and_blocks_are_concatenated(monkeypatch):
    more = million.simulate(50, 30, device=CPU, seed=0, first=80)
    assert torch.equal(more.lfc, million.simulate(80, 30, device=CPU, seed=0).lfc)
    monkeypatch.setattr(million, "_BLOCK", 30 * 7)
    assert million.simulate(50, 30, device=CPU, seed=0).rows.n == 50


def test_changed_genes_are_found_and_the_row_has_the_cost():
    row = million.measured(800, 40, epochs=60, device="cpu", n_draws=60)
    assert row["n_true"] > 0
    assert row["tpr"] > 0.5
    assert row["fdp"] <= 0.35
    assert row["peak_device_gb"] is None
    assert row["peak_host_gb"] > 0.1
    assert row["seconds_de"] > 0
    assert row["seconds_per_epoch"] == pytest.approx(row["seconds_training"] / 60, rel=0.5)
