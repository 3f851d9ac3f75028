"""Recipes, which say how a model and its proposal are trained, and members, the pairs that are trained by them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor, nn

from vaerdict.objectives import Loss, elbo_loss, iwelbo_loss, loss
from vaerdict.proposals import Trainable

Annealing = Callable[[float], float]
"""The weight of the KL term as a function of the fraction of training done, both in [0, 1]."""


@dataclass(frozen=True)
class _WarmUp:
    fraction: float

    def __call__(self, done: float) -> float:
        return min(1.0, done / self.fraction)


@dataclass(frozen=True)
class _Cyclical:
    cycles: int
    fraction: float

    def __call__(self, done: float) -> float:
        return 1.0 if done >= 1 else min(1.0, (done * self.cycles % 1.0) / self.fraction)


@dataclass(frozen=True)
class _Constant:
    weight: float

    def __call__(self, done: float) -> float:
        return self.weight


def constant(weight: float = 0.75) -> Annealing:
    """The same weight in all of training; by default the mean weight of `cyclical` over training."""
    return _Constant(weight)


def warm_up(fraction: float = 0.5) -> Annealing:
    """Rise linearly from 0 to 1 over the first `fraction` of training, then stay at 1."""
    return _WarmUp(fraction)


def cyclical(cycles: int = 4, fraction: float = 0.5) -> Annealing:
    """Rise linearly from 0 to 1 over the first `fraction` of each cycle, then stay at 1 (Fu et al., 2019)."""
    return _Cyclical(cycles, fraction)


@dataclass(frozen=True)
class Lagging:
    """Lagging inference networks (He et al., 2019): up to `inner` steps of q before each step of the model.

    The phase ends when the mutual information between x and z stops rising on held-out data, or after `epochs` epochs.
    """

    inner: int = 10
    epochs: int = 30


@dataclass(frozen=True, repr=False)
class Recipe:
    """How a member is trained.

    Parameters
    ----------
    name
        The name in files, tables and messages. It also seeds the noise: two recipes with one seed draw different noise.
    theta
        The loss of the model's parameters, a function of the log-weights. Shapes: ``(K, *batch) -> (*batch)``.
    phi
        The loss of the proposal's parameters; `vaerdict.objectives.loss` makes one.
    annealing
        The weight of the KL term over training (`constant`, `warm_up`, `cyclical`).
    lagging
        Additional steps of the proposal at the start of training.

    Examples
    --------
    >>> from vaerdict.objectives import iwelbo_loss, loss
    >>> Recipe("IWAE-warm", iwelbo_loss, loss("iwelbo", "dreg"), annealing=warm_up(0.2)).annealing(0.1)
    0.5
    """

    name: str
    theta: Callable[[Tensor], Tensor]
    phi: Loss
    annealing: Annealing | None = None
    lagging: Lagging | None = None

    def __repr__(self) -> str:
        if RECIPES.get(self.name) == self:
            return self.name
        arguments = [repr(self.name), getattr(self.theta, "__qualname__", repr(self.theta)), repr(self.phi)]
        optional = {"annealing": self.annealing, "lagging": self.lagging}
        return f"Recipe({', '.join(arguments + [f'{k}={v!r}' for k, v in optional.items() if v is not None])})"


VAE = Recipe("VAE", elbo_loss, loss("elbo", "stl"))
IWAE = Recipe("IWAE", iwelbo_loss, loss("iwelbo", "dreg"))
WW = Recipe("WW", iwelbo_loss, loss("forward_kl", "dreg"))
CHI = Recipe("CHI", iwelbo_loss, loss("cubo", "dreg"))
AGG = Recipe("AGG", elbo_loss, loss("elbo", "stl"), lagging=Lagging())
CYCLIC = Recipe("CYCLIC", elbo_loss, loss("elbo", "stl"), annealing=cyclical())
CONSTANT = Recipe("CONSTANT", elbo_loss, loss("elbo", "stl"), annealing=constant())

RECIPES: dict[str, Recipe] = {recipe.name: recipe for recipe in (VAE, IWAE, WW, CHI, AGG, CYCLIC, CONSTANT)}


@dataclass(frozen=True, eq=False)
class Member:
    """A model and a proposal that are trained together.

    Parameters
    ----------
    model
        A module with ``log_joint(x, z)`` and ``prior``. `train` copies it.
    proposal
        A proposal with parameters, as a family makes it (``Normal().make``). `train` copies it.
    recipe
        The losses and schedules.
    seed
        The seed of the order of the data and of all noise drawn in training.

    Examples
    --------
    >>> import torch, vaerdict as vd
    >>> x = torch.randn(20, 3, generator=vd.seeded(0))
    >>> proposal = vd.Normal().make(x, 2, hidden=(4,), generator=vd.seeded(1))
    >>> Member(vd.models.PPCA(torch.ones(3, 2), 1.0), proposal, vd.IWAE, seed=3).name
    'IWAE, seed 3'
    """

    model: nn.Module
    proposal: Trainable
    recipe: Recipe
    seed: int

    @property
    def name(self) -> str:
        """The name in messages: ``IWAE, seed 3``."""
        return f"{self.recipe.name}, seed {self.seed}"
