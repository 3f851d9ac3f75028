from __future__ import annotations

import sys

import pytest
import torch

from vaerdict.likelihoods import CountParameters, NegativeBinomial
from vaerdict.noise import seeded
from vaerdict_paper.benchmarks import counts as benchmark
from vaerdict_paper.benchmarks.timing import ABLATION, LIKE


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
    rows = list(benchmark.run(quick=True))
    assert [row["case"] for row in rows] == [
        "epoch of the IWELBO, 30 particles, 200 x 100 counts, dense",
        "epoch of the IWELBO, 30 particles, 200 x 100 counts, mostly zero",
    ]
    assert {row["kind"] for row in rows} == {ABLATION}
    assert "scvi-tools is not installed" in caplog.text


@pytest.mark.slow
@pytest.mark.parametrize("as_sparse", [False, True])
def test_scvi_is_timed_on_the_same_counts(as_sparse):
    pytest.importorskip("scvi")
    row = benchmark._against_scvi(NegativeBinomial(), "nb", as_sparse, True, 1)
    assert row is not None
    assert row["kind"] == LIKE
    assert row["peer"] == "scvi-tools"
    assert row["peer_s"] > 0
    assert row["ours_s"] > 0
