from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from scipy import special

from checks import assert_mean
from vaerdict import de
from vaerdict.core import SettingError, VaerdictError
from vaerdict.de import columns, moderation, tables
from vaerdict.de.effects import PROPORTION, GeneTable
from vaerdict.de.model import checks, effect, stage
from vaerdict.de.stage_cache import StageCache
from vaerdict.optional import isolated

ad = pytest.importorskip("anndata")
pd = pytest.importorskip("pandas")

CHANGED = 6
"""Genes whose rate differs between the groups, threefold, the first half up."""


def simulated(n: int = 240, genes: int = 40, *, seed: int = 0, null: bool = False) -> Any:
    """Negative binomial counts of groups A, B and C; six samples in each of A and B's cells, two batches."""
    rng = np.random.default_rng(seed)
    group = np.array(["A", "B", "C"])[np.arange(n) % 3]
    rate = np.exp(rng.normal(1.0, 0.5, size=genes)) * np.exp(rng.normal(0, 0.2, size=(n, 1)))
    if not null:
        rate[:, : CHANGED // 2] *= np.where(group == "A", 4.0, 1.0)[:, None]
        rate[:, CHANGED // 2 : CHANGED] *= np.where(group == "A", 0.25, 1.0)[:, None]
    counts = rng.poisson(rng.gamma(5.0, rate / 5.0))
    obs = {
        "group": group,
        "sample": [f"{g}{i % 4}" for i, g in zip(np.arange(n) // 3, group, strict=True)],
        "type": np.where(np.arange(n) // 3 % 2 == 0, "t", "u"),
        "batch": np.where(rng.random(n) < 0.5, "x", "y"),
    }
    frame = pd.DataFrame(obs, index=[f"c{i}" for i in range(n)])
    return ad.AnnData(counts.astype(np.float32), obs=frame, var=pd.DataFrame(index=[f"g{i}" for i in range(genes)]))


FAST = {"n_draws": 100}
MODEL = {"quick": True, "check_model": True, **FAST}


@pytest.fixture(scope="module")
def answer() -> de.DEResult:
    options = {"objectives": ["VAE", "IWAE"], **MODEL}
    return de.differential_expression(simulated(), "group", "A", "B", **options)


@pytest.fixture(scope="module")
def from_counts() -> de.DEResult:
    return de.differential_expression(simulated(), "group", "A", "B", **FAST)


def test_the_counts_decide_and_no_model_is_trained_by_default(from_counts, answer, tmp_path):
    """A model that only checks changes no number of the table, and nothing of its folder is imported without one."""
    assert from_counts.results["model"] is None
    assert from_counts.latent is None
    assert from_counts.verdict["decided_by"] == answer.verdict["decided_by"] == "counts"
    pd.testing.assert_frame_equal(answer.table[from_counts.table.columns], from_counts.table, check_exact=True)
    simulated(n=60).write_h5ad(tmp_path / "a.h5ad")
    script = (
        "import sys; from vaerdict import de\n"
        "de.differential_expression('a.h5ad', 'group', 'A', 'B')\n"
        "print(*(m for m in sys.modules if m.startswith('vaerdict.de.model')))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd=tmp_path)
    assert done.stdout.split() == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"objectives": ["VAE"]}, "none is trained; add check_model=True or leave them out"),
        ({"refits": 3}, "there is none; add scale='pair' or leave them out"),
        ({"refits": 3, "check_model": True}, "there is none; add scale='pair' or leave them out"),
        ({"check_model": True, "n_draws": 5}, "n_draws=5: with a model at least 20 draws"),
    ],
)
def test_options_of_a_model_without_effect_are_refused(options, message):
    for function in (de.differential_expression, de.calibrate):
        with pytest.raises(SettingError, match=message):
            function(simulated(n=60), "group", "A", **options)


def test_values_of_numpy_and_single_names_become_plain(tmp_path):
    options = {"n_top_genes": np.int64(30), "delta": np.float32(0.5), "seed": np.int64(1), "keep_genes": "g1"}
    result = de.differential_expression(simulated(n=60), "group", "A", "B", out=tmp_path, **options)
    assert result.results["settings"]["keep_genes"] == ("g1",)
    assert json.loads((tmp_path / "results.json").read_text())["settings"]["n_top_genes"] == 30
    assert de.DEOptions(groupby="g", keep_genes=np.array(["a", "b"])).keep_genes == ("a", "b")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"group_a": "A", "pairs": [("A", "B")]}, "pairs takes the place of group_a and group_b"),
        ({"pairs": ("A", "B")}, r"pairs holds 'A'; give pairs of groups"),
        ({"pairs": [("A",)]}, r"pairs holds \('A',\)"),
    ],
)
def test_pairs_that_are_ambiguous_are_refused(arguments, message):
    with pytest.raises(SettingError, match=message):
        de.differential_expression(simulated(n=60), "group", **arguments)


