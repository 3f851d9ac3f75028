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
from vaerdict.training.scores import OwnBound, RefinedBound, RefinedEvidence, Score, refined_evidence
from vaerdict.training.semibounds import RULES, rule
from vaerdict.training.semistack import Labelled, SemiMember, SemiSettings
from vaerdict.training.semisupervised import SemiFit, train_each, train_semisupervised
from vaerdict.training.stacks import as_model

__all__ = [
    "AGG",
    "CHI",
    "CYCLIC",
    "IWAE",
    "RECIPES",
    "RULES",
    "VAE",
    "WW",
    "Fit",
    "Labelled",
    "Lagging",
    "Member",
    "OwnBound",
    "Recipe",
    "RefinedBound",
    "RefinedEvidence",
    "Score",
    "SemiFit",
    "SemiMember",
    "SemiSettings",
    "Settings",
    "as_model",
    "cyclical",
    "recipe",
    "refined_evidence",
    "rule",
    "train",
    "train_each",
    "train_semisupervised",
    "warm_up",
]
