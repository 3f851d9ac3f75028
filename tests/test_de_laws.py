"""What counts say of fold changes: closed forms, batches, and samples of cells in numbers that differ."""

from __future__ import annotations

import math

import pytest
import torch
from scipy import stats

from de_toys import simulated
from vaerdict.core import SettingError
from vaerdict.de.counts_likelihood import Law, Shares, count_law, paired_law, raw_shares, sample_law
from vaerdict.de.shrinkage import anchor
from vaerdict.decisions import discoveries
from vaerdict.noise import seeded
from vaerdict.training.data import Shared

DELTA = 0.5


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


def test_raw_proportions_do_not_depend_on_blocks(monkeypatch):
    x = torch.poisson(torch.full((50, 7), 3.0), generator=seeded(1)) + 1
    rows, some = Shared(torch.cat([x, torch.ones(50, 2)], 1)), torch.arange(0, 50, 3)
    found = raw_shares(rows, 7, {"some": some, "all": torch.arange(50)})["some"]
    share = (x / x.sum(-1, keepdim=True)).double()[some]
    torch.testing.assert_close(found.mean, share.mean(0), rtol=1e-6, atol=0)
    torch.testing.assert_close(found.variance, share.var(0), rtol=1e-5, atol=1e-9)
    assert found.inverse_library == pytest.approx(float((1 / x[some].sum(-1)).mean()))
    assert found.n_cells == len(some)
    assert found.seen is not None
    torch.testing.assert_close(found.seen, (x[some] > 0).double().mean(0))
    monkeypatch.setattr("vaerdict.de.counts_likelihood.block_size", lambda _: 4)
    torch.testing.assert_close(raw_shares(rows, 7, {"some": some})["some"].mean, found.mean)


def test_a_gene_unseen_says_nothing_of_either_direction_however_it_is_cut():
    nothing, library = torch.zeros(3, dtype=torch.float64), 1 / 1000.0
    few, many = Shares(nothing, nothing, library, 4), Shares(nothing, nothing, library, 1000)
    one = count_law([(few, many)])
    assert one.mode.abs().max() < 1e-9
    assert one.error.min() > 5
    batches = count_law([(Shares(nothing, nothing, library, 2), Shares(nothing, nothing, library, 2))] * 40)
    assert batches.error.min() > 2.5


def cells(generator: torch.Generator, mean: torch.Tensor, n: int, size: float = 0.5) -> Shares:
    """Cells whose counts are negative binomial of that size, in libraries that hardly differ."""
    rate = torch._standard_gamma(torch.full((n, len(mean)), size, dtype=torch.float64), generator=generator) / size
    share = torch.poisson(mean * rate * 1000, generator=generator) / 1000
    return Shares(share.mean(0), share.var(0), 1 / 1000, n)


