"""The selective classifier: the checks of scikit-learn, decisions, choices on held-out labels, files."""

from __future__ import annotations

import copy
import json
import math
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import vaerdict as vd
from vaerdict import decisions, selective
from vaerdict.core import DataError, SettingError
from vaerdict.inference.m1m2_steps import M1M2Steps, fit_m1m2_steps
from vaerdict.noise import CommonRandomNumbers, Iid, seeded
from vaerdict.training.semisupervised_stack import SemiSettings, semi_recipe

pytest.importorskip("sklearn")

from sklearn.datasets import load_digits, make_blobs
from sklearn.utils.estimator_checks import parametrize_with_checks

from vaerdict.classify.fitting import threads
from vaerdict.classify.preprocessing import (
    MIN_HELD_OUT,
    check_range,
    hold_out,
    likelihood_of,
    scaling,
    unlabelled,
    with_rejects,
    without_missing,
)
from vaerdict.classify.storage import write

SMALL = {"epochs": 20, "proposals": (), "n_draws": 50, "hidden": (32,), "n_particles": 5}


def small(**changes) -> vd.SelectiveClassifier:
    return vd.SelectiveClassifier(**{**SMALL, "random_state": 0, **changes})


def blobs(n: int = 60, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    X, y = make_blobs(n, centers=[[-4, 0], [4, 0], [0, 6]], random_state=seed)[:2]
    return X, y


@pytest.fixture(scope="module")
def digits():
    """Rows and labels to fit, rows and digits to test: 150 labels, none of a nine."""
    X, digit = load_digits(return_X_y=True)
    order = np.random.RandomState(0).permutation(len(X))  # they are ordered by writer
    X, digit = X[order] / 16, digit[order]
    y = np.where(digit[:500] == 9, -1, digit[:500])
    y[200:] = -1
    return X[:500], y, X[500:560], digit[500:560]


@pytest.fixture(scope="module")
def reader(digits):
    """A classifier fitted by all three steps at small size, with a free class."""
    steps = {"objectives": ("VAE", "WW"), "proposals": ("CHI",), "estimator": "auto"}
    return small(epochs=50, cost=0.1, n_draws=200, n_free=1, **steps).fit(*digits[:2])


@pytest.fixture(scope="module")
def decided(digits, reader):
    return reader.decide(digits[2], evidence=True)


# ------------------------------------------------------------------------------------------------ conventions
EXCEPTIONS = {"check_classifiers_classes": "its last case has labels -1 and 1, and -1 means unlabelled here"}


@parametrize_with_checks([small(random_state=None)], expected_failed_checks=lambda _: EXCEPTIONS)
def test_the_checks_of_scikit_learn_pass(estimator, check):
    check(estimator)


@pytest.mark.parametrize("dtype", [None, object])
def test_classes_may_be_strings(dtype):
    """The cases of the check above without a class named -1."""
    X, code = blobs(30)
    y = np.array(["one", "two", "three"], dtype=dtype)[code]
    fitted = small().fit(X, y)
    assert fitted.classes_.tolist() == ["one", "three", "two"]
    assert fitted.score(X, y) > 0.8
    assert set(fitted.predict(X)) <= set(fitted.classes_)


@pytest.mark.parametrize(
    "y",
    [
        [0, -1, 3],
        [0.0, -1.0, 3.0],
        [0.0, np.nan, 3.0],
        [0, None, 3],
        ["a", "", "b"],
        ["a", -1, "b"],
        ["a", None, "b"],
        np.array(["a", -1, "b"], dtype=object),
        np.array(["a", np.nan, "b"], dtype=object),
        np.array([True, None, False], dtype=object),
    ],
)
def test_values_that_mark_unlabelled_rows(y):
    assert unlabelled(np.asarray(y)).tolist() == [False, True, False]
    filled = np.asarray(without_missing(y))
    assert unlabelled(filled).tolist() == [False, True, False]
    assert filled[[0, 2]].tolist() == np.asarray(y)[[0, 2]].tolist()


@pytest.mark.parametrize("missing", [None, np.nan])
@pytest.mark.parametrize("names", [[0, 1, 2], [0.0, 1.0, 2.0], ["a", "b", "c"]])
def test_missing_labels_are_as_good_as_minus_one(missing, names):
    X, code = blobs(40)
    y = np.array(names, dtype=object)[code]
    y[20:] = missing
    marked = np.where(np.arange(40) < 20, np.array(names)[code], "" if isinstance(names[0], str) else -1)
    fitted, same = small(epochs=2).fit(X, y), small(epochs=2).fit(X, marked)
    assert fitted.classes_.tolist() == same.classes_.tolist() == names
    assert np.array_equal(fitted.predict_proba(X), same.predict_proba(X))
    assert fitted.score(X, y) == same.score(X, marked)


def test_unlabelled_rows_form_no_class_and_are_ignored_by_the_score():
    X, y = blobs()
    half = np.where(np.arange(60) < 30, y, -1)
    fitted = small().fit(X, half)
    assert fitted.classes_.tolist() == [0, 1, 2]
    assert fitted.score(X, half) == np.mean(fitted.predict(X[:30]) == y[:30])
    with pytest.raises(DataError, match="none of 60 rows has a label"):
        small().fit(X, np.full(60, -1))


def test_labels_of_one_class_are_refused_unless_there_is_a_free_one():
    X, y = blobs()
    signs = np.where(y == 0, 1, -1)
    with pytest.raises(DataError, match=r"one class only, 1, and -1 means unlabelled \(40 rows\).*recode -1"):
        small().fit(X, signs)
    assert small(epochs=1, n_free=1).fit(X, signs).classes_.tolist() == [1]


def test_settings_may_be_numpy_integers():
    X, y = blobs(30)
    names = {"epochs": 1, "n_draws": 30, "n_particles": 2, "batch_size": 16, "n_free": 1}
    by_numpy = small(**{name: np.arange(value, value + 1)[0] for name, value in names.items()}).fit(X, y)
    assert np.array_equal(by_numpy.decide(X).prob, small(**names).fit(X, y).decide(X).prob)


def test_results_depend_on_the_seed_only():
    X, y = blobs()
    one, same, other = (small(random_state=seed).fit(X, y).predict_proba(X) for seed in (1, 1, 2))
    assert np.array_equal(one, same)
    assert not np.allclose(one, other)


# ------------------------------------------------------------------------------------------------ decisions
def test_digits_are_classified_and_uncertain_ones_rejected(digits, decided):
    seen, right = digits[3] != 9, decided.label == digits[3]
    assert right[seen].mean() > 0.8
    accepted = decided.action != -1
    assert 0 < accepted.sum() < len(right)
    assert right[accepted].mean() > right.mean()
    assert np.array_equal(decided.action[accepted], decided.label[accepted])
    assert (~accepted[~seen]).mean() > (~accepted[seen]).mean()


def test_every_row_has_its_evidence(digits, decided):
    n = len(digits[2])
    assert decided.prob.shape == (n, 9)
    np.testing.assert_allclose(decided.prob.sum(1), 1)
    for column in (decided.score, decided.free, *decided.evidence):
        assert column.shape == (n,)
    assert set(decided.evidence.stage) <= {"MIS", "REFINED"}
    assert set(decided.evidence.verdict) <= {0, 1, 2}
    assert (decided.evidence.verdict == vd.Verdict.OK).mean() > 0.8
    assert np.isfinite(decided.evidence.log_evidence).all()
    assert ((decided.free >= 0) & (decided.free <= 1)).all()


def test_the_plugin_decides_without_importance_sampling(monkeypatch):
    X, y = blobs(110)
    fitted = small(alpha=0.2, reject_by="entropy").fit(X, y)
    with_evidence = fitted.decide(X, evidence=True)
    monkeypatch.setattr(M1M2Steps, "posterior", lambda *_, **__: pytest.fail("importance sampling"))
    decided = fitted.decide(X)
    fitted.predict_proba(X)
    small(alpha=0.2, reject_by="entropy").fit(X, y)
    assert decided.evidence is None
    for before, after in zip(with_evidence[:-1], decided[:-1], strict=True):
        assert np.array_equal(before, after)


def test_decisions_follow_bayes_rule_with_a_free_class(decided):
    """The actions are the labelled classes and rejecting; the states include the free class."""
    full = torch.tensor(np.column_stack([decided.prob * (1 - decided.free)[:, None], decided.free]))
    loss = decisions.reject_loss(10, 0.1)[[*range(9), 10]]
    action = np.where(np.isinf(decided.score), 9, decisions.bayes_action(full, loss).numpy())
    assert np.array_equal(np.where(action == 9, -1, action), decided.action)


def test_an_answer_does_not_depend_on_other_rows(digits, reader, decided):
    """Up to rounding; for refined rows within the Monte-Carlo error, because of kinks of the decoder."""
    stage = decided.evidence.stage
    rows = np.r_[np.flatnonzero(stage == "MIS")[:2], np.flatnonzero(stage == "REFINED")[:2]]
    assert len(rows) == 4
    part = reader.decide(digits[2][rows], evidence=True)
    assert np.array_equal(part.evidence.stage, stage[rows])
    np.testing.assert_allclose(part.prob[:2], decided.prob[rows[:2]], atol=1e-9)
    np.testing.assert_allclose(part.evidence.mcse[:2], decided.evidence.mcse[rows[:2]], atol=1e-9)
    np.testing.assert_allclose(part.prob[2:], decided.prob[rows[2:]], atol=0.02)


def test_choices_are_made_on_held_out_labels(digits, reader):
    assert reader.n_held_out_ == round(0.2 * (~unlabelled(digits[1])).sum())
    assert {row.model for row in reader.selection_} == {"VAE", "WW"}
    assert reader.selection_[0].iwelbo == max(row.iwelbo for row in reader.selection_)
    assert reader.estimator_ == max(reader.log_scores_, key=lambda name: reader.log_scores_[name])
    assert list(reader.steps_.recognitions) == [reader.selection_[0].model, "CHI"]
    assert reader.agreement_.log_score == pytest.approx(reader.log_scores_["corrected"], abs=0.2)
    gain = reader.log_scores_["plugin"] - reader.log_scores_["corrected"]
    assert reader.agreement_.plugin_gain == pytest.approx(gain, abs=0.2)  # one on certified rows, the other on all


@pytest.fixture
def half_refused(monkeypatch):
    """A fitted classifier for which every other row has the verdict REFUSE."""

    def fit(n: int, **settings):
        X, y = blobs(n)
        fitted = small(epochs=5, **settings)
        posterior = M1M2Steps.posterior

        def refusing(steps, x, *args, **kwargs):
            answer = posterior(steps, x, *args, **kwargs)
            return replace(answer, verdict=torch.where(torch.arange(len(x)) % 2 == 0, int(vd.Verdict.REFUSE), 0))

        monkeypatch.setattr(M1M2Steps, "posterior", refusing)
        return fitted.fit(X, y), X

    return fit


def test_refused_rows_are_rejected_whatever_their_probability(half_refused):
    fitted, X = half_refused(30, estimator="corrected", cost=1.0)
    decided = fitted.decide(X)
    refused = decided.evidence.verdict == vd.Verdict.REFUSE
    assert np.array_equal(decided.action == -1, refused)
    assert np.array_equal(decided.score > decided.threshold, refused)
    assert np.array_equal(fitted.predict(X), decided.label)  # never rejects
    fitted.set_params(reject_refused=False)
    assert (fitted.decide(X).action == decided.label).all()


def test_refused_weights_do_not_affect_the_plugin(half_refused):
    fitted, X = half_refused(30, estimator="plugin", cost=1.0)
    assert (fitted.decide(X, evidence=True).action != -1).all()


def test_refused_rows_count_towards_the_conformal_share(half_refused):
    fitted, X = half_refused(110, alpha=0.6, reject_by="error", estimator="corrected")
    decided = fitted.decide(X)
    assert (decided.action[decided.evidence.verdict == vd.Verdict.REFUSE] == -1).all()
    assert math.isfinite(fitted.threshold_)
    fitted, X = half_refused(
        110, alpha=0.2, reject_by="error", estimator="corrected"
    )  # more are refused than may be rejected
    assert fitted.threshold_ == math.inf
    assert (fitted.decide(X).action != -1).all()


@pytest.mark.parametrize("estimator", ["plugin", "corrected"])
def test_the_estimator_can_be_fixed(estimator):
    X, y = blobs(30)
    fitted = small(estimator=estimator).fit(X, y)
    corrected = fitted.steps_.posterior(fitted._scaled(X), 50, seed=fitted.seed_).prob
    assert fitted.estimator_ == estimator
    assert np.allclose(fitted.predict_proba(X), corrected) == (estimator == "corrected")


@pytest.mark.parametrize("reject_by", selective.REJECT_SCORES)
def test_the_conformal_threshold_is_that_of_the_held_out_rows(reject_by):
    X, y = blobs(110)
    fitted = small(alpha=0.2, reject_by=reject_by, n_free=1).fit(X, y)
    split = hold_out(110, np.arange(110), y, 0.2, np.random.RandomState(fitted.seed_))
    held_out = fitted.decide(X[split.held_out])
    assert fitted.n_held_out_ == 22
    assert fitted.threshold_ == pytest.approx(selective.conformal_threshold(torch.tensor(held_out.score), 0.2))
    assert (held_out.score > fitted.threshold_ + 1e-9).mean() <= 0.2
    if reject_by == "free":
        trusted = np.isfinite(held_out.score)
        np.testing.assert_allclose(held_out.score[trusted], held_out.free[trusted])


def test_with_few_labels_nothing_is_held_out():
    X, y = blobs()
    fitted = small(objectives=("VAE", "WW"), proposals=("CHI",), estimator="auto").fit(X, y)
    assert (fitted.n_held_out_, fitted.estimator_, fitted.log_scores_, fitted.selection_) == (0, "plugin", {}, ())
    assert list(fitted.steps_.recognitions) == ["VAE"]
    with pytest.raises(
        SettingError, match=r"alpha=0.1 needs at least 20 held-out labels, but held_out=0.2 of 60 labels"
    ):
        small(alpha=0.1, reject_by="error").fit(X, y)


def test_labels_are_held_out_only_where_a_choice_needs_them():
    X, y = blobs(110)
    assert small(epochs=1).fit(X, y).n_held_out_ == 0
    assert small(epochs=1, alpha=0.1).fit(X, y).n_held_out_ == 0
    needed = {"estimator": "auto"}, {"objectives": ("VAE", "WW")}, {"alpha": 0.1, "reject_by": "error"}
    for settings in (*needed, {"novelty": "evidence"}):
        assert small(epochs=1, **settings).fit(X, y).n_held_out_ == 22


def test_agreement_is_cross_fitted_where_nothing_was_held_out(monkeypatch, tmp_path):
    X, y = blobs(40)
    y[30:] = -1
    fitted = small(epochs=30).fit(X, y)
    trained_on = []
    monkeypatch.setattr(
        "vaerdict.classify.fitting.fit_m1m2_steps",
        lambda make, x, labelled, *rest, **settings: (
            trained_on.append((len(x), len(labelled))),
            fit_m1m2_steps(make, x, labelled, *rest, **settings),
        )[1],
    )
    again = vd.SelectiveClassifier.load(fitted.save(tmp_path / "fitted"))
    for one in (fitted, again):
        assert one.agreement_.n == 30
        assert one.agreement_ is one.agreement_
    assert trained_on == 10 * [(34, 24)]  # the labels of a fold are not trained on
    assert fitted.agreement_ == again.agreement_
    assert fitted.agreement_.accuracy > 0.9
    alone = small(epochs=1).fit(X, np.where(np.arange(40) < 2, np.arange(40), -1))
    with pytest.raises(DataError, match="2 labels, none of a class with another label"):
        alone.agreement_  # noqa: B018
    with pytest.raises(ValueError, match="not fitted"):
        small().agreement_  # noqa: B018


def test_progress_is_printed_on_request(capsys):
    X, y = blobs(30)
    small(epochs=20).fit(X, y)
    assert capsys.readouterr().out == ""
    fitted = small(epochs=20, verbose=1, estimator="corrected").fit(X, y)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 10
    assert lines[-1] == "[SelectiveClassifier] VAE (1 of 1): 20 of 20"
    fitted.predict(X)
    assert "p(c | x) by importance sampling: 30 of 30" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"estimator": "best"}, "estimator='best' is unknown; choose one of auto, plugin, corrected"),
        ({"reject_by": "max"}, "reject_by='max' is unknown; choose one of auto, novelty, error, entropy, free"),
        ({"likelihood": "poisson"}, "likelihood='poisson' is unknown"),
        ({"cost": 2.0}, r"cost=2.0 must lie in \[0, 1\]"),
        ({"held_out": 1.0}, "held_out=1.0 must lie strictly between 0 and 1"),
        ({"novelty": "distance"}, "novelty='distance' is unknown; choose one of diffusion, neighbours, class"),
        ({"objectives": ()}, r"objectives=\(\) is empty"),
        ({"reject_by": "entropy"}, r"'entropy' \(entropy of .*\) cannot be compared with cost=; give alpha="),
        ({"reject_by": "free", "alpha": 0.1}, "give n_free=1 or more"),
        ({"n_free": -1}, "n_free=-1 must not be negative"),
        ({"alpha": 1.0}, "alpha=1.0 must lie strictly between 0 and 1"),
        ({"n_jobs": 0}, "n_jobs=0 leaves no thread"),
        ({"objectives": ("ELBO",)}, "no objective 'ELBO'"),
        ({"image_shape": (3, 3)}, r"image_shape=\(3, 3\) does not hold"),
    ],
)
def test_settings_that_cannot_be_used_are_refused(settings, message):
    with pytest.raises(SettingError, match=message):
        small(**settings).fit(*blobs())


