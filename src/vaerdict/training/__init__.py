"""Fitting models and proposals: separate objectives for each, many members side by side, resumable."""

from vaerdict.training.loop import Fit, Member, Settings, train
from vaerdict.training.recipes import (
    AGG,
    CHI,
    CYCLIC,
    IWAE,
    RECIPES,
    VAE,
    WW,
    Lagging,
    Recipe,
    cyclical,
    recipe,
    warm_up,
)
from vaerdict.training.stacks import as_model

__all__ = [
    "AGG",
    "CHI",
    "CYCLIC",
    "IWAE",
    "RECIPES",
    "VAE",
    "WW",
    "Fit",
    "Lagging",
    "Member",
    "Recipe",
    "Settings",
    "as_model",
    "cyclical",
    "recipe",
    "train",
    "warm_up",
]
