from __future__ import annotations

import sys

import pytest
import torch

from vaerdict.likelihoods import CountParameters, NegativeBinomial
from vaerdict.noise import seeded
from vaerdict_paper.benchmarks import counts as benchmark


def test_the_peer_computes_the_same_loss():
    g = seeded(0)
    x = benchmark.sparse_counts(30, 20).double()
    at = CountParameters(torch.randn(4, 30, 20, generator=g).double(), torch.randn(20, generator=g).double())
    ours, peer = NegativeBinomial(), benchmark.Textbook()
    torch.testing.assert_close(ours.fixed(x, at) + ours.moving(x, at), peer.fixed(x, at) + peer.moving(x, at))


def test_sparse_counts_are_sparse_and_no_cell_is_empty():
    x = benchmark.sparse_counts(300, 500)
    assert 0.75 < (x == 0).double().mean() < 0.95
    assert (x.sum(-1) > 0).all()


def test_without_scvi_its_rows_are_left_out_with_a_warning(monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, "scvi", None)
    rows = benchmark.run(quick=True)
    assert [row["case"] for row in rows] == [
        "IWELBO, 30 particles, 200 x 100 dense",
        "IWELBO, 30 particles, 200 x 100 sparse",
    ]
    assert all(row["ratio"] == row["peer_s"] / row["ours_s"] for row in rows)
    assert "scvi-tools is not installed" in caplog.text


@pytest.mark.slow
def test_scvi_is_timed_on_the_same_counts():
    pytest.importorskip("scvi")
    row = benchmark._against_scvi(NegativeBinomial(), "nb", quick=True)
    assert row is not None
    assert row["peer"] == "scvi-tools"
    assert row["peer_s"] > 0
    assert row["ours_s"] > 0
