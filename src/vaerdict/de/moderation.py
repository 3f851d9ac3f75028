r"""Variances moderated across genes by empirical Bayes, as in limma.

With d degrees of freedom the variance :math:`s_g^2` of a gene is moved towards a common one,
:math:`\tilde s_g^2 = (d_0 s_0^2 + d s_g^2) / (d_0 + d)`, which has :math:`d_0 + d`. Reference: Smyth (2004), Linear
models and empirical Bayes methods, Statistical Applications in Genetics and Molecular Biology 3(1).
"""

from __future__ import annotations

import math
from typing import NamedTuple

from scipy import special
from torch import Tensor

from vaerdict.core import SettingError

LARGEST_DF = 1e6
"""Degrees of freedom of a prior that leaves the genes' variances no room."""


class Moderated(NamedTuple):
    """Moderated variances and their degrees of freedom. Shapes: ``variance (genes,)``."""

    variance: Tensor
    df: float


def moderate(variance: Tensor, df: int) -> Moderated:
    """Moderate variances of `df` degrees of freedom by Smyth's moment estimate. Shapes: ``(genes,) -> (genes,)``."""
    if df < 1:
        raise SettingError(f"df={df} degrees of freedom show no variance; give at least two samples per group.")
    half, positive = df / 2, variance[variance > 0].double()
    if len(positive) < 2:
        return Moderated(variance, float(df))
    e = positive.log() - float(special.digamma(half)) + math.log(half)
    excess = float(e.var()) - float(special.polygamma(1, half))
    df0 = min(2 * inverse_trigamma(excess), LARGEST_DF) if excess > 0 else LARGEST_DF
    s0 = math.exp(float(e.mean()) + float(special.digamma(df0 / 2)) - math.log(df0 / 2))
    return Moderated((df0 * s0 + df * variance) / (df0 + df), df0 + df)


def inverse_trigamma(x: float) -> float:
    """The argument at which the trigamma function is x, by Newton's method on its reciprocal."""
    y = 0.5 + 1 / x
    for _ in range(50):
        slope = float(special.polygamma(1, y))
        y += slope * (1 - slope / x) / float(special.polygamma(2, y))
    return y
