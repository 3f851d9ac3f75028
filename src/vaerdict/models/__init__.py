"""Models whose posteriors we decide with."""

from vaerdict.models.counts import CountModel
from vaerdict.models.m1m2 import (
    M1M2,
    Bernoulli,
    ClassPrior,
    ClassProposal,
    Gaussian,
    PerClass,
    Recognition,
    per_class,
    recognition,
)
from vaerdict.models.ppca import PPCA, LambdaPPCA

__all__ = [
    "M1M2",
    "PPCA",
    "Bernoulli",
    "ClassPrior",
    "ClassProposal",
    "CountModel",
    "Gaussian",
    "LambdaPPCA",
    "PerClass",
    "Recognition",
    "per_class",
    "recognition",
]
