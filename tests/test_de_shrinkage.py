"""Adaptive shrinkage of the counts' likelihood, genes that a model decides, and calibration of both."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch

from de_toys import simulated
from vaerdict.core import DataError
from vaerdict.de.counts_likelihood import LfcLikelihood, cells_likelihood
from vaerdict.de.model.combine import combine
from vaerdict.de.shrinkage import posterior_draws
from vaerdict.decisions import discoveries
from vaerdict.noise import seeded

GENES, DELTA = 2000, 0.5


def changes(generator: torch.Generator, share: float = 0.3) -> torch.Tensor:
    some = torch.rand(GENES, generator=generator) < share
    return torch.where(some, torch.randn(GENES, generator=generator, dtype=torch.float64), 0.0)


def spread(centre: torch.Tensor, generator: torch.Generator, sd: float = 0.05, draws: int = 200) -> torch.Tensor:
    return centre + sd * torch.randn(draws, len(centre), generator=generator, dtype=torch.float64)


class Answer(NamedTuple):
    """Draws of the fold changes by whoever decides each gene, and the shares of the model."""

    lfc: torch.Tensor
    by_model: float
    contradicted: float


def answered(model: torch.Tensor, likelihood: LfcLikelihood, *, new_cells: float, seed: int) -> Answer:
    combined = combine(model, likelihood, new_cells=new_cells)
    draws = posterior_draws(combined.likelihood, len(model), seed=seed)
    return Answer(draws, combined.share_by_model, combined.share_contradicted)


# ------------------------------------------------------------------------------------------------- who decides
def error(lfc: torch.Tensor, truth: torch.Tensor) -> float:
    return float((lfc.mean(0) - truth).square().mean().sqrt())


def test_a_model_that_learned_from_more_cells_decides_and_helps():
    generator = seeded(2)
    truth = changes(generator)
    model, likelihood = spread(truth, generator), cells_likelihood([simulated(generator, truth, 10.0)])
    answer, alone = (
        answered(model, likelihood, new_cells=20.0, seed=0),
        answered(model, likelihood, new_cells=1.0, seed=0),
    )
    assert answer.by_model > 0.9
    assert answer.contradicted < 0.1
    assert alone.by_model == 0  # trained on the cells compared it knows no more than their counts
    assert error(answer.lfc, truth) < 0.7 * error(alone.lfc, truth)


@pytest.mark.parametrize("seed", [3, 4])
def test_a_model_that_the_counts_contradict_does_not(seed):
    generator = seeded(seed)
    truth, nonsense = changes(generator), changes(generator)
    likelihood = cells_likelihood([simulated(generator, truth)])
    answer = answered(spread(nonsense, generator), likelihood, new_cells=20.0, seed=0)
    assert answer.contradicted > 0.2
    assert answer.by_model == 0
    assert error(answer.lfc, truth) < 0.5 * error(nonsense.expand(2, -1), truth)


def test_a_gene_whose_counts_contradict_the_model_is_decided_by_them():
    generator = seeded(10)
    truth = torch.zeros(GENES, dtype=torch.float64)
    truth[:20] = 3.0
    likelihood = cells_likelihood([simulated(generator, truth, 40.0, (40, 40))])
    answer = answered(spread(torch.zeros(GENES), generator), likelihood, new_cells=10.0, seed=0)
    assert answer.by_model > 0.9  # the model is right of nearly all
    assert answer.contradicted < 0.1
    called = (answer.lfc.abs() >= DELTA).double().mean(0) > 0.95
    strong = likelihood.mode[:20] / likelihood.error[:20] > 4
    assert strong.sum() > 5
    assert called[:20][strong].all()
    assert answer.lfc.mean(0)[:20][strong].min() > 1.0
    assert called[20:].sum() <= 1


def test_groups_of_different_size_are_not_shifted_by_genes_hardly_seen():
    generator = seeded(5)
    nothing = torch.zeros(GENES, dtype=torch.float64)
    likelihood = cells_likelihood([simulated(generator, nothing, 30.0, (20, 6000))])
    answer = answered(spread(nothing, generator), likelihood, new_cells=1.0, seed=0)
    assert abs(float(answer.lfc.mean(0).median())) < 0.2  # half a count in place of none would make it 0.5
    assert answer.contradicted < 0.2


def test_a_fold_change_that_is_not_finite_is_refused():
    generator = seeded(6)
    model = spread(changes(generator), generator)
    model[0, 3] = -torch.inf
    with pytest.raises(DataError, match="not finite"):
        answered(model, cells_likelihood([simulated(generator, torch.zeros(GENES))]), new_cells=1.0, seed=0)


# ------------------------------------------------------------------------------------------------- calibration
def called_false(prob: torch.Tensor, truth: torch.Tensor) -> tuple[float, float, float]:
    """False ones of the genes called at 10 %, how many that should be, and three standard errors of it."""
    called = discoveries(prob, 0.1)
    wrong = 1 - prob[called]
    false = float((called & (truth.abs() < DELTA)).sum())
    return false, float(wrong.sum()), 3 * float((wrong * (1 - wrong)).sum().sqrt())


@pytest.mark.parametrize("copied", [False, True])
def test_the_genes_called_hold_as_many_false_ones_as_is_said(copied):
    """Also where the model copied the noise of the counts; probabilities under a flat prior are far off."""
    generator = seeded(7)
    truth = changes(generator)
    likelihood = cells_likelihood([simulated(generator, truth, 15.0)])
    model = spread(likelihood.mode if copied else changes(generator), generator)
    answer = answered(model, likelihood, new_cells=1.0, seed=1)
    false, expected, error = called_false((answer.lfc.abs() >= DELTA).double().mean(0), truth)
    assert expected > 10
    assert abs(false - expected) < error + 0.1 * expected
    flat = torch.softmax(likelihood.log_lik, -1) @ (likelihood.grid.abs() >= DELTA).double()
    false, expected, error = called_false(flat, truth)
    assert false > expected + error + 0.1 * expected


def test_intervals_cover():
    generator = seeded(8)
    truth = changes(generator, 1.0)
    likelihood = cells_likelihood([simulated(generator, truth)])
    answer = answered(spread(torch.zeros(GENES), generator, draws=500), likelihood, new_cells=1.0, seed=1)
    low, high = answer.lfc.quantile(torch.tensor([0.05, 0.95], dtype=torch.float64), 0)
    covered = ((low <= truth) & (truth <= high)).double().mean()
    assert covered == pytest.approx(0.9, abs=0.025)  # 3.7 standard errors of 2,000 genes


def test_draws_depend_on_the_seed_alone():
    generator = seeded(9)
    truth = changes(generator)[:50]
    likelihood, model = cells_likelihood([simulated(generator, truth)]), spread(truth, generator)
    one, same, other = (answered(model, likelihood, new_cells=1.0, seed=s).lfc for s in (3, 3, 4))
    assert isinstance(likelihood, LfcLikelihood)
    assert torch.equal(one, same)
    assert not torch.equal(one, other)
