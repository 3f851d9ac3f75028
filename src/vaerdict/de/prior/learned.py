r"""A prior for fold changes learned from a prediction, and the posterior of each gene under it.

The prediction of a gene's fold change is :math:`u_g` in the cells compared and :math:`N(m_g, v_g)` in new cells of the
same groups (`vaerdict.de.prior.prediction`). A gene either goes its own way, with the fold change that adaptive
shrinkage of the counts alone expects, or it follows the prediction up to a deviation d,

.. math:: d_g \sim \sum_j \rho_j\, N\big(0, (\tau_j + c_j |u_g|)^2\big).

Both groups may hold more cells of some state by chance. The counts of the gene and its prediction see the same chance;
so the counts tell the deviation from what the other genes say of *these* cells, :math:`L_g(u_g + d)`, and the fold
change in new cells is :math:`m_g + d_g`. All shares have the highest marginal likelihood over genes. Some genes are
counted as going their own way beforehand, so that few genes cannot show that all follow. Where the prediction is of no
use the shares say so, and the posterior is that of the counts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from vaerdict.de.counts_likelihood import LfcLikelihood
from vaerdict.de.prior.prediction import Prediction
from vaerdict.de.shrinkage import LfcPosterior, NodeLikelihood, em_shares, normal_density, prior_density

DEVIATIONS = ((0.05, 0.0), (0.15, 0.0), (0.3, 0.0), (0.6, 0.0), (0.05, 0.25), (0.05, 0.5), (0.05, 1.0))
"""Standard deviations of following genes about their prediction: a width, and a part of the prediction."""

_OWN_WAY = 30.0
"""Genes that are counted as going their own way beside those seen."""

_EXPECTED = 30.0
"""Genes that the shares of the next better known ones count for."""

_LEAST_SD = 1e-6
"""Of predictions in new cells; a gene without features, unseen in the other cells, has none of its own."""

_MOST_SETS, _GENES_IN_SET = 5, 200
_QUANTILE_STEPS = 12


class Summary(NamedTuple):
    """How good a prediction was.

    Its cross-fitted correlation with the fold changes of the counts, the slope of these on it, and the share of genes
    that follow it.
    """

    correlation: float
    slope: float
    share_following: float


class LearnedPrior:
    """The shares of genes that go their own way and that follow a prediction, with each deviation."""

    def __init__(
        self, likelihood: LfcLikelihood, centre: float, prediction: Prediction, own: Tensor, exact: Sequence[float]
    ) -> None:
        """Learn from all expressed genes; `own` are the shares of the counts' own prior.

        Tails are asked for at the differences `exact` from the centre.
        """
        self.own, self.here = own, prediction.here()
        self.mean, self.variance = prediction.elsewhere()
        self._likelihood = NodeLikelihood.of(likelihood, centre, exact, about=self.here)
        self.shares = _shares_by_error(self._marginal(self._likelihood, self.here), likelihood.error)
        self.summary = self._summary(prediction.weight)

    def _marginal(self, likelihood: NodeLikelihood, here: Tensor) -> Tensor:
        """Marginal likelihoods: of genes that go their own way, and of each deviation. Shapes: ``(genes, 1 + k)``."""
        scaled = likelihood.log_lik.exp() * likelihood.weights
        own = (scaled * prior_density(likelihood.nodes, self.own)).sum(-1) + self.own[0] * likelihood.at_zero()
        return torch.stack([own, *((scaled * part).sum(-1) for part in _deviations(likelihood.nodes, here))], -1)

    def posterior(self, tested: Tensor) -> PredictedPosterior:
        """The posterior of some genes. Shapes: ``tested (t,)`` places."""
        likelihood = self._likelihood.take(tested)
        here, mean, variance = self.here[tested], self.mean[tested], self.variance[tested]
        shares = self.shares[tested]
        weight = shares * self._marginal(likelihood, here)
        follows = weight[:, 1:].sum(-1) / weight.sum(-1)
        parts = zip(shares[:, 1:].unbind(-1), _deviations(likelihood.nodes, here), strict=True)
        density = sum((share.unsqueeze(-1) * part for share, part in parts), torch.tensor(0.0))
        mass = likelihood.log_lik.exp() * likelihood.weights * density
        points = likelihood.nodes - here.unsqueeze(-1) + mean.unsqueeze(-1)
        return PredictedPosterior(
            LfcPosterior(likelihood, self.own),
            follows,
            _Smoothed(
                points, mass / mass.sum(-1, keepdim=True).clamp_min(1e-300), variance.sqrt().clamp_min(_LEAST_SD)
            ),
        )

    def _summary(self, weight: Tensor) -> Summary:
        mode, here = self._likelihood.mode, self.here
        both, squares = (weight * mode * here).sum(), (weight * here.square()).sum()
        correlation = both / (squares * (weight * mode.square()).sum()).sqrt().clamp_min(1e-300)
        return Summary(float(correlation), float(both / squares.clamp_min(1e-300)), 1 - float(self.shares[:, 0].mean()))


def _shares_by_error(marginal: Tensor, error: Tensor) -> Tensor:
    """Shares of genes of similar errors, best known first; what those show is expected of the next.

    Shapes: ``marginal (genes, k)``, ``error (genes,)``, ``-> (genes, k)``.
    """
    shares = torch.empty_like(marginal)
    pseudo = torch.zeros_like(marginal[0])
    pseudo[0] = _OWN_WAY
    expected = torch.zeros_like(pseudo)
    for some in error.argsort().tensor_split(max(1, min(_MOST_SETS, len(error) // _GENES_IN_SET))):
        expected = em_shares(marginal[some], pseudo + expected)
        shares[some] = expected
        expected = expected * _EXPECTED
    return shares


def _deviations(nodes: Tensor, here: Tensor) -> list[Tensor]:
    """Densities of following genes at their nodes. Shapes: ``(genes, r)`` each."""
    size, centre = here.abs().unsqueeze(-1), here.unsqueeze(-1)
    return [normal_density(nodes, centre, width + part * size) for width, part in DEVIATIONS]


class _Smoothed(NamedTuple):
    """Distributions of points with masses, smoothed by normals. Shapes: ``(genes, r)`` twice, ``sd (genes,)``."""

    points: Tensor
    mass: Tensor
    sd: Tensor

    @property
    def mean(self) -> Tensor:
        return (self.points * self.mass).sum(-1)

    def bounds(self, level: float) -> tuple[Tensor, Tensor]:
        """Values below and above the quantile of a level, by Cantelli's inequality. Shapes: ``-> (genes,)`` twice."""
        variance = (self.mass * (self.points - self.mean.unsqueeze(-1)).square()).sum(-1) + self.sd.square()
        sd = variance.sqrt()
        return self.mean - sd * math.sqrt((1 - level) / level), self.mean + sd * math.sqrt(level / (1 - level))

    def below(self, value: Tensor | float) -> Tensor:
        """Shapes: ``value (genes,)`` or a number, ``-> (genes,)``."""
        return self._tail(value, 1.0)

    def above(self, value: Tensor | float) -> Tensor:
        """Shapes: ``value (genes,)`` or a number, ``-> (genes,)``."""
        return self._tail(value, -1.0)

    def _tail(self, value: Tensor | float, sign: float) -> Tensor:
        value = torch.as_tensor(value, dtype=self.sd.dtype).expand_as(self.sd)
        distance = sign * (self.points - value.unsqueeze(-1)) / self.sd.unsqueeze(-1)
        return (self.mass * torch.erfc(distance / math.sqrt(2))).sum(-1) / 2