def test_results_of_another_command_are_not_overwritten(tmp_path):
    adata = simulated(n=60)
    de.differential_expression(adata, "group", "A", "B", out=tmp_path / "de", **FAST)
    with pytest.raises(SettingError, match="holds results of 'de', not of 'calibrate'"):
        de.calibrate(adata, "group", "A", splits=1, spikes=0, out=tmp_path / "de", **FAST)
    de.calibrate(adata, "group", "A", splits=1, spikes=0, out=tmp_path / "calibrate", **FAST)
    with pytest.raises(SettingError, match="holds results of 'calibrate', not of 'de'"):
        de.differential_expression(adata, "group", "A", "B", out=tmp_path / "calibrate", **FAST)


def test_an_unknown_option_is_refused_by_its_name():
    with pytest.raises(TypeError, match=r"differential_expression\(\) got an unexpected keyword argument 'detla'"):
        de.differential_expression(simulated(n=60), "group", "A", "B", detla=0.3)


def test_changed_genes_are_found_with_their_direction(answer):
    table = answer.table.set_index("gene")
    up, down = [f"g{i}" for i in range(3)], [f"g{i}" for i in range(3, 6)]
    assert table.loc[up + down, "is_de"].all()
    assert table.loc[up, "lfc_mean"].to_numpy() == pytest.approx([2] * 3, abs=0.6)
    assert table.loc[down, "lfc_mean"].to_numpy() == pytest.approx([-2] * 3, abs=0.6)
    assert table["is_de"].sum() <= 8
    assert set(answer.discoveries().gene.head(6)) == set(up + down)


def test_the_table_has_the_documented_columns(answer, from_counts):
    assert list(answer.table.columns) == columns.names(columns.DE, columns.MODEL)
    assert list(from_counts.table.columns) == columns.names(columns.DE)
    assert set(answer.table.group_a) | set(answer.table.group_b) == {"A", "B"}
    assert (answer.table.lfc_low <= answer.table.lfc_high).all()
    assert answer.table[["prob_de", "q_value", "mcse"]].notna().all(axis=None)


def test_the_results_follow_the_contract(answer):
    results, model = answer.results, answer.results["model"]
    assert results["experiment"] == "de"
    assert {"certified", "caution", "refused"} >= {answer.verdict["inference"]}
    (contrast,) = results["contrasts"]
    assert contrast["n_up"] + contrast["n_down"] == contrast["n_discoveries"] == answer.table.is_de.sum()
    assert contrast["expected_fdr"] <= 0.05
    curve = contrast["fdr_curve"]
    assert curve["k"][-1] == 40
    assert all(low <= high for low, high in zip(curve["low"], curve["high"], strict=True))
    assert sum(row["chosen"] for row in model["selection"]) == 1
    assert {row["model"] for row in model["selection"]} == {"VAE", "IWAE"}
    best = max(model["selection"], key=lambda row: row["evidence_refined"])
    assert best["chosen"]
    assert [check["name"] for check in model["checks"]] == ["zeros", "variance", "library"]
    assert {row["group"] for row in model["diagnostics"]} == {"A", "B"}
    assert any("Cells are the replicates" in message for message in answer.verdict["messages"])
    json.dumps(results)


def mostly_changed(n_down: int, n_same: int, n_up: int, *, n: int = 400, seed: int = 0) -> Any:
    """Counts of groups A and B, in which most genes halve or double."""
    rng = np.random.default_rng(seed)
    lfc = np.repeat([-1.0, 0.0, 1.0], (n_down, n_same, n_up))
    in_a = np.arange(n) % 2 == 0
    rate = np.exp(rng.normal(2.0, 0.3, size=len(lfc))) * 2 ** (lfc * in_a[:, None])
    frame = pd.DataFrame({"group": np.where(in_a, "A", "B")}, index=[f"c{i}" for i in range(n)])
    genes = pd.DataFrame(index=[f"g{i}" for i in range(len(lfc))])
    return ad.AnnData(rng.poisson(rng.gamma(5.0, rate / 5.0)).astype(np.float32), obs=frame, var=genes)


