"""Likelihoods of the features of an `M1M2` model: pixels in [0, 1], real features, and counts."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from vaerdict.distributions import Diagonal, Elliptical
from vaerdict.likelihoods import CountParameters, NegativeBinomial
from vaerdict.models.counts import fixed_part

UNIT_SCALE = math.log(math.e - 1)
"""The raw scale whose softplus is 1."""


class PixelLikelihood(Protocol):
    """The distribution of pixels given the decoder's outputs."""

    @property
    def counts(self) -> bool:
        """Whether pixels are counts: the model then has a dispersion per pixel, and encoders see log(1 + x)."""
        ...

    def n_outputs(self, n_pixels: int) -> int:
        """The number of the decoder's outputs for an image of `n_pixels`."""
        ...

    def log_prob(self, x: Tensor, out: Tensor, log_dispersion: Tensor | None = None) -> Tensor:
        """Log p(x | out). Shapes: ``(*batch, p), (K, *batch, n_outputs) -> (K, *batch)``, ``log_dispersion (p)``."""
        ...


@dataclass(frozen=True)
class BernoulliLikelihood:
    """Pixels in [0, 1]; for grey values the cross-entropy, as is usual."""

    counts = False

    def n_outputs(self, n_pixels: int) -> int:
        """One log-odds per pixel."""
        return n_pixels

    def log_prob(self, x: Tensor, out: Tensor, log_dispersion: Tensor | None = None) -> Tensor:
        """Log p(x | out). Shapes: ``(*batch, p), (K, *batch, p) -> (K, *batch)``."""
        return _BernoulliLogProb.apply(out, x)


class _BernoulliLogProb(torch.autograd.Function):
    """Sum of x out - log(1 + exp(out)), in one pass over the largest tensor of training instead of four."""

    @staticmethod
    def forward(ctx, out: Tensor, x: Tensor) -> Tensor:  # type: ignore[override]
        ctx.save_for_backward(out, x)
        return F.softplus(out).addcmul_(out, x.expand_as(out), value=-1).sum(-1).neg_()

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:  # type: ignore[override]
        out, x = ctx.saved_tensors
        of_out, of_x = ctx.needs_input_grad
        grad = grad.unsqueeze(-1)
        return (
            (x - torch.sigmoid(out)) * grad if of_out else None,
            (out * grad).sum_to_size(x.shape) if of_x else None,
        )


@dataclass(frozen=True)
class GaussianLikelihood:
    """Real features with a mean and a scale each; `floor` keeps a scale from collapsing onto a training point."""

    floor: float = 0.1
    counts = False

    def n_outputs(self, n_pixels: int) -> int:
        """A mean and a raw scale per feature."""
        return 2 * n_pixels

    def log_prob(self, x: Tensor, out: Tensor, log_dispersion: Tensor | None = None) -> Tensor:
        """Log p(x | out). Shapes: ``(*batch, p), (K, *batch, 2 p) -> (K, *batch)``."""
        loc, raw = out.chunk(2, -1)
        return Elliptical(loc, Diagonal(F.softplus(raw + UNIT_SCALE) + self.floor)).log_prob(x.expand_as(loc))


@dataclass(frozen=True)
class NegativeBinomialLikelihood:
    r"""Counts given their total, the library size :math:`\ell`, as in `CountModel`.

    .. math:: x_g \sim \mathrm{NB}(\ell\,\rho_g, r_g), \qquad \rho = \mathrm{softmax}(\text{out}), \qquad
              \ell = \textstyle\sum_g x_g,

    with a dispersion :math:`r_g` per gene.
    """

    counts = True

    def n_outputs(self, n_pixels: int) -> int:
        """One logit per gene."""
        return n_pixels

    def log_prob(self, x: Tensor, out: Tensor, log_dispersion: Tensor | None = None) -> Tensor:
        """Log p(x | out). Shapes: ``(*batch, p), (K, *batch, p) -> (K, *batch)``, ``log_dispersion (p)``."""
        # without counts every mean is zero, and so is the log-probability
        log_library = x.sum(-1, keepdim=True).clamp_min(torch.finfo(x.dtype).tiny).log()
        at, family = CountParameters(out.log_softmax(-1) + log_library, log_dispersion), NegativeBinomial()
        return fixed_part(family, x, at) + family.moving(x, at)