class PredictedPosterior:
    """A gene's posterior under a learned prior: that of its own way and that of following, by their probabilities.

    It has the methods of `vaerdict.de.shrinkage.LfcPosterior`.
    """

    def __init__(self, own: LfcPosterior, follows: Tensor, following: _Smoothed) -> None:
        self._own, self._follows, self._following = own, follows, following
        self.mean = (1 - follows) * own.mean + follows * following.mean

    def below(self, value: float, *, or_equal: bool = False) -> Tensor:
        """Probability of a difference below a value that is a node. Shapes: ``-> (genes,)``."""
        return self._mixed(self._own.below(value, or_equal=or_equal), self._following.below(value))

    def above(self, value: float, *, or_equal: bool = False) -> Tensor:
        """Probability of a difference above a value that is a node. Shapes: ``-> (genes,)``."""
        return self._mixed(self._own.above(value, or_equal=or_equal), self._following.above(value))

    def _mixed(self, own: Tensor, following: Tensor) -> Tensor:
        return ((1 - self._follows) * own + self._follows * following).clamp(0, 1)

    def quantile(self, level: float) -> Tensor:
        """By false position within bounds that hold the quantile. Shapes: ``-> (genes,)``."""
        own, following = self._own.quantile(level), self._following.bounds(level)
        low, high = torch.minimum(own, following[0]), torch.maximum(own, following[1])
        at_low, at_high = (self._up_to(value) - level for value in (low, high))
        for _ in range(_QUANTILE_STEPS):
            share = (-at_low / (at_high - at_low).clamp_min(1e-300)).clamp(0.02, 0.98)
            middle = low + share * (high - low)
            at_middle = self._up_to(middle) - level
            is_low = at_middle < 0
            # a bound that stays counts half, so that both move (Illinois)
            at_low, at_high = torch.where(is_low, at_middle, at_low / 2), torch.where(is_low, at_high / 2, at_middle)
            low, high = torch.where(is_low, middle, low), torch.where(is_low, high, middle)
        return 0.5 * (low + high)

    def _up_to(self, value: Tensor) -> Tensor:
        return self._mixed(self._own.up_to(value), self._following.below(value))
