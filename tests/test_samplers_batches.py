"""Samplers on batches: chunks, cost, devices, starts, schedules and weights."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from checks import assert_mean, assert_within
from sampler_toys import DOUBLE, Banana, Bound, Poisson, Selectable, linear_gaussian
from vaerdict.core import SettingError, ShapeError
from vaerdict.noise import seeded
from vaerdict.proposals import Prior
from vaerdict.samplers import (
    AnnealingPath,
    ais,
    bdmc,
    chunks,
    geometric_schedule,
    linear_schedule,
    log_standard_error,
    sigmoid_schedule,
    smc,
    tempering,
    weights,
)

# --- batches, chunks, cost --------------------------------------------------------------------------------------------


def test_finished_observations_cost_nothing(generator):
    model, x = Poisson(), torch.tensor([[3.0], [0.0], [400.0], [3.0]], dtype=DOUBLE)
    result = smc(model, x, Prior(model.prior), n_particles=512, generator=generator)
    assert result.n_temperatures[2] > 2 * result.n_temperatures[0]
    assert torch.equal(result.n_gradients, 512 * (1 + 6 * result.n_temperatures))
    n_memory_test = 2 + 4
    assert model.rows == result.n_gradients.sum() + n_memory_test
    assert_within(result.log_evidence, model.log_evidence(x), result.standard_error, rate=1e-6)


def test_decorrelated_observations_cost_nothing(generator):
    model, x = Banana(), torch.tensor([[0.0, 0.02], [0.0, 3.0], [1.0, 0.02]], dtype=DOUBLE)
    result = smc(model, x, Prior(model.prior), n_particles=512, generator=generator)
    n_moves = (result.n_gradients // 512 - 1) // 6
    assert n_moves[1] == result.n_temperatures[1]
    assert (n_moves > 2 * result.n_temperatures)[[0, 2]].all()
    assert (n_moves <= 4 * (result.n_temperatures + 1)).all()
    assert model.rows == result.n_gradients.sum() + 2 + 4
    assert_within(result.log_evidence, model.moments(x)[0], result.standard_error, rate=1e-6)


def test_ais_counts_its_gradients(generator):
    model, x = Poisson(), torch.tensor([[3.0], [0.0]], dtype=DOUBLE)
    result = ais(
        model, x, Prior(model.prior), n_chains=5, n_pilots=3, temperatures=7, n_leapfrog=4, generator=generator
    )
    assert result.n_gradients.tolist() == [8 * (1 + 7 * 4)] * 2
    assert model.rows == result.n_gradients.sum() + 2 + 4
    assert result.step_size.shape == (7, 2)


@pytest.mark.parametrize("sampler", ["ais", "smc"])
def test_chunks_bound_the_number_of_rows(sampler, generator):
    model, x = Poisson(), torch.arange(30, dtype=DOUBLE).unsqueeze(-1) % 7
    path = AnnealingPath(model, Prior(model.prior), x)
    rows = 72 if sampler == "ais" else 512
    each = chunks.bytes_per_particle(path, rows, generator=generator)
    reports: list[tuple[int, int]] = []

    def run(n_chunks: int):
        settings = {"generator": seeded(5), "progress": lambda done, total, what: reports.append((done, total))}
        if sampler == "ais":
            settings |= {"n_chains": 64, "n_pilots": 8, "temperatures": 8, "n_leapfrog": 2}
            return ais(model, x, path.initial, max_bytes=each * 72 * -(-30 // n_chunks), **settings)
        return smc(model, x, path.initial, n_particles=512, max_bytes=each * 512 * -(-30 // n_chunks), **settings)

    one_chunk, model.max_rows = run(1), 0
    reports.clear()
    four_chunks = run(4)
    assert model.max_rows == rows * 8
    assert reports == sorted(reports)
    assert reports[-1][0] == reports[-1][1]
    assert four_chunks.z.shape == one_chunk.z.shape
    truth = model.log_evidence(x)
    for result in (one_chunk, four_chunks):
        assert_within(result.log_evidence, truth, result.standard_error, rate=1e-6)
    assert torch.equal(run(4).log_w, four_chunks.log_w)
    assert not torch.equal(one_chunk.log_w, four_chunks.log_w)


def test_bdmc_works_in_chunks(generator):
    model = linear_gaussian()
    x, z = model.simulate(3, generator=generator)
    settings = {"n_chains": 20, "temperatures": 30, "n_leapfrog": 3, "generator": generator}
    sandwich = bdmc(model, x, z, Prior(model.prior), max_bytes=1, **settings)
    assert sandwich.forward.step_size.shape == (30, 3)
    assert (sandwich.upper - model.log_evidence(x)).abs().max() < 1
    assert (sandwich.lower - model.log_evidence(x)).abs().max() < 1


@pytest.mark.parametrize("sampler", ["ais", "smc", "bdmc"])
def test_results_are_reproducible(sampler):
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
    particles = smc(model, x, Prior(model.prior), n_particles=1024, keep=(0.1, 1.0), generator=generator)
    assert particles.tempered.shape == (2, 1024, 2, 5, 2)
    assert particles.decorrelated.shape == (2, 5)
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


def test_a_start_for_fixed_observations_needs_select(generator):
    model = linear_gaussian()
    x, _ = model.simulate(6, generator=generator)
    x[0] *= 5
    initial = Selectable(model.posterior(x, inflate=1.5).detach())
    result = smc(model, x, initial, n_particles=256, keep=(1.0,), max_bytes=1, generator=generator)
    assert result.tempered.shape == (1, 256, 6, 2)
    assert_within(result.log_evidence, model.log_evidence(x).detach(), result.standard_error, rate=1e-6)
    with pytest.raises(ShapeError, match="observations"):
        smc(model, x, Bound(initial.q), n_particles=256, max_bytes=1, generator=generator)


def test_an_exact_start_needs_one_temperature_and_gives_the_exact_evidence(generator):
    model = linear_gaussian()
    x, _ = model.simulate(4, generator=generator)
    result = smc(model, x, Selectable(model.posterior(x).detach()), n_particles=64, generator=generator)
    assert result.n_temperatures.tolist() == [1] * 4
    torch.testing.assert_close(result.log_evidence, model.log_evidence(x).detach(), atol=1e-10, rtol=0)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu_within_its_memory():
    model, generator = linear_gaussian().float().cuda(), seeded(0, "cuda")
    x = torch.randn(2000, 3, generator=generator, device="cuda")
    truth, initial, max_bytes = model.log_evidence(x).detach(), Prior(model.prior), 2**26
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    result = smc(model, x, initial, n_particles=1024, max_bytes=max_bytes, generator=generator)
    result_bytes = result.z.numel() * 4 + result.log_w.numel() * 8
    # the results of chunks exist twice while they are concatenated
    assert torch.cuda.max_memory_allocated() - before < 1.2 * max_bytes + 2 * result_bytes
    assert_within(result.log_evidence, truth, result.standard_error, rate=1e-6)
    settings = {"n_chains": 100, "temperatures": 20, "n_leapfrog": 3, "generator": generator}
    annealing = ais(model, x[:50], initial, **settings)
    assert_within(annealing.log_evidence, truth[:50], annealing.standard_error, rate=1e-6)
    assert 0 < chunks.free_bytes("cuda") <= torch.cuda.mem_get_info()[1]


# --- schedules, weights, memory --------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [linear_schedule, sigmoid_schedule, geometric_schedule])
@pytest.mark.parametrize("n", [1, 2, 100])
def test_schedules_rise_from_zero_to_one(make, n):
    t = make(n)
    assert t.shape == (n + 1,)
    assert t[0] == 0
    assert t[-1] == 1
    assert (t.diff() > 0).all()


def test_the_sigmoid_schedule_is_symmetric_and_fine_at_both_ends():
    t = sigmoid_schedule(10)
    torch.testing.assert_close(t, 1 - t.flip(0))
    assert t[1] == pytest.approx((torch.sigmoid(torch.tensor(-3.2)) - torch.sigmoid(torch.tensor(-4.0))) / 0.96402758)


def test_systematic_counts_are_rounded_expectations(generator):
    log_w = torch.randn(50, 3, generator=generator, dtype=DOUBLE)
    ancestors = weights.systematic(log_w, torch.rand(3, generator=generator, dtype=DOUBLE))
    for j in range(3):
        count, expected = torch.bincount(ancestors[:, j], minlength=50), 50 * log_w[:, j].softmax(0)
        assert ((count >= expected.floor()) & (count <= expected.ceil())).all()


def test_systematic_resampling_is_unbiased(generator):
    log_w = torch.tensor([0.0, 1.0, -1.0], dtype=DOUBLE).unsqueeze(-1).expand(3, 20_000)
    ancestors = weights.systematic(log_w, torch.rand(20_000, generator=generator, dtype=DOUBLE))
    for i, weight in enumerate(log_w[:, 0].softmax(0).tolist()):
        assert_mean((ancestors == i).double().mean(0), weight, rate=1e-6)


def test_the_next_temperature_meets_its_target(generator):
    model, x = Poisson(), torch.tensor([[0.0], [9.0], [40.0], [1.0]], dtype=DOUBLE)
    path = AnnealingPath(model, Prior(model.prior), x)
    state = path.evaluate(path.draw(1000, generator=generator).z)
    log_w, t = torch.randn(1000, 4, generator=generator, dtype=DOUBLE), torch.tensor([0.0, 0.2, 0.0, 0.9999]).double()
    t_next = weights.next_temperature(state, log_w, t, 0.6)
    assert t_next[3] == 1
    assert (t_next > t).all()
    ess = weights.conditional_ess(log_w, state.log_increment(t, t_next))
    torch.testing.assert_close(ess[1:3], torch.full((2,), 0.6, dtype=DOUBLE), atol=2e-3, rtol=0)
    assert ess[3] > 0.6


def test_conditional_ess_with_equal_weights_is_the_ess(generator):
    log_v = torch.randn(20, 3, generator=generator, dtype=DOUBLE)
    equal = weights.conditional_ess(torch.zeros(20, 3, dtype=DOUBLE), log_v)
    v = log_v.exp()
    torch.testing.assert_close(equal, v.sum(0) ** 2 / (20 * v.square().sum(0)))
    torch.testing.assert_close(weights.relative_ess(log_v), equal)


def test_the_covariance_root_is_that_of_the_weighted_particles(generator):
    z = torch.randn(60, 1, 2, generator=generator, dtype=DOUBLE) @ torch.tensor([[1.0, 0.5], [0.0, 0.1]], dtype=DOUBLE)
    log_w = torch.randn(60, 1, generator=generator, dtype=DOUBLE)
    root, weight = weights.covariance_root(z, log_w)[0], log_w[:, 0].softmax(0)
    intensity = 2 / (2 + 1 / weight.square().sum())
    weighted = torch.cov(z[:, 0].mT, correction=0, aweights=weight)
    torch.testing.assert_close(root @ root.mT, (1 - intensity) * weighted + intensity * torch.diag(z[:, 0].var(0)))
    assert (root.triu(1) == 0).all()


def test_the_covariance_root_of_few_particles_is_finite(generator):
    z = torch.randn(8, 3, 4, generator=generator, dtype=DOUBLE)
    log_w = torch.zeros(8, 3, dtype=DOUBLE)
    log_w[1:, 1], log_w[:, 2] = -torch.inf, -torch.inf  # one positive weight, and none
    root = weights.covariance_root(z, log_w)
    assert torch.isfinite(root).all()
    assert (root.diagonal(dim1=-2, dim2=-1) > 0.1).all()


def test_the_largest_correlation_is_over_whitened_coordinates(generator):
    root = torch.tensor([[2.0, 0.0], [1.0, 0.1]], dtype=DOUBLE)
    a, b = torch.randn(2, 500, 3, 2, generator=generator, dtype=DOUBLE)
    b[..., 1] -= 0.7 * a[..., 1]
    expected = [torch.corrcoef(torch.stack([a[:, j, 1], b[:, j, 1]]))[0, 1].abs() for j in range(3)]
    for n_roots in (1, 2):
        found = weights.largest_correlation(5 + a @ root.mT, b @ root.mT, root.expand(n_roots, 3, 2, 2))
        torch.testing.assert_close(found, torch.stack(expected))
    assert weights.largest_correlation(torch.ones_like(a), b, root.expand(1, 3, 2, 2)).isnan().all()


def test_the_standard_error_is_the_delta_method(generator):
    w = torch.rand(30, 2, generator=generator, dtype=DOUBLE)
    torch.testing.assert_close(log_standard_error(w.log() - 900), w.std(0) / math.sqrt(30) / w.mean(0))
    assert log_standard_error(w[:1].log()).isnan().all()


def test_chunks_fit_in_memory(monkeypatch, generator):
    assert 0 < chunks.free_bytes("cpu") < 2**50
    model = linear_gaussian()
    path = AnnealingPath(model, Prior(model.prior), torch.zeros(5, 3, dtype=DOUBLE))
    each, states = chunks.bytes_per_particle(path, 1, generator=generator), 24 * 2 * 8
    assert states < each < 4096
    monkeypatch.setattr(chunks, "free_bytes", lambda device: 10 * each)
    assert chunks.default_budget(torch.device("cpu")) == 5 * each
    assert [p.x.shape[0] for p in chunks.chunks(path, 2, generator=generator, max_bytes=None)] == [2, 2, 1]
    assert [p.x.shape[0] for p in chunks.chunks(path, 2, generator=generator, max_bytes=1)] == [1] * 5


def test_a_flat_start_has_no_gradient():
    class Flat(Bound):
        def log_prob(self, z: Tensor, x: Tensor) -> Tensor:
            return torch.zeros(z.shape[:-1], dtype=z.dtype)

    path = AnnealingPath(Poisson(), Flat(None), torch.ones(1, 1, dtype=DOUBLE))  # type: ignore[arg-type]
    assert (path.evaluate(torch.zeros(3, 1, 1, dtype=DOUBLE)).grad_q == 0).all()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"n_particles": 100}, "n_particles=96"),
        ({"n_particles": 16}, "n_particles=32"),
        ({"n_islands": 5}, "even"),
        ({"ess_target": 1.0}, "ess_target=1.0"),
        ({"n_leapfrog": 0}, "n_leapfrog=0"),
        ({"max_moves": 0}, "max_moves=0"),
        ({"keep": (0.5, 0.0)}, r"keep=\(0.5, 0.0\)"),
        ({"max_bytes": 0}, "max_bytes=0"),
    ],
)
def test_invalid_smc_settings_raise(settings, message, generator):
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
def test_invalid_ais_settings_raise(settings, message, generator):
    with pytest.raises(SettingError, match=message):
        ais(Poisson(), torch.ones(2, 1, dtype=DOUBLE), Prior(Poisson.prior), generator=generator, **settings)


def test_invalid_shapes_and_schedules_raise(generator):
    with pytest.raises(ShapeError, match=r"x\[None\]"):
        smc(Poisson(), torch.ones(3, dtype=DOUBLE), Prior(Poisson.prior), generator=generator)
    with pytest.raises(SettingError, match="first=2"):
        geometric_schedule(10, 2.0)
    assert tempering.as_schedule(7).shape == (8,)
