"""Weights of a particle population: effective size, the next temperature, systematic resampling, covariance."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from vaerdict.core import Latent, expand_trailing, log_normalise, map_latent
from vaerdict.samplers.path import State

_SMALLEST = 1e-8
_HALVINGS = 14


def relative_ess(log_w: Tensor) -> Tensor:
    r"""Effective share of a population, :math:`(\sum w)^2 / (K \sum w^2)`. Shapes: ``(K, *batch) -> (*batch)``."""
    return torch.exp(-torch.logsumexp(2 * log_normalise(log_w), 0)) / log_w.shape[0]


def conditional_ess(log_w: Tensor, log_v: Tensor) -> Tensor:
    r"""Effective share kept when weights w are multiplied by v: :math:`(\sum \bar w v)^2 / \sum \bar w v^2`.

    Shapes: ``(K, *batch), (K, *batch) -> (*batch)``. Reference: Zhou, Johansen & Aston (2016).
    """
    log_w = log_normalise(log_w)
    return torch.exp(2 * torch.logsumexp(log_w + log_v, 0) - torch.logsumexp(log_w + 2 * log_v, 0))


def next_temperature(state: State, log_w: Tensor, t: Tensor, share: float) -> Tensor:
    """The temperature at which the conditional effective size falls to `share`, or 1 if it stays above.

    Bisection of the logarithm of the step, for each observation its own. Shapes: ``(*batch) -> (*batch)``.
    """
    log_w = log_normalise(log_w)

    def keeps(to: Tensor) -> Tensor:
        return conditional_ess(log_w, state.log_increment(t, to)) >= share

    left = 1 - t
    low, high = torch.full_like(t, math.log(_SMALLEST)), torch.zeros_like(t)
    reaches = keeps(torch.ones_like(t))
    for _ in range(_HALVINGS):
        middle = 0.5 * (low + high)
        kept = keeps(t + left * middle.exp())
        low, high = torch.where(kept, middle, low), torch.where(kept, high, middle)
    return torch.where(reaches, 1.0, t + left * low.exp())


def systematic(log_w: Tensor, offset: Tensor, n: int | None = None) -> Tensor:
    """The n ancestors (default: as many as there are) by systematic resampling, one uniform offset a population.

    Shapes: ``(K, *batch), (*batch) -> (n, *batch)``.
    """
    k = log_w.shape[0]
    n = k if n is None else n
    position = (torch.arange(n, device=log_w.device).reshape(-1, *(1,) * (log_w.dim() - 1)) + offset) / n
    cumulative = log_normalise(log_w).exp().cumsum(0)
    ancestors = torch.searchsorted(cumulative.movedim(0, -1).contiguous(), position.movedim(0, -1).contiguous())
    # rounding can leave the last sum a hair below one
    return ancestors.clamp_max(k - 1).movedim(-1, 0)


def gathered(particles: Latent, index: Tensor) -> Latent:
    """The particles at `index` of each observation, of a latent or a `State`. Shapes: ``index (n, *batch)``."""
    return map_latent(lambda t: t.gather(0, expand_trailing(index, t).expand(len(index), *t.shape[1:])), particles)


def covariance_root(z: Tensor, log_w: Tensor) -> Tensor:
    """Lower-triangular root of the weighted covariance, as far as the weights can tell it.

    A share d / (d + ESS) is taken from the plain variances instead, so that few surviving particles still spread.

    Shapes: ``(K, *batch, d), (K, *batch) -> (*batch, d, d)``.
    """
    d = z.shape[-1]
    weight = log_normalise(torch.where(torch.isneginf(log_w).all(0), 0.0, log_w)).exp()
    centred = z.double() - (weight.unsqueeze(-1) * z).sum(0)
    covariance = torch.einsum("k...i,k...j->...ij", weight.unsqueeze(-1) * centred, centred)
    share = (d / (d + 1 / weight.square().sum(0))).unsqueeze(-1)
    plain = share * z.double().var(0) + torch.finfo(z.dtype).tiny
    return torch.linalg.cholesky((1 - share.unsqueeze(-1)) * covariance + torch.diag_embed(plain)).to(z.dtype)
