"""The likelihood of fold changes given the counts: closed forms, batches, and samples of different numbers of cells."""

from __future__ import annotations

import math

import pytest
import torch
from scipy import stats

from de_toys import simulated
from vaerdict.core import SettingError
from vaerdict.de.counts_likelihood import (
    GroupProportions,
    LfcLikelihood,
    cells_likelihood,
    group_proportions,
    paired_likelihood,
    samples_likelihood,
)
from vaerdict.de.shrinkage import posterior_draws
from vaerdict.decisions import discoveries
from vaerdict.noise import seeded
from vaerdict.training.data import SharedRows

DELTA = 0.5


def test_the_likelihood_of_poisson_counts_is_binomial_given_their_sum():
    n = 10**7  # so many that Student's t is normal
    a = GroupProportions(torch.tensor([12.0, 0.0]) / n, torch.tensor([12.0, 0.0]) / n, 1.0, n)
    b = GroupProportions(torch.tensor([5.0, 3.0]) / n / 2, torch.tensor([5.0, 3.0]) / n / 2, 1.0, 2 * n)
    likelihood = cells_likelihood([(a, b)])
    odds = 0.5 * torch.exp2(likelihood.grid)  # half as many cells
    for gene, (x, y) in enumerate(((12, 5), (0, 3))):
        expected = torch.from_numpy(stats.binom.logpmf(x, x + y, (odds / (1 + odds)).numpy()))
        near = expected > expected.max() - 20
        apart = (likelihood.log_lik[gene] - expected)[near]
        torch.testing.assert_close(apart, apart[:1].expand_as(apart), rtol=0, atol=1e-3)
    assert likelihood.grid[likelihood.log_lik[0].argmax()] == pytest.approx(math.log2(12 / 5 * 2), abs=0.03)
    assert likelihood.log_lik[1].argmax() == 0  # never seen in the first group: the smaller the likelier


def test_over_dispersed_counts_and_few_cells_say_less():
    a, b = simulated(seeded(0), torch.zeros(5))
    wide = [GroupProportions(s.mean, 4 * s.variance, s.inverse_library, s.n_cells) for s in (a, b)]
    torch.testing.assert_close(cells_likelihood([(wide[0], wide[1])]).error, 2 * cells_likelihood([(a, b)]).error)
    few = [
        GroupProportions(s.mean, s.variance, s.inverse_library * 3 / s.n_cells, 3) for s in (a, b)
    ]  # as many counts in 3 cells
    for likelihood, limit in ((cells_likelihood([(a, b)]), 9.3), (cells_likelihood([(few[0], few[1])]), 6.0)):
        drop = likelihood.log_lik[0].max() - likelihood.log_lik[0][0]
        assert bool(drop > limit) == (limit == 9.3)


def test_batches_add_up_and_what_differs_between_them_is_no_change():
    generator = seeded(1)
    lfc = torch.zeros(200)
    first, second = simulated(generator, lfc, 400.0, (80, 20)), simulated(generator, lfc, 100.0, (20, 80))
    apart = cells_likelihood([first, second])
    mixed = [
        GroupProportions(
            (x.mean * x.n_cells + y.mean * y.n_cells) / 100, (x.variance + y.variance) / 2, x.inverse_library, 100
        )
        for x, y in zip(first, second, strict=True)
    ]
    assert abs(apart.mode).median() < 0.5 * abs(cells_likelihood([(mixed[0], mixed[1])]).mode).median()
    assert (apart.error < cells_likelihood([first]).error).all()


def test_raw_proportions_do_not_depend_on_blocks(monkeypatch):
    x = torch.poisson(torch.full((50, 7), 3.0), generator=seeded(1)) + 1
    rows, some = SharedRows(torch.cat([x, torch.ones(50, 2)], 1)), torch.arange(0, 50, 3)
    proportions = group_proportions(rows, 7, {"some": some, "all": torch.arange(50)})["some"]
    share = (x / x.sum(-1, keepdim=True)).double()[some]
    torch.testing.assert_close(proportions.mean, share.mean(0), rtol=1e-6, atol=0)
    torch.testing.assert_close(proportions.variance, share.var(0), rtol=1e-5, atol=1e-9)
    assert proportions.inverse_library == pytest.approx(float((1 / x[some].sum(-1)).mean()))
    assert proportions.n_cells == len(some)
    assert proportions.seen is not None
    torch.testing.assert_close(proportions.seen, (x[some] > 0).double().mean(0))
    monkeypatch.setattr("vaerdict.de.counts_likelihood.block_size", lambda _: 4)
    torch.testing.assert_close(group_proportions(rows, 7, {"some": some})["some"].mean, proportions.mean)


