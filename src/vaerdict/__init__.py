"""Decisions you can trust from variational autoencoders.

Everything passes log-weights ``log p(x, z) - log q(z | x)`` of shape ``(particles, *batch)``; every answer carries its
Monte-Carlo error, effective sample size, k-hat and a verdict. Start with `ThreeStep`, `posterior` or `expect`.
"""

from vaerdict import datasets, decisions, diagnostics, estimators, models, objectives, samplers, theory
from vaerdict.core import (
    DataError,
    DivergenceError,
    Draws,
    Estimate,
    Model,
    Proposal,
    SettingError,
    ShapeError,
    VaerdictError,
    WeightError,
)
from vaerdict.diagnostics import Verdict
from vaerdict.noise import Sobol, seeded
from vaerdict.procedure import Answer, Decision, Posterior, ThreeStep, expect, posterior
from vaerdict.proposals import Mixture, Normal, Prior, SplineFlow, Student
from vaerdict.refinement import refine
from vaerdict.training import AGG, CHI, CYCLIC, IWAE, VAE, WW, Fit, Member, Recipe, Settings, train

__version__ = "0.1.0"

__all__ = [
    "AGG",
    "CHI",
    "CYCLIC",
    "IWAE",
    "VAE",
    "WW",
    "Answer",
    "DataError",
    "Decision",
    "DivergenceError",
    "Draws",
    "Estimate",
    "Fit",
    "Member",
    "Mixture",
    "Model",
    "Normal",
    "Posterior",
    "Prior",
    "Proposal",
    "Recipe",
    "SettingError",
    "Settings",
    "ShapeError",
    "Sobol",
    "SplineFlow",
    "Student",
    "ThreeStep",
    "VaerdictError",
    "Verdict",
    "WeightError",
    "datasets",
    "decisions",
    "diagnostics",
    "estimators",
    "expect",
    "models",
    "objectives",
    "posterior",
    "refine",
    "samplers",
    "seeded",
    "theory",
    "train",
]
