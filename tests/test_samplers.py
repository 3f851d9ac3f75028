"""Samplers against closed forms and quadrature, with planted errors that must be noticed."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from scipy import integrate, stats
from torch import Tensor

from checks import assert_mean, assert_within, chi_square_rate
from vaerdict.core import Draws, SettingError, ShapeError, WeightError, log_mean_exp
from vaerdict.distributions import Diagonal, Elliptical, StandardNormal
from vaerdict.models.ppca import PPCA
from vaerdict.noise import as_source, seeded
from vaerdict.proposals import Mixture, Prior
from vaerdict.samplers import (
    Path,
    State,
    ais,
    annealed,
    bdmc,
    free_bytes,
    geometric,
    hmc,
    linear,
    log_standard_error,
    memory,
    resampling,
    schedules,
    sequential,
    sigmoid,
    smc,
    transition,
)

DOUBLE = torch.float64
LOG_2PI = math.log(2 * math.pi)


class Poisson:
    """z ~ N(0, 1), x ~ Poisson(exp(z + 1)): a skewed posterior; weights of an annealing from the prior are bounded."""

    prior = StandardNormal(1)

    def __init__(self) -> None:
        self.rows = 0
        self.most_rows = 0

    def prepare(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x[..., 0], torch.lgamma(x[..., 0] + 1)

    def log_joint(self, given: tuple[Tensor, Tensor], z: Tensor) -> Tensor:
        x, constant = given
        self.rows += z[..., 0].numel()
        self.most_rows = max(self.most_rows, z[..., 0].numel())
        log_rate = z[..., 0] + 1
        return x * log_rate - log_rate.exp() - constant + self.prior.log_prob(z)

    def log_evidence(self, x: Tensor) -> Tensor:
        return _quadrature(lambda z, v: stats.poisson.pmf(v, math.exp(z + 1)) * stats.norm.pdf(z), x)


class Gumbel:
    """z ~ N(0, 1), x ~ Gumbel(z, 0.3): another skew, the other way."""

    prior = StandardNormal(1)

    def log_joint(self, x: Tensor, z: Tensor) -> Tensor:
        u = (x[..., 0] - z[..., 0]) / 0.3
        return -u - torch.exp(-u) - math.log(0.3) + self.prior.log_prob(z)

    def log_evidence(self, x: Tensor) -> Tensor:
        return _quadrature(lambda z, v: stats.gumbel_r.pdf(v, z, 0.3) * stats.norm.pdf(z), x)


class Bimodal:
    """z ~ N(0, I_2), x ~ N(z_1^2 + 0.3 z_1 + z_2 / 2, 0.3^2): two uneven, curved modes."""

    prior = StandardNormal(2)

    def log_joint(self, x: Tensor, z: Tensor) -> Tensor:
        mean = z[..., 0].square() + 0.3 * z[..., 0] + 0.5 * z[..., 1]
        log_lik = -0.5 * ((x[..., 0] - mean) / 0.3).square() - math.log(0.3) - 0.5 * LOG_2PI
        return log_lik + self.prior.log_prob(z)

    def log_evidence(self, x: Tensor) -> Tensor:
        sd = math.sqrt(0.3**2 + 0.5**2)
        return _quadrature(lambda z, v: stats.norm.pdf(v, z * z + 0.3 * z, sd) * stats.norm.pdf(z), x)


def _quadrature(density, x: Tensor) -> Tensor:
    points = [-2.0, -1.0, 0.0, 1.0, 2.0]
    values = [integrate.quad(density, -9, 9, args=(v,), points=points, limit=200)[0] for v in x[:, 0].tolist()]
    return torch.tensor(values, dtype=DOUBLE).log()


def linear_gaussian() -> PPCA:
    weight = torch.tensor([[1.0, 0.4], [-0.3, 0.8], [0.5, 0.5]], dtype=DOUBLE)
    return PPCA(weight, torch.tensor([0.5, 0.7, 0.4], dtype=DOUBLE), torch.tensor([0.2, 0.0, -0.5], dtype=DOUBLE))


CASES = {
    "linear-gaussian": (linear_gaussian(), [[1.0, -0.5, 0.3], [-2.0, 1.0, 0.0], [0.2, 0.1, -0.6]]),
    "poisson": (Poisson(), [[0.0], [3.0], [12.0]]),
    "gumbel": (Gumbel(), [[-1.0], [0.4], [2.0]]),
    "bimodal": (Bimodal(), [[0.0], [1.0], [2.5]]),
}


@pytest.fixture(params=CASES)
def case(request):
    model, x = CASES[request.param]
    x = torch.tensor(x, dtype=DOUBLE)
    return model, x, model.log_evidence(x).detach()


# --- the evidence, three ways ---------------------------------------------------------------------------------------


def test_importance_sampling_finds_the_evidence(case, generator):
    model, x, truth = case
    path = Path(model, Prior(model.prior), x)
    log_w = path.evaluate(path.draw(20_000, generator=generator).z).log_increment(torch.tensor(0.0), torch.tensor(1.0))
    assert_within(log_mean_exp(log_w), truth, log_standard_error(log_w), rate=1e-6)


def test_ais_finds_the_evidence(case, generator):
    model, x, truth = case
    result = ais(model, x, Prior(model.prior), n_chains=400, temperatures=20, n_leapfrog=3, generator=generator)
    assert result.z.shape == (400, 3, model.prior.event_shape[0])
    assert result.log_w.dtype == DOUBLE
    assert (result.standard_error < 0.1).all()
    assert_within(result.log_evidence, truth, result.standard_error, rate=1e-6)


def test_smc_finds_the_evidence(case, generator):
    model, x, truth = case
    result = smc(model, x, Prior(model.prior), n_particles=2048, generator=generator)
    assert result.z.shape == (2048, 3, model.prior.event_shape[0])
    assert (result.standard_error < 0.1).all()
    assert_within(result.log_evidence, truth, result.standard_error, rate=1e-6)


def test_smc_particles_are_the_posterior(generator):
    model, x = linear_gaussian(), torch.tensor([[1.0, -0.5, 0.3]], dtype=DOUBLE)
    result = smc(model, x, Prior(model.prior), n_particles=4096, generator=generator)
    exact, weight = model.posterior(x).detach(), result.log_w.softmax(0).unsqueeze(-1)
    mean = (weight * result.z).sum(0)
    torch.testing.assert_close(mean, exact.loc, atol=0.05, rtol=0)
    second = torch.einsum("kni,knj->nij", weight * (result.z - mean), result.z - mean)
    torch.testing.assert_close(second, exact.covariance(), atol=0.02, rtol=0)


def test_smc_standard_errors_are_calibrated(generator):
    model, x = CASES["gumbel"]
    x = torch.tensor(x, dtype=DOUBLE)
    result = smc(model, x.repeat(40, 1), Prior(model.prior), n_particles=512, generator=generator)
    score = (result.log_evidence - model.log_evidence(x).repeat(40)) / result.standard_error
    # over 16 islands the scores are Student's t with 15 degrees of freedom
    uniform = torch.from_numpy(stats.t.cdf(score.numpy(), 15)).clamp(1e-12, 1 - 1e-12)
    assert chi_square_rate(torch.special.ndtri(uniform)) > 1e-6
    assert chi_square_rate(torch.special.ndtri(uniform) * 1.6) < 1e-6
    assert 0.8 < score.std() < 1.3
    assert abs(score.mean()) < 0.45  # Jensen, and temperatures and step sizes tuned on the population: O(N^-1/2)


# --- annealing is exactly unbiased, and errors in it are seen ---------------------------------------------------------


def annealing_ratio(generator, **settings) -> Tensor:
    """Weights over the true evidence: their mean is one. Few temperatures, so that every detail counts."""
    model, x = Poisson(), torch.tensor([[0.0], [9.0]], dtype=DOUBLE)
    settings = {"n_chains": 8000, "temperatures": 5, "n_leapfrog": 3, "step_size": 0.4} | settings
    result = ais(model, x, Prior(model.prior), generator=generator, **settings)
    return (result.log_w - model.log_evidence(x)).exp()


def assert_unbiased(ratio: Tensor) -> None:
    # no likelihood exceeds its maximum, 1 and 0.13 here, so no ratio exceeds that over the evidence
    assert ratio.max() < 8, f"a weight of {ratio.max():.1f} is beyond the bound, so standard errors mean nothing"
    for column in ratio.unbind(-1):
        assert_mean(column, 1.0, rate=1e-6)


@pytest.mark.parametrize("schedule", [linear(5), sigmoid(5), geometric(5, 0.05), linear(1)])
def test_ais_is_unbiased(schedule, generator):
    assert_unbiased(annealing_ratio(generator, temperatures=schedule))


def test_ais_with_given_steps_is_unbiased(generator):
    assert_unbiased(annealing_ratio(generator, step_size=torch.full((5, 2), 0.3, dtype=DOUBLE)))


PLANTED = {
    "wrong sign": ("log_increment", lambda self, a, b: (a - b) * (self.log_p - self.log_q)),
    "start forgotten": ("log_increment", lambda self, a, b: (b - a) * self.log_p),
    "wrong end first": ("log_density", lambda self, t: (1 - t) * self.log_p + t * self.log_q),
    "start not cooled": ("log_density", lambda self, t: self.log_q + t * self.log_p),
    "normalisation": ("log_increment", lambda self, a, b: (b - a) * (self.log_p - self.log_q + 0.1)),
}


@pytest.mark.parametrize("planted", PLANTED)
def test_planted_tempering_errors_are_seen(planted, generator, monkeypatch):
    name, wrong = PLANTED[planted]
    monkeypatch.setattr(State, name, wrong)
    with pytest.raises(AssertionError, match="standard errors"):
        assert_unbiased(annealing_ratio(generator))


def test_moving_one_temperature_late_is_seen(generator, monkeypatch):
    schedule = linear(5)

    def late(path, state, t, step, **settings):
        return transition(path, state, schedule[torch.searchsorted(schedule, t) - 1], step, **settings)

    monkeypatch.setattr(annealed, "transition", late)
    with pytest.raises(AssertionError, match="standard errors"):
        assert_unbiased(annealing_ratio(generator, temperatures=schedule))


def test_a_step_tuned_on_the_chain_itself_is_seen(generator, monkeypatch):
    # one chain, which is its own pilot: the move depends on the state it moves
    def own(path, state, t, step, **settings):
        small = torch.where(state.z[..., 0] < 1.0, 0.02, 0.9)
        return transition(path, state, t, small, **settings)

    monkeypatch.setattr(annealed, "transition", own)
    with pytest.raises(AssertionError, match="standard errors"):
        assert_unbiased(annealing_ratio(generator))


@pytest.mark.parametrize("planted", ["wrong sign", "start forgotten", "normalisation"])
def test_planted_errors_are_seen_by_smc(planted, generator, monkeypatch):
    model, x = Poisson(), torch.tensor([[0.0], [9.0]], dtype=DOUBLE).repeat(8, 1)
    monkeypatch.setattr(State, *PLANTED[planted])
    with pytest.raises((AssertionError, WeightError)):
        _assert_smc_finds_the_evidence(model, x, generator)


def test_resetting_weights_without_resampling_is_seen(generator, monkeypatch):
    model, x = Poisson(), torch.tensor([[0.0], [9.0]], dtype=DOUBLE).repeat(8, 1)
    monkeypatch.setattr(sequential, "_longest_step", lambda settings: 0.01)  # moves would repair it
    _assert_smc_finds_the_evidence(model, x, generator)
    monkeypatch.setattr(sequential, "systematic", lambda log_w, offset: _places(log_w))
    with pytest.raises(AssertionError, match="standard errors"):
        _assert_smc_finds_the_evidence(model, x, generator)


def _places(log_w: Tensor) -> Tensor:
    return torch.arange(log_w.shape[0]).reshape(-1, *(1,) * (log_w.dim() - 1)).expand(log_w.shape)


def _assert_smc_finds_the_evidence(model, x: Tensor, generator) -> None:
    result = smc(model, x, Prior(model.prior), n_particles=1024, generator=generator)
    pooled = result.standard_error.square().mean().sqrt() / math.sqrt(x.shape[0])
    assert_within((result.log_evidence - model.log_evidence(x)).mean(), torch.tensor(0.0), pooled, rate=1e-6)


def test_a_stratified_start_is_weighted_by_its_realised_shares(generator):
    model, x = Poisson(), torch.full((4000, 1), 2.0, dtype=DOUBLE)
    far = Elliptical(torch.full((1, 1), 2.0, dtype=DOUBLE), Diagonal(torch.full((1, 1), 1.0, dtype=DOUBLE)))
    # 3 draws cannot be shared one to four: one to two is what happens
    initial = Mixture({"PRIOR": Prior(model.prior), "far": Everywhere(far)}, {"PRIOR": 0.2, "far": 0.8})

    def ratio(start) -> Tensor:
        settings = {"n_chains": 3, "temperatures": 2, "n_leapfrog": 2, "n_pilots": 2, "generator": generator}
        return (ais(model, x, start, **settings).log_evidence - model.log_evidence(x[:1])).exp()

    assert_mean(ratio(initial), 1.0, rate=1e-6)
    with pytest.raises(AssertionError, match="standard errors"):
        assert_mean(ratio(Nominal(initial)), 1.0, rate=1e-6)


class Everywhere:
    """One distribution for all observations."""

    def __init__(self, q: Elliptical) -> None:
        self.q = q

    def draw(self, x: Tensor, k: int, *, generator) -> Draws:
        z = self.q.loc + self.q.root.apply(torch.randn(k, *x.shape[:-1], 1, generator=generator, dtype=x.dtype))
        return Draws(z, self.q.log_prob(z))

    def log_prob(self, z: Tensor, x: Tensor) -> Tensor:
        return self.q.log_prob(z)


class Nominal(Everywhere):
    """A mixture that forgets which shares it realised."""

    def draw(self, x: Tensor, k: int, *, generator) -> Draws:
        z = self.q.draw(x, k, generator=generator).z
        return Draws(z, self.q.log_prob(z, x))

    def log_prob(self, z: Tensor, x: Tensor) -> Tensor:
        return self.q.log_prob(z, x)


# --- moves ------------------------------------------------------------------------------------------------------------


class Fixed:
    """A normalised target that does not look at x: Gumbel in two independent coordinates of different scale."""

    prior = StandardNormal(2)
    scale = torch.tensor([1.0, 0.25], dtype=DOUBLE)

    def log_joint(self, x: Tensor, z: Tensor) -> Tensor:
        u = z / self.scale
        return (-u - torch.exp(-u) - self.scale.log()).sum(-1)

    def sample(self, k: int, generator) -> Tensor:
        return -(-torch.rand(k, 1, 2, generator=generator, dtype=DOUBLE).log()).log() * self.scale


ROOT = torch.linalg.cholesky(torch.tensor([[1.6, 0.1], [0.1, 0.1]], dtype=DOUBLE))[None]


def assert_gumbel_is_left_invariant(generator, root: Tensor | None) -> Tensor:
    model, x = Fixed(), torch.zeros(1, 1, dtype=DOUBLE)
    path = Path(model, Prior(model.prior), x)
    state = path.evaluate(model.sample(20_000, generator))
    step, source = torch.tensor([0.35 if root is None else 0.8], dtype=DOUBLE), as_source(generator)
    for _ in range(4):
        move = transition(path, state, torch.tensor(1.0), step, n_leapfrog=3, source=source, root=root)
        state = move.state
    u = state.z / model.scale
    assert_mean(u[..., 0], 0.5772156649, rate=1e-6)
    assert_mean(u[..., 1], 0.5772156649, rate=1e-6)
    assert_mean((u - 0.5772156649).square(), math.pi**2 / 6, rate=1e-6)
    assert_mean(torch.exp(-u), 1.0, rate=1e-6)
    return move.acceptance.mean()


@pytest.mark.parametrize("root", [None, ROOT])
def test_moves_leave_a_skewed_target_invariant(root, generator):
    acceptance = assert_gumbel_is_left_invariant(generator, root)
    assert 0.5 < acceptance < 0.8  # the correction has work to do


@pytest.mark.parametrize(
    "wrong",
    [
        lambda a, b, v, w: torch.zeros_like(a),
        lambda a, b, v, w: a - b + 0.5 * (w.square() - v.square()).sum(-1),
        lambda a, b, v, w: b - a,
        lambda a, b, v, w: b - a - 0.5 * (v.square() - w.square()).sum(-1),
    ],
    ids=["no correction", "flipped energy", "no kinetic energy", "flipped kinetic energy"],
)
def test_wrong_metropolis_corrections_are_seen(wrong, generator, monkeypatch):
    monkeypatch.setattr(hmc, "log_acceptance", wrong)
    with pytest.raises(AssertionError, match="standard errors"):
        assert_gumbel_is_left_invariant(generator, None)


def test_moves_leave_a_tempered_gaussian_invariant(generator):
    # q0 = N(1, 1) and p = N(-1, 1/4): at t = 0.4 the precision is 0.6 + 0.4 * 4 and the mean (0.6 - 1.6) / 2.2
    narrow = Elliptical(torch.full((1, 1), -1.0, dtype=DOUBLE), Diagonal(torch.full((1, 1), 0.5, dtype=DOUBLE)))
    start = Elliptical(torch.full((1, 1), 1.0, dtype=DOUBLE), Diagonal(torch.full((1, 1), 1.0, dtype=DOUBLE)))

    class Narrow:
        prior = StandardNormal(1)

        def log_joint(self, x: Tensor, z: Tensor) -> Tensor:
            return narrow.log_prob(z) + 3.0

    path = Path(Narrow(), start, torch.zeros(1, 1, dtype=DOUBLE))
    mean, sd = -1.0 / 2.2, 2.2**-0.5
    state = path.evaluate(mean + sd * torch.randn(20_000, 1, 1, generator=generator, dtype=DOUBLE))
    for _ in range(4):
        state = transition(
            path, state, torch.tensor(0.4), torch.tensor([0.9]), n_leapfrog=2, source=as_source(generator)
        ).state
    score = (state.z - mean) / sd
    assert_mean(score, 0.0, rate=1e-6)
    assert_mean(score.square(), 1.0, rate=1e-6)


def test_leapfrog_is_reversible_and_second_order(generator):
    model = Bimodal()
    path = Path(model, Prior(model.prior), torch.tensor([[1.0]], dtype=DOUBLE))
    t, state = torch.tensor(0.7), path.evaluate(torch.randn(50, 1, 2, generator=generator, dtype=DOUBLE))
    velocity = torch.randn(50, 1, 2, generator=generator, dtype=DOUBLE)

    def run(step: float, n: int, begin: State, v: Tensor) -> tuple[State, Tensor]:
        return hmc.leapfrog(path, begin, v, t, torch.full((50, 1), step, dtype=DOUBLE), n, ROOT)[:2]

    end, v = run(0.02, 8, state, velocity)
    back, w = run(0.02, 8, end, -v)
    torch.testing.assert_close(back.z, state.z, atol=1e-10, rtol=0)
    torch.testing.assert_close(-w, velocity, atol=1e-9, rtol=0)

    def error(step: float, n: int) -> float:
        end, v = run(step, n, state, velocity)
        return hmc.log_acceptance(state.log_density(t), end.log_density(t), velocity, v).abs().median().item()

    assert 3.2 < error(0.02, 10) / error(0.01, 20) < 4.8


def test_carried_gradients_are_those_of_the_tempered_density():
    model = Bimodal()
    path = Path(model, Prior(model.prior), torch.tensor([[1.0], [0.2]], dtype=DOUBLE))
    t = torch.tensor([0.3, 0.8], dtype=DOUBLE)
    z = torch.tensor([[[0.4, -1.0], [1.2, 0.3]]], dtype=DOUBLE)
    numeric = torch.autograd.functional.jacobian(lambda v: path_density(path, v, t).sum(), z)
    torch.testing.assert_close(path.evaluate(z).gradient(t), numeric)


def path_density(path: Path, z: Tensor, t: Tensor) -> Tensor:
    return (1 - t) * path.initial.log_prob(z, path.x) + t * path.model.log_joint(path.given, z)


class Walled(Fixed):
    """A standard normal below a wall, nothing above it."""

    prior = StandardNormal(1)

    def log_joint(self, x: Tensor, z: Tensor) -> Tensor:
        assert torch.isfinite(z).all()
        return torch.where(z[..., 0] < 1.0, self.prior.log_prob(z), -torch.inf)


@pytest.mark.parametrize("sampler", ["ais", "smc"])
def test_proposals_outside_the_support_are_rejected_and_counted(sampler, generator):
    x, model = torch.zeros(2, 1, dtype=DOUBLE), Walled()
    if sampler == "ais":
        result = ais(model, x, Prior(model.prior), n_chains=2000, temperatures=4, n_leapfrog=3, generator=generator)
    else:
        result = smc(model, x, Prior(model.prior), n_particles=2048, generator=generator)
    assert (result.n_nonfinite > 0).all()
    alive = result.log_w > -torch.inf
    assert (result.z[..., 0][alive] < 1).all()
    truth = torch.full((2,), math.log(stats.norm.cdf(1.0)), dtype=DOUBLE)
    assert_within(result.log_evidence, truth, result.standard_error, rate=1e-6)


def test_a_chain_that_leaves_the_finite_numbers_stays_where_it_was(generator):
    model, x = Walled(), torch.zeros(1, 1, dtype=DOUBLE)
    path = Path(model, Prior(model.prior), x)
    state = path.evaluate(torch.linspace(-1, 0.5, 7, dtype=DOUBLE).reshape(7, 1, 1))
    step = torch.tensor([torch.finfo(DOUBLE).max], dtype=DOUBLE)
    move = transition(path, state, torch.tensor(1.0), step, n_leapfrog=3, source=as_source(generator))
    assert move.n_nonfinite.tolist() == [7]
    assert torch.equal(move.state.z, state.z)
    assert (move.acceptance == 0).all()


def test_unusable_weights_raise(generator):
    class Broken(Fixed):
        def log_joint(self, x: Tensor, z: Tensor) -> Tensor:
            return z[..., 0] * torch.nan

    x, initial = torch.zeros(2, 1, dtype=DOUBLE), Prior(StandardNormal(2))
    with pytest.raises(WeightError, match="NaN"):
        ais(Broken(), x, initial, n_chains=4, temperatures=2, generator=generator)
    with pytest.raises(WeightError, match="NaN"):
        smc(Broken(), x, initial, n_particles=32, generator=generator)


# --- bidirectional --------------------------------------------------------------------------------------------------


def test_bdmc_brackets_the_evidence(generator):
    model = linear_gaussian()
    x, z = model.simulate(60, generator=generator)
    truth = model.log_evidence(x).detach()
    sandwich = bdmc(model, x, z, Prior(model.prior), n_chains=2, temperatures=12, n_leapfrog=2, generator=generator)
    low, high = sandwich.lower - truth, sandwich.upper - truth
    assert low.mean() < -3 * low.std() / math.sqrt(60)
    assert high.mean() > 3 * high.std() / math.sqrt(60)
    assert low.max() < math.log(60 / 1e-6)
    torch.testing.assert_close(sandwich.gap, sandwich.upper - sandwich.lower)
    fine = bdmc(
        model, x[:8], z[:8], Prior(model.prior), n_chains=20, temperatures=100, n_leapfrog=4, generator=generator
    )
    assert fine.gap.abs().mean() < 0.25 * sandwich.gap.mean()


def test_the_reverse_weights_are_unbiased_for_the_inverse_evidence(generator):
    model = linear_gaussian()
    x, z = model.simulate(3000, generator=generator)
    truth, initial = model.log_evidence(x).detach(), Narrowing(model.posterior(x, inflate=0.6).detach())

    def ratio(start: Tensor) -> Tensor:
        # backwards the weights are of q0 over p: bounded, as q0 is the narrower
        settings = {"n_chains": 1, "temperatures": 3, "n_leapfrog": 2, "step_size": 0.3, "generator": generator}
        return (bdmc(model, x, start, initial, **settings).reverse.log_w[0] + truth).exp()

    assert_mean(ratio(z), 1.0, rate=1e-6)
    with pytest.raises(AssertionError, match="standard errors"):
        assert_mean(ratio(z + 0.15), 1.0, rate=1e-6)  # no draws from the posterior


def test_bdmc_wants_a_latent_for_each_observation(generator):
    model = linear_gaussian()
    with pytest.raises(ShapeError, match="same observations"):
        bdmc(model, torch.zeros(3, 3), torch.zeros(2, 2), Prior(model.prior), generator=generator)


# --- batches, chunks, cost --------------------------------------------------------------------------------------------


def test_observations_arrive_at_their_own_pace_and_then_cost_nothing(generator):
    model, x = Poisson(), torch.tensor([[3.0], [0.0], [400.0], [3.0]], dtype=DOUBLE)
    result = smc(model, x, Prior(model.prior), n_particles=512, generator=generator)
    assert result.n_temperatures[2] > 2 * result.n_temperatures[0]
    assert torch.equal(result.n_gradients, 512 * (1 + 3 * result.n_temperatures))
    probes = 2 + 4
    assert model.rows == result.n_gradients.sum() + probes
    assert_within(result.log_evidence, model.log_evidence(x), result.standard_error, rate=1e-6)


def test_ais_counts_its_gradients(generator):
    model, x = Poisson(), torch.tensor([[3.0], [0.0]], dtype=DOUBLE)
    result = ais(
        model, x, Prior(model.prior), n_chains=5, n_pilots=3, temperatures=7, n_leapfrog=4, generator=generator
    )
    assert result.n_gradients.tolist() == [8 * (1 + 7 * 4)] * 2
    assert model.rows == result.n_gradients.sum() + 2 + 4
    assert result.step_size.shape == (7, 2)


@pytest.mark.parametrize("sampler", ["ais", "smc"])
def test_chunks_bound_the_work_at_a_time(sampler, generator):
    model, x = Poisson(), torch.arange(30, dtype=DOUBLE).unsqueeze(-1) % 7
    path = Path(model, Prior(model.prior), x)
    rows = 72 if sampler == "ais" else 512
    each = memory.bytes_per_particle(path, rows, generator=generator)
    seen: list[tuple[int, int]] = []

    def run(n_chunks: int):
        settings = {"generator": seeded(5), "progress": lambda done, total, what: seen.append((done, total))}
        if sampler == "ais":
            most = each * 72 * -(-30 // n_chunks)
            return ais(
                model,
                x,
                path.initial,
                n_chains=64,
                n_pilots=8,
                temperatures=8,
                n_leapfrog=2,
                max_bytes=most,
                **settings,
            )
        return smc(model, x, path.initial, n_particles=512, max_bytes=each * 512 * -(-30 // n_chunks), **settings)

    whole, model.most_rows = run(1), 0
    seen.clear()
    parts = run(4)
    assert model.most_rows == rows * 8
    assert seen == sorted(seen)
    assert seen[-1][0] == seen[-1][1]
    assert parts.z.shape == whole.z.shape
    truth = model.log_evidence(x)
    for result in (whole, parts):
        assert_within(result.log_evidence, truth, result.standard_error, rate=1e-6)
    assert torch.equal(run(4).log_w, parts.log_w)
    assert not torch.equal(whole.log_w, parts.log_w)


def test_bdmc_works_in_chunks(generator):
    model = linear_gaussian()
    x, z = model.simulate(3, generator=generator)
    settings = {"n_chains": 20, "temperatures": 30, "n_leapfrog": 3, "generator": generator}
    sandwich = bdmc(model, x, z, Prior(model.prior), max_bytes=1, **settings)
    assert sandwich.forward.step_size.shape == (30, 3)
    assert (sandwich.upper - model.log_evidence(x)).abs().max() < 1
    assert (sandwich.lower - model.log_evidence(x)).abs().max() < 1


@pytest.mark.parametrize("sampler", ["ais", "smc", "bdmc"])
def test_same_seed_same_result(sampler):
    model = linear_gaussian()
    x, z = model.simulate(3, generator=seeded(1))

    def run(seed: int) -> Tensor:
        initial, generator = Prior(model.prior), seeded(seed)
        if sampler == "smc":
            return smc(model, x, initial, n_particles=64, generator=generator).log_w
        settings = {"n_chains": 4, "temperatures": 5, "n_leapfrog": 2, "generator": generator}
        return (
            ais(model, x, initial, **settings).log_w if sampler == "ais" else bdmc(model, x, z, initial, **settings).gap
        )

    assert torch.equal(run(3), run(3))
    assert not torch.equal(run(3), run(4))


@pytest.mark.parametrize("generators", [1, 2])
def test_stacked_batches(generators):
    model, x = linear_gaussian(), torch.randn(2, 5, 3, generator=seeded(0), dtype=DOUBLE)
    generator = tuple(seeded(i) for i in range(generators))
    annealing = ais(model, x, Prior(model.prior), n_chains=200, temperatures=20, n_leapfrog=3, generator=generator)
    particles = smc(model, x, Prior(model.prior), n_particles=1024, generator=generator)
    for result in (annealing, particles):
        assert result.z.shape[1:] == (2, 5, 2)
        assert_within(result.log_evidence, model.log_evidence(x).detach(), result.standard_error, rate=1e-6)


def test_single_precision_and_trainable_models(generator):
    model = linear_gaussian().float()
    x = torch.tensor([[1.0, -0.5, 0.3]])
    result = smc(model, x, Prior(model.prior), generator=generator)
    assert result.z.dtype == torch.float32
    assert result.log_w.dtype == DOUBLE
    assert not result.z.requires_grad
    assert model.log_noise.grad is None
    assert_within(result.log_evidence, model.log_evidence(x).detach(), result.standard_error, rate=1e-6)


class Bound:
    """A proposal made for its observations, which can be narrowed to some of them."""

    def __init__(self, q: Elliptical) -> None:
        self.q = q

    def draw(self, x: Tensor, k: int, *, generator) -> Draws:
        return self.q.draw(x, k, generator=generator)

    def log_prob(self, z: Tensor, x: Tensor) -> Tensor:
        return self.q.log_prob(z)


class Narrowing(Bound):
    def select(self, index: Tensor) -> Narrowing:
        root = type(self.q.root)(*(part.index_select(0, index) for part in self.q.root))
        return Narrowing(replace(self.q, loc=self.q.loc.index_select(0, index), root=root))


def test_a_start_bound_to_its_observations(generator):
    model = linear_gaussian()
    x, _ = model.simulate(6, generator=generator)
    x[0] *= 5
    initial = Narrowing(model.posterior(x, inflate=1.5).detach())
    result = smc(model, x, initial, n_particles=256, max_bytes=1, generator=generator)
    assert_within(result.log_evidence, model.log_evidence(x).detach(), result.standard_error, rate=1e-6)
    with pytest.raises(ShapeError, match="observations"):
        smc(model, x, Bound(initial.q), n_particles=256, max_bytes=1, generator=generator)


def test_an_exact_start_needs_one_temperature_and_gives_the_exact_evidence(generator):
    model = linear_gaussian()
    x, _ = model.simulate(4, generator=generator)
    result = smc(model, x, Narrowing(model.posterior(x).detach()), n_particles=64, generator=generator)
    assert result.n_temperatures.tolist() == [1] * 4
    torch.testing.assert_close(result.log_evidence, model.log_evidence(x).detach(), atol=1e-10, rtol=0)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu_within_its_memory():
    model, generator = linear_gaussian().float().cuda(), seeded(0, "cuda")
    x = torch.randn(2000, 3, generator=generator, device="cuda")
    truth, initial, most = model.log_evidence(x).detach(), Prior(model.prior), 2**26
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    result = smc(model, x, initial, n_particles=1024, max_bytes=most, generator=generator)
    kept = result.z.numel() * 4 + result.log_w.numel() * 8
    # the results of chunks are joined at the end, which holds them twice
    assert torch.cuda.max_memory_allocated() - before < 1.2 * most + 2 * kept
    assert_within(result.log_evidence, truth, result.standard_error, rate=1e-6)
    settings = {"n_chains": 100, "temperatures": 20, "n_leapfrog": 3, "generator": generator}
    annealing = ais(model, x[:50], initial, **settings)
    assert_within(annealing.log_evidence, truth[:50], annealing.standard_error, rate=1e-6)
    assert 0 < free_bytes("cuda") <= torch.cuda.mem_get_info()[1]


# --- the parts --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [linear, sigmoid, geometric])
@pytest.mark.parametrize("n", [1, 2, 100])
def test_schedules_rise_from_zero_to_one(make, n):
    t = make(n)
    assert t.shape == (n + 1,)
    assert t[0] == 0
    assert t[-1] == 1
    assert (t.diff() > 0).all()


def test_the_sigmoid_schedule_is_symmetric_and_fine_at_both_ends():
    t = sigmoid(10)
    torch.testing.assert_close(t, 1 - t.flip(0))
    assert t[1] == pytest.approx((torch.sigmoid(torch.tensor(-3.2)) - torch.sigmoid(torch.tensor(-4.0))) / 0.96402758)


def test_systematic_resampling_rounds_every_count(generator):
    log_w = torch.randn(50, 3, generator=generator, dtype=DOUBLE)
    ancestors = resampling.systematic(log_w, torch.rand(3, generator=generator, dtype=DOUBLE))
    for j in range(3):
        count, expected = torch.bincount(ancestors[:, j], minlength=50), 50 * log_w[:, j].softmax(0)
        assert ((count >= expected.floor()) & (count <= expected.ceil())).all()


def test_systematic_resampling_is_unbiased(generator):
    log_w = torch.tensor([0.0, 1.0, -1.0], dtype=DOUBLE).unsqueeze(-1).expand(3, 20_000)
    ancestors = resampling.systematic(log_w, torch.rand(20_000, generator=generator, dtype=DOUBLE))
    for i, share in enumerate(log_w[:, 0].softmax(0).tolist()):
        assert_mean((ancestors == i).double().mean(0), share, rate=1e-6)


def test_the_next_temperature_meets_its_target(generator):
    model, x = Poisson(), torch.tensor([[0.0], [9.0], [40.0], [1.0]], dtype=DOUBLE)
    path = Path(model, Prior(model.prior), x)
    state = path.evaluate(path.draw(1000, generator=generator).z)
    log_w, t = torch.randn(1000, 4, generator=generator, dtype=DOUBLE), torch.tensor([0.0, 0.2, 0.0, 0.9999]).double()
    to = resampling.next_temperature(state, log_w, t, 0.6)
    assert to[3] == 1
    assert (to > t).all()
    kept = resampling.conditional_ess(log_w, state.log_increment(t, to))
    torch.testing.assert_close(kept[1:3], torch.full((2,), 0.6, dtype=DOUBLE), atol=2e-3, rtol=0)
    assert kept[3] > 0.6


def test_conditional_ess_with_equal_weights_is_the_ess(generator):
    log_v = torch.randn(20, 3, generator=generator, dtype=DOUBLE)
    equal = resampling.conditional_ess(torch.zeros(20, 3, dtype=DOUBLE), log_v)
    v = log_v.exp()
    torch.testing.assert_close(equal, v.sum(0) ** 2 / (20 * v.square().sum(0)))
    torch.testing.assert_close(resampling.relative_ess(log_v), equal)


def test_the_covariance_root_is_that_of_the_weighted_particles(generator):
    z = torch.randn(60, 1, 2, generator=generator, dtype=DOUBLE) @ torch.tensor([[1.0, 0.5], [0.0, 0.1]], dtype=DOUBLE)
    log_w = torch.randn(60, 1, generator=generator, dtype=DOUBLE)
    root, weight = resampling.covariance_root(z, log_w)[0], log_w[:, 0].softmax(0)
    share = 2 / (2 + 1 / weight.square().sum())
    weighted = torch.cov(z[:, 0].mT, correction=0, aweights=weight)
    torch.testing.assert_close(root @ root.mT, (1 - share) * weighted + share * torch.diag(z[:, 0].var(0)))
    assert (root.triu(1) == 0).all()


def test_the_covariance_root_survives_few_particles(generator):
    z = torch.randn(8, 3, 4, generator=generator, dtype=DOUBLE)
    log_w = torch.zeros(8, 3, dtype=DOUBLE)
    log_w[1:, 1], log_w[:, 2] = -torch.inf, -torch.inf  # one left, none left
    root = resampling.covariance_root(z, log_w)
    assert torch.isfinite(root).all()
    assert (root.diagonal(dim1=-2, dim2=-1) > 0.1).all()


def test_the_standard_error_is_the_delta_method(generator):
    w = torch.rand(30, 2, generator=generator, dtype=DOUBLE)
    torch.testing.assert_close(log_standard_error(w.log() - 900), w.std(0) / math.sqrt(30) / w.mean(0))
    assert log_standard_error(w[:1].log()).isnan().all()


def test_memory_is_measured(monkeypatch, generator):
    assert 0 < free_bytes("cpu") < 2**50
    model = linear_gaussian()
    path = Path(model, Prior(model.prior), torch.zeros(5, 3, dtype=DOUBLE))
    small, states = memory.bytes_per_particle(path, 1, generator=generator), 24 * 2 * 8
    assert states < small < 4096
    monkeypatch.setattr(memory, "free_bytes", lambda device: 10 * small)
    assert memory.default_budget(torch.device("cpu")) == 5 * small
    assert [p.x.shape[0] for p in memory.chunks(path, 2, generator=generator, max_bytes=None)] == [2, 2, 1]
    assert [p.x.shape[0] for p in memory.chunks(path, 2, generator=generator, max_bytes=1)] == [1] * 5


def test_a_flat_start_has_no_gradient():
    class Flat(Bound):
        def log_prob(self, z: Tensor, x: Tensor) -> Tensor:
            return torch.zeros(z.shape[:-1], dtype=z.dtype)

    path = Path(Poisson(), Flat(None), torch.ones(1, 1, dtype=DOUBLE))  # type: ignore[arg-type]
    assert (path.evaluate(torch.zeros(3, 1, 1, dtype=DOUBLE)).grad_q == 0).all()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"n_particles": 100}, "n_particles=96"),
        ({"n_particles": 16}, "n_particles=32"),
        ({"n_islands": 5}, "even"),
        ({"ess_target": 1.0}, "ess_target=1.0"),
        ({"n_leapfrog": 0}, "n_leapfrog=0"),
        ({"max_bytes": 0}, "max_bytes=0"),
    ],
)
def test_smc_settings_that_have_no_meaning(settings, message, generator):
    with pytest.raises(SettingError, match=message):
        smc(Poisson(), torch.ones(2, 1, dtype=DOUBLE), Prior(Poisson.prior), generator=generator, **settings)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"temperatures": torch.tensor([0.0, 0.5, 0.4, 1.0])}, "increase strictly"),
        ({"temperatures": torch.tensor([0.1, 1.0])}, "increase strictly"),
        ({"temperatures": 0}, "temperatures=0"),
        ({"n_chains": 0}, "n_chains=0"),
        ({"step_size": torch.ones(3, 2)}, r"\(500, 2\)"),
    ],
)
def test_ais_settings_that_have_no_meaning(settings, message, generator):
    with pytest.raises(SettingError, match=message):
        ais(Poisson(), torch.ones(2, 1, dtype=DOUBLE), Prior(Poisson.prior), generator=generator, **settings)


def test_bad_shapes_are_named(generator):
    with pytest.raises(ShapeError, match=r"x\[None\]"):
        smc(Poisson(), torch.ones(3, dtype=DOUBLE), Prior(Poisson.prior), generator=generator)
    with pytest.raises(SettingError, match="first=2"):
        geometric(10, 2.0)
    assert schedules.as_schedule(7).shape == (8,)
