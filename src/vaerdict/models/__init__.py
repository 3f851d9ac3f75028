"""Models: probabilistic PCA, gene counts, and the semi-supervised M1+M2; `scvi` wraps models of scvi-tools."""

from vaerdict.models.counts import CountModel
from vaerdict.models.enumerated import Enumerated, discrete_latents
from vaerdict.models.m1m2 import (
    M1M2,
    Architecture,
    ClassPrior,
    ClassProposal,
    PerClass,
    Recognition,
    per_class,
    recognition,
)
from vaerdict.models.pixels import BernoulliLikelihood, GaussianLikelihood, NegativeBinomialLikelihood
from vaerdict.models.ppca import PPCA, LambdaPPCA
from vaerdict.models.vae import Autoencoder, from_vae

__all__ = [
    "M1M2",
    "PPCA",
    "Architecture",
    "Autoencoder",
    "BernoulliLikelihood",
    "ClassPrior",
    "ClassProposal",
    "CountModel",
    "Enumerated",
    "GaussianLikelihood",
    "LambdaPPCA",
    "NegativeBinomialLikelihood",
    "PerClass",
    "Recognition",
    "discrete_latents",
    "from_vae",
    "per_class",
    "recognition",
]
