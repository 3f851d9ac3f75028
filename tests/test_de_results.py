"""What an analysis returns and writes: files, draws, arviz, the truth beside it; and that the docs name all of it."""

from __future__ import annotations

import inspect
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from vaerdict.de.page.table import MEASURES

import vaerdict
from test_de_analysis import FAST, simulated
from vaerdict import de
from vaerdict.core import DataError, SettingError
from vaerdict.de import data as inputs
from vaerdict.de import draws
from vaerdict.de.effects import INTERVAL, Effect
from vaerdict.de.model.fitting import FULL, MOST_TRAINING
from vaerdict.de.result import read_table
from vaerdict.de.shrinkage import MOST_MISSED
from vaerdict.de.verdict import _CAUTION, _CERTIFIED, FEW

pd = pytest.importorskip("pandas")
DOCS = Path(__file__).parent.parent / "docs" / "de.md"


@pytest.fixture(scope="module")
def answer() -> de.DEResult:
    pairs = [("A", "B"), ("A", None)]
    return de.differential_expression(simulated(), "group", pairs=pairs, refits=2, **FAST)


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
    found = de.differential_expression(adata, "group", "A", "B", batch_key="donor", out=tmp_path, **FAST)
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
    assert (len(back.obs), back.cells.shape, back.latent.shape) == (0, (0,), (0, 0))
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
    assert list(found.table.columns) == ["contrast", "gene", "gene_id", *list(de.COLUMNS)[2:]]
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
    assert sampled["khat"].sel(group="A").item() == answer.results["diagnostics"][0]["khat"]


def test_draws_are_bounded(generator):
    effects = [Effect(torch.randn(40, 7, generator=generator, dtype=torch.float64), torch.ones(7)) for _ in range(3)]
    whole, few, one = draws.kept(effects), draws.kept(effects, most=3 * 7 * 5 + 6), draws.kept(effects, most=1)
    assert (whole.shape, few.shape, one.shape) == ((3, 40, 7), (3, 5, 7), (3, 1, 7))
    assert whole.dtype == np.float32
    assert np.array_equal(few, whole[:, :5])
    assert np.array_equal(whole[2], effects[2].lfc.float().numpy())
    assert draws.kept([Effect(torch.zeros(draws.MOST_DRAWS + 1, 2), torch.ones(2))]).shape[1] == draws.MOST_DRAWS


# -------------------------------------------------------------------------------------------------------- truth
def test_truth_of_a_contrast_that_was_not_compared_is_refused(answer):
    assert answer.results["truth"] is None
    known = answer.with_truth({"A vs B": {"g0": 2.0}})
    assert (known.results["truth"], answer.results["truth"]) == ({"A vs B": {"g0": 2.0}}, None)
    with pytest.raises(SettingError, match="no contrast B vs C was compared"):
        answer.with_truth({"B vs C": {}})


# --------------------------------------------------------------------------------------------------------- docs
def rows_under(heading: str) -> dict[str, str]:
    """The table under a heading of the documentation: what stands in code in its first column, and the rest."""
    section = DOCS.read_text(encoding="utf-8").split(f"\n## {heading}\n")[1].split("\n## ")[0]
    rows = re.finditer(r"^\| `([^`]+)` \| (.*) \|$", section, re.MULTILINE)
    return {row[1]: row[2].replace(r"\|", "|") for row in rows}


def test_documentation_says_of_every_column_what_the_code_says():
    assert rows_under("Columns") == de.COLUMNS
    assert {measure.key for measure in MEASURES} | {"contrast"} == de.COLUMNS.keys()


def test_documentation_names_every_file(folder):
    documented = set(rows_under("Files")) - {"report.html", "figures/", "parts/"}
    assert documented == {path.name for path in folder.iterdir()}


def test_documentation_names_every_setting_with_its_default():
    parameters = inspect.signature(de.differential_expression).parameters
    effort = {field: getattr(FULL, field) for field in ("refits", "n_draws")} | {"objectives": ",".join(FULL.recipes)}
    documented = {name: rest.split(" | ")[:2] for name, rest in rows_under("Settings").items()}
    assert documented.keys() == parameters.keys() - {"adata", "group_a", "group_b", "pairs", "progress", "out"}
    for name, (_, default) in documented.items():
        found = effort.get(name, parameters[name].default)
        blank = {None: ("none", "X"), inspect.Parameter.empty: ("required",)}
        assert default in blank.get(found, (str(found),)), name


def test_documentation_names_only_commands_that_exist(command):
    code, out, _ = command("de", "--help")
    flags = {rest.split(" | ")[0].strip("`") for rest in rows_under("Settings").values()} - {"Python only"}
    assert code == 0
    assert len(flags) > 10
    assert flags <= set(re.findall(r"--[a-z-]+", out))


def test_documentation_says_the_limits_and_scales_of_the_code():
    text = DOCS.read_text(encoding="utf-8")
    assert set(rows_under("Scales")) == set(de.ESTIMANDS)
    assert all(rest.startswith(de.ESTIMANDS[name].target) for name, rest in rows_under("Scales").items())
    assert f"{INTERVAL:.0%} credible" in text
    assert f"at least {100 * _CERTIFIED:.0f} %, at least {100 * _CAUTION:.0f} %, fewer" in text
    assert f"at least {FEW['cells']} cells, or {FEW['samples']} samples" in text
    assert f"the counts of more than {100 * MOST_MISSED:.0f} % of the genes contradict the model" in text
    assert f"{inputs.HELD // 2**20} MB" in text
    assert f"{MOST_TRAINING:,}" in text
    assert f"{draws.MOST_DRAWS} for each gene" in text
    assert f"{4 * draws.MOST_NUMBERS // 2**20} MB in all" in text


def test_documentation_uses_only_names_that_exist():
    text = DOCS.read_text(encoding="utf-8")
    used, called = set(re.findall(r"\bvd\.(\w+)", text)), set(re.findall(r"\bresult\.(\w+)", text))
    assert {"differential_expression", "DEResult"} <= used
    assert {"to_scanpy", "to_arviz", "with_truth"} <= called
    assert all(hasattr(vaerdict, name) for name in used)
    assert all(hasattr(de.DEResult, name) for name in called)
