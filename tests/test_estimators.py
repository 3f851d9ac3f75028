"""Estimators of posterior expectations for known posteriors: pPCA, and a mixture of two normals.

The query on pPCA is whether the first latent lies half a posterior standard deviation above its mean, which has
probability 0.31 for every observation. Proposals are wider than the posterior, so that weights are bounded.
"""

from __future__ import annotations

import math

import pytest
import torch
from scipy import stats
from torch import Tensor

from checks import assert_mean, assert_within, chi_square_rate
from vaerdict import diagnostics, estimators
from vaerdict.core import Estimate, Proposal, ShapeError, WeightError
from vaerdict.distributions import Diagonal, Elliptical
from vaerdict.models.ppca import PPCA
from vaerdict.noise import seeded
from vaerdict.proposals import Mixture, Prior, defensive, optimal_shares

EXACT = stats.norm.sf(0.5)


@pytest.fixture(scope="module")
def model() -> PPCA:
    return PPCA(torch.randn(5, 2, generator=seeded(0), dtype=torch.double), 1.0).requires_grad_(False)


@pytest.fixture(scope="module")
def x(model) -> Tensor:
    return model.simulate(400, generator=seeded(1))[0]


def query(model: PPCA, x: Tensor, z: Tensor) -> Tensor:
    posterior = model.posterior(x)
    return z[..., 0] >= posterior.loc[..., 0] + 0.5 * posterior.covariance()[..., 0, 0].sqrt()


def particles(model: PPCA, x: Tensor, q: Proposal, k: int, seed: int = 2) -> tuple[Tensor, Tensor]:
    """The query's values and the log-weights of k particles."""
    z, log_q = q.draw(x, k, generator=seeded(seed))
    return query(model, x, z).double(), model.log_joint(x, z) - log_q


# ------------------------------------------------------------------------------------ correct within their error
def estimate(name: str, model: PPCA, x: Tensor) -> Estimate:
    wide = model.posterior(x, inflate=1.5)
    if name == "mis":
        mixture = Mixture({"wide": wide, "shifted": shifted(wide, 0.5), "PRIOR": Prior(model.prior)})
        return estimators.mis(*particles(model, x, mixture, 2000), mixture.source(2000))
    return getattr(estimators, name)(*particles(model, x, wide, 2000))


def shifted(q: Elliptical, by: float) -> Elliptical:
    return Elliptical(q.loc + by, q.root)


@pytest.mark.parametrize("name", ["snis", "psis", "mis"])
def test_estimates_are_correct_within_their_standard_error(name, model, x):
    """400 observations; each of the three checks fails for a correct estimator once in a million times."""
    value, mcse, ess, khat = estimate(name, model, x)
    score = (value - EXACT) / mcse
    assert_mean(score, 0.0, rate=1e-6)
    assert_within(value, torch.tensor(EXACT), mcse, rate=1e-6)
    assert 1e-6 < chi_square_rate(score) < 1 - 1e-6  # the error is neither too small nor too large
    assert ((ess > 500) & (ess < 2000)).all()
    assert (khat < 0.5).all()


@pytest.mark.parametrize("name", ["snis", "psis", "mis"])
def test_a_planted_bias_or_error_is_detected(name, model, x):
    value, mcse, *_ = estimate(name, model, x)
    with pytest.raises(AssertionError, match="standard errors"):
        assert_mean((value + 0.01 - EXACT) / mcse, 0.0, rate=1e-6)  # one percentage point, about 0.8 standard errors
    with pytest.raises(AssertionError, match="standard errors off"):
        assert_within(value + 0.1, torch.tensor(EXACT), mcse, rate=1e-6)
    assert chi_square_rate((value - EXACT) / (0.8 * mcse)) < 1e-6
    assert chi_square_rate((value - EXACT) / (1.25 * mcse)) > 1 - 1e-6


def test_the_plugin_estimates_the_mean_under_q(model, x):
    f, log_w = particles(model, x, model.posterior(x, inflate=1.5), 2000)
    plugin, snis = estimators.plugin(f, log_w), estimators.snis(f, log_w)
    under_q = stats.norm.sf(0.5 / math.sqrt(1.5))
    assert_mean((plugin.value - under_q) / plugin.mcse, 0.0, rate=1e-6)
    with pytest.raises(AssertionError, match="standard errors"):
        assert_mean((plugin.value - EXACT) / plugin.mcse, 0.0, rate=1e-6)
    assert torch.equal(plugin.ess, snis.ess)
    assert torch.equal(plugin.khat, snis.khat)


