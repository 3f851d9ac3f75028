"""Where randomness comes from: i.i.d. generators, one per stacked member, or a scrambled Sobol net.

A proposal asks a source for base noise and transforms it; it never samples by itself. The same transform therefore
serves plain Monte Carlo, quasi-Monte-Carlo and many seeds trained side by side.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from scipy import special
from torch import Tensor
from torch.quasirandom import SobolEngine

from vaerdict.core import SettingError

_SOBOL_BITS = 30


def seeded(seed: int, device: torch.device | str = "cpu") -> torch.Generator:
    """A generator with its seed set: ``seeded(0)``."""
    return torch.Generator(device=device).manual_seed(seed)


@dataclass(frozen=True)
class Iid:
    """Independent noise. With several generators the first batch axis is the member axis, one generator each."""

    generators: tuple[torch.Generator, ...]

    def normal(self, k: int, batch: Sequence[int], d: int, *, like: Tensor) -> Tensor:
        """Standard normals of shape ``(k, *batch, d)`` with the dtype and device of `like`."""

        def make(shape: Sequence[int], g: torch.Generator) -> Tensor:
            return torch.randn(*shape, d, generator=g, dtype=like.dtype, device=g.device)

        return self._each(k, batch, make, like)

    def uniform(self, k: int, batch: Sequence[int], d: int, *, like: Tensor) -> Tensor:
        """Uniform numbers of [0, 1), shape ``(k, *batch, d)``, with the dtype and device of `like`."""

        def make(shape: Sequence[int], g: torch.Generator) -> Tensor:
            return torch.rand(*shape, d, generator=g, dtype=like.dtype, device=g.device)

        return self._each(k, batch, make, like)

    def normal_gamma(self, k: int, batch: Sequence[int], d: int, concentration: Tensor) -> tuple[Tensor, Tensor]:
        """Standard normals ``(k, *batch, d)`` and standard gammas ``(k, *batch, 1)``, independent of each other.

        `concentration` is a scalar, or one value a member.
        """
        eps = self.normal(k, batch, d, like=concentration)
        alphas = concentration.detach().reshape(-1)
        if len(self.generators) == 1:
            alpha = alphas if alphas.numel() == 1 else alphas.reshape(-1, 1, 1)
            return eps, _standard_gamma(alpha, (k, *batch, 1), self.generators[0])
        per_member = [
            _standard_gamma(alphas[min(i, alphas.numel() - 1)], (k, *batch[1:], 1), g)
            for i, g in enumerate(self.generators)
        ]
        return eps, torch.stack(per_member, 1)

    def _each(self, k: int, batch: Sequence[int], make, like: Tensor) -> Tensor:
        if len(self.generators) == 1:
            return make((k, *batch), self.generators[0]).to(like.device)
        if not batch or batch[0] != len(self.generators):
            raise SettingError(
                f"{len(self.generators)} generators serve a stack of as many members, but the batch is {tuple(batch)}."
            )
        return torch.stack([make((k, *batch[1:]), g) for g in self.generators], 1).to(like.device)


@dataclass(frozen=True)
class Shared(Iid):
    """Independent noise along the particles, the same for every observation.

    Each estimate is as good as by `Iid`, and does not depend on the observations it is asked with; the errors of
    different observations are not independent.
    """

    def normal_gamma(self, k: int, batch: Sequence[int], d: int, concentration: Tensor) -> tuple[Tensor, Tensor]:
        """Standard normals ``(k, *batch, d)`` and standard gammas ``(k, *batch, 1)``, alike along the batch."""
        eps, gamma = super().normal_gamma(k, [1] * len(batch), d, concentration)
        return eps.expand(k, *batch, d), gamma.expand(k, *batch, 1)

    def _each(self, k: int, batch: Sequence[int], make, like: Tensor) -> Tensor:
        one = super()._each(k, [1] * len(batch), make, like)
        return one.expand(k, *batch, one.shape[-1])


def _standard_gamma(alpha: Tensor, shape: Sequence[int], generator: torch.Generator) -> Tensor:
    drawn = torch._standard_gamma(alpha.to(generator.device).expand(shape).contiguous(), generator=generator)
    return drawn.to(alpha.device)


@dataclass(frozen=True)
class Sobol:
    """Scrambled Sobol points, randomised independently for every observation by a digital shift.

    Estimates stay unbiased, and for smooth integrands their error falls almost like 1/k. Counts that are powers of
    two keep the net's balance exactly. The i.i.d. standard errors of `vaerdict.estimators` are
    then usually too large; at small counts that are no power of two they may be too small.
    """

    generator: torch.Generator = field(repr=False)

    def uniform(self, k: int, batch: Sequence[int], d: int, *, like: Tensor) -> Tensor:
        """Points of ``(0, 1)^d``, shape ``(k, *batch, d)``: along k a randomised net, across the batch independent."""
        seed = int(torch.randint(2**31 - 1, (1,), generator=self.generator, device=self.generator.device))
        points = SobolEngine(d, scramble=True, seed=seed).draw(k, dtype=torch.float64)
        # in an order of its own: two nets whose points are paired one by one must not go in step
        points = points[torch.randperm(k, generator=seeded(seed))]
        # the engine keeps its first point in float32, which can round up to 1
        net = (points * 2**_SOBOL_BITS).long().clamp_max(2**_SOBOL_BITS - 1).to(like.device)
        shift = torch.randint(2**_SOBOL_BITS, (*batch, d), generator=self.generator, device=self.generator.device)
        net = net.reshape(k, *(1 for _ in batch), d)
        return (net.bitwise_xor(shift.to(like.device)).double() + 0.5) * 2.0**-_SOBOL_BITS

    def normal(self, k: int, batch: Sequence[int], d: int, *, like: Tensor) -> Tensor:
        """Standard normals of shape ``(k, *batch, d)`` by the inverse distribution function."""
        return torch.special.ndtri(self.uniform(k, batch, d, like=like)).to(like.dtype)

    def normal_gamma(self, k: int, batch: Sequence[int], d: int, concentration: Tensor) -> tuple[Tensor, Tensor]:
        """Normals ``(k, *batch, d)`` and gammas ``(k, *batch, 1)`` from one net of dimension d + 1."""
        u = self.uniform(k, batch, d + 1, like=concentration)
        eps = torch.special.ndtri(u[..., :d]).to(concentration.dtype)
        alpha = concentration.detach().double().cpu()
        alpha = alpha if alpha.numel() == 1 else alpha.reshape(-1, 1, 1)
        gamma = torch.from_numpy(special.gammaincinv(alpha.numpy(), u[..., d:].cpu().numpy()))
        return eps, gamma.to(concentration)


Source = Iid | Sobol
Randomness = torch.Generator | Sequence[torch.Generator] | Iid | Sobol
"""What ``generator=`` accepts: a generator, one per stacked member, or a source."""


def as_source(generator: Randomness) -> Source:
    """The source behind a ``generator=`` argument."""
    if isinstance(generator, (Iid, Sobol)):
        return generator
    if isinstance(generator, torch.Generator):
        return Iid((generator,))
    if isinstance(generator, Sequence) and generator and all(isinstance(g, torch.Generator) for g in generator):
        return Iid(tuple(generator))
    raise SettingError(
        f"generator={generator!r} is no source of randomness; "
        "pass a torch.Generator (vaerdict.noise.seeded(0)) or a Sobol source."
    )
