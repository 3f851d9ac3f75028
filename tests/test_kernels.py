"""Mixtures of Student-t kernels: density, draws, and fits to weighted points."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor

from checks import assert_mean, assert_within
from vaerdict.inference.adaptation import Population, fit_kernels
from vaerdict.noise import Sobol, seeded
from vaerdict.proposals import Kernels


def kernels(n_kernels: int = 3, m: int = 4, d: int = 2, df: float = 5.0, seed: int = 0) -> Kernels:
    g = seeded(seed)
    loc = 2 * torch.randn(n_kernels, m, d, generator=g, dtype=torch.double)
    below = torch.randn(n_kernels, m, d, d, generator=g, dtype=torch.double).tril(-1)
    tril = below + torch.diag_embed(0.3 + torch.rand(loc.shape, generator=g, dtype=torch.double))
    return Kernels(loc, tril, torch.randn(n_kernels, m, generator=g, dtype=torch.double).log_softmax(0), df)


@pytest.fixture
def x() -> Tensor:
    return torch.zeros(4, 1, dtype=torch.double)


def test_the_density_is_that_of_scipy(x):
    q = kernels()
    z = torch.randn(50, 4, 2, generator=seeded(1), dtype=torch.double)
    for i in range(4):
        covariance = (q.tril[:, i] @ q.tril[:, i].mT).numpy()
        parts = [stats.multivariate_t(q.loc[j, i].numpy(), covariance[j], df=5).pdf(z[:, i].numpy()) for j in range(3)]
        by_hand = q.log_share[:, i].exp() @ torch.tensor(np.stack(parts))
        torch.testing.assert_close(q.log_prob(z, x)[:, i].exp(), by_hand)


def test_the_density_integrates_to_one():
    q = kernels(d=1)
    z = torch.linspace(-400, 400, 800_001, dtype=torch.double)
    total = torch.trapezoid(q.log_prob(z[:, None, None].expand(-1, 4, 1)).exp(), z, dim=0)
    torch.testing.assert_close(total, torch.ones(4).double(), rtol=0, atol=1e-6)


@pytest.mark.parametrize("sobol", [False, True])
def test_draws_match_the_density(x, sobol):
    """Any density p has E p(z) / q(z) = 1 under q. The errors of nets are at most those of independent draws."""
    q, p = kernels(df=3.0), kernels(seed=0, df=8.0)
    z, log_q = q.draw(x, 16_384, generator=Sobol(seeded(2)) if sobol else seeded(2))
    torch.testing.assert_close(log_q, q.log_prob(z))
    ratio = (p.log_prob(z) - log_q).exp()  # bounded: lighter tails about the same centres
    for i in range(4):
        assert_mean(ratio[:, i], 1.0, rate=1e-6)
    with pytest.raises(AssertionError, match="standard errors"):
        assert_mean(1.05 * ratio[:, 0], 1.0, rate=1e-6)
    mean = (q.log_share.exp().unsqueeze(-1) * q.loc).sum(0)
    assert_within(z.mean(0), mean, z.std(0) / len(z) ** 0.5, rate=1e-6)


def test_kernels_without_a_share_are_not_drawn(x):
    q = kernels()
    only = Kernels(q.loc + torch.tensor([0.0, 1e6, 0.0]).double()[:, None, None], q.tril, q.log_share, q.df)
    share = q.log_share.clone()
    share[1] = -math.inf
    z, log_q = Kernels(only.loc, q.tril, share.log_softmax(0), q.df).draw(x, 5000, generator=seeded(0))
    assert z.abs().max() < 1e5
    assert log_q.isfinite().all()


def test_some_observations_may_be_selected():
    q, index = kernels(), torch.tensor([2, 0])
    z = torch.randn(7, 4, 2, generator=seeded(1), dtype=torch.double)
    torch.testing.assert_close(q.select(index).log_prob(z[:, index]), q.log_prob(z)[:, index])


def test_scaled_kernels_are_wider_about_the_same_centres():
    q = kernels(n_kernels=1)
    wide = q.scaled(3.0, 2.0)
    assert wide.df == 2.0
    step = torch.randn(9, 4, 2, generator=seeded(1), dtype=torch.double)
    same_df = q.scaled(3.0, q.df)
    torch.testing.assert_close(same_df.log_prob(q.loc + 3 * step), q.log_prob(q.loc + step) - 2 * math.log(3))


# ------------------------------------------------------------------------------------------- fits to points
def points(n: int = 4000, m: int = 3) -> Tensor:
    """Points on a bent line: no ellipse fits."""
    z = torch.randn(n, m, 2, generator=seeded(3), dtype=torch.double)
    return torch.stack([z[..., 0], 1.5 * z[..., 0] ** 2 + 0.1 * z[..., 1]], -1)


def test_kernels_fitted_to_points_follow_a_bend():
    """Half of the points have negligible weight; the kernels are at the others and as wide as their neighbourhood."""
    z = points()
    log_w = torch.where(z[..., 0] > 0, 0.0, -1e3)
    fitted = fit_kernels([Population(z, log_w, 64, 1.0)], df=5.0)
    assert fitted.loc.shape == (64, 3, 2)
    torch.testing.assert_close(fitted.log_share.exp().sum(0), torch.ones(3).double())
    assert (fitted.loc[..., 0] > 0).all()
    drawn, log_q = fitted.draw(torch.zeros(3, 1), 4000, generator=seeded(4))
    log_p = -0.5 * (drawn[..., 0] ** 2 + ((drawn[..., 1] - 1.5 * drawn[..., 0] ** 2) / 0.1) ** 2)
    weight = torch.where(drawn[..., 0] > 0, (log_p - log_q).exp(), 0)
    ess = weight.sum(0) ** 2 / weight.square().sum(0)
    assert (ess > 0.2 * 4000).all()
    height = (fitted.tril @ fitted.tril.mT)[..., 1, 1].sqrt()
    assert height.median() < 0.5 * z[:, 0, 1].std()  # an ellipse would be as high as the whole


def test_populations_have_their_shares_and_numbers_of_kernels():
    z, log_w = points(), torch.zeros(4000, 3).double()
    fitted = fit_kernels([Population(z, log_w, 10, 0.6), Population(z + 100, log_w, 5, 0.2)], df=5.0)
    share = fitted.log_share.exp()
    torch.testing.assert_close(share[:10].sum(0), torch.full((3,), 0.75).double())
    assert (fitted.loc[10:] > 90).all()
    assert (fitted.loc[:10, :, 0] < 10).all()


@pytest.mark.parametrize("log_w", ["one heavy", "copies"])
def test_degenerate_points_still_give_a_density(log_w):
    """All weight on one point, or all points the same."""
    z = points(500)
    weights = torch.zeros(500, 3).double()
    if log_w == "copies":
        z = z[:1].expand(500, 3, 2).contiguous()
    else:
        weights[0] = 1e3
    fitted = fit_kernels([Population(z, weights, 16, 1.0)], df=5.0)
    drawn, log_q = fitted.draw(torch.zeros(3, 1), 100, generator=seeded(0))
    assert drawn.isfinite().all()
    assert log_q.isfinite().all()
