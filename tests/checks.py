"""Statistical assertions with a stated false-alarm rate."""

from __future__ import annotations

import math

import torch
from scipy import stats
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


def assert_mean(sample: Tensor, expected: float, *, rate: float) -> None:
    """Assert that i.i.d. numbers have mean `expected`; a true claim fails with probability about `rate`.

    Uses the normal bound, so the numbers must be bounded or light-tailed and many.
    """
    values = sample.detach().double().flatten()
    error = values.std().item() / math.sqrt(values.numel())
    distance = abs(values.mean().item() - expected)
    allowed = stats.norm.isf(rate / 2)
    assert distance <= allowed * error, (
        f"mean {values.mean().item():.6g} is {distance / error:.2f} standard errors from {expected:.6g} "
        f"(allowed {allowed:.2f} at a false-alarm rate of {rate:g})"
    )


def assert_within(value: Tensor, expected: Tensor, mcse: Tensor, *, rate: float) -> None:
    """Assert that every estimate is within its allowed number of standard errors, jointly at false-alarm `rate`."""
    score = ((value - expected).abs() / mcse).double().flatten()
    allowed = stats.norm.isf(rate / 2 / score.numel())
    worst = score.max().item()
    message = f"worst of {score.numel()} estimates is {worst:.2f} standard errors off (allowed {allowed:.2f})"
    assert worst <= allowed, message


def chi_square_rate(score: Tensor) -> float:
    """P-value of standard scores being standard normal, by their sum of squares; small means badly calibrated."""
    z = score.double().flatten()
    return float(stats.chi2.sf(torch.sum(z**2).item(), z.numel()))


class Largest(TorchDispatchMode):
    """Record the size of the largest tensor that any operation returns."""

    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(tensor, Tensor):
                self.numel = max(self.numel, tensor.numel())
        return out
