"""Differential expression against closed forms: Gaussian posteriors, bootstrap variances, FDR arithmetic."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from scipy import stats
from torch import Tensor

from checks import Largest, assert_mean
from de_toys import NOISE_SD, Powers, wide
from vaerdict import decisions
from vaerdict.core import SettingError, ShapeError
from vaerdict.de import effects
from vaerdict.de import model as de
from vaerdict.de.effects import CENTRED, ESTIMANDS, PROPORTION, Effect, Estimand, GeneTable, summarise_draws
from vaerdict.de.model.averaging import _resampled
from vaerdict.de.model.cell_weights import PARTICLES
from vaerdict.de.options import DEOptions
from vaerdict.de.tables import call_genes
from vaerdict.engines import Threads
from vaerdict.noise import KeyedNoise

CELLS = torch.arange


@pytest.fixture
def x(generator) -> Tensor:
    return torch.randn(24, 5, generator=generator, dtype=torch.float64)


GROUPS = {"a": torch.arange(0, 12), "b": torch.arange(12, 24), "one": torch.tensor([3]), "other": torch.tensor([20])}


def compared(
    posterior: de.CellPosterior,
    a: str,
    b: str,
    *,
    estimand: Estimand = CENTRED,
    weighting: de.Weighting | None = None,
    refits: Sequence[de.CellPosterior] = (),
    n_draws: int = 1000,
    **how: Any,
) -> GeneTable:
    """The genes of two groups by the pieces of the model stage; cells have equal weights by default."""
    equal = {f"{name} equal": de.Population(GROUPS[name], de.Equal()) for name in (a, b)}
    groups = equal | {name: de.Population(GROUPS[name], weighting or de.Equal()) for name in (a, b)}
    how = {"seed": 0, **how}
    averages = de.averages(posterior, groups, n_draws, **how)
    fits = [averages, *(de.averages(refit, equal, n_draws, **how) for refit in refits)]
    fixed, *others = (estimand.lfc(*(fit.expression[name] for name in equal)) for fit in fits)
    ess = 1 / (1 / averages.ess[~averages.ess.isnan()]).mean().item()
    full = estimand.lfc(averages.expression[a], averages.expression[b])
    effect = de.joint_effect(full, fixed, ess, [other.mean(0) for other in others])
    means = {f"mean_{side}": averages.expression[name].mean(0) for side, name in zip("ab", (a, b), strict=True)}
    return call_genes([summarise_draws(effect) | means], DEOptions(groupby="g"))[0]


# --------------------------------------------------------------------------------------------- posterior of z
def test_one_cell_against_another_has_the_exact_posterior(x):
    """The LFC is normal with known mean and variance; importance weights must recover it."""
    t = compared(wide(x), "one", "other", estimand=PROPORTION, n_draws=20_000)
    loc, sd = Powers(5).posterior(x)
    exact = torch.distributions.Normal(loc[3] - loc[20], math.sqrt(2) * sd)
    up, down = 1 - exact.cdf(torch.tensor(0.5)), exact.cdf(torch.tensor(-0.5))
    torch.testing.assert_close(t["lfc_mean"], exact.mean, atol=0.03, rtol=0)
    torch.testing.assert_close(t["lfc_median"], exact.mean, atol=0.04, rtol=0)
    for key, expected in (("prob_up", up), ("prob_down", down), ("prob_de", up.maximum(down))):
        torch.testing.assert_close(t[key], expected, atol=0.015, rtol=0)
    width = 2 * (exact.icdf(torch.tensor(0.95)) - exact.mean)
    torch.testing.assert_close(t["lfc_high"] - t["lfc_low"], width, rtol=0.04, atol=0)


def test_without_weights_the_proposal_stands_in_for_the_posterior(x):
    plain = de.Proposed(Powers(5), x, Powers(5).exact(x, 2.0), weighted=False)
    answer = de.averages(plain, {"one": de.Population(GROUPS["one"], de.Equal())}, 20_000, seed=0)
    sd = Powers(5).posterior(x)[1]
    found = answer.expression["one"].log2().std(0)
    torch.testing.assert_close(found, torch.full((5,), 2 * sd).double(), rtol=0.03, atol=0)


def test_a_group_mean_of_latents_sharpens_with_cells(x):
    """Means of independent 2^z: variance of one cell over the number of cells, and no order shared between cells."""
    same = x[:1].expand(24, 5)
    populations = {str(n): de.Population(CELLS(n), de.Equal()) for n in (1, 24)}
    answer = de.averages(wide(same), populations, 4000, seed=1).expression
    ratio = answer["1"].var(0) / answer["24"].var(0)
    torch.testing.assert_close(ratio, torch.full((5,), 24.0).double(), rtol=0.15, atol=0)
    loc, sd = Powers(5).posterior(same[:1])
    mean = torch.exp2(loc[0]) * math.exp(0.5 * (sd * math.log(2)) ** 2)
    torch.testing.assert_close(answer["24"].mean(0), mean, rtol=0.01, atol=0)


def test_refined_proposals_with_a_share_of_the_prior_are_as_good_as_exact_ones(x):
    cells = de.refined(Powers(5), x, torch.zeros_like(x))
    exact = de.Proposed(Powers(5), x, Powers(5).exact(x))
    tables = [compared(q, "a", "b", n_draws=4000, seed=2) for q in (cells, exact)]
    torch.testing.assert_close(tables[0]["lfc_mean"], tables[1]["lfc_mean"], atol=0.02, rtol=0)
    torch.testing.assert_close(tables[0]["prob_de"], tables[1]["prob_de"], atol=0.05, rtol=0)


def test_resampled_draws_are_whole_particles_in_an_order_of_each_cells_own(generator):
    """No order is that of another cell or of the particles; a true claim fails with probability 1e-6."""
    n, cells = 2000, 3
    first, particle = n * torch.arange(cells).unsqueeze(1), torch.arange(n, dtype=torch.double).reshape(n, 1, 1)
    log_w = 0.3 * torch.randn(n, cells, generator=generator, dtype=torch.double)
    z = first + particle * torch.tensor([1.0, 2.0])  # both coordinates name the particle
    index = _resampled(z, log_w, KeyedNoise(0, PARTICLES, torch.arange(cells))) - first
    assert torch.equal(index[..., 1], 2 * index[..., 0])
    times = torch.stack([column.long().bincount(minlength=n) for column in index[..., 0].T], -1)
    assert ((times - n * log_w.softmax(0)).abs() < 1).all()
    correlation = torch.corrcoef(torch.cat([index[..., 0], particle[..., 0]], 1).T).triu(1)
    assert correlation.abs().max() < stats.norm.isf(1e-6 / 2 / 6) / math.sqrt(n)


def test_given_particles_are_taken_as_they_are(x):
    z, log_w = wide(x).particles(500, [torch.Generator().manual_seed(i) for i in range(24)])
    held = de.Given(Powers(5), z, log_w)
    answer = de.averages(held, {"one": de.Population(GROUPS["one"], de.Equal())}, 500, seed=0)
    value = (torch.softmax(log_w[:, 3], 0)[:, None] * torch.exp2(z[:, 3])).sum(0)
    torch.testing.assert_close(
        answer.expression["one"].mean(0), value, rtol=0.02, atol=0
    )  # up to smoothing of the tail
    with pytest.raises(ShapeError, match="n=7 particles were asked for, but there are 500"):
        de.averages(held, {"one": de.Population(GROUPS["one"], de.Equal())}, 7, seed=0)


# ------------------------------------------------------------------------------------------- priors of groups
def test_a_prior_about_the_groups_own_mean_takes_out_the_shrinkage(generator):
    """Under N(0, I) group means of the latent shrink by 1 / (1 + sd^2); about its own mean a group's do not."""
    z = torch.cat([torch.full((400, 2), 1.5), torch.full((400, 2), -1.0)]).double()
    x = z + NOISE_SD * torch.randn(800, 2, generator=generator, dtype=torch.float64)
    labels = (CELLS(800) >= 400).long()
    level = torch.stack([x[:400].mean(0), x[400:].mean(0)])
    shrunk, own = (de.refined(Powers(2), x, torch.zeros_like(x), labels=given) for given in (None, labels))
    for posterior, factor in ((shrunk, 1 / (1 + NOISE_SD**2)), (own, 1.0)):
        draws = posterior.particles(200, [torch.Generator().manual_seed(i) for i in range(800)])
        mean = (torch.softmax(draws.log_w, 0).unsqueeze(-1) * draws.z).sum(0)
        found = torch.stack([mean[:400].mean(0), mean[400:].mean(0)])
        torch.testing.assert_close(found, factor * level, atol=0.02, rtol=0)


