"""The benchmark of methods of differential expression: its splits, measures, rows and tables."""

from __future__ import annotations

import anndata
import numpy as np
import pandas as pd
import pytest
from scipy import sparse

from vaerdict.report import text
from vaerdict_paper import benchmarks
from vaerdict_paper.benchmarks import de_methods
from vaerdict_paper.benchmarks.de_methods import cells
from vaerdict_paper.pages import bench

for package in de_methods.PACKAGES:
    pytest.importorskip(package)

ABOUT = {"benchmark": "de-methods", "hardware": {"threads": 1, "cores": 2}, "versions": {"torch": "2"}}


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(4)


@pytest.fixture
def folder(tmp_path, monkeypatch, rng):
    """Small files in place of the real ones."""
    counts = sparse.csr_matrix(rng.poisson(2.0, (200, 60)).astype(np.float32))
    obs = {
        cells.PBMC: {"cell_type": ["Naive CD4 T", "B"] * 100},
        cells.KANG: {"cell_type": ["CD14+ Monocytes"] * 200, "condition": ["ctrl"] * 200, "sample": ["p", "q"] * 100},
        cells.GLIOBLASTOMA: {
            "patient_id": [f"p{i % 5}" for i in range(200)],
            "condition": ["ctrl" if i % 10 < 5 else "drug" for i in range(200)],
        },
    }
    (tmp_path / "scrna").mkdir()
    for name, columns in obs.items():
        made = anndata.AnnData(counts, obs=pd.DataFrame(columns, index=[f"c{i}" for i in range(200)]))
        made.write_h5ad(tmp_path / "scrna" / f"{name}.h5ad")
    monkeypatch.setenv("VAERDICT_DATA", str(tmp_path))
    cells.read_cells.cache_clear()
    yield tmp_path
    cells.read_cells.cache_clear()


def test_sides_have_the_sizes_of_their_design(folder, rng):
    for design, sizes in {"20": (20, 20), "all": (50, 50), "1:9": (10, 90)}.items():
        split = cells.split_cells("PBMC 3k, B", design, rng)
        assert (split.first.sum(), (~split.first).sum()) == sizes
        assert not split.truth.any()
    assert not cells.fits("PBMC 3k, B", "100")
    assert cells.fits("Kang, control CD14+ monocytes", "100")
    changed = cells.split_cells("Kang, control CD14+ monocytes", "50", rng, de_methods.plant)
    assert (changed.lfc != 0).sum() == 21  # seven of every twenty genes
    relative = changed.truth - np.median(changed.truth)
    np.testing.assert_allclose(relative, changed.lfc, atol=0.1)


def test_patients_are_halved_or_their_conditions_exchanged(folder):
    halves = [cells.split_glioblastoma(cells.CONTROLS, seed) for seed in range(11)]
    assert [split is None for split in halves] == [False] * 10 + [True]
    for split in halves[:10]:
        owners = [set(split.samples[split.first]), set(split.samples[~split.first])]
        assert sorted(map(len, owners)) == [2, 3]
        assert not owners[0] & owners[1]
    permuted = [cells.split_glioblastoma(cells.PERMUTED, seed) for seed in range(11)]
    assert [split is None for split in permuted] == [False] * 10 + [True]
    assert len({split.first.tobytes() for split in permuted[:10]}) == 10
    for split in permuted[:10]:
        assert set(split.samples[split.first]) == set(split.samples[~split.first])  # pairs


def test_donors_vary_by_gene_and_have_uneven_numbers_of_cells(rng):
    counts, donor = cells.simulated_donors(30, rng)
    sizes = np.bincount(donor)
    assert sizes.min() >= 20
    assert sizes.max() > 3 * sizes.min()  # of 30 log-normal sizes with a spread of 0.8: fails below 1e-6
    sums = np.stack([np.asarray(counts[donor == d].sum(0)).ravel() for d in range(30)])
    share = sums / sums.sum(1, keepdims=True)
    common = sums.sum(0) > 30 * 300
    variation = (share.std(0) / share.mean(0))[common]
    assert 0.1 < np.median(variation) < 0.4
    assert np.quantile(variation, 0.9) > 2 * np.quantile(variation, 0.1)


