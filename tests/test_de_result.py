"""What an analysis returns and writes: files, draws, arviz, the truth beside it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from test_de_pipeline import FAST, MODEL, simulated
from vaerdict import de
from vaerdict.core import DataError, SettingError
from vaerdict.de import columns
from vaerdict.de.effects import INTERVAL, Effect
from vaerdict.de.result import MOST_DRAWS, kept_draws, read_table

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
    for name in ("cells", "latent", "draws"):
        assert np.array_equal(getattr(back, name), getattr(answer, name)), name
    assert list(back.obs.index) == list(answer.obs.index)
    assert (back.data_sha256, back.verdict) == (answer.data_sha256, answer.verdict)
    here, there = simulated(), simulated()
    answer.to_scanpy(here)
    back.to_scanpy(there)
    assert np.array_equal(here.uns["rank_genes_groups"]["names"], there.uns["rank_genes_groups"]["names"])


@pytest.mark.parametrize("name", ["results.json", "latent.h5ad", "draws.npz"])
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
    assert np.array_equal(back.draws, answer.draws)


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


# -------------------------------------------------------------------------------------------------------- draws
def test_arviz_summarises_the_draws_as_the_table_does(answer):
    arviz = pytest.importorskip("arviz")
    data = answer.to_arviz()
    assert data.posterior["lfc"].dims == ("chain", "draw", "contrast", "gene")
    for name, rows in answer.table.groupby("contrast"):
        lfc = data.posterior["lfc"].sel(contrast=name)
        assert lfc.coords["gene"].to_numpy().tolist() == rows["gene"].tolist()
        summary = arviz.summary(data, var_names="lfc", coords={"contrast": name}, kind="stats", round_to="none")
        assert summary["mean"].to_numpy() == pytest.approx(rows["lfc_mean"].to_numpy(), abs=1e-5)
        low, high = lfc.quantile([0.5 - INTERVAL / 2, 0.5 + INTERVAL / 2], dim=("chain", "draw")).to_numpy()
        assert low == pytest.approx(rows["lfc_low"].to_numpy(), abs=1e-5)
        assert high == pytest.approx(rows["lfc_high"].to_numpy(), abs=1e-5)
    sampled = data.importance_diagnostics
    assert sampled["khat"].sel(group="A").item() == answer.results["model"]["diagnostics"][0]["khat"]


def test_draws_are_bounded(generator):
    effects = [Effect(torch.randn(40, 7, generator=generator, dtype=torch.float64), torch.ones(7)) for _ in range(3)]
    whole, few, one = kept_draws(effects), kept_draws(effects, most=3 * 7 * 5 + 6), kept_draws(effects, most=1)
    assert (whole.shape, few.shape, one.shape) == ((3, 40, 7), (3, 5, 7), (3, 1, 7))
    assert whole.dtype == np.float32
    assert np.array_equal(few, whole[:, :5])
    assert np.array_equal(whole[2], effects[2].lfc.float().numpy())
    assert kept_draws([Effect(torch.zeros(MOST_DRAWS + 1, 2), torch.ones(2))]).shape[1] == MOST_DRAWS


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
    assert "importance_diagnostics" not in pytest.importorskip("arviz").InferenceData.groups(back.to_arviz())