def test_a_shifted_prior_is_that_of_the_joint_density(x, generator):
    model, mean = Powers(5), torch.randn(24, 5, generator=generator, dtype=torch.float64)
    z = torch.randn(3, 24, 5, generator=generator, dtype=torch.float64)
    expected = model.log_joint(x, z) - model.prior.log_prob(z) + model.prior.log_prob(z - mean)
    known = torch.cat([x, mean], -1)
    torch.testing.assert_close(de.GroupedModel(model).log_joint(known, z), expected)
    torch.testing.assert_close(de.GroupedModel(model).expression(z), model.expression(z))
    assert (de.group_means(model.exact(x), 1.0, torch.full((24,), -1)).mean == 0).all()


@dataclass(frozen=True)
class Levels(Powers):
    """Expression is the latent itself, of which x says little."""

    noise_var = 4.0

    def log_joint(self, x: Tensor, z: Tensor) -> Tensor:
        return self.prior.log_prob(z) - 0.5 * (x - z).square().sum(-1) / self.noise_var

    def expression(self, z: Tensor) -> Tensor:
        return z


def test_what_is_not_known_of_a_groups_mean_is_in_its_joint_draws(x):
    """With z = m + e, x = z + noise and m ~ N(0, I) the posterior of a group's mean latent has a closed form."""
    labels = torch.cat([torch.zeros(12), torch.ones(12)]).long()
    cells = de.refined(Levels(5), x, torch.zeros_like(x), labels=labels)
    groups = {name: de.Population(GROUPS[name], de.Equal()) for name in ("a", "b")}
    drawn = de.averages(cells, groups, 4000, seed=3).expression
    unknown = Levels.noise_var / (1 + Levels.noise_var)  # the share of a cell's latent that the prior decides
    variance = unknown / 12 + unknown**2 / (12 * (1 - unknown) + 1)
    for name in ("a", "b"):
        torch.testing.assert_close(drawn[name].var(0), torch.full((5,), variance).double(), rtol=0.12, atol=0)
    both = torch.corrcoef(torch.cat([drawn["a"], drawn["b"]], 1).mT)
    assert (both - torch.eye(10)).abs().max() < 0.08  # groups and directions apart
    small = de.averages(cells, groups, 4000, seed=3, block=5, chunk=1).expression
    torch.testing.assert_close(small["a"], drawn["a"])