def covered(law: Law) -> float:
    """The share of flat 90 % intervals that hold no change."""
    reached = torch.softmax(law.log_lik, -1).cumsum(-1)[:, len(law.grid) // 2]
    return float(((reached > 0.05) & (reached < 0.95)).double().mean())


@pytest.mark.parametrize(("n_batches", "n"), [(1, 90), (10, 9), (30, 3)])
def test_the_dispersion_of_small_batches_is_that_of_all(n_batches, n):
    """By each batch alone intervals of thirty batches covered 66 %."""
    generator, mean = seeded(17), torch.full((600,), 0.004, dtype=torch.float64)
    law = count_law([(cells(generator, mean, n), cells(generator, mean, n)) for _ in range(n_batches)])
    assert covered(law) > 0.82  # conditional on sums of so few cells, counts are not quite so well behaved


def test_a_small_group_knows_its_dispersion_by_its_own_cells():
    """With as many degrees of freedom as cells in all, 80 %."""
    generator, mean = seeded(18), torch.full((600,), 0.02, dtype=torch.float64)
    assert covered(count_law([(cells(generator, mean, 5), cells(generator, mean, 1000))])) > 0.84


# ---------------------------------------------------------------------------------------- samples as replicates
GENES, LIBRARY = 1000, 600.0


def proportions(generator: torch.Generator) -> torch.Tensor:
    level = torch.exp(1.3 * torch.randn(GENES, generator=generator, dtype=torch.float64))
    return level / level.sum()


def samples(generator: torch.Generator, means: list[torch.Tensor], cells: int, phi: float = 1.3) -> list[Shares]:
    """Samples of cells whose counts are over-dispersed by phi."""
    made = []
    for mean in means:
        shape = (mean * LIBRARY / (phi - 1)).expand(cells, -1).contiguous()
        x = torch.poisson(torch._standard_gamma(shape, generator=generator) * (phi - 1), generator=generator)
        total = x.sum(1, keepdim=True)
        made.append(Shares((x / total).mean(0), (x / total).var(0), float((1 / total).mean()), cells))
    return made


def around(generator: torch.Generator, level: torch.Tensor, n: int, sd: float) -> list[torch.Tensor]:
    """Mean proportions of samples, apart by `sd` on the scale of logarithms."""
    means = [level * torch.exp(sd * torch.randn(GENES, generator=generator, dtype=torch.float64)) for _ in range(n)]
    return [mean / mean.sum() for mean in means]


def probabilities(law: Law) -> torch.Tensor:
    model = torch.zeros(200, GENES, dtype=torch.float64) + 0.05 * torch.randn(200, 1, generator=seeded(0))
    lfc = anchor(model, law, new_cells=1.0, seed=0).lfc
    lfc = lfc - lfc.median(1, keepdim=True).values
    return (lfc.abs() >= DELTA).double().mean(0)


@pytest.mark.parametrize("cells", [(5, 160), (10, 150), (60, 60)])
@pytest.mark.parametrize("sd", [0.0, 0.3])
def test_samples_of_few_and_of_many_cells_show_no_change_where_there_is_none(cells, sd):
    """Logarithms of means with half a count in each sample called hundreds of these genes."""
    generator = seeded(11)
    level = proportions(generator)
    a, b = (samples(generator, around(generator, level, 4, sd), n) for n in cells)
    assert discoveries(probabilities(sample_law([(a, b)])), 0.05).sum() <= 1


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
    law = paired_law(list(zip(a, b, strict=True))) if paired else sample_law([(a, b)])
    called = discoveries(probabilities(law), 0.1)
    real = lfc.abs() >= DELTA
    assert (called & real).sum() > 0.25 * real.sum()
    assert (called & ~real).sum() <= 0.2 * called.sum()
    if paired:  # what tells donors apart is taken out
        assert (law.error < sample_law([(a, b)]).error).double().mean() > 0.8


def test_samples_that_differ_say_less_than_their_cells():
    generator = seeded(13)
    level = proportions(generator)
    a, b = (samples(generator, around(generator, level, 4, 0.5), 80) for _ in range(2))
    alike_a, alike_b = (samples(generator, [level] * 4, 80) for _ in range(2))
    seen = level * LIBRARY * 80 > 20
    apart, alike = sample_law([(a, b)]).error[seen], sample_law([(alike_a, alike_b)]).error[seen]
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
    law = sample_law([(sides[0], sides[1])])
    assert discoveries(probabilities(law), 0.05).sum() <= 2
    assert covered(law) > 0.85


def test_a_sample_of_few_cells_does_not_outvote_one_of_many():
    generator = seeded(14)
    level = proportions(generator)
    many, b = samples(generator, [level] * 3, 200), samples(generator, [level] * 3, 200)
    odd = samples(generator, [level.flip(0)], 3)
    seen = level * LIBRARY * 200 > 30
    moved = (sample_law([([*many, *odd], b)]).mode - sample_law([(many, b)]).mode).abs()
    assert moved[seen].median() < 0.2


def test_what_differs_between_batches_of_samples_is_no_change():
    generator = seeded(15)
    first, second = proportions(generator), proportions(generator)
    a = [samples(generator, [first] * 3, 60), samples(generator, [second], 60)]
    b = [samples(generator, [first], 60), samples(generator, [second] * 3, 60)]
    apart = sample_law(list(zip(a, b, strict=True)))
    mixed = sample_law([([*a[0], *a[1]], [*b[0], *b[1]])])
    seen = torch.minimum(first, second) * LIBRARY * 60 > 10
    assert apart.mode[seen].abs().median() < 0.4 * mixed.mode[seen].abs().median()


def test_one_sample_shows_no_variance():
    generator = seeded(16)
    a, b = (samples(generator, [proportions(generator)], 10) for _ in range(2))
    with pytest.raises(SettingError, match="no variance between samples"):
        sample_law([(a, b)])
    with pytest.raises(SettingError, match="at least two"):
        paired_law([(a[0], b[0])])
