"""What an analysis returns and writes: files, the genes not tested, the truth beside it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from test_de_pipeline import FAST, MODEL, simulated
from vaerdict import de
from vaerdict.core import DataError, SettingError
from vaerdict.de import columns
from vaerdict.de.result import NOT_TESTED, read_table

pd = pytest.importorskip("pandas")


@pytest.fixture(scope="module")
def answer() -> de.DEResult:
    pairs = [("A", "B"), ("A", None)]
    return de.differential_expression(simulated(), "group", pairs=pairs, **MODEL)


@pytest.fixture(scope="module")
def folder(answer, tmp_path_factory) -> Path:
    return answer.save(tmp_path_factory.mktemp("results"))


# -------------------------------------------------------------------------------------------------------- files
def test_parquet_holds_what_csv_holds_with_its_types(answer, folder):
    pytest.importorskip("pyarrow")
    parquet, csv = pd.read_parquet(folder / "de.parquet"), read_table(folder)
    pd.testing.assert_frame_equal(parquet, answer.table, check_exact=True)
    pd.testing.assert_frame_equal(parquet, csv, check_exact=True)
    assert [parquet[key].dtype.kind for key in ("gene", "is_de", "lfc_mean", "q_value")] == ["O", "b", "f", "f"]


def test_a_saved_run_comes_back_whole(answer, folder):
    back = de.DEResult.load(folder)
    pd.testing.assert_frame_equal(back.table, answer.table, check_exact=True)
    for name in ("cells", "latent"):
        assert np.array_equal(getattr(back, name), getattr(answer, name)), name
    assert list(back.obs.index) == list(answer.obs.index)
    assert (back.data_sha256, back.verdict) == (answer.data_sha256, answer.verdict)
    here, there = simulated(), simulated()
    answer.to_scanpy(here)
    back.to_scanpy(there)
    assert np.array_equal(here.uns["rank_genes_groups"]["names"], there.uns["rank_genes_groups"]["names"])


@pytest.mark.parametrize("name", ["results.json", "latent.h5ad"])
def test_a_damaged_run_is_named(answer, tmp_path, name):
    answer.save(tmp_path)
    (tmp_path / name).write_bytes((tmp_path / name).read_bytes()[:100])
    with pytest.raises(DataError, match="run `vaerdict de` again"):
        de.DEResult.load(tmp_path)


def test_what_else_is_known_of_the_cells_does_not_stop_a_run(tmp_path):
    """A column of strings and numbers cannot be written; only the labels used are."""
    adata = simulated(n=90)
    adata.obs["donor"] = [1 if i % 2 else "d2" for i in range(90)]
    adata.obs["group"] = adata.obs["group"].where(np.arange(90) > 3)
    found = de.differential_expression(adata, "group", "A", "B", batch_key="donor", out=tmp_path, **MODEL)
    assert list(found.obs.columns) == ["group", "donor"]
    back = de.DEResult.load(tmp_path)
    assert back.obs["donor"].astype(str).tolist() == found.obs["donor"].astype(str).tolist()
    assert set(back.obs["donor"]) == {"1", "d2"}
    assert back.obs.index.tolist() == adata.obs_names[back.cells].tolist()


def test_cells_that_cannot_be_written_cost_no_genes(answer, tmp_path):
    (tmp_path / "latent.h5ad").write_text("of an earlier run")
    odd = replace(answer, obs=answer.obs.assign(mixed=[1, "a"] * (len(answer.obs) // 2)))
    odd.save(tmp_path)
    assert not (tmp_path / "latent.h5ad").exists()
    assert not list(tmp_path.glob("partial-*"))
    back = de.DEResult.load(tmp_path)
    pd.testing.assert_frame_equal(back.table, answer.table, check_exact=True)
    assert any(words.startswith("latent.h5ad was not written (") for words in back.warnings)
    assert (len(back.obs), back.cells.shape, back.latent) == (0, (0,), None)


def test_names_that_look_like_numbers_stay_names(answer, tmp_path):
    genes = [f"0{100 + i}" for i in range(40)] * 2
    replace(answer, table=answer.table.assign(gene=genes, contrast=["1"] * 40 + ["2"] * 40)).save(tmp_path)
    back = de.DEResult.load(tmp_path).table
    assert back["gene"].tolist() == genes
    assert set(back["contrast"]) == {"1", "2"}


def test_symbols_stand_beside_the_names_of_the_file(tmp_path):
    adata = simulated(n=90)
    adata.var["symbol"] = [f"S{i}" for i in range(40)]
    found = de.differential_expression(adata, "group", "A", "B", gene_symbols="symbol", out=tmp_path, **FAST)
    assert list(found.table.columns) == columns.names(columns.DE, columns.SYMBOLS)
    assert found.table["gene"].tolist() == adata.var["symbol"].tolist()
    back = de.DEResult.load(tmp_path)
    pd.testing.assert_frame_equal(back.table, found.table, check_exact=True)
    back.to_scanpy(adata)
    assert set(adata.uns["rank_genes_groups"]["names"]["A"]) == set(adata.var_names)


# --------------------------------------------------------------------------------------------- genes not tested
@pytest.fixture(scope="module")
def rare() -> de.DEResult:
    """Gene g0 is not seen, g1 in five cells, g2 in group C only, g3 in group A only."""
    adata = simulated()
    group = adata.obs["group"].to_numpy()
    adata.X[:, 0] = 0
    adata.X[5:, 1], adata.X[:5, 1] = 0, 1
    adata.X[group != "C", 2] = 0
    adata.X[group != "A", 3] = 0
    return de.differential_expression(adata, "group", pairs=[("A", "B"), ("B", "C")])


def test_genes_that_were_not_tested_are_listed_with_the_reason(rare, tmp_path):
    assert list(rare.not_tested.columns) == columns.names(columns.NOT_TESTED)
    few = "seen in fewer than 10 of the cells compared"
    assert rare.not_tested.to_numpy().tolist() == [
        ["A vs B", "g0", 0, "not seen"],
        ["A vs B", "g1", 4, few],
        ["A vs B", "g2", 0, "not seen"],
        ["B vs C", "g0", 0, "not seen"],
        ["B vs C", "g1", 3, few],
        ["B vs C", "g3", 0, "not seen"],
    ]
    back = de.DEResult.load(rare.save(tmp_path))
    pd.testing.assert_frame_equal(back.not_tested, rare.not_tested)
    for row, genes in zip(rare.results["contrasts"], (37, 37), strict=True):
        assert (row["n_tested"], row["n_expressed"], row["least_cells"]) == (genes, genes, 10)
        assert (rare.table["contrast"] == row["name"]).sum() == genes


def test_nothing_left_out_is_an_empty_table(tmp_path):
    result = de.differential_expression(simulated(), "group", "A", "B", out=tmp_path)
    assert len(result.not_tested) == 0
    back = de.DEResult.load(tmp_path).not_tested
    assert (len(back), list(back.columns)) == (0, columns.names(columns.NOT_TESTED))
    assert (tmp_path / NOT_TESTED).read_text().count("\n") == 1


def test_scanpy_ranks_contrasts_of_different_genes(rare):
    adata = simulated()
    rare.to_scanpy(adata)
    ranking = adata.uns["rank_genes_groups"]
    assert rare.table["gene"].nunique() == 38
    assert len(ranking["names"]) == 40  # scanpy's plots want every gene
    place = ranking["names"]["A"].tolist().index("g2")
    assert (ranking["scores"]["A"][place], ranking["pvals"]["A"][place], ranking["pvals_adj"]["A"][place]) == (0, 1, 1)
    assert ranking["logfoldchanges"]["A"][place] == 0
    assert "g0" in ranking["names"]["A"]
    frame = pytest.importorskip("scanpy").get.rank_genes_groups_df(adata, "A")
    assert frame["scores"].is_monotonic_decreasing


# -------------------------------------------------------------------------------------------------------- truth
def test_truth_of_a_contrast_that_was_not_compared_is_refused(answer):
    assert answer.results["truth"] is None
    known = answer.with_truth({"A vs B": {"g0": 2.0}})
    assert (known.results["truth"], answer.results["truth"]) == ({"A vs B": {"g0": 2.0}}, None)
    with pytest.raises(SettingError, match="no contrast B vs C was compared"):
        answer.with_truth({"B vs C": {}})


def test_a_run_from_the_counts_comes_back_without_cells(tmp_path):
    result = de.differential_expression(simulated(n=90), "group", "A", "B", out=tmp_path, **FAST)
    assert not (tmp_path / "latent.h5ad").exists()
    back = de.DEResult.load(tmp_path)
    pd.testing.assert_frame_equal(back.table, result.table, check_exact=True)
    assert (len(back.obs), back.cells.shape, back.latent) == (0, (0,), None)
