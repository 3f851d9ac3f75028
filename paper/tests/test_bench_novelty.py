"""The benchmark of hidden classes: its problems, measures, rows and tables."""

from __future__ import annotations

import h5py
import numpy as np
import pytest
from scipy import sparse

pytest.importorskip("sklearn")

from vaerdict.report import text
from vaerdict_paper import benchmarks
from vaerdict_paper.benchmarks import novelty
from vaerdict_paper.benchmarks.novelty import methods, tables
from vaerdict_paper.pages import bench

NEAR = (tables.DIGITS, tables.WINE, tables.CANCER)  # which scikit-learn has
ABOUT = {"benchmark": "novelty", "hardware": {"threads": 1, "cores": 2}, "versions": {"torch": "2"}}


@pytest.mark.parametrize(("data", "n_labels"), [(d, n) for d in NEAR for n in tables.DESIGNS[d].labels])
def test_problems_hide_one_class_from_labels_only(data, n_labels):
    design = tables.DESIGNS[data]
    _, y, names = tables.table(data)
    assert len(names) == len(np.unique(y)) == design.classes
    given = tables.problem(data, n_labels, 1, seed=3)
    assert (len(given.labelled), len(given.unlabelled)) == (n_labels, design.n_train - n_labels)
    assert len(given.query) == design.n_query
    assert set(given.classes) == set(range(design.classes)) - {1}
    assert 0.5 < given.hidden.mean() / (y == 1).mean() < 2
    again, other = (tables.problem(data, n_labels, 1, seed=seed) for seed in (3, 4))
    assert (again.query == given.query).all()
    assert (other.query != given.query).any()
    rows = np.concatenate([given.labelled, given.unlabelled, given.query])
    assert len(np.unique(rows, axis=0)) > 0.99 * len(rows)  # no row twice, up to equal rows of the table
    if data == tables.DIGITS:  # as they are
        assert (rows.min(), rows.max()) == (0, 1)
    else:
        np.testing.assert_allclose(given.unlabelled.mean(0), 0, atol=1e-9)
        np.testing.assert_allclose(given.unlabelled.std(0), 1)


def test_cells_are_read_without_anndata(tmp_path, monkeypatch):
    rng = np.random.default_rng(0)
    counts = sparse.csr_matrix(rng.poisson(1.0, (80, 50)).astype(np.float32))
    (tmp_path / "scrna").mkdir()
    with h5py.File(tmp_path / "scrna" / "pbmc3k.h5ad", "w") as file:
        group = file.create_group("X")
        group.attrs["encoding-type"], group.attrs["shape"] = "csr_matrix", counts.shape
        for name in ("data", "indices", "indptr"):
            group[name] = getattr(counts, name)
        group = file.create_group("obs/cell_type")
        group["categories"], group["codes"] = ["B", "NK", "unassigned"], np.arange(80) % 3
    monkeypatch.setenv("VAERDICT_DATA", str(tmp_path))
    tables.table.cache_clear()
    x, y, names = tables.table(tables.PBMC)
    tables.table.cache_clear()
    assert (x.shape, names, set(y)) == ((54, 30), ["B", "NK"], {0, 1})
    np.testing.assert_allclose(x.mean(0), 0, atol=1e-9)
    assert (np.diff(x.var(0)) <= 1e-9).all()


def test_measures_by_hand():
    given = tables.problem(tables.WINE, 60, 0, seed=0)._replace(hidden=np.array([True, True, False, False]))
    answer = tables.Answer(np.array([4.0, 2.0, 3.0, 1.0]), np.array([True, False, True, False]), "rule")
    row = novelty.measured(answer, given)
    expected = {"rule": "rule", "auroc": 0.75, "average_precision": (1 + 2 / 3) / 2, "n_called": 2}
    assert row == pytest.approx(expected | {"fdp": 0.5, "power": 0.5})
    nothing = novelty.measured(answer, given._replace(hidden=np.zeros(4, dtype=bool)))
    assert (nothing["auroc"], nothing["fdp"], nothing["power"]) == (None, 1.0, None)


def test_every_method_is_asked_and_a_stopped_run_goes_on(tmp_path, monkeypatch):
    chosen = [task for task in novelty.tasks(quick=True) if task["hidden"] == 1]
    monkeypatch.setattr(novelty, "tasks", lambda *, quick: chosen)
    rows = list(novelty.run(quick=True, out=tmp_path / "novelty", workers=1))
    by_data = {row["data"]: [r["method"] for r in rows if r["data"] == row["data"]] for row in rows}
    scores = [f"M1+M2: {name}" for name in ("evidence", "nearest neighbours in z", "nearest class in z")]
    scores += ["M1+M2: diffusion in z"]
    assert by_data[tables.WINE] == ["M1+M2: ambiguity", *scores, *methods.OURS, *methods.RIVALS]
    without_classes = set(methods.RIVALS) - {"logistic regression", "self-training"}
    assert set(by_data[tables.CANCER]) == {"M1+M2: free class", *scores, *methods.OURS, *without_classes}
    default = [row for row in rows if row["method"] == "diffusion"]
    assert all(row["auroc"] > 0.95 and row["power"] > 0.5 for row in default)
    assert benchmarks.run("novelty", quick=True, folder=tmp_path)["rows"] == rows
    output = bench.text({**ABOUT, "rows": rows})
    assert all(name in output for name in (*methods.OURS, *methods.RIVALS))


def test_tasks_cover_every_class_and_seed():
    tasks = novelty.tasks()
    scores = [t for t in tasks if t["stage"] == novelty.SCORES]
    assert len(scores) == 10 * (2 * 10 + 3 + 2 + 2 * 9 + 10)
    assert len({tuple(t.values()) for t in tasks}) == len(tasks)
    assert {t["seed"] for t in tasks if t["stage"] == novelty.MODEL} == set(range(novelty.MODEL_SEEDS))


def test_missing_data_are_skipped(tmp_path, monkeypatch):
    monkeypatch.setenv("VAERDICT_DATA", str(tmp_path / "nothing"))
    tables.table.cache_clear()
    with pytest.raises(novelty.Skipped, match="does not exist; download it"):
        novelty.work({"stage": "scores", "data": tables.PBMC, "labels": 60, "hidden": 0, "seed": 0})


def test_tables_average_over_classes():
    measured = {"n_hidden": 9, "average_precision": 0.5, "fdp": 0.1, "power": 0.6, "n_called": 5, "seconds": 1.0}
    shared = {"data": "wine", "labels": 60, "seed": 0, "rule": "FDR 10 %", **measured}
    rows = [
        novelty.averaged([{**shared, "hidden": hidden, "method": method, "auroc": a} for a in (auroc, auroc + 0.1)])
        for method, aurocs in {"diffusion": (0.8, 0.7), "LOF": (0.5, 0.6)}.items()
        for hidden, auroc in zip("ab", aurocs, strict=True)
    ]
    assert rows[0]["auroc_se"] == pytest.approx(0.05)
    document = bench.document([{**ABOUT, "rows": rows}])
    output = text(document)
    assert "0.800 ± 0.035" in output  # 0.05 / sqrt(2)
    assert output.index("diffusion") < output.index("LOF")
    sentence = "diffusion has an AUROC of 0.800 (LOF 0.600); at an FDR of 10% it calls 60% of the hidden rows"
    assert any(sentence in line for line in document.summary)