def test_a_doubtful_centre_is_said_first_and_the_list_is_not_to_be_used(tmp_path):
    adata = mostly_changed(30, 40, 30)  # genes that go up are better known, and few: they pass for the largest set
    result = de.differential_expression(adata, "group", "A", "B")
    assert result.verdict["centre"] == "unsure"
    assert result.results["contrasts"][0]["balance"]["shift"] == pytest.approx(-1, abs=0.2)
    page = result.report(tmp_path / "doubted").read_text()
    assert "It is not certain which genes do not change." in page
    assert "can be used" not in page
    assert '<section class="summary bad"' in page
    assert de.differential_expression(adata, "group", "A", "B", scale="proportion").verdict["centre"] is None
    sure = de.differential_expression(mostly_changed(10, 80, 10), "group", "A", "B")
    assert sure.verdict["centre"] == "balanced"
    page = sure.report(tmp_path / "sure").read_text()
    assert "can be used" in page
    assert '<section class="summary"' in page


def test_means_and_shares_are_those_of_the_counts(answer):
    """The model's means and fold changes are columns of their own."""
    adata, table = simulated(), answer.table.set_index("gene")
    for side in "ab":
        mask = (adata.obs["group"] == side.upper()).to_numpy()
        share = adata.X[mask].sum(0) / adata.X[mask].sum()
        assert table[f"mean_{side}"].to_numpy() == pytest.approx(share)
        assert table[f"seen_{side}"].to_numpy() == pytest.approx((adata.X[mask] > 0).mean(0))
        assert table[f"model_mean_{side}"].to_numpy() == pytest.approx(share, rel=0.5)
        assert not np.allclose(table[f"model_mean_{side}"], table[f"mean_{side}"], rtol=1e-4)
    up, down = table.loc[["g0", "g1", "g2"], "model_lfc"], table.loc[["g3", "g4", "g5"], "model_lfc"]
    assert up.min() > 0.5 > -0.5 > down.max()
    assert not np.allclose(table["model_lfc"], table["lfc_mean"], atol=1e-3)


def test_a_contrast_that_batches_confound_costs_no_run(tmp_path):
    adata = simulated(n=120)
    adata.obs["batch"] = np.where(adata.obs["group"] == "C", "y", np.where(np.arange(120) % 2 == 0, "x", "w"))
    adata.obs.loc[adata.obs_names[:30:3], "batch"] = "alone"  # cells of A only
    options = {"pairs": [("A", "B"), ("A", "C")], "batch_key": "batch", "out": tmp_path, **FAST}
    result = de.differential_expression(adata, "group", **options)
    (row,) = result.results["contrasts"]
    assert (row["name"], row["against_rest"], row["paired"]) == ("A vs B", False, None)
    assert [row[f"n_cells_{side}"] for side in ("a", "b", "a_used", "b_used")] == [40, 40, 30, 40]
    assert [warning.split(":")[0] for warning in result.warnings] == ["left out", "A vs B"]
    adata.obs["batch"] = np.roll(adata.obs["batch"], 6)
    with pytest.raises(SettingError, match="holds a finished run of other data"):
        de.differential_expression(adata, "group", **options)


def test_a_contrast_whose_cells_have_no_counts_is_said_to_be_left_out():
    adata = simulated(n=120)
    adata.obs["type"] = np.where(np.arange(120) < 12, "empty", "full")
    adata.X[:12] = 0
    result = de.differential_expression(adata, "group", "A", "B", within="type", **FAST)
    assert [row["name"] for row in result.results["contrasts"]] == ["A vs B within full"]
    assert "left out: A vs B within empty, because too few of its cells have counts." in result.warnings


def test_no_number_of_genes_means_all_of_them():
    result = de.differential_expression(simulated(n=60), "group", "A", "B", n_top_genes=0, **FAST)
    assert len(result.table) == 40
    assert result.results["settings"]["n_top_genes"] is None


def test_groups_of_the_same_population_give_no_discoveries():
    result = de.differential_expression(simulated(null=True, seed=1), "group", "A", "B", **FAST)
    assert result.table.is_de.sum() == 0


