from __future__ import annotations

import gzip
import struct
from pathlib import Path

import pytest
import torch
from scipy import stats
from torch import Tensor

from vaerdict import datasets
from vaerdict.core import DataError, SettingError
from vaerdict.datasets import SIMULATORS, CountData
from vaerdict.datasets.genes import _changes
from vaerdict.noise import seeded
from vaerdict_paper.mnist_data import MD5, Mnist, data_folder, find_data, mnist, mnist_split, read_idx

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
    """Means of 20,000 cells' expression are the stated truth, up to their own errors and those of eight donors."""
    sizes = {"n_donors": (300, 300)} if name == "donors" else {}
    data = SIMULATORS[name](3, n_cells=20_000, n_genes=8, **sizes)
    shares = data.rate / data.rate.sum(-1, keepdim=True)
    for state in range(len(data.level)):
        rate, share = data.rate[data.labels == state], shares[data.labels == state]
        for values, truth in ((rate, data.level[state]), (share, data.proportion[state])):
            found, error = values.mean(0), values.std(0) / len(values) ** 0.5
            allowed = 6 * error + (0.1 if name == "donors" else 0.02) * truth.exp2()
            assert ((found - truth.exp2()).abs() < allowed).all()
            assert not ((1.3 * found - truth.exp2()).abs() < allowed).all()  # the check can fail


@pytest.mark.parametrize("name", SIMULATORS)
def test_fold_changes_are_differences_and_proportions_shift_them(name):
    data = small(name, n_genes=100)
    absolute, relative = data.lfc(1, 0), data.lfc(1, 0, proportions=True)
    assert torch.equal(absolute, data.level[1] - data.level[0])
    assert torch.equal(data.lfc(0, 1), -absolute)
    shift = relative - absolute
    assert shift.mean().abs() > 0.01  # composition moves every gene
    assert shift.std() < 0.1 * absolute.std()  # by almost the same
    torch.testing.assert_close(relative - relative.median(), absolute - absolute.median(), rtol=0, atol=0.2)


def test_changes_lie_about_minus_one_zero_and_one():
    lfc = _changes(3, 5000, 0.5, seeded(0))
    assert not lfc[0].any()
    nearest = lfc[1:].round().clamp(-1, 1)
    for sign in (-1, 1):
        assert nearest.eq(sign).double().mean().item() == pytest.approx(0.25, abs=0.02)
    assert (lfc[1:] - nearest).std().item() == pytest.approx(0.16, abs=0.01)


@pytest.mark.parametrize(("name", "changed"), [("appendix", 2 / 3), ("section5", 2 / 3), ("released", 0.5)])
def test_a_share_of_the_genes_changes(name, changed, monkeypatch):
    """Binomial over ten sets of 100 genes: five standard errors."""
    monkeypatch.setattr("vaerdict.datasets.genes._TRUTH_CELLS", 10)
    lfc = torch.cat([SIMULATORS[name](seed, n_cells=5).lfc(1, 0) for seed in range(10)])
    assert lfc.abs().gt(0.5).double().mean().item() == pytest.approx(changed, abs=0.08)


def log_rates(name: str) -> tuple[Tensor, CountData]:
    data = SIMULATORS[name](0, n_cells=5000, n_genes=10, shares=(1,))
    return data.rate.log(), data


@pytest.mark.parametrize(("name", "scale", "low", "high"), [("appendix", 1, 10, 100), ("released", 0.08, 10, 60)])
def test_log_normals_have_the_printed_medians_and_covariance(name, scale, low, high):
    """Sigma is diagonal plus rank one, the diagonal in scale x (0.25, 0.75), the factor's in scale x (0, 2)."""
    log_h, _ = log_rates(name)
    median = log_h.mean(0).exp()
    assert (median > 0.9 * low).all()
    assert (median < 1.1 * high).all()
    sigma = torch.cov(log_h.mT) / scale
    assert (sigma.diagonal() > 0.2).all()
    assert (sigma.diagonal() < 2.9).all()
    off = sigma - torch.diag(sigma.diagonal())
    leading = torch.linalg.eigvalsh(sigma)
    assert leading[-2] < 0.85 < leading[-1]  # one common factor, the rest under 0.75
    assert off.abs().max() > 0.3


def test_skewness_of_rates_is_a_log_normals():
    log_h, data = log_rates("appendix")
    assert stats.skew(log_h.numpy(), axis=0) == pytest.approx(0, abs=0.25)
    assert stats.skew(data.rate.numpy(), axis=0).min() > 0.5


def test_the_released_variant_drops_entries_whatever_the_state():
    data = datasets.released(0)
    dropped = data.counts == 0
    for state in range(2):
        assert dropped[data.labels == state].double().mean().item() == pytest.approx(0.3, abs=0.01)
    kept = data.counts[~dropped] / data.rate[~dropped]
    assert kept.mean().item() == pytest.approx(1.0, abs=0.01)
    assert datasets.appendix(0).counts.eq(0).double().mean() < 0.02


