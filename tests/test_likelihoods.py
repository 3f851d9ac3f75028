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
    at = CountParameters(log_mean, torch.randn(5, generator=g), torch.randn(5, generator=g))
    return x.to(dtype), CountParameters(*(t.to(dtype) for t in at))


# ------------------------------------------------------------------------------------------------ against scipy
def test_poisson_is_scipys():
    x, mean = grid(COUNTS, MEANS)
    expected = torch.as_tensor(stats.poisson(mean).logpmf(x))
    torch.testing.assert_close(Poisson().log_prob(x, CountParameters(mean.log())), expected, rtol=1e-9, atol=1e-9)


def test_negative_binomial_is_scipys():
    x, mean, r = grid(COUNTS, MEANS, DISPERSIONS)
    expected = torch.as_tensor(stats.nbinom(r, r / (r + mean)).logpmf(x))
    found = NegativeBinomial().log_prob(x, CountParameters(mean.log(), r.log()))
    torch.testing.assert_close(found, expected, rtol=1e-7, atol=1e-7)


def test_zero_inflation_mixes_with_zero():
    x, mean, r, logit = grid(COUNTS, MEANS, DISPERSIONS, LOGITS)
    dropped = torch.sigmoid(logit)
    pmf = torch.as_tensor(stats.nbinom(r, r / (r + mean)).pmf(x))
    expected = dropped * (x == 0) + (1 - dropped) * pmf
    found = ZeroInflated().log_prob(x, CountParameters(mean.log(), r.log(), logit))
    torch.testing.assert_close(found.exp(), expected, rtol=1e-7, atol=1e-12)
    assert found.isfinite().all()


# ---------------------------------------------------------------------------------------------------- the split
@pytest.mark.parametrize("likelihood", LIKELIHOODS)
def test_fixed_and_moving_parts_make_the_whole(likelihood):
    x, at = batch()
    whole = likelihood.log_prob(x, at).sum(-1)
    torch.testing.assert_close(likelihood.fixed(x, at) + likelihood.moving(x, at), whole)


@pytest.mark.parametrize("likelihood", LIKELIHOODS)
def test_what_is_fixed_is_one_number_a_cell_and_blind_to_the_mean(likelihood):
    x, at = batch()
    there = likelihood.fixed(x, at._replace(log_mean=torch.full_like(at.log_mean, math.nan)))
    assert there.shape == (6,)
    assert torch.equal(there, likelihood.fixed(x, at))


@pytest.mark.parametrize("shape", [(5,), (6, 5), (1, 6, 5), (4, 6, 5)])
@pytest.mark.parametrize("likelihood", LIKELIHOODS)
def test_both_parts_teach_every_parameter(likelihood, shape, monkeypatch):
    """Gradients of the split are those of the whole, whatever the parameters' shapes, and a few particles at a time."""
    monkeypatch.setattr("vaerdict.likelihoods._CACHED", 60)  # two particles
    x, at = batch()
    logit = shape if likelihood.per_cell else shape[-2:]  # what is of the cell has no particle axis
    given = at._replace(log_dispersion=at.log_dispersion.expand(shape[-2:]), zero_logit=at.zero_logit.expand(logit))

    def derivatives(total) -> tuple[Tensor, ...]:
        leaves = [t.clone().requires_grad_() for t in given]
        weight = torch.arange(1.0, 5.0).reshape(4, 1)
        return torch.autograd.grad((weight * total(CountParameters(*leaves))).sum(), leaves, materialize_grads=True)

    split = derivatives(lambda p: likelihood.fixed(x, p) + likelihood.moving(x, p))
    whole = derivatives(lambda p: likelihood.log_prob(x, p).sum(-1))
    for a, b in zip(split, whole, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("likelihood", LIKELIHOODS)
def test_derivatives_can_be_differentiated_again(likelihood):
    x, at = batch()
    leaves = [t.clone().requires_grad_() for t in at]

    def moving(*parameters: Tensor) -> Tensor:
        return likelihood.moving(x, CountParameters(*parameters))

    used = 1 if not likelihood.dispersed else 2 if not likelihood.inflated else 3
    rest = [t.detach() for t in leaves[used:]]
    with torch.random.fork_rng(devices=[]):  # the checks draw from the global state
        assert torch.autograd.gradcheck(lambda *p: moving(*p, *rest), leaves[:used])
        assert torch.autograd.gradgradcheck(lambda *p: moving(*p, *rest), leaves[:used])


def test_large_cells_keep_their_digits_in_single_precision():
    g = seeded(1)
    x = torch.poisson(1000 * torch.rand(50, 100, generator=g), generator=g)
    at = CountParameters((x + 5).log() + 0.3 * torch.randn(50, 100, generator=g), 1 + torch.randn(100, generator=g))
    exact = NegativeBinomial().moving(x.double(), CountParameters(at.log_mean.double(), at.log_dispersion.double()))
    assert (NegativeBinomial().moving(x, at) - exact).abs().max() < 2e-3
    r, log_r = at.log_dispersion.exp(), at.log_dispersion
    short = (x * at.log_mean).sum(-1) - ((x + r) * torch.logaddexp(at.log_mean, log_r)).sum(-1) + (r * log_r).sum(-1)
    assert (short - exact).abs().max() > 0.05  # the shorter way to write it does not


# ------------------------------------------------------------------------------------------------------- draws
MEAN, R, LOGIT = 4.0, 2.0, -1.0
DROPPED = 1 / (1 + math.e)
N = 40_000


def draws(likelihood: CountLikelihood) -> Tensor:
    at = CountParameters(torch.full((N,), math.log(MEAN)), torch.tensor(math.log(R)), torch.tensor(LOGIT))
    return likelihood.sample(at, generator=seeded(2)).double()


@pytest.mark.parametrize(
    ("likelihood", "mean", "second"),
    [
        (Poisson(), MEAN, MEAN + MEAN**2),
        (NegativeBinomial(), MEAN, MEAN + MEAN**2 / R + MEAN**2),
        (ZeroInflated(), (1 - DROPPED) * MEAN, (1 - DROPPED) * (MEAN + MEAN**2 / R + MEAN**2)),
    ],
)
def test_draws_have_the_moments_of_the_law(likelihood, mean, second):
    """Six claims, each failing by chance with probability 1e-6; counts have light tails and are many."""
    x = draws(likelihood)
    assert_mean(x, mean, rate=1e-6)
    assert_mean(x.square(), second, rate=1e-6)
    with pytest.raises(AssertionError, match="standard errors"):
        assert_mean(x, 1.05 * mean, rate=1e-6)


@pytest.mark.parametrize("likelihood", LIKELIHOODS[:3])
def test_draws_follow_the_log_probability(likelihood):
    """The share of zeros, of ones and of twos is their probability; a false alarm in 1e-6 of cases each."""
    at = CountParameters(torch.tensor(math.log(MEAN)), torch.tensor(math.log(R)), torch.tensor(LOGIT))
    x = draws(likelihood)
    for count in range(3):
        probability = likelihood.log_prob(torch.tensor(float(count)), at).exp().item()
        assert_mean((x == count).double(), probability, rate=1e-6)


def test_draws_repeat_with_their_seed():
    assert torch.equal(draws(ZeroInflated()), draws(ZeroInflated()))


def test_a_missing_parameter_is_named():
    with pytest.raises(SettingError, match="dispersion"):
        NegativeBinomial().log_prob(torch.zeros(1), CountParameters(torch.zeros(1)))