def test_one_against_the_rest_within_types_and_samples_at_once():
    adata = simulated(n=360)
    result = de.differential_expression(
        adata, "group", "A", within="type", sample_key="sample", batch_key="batch", n_top_genes=None, **FAST
    )
    rows = result.results["contrasts"]
    assert [row["name"] for row in rows] == ["A vs rest within t", "A vs rest within u"]
    assert [row["n_samples_a"] for row in rows] == [2, 2]
    assert result.verdict["replicates"] == "samples"
    assert not any("Cells are" in warning for warning in result.warnings)
    for row in rows:
        assert set(result.discoveries(row["name"]).gene.head(4)) <= {f"g{i}" for i in range(6)}


def test_a_stopped_run_goes_on_to_the_identical_file(tmp_path, monkeypatch):
    adata, options = simulated(n=150), {"refits": 2, "scale": "pair", "quick": True, **FAST}
    whole = de.differential_expression(adata, "group", "A", "B", out=tmp_path / "whole", **options)
    with monkeypatch.context() as patch:

        def killed(*_: Any, **__: Any) -> None:
            raise KeyboardInterrupt

        patch.setattr(stage, "refit_averages", killed)
        with pytest.raises(KeyboardInterrupt):
            de.differential_expression(adata, "group", "A", "B", out=tmp_path / "stopped", **options)
    assert not (tmp_path / "stopped" / "de.csv").exists()
    with monkeypatch.context() as patch:
        patch.setattr(stage, "group_averages", killed)  # that stage was stored and is not done again
        de.differential_expression(adata, "group", "A", "B", out=tmp_path / "stopped", **options)
    first, second = ((tmp_path / name / "de.csv").read_bytes() for name in ("whole", "stopped"))
    assert first == second
    read_back = pd.read_csv(tmp_path / "whole" / "de.csv")
    assert read_back.lfc_mean.to_numpy() == pytest.approx(whole.table.lfc_mean.to_numpy())
    with pytest.raises(SettingError, match=r"run with other settings .*; choose another out="):
        de.differential_expression(adata, "group", "A", "B", out=tmp_path / "whole", delta=1.0, **options)


def test_saved_files_are_whole_and_scanpy_reads_them(answer, tmp_path):
    answer.save(tmp_path)
    assert {"de.csv", "results.json", "latent.h5ad", "manifest.json"} <= {file.name for file in tmp_path.iterdir()}
    assert not list(tmp_path.glob("partial-*"))
    latent = ad.read_h5ad(tmp_path / "latent.h5ad")
    assert latent.obsm["X_vaerdict"].shape == (160, 10)
    assert set(latent.obs["group"]) == {"A", "B"}
    assert len(json.loads((tmp_path / "manifest.json").read_text())["data_sha256"]) == 64


def test_scanpy_reads_the_ranking(answer):
    scanpy = pytest.importorskip("scanpy")
    adata = simulated()
    answer.to_scanpy(adata)
    frame = scanpy.get.rank_genes_groups_df(adata, "A")
    assert set(frame.names.head(3)) == {"g0", "g1", "g2"}
    assert set(frame.names.tail(3)) == {"g3", "g4", "g5"}
    assert frame.scores.is_monotonic_decreasing
    table = answer.table.set_index("gene").loc[frame.names]
    assert frame.pct_nz_group.tolist() == table["seen_a"].tolist()
    assert frame.pct_nz_reference.tolist() == table["seen_b"].tolist()


def test_a_fitted_scvi_model_takes_the_place_of_training(tmp_path):
    scvi = pytest.importorskip("scvi")
    adata = simulated(n=150)
    with isolated(0):
        scvi.model.SCVI.setup_anndata(adata, batch_key="batch")
        model = scvi.model.SCVI(adata)
        model.train(max_epochs=30, accelerator="cpu", enable_progress_bar=False, logger=False)
    result = de.differential_expression(adata, "group", "A", "B", model=model, out=tmp_path, **FAST)
    assert result.results["settings"]["model"] == "SCVI"
    assert result.results["model"]["refits"] == 0
    assert [row["model"] for row in result.results["model"]["selection"]] == ["SCVI"]
    assert any("its own error is not assessed" in words for words in result.warnings)
    assert all(row["khat"] < row["khat_encoder"] for row in result.results["model"]["diagnostics"])
    assert set(result.table.nlargest(3, "lfc_mean").gene) == {"g0", "g1", "g2"}


