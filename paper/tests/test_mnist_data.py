"""MNIST: the data folder, the original files, and the semi-supervised split."""

from __future__ import annotations

import gzip
import struct
from pathlib import Path

import pytest
import torch
from scipy import stats
from torch import Tensor

from vaerdict.core import DataError, SettingError
from vaerdict.noise import seeded
from vaerdict_paper.mnist_data import MD5, Mnist, data_folder, find_data, mnist, mnist_split, read_idx


# ------------------------------------------------------------------------------------------------ the data folder
def test_the_data_folder_is_that_of_the_environment_variable_or_the_users_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("VAERDICT_DATA", str(tmp_path / "data"))
    assert data_folder() == tmp_path / "data"
    monkeypatch.delenv("VAERDICT_DATA")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert data_folder() == tmp_path / "cache" / "vaerdict"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert data_folder() == Path.home() / ".cache" / "vaerdict"


def test_the_error_of_a_missing_file_names_its_source(monkeypatch, tmp_path):
    monkeypatch.setenv("VAERDICT_DATA", str(tmp_path))
    with pytest.raises(DataError, match=rf"{tmp_path}/a/b.gz is not there; get it from a mirror.*set VAERDICT_DATA"):
        find_data("a/b.gz", source="a mirror")
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


def test_a_file_with_another_checksum_is_refused(monkeypatch, tmp_path):
    monkeypatch.setenv("VAERDICT_DATA", str(tmp_path))
    (tmp_path / "mnist").mkdir()
    for name in MD5:
        (tmp_path / "mnist" / name).write_bytes(gzip.compress(idx(torch.zeros(3, dtype=torch.uint8))))
    with pytest.raises(DataError, match=r"has MD5 .* the original f68b3c2dcbeaaa9fbdd348bbdeb94873"):
        mnist()


def fake(n: int = 3000) -> Mnist:
    """Digits of unequal frequency; the first pixel of an image is its number, the second its digit."""
    y = torch.multinomial(torch.arange(1.0, 11.0), n, replacement=True, generator=seeded(0))
    x = torch.stack([torch.arange(n), y], -1).float()
    return Mnist(x[: n - 500], y[: n - 500], x[n - 500 :], y[n - 500 :])


def test_the_split_is_into_disjoint_parts():
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


def test_the_unknown_digit_is_never_labelled_but_is_in_training_and_test():
    split = mnist_split(0, n_labels=90, n_held_out=100, data=fake())
    assert split.y_labelled.bincount(minlength=10).tolist() == [10] * 9 + [0]
    assert 9 not in split.y_held_out
    assert (split.x_train[:, 1] == 9).sum() > 100
    assert (split.y_test == 9).sum() > 100
    other = mnist_split(0, n_labels=90, n_held_out=100, unknown=3, data=fake())
    assert other.y_labelled.bincount(minlength=10).tolist() == [10] * 3 + [0] + [10] * 6


def test_the_held_out_digits_are_as_frequent_as_in_the_training_half():
    """Chi-square over nine digits at a false-alarm rate of 1e-4; drawn after the labels, rare digits would be few."""
    data = fake(30_000)
    split = mnist_split(0, n_labels=900, n_held_out=2000, data=data)
    frequency = torch.cat([data.y_train, data.y_test]).bincount()[:9].double()
    expected = frequency / frequency.sum() * 2000
    counts = split.y_held_out.bincount(minlength=9)
    assert stats.chisquare(counts, expected).pvalue > 1e-4
    assert stats.chisquare(counts, expected.flip(0)).pvalue < 1e-4  # the check can fail


def test_the_split_repeats_with_its_seed():
    one, same, other = (mnist_split(seed, n_labels=90, n_held_out=50, data=fake()) for seed in (0, 0, 1))
    assert all(torch.equal(a, b) for a, b in zip(one, same, strict=True))
    assert not torch.equal(one.x_test, other.x_test)


def test_invalid_splits_are_refused():
    with pytest.raises(SettingError, match="n_labels=100 cannot be spread evenly over 9 digits; use 99 or 108"):
        mnist_split(0, n_labels=100, data=fake())
    with pytest.raises(SettingError, match="900 labelled images are asked for where"):
        mnist_split(0, n_labels=8100, data=fake())


def test_the_original_files():
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
