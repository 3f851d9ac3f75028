"""Temperature schedules: n + 1 values from 0 to 1, which is n weights and n transitions."""

from __future__ import annotations

import torch
from torch import Tensor

from vaerdict.core import SettingError, check_count


def linear(n: int) -> Tensor:
    r"""Equal steps, :math:`t_i = i / n`."""
    return torch.linspace(0, 1, check_count(n, name="n") + 1, dtype=torch.float64)


def sigmoid(n: int, sharpness: float = 4.0) -> Tensor:
    r"""Small steps at both ends: :math:`\sigma(\delta(2i/n - 1))` rescaled to [0, 1] (Wu et al., 2016)."""
    s = torch.sigmoid(sharpness * (2 * linear(n) - 1))
    t = (s - s[0]) / (s[-1] - s[0])
    t[-1] = 1.0
    return t


def geometric(n: int, first: float = 1e-4) -> Tensor:
    r"""Equal ratios after a first step from 0 to `first`: for a start much wider than the posterior."""
    if not 0 < first < 1:
        raise SettingError(f"first={first} must lie strictly between 0 and 1.")
    exponents = linear(n - 1) if check_count(n, name="n") > 1 else linear(1)[1:]
    return torch.cat([torch.zeros(1, dtype=torch.float64), first ** (1 - exponents)])


def as_schedule(temperatures: int | Tensor) -> Tensor:
    """The schedule meant: itself, or the sigmoid one of so many transitions."""
    if isinstance(temperatures, int):
        return sigmoid(check_count(temperatures, name="temperatures"))
    t = temperatures.detach().double().cpu()
    if t.dim() != 1 or len(t) < 2 or t[0] != 0 or t[-1] != 1 or not (t.diff() > 0).all():
        raise SettingError(
            "a temperature schedule must increase strictly from 0 to 1; "
            "take vaerdict.samplers.sigmoid(500), linear(500) or geometric(500)."
        )
    return t
