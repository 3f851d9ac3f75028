"""Samplers of the latents of fixed observations: HMC moves, AIS, adaptive SMC and bidirectional Monte Carlo."""

from vaerdict.samplers.annealed import AISResult, Sandwich, ais, bdmc
from vaerdict.samplers.hmc import Move, transition
from vaerdict.samplers.sequential import SMCResult, smc
from vaerdict.samplers.tempering import AnnealingPath, PathState, geometric_schedule, linear_schedule, sigmoid_schedule
from vaerdict.samplers.weights import by_island, gathered, log_standard_error, next_temperature, systematic

__all__ = [
    "AISResult",
    "AnnealingPath",
    "Move",
    "PathState",
    "SMCResult",
    "Sandwich",
    "ais",
    "bdmc",
    "by_island",
    "gathered",
    "geometric_schedule",
    "linear_schedule",
    "log_standard_error",
    "next_temperature",
    "sigmoid_schedule",
    "smc",
    "systematic",
    "transition",
]
