"""Weights of a particle population: effective size, error of the evidence, next temperature, resampling, covariance."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from vaerdict.core import Latent, expand_trailing, log_normalise, map_latent
from vaerdict.samplers.tempering import PathState

_MIN_STEP = 1e-8
_BISECTIONS = 14


def log_standard_error(log_w: Tensor) -> Tensor:
    r"""Standard error of ``log_mean_exp(log_w)`` for independent weights, by the delta method.

    :math:`\mathrm{sd}(w) / (\sqrt{K}\,\bar w)`. Values above 0.3 are unreliable, and usually too small, because a few
    weights then dominate the sum.

    Shapes: ``(K, *batch) -> (*batch)``.
    """
    k = log_w.shape[0]
    if k < 2:
        return torch.full_like(log_w[0], torch.nan)
    inverse_ess = log_normalise(log_w.double()).exp().square().sum(0)
    return ((k * inverse_ess - 1).clamp_min(0) / (k - 1)).sqrt()


def by_island(t: Tensor, n_islands: int) -> Tensor:
    """Group particles by island; particle i is in island i modulo `n_islands`, and a remainder is left out.

    Shapes: ``(N, *batch) -> (N / islands, islands, *batch)``.
    """
    n = len(t) // n_islands * n_islands
    return t[:n].reshape(-1, n_islands, *t.shape[1:])


def relative_ess(log_w: Tensor) -> Tensor:
    r"""Effective sample size over K, :math:`(\sum w)^2 / (K \sum w^2)`. Shapes: ``(K, *batch) -> (*batch)``."""
    return torch.exp(-torch.logsumexp(2 * log_normalise(log_w), 0)) / log_w.shape[0]


def conditional_ess(log_w: Tensor, log_v: Tensor) -> Tensor:
    r"""Relative effective size kept when weights w are multiplied by v: :math:`(\sum \bar w v)^2 / \sum \bar w v^2`.

    Shapes: ``(K, *batch), (K, *batch) -> (*batch)``. Reference: Zhou, Johansen & Aston (2016).
    """
    log_w = log_normalise(log_w)
    return torch.exp(2 * torch.logsumexp(log_w + log_v, 0) - torch.logsumexp(log_w + 2 * log_v, 0))


def next_temperature(state: PathState, log_w: Tensor, t: Tensor, target: float) -> Tensor:
    """The temperature at which the conditional effective size falls to `target`, or 1 if it stays above.

    The logarithm of the step is bisected, separately for each observation. Shapes: ``(*batch) -> (*batch)``.
    """
    log_w = log_normalise(log_w)

    def above_target(t_to: Tensor) -> Tensor:
        return conditional_ess(log_w, state.log_increment(t, t_to)) >= target

    remaining = 1 - t
    low, high = torch.full_like(t, math.log(_MIN_STEP)), torch.zeros_like(t)
    reaches_one = above_target(torch.ones_like(t))
    for _ in range(_BISECTIONS):
        middle = 0.5 * (low + high)
        above = above_target(t + remaining * middle.exp())
        low, high = torch.where(above, middle, low), torch.where(above, high, middle)
    return torch.where(reaches_one, 1.0, t + remaining * low.exp())


def systematic(log_w: Tensor, offset: Tensor, n: int | None = None) -> Tensor:
    """Indices of the n ancestors (default: K) by systematic resampling with one uniform offset per population.

    Shapes: ``(K, *batch), (*batch) -> (n, *batch)``.
    """
    k = log_w.shape[0]
    n = k if n is None else n
    position = (torch.arange(n, device=log_w.device).reshape(-1, *(1,) * (log_w.dim() - 1)) + offset) / n
    cumulative = log_normalise(log_w).exp().cumsum(0)
    ancestors = torch.searchsorted(cumulative.movedim(0, -1).contiguous(), position.movedim(0, -1).contiguous())
    # rounding can leave the last sum slightly below one
    return ancestors.clamp_max(k - 1).movedim(-1, 0)


def gathered(particles: Latent, index: Tensor) -> Latent:
    """The particles at `index` of each observation, of a latent or a `PathState`. Shapes: ``index (n, *batch)``."""
    return map_latent(lambda t: t.gather(0, expand_trailing(index, t).expand(len(index), *t.shape[1:])), particles)


def covariance_root(z: Tensor, log_w: Tensor) -> Tensor:
    """Lower-triangular root of the weighted covariance, shrunk towards the diagonal of unweighted variances.

    The shrinkage intensity is d / (d + ESS), so that a population with few effective particles keeps its spread.

    Shapes: ``(K, *batch, d), (K, *batch) -> (*batch, d, d)``.
    """
    d = z.shape[-1]
    weight = log_normalise(torch.where(torch.isneginf(log_w).all(0), 0.0, log_w)).exp()
    centred = z.double() - (weight.unsqueeze(-1) * z).sum(0)
    covariance = torch.einsum("k...i,k...j->...ij", weight.unsqueeze(-1) * centred, centred)
    intensity = (d / (d + 1 / weight.square().sum(0))).unsqueeze(-1)
    diagonal = intensity * z.double().var(0) + torch.finfo(z.dtype).tiny
    shrunk = (1 - intensity.unsqueeze(-1)) * covariance + torch.diag_embed(diagonal)
    return torch.linalg.cholesky(shrunk).to(z.dtype)


def largest_correlation(z: Tensor, start: Tensor, root: Tensor) -> Tensor:
    """Largest absolute correlation over the particles between z and start, over the coordinates whitened by `root`.

    With R roots, particle i has root i modulo R. The result is NaN where particles do not differ.

    Shapes: ``(K, *batch, d), (K, *batch, d), (R, *batch, d, d) -> (*batch)``.
    """

    def whitened(particles: Tensor) -> Tensor:
        centred = (particles - particles.mean(0)).reshape(-1, *root.shape[:-1]).movedim(0, -1)
        return torch.linalg.solve_triangular(root, centred, upper=False)

    a, b = whitened(z), whitened(start)
    product, squares = (a * b).sum((0, -1)), a.square().sum((0, -1)) * b.square().sum((0, -1))
    return (product / squares.sqrt()).abs().amax(-1)
