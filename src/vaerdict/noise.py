"""Where randomness comes from: i.i.d. generators, one per stacked member, a counter per unit, or a scrambled Sobol net.

A proposal asks a source for base noise and transforms it; it never samples by itself. The same transform therefore
serves plain Monte Carlo, quasi-Monte-Carlo and many seeds trained side by side.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
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


@dataclass(eq=False)
class PerUnit:
    """Noise of units, such as cells, that depends on the seed, the stream and the unit alone.

    A generator for each unit would do the same, one call at a time. Here number i of a unit is a hash of (seed, stream,
    unit, i), so that all are made at once, on any device, and alike whichever units are asked together. The hash is
    SplitMix64, with a key of its own for each unit. Like a generator it goes on where the last call ended.

    Shapes: ``units (n,)`` of whole numbers, on the device of the noise; a batch must be ``(n,)``.

    Reference: Steele, Lea & Flood (2014), Fast splittable pseudorandom number generators, OOPSLA.
    """

    seed: int
    stream: int
    units: Tensor = field(repr=False)
    used: int = field(default=0, init=False, repr=False)

    def __post_init__(self) -> None:
        start = _wrapped(_scalar_mix(_scalar_mix(self.seed) + self.stream))
        self.keys = _mix(self.units.long() * _GOLDEN + start)

    @property
    def generator(self) -> torch.Generator:
        """A generator for what only knows those, seeded by the first unit; of several units it serves all."""
        self.used += 1
        return seeded(int(_mix(self.keys[:1] + _wrapped(self.used * _GOLDEN))[0]) % 2**63)

    def uniform(self, k: int, batch: Sequence[int], d: int, *, like: Tensor) -> Tensor:
        """Uniform numbers of (0, 1), shape ``(k, n, d)``, with the dtype of `like`."""
        return _unit_interval(self._words(k, batch, d), like.dtype)

    def normal(self, k: int, batch: Sequence[int], d: int, *, like: Tensor) -> Tensor:
        """Standard normals of shape ``(k, n, d)``, two from each number by the method of Box and Muller."""
        pairs = self._words(k, batch, (d + 1) // 2)
        u, angle = _halves(pairs, like.dtype)
        radius, angle = u.log_().mul_(-2).sqrt_(), angle.mul_(2 * math.pi)
        return torch.cat([radius * angle.cos(), radius * angle.sin()], -1)[..., :d]

    def gamma(self, k: int, batch: Sequence[int], concentration: Tensor) -> Tensor:
        """Standard gammas of shape ``(k, n, 1)``, all of one concentration."""
        return _gammas(self._words(k, batch, 1), float(concentration), concentration.dtype)

    def normal_gamma(self, k: int, batch: Sequence[int], d: int, concentration: Tensor) -> tuple[Tensor, Tensor]:
        """Standard normals ``(k, n, d)`` and standard gammas ``(k, n, 1)``, independent of each other."""
        return self.normal(k, batch, d, like=concentration), self.gamma(k, batch, concentration)

    def _words(self, k: int, batch: Sequence[int], d: int) -> Tensor:
        """The next k d numbers of 64 bits of each unit. Shapes: ``-> (k, n, d)``."""
        if tuple(batch) != tuple(self.units.shape):
            raise SettingError(f"noise of {len(self.units)} units was asked for a batch {tuple(batch)}; ask for these.")
        counter = torch.arange(self.used + 1, self.used + k * d + 1, device=self.keys.device).reshape(k, 1, d)
        self.used += k * d
        return _mix(counter * _GOLDEN + self.keys[:, None])


def _wrapped(word: int) -> int:
    """The low 64 bits, as a signed number: what torch's integers hold."""
    return (word + 2**63) % 2**64 - 2**63


_GOLDEN, _FIRST, _SECOND = (_wrapped(c) for c in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))


