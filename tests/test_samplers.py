"""Samplers against closed forms and quadrature, with planted errors that must be detected."""

from __future__ import annotations

import math

import pytest
import torch
from scipy import stats
from torch import Tensor

from checks import assert_mean, assert_within, chi_square_rate
from sampler_toys import CASES, DOUBLE, Banana, Bimodal, Everywhere, Nominal, Poisson, Selectable, linear_gaussian
from vaerdict.core import DivergenceError, ShapeError, WeightError, log_mean_exp
from vaerdict.distributions import Diagonal, Elliptical, StandardNormal
from vaerdict.models.ppca import PPCA
from vaerdict.noise import as_source
from vaerdict.proposals import Mixture, Prior
from vaerdict.samplers import (
    AnnealingPath,
    PathState,
    ais,
    annealed,
    bdmc,
    geometric_schedule,
    hmc,
    linear_schedule,
    log_standard_error,
    sequential,
    sigmoid_schedule,
    smc,
    transition,
)


@pytest.fixture(params=CASES)
def case(request):
    model, x = CASES[request.param]
    x = torch.tensor(x, dtype=DOUBLE)
    return model, x, model.log_evidence(x).detach()


# --- evidence -------------------------------------------------------------------------------------------------------


def test_importance_sampling_estimates_the_evidence(case, generator):
    model, x, truth = case
    path = AnnealingPath(model, Prior(model.prior), x)
    log_w = path.evaluate(path.draw(20_000, generator=generator).z).log_increment(torch.tensor(0.0), torch.tensor(1.0))
    assert_within(log_mean_exp(log_w), truth, log_standard_error(log_w), rate=1e-6)


def test_ais_estimates_the_evidence(case, generator):
    model, x, truth = case
    result = ais(model, x, Prior(model.prior), n_chains=400, temperatures=20, n_leapfrog=3, generator=generator)
    assert result.z.shape == (400, 3, model.prior.event_shape[0])
    assert result.log_w.dtype == DOUBLE
    assert (result.standard_error < 0.1).all()
    assert_within(result.log_evidence, truth, result.standard_error, rate=1e-6)


def test_smc_estimates_the_evidence(case, generator):
    model, x, truth = case
    result = smc(model, x, Prior(model.prior), n_particles=2048, generator=generator)
    assert result.z.shape == (2048, 3, model.prior.event_shape[0])
    assert (result.standard_error < 0.1).all()
    assert_within(result.log_evidence, truth, result.standard_error, rate=1e-6)


def test_smc_particles_have_the_moments_of_the_posterior(generator):
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
    # with 16 islands the scores have a Student-t distribution with 15 degrees of freedom
    uniform = torch.from_numpy(stats.t.cdf(score.numpy(), 15)).clamp(1e-12, 1 - 1e-12)
    assert chi_square_rate(torch.special.ndtri(uniform)) > 1e-6
    assert chi_square_rate(torch.special.ndtri(uniform) * 1.6) < 1e-6
    assert 0.8 < score.std() < 1.3
    assert abs(score.mean()) < 0.45  # bias of the logarithm and of adaptation: O(N^-1/2)


def test_repeated_moves_explore_a_curved_posterior(generator):
    model, x = Banana(), torch.tensor([[0.0, 0.02]], dtype=DOUBLE)
    log_evidence, second = model.moments(x)

    def run(max_moves: int) -> tuple[Tensor, Tensor]:
        result = smc(
            model, x.expand(150, 2), Prior(model.prior), n_particles=512, max_moves=max_moves, generator=generator
        )
        assert_mean((result.log_evidence - log_evidence).exp(), 1.0, rate=1e-6)
        assert (result.decorrelated < 0.6).all()  # at the sharp end of the path eight moves are not enough
        return result.decorrelated, (result.log_w.softmax(0) * result.z[..., 0].square()).sum(0) - second

    (once, error), (repeated, smaller) = run(1), run(4)
    assert repeated.mean() > once.mean()
    # the mean squared error is a third; its ratio has a standard error of a fifth, so this fails once in 10,000 runs
    assert smaller.square().mean() < 0.7 * error.square().mean()
    assert_mean(smaller, 0.0, rate=1e-6)