def test_scores_by_hand():
    changed = np.array([True] * 20 + [False] * 20)
    order = np.r_[np.arange(19), 20, 19, np.arange(21, 40)]
    called = np.isin(np.arange(40), [0, 1, 2, 20])
    row = de_methods.scores(called, order, changed)
    assert (row["n_true"], row["fdp"], row["tpr"]) == (20, 0.25, pytest.approx(0.15))
    assert row["tpr_matched"] == 1  # one false of the first 21
    assert row["auprc"] == pytest.approx((19 + 20 / 21) / 20)
    wrong = de_methods.scores(called, order[::-1].copy(), changed)
    assert wrong["tpr_matched"] == 0
    assert de_methods.scores(called, order, np.zeros(40, dtype=bool))["tpr"] is None


def test_every_method_is_asked_and_a_stopped_run_goes_on(folder, monkeypatch, tmp_path):
    todo = [t for t in de_methods.tasks(quick=True) if t["data"] != "simulated donors" and t["seed"] == 0]
    assert len(todo) == 8
    chosen = [t for t in todo if t["design"] in ("50", "20", cells.PERMUTED)]
    chosen = [t for t in chosen if not t["data"].startswith("PBMC")]
    monkeypatch.setattr(de_methods, "tasks", lambda *, quick: chosen)
    seen: list[int] = []
    result = benchmarks.run("de-methods", quick=True, folder=tmp_path, save=lambda so_far: seen.append(len(so_far)))
    rows = result["rows"]
    tests = list(de_methods.RIVALS)
    by_task = {(row["stage"], row["data"]): [r["method"] for r in rows if r["data"] == row["data"]] for row in rows}
    assert by_task["null", "glioblastoma"] == ["vaerdict", *tests, "wilcoxon, cells"]
    planted = [row for row in rows if row["stage"] == "planted"]
    assert [row["method"] for row in planted] == ["vaerdict", *tests]
    assert all(row["n_true_delta"] <= row["n_true"] for row in planted)
    edger, treat = (next(row for row in planted if row["method"] == m) for m in ("edger", "edger-treat"))
    assert (edger["question"], edger["n_true"]) == ("any change", 21)
    assert treat["n_true"] == treat["n_true_delta"] == planted[0]["n_true"] < 21
    assert 0.5 < planted[0]["coverage"] <= 1
    again = benchmarks.run("de-methods", folder=tmp_path)["rows"]
    assert again == rows


def test_deseq2_tests_cells_in_few_splits_only(folder):
    task = {"stage": "null", "data": "PBMC 3k, B", "design": "20"}
    few, more = (
        [row["method"] for row in de_methods.work({**task, "seed": seed})["rows"]]
        for seed in (0, de_methods.DESEQ2_ON_CELLS)
    )
    assert set(few) - set(more) == {"deseq2", "deseq2+lfc", "deseq2-threshold"}


def test_missing_data_are_skipped(tmp_path, monkeypatch):
    monkeypatch.setenv("VAERDICT_DATA", str(tmp_path / "nothing"))
    cells.read_cells.cache_clear()
    with pytest.raises(de_methods.Skipped, match="does not exist; download it"):
        de_methods.work({"stage": "null", "data": "PBMC 3k, B", "design": "20", "seed": 0})


def test_tables_count_false_calls_and_average_planted_ones():
    shared = {"data": "cells", "replicates": "cells", "n_genes": 9, "seconds": 1.0}
    null = [
        {**shared, "stage": "null", "design": "20", "seed": i, "method": m, "question": "any change", "n_called": n}
        for m, calls in {"vaerdict": (0, 0), "edger": (0, 7)}.items()
        for i, n in enumerate(calls)
    ]
    scored = {
        "stage": "planted",
        "design": "50",
        "method": "edger",
        "question": "any change",
        "n_called": 5,
        "tpr": 0.4,
    }
    document = bench.document([{**ABOUT, "rows": [*null, {**shared, **scored, "seed": 0}]}])
    output = text(document)
    assert "1 of 2 (3.5)" in output
    assert "40.0" in output
    sentence = "a discovery at an FDR of 5% is made by vaerdict in 0 of 2, edger in 1 of 2 splits."
    assert any(sentence in line for line in document.summary)
