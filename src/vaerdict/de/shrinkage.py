r"""Fold changes by the counts, or by a model where it may know more; and shrunk by what the other genes show.

The counts give a `Law` of the log2 fold change :math:`\lambda_g` of every gene (`vaerdict.de.counts_likelihood`). A
model that was trained on the cells compared knows no more than these counts do, may miss what differs, and may repeat
their noise: nothing in its own posterior tells. So the counts decide, and the model is held against them.

Where a model learned from many more cells *of the kinds compared*, it can know more. Its law is then

.. math:: \sum_k \pi_k\, N(\mu_g + c,\; v_g + f_g + \tau_k^2),

with its fold change :math:`\mu_g` and variance :math:`v_g`, a floor :math:`f_g` under what its training cells can know
(the variance of the counts over as many times more cells), and shares :math:`\pi_k` of misfits :math:`\tau_k`, those of
highest marginal likelihood of the counts over all genes. A gene is judged by the model where this law is the narrower
one and its own counts do not contradict it, never by both, for both come from the same cells; and no gene is where the
counts of many contradict the model.

A prior of all genes, a mixture of normals about a common shift, then shrinks the law: without it a gene of few counts
would look changed for no other reason. Reference: Stephens (2017), False discovery rates: a new deal, Biostatistics
18(2). The form was settled on one split of PBMC 3k with changes planted and on simulations.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from vaerdict.core import DataError
from vaerdict.de.counts_likelihood import STEP, Law
from vaerdict.noise import seeded

WIDTHS = (0.0, 0.05, 0.1, 0.2, 0.35, 0.6, 1.0, 1.6, 2.5)
"""Standard deviations of misfits, and of changes, in log2 units; the first is none at all."""

MOST_MISSED = 0.1
"""The share of genes whose counts may contradict the model before it decides none."""

_CONTRADICTED = 2.576  # standard errors between the counts of a gene and the model: one in a hundred by chance
_SMALL = 0.3  # a misfit that does not matter
_ROUNDS = 200
_CLOSE_AND_FAR = (0.1, 1.0)  # widths of genes that fit and that do not, when all are moved together
_FARTHEST = 4.0


class Anchored(NamedTuple):
    """Draws of fold changes; the share of genes the model decided, and of those whose change it does not give.

    Shapes: ``lfc (draws, genes)``.
    """

    lfc: Tensor
    by_model: float
    missed: float


def anchor(model: Tensor, law: Law, *, new_cells: float, seed: int) -> Anchored:
    """Draws of the fold changes, as many as the model's, of each gene by the law that decides it, and shrunk.

    `new_cells` is how many cells of the kinds compared the model was trained on, for each that is compared: by that
    much at most it knows more than the counts, and with one it decides nothing. Shapes: ``model (draws, genes)``.
    """
    model = model.double()
    if not model.isfinite().all():
        raise DataError("the model gives fold changes that are not finite; train it again, or with other objectives.")
    centre, stated = _shift(model.mean(0), law), model.var(0)
    missed = _fitted(centre, stated, law).shares[torch.tensor(WIDTHS) > _SMALL].sum()
    variance = stated + law.error.square() / max(1.0, new_cells)
    misfit = _fitted(centre, variance, law)
    own = _mixture(misfit, variance, law.grid)
    whole = variance + (misfit.shares * torch.tensor(WIDTHS).square()).sum()
    apart = (law.mode - centre).square() / (whole + law.error.square())
    by_model = (whole < law.error.square()) & (apart < _CONTRADICTED**2) & (missed <= MOST_MISSED)
    log_lik = torch.where(by_model.unsqueeze(-1), own, law.log_lik)
    chosen = law._replace(log_lik=log_lik)
    zero = torch.zeros_like(centre)
    prior = _fitted(_shift(zero, chosen), zero, chosen)
    posterior = torch.softmax(log_lik + _mixture(prior, zero, law.grid), -1)
    return Anchored(_drawn(posterior, law.grid, len(model), seed), float(by_model.double().mean()), float(missed))


class _Misfit(NamedTuple):
    """Shares of widths about a centre. Shapes: ``centre (genes,)``, ``shares (widths,)``."""

    centre: Tensor
    shares: Tensor


def _shift(centre: Tensor, law: Law) -> Tensor:
    """The centre moved as far for all genes as is likeliest where many fit closely and some do not.

    Shapes: ``(genes,)``, as centre.
    """
    apart = (law.grid[:, None] - law.grid).square()
    kernel = sum(0.5 * torch.softmax(-0.5 * apart / width**2, -1) for width in _CLOSE_AND_FAR)
    lik = (law.log_lik - law.log_lik.amax(-1, keepdim=True)).exp()
    log_lik = (lik @ kernel).clamp_min(1e-300).log()
    moves = law.grid[law.grid.abs() <= _FARTHEST]
    place = ((centre.unsqueeze(-1) + moves - law.grid[0]) / STEP).round().long().clamp(0, len(law.grid) - 1)
    return centre + moves[log_lik.gather(-1, place).sum(0).argmax()]


def _fitted(centre: Tensor, variance: Tensor, law: Law) -> _Misfit:
    """The shares of highest marginal likelihood, by EM. Shapes: ``centre`` and ``variance`` ``(genes,)``."""
    lik = (law.log_lik - law.log_lik.amax(-1, keepdim=True)).exp()
    columns = [(lik * _normal(centre, variance, width, law.grid)).sum(-1) for width in WIDTHS]
    given = torch.stack(columns, -1).clamp_min(1e-300)
    shares = torch.full((len(WIDTHS),), 1 / len(WIDTHS), dtype=given.dtype)
    for _ in range(_ROUNDS):
        part = shares * given
        shares = (part / part.sum(-1, keepdim=True)).mean(0)
    return _Misfit(centre, shares)


def _mixture(misfit: _Misfit, variance: Tensor, grid: Tensor) -> Tensor:
    """Log-density of all widths together. Shapes: ``-> (genes, r)``."""
    parts = (s * _normal(misfit.centre, variance, w, grid) for s, w in zip(misfit.shares, WIDTHS, strict=True))
    return sum(parts, torch.tensor(0.0)).clamp_min(1e-300).log()


def _normal(centre: Tensor, variance: Tensor, width: float, grid: Tensor) -> Tensor:
    """A normal on the grid, no narrower than its step can show. Shapes: ``-> (genes, r)``."""
    sd = (width**2 + variance + (0.5 * STEP) ** 2).sqrt().unsqueeze(-1)
    return torch.softmax(-0.5 * ((grid - centre.unsqueeze(-1)) / sd).square(), -1)


def _drawn(density: Tensor, grid: Tensor, n: int, seed: int) -> Tensor:
    """Stratified draws of every gene in random order. Shapes: ``density (genes, r) -> (n, genes)``."""
    generator, genes = seeded(seed), len(density)
    order = torch.rand(genes, n, generator=generator, dtype=density.dtype).argsort(-1)
    level = (order + torch.rand(genes, n, generator=generator, dtype=density.dtype)) / n
    place = torch.searchsorted(density.cumsum(-1), level).clamp(max=len(grid) - 1)
    dither = torch.rand(genes, n, generator=generator, dtype=density.dtype) - 0.5
    return (grid[place] + STEP * dither).mT.contiguous()
