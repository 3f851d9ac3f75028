"""The likelihood of fold changes given the counts: closed forms, cells, batches, samples and pairs."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
from scipy import optimize, stats
from torch import Tensor

from checks import assert_mean
from de_toys import LIBRARY, cells, gamma, planted, rates
from vaerdict.core import SettingError
from vaerdict.de import counts_likelihood, dispersion
from vaerdict.de.counts_likelihood import (
    LfcLikelihood,
    SampleDesign,
    SideCounts,
    _common_lfc,
    _Deviance,
    _deviance,
    _welch_df,
    cells_likelihood,
    paired_likelihood,
    samples_likelihood,
)
from vaerdict.de.dispersion import Dispersion
from vaerdict.de.shrinkage import LfcPosterior, NodeLikelihood, centre_of, fit_shares
from vaerdict.de.sums import GroupSums
from vaerdict.noise import seeded

GENES, DELTA = 1000, 0.5


def double(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


# ------------------------------------------------------------------------------------------------ closed forms
def side(counts: Tensor, exposure: float, spread: float, factor: float = 1.0) -> SideCounts:
    return SideCounts(counts, *(torch.full_like(counts, value) for value in (exposure, spread, factor)))


def test_the_likelihood_of_poisson_counts_is_binomial_given_their_sum():
    lfc = torch.linspace(-4, 6, 41, dtype=torch.float64).expand(2, -1)
    deviance = _deviance(side(double(12, 0), 10.0, 1e-9), side(double(5, 3), 20.0, 1e-9), lfc).value
    odds = 0.5 * torch.exp2(lfc[0])  # half the exposure
    for gene, (x, y) in enumerate(((12, 5), (0, 3))):
        expected = stats.binom.logpmf(x, x + y, (odds / (1 + odds)).numpy())
        best = stats.binom.logpmf(x, x + y, x / (x + y))
        torch.testing.assert_close(deviance[gene], torch.from_numpy(2 * (best - expected)), rtol=1e-5, atol=1e-6)


def brute_force(y: Sequence[float], exposure: Sequence[float], spread: Sequence[float]) -> float:
    """Twice the difference between the best log-likelihood of two rates and that of one."""

    def negative(log_rate: float, sides: Sequence[int]) -> float:
        total = 0.0
        for i in sides:
            mean = exposure[i] * math.exp(log_rate)
            total -= stats.nbinom.logpmf(y[i], 1 / spread[i], 1 / (1 + spread[i] * mean))
        return total

    def least(sides: Sequence[int]) -> float:
        return optimize.minimize_scalar(negative, bounds=(-12, 8), args=(sides,), method="bounded").fun  # type: ignore[union-attr]

    return 2 * (least((0, 1)) - least((0,)) - least((1,)))


@pytest.mark.parametrize("spread", [(0.02, 0.3), (1e-3, 1e-3), (2.0, 0.1)])
@pytest.mark.parametrize("y", [(30, 4), (1, 900), (7, 7)])
@pytest.mark.parametrize("lfc", [-2.0, 0.0, 1.5])
def test_the_deviance_is_that_at_the_best_rate_for_both_sides(spread, y, lfc):
    a, b = side(double(y[0]), 3.0, spread[0]), side(double(y[1]), 11.0, spread[1])
    found = float(_deviance(a, b, double(lfc).unsqueeze(-1)).value)
    assert found == pytest.approx(brute_force(y, (3.0 * 2**lfc, 11.0), spread), rel=1e-4, abs=1e-4)
    swapped = float(_deviance(b, a, double(-lfc).unsqueeze(-1)).value)
    assert swapped == pytest.approx(found, rel=1e-9, abs=1e-9)


def test_the_dispersion_divides_the_deviance_by_the_variance_of_both_sides():
    lfc, rate = double(0.0).unsqueeze(-1), 20.0  # equal counts over equal exposures, so that the rate is theirs
    plain = _deviance(side(double(30), 1.0, 0.1), side(double(10), 1.0, 0.1), lfc).value
    both = _deviance(side(double(30), 1.0, 0.1, 3.0), side(double(10), 1.0, 0.1, 3.0), lfc).value
    assert float(plain / both) == pytest.approx(3.0)
    one = _deviance(side(double(30), 1.0, 0.1, 3.0), side(double(10), 1.0, 0.1, 1.0), lfc)
    assert float(plain / one.value) == pytest.approx(2.0)
    assert float(one.variance_a) == pytest.approx(3 * (1 / rate + 0.1))
    assert float(one.variance_b) == pytest.approx(1 / rate + 0.1)


def test_degrees_of_freedom_are_welchs_and_one_dispersion_of_many_batches_counts_once():
    def part(a: float, b: float) -> _Deviance:
        return _Deviance(*(double(value).unsqueeze(-1) for value in (0.0, a, b)))

    def df(*parts: _Deviance) -> float:
        return float(_welch_df(parts, double(6.0), double(20.0)))

    assert df(part(2.0, 3.0)) == pytest.approx(25 / (4 / 6 + 9 / 20))
    assert df(part(1.0, 1e-9)) == pytest.approx(6.0)
    assert df(part(1e-9, 1.0)) == pytest.approx(20.0)
    assert df(*[part(2.0, 3.0)] * 5) == pytest.approx(df(part(2.0, 3.0)))
    assert df(part(2.0, 3.0), part(1e300, 1e300)) == pytest.approx(df(part(2.0, 3.0)))  # nothing was seen there
    # weights 1 / (u_a + u_b) of 1 / 3 and 1 / 6, so that u_a of the mean is 1 / 9 + 4 / 36 of a sum of 1 / 2
    assert df(part(1.0, 2.0), part(4.0, 2.0)) == pytest.approx(0.25 / ((2 / 9) ** 2 / 6 + (5 / 18) ** 2 / 20))


def fixed(monkeypatch: pytest.MonkeyPatch, trend: float, factor: float, df: float) -> None:
    """Dispersions that are known."""

    def known(groups: Sequence[Sequence[GroupSums]]) -> list[Dispersion]:
        return [Dispersion(*(torch.full_like(g[0].total, v) for v in (trend, factor, df))) for g in groups]

    monkeypatch.setattr(counts_likelihood, "dispersions", known)


def flat_group(counts: Sequence[float], n: int, library: float = 100.0) -> GroupSums:
    """Cells of equal libraries. Sums beside the totals are not used where dispersions are known."""
    total, none = double(*counts), double(*[0.0] * len(counts))
    return GroupSums(total, none, none, none, torch.tensor(n * library), torch.tensor(n * library**2), n)


def test_few_degrees_of_freedom_make_the_likelihood_students(monkeypatch):
    """Of large counts it is that of Student's t of 2 x 5 degrees of freedom, with its standard error as scale."""
    fixed(monkeypatch, trend=0.2, factor=1.5, df=5.0)
    likelihood = cells_likelihood([(flat_group([1e6], 40), flat_group([1e6], 40))])
    error = math.sqrt(2 * 1.5 * (1e-6 + 0.2 / 40)) / math.log(2)
    assert float(likelihood.error) == pytest.approx(error, rel=1e-4)
    at = torch.linspace(-4, 4, 9, dtype=torch.float64) * error
    expected = stats.t.logpdf(at.numpy(), 10, scale=error) - stats.t.logpdf(0.0, 10, scale=error)
    torch.testing.assert_close(likelihood.at(at.unsqueeze(0))[0], torch.from_numpy(expected), rtol=0.01, atol=1e-6)


