"""Decisions you can trust from variational autoencoders.

Everything passes log-weights ``log p(x, z) - log q(z | x)`` of shape ``(particles, *batch)``; every answer carries its
Monte-Carlo error, effective sample size, k-hat and a verdict. Start with `ThreeStep`, `posterior` or `expect`.
"""

from typing import TYPE_CHECKING, Any

from vaerdict import datasets, decisions, diagnostics, estimators, models, objectives, samplers, selective, theory
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
from vaerdict.flows import SplineFlow
from vaerdict.models.adapters import from_scvi
from vaerdict.noise import Sobol, seeded
from vaerdict.procedure import Answer, Decision, Posterior, ThreeStep, expect, posterior
from vaerdict.proposals import Mixture, Normal, Prior, Student
from vaerdict.refinement import refine
from vaerdict.training import AGG, CHI, CYCLIC, IWAE, VAE, WW, Fit, Member, Recipe, Settings, train

if TYPE_CHECKING:
    from vaerdict.classify import SelectiveClassifier
    from vaerdict.de import Calibration, DEResult, calibrate, differential_expression

__version__ = "0.1.0"

__all__ = [
    "AGG",
    "CHI",
    "CYCLIC",
    "IWAE",
    "VAE",
    "WW",
    "Answer",
    "Calibration",
    "DEResult",
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
    "SelectiveClassifier",
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
    "calibrate",
    "datasets",
    "decisions",
    "diagnostics",
    "differential_expression",
    "estimators",
    "expect",
    "from_scvi",
    "models",
    "objectives",
    "posterior",
    "refine",
    "samplers",
    "seeded",
    "selective",
    "theory",
    "train",
]


def __getattr__(name: str) -> Any:
    """Names whose modules import more than torch, numpy and scipy: only when asked for."""
    if name == "SelectiveClassifier":
        from vaerdict.classify import SelectiveClassifier

        return SelectiveClassifier
    if name in ("Calibration", "DEResult", "calibrate", "differential_expression"):
        from vaerdict import de

        return getattr(de, name)
    raise AttributeError(f"module 'vaerdict' has no attribute {name!r}")