def test_one_move_decorrelates_a_gaussian(generator):
    model = linear_gaussian()
    x, _ = model.simulate(5, generator=generator)
    result = smc(model, x, Prior(model.prior), n_particles=512, n_leapfrog=5, generator=generator)
    assert (result.decorrelated == 1).all()
    assert torch.equal(result.n_gradients, 512 * (1 + 5 * result.n_temperatures))


def test_tempered_populations_have_the_moments_of_their_temperature(generator, monkeypatch):
    model, x = linear_gaussian(), torch.tensor([[1.0, -0.5, 0.3]], dtype=DOUBLE).expand(60, 3)
    monkeypatch.setattr(sequential, "next_temperature", lambda state, log_w, t, target: t + 0.25)
    result = smc(model, x, Prior(model.prior), n_particles=512, keep=(1.0, 0.3, 0.5), generator=generator)
    assert result.tempered.shape == (3, 512, 60, 2)

    def assert_moments(z: Tensor, t: float) -> None:
        at_t = PPCA(model.weight, model.noise_sd.detach() / math.sqrt(t), model.mean).posterior(x).detach()
        for mean, sample in zip(at_t.loc[0], z.mean(0).unbind(-1), strict=True):
            assert_mean(sample, mean.item(), rate=1e-6)
        for variance, sample in zip(at_t.covariance()[0].diagonal(), z.var(0).unbind(-1), strict=True):
            assert_mean(sample, variance.item(), rate=1e-6)

    for z, t in zip(result.tempered, (1.0, 0.5, 0.5), strict=True):
        assert_moments(z, t)
    with pytest.raises(AssertionError, match="standard errors"):
        assert_moments(result.tempered[1], 0.45)


# --- annealing is unbiased, and planted errors are detected -----------------------------------------------------------


def annealing_ratio(generator, **settings) -> Tensor:
    """Weights over the true evidence, with mean one. Few temperatures make errors visible."""
    model, x = Poisson(), torch.tensor([[0.0], [9.0]], dtype=DOUBLE)
    settings = {"n_chains": 8000, "temperatures": 5, "n_leapfrog": 3, "step_size": 0.4} | settings
    result = ais(model, x, Prior(model.prior), generator=generator, **settings)
    return (result.log_w - model.log_evidence(x)).exp()


def assert_unbiased(ratio: Tensor) -> None:
    # the likelihoods are at most 1 and 0.13 here, which bounds the ratios
    assert ratio.max() < 8, f"a weight of {ratio.max():.1f} exceeds the bound, so that standard errors are invalid"
    for column in ratio.unbind(-1):
        assert_mean(column, 1.0, rate=1e-6)


@pytest.mark.parametrize(
    "schedule", [linear_schedule(5), sigmoid_schedule(5), geometric_schedule(5, 0.05), linear_schedule(1)]
)
def test_ais_is_unbiased(schedule, generator):
    assert_unbiased(annealing_ratio(generator, temperatures=schedule))


def test_ais_with_fixed_step_sizes_is_unbiased(generator):
    assert_unbiased(annealing_ratio(generator, step_size=torch.full((5, 2), 0.3, dtype=DOUBLE)))


PLANTED = {
    "wrong sign": ("log_increment", lambda self, a, b: (a - b) * (self.log_p - self.log_q)),
    "start forgotten": ("log_increment", lambda self, a, b: (b - a) * self.log_p),
    "wrong end first": ("log_density", lambda self, t: (1 - t) * self.log_p + t * self.log_q),
    "start not cooled": ("log_density", lambda self, t: self.log_q + t * self.log_p),
    "normalisation": ("log_increment", lambda self, a, b: (b - a) * (self.log_p - self.log_q + 0.1)),
}


@pytest.mark.parametrize("planted", PLANTED)
def test_planted_tempering_errors_are_detected(planted, generator, monkeypatch):
    name, wrong = PLANTED[planted]
    monkeypatch.setattr(PathState, name, wrong)
    with pytest.raises(AssertionError, match="standard errors"):
        assert_unbiased(annealing_ratio(generator))


def test_moving_one_temperature_late_is_detected(generator, monkeypatch):
    schedule = linear_schedule(5)

    def late(path, state, t, step, **settings):
        return transition(path, state, schedule[torch.searchsorted(schedule, t) - 1], step, **settings)

    monkeypatch.setattr(annealed, "transition", late)
    with pytest.raises(AssertionError, match="standard errors"):
        assert_unbiased(annealing_ratio(generator, temperatures=schedule))


