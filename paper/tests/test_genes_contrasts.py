"""Comparisons of two groups under a fitted model: exact posteriors, bounded memory, errors, refits."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from de_toys import Powers, wide
from vaerdict.core import SettingError, ShapeError
from vaerdict.de import model as de_model
from vaerdict.de.effects import PAIR, PROPORTION
from vaerdict_paper.experiments.genes_contrasts import compare_groups

A, B, ONE, OTHER = torch.arange(0, 12), torch.arange(12, 24), torch.tensor([3]), torch.tensor([20])


@pytest.fixture
def x(generator) -> Tensor:
    return torch.randn(24, 5, generator=generator, dtype=torch.float64)


def test_one_cell_against_another_has_the_exact_posterior(x):
    """The LFC is normal with known mean and variance; importance weights must recover it."""
    t = compare_groups(wide(x), ONE, OTHER, estimand=PROPORTION, weighting=de_model.Equal(), n_draws=20_000).table
    loc, sd = Powers(5).posterior(x)
    exact = torch.distributions.Normal(loc[3] - loc[20], math.sqrt(2) * sd)
    up, down = 1 - exact.cdf(torch.tensor(0.5)), exact.cdf(torch.tensor(-0.5))
    torch.testing.assert_close(t["lfc_mean"], exact.mean, atol=0.03, rtol=0)
    torch.testing.assert_close(t["lfc_median"], exact.mean, atol=0.04, rtol=0)
    for key, expected in (("prob_up", up), ("prob_down", down), ("prob_de", up + down)):
        torch.testing.assert_close(t[key], expected, atol=0.015, rtol=0)
    width = 2 * (exact.icdf(torch.tensor(0.95)) - exact.mean)
    torch.testing.assert_close(t["lfc_high"] - t["lfc_low"], width, rtol=0.04, atol=0)


def test_opposite_contrasts_mirror_each_other(x):
    one, other = (compare_groups(wide(x), *groups, n_draws=200).table for groups in ((A, B), (B, A)))
    torch.testing.assert_close(one["lfc_mean"], -other["lfc_mean"])
    torch.testing.assert_close(one["prob_up"], other["prob_down"])
    torch.testing.assert_close(one["q_value"], other["q_value"])
    torch.testing.assert_close(one["mean_a"], other["mean_b"])


def test_pairs_compare_one_random_cell_of_each_group(x):
    pairs, groups = (compare_groups(wide(x), A, B, estimand=e, n_draws=300).table for e in (PAIR, PROPORTION))
    assert ((pairs["lfc_high"] - pairs["lfc_low"]) > 2 * (groups["lfc_high"] - groups["lfc_low"])).all()


def test_refits_widen_a_comparison(x):
    """Refits are other models of the same cells: here the same posterior with another scale of one gene."""
    factor = torch.tensor([1.0, 2.0, 1.0, 1.0, 1.0])

    @dataclass(frozen=True)
    class Scaled(Powers):
        by: float = 1.0

        def expression(self, z: Tensor) -> Tensor:
            return torch.exp2(z * factor**self.by)

    refits = [de_model.Proposed(Scaled(5, by), x, Powers(5).exact(x)) for by in (-1.0, 0.0, 1.0)]
    options: dict[str, Any] = {"estimand": PROPORTION, "weighting": de_model.Equal(), "n_draws": 300}
    alone, refitted = (compare_groups(wide(x), A, B, refits=r, **options).table for r in ([], refits))
    ratio = (refitted["lfc_high"] - refitted["lfc_low"]) / (alone["lfc_high"] - alone["lfc_low"])
    assert ratio[1] > 1.2
    torch.testing.assert_close(ratio[[0, 2, 3, 4]], torch.ones(4).double(), atol=0.05, rtol=0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"delta": 0.0}, "delta=0.0 must be positive"),
        ({"interval": 1.0}, "interval=1.0 is no probability"),
        ({"a": torch.tensor([99])}, "must name some of the cells 0 to 23"),
        ({"a": torch.arange(2)}, "a bootstrap of 2 cells shows no spread"),
        ({"n_draws": 0}, "n_draws=0 must be a whole number"),
    ],
)
def test_meaningless_settings_are_refused(x, change, message):
    with pytest.raises(SettingError, match=message):
        compare_groups(wide(x), **{"a": A, "b": B, "n_draws": 20, **change})


def test_refits_must_be_of_the_same_cells(x):
    with pytest.raises((SettingError, ShapeError), match="must name some of the cells 0 to 19"):
        compare_groups(wide(x), A, B, refits=[wide(x), wide(x[:20])], n_draws=20)
