"""The three steps: choose a model, fit proposals for it, combine them and decide."""

from vaerdict.procedure.classes import (
    ClassPosterior,
    amortised,
    class_posterior,
    class_weights,
    from_weights,
    plugin_classes,
    refined,
)
from vaerdict.procedure.escalation import Escalation
from vaerdict.procedure.posterior import Answer, Decision, Posterior, expect, posterior
from vaerdict.procedure.threestep import Score, ThreeStep

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
