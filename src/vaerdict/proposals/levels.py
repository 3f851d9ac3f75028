"""Proposals for several latents, level by level: each is given those before it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from vaerdict.core import SettingError, floating
from vaerdict.distributions import Noise
from vaerdict.noise import Source
from vaerdict.proposals.families import Family, Trainable


@dataclass(frozen=True)
class Levels:
    r"""Proposals :math:`q(a \mid x)\,q(b \mid a, x) \cdots`, each level of one family; the latent is their vector.

    Parameters
    ----------
    sizes
        The number of latents of each level, in the order of a `vaerdict.JointPrior`.
    family
        The family of every level.
    """

    sizes: tuple[int, ...]
    family: Family

    @property
    def suffix(self) -> str:
        """The suffix of the family."""
        return self.family.suffix

    def make(self, x: Tensor, d: int, *, hidden: Sequence[int], generator: torch.Generator) -> LevelsProposal:
        """Create an untrained proposal; see `Family.make`."""
        if d != sum(self.sizes):
            raise SettingError(f"levels of {', '.join(map(str, self.sizes))} latents are not {d} latents in all.")
        x, levels = floating(x), []
        for i, size in enumerate(self.sizes):
            given = torch.cat([x, x.new_zeros(*x.shape[:-1], sum(self.sizes[:i]))], -1)
            levels.append(self.family.make(given, size, hidden=hidden, generator=generator))
        return LevelsProposal(levels, self.sizes)


class LevelsProposal(Trainable):
    """Networks for each level; see `Levels`."""

    def __init__(self, levels: Sequence[Trainable], sizes: tuple[int, ...]) -> None:
        super().__init__()
        self.map, self.sizes = _Map(levels), sizes

    def forward(self, x: Tensor) -> LevelsConditional:
        """The distribution of latents given x."""
        return LevelsConditional(self, floating(x))


class _Map(nn.Module):
    """All levels, evaluated inside `forward`, where `functional_call` can replace their parameters."""

    def __init__(self, levels: Sequence[Trainable]) -> None:
        super().__init__()
        self.levels = nn.ModuleList(levels)

    def forward(self, x: Tensor, values: Sequence[Any], draw: bool) -> tuple[Tensor, Tensor]:
        """Latents from noise, or their log-density. Shapes: ``x (*batch, p) -> (K, *batch, d), (K, *batch)``."""
        latents: list[Tensor] = []
        log_q: Tensor | None = None
        for level, value in zip(self.levels, values, strict=True):
            if not latents:
                q = level(x)
                z = q.transform(value) if draw else value
                term = q.log_prob(z)
            else:
                q = level(_given(x, latents))  # one distribution per particle, with one particle each
                z = q.transform(_one_particle(value))[0] if draw else value
                term = q.log_prob(z.unsqueeze(0))[0]
            latents.append(z)
            log_q = term if log_q is None else log_q + term
        assert log_q is not None
        return torch.cat(latents, -1), log_q


def _one_particle(noise: Noise) -> Noise:
    return Noise(noise.normal.unsqueeze(0), None if noise.gamma is None else noise.gamma.unsqueeze(0))


def _given(x: Tensor, latents: list[Tensor]) -> Tensor:
    return torch.cat([x.expand(*latents[0].shape[:-1], x.shape[-1]), *latents], -1)


@dataclass(frozen=True, eq=False)
class LevelsConditional:
    """Levels conditioned on observations; if `stopped`, they are evaluated with detached parameters."""

    owner: LevelsProposal
    x: Tensor
    stopped: bool = False

    def noise(self, k: int, source: Source) -> tuple[Noise, ...]:
        """Base noise for k particles of each observation, for every level."""
        sizes, x = self.owner.sizes, self.x
        padded = (torch.cat([x, x.new_zeros(*x.shape[:-1], sum(sizes[:i]))], -1) for i in range(len(sizes)))
        return tuple(level.noise(p, k, source) for level, p in zip(self.owner.map.levels, padded, strict=True))  # type: ignore[operator]

    def transform(self, noise: tuple[Noise, ...]) -> Tensor:
        """Particles from base noise. Shapes: ``-> (K, *batch, d)``."""
        return self._evaluate(noise, draw=True)[0]

    def log_prob(self, z: Tensor) -> Tensor:
        """Log-density at z. Shapes: ``(K, *batch, d) -> (K, *batch)``."""
        return self._evaluate(z.split(list(self.owner.sizes), -1), draw=False)[1]

    def detach(self) -> LevelsConditional:
        """The same distribution with no gradient in its parameters."""
        return LevelsConditional(self.owner, self.x, stopped=True)

    def _evaluate(self, values: Sequence[Any], *, draw: bool) -> tuple[Tensor, Tensor]:
        levels = self.owner.map
        parameters = {name: p.detach() if self.stopped else p for name, p in levels.named_parameters()}
        return functional_call(levels, parameters, (self.x, values, draw))
