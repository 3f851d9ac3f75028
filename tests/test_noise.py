from __future__ import annotations

import math

import pytest
import torch
from scipy import stats

from checks import assert_mean
from vaerdict import noise
from vaerdict.core import SettingError
from vaerdict.noise import CommonRandomNumbers, Iid, KeyedNoise, Sobol, as_source, seeded

LIKE = torch.zeros((), dtype=torch.double)


def test_a_generator_is_converted_to_a_source():
    g = seeded(0)
    assert as_source(g) == Iid((g,))
    assert as_source([g, g]) == Iid((g, g))
    sobol = Sobol(g)
    assert as_source(sobol) is sobol


@pytest.mark.parametrize("generator", [None, 3, [], [1, 2]])
def test_other_types_are_not_sources(generator):
    with pytest.raises(SettingError, match=r"is not a source of randomness; pass a torch.Generator"):
        as_source(generator)


@pytest.mark.parametrize("kind", [lambda s: as_source(seeded(s)), lambda s: Sobol(seeded(s))], ids=["iid", "sobol"])
def test_noise_has_the_requested_shape_and_dtype_and_is_reproducible(kind):
    for like in (LIKE, LIKE.float()):
        eps = kind(3).normal(8, (5, 2), 4, like=like)
        assert eps.shape == (8, 5, 2, 4)
        assert eps.dtype == like.dtype
        assert torch.equal(eps, kind(3).normal(8, (5, 2), 4, like=like))
        assert not torch.equal(eps, kind(4).normal(8, (5, 2), 4, like=like))
    eps, gamma = kind(3).normal_gamma(8, (5, 2), 4, torch.tensor(2.5))
    assert (eps.shape, gamma.shape, gamma.dtype) == ((8, 5, 2, 4), (8, 5, 2, 1), torch.float32)


@pytest.mark.parametrize("source", [as_source(seeded(1)), Sobol(seeded(1))], ids=["iid", "sobol"])
def test_noise_has_the_stated_distribution(source):
    shape = torch.tensor([0.8, 3.0], dtype=torch.double)  # one concentration per member
    eps, gamma = source.normal_gamma(256, (2, 60), 2, shape)
    assert stats.kstest(eps.flatten().numpy(), "norm").pvalue > 1e-6
    for member in range(2):
        values = gamma[:, member].flatten().numpy()
        assert stats.kstest(values, stats.gamma(shape[member].item()).cdf).pvalue > 1e-6
        assert stats.kstest(values, stats.gamma(1.2 * shape[member].item()).cdf).pvalue < 1e-6


def test_each_member_of_a_stack_draws_from_its_own_generator():
    shape = torch.tensor([0.8, 3.0, 5.0], dtype=torch.double)
    stack = Iid(tuple(seeded(s) for s in range(3)))
    eps, gamma = stack.normal_gamma(4, (3, 5), 2, shape)
    for member in range(3):
        alone, gamma_alone = as_source(seeded(member)).normal_gamma(4, (5,), 2, shape[member])
        assert torch.equal(eps[:, member], alone)
        assert torch.equal(gamma[:, member], gamma_alone)


@pytest.mark.parametrize("kind", [lambda s: as_source(seeded(s)), lambda s: Sobol(seeded(s))], ids=["iid", "sobol"])
def test_uniform_numbers_have_the_stated_distribution_and_are_reproducible(kind):
    u = kind(3).uniform(64, (50, 2), 3, like=LIKE)
    assert (u.shape, u.dtype) == ((64, 50, 2, 3), torch.double)
    assert 0 <= u.min() < u.max() < 1
    assert torch.equal(u, kind(3).uniform(64, (50, 2), 3, like=LIKE))
    assert stats.kstest(u.flatten().numpy(), "uniform").pvalue > 1e-6
    assert stats.kstest((u**1.1).flatten().numpy(), "uniform").pvalue < 1e-6