def test_the_variance_is_never_below_poissons(monkeypatch):
    fixed(monkeypatch, trend=0.2, factor=1e-3, df=50.0)
    likelihood = cells_likelihood([(flat_group([400.0, 1e9], 40), flat_group([400.0, 1e9], 40))])
    assert float(likelihood.error[0]) == pytest.approx(math.sqrt(2 / 400) / math.log(2), rel=0.01)
    above = math.sqrt(2 * 1e-3 * 0.2 / 40) / math.log(2)  # of very many counts Poisson's is less
    assert float(likelihood.error[1]) == pytest.approx(above, rel=0.01)


def test_a_share_of_the_information_widens_everything_by_its_root(monkeypatch):
    fixed(monkeypatch, trend=0.3, factor=1.2, df=1e6)
    pair = (flat_group([5000.0], 30), flat_group([2500.0], 30))
    full, quarter = cells_likelihood([pair]), cells_likelihood([pair], informative=0.25)
    assert float(quarter.error / full.error) == pytest.approx(2.0, rel=1e-3)
    torch.testing.assert_close(quarter.mode, full.mode, rtol=1e-3, atol=0)
    far = (full.mode + 3 * full.error).unsqueeze(-1)
    assert float(quarter.at(far) / full.at(far)) == pytest.approx(0.25, rel=1e-3)


def test_unequal_libraries_are_worth_fewer_cells(monkeypatch):
    fixed(monkeypatch, trend=0.4, factor=1.0, df=1e6)
    even, group = flat_group([1e7], 20), flat_group([1e7], 20)
    uneven = even._replace(library_squares=2 * even.library_squares)
    ratio = cells_likelihood([(uneven, group)]).error / cells_likelihood([(even, group)]).error
    assert float(ratio) == pytest.approx(math.sqrt(1.5), rel=1e-3)


