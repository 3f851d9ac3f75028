"""Recipes: which bound teaches the model, which loss teaches q, and on what schedule."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from vaerdict.core import SettingError
from vaerdict.objectives import Loss, elbo_loss, iwelbo_loss, loss

Annealing = Callable[[float], float]
"""The weight of the KL term as a function of the share of training done, both in [0, 1]."""


@dataclass(frozen=True)
class _WarmUp:
    share: float

    def __call__(self, done: float) -> float:
        return min(1.0, done / self.share)


@dataclass(frozen=True)
class _Cyclical:
    cycles: int
    share: float

    def __call__(self, done: float) -> float:
        return 1.0 if done >= 1 else min(1.0, (done * self.cycles % 1.0) / self.share)


def warm_up(share: float = 0.5) -> Annealing:
    """Rise from 0 to 1 over the first `share` of training, then stay."""
    return _WarmUp(share)


def cyclical(cycles: int = 4, share: float = 0.5) -> Annealing:
    """Rise from 0 to 1 over the first `share` of each cycle, then stay until its end (Fu et al., 2019)."""
    return _Cyclical(cycles, share)


@dataclass(frozen=True)
class Lagging:
    """Lagging inference networks (He et al., 2019): up to `inner` steps of q before each step of the model, for as long
    as the mutual information between x and z still rises on held-out data, `epochs` at most."""

    inner: int = 10
    epochs: int = 30


@dataclass(frozen=True, repr=False)
class Recipe:
    """How one member of a table is trained. `name` is what files and tables call it."""

    name: str
    theta: Callable[[Tensor], Tensor]
    phi: Loss
    annealing: Annealing | None = None
    lagging: Lagging | None = None

    def __repr__(self) -> str:
        if RECIPES.get(self.name) == self:
            return self.name
        shown = [repr(self.name), getattr(self.theta, "__qualname__", repr(self.theta)), repr(self.phi)]
        extra = {"annealing": self.annealing, "lagging": self.lagging}
        return f"Recipe({', '.join(shown + [f'{k}={v!r}' for k, v in extra.items() if v is not None])})"


VAE = Recipe("VAE", elbo_loss, loss("elbo", "stl"))
IWAE = Recipe("IWAE", iwelbo_loss, loss("iwelbo", "dreg"))
WW = Recipe("WW", iwelbo_loss, loss("forward_kl", "dreg"))
CHI = Recipe("CHI", iwelbo_loss, loss("cubo", "dreg"))
AGG = Recipe("AGG", elbo_loss, loss("elbo", "stl"), lagging=Lagging())
CYCLIC = Recipe("CYCLIC", elbo_loss, loss("elbo", "stl"), annealing=cyclical())

RECIPES: dict[str, Recipe] = {recipe.name: recipe for recipe in (VAE, IWAE, WW, CHI, AGG, CYCLIC)}


def recipe(name: str) -> Recipe:
    """The recipe of that name; an unknown one is refused with the list."""
    if name not in RECIPES:
        raise SettingError(f"no recipe {name!r}; choose one of {', '.join(RECIPES)}.")
    return RECIPES[name]