def test_several_objectives_need_held_out_rows(digits):
    x, y = torch.tensor(digits[0][:20]).float(), torch.tensor(digits[1][:20])
    with pytest.raises(SettingError, match="2 objectives and 0 held-out rows"):
        fit_m1m2_steps(
            lambda generator: pytest.fail("no model is made"),
            x,
            torch.arange(20),
            y,
            x[:0],
            objectives=[semi_recipe("VAE"), semi_recipe("WW")],
            settings=SemiSettings(),
        )


# ------------------------------------------------------------------------------------------------ rows
def test_held_out_rows_are_not_trained_on():
    labelled, codes = np.arange(0, 300, 2), np.arange(150) % 5
    split = hold_out(400, labelled, codes, 0.2, np.random.RandomState(0))
    assert len(split.held_out) == 30
    assert not set(split.train) & (set(split.held_out) | set(split.valid))
    assert set(split.labelled) | set(split.held_out) == set(labelled)
    assert set(split.labelled) <= set(split.train)
    assert np.array_equal(split.codes, codes[split.labelled // 2])
    assert np.array_equal(split.held_out_codes, codes[split.held_out // 2])
    assert len(split.valid) == 30 + 50
    assert len(split.train) == 400 - 80


def test_the_last_label_of_a_class_is_not_held_out():
    codes = np.r_[np.zeros(200, int), 1]
    for seed in range(20):
        split = hold_out(201, np.arange(201), codes, 0.5, np.random.RandomState(seed))
        assert 1 in split.codes
        assert 1 not in split.held_out_codes


def test_too_few_labels_are_not_held_out():
    n = 5 * MIN_HELD_OUT
    assert len(hold_out(n, np.arange(n), np.zeros(n, int), 0.2, np.random.RandomState(0)).held_out) == MIN_HELD_OUT
    none = hold_out(n, np.arange(n - 5), np.zeros(n - 5, int), 0.2, np.random.RandomState(0))
    assert (len(none.held_out), len(none.valid), len(none.train)) == (0, 0, n)


def test_the_likelihood_follows_from_the_range_of_the_features():
    X = np.array([[0.0, 0.5], [1.0, 0.5]])
    assert likelihood_of(X) == "bernoulli"
    assert likelihood_of(X - 0.1) == "gaussian"
    center, spread = scaling(2 * X, "gaussian")
    np.testing.assert_allclose(center, [1, 1])
    np.testing.assert_allclose(spread, [1, 1])  # the second is constant
    np.testing.assert_allclose(scaling(X, "bernoulli")[1], [1, 1])
    with pytest.raises(DataError, match=r'must lie in \[0, 1\]: clip them, or fit with likelihood="gaussian"'):
        check_range(2 * X, "bernoulli")
    check_range(2 * X, "gaussian")


@pytest.mark.parametrize("constant", [0.1, -1234.567, 1e-9, 0.0])
def test_rounding_does_not_count_as_spread(constant):
    """The standard deviation of a computed constant is not exactly zero and must not be divided by."""
    X = np.c_[np.full(1000, constant), np.linspace(-1, 1, 1000), constant + 1e-9 * np.arange(1000)]
    X[::7, 0] = np.nextafter(constant, 1)
    center, spread = scaling(X, "gaussian")
    assert spread[0] == 1
    assert center[0] == pytest.approx(constant)
    np.testing.assert_allclose(
        spread[1:], X[:, 1:].std(0)
    )  # features that vary are standardised, however little they vary


def test_a_constant_feature_has_no_effect():
    X, y = blobs(30)
    fitted = small(n_draws=30).fit(np.c_[X, np.full(30, 0.1)], y)
    moved = fitted.predict_proba(np.c_[X, np.full(30, 0.1000001)])
    np.testing.assert_allclose(moved, fitted.predict_proba(np.c_[X, np.full(30, 0.1)]), atol=1e-4)


def test_features_outside_the_range_of_the_likelihood_are_refused():
    X, y = blobs(30)
    X = (X - X.min()) / np.ptp(X)
    fitted = small(epochs=1).fit(X, y)
    assert fitted.likelihood_ == "bernoulli"
    with pytest.raises(DataError, match="features reach from 0 to 2"):
        fitted.predict(2 * X)


@pytest.mark.parametrize(
    ("label", "reject", "kind", "expected"),
    [
        ([1, 2], -1, "i", [1, -1]),
        ([1.0, 2.0], -1, "f", [1.0, -1.0]),
        (["a", "b"], "reject", "U", ["a", "reject"]),
        (["a", "b"], -1, "O", ["a", -1]),
        ([1, 2], "none", "O", [1, "none"]),
    ],
)
def test_the_reject_label_may_have_another_type(label, reject, kind, expected):
    action = with_rejects(np.array(label), np.array([False, True]), reject)
    assert action.dtype.kind == kind
    assert action.tolist() == expected


def test_images_are_convolved_and_shifted(digits):
    X, y, _, _ = digits
    fitted = small(epochs=3, image_shape=(8, 8), shifts=1).fit(X[:90], y[:90])
    assert type(fitted.steps_.recognition.encoder).__name__ == "CNN"
    assert fitted.likelihood_ == "bernoulli"
    assert fitted.predict_proba(X[:5]).shape == (5, 9)


def test_shared_noise_is_the_same_for_all_observations_and_differs_between_particles():
    shared, plain = CommonRandomNumbers((seeded(0),)), Iid((seeded(0),))
    like = torch.zeros(1, dtype=torch.double)
    eps = shared.normal(6, (3, 2), 4, like=like)
    assert eps.shape == (6, 3, 2, 4)
    assert torch.equal(eps, plain.normal(6, (1, 1), 4, like=like).expand_as(eps))
    assert len(eps[:, 0, 0].unique()) == 24
    assert not torch.equal(shared.normal(6, (3, 2), 4, like=like), eps)
    normal, gamma = shared.normal_gamma(5, (3,), 2, torch.tensor(2.0))
    assert torch.equal(normal[:, 0], normal[:, 2])
    assert torch.equal(gamma, gamma[:, :1].expand(5, 3, 1))


@pytest.mark.parametrize(("n_jobs", "inside"), [(None, 1), (2, 2), (-1, os.cpu_count())])
def test_the_number_of_threads_is_set_and_restored(n_jobs, inside):
    before = torch.get_num_threads()
    with threads(n_jobs):
        assert torch.get_num_threads() == inside
    assert torch.get_num_threads() == before


# ------------------------------------------------------------------------------------------------ files
def test_a_saved_classifier_is_the_same_classifier(digits, reader, decided, tmp_path):
    path = reader.save(tmp_path / "reader")
    assert path == tmp_path / "reader.safetensors"
    again = vd.SelectiveClassifier.load(path)
    same = again.decide(digits[2], evidence=True)
    for before, after in zip((*decided[:-1], *decided.evidence), (*same[:-1], *same.evidence), strict=True):
        assert np.array_equal(before, after, equal_nan=np.asarray(before).dtype.kind == "f")
    for name in (
        "agreement_",
        "selection_",
        "log_scores_",
        "estimator_",
        "reject_by_",
        "threshold_",
        "n_held_out_",
        "n_features_in_",
    ):
        assert getattr(again, name) == getattr(reader, name)
    assert again.get_params() == reader.get_params()


def test_file_names_may_contain_dots(reader, tmp_path):
    paths = [reader.save(tmp_path / name) for name in ("reader-0.1", "reader-0.2")]
    assert [path.name for path in paths] == ["reader-0.1.safetensors", "reader-0.2.safetensors"]
    assert all(path.exists() for path in paths)
    assert vd.SelectiveClassifier.load(tmp_path / "reader-0.1").seed_ == reader.seed_


def test_a_classifier_fitted_on_a_gpu_is_read_onto_the_cpu_without_one(
    digits, reader, decided, tmp_path, monkeypatch, caplog
):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    path = write(copy.copy(reader).set_params(device="cuda"), tmp_path / "reader")
    again = vd.SelectiveClassifier.load(path)
    assert again.device == "cpu"
    assert "fitted on cuda, which is not available" in caplog.text
    assert np.array_equal(again.predict_proba(digits[2]), reader.predict_proba(digits[2]))
    assert vd.SelectiveClassifier.load(path, device="cpu").device == "cpu"
    assert caplog.text.count("not available") == 1


def test_string_classes_and_feature_names_are_saved(tmp_path):
    pandas = pytest.importorskip("pandas")
    X, code = blobs(40)
    X = pandas.DataFrame(X, columns=["height", "weight"])
    fitted = small(epochs=5, reject_label="reject").fit(X, np.array(["a", "b", "c"])[code])
    again = vd.SelectiveClassifier.load(fitted.save(tmp_path / "named"))
    assert again.feature_names_in_.tolist() == ["height", "weight"]
    assert again.classes_.tolist() == ["a", "b", "c"]
    assert np.array_equal(again.predict_proba(X), fitted.predict_proba(X))


def test_the_file_holds_tensors_and_text_only(reader, tmp_path):
    raw = reader.save(tmp_path / "reader").read_bytes()
    header = json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")])
    assert json.loads(header.pop("__metadata__")["notes"])["format"] == "vaerdict selective classifier 3"
    assert {entry["dtype"] for entry in header.values()} <= {"F64", "F32", "I64", "BOOL"}


def test_other_files_are_refused(reader, tmp_path):
    from vaerdict.training.checkpoint import save_checkpoint

    (tmp_path / "text.safetensors").write_text("no tensors")
    with pytest.raises(SettingError, match="is no checkpoint of vaerdict"):
        vd.SelectiveClassifier.load(tmp_path / "text")
    save_checkpoint(tmp_path / "other", {"a": torch.zeros(1)}, {"format": "other"})
    with pytest.raises(SettingError, match="holds 'other', not 'vaerdict selective classifier 3'"):
        vd.SelectiveClassifier.load(tmp_path / "other")


def test_only_numbers_and_strings_can_be_saved(tmp_path):
    X, y = blobs(30)
    with pytest.raises(SettingError, match="only numbers and strings can be saved"):
        small(epochs=1, reject_label=1j).fit(X, y).save(tmp_path / "complex")


# ------------------------------------------------------------------------------------------------ around it
def test_without_scikit_learn_the_error_says_what_to_install():
    code = (
        "import sys; sys.modules['sklearn'] = None\n"
        "import vaerdict\n"
        "try:\n    vaerdict.SelectiveClassifier\n"
        "except vaerdict.SettingError as error:\n    print(error)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "pip install vaerdict[sklearn]" in done.stdout


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="module 'vaerdict' has no attribute 'SelectiveClasifier'"):
        vd.SelectiveClasifier  # noqa: B018


def test_the_digits_example_runs(capsys):
    """At toy size: few rows, few epochs."""
    source = (Path(__file__).parent.parent / "examples" / "digits.py").read_text()
    toy = {
        "alpha=0.1, random_state": "epochs=40, proposals=(), random_state",
        "slice(1200), slice(1200, None)": "slice(600), slice(600, 700)",
        "X[test][:100]": "X[test][:20]",
    }
    for old, new in toy.items():
        assert source.count(old) == 1
        source = source.replace(old, new)
    exec(source, {})
    printed = capsys.readouterr().out
    assert re.search(r"verdicts: \d+% OK", printed)
    assert re.search(r"called novel: \d+ rows", printed)
    assert float(re.search(r"digits 0-8: ([\d.]+)% correct", printed)[1]) > 80
    assert float(re.search(r"rejected: (\d+)% of the nines", printed)[1]) > 50