# -------------------------------------------------------------------------------------------------- invariances
def posterior_of(likelihood: LfcLikelihood) -> tuple[float, LfcPosterior]:
    """The centre and the shrunken posterior."""
    centre = centre_of(likelihood.mode, likelihood.error)
    nodes = NodeLikelihood.of(likelihood, centre, (-DELTA, 0.0, DELTA))
    return centre, LfcPosterior(nodes, fit_shares(nodes))


def samples_of(
    generator: torch.Generator, rate: Tensor, numbers: Sequence[int], between: Tensor | float = 0.05
) -> list[GroupSums]:
    """Samples of these numbers of cells, their rates apart by the variance `between`."""
    variance = torch.as_tensor(between, dtype=torch.float64).expand_as(rate).contiguous()
    alpha = torch.full_like(rate, 0.5)
    return [cells(generator, rate * gamma(generator, variance), n, alpha) for n in numbers]


def design(n_a: int, n_b: int, covariates: Tensor | None = None) -> SampleDesign:
    """Samples of side a followed by those of side b, in one batch."""
    n = n_a + n_b
    covariates = torch.zeros(n, 0, dtype=torch.float64) if covariates is None else covariates
    return SampleDesign(torch.zeros(n, dtype=torch.long), torch.arange(n) < n_a, covariates)


def by_cells(a: list[GroupSums], b: list[GroupSums]) -> LfcLikelihood:
    return cells_likelihood(list(zip(a, b, strict=True)))


def by_samples(a: list[GroupSums], b: list[GroupSums]) -> LfcLikelihood:
    return samples_likelihood([*a, *b], design(len(a), len(b)))


def by_pairs(a: list[GroupSums], b: list[GroupSums]) -> LfcLikelihood:
    return paired_likelihood(list(zip(a, b, strict=True)))


LIKELIHOODS = {"cells": by_cells, "samples": by_samples, "pairs": by_pairs}


@pytest.fixture(scope="module")
def sides() -> tuple[list[GroupSums], list[GroupSums]]:
    """Three samples, or batches, on each side, with genes that are hardly seen."""
    generator = seeded(1)
    rate, lfc = rates(generator, GENES, 0.2), planted(generator, GENES)
    a, b = samples_of(generator, rate * torch.exp2(lfc), (20, 40, 60)), samples_of(generator, rate, (60, 10, 30))
    expressed = (torch.stack([s.seen for s in (*a, *b)]).sum(0) >= 3).nonzero().squeeze(-1)
    return [s.take(expressed) for s in a], [s.take(expressed) for s in b]


@pytest.mark.parametrize("kind", LIKELIHOODS)
def test_swapping_the_sides_mirrors_everything(kind, sides):
    (centre, posterior), (mirrored, other) = (
        posterior_of(LIKELIHOODS[kind](*both)) for both in ((sides[0], sides[1]), (sides[1], sides[0]))
    )
    assert mirrored == pytest.approx(-centre, abs=1e-9)
    torch.testing.assert_close(other.mean, -posterior.mean, rtol=1e-6, atol=1e-8)
    torch.testing.assert_close(other.quantile(0.95), -posterior.quantile(0.05), rtol=1e-6, atol=1e-8)
    torch.testing.assert_close(other.below(-DELTA), posterior.above(DELTA), rtol=1e-6, atol=0)
    torch.testing.assert_close(other.above(-DELTA), posterior.below(DELTA), rtol=1e-6, atol=0)


@pytest.mark.parametrize("kind", LIKELIHOODS)
def test_the_order_of_genes_does_not_matter(kind, sides):
    order = torch.randperm(len(sides[0][0].total), generator=seeded(2))
    centre, posterior = posterior_of(LIKELIHOODS[kind](*sides))
    again, moved = posterior_of(LIKELIHOODS[kind](*([s.take(order) for s in side] for side in sides)))
    assert again == pytest.approx(centre, abs=1e-9)
    torch.testing.assert_close(moved.mean, posterior.mean[order], rtol=1e-6, atol=1e-8)
    torch.testing.assert_close(moved.below(DELTA), posterior.below(DELTA)[order], rtol=1e-6, atol=0)


