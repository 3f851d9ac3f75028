r"""Adaptive shrinkage: a prior for fold changes estimated from all genes, and draws of each gene's posterior.

The prior is a mixture of normals about a common centre,

.. math:: \lambda_g \sim \sum_k \pi_k\, N(c, \tau_k^2),

with shares :math:`\pi_k` of highest marginal likelihood over all genes (empirical Bayes). Without it a gene of few
counts would look changed because its likelihood is wide. Reference: Stephens (2017), False discovery rates: a new deal,
Biostatistics 18(2).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from vaerdict.de.counts_likelihood import STEP, LfcLikelihood
from vaerdict.noise import seeded

WIDTHS = (0.0, 0.05, 0.1, 0.2, 0.35, 0.6, 1.0, 1.6, 2.5)
"""Standard deviations of the mixture's components, in log2 units; the first is none at all."""

_ITERATIONS = 200
_CLOSE_AND_FAR = (0.1, 1.0)  # widths for genes that fit and that do not, when a common centre is sought
_LARGEST_SHIFT = 4.0


class NormalMixture(NamedTuple):
    """Normals of the standard deviations `WIDTHS` about a centre. Shapes: ``centre (genes,)``, ``shares (widths,)``."""

    centre: Tensor
    shares: Tensor

    def log_density(self, variance: Tensor, grid: Tensor) -> Tensor:
        """Log-density on the grid, each component widened by `variance` ``(genes,)``. Shapes: ``-> (genes, r)``."""
        parts = (s * _normal(self.centre, variance, w, grid) for s, w in zip(self.shares, WIDTHS, strict=True))
        return sum(parts, torch.tensor(0.0)).clamp_min(1e-300).log()


def posterior_draws(likelihood: LfcLikelihood, n: int, *, seed: int) -> Tensor:
    """Draws of every gene's fold change from its posterior under the estimated prior. Shapes: ``-> (n, genes)``."""
    zero = torch.zeros_like(likelihood.mode)
    prior = fit_mixture(common_shift(zero, likelihood), zero, likelihood)
    posterior = torch.softmax(likelihood.log_lik + prior.log_density(zero, likelihood.grid), -1)
    return _stratified_draws(posterior, likelihood.grid, n, seed)


def common_shift(centre: Tensor, likelihood: LfcLikelihood) -> Tensor:
    """The centre moved by the likeliest shift common to all genes, where many fit closely and some do not.

    Shapes: ``(genes,)``, as centre.
    """
    apart = (likelihood.grid[:, None] - likelihood.grid).square()
    kernel = sum(0.5 * torch.softmax(-0.5 * apart / width**2, -1) for width in _CLOSE_AND_FAR)
    log_lik = (_scaled(likelihood) @ kernel).clamp_min(1e-300).log()
    shifts = likelihood.grid[likelihood.grid.abs() <= _LARGEST_SHIFT]
    place = ((centre.unsqueeze(-1) + shifts - likelihood.grid[0]) / STEP).round().long()
    place = place.clamp(0, len(likelihood.grid) - 1)
    return centre + shifts[log_lik.gather(-1, place).sum(0).argmax()]


def fit_mixture(centre: Tensor, variance: Tensor, likelihood: LfcLikelihood) -> NormalMixture:
    """The shares of highest marginal likelihood, by EM. Shapes: ``centre`` and ``variance`` ``(genes,)``."""
    scaled = _scaled(likelihood)
    columns = [(scaled * _normal(centre, variance, width, likelihood.grid)).sum(-1) for width in WIDTHS]
    marginal = torch.stack(columns, -1).clamp_min(1e-300)
    shares = torch.full((len(WIDTHS),), 1 / len(WIDTHS), dtype=marginal.dtype)
    for _ in range(_ITERATIONS):
        part = shares * marginal
        shares = (part / part.sum(-1, keepdim=True)).mean(0)
    return NormalMixture(centre, shares)


def _scaled(likelihood: LfcLikelihood) -> Tensor:
    """The likelihood of each gene over its largest value. Shapes: ``-> (genes, r)``."""
    return (likelihood.log_lik - likelihood.log_lik.amax(-1, keepdim=True)).exp()


def _normal(centre: Tensor, variance: Tensor, width: float, grid: Tensor) -> Tensor:
    """A normal on the grid, no narrower than its step can show. Shapes: ``-> (genes, r)``."""
    sd = (width**2 + variance + (0.5 * STEP) ** 2).sqrt().unsqueeze(-1)
    return torch.softmax(-0.5 * ((grid - centre.unsqueeze(-1)) / sd).square(), -1)


def _stratified_draws(density: Tensor, grid: Tensor, n: int, seed: int) -> Tensor:
    """Stratified draws of every gene in random order. Shapes: ``density (genes, r) -> (n, genes)``."""
    generator, genes = seeded(seed), len(density)
    order = torch.rand(genes, n, generator=generator, dtype=density.dtype).argsort(-1)
    level = (order + torch.rand(genes, n, generator=generator, dtype=density.dtype)) / n
    place = torch.searchsorted(density.cumsum(-1), level).clamp(max=len(grid) - 1)
    dither = torch.rand(genes, n, generator=generator, dtype=density.dtype) - 0.5
    return (grid[place] + STEP * dither).mT.contiguous()