def test_each_member_of_a_stack_draws_uniform_numbers_from_its_generator():
    u = Iid(tuple(seeded(s) for s in range(3))).uniform(4, (3, 5), 2, like=LIKE.float())
    assert u.dtype == torch.float32
    for member in range(3):
        assert torch.equal(u[:, member], as_source(seeded(member)).uniform(4, (5,), 2, like=LIKE.float()))


@pytest.mark.parametrize("batch", [(), (4, 5)])
def test_several_generators_need_a_batch_of_as_many_members(batch):
    with pytest.raises(SettingError, match="3 generators serve a stack of as many members, but the batch is"):
        Iid(tuple(seeded(s) for s in range(3))).normal(2, batch, 1, like=LIKE)


@pytest.mark.parametrize("m", [3, 6])
def test_the_points_of_every_observation_are_a_net(generator, m):
    k = 2**m
    u = Sobol(generator).uniform(k, (5,), 2, like=LIKE)
    assert 0 < u.min() < u.max() < 1
    for n_rows in range(m + 1):  # every partition of the square into k equal boxes has one point in each box
        rows, columns = (u[..., 0] * 2**n_rows).long(), (u[..., 1] * 2 ** (m - n_rows)).long()
        box = rows * 2 ** (m - n_rows) + columns
        assert torch.equal(box.sort(0).values, torch.arange(k).unsqueeze(1).expand(k, 5))
    assert not torch.equal(u[:, 0].sort(0).values, u[:, 1].sort(0).values)  # randomised independently


def test_sobol_estimates_are_unbiased_and_more_accurate_than_iid(generator):
    def average(source: noise.Source) -> torch.Tensor:
        return torch.special.ndtr(source.normal(256, (4000,), 2, like=LIKE) + 1).prod(-1).mean(0)

    exact = stats.norm.cdf(1 / math.sqrt(2)) ** 2
    sobol, iid = average(Sobol(generator)), average(as_source(generator))
    assert_mean(sobol, exact, rate=1e-6)
    with pytest.raises(AssertionError, match="standard errors"):
        assert_mean(sobol, exact + 2e-4, rate=1e-6)
    assert (sobol - exact).square().mean() < 0.05**2 * (iid - exact).square().mean()


def test_the_points_of_two_nets_are_uncorrelated(generator):
    """Two nets in the order of the engine share their leading bits, which gives correlations of 0.75 at every k."""
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


def test_common_random_numbers_are_equal_for_all_observations(generator):
    source = CommonRandomNumbers((generator,))
    draws = [*source.normal_gamma(4, (3, 5), 2, torch.tensor(2.0)), source.uniform(4, (3, 5), 2, like=LIKE)]
    for values in draws:
        assert values.shape[:3] == (4, 3, 5)
        assert (values == values[:, :1, :1]).all()
        assert len(values[:, 0, 0, 0].unique()) == 4


# --------------------------------------------------------------------------------------------------- keyed noise
IDS, N_DRAWS = torch.arange(400), 500


def standardised(name: str, seed: int = 0, stream: int = 0, ids: torch.Tensor = IDS, k: int = N_DRAWS) -> torch.Tensor:
    """Standardised keyed noise in double precision. Shapes: ``-> (k, ids)``."""
    source, batch = KeyedNoise(seed, stream, ids), tuple(ids.shape)
    if name == "uniform":
        return (source.uniform(k, batch, 1, like=LIKE).squeeze(-1) - 0.5) * math.sqrt(12)
    if name == "normal":
        return source.normal(k, batch, 1, like=LIKE).squeeze(-1)
    alpha = float(name.removeprefix("gamma "))
    return (source.gamma(k, batch, torch.tensor(alpha).double()).squeeze(-1) - alpha) / math.sqrt(alpha)


DISTRIBUTIONS = {
    "uniform": stats.uniform(-math.sqrt(3), 2 * math.sqrt(3)),
    "normal": stats.norm,
    "gamma 5": stats.gamma(5, loc=-math.sqrt(5), scale=1 / math.sqrt(5)),
    "gamma 0.4": stats.gamma(0.4, loc=-math.sqrt(0.4), scale=1 / math.sqrt(0.4)),
}