# ------------------------------------------------------------------------------------------------ closed forms
def test_values_by_hand():
    f = torch.tensor([[0.0], [1.0], [4.0]])
    log_w = torch.tensor([[1.0], [2.0], [2.0]]).log()
    assert estimators.plugin(f, log_w).value.item() == pytest.approx(5 / 3)
    value, mcse, ess, khat = estimators.snis(f, log_w)
    assert value.item() == pytest.approx(2)
    assert mcse.item() == pytest.approx(math.sqrt(2**2 + (2 * 1) ** 2 + (2 * 2) ** 2) / 5)
    assert ess.item() == pytest.approx(25 / 9)
    assert khat.isnan().all()  # three particles have no tail to assess
    assert value.dtype == torch.float64


def test_values_are_invariant_to_the_scale_of_the_weights(generator):
    f, log_w = torch.randn(200, 3, 2, generator=generator), torch.randn(200, 3, generator=generator)
    for estimator in (estimators.snis, estimators.psis):
        for near, far in zip(estimator(f, log_w), estimator(f, log_w.double() - 900), strict=True):
            torch.testing.assert_close(near, far)


def test_queries_may_have_any_shape(generator):
    f, log_w = torch.randn(200, 3, 4, 5, generator=generator), torch.randn(200, 3, generator=generator)
    source = torch.arange(200) % 2
    for estimate in (
        estimators.plugin(f, log_w),
        estimators.snis(f, log_w),
        estimators.psis(f, log_w),
        estimators.mis(f, log_w, source),
        estimators.mis(f, log_w, source, smooth=True),
    ):
        assert (estimate.value.shape, estimate.mcse.shape) == ((3, 4, 5), (3, 4, 5))
        assert (estimate.ess.shape, estimate.khat.shape) == ((3,), (3,))
    assert estimators.snis(f[..., 0, 0] > 0, log_w).value.shape == (3,)  # an event is a query too


@pytest.mark.parametrize("estimator", [estimators.plugin, estimators.snis, estimators.psis])
def test_one_observation_needs_no_batch_axis(estimator, generator):
    f, log_w = torch.randn(200, 1, 4, generator=generator), torch.randn(200, 1, generator=generator)
    for alone, batch in zip(estimator(f[:, 0], log_w[:, 0]), estimator(f, log_w), strict=True):
        assert torch.equal(alone, batch[0])
    assert estimator(f[:, 0, 0], log_w[:, 0]).value.shape == ()
    assert estimator(f[..., :0], log_w).value.shape == (1, 0)  # nor does a query need an output
    assert estimators.mis(f[:, 0], log_w[:, 0], torch.arange(200) % 2).mcse.shape == (4,)


@pytest.mark.parametrize("estimator", [estimators.plugin, estimators.snis, estimators.psis])
def test_the_error_of_one_draw_is_unknown(estimator):
    assert estimator(torch.tensor([[3.7, 1.0]]), torch.zeros(1, 2)).mcse.isnan().all()


def test_smoothing_is_that_of_psis(generator):
    f, log_w = torch.randn(400, 3, generator=generator).double(), 2 * torch.randn(400, 3, generator=generator).double()
    smoothed, khat = diagnostics.psis(log_w)
    estimate = estimators.psis(f, log_w)
    torch.testing.assert_close(estimate.value, (torch.softmax(smoothed, 0) * f).sum(0))
    assert torch.equal(estimate.khat, khat)
    assert torch.equal(estimate.ess, diagnostics.ess(log_w))  # smoothing can hide a draw that outweighs all others
    assert not torch.equal(estimate.ess, diagnostics.ess(smoothed))
    mixed = estimators.mis(f, log_w, torch.arange(400) % 2, smooth=True)
    assert torch.equal(mixed.value, estimate.value)
    assert not torch.equal(estimate.value, estimators.snis(f, log_w).value)


@pytest.mark.parametrize("stratified", [False, True])
def test_smoothed_estimates_report_the_larger_of_both_errors(stratified, generator):
    f, log_w = torch.randn(2, 400, 50, generator=generator, dtype=torch.float64)
    strata = torch.arange(400) % 2 if stratified else None
    raw, smoothed = (diagnostics.mcse_snis(f, w, strata=strata) for w in (log_w, diagnostics.psis(log_w)[0]))
    estimate = estimators.psis(f, log_w) if strata is None else estimators.mis(f, log_w, strata, smooth=True)
    torch.testing.assert_close(estimate.mcse, torch.maximum(raw, smoothed))
    assert 0 < (raw > smoothed).sum() < 50  # each of them is the larger one for some observations


# ------------------------------------------------------------------------------------- many proposals, equal draws
def rmse(model: PPCA, x: Tensor, q: Proposal, k: int) -> float:
    f, log_w = particles(model, x, q, k, seed=3)
    return (estimators.snis(f, log_w).value - EXACT).square().mean().sqrt().item()


