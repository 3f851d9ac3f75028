"""How far a quantity moves from the encoder to refined inference, per observation and in sums over many."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from vaerdict import diagnostics
from vaerdict.auditing.refined import Sample
from vaerdict.core import WeightError

BEYOND = 3.0
"""A quantity of an observation has moved if the difference is larger than so many standard errors."""

_ROUNDING = 1e-12  # variance relative to the square of a value below which a quantity is constant


class Movement(NamedTuple):
    """A quantity by the encoder and by refined inference, with errors and spread.

    `plugin` is its mean under the encoder, `value` its posterior mean; `error` is the standard error of their
    difference. `encoder_variance` and `variance` are those under the encoder and under the posterior.

    Shapes: ``(m, outputs)`` each.
    """

    plugin: Tensor
    value: Tensor
    error: Tensor
    encoder_variance: Tensor
    variance: Tensor

    def select(self, index: Tensor) -> Movement:
        """The movement of some observations."""
        return Movement(*(t[index] for t in self))


@torch.no_grad()
def movement(before: Iterable[Tensor], after: Iterable[Tensor], encoder: Sample, posterior: Sample) -> Movement:
    """Compare a quantity under the encoder and under the posterior.

    Parameters
    ----------
    before, after
        Values at the draws of `encoder` and of `posterior`, some particles at a time, ``(k, m, outputs)`` each.
    encoder, posterior
        Draws of m observations. Those of the encoder count alike, except that draws which are impossible under the
        model do not count: an estimate of a bounded latent may leave its support.
    """
    possible = (~encoder.log_w.isneginf()).double()
    n = possible.sum(0).unsqueeze(-1)
    centre, mean, square = _sums(before, (possible / possible.sum(0)).unsqueeze(0), None)
    encoder_variance = (square[0] - mean[0].square()).clamp_min(0) * n / (n - 1).clamp_min(1)
    smooth = torch.softmax(diagnostics.psis(posterior.log_w)[0], 0)
    raw = torch.softmax(posterior.log_w, 0).square()
    _, first, second = _sums(after, torch.stack([smooth, raw]), centre)
    value = first[0]
    variance = (second[0] - value.square()).clamp_min(0)
    # delta method: the sum of w^2 (f - value)^2
    mcse = (second[1] - 2 * value * first[1] + value.square() * raw.sum(0).unsqueeze(-1)).clamp_min(0)
    error = (mcse + encoder_variance / n).sqrt()
    return Movement(centre + mean[0], centre + value, error, encoder_variance, variance)


def _sums(values: Iterable[Tensor], weights: Tensor, centre: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Weighted sums of a quantity and of its square about a centre, by default its mean over the first particles.

    Shapes: ``weights (s, n, m) -> (m, outputs), (s, m, outputs), (s, m, outputs)``.
    """
    first, second, start = weights.new_zeros(()), weights.new_zeros(()), 0
    for part in values:
        weight = weights[:, start : start + len(part)]
        start += len(part)
        part = _finite(part, weight)
        centre = part.mean(0).double() if centre is None else centre
        part = part - centre.to(part)
        first = first + torch.einsum("snm,nmf->smf", weight.to(part), part).double()
        second = second + torch.einsum("snm,nmf->smf", weight.to(part), part.square()).double()
    assert centre is not None
    return centre, first, second


def _finite(values: Tensor, weight: Tensor) -> Tensor:
    """The values, zero where the weight is: draws in a far tail may overflow."""
    if bool(values.isfinite().all()):
        return values
    values = torch.where((weight[0] > 0).unsqueeze(-1), values, 0.0)
    n_bad = values.numel() - int(values.isfinite().sum())
    if n_bad:
        raise WeightError(f"a quantity is not finite at {n_bad} of {values.numel()} draws; bound it or take its log.")
    return values


# ------------------------------------------------------------------------------------------------------- sums
FIELDS = (
    "n",
    "plugin",
    "value",
    "square",
    "shift",
    "error",
    "moved",
    "units",
    "units_square",
    "sds",
    "sds_square",
    "before",
    "after",
)
"""What is summed over observations, see `tally`."""


def in_sds(moved: Movement) -> Tensor:
    """Squared movement in posterior variances, without the share of Monte-Carlo error. Shapes: ``-> (m, outputs)``."""
    square = (moved.value - moved.plugin).square() - moved.error.square()
    smallest = _ROUNDING * moved.value.square() + torch.finfo(torch.double).tiny
    return torch.where(moved.variance > smallest, square / moved.variance.clamp_min(smallest), 0.0)


def tally(moved: Movement, group: Tensor, n_groups: int) -> Tensor:
    """Sums over the observations of every group, one for each of `FIELDS`.

    Shapes: ``group (m,) -> (fields, groups, outputs)``.
    """
    shift, sds = moved.value - moved.plugin, in_sds(moved)
    units = shift.square() - moved.error.square()
    columns = (
        torch.ones_like(shift),
        moved.plugin,
        moved.value,
        moved.value.square(),
        shift,
        moved.error.square(),
        (shift.abs() > BEYOND * moved.error).double(),
        units,
        units.square(),
        sds,
        sds.square(),
        moved.encoder_variance,
        moved.variance,
    )
    sums = torch.zeros(len(FIELDS), n_groups, shift.shape[-1], dtype=torch.float64)
    return sums.index_add_(1, group.cpu(), torch.stack(columns).cpu())