def test_shares_set_the_sizes_of_groups():
    data = datasets.appendix(0, n_cells=3000, n_genes=5, shares=(1, 3, 2))
    assert data.labels.bincount().div(3000).tolist() == pytest.approx([1 / 6, 1 / 2, 1 / 3], abs=0.04)
    assert data.level.shape == (3, 5)


def test_every_state_has_a_cell_however_small_its_share():
    data = datasets.section5(0, n_cells=5, n_genes=3, shares=(1, 1e6, 1, 1, 1))
    assert sorted(data.labels.tolist()) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("shares", [(), (1, 0), (1, -1), (1, 1, 1, 1)])
def test_shares_that_cannot_be_are_refused(shares):
    with pytest.raises(SettingError, match=r"shares=\(.*must be positive"):
        datasets.appendix(0, n_cells=3, shares=shares)


# -------------------------------------------------------------------------------------------------------- donors
def test_a_donor_is_in_one_group_and_donors_give_unequal_numbers_of_cells():
    data = datasets.donors(0, n_cells=4000, n_genes=5, n_donors=(3, 4), shares=(1, 3))
    assert data.donors is not None
    groups = [data.labels[data.donors == donor].unique().tolist() for donor in range(7)]
    assert groups == [[0]] * 3 + [[1]] * 4
    assert data.labels.double().mean().item() == pytest.approx(0.75, abs=0.03)
    sizes = data.donors.bincount()
    assert sizes[0] < sizes[1] < sizes[2]
    assert sizes[3] < sizes[6]


def test_without_depth_and_donors_counts_are_negative_binomial():
    data = datasets.donors(0, n_cells=40_000, n_genes=4, n_donors=(1,), shares=(1,), donor_sd=0, depth_sd=0)
    mean = data.level[0].exp2()
    variance = data.counts.double().var(0)
    r = mean.square() / (variance - mean)
    assert ((r > 0.9) & (r < 11)).all()
    for gene in range(4):
        expected = stats.nbinom(r[gene], r[gene] / (r[gene] + mean[gene])).pmf(0)
        assert data.counts[:, gene].eq(0).double().mean().item() == pytest.approx(expected, abs=0.01)


def test_depth_is_technical_and_no_part_of_the_truth():
    shallow, deep = (datasets.donors(0, n_cells=2000, n_genes=10, depth_sd=sd) for sd in (0.0, 1.0))
    assert torch.equal(shallow.level, deep.level)
    assert deep.counts.sum(-1).log1p().std() > 2 * shallow.counts.sum(-1).log1p().std()


def test_donor_effects_move_whole_donors():
    def spread(sd: float) -> float:
        data = datasets.donors(0, n_cells=20_000, n_genes=10, n_donors=(8,), shares=(1,), donor_sd=sd, depth_sd=0)
        means = torch.stack([data.rate[data.donors == d].mean(0).log() for d in range(8)])
        return means.std(0).mean().item()

    assert spread(0.5) == pytest.approx(0.5, abs=0.12)
    assert spread(0.0) < 0.05


def test_in_the_null_arm_no_gene_differs():
    data = datasets.donors(0, null=True, n_cells=200)
    assert not data.lfc(1, 0).any()
    assert not data.lfc(1, 0, proportions=True).any()
    assert datasets.donors(0, n_cells=200).lfc(1, 0).abs().max() > 0.5
    assert data.counts.shape == (200, 100)


def test_each_group_needs_donors_and_a_share():
    with pytest.raises(SettingError, match="n_donors names 3 groups, shares 2"):
        datasets.donors(0, n_donors=(1, 2, 3))


# ------------------------------------------------------------------------------------------------ the data folder
def test_the_folder_is_the_one_named_else_the_users_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("VAERDICT_DATA", str(tmp_path / "here"))
    assert data_folder() == tmp_path / "here"
    monkeypatch.delenv("VAERDICT_DATA")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert data_folder() == tmp_path / "cache" / "vaerdict"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert data_folder() == Path.home() / ".cache" / "vaerdict"


def test_a_file_that_is_not_there_is_asked_for(monkeypatch, tmp_path):
    monkeypatch.setenv("VAERDICT_DATA", str(tmp_path))
    with pytest.raises(DataError, match=rf"{tmp_path}/a/b.gz is not there; get it from the moon.*set VAERDICT_DATA"):
        find_data("a/b.gz", source="the moon")
    with pytest.raises(DataError, match=r"mnist/train-images-idx3-ubyte\.gz is not there"):
        mnist()


# --------------------------------------------------------------------------------------------------------- MNIST
def idx(values: Tensor) -> bytes:
    return bytes([0, 0, 8, values.dim()]) + struct.pack(f">{values.dim()}I", *values.shape) + bytes(values.flatten())


