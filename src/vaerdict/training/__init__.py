"""Training of models and proposals: separate objectives for each, many members side by side, with checkpoints."""

from vaerdict.training.loop import Fit, Settings, train
from vaerdict.training.recipes import (
    AGG,
    CHI,
    CONSTANT,
    CYCLIC,
    IWAE,
    RECIPES,
    VAE,
    WW,
    Lagging,
    Member,
    Recipe,
    constant,
    cyclical,
    warm_up,
)
from vaerdict.training.scores import AmortisedBound, HeldOutScore, RefinedBound, RefinedEvidence, refined_evidence
from vaerdict.training.semisupervised import SemiFit, train_semisupervised, train_semisupervised_each
from vaerdict.training.semisupervised_stack import (
    SEMI_RECIPES,
    SemiData,
    SemiMember,
    SemiRecipe,
    SemiSettings,
    semi_recipe,
)
from vaerdict.training.stacks import as_model

__all__ = [
    "AGG",
    "CHI",
    "CONSTANT",
    "CYCLIC",
    "IWAE",
    "RECIPES",
    "SEMI_RECIPES",
    "VAE",
    "WW",
    "AmortisedBound",
    "Fit",
    "HeldOutScore",
    "Lagging",
    "Member",
    "Recipe",
    "RefinedBound",
    "RefinedEvidence",
    "SemiData",
    "SemiFit",
    "SemiMember",
    "SemiRecipe",
    "SemiSettings",
    "Settings",
    "as_model",
    "constant",
    "cyclical",
    "refined_evidence",
    "semi_recipe",
    "train",
    "train_semisupervised",
    "train_semisupervised_each",
    "warm_up",
]
