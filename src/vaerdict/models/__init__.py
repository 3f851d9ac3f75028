"""Models: probabilistic PCA, gene counts, and the semi-supervised M1+M2; `scvi` wraps models of scvi-tools."""

from vaerdict.models.counts import CountModel
from vaerdict.models.m1m2 import (
    M1M2,
    BernoulliLikelihood,
    ClassPrior,
    ClassProposal,
    GaussianLikelihood,
    PerClass,
    Recognition,
    per_class,
    recognition,
)
from vaerdict.models.ppca import PPCA, LambdaPPCA

__all__ = [
    "M1M2",
    "PPCA",
    "BernoulliLikelihood",
    "ClassPrior",
    "ClassProposal",
    "CountModel",
    "GaussianLikelihood",
    "LambdaPPCA",
    "PerClass",
    "Recognition",
    "per_class",
    "recognition",
]
