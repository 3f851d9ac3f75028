from __future__ import annotations

import math

import pytest
import torch
from scipy import stats
from torch import Tensor

from checks import assert_mean
from vaerdict.core import SettingError
from vaerdict.likelihoods import CountLikelihood, CountParameters, NegativeBinomial, Poisson, ZeroInflated
from vaerdict.noise import seeded

COUNTS = torch.tensor([0.0, 1.0, 2.0, 7.0, 60.0, 1000.0]).double()
MEANS = torch.tensor([1e-3, 0.5, 3.0, 50.0, 2000.0]).double()
DISPERSIONS = torch.tensor([0.1, 1.0, 20.0, 1e4]).double()
LOGITS = torch.tensor([-30.0, -1.0, 0.0, 4.0]).double()
LIKELIHOODS: list[CountLikelihood] = [Poisson(), NegativeBinomial(), ZeroInflated(), ZeroInflated(per_cell=True)]


def grid(*axes: Tensor) -> list[Tensor]:
    return [t.flatten() for t in torch.meshgrid(*axes, indexing="ij")]


def batch(dtype: torch.dtype = torch.double) -> tuple[Tensor, CountParameters]:
    """Counts of 6 cells and 5 genes, some zero, and parameters for 4 particles."""
    g = seeded(0)
    x = torch.poisson(3 * torch.rand(6, 5, generator=g), generator=g)
    log_mean = torch.randn(4, 6, 5, generator=g)
    parameters = CountParameters(log_mean, torch.randn(5, generator=g), torch.randn(5, generator=g))
    return x.to(dtype), CountParameters(*(t.to(dtype) for t in parameters))


# ------------------------------------------------------------------------------------------------ against scipy
def test_poisson_agrees_with_scipy():
    x, mean = grid(COUNTS, MEANS)
    expected = torch.as_tensor(stats.poisson(mean).logpmf(x))
    torch.testing.assert_close(Poisson().log_prob(x, CountParameters(mean.log())), expected, rtol=1e-9, atol=1e-9)


def test_negative_binomial_agrees_with_scipy():
    x, mean, r = grid(COUNTS, MEANS, DISPERSIONS)
    expected = torch.as_tensor(stats.nbinom(r, r / (r + mean)).logpmf(x))
    log_prob = NegativeBinomial().log_prob(x, CountParameters(mean.log(), r.log()))
    torch.testing.assert_close(log_prob, expected, rtol=1e-7, atol=1e-7)


def test_zero_inflation_is_a_mixture_with_zero():
    x, mean, r, logit = grid(COUNTS, MEANS, DISPERSIONS, LOGITS)
    extra_zero = torch.sigmoid(logit)
    pmf = torch.as_tensor(stats.nbinom(r, r / (r + mean)).pmf(x))
    expected = extra_zero * (x == 0) + (1 - extra_zero) * pmf
    log_prob = ZeroInflated().log_prob(x, CountParameters(mean.log(), r.log(), logit))
    torch.testing.assert_close(log_prob.exp(), expected, rtol=1e-7, atol=1e-12)
    assert log_prob.isfinite().all()


# --------------------------------------------------------------------------------------- fixed and moving parts
@pytest.mark.parametrize("likelihood", LIKELIHOODS)
def test_fixed_and_moving_parts_sum_to_the_log_probability(likelihood):
    x, parameters = batch()
    log_prob = likelihood.log_prob(x, parameters).sum(-1)
    torch.testing.assert_close(likelihood.fixed(x, parameters) + likelihood.moving(x, parameters), log_prob)


@pytest.mark.parametrize("likelihood", LIKELIHOODS)
def test_the_fixed_part_is_one_number_per_cell_and_ignores_the_mean(likelihood):
    x, parameters = batch()
    fixed = likelihood.fixed(x, parameters._replace(log_mean=torch.full_like(parameters.log_mean, math.nan)))
    assert fixed.shape == (6,)
    assert torch.equal(fixed, likelihood.fixed(x, parameters))


