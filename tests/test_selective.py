"""Reject scores, their curves compared with scikit-learn and by hand, and simulated guarantees of thresholds."""

from __future__ import annotations

import math

import pytest
import torch

from checks import assert_mean
from vaerdict import decisions, selective
from vaerdict.core import DataError, SettingError, ShapeError
from vaerdict.noise import seeded

PROB = torch.tensor([[0.7, 0.2, 0.1], [0.25, 0.25, 0.5], [0.0, 1.0, 0.0]], dtype=torch.double)


# ------------------------------------------------------------------------------------------------ scores
def test_scores_by_hand():
    torch.testing.assert_close(selective.one_minus_max(PROB), torch.tensor([0.3, 0.5, 0.0]).double())
    by_hand = [-sum(p * math.log(p) for p in row if p) for row in PROB.tolist()]
    torch.testing.assert_close(selective.entropy(PROB), torch.tensor(by_hand).double())
    torch.testing.assert_close(selective.free_class(PROB, [1, 2]), torch.tensor([0.3, 0.75, 1.0]).double())
    torch.testing.assert_close(selective.one_minus_max(PROB, [1]), torch.tensor([0.3, 0.5, 1.0]).double())


def test_the_registry_holds_every_score_with_its_meaning():
    by_name = {name: score.function(PROB, [2]) for name, score in selective.REJECT_SCORES.items()}
    assert list(by_name) == ["error", "entropy", "free"]
    torch.testing.assert_close(by_name["error"], torch.tensor([0.3, 0.75, 0.0]).double())
    assert torch.equal(by_name["entropy"], selective.entropy(PROB))
    assert torch.equal(by_name["free"], PROB[:, 2])
    assert all(score.meaning for score in selective.REJECT_SCORES.values())


def test_the_bayes_rule_is_a_threshold_on_the_first_score(generator):
    prob = torch.rand(200, 4, generator=generator, dtype=torch.double).softmax(-1)
    rejected = decisions.decide_or_reject(prob, 0.7) == -1
    assert 0 < rejected.sum() < 200
    assert torch.equal(rejected, selective.one_minus_max(prob) > 0.7)


def test_probabilities_among_the_known_classes():
    among_known = selective.among_known(PROB, free=[1])
    torch.testing.assert_close(among_known, torch.tensor([[7 / 8, 1 / 8], [1 / 3, 2 / 3], [0.5, 0.5]]).double())


def test_accuracy_ignores_items_of_no_class():
    label = torch.tensor([0, 1, -1])
    assert selective.wrong(PROB, label).tolist() == [False, True, True]
    assert selective.accuracy(PROB, label) == 0.5
    assert selective.accuracy(PROB, torch.tensor([0, 2, 7])) == 1
    with pytest.raises(DataError, match="no item has a label among the classes"):
        selective.accuracy(PROB, torch.tensor([-1, 3, -1]))