def test_counts_are_compared_within_the_batches_of_a_given_model():
    """Genes of which only the batches differ, and groups in unlike batches: nothing changed."""
    scvi = pytest.importorskip("scvi")
    adata, rng = simulated(n=150, null=True), np.random.default_rng(1)
    far = rng.random(150) < np.where(adata.obs["group"] == "B", 0.8, 0.2)
    adata.X[far, 20:30] = rng.poisson(4 * adata.X[far, 20:30])
    adata.obs["batch"] = np.where(far, "y", "x")
    with isolated(0):
        scvi.model.SCVI.setup_anndata(adata, batch_key="batch")
        model = scvi.model.SCVI(adata, n_hidden=8, n_latent=2)
        model.train(max_epochs=2, accelerator="cpu", enable_progress_bar=False, logger=False)
    result = de.differential_expression(adata, "group", "A", "B", model=model, **FAST)
    adata.obs["all"] = "one"
    mixed = de.differential_expression(adata, "group", "A", "B", model=model, batch_key="all", **FAST)
    assert (result.table.is_de.sum(), mixed.table.is_de.sum() >= 8) == (0, True)
    assert result.results["contrasts"][0]["n_cells_a_used"] == mixed.results["contrasts"][0]["n_cells_a_used"] == 50


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"scale": "log"}, "scale='log' is not one of centred, proportion, pair"),
        ({"scale": "pair", "sample_key": "sample"}, "choose one of them"),
        ({"prior": "flat"}, "prior='flat' is not one of none, profile, model"),
        ({"delta": 0.0}, "delta=0.0 must be positive"),
        ({"level": 1.5}, "strictly between 0 and 1"),
        ({"objectives": ["GAN"]}, "objectives .*GAN"),
        ({"refits": 1, "scale": "pair"}, "at least two, or 0"),
        ({"n_draws": 0}, "n_draws=0"),
        ({"n_top_genes": 1}, "n_top_genes=1: at least 2 genes are needed to compare; 0 for all"),
        ({"n_top_genes": -5}, "n_top_genes=-5: at least 0"),
        ({"n_top_genes": 2.5}, "n_top_genes=2.5 must be a whole number"),
        ({"min_cells": -1}, "min_cells=-1: at least 1"),
        ({"delta": float("inf")}, "delta=inf must be finite"),
        ({"seed": 2**40}, "seed=1099511627776 must be below"),
        ({"sample_key": "donor"}, "sample_key='donor' is no column"),
    ],
)
def test_settings_without_a_meaning_are_refused(options, message):
    with pytest.raises(SettingError, match=message):
        de.differential_expression(simulated(n=30), "group", "A", "B", **options)


# ------------------------------------------------------------------------------------------- covariates and pairs
def with_covariates() -> Any:
    """Cells with numbers and categories; genes 20 to 29 follow `cycle`, which is higher in group A by one."""
    adata, rng = simulated(null=True), np.random.default_rng(5)
    n, group = adata.n_obs, adata.obs["group"].to_numpy()
    cycle = rng.normal(size=n) + (group == "A")
    adata.X[:, 20:30] = rng.poisson(adata.X[:, 20:30] * np.exp(0.8 * cycle - 0.8)[:, None])
    sites = np.where(adata.obs["type"] == "t", rng.choice(["x", "y", "z"], n), rng.choice(["y", "z"], n))
    wards = np.where(adata.obs["type"] == "t", rng.choice(["x", "y"], n), "z")
    obs = {"cycle": cycle, "double": 2 * cycle, "site": sites, "ward": wards, "one": 1.0, "same": "s", "copy": group}
    obs |= {"gap": np.where(rng.random(n) < 0.1, np.nan, 1.0), "infinite": np.where(cycle > 0, np.inf, 0.0)}
    adata.obs = adata.obs.assign(**obs, cell=[str(i) for i in range(n)], patient=[f"p{i % 5}" for i in range(n)])
    return adata


