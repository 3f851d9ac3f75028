"""Estimates of p(c | x) compared with integrals on a grid, for one-dimensional z and u."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

import vaerdict as vd
from checks import assert_mean, assert_within
from vaerdict.core import Draws, SettingError, WeightError, log_mean_exp
from vaerdict.diagnostics import Verdict
from vaerdict.inference import ClassPosterior, amortised, class_posterior, class_weights, plugin_classes, refined
from vaerdict.inference import class_probabilities as module
from vaerdict.inference.assess import assess
from vaerdict.models import M1M2, ClassPrior, Enumerated, PerClass, Recognition, per_class, recognition
from vaerdict.noise import CommonRandomNumbers, Sobol, seeded
from vaerdict.objectives import loss
from vaerdict.refinement import refine_elbo

P, C = 6, 3


def make(d: int = 1) -> tuple[M1M2, list[Recognition]]:
    """A model whose classes differ, with two untrained recognition models."""
    g = seeded(7)
    model = M1M2(P, C, d_z=d, d_u=d, hidden=(8,), generator=g).double()
    qs = [recognition(model, hidden=(8,), df=df, generator=g).double() for df in (None, 5.0)]
    with torch.no_grad():
        model.decoder.layers[0].get_parameter("weight").mul_(1.5)
        model.decoder.layers[1].get_parameter("weight").mul_(2)
        model.between.of_class.weight.mul_(4)
        for q in qs:  # broad, so that weights are bounded and their standard errors reliable
            for layers in (q.encoder.layers, q.auxiliary.rest.layers):
                layers[-1].bias[d:] += 1.5
    return model, qs


@pytest.fixture(scope="module")
def model() -> M1M2:
    return make()[0]


@pytest.fixture(scope="module")
def qs() -> list[Recognition]:
    return make()[1]


@pytest.fixture(scope="module")
def x() -> Tensor:
    return (torch.rand(6, P, generator=seeded(3)) < 0.5).double()


@pytest.fixture(scope="module")
def truth(model, x) -> tuple[Tensor, Tensor]:
    return exact(model, x)


@torch.no_grad()
def exact(model: M1M2, x: Tensor) -> tuple[Tensor, Tensor]:
    """P(c | x) and log p(x) by the trapezoidal rule, which is practically exact for these integrands.

    Shapes: ``(n, p) -> (n, classes), (n,)``.
    """
    z, u = torch.linspace(-12, 12, 601, dtype=torch.double), torch.linspace(-8, 8, 201, dtype=torch.double)
    step = math.log((z[1] - z[0]).item() * (u[1] - u[0]).item())
    eye = torch.eye(C, dtype=torch.double)
    log_z = [
        torch.logsumexp(model.log_prior(z[:, None, None], eye[[c]], u[:, None]), 1) for c in range(C)
    ]  # log p(z, c) up to the grid's step
    log_x = model.log_likelihood(x, z[:, None, None].expand(-1, len(x), 1))
    joint = torch.stack([torch.logsumexp(log_x + log[:, None], 0) for log in log_z], -1) + step
    return torch.softmax(joint, -1), torch.logsumexp(joint, -1)


def test_the_exact_probabilities_sum_to_one(model, truth):
    """All images have probability one, each class a third of it; and the test images distinguish the classes."""
    every = torch.cartesian_prod(*[torch.tensor([0.0, 1.0], dtype=torch.double)] * P)
    prob, log_evidence = exact(model, every)
    per_class_total = (prob * log_evidence.exp()[:, None]).sum(0)
    torch.testing.assert_close(per_class_total, torch.full((C,), 1 / C, dtype=torch.double), rtol=1e-6, atol=0)
    assert (truth[0].amax(-1) - truth[0].amin(-1)).min() > 0.05


# ------------------------------------------------------------------------------------------------ against the truth
def proposals(model: M1M2, qs: list[Recognition]) -> dict[str, module.MakeProposal]:
    first, second = qs
    return {
        "normal": amortised({"A": first}),
        "student": amortised({"B": second}),
        "mis": amortised({"A": first, "B": second}),
        "with prior": amortised({"A": first, "B": second}, model),
        "prior": amortised({}, model),
        "refined": refined(model, first, improve=False, generator=seeded(1)),
        "improved": refined(model, first, improve=True, generator=seeded(1)),
    }


@pytest.mark.parametrize("smooth", [True, False])
@pytest.mark.parametrize("name", ["normal", "student", "mis", "with prior", "prior", "refined", "improved"])
def test_class_probabilities_lie_within_their_standard_errors(
    name, smooth, model, qs, x, truth, generator, monkeypatch
):
    short = ((loss("elbo", "stl"), 30), (loss("iwelbo", "dreg"), 20))
    monkeypatch.setattr(module, "STAGES", short)
    make = proposals(model, qs)[name]
    answer = class_posterior(model, x, {name: make}, 6000, generator=generator, smooth=smooth)
    assert (answer.prob.shape, answer.mcse.shape, answer.khat.shape) == ((6, C), (6, C), (6,))
    torch.testing.assert_close(answer.prob.sum(-1), torch.ones(6, dtype=torch.double))
    assert answer.khat.isfinite().all()
    assert answer.mcse.max() < 0.01
    assert (answer.stages, answer.stage.tolist()) == ((name,), [0] * 6)
    assert_within(answer.prob, truth[0], answer.mcse, rate=1e-6)
    off = torch.tensor([0.08, -0.04, -0.04], dtype=torch.double)
    with pytest.raises(AssertionError, match="standard errors off"):
        assert_within(answer.prob + off, truth[0], answer.mcse, rate=1e-6)


def test_the_model_itself_is_answered_by_expect_and_posterior(model, qs, x, truth, generator):
    """The sum over classes, the integral on a grid and proposals for each class agree; false alarms once in 1e6."""
    off = torch.tensor([0.08, -0.04, -0.04], dtype=torch.double)
    by_expect = vd.expect(model, x, lambda latent: latent.c, seed=0)
    assert (by_expect.verdict == Verdict.OK).all()
    particles = vd.posterior(model, x, vd.Prior(Enumerated(model, x).prior), 6000, seed=0)
    per_class = class_posterior(model, x, {"REFINED": proposals(model, qs)["refined"]}, 6000, generator=generator)
    for answer in (by_expect, particles.expect(lambda latent: latent.c)):
        assert_within(answer.value, truth[0], answer.mcse, rate=1e-6)
        both = (answer.mcse.square() + per_class.mcse.square()).sqrt()
        assert_within(answer.value, per_class.prob, both, rate=1e-6)
        with pytest.raises(AssertionError, match="standard errors off"):
            assert_within(answer.value + off, truth[0], answer.mcse, rate=1e-6)
    log_w = particles.log_w - truth[1]
    for i in range(6):
        assert_mean(log_w[:, i].exp(), 1.0, rate=1e-7)
    with pytest.raises(AssertionError, match="standard errors"):
        assert_mean(1.1 * log_w.exp().mean(1), 1.0, rate=1e-7)


@pytest.mark.parametrize("name", ["student", "with prior", "refined"])
def test_weights_are_unbiased_for_the_evidence_including_the_class_prior(name, model, qs, x, truth, generator):
    log_w = class_weights(model, x, proposals(model, qs)[name], 20_000, generator=generator)
    assert log_w.shape == (20_000, 6, C)
    joint = truth[0].log() + truth[1][:, None]
    ratio = (log_w - joint).exp()
    for i in range(6):
        assert_mean(torch.logsumexp(log_w[:, i] - truth[1][i], -1).exp(), 1.0, rate=1e-7)
        for c in range(C):
            assert_mean(ratio[:, i, c], 1.0, rate=1e-7)
    with pytest.raises(AssertionError, match="standard errors"):
        assert_mean(1.05 * ratio[:, :, 0].mean(1), 1.0, rate=1e-7)
    answer = ClassPosterior.from_weights(log_w)
    torch.testing.assert_close(answer.log_evidence, log_mean_exp(torch.logsumexp(log_w, -1)))


def test_quasi_random_and_shared_noise_work_too(model, qs, x, truth, generator):
    for noise in (Sobol(generator), CommonRandomNumbers((generator,))):
        answer = class_posterior(model, x, {"B": amortised({"B": qs[1]}, model)}, 4096, generator=noise)
        assert (answer.prob - truth[0]).abs().max() < 0.1
        assert_within(answer.prob, truth[0], answer.mcse, rate=1e-6)


def test_with_shared_noise_an_answer_does_not_depend_on_other_observations(model, qs, x):
    make = amortised({"B": qs[1]}, model)
    batch = class_posterior(model, x, {"B": make}, 200, generator=CommonRandomNumbers((seeded(5),)))
    alone = class_posterior(model, x[3:4], {"B": make}, 200, generator=CommonRandomNumbers((seeded(5),)))
    torch.testing.assert_close(batch.prob[3:4], alone.prob)


@torch.no_grad()
def test_the_plugin_is_the_mean_of_the_recognition_models_classifier_and_not_the_posterior(model, qs, x, truth):
    q, k = qs[0], 20_000
    grid = torch.linspace(-9, 9, 2001, dtype=torch.double)[:, None, None].expand(-1, 6, 1)
    encoder = q.z_given(x)
    z = encoder.loc + encoder.root.apply(grid)
    density = torch.softmax(-0.5 * grid.square(), 0)
    mean = (density * q.log_class(z).exp()).sum(0)
    prob = plugin_classes(q, x, k, generator=seeded(2)).double()
    # a probability varies by one half at most; six standard errors are exceeded with probability 2e-9
    assert (prob - mean).abs().max() < 6 * 0.5 / math.sqrt(k)
    assert (prob - truth[0]).abs().max() > 0.1
    with pytest.raises(SettingError, match="k=0 must be a whole number"):
        plugin_classes(q, x, 0, generator=seeded(2))


# ---------------------------------------------------------------------------------------------------- from weights
def test_even_weights_give_their_proportions_and_full_effective_size():
    shares = torch.tensor([[0.5, 0.3, 0.2], [0.1, 0.1, 0.8]], dtype=torch.double)
    log_w = (shares.log() + torch.tensor([[-2000.0], [3.0]])).expand(100, 2, C)
    answer = ClassPosterior.from_weights(log_w)
    torch.testing.assert_close(answer.prob, shares)
    torch.testing.assert_close(answer.ess, torch.full((2,), 100.0, dtype=torch.double))
    torch.testing.assert_close(answer.log_evidence, torch.tensor([-2000.0, 3.0], dtype=torch.double))
    assert answer.certified.all()


def test_estimates_are_ratios_of_sums_of_weights(generator):
    log_w = torch.randn(50, 4, C, generator=generator)
    answer = ClassPosterior.from_weights(log_w, smooth=False)
    sums = log_w.double().exp().sum(0)
    torch.testing.assert_close(answer.prob, sums / sums.sum(-1, keepdim=True))
    assert answer.prob.dtype == torch.double
    heavy = log_w.clone()
    heavy[0, 2] = 40.0
    answer = ClassPosterior.from_weights(heavy)
    assert answer.verdict[2] == Verdict.REFUSE
    assert not answer.certified[2]
    with pytest.raises(WeightError, match="NaN"):
        ClassPosterior.from_weights(torch.where(torch.arange(50)[:, None, None] == 7, torch.nan, log_w))


def test_an_improbable_class_is_no_event_that_draws_have_missed(generator):
    """Every particle has a draw given the class; a probability of z alone would get an error of about 1 / ESS."""
    log_w = torch.randn(200, 4, C, generator=generator, dtype=torch.double)
    log_w[..., 2] = 5 * log_w[..., 2] - 40
    answer = ClassPosterior.from_weights(log_w)
    assert answer.certified.all()
    assert answer.mcse[:, 2].max() < 1e-8
    as_event = assess(torch.softmax(log_w, -1), torch.logsumexp(log_w, -1))
    assert (as_event.mcse[:, 2] > 1 / as_event.ess).all()


# ---------------------------------------------------------------------------------------------------------- stages
class Coarse:
    """The prior, with heavy-tailed noise on the weights of images whose first pixel is white."""

    def __init__(self, model: M1M2) -> None:
        self.prior = ClassPrior(model)

    def draw(self, x: Tensor, k: int, *, generator: torch.Generator) -> Draws:
        latent, log_q = self.prior.draw(x, k, generator=generator)
        noise = torch.rand(k, *x.shape[1:-1], generator=generator, dtype=x.dtype).log()
        return Draws(latent, log_q + 3 * (x[0, :, 0] * noise).unsqueeze(1))

    def log_prob(self, latent: Tensor, x: Tensor) -> Tensor:
        return self.prior.log_prob(latent, x)


class Recorded:
    """A stage that records the images it is called with."""

    def __init__(self, make: module.MakeProposal) -> None:
        self.make, self.images = make, []

    def __call__(self, x: Tensor):
        self.images.append(x[0])
        return self.make(x)


def test_only_observations_that_are_not_certified_reach_the_next_stage(model, x, truth, generator):
    stages = {
        "COARSE": Recorded(lambda _: Coarse(model)),
        "PRIOR": Recorded(amortised({}, model)),
        "NEVER": Recorded(pytest.fail),
    }
    spoilt = x[:, 0] == 1
    assert 0 < spoilt.sum() < 6
    answer = class_posterior(model, x, stages, 4000, generator=generator)
    assert torch.equal(stages["COARSE"].images[0], x)
    assert torch.equal(torch.cat(stages["PRIOR"].images), x[spoilt])
    assert stages["NEVER"].images == []
    assert answer.stage.tolist() == spoilt.long().tolist()
    assert answer.stages == ("COARSE", "PRIOR", "NEVER")
    assert answer.certified.all()
    assert_within(answer.prob, truth[0], answer.mcse, rate=1e-6)


def test_a_certified_answer_with_too_large_an_error_reaches_the_next_stage(model, x, generator):
    stages = {"A": Recorded(amortised({}, model)), "B": Recorded(amortised({}, model))}
    answer = class_posterior(model, x, stages, 1000, generator=generator, tolerance=1e-6)
    assert len(torch.cat(stages["B"].images)) == 6
    assert answer.stage.tolist() == [1] * 6


def test_a_stage_may_have_more_draws_than_the_one_before(model, x, generator):
    prior, spoilt = amortised({}, model), x[:, 0] == 1
    for counts in ([200, 4000], 4000):
        answer = class_posterior(
            model, x, {"A": lambda _: Coarse(model), "B": prior}, counts, generator=generator, tolerance=2.0
        )
        assert answer.stage.tolist() == spoilt.long().tolist()
        assert answer.ess[spoilt].min() > 200
        assert answer.ess[~spoilt].max() < (200 if counts != 4000 else 4000)
    with pytest.raises(SettingError, match=r"k=\[200\] has 1 numbers for 2 stages"):
        class_posterior(model, x, {"A": prior, "B": prior}, [200], generator=generator)


def test_the_number_of_draws_may_be_any_integer_and_nothing_else(model, x):
    prior = amortised({}, model)

    def answer(k) -> ClassPosterior:
        return class_posterior(model, x, {"A": prior}, k, generator=seeded(1))

    for k in (np.int64(200), [np.int64(200)], np.array([200])):
        assert torch.equal(answer(k).prob, answer(200).prob)
    with pytest.raises(SettingError, match=r"k=200.0 must be a whole number"):
        answer(200.0)


def test_longer_refinement_takes_as_many_more_steps(model, qs, x, monkeypatch):
    taken = []

    def recorded(*args, stages, **settings):
        taken.append([n for _, n in stages])
        return refine_elbo(*args, stages=[(objective, 1) for objective, _ in stages], **settings)

    monkeypatch.setattr(module, "refine_elbo", recorded)
    for longer in (1, 3):
        refined(model, qs[0], improve=True, longer=longer, generator=seeded(1))(per_class(x, C))
    assert taken == [[300, 150], [900, 450]]


def test_a_single_stage_answers_for_all_observations(model, x, generator):
    answer = class_posterior(model, x, {"COARSE": lambda _: Coarse(model)}, 500, generator=generator)
    assert answer.stage.tolist() == [0] * 6
    assert answer.certified.tolist() == (x[:, 0] == 0).tolist()
    with pytest.raises(SettingError, match="stages= is empty"):
        class_posterior(model, x, {}, 500, generator=generator)


def test_chunks_keep_shape_and_order(model, x, truth, generator, monkeypatch):
    calls: list[tuple[int, int, str]] = []
    stages = {"COARSE": lambda _: Coarse(model), "PRIOR": amortised({}, model)}
    monkeypatch.setattr(module, "_CHUNK", {"cpu": 2 * 4000 * C * P})
    assert module.chunk_size(x, 4000, C) == 2
    answer = class_posterior(model, x, stages, 4000, generator=generator, progress=lambda *args: calls.append(args))
    assert (answer.prob.shape, answer.log_evidence.shape, answer.stage.shape) == ((6, C), (6,), (6,))
    assert_within(answer.prob, truth[0], answer.mcse, rate=1e-6)
    assert calls[:3] == [(i, 6, "p(c | x) by COARSE") for i in (2, 4, 6)]
    n_spoilt = int(x[:, 0].sum())
    assert calls[-1] == (n_spoilt, n_spoilt, "p(c | x) by PRIOR")
    monkeypatch.setattr(module, "_CHUNK", {"cpu": 1})
    assert module.chunk_size(x, 4000, C) == 1
    assert plugin_classes(make()[1][0], x, 50, generator=generator).shape == (6, C)


def test_concatenated_answers_keep_their_order(model, x, generator):
    weights = [class_weights(model, x[i : i + 3], amortised({}, model), 50, generator=generator) for i in (0, 3)]
    chunks = [ClassPosterior.from_weights(log_w) for log_w in weights]
    answer = ClassPosterior.concatenated(chunks)
    assert answer.stages == ("q",)
    for name in ("prob", "mcse", "ess", "khat", "verdict", "log_evidence", "stage"):
        assert torch.equal(getattr(answer, name), torch.cat([getattr(chunk, name) for chunk in chunks]))


# ------------------------------------------------------------------------------------------------------ refinement
def test_refinement_raises_the_effective_sample_size(x, generator):
    model, (q, _) = make(d=2)
    with torch.no_grad():
        model.decoder.layers[1].get_parameter("weight").mul_(3)  # posteriors that are narrow and unknown to the encoder
    before = class_posterior(model, x, {"ENCODER": amortised({"Q": q})}, 300, generator=generator)
    make_refined = refined(model, q, improve=False, generator=generator)
    after = class_posterior(model, x, {"REFINED": make_refined}, 300, generator=generator)
    assert after.ess.median() > 2 * before.ess.median()
    mixture = make_refined(per_class(x, C))
    assert mixture.shares == pytest.approx({"REFINED": 0.95, "PRIOR": 0.05})
    assert mixture.components["REFINED"].batch_shape == (C, 6)
    assert PerClass(model).log_joint(per_class(x, C), mixture.components["REFINED"].loc[None]).isfinite().all()


@pytest.mark.parametrize("k", [10, np.int64(10)])
def test_chunks_have_a_size_on_every_device(k):
    """Other devices are treated as a CPU; counts may be numpy integers."""
    cpu, other = (module.chunk_size(torch.empty(5, 1000, device=device), k, 2) for device in ("cpu", "meta"))
    assert cpu == other == 2**24 // 20_000
    assert isinstance(cpu, int)
