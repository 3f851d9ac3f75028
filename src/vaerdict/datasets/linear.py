"""The linear-Gaussian data of the pPCA experiment."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from vaerdict.core import SettingError
from vaerdict.noise import seeded


class LinearGaussianData(NamedTuple):
    """A simulated linear-Gaussian data set with its generator.

    Shapes: ``x_train (n_train, p)``, ``x_test (n_test, p)``, ``weight (p, d)``, ``noise_sd (p,)``.
    """

    x_train: Tensor
    x_test: Tensor
    weight: Tensor
    noise_sd: Tensor


LOADINGS = {"released": 6, "text": 10}
"""Variance of the loadings is one over this: 1/6 in the released code, 1/p = 1/10 in the paper's text."""


def linear_gaussian(
    seed: int = 0, *, loadings: str = "released", n: int = 1000, p: int = 10, d: int = 6
) -> LinearGaussianData:
    """The pPCA experiment's data: x = B z + diag(c) e with c ~ N(1, 2^2), split 80 % to 20 %.

    `loadings` names the variance of the entries of B, where the paper's text and released code disagree (`LOADINGS`).
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