def test_optimal_shares_ignore_a_useless_proposal(model, x):
    """200 draws each. Shares come from a pilot of 400 draws; 4000 replicates give the error to about one per cent."""
    x = x.repeat(10, 1)
    good = model.posterior(x, inflate=1.2)
    equal = defensive({"good": good, "useless": shifted(good.scaled(0.2), 9.0)}, model.prior, 0.05)
    z, log_q = equal.draw(x, 400, generator=seeded(9))
    pilot = model.log_joint(x, z), equal.component_log_prob(z, x), log_q
    shares = optimal_shares(*pilot, floor=[0.0, 0.0, 0.05])
    assert shares.tolist() == pytest.approx([0.95, 0.0, 0.05], abs=1e-6)
    best = Mixture(equal.components, dict(zip(equal.components, shares.tolist(), strict=True)))
    alone = rmse(model, x, good, 200)
    assert rmse(model, x, best, 200) < 1.1 * alone
    assert rmse(model, x, equal, 200) > 1.3 * alone  # equal shares waste draws on the useless one


def bimodal(z: Tensor) -> Tensor:
    sides = [Elliptical(torch.full((1,), c).double(), Diagonal(torch.ones(1).double())) for c in (-3.0, 3.0)]
    return torch.logaddexp(*(side.log_prob(z) for side in sides)) - math.log(2)


def test_two_proposals_for_one_mode_each_beat_either_alone():
    """Each proposal covers one of two modes; 200 draws each, 1000 replicates, query P(z > 0) = 1/2."""
    blank = torch.zeros(1000, 1, dtype=torch.double)
    halves = {name: Elliptical(blank + c, Diagonal(blank + 1.3)) for name, c in {"left": -3.0, "right": 3.0}.items()}
    error, estimate = {}, {}
    for name, q in {**halves, "mis": Mixture(halves)}.items():
        z, log_q = q.draw(blank, 200, generator=seeded(4))
        f, log_w = (z[..., 0] > 0).double(), bimodal(z) - log_q
        estimate[name] = (
            estimators.mis(f, log_w, Mixture(halves).source(200)) if name == "mis" else estimators.snis(f, log_w)
        )
        error[name] = (estimate[name].value - 0.5).square().mean().sqrt().item()
        if name == "mis":
            score = (estimate[name].value - 0.5) / estimate[name].mcse
            assert 1e-6 < chi_square_rate(score) < 1 - 1e-6
            assert (estimate[name].mcse < 0.8 * estimators.snis(f, log_w).mcse).all()  # stratification removes variance
    assert error["mis"] < 0.1 * min(error["left"], error["right"])


# -------------------------------------------------------------------------------------------------- bad input
@pytest.mark.parametrize("estimator", [estimators.plugin, estimators.snis, estimators.psis])
def test_bad_values_and_weights_are_refused(estimator):
    f, log_w = torch.zeros(4, 3), torch.zeros(4, 3)
    with pytest.raises(ShapeError, match=r"f has shape \(4, 2\); it must begin with the shape of the log-weights"):
        estimator(f[:, :2], log_w)
    with pytest.raises(ShapeError, match="hold no particle; draw at least one"):
        estimator(f[:0], log_w[:0])
    with pytest.raises(WeightError, match="12 of 12 log-weights are NaN"):
        estimator(f, log_w * torch.nan)
    with pytest.raises(WeightError, match="3 observations have no particle with positive weight"):
        estimator(f, log_w - torch.inf)
    with pytest.raises(WeightError, match="12 of 12 values of f are not finite"):
        estimator(f + torch.inf, log_w)


def test_mis_needs_the_source_of_every_particle():
    f = torch.zeros(4, 3)
    with pytest.raises(ShapeError, match=r"source has shape \(3,\); expected one entry for each of 4 particles"):
        estimators.mis(f, f, torch.zeros(3))


def test_a_stratum_of_one_draw_is_counted_as_if_not_stratified(generator):
    f, log_w = torch.randn(2, 6, 3, generator=generator, dtype=torch.float64)
    lone = estimators.mis(f, log_w, torch.tensor([0, 0, 0, 0, 0, 1]))
    torch.testing.assert_close(lone.mcse, estimators.snis(f, log_w).mcse)


@pytest.mark.parametrize("estimator", [estimators.plugin, estimators.snis, estimators.psis])
def test_an_indicator_that_never_varied_has_a_positive_error(estimator):
    f, log_w = torch.zeros(100, 2, dtype=torch.float64), torch.zeros(100, 2, dtype=torch.float64)
    torch.testing.assert_close(estimator(f, log_w).mcse, torch.full((2,), 0.02, dtype=torch.float64))
    assert (estimator(f + 7, log_w).mcse < 1e-12).all()  # not an indicator: a constant is known exactly
