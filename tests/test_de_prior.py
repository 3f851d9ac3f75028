"""The prior of fold changes learned from other cells: what it finds, and that chance and other genes do not fool it."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from scipy import integrate, sparse, stats
from torch import Tensor

from test_de_shrinkage import normal
from vaerdict import de
from vaerdict.de import analysis
from vaerdict.de.contrasts import Labels
from vaerdict.de.counts_likelihood import LOG2
from vaerdict.de.model import prediction as by_model
from vaerdict.de.model.fitting import Effort
from vaerdict.de.options import DEOptions
from vaerdict.de.prior.learned import DEVIATIONS, LearnedPrior, PredictedPosterior
from vaerdict.de.prior.prediction import BLOCKS, FoldChanges, Prediction
from vaerdict.de.prior.profile import profiles, regressed
from vaerdict.de.shrinkage import LfcPosterior, NodeLikelihood, em_shares, fit_shares
from vaerdict.noise import seeded

ad = pytest.importorskip("anndata")
pd = pytest.importorskip("pandas")
pytest.importorskip("sklearn")

DELTA = 0.5


def modular(
    n: int = 15,
    n_other: int = 300,
    genes: int = 150,
    *,
    modules: int = 5,
    shift: float = 2.0,
    spread: float = 0.3,
    seed: int = 0,
) -> Any:
    """Counts whose genes belong to modules in turn; cells of A and B differ in the state of the first by `shift`.

    Other cells have states of their own. Fold changes of all genes are in var, and groups, samples and types in obs.
    """
    rng = np.random.default_rng(seed)
    of_module = np.arange(genes)[:, None] % modules == np.arange(modules)
    loading = np.where(of_module, rng.normal(0, 0.6, (genes, 1)), 0.0)
    apart = np.r_[shift / 2, np.zeros(modules - 1)]
    states = [sign * apart + spread * rng.normal(size=(n, modules)) for sign in (1, -1)]
    state = np.concatenate([*states, rng.normal(size=(n_other, modules))])
    mean = np.exp(rng.normal(0.3, 0.8, genes) + state @ loading.T + 0.3 * rng.normal(size=(len(state), 1)))
    counts = rng.poisson(rng.gamma(5.0, mean / 5.0)).astype(np.float32)
    group = np.array(["A"] * n + ["B"] * n + [None] * n_other, dtype=object)
    obs = {"group": group, "sample": [f"{g}{i % 7}" for i, g in enumerate(group)]}
    obs |= {"patient": [f"p{i % 7}" for i in range(len(group))], "batch": np.where(rng.random(len(group)) < 0.5, 1, 2)}
    var = pd.DataFrame({"lfc": shift * loading[:, 0] / LOG2}, index=[f"g{i}" for i in range(genes)])
    return ad.AnnData(counts, obs=pd.DataFrame(obs, index=[f"c{i}" for i in range(len(group))]), var=var)


def compared(adata: Any, **options: Any) -> de.DEResult:
    return de.differential_expression(adata, "group", "A", "B", **options)


def record(result: de.DEResult, number: int = 0) -> dict[str, Any]:
    return result.results["contrasts"][number]["prior"]


def read(adata: Any, **keys: str) -> analysis.Analysis:
    """The analysis of A against B, with columns of obs for samples, pairs or batches."""
    columns = {role: np.array(adata.obs[column].astype(str), dtype=object) for role, column in keys.items()}
    labels = Labels("group", adata.obs["group"].to_numpy(), **columns)
    return analysis.read(adata, DEOptions(groupby="group", pairs=(("A", "B"),)), labels, None)


# ---------------------------------------------------------------------------------------------- what it is made of
def test_genes_counted_beforehand_have_their_share():
    sure = torch.tensor([[1e-12, 1.0]]).double().expand(10, -1)
    assert em_shares(sure).tolist() == pytest.approx([0, 1], abs=1e-6)
    assert em_shares(sure, torch.tensor([30.0, 0.0]).double()).tolist() == pytest.approx([0.75, 0.25], abs=1e-6)


def predictions(truth: float, n: int, *, ignoring: bool = False) -> list[tuple[Tensor, Tensor, Prediction]]:
    """True fold changes, those expected of new cells and the prediction, where coefficients vary by chance.

    True coefficients have the scale `truth`, errors that of the influences of 40 replicates, which are given as nearly
    nothing where chance is to be ignored.
    """
    generator, made = seeded(3), []
    for _ in range(n):
        features = torch.randn(100, 6, generator=generator, dtype=torch.float64)
        root = 0.3 * torch.randn(6, 6, generator=generator, dtype=torch.float64) / 6**0.5
        influence = torch.randn(40, 6, generator=generator, dtype=torch.float64) @ root / 40**0.5
        beta = truth * torch.randn(6, generator=generator, dtype=torch.float64)
        estimate = beta + torch.randn(6, generator=generator, dtype=torch.float64) @ root
        block = torch.arange(100) % BLOCKS
        seen = 1e-6 * influence if ignoring else influence
        of = Prediction(features, estimate.expand(BLOCKS, -1), block, seen, torch.ones(100).double(), 38.0)
        made.append((features @ beta, of.elsewhere()[0], of))
    return made


def kept(made: list[tuple[Tensor, Tensor, Prediction]]) -> float:
    """The part of the predictions that is expected of new cells, by sums of squares."""
    return sum(float(m.square().sum()) for _, m, _ in made) / sum(float(p.here().square().sum()) for *_, p in made)


def test_a_prediction_by_chance_alone_is_not_expected_of_new_cells():
    """The part that is kept is 2.5 % on average over six seeds, with a standard deviation of 0.8 %."""
    assert kept(predictions(0.0, 100)) < 0.1
    assert kept(predictions(0.0, 100, ignoring=True)) > 0.9  # where chance is ignored


def test_a_prediction_beyond_chance_is_kept():
    made = predictions(1.0, 50)
    assert kept(made) == pytest.approx(1 / 1.09**2, abs=0.1)  # by the variances of signal and noise
    truth, mean = torch.cat([t for t, *_ in made]), torch.cat([m for _, m, _ in made])
    assert float((truth * mean).sum() / mean.square().sum()) == pytest.approx(1.0, abs=0.05)
    variance = torch.cat([p.elsewhere()[1] for *_, p in made])
    assert 0.75 < float(((truth - mean).abs() < 1.645 * variance.sqrt()).double().mean()) < 0.95


def test_genes_of_a_module_have_similar_features_and_rare_ones_have_none():
    adata = modular(n_other=400, genes=100)
    counts = np.asarray(adata.X[30:], dtype=np.float64)
    counts[:, 90:] = np.random.default_rng(1).random((400, 10)) < 0.003
    features = profiles(sparse.csr_matrix(counts[counts.sum(1) > 0]), 0)
    size = features.norm(dim=-1)
    assert size[90:].max() < 0.5 * size[:90].median()
    changed = (size[:90] > size[:90].median()).nonzero().squeeze(-1)
    unit = features[changed] / size[changed].unsqueeze(-1)
    likeness, same = (unit @ unit.mT).abs(), (changed % 5).unsqueeze(-1) == changed % 5
    off = ~torch.eye(len(changed), dtype=torch.bool)
    assert likeness[same & off].mean() > 2 * likeness[~same].mean()


# ------------------------------------------------------------------------------------------------------- posterior
GENES = 300


def learned(*, useful: bool = True, seed: int = 2) -> tuple[LearnedPrior, LfcPosterior, Tensor]:
    """A prior for genes of normal likelihoods, the posterior of the counts alone, and the true fold changes."""
    generator = seeded(seed)
    u, noise, deviation = (torch.randn(GENES, generator=generator, dtype=torch.float64) for _ in range(3))
    error = 0.2 + 0.6 * torch.rand(GENES, generator=generator, dtype=torch.float64)
    truth = u + 0.1 * deviation
    likelihood = normal(truth + error * noise, error)
    features = (u if useful else u[torch.randperm(GENES, generator=generator)]).unsqueeze(-1)
    influence = 0.1 * torch.randn(40, 1, generator=generator, dtype=torch.float64) / 40**0.5
    block, weight = torch.arange(GENES) % BLOCKS, torch.ones(GENES).double()
    made = Prediction(features, torch.ones(BLOCKS, 1).double(), block, influence, weight, 38.0)
    nodes = NodeLikelihood.of(likelihood, 0.0, (-DELTA, 0.0, DELTA))
    own = fit_shares(nodes)
    return LearnedPrior(likelihood, 0.0, made, own, (-DELTA, 0.0, DELTA)), LfcPosterior(nodes, own), truth


def brute_force(prior: LearnedPrior, gene: int) -> tuple[np.ndarray, np.ndarray, float]:
    """A grid of fold changes of new cells, the distribution function of following genes there, and their share."""
    here, mean, sd = (float(v[gene]) for v in (prior.here, prior.mean, prior.variance.sqrt()))
    mode, error = (float(v[gene]) for v in (prior._likelihood.mode, prior._likelihood.error))
    sds, shares = np.array([w + p * abs(here) for w, p in DEVIATIONS]), prior.shares[gene].numpy()
    d = np.linspace(-8, 8, 4001)
    density = (shares[1:] * stats.norm.pdf(d[:, None], 0, sds)).sum(1) * np.exp(-0.5 * ((here + d - mode) / error) ** 2)
    widths = np.sqrt(np.square([0, 0.05, 0.1, 0.2, 0.35, 0.6, 1.0, 1.6, 2.5, 4.0]) + error**2)
    own = error * (prior.own.numpy() * np.exp(-0.5 * (mode / widths) ** 2) / widths).sum() * shares[0]
    total = integrate.trapezoid(density, d)
    grid, mass = np.linspace(-5, 5, 201), density * (d[1] - d[0]) / total
    return grid, (stats.norm.cdf(grid[:, None], mean + d, sd) * mass).sum(1), total / (total + own)


def test_the_posterior_is_that_of_a_fine_grid_and_its_quantiles_invert_it():
    prior, alone, truth = learned()
    posterior = prior.posterior(torch.arange(GENES))
    for gene in range(0, GENES, 30):
        grid, cdf, share = brute_force(prior, gene)
        assert float(posterior._follows[gene]) == pytest.approx(share, abs=0.01)
        own = np.array([float(alone.up_to(torch.full((GENES,), x).double())[gene]) for x in grid])
        both = (1 - share) * own + share * cdf
        for value in (-DELTA, 0.0, DELTA):
            expected = float(np.interp(value, grid, both))
            assert float(posterior.below(value, or_equal=True)[gene]) == pytest.approx(expected, abs=0.01)
            assert float(posterior.above(value)[gene]) == pytest.approx(1 - expected, abs=0.01)
        for level in (0.05, 0.5, 0.95):
            value = float(posterior.quantile(level)[gene])
            low, high = (float(np.interp(value + step, grid, both)) for step in (-0.03, 0.03))
            assert low - 0.01 <= level <= high + 0.01
    errors = [float((mean - truth).square().mean()) for mean in (posterior.mean, alone.mean)]
    assert errors[0] < 0.5 * errors[1]
    assert prior.summary.share_following > 0.7
    assert prior.summary.slope == pytest.approx(1.0, abs=0.1)


def test_genes_that_go_their_own_way_have_the_posterior_of_the_counts():
    prior, alone, _ = learned()
    posterior = prior.posterior(torch.arange(GENES))
    own = PredictedPosterior(alone, torch.zeros(GENES).double(), posterior._following)
    assert torch.equal(own.below(DELTA), alone.below(DELTA))
    for level in (0.05, 0.5, 0.95):
        assert (own.quantile(level) - alone.quantile(level)).abs().max() < 0.03


def test_a_useless_prediction_leaves_the_answer_of_the_counts():
    prior, alone, _ = learned(useful=False)
    posterior = prior.posterior(torch.arange(GENES))
    assert prior.summary.share_following < 0.1
    assert abs(prior.summary.correlation) < 0.2
    assert (posterior.mean - alone.mean).abs().quantile(0.95) < 0.1
    assert (posterior.below(0.0) - alone.below(0.0)).abs().quantile(0.95) < 0.05


# --------------------------------------------------------------------------------------- without the gene's counts
def test_a_profile_does_not_see_the_fold_change_of_a_gene_or_its_block():
    """Coefficients by all genes would move the block as much as others; robust weights of all move it a little."""
    adata = modular()
    made, genes = read(adata), np.arange(150)
    likelihood = made.likelihood(made.contrasts[0], genes)
    features = profiles(sparse.csr_matrix(adata.X[30:], dtype=np.float64), 0)
    changed = likelihood.mode.clone()
    changed[7] += 2.0
    changes = [FoldChanges(mode, likelihood.error) for mode in (likelihood.mode, changed)]
    before, after = (regressed(made, made.contrasts[0], genes, each, features) for each in changes)
    same = before.block == before.block[7]
    moved = (before.here() - after.here()).abs()
    assert moved[same].max() < 0.2 * moved[~same].max()


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(by_model, "_EFFORT", Effort(recipes=("VAE",), epochs=4, refits=0, n_particles=1))


def test_a_model_does_not_see_the_counts_of_a_gene_or_its_block(quick):
    """Counts move from one gene to another of its block, which leaves all libraries as they are."""
    adata = modular(genes=60)
    block = torch.randint(BLOCKS, (60,), generator=seeded(0))
    own, other = (block == 0).nonzero().squeeze(-1)[:2].tolist()
    adata.X[:30, other] += 9
    moved = adata.copy()
    moved.X[:15, own] += 9
    moved.X[:15, other] -= 9
    others, features = sparse.csr_matrix(adata.X[30:], dtype=np.float64), []
    for data in (adata, moved):
        made, genes = read(data), np.arange(60)
        likelihood = made.likelihood(made.contrasts[0], genes)
        changes = FoldChanges(likelihood.mode, likelihood.error)
        features.append(by_model.predict_by_model(made, made.contrasts[0], genes, changes, others))
    assert torch.equal(features[0].block, block)
    before, after = (each.features[:, 1] for each in features)
    assert torch.equal(before[block == 0], after[block == 0])
    assert (before - after)[block != 0].abs().max() > 1e-3


# ------------------------------------------------------------------------------------------------- the whole of it
def test_more_genes_are_found_where_other_cells_share_their_modules():
    """Nine in ten of the genes called differ by half of delta or more, with a prior and without."""
    found, right = {"none": 0, "profile": 0}, {"none": 0, "profile": 0}
    for seed in range(3):
        adata = modular(10, 600, 300, shift=1.5, seed=seed)
        for prior in found:
            called = compared(adata, prior=prior).table.set_index("gene")["is_de"]
            found[prior] += int(called.sum())
            right[prior] += int((called & (adata.var["lfc"].reindex(called.index).abs() > DELTA / 2)).sum())
    assert found["profile"] > 1.8 * found["none"] > 18
    assert all(right[prior] >= 0.9 * found[prior] for prior in found)


def test_states_that_are_imbalanced_by_chance_call_nothing(monkeypatch):
    """At a rate of 5 % two or more of twelve splits have a call in 12 % of cases; with these seeds none has."""

    def called(*seeds: int) -> list[int]:
        made = (modular(12, modules=1, shift=0.0, spread=1.2, seed=seed) for seed in seeds)
        return [int(compared(adata).table["is_de"].sum()) for adata in made]

    assert sum(n > 0 for n in called(*range(12))) <= 1
    monkeypatch.setattr(Prediction, "elsewhere", lambda self: (self.here(), torch.full_like(self.here(), 1e-4)))
    assert sum(called(0, 3, 11)) > 20  # where the chance that is predicted is taken for a fold change of new cells


def test_a_gene_that_stays_is_not_dragged_along_where_its_counts_tell():
    adata = modular(15, 600, 300)
    stays = int(np.argsort(-adata.var["lfc"].abs().to_numpy())[10])
    library = adata.X[:30].sum(1)
    adata.X[:30, stays] = np.random.default_rng(9).poisson(40 * library / library.mean())
    result = compared(adata)
    gene = result.table.set_index("gene").loc[f"g{stays}"]
    assert record(result)["share_following"] > 0.3
    assert abs(gene["lfc_predicted"]) > 1
    assert not gene["is_de"]
    assert abs(gene["prior_shift"]) < 0.01


# ----------------------------------------------------------------------------------------------- when there is none
def test_why_there_is_no_prior():
    few = compared(modular(n_other=99))
    assert record(few)["reason"] == "99 cells with counts are not compared, and at least 100 are needed"
    assert (record(few)["used"], record(few)["n_other"], few.verdict["prior"]) == (False, 99, "none")
    assert "lfc_counts" not in few.table
    assert record(compared(modular(genes=40)))["reason"] == "40 genes are expressed, and at least 50 are needed"
    adata = modular(n=30)
    adata.obs["sample"] = [name[0] + str(i % 3) for i, name in enumerate(adata.obs["sample"])]
    assert "leave 4 degrees of freedom" in record(compared(adata, sample_key="sample"))["reason"]
    empty = modular()
    empty.X[31:] = 0
    assert record(compared(empty))["reason"].startswith("1 cells with counts are not compared")
    pd.testing.assert_frame_equal(few.table, compared(modular(n_other=99), prior="none").table)
    assert record(compared(modular(), prior="none")) is None


@pytest.mark.parametrize("joint", [False, True])
def test_a_contrast_without_a_prior_beside_one_with(joint):
    adata = modular()
    adata.obs["group"] = adata.obs["group"].fillna("C").astype(str)
    how = {"pairs": [("A", "B"), ("A", None)], "joint_fdr": joint}
    result, alone = (de.differential_expression(adata, "group", prior=prior, **how) for prior in ("profile", "none"))
    assert [record(result, number)["used"] for number in (0, 1)] == [True, False]
    table, counts = result.table, alone.table
    with_prior = (table["contrast"] == "A vs B").to_numpy()
    assert table["lfc_predicted"].isna().to_numpy().tolist() == (~with_prior).tolist()
    assert (table["prior_shift"][~with_prior] == 0).all()
    for column in ("lfc", "lfsr"):
        name = "lfc_mean" if column == "lfc" else column
        pd.testing.assert_series_equal(table[f"{column}_counts"], counts[name], check_names=False)
    assert table["prior_shift"].to_numpy() == pytest.approx((table["lfc_mean"] - table["lfc_counts"]).to_numpy())
    assert ((table["is_de"] & ~counts["is_de"]) == table["by_prior"]).all()
    assert record(result)["n_by_prior"] == table["by_prior"][with_prior].sum() > 0
    assert record(result)["n_counts"] == counts["is_de"][with_prior].sum()


def test_the_command_has_the_option_and_the_same_seed_gives_the_same_file(command, tmp_path):
    modular().write_h5ad(tmp_path / "a.h5ad")
    for name, prior in (("one", "profile"), ("two", "profile"), ("none", "none")):
        words = ("de", tmp_path / "a.h5ad", "--groupby", "group", "--groups", "A", "B", "--device", "cpu")
        assert command(*words, "--prior", prior, "--out", tmp_path / name)[0] == 0
    one, two, none = ((tmp_path / name / "de.csv").read_bytes() for name in ("one", "two", "none"))
    assert one == two
    assert b"by_prior" in one
    assert b"by_prior" not in none


def test_a_given_model_predicts():
    scvi = pytest.importorskip("scvi")
    from vaerdict.optional import isolated

    adata = modular(n_other=150, genes=60)
    with isolated(0):
        scvi.model.SCVI.setup_anndata(adata, batch_key="batch")
        model = scvi.model.SCVI(adata, n_hidden=8, n_latent=2)
        model.train(max_epochs=2, accelerator="cpu", enable_progress_bar=False, logger=False)
    result = compared(adata, model=model, prior="model", n_draws=100)
    assert record(result)["used"]
    assert math.isfinite(record(result)["correlation"])
    assert result.table[["lfc_mean", "lfc_predicted", "lfsr"]].notna().all().all()
