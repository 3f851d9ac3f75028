r"""Fold changes predicted from other genes, and what is left of them in new cells of the same groups.

A gene has features :math:`\varphi_g`, learned from cells that are not compared. The fold changes of the genes outside
its block give coefficients :math:`\hat\beta`, and :math:`\varphi_g^\top \hat\beta` predicts its own without its counts.

Two groups of a few cells differ in cell states by chance, which moves all genes of a programme together. The
prediction describes *these* cells, chance included. How much of it new cells would show follows from how far each cell
(or sample) moves the coefficients: their sampling covariance :math:`S` is the sum of squared influences. In the
directions :math:`\theta_j` in which coefficients vary independently, with variances :math:`s_j^2`,

.. math:: \hat\theta_j \sim N(\theta_j, s_j^2), \qquad \theta_j \sim \sum_k \pi_k\, N(0, \tau_k^2),

with shares :math:`\pi_k` of highest marginal likelihood over directions. Where groups differ by chance alone, the
posterior of :math:`\theta` stays near zero.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from vaerdict.de.analysis import Analysis
from vaerdict.de.contrasts import Contrast
from vaerdict.de.shrinkage import em_shares

BLOCKS = 5
"""Blocks of genes; each is predicted from the genes of the others."""

_SCALES = torch.cat([torch.zeros(1), 2.0 ** torch.arange(-7.0, 2.0)]).double()
"""Standard deviations of coefficients in new cells, as root mean squares of the fold changes that they predict."""

_NO_SIGNAL = 2.0
"""Directions without signal that are counted beside those seen."""


class FoldChanges(NamedTuple):
    """Fold changes by the counts, as differences from the centre, with their errors. Shapes: ``(genes,)``."""

    mode: Tensor
    error: Tensor


class Prediction(NamedTuple):
    """Features of genes, and coefficients by the genes outside each block, with the influence of every replicate.

    Shapes: ``features (genes, p)``, ``coefficients (blocks, p)``, ``block (genes,)``, ``influence (replicates, p)``,
    ``weight (genes,)``; `df` are the degrees of freedom between replicates.
    """

    features: Tensor
    coefficients: Tensor
    block: Tensor
    influence: Tensor
    weight: Tensor
    df: float

    def here(self) -> Tensor:
        """The predicted fold changes of the cells compared. Shapes: ``-> (genes,)``."""
        return (self.features * self.coefficients[self.block]).sum(-1)

    def elsewhere(self) -> tuple[Tensor, Tensor]:
        """Mean and variance of the predicted fold changes of new cells. Shapes: ``-> (genes,), (genes,)``."""
        directions = _Directions.of(self)
        kept, variance = _shrunken(directions.estimate(self.coefficients.mean(0)), directions.variance)
        features = self.features @ directions.basis
        mean = (features * (kept * directions.estimate(self.coefficients))[self.block]).sum(-1)
        return mean, features.square() @ variance


class Predictor(Protocol):
    """Predicts the fold change of every gene without its own counts."""

    def __call__(
        self, analysis: Analysis, contrast: Contrast, genes: np.ndarray, changes: FoldChanges, others: Any, /
    ) -> Prediction:
        """Predict the fold changes of genes, columns of the file, by their counts in cells that are not compared.

        Shapes: ``genes (n,)``, ``others (cells, n)``, sparse, without empty rows.
        """
        ...


class _Directions(NamedTuple):
    """Directions of the coefficients that vary independently, each scaled to predict fold changes of mean square one.

    Coefficients are ``basis @ theta``. Shapes: ``basis (p, p)``, ``inverse (p, p)``, ``variance (p,)``.
    """

    basis: Tensor
    inverse: Tensor
    variance: Tensor

    @classmethod
    def of(cls, prediction: Prediction) -> _Directions:
        features, weight = prediction.features, prediction.weight / prediction.weight.sum()
        values, vectors = torch.linalg.eigh(features.mT @ (weight.unsqueeze(-1) * features))
        root = vectors * values.clamp_min(1e-10 * float(values.max().clamp_min(1e-30))).sqrt()
        covariance = _regularised((prediction.influence @ root).mT @ (prediction.influence @ root), prediction.df)
        variance, rotation = torch.linalg.eigh(covariance)
        inverse = rotation.mT @ root.mT
        return cls(torch.linalg.inv(inverse), inverse, variance)

    def estimate(self, coefficients: Tensor) -> Tensor:
        """Shapes: ``(*, p) -> (*, p)``."""
        return coefficients @ self.inverse.mT


def _regularised(covariance: Tensor, df: float) -> Tensor:
    """A covariance of few degrees of freedom moved towards equal variances, and inflated for its own error.

    The smallest eigenvalues of a sample covariance are far too small. The weight of the target is that of the oracle
    approximating shrinkage (Chen et al., 2010). Shapes: ``(p, p) -> (p, p)``.
    """
    p, trace, squares = len(covariance), covariance.trace(), covariance.square().sum()
    apart = (df + 1 - 2 / p) * (squares - trace.square() / p)
    weight = min(1.0, float(((1 - 2 / p) * squares + trace.square()) / apart.clamp_min(1e-300)))
    inflated = df / max(df - 2, 1.0)
    return inflated * ((1 - weight) * covariance + weight * trace / p * torch.eye(p, dtype=covariance.dtype))


def _shrunken(estimate: Tensor, variance: Tensor) -> tuple[Tensor, Tensor]:
    """The share of each estimate that new cells would show, and its posterior variance. Shapes: ``(p,)`` each."""
    variance = variance.clamp_min(1e-12).unsqueeze(-1)
    total = variance + _SCALES.square()
    log_density = -0.5 * (estimate.square().unsqueeze(-1) / total + total.log())
    marginal = (log_density - log_density.amax(-1, keepdim=True)).exp()
    pseudo = torch.zeros_like(_SCALES)
    pseudo[0] = _NO_SIGNAL
    shares = em_shares(marginal, pseudo)
    weight = shares * marginal
    weight = weight / weight.sum(-1, keepdim=True)
    kept = _SCALES.square() / total
    mean_kept = (weight * kept).sum(-1)
    second = (weight * (kept * variance + (kept * estimate.unsqueeze(-1)).square())).sum(-1)
    return mean_kept, (second - (mean_kept * estimate).square()).clamp_min(1e-12)