def test_what_a_covariate_explains_is_not_called():
    adata = with_covariates()
    plain = de.differential_expression(adata, "group", "A", "B").table.set_index("gene")
    result = de.differential_expression(adata, "group", "A", "B", covariates=["cycle", "site"])
    follows = [f"g{i}" for i in range(20, 30)]
    assert plain.loc[follows, "is_de"].sum() >= 5
    assert result.table["is_de"].sum() == 0
    assert abs(result.table.set_index("gene").loc[follows, "lfc_mean"]).max() < 0.35


@pytest.mark.parametrize(
    ("covariates", "message"),
    [
        ("age", "covariates='age' is no column of obs"),
        ("gap", r"covariate 'gap' is missing in \d+ of 240 cells; fill it in"),
        ("infinite", "covariate 'infinite' holds values that are not finite"),
        ("one", "covariate 'one' is constant in the units of A vs B"),
        ("same", "covariate 'same' has one value, 's', in all cells; leave it out"),
        ("cell", "covariate 'cell' has 240 categories, more than 20"),
        (("cycle", "double"), "covariate 'double' is constant in the units of A vs B, or explained by"),
        ("copy", "covariates copy explain the groups of A vs B completely"),
    ],
)
@pytest.mark.parametrize("sample_key", [None, "sample"])
def test_covariates_that_cannot_be_adjusted_for_are_refused(covariates, message, sample_key):
    with pytest.raises(VaerdictError, match=message):
        de.differential_expression(with_covariates(), "group", "A", "B", covariates=covariates, sample_key=sample_key)


def test_categories_that_a_contrast_lacks_are_no_obstacle():
    """Within type u there is no site x, and only ward z."""
    adata, options = with_covariates(), {"within": "type"}
    both = de.differential_expression(adata, "group", "A", "B", covariates="site", **options)
    assert [row["name"] for row in both.results["contrasts"]] == ["A vs B within t", "A vs B within u"]
    one = de.differential_expression(adata, "group", "A", "B", covariates="ward", **options)
    assert [row["name"] for row in one.results["contrasts"]] == ["A vs B within t"]
    assert one.warnings[0].startswith("left out: covariate 'ward' is constant in the units of A vs B within u")


def test_too_many_covariates_for_the_samples_are_refused():
    """Four samples a side: six coefficients leave two deviations, eight none."""
    adata, covariates = with_covariates(), ["cycle", "site", "batch"]
    de.differential_expression(adata, "group", "A", "B", covariates=covariates, sample_key="sample")
    adata.obs["region"] = [f"r{i % 4}" for i in np.random.default_rng(0).permutation(adata.n_obs)]
    with pytest.raises(SettingError, match=r"A vs B has 8 units for \d+ coefficients; leave covariates out"):
        de.differential_expression(adata, "group", "A", "B", covariates=[*covariates, "region"], sample_key="sample")


def test_pairs_take_out_what_differs_between_patients():
    """Patients differ fourfold in all genes but a few; the three that change do so in every patient."""
    adata, rng = simulated(n=360, null=True), np.random.default_rng(3)
    patient = rng.integers(4, size=360)
    level = np.exp(rng.normal(0, 0.7, size=(4, 40)))
    level[:, 0:3] *= 2.0  # enough counts to see a change in
    rate = level[patient]
    rate[:, :3] *= np.where(adata.obs["group"] == "A", 2.0, 1.0)[:, None]
    adata.X = rng.poisson(2 * rate).astype(np.float32)
    adata.obs["patient"] = [f"p{i}" for i in patient]
    adata.obs["tube"] = adata.obs["patient"] + adata.obs["group"]
    apart = de.differential_expression(adata, "group", "A", "B", sample_key="tube")
    within = de.differential_expression(adata, "group", "A", "B", sample_key="tube", pair_by="patient")
    assert [r.results["contrasts"][0]["paired"] for r in (apart, within)] == [False, True]
    assert set(within.discoveries().gene) == {"g0", "g1", "g2"}
    assert apart.table["is_de"].sum() == 0
    auto = de.differential_expression(adata, "group", "A", "B", sample_key="patient")
    pd.testing.assert_frame_equal(auto.table, within.table)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"pair_by": "sample"}, "A vs B has 0 pairs with 3 cells or more on both sides; at least 2 are needed"),
        ({"pair_by": "group"}, "group A has 1 pairs of 3 cells or more; .*leave pair_by out"),
        ({"pair_by": "patient", "sample_key": "sample"}, "sample 'A0' has several values of 'patient'"),
        ({"pair_by": "patient", "covariates": "cycle"}, "leave covariates out"),
        ({"pair_by": "patient", "batch_key": "batch"}, "leave batch_key out"),
        ({"pair_by": "patient", "check_model": True}, "for the counts; leave them out where a model is asked for"),
        ({"covariates": "cycle", "scale": "pair"}, "for the counts; leave them out where a model is asked for"),
    ],
)
def test_pairs_without_a_meaning_are_refused(options, message):
    with pytest.raises(SettingError, match=message):
        de.differential_expression(with_covariates(), "group", "A", "B", **options)