def test_a_step_size_that_depends_on_the_chain_is_detected(generator, monkeypatch):
    def state_dependent(path, state, t, step, **settings):
        return transition(path, state, t, torch.where(state.z[..., 0] < 1.0, 0.02, 0.9), **settings)

    monkeypatch.setattr(annealed, "transition", state_dependent)
    with pytest.raises(AssertionError, match="standard errors"):
        assert_unbiased(annealing_ratio(generator))


def test_step_sizes_follow_the_acceptance_of_the_pilots_alone(generator, monkeypatch):
    """If all chains accept and no pilot does, steps shrink by the same factor at every temperature."""

    def reported(*arguments, **settings):
        move = transition(*arguments, **settings)
        return move._replace(acceptance=(torch.arange(9) < 5).double()[:, None])

    monkeypatch.setattr(annealed, "transition", reported)
    settings = {"n_chains": 5, "n_pilots": 4, "temperatures": 4, "n_leapfrog": 1, "step_size": 0.3}
    result = ais(Poisson(), torch.zeros(1, 1, dtype=DOUBLE), Prior(Poisson.prior), generator=generator, **settings)
    factor = math.exp(-annealed._GAIN * annealed._TARGET_ACCEPTANCE)
    torch.testing.assert_close(result.step_size[:, 0], 0.3 * factor ** torch.arange(4, dtype=DOUBLE))
    assert result.acceptance.tolist() == [1.0]


@pytest.mark.parametrize("planted", ["wrong sign", "start forgotten", "normalisation"])
def test_planted_errors_are_detected_with_smc(planted, generator, monkeypatch):
    model, x = Poisson(), torch.tensor([[0.0], [9.0]], dtype=DOUBLE).repeat(8, 1)
    monkeypatch.setattr(PathState, *PLANTED[planted])
    with pytest.raises((AssertionError, WeightError)):
        _assert_smc_estimates_the_evidence(model, x, generator)


def test_resetting_weights_without_resampling_is_detected(generator, monkeypatch):
    model, x = Poisson(), torch.tensor([[0.0], [9.0]], dtype=DOUBLE).repeat(8, 1)
    monkeypatch.setattr(sequential, "_longest_step", lambda settings: 0.01)  # longer moves would hide the error
    _assert_smc_estimates_the_evidence(model, x, generator)
    monkeypatch.setattr(sequential, "systematic", lambda log_w, offset: _identity(log_w))
    with pytest.raises(AssertionError, match="standard errors"):
        _assert_smc_estimates_the_evidence(model, x, generator)


def _identity(log_w: Tensor) -> Tensor:
    return torch.arange(log_w.shape[0]).reshape(-1, *(1,) * (log_w.dim() - 1)).expand(log_w.shape)


def _assert_smc_estimates_the_evidence(model, x: Tensor, generator) -> None:
    result = smc(model, x, Prior(model.prior), n_particles=1024, generator=generator)
    pooled = result.standard_error.square().mean().sqrt() / math.sqrt(x.shape[0])
    assert_within((result.log_evidence - model.log_evidence(x)).mean(), torch.tensor(0.0), pooled, rate=1e-6)


def test_a_stratified_start_is_weighted_by_its_realised_shares(generator):
    model, x = Poisson(), torch.full((4000, 1), 2.0, dtype=DOUBLE)
    far = Elliptical(torch.full((1, 1), 2.0, dtype=DOUBLE), Diagonal(torch.full((1, 1), 1.0, dtype=DOUBLE)))
    # the shares of 3 draws cannot be 0.2 and 0.8: they are 1/3 and 2/3
    initial = Mixture({"PRIOR": Prior(model.prior), "far": Everywhere(far)}, {"PRIOR": 0.2, "far": 0.8})

    def ratio(start) -> Tensor:
        settings = {"n_chains": 3, "temperatures": 2, "n_leapfrog": 2, "n_pilots": 2, "generator": generator}
        return (ais(model, x, start, **settings).log_evidence - model.log_evidence(x[:1])).exp()

    assert_mean(ratio(initial), 1.0, rate=1e-6)
    with pytest.raises(AssertionError, match="standard errors"):
        assert_mean(ratio(Nominal(initial)), 1.0, rate=1e-6)


# --- moves ------------------------------------------------------------------------------------------------------------


