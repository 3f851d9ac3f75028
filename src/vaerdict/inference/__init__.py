"""The three steps: choose a model, fit proposals for it, combine them and decide."""

from vaerdict.inference.class_posterior import (
    ClassPosterior,
    amortised,
    class_posterior,
    class_weights,
    from_weights,
    plugin_classes,
    refined,
)
from vaerdict.inference.escalation import Escalation
from vaerdict.inference.posterior import Answer, Decision, Posterior, expect, posterior
from vaerdict.inference.three_steps import Score, ThreeStep

__all__ = [
    "Answer",
    "ClassPosterior",
    "Decision",
    "Escalation",
    "Posterior",
    "Score",
    "ThreeStep",
    "amortised",
    "class_posterior",
    "class_weights",
    "expect",
    "from_weights",
    "plugin_classes",
    "posterior",
    "refined",
]
