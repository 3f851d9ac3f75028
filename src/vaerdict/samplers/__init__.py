"""Samplers for the latents of given observations: HMC moves, AIS, adaptive SMC and the BDMC sandwich."""

from vaerdict.samplers.annealed import AISResult, ais
from vaerdict.samplers.hmc import Move, transition
from vaerdict.samplers.memory import free_bytes
from vaerdict.samplers.path import Path, State
from vaerdict.samplers.resampling import gathered, systematic
from vaerdict.samplers.results import by_island, log_standard_error
from vaerdict.samplers.sandwich import Sandwich, bdmc
from vaerdict.samplers.schedules import geometric, linear, sigmoid
from vaerdict.samplers.sequential import SMCResult, smc

__all__ = [
    "AISResult",
    "Move",
    "Path",
    "SMCResult",
    "Sandwich",
    "State",
    "ais",
    "bdmc",
    "by_island",
    "free_bytes",
    "gathered",
    "geometric",
    "linear",
    "log_standard_error",
    "sigmoid",
    "smc",
    "systematic",
    "transition",
]
