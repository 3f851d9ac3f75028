from __future__ import annotations

import math

import pytest
import torch
from scipy import stats

from checks import assert_mean
from vaerdict import noise
from vaerdict.core import SettingError
from vaerdict.noise import Iid, Sobol, as_source, seeded

LIKE = torch.zeros((), dtype=torch.double)


def test_a_generator_stands_for_a_source():
    g = seeded(0)
    assert as_source(g) == Iid((g,))
    assert as_source([g, g]) == Iid((g, g))
    sobol = Sobol(g)
    assert as_source(sobol) is sobol


@pytest.mark.parametrize("bad", [None, 3, [], [1, 2]])
def test_what_is_no_source_is_refused(bad):
    with pytest.raises(SettingError, match=r"is no source of randomness; pass a torch.Generator"):
        as_source(bad)


@pytest.mark.parametrize("kind", [lambda s: as_source(seeded(s)), lambda s: Sobol(seeded(s))], ids=["iid", "sobol"])
def test_noise_has_its_shape_type_and_repeats(kind):
    for like in (LIKE, LIKE.float()):
        eps = kind(3).normal(8, (5, 2), 4, like=like)
        assert eps.shape == (8, 5, 2, 4)
        assert eps.dtype == like.dtype
        assert torch.equal(eps, kind(3).normal(8, (5, 2), 4, like=like))
        assert not torch.equal(eps, kind(4).normal(8, (5, 2), 4, like=like))
    eps, gamma = kind(3).normal_gamma(8, (5, 2), 4, torch.tensor(2.5))
    assert (eps.shape, gamma.shape, gamma.dtype) == ((8, 5, 2, 4), (8, 5, 2, 1), torch.float32)


@pytest.mark.parametrize("source", [as_source(seeded(1)), Sobol(seeded(1))], ids=["iid", "sobol"])
def test_noise_has_its_law(source):
    shape = torch.tensor([0.8, 3.0], dtype=torch.double)  # one concentration a member
    eps, gamma = source.normal_gamma(256, (2, 60), 2, shape)
    assert stats.kstest(eps.flatten().numpy(), "norm").pvalue > 1e-6
    for member in range(2):
        drawn = gamma[:, member].flatten().numpy()
        assert stats.kstest(drawn, stats.gamma(shape[member].item()).cdf).pvalue > 1e-6
        assert stats.kstest(drawn, stats.gamma(1.2 * shape[member].item()).cdf).pvalue < 1e-6


def test_each_member_of_a_stack_draws_from_its_own_generator():
    shape = torch.tensor([0.8, 3.0, 5.0], dtype=torch.double)
    stack = Iid(tuple(seeded(s) for s in range(3)))
    eps, gamma = stack.normal_gamma(4, (3, 5), 2, shape)
    for member in range(3):
        alone, gamma_alone = as_source(seeded(member)).normal_gamma(4, (5,), 2, shape[member])
        assert torch.equal(eps[:, member], alone)
        assert torch.equal(gamma[:, member], gamma_alone)


@pytest.mark.parametrize("kind", [lambda s: as_source(seeded(s)), lambda s: Sobol(seeded(s))], ids=["iid", "sobol"])
def test_uniform_numbers_have_their_law_and_repeat(kind):
    u = kind(3).uniform(64, (50, 2), 3, like=LIKE)
    assert (u.shape, u.dtype) == ((64, 50, 2, 3), torch.double)
    assert 0 <= u.min() < u.max() < 1
    assert torch.equal(u, kind(3).uniform(64, (50, 2), 3, like=LIKE))
    assert stats.kstest(u.flatten().numpy(), "uniform").pvalue > 1e-6
    assert stats.kstest((u**1.1).flatten().numpy(), "uniform").pvalue < 1e-6


def test_each_member_of_a_stack_draws_its_own_uniform_numbers():
    u = Iid(tuple(seeded(s) for s in range(3))).uniform(4, (3, 5), 2, like=LIKE.float())
    assert u.dtype == torch.float32
    for member in range(3):
        assert torch.equal(u[:, member], as_source(seeded(member)).uniform(4, (5,), 2, like=LIKE.float()))


@pytest.mark.parametrize("batch", [(), (4, 5)])
def test_a_stack_of_generators_needs_a_batch_of_as_many_members(batch):
    with pytest.raises(SettingError, match="3 generators serve a stack of as many members, but the batch is"):
        Iid(tuple(seeded(s) for s in range(3))).normal(2, batch, 1, like=LIKE)


@pytest.mark.parametrize("m", [3, 6])
def test_the_points_of_every_observation_are_a_net(generator, m):
    k = 2**m
    u = Sobol(generator).uniform(k, (5,), 2, like=LIKE)
    assert 0 < u.min() < u.max() < 1
    for across in range(m + 1):  # every way to cut the square in k equal boxes: one point in each
        rows, columns = (u[..., 0] * 2**across).long(), (u[..., 1] * 2 ** (m - across)).long()
        box = rows * 2 ** (m - across) + columns
        assert torch.equal(box.sort(0).values, torch.arange(k).unsqueeze(1).expand(k, 5))
    assert not torch.equal(u[:, 0].sort(0).values, u[:, 1].sort(0).values)  # randomised apart from each other


def test_sobol_estimates_are_unbiased_and_far_more_accurate(generator):
    def average(source: noise.Source) -> torch.Tensor:
        return torch.special.ndtr(source.normal(256, (4000,), 2, like=LIKE) + 1).prod(-1).mean(0)

    exact = stats.norm.cdf(1 / math.sqrt(2)) ** 2
    sobol, iid = average(Sobol(generator)), average(as_source(generator))
    assert_mean(sobol, exact, rate=1e-6)
    with pytest.raises(AssertionError, match="standard errors"):
        assert_mean(sobol, exact + 2e-4, rate=1e-6)
    assert (sobol - exact).square().mean() < 0.05**2 * (iid - exact).square().mean()


def test_nets_paired_point_by_point_do_not_go_in_step(generator):
    """Two nets in the engine's order would share their leading bits: correlations of three quarters, at every k."""
    source = Sobol(generator)
    one, other = (source.uniform(1024, (200,), 1, like=LIKE) - 0.5 for _ in range(2))
    correlation = 12 * (one * other).mean(0)
    assert correlation.abs().max() < 6 / math.sqrt(1024)  # six standard errors of independent points


def test_a_first_point_rounded_up_to_one_stays_inside(generator, monkeypatch):
    class Rounded:
        def __init__(self, d: int, **_: object) -> None:
            self.d = d

        def draw(self, k: int, dtype: torch.dtype) -> torch.Tensor:
            return torch.ones(k, self.d, dtype=dtype)

    monkeypatch.setattr(noise, "SobolEngine", Rounded)
    assert torch.isfinite(Sobol(generator).normal(1, (50,), 3, like=LIKE)).all()