def test_replicates_need_priors_of_their_own(generator):
    """About a mean they share, differences between donors shrink with their cells' latents, to a share 1 - unknown."""
    donors = CELLS(600) // 50
    level = torch.randn(12, 5, generator=generator, dtype=torch.float64)
    x = level[donors] + torch.randn(600, 5, generator=generator, dtype=torch.float64) * math.sqrt(1 + Levels.noise_var)
    group = {"g": de.Population(CELLS(600), de.Bootstrap(donors))}
    sd = {}
    for name, labels in (("group", torch.zeros(600).long()), ("donors", donors)):
        cells = de.refined(Levels(5), x, torch.zeros_like(x), labels=labels)
        sd[name] = float(de.averages(cells, group, 1000, seed=0).expression["g"].var(0).mean().sqrt())
    needed = float((torch.stack([x[donors == d].mean(0) for d in range(12)]).var(0) / 12).mean().sqrt())
    assert sd["donors"] == pytest.approx(needed, rel=0.15)
    assert sd["group"] < 0.6 * needed


def test_only_a_standard_normal_prior_can_be_shifted():
    @dataclass(frozen=True)
    class Other(Powers):
        @property
        def prior(self):
            return torch.distributions.Normal(torch.zeros(self.d), 2.0)

    with pytest.raises(SettingError, match="groups shift a standard normal prior, not a Normal"):
        de.GroupedModel(Other(2))