# ------------------------------------------------------------------------------------------------ curves
def scored(generator: torch.Generator, n: int, digits: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Scores that are larger for unseen items on average; few digits make many ties."""
    unseen = torch.rand(n, generator=generator) < 0.2
    score = torch.randn(n, generator=generator, dtype=torch.double) + unseen
    return score.round(decimals=digits), unseen


@pytest.mark.parametrize("digits", [0, 1, 12])
@pytest.mark.parametrize("n", [30, 1000])
def test_curves_agree_with_scikit_learn(n, digits, generator):
    metrics = pytest.importorskip("sklearn.metrics")
    score, unseen = scored(generator, n, digits)
    curve = selective.sweep(score, unseen)
    precision, recall, threshold = metrics.precision_recall_curve(unseen, score)
    torch.testing.assert_close(curve.precision, torch.as_tensor(precision))
    torch.testing.assert_close(curve.recall, torch.as_tensor(recall))
    # here items above the threshold are rejected, in scikit-learn those at or above it
    assert [int((score > t).sum()) for t in curve.threshold[:-1]] == [int((score >= t).sum()) for t in threshold]
    assert selective.average_precision(score, unseen) == pytest.approx(metrics.average_precision_score(unseen, score))
    assert selective.auroc(score, unseen) == pytest.approx(metrics.roc_auc_score(unseen, score))


def test_rejecting_by_hand():
    score, unseen = torch.tensor([3.0, 2.0, 2.0, 1.0]), torch.tensor([True, True, False, False])
    curve = selective.sweep(score, unseen)
    assert curve.threshold.tolist() == [-math.inf, 1, 2, 3]
    assert curve.recall.tolist() == [1, 1, 0.5, 0]
    assert curve.false_alarms.tolist() == [1, 0.5, 0, 0]
    torch.testing.assert_close(curve.precision, torch.tensor([1 / 2, 2 / 3, 1, 1]).double())
    assert selective.average_precision(score, unseen) == pytest.approx(0.5 * 1 + 0.5 * 2 / 3)
    assert selective.auroc(score, unseen) == pytest.approx(3.5 / 4)


def test_a_constant_score_has_the_base_rate():
    unseen = torch.arange(10) < 3
    assert selective.average_precision(torch.ones(10), unseen) == pytest.approx(0.3)
    assert selective.auroc(torch.ones(10), unseen) == pytest.approx(0.5)


def test_risk_and_coverage_by_hand():
    score = torch.tensor([0.4, 0.1, 0.2, 0.2])
    curve = selective.risk_coverage(score, torch.tensor([True, False, True, False]))
    torch.testing.assert_close(curve.coverage, torch.tensor([0.25, 0.75, 1.0]).double())
    torch.testing.assert_close(curve.risk, torch.tensor([0, 1 / 3, 1 / 2]).double())
    assert curve.area == pytest.approx(0.25 * 0 + 0.5 / 3 + 0.25 / 2)
    assert [curve.accuracy_at(c) for c in (0.0, 0.25, 0.26, 1.0)] == pytest.approx([1, 1, 2 / 3, 1 / 2])


def test_the_area_without_ties_is_the_mean_risk_over_items(generator):
    score, wrong = scored(generator, 300, 12)
    by_hand = wrong[score.argsort()].double().cumsum(0) / torch.arange(1, 301)
    assert selective.risk_coverage(score, wrong).area == pytest.approx(by_hand.mean().item())


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: selective.sweep(torch.ones(3), torch.ones(3).bool()), DataError, "of 3 items 3 are unseen; seen and"),
        (lambda: selective.auroc(torch.ones(3), torch.zeros(3).bool()), DataError, "of 3 items 0 are unseen; seen and"),
        (lambda: selective.sweep(torch.ones(3), torch.ones(2).bool()), ShapeError, r"expected \(n,\) both"),
        (lambda: selective.risk_coverage(torch.tensor([math.nan]), torch.ones(1).bool()), DataError, "1 of 1 reject"),
        (lambda: selective.wrong(PROB, torch.zeros(2)), ShapeError, r"expected \(n, classes\) and \(n,\)"),
        (lambda: selective.entropy(2 * PROB), SettingError, "must lie in"),
        (lambda: selective.coverage_threshold(torch.ones(3), 1.5), SettingError, r"coverage=1.5 must lie in \[0, 1\]"),
        (lambda: selective.conformal_threshold(torch.ones(3), 0.0), SettingError, "alpha=0.0 must lie strictly"),
        (
            lambda: selective.guaranteed_risk_threshold(torch.ones(3), torch.ones(3).bool(), 0.1, confidence=1.0),
            SettingError,
            "confidence=1.0 must lie strictly",
        ),
    ],
)
def test_input_that_cannot_be_used_is_refused(call, error, message):
    with pytest.raises(error, match=message):
        call()


# ------------------------------------------------------------------------------------------------ thresholds
def test_thresholds_for_a_coverage_or_a_risk_by_hand():
    score = torch.tensor([0.4, 0.1, 0.2, 0.3])
    wrong = torch.tensor([False, False, True, False])
    assert selective.coverage_threshold(score, 0.5) == pytest.approx(0.2)
    assert selective.coverage_threshold(score, 0.51) == pytest.approx(0.3)
    assert selective.risk_threshold(score, wrong, 0.25) == pytest.approx(0.4)  # risk falls again after the one error
    assert selective.risk_threshold(score, wrong, 0.2) == pytest.approx(0.1)
    assert selective.risk_threshold(score, torch.ones(4).bool(), 0.5) == -math.inf


def test_the_conformal_threshold_is_an_order_statistic():
    score = torch.arange(1.0, 10.0)
    assert selective.conformal_threshold(score, 0.1) == 9
    assert selective.conformal_threshold(score, 0.2) == 8
    assert selective.conformal_threshold(score, 0.25) == 8
    assert selective.conformal_threshold(score, 0.09) == math.inf


def test_known_items_are_rejected_at_the_stated_rate(generator):
    """For continuous scores the share rejected over calibrations is (n + 1 - rank) / (n + 1) exactly."""
    n, alpha, repeats = 19, 0.2, 20_000
    scores = torch.randn(repeats, n + 1, generator=generator, dtype=torch.double)
    threshold = torch.tensor([selective.conformal_threshold(row[:n], alpha) for row in scores])
    rejected = (scores[:, n] > threshold).double()
    assert_mean(rejected, 0.2, rate=1e-6)
    uncorrected = scores[:, :n].quantile(1 - alpha, dim=1)  # the quantile without the finite-sample correction
    with pytest.raises(AssertionError, match="standard errors"):
        assert_mean((scores[:, n] > uncorrected).double(), 0.2, rate=1e-6)


def simulate_risk(choose, generator: torch.Generator, repeats: int = 500, n: int = 2000) -> torch.Tensor:
    """True error among the accepted for many calibrations: scores uniform, P(wrong | score s) = s / 2."""
    score = torch.rand(repeats, n, generator=generator, dtype=torch.double)
    wrong = torch.rand(repeats, n, generator=generator, dtype=torch.double) < score / 2
    threshold = torch.tensor([choose(s, w) for s, w in zip(score, wrong, strict=True)])
    return threshold.clamp(0, 1) / 4


def test_the_guaranteed_risk_is_exceeded_at_most_at_the_stated_rate(generator):
    """Confidence 0.9: at most 0.1 of the calibrations exceed the risk; without a guarantee many more do."""
    guaranteed = simulate_risk(lambda s, w: selective.guaranteed_risk_threshold(s, w, 0.1, confidence=0.9), generator)
    exceeded = (guaranteed > 0.1).double().mean().item()
    assert exceeded <= 0.1 + 4.75 * math.sqrt(0.1 * 0.9 / 500)  # false alarms at a rate of 1e-6
    assert (guaranteed > 0.02).double().mean() > 0.5  # without rejecting everything
    unguaranteed = simulate_risk(lambda s, w: selective.risk_threshold(s, w, 0.1), generator)
    assert (unguaranteed > 0.1).double().mean() > 0.3


def test_the_guaranteed_risk_by_hand():
    """No error in n items proves a risk r if (1 - r)^n is at most a twentieth of the level."""
    score, right = torch.arange(100).double(), torch.zeros(100, dtype=torch.bool)
    provable = 1 - (0.05 / 20) ** (1 / 100)
    assert selective.guaranteed_risk_threshold(score, right, provable + 1e-6) > score.max()
    assert selective.guaranteed_risk_threshold(score, right, provable - 1e-6) < score.max()
    assert selective.guaranteed_risk_threshold(score, ~right, 0.9) == -math.inf


def test_ties_are_accepted_or_rejected_together():
    score, wrong = torch.ones(200), torch.zeros(200, dtype=torch.bool)
    assert selective.guaranteed_risk_threshold(score, wrong, 0.5) >= 1
    assert selective.conformal_threshold(score, 0.1) == 1


def test_thresholds_are_deterministic():
    score, wrong = scored(seeded(1), 100, 3)
    assert selective.guaranteed_risk_threshold(score, wrong, 0.5) == selective.guaranteed_risk_threshold(
        score, wrong, 0.5
    )