class Fixed:
    """A normalised target that ignores x: Gumbel in two independent coordinates of different scale."""

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
    path = AnnealingPath(model, Prior(model.prior), x)
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
    assert 0.5 < acceptance < 0.8  # the correction matters


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
def test_wrong_metropolis_corrections_are_detected(wrong, generator, monkeypatch):
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

    path = AnnealingPath(Narrow(), start, torch.zeros(1, 1, dtype=DOUBLE))
    mean, sd = -1.0 / 2.2, 2.2**-0.5
    state = path.evaluate(mean + sd * torch.randn(20_000, 1, 1, generator=generator, dtype=DOUBLE))
    for _ in range(4):
        state = transition(
            path, state, torch.tensor(0.4), torch.tensor([0.9]), n_leapfrog=2, source=as_source(generator)
        ).state
    score = (state.z - mean) / sd
    assert_mean(score, 0.0, rate=1e-6)
    assert_mean(score.square(), 1.0, rate=1e-6)


class Still:
    """A standard normal for any x."""

    prior = StandardNormal(1)

    def log_joint(self, x: Tensor, z: Tensor) -> Tensor:
        return self.prior.log_prob(z)


def test_no_chain_stays_on_a_periodic_orbit(generator, monkeypatch):
    """On a standard normal a leapfrog step turns phase space by an angle of cosine 1 - step^2 / 2: here a sixth."""
    model = Still()
    path = AnnealingPath(model, Prior(model.prior), torch.zeros(1, 1, dtype=DOUBLE))
    state = path.evaluate(torch.randn(2000, 1, 1, generator=generator, dtype=DOUBLE))
    settings = {"n_leapfrog": 6, "source": as_source(generator)}
    moved = transition(path, state, torch.tensor(1.0), torch.tensor([1.0]), **settings)
    assert ((moved.state.z - state.z).abs() > 0.01).double().mean() > 0.7
    monkeypatch.setattr(hmc, "_JITTER", 0.0)
    back = transition(path, state, torch.tensor(1.0), torch.tensor([1.0]), **settings)
    torch.testing.assert_close(back.state.z, state.z, rtol=0, atol=1e-9)


def test_leapfrog_is_reversible_and_second_order(generator):
    model = Bimodal()
    path = AnnealingPath(model, Prior(model.prior), torch.tensor([[1.0]], dtype=DOUBLE))
    t, state = torch.tensor(0.7), path.evaluate(torch.randn(50, 1, 2, generator=generator, dtype=DOUBLE))
    velocity = torch.randn(50, 1, 2, generator=generator, dtype=DOUBLE)

    def run(step: float, n: int, begin: PathState, v: Tensor) -> tuple[PathState, Tensor]:
        return hmc.leapfrog(path, begin, v, t, torch.full((50, 1), step, dtype=DOUBLE), n, ROOT)[:2]

    end, v = run(0.02, 8, state, velocity)
    back, w = run(0.02, 8, end, -v)
    torch.testing.assert_close(back.z, state.z, atol=1e-10, rtol=0)
    torch.testing.assert_close(-w, velocity, atol=1e-9, rtol=0)

    def error(step: float, n: int) -> float:
        end, v = run(step, n, state, velocity)
        return hmc.log_acceptance(state.log_density(t), end.log_density(t), velocity, v).abs().median().item()

    assert 3.2 < error(0.02, 10) / error(0.01, 20) < 4.8


def test_stored_gradients_are_those_of_the_tempered_density():
    model = Bimodal()
    path = AnnealingPath(model, Prior(model.prior), torch.tensor([[1.0], [0.2]], dtype=DOUBLE))
    t = torch.tensor([0.3, 0.8], dtype=DOUBLE)
    z = torch.tensor([[[0.4, -1.0], [1.2, 0.3]]], dtype=DOUBLE)
    numeric = torch.autograd.functional.jacobian(lambda v: path_density(path, v, t).sum(), z)
    torch.testing.assert_close(path.evaluate(z).gradient(t), numeric)


def path_density(path: AnnealingPath, z: Tensor, t: Tensor) -> Tensor:
    return (1 - t) * path.initial.log_prob(z, path.x) + t * path.model.log_joint(path.prepared_x, z)


