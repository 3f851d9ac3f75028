"""Fold changes of a model held against the counts: the likelihoods, who decides, and calibration."""

from __future__ import annotations

import math

import pytest
import torch
from scipy import stats

from vaerdict.core import DataError
from vaerdict.de.anchored import Law, Shares, anchor, count_law, raw_shares, sample_law
from vaerdict.decisions import discoveries
from vaerdict.noise import seeded
from vaerdict.training.data import Shared

GENES, DELTA = 2000, 0.5


def simulated(
    generator: torch.Generator, lfc: torch.Tensor, counts: float = 40.0, cells: tuple[int, int] = (200, 200)
) -> tuple[Shares, Shares]:
    """Groups whose means are worth Poisson counts, about `counts` for two hundred cells, in libraries of 1,000."""
    level = counts * (0.7 * torch.randn(len(lfc), generator=generator, dtype=torch.float64)).exp() / 200
    library, sides = 1000.0, []
    for n, sign in zip(cells, (0.5, -0.5), strict=True):
        drawn = torch.poisson(n * level * torch.exp2(sign * lfc), generator=generator)
        mean = drawn / (n * library)
        sides.append(Shares(mean, mean / library, 1 / library, n))
    return sides[0], sides[1]


def changes(generator: torch.Generator, share: float = 0.3) -> torch.Tensor:
    some = torch.rand(GENES, generator=generator) < share
    return torch.where(some, torch.randn(GENES, generator=generator, dtype=torch.float64), 0.0)


def spread(centre: torch.Tensor, generator: torch.Generator, sd: float = 0.05, draws: int = 200) -> torch.Tensor:
    return centre + sd * torch.randn(draws, len(centre), generator=generator, dtype=torch.float64)


# ------------------------------------------------------------------------------------------------- likelihoods
def test_the_likelihood_of_poisson_counts_is_binomial_given_their_sum():
    n = 10**7  # so many that Student's t is normal
    a = Shares(torch.tensor([12.0, 0.0]) / n, torch.tensor([12.0, 0.0]) / n, 1.0, n)
    b = Shares(torch.tensor([5.0, 3.0]) / n / 2, torch.tensor([5.0, 3.0]) / n / 2, 1.0, 2 * n)
    law = count_law([(a, b)])
    odds = 0.5 * torch.exp2(law.grid)  # half as many cells
    for gene, (x, y) in enumerate(((12, 5), (0, 3))):
        expected = torch.from_numpy(stats.binom.logpmf(x, x + y, (odds / (1 + odds)).numpy()))
        near = expected > expected.max() - 20
        apart = (law.log_lik[gene] - expected)[near]
        torch.testing.assert_close(apart, apart[:1].expand_as(apart), rtol=0, atol=1e-3)
    assert law.grid[law.log_lik[0].argmax()] == pytest.approx(math.log2(12 / 5 * 2), abs=0.03)
    assert law.log_lik[1].argmax() == 0  # never seen in the first group: the smaller the likelier


def test_over_dispersed_counts_and_few_cells_say_less():
    a, b = simulated(seeded(0), torch.zeros(5))
    wide = [Shares(s.mean, 4 * s.variance, s.inverse_library, s.n_cells) for s in (a, b)]
    torch.testing.assert_close(count_law([(wide[0], wide[1])]).error, 2 * count_law([(a, b)]).error)
    few = [
        Shares(s.mean, s.variance, s.inverse_library * 3 / s.n_cells, 3) for s in (a, b)
    ]  # as many counts in 3 cells
    for law, limit in ((count_law([(a, b)]), 9.3), (count_law([(few[0], few[1])]), 6.0)):
        drop = law.log_lik[0].max() - law.log_lik[0][0]
        assert bool(drop > limit) == (limit == 9.3)


def test_batches_add_up_and_what_differs_between_them_is_no_change():
    generator = seeded(1)
    lfc = torch.zeros(200)
    first, second = simulated(generator, lfc, 400.0, (80, 20)), simulated(generator, lfc, 100.0, (20, 80))
    apart = count_law([first, second])
    mixed = [
        Shares((x.mean * x.n_cells + y.mean * y.n_cells) / 100, (x.variance + y.variance) / 2, x.inverse_library, 100)
        for x, y in zip(first, second, strict=True)
    ]
    assert abs(apart.mode).median() < 0.5 * abs(count_law([(mixed[0], mixed[1])]).mode).median()
    assert (apart.error < count_law([first]).error).all()


def test_the_likelihood_of_samples_is_students_t():
    law = sample_law(torch.tensor([0.3, -1.0]), torch.tensor([0.2, 0.5]), 7.0)
    expected = torch.from_numpy(stats.t.logpdf(law.grid.numpy(), 7.0, loc=-1.0, scale=0.5))
    apart = law.log_lik[1] - expected
    torch.testing.assert_close(apart, apart[:1].expand_as(apart))


