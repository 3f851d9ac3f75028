"""Dispersions moderated across genes: trend, factors, degrees of freedom, and genes unlike the others."""

from __future__ import annotations

import math

import pytest
import torch
from scipy import special

from checks import assert_mean
from de_toys import LIBRARY, cells, group_sums, libraries, rates
from vaerdict.de import dispersion
from vaerdict.de.counts_likelihood import cells_likelihood
from vaerdict.de.dispersion import Bins, dispersions, where_one
from vaerdict.de.moderation import inverse_trigamma, moderate
from vaerdict.noise import seeded

GENES = 1200


def dispersed(seed: int, n: int, *, sd: float, alpha: float = 0.5, per_cell: float = 2.0):
    """Two groups of n cells; the dispersions of genes are apart by `sd` on the scale of logarithms."""
    generator = seeded(seed)
    rate = rates(generator, GENES, per_cell)
    alphas = alpha * torch.exp(sd * torch.randn(GENES, generator=generator, dtype=torch.float64))
    return [cells(generator, rate, n, alphas) for _ in range(2)], rate, alphas


def test_the_trend_is_the_dispersion_of_most_genes_and_zero_of_poisson_counts():
    groups, rate, _ = dispersed(0, 60, sd=0.0)
    seen = rate * LIBRARY > 1
    first, second = dispersions([[group] for group in groups])
    assert torch.equal(first.trend, second.trend)
    assert float(first.trend[seen].median()) == pytest.approx(0.5, rel=0.15)
    assert float(first.factor[seen].log().mean()) == pytest.approx(0.0, abs=0.1)
    poisson, rate, _ = dispersed(1, 60, sd=0.0, alpha=1e-6)
    assert float(dispersions([[group] for group in poisson])[0].trend.median()) < 0.03


def test_genes_that_agree_give_many_degrees_of_freedom_and_those_that_do_not_few():
    """Sixty cells have at most 59 of their own; one number for genes that differ would understate the uncertainty."""
    alike, apart = (dispersions([[g] for g in dispersed(2, 60, sd=sd)[0]])[0].df.median() for sd in (0.0, 1.0))
    assert float(alike) > 300
    assert 20 < float(apart) < 100
    few = dispersions([[g] for g in dispersed(2, 8, sd=1.0)[0]])[0].df.median()
    assert float(few) < 0.5 * float(apart)


def test_moderated_factors_are_nearer_the_truth_than_those_of_each_gene():
    groups, rate, alphas = dispersed(3, 15, sd=0.7)
    of_a, _ = dispersions([[group] for group in groups])
    seen = rate * LIBRARY > 1
    mu = rate * LIBRARY * 1.09  # libraries differ: the mean of N^2 is 9 % above the square of the mean
    truth = ((mu + alphas * mu**2) / (mu + of_a.trend * mu**2)).log()[seen]
    raw = dispersion._factors([groups[0]], of_a.trend).log()[seen]
    bias = torch.special.digamma(of_a.df / 2) - (of_a.df / 2).log()
    moderated = (of_a.factor.log() - bias)[seen]
    assert (moderated - truth).square().mean() < 0.5 * (raw - truth).square().mean()
    assert abs(float((moderated - truth).mean())) < 0.1


def test_a_gene_that_varies_much_in_one_group_is_expected_to_in_the_other():
    groups, rate, alphas = dispersed(4, 12, sd=1.0)
    quiet = group_sums(torch.zeros(3, GENES, dtype=torch.float64), libraries(seeded(0), 3))
    of_a, _ = dispersions([[groups[0]], [groups[1]]])
    alone, _ = dispersions([[groups[0]], [quiet]])
    seen = rate * LIBRARY > 2

    def explained(of: dispersion.Dispersion) -> float:
        mu = rate * LIBRARY
        total = (of.factor * (mu + of.trend * mu**2)).log()[seen]
        return float(torch.corrcoef(torch.stack([total, (mu + alphas * mu**2).log()[seen]]))[0, 1])

    assert explained(of_a) > explained(alone) + 0.005
    assert of_a.df[seen].median() > alone.df[seen].median()


def test_batches_have_one_dispersion_about_their_own_rates():
    """What differs between batches is no dispersion."""
    generator, alpha = seeded(5), torch.full((GENES,), 0.3).double()
    rate = rates(generator, GENES, 2.0)
    shifted = rate * torch.exp(torch.randn(GENES, generator=generator, dtype=torch.float64))
    halves = [[cells(generator, r, 40, alpha) for r in (rate, shifted)] for _ in range(2)]
    seen = torch.minimum(rate, shifted) * LIBRARY > 1
    trend = dispersions(halves)[0].trend[seen].median()
    assert float(trend) == pytest.approx(0.3, rel=0.25)


def test_a_gene_whose_counts_are_all_in_one_cell_shows_no_change():
    generator = seeded(6)
    rate, library = rates(generator, GENES, 0.5), libraries(generator, 50)
    sides = []
    for odd in (40.0, 0.0):
        x = torch.poisson(rate * library.unsqueeze(-1), generator=generator)
        x[:, :10] = 0.0
        x[0, :10] = odd
        sides.append(group_sums(x, library))
    ordinary = sides[0]._replace(squares=sides[0].squares.clone())
    ordinary.squares[:10] = 40.0  # the same counts, one in each of 40 cells
    none = torch.zeros(GENES, 1).double()
    one_cell, many = (cells_likelihood([(side, sides[1])]).at(none)[:10] for side in (sides[0], ordinary))
    assert one_cell.min() > -1.5
    assert many.max() < -8


