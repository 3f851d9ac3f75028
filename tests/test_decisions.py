"""Bayes actions, the reject option, and sets of discoveries with a bounded expected FDR."""

from __future__ import annotations

import itertools

import pytest
import torch

from vaerdict import decisions
from vaerdict.core import SettingError, ShapeError

PROB = torch.tensor([[0.7, 0.2, 0.1], [0.4, 0.35, 0.25]], dtype=torch.double)


def test_expected_loss_and_the_best_action_by_hand():
    loss = torch.tensor([[0.0, 1.0, 10.0], [5.0, 0.0, 1.0]])
    expected = decisions.expected_loss(PROB, loss)
    torch.testing.assert_close(expected, torch.tensor([[1.2, 3.6], [2.85, 2.25]], dtype=torch.double))
    assert decisions.bayes_action(PROB, loss).tolist() == [0, 1]


def test_the_first_of_equal_actions_is_taken():
    assert decisions.bayes_action(torch.tensor([0.5, 0.5]), 1 - torch.eye(2)).item() == 0


def test_zero_one_loss_takes_the_most_probable_class_for_any_batch():
    prob = PROB.expand(4, 2, 3)
    assert decisions.bayes_action(prob, 1 - torch.eye(3)).shape == (4, 2)
    assert torch.equal(decisions.bayes_action(prob, 1 - torch.eye(3)), prob.argmax(-1))


@pytest.mark.parametrize(("cost", "expected"), [(0.0, [-1, -1]), (0.25, [-1, -1]), (0.35, [0, -1]), (0.7, [0, 0])])
def test_items_are_rejected_where_the_best_class_is_too_uncertain(cost, expected):
    assert decisions.decide_or_reject(PROB, cost).tolist() == expected


def test_reject_loss_is_the_zero_one_loss_with_a_last_row():
    expected = torch.tensor([[0.0, 1.0], [1.0, 0.0], [0.25, 0.25]])
    assert torch.equal(decisions.reject_loss(2, 0.25), expected)
    with pytest.raises(SettingError, match=r"cost=1.5 of rejecting must lie in \[0, 1\]"):
        decisions.reject_loss(2, 1.5)


def test_expected_fdr_by_hand():
    prob = torch.tensor([0.5, 1.0, 0.9])
    torch.testing.assert_close(decisions.expected_fdr(prob), torch.tensor([0, 0.05, 0.2], dtype=torch.double))


@pytest.mark.parametrize("level", [0.0, 0.05, 0.1, 0.3, 1.0])
def test_discoveries_are_the_largest_admissible_set(level, generator):
    """Compared with all 2^8 sets: no larger one is admissible, and the last admissible hypothesis is included."""
    prob = torch.rand(8, generator=generator, dtype=torch.double) ** 0.2
    chosen = decisions.discoveries(prob, level)
    largest = max(
        size
        for size in range(9)
        for subset in itertools.combinations(range(8), size)
        if size == 0 or (1 - prob[list(subset)]).mean() <= level
    )
    assert chosen.sum() == largest
    if chosen.any():
        assert (1 - prob[chosen]).mean() <= level
        assert prob[chosen].min() >= prob[~chosen].max() if (~chosen).any() else True


def test_nothing_admissible_selects_nothing():
    assert not decisions.discoveries(torch.tensor([0.5, 0.6]), 0.1).any()


def test_q_values_are_the_levels_at_which_hypotheses_are_called(generator):
    prob = torch.rand(30, generator=generator, dtype=torch.double)
    q = decisions.q_values(prob)
    for level in (0.1, 0.3, 0.5):
        assert torch.equal(q <= level, decisions.discoveries(prob, level))
    assert torch.equal(q.argsort(), prob.argsort(descending=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("level", [0.01, 0.05, 0.1, 0.3])
def test_rounding_does_not_decide_how_many_are_called(level, dtype):
    """The mean of equal rates is that rate, however their sum is rounded."""
    for n in (1, 3, 10, 1000, 100_000):
        prob = torch.full((n,), 1 - level, dtype=dtype)
        assert decisions.discoveries(prob, level).all()
        assert (decisions.q_values(prob) <= level).all()
        assert not decisions.discoveries(prob - 1e-5, level).any()


@pytest.mark.parametrize(
    ("prob", "message"),
    [
        (
            torch.tensor([0.5, 0.6]),
            "sums of probabilities over states differ from one by up to 0.1; normalise them first",
        ),
        (torch.tensor([-0.5, 1.5]), "range from -0.5 to 1.5; they must lie in"),
        (torch.tensor([torch.nan, 1.0]), "range from nan"),
    ],
)
def test_values_that_are_not_probabilities_are_refused(prob, message):
    with pytest.raises(SettingError, match=message):
        decisions.bayes_action(prob, 1 - torch.eye(2))


def test_bad_shapes_and_levels_are_refused():
    with pytest.raises(ShapeError, match=r"loss has shape \(2, 2\); expected \(actions, states\) with 3 states"):
        decisions.bayes_action(PROB, torch.eye(2))
    with pytest.raises(ShapeError, match="no probabilities were given"):
        decisions.discoveries(torch.zeros(0), 0.1)
    with pytest.raises(ShapeError, match=r"shape \(2, 3\); expected one probability per hypothesis, \(n,\)"):
        decisions.discoveries(PROB, 0.1)
    with pytest.raises(SettingError, match=r"level=1.2 is not a false discovery rate"):
        decisions.discoveries(torch.tensor([0.5]), 1.2)