@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_keyed_noise_has_the_stated_distribution(name):
    """Kolmogorov-Smirnov on 200,000 numbers of many and of two ids; false alarms 1e-6 each."""
    for ids, k in ((IDS, N_DRAWS), (torch.tensor([3, 10**9]), 100_000)):
        values = standardised(name, ids=ids, k=k).flatten().numpy()
        assert stats.kstest(values, DISTRIBUTIONS[name].cdf).pvalue > 1e-6
        assert stats.kstest(values + 0.02, DISTRIBUTIONS[name].cdf).pvalue < 1e-6  # the check can fail


@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_keyed_noise_is_independent_along_draws_and_across_ids(name):
    """Correlations of values and of squares at lags along draws and ids, and between streams and seeds."""
    x = standardised(name)
    pairs = {
        "draw": (x[1:], x[:-1]),
        "two draws": (x[2:], x[:-2]),
        "id": (x[:, 1:], x[:, :-1]),
        "both": (x[1:, 1:], x[:-1, :-1]),
        "stream": (x, standardised(name, stream=1)),
        "seed": (x, standardised(name, seed=1)),
        "halves": (x[: N_DRAWS // 2], x[N_DRAWS // 2 :]),
    }
    for a, b in pairs.values():
        for f in (torch.clone, torch.square):
            one, two = ((t - t.mean()) / t.std() for t in (f(a), f(b)))
            assert_mean((one * two).flatten(), 0.0, rate=1e-6)
    with pytest.raises(AssertionError, match="standard errors"):
        assert_mean((x * (0.02 * x + standardised(name, seed=1))).flatten(), 0.0, rate=1e-6)


def test_the_numbers_of_one_id_are_independent():
    """The two normals of one hash, the coordinates of a draw, and gammas and normals."""
    eps, gamma = KeyedNoise(0, 0, IDS).normal_gamma(N_DRAWS, IDS.shape, 4, torch.tensor(5.0).double())
    columns = torch.cat([eps, (gamma - 5) / math.sqrt(5)], -1).flatten(0, 1)
    for i in range(5):
        for j in range(i):
            assert_mean(columns[:, i] * columns[:, j], 0.0, rate=1e-6)
    assert stats.kstest(eps[..., 3].flatten().numpy(), stats.norm.cdf).pvalue > 1e-6


def test_the_noise_of_an_id_does_not_depend_on_other_ids_and_continues_between_calls():
    subset = torch.tensor([7, 2, 399])
    all_ids, few_ids = KeyedNoise(5, 2, IDS), KeyedNoise(5, 2, subset)
    for _ in range(2):
        full, partial = (s.normal_gamma(6, s.ids.shape, 3, torch.tensor(0.7)) for s in (all_ids, few_ids))
        for a, b in zip(full, partial, strict=True):
            torch.testing.assert_close(a[:, subset], b)  # vector loops may round differently at their end
    restarted = KeyedNoise(5, 2, subset).normal(6, subset.shape, 3, like=LIKE.float())
    assert not torch.equal(restarted, few_ids.normal(6, subset.shape, 3, like=LIKE.float()))
    assert as_source(few_ids) is few_ids
    with pytest.raises(SettingError, match="keyed by 3 ids, but the batch is"):
        few_ids.normal(2, (4,), 1, like=LIKE)


def test_the_hash_is_splitmix64():
    """The first numbers of the reference implementation (Vigna, splitmix64.c) from state 1234567."""
    state = torch.tensor([1234567]) + noise._GOLDEN * torch.arange(1, 4)
    expected = [6457827717110365317, 3203168211198807973, 9817491932198370423]
    assert [int(bits) % 2**64 for bits in noise._mix(state)] == expected


def test_uniform_numbers_stay_inside_the_open_interval_in_either_precision():
    bits = torch.tensor([0, -1, 2**63 - 1, -(2**63)])
    for dtype in (torch.float32, torch.float64):
        u = noise._unit_interval(bits, dtype)
        assert (u > 0).all()
        assert (u < 1).all()
        assert all((half > 0).all() and (half <= 1).all() for half in noise._halves(bits, dtype))