@pytest.mark.parametrize("kind", ["samples", "pairs"])
def test_the_order_of_samples_does_not_matter(kind, sides):
    one, other = LIKELIHOODS[kind](*sides), LIKELIHOODS[kind](sides[0][::-1], sides[1][::-1])
    torch.testing.assert_close(other.mode, one.mode, rtol=1e-6, atol=1e-8)
    torch.testing.assert_close(other.error, one.error, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("kind", ["samples", "pairs"])
def test_a_likelihood_at_one_fold_change_does_not_depend_on_others(kind, sides):
    likelihood = LIKELIHOODS[kind](*sides)
    many = torch.linspace(-3, 3, 7, dtype=torch.float64).expand(len(likelihood.mode), -1)
    torch.testing.assert_close(likelihood.at(many[:, 2:3]), likelihood.at(many)[:, 2:3])


@pytest.mark.parametrize("kind", LIKELIHOODS)
def test_a_gene_unseen_says_nothing_in_either_direction(kind, sides):
    """Also where the sides are of different size, and where it is unseen in one sample or batch only."""
    changed = [
        [s._replace(**{name: getattr(s, name).clone() for name in s._fields[:4]}) for s in both] for both in sides
    ]
    for part in (part for side in changed for s in side for part in s[:4]):
        part[0] = 0.0
    for part in (part for side in changed for part in side[1][:4]):
        part[1] = 0.0
    likelihood = LIKELIHOODS[kind](*changed)
    assert abs(float(likelihood.mode[0])) < 1e-6
    assert float(likelihood.error[0]) > 2
    nodes = NodeLikelihood.of(likelihood, 0.0, (-DELTA, 0.0, DELTA))
    assert nodes.log_lik.isfinite().all()
    near = nodes.log_lik[0][nodes.nodes[0].abs() < 3]
    assert float(near.max() - near.min()) < 0.8


# ------------------------------------------------------------------------------------------- cells as replicates
def p_values(likelihood: LfcLikelihood) -> Tensor:
    """Of no change: twice the smaller tail under a flat prior, which is the usual one of Student's t.

    Shapes: ``-> (genes,)``.
    """
    flat = LfcPosterior(NodeLikelihood.of(likelihood, 0.0, (0.0,)), None)
    return 2 * torch.minimum(flat.below(0.0), flat.above(0.0))


def share_below(p: Tensor, level: float) -> float:
    return float((p < level).double().mean())


def null_cells(seed: int, n: tuple[int, int], per_cell: float, genes: int = 2000) -> tuple[GroupSums, GroupSums]:
    """Groups between which nothing changes; dispersions of genes are apart by half."""
    generator = seeded(seed)
    rate = rates(generator, genes, per_cell)
    alpha = 0.4 * torch.exp(0.5 * torch.randn(genes, generator=generator, dtype=torch.float64))
    a, b = (cells(generator, rate, k, alpha) for k in n)
    expressed = (a.seen + b.seen >= 5).nonzero().squeeze(-1)
    return a.take(expressed), b.take(expressed)


@pytest.mark.parametrize(("n", "per_cell"), [((15, 15), 2.0), ((50, 50), 0.5), ((10, 100), 2.0)])
def test_p_values_of_unchanged_genes_are_uniform(n, per_cell):
    """Of 2,000 genes the standard error of a share of 5 % is .005, of 50 % .011: 3 of them, and .005 for what is rough.

    A true share of 5 % fails with probability 1e-4.
    """
    p = p_values(cells_likelihood([null_cells(20, n, per_cell)]))
    assert share_below(p, 0.05) == pytest.approx(0.05, abs=0.02)
    assert share_below(p, 0.5) == pytest.approx(0.5, abs=0.04)
    assert share_below(p, 0.001) < 0.006


@pytest.mark.parametrize("bug", ["factor", "trend", "df"])
def test_p_values_show_a_dispersion_that_is_too_small(monkeypatch, bug):
    """What would be uniform is not where the dispersion is halved, left out, or taken for known."""
    right = dispersion.dispersions

    def wrong(groups: Sequence[Sequence[GroupSums]]) -> list[Dispersion]:
        change = {"factor": 0.5, "trend": 0.3, "df": 1e6}[bug]
        return [d._replace(**{bug: change * getattr(d, bug)}) for d in right(groups)]

    pair = null_cells(20, (15, 15) if bug != "df" else (4, 4), 2.0)
    p = p_values(cells_likelihood([pair]))
    monkeypatch.setattr(counts_likelihood, "dispersions", wrong)
    planted_bug = p_values(cells_likelihood([pair]))
    if bug == "df":
        assert share_below(planted_bug, 0.001) > 1.5 * share_below(p, 0.001)
    else:
        assert share_below(planted_bug, 0.05) > 0.07


def covered(likelihood: LfcLikelihood, truth: Tensor) -> Tensor:
    """Whether the shrunken 90 % interval of each gene holds the truth. Shapes: ``(genes,) -> (genes,)``."""
    centre, posterior = posterior_of(likelihood)
    low, high = (posterior.quantile(level) + centre for level in (0.05, 0.95))
    return (low - 1e-6 <= truth) & (truth <= high + 1e-6)


def false_discoveries(likelihood: LfcLikelihood, truth: Tensor, level: float = 0.1) -> tuple[int, float, int]:
    """False ones of the genes called, how many the posterior expects, and the genes called."""
    _, posterior = posterior_of(likelihood)
    lfdr = torch.minimum(posterior.below(DELTA), posterior.above(-DELTA))
    order = lfdr.argsort()
    called = order[lfdr[order].cumsum(0) <= level * torch.arange(1, len(lfdr) + 1)]
    return int((truth[called].abs() < DELTA).sum()), float(lfdr[called].sum()), len(called)


@pytest.mark.parametrize(("n", "per_cell"), [(15, 2.0), (50, 0.5)])
def test_intervals_and_calls_of_planted_changes_hold_what_they_say(n, per_cell):
    """All genes change. A share of 90 % of 2,000 has a standard error of .007: by chance it is off by .03 in 1e-5."""
    generator = seeded(21)
    rate, lfc = rates(generator, 2000, per_cell), planted(generator, 2000, share=1.0)
    alpha = torch.full_like(rate, 0.4)
    a, b = cells(generator, rate * torch.exp2(lfc), n, alpha), cells(generator, rate, n, alpha)
    expressed = (a.seen + b.seen >= 5).nonzero().squeeze(-1)
    likelihood = cells_likelihood([(a.take(expressed), b.take(expressed))])
    truth = lfc[expressed]
    assert float(covered(likelihood, truth).double().mean()) == pytest.approx(0.9, abs=0.03)
    false, expected, called = false_discoveries(likelihood, truth)
    assert called > 100
    assert abs(false - expected) < 4 * math.sqrt(expected) + 2
    half = LfcLikelihood(lambda at: 4 * likelihood.at(at), likelihood.mode, likelihood.error / 2)
    assert float(covered(half, truth).double().mean()) < 0.8  # intervals half as wide would not


def test_intervals_cover_where_few_genes_change():
    """Unchanged genes are nearly all covered, because they are known to be many."""
    generator = seeded(22)
    rate, lfc = rates(generator, 2000, 1.0), planted(generator, 2000)
    alpha = torch.full_like(rate, 0.4)
    likelihood = cells_likelihood(
        [(cells(generator, rate * torch.exp2(lfc), 50, alpha), cells(generator, rate, 50, alpha))]
    )
    inside = covered(likelihood, lfc)
    assert 0.87 < float(inside.double().mean()) < 0.96
    assert float(inside[lfc == 0].double().mean()) > 0.97


def test_batches_add_up_and_what_differs_between_them_is_no_change():
    generator = seeded(23)
    rate, alpha = rates(generator, GENES, 2.0), torch.full((GENES,), 0.2).double()
    other = rate * torch.exp2(2 * torch.randn(GENES, generator=generator, dtype=torch.float64))
    first = cells(generator, rate, 80, alpha), cells(generator, rate, 20, alpha)
    second = cells(generator, other, 20, alpha), cells(generator, other, 80, alpha)

    def merged(x: GroupSums, y: GroupSums) -> GroupSums:
        return GroupSums(*(a + b for a, b in zip(x, y, strict=True)))

    apart = cells_likelihood([first, second])
    mixed = cells_likelihood([(merged(first[0], second[0]), merged(first[1], second[1]))])
    assert apart.mode.abs().median() < 0.4 * mixed.mode.abs().median()
    assert (apart.error < cells_likelihood([first]).error).double().mean() > 0.95
    assert share_below(p_values(apart), 0.05) == pytest.approx(0.05, abs=0.03)  # 4.3 standard errors of 1,000 genes


@pytest.mark.parametrize(("n_batches", "n"), [(10, 5), (25, 2)])
def test_the_dispersion_of_small_batches_is_that_of_all(n_batches, n):
    generator = seeded(24)
    rate, alpha = rates(generator, GENES, 2.0), torch.full((GENES,), 0.5).double()
    pairs = [(cells(generator, rate, n, alpha), cells(generator, rate, n, alpha)) for _ in range(n_batches)]
    p = p_values(cells_likelihood(pairs))
    assert share_below(p, 0.1) == pytest.approx(0.1, abs=0.045)  # 4.7 standard errors: few cells are rough


# ----------------------------------------------------------------------------------------- samples as replicates
def four_by_four(seed: int, numbers: Sequence[int], share: float = 1.0) -> tuple[LfcLikelihood, Tensor]:
    """Four samples a side of these cells, with a variance between samples of the gene's own."""
    generator = seeded(seed)
    rate, lfc = rates(generator, 1500, 0.5), planted(generator, 1500, share)
    between = 0.06 * torch.exp(0.7 * torch.randn(1500, generator=generator, dtype=torch.float64))
    a, b = (samples_of(generator, r, numbers, between) for r in (rate * torch.exp2(lfc), rate))
    return by_samples(a, b), lfc


@pytest.mark.parametrize("numbers", [(60, 60, 60, 60), (10, 40, 150, 400)])
def test_intervals_of_samples_cover(numbers):
    """The standard error of a share of 90 % of 1,500 genes is .008: 4 of them."""
    likelihood, lfc = four_by_four(30, numbers)
    assert float(covered(likelihood, lfc).double().mean()) == pytest.approx(0.9, abs=0.032)
    false, expected, called = false_discoveries(likelihood, lfc)
    assert called > 100
    assert abs(false - expected) < 4 * math.sqrt(expected) + 2


@pytest.mark.parametrize("numbers", [(60, 60, 60, 60), (5, 5, 5, 160)])
def test_p_values_of_samples_without_change_are_uniform(numbers):
    likelihood, _ = four_by_four(31, numbers, share=0.0)
    p = p_values(likelihood)
    assert share_below(p, 0.05) == pytest.approx(0.05, abs=0.03)
    assert share_below(p, 0.001) < 0.008
    assert false_discoveries(likelihood, torch.zeros(1500), 0.05)[2] <= 1


def test_cells_taken_for_replicates_would_call_what_differs_between_samples():
    generator = seeded(32)
    rate = rates(generator, GENES, 2.0)
    a, b = (samples_of(generator, rate, (60, 60, 60), 0.3) for _ in range(2))

    def pooled(side: list[GroupSums]) -> GroupSums:
        return GroupSums(*(sum(parts[1:], parts[0]) for parts in zip(*side, strict=True)))

    cells_p = p_values(cells_likelihood([(pooled(a), pooled(b))]))
    assert share_below(cells_p, 0.05) > 0.3
    assert share_below(p_values(by_samples(a, b)), 0.05) < 0.08


def test_samples_that_differ_say_less_than_their_cells():
    """Two sides of four samples of variance 0.25: sqrt(2 x 0.25 / 4) / log 2 = 0.51."""
    generator = seeded(33)
    rate = rates(generator, GENES, 5.0)
    seen = rate * LIBRARY > 2
    apart, alike = (
        by_samples(*(samples_of(generator, rate, (80,) * 4, v) for _ in range(2))).error[seen] for v in (0.25, 1e-6)
    )
    assert float(apart.median()) == pytest.approx(0.51, rel=0.12)
    assert alike.median() < 0.3 * apart.median()


def test_genes_have_variances_of_their_own():
    generator = seeded(34)
    rate = rates(generator, GENES, 5.0)
    between = torch.where(torch.arange(GENES) % 2 == 0, 0.02, 0.5).double()
    error = by_samples(*(samples_of(generator, rate, (60,) * 6, between) for _ in range(2))).error
    assert error[1::2].median() > 2 * error[::2].median()


def test_a_sample_of_few_cells_does_not_outvote_one_of_many():
    generator = seeded(35)
    rate = rates(generator, GENES, 2.0)
    many, b = (samples_of(generator, rate, (200,) * 3, 0.01) for _ in range(2))
    odd = samples_of(generator, rate * torch.exp2(torch.randn(GENES, generator=generator).double()), (2,), 0.01)
    moved = (by_samples([*many, *odd], b).mode - by_samples(many, b).mode).abs()
    outvoted = torch.log2((torch.stack([s.rate for s in (*many, *odd)]).mean(0) + 1e-9) / many[0].rate).abs()
    assert moved.median() < 0.1
    assert outvoted.median() > 0.15  # as equals they would differ by so much


def test_what_differs_between_batches_of_samples_is_no_change():
    generator = seeded(36)
    rate = rates(generator, GENES, 2.0)
    other = rate * torch.exp2(2 * torch.randn(GENES, generator=generator, dtype=torch.float64))
    units = [*samples_of(generator, rate, (60,) * 4), *samples_of(generator, other, (60,) * 4)]
    first = torch.tensor([True] * 3 + [False] + [True] + [False] * 3)
    none = torch.zeros(8, 0, dtype=torch.float64)
    apart = samples_likelihood(units, SampleDesign(torch.tensor([0] * 4 + [1] * 4), first, none))
    mixed = samples_likelihood(units, SampleDesign(torch.zeros(8, dtype=torch.long), first, none))
    assert apart.mode.abs().median() < 0.5 * mixed.mode.abs().median()
    assert share_below(p_values(apart), 0.05) == pytest.approx(0.05, abs=0.03)


def test_many_batches_of_samples_are_calibrated():
    """The fold changes of batches are as far apart as the variance between samples lets them be."""
    generator = seeded(37)
    rate, units = rates(generator, GENES, 2.0), []
    for _ in range(5):
        of_batch = rate * torch.exp2(torch.randn(GENES, generator=generator, dtype=torch.float64))
        units += samples_of(generator, of_batch, (50,) * 3, 0.1)
    first, none = torch.tensor([True, True, False] * 5), torch.zeros(15, 0, dtype=torch.float64)
    p = p_values(samples_likelihood(units, SampleDesign(torch.arange(5).repeat_interleave(3), first, none)))
    assert share_below(p, 0.05) == pytest.approx(0.05, abs=0.03)
    assert share_below(p, 0.5) == pytest.approx(0.5, abs=0.06)


# ---------------------------------------------------------------------------------------- covariates of samples
def test_a_covariate_of_samples_that_differs_between_the_sides_does_not_bias():
    """The covariate doubles half of the genes per unit; false alarms at a rate of 1e-6."""
    generator = seeded(38)
    age = double(1.5, 0.5, 1.0, 0.2, 1.1, 0.3, -0.5, -1.0, 0.4, -0.2, -1.5, -0.1)
    rate, effect = rates(generator, GENES, 3.0), math.log(2) * (torch.arange(GENES) % 2)
    units = [samples_of(generator, rate * torch.exp(effect * z), (80,), 0.02)[0] for z in age.tolist()]
    adjusted = samples_likelihood(units, design(6, 6, age.unsqueeze(-1)))
    plain = samples_likelihood(units, design(6, 6))
    changes = effect > 0
    assert_mean(adjusted.mode[changes], 0.0, rate=1e-6)
    with pytest.raises(AssertionError, match="standard errors"):
        assert_mean(plain.mode[changes], 0.0, rate=1e-6)
    assert share_below(p_values(adjusted), 0.05) == pytest.approx(0.05, abs=0.035)


def test_the_share_of_information_that_covariates_leave_is_that_of_regression():
    generator = seeded(39)
    z = torch.randn(10, 2, generator=generator, dtype=torch.float64)
    units = design(5, 5, z)
    z[:5] += 1.0
    x = torch.cat([units.first.double().unsqueeze(-1), torch.ones(10, 1).double()], -1)
    ratio = torch.linalg.inv(x.T @ x)[0, 0] / torch.linalg.inv(torch.cat([x, z], -1).T @ torch.cat([x, z], -1))[0, 0]
    torch.testing.assert_close(units.informative(torch.ones(10, 3).double()), ratio.expand(3))
    assert torch.equal(design(5, 5).informative(torch.ones(10, 3).double()), torch.ones(3).double())


def test_a_covariate_widens_by_what_it_explains_of_the_sides():
    generator = seeded(40)
    z = double(1, 2, 3, 4, 0, 1, 2, 3).unsqueeze(-1)
    rate = rates(generator, GENES, 5.0)
    a, b = (samples_of(generator, rate, (60,) * 4, 0.1) for _ in range(2))
    units = design(4, 4, z)
    share = float(units.informative(torch.ones(8, 1).double()))
    ratio = samples_likelihood([*a, *b], units).error / by_samples(a, b).error
    assert float(ratio.median()) == pytest.approx(1 / math.sqrt(share), rel=0.12)
    assert share < 0.9


# -------------------------------------------------------------------------------------------------------- pairs
def pairs_of(
    generator: torch.Generator, rate: Tensor, lfc: Tensor, n: int, tau: float, numbers: tuple[int, int] = (60, 60)
) -> list[tuple[GroupSums, GroupSums]]:
    """Samples far apart, with cells on both sides, whose fold changes are apart by the variance tau of logarithms."""
    alpha, pairs = torch.full_like(rate, 0.5), []
    for i in range(n):
        own = rate * torch.exp(0.8 * torch.randn(len(rate), generator=generator, dtype=torch.float64))
        change = torch.exp2(lfc) * gamma(generator, torch.full_like(rate, tau))
        sizes = numbers if i % 2 else numbers[::-1]
        pairs.append((cells(generator, own * change, sizes[0], alpha), cells(generator, own, sizes[1], alpha)))
    return pairs


@pytest.mark.parametrize(("n", "tau"), [(4, 0.03), (8, 0.15)])
def test_intervals_of_pairs_cover_and_unchanged_genes_are_not_called(n, tau):
    generator = seeded(41)
    rate, lfc = rates(generator, 1500, 1.0), planted(generator, 1500, share=1.0)
    likelihood = paired_likelihood(pairs_of(generator, rate, lfc, n, tau, (20, 200)))
    assert float(covered(likelihood, lfc).double().mean()) == pytest.approx(0.9, abs=0.04)
    nothing = torch.zeros(1500).double()
    null = paired_likelihood(pairs_of(generator, rate, nothing, n, tau, (20, 200)))
    assert share_below(p_values(null), 0.05) == pytest.approx(0.055, abs=0.035)
    assert false_discoveries(null, nothing, 0.05)[2] <= 1


def test_fold_changes_that_vary_between_pairs_say_less():
    """Of n pairs of many counts the variance of the mean is tau / n."""
    generator = seeded(42)
    rate, nothing = rates(generator, GENES, 30.0), torch.zeros(GENES).double()
    error = paired_likelihood(pairs_of(generator, rate, nothing, 6, 0.2)).error
    assert float(error.median()) == pytest.approx(math.sqrt(0.2 / 6) / math.log(2), rel=0.15)
    alike = paired_likelihood(pairs_of(generator, rate, nothing, 6, 1e-6)).error
    assert alike.median() < 0.5 * error.median()


def one_against_many(odd: float, n: int) -> list[tuple[GroupSums, GroupSums]]:
    """Poisson counts of `n` pairs without change, and of one with ten times the cells and a fold change of `odd`."""
    generator, rate = seeded(43), torch.full((GENES,), 20 / LIBRARY).double()
    none = torch.full_like(rate, 1e-6)
    pairs = []
    for i in range(n + 1):
        size, change = (300, odd) if i == 0 else (30, 0.0)
        pairs.append((cells(generator, rate * 2**change, size, none), cells(generator, rate, size, none)))
    return pairs


def test_pairs_that_agree_count_by_their_cells_and_those_that_do_not_alike():
    """Of six pairs the first has ten times the cells; if it disagrees its weight is a sixth, not two thirds."""
    agree, disagree = paired_likelihood(one_against_many(0.0, 5)), paired_likelihood(one_against_many(1.5, 5))
    assert float(disagree.mode.median()) == pytest.approx(1.5 / 6, abs=0.06)
    counts = 20 * (300 + 5 * 30)  # on each side
    assert float(agree.error.median()) == pytest.approx(math.sqrt(2 / counts) / math.log(2), rel=0.25)


def test_what_tells_the_samples_apart_is_taken_out_of_pairs():
    generator = seeded(44)
    rate, nothing = rates(generator, GENES, 3.0), torch.zeros(GENES).double()
    pairs = pairs_of(generator, rate, nothing, 5, 0.01)
    a, b = (list(side) for side in zip(*pairs, strict=True))
    assert (paired_likelihood(pairs).error < 0.7 * by_samples(a, b).error).double().mean() > 0.9


def test_the_fold_change_common_to_pairs_is_that_of_highest_likelihood():
    a, b, log_ratio = double(3, 0, 40), double(5, 2, 9), double(0.3, -1.0, 0.8)
    more = torch.sigmoid(log_ratio) / 3

    def negative(lfc: float) -> float:
        odds = log_ratio + lfc * math.log(2)
        return -float(((a + more) * odds - (a + b + 1 / 3) * torch.nn.functional.softplus(odds)).sum())

    expected = optimize.minimize_scalar(negative, bounds=(-8, 8), method="bounded", options={"xatol": 1e-9}).x  # type: ignore[union-attr]
    one, none = torch.ones(3, 1).double(), torch.zeros(3, 1).double()
    found = _common_lfc(a.unsqueeze(-1), b.unsqueeze(-1), log_ratio.unsqueeze(-1), one)
    assert float(found) == pytest.approx(expected, abs=1e-5)
    assert float(_common_lfc(none, none, log_ratio.unsqueeze(-1), one)) == pytest.approx(0.0, abs=1e-12)


def test_too_few_samples_show_no_variance():
    generator = seeded(45)
    rate = rates(generator, 50)
    a, b = samples_of(generator, rate, (10, 10)), samples_of(generator, rate, (10,))
    with pytest.raises(SettingError, match="2 samples with 2 coefficients leave no deviation between samples; give"):
        samples_likelihood([a[0], b[0]], design(1, 1))
    with pytest.raises(SettingError, match="3 samples with 3 coefficients"):
        samples_likelihood([*a, *b], design(2, 1, torch.randn(3, 1, generator=generator).double()))
    with pytest.raises(SettingError, match="give at least two"):
        paired_likelihood([(a[0], b[0])])
