"""MNIST from its four original files, and the split of the paper's semi-supervised experiment."""

from __future__ import annotations

import gzip
import hashlib
import os
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from vaerdict.core import DataError, SettingError
from vaerdict.noise import seeded

MD5 = {
    "train-images-idx3-ubyte.gz": "f68b3c2dcbeaaa9fbdd348bbdeb94873",
    "train-labels-idx1-ubyte.gz": "d53e105ee54ea40749a09fcbcd1e9432",
    "t10k-images-idx3-ubyte.gz": "9fb629c4189551a2d022fa330f9573f3",
    "t10k-labels-idx1-ubyte.gz": "ec29112dd5afa0611ce80d1b7f02629c",
}
"""The published checksums of the original files."""

_SOURCE = "a public mirror of MNIST (https://ossci-datasets.s3.amazonaws.com/mnist/)"
_BYTES = 0x08  # the idx code of unsigned bytes


class Mnist(NamedTuple):
    """MNIST, pixels in [0, 1].

    Shapes: ``x_train (60000, 784)``, ``y_train (60000,)``, ``x_test (10000, 784)``, ``y_test (10000,)``.
    """

    x_train: Tensor
    y_train: Tensor
    x_test: Tensor
    y_test: Tensor


class MnistSplit(NamedTuple):
    """The semi-supervised problem: nine known digits, few labels, and a digit that is never labelled.

    `labelled` indexes the rows of `x_train` whose digits `y_labelled` are given. The held-out images show known digits
    and are not used for training; thresholds and calibration are chosen on them.

    Shapes: ``x_train (n, 784)``, ``labelled (n_labels,)``, ``y_labelled (n_labels,)``,
    ``x_held_out (n_held_out, 784)``, ``y_held_out (n_held_out,)``, ``x_test (m, 784)``, ``y_test (m,)``.
    """

    x_train: Tensor
    labelled: Tensor
    y_labelled: Tensor
    x_held_out: Tensor
    y_held_out: Tensor
    x_test: Tensor
    y_test: Tensor


def mnist() -> Mnist:
    """MNIST from ``mnist/*.gz`` in the data folder, with verified checksums."""
    x_train, y_train, x_test, y_test = (_read(name) for name in MD5)
    return Mnist(_pixels(x_train), y_train.long(), _pixels(x_test), y_test.long())


def mnist_split(
    seed: int = 0, *, n_labels: int = 1494, n_held_out: int = 500, unknown: int = 9, data: Mnist | None = None
) -> MnistSplit:
    """The paper's split: all images shuffled by `seed` and halved, with a few labels of every known digit.

    Unlike in the paper, which chose its thresholds on test images, `n_held_out` labelled images of known digits are
    taken out of the training half.

    Parameters
    ----------
    seed
        The seed of the shuffle.
    n_labels
        Labels in the training half, spread evenly over the known digits; 1,494 as in the released split (the paper
        says about 1,500).
    n_held_out
        Labelled images of known digits outside of training and test.
    unknown
        The digit without labels.
    data
        The images; those of `mnist` by default.
    """
    data = mnist() if data is None else data
    generator = seeded(seed)
    x, y = torch.cat([data.x_train, data.x_test]), torch.cat([data.y_train, data.y_test])
    order = torch.randperm(len(x), generator=generator)
    train, test = order[: len(x) // 2], order[len(x) // 2 :]
    known = [digit for digit in y.unique().tolist() if digit != unknown]
    if n_labels % len(known):
        few, many = (n_labels // len(known) + i for i in (0, 1))
        raise SettingError(
            f"n_labels={n_labels} cannot be spread evenly over {len(known)} digits; "
            f"use {few * len(known)} or {many * len(known)}."
        )
    # the half is in random order, so the first images that qualify are a random choice; after the labels, which reach
    # further down for rare digits, the held-out images would not be one
    held_out = _first(train, y[train] != unknown, n_held_out)
    train = train[~torch.isin(train, held_out)]
    chosen = torch.cat([_first(train, y[train] == digit, n_labels // len(known)) for digit in known])
    labelled = torch.isin(train, chosen).nonzero().flatten()
    return MnistSplit(x[train], labelled, y[train[labelled]], x[held_out], y[held_out], x[test], y[test])


def _first(index: Tensor, mask: Tensor, n: int) -> Tensor:
    candidates = index[mask]
    if len(candidates) < n:
        raise SettingError(f"{n} labelled images exceed the {len(candidates)} that are left; use fewer.")
    return candidates[:n]


def _read(name: str) -> Tensor:
    """One idx file; raises `DataError` if it is not the original one. Shapes: as in its header."""
    packed = _packed(name)
    digest = hashlib.md5(packed, usedforsecurity=False).hexdigest()
    if digest != MD5[name]:
        raise DataError(f"mnist/{name} has MD5 {digest}, the original {MD5[name]}; download it again from {_SOURCE}.")
    return read_idx(gzip.decompress(packed))


def mnist_files() -> Iterator[bytes]:
    """The contents of the four files, for the hash in the manifest."""
    return map(_packed, MD5)


def _packed(name: str) -> bytes:
    return find_data(f"mnist/{name}", source=_SOURCE).read_bytes()


def read_idx(raw: bytes) -> Tensor:
    """An array of unsigned bytes in the idx format: two zeros, type, axes, the length of each axis, the values."""
    kind, n_axes = raw[2], raw[3]
    if kind != _BYTES:
        raise DataError(f"the idx file holds values of type {kind:#04x}; only unsigned bytes ({_BYTES:#04x}) are read.")
    start = 4 + 4 * n_axes
    shape = struct.unpack(f">{n_axes}I", raw[4:start])
    return torch.from_numpy(np.frombuffer(raw, np.uint8, offset=start).reshape(shape).copy())


def _pixels(images: Tensor) -> Tensor:
    return images.reshape(len(images), -1).float() / 255


def data_folder() -> Path:
    """The folder named by ``VAERDICT_DATA``, else ``vaerdict`` in the user's cache folder."""
    if named := os.environ.get("VAERDICT_DATA"):
        return Path(named).expanduser()
    cache = os.environ.get("XDG_CACHE_HOME")
    return (Path(cache) if cache else Path.home() / ".cache") / "vaerdict"


def find_data(name: str, *, source: str) -> Path:
    """The file `name` of the data folder; if it is absent, the error names its public `source`."""
    path = data_folder() / name
    if not path.is_file():
        raise DataError(
            f"{path} does not exist; download it from {source}, or set VAERDICT_DATA to the folder that holds {name}."
        )
    return path
