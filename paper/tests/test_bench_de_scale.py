"""The benchmark of `vaerdict de` from a file to a table: its cells, and the limits of the methods."""

from __future__ import annotations

import numpy as np
import pytest

from vaerdict.optional import isolated
from vaerdict_paper.benchmarks import de_scale

anndata = pytest.importorskip("anndata")
GENES = 60


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return de_scale.simulate(tmp_path_factory.mktemp("cells") / "a.h5ad", 960, GENES, seed=0)


def test_the_file_holds_sparse_counts_of_eight_types_a_quarter_of_two(path):
    with isolated(0):
        adata = anndata.read_h5ad(path)
    assert adata.shape == (960, GENES)
    assert (adata.X.data == np.round(adata.X.data)).all()
    assert (adata.X.sum(1) > 0).all()
    share = adata.obs["cell_type"].value_counts(normalize=True)
    assert share["t0"] == share["t1"] == 0.25
    assert len(share) == 8


def test_counts_have_the_means_and_the_over_dispersion_of_their_profile():
    rates = de_scale._rates(GENES, np.random.default_rng(0))[:2, :2]
    tables = de_scale._tables(rates, np.random.default_rng(0)).astype(float)
    below = rates < 20  # the largest count is not reached
    np.testing.assert_allclose(tables.mean(-1)[below], rates[below], rtol=0.05, atol=0.02)
    often = (rates > 2) & below
    assert (tables.var(-1)[often] > 1.1 * rates[often]).all()


def test_some_genes_change_and_others_do_not():
    rates = de_scale._rates(2000, np.random.default_rng(0)).mean(1)
    lfc = np.log2(rates[0] / rates[1])
    changed = np.abs(lfc - np.median(lfc)) >= de_scale.DELTA
    assert 0.05 < changed.mean() < 0.6


def test_a_method_that_was_too_slow_is_not_tried():
    assert de_scale._not_tried(10_000, None, 120) is None
    assert de_scale._not_tried(10_000, (1000, 1.0), 120) is None
    assert de_scale._not_tried(10_000, (1000, 20.0), 120) == "not tried in 120 CPU s: 20 for 1,000 cells"


def test_a_method_without_an_answer_keeps_its_reason_at_every_size(monkeypatch):
    first = {
        "answers": {"n_called": 3, "needs_s": 0.1, "stopped": None},
        "memory": {"stopped": "needs more than 8 GiB"},
        "time": {"stopped": "did not finish in 60 CPU s"},
        "fails": {"stopped": "ended with exit code 1"},
    }
    methods = {name: de_scale.Method(lambda path: {}, de_scale.BEYOND_DELTA, "vaerdict") for name in first}
    methods["absent"] = methods["fails"]._replace(package="no_such_package")
    monkeypatch.setattr(de_scale, "_methods", lambda: methods)
    monkeypatch.setattr(de_scale, "in_limits", lambda name, files, limit: dict(first[name]))
    monkeypatch.setattr(de_scale, "simulate", lambda path, *size, seed: path.touch() or path)
    rows = list(de_scale.run(quick=True))
    stopped = {name: [row["stopped"] for row in rows if row["method"] == name] for name in methods}
    assert stopped == {
        "answers": [None, None],
        "memory": ["needs more than 8 GiB", "not tried: with fewer cells it needs more than 8 GiB"],
        "time": ["did not finish in 60 CPU s", "not tried: with fewer cells it did not finish in 60 CPU s"],
        "fails": ["ended with exit code 1", "not tried: with fewer cells it ended with exit code 1"],
        "absent": ["no_such_package is not installed"] * 2,
    }


@pytest.mark.slow
def test_a_method_that_fails_says_how_its_process_ended(path, tmp_path):
    absent = tmp_path / "absent.h5ad"
    assert de_scale.in_limits(de_scale.OURS, (path, absent)) == {"stopped": "ended with exit code 1"}


def test_the_default_path_is_timed_in_a_process_of_its_own(path):
    answer = de_scale.in_limits("vaerdict de", (path, path))
    assert answer["stopped"] is None
    assert answer["n_called"] > 0
    assert 0 < answer["cpu_s"] == answer["spent_s"]
    assert 0.1 < answer["peak_gb"] < de_scale.MEMORY
    assert answer["repeats"] == de_scale.REPEATS


@pytest.mark.slow
@pytest.mark.parametrize(
    ("limits", "message"), [((-1, 8), "did not finish in -1 CPU s"), ((60, 0.1), "needs more than 0.1 GiB")]
)
def test_a_method_that_reaches_a_limit_says_so(path, limits, message):
    assert de_scale.in_limits("vaerdict de", (path, path), *limits) == {"stopped": message}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "package"), [("scanpy t-test", "scanpy"), ("edgepython QL", "edgepython"), ("scvi-tools", "scvi")]
)
def test_every_rival_answers(path, name, package):
    pytest.importorskip(package)
    answer = de_scale.in_limits(name, (path, path))
    assert answer["stopped"] is None
    assert 0 < answer["reading_s"] < answer["cpu_s"]
    assert ("training_s" in answer) == (name == "scvi-tools")