def test_idx_files_are_read():
    values = torch.arange(24, dtype=torch.uint8).reshape(2, 3, 4)
    assert torch.equal(read_idx(idx(values)), values)
    with pytest.raises(DataError, match="type 0x0d; only unsigned bytes"):
        read_idx(bytes([0, 0, 0x0D, 1]) + struct.pack(">I", 1) + bytes(4))


def test_a_file_that_is_not_the_original_is_refused(monkeypatch, tmp_path):
    monkeypatch.setenv("VAERDICT_DATA", str(tmp_path))
    (tmp_path / "mnist").mkdir()
    for name in MD5:
        (tmp_path / "mnist" / name).write_bytes(gzip.compress(idx(torch.zeros(3, dtype=torch.uint8))))
    with pytest.raises(DataError, match=r"has MD5 .* the original f68b3c2dcbeaaa9fbdd348bbdeb94873"):
        mnist()


def fake(n: int = 3000) -> Mnist:
    """Digits of unequal frequency; an image's first pixel is its number, its second its digit."""
    y = torch.multinomial(torch.arange(1.0, 11.0), n, replacement=True, generator=seeded(0))
    x = torch.stack([torch.arange(n), y], -1).float()
    return Mnist(x[: n - 500], y[: n - 500], x[n - 500 :], y[n - 500 :])


def test_the_split_halves_the_images_and_keeps_parts_apart():
    data = fake()
    split = mnist_split(0, n_labels=90, n_held_out=100, data=data)
    assert len(split.x_test) == 1500
    assert len(split.x_train) == 1400
    assert len(split.x_held_out) == 100
    number = torch.cat([split.x_train, split.x_held_out, split.x_test])[:, 0]
    assert torch.equal(number.sort().values, torch.arange(3000.0))
    assert torch.equal(split.x_test[:, 1].long(), split.y_test)
    assert torch.equal(split.x_held_out[:, 1].long(), split.y_held_out)
    assert torch.equal(split.x_train[split.labelled][:, 1].long(), split.y_labelled)


def test_the_unknown_digit_is_never_named_but_is_in_training_and_test():
    split = mnist_split(0, n_labels=90, n_held_out=100, data=fake())
    assert split.y_labelled.bincount(minlength=10).tolist() == [10] * 9 + [0]
    assert 9 not in split.y_held_out
    assert (split.x_train[:, 1] == 9).sum() > 100
    assert (split.y_test == 9).sum() > 100
    other = mnist_split(0, n_labels=90, n_held_out=100, unknown=3, data=fake())
    assert other.y_labelled.bincount(minlength=10).tolist() == [10] * 3 + [0] + [10] * 6


def test_the_held_out_digits_are_as_frequent_as_in_the_half():
    """Chi-square over nine digits, false alarms in 1e-4 of cases; taken after the labels, rare ones would be few."""
    data = fake(30_000)
    split = mnist_split(0, n_labels=900, n_held_out=2000, data=data)
    whole = torch.cat([data.y_train, data.y_test]).bincount()[:9].double()
    expected = whole / whole.sum() * 2000
    found = split.y_held_out.bincount(minlength=9)
    assert stats.chisquare(found, expected).pvalue > 1e-4
    assert stats.chisquare(found, expected.flip(0)).pvalue < 1e-4  # the check can fail


def test_the_split_repeats_with_its_seed():
    one, same, other = (mnist_split(seed, n_labels=90, n_held_out=50, data=fake()) for seed in (0, 0, 1))
    assert all(torch.equal(a, b) for a, b in zip(one, same, strict=True))
    assert not torch.equal(one.x_test, other.x_test)


def test_splits_that_cannot_be_are_refused():
    with pytest.raises(SettingError, match="n_labels=100 cannot be spread evenly over 9 digits; use 99 or 108"):
        mnist_split(0, n_labels=100, data=fake())
    with pytest.raises(SettingError, match="900 labelled images are asked for where"):
        mnist_split(0, n_labels=8100, data=fake())


def test_mnist_itself():
    try:
        data = mnist()
    except DataError as error:
        pytest.skip(str(error))
    assert data.x_train.shape == (60_000, 784)
    assert data.x_test.shape == (10_000, 784)
    assert data.y_train[:5].tolist() == [5, 0, 4, 1, 9]
    assert data.y_test[:5].tolist() == [7, 2, 1, 0, 4]
    assert (data.x_train.min(), data.x_train.max()) == (0, 1)
    assert data.x_train.mean().item() == pytest.approx(0.1307, abs=1e-4)
    split = mnist_split(0, data=data)
    assert (len(split.x_train), len(split.x_held_out), len(split.x_test)) == (34_500, 500, 35_000)
    assert split.y_labelled.bincount(minlength=10).tolist() == [166] * 9 + [0]