def _mix(words: Tensor) -> Tensor:
    """SplitMix64's finaliser, in place: every bit of the answer depends on every bit of the word."""
    for shift, factor in ((30, _FIRST), (27, _SECOND)):
        words.bitwise_xor_((words >> shift).bitwise_and_((1 << (64 - shift)) - 1)).mul_(factor)
    return words.bitwise_xor_((words >> 31).bitwise_and_((1 << 33) - 1))


def _scalar_mix(word: int) -> int:
    return int(_mix(torch.tensor([_wrapped(word)]))[0])


def _halves(words: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Two uniform numbers of (0, 1] from the high and the low 32 bits."""
    high, low = (words >> 32) & 0xFFFFFFFF, words & 0xFFFFFFFF
    return tuple(half.to(dtype).add_(0.5).mul_(2.0**-32) for half in (high, low))  # type: ignore[return-value]


def _unit_interval(words: Tensor, dtype: torch.dtype) -> Tensor:
    """Uniform numbers of (0, 1), as fine as the dtype allows."""
    bits = 52 if dtype == torch.float64 else 23  # one less than the mantissa, so that the half is not rounded away
    return ((words >> (64 - bits)) & ((1 << bits) - 1)).to(dtype).add_(0.5).mul_(2.0**-bits)


def _gammas(words: Tensor, concentration: float, dtype: torch.dtype) -> Tensor:
    r"""A standard gamma from each word, which is the key of its own sequence of attempts.

    Marsaglia and Tsang's rejection, refused once in twenty or less; below one by
    :math:`G_a = G_{a+1} U^{1/a}`. Reference: Marsaglia & Tsang (2000), A simple method for generating gamma variables.
    """
    keys = words.flatten()
    d = (concentration if concentration >= 1 else concentration + 1) - 1 / 3
    out, left, attempt = torch.empty(len(keys), dtype=dtype, device=keys.device), keys, 0
    place = torch.arange(len(keys), device=keys.device)
    while len(left):
        u, angle = _halves(_mix(left + _wrapped((2 * attempt + 1) * _GOLDEN)), dtype)
        x = u.log_().mul_(-2).sqrt_().mul_(angle.mul_(2 * math.pi).cos_())
        v = (1 + x / math.sqrt(9 * d)) ** 3
        test = _unit_interval(_mix(left + _wrapped((2 * attempt + 2) * _GOLDEN)), dtype).log_()
        ok = (v > 0) & (test < 0.5 * x.square() + d * (1 - v + v.clamp_min(torch.finfo(dtype).tiny).log()))
        out[place[ok]] = d * v[ok]
        left, place, attempt = left[~ok], place[~ok], attempt + 1
    if concentration < 1:
        out *= _unit_interval(_mix(keys ^ _SECOND), dtype) ** (1 / concentration)
    return out.reshape(words.shape)


Source = Iid | Sobol | PerUnit
Randomness = torch.Generator | Sequence[torch.Generator] | Iid | Sobol | PerUnit
"""What ``generator=`` accepts: a generator, one per stacked member, or a source."""


def as_source(generator: Randomness) -> Source:
    """The source behind a ``generator=`` argument."""
    if isinstance(generator, (Iid, Sobol, PerUnit)):
        return generator
    if isinstance(generator, torch.Generator):
        return Iid((generator,))
    if isinstance(generator, Sequence) and generator and all(isinstance(g, torch.Generator) for g in generator):
        return Iid(tuple(generator))
    raise SettingError(
        f"generator={generator!r} is no source of randomness; "
        "pass a torch.Generator (vaerdict.noise.seeded(0)) or a Sobol source."
    )


@contextmanager
def global_state_from(generator: torch.Generator) -> Iterator[None]:
    """Let code that only knows torch's global random state draw from a generator: fork, seed, restore."""
    seed = int(torch.randint(2**31, (1,), generator=generator, device=generator.device))
    devices = list(range(torch.cuda.device_count())) if torch.cuda.is_initialized() else []
    with torch.random.fork_rng(devices=devices):
        # torch.manual_seed would also seed devices that are not forked, and never restore them
        torch.default_generator.manual_seed(seed)
        if devices:
            torch.cuda.manual_seed_all(seed)
        yield
