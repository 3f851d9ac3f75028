"""Approximate posteriors: amortised families, normalising flows, the prior, and mixtures of proposals."""

from vaerdict.priors import Prior
from vaerdict.proposals.families import (
    Amortised,
    Conditional,
    Family,
    Normal,
    OfCounts,
    Preprocessed,
    Student,
    Trainable,
)
from vaerdict.proposals.flow import Flow, SplineFlow
from vaerdict.proposals.kernels import Kernels
from vaerdict.proposals.levels import Levels
from vaerdict.proposals.mixture import Mixture, by_rows, check_latent, defensive, optimal_shares
from vaerdict.proposals.wrapped import as_proposal

__all__ = [
    "Amortised",
    "Conditional",
    "Family",
    "Flow",
    "Kernels",
    "Levels",
    "Mixture",
    "Normal",
    "OfCounts",
    "Preprocessed",
    "Prior",
    "SplineFlow",
    "Student",
    "Trainable",
    "as_proposal",
    "by_rows",
    "check_latent",
    "defensive",
    "optimal_shares",
]
