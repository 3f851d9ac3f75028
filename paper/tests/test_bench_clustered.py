from __future__ import annotations

from functools import partial

import numpy as np
import pytest
from scipy import sparse

from vaerdict_paper.benchmarks import clustered
from vaerdict_paper.pages import bench

for package in clustered.PACKAGES:
    pytest.importorskip(package)


@pytest.fixture
def rows(monkeypatch):
    for name, value in {"_CELLS": 200, "_GENES": 100, "_DEPTH": 400}.items():
        monkeypatch.setattr(clustered, name, value)
    data = {
        "one": ("nothing", clustered.simulated),
        "within": ("nothing", partial(clustered.simulated, kinds=2)),
        "two": ("kinds", partial(clustered.simulated, kinds=2, clusters=2)),
    }
    monkeypatch.setattr(clustered, "DATA", data)
    return list(clustered.run(quick=True))


def test_every_method_is_measured_on_every_data_set(rows):
    null, within, kinds = ([row for row in rows if row["data"] == name] for name in ("one", "within", "two"))
    assert [row["method"] for row in null] == [row["method"] for row in within] == [*clustered.METHODS]
    assert [row["method"] for row in kinds] == [*clustered.METHODS, *clustered.KNOWN]
    for row in rows:
        assert ("correlation" in row) == row["method"].startswith("split")
        assert ("tpr" in row) == (row["data"] == "two")
        assert 0 <= row["any"] <= min(1, row["calls"])
    poisson, default = (next(r for r in null if r["method"] == f"split, {how}") for how in ("Poisson", "default"))
    assert abs(default["correlation"]) < 0.1 < poisson["correlation"]
    assert all(row["purity"] == 1 for row in kinds if row["method"] in clustered.KNOWN)


def test_permutation_keeps_every_gene_and_the_strata_of_cells():
    rng = np.random.default_rng(0)
    counts = sparse.csr_matrix(rng.poisson(np.linspace(1, 40, 40)[:, None], (40, 6)))
    permuted, order = clustered._permuted(counts, rng).toarray(), np.argsort(counts.sum(1).A1)
    assert (permuted != counts.toarray()).any()
    for stratum in (order[:20], order[20:]):
        assert (np.sort(permuted[stratum], 0) == np.sort(counts.toarray()[stratum], 0)).all()


def test_the_summary_counts_runs_with_false_calls():
    row = {"data": "x", "differs": "nothing", "method": "plain", "any": 0.25, "calls": 1.5, "calls_se": 0.1, "seeds": 4}
    about = {"benchmark": "clustered", "hardware": {"threads": 1, "cores": 2}, "versions": {"torch": "2"}}
    document = bench.document([{**about, "rows": [row, {**row, "any": 0.5}, {**row, "differs": "kinds"}]}])
    assert document.summary[-1].endswith("plain: a gene is called in 3 of 8 runs, 1.50 per run.")