def test_a_gene_unseen_is_as_uncertain_as_others_of_its_kind():
    groups, _, _ = dispersed(7, 30, sd=0.5)
    groups[0].total[:5] = groups[0].squares[:5] = groups[0].cross[:5] = 0.0
    of_a, of_b = dispersions([[group] for group in groups])
    for part in (*of_a, *of_b):
        assert part.isfinite().all()
    assert (of_a.df[:5] <= of_a.df[5:].max()).all()


@pytest.mark.parametrize("swap", [False, True])
def test_the_order_of_genes_and_groups_does_not_matter(swap):
    groups, _, _ = dispersed(8, 20, sd=0.5, per_cell=0.1)  # with many genes of equal counts
    order = torch.randperm(GENES, generator=seeded(1))
    first = dispersions([[group] for group in groups])
    moved = [[group.take(order)] for group in groups]
    second = dispersions(moved[::-1])[::-1] if swap else dispersions(moved)
    for one, other in zip(first, second, strict=True):
        for part, same in zip(one, other, strict=True):
            torch.testing.assert_close(part[order], same, rtol=1e-9, atol=1e-12)


# ------------------------------------------------------------------------------------------------------- pieces
def test_genes_of_one_abundance_are_in_one_class():
    abundance = torch.tensor([1.0] * 500 + [2.0] * 30 + [5.0] * 470, dtype=torch.float64)
    bins = Bins.of(abundance, per_bin=100)
    assert [sorted(set(abundance[genes].tolist())) for genes in bins.genes] == [[1.0], [2.0, 5.0]]
    curve = bins.curve([0.0, 1.0])
    assert torch.equal(curve[:500], torch.zeros(500).double())
    assert float(curve[500]) == pytest.approx(math.log(2) / math.log(5))


@pytest.mark.parametrize(("n", "classes"), [(50, 1), (224, 1), (225, 2), (1000, 7), (10_000, 20)])
def test_classes_are_of_about_equal_size(n, classes):
    bins = Bins.of(torch.rand(n, generator=seeded(0), dtype=torch.float64), per_bin=150)
    assert len(bins.genes) == classes
    assert torch.cat(list(bins.genes)).unique().numel() == n
    assert min(map(len, bins.genes)) >= min(n, 75)


def test_the_place_where_a_falling_function_is_one():
    assert where_one(lambda v: 3 / (1 + v), 20.0) == pytest.approx(2.0, abs=1e-5)
    assert where_one(lambda v: 0.5, 20.0) == 0.0
    assert where_one(lambda v: 5.0, 20.0) == pytest.approx(20.0, abs=1e-5)


def test_degrees_of_freedom_are_those_whose_logarithm_varies_so():
    df = dispersion._df_of(torch.tensor([float(special.polygamma(1, d / 2)) for d in (1.0, 4.0, 60.0, 1e4)]).double())
    torch.testing.assert_close(df, torch.tensor([1.0, 4.0, 60.0, 1e4]).double(), rtol=2e-3, atol=0)
    for y in (0.1, 1.0, 30.0, 1e5):
        assert inverse_trigamma(float(special.polygamma(1, y))) == pytest.approx(y, rel=1e-6)


def test_the_factor_is_that_of_a_scaled_chi_square():
    """Where log-factors of true value one are seen with normal noise, so moderated they are right on average.

    The mean of log psi under an inverse chi-square of d degrees of freedom and scale s^2 is
    log s^2 - digamma(d / 2) + log(d / 2). False alarms at a rate of 1e-6.
    """
    n, noise, prior = 20_000, 0.3, 0.2
    generator = seeded(9)
    truth = prior * torch.randn(n, generator=generator, dtype=torch.float64)
    seen = truth + noise * torch.randn(n, generator=generator, dtype=torch.float64)
    none, unseen = torch.zeros(n).double(), torch.full((n,), math.inf).double()
    own = dispersion._Logs(none, seen, torch.full_like(none, noise**2))
    of = dispersion._posterior(own, dispersion._Logs(none, none, unseen), prior**2, 0.0, none)
    log_psi = of.factor.log() - torch.special.digamma(of.df / 2) + (of.df / 2).log()
    usual = seen < 0  # above, a share is left to genes unlike the others
    assert_mean((log_psi - truth)[usual], 0.0, rate=1e-6)
    with pytest.raises(AssertionError, match="standard errors"):
        assert_mean((of.factor.log() - truth)[usual], 0.0, rate=1e-6)
    posterior = prior**2 * noise**2 / (prior**2 + noise**2)
    assert float(torch.special.polygamma(1, of.df[usual] / 2).mean()) == pytest.approx(posterior, rel=0.01)


def test_variances_are_moderated_as_in_limma():
    """Prior of 8 degrees of freedom and scale 2, seen with 3 of their own."""
    generator, d0, df = seeded(10), 8, 3
    n = 20_000
    true = 2 * d0 / (2 * torch._standard_gamma(torch.full((n,), d0 / 2).double(), generator=generator))
    seen = true * 2 * torch._standard_gamma(torch.full((n,), df / 2).double(), generator=generator) / df
    moderated = moderate(seen, df)
    assert moderated.df == pytest.approx(d0 + df, rel=0.1)
    torch.testing.assert_close(moderated.variance, (d0 * 2 + df * seen) / (d0 + df), rtol=0.05, atol=0)
