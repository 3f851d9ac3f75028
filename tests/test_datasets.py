"""Simulators of counts: shapes, seeds, and true fold changes against the means of many cells."""

from __future__ import annotations

import pytest
import torch
from scipy import stats
from torch import Tensor

from vaerdict import datasets
from vaerdict.core import SettingError
from vaerdict.datasets import SIMULATORS, CountData
from vaerdict.datasets.genes import _changes
from vaerdict.noise import seeded

SMALL = {name: {"n_cells": 400, "n_genes": 20} for name in SIMULATORS}


def small(name: str, seed: int = 0, **sizes) -> CountData:
    return SIMULATORS[name](seed, **SMALL[name] | sizes)


# ---------------------------------------------------------------------------------------------------- simulators
@pytest.mark.parametrize("name", SIMULATORS)
def test_simulators_return_counts_and_the_truth(name):
    data = small(name)
    n_states = 5 if name == "section5" else 2
    assert data.counts.shape == data.rate.shape == (400, 20)
    assert data.level.shape == data.proportion.shape == (n_states, 20)
    assert data.counts.dtype == torch.float32
    assert torch.equal(data.counts, data.counts.round())
    assert data.counts.min() >= 0
    assert sorted(data.labels.unique().tolist()) == list(range(n_states))
    assert (data.donors is None) == (name != "donors")


@pytest.mark.parametrize("name", SIMULATORS)
def test_simulators_repeat_with_their_seed_and_change_with_it(name):
    one, same, other = small(name), small(name), small(name, seed=1)
    assert all(torch.equal(a, b) for a, b in zip(one, same, strict=True) if a is not None)
    assert not torch.equal(one.counts, other.counts)
    assert not torch.equal(one.level[1], other.level[1])


@pytest.mark.parametrize("name", SIMULATORS)
def test_levels_and_proportions_are_those_of_many_cells(name):
    """Means of the expression of 20,000 cells are the truth, up to their standard errors and those of the donors."""
    sizes = {"n_donors": (300, 300)} if name == "donors" else {}
    data = SIMULATORS[name](3, n_cells=20_000, n_genes=8, **sizes)
    proportions = data.rate / data.rate.sum(-1, keepdim=True)
    for state in range(len(data.level)):
        rate, proportion = data.rate[data.labels == state], proportions[data.labels == state]
        for values, truth in ((rate, data.level[state]), (proportion, data.proportion[state])):
            mean, error = values.mean(0), values.std(0) / len(values) ** 0.5
            allowed = 6 * error + (0.1 if name == "donors" else 0.02) * truth.exp2()
            assert ((mean - truth.exp2()).abs() < allowed).all()
            assert not ((1.3 * mean - truth.exp2()).abs() < allowed).all()  # the check can fail


@pytest.mark.parametrize("name", SIMULATORS)
def test_fold_changes_of_levels_and_of_proportions(name):
    data = small(name, n_genes=100)
    absolute, relative = data.lfc(1, 0), data.lfc(1, 0, proportions=True)
    assert torch.equal(absolute, data.level[1] - data.level[0])
    assert torch.equal(data.lfc(0, 1), -absolute)
    shift = relative - absolute
    assert shift.mean().abs() > 0.01  # the change of composition shifts every gene
    assert shift.std() < 0.1 * absolute.std()  # by almost the same amount
    torch.testing.assert_close(relative - relative.median(), absolute - absolute.median(), rtol=0, atol=0.2)


def test_changes_lie_about_minus_one_zero_and_one():
    lfc = _changes(3, 5000, 0.5, seeded(0))
    assert not lfc[0].any()
    nearest = lfc[1:].round().clamp(-1, 1)
    for sign in (-1, 1):
        assert nearest.eq(sign).double().mean().item() == pytest.approx(0.25, abs=0.02)
    assert (lfc[1:] - nearest).std().item() == pytest.approx(0.16, abs=0.01)


def test_graded_changes_are_uniform_and_opposite_in_pairs(monkeypatch):
    monkeypatch.setattr("vaerdict.datasets.genes._TRUTH_CELLS", 10)
    lfc = datasets.graded(0, n_cells=5, n_genes=4001).lfc(1, 0).sort().values
    torch.testing.assert_close(lfc, -lfc.flip(0), rtol=0, atol=1e-5)
    assert lfc[2000] == pytest.approx(0, abs=1e-6)
    # Kolmogorov and Smirnov: 2000 independent changes differ by more with a probability below 1e-6
    assert stats.kstest(lfc[lfc > 0].numpy(), "uniform").statistic < 2.7 / 2000**0.5


@pytest.mark.parametrize(("name", "changed"), [("appendix", 2 / 3), ("section5", 2 / 3), ("released", 0.5)])
def test_the_fraction_of_genes_that_change(name, changed, monkeypatch):
    """Over ten data sets of 100 genes, to five standard errors of a binomial."""
    monkeypatch.setattr("vaerdict.datasets.genes._TRUTH_CELLS", 10)
    lfc = torch.cat([SIMULATORS[name](seed, n_cells=5).lfc(1, 0) for seed in range(10)])
    assert lfc.abs().gt(0.5).double().mean().item() == pytest.approx(changed, abs=0.08)


def log_rates(name: str) -> tuple[Tensor, CountData]:
    data = SIMULATORS[name](0, n_cells=5000, n_genes=10, group_weights=(1,))
    return data.rate.log(), data