def test_raw_proportions_do_not_depend_on_blocks(monkeypatch):
    x = torch.poisson(torch.full((50, 7), 3.0), generator=seeded(1)) + 1
    rows, some = Shared(torch.cat([x, torch.ones(50, 2)], 1)), torch.arange(0, 50, 3)
    found = raw_shares(rows, 7, {"some": some, "all": torch.arange(50)})["some"]
    share = (x / x.sum(-1, keepdim=True)).double()[some]
    torch.testing.assert_close(found.mean, share.mean(0), rtol=1e-6, atol=0)
    torch.testing.assert_close(found.variance, share.var(0), rtol=1e-5, atol=1e-9)
    assert found.inverse_library == pytest.approx(float((1 / x[some].sum(-1)).mean()))
    assert found.n_cells == len(some)
    monkeypatch.setattr("vaerdict.de.anchored.block_size", lambda _: 4)
    torch.testing.assert_close(raw_shares(rows, 7, {"some": some})["some"].mean, found.mean)


# ------------------------------------------------------------------------------------------------- who decides
def error(found: torch.Tensor, truth: torch.Tensor) -> float:
    return float((found.mean(0) - truth).square().mean().sqrt())


def test_a_model_that_learned_from_more_cells_decides_and_helps():
    generator = seeded(2)
    truth = changes(generator)
    model, law = spread(truth, generator), count_law([simulated(generator, truth, 10.0)])
    found, alone = anchor(model, law, new_cells=20.0, seed=0), anchor(model, law, new_cells=1.0, seed=0)
    assert found.by_model > 0.9
    assert found.missed < 0.1
    assert alone.by_model == 0  # trained on the cells compared it knows no more than their counts
    assert error(found.lfc, truth) < 0.7 * error(alone.lfc, truth)


@pytest.mark.parametrize("seed", [3, 4])
def test_a_model_that_the_counts_contradict_does_not(seed):
    generator = seeded(seed)
    truth, nonsense = changes(generator), changes(generator)
    law = count_law([simulated(generator, truth)])
    found = anchor(spread(nonsense, generator), law, new_cells=20.0, seed=0)
    assert found.missed > 0.2
    assert found.by_model == 0
    assert error(found.lfc, truth) < 0.5 * error(nonsense.expand(2, -1), truth)


def test_groups_of_different_size_are_not_shifted_by_genes_hardly_seen():
    generator = seeded(5)
    nothing = torch.zeros(GENES, dtype=torch.float64)
    law = count_law([simulated(generator, nothing, 30.0, (20, 6000))])
    found = anchor(spread(nothing, generator), law, new_cells=1.0, seed=0)
    assert abs(float(found.lfc.mean(0).median())) < 0.2  # half a count in place of none would make it 0.5
    assert found.missed < 0.2


def test_a_fold_change_that_is_not_finite_is_refused():
    generator = seeded(6)
    model = spread(changes(generator), generator)
    model[0, 3] = -torch.inf
    with pytest.raises(DataError, match="not finite"):
        anchor(model, count_law([simulated(generator, torch.zeros(GENES))]), new_cells=1.0, seed=0)


# ------------------------------------------------------------------------------------------------- calibration
def called_false(prob: torch.Tensor, truth: torch.Tensor) -> tuple[float, float, float]:
    """False ones of the genes called at 10 %, how many that should be, and three standard errors of it."""
    called = discoveries(prob, 0.1)
    wrong = 1 - prob[called]
    false = float((called & (truth.abs() < DELTA)).sum())
    return false, float(wrong.sum()), 3 * float((wrong * (1 - wrong)).sum().sqrt())


@pytest.mark.parametrize("copied", [False, True])
def test_the_genes_called_hold_as_many_false_ones_as_is_said(copied):
    """Also where the model copied the noise of the counts; flat probabilities are far off."""
    generator = seeded(7)
    truth = changes(generator)
    law = count_law([simulated(generator, truth, 15.0)])
    model = spread(law.mode if copied else changes(generator), generator)
    found = anchor(model, law, new_cells=1.0, seed=1)
    false, expected, error = called_false((found.lfc.abs() >= DELTA).double().mean(0), truth)
    assert expected > 10
    assert abs(false - expected) < error + 0.1 * expected
    flat = torch.softmax(law.log_lik, -1) @ (law.grid.abs() >= DELTA).double()
    false, expected, error = called_false(flat, truth)
    assert false > expected + error + 0.1 * expected


def test_intervals_cover():
    generator = seeded(8)
    truth = changes(generator, 1.0)
    law = count_law([simulated(generator, truth)])
    found = anchor(spread(torch.zeros(GENES), generator, draws=500), law, new_cells=1.0, seed=1)
    low, high = found.lfc.quantile(torch.tensor([0.05, 0.95], dtype=torch.float64), 0)
    covered = ((low <= truth) & (truth <= high)).double().mean()
    assert covered == pytest.approx(0.9, abs=0.025)  # 3.7 standard errors of 2,000 genes


def test_draws_depend_on_the_seed_alone():
    generator = seeded(9)
    truth = changes(generator)[:50]
    law, model = count_law([simulated(generator, truth)]), spread(truth, generator)
    one, same, other = (anchor(model, law, new_cells=1.0, seed=s).lfc for s in (3, 3, 4))
    assert isinstance(law, Law)
    assert torch.equal(one, same)
    assert not torch.equal(one, other)