@pytest.mark.parametrize("shape", [(5,), (6, 5), (1, 6, 5), (4, 6, 5)])
@pytest.mark.parametrize("likelihood", LIKELIHOODS)
def test_gradients_of_both_parts_sum_to_those_of_the_log_probability(likelihood, shape, monkeypatch):
    """For parameters of any shape, and in chunks of particles."""
    monkeypatch.setattr("vaerdict.likelihoods._CACHED", 60)  # two particles
    x, (log_mean, log_dispersion, zero_logit) = batch()
    logit_shape = shape if likelihood.per_cell else shape[-2:]  # without `per_cell` there is no particle axis
    parameters = (log_mean, log_dispersion.expand(shape[-2:]), zero_logit.expand(logit_shape))

    def derivatives(total) -> tuple[Tensor, ...]:
        leaves = [t.clone().requires_grad_() for t in parameters]
        weight = torch.arange(1.0, 5.0).reshape(4, 1)
        return torch.autograd.grad((weight * total(CountParameters(*leaves))).sum(), leaves, materialize_grads=True)

    split = derivatives(lambda p: likelihood.fixed(x, p) + likelihood.moving(x, p))
    direct = derivatives(lambda p: likelihood.log_prob(x, p).sum(-1))
    for a, b in zip(split, direct, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("likelihood", LIKELIHOODS)
def test_derivatives_can_be_differentiated_again(likelihood):
    x, parameters = batch()
    leaves = [t.clone().requires_grad_() for t in parameters]
    n_used = 1 if not likelihood.dispersed else 2 if not likelihood.inflated else 3
    unused = [t.detach() for t in leaves[n_used:]]

    def moving(*used: Tensor) -> Tensor:
        return likelihood.moving(x, CountParameters(*used, *unused))

    with torch.random.fork_rng(devices=[]):  # the checks draw from the global state
        assert torch.autograd.gradcheck(moving, leaves[:n_used])
        assert torch.autograd.gradgradcheck(moving, leaves[:n_used])


def test_the_moving_part_of_large_cells_is_accurate_in_single_precision():
    g = seeded(1)
    x = torch.poisson(1000 * torch.rand(50, 100, generator=g), generator=g)
    log_mean = (x + 5).log() + 0.3 * torch.randn(50, 100, generator=g)
    log_r = 1 + torch.randn(100, generator=g)
    exact = NegativeBinomial().moving(x.double(), CountParameters(log_mean.double(), log_r.double()))
    assert (NegativeBinomial().moving(x, CountParameters(log_mean, log_r)) - exact).abs().max() < 2e-3
    r = log_r.exp()
    expanded = (x * log_mean).sum(-1) - ((x + r) * torch.logaddexp(log_mean, log_r)).sum(-1) + (r * log_r).sum(-1)
    assert (expanded - exact).abs().max() > 0.02  # the expanded form is not, on any processor


# ------------------------------------------------------------------------------------------------------- draws
MEAN, R, LOGIT = 4.0, 2.0, -1.0
EXTRA_ZERO = 1 / (1 + math.e)
N = 40_000


def draws(likelihood: CountLikelihood) -> Tensor:
    parameters = CountParameters(torch.full((N,), math.log(MEAN)), torch.tensor(math.log(R)), torch.tensor(LOGIT))
    return likelihood.sample(parameters, generator=seeded(2)).double()


@pytest.mark.parametrize(
    ("likelihood", "mean", "second"),
    [
        (Poisson(), MEAN, MEAN + MEAN**2),
        (NegativeBinomial(), MEAN, MEAN + MEAN**2 / R + MEAN**2),
        (ZeroInflated(), (1 - EXTRA_ZERO) * MEAN, (1 - EXTRA_ZERO) * (MEAN + MEAN**2 / R + MEAN**2)),
    ],
)
def test_draws_have_the_moments_of_the_distribution(likelihood, mean, second):
    """Six assertions with a false-alarm rate of 1e-6 each; counts have light tails."""
    x = draws(likelihood)
    assert_mean(x, mean, rate=1e-6)
    assert_mean(x.square(), second, rate=1e-6)
    with pytest.raises(AssertionError, match="standard errors"):
        assert_mean(x, 1.05 * mean, rate=1e-6)


@pytest.mark.parametrize("likelihood", LIKELIHOODS[:3])
def test_draws_have_the_frequencies_of_the_log_probability(likelihood):
    """The frequencies of zeros, ones and twos, each with a false-alarm rate of 1e-6."""
    parameters = CountParameters(torch.tensor(math.log(MEAN)), torch.tensor(math.log(R)), torch.tensor(LOGIT))
    x = draws(likelihood)
    for count in range(3):
        probability = likelihood.log_prob(torch.tensor(float(count)), parameters).exp().item()
        assert_mean((x == count).double(), probability, rate=1e-6)


def test_draws_are_reproducible():
    assert torch.equal(draws(ZeroInflated()), draws(ZeroInflated()))


def test_a_missing_parameter_is_named():
    with pytest.raises(SettingError, match="dispersion"):
        NegativeBinomial().log_prob(torch.zeros(1), CountParameters(torch.zeros(1)))