def test_pairs_on_one_side_only_are_left_out_and_covariates_of_pairs_are_refused():
    adata = with_covariates()
    adata.obs["patient"] = adata.obs["patient"].where((adata.obs["group"] != "B") | (adata.obs["patient"] < "p3"), "p9")
    result = de.differential_expression(adata, "group", "A", "B", pair_by="patient")
    assert result.results["contrasts"][0]["n_samples_a"] == 3
    assert "A vs B: 3 of 6 pairs have cells on one side only and are left out." in result.warnings
    with pytest.raises(SettingError, match="all samples of A vs B have cells on both sides and are pairs"):
        de.differential_expression(with_covariates(), "group", "A", "B", sample_key="patient", covariates="cycle")


# ------------------------------------------------------------------------------------------------------ the scale
def test_the_scale_does_not_move_with_the_genes_tested():
    adata = simulated()
    every = de.differential_expression(adata, "group", "A", "B").table.set_index("gene")
    some = de.differential_expression(adata, "group", "A", "B", n_top_genes=10, keep_genes=["g39"])
    few = some.table.set_index("gene")
    assert len(few) in (10, 11)
    assert "g39" in few.index
    columns = ["lfc_mean", "lfc_low", "lfc_high", "prob_de", "mean_a"]
    assert few[columns].to_numpy() == pytest.approx(every.loc[few.index, columns].to_numpy(), abs=1e-12)
    assert set(some.not_tested["reason"]) == {"not among the most variable"}


def test_without_shrinkage_intervals_change_and_calls_do_not():
    adata = simulated()
    shrunken, plain = (
        de.differential_expression(adata, "group", "A", "B", shrinkage=shrinkage) for shrinkage in (True, False)
    )
    same = ["prob_de", "lfsr", "q_value", "is_de"]
    assert np.array_equal(shrunken.table[same].to_numpy(), plain.table[same].to_numpy())
    assert abs(plain.table["lfc_mean"]).mean() > 1.1 * abs(shrunken.table["lfc_mean"]).mean()
    assert (shrunken.results["shrinkage"], plain.results["shrinkage"]) == (True, False)


def test_without_shrinkage_a_gene_unseen_in_a_group_keeps_a_finite_change():
    adata = simulated()
    adata.X[adata.obs["group"] == "A", 10] = 0
    result = de.differential_expression(adata, "group", "A", "B", shrinkage=False)
    gene = result.table.set_index("gene").loc["g10"]
    assert gene["is_de"]
    assert -16 < gene["lfc_low"] < gene["lfc_mean"] < gene["lfc_high"] < -4


# -------------------------------------------------------------------------------------------------- replicates
def test_moderated_variances_recover_their_prior():
    rng = np.random.default_rng(0)
    df0, s0, df, n = 8.0, 0.3, 4, 20_000
    variance = df0 * s0 / rng.chisquare(df0, n)
    seen = torch.from_numpy(variance * rng.chisquare(df, n) / df)
    moderated = moderation.moderate(seen, df)
    assert moderated.df - df == pytest.approx(df0, rel=0.1)
    prior = (moderated.variance * moderated.df - df * seen) / (moderated.df - df)
    assert prior.mean().item() == pytest.approx(s0, rel=0.05)


def test_inverse_trigamma():
    for y in (0.3, 1.0, 7.0):
        assert moderation.inverse_trigamma(float(special.polygamma(1, y))) == pytest.approx(y)