class Truncated(Fixed):
    """A standard normal truncated above 1."""

    prior = StandardNormal(1)

    def log_joint(self, x: Tensor, z: Tensor) -> Tensor:
        assert torch.isfinite(z).all()
        return torch.where(z[..., 0] < 1.0, self.prior.log_prob(z), -torch.inf)


@pytest.mark.parametrize("sampler", ["ais", "smc"])
def test_proposals_outside_the_support_are_rejected_and_counted(sampler, generator):
    x, model = torch.zeros(2, 1, dtype=DOUBLE), Truncated()
    if sampler == "ais":
        result = ais(model, x, Prior(model.prior), n_chains=2000, temperatures=4, n_leapfrog=3, generator=generator)
    else:
        result = smc(model, x, Prior(model.prior), n_particles=2048, generator=generator)
    assert (result.n_nonfinite > 0).all()
    alive = result.log_w > -torch.inf
    assert (result.z[..., 0][alive] < 1).all()
    truth = torch.full((2,), math.log(stats.norm.cdf(1.0)), dtype=DOUBLE)
    assert_within(result.log_evidence, truth, result.standard_error, rate=1e-6)


def test_a_chain_that_becomes_non_finite_is_not_moved(generator):
    model, x = Truncated(), torch.zeros(1, 1, dtype=DOUBLE)
    path = AnnealingPath(model, Prior(model.prior), x)
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


def test_smc_can_drop_failed_observations_and_continue_with_the_others(generator, monkeypatch):
    model = linear_gaussian()
    x, _ = model.simulate(6, generator=generator)
    settings = {"n_particles": 512, "n_islands": 16}
    x[1], x[4] = 1e200, 30.0  # overflows, and far from the prior
    steps = smc(model, x[[0, 2, 3, 5, 4]], Prior(model.prior), generator=generator, **settings).n_temperatures
    monkeypatch.setattr(sequential, "_MAX_TEMPERATURES", int(steps[:4].max()) + 3)
    assert steps[4] > steps[:4].max() + 6
    result = smc(model, x, Prior(model.prior), strict=False, keep=(1.0,), generator=generator, **settings)
    assert result.log_evidence.isnan().tolist() == [False, True, False, False, True, False]
    assert torch.equal(result.tempered[0].isnan().any(0).any(-1), result.log_evidence.isnan())
    i = [0, 2, 3, 5]
    assert_within(result.log_evidence[i], model.log_evidence(x)[i].detach(), result.standard_error[i], rate=1e-6)
    with pytest.raises(WeightError, match=r"1 observations have no particle with positive weight \(at 1\)"):
        smc(model, x, Prior(model.prior), generator=generator, **settings)
    with pytest.raises(DivergenceError, match="1 observations did not reach the posterior within"):
        smc(model, x[[0, 4]], Prior(model.prior), generator=generator, **settings)


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
    assert sandwich.forward.standard_error.isfinite().all()
    assert (
        sandwich.reverse.standard_error.isnan().all()
    )  # with a common start the spread of the chains is not the error
    fine = bdmc(
        model, x[:8], z[:8], Prior(model.prior), n_chains=20, temperatures=100, n_leapfrog=4, generator=generator
    )
    assert fine.gap.abs().mean() < 0.25 * sandwich.gap.mean()


def test_the_reverse_weights_are_unbiased_for_the_inverse_evidence(generator):
    model = linear_gaussian()
    x, z = model.simulate(3000, generator=generator)
    truth, initial = model.log_evidence(x).detach(), Selectable(model.posterior(x, inflate=0.6).detach())

    def ratio(start: Tensor) -> Tensor:
        # reverse weights are of q0 over p, which is bounded because q0 is narrower
        settings = {"n_chains": 1, "temperatures": 3, "n_leapfrog": 2, "step_size": 0.3, "generator": generator}
        return (bdmc(model, x, start, initial, **settings).reverse.log_w[0] + truth).exp()

    assert_mean(ratio(z), 1.0, rate=1e-6)
    with pytest.raises(AssertionError, match="standard errors"):
        assert_mean(ratio(z + 0.15), 1.0, rate=1e-6)  # not draws from the posterior


def test_bdmc_needs_one_latent_per_observation(generator):
    model = linear_gaussian()
    with pytest.raises(ShapeError, match="same observations"):
        bdmc(model, torch.zeros(3, 3), torch.zeros(2, 2), Prior(model.prior), generator=generator)
