"""Posteriors of separated modes, and narrow modes that hold much of the mass."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from vaerdict_paper.benchmarks.verdicts.benign import moduli
from vaerdict_paper.benchmarks.verdicts.questions import (
    N_OBS,
    Joint,
    Likelihood,
    Target,
    first_square,
    generator_of,
    normal,
    normal_prior,
    uniform,
)

GROUP = "separated"


def targets(seed: int) -> list[Target]:
    """All targets of the group."""
    return [
        modes("two modes, 1-d", seed, 1, 2, radius=3.0, width=(0.2, 0.6)),
        modes("two near modes, 3-d", seed, 3, 2, radius=1.5, width=(0.4, 0.8)),
        modes("two far modes, 6-d", seed, 6, 2, radius=5.0, width=(0.4, 0.8)),
        modes("three modes, 2-d", seed, 2, 3, radius=3.0, width=(0.1, 0.7)),
        modes("five modes, 5-d", seed, 5, 5, radius=4.0, width=(0.3, 0.8)),
        modes("eight modes, 4-d", seed, 4, 8, radius=4.0, width=(0.2, 0.6)),
        spike("spike on a slab, 1-d", seed, 1, width=0.01),
        spike("spike on a slab, 3-d", seed, 3, width=0.03),
        spike("narrow mode with most of the mass, 2-d", seed, 2, width=0.02, weight=0.85, distance=3.0),
        lattice("64 modes, 2-d", seed),
        signs("32 modes by sign, 5-d", seed),
        swap("exchangeable components, 2-d", seed),
    ]


def mixture(x: Tensor, z: Tensor, loc: Tensor, scale: Tensor, log_weight: Tensor) -> Tensor:
    """Log-density of a mixture of round normals; x moves all of them and, by its last column, changes the first weight.

    Shapes: ``x (*batch, d + 1), z (K, *batch, d), loc (C, d), scale (C), log_weight (C)``.
    """
    d = z.shape[-1]
    square = (z - x[..., :d]).unsqueeze(-2).sub(loc).square().sum(-1) / scale.square()
    return torch.logsumexp(_log_weights(x, log_weight) - 0.5 * square - d * scale.log(), -1) - 4.0


def _log_weights(x: Tensor, log_weight: Tensor) -> Tensor:
    """Normalised log-weights of the modes. Shapes: ``(*batch, d + 1), (C) -> (*batch, C)``."""
    first = torch.zeros_like(log_weight)
    first[0] = 1
    return torch.log_softmax(log_weight + x[..., -1:] * first, -1)


def of_mixture(name: str, x: Tensor, loc: Tensor, scale: Tensor, weight: Tensor, prior_scale: float) -> Target:
    """The target of a `mixture`."""
    d = loc.shape[-1]
    probabilities = _log_weights(x, weight.log()).exp()

    def sample(n: int, g: torch.Generator) -> Tensor:
        mode = torch.multinomial(probabilities, n, replacement=True, generator=g).mT
        return x[:, :d] + loc[mode] + scale[mode].unsqueeze(-1) * normal(g, n, N_OBS, d)

    parameters = {"loc": loc, "scale": scale, "log_weight": weight.log()}
    return Target(
        GROUP, name, Joint(normal_prior(d, prior_scale), mixture, parameters), x, sample, product=first_square
    )


def _shifts(g: torch.Generator, d: int) -> Tensor:
    return torch.cat([uniform(g, -0.5, 0.5, N_OBS, d), uniform(g, -1.0, 1.0, N_OBS, 1)], -1)


def modes(name: str, seed: int, d: int, n_modes: int, radius: float, width: tuple[float, float]) -> Target:
    """Modes of unequal weight and width on a sphere."""
    g = generator_of(seed, name)
    loc = radius * _directions(g, d, n_modes)
    scale, weight = uniform(g, *width, n_modes), uniform(g, 0.3, 1.0, n_modes)
    return of_mixture(name, _shifts(g, d), loc, scale, weight / weight.sum(), max(2.0, 0.8 * radius))


def _directions(g: torch.Generator, d: int, n: int) -> Tensor:
    """Directions far from each other: of many sets the one with the largest smallest distance."""
    sets = [torch.nn.functional.normalize(normal(g, n, d), dim=-1) for _ in range(200)]
    return max(sets, key=lambda points: torch.pdist(points).min().item())


def spike(name: str, seed: int, d: int, width: float, weight: float = 0.5, distance: float = 0.7) -> Target:
    """A narrow mode at a distance from the centre of a broad one."""
    g = generator_of(seed, name)
    loc = torch.stack([torch.zeros(d, dtype=torch.float64), distance * _directions(g, d, 2)[0]])
    scale = torch.tensor([1.0, width], dtype=torch.float64)
    return of_mixture(name, _shifts(g, d), loc, scale, torch.tensor([1 - weight, weight], dtype=torch.float64), 2.0)


def lattice(name: str, seed: int) -> Target:
    """An eight by eight lattice of modes with random weights."""
    g = generator_of(seed, name)
    axis = 1.2 * (torch.arange(8, dtype=torch.float64) - 3.5)
    weight = uniform(g, 0.2, 1.0, 64)
    scale = uniform(g, 0.1, 0.2, 64)
    return of_mixture(name, _shifts(g, 2), torch.cartesian_prod(axis, axis), scale, weight / weight.sum(), 3.0)


def signs(name: str, seed: int, d: int = 5) -> Target:
    """The moduli of all latents are measured precisely; every combination of signs is a mode."""
    g, noise, sd, centre = generator_of(seed, name), 0.2, 1.5, 0.3
    x = uniform(g, 0.8, 1.8, N_OBS, d)
    model = Likelihood(normal_prior(d, sd, centre), moduli, {"noise": noise})
    precision = 1 / sd**2 + 1 / noise**2
    sign = torch.tensor([1.0, -1.0], dtype=torch.float64)
    loc = (sign * centre / sd**2 + x.unsqueeze(-1) / noise**2) / precision  # of the modulus, for either sign
    start = torch.special.ndtr(-loc * precision**0.5)
    log_mass = (1 - start).log() + 0.5 * precision * loc.square()
    positive = torch.softmax(log_mass, -1)[..., 0]

    def sample(n: int, g: torch.Generator) -> Tensor:
        side = (uniform(g, 0, 1, n, N_OBS, d) > positive).long().unsqueeze(-1)
        at, low = (t.expand(n, *t.shape).gather(-1, side).squeeze(-1) for t in (loc, start))
        modulus = at + torch.special.ndtri(low + (1 - low) * uniform(g, 0, 1, n, N_OBS, d)) / precision**0.5
        return modulus * sign[side.squeeze(-1)]

    return Target(GROUP, name, model, x, sample, product=first_square)


def two_components(x: Tensor, z: Tensor, weight: float, noise: float) -> Tensor:
    """Log-likelihood of a sample from two normals with means z."""
    parts = [math.log(w) - 0.5 * ((x - z[..., i : i + 1]) / noise).square() for i, w in enumerate((weight, 1 - weight))]
    return torch.logaddexp(*parts).sum(-1)


def swap(name: str, seed: int) -> Target:
    """The means of two components of nearly equal weight: two modes, one of them preferred."""
    g, weight = generator_of(seed, name), 0.45
    centre = torch.where(uniform(g, 0, 1, N_OBS, 12) < weight, -1.5, 1.5) + uniform(g, -0.3, 0.3, N_OBS, 1)
    x = centre + 0.7 * normal(g, N_OBS, 12)
    model = Likelihood(normal_prior(2, 2.0), two_components, {"weight": weight, "noise": 0.7})
    return Target(GROUP, name, model, x, box=((-9, 9),) * 2, product=first_square)