def test_a_gene_unseen_says_nothing_of_either_direction_however_it_is_cut():
    nothing, library = torch.zeros(3, dtype=torch.float64), 1 / 1000.0
    few, many = GroupProportions(nothing, nothing, library, 4), GroupProportions(nothing, nothing, library, 1000)
    one = cells_likelihood([(few, many)])
    assert one.mode.abs().max() < 1e-9
    assert one.error.min() > 5
    batches = cells_likelihood(
        [(GroupProportions(nothing, nothing, library, 2), GroupProportions(nothing, nothing, library, 2))] * 40
    )
    assert batches.error.min() > 2.5


def cells(generator: torch.Generator, mean: torch.Tensor, n: int, size: float = 0.5) -> GroupProportions:
    """Cells whose counts are negative binomial of that size, in libraries that hardly differ."""
    rate = torch._standard_gamma(torch.full((n, len(mean)), size, dtype=torch.float64), generator=generator) / size
    share = torch.poisson(mean * rate * 1000, generator=generator) / 1000
    return GroupProportions(share.mean(0), share.var(0), 1 / 1000, n)


def covered(likelihood: LfcLikelihood) -> float:
    """The share of flat 90 % intervals that hold no change."""
    reached = torch.softmax(likelihood.log_lik, -1).cumsum(-1)[:, len(likelihood.grid) // 2]
    return float(((reached > 0.05) & (reached < 0.95)).double().mean())


@pytest.mark.parametrize(("n_batches", "n"), [(1, 90), (10, 9), (30, 3)])
def test_the_dispersion_of_small_batches_is_that_of_all(n_batches, n):
    """By each batch alone intervals of thirty batches covered 66 %."""
    generator, mean = seeded(17), torch.full((600,), 0.004, dtype=torch.float64)
    likelihood = cells_likelihood([(cells(generator, mean, n), cells(generator, mean, n)) for _ in range(n_batches)])
    assert covered(likelihood) > 0.82  # conditional on sums of so few cells, counts are not quite so well behaved


def test_a_small_group_knows_its_dispersion_by_its_own_cells():
    """With as many degrees of freedom as cells in all, 80 %."""
    generator, mean = seeded(18), torch.full((600,), 0.02, dtype=torch.float64)
    assert covered(cells_likelihood([(cells(generator, mean, 5), cells(generator, mean, 1000))])) > 0.84


# ---------------------------------------------------------------------------------------- samples as replicates
GENES, LIBRARY = 1000, 600.0


def proportions(generator: torch.Generator) -> torch.Tensor:
    level = torch.exp(1.3 * torch.randn(GENES, generator=generator, dtype=torch.float64))
    return level / level.sum()


def samples(
    generator: torch.Generator, means: list[torch.Tensor], cells: int, phi: float = 1.3
) -> list[GroupProportions]:
    """Samples of cells whose counts are over-dispersed by phi."""
    made = []
    for mean in means:
        shape = (mean * LIBRARY / (phi - 1)).expand(cells, -1).contiguous()
        x = torch.poisson(torch._standard_gamma(shape, generator=generator) * (phi - 1), generator=generator)
        total = x.sum(1, keepdim=True)
        made.append(GroupProportions((x / total).mean(0), (x / total).var(0), float((1 / total).mean()), cells))
    return made


def around(generator: torch.Generator, level: torch.Tensor, n: int, sd: float) -> list[torch.Tensor]:
    """Mean proportions of samples, apart by `sd` on the scale of logarithms."""
    means = [level * torch.exp(sd * torch.randn(GENES, generator=generator, dtype=torch.float64)) for _ in range(n)]
    return [mean / mean.sum() for mean in means]


def probabilities(likelihood: LfcLikelihood) -> torch.Tensor:
    lfc = posterior_draws(likelihood, 200, seed=0)
    lfc = lfc - lfc.median(1, keepdim=True).values
    return (lfc.abs() >= DELTA).double().mean(0)


@pytest.mark.parametrize("cells", [(5, 160), (10, 150), (60, 60)])
@pytest.mark.parametrize("sd", [0.0, 0.3])
def test_samples_of_few_and_of_many_cells_show_no_change_where_there_is_none(cells, sd):
    """Logarithms of means with half a count in each sample called hundreds of these genes."""
    generator = seeded(11)
    level = proportions(generator)
    a, b = (samples(generator, around(generator, level, 4, sd), n) for n in cells)
    assert discoveries(probabilities(samples_likelihood([(a, b)])), 0.05).sum() <= 1


@pytest.mark.parametrize("paired", [False, True])
def test_changes_between_samples_are_found_with_few_false_ones(paired):
    generator = seeded(12)
    level = proportions(generator)
    changed = torch.rand(GENES, generator=generator) < 0.2
    lfc = torch.where(changed, 1.5 * torch.randn(GENES, generator=generator, dtype=torch.float64), 0.0)
    donors = around(generator, level, 6, 0.5 if paired else 0.15)
    others = donors if paired else around(generator, level, 6, 0.15)
    side_a = [m * torch.exp2(lfc) / (m * torch.exp2(lfc)).sum() for m in donors]
    a, b = samples(generator, side_a, 80), samples(generator, others, 80)
    likelihood = paired_likelihood(list(zip(a, b, strict=True))) if paired else samples_likelihood([(a, b)])
    called = discoveries(probabilities(likelihood), 0.1)
    real = lfc.abs() >= DELTA
    assert (called & real).sum() > 0.25 * real.sum()
    assert (called & ~real).sum() <= 0.2 * called.sum()
    if paired:  # what tells donors apart is taken out
        assert (likelihood.error < samples_likelihood([(a, b)]).error).double().mean() > 0.8


def test_samples_that_differ_say_less_than_their_cells():
    generator = seeded(13)
    level = proportions(generator)
    a, b = (samples(generator, around(generator, level, 4, 0.5), 80) for _ in range(2))
    alike_a, alike_b = (samples(generator, [level] * 4, 80) for _ in range(2))
    seen = level * LIBRARY * 80 > 20
    apart, alike = samples_likelihood([(a, b)]).error[seen], samples_likelihood([(alike_a, alike_b)]).error[seen]
    # two sides of four samples, half apart in logarithms: sqrt(2 * 0.5^2 / 4) / log 2 = 0.51
    assert apart.median() == pytest.approx(0.55, abs=0.12)
    assert alike.median() < 0.5 * apart.median()


def test_a_tiny_sample_does_not_hide_how_much_the_others_differ():
    """Where no gene was seen enough in all samples, these were taken to be alike: two in five genes were called."""
    generator = seeded(19)
    level = proportions(generator)
    sides = []
    for _ in range(2):
        means = around(generator, level, 4, 0.7)
        sides.append([*samples(generator, means[:1], 3), *samples(generator, means[1:], 200)])
    likelihood = samples_likelihood([(sides[0], sides[1])])
    assert discoveries(probabilities(likelihood), 0.05).sum() <= 2
    assert covered(likelihood) > 0.85


def test_a_sample_of_few_cells_does_not_outvote_one_of_many():
    generator = seeded(14)
    level = proportions(generator)
    many, b = samples(generator, [level] * 3, 200), samples(generator, [level] * 3, 200)
    odd = samples(generator, [level.flip(0)], 3)
    seen = level * LIBRARY * 200 > 30
    moved = (samples_likelihood([([*many, *odd], b)]).mode - samples_likelihood([(many, b)]).mode).abs()
    assert moved[seen].median() < 0.2


def test_what_differs_between_batches_of_samples_is_no_change():
    generator = seeded(15)
    first, second = proportions(generator), proportions(generator)
    a = [samples(generator, [first] * 3, 60), samples(generator, [second], 60)]
    b = [samples(generator, [first], 60), samples(generator, [second] * 3, 60)]
    apart = samples_likelihood(list(zip(a, b, strict=True)))
    mixed = samples_likelihood([([*a[0], *a[1]], [*b[0], *b[1]])])
    seen = torch.minimum(first, second) * LIBRARY * 60 > 10
    assert apart.mode[seen].abs().median() < 0.4 * mixed.mode[seen].abs().median()


def test_one_sample_shows_no_variance():
    generator = seeded(16)
    a, b = (samples(generator, [proportions(generator)], 10) for _ in range(2))
    with pytest.raises(SettingError, match="no variance between samples"):
        samples_likelihood([(a, b)])
    with pytest.raises(SettingError, match="at least two"):
        paired_likelihood([(a[0], b[0])])
