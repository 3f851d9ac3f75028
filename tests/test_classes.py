"""Estimates of p(c | x) against integrals on a grid: with one-dimensional z and u nothing else is needed."""

from __future__ import annotations

import math
from functools import partial

import numpy as np
import pytest
import torch
from torch import Tensor

from checks import assert_mean, assert_within
from vaerdict.core import Draws, SettingError, WeightError, log_mean_exp
from vaerdict.diagnostics import Verdict
from vaerdict.inference import amortised, class_posterior, class_weights, from_weights, plugin_classes, refined
from vaerdict.inference import class_posterior as classes
from vaerdict.models import M1M2, ClassPrior, PerClass, Recognition, per_class, recognition
from vaerdict.noise import Shared, Sobol, seeded
from vaerdict.objectives import loss
from vaerdict.refinement import refine_elbo

P, C = 6, 3


def make(d: int = 1) -> tuple[M1M2, list[Recognition]]:
    """A model whose classes differ, with two recognition models that know nothing of it."""
    g = seeded(7)
    model = M1M2(P, C, d_z=d, d_u=d, hidden=(8,), generator=g).double()
    qs = [recognition(model, hidden=(8,), df=df, generator=g).double() for df in (None, 5.0)]
    with torch.no_grad():
        model.decoder.layers[0].get_parameter("weight").mul_(1.5)
        model.decoder.layers[1].get_parameter("weight").mul_(2)
        model.between.of_class.weight.mul_(4)
        for q in qs:  # broad, so that weights are bounded and their standard errors honest
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
    """P(c | x) and log p(x) by the trapezoidal rule, which for such integrands is as good as exact.

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


def test_the_truth_is_one(model, truth):
    """All images there are have probability one, each class a third of it; and the classes of ours are no matter of
    course."""
    every = torch.cartesian_prod(*[torch.tensor([0.0, 1.0], dtype=torch.double)] * P)
    prob, log_evidence = exact(model, every)
    per_class_total = (prob * log_evidence.exp()[:, None]).sum(0)
    torch.testing.assert_close(per_class_total, torch.full((C,), 1 / C, dtype=torch.double), rtol=1e-6, atol=0)
    assert (truth[0].amax(-1) - truth[0].amin(-1)).min() > 0.05


# ------------------------------------------------------------------------------------------------ against the truth
def proposals(model: M1M2, qs: list[Recognition]) -> dict[str, classes.Make]:
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
    monkeypatch.setattr(classes, "refine_elbo", partial(refine_elbo, stages=short))
    make = proposals(model, qs)[name]
    found = class_posterior(model, x, {name: make}, 6000, generator=generator, smooth=smooth)
    assert (found.prob.shape, found.mcse.shape, found.khat.shape) == ((6, C), (6, C), (6,))
    torch.testing.assert_close(found.prob.sum(-1), torch.ones(6, dtype=torch.double))
    assert found.khat.isfinite().all()
    assert found.mcse.max() < 0.01
    assert (found.rungs, found.rung.tolist()) == ((name,), [0] * 6)
    assert_within(found.prob, truth[0], found.mcse, rate=1e-6)
    off = torch.tensor([0.08, -0.04, -0.04], dtype=torch.double)
    with pytest.raises(AssertionError, match="standard errors off"):
        assert_within(found.prob + off, truth[0], found.mcse, rate=1e-6)


@pytest.mark.parametrize("name", ["student", "with prior", "refined"])
def test_weights_are_unbiased_for_the_evidence_with_the_prior_of_classes_in_it(name, model, qs, x, truth, generator):
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
    found = from_weights(log_w)
    torch.testing.assert_close(found.log_evidence, log_mean_exp(torch.logsumexp(log_w, -1)))


def test_quasi_random_and_shared_noise_serve_as_well(model, qs, x, truth, generator):
    for noise in (Sobol(generator), Shared((generator,))):
        found = class_posterior(model, x, {"B": amortised({"B": qs[1]}, model)}, 4096, generator=noise)
        assert (found.prob - truth[0]).abs().max() < 0.1
        assert_within(found.prob, truth[0], found.mcse, rate=1e-6)


def test_with_the_same_noise_for_all_an_answer_does_not_depend_on_its_company(model, qs, x):
    make = amortised({"B": qs[1]}, model)
    whole = class_posterior(model, x, {"B": make}, 200, generator=Shared((seeded(5),)))
    alone = class_posterior(model, x[3:4], {"B": make}, 200, generator=Shared((seeded(5),)))
    torch.testing.assert_close(whole.prob[3:4], alone.prob)


@torch.no_grad()
def test_the_plugin_is_the_mean_of_the_recognition_models_classifier_and_not_the_posterior(model, qs, x, truth):
    q, k = qs[0], 20_000
    grid = torch.linspace(-9, 9, 2001, dtype=torch.double)[:, None, None].expand(-1, 6, 1)
    law = q.z_given(x)
    z = law.loc + law.root.apply(grid)
    density = torch.softmax(-0.5 * grid.square(), 0)
    mean = (density * q.log_class(z).exp()).sum(0)
    found = plugin_classes(q, x, k, generator=seeded(2)).double()
    # a probability varies by one half at most; six standard errors are exceeded with probability 2e-9
    assert (found - mean).abs().max() < 6 * 0.5 / math.sqrt(k)
    assert (found - truth[0]).abs().max() > 0.1
    with pytest.raises(SettingError, match="k=0 must be a whole number"):
        plugin_classes(q, x, 0, generator=seeded(2))


# ---------------------------------------------------------------------------------------------------- from weights
def test_even_weights_give_their_shares_and_full_effective_size():
    shares = torch.tensor([[0.5, 0.3, 0.2], [0.1, 0.1, 0.8]], dtype=torch.double)
    log_w = (shares.log() + torch.tensor([[-2000.0], [3.0]])).expand(100, 2, C)
    found = from_weights(log_w)
    torch.testing.assert_close(found.prob, shares)
    torch.testing.assert_close(found.ess, torch.full((2,), 100.0, dtype=torch.double))
    torch.testing.assert_close(found.log_evidence, torch.tensor([-2000.0, 3.0], dtype=torch.double))
    assert found.certified.all()


def test_estimates_are_ratios_of_sums_of_weights(generator):
    log_w = torch.randn(50, 4, C, generator=generator)
    found = from_weights(log_w, smooth=False)
    sums = log_w.double().exp().sum(0)
    torch.testing.assert_close(found.prob, sums / sums.sum(-1, keepdim=True))
    assert found.prob.dtype == torch.double
    heavy = log_w.clone()
    heavy[0, 2] = 40.0
    found = from_weights(heavy)
    assert found.verdict[2] == Verdict.REFUSE
    assert not found.certified[2]
    with pytest.raises(WeightError, match="NaN"):
        from_weights(torch.where(torch.arange(50)[:, None, None] == 7, torch.nan, log_w))


# ------------------------------------------------------------------------------------------------------ the ladder
class Coarse:
    """The prior, its weights spoilt by heavy-tailed noise for images whose first pixel is white."""

    def __init__(self, model: M1M2) -> None:
        self.prior = ClassPrior(model)

    def draw(self, x: Tensor, k: int, *, generator: torch.Generator) -> Draws:
        latent, log_q = self.prior.draw(x, k, generator=generator)
        noise = torch.rand(k, *x.shape[1:-1], generator=generator, dtype=x.dtype).log()
        return Draws(latent, log_q + 3 * (x[0, :, 0] * noise).unsqueeze(1))

    def log_prob(self, latent: Tensor, x: Tensor) -> Tensor:
        return self.prior.log_prob(latent, x)


class Rung:
    """A way to make proposals that remembers the images it was asked for."""

    def __init__(self, make: classes.Make) -> None:
        self.make, self.asked = make, []

    def __call__(self, x: Tensor):
        self.asked.append(x[0])
        return self.make(x)


def test_only_what_is_not_certified_goes_up_the_ladder(model, x, truth, generator):
    rungs = {"COARSE": Rung(lambda _: Coarse(model)), "PRIOR": Rung(amortised({}, model)), "NEVER": Rung(pytest.fail)}
    spoilt = x[:, 0] == 1
    assert 0 < spoilt.sum() < 6
    found = class_posterior(model, x, rungs, 4000, generator=generator)
    assert torch.equal(rungs["COARSE"].asked[0], x)
    assert torch.equal(torch.cat(rungs["PRIOR"].asked), x[spoilt])
    assert rungs["NEVER"].asked == []
    assert found.rung.tolist() == spoilt.long().tolist()
    assert found.rungs == ("COARSE", "PRIOR", "NEVER")
    assert found.certified.all()
    assert_within(found.prob, truth[0], found.mcse, rate=1e-6)


def test_an_answer_too_coarse_goes_up_though_it_is_certified(model, x, generator):
    rungs = {"A": Rung(amortised({}, model)), "B": Rung(amortised({}, model))}
    found = class_posterior(model, x, rungs, 1000, generator=generator, tolerance=1e-6)
    assert len(torch.cat(rungs["B"].asked)) == 6
    assert found.rung.tolist() == [1] * 6


def test_a_ladder_of_one_answers_for_all_certified_or_not(model, x, generator):
    found = class_posterior(model, x, {"COARSE": lambda _: Coarse(model)}, 500, generator=generator)
    assert found.rung.tolist() == [0] * 6
    assert found.certified.tolist() == (x[:, 0] == 0).tolist()
    with pytest.raises(SettingError, match="the ladder has no rung"):
        class_posterior(model, x, {}, 500, generator=generator)


def test_working_in_parts_changes_neither_shape_nor_place(model, x, truth, generator, monkeypatch):
    heard: list[tuple[int, int, str]] = []
    ladder = {"COARSE": lambda _: Coarse(model), "PRIOR": amortised({}, model)}
    monkeypatch.setattr(classes, "_PART", {"cpu": 2 * 4000 * C * P})
    assert classes.part_size(x, 4000, C) == 2
    found = class_posterior(model, x, ladder, 4000, generator=generator, progress=lambda *heed: heard.append(heed))
    assert (found.prob.shape, found.log_evidence.shape, found.rung.shape) == ((6, C), (6,), (6,))
    assert_within(found.prob, truth[0], found.mcse, rate=1e-6)
    assert heard[:3] == [(i, 6, "p(c | x) by COARSE") for i in (2, 4, 6)]
    n_spoilt = int(x[:, 0].sum())
    assert heard[-1] == (n_spoilt, n_spoilt, "p(c | x) by PRIOR")
    monkeypatch.setattr(classes, "_PART", {"cpu": 1})
    assert classes.part_size(x, 4000, C) == 1
    assert plugin_classes(make()[1][0], x, 50, generator=generator).shape == (6, C)


def test_joined_answers_are_in_the_order_given(model, x, generator):
    parts = [
        from_weights(class_weights(model, x[i : i + 3], amortised({}, model), 50, generator=generator)) for i in (0, 3)
    ]
    whole = classes.joined(parts)
    assert whole.rungs == ("q",)
    for name in ("prob", "mcse", "ess", "khat", "verdict", "log_evidence", "rung"):
        assert torch.equal(getattr(whole, name), torch.cat([getattr(part, name) for part in parts]))


# ------------------------------------------------------------------------------------------------------ refinement
def test_refinement_raises_what_the_encoder_certifies(x, generator):
    model, (q, _) = make(d=2)
    with torch.no_grad():
        model.decoder.layers[1].get_parameter("weight").mul_(3)  # sharp posteriors, of which the encoder knows nothing
    before = class_posterior(model, x, {"ENCODER": amortised({"Q": q})}, 300, generator=generator)
    make_refined = refined(model, q, improve=False, generator=generator)
    after = class_posterior(model, x, {"REFINED": make_refined}, 300, generator=generator)
    assert after.ess.median() > 2 * before.ess.median()
    mixture = make_refined(per_class(x, C))
    assert mixture.shares == pytest.approx({"REFINED": 0.95, "PRIOR": 0.05})
    assert mixture.components["REFINED"].batch_shape == (C, 6)
    assert PerClass(model).log_joint(per_class(x, C), mixture.components["REFINED"].loc[None]).isfinite().all()


@pytest.mark.parametrize("k", [10, np.int64(10)])
def test_parts_have_a_size_on_every_device(k):
    """A device that nobody measured is worked on as a CPU is; numpy's counts are counts."""
    here, there = (classes.part_size(torch.empty(5, 1000, device=device), k, 2) for device in ("cpu", "meta"))
    assert here == there == 2**24 // 20_000
    assert isinstance(here, int)