@pytest.mark.parametrize("paired", [False, True])
def test_intervals_between_samples_cover_what_is_constant_across_individuals(paired):
    """Between samples genes vary by 0.3; 90 % intervals of the fold change cover zero in 90 % of 4000 genes."""
    rng, genes, n = np.random.default_rng(1), 4000, 4
    own = rng.normal(0, 2.0, (n, genes)) if paired else np.zeros((n, genes))

    def side(name: str) -> dict[str, torch.Tensor]:
        y = own + rng.normal(0, 0.3, (n, genes))
        keys = [f"s{i}" if paired else f"{name}{i}" for i in range(n)]
        return {key: torch.from_numpy(2.0**row).expand(800, -1) for key, row in zip(keys, y, strict=True)}

    lfc = effect.replicate_effect(side("a"), side("b"), PROPORTION, seed=0).lfc
    low, high = lfc.quantile(torch.tensor([0.05, 0.95], dtype=torch.float64), 0)
    inside = ((low <= 0) & (high >= 0)).double()
    assert_mean(inside, 0.9, rate=1e-6)
    with pytest.raises(AssertionError, match="standard errors"):
        assert_mean(((low + 0.1 <= 0) & (high - 0.1 >= 0)).double(), 0.9, rate=1e-6)


def test_three_refits_do_not_make_an_unknown_gene_look_changed():
    """True change zero, refits vary by one: three points on both sides of zero would be sure of a change."""
    rng = np.random.default_rng(3)
    means = [torch.from_numpy(rng.normal(0, 1.0, 2000)) for _ in range(3)]
    draws = effect.refit_error(means, 2000, seed=0)
    assert draws.mean(1).std().item() < 0.1
    assert (draws.abs() >= 0.5).double().mean(0).max().item() < 0.9
    inside = (draws.abs() < 1.645).double().mean(0)
    assert inside.mean().item() == pytest.approx(0.9, abs=0.02)
    points = torch.stack(means) - torch.stack(means).mean(0)
    assert (points.abs() >= 0.5).all(0).double().mean().item() > 0.1  # as the refits stand, many would


# ------------------------------------------------------------------------------------------------------ checks
def test_a_right_model_passes_the_checks_and_one_without_overdispersion_does_not():
    rng = np.random.default_rng(2)
    rate = np.exp(rng.normal(1.0, 0.5, size=300))

    def draw(size: tuple[int, ...]) -> torch.Tensor:
        return torch.from_numpy(rng.poisson(rng.gamma(1.0, rate, size=(*size, 300)))).float()

    observed, right = draw((200,)), draw((40, 200))
    wrong = torch.from_numpy(rng.poisson(rate, size=(40, 200, 300))).float()
    assert all(check["ok"] for check in checks.predictive_checks(observed, right))
    assert [check["name"] for check in checks.predictive_checks(observed, wrong) if not check["ok"]][:2] == [
        "zeros",
        "variance",
    ]


# ------------------------------------------------------------------------------------------------------ stages
def test_calls_are_made_in_each_contrast_and_on_demand_over_all_together():
    def part(lfdr: float) -> GeneTable:
        return {"lfdr": torch.full((9,), lfdr), "lfsr": torch.full((9,), 0.01), "lfc_mean": torch.ones(9)}

    options = de.DEOptions(groupby="g")
    sure, unsure = tables.call_genes([part(0.001), part(0.06)], options)
    assert sure["is_de"].all()
    assert not unsure["is_de"].any()
    assert unsure["q_value"].tolist() == pytest.approx([0.06] * 9)
    together = tables.call_genes([part(0.001), part(0.06)], replace(options, joint_fdr=True))
    assert all(table["is_de"].all() for table in together)
    assert together[1]["q_value"].max().item() == pytest.approx((9 * 0.001 + 9 * 0.06) / 18)


def test_a_gene_of_uncertain_direction_is_not_called():
    table = {"lfdr": torch.full((3,), 1e-4), "lfsr": torch.tensor([1e-3, 0.049, 0.051]), "lfc_mean": torch.ones(3)}
    (called,) = tables.call_genes([table], de.DEOptions(groupby="g", level=0.2))
    assert called["is_de"].tolist() == [True, True, False]
    assert called["q_value"].tolist() == pytest.approx([1e-3, 0.049, 0.051])


def test_stages_come_back_as_they_were_stored(tmp_path):
    name, value = "a\0b / <é>", torch.arange(3.0)
    cache = StageCache(tmp_path)
    cache.stage("s", lambda: {name: value})

    def again() -> dict[str, torch.Tensor]:
        raise AssertionError("made twice")

    assert cache.stage("s", again)[name].tolist() == [0, 1, 2]
