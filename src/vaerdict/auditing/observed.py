"""The observations of a block as an audit sees them: a density of vectors, an encoder, and quantities of both."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from vaerdict.auditing.quantities import Quantity
from vaerdict.core import Latent, Model, Observations, Proposal, SettingError, map_latent, prepared, restricted, rows_of
from vaerdict.inference import posterior
from vaerdict.inference.target import Space, Target, TargetProposal, with_observations
from vaerdict.models import Enumerated
from vaerdict.noise import Randomness
from vaerdict.refinement import location

_CHUNK = {"cpu": 2**22, "cuda": 2**27}  # numbers computed at a time
_HIDDEN = 512  # numbers that a network computes for a particle at least
_TOLERANCE = 0.2  # of escalated latents, in posterior standard deviations


def space_of(model: Model, x: Observations) -> Space:
    """The space of a model's latents as vectors; refused where nothing in it is continuous."""
    space = Space.of(model, x)
    if not space.parts:
        raise SettingError("all latents of the model are discrete; vaerdict.expect sums over their states exactly.")
    return space


def state_coordinates(space: Space) -> list[int]:
    """Coordinates of the latent that represents an observation: the model's ``state`` among several, else all."""
    model = space.model.model if isinstance(space.model, Enumerated) else space.model
    names = [part.name for part in space.parts for _ in range(part.size)]
    state = getattr(model, "state", None)
    return [i for i, name in enumerate(names) if name == state] or list(range(len(names)))


def n_states(space: Space) -> int:
    """The number of states that are summed over for every particle."""
    return space.model.n_states if isinstance(space.model, Enumerated) else 1


def latent_names(space: Space) -> list[str]:
    """The names of the coordinates of a latent: z1, z2, ... or name[1], name[2], ..."""
    return [f"{part.name}[{i}]" if part.name else f"z{i}" for part in space.parts for i in range(1, part.size + 1)]


@dataclass(frozen=True, eq=False)
class Observed:
    """Some observations with the density of their latents as vectors, and the encoder for them.

    Shapes: latents ``z (K, m, d)``.
    """

    target: Target
    encoder: TargetProposal

    @classmethod
    def at(cls, space: Space, x: Observations, encoder: Proposal, rows: Tensor) -> Observed:
        """The observations at `rows`."""
        target = Target(space, rows_of(x, rows))
        return cls(target, target.proposal(restricted(encoder, rows.to(target.index.device))))

    @property
    def x(self) -> Tensor:
        """The observations as the target takes them: row numbers. Shapes: ``(m, 1)``."""
        return self.target.index

    @property
    def device(self) -> torch.device:
        """Where the observations are."""
        return self.x.device

    def start(self, generator: Randomness) -> Tensor:
        """Where a search may begin: the location of the encoder, zero where it is not finite. Shapes: ``-> (m, d)``."""
        start = self.encoder.location(self.x, generator)
        return torch.where(start.isfinite().all(-1, keepdim=True), start, 0.0)

    def exact_location(self) -> Tensor | None:
        """The location of the encoder where it has one in the space of the latents. Shapes: ``-> (m, d)``."""
        if any(part.transform is not None or part.name for part in self.target.space.parts):
            return None
        try:
            return location(self.encoder.base, self.target.x, None)
        except SettingError:
            return None

    @torch.no_grad()
    def log_joint(self, z: Tensor) -> Tensor:
        """Log p(x, z), some particles at a time. Shapes: ``(K, m, d) -> (K, m)``."""
        x = prepared(self.target, self.x)
        return torch.cat([self.target.log_joint(x, part) for part in self.chunks(z)])

    def log_prior(self, z: Tensor) -> Tensor:
        """Log p(z). Shapes: ``(K, m, d) -> (K, m)``."""
        return self.target.prior.log_prob(z, self.x)

    def latents(self, z: Tensor) -> Tensor:
        """The latents as the model has them, side by side. Shapes: as z."""
        latent: Latent = self.target.space.latent(z)
        return latent if isinstance(latent, Tensor) else torch.cat(tuple(latent), -1)

    def values(self, quantity: Quantity, z: Tensor) -> Iterator[Tensor]:
        """A quantity, some particles at a time. Shapes: ``(K, m, d) -> (k, m, outputs)`` each."""
        space, x = self.target.space, self.target.x
        for part in self.chunks(z):
            latent = space.latent(part)
            if quantity.continuous and isinstance(space.model, Enumerated):
                values = with_observations(quantity.f)(space.model.first(latent), x)
            else:
                values = space.evaluate(quantity.f, latent, x)
            yield quantity.checked(values, part)

    def chunks(self, z: Tensor) -> tuple[Tensor, ...]:
        """The particles, as many at a time as keep what is computed from them small."""
        size = _CHUNK.get(z.device.type, _CHUNK["cpu"]) // n_states(self.target.space)
        return z.split(max(1, size // (len(self.x) * max(_HIDDEN, self.target.width))))

    def escalated(self, n: int, budget: int | None, seed: int) -> tuple[Tensor, Any]:
        """The latents of the posterior by all stages of escalation, as vectors, and that posterior."""
        model, encoder = self.target.space.model, {"encoder": self.encoder.base}
        model = model.model if isinstance(model, Enumerated) else model
        answer = posterior(model, self.target.x, encoder, n, tolerance=_TOLERANCE, budget=budget, seed=seed)
        known = map_latent(lambda t: torch.where(answer.failed.unsqueeze(-1), 0.0, t), answer.z)
        return self.target.space.vector(known), answer
