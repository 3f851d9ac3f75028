"""Adaptive shrinkage: centre, prior and exact posteriors, their summaries, and genes that contradict a model."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy import integrate, optimize, stats
from torch import Tensor

from de_toys import cells, planted, rates
from vaerdict.core import DataError, SettingError
from vaerdict.de import effects
from vaerdict.de.counts_likelihood import LfcLikelihood, cells_likelihood
from vaerdict.de.effects import CENTRED, PROPORTION, node_values, summarise_posterior
from vaerdict.de.model.agreement import share_contradicted
from vaerdict.de.shrinkage import WIDTHS, LfcPosterior, NodeLikelihood, balance_of, centre_of, fit_shares
from vaerdict.noise import seeded

GENES, DELTA = 2000, 0.5


def normal(mode: Tensor, error: Tensor) -> LfcLikelihood:
    """Log-likelihoods that are parabolas."""
    return LfcLikelihood(lambda lfc: -0.5 * ((lfc - mode.unsqueeze(-1)) / error.unsqueeze(-1)).square(), mode, error)


# --------------------------------------------------------------------------------------------- exact posteriors
MODES = torch.tensor([0.0, 0.3, 1.5, 3.0, 3.0, -6.0, 8.0, 0.8, 2.0, -0.1], dtype=torch.float64)
ERRORS = torch.tensor([0.5, 0.1, 0.3, 0.2, 0.1, 0.4, 0.5, 0.03, 0.1, 4.0], dtype=torch.float64)
SHARES = torch.tensor([0.5, *[0.5 / 9] * 9], dtype=torch.float64)


class Exact:
    """The posterior of a normal likelihood: a mixture of normals and the atom at zero."""

    def __init__(self, mode: float, error: float) -> None:
        variance = np.square(WIDTHS)
        log = np.log(SHARES.numpy()) + stats.norm.logpdf(mode, 0, np.sqrt(error**2 + variance))
        self.weight = np.exp(log - log.max()) / np.exp(log - log.max()).sum()
        self.mean_of = mode * variance / (variance + error**2)
        self.sd = np.sqrt(variance * error**2 / (variance + error**2))
        self.mean = float((self.weight * self.mean_of).sum())

    def below(self, value: float) -> float:
        """Below or equal."""
        smooth = self.weight[1:] * stats.norm.cdf(value, self.mean_of[1:], self.sd[1:])
        return float(smooth.sum() + self.weight[0] * (value >= 0))

    def above(self, value: float) -> float:
        """Strictly above."""
        smooth = self.weight[1:] * stats.norm.sf(value, self.mean_of[1:], self.sd[1:])
        return float(smooth.sum() + self.weight[0] * (value < 0))


@pytest.mark.parametrize("centre", [0.0, 0.1, -0.7])
def test_probabilities_are_exact_down_to_the_smallest(centre):
    """Within a tenth, down to 1e-126; by the trapezoidal rule alone they were five times too large."""
    posterior = LfcPosterior(NodeLikelihood.of(normal(MODES, ERRORS), centre, (-DELTA, 0.0, DELTA)), SHARES)
    smallest = 1.0
    for gene, (mode, error) in enumerate(zip((MODES - centre).tolist(), ERRORS.tolist(), strict=True)):
        exact = Exact(mode, error)
        for value in (-DELTA, DELTA):
            assert float(posterior.below(value)[gene]) == pytest.approx(exact.below(value), rel=0.1, abs=1e-250)
            assert float(posterior.above(value)[gene]) == pytest.approx(exact.above(value), rel=0.1, abs=1e-250)
            smallest = min(smallest, exact.below(value), exact.above(value))
        assert float(posterior.mean[gene]) == pytest.approx(exact.mean, abs=2e-3)
    assert smallest < 1e-50


@pytest.mark.parametrize("level", [0.05, 0.5, 0.95])
def test_quantiles_are_exact(level):
    posterior = LfcPosterior(NodeLikelihood.of(normal(MODES, ERRORS), 0.0, (0.0,)), SHARES)
    for gene, value in enumerate(posterior.quantile(level).tolist()):
        exact = Exact(float(MODES[gene]), float(ERRORS[gene]))
        if value == 0.0:  # inside the probability of the centre
            assert 1 - exact.above(-1e-12) <= exact.below(0.0)
            assert exact.below(-1e-12) - 1e-3 <= level <= exact.below(0.0) + 1e-3
        else:
            assert exact.below(value) == pytest.approx(level, abs=2e-3)


def test_the_centre_belongs_to_neither_side():
    posterior = LfcPosterior(NodeLikelihood.of(normal(MODES[:1], ERRORS[:1]), 0.0, (0.0,)), SHARES)
    exact = Exact(0.0, 0.5)
    assert float(posterior.below(0.0)) == pytest.approx(0.5 * (1 - exact.weight[0]), rel=1e-3)
    assert float(posterior.below(0.0, or_equal=True)) == pytest.approx(exact.below(0.0), rel=1e-3)
    assert float(posterior.above(0.0)) == pytest.approx(exact.above(0.0), rel=1e-3)
    assert float(posterior.below(0.0) + posterior.above(0.0, or_equal=True)) == pytest.approx(1.0)


def test_a_skewed_likelihood_and_a_flat_prior_agree_with_quadrature():
    """Of 3 counts against none: the likelihood does not fall on one side, and the nodes end at 14.8."""

    def log_lik(lfc: Tensor) -> Tensor:
        return 3 * (lfc * math.log(2) - torch.log1p(torch.exp2(lfc)))

    likelihood = LfcLikelihood(log_lik, torch.tensor([2.0]).double(), torch.tensor([1.5]).double())
    nodes = NodeLikelihood.of(likelihood, 0.0, (-DELTA, 0.0, DELTA))
    low, high = float(nodes.nodes.min()), float(nodes.nodes.max())

    def density(x: float, prior: bool) -> float:
        mixture = sum(s * stats.norm.pdf(x, 0, w) for s, w in zip(SHARES[1:].tolist(), WIDTHS[1:], strict=True))
        return float(log_lik(torch.tensor(x).double()).exp()) * (mixture if prior else 1.0)

    for shares in (SHARES, None):
        points, prior = [0.0, DELTA, 3.0], shares is not None
        parts = [
            integrate.quad(density, a, b, args=(prior,), points=[p for p in points if a < p < b], limit=200)[0]
            for a, b in ((low, DELTA), (DELTA, high))
        ]
        atom = float(SHARES[0]) * density(0.0, False) if prior else 0.0
        expected = parts[1] / (sum(parts) + atom)
        assert float(LfcPosterior(nodes, shares).above(DELTA)) == pytest.approx(expected, rel=0.01)


def test_nodes_are_rising_and_hold_the_values_asked_for():
    centre = 0.123
    down, zero, up = node_values(centre, PROPORTION, DELTA)
    nodes = NodeLikelihood.of(normal(MODES, ERRORS), centre, (down, zero, up)).nodes
    assert (nodes.diff(dim=-1) >= 0).all()
    for value in (down, zero, up, 0.0):
        assert (nodes == value).any(-1).all()


# --------------------------------------------------------------------------------------------------- summaries
def summary(likelihood: LfcLikelihood, centre: float, estimand: effects.Estimand, shares: Tensor) -> effects.GeneTable:
    nodes = NodeLikelihood.of(likelihood, centre, node_values(centre, estimand, DELTA))
    posterior = LfcPosterior(nodes, shares)
    return summarise_posterior(posterior, posterior, centre, estimand, DELTA)


@pytest.mark.parametrize("centre", [0.2, -0.8])
@pytest.mark.parametrize("estimand", [CENTRED, PROPORTION])
def test_summaries_are_about_the_centre_or_about_zero(estimand, centre):
    """On the scale of proportions a gene that follows the others changes, by the centre."""
    table = summary(normal(MODES + centre, ERRORS), centre, estimand, SHARES)
    shift = 0.0 if estimand.centred else centre
    for gene, (mode, error) in enumerate(zip(MODES.tolist(), ERRORS.tolist(), strict=True)):
        exact = Exact(mode, error)
        up, down = exact.above(DELTA - shift), exact.below(-DELTA - shift)
        for name, value in {
            "prob_up": up,
            "prob_down": down,
            "prob_de": max(up, down),
            "lfdr": min(exact.below(DELTA - shift), exact.above(-DELTA - shift)),
            "lfsr": min(exact.below(-shift), exact.above(-shift - 1e-12)),
        }.items():
            assert float(table[name][gene]) == pytest.approx(value, rel=0.1, abs=1e-250), (name, mode, error)
        assert float(table["lfc_mean"][gene]) == pytest.approx(exact.mean + shift, abs=2e-3)
        low, high = float(table["lfc_low"][gene]) - shift, float(table["lfc_high"][gene]) - shift
        assert exact.below(low) >= 0.047
        assert exact.above(high) <= 0.053


def test_a_small_lfdr_is_not_lost_in_one_minus_a_probability():
    table = summary(normal(MODES, ERRORS), 0.0, CENTRED, SHARES)
    assert float(table["lfdr"][4]) < 1e-100
    assert float(table["lfdr"][4]) > 0
    torch.testing.assert_close(table["lfdr"], 1 - table["prob_de"], rtol=0, atol=1e-3)
    assert len(table["lfdr"].unique()) == len(MODES)  # no two genes tie


def test_mirrored_likelihoods_have_mirrored_summaries():
    one, other = (summary(normal(sign * MODES, ERRORS), sign * 0.3, PROPORTION, SHARES) for sign in (1, -1))
    for name in ("lfc_mean", "lfc_median"):
        torch.testing.assert_close(one[name], -other[name], rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(one["lfc_low"], -other["lfc_high"], rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(one["prob_up"], other["prob_down"], rtol=1e-9, atol=0)
    for name in ("prob_de", "lfdr", "lfsr"):
        torch.testing.assert_close(one[name], other[name], rtol=1e-9, atol=0)


def test_a_threshold_of_zero_is_refused():
    with pytest.raises(SettingError, match="delta=0 must be positive"):
        effects.check_delta(0)


# -------------------------------------------------------------------------------------------- centre and prior
@pytest.mark.parametrize("share", [0.0, 0.35])
def test_the_centre_stands_still_where_many_genes_change_in_one_direction(share):
    """By at most a third of what the median moves; its own standard error is at most .012."""
    generator = seeded(1)
    error = 0.1 + 0.4 * torch.rand(GENES, generator=generator, dtype=torch.float64)
    up = torch.rand(GENES, generator=generator) < share
    truth = 0.7 + torch.where(up, 1.0 + torch.rand(GENES, generator=generator, dtype=torch.float64), 0.0)
    mode = truth + error * torch.randn(GENES, generator=generator, dtype=torch.float64)
    moved = float(mode.median()) - 0.7
    assert (moved > 0.15) == (share > 0)
    assert abs(centre_of(mode, error) - 0.7) < max(0.05, moved / 3)


def test_the_centre_is_equivariant():
    generator = seeded(2)
    mode, error = torch.randn(999, generator=generator).double(), 0.2 + torch.rand(999, generator=generator).double()
    centre = centre_of(mode, error)
    assert centre_of(-mode, error) == pytest.approx(-centre, abs=1e-12)
    assert centre_of(mode + 0.37, error) == pytest.approx(centre + 0.37, abs=1e-9)
    order = torch.randperm(999, generator=generator)
    assert centre_of(mode[order], error[order]) == pytest.approx(centre, abs=1e-9)
    unknown = torch.full((10,), 50.0).double()  # genes hardly seen have no vote
    assert centre_of(torch.cat([mode, unknown]), torch.cat([error, unknown])) == pytest.approx(centre, abs=0.02)
    best = optimize.minimize_scalar(
        lambda c: -closeness(c, mode, error), bounds=(centre - 0.2, centre + 0.2), method="bounded"
    )
    assert centre == pytest.approx(best.x, abs=1e-3)  # type: ignore[union-attr]


def three_sets(sizes: tuple[int, int, int], spread: float, seed: int) -> tuple[Tensor, Tensor]:
    """Modes and errors of genes that go down by about one, do not change, and go up by about one."""
    generator = seeded(seed)
    truth = torch.tensor([-1.0, 0.0, 1.0]).double().repeat_interleave(torch.tensor(sizes))
    truth += spread * truth.abs() * torch.randn(len(truth), generator=generator, dtype=torch.float64)
    error = torch.full((len(truth),), 0.1).double()
    return truth + error * torch.randn(len(truth), generator=generator, dtype=torch.float64), error


def doubted(mode: Tensor, error: Tensor, centre: float) -> bool:
    return abs(balance_of(mode, error, centre)[0] - centre) > DELTA / 2


@pytest.mark.parametrize("sizes", [(30, 40, 30), (0, 100, 0), (0, 90, 10), (5, 85, 10)])
def test_changes_balance_about_a_centre_that_most_genes_or_both_directions_speak_for(sizes):
    for seed in range(20):
        mode, error = three_sets(sizes, 0.3, seed)
        centre = centre_of(mode, error)
        assert abs(centre) < 0.1
        assert not doubted(mode, error, centre)


@pytest.mark.parametrize("sizes", [(50, 20, 30), (30, 20, 50)])
def test_a_centre_at_genes_that_changed_is_doubted_and_no_other(sizes):
    wrong = []
    for seed in range(30):
        mode, error = three_sets(sizes, 0.2, seed)
        centre = centre_of(mode, error)
        wrong.append(abs(centre) > DELTA / 2)
        assert doubted(mode, error, centre) == wrong[-1]
    assert sum(wrong) > 20


def test_most_genes_changed_alike_are_not_told_from_genes_that_did_not():
    mode, error = three_sets((15, 35, 50), 0.05, 1)
    centre = centre_of(mode, error)
    assert centre == pytest.approx(1.0, abs=0.1)
    assert not doubted(mode, error, centre)


def test_a_balance_is_equivariant():
    mode, error = three_sets((50, 20, 30), 0.2, 0)
    balance, se = balance_of(mode, error, -1.0)
    assert balance_of(-mode, error, 1.0) == pytest.approx((-balance, se), abs=1e-6)
    assert balance_of(mode + 0.37, error, -0.63) == pytest.approx((balance + 0.37, se), abs=1e-6)


@pytest.mark.parametrize(("sizes", "error"), [((10, 80, 10), 0.3), ((0, 100, 0), 0.8), ((6, 40, 4), 0.3)])
def test_a_balance_has_a_standard_error(sizes, error):
    """The root mean square of z over 200 data sets; if the error is right, 0.75 to 1.25 leaves out less than 1e-6."""
    z = []
    for seed in range(200):
        mode, _ = three_sets(sizes, 0.0, seed)
        mode = mode + math.sqrt(error**2 - 0.01) * torch.randn(len(mode), generator=seeded(seed + 1000)).double()
        balance, se = balance_of(mode, torch.full_like(mode, error), 0.0)
        z.append(balance / se)
    assert 0.8 < float(np.sqrt(np.mean(np.square(z)))) < 1.25


def test_the_balance_of_a_single_gene_is_unknown():
    assert balance_of(torch.zeros(1).double(), torch.ones(1).double(), 0.0)[1] == math.inf


def test_a_balance_uses_some_genes_where_there_are_many():
    mode, error = three_sets((3000, 4000, 3000), 0.3, 0)
    some, more = (balance_of(mode, error, 0.0, most=n) for n in (2000, 10_000))
    assert some[0] == pytest.approx(more[0], abs=0.05)
    mode[1::5] += 0.5  # every fifth is used
    assert balance_of(mode, error, 0.0, most=2000) == some
    assert balance_of(mode, error, 0.0, most=10_000) != more


def closeness(centre: float, mode: Tensor, error: Tensor) -> float:
    """Log-likelihood of a centre by the better known half of the genes."""
    half = error <= error.median()
    parts = [stats.norm.logpdf(mode[half], centre, (error[half].square() + w**2).sqrt()) for w in (0.1, 1.0)]
    return float(np.logaddexp(*parts).sum())


def test_shares_of_the_prior_are_estimated():
    """Four in five genes do not change; the others vary by one."""
    generator = seeded(3)
    truth = planted(generator, 6000, share=0.2)
    error = torch.full((6000,), 0.15).double()
    mode = truth + error * torch.randn(6000, generator=generator, dtype=torch.float64)
    shares = fit_shares(NodeLikelihood.of(normal(mode, error), 0.0, (0.0,)))
    assert float(shares.sum()) == pytest.approx(1.0)
    assert float(shares[:3].sum()) == pytest.approx(0.8, abs=0.05)  # of widths up to 0.1
    assert float((shares * torch.tensor(WIDTHS).double().square()).sum()) == pytest.approx(0.2, abs=0.04)


# ------------------------------------------------------------------------------------------------- calibration
@pytest.fixture(scope="module")
def planted_cells() -> tuple[LfcLikelihood, Tensor]:
    generator = seeded(7)
    rate, truth = rates(generator, GENES, 1.0), planted(generator, GENES)
    alpha = torch.full_like(rate, 0.4)
    pair = cells(generator, rate * torch.exp2(truth), 40, alpha), cells(generator, rate, 40, alpha)
    return cells_likelihood([pair]), truth


def called_false(posterior: LfcPosterior, truth: Tensor) -> tuple[float, float, float]:
    """False ones of the genes called at 10 %, how many that should be, and four standard errors of it."""
    lfdr = torch.minimum(posterior.below(DELTA), posterior.above(-DELTA))
    order = lfdr.argsort()
    called = order[lfdr[order].cumsum(0) <= 0.1 * torch.arange(1, len(lfdr) + 1)]
    wrong = lfdr[called]
    false = float((truth[called].abs() < DELTA).sum())
    return false, float(wrong.sum()), 4 * float((wrong * (1 - wrong)).sum().sqrt())


def test_the_genes_called_hold_as_many_false_ones_as_is_said(planted_cells):
    """Four standard errors fail in 6e-5; probabilities under a flat prior are far off."""
    likelihood, truth = planted_cells
    nodes = NodeLikelihood.of(likelihood, centre_of(likelihood.mode, likelihood.error), (-DELTA, 0.0, DELTA))
    false, expected, error = called_false(LfcPosterior(nodes, fit_shares(nodes)), truth)
    assert expected > 10
    assert abs(false - expected) < error
    false, expected, error = called_false(LfcPosterior(nodes, None), truth)
    assert false > expected + error


# ---------------------------------------------------------------------------------- what the counts say of a model
def spread(centre: Tensor, seed: int, sd: float = 0.05, draws: int = 200) -> Tensor:
    return centre + sd * torch.randn(draws, len(centre), generator=seeded(seed), dtype=torch.float64)


def contradicted(model: Tensor, likelihood: LfcLikelihood) -> float:
    return share_contradicted(model, NodeLikelihood.of(likelihood, 0.0, (-DELTA, 0.0, DELTA)))


def test_the_counts_contradict_a_model_that_misses_genes(planted_cells):
    likelihood, truth = planted_cells
    assert contradicted(spread(truth, 4), likelihood) < 0.02
    assert contradicted(spread(truth + 0.7, 4), likelihood) < 0.02  # a shift of all genes is none of their business
    assert contradicted(spread(planted(seeded(5), GENES), 5), likelihood) > 0.2
    missed = torch.where(torch.arange(GENES) % 5 == 0, truth + 2.0, truth)
    assert contradicted(spread(missed, 6), likelihood) > 0.15


def test_a_model_that_states_its_error_is_not_contradicted(planted_cells):
    likelihood, truth = planted_cells
    off = truth + 0.8 * torch.randn(GENES, generator=seeded(7), dtype=torch.float64)
    assert contradicted(spread(off, 8), likelihood) > 0.5
    assert contradicted(spread(off, 8, sd=0.8), likelihood) < 0.1


def test_a_fold_change_that_is_not_finite_is_refused(planted_cells):
    model = spread(planted_cells[1], 6)
    model[0, 3] = -torch.inf
    with pytest.raises(DataError, match="not finite"):
        contradicted(model, planted_cells[0])
