"""Quantities that people read off a model, and those that a model offers by itself."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import Tensor

from vaerdict.core import SettingError, ShapeError

LATENT, RECONSTRUCTION = "latent", "reconstruction"
"""What is compared for every model: the latents, and the log-likelihood of the observation."""


@dataclass(frozen=True, eq=False)
class Quantity:
    """A function of the latent that people read off a model, with its unit.

    Parameters
    ----------
    f
        ``f(z)`` or ``f(z, x)``: ``(K, m, d) -> (K, m, *out)`` for any m observations x.
    unit
        The unit of its values, for tables.
    scale
        Factor from the values of f to that unit.
    features
        Names of its outputs.
    continuous
        Whether it is the same in every state of the discrete latents, so that one evaluation serves all.
    """

    f: Callable[..., Tensor]
    unit: str = ""
    scale: float = 1.0
    features: Sequence[str] | None = field(default=None, repr=False)
    continuous: bool = False

    def checked(self, values: Tensor, z: Tensor) -> Tensor:
        """The values of f at particles z in the unit, one row of outputs each. Shapes: ``-> (K, m, outputs)``."""
        if not isinstance(values, Tensor) or values.shape[:2] != z.shape[:2]:
            shape = tuple(values.shape) if isinstance(values, Tensor) else type(values).__name__
            raise ShapeError(f"a quantity returned {shape}; it must begin with {tuple(z.shape[:2])}.")
        values = values.reshape(*values.shape[:2], -1)
        if self.features is not None and len(self.features) != values.shape[-1]:
            raise ShapeError(
                f"{len(self.features)} features are named, but the quantity has {values.shape[-1]} outputs."
            )
        return self.scale * values

    def names(self, n: int) -> list[str]:
        """The names of its n outputs."""
        return [str(i + 1) for i in range(n)] if self.features is None else [str(name) for name in self.features]


def default_quantities(
    model: Any, genes: Sequence[str] | None = None, regions: Sequence[str] | None = None
) -> dict[str, Quantity]:
    """Normalised expression, class probabilities and accessibility, where a model offers them.

    `genes` and `regions` are their names, in the order of the outputs.
    """
    offered = {
        "normalised expression": ("expression", "counts per 10,000", 1e4, genes),
        "class probabilities": ("class_probabilities", "%", 100.0, getattr(model, "classes", None)),
        "accessibility": ("accessibility", "%", 100.0, regions),
    }
    return {
        name: Quantity(partial(_at, getattr(model, method)), unit, scale, names, continuous=True)
        for name, (method, unit, scale, names) in offered.items()
        if hasattr(model, method)
    }


def _at(method: Callable[..., Tensor], z: Any, x: Any) -> Tensor:
    """A method of a model at its latents and observations, where it takes both."""
    return method(z, x) if len(inspect.signature(method).parameters) > 1 else method(z)


def as_quantities(given: Any, model: Any) -> dict[str, Quantity]:
    """The quantities asked for, by name; those that the model offers by default."""
    given = default_quantities(model) if given is None else given
    if not isinstance(given, Mapping):
        raise SettingError("quantities= must map names to functions f(z) or f(z, x), or to `Quantity`.")
    reserved = {LATENT, RECONSTRUCTION} & given.keys()
    if reserved:
        raise SettingError(f"quantities= names {', '.join(sorted(reserved))}, which every audit has; choose another.")
    return {str(name): f if isinstance(f, Quantity) else Quantity(f) for name, f in given.items()}
