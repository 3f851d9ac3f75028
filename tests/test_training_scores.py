"""Held-out scores: their values, and how training treats scores that are not finite."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from training_toys import SHORT, TRUE, X, equal_to_rounding, member, same_bits, script, stack_of
from vaerdict.core import DivergenceError, SettingError
from vaerdict.models.ppca import PPCA
from vaerdict.noise import seeded
from vaerdict.training import IWAE, VAE, AmortisedBound, Recipe, RefinedBound, train
from vaerdict.training.data import PerMemberRows, SharedRows

PATIENT = replace(SHORT, epochs=6, check_every=1, patience=2, drops=0)


# ------------------------------------------------------------------------------------------- scores that are not finite
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_score_that_is_no_number_stops_training_at_once(bad, monkeypatch):
    script(monkeypatch, [[1.0, 1.0], [2.0, bad]])
    with pytest.raises(DivergenceError, match=rf"held-out score of IWAE, seed 1 became {bad} in epoch 2: .* x_valid"):
        train([member(IWAE, 0), member(IWAE, 1)], X, X, PATIENT)


def test_training_without_any_finite_score_is_an_error():
    x = X.float()
    outlier = x.clone()
    outlier[0, 0] = 1e25  # its square overflows float32
    one = member(IWAE, 0, dtype=torch.float32)
    message = "held-out score of IWAE, seed 0 was -inf at every check up to epoch 2: .* another scale in x_valid"
    with pytest.raises(DivergenceError, match=message):
        train([one], x, outlier, PATIENT)
    with pytest.raises(DivergenceError, match="up to epoch 1"):  # at the limit of epochs too
        train([one], x, outlier, replace(PATIENT, epochs=1))


def test_a_score_of_minus_infinity_may_pass(monkeypatch):
    (three_epochs,) = train([member(IWAE, 0)], X, X, replace(PATIENT, epochs=3, patience=None))
    low = -math.inf
    script(monkeypatch, [[low], [low], [2.0], [1.0], [1.0], [1.0]])
    (fit,) = train([member(IWAE, 0)], X, X, replace(PATIENT, patience=3))
    assert same_bits(fit, three_epochs)
    assert fit.history[:3] == [(1, low), (2, low), (3, 2.0)]


def test_the_effective_sample_size_is_zero_where_no_particle_has_weight():
    class Bounded(PPCA):
        def log_joint(self, x: Tensor, z: Tensor) -> Tensor:
            return super().log_joint(x, z).where(x[..., 0] < 100, -torch.inf)

    far = X[:3].clone()
    far[0, 0] = 200.0
    stack = stack_of(replace(member(IWAE, 0), model=Bounded(TRUE.weight, 1.0)), learn_model=False)
    assert AmortisedBound()(stack, SharedRows(far), 5).tolist() == [-math.inf]
    assert AmortisedBound()(stack, SharedRows(far[1:]), 5).isfinite().all()


@pytest.mark.parametrize("stacked", [False, True])
def test_with_annealing_that_never_reaches_one_the_last_parameters_are_returned(stacked):
    half = Recipe("BETA", VAE.theta, VAE.phi, annealing=lambda done: 0.5)
    members = [member(half, 0), member(IWAE, 0)] if stacked else [member(half, 0)]
    fit = train(members, X, X, replace(PATIENT, patience=50))[0]
    last = train(members, X, X, replace(PATIENT, patience=None))[0]
    assert not fit.converged
    assert same_bits(fit, last)
    assert not same_bits(fit, members[0])


# ----------------------------------------------------------------------------------------------------- refined scores
@pytest.mark.parametrize("n_members", [1, 2])
def test_the_refined_bound_is_the_evidence_however_poor_the_encoder(n_members):
    stack = stack_of(*(member(IWAE, i) for i in range(n_members)))
    exact = PPCA(TRUE.weight, 1.0).log_evidence(X[:64]).mean().item()
    refined = RefinedBound(64)(stack, SharedRows(X), 400)
    assert refined.shape == (n_members,)
    assert refined.tolist() == pytest.approx([exact] * n_members, abs=0.02)
    amortised, refined = (score(stack, SharedRows(X[:64]), 5) for score in (AmortisedBound(), RefinedBound(64)))
    assert (amortised < exact - 0.2).all()  # the encoders are untrained
    assert (refined > exact - 0.1).all()


def test_the_refined_bound_of_separate_data_is_that_of_each_data_set():
    x = torch.stack([TRUE.simulate(20, generator=seeded(10 + i))[0] for i in range(3)])
    bound = RefinedBound(20)(stack_of(*(member(IWAE, i) for i in range(3))), PerMemberRows(x), 400)
    exact = PPCA(TRUE.weight, 1.0).log_evidence(x).mean(-1)
    assert bound.tolist() == pytest.approx(exact.tolist(), abs=0.03)


def test_proposals_for_a_fixed_model_have_the_amortised_score():
    stack = stack_of(member(IWAE, 0), learn_model=False)
    assert torch.equal(RefinedBound()(stack, SharedRows(X), 10), AmortisedBound()(stack, SharedRows(X), 10))


def test_training_uses_the_score_of_its_settings(tmp_path):
    members, refined = [member(IWAE, 0)], replace(SHORT, score=RefinedBound(32), score_particles=50)
    (fit,) = train(members, X[:200], X[200:], refined, checkpoint=tmp_path)
    exact = fit.model.log_evidence(X[200:232]).mean().item()
    assert fit.history[-1][1] == pytest.approx(exact, abs=0.05)
    (again,) = train(members, X[:200], X[200:], refined, checkpoint=tmp_path)
    assert equal_to_rounding(fit, again)
    for other in (RefinedBound(33), AmortisedBound()):
        with pytest.raises(SettingError, match="another run"):
            train(members, X[:200], X[200:], replace(refined, score=other), checkpoint=tmp_path)


def test_numbers_of_observations_and_steps_must_be_positive():
    with pytest.raises(SettingError, match="n_observations=0"):
        RefinedBound(0)
    with pytest.raises(SettingError, match="n_steps=0"):
        RefinedBound(n_steps=0)