def test_quantiles_are_taken_of_few_numbers_at_a_time(monkeypatch, generator):
    """Older versions of torch refuse more than 2^24 numbers: a thousand draws of 17,000 genes."""
    a, b = torch.rand(2, 40, 9, generator=generator, dtype=torch.float64)
    quantile, sizes = Tensor.quantile, []
    expected = a.log2() - b.log2()
    expected = expected - quantile(expected, 0.5, -1, keepdim=True)
    monkeypatch.setattr(effects, "_AT_A_TIME", 90)
    spy = lambda t, *args, **keys: sizes.append(t.numel()) or quantile(t, *args, **keys)  # noqa: E731
    monkeypatch.setattr(Tensor, "quantile", spy)
    lfc = CENTRED.lfc(a, b)
    table = summarise_draws(Effect(lfc, torch.ones(9)))
    assert max(sizes) <= 90
    torch.testing.assert_close(lfc, expected)
    torch.testing.assert_close(table["lfc_median"], quantile(expected, 0.5, 0))
    torch.testing.assert_close(table["lfc_high"], quantile(expected, 0.95, 0))


# ----------------------------------------------------------------------------------------------------- cells
@pytest.mark.parametrize("n", [4, 30])
def test_the_bootstrap_has_the_variance_of_a_standard_error(n, generator):
    """Exact for the weighted mean: s^2 / n with s^2 the unbiased sample variance."""
    values = torch.rand(n, 3, generator=generator, dtype=torch.float64)
    draws = de.fixed_averages(values, {"g": de.Population(CELLS(n))}, 20_000, seed=5)["g"]
    square = (draws - values.mean(0)).square()
    for j in range(3):
        expected = values[:, j].var().item() / n
        assert_mean(square[:, j] / expected, 1.0, rate=1e-5)
        with pytest.raises(AssertionError, match="standard errors"):
            assert_mean(square[:, j] / expected, (n - 1) / (n + 1) if n < 10 else 1.1, rate=1e-5)


def test_replicates_count_the_same_however_many_cells_they_give(generator):
    donors = torch.tensor([0] * 10 + [1] * 3 + [2, 2, 3])
    level = torch.rand(4, 2, generator=generator, dtype=torch.float64)
    draws = de.fixed_averages(level[donors], {"g": de.Population(CELLS(16), de.Bootstrap(donors))}, 20_000, seed=5)["g"]
    torch.testing.assert_close(draws.mean(0), level.mean(0), atol=0.01, rtol=0)
    torch.testing.assert_close(draws.var(0), level.var(0) / 4, rtol=0.06, atol=0)
    with pytest.raises(SettingError, match="a bootstrap of 2 replicates shows no spread"):
        de.fixed_averages(level[donors][:12], {"g": de.Population(CELLS(12), de.Bootstrap(donors))}, 10, seed=5)


def test_a_pair_is_one_cell_of_each_group(generator):
    values = torch.rand(6, 2, generator=generator, dtype=torch.float64)
    groups = {"a": de.Population(CELLS(3), de.OneCell()), "b": de.Population(CELLS(3) + 3, de.OneCell())}
    draws = de.fixed_averages(values, groups, 3000, seed=0)
    for name, cells in (("a", values[:3]), ("b", values[3:])):
        match = (draws[name][:, None] - cells).abs().amax(-1) < 1e-6
        assert match.any(1).all()
        torch.testing.assert_close(match.double().mean(0), torch.full((3,), 1 / 3).double(), atol=0.04, rtol=0)
    together = torch.stack([draws["a"][:, 0] > values[:3, 0].median(), draws["b"][:, 0] > values[3:, 0].median()])
    assert abs(torch.corrcoef(together.double())[0, 1]) < 0.1


