r"""Samples as replicates, by logarithms of their means: for a model's means, which are never zero, and the raw columns.

What decides is the law of their counts, `vaerdict.de.counts_likelihood`, which needs no logarithm of a count.

Let :math:`y_{sg}` be the log2 mean expression of gene g in sample s. The variance of y between samples of a group is
known by few samples, so that genes lend each other strength, as in limma: with d degrees of freedom the variance
:math:`s_g^2` is shrunk to a common one, :math:`\tilde s_g^2 = (d_0 s_0^2 + d s_g^2) / (d_0 + d)`, and

.. math:: \mathrm{LFC}_g \sim \bar y_{ag} - \bar y_{bg} + \tilde s_g \sqrt{1/n_a + 1/n_b}\; t_{d_0 + d}.

Where every sample gave cells to both groups, the differences within samples take the place of y. Reference: Smyth
(2004), Linear models and empirical Bayes methods, Statistical Applications in Genetics and Molecular Biology 3(1).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from scipy import special
from torch import Tensor

from vaerdict.core import SettingError
from vaerdict.de.effects import Effect, Estimand

_LARGEST_DF = 1e6  # of a prior that leaves the genes' variances no room


class Shrunk(NamedTuple):
    """Variances that lent each other strength, and their degrees of freedom. Shapes: ``variance (genes,)``."""

    variance: Tensor
    df: float


def shrink(variance: Tensor, df: int) -> Shrunk:
    """Shrink variances of `df` degrees of freedom to a common one by Smyth's moment estimate.

    Shapes: ``(genes,) -> (genes,)``.
    """
    if df < 1:
        raise SettingError(f"df={df} degrees of freedom show no variance; give at least two samples a group.")
    half, positive = df / 2, variance[variance > 0].double()
    if len(positive) < 2:
        return Shrunk(variance, float(df))
    e = positive.log() - float(special.digamma(half)) + math.log(half)
    spread = float(e.var()) - float(special.polygamma(1, half))
    df0 = min(2 * _inverse_trigamma(spread), _LARGEST_DF) if spread > 0 else _LARGEST_DF
    s0 = math.exp(float(e.mean()) + float(special.digamma(df0 / 2)) - math.log(df0 / 2))
    return Shrunk((df0 * s0 + df * variance) / (df0 + df), df0 + df)


def _inverse_trigamma(x: float) -> float:
    """The argument at which the trigamma function is x, by Newton's method on its reciprocal."""
    y = 0.5 + 1 / x
    for _ in range(50):
        slope = float(special.polygamma(1, y))
        y += slope * (1 - slope / x) / float(special.polygamma(2, y))
    return y


class Between(NamedTuple):
    """A fold change between groups of samples: Student's t. Shapes: ``mean`` and ``scale`` ``(genes,)``."""

    mean: Tensor
    scale: Tensor
    df: float


def between(a: Mapping[str, Tensor], b: Mapping[str, Tensor], estimand: Estimand) -> Between:
    """The fold change between groups of samples, from joint draws of every sample's mean expression.

    The error is that between samples, or that of the sample means themselves where it is larger, as it is when the
    samples happen to agree better than their cells allow.

    Shapes: ``{sample: (draws, genes)}``.
    """
    full = group_lfc(a, b, estimand)
    shared = sorted(a.keys() & b.keys())
    paired = len(shared) == len(a) == len(b)
    y_a, y_b = (torch.stack([side[s].mean(0).log2() for s in sorted(side)]) for side in (a, b))
    if paired:
        found, share = shrink((y_a - y_b).var(0), len(shared) - 1), 1 / len(shared)
    else:
        df = len(y_a) + len(y_b) - 2
        pooled = (_squares(y_a) + _squares(y_b)) / df
        found, share = shrink(pooled, df), 1 / len(y_a) + 1 / len(y_b)
    return Between(full.mean(0), torch.maximum(found.variance * share, full.var(0)).sqrt(), found.df)


def replicate_effect(a: Mapping[str, Tensor], b: Mapping[str, Tensor], estimand: Estimand, *, seed: int) -> Effect:
    """As many draws of the fold change `between` groups of samples. Shapes: ``{sample: (draws, genes)}``."""
    found, n = between(a, b, estimand), len(next(iter(a.values())))
    noise = np.random.default_rng([seed, 42]).standard_t(found.df, size=(n, len(found.mean)))
    lfc = found.mean + found.scale * torch.from_numpy(noise).to(found.mean)
    return Effect(lfc, torch.full_like(found.scale, float(n)))


def spread(means: Sequence[Tensor], n_draws: int, *, seed: int) -> Tensor:
    """Draws of the model's own error, from the mean fold changes of few refits.

    Added as they are, three refits would be three points: where they happen to lie on both sides of zero, no draw would
    be near it, and a gene of which nothing is known would look changed for sure. So the genes' variances lend each
    other strength here too, and the draws are of Student's t. Shapes: ``means (genes,)`` each ``-> (draws, genes)``.
    """
    found = shrink(torch.stack(list(means)).var(0), len(means) - 1)
    noise = np.random.default_rng([seed, 43]).standard_t(found.df, size=(n_draws, len(found.variance)))
    return found.variance.sqrt() * torch.from_numpy(noise).to(found.variance)


def group_lfc(a: Mapping[str, Tensor], b: Mapping[str, Tensor], estimand: Estimand) -> Tensor:
    """Fold change of group over group in every joint draw. Shapes: ``{sample: (draws, genes)} -> (draws, genes)``."""
    return estimand.lfc(_group(a), _group(b))


def _group(side: Mapping[str, Tensor]) -> Tensor:
    """Geometric mean over samples, each counting the same: the mean of log2. Shapes: ``-> (draws, genes)``."""
    return torch.stack(list(side.values())).log2().mean(0).exp2()


def _squares(y: Tensor) -> Tensor:
    return (y - y.mean(0)).square().sum(0)
