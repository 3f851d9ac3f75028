"""The three steps: choose a model, fit proposals for it, combine them and decide."""

from vaerdict.procedure.escalation import Escalation
from vaerdict.procedure.posterior import Answer, Decision, Posterior, expect, posterior
from vaerdict.procedure.threestep import Score, ThreeStep

__all__ = ["Answer", "Decision", "Escalation", "Posterior", "Score", "ThreeStep", "expect", "posterior"]
