"""Comparisons of two groups under a fitted model: exact posteriors, bounded memory, errors, refits."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from checks import Largest
from vaerdict.core import SettingError, ShapeError
from vaerdict.de import model as de_model
from vaerdict.de.effects import PAIR, PROPORTION
from vaerdict.distributions import Diagonal, Elliptical, StandardNormal
from vaerdict.engines import Threads
from vaerdict_paper.experiments.genes_contrasts import compare_groups

A, B, ONE, OTHER = torch.arange(0, 12), torch.arange(12, 24), torch.tensor([3]), torch.tensor([20])
NOISE_SD = 0.5


@dataclass(frozen=True)
class Powers:
    """Latents with a Gaussian posterior, x = z + noise, and expression 2^z: fold changes are differences of latents."""

    d: int

    @property
    def prior(self) -> StandardNormal:
        return StandardNormal(self.d)

    def log_joint(self, x: Tensor, z: Tensor) -> Tensor:
        return self.prior.log_prob(z) - 0.5 * ((x - z) / NOISE_SD).square().sum(-1)

    def expression(self, z: Tensor) -> Tensor:
        return torch.exp2(z)

    def posterior(self, x: Tensor) -> tuple[Tensor, float]:
        """Mean and standard deviation of each latent."""
        shrink = 1 / (1 + NOISE_SD**2)
        return shrink * x, math.sqrt(shrink) * NOISE_SD

    def exact(self, x: Tensor, inflate: float = 1.0) -> Elliptical:
        loc, sd = self.posterior(x)
        return Elliptical(loc, Diagonal(torch.full_like(loc, sd * inflate)))


@pytest.fixture
def x(generator) -> Tensor:
    return torch.randn(24, 5, generator=generator, dtype=torch.float64)


def wide(x: Tensor, inflate: float = 1.5) -> de_model.Proposed:
    """The posterior by an inflated proposal, whose weights are bounded."""
    model = Powers(x.shape[1])
    return de_model.Proposed(model, x, model.exact(x, inflate))


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


def test_refined_proposals_with_a_share_of_the_prior_are_as_good_as_exact_ones(x):
    posteriors = (
        de_model.refined(Powers(5), x, torch.zeros_like(x)),
        de_model.Proposed(Powers(5), x, Powers(5).exact(x)),
    )
    refined, exact = (
        compare_groups(q, A, B, weighting=de_model.Equal(), n_draws=4000, seed=2).table for q in posteriors
    )
    torch.testing.assert_close(refined["lfc_mean"], exact["lfc_mean"], atol=0.02, rtol=0)
    torch.testing.assert_close(refined["prob_de"], exact["prob_de"], atol=0.05, rtol=0)


def largest(n_cells: int, n_draws: int, d: int = 20) -> int:
    cells = wide(torch.zeros(n_cells, d))
    a, b = torch.arange(n_cells).tensor_split([n_cells // 2])
    with Largest() as seen:
        compare_groups(cells, a, b, n_draws=n_draws, block=8, chunk=8000, engine=Threads(1))
    return seen.numel


def test_memory_does_not_grow_with_cells_times_draws_times_genes():
    """The latents of a block are the largest tensor; only a few numbers per cell are stored for all cells."""
    few, many = largest(50, 200), largest(250, 200)
    assert few == many <= 8 * 200 * 20
    assert many < 250 * 200 * 20 / 20


def test_the_answer_does_not_depend_on_blocks_and_chunks(x):
    small, large = (
        compare_groups(wide(x), A, B, n_draws=100, seed=3, block=block, chunk=chunk).table
        for block, chunk in ((1, 500), (100, 10**6))
    )
    for key in small:
        torch.testing.assert_close(small[key], large[key])
    other = compare_groups(wide(x), A, B, n_draws=100, seed=4).table
    assert not torch.allclose(other["lfc_mean"], small["lfc_mean"])


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


def test_the_stated_error_is_that_between_seeds(x):
    """Probabilities by many seeds scatter as their stated error, with few particles of unequal weight."""
    cells = wide(x, 2.5)
    options: dict[str, Any] = {"estimand": PROPORTION, "weighting": de_model.Equal(), "n_draws": 100}
    tables = [compare_groups(cells, ONE, OTHER, seed=s, **options).table for s in range(90)]
    spread = torch.stack([t["prob_de"] for t in tables]).std(0)
    stated = torch.stack([t["mcse"] for t in tables]).mean(0)
    middling = spread > 0.1  # elsewhere the rule of succession sets a floor
    ratio = (stated / spread)[middling]
    assert len(ratio) >= 3
    assert ((ratio > 0.7) & (ratio < 1.6)).all()
    naive = torch.stack([(t["prob_de"] * (1 - t["prob_de"]) / 100).sqrt() for t in tables]).mean(0)
    assert (naive / spread)[middling].max() < 0.7  # the number of draws instead of the effective number would fail


def test_averages_tell_good_weights_from_bad(x):
    good, bad = (compare_groups(wide(x, inflate), A, B, n_draws=400).averages for inflate in (1.05, 0.3))
    assert good.khat.nanmedian() < 0.5 < 0.6 < bad.khat.nanmedian()
    assert good.ess.median() > 300


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