# ------------------------------------------------------------------------------------- one pass, bounded memory
def largest(n_cells: int, n_draws: int, d: int = 20) -> int:
    cells = wide(torch.zeros(n_cells, d))
    with Largest() as seen:
        groups = {"a": de.Population(CELLS(n_cells // 2)), "b": de.Population(CELLS(n_cells // 2, n_cells))}
        de.averages(cells, groups, n_draws, seed=0, block=8, chunk=8000, engine=Threads(1))
    return seen.numel


def test_memory_does_not_grow_with_cells_times_draws_times_genes():
    """A block's latents are the largest thing; of all cells only some numbers each are kept."""
    few, many = largest(50, 200), largest(250, 200)
    assert few == many <= 8 * 200 * 20
    assert many < 250 * 200 * 20 / 20


def test_averages_do_not_depend_on_the_chunks_or_on_other_groups(x):
    def averages(seed: int = 3, groups: str = "ab", **how: Any) -> Tensor:
        populations = {name: de.Population(GROUPS[name]) for name in groups}
        return de.averages(wide(x), populations, 100, seed=seed, **how).expression["a"]

    small = averages(block=1, chunk=500)
    torch.testing.assert_close(small, averages(block=100, chunk=10**6))
    torch.testing.assert_close(small, averages(groups="ba", block=7, chunk=700))
    torch.testing.assert_close(small, averages(groups="a"))
    assert not torch.allclose(small, averages(seed=4))


def test_opposite_contrasts_mirror_each_other(x):
    one, other = (compared(wide(x), *pair, weighting=de.Bootstrap(), n_draws=200) for pair in ("ab", "ba"))
    torch.testing.assert_close(one["lfc_mean"], -other["lfc_mean"])
    torch.testing.assert_close(one["prob_up"], other["prob_down"])
    torch.testing.assert_close(one["q_value"], other["q_value"])
    torch.testing.assert_close(one["mean_a"], other["mean_b"])


# ------------------------------------------------------------------------------------------------ the estimands
def test_centring_takes_out_what_all_genes_share(generator):
    a, b = torch.rand(2, 30, 7, generator=generator, dtype=torch.float64)
    factor = torch.rand(30, 1, generator=generator, dtype=torch.float64)
    torch.testing.assert_close(CENTRED.lfc(factor * a, b), CENTRED.lfc(a, b))
    assert not torch.allclose(PROPORTION.lfc(factor * a, b), PROPORTION.lfc(a, b))
    torch.testing.assert_close(CENTRED.lfc(a, b).median(1).values, torch.zeros(30).double())
    assert set(ESTIMANDS) == {"centred", "proportion", "pair"}


# ---------------------------------------------------------------------------------------------- tables and FDR
def test_the_called_set_and_its_q_values_agree(generator):
    effect = Effect(torch.randn(50, 40, generator=generator) + torch.linspace(-2, 2, 40), torch.full((40,), 50.0))
    (t,) = call_genes([summarise_draws(effect, delta=0.5)], DEOptions(groupby="g", level=0.1))
    within = decisions.discoveries(t["prob_de"], 0.1, ties=t["lfc_mean"].abs())
    sure = t["lfsr"] < 0.05
    assert torch.equal(t["is_de"], within & sure)
    assert torch.equal(t["is_de"], (t["q_value"] <= 0.1) & sure)
    assert 0 < int(t["is_de"].sum()) < int(within.sum()) < 40  # each of the rules leaves genes out
    assert (t["q_value"] >= t["lfsr"]).all()
    assert torch.equal(t["prob_de"], torch.maximum(t["prob_up"], t["prob_down"]))
    assert list(t) == ["lfc_mean", "lfc_median", "lfc_low", "lfc_high", "prob_de", "prob_up", "prob_down", "lfsr",
                       "lfdr", "mcse", "q_value", "is_de"]  # fmt: skip


def test_equal_probabilities_are_ranked_by_the_size_of_the_effect():
    prob, effect = torch.tensor([1.0, 0.4, 1.0, 0.4]), torch.tensor([0.6, 3.0, 2.0, 1.0])
    assert decisions.ranking(prob, effect).tolist() == [2, 0, 1, 3]
    assert decisions.ranking(prob).tolist() == [0, 2, 1, 3]
    assert decisions.discoveries(prob, 0.25, ties=effect).tolist() == [True, True, True, False]
    assert decisions.discoveries(prob, 0.25, ties=-effect).tolist() == [True, False, True, True]
    with pytest.raises(ShapeError, match="one value per hypothesis"):
        decisions.ranking(prob, effect[:2])


def test_refits_add_their_spread_about_their_own_mean(generator):
    """Variances add up, whatever the refits' mean; with unbiased variance of few refits."""
    full = torch.randn(4000, 2, generator=generator, dtype=torch.float64)
    refits = list(5 + torch.tensor([[0.0, -3.0], [1.0, 0.0], [2.0, 3.0]], dtype=torch.float64))
    effect = de.joint_effect(full, full, 4000.0, refits)
    assert effect.lfc.shape == (12_000, 2)
    torch.testing.assert_close(effect.lfc.mean(0), full.mean(0))
    expected = full.var(0, correction=0) + torch.tensor([1.0, 9.0])
    torch.testing.assert_close(effect.lfc.var(0, correction=0), expected)
    with pytest.raises(SettingError, match="a single refit shows no spread"):
        de.joint_effect(full, full, 10.0, refits[:1])


def test_few_refits_and_few_particles_count_as_few_draws(generator):
    noise, none = torch.randn(100, 2, generator=generator), torch.zeros(100, 2)
    apart = [torch.full((2,), float(i)) for i in range(3)]
    assert de.joint_effect(none, none, 50.0, apart).n_effective.tolist() == pytest.approx([3, 3])
    assert de.joint_effect(noise, none, 5.0).n_effective.tolist() == pytest.approx([100, 100])
    assert de.joint_effect(noise, noise, 5.0).n_effective.tolist() == pytest.approx([5, 5])


def test_refits_widen_a_comparison(x):
    """Refits of other models of the same cells: here the same posterior shifted by a factor on one gene."""
    factor = torch.tensor([1.0, 2.0, 1.0, 1.0, 1.0])

    @dataclass(frozen=True)
    class Scaled(Powers):
        by: float = 1.0

        def expression(self, z: Tensor) -> Tensor:
            return torch.exp2(z * factor**self.by)

    refits = [de.Proposed(Scaled(5, by), x, Powers(5).exact(x)) for by in (-1.0, 0.0, 1.0)]
    alone, refitted = (compared(wide(x), "a", "b", refits=r, estimand=PROPORTION, n_draws=300) for r in ([], refits))
    ratio = (refitted["lfc_high"] - refitted["lfc_low"]) / (alone["lfc_high"] - alone["lfc_low"])
    assert ratio[1] > 1.2
    torch.testing.assert_close(ratio[[0, 2, 3, 4]], torch.ones(4).double(), atol=0.05, rtol=0)


def test_the_stated_error_is_that_between_seeds(x):
    """Probabilities of the same comparison by many seeds scatter as their error says, with particles few and uneven."""
    cells = wide(x, 2.5)
    tables = [compared(cells, "one", "other", estimand=PROPORTION, n_draws=100, seed=s) for s in range(90)]
    spread = torch.stack([t["prob_de"] for t in tables]).std(0)
    stated = torch.stack([t["mcse"] for t in tables]).mean(0)
    middling = spread > 0.1  # elsewhere the rule of succession sets a floor
    ratio = (stated / spread)[middling]
    assert len(ratio) >= 3
    assert ((ratio > 0.7) & (ratio < 1.6)).all()
    naive = torch.stack([effects.probability_error(t["prob_de"], torch.tensor(100.0)) for t in tables]).mean(0)
    assert (naive / spread)[middling].max() < 0.7  # counting draws instead of their effective number would fail


def test_support_tells_good_weights_from_bad(x):
    def supported(inflate: float) -> de.Support:
        averages = de.averages(wide(x, inflate), {"a": de.Population(GROUPS["a"])}, 400, seed=0)
        return de.support(averages.khat[GROUPS["a"]], averages.ess[GROUPS["a"]], 400)

    good, bad = supported(1.05), supported(0.3)
    assert good.n_cells == 12
    assert good.khat < 0.5
    assert good.ess > 300
    assert good.share_ok == 1
    assert bad.khat > 0.6
    assert bad.share_ok < 0.5


# ------------------------------------------------------------------------------------------------------- errors
@pytest.mark.parametrize(
    ("cells", "n_draws", "message"),
    [
        (torch.tensor([99]), 20, "population 'a' must name some of the cells 0 to 23"),
        (CELLS(2), 20, "a bootstrap of 2 cells shows no spread"),
        (CELLS(5), 0, "n_draws=0 must be a whole number"),
    ],
)
def test_populations_that_cannot_be_averaged_are_refused(x, cells, n_draws, message):
    with pytest.raises(SettingError, match=message):
        de.averages(wide(x), {"a": de.Population(cells)}, n_draws, seed=0)


def test_thresholds_without_a_meaning_are_refused():
    effect = Effect(torch.zeros(3, 2), torch.ones(2))
    with pytest.raises(SettingError, match=r"delta=0.0 must be positive"):
        summarise_draws(effect, delta=0.0)
    with pytest.raises(SettingError, match=r"interval=1.0 is no probability"):
        summarise_draws(effect, interval=1.0)
