"""The cells that the page shows: which ones, of which genes, on which map, and the file that holds them."""

from __future__ import annotations

import numpy as np
import pytest

from test_de_pipeline import simulated
from vaerdict.core import DataError
from vaerdict.de import cells as shown_cells
from vaerdict.de import differential_expression
from vaerdict.de.cells import FILE, ShownCells
from vaerdict.de.result import DEResult

pytest.importorskip("anndata")
pytest.importorskip("sklearn")


@pytest.fixture(scope="module")
def data():
    return simulated(n=120)


@pytest.fixture(scope="module")
def shown(data) -> ShownCells:
    shown = differential_expression(data, "group", "A", "B").shown()
    assert shown is not None
    return shown


def test_counts_sides_and_names_are_those_of_the_data(data, shown):
    sides = np.array([shown.groups[code] for code in shown.group])
    np.testing.assert_array_equal(sides, data.obs["group"].to_numpy()[shown.rows].astype(str))
    np.testing.assert_array_equal(shown.sides[0], np.where(sides == "A", 1, 2))
    matrix = np.asarray(data.X.todense() if hasattr(data.X, "todense") else data.X)
    place = [list(data.var_names).index(gene) for gene in shown.genes]
    np.testing.assert_array_equal(shown.counts.toarray(), matrix[shown.rows][:, place])
    np.testing.assert_array_equal(shown.totals, matrix[shown.rows].sum(1))
    assert shown.place is not None
    assert shown.place.shape == (len(shown.rows), 2)
    assert (shown.map_name, shown.khat) == ("first two principal components", None)
    assert set(shown.sample) == {-1}


def test_large_groups_are_thinned_and_small_ones_are_not(data, monkeypatch):
    monkeypatch.setattr(shown_cells, "MOST_CELLS", 40)
    group = np.array(["a"] * 5 + ["b"] * 60 + ["c"] * 30 + [None] * 9, dtype=object)
    index = shown_cells._some_cells(group, 0)
    assert (np.diff(index) > 0).all()
    assert [int((group[index] == name).sum()) for name in ("a", "b", "c", None)] == [5, 13, 13, 9]
    np.testing.assert_array_equal(index, shown_cells._some_cells(group, 0))
    assert (index != shown_cells._some_cells(group, 1)).any()


def test_leading_genes_of_both_directions_and_those_asked_for_are_kept(data, monkeypatch):
    monkeypatch.setattr(shown_cells, "MOST_GENES", 10)
    result = differential_expression(data, "group", "A", "B", keep_genes=("g39",))
    shown, table = result.shown(), result.table.sort_values("q_value", kind="stable")
    assert shown is not None
    for up in (True, False):
        genes = [gene for gene, lfc in zip(table["gene"], table["lfc_mean"], strict=True) if (lfc > 0) == up]
        assert set(genes[:3]) <= set(shown.genes)
    assert "g39" in shown.genes
    assert len(shown.genes) <= 11


def test_the_file_has_the_same_bytes_and_holds_everything(data, shown, tmp_path):
    result = differential_expression(data, "group", "A", "B", out=tmp_path / "a")
    differential_expression(data, "group", "A", "B", out=tmp_path / "b")
    written = (tmp_path / "a" / FILE).read_bytes()
    assert written == (tmp_path / "b" / FILE).read_bytes()
    DEResult.load(tmp_path / "a").save(tmp_path / "c")
    assert written == (tmp_path / "c" / FILE).read_bytes()
    loaded = ShownCells.load(tmp_path / "a" / FILE)
    assert loaded is not None
    for name in ("contrasts", "groups", "samples", "genes", "map_name", "khat"):
        assert getattr(loaded, name) == getattr(result.shown(), name)
    for name in ("rows", "sides", "group", "sample", "totals", "place"):
        np.testing.assert_array_equal(getattr(loaded, name), getattr(shown, name))
    np.testing.assert_array_equal(loaded.counts.toarray(), shown.counts.toarray())


def test_samples_and_unlabelled_cells_have_their_place():
    data = simulated(n=120)
    data.obs["donor"] = [f"d{i % 4}" for i in range(data.n_obs)]
    shown = differential_expression(data, "group", "A", sample_key="donor").shown()
    assert shown is not None
    assert shown.samples == ["d0", "d1", "d2", "d3"]
    np.testing.assert_array_equal(shown.sample, shown.rows % 4)


def test_a_map_needs_two_dimensions():
    counts = np.zeros((3, 3))
    assert shown_cells._map(shown_cells.sparse.csr_matrix(counts), np.ones(3), None, 0) == ("", None)
    assert shown_cells._map(counts, np.ones(3), np.ones((3, 1)), 0) == ("", None)
    latent = np.random.default_rng(0).normal(size=(30, 5)) * [1, 1, 9, 1, 5]
    name, place = shown_cells._map(counts, np.ones(30), latent, 0)
    assert name == "two main axes of the latents of the model"
    assert place is not None
    assert abs(np.corrcoef(place[:, 0], latent[:, 2])[0, 1]) > 0.95


def test_umap_is_used_where_it_is_installed_and_repeats():
    pytest.importorskip("umap")
    pytest.importorskip("scanpy")
    rng = np.random.default_rng(0)
    space = rng.normal(size=(240, 4)) + 20 * (np.arange(240) % 2)[:, None]
    name, place = shown_cells._map(None, np.ones(240), space, 0)
    assert name == "UMAP of latents of the model"
    assert place is not None
    apart = np.linalg.norm(place[::2].mean(0) - place[1::2].mean(0))
    assert apart > 2 * place[::2].std(0).max()
    np.testing.assert_array_equal(place, shown_cells._map(None, np.ones(240), space, 0)[1])


def test_cells_that_cannot_be_read_again_are_a_warning(data, tmp_path, monkeypatch):
    data.write_h5ad(tmp_path / "data.h5ad")
    result = differential_expression(tmp_path / "data.h5ad", "group", "A", "B")

    def gone():
        raise DataError("data.h5ad is gone")

    object.__setattr__(result, "shown", gone)
    out = result.save(tmp_path / "run")
    assert not (out / FILE).exists()
    assert any("the page shows no cells (data.h5ad is gone)" in warning for warning in DEResult.load(out).warnings)


def test_a_damaged_file_is_named(tmp_path):
    (tmp_path / FILE).write_bytes(b"PK\x03\x04 cut short")
    with pytest.raises(DataError, match=r"cells.npz cannot be read"):
        ShownCells.load(tmp_path / FILE)
    assert ShownCells.load(tmp_path / "none.npz") is None