@pytest.mark.parametrize(("name", "scale", "low", "high"), [("appendix", 1, 10, 100), ("released", 0.08, 10, 60)])
def test_log_normals_have_the_printed_medians_and_covariance(name, scale, low, high):
    """Sigma is diagonal plus rank one: the diagonal in scale x (0.25, 0.75), the factor's in scale x (0, 2)."""
    log_h, _ = log_rates(name)
    median = log_h.mean(0).exp()
    assert (median > 0.9 * low).all()
    assert (median < 1.1 * high).all()
    sigma = torch.cov(log_h.mT) / scale
    assert (sigma.diagonal() > 0.2).all()
    assert (sigma.diagonal() < 2.9).all()
    off = sigma - torch.diag(sigma.diagonal())
    leading = torch.linalg.eigvalsh(sigma)
    assert leading[-2] < 0.85 < leading[-1]  # one common factor, the rest below 0.75
    assert off.abs().max() > 0.3


def test_rates_have_the_skewness_of_a_log_normal():
    log_h, data = log_rates("appendix")
    assert stats.skew(log_h.numpy(), axis=0) == pytest.approx(0, abs=0.25)
    assert stats.skew(data.rate.numpy(), axis=0).min() > 0.5


def test_the_released_variant_drops_entries_whatever_the_state():
    data = datasets.released(0)
    dropped = data.counts == 0
    for state in range(2):
        assert dropped[data.labels == state].double().mean().item() == pytest.approx(0.3, abs=0.01)
    ratio = data.counts[~dropped] / data.rate[~dropped]
    assert ratio.mean().item() == pytest.approx(1.0, abs=0.01)
    assert datasets.appendix(0).counts.eq(0).double().mean() < 0.02


def test_group_weights_set_the_sizes_of_groups():
    data = datasets.appendix(0, n_cells=3000, n_genes=5, group_weights=(1, 3, 2))
    assert data.labels.bincount().div(3000).tolist() == pytest.approx([1 / 6, 1 / 2, 1 / 3], abs=0.04)
    assert data.level.shape == (3, 5)


def test_every_state_has_a_cell_however_small_its_weight():
    data = datasets.section5(0, n_cells=5, n_genes=3, group_weights=(1, 1e6, 1, 1, 1))
    assert sorted(data.labels.tolist()) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("weights", [(), (1, 0), (1, -1), (1, 1, 1, 1)])
def test_invalid_group_weights_are_refused(weights):
    with pytest.raises(SettingError, match=r"group_weights=\(.*must be positive"):
        datasets.appendix(0, n_cells=3, group_weights=weights)


# -------------------------------------------------------------------------------------------------------- donors
def test_a_donor_is_in_one_group_and_donors_have_unequal_numbers_of_cells():
    data = datasets.donors(0, n_cells=4000, n_genes=5, n_donors=(3, 4), group_weights=(1, 3))
    assert data.donors is not None
    groups = [data.labels[data.donors == donor].unique().tolist() for donor in range(7)]
    assert groups == [[0]] * 3 + [[1]] * 4
    assert data.labels.double().mean().item() == pytest.approx(0.75, abs=0.03)
    sizes = data.donors.bincount()
    assert sizes[0] < sizes[1] < sizes[2]
    assert sizes[3] < sizes[6]


def test_without_depth_and_donors_counts_are_negative_binomial():
    data = datasets.donors(0, n_cells=40_000, n_genes=4, n_donors=(1,), group_weights=(1,), donor_sd=0, depth_sd=0)
    mean = data.level[0].exp2()
    variance = data.counts.double().var(0)
    r = mean.square() / (variance - mean)
    assert ((r > 0.9) & (r < 11)).all()
    for gene in range(4):
        expected = stats.nbinom(r[gene], r[gene] / (r[gene] + mean[gene])).pmf(0)
        assert data.counts[:, gene].eq(0).double().mean().item() == pytest.approx(expected, abs=0.01)


def test_the_truth_does_not_depend_on_depth():
    shallow, deep = (datasets.donors(0, n_cells=2000, n_genes=10, depth_sd=sd) for sd in (0.0, 1.0))
    assert torch.equal(shallow.level, deep.level)
    assert deep.counts.sum(-1).log1p().std() > 2 * shallow.counts.sum(-1).log1p().std()


def test_donor_effects_are_common_to_the_cells_of_a_donor():
    def spread(sd: float) -> float:
        data = datasets.donors(
            0, n_cells=20_000, n_genes=10, n_donors=(8,), group_weights=(1,), donor_sd=sd, depth_sd=0
        )
        means = torch.stack([data.rate[data.donors == d].mean(0).log() for d in range(8)])
        return means.std(0).mean().item()

    assert spread(0.5) == pytest.approx(0.5, abs=0.12)
    assert spread(0.0) < 0.05


def test_with_null_no_gene_differs():
    data = datasets.donors(0, null=True, n_cells=200)
    assert not data.lfc(1, 0).any()
    assert not data.lfc(1, 0, proportions=True).any()
    assert datasets.donors(0, n_cells=200).lfc(1, 0).abs().max() > 0.5
    assert data.counts.shape == (200, 100)


def test_each_group_needs_donors_and_a_weight():
    with pytest.raises(SettingError, match="n_donors names 3 groups, group_weights 2"):
        datasets.donors(0, n_donors=(1, 2, 3))
