"""The observations of a block as an audit sees them: a joint density of vectors, an encoder, and quantities of both."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from vaerdict.auditing.quantities import Quantity
from vaerdict.core import Model, Proposal, check_log_joint, prepared, restricted
from vaerdict.inference import Posterior, posterior
from vaerdict.noise import KeyedNoise, Randomness, seeded
from vaerdict.proposals import Prior
from vaerdict.refinement import location

_CHUNK = {"cpu": 2**22, "cuda": 2**27}  # numbers computed at a time
_TOLERANCE = 0.2  # of escalated latents, in posterior standard deviations


@dataclass(frozen=True, eq=False)
class Space:
    """Some observations, the model's density of their latents as vectors, and the encoder for them.

    Shapes: ``x (m, ...)``, latents ``(K, m, d)``.
    """

    model: Model
    x: Any
    encoder: Proposal

    @classmethod
    def of(cls, model: Model, x: Any, encoder: Proposal, rows: Tensor) -> Space:
        """The observations at `rows`."""
        index = rows.to(x.device)
        return cls(model, x[index], restricted(encoder, index))

    @property
    def device(self) -> torch.device:
        """Where the observations are."""
        return self.x.device

    @property
    def prior(self) -> Proposal:
        """The prior as a proposal."""
        return Prior(self.model.prior)

    @property
    def latent_names(self) -> list[str]:
        """The names of the coordinates of a latent."""
        return [f"z{i + 1}" for i in range(math.prod(self.model.prior.event_shape))]

    def start(self, generator: Randomness) -> Tensor:
        """Where a search may begin: the location of the encoder, zero where it is not finite. Shapes: ``-> (m, d)``."""
        start = location(self.encoder, self.x, generator)
        return torch.where(start.isfinite().all(-1, keepdim=True), start, 0.0)

    @torch.no_grad()
    def log_joint(self, z: Tensor) -> Tensor:
        """Log p(x, z), some particles at a time. Shapes: ``(K, m, d) -> (K, m)``."""
        x = prepared(self.model, self.x)
        parts = [check_log_joint(self.model.log_joint(x, part), part[..., 0], part) for part in self.chunks(z)]
        return torch.cat(parts)

    def log_prior(self, z: Tensor) -> Tensor:
        """Log p(z). Shapes: ``(K, m, d) -> (K, m)``."""
        return self.prior.log_prob(z, self.x)

    def values(self, quantity: Quantity, z: Tensor) -> Iterator[Tensor]:
        """A quantity, some particles at a time. Shapes: ``(K, m, d) -> (k, m, outputs)`` each."""
        return (quantity(part, self.x) for part in self.chunks(z))

    def chunks(self, z: Tensor) -> tuple[Tensor, ...]:
        """The particles, as many at a time as keep what is computed from them small."""
        return z.split(max(1, _CHUNK.get(z.device.type, _CHUNK["cpu"]) // max(1, self.x.numel())))

    def escalated(self, n: int, budget: int | None, seed: int) -> Posterior:
        """The posterior by all stages of escalation, which search modes from the prior too."""
        return posterior(
            self.model,
            self.x,
            {"encoder": self.encoder},
            n,
            tolerance=_TOLERANCE,
            budget=budget,
            generator=seeded(seed, self.x.device),
        )


def noise(seed: int, stream: int, rows: Tensor, device: torch.device) -> KeyedNoise:
    """Noise that depends on the observation and not on those beside it."""
    return KeyedNoise(seed, stream, rows.to(device))


def simulated(model: Any, n: int, seed: int) -> tuple[Any, Tensor] | None:
    """Pairs (x, z) from the model, None if it cannot simulate. Shapes: ``-> x (n, ...), z (n, d)``."""
    simulate: Callable[..., tuple[Any, Tensor]] | None = getattr(model, "simulate", None)
    return None if simulate is None else simulate(n, generator=seeded(seed))
