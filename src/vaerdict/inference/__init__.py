"""The three steps: select a model, fit proposals for it, combine them and decide."""

from vaerdict.inference.check import CheckReport, check
from vaerdict.inference.class_probabilities import (
    ClassPosterior,
    amortised,
    class_posterior,
    class_weights,
    plugin_classes,
    refined,
)
from vaerdict.inference.posterior import Answer, Decision, Posterior, expect, posterior
from vaerdict.inference.sampling import Escalation
from vaerdict.inference.target import Target
from vaerdict.inference.three_steps import ModelScore, ThreeStep

__all__ = [
    "Answer",
    "CheckReport",
    "ClassPosterior",
    "Decision",
    "Escalation",
    "ModelScore",
    "Posterior",
    "Target",
    "ThreeStep",
    "amortised",
    "check",
    "class_posterior",
    "class_weights",
    "expect",
    "plugin_classes",
    "posterior",
    "refined",
]
