from __future__ import annotations

import math

import pytest
import torch
from scipy import stats

from checks import assert_mean
from vaerdict import noise
from vaerdict.core import SettingError
from vaerdict.noise import Iid, PerUnit, Sobol, as_source, seeded

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


# ------------------------------------------------------------------------------------------------ noise of units
UNITS, MANY = torch.arange(400), 500


def drawn(name: str, seed: int = 0, stream: int = 0, units: torch.Tensor = UNITS, k: int = MANY) -> torch.Tensor:
    """Standardised noise of units in double precision. Shapes: ``-> (k, units)``."""
    source, batch = PerUnit(seed, stream, units), tuple(units.shape)
    if name == "uniform":
        return (source.uniform(k, batch, 1, like=LIKE).squeeze(-1) - 0.5) * math.sqrt(12)
    if name == "normal":
        return source.normal(k, batch, 1, like=LIKE).squeeze(-1)
    alpha = float(name.removeprefix("gamma "))
    return (source.gamma(k, batch, torch.tensor(alpha).double()).squeeze(-1) - alpha) / math.sqrt(alpha)


LAWS = {
    "uniform": stats.uniform(-math.sqrt(3), 2 * math.sqrt(3)),
    "normal": stats.norm,
    "gamma 5": stats.gamma(5, loc=-math.sqrt(5), scale=1 / math.sqrt(5)),
    "gamma 0.4": stats.gamma(0.4, loc=-math.sqrt(0.4), scale=1 / math.sqrt(0.4)),
}


@pytest.mark.parametrize("name", LAWS)
def test_noise_of_units_has_its_law(name):
    """Kolmogorov-Smirnov on 200,000 numbers, and on as many of few units; false alarms 1e-6 each."""
    for units, k in ((UNITS, MANY), (torch.tensor([3, 10**9]), 100_000)):
        values = drawn(name, units=units, k=k).flatten().numpy()
        assert stats.kstest(values, LAWS[name].cdf).pvalue > 1e-6
        assert stats.kstest(values + 0.02, LAWS[name].cdf).pvalue < 1e-6  # the check can fail


@pytest.mark.parametrize("name", LAWS)
def test_noise_of_units_is_independent_along_and_across_them(name):
    """Correlations of values and squares, lagged along draws and units, with streams, seeds and neighbours apart."""
    x = drawn(name)
    others = {
        "draw": (x[1:], x[:-1]),
        "two draws": (x[2:], x[:-2]),
        "unit": (x[:, 1:], x[:, :-1]),
        "both": (x[1:, 1:], x[:-1, :-1]),
        "stream": (x, drawn(name, stream=1)),
        "seed": (x, drawn(name, seed=1)),
        "halves": (x[: MANY // 2], x[MANY // 2 :]),
    }
    for a, b in others.values():
        for f in (torch.clone, torch.square):
            one, two = ((t - t.mean()) / t.std() for t in (f(a), f(b)))
            assert_mean((one * two).flatten(), 0.0, rate=1e-6)
    with pytest.raises(AssertionError, match="standard errors"):
        assert_mean((x * (0.02 * x + drawn(name, seed=1))).flatten(), 0.0, rate=1e-6)


def test_several_numbers_of_one_unit_are_apart():
    """The two normals of one hash, the coordinates of a draw, and gammas beside normals."""
    eps, gamma = PerUnit(0, 0, UNITS).normal_gamma(MANY, UNITS.shape, 4, torch.tensor(5.0).double())
    columns = torch.cat([eps, (gamma - 5) / math.sqrt(5)], -1).flatten(0, 1)
    for i in range(5):
        for j in range(i):
            assert_mean(columns[:, i] * columns[:, j], 0.0, rate=1e-6)
    assert stats.kstest(eps[..., 3].flatten().numpy(), stats.norm.cdf).pvalue > 1e-6


def test_what_a_unit_draws_depends_on_it_alone_and_goes_on():
    some = torch.tensor([7, 2, 399])
    all_of_them, few = PerUnit(5, 2, UNITS), PerUnit(5, 2, some)
    for _ in range(2):
        whole, part = (s.normal_gamma(6, s.units.shape, 3, torch.tensor(0.7)) for s in (all_of_them, few))
        for a, b in zip(whole, part, strict=True):
            torch.testing.assert_close(a[:, some], b)  # functions may round otherwise at the end of a row of numbers
    again = PerUnit(5, 2, some).normal(6, some.shape, 3, like=LIKE.float())
    assert not torch.equal(again, few.normal(6, some.shape, 3, like=LIKE.float()))
    assert as_source(few) is few
    with pytest.raises(SettingError, match="noise of 3 units was asked for a batch"):
        few.normal(2, (4,), 1, like=LIKE)


def test_the_hash_is_splitmix64():
    """The first numbers of the reference implementation (Vigna, splitmix64.c) from state 1234567."""
    state = torch.tensor([1234567]) + noise._GOLDEN * torch.arange(1, 4)
    expected = [6457827717110365317, 3203168211198807973, 9817491932198370423]
    assert [int(word) % 2**64 for word in noise._mix(state)] == expected


def test_single_precision_never_leaves_the_open_interval():
    words = torch.tensor([0, -1, 2**63 - 1, -(2**63)])
    for dtype in (torch.float32, torch.float64):
        u = noise._unit_interval(words, dtype)
        assert (u > 0).all()
        assert (u < 1).all()
        assert all((half > 0).all() and (half <= 1).all() for half in noise._halves(words, dtype))
