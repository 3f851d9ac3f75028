"""The linear-Gaussian data of the pPCA experiment."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from vaerdict.core import SettingError
from vaerdict.noise import seeded


class LinearGaussianData(NamedTuple):
    """A simulated linear-Gaussian data set with its true parameters.

    Shapes: ``x_train (n_train, p)``, ``x_test (n_test, p)``, ``weight (p, d)``, ``noise_sd (p,)``.
    """

    x_train: Tensor
    x_test: Tensor
    weight: Tensor
    noise_sd: Tensor


LOADINGS = {"released": 6, "text": 10}
"""The inverse variance of the loadings: 6 in the paper's released code, p = 10 in its text."""


def linear_gaussian(
    seed: int = 0, *, loadings: str = "released", n: int = 1000, p: int = 10, d: int = 6
) -> LinearGaussianData:
    """The data of the pPCA experiment: x = B z + diag(c) e with c ~ N(1, 2^2), of which 80 % are for training.

    Parameters
    ----------
    seed
        The seed of parameters and data.
    loadings
        The variance of the entries of B, for which the paper's text and released code disagree: a key of `LOADINGS`.
    n, p, d
        The numbers of observations, features and latents.

    Examples
    --------
    >>> data = linear_gaussian(0, n=100)
    >>> data.x_train.shape, data.x_test.shape, data.weight.shape
    (torch.Size([80, 10]), torch.Size([20, 10]), torch.Size([10, 6]))
    """
    if loadings not in LOADINGS:
        raise SettingError(f"loadings={loadings!r}; choose one of {', '.join(LOADINGS)}.")
    generator = seeded(seed)
    weight = torch.randn(p, d, generator=generator) / LOADINGS[loadings] ** 0.5
    noise_sd = (1 + 2 * torch.randn(p, generator=generator)).abs()
    z = torch.randn(n, d, generator=generator)
    x = z @ weight.mT + noise_sd * torch.randn(n, p, generator=generator)
    n_train = int(0.8 * n)
    return LinearGaussianData(x[:n_train], x[n_train:], weight, noise_sd)
