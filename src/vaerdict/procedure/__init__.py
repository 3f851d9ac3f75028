"""The three steps: choose a model, fit proposals for it, combine them and decide."""

from vaerdict.procedure.posterior import Decision, Posterior, posterior
from vaerdict.procedure.threestep import Score, ThreeStep

__all__ = ["Decision", "Posterior", "Score", "ThreeStep", "posterior"]
