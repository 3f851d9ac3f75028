"""Sources of base noise: i.i.d. generators, common random numbers, noise keyed by id, and scrambled Sobol nets.

A proposal transforms base noise from a source and never samples by itself. The same transform therefore serves Monte
Carlo, quasi-Monte Carlo and the training of many seeds side by side.
"""

from __future__ import annotations

import copy
import math
import secrets
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import torch
from scipy import special
from torch import Tensor
from torch.quasirandom import SobolEngine

from vaerdict.core import Draws, Observations, Proposal, SettingError, parts_of, rows_of

_SOBOL_BITS = 30


def seeded(seed: int, device: torch.device | str = "cpu") -> torch.Generator:
    """A generator with the given seed."""
    return torch.Generator(device=device).manual_seed(seed)


@dataclass(frozen=True)
class Iid:
    """Independent noise. With several generators, the first batch axis is the member axis, with one generator each."""

    generators: tuple[torch.Generator, ...]

    def normal(self, k: int, batch: Sequence[int], d: int, *, like: Tensor) -> Tensor:
        """Standard normals of shape ``(k, *batch, d)`` with the dtype and device of `like`."""
        return self._sample(torch.randn, k, batch, d, like)

    def uniform(self, k: int, batch: Sequence[int], d: int, *, like: Tensor) -> Tensor:
        """Uniform numbers in [0, 1), shape ``(k, *batch, d)``, with the dtype and device of `like`."""
        return self._sample(torch.rand, k, batch, d, like)

    def normal_gamma(self, k: int, batch: Sequence[int], d: int, concentration: Tensor) -> tuple[Tensor, Tensor]:
        """Standard normals ``(k, *batch, d)`` and standard gammas ``(k, *batch, 1)``, independent of each other.

        `concentration` is a scalar, or holds one value per member.
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

    def _sample(self, fn: Callable[..., Tensor], k: int, batch: Sequence[int], d: int, like: Tensor) -> Tensor:
        def draw(shape: Sequence[int], g: torch.Generator) -> Tensor:
            return fn(k, *shape, d, generator=g, dtype=like.dtype, device=g.device)

        if len(self.generators) == 1:
            return draw(batch, self.generators[0]).to(like.device)
        if not batch or batch[0] != len(self.generators):
            raise SettingError(
                f"{len(self.generators)} generators serve a stack of as many members, but the batch is {tuple(batch)}."
            )
        return torch.stack([draw(batch[1:], g) for g in self.generators], 1).to(like.device)


@dataclass(frozen=True)
class CommonRandomNumbers(Iid):
    """Noise that is independent along the particles and the same for every observation.

    Each estimate is as accurate as with `Iid` and does not depend on the other observations of the batch. The errors
    of different observations are dependent.
    """

    def normal_gamma(self, k: int, batch: Sequence[int], d: int, concentration: Tensor) -> tuple[Tensor, Tensor]:
        """Standard normals ``(k, *batch, d)`` and standard gammas ``(k, *batch, 1)``, equal along the batch."""
        eps, gamma = super().normal_gamma(k, [1] * len(batch), d, concentration)
        return eps.expand(k, *batch, d), gamma.expand(k, *batch, 1)

    def _sample(self, fn: Callable[..., Tensor], k: int, batch: Sequence[int], d: int, like: Tensor) -> Tensor:
        return super()._sample(fn, k, [1] * len(batch), d, like).expand(k, *batch, d)


def _standard_gamma(alpha: Tensor, shape: Sequence[int], generator: torch.Generator) -> Tensor:
    gamma = torch._standard_gamma(alpha.to(generator.device).expand(shape).contiguous(), generator=generator)
    return gamma.to(alpha.device)


def _shifted_net(k: int, d: int, seed: int, shift: Tensor) -> Tensor:
    """A scrambled net, shifted for every observation. Shapes: ``shift (*batch, d) -> (k, *batch, d)``."""
    points = SobolEngine(d, scramble=True, seed=seed).draw(k, dtype=torch.float64)
    # shuffled, because the points of two nets in the engine's order are correlated
    points = points[torch.randperm(k, generator=seeded(seed))]
    # the engine stores its first point in float32, which can round up to 1
    net = (points * 2**_SOBOL_BITS).long().clamp_max(2**_SOBOL_BITS - 1).to(shift.device)
    net = net.reshape(k, *(1 for _ in shift.shape[:-1]), d)
    return (net.bitwise_xor(shift).double() + 0.5) * 2.0**-_SOBOL_BITS


@dataclass(frozen=True)
class Sobol:
    """Scrambled Sobol points, randomised independently for every observation by a digital shift.

    Estimates stay unbiased, and for smooth integrands their error falls almost as 1/k. The net is balanced exactly
    where k is a power of two. The i.i.d. standard errors of `vaerdict.estimators` are then usually too large; for
    small k that is not a power of two they may be too small.
    """

    generator: torch.Generator = field(repr=False)

    def uniform(self, k: int, batch: Sequence[int], d: int, *, like: Tensor) -> Tensor:
        """Points in ``(0, 1)^d``, shape ``(k, *batch, d)``: a randomised net along k, independent across the batch."""
        seed = int(torch.randint(2**31 - 1, (1,), generator=self.generator, device=self.generator.device))
        shift = torch.randint(2**_SOBOL_BITS, (*batch, d), generator=self.generator, device=self.generator.device)
        return _shifted_net(k, d, seed, shift.to(like.device))

    def normal(self, k: int, batch: Sequence[int], d: int, *, like: Tensor) -> Tensor:
        """Standard normals of shape ``(k, *batch, d)`` by the inverse distribution function."""
        return torch.special.ndtri(self.uniform(k, batch, d, like=like)).to(like.dtype)

    def normal_gamma(self, k: int, batch: Sequence[int], d: int, concentration: Tensor) -> tuple[Tensor, Tensor]:
        """Standard normals ``(k, *batch, d)`` and gammas ``(k, *batch, 1)`` from one net of dimension d + 1."""
        u = self.uniform(k, batch, d + 1, like=concentration)
        eps = torch.special.ndtri(u[..., :d]).to(concentration.dtype)
        alpha = concentration.detach().double().cpu()
        alpha = alpha if alpha.numel() == 1 else alpha.reshape(-1, 1, 1)
        gamma = torch.from_numpy(special.gammaincinv(alpha.numpy(), u[..., d:].cpu().numpy()))
        return eps, gamma.to(concentration)


@dataclass(eq=False)
class KeyedNoise:
    """Counter-based noise: the numbers of an id, such as the index of a cell, depend on seed, stream and id alone.

    Number i of an id is a hash (SplitMix64) of (seed, stream, id, i). All numbers are computed at once, on any device,
    and do not depend on which ids are drawn together. Like a generator, the source continues where the last call
    ended, separately for every id.

    Shapes: ``ids (n,)`` of whole numbers, on the device of the noise; a batch must be ``(n,)``.

    Reference: Steele, Lea & Flood (2014), Fast splittable pseudorandom number generators, OOPSLA.
    """

    seed: int
    stream: int
    ids: Tensor = field(repr=False)

    def __post_init__(self) -> None:
        start = _wrapped(_scalar_mix(_scalar_mix(self.seed) + self.stream))
        self.keys = _mix(self.ids.long() * _GOLDEN + start)
        self.used = torch.zeros_like(self.keys)

    @property
    def generator(self) -> torch.Generator:
        """A generator, seeded by the first id, for functions that accept nothing else."""
        return self.generators()[0]

    def generators(self) -> list[torch.Generator]:
        """A generator per id, for distributions that accept nothing else."""
        self.used = self.used + 1
        return [seeded(key % 2**63) for key in _mix(self.keys + self.used * _GOLDEN).tolist()]

    def select(self, index: Tensor) -> KeyedNoise:
        """The source of the ids at `index`, which continues on its own."""
        part = copy.copy(self)
        part.ids, part.keys, part.used = (t[index.to(t.device)] for t in (self.ids, self.keys, self.used))
        return part

    def fork(self, stream: int) -> KeyedNoise:
        """Another source of the same ids, whose numbers are independent of those of this one."""
        part = copy.copy(self)
        part.keys, part.used = _mix(self.keys + _wrapped(_scalar_mix(stream))), torch.zeros_like(self.used)
        return part

    def net(self) -> KeyedSobol:
        """Sobol points that are randomised by this noise."""
        return KeyedSobol(self.generator, noise=self)

    def uniform(self, k: int, batch: Sequence[int], d: int, *, like: Tensor) -> Tensor:
        """Uniform numbers in (0, 1), shape ``(k, n, d)``, with the dtype of `like`."""
        return _unit_interval(self.bits(k, batch, d), like.dtype)

    def normal(self, k: int, batch: Sequence[int], d: int, *, like: Tensor) -> Tensor:
        """Standard normals of shape ``(k, n, d)`` by the Box-Muller transform."""
        u, angle = _halves(self.bits(k, batch, (d + 1) // 2), like.dtype)
        radius, angle = u.log_().mul_(-2).sqrt_(), angle.mul_(2 * math.pi)
        return torch.cat([radius * angle.cos(), radius * angle.sin()], -1)[..., :d]

    def gamma(self, k: int, batch: Sequence[int], concentration: Tensor) -> Tensor:
        """Standard gammas of shape ``(k, n, 1)`` with one concentration."""
        return _gammas(self.bits(k, batch, 1), float(concentration), concentration.dtype)

    def normal_gamma(self, k: int, batch: Sequence[int], d: int, concentration: Tensor) -> tuple[Tensor, Tensor]:
        """Standard normals ``(k, n, d)`` and standard gammas ``(k, n, 1)``, independent of each other."""
        return self.normal(k, batch, d, like=concentration), self.gamma(k, batch, concentration)

    def bits(self, k: int, batch: Sequence[int], d: int) -> Tensor:
        """The next k d random 64-bit integers of each id. Shapes: ``-> (k, n, d)``."""
        if tuple(batch) != tuple(self.ids.shape):
            raise SettingError(f"the noise is keyed by {len(self.ids)} ids, but the batch is {tuple(batch)}.")
        counter = torch.arange(1, k * d + 1, device=self.keys.device).reshape(k, 1, d)
        start = (self.keys + self.used * _GOLDEN).unsqueeze(-1)
        self.used = self.used + k * d
        return _mix(counter * _GOLDEN + start)


@dataclass(frozen=True)
class KeyedSobol(Sobol):
    """Scrambled Sobol points with one net per seed and a digital shift per id (see `Sobol` and `KeyedNoise`)."""

    noise: KeyedNoise = field(kw_only=True)
    calls: list[int] = field(kw_only=True, default_factory=list)  # every call has a net of its own

    def select(self, index: Tensor) -> KeyedSobol:
        """The points of the ids at `index`, which continue on their own."""
        return replace(self, noise=self.noise.select(index), calls=list(self.calls))

    def uniform(self, k: int, batch: Sequence[int], d: int, *, like: Tensor) -> Tensor:
        """Points in ``(0, 1)^d``, shape ``(k, n, d)``."""
        seed = self.noise.seed
        for part in (self.noise.stream, len(self.calls), k, d):
            seed = _scalar_mix(_scalar_mix(seed) + part)
        seed %= 2**31 - 1
        self.calls.append(d)
        shift = self.noise.bits(1, batch, d)[0].bitwise_and_(2**_SOBOL_BITS - 1)
        return _shifted_net(k, d, seed, shift.to(like.device))


def _wrapped(value: int) -> int:
    """The low 64 bits as a signed integer, as torch stores them."""
    return (value + 2**63) % 2**64 - 2**63


_GOLDEN, _FIRST, _SECOND = (_wrapped(c) for c in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))


def _mix(bits: Tensor) -> Tensor:
    """The finaliser of SplitMix64, in place: every output bit depends on every input bit."""
    for shift, factor in ((30, _FIRST), (27, _SECOND)):
        bits.bitwise_xor_((bits >> shift).bitwise_and_((1 << (64 - shift)) - 1)).mul_(factor)
    return bits.bitwise_xor_((bits >> 31).bitwise_and_((1 << 33) - 1))


def _scalar_mix(value: int) -> int:
    return int(_mix(torch.tensor([_wrapped(value)]))[0])


def _halves(bits: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Two uniform numbers in (0, 1] from the high and the low 32 bits."""
    high, low = (bits >> 32) & 0xFFFFFFFF, bits & 0xFFFFFFFF
    return tuple(half.to(dtype).add_(0.5).mul_(2.0**-32) for half in (high, low))  # type: ignore[return-value]


def _unit_interval(bits: Tensor, dtype: torch.dtype) -> Tensor:
    """Uniform numbers in (0, 1) with the resolution of the dtype."""
    n = 52 if dtype == torch.float64 else 23  # one less than the mantissa, so that adding one half is exact
    return ((bits >> (64 - n)) & ((1 << n) - 1)).to(dtype).add_(0.5).mul_(2.0**-n)


def _gammas(bits: Tensor, concentration: float, dtype: torch.dtype) -> Tensor:
    r"""One standard gamma per 64-bit integer, which is the key of its sequence of proposals.

    The rejection sampler of Marsaglia & Tsang (2000), A simple method for generating gamma variables; it rejects at
    most one proposal in twenty. Concentrations below one use :math:`G_a = G_{a+1} U^{1/a}`.
    """
    keys = bits.flatten()
    d = (concentration if concentration >= 1 else concentration + 1) - 1 / 3
    out, pending, attempt = torch.empty(len(keys), dtype=dtype, device=keys.device), keys, 0
    index = torch.arange(len(keys), device=keys.device)
    while len(pending):
        u, angle = _halves(_mix(pending + _wrapped((2 * attempt + 1) * _GOLDEN)), dtype)
        x = u.log_().mul_(-2).sqrt_().mul_(angle.mul_(2 * math.pi).cos_())
        v = (1 + x / math.sqrt(9 * d)) ** 3
        log_u = _unit_interval(_mix(pending + _wrapped((2 * attempt + 2) * _GOLDEN)), dtype).log_()
        accept = (v > 0) & (log_u < 0.5 * x.square() + d * (1 - v + v.clamp_min(torch.finfo(dtype).tiny).log()))
        out[index[accept]] = d * v[accept]
        pending, index, attempt = pending[~accept], index[~accept], attempt + 1
    if concentration < 1:
        out *= _unit_interval(_mix(keys ^ _SECOND), dtype) ** (1 / concentration)
    return out.reshape(bits.shape)


def fresh_seed() -> int:
    """A seed that differs from call to call."""
    return secrets.randbits(62)


def row_keys(x: Observations) -> Tensor:
    """A whole number per observation that depends on its values; equal observations get different ones in order.

    The number does not depend on the position of an observation or on the others, except those equal to it.

    Shapes: ``-> (n,)``.
    """
    total: Tensor | None = None
    for i, part in enumerate(parts_of(x)):
        flat = part.detach().reshape(len(part), -1)
        bits = flat.double().view(torch.long) if flat.is_floating_point() else flat.long()
        position = torch.arange(1, bits.shape[1] + 1, device=bits.device) * _GOLDEN + _scalar_mix(i)
        # in blocks, because the hash takes eight bytes for each number of x
        sums = [_mix(_mix(b * _FIRST) + position).sum(1) for b in bits.split(max(1, 2**22 // bits.shape[1]))]
        key = torch.cat(sums)
        total = key if total is None else _mix(total + key.to(total.device))
    assert total is not None
    return _mix(total + _occurrence(total) * _GOLDEN)


def _occurrence(keys: Tensor) -> Tensor:
    """How many equal entries come before each. Shapes: ``(n,) -> (n,)``."""
    values, order = keys.sort(stable=True)
    position = torch.arange(len(keys), device=keys.device)
    first = torch.cat([position.new_ones(1, dtype=torch.bool), values[1:] != values[:-1]])
    start = torch.where(first, position, 0).cummax(0).values
    return torch.empty_like(position).index_copy_(0, order, position - start)


Source = Iid | Sobol | KeyedNoise
Randomness = torch.Generator | Sequence[torch.Generator] | Iid | Sobol | KeyedNoise
"""What ``generator=`` accepts: a generator, one per stacked member, or a source."""


def source_at(source: Randomness, index: Tensor) -> Randomness:
    """The noise of the observations at `index`; keyed noise then continues on its own."""
    return source.select(index) if isinstance(source, (KeyedNoise, KeyedSobol)) else source


def side_stream(source: Randomness, stream: int) -> Randomness:
    """Noise that leaves the numbers of keyed noise unused; other sources are returned as they are."""
    return source.fork(stream) if isinstance(source, KeyedNoise) else source


def sources_joined(sources: Sequence[Source], order: Tensor) -> Source:
    """The sources of several groups of observations as one, in a given order."""
    first = sources[0]
    if isinstance(first, KeyedNoise):
        first = copy.copy(first)
        for name in ("ids", "keys", "used"):
            setattr(first, name, torch.cat([getattr(source, name) for source in sources])[order])
    return first


@contextmanager
def noise_of(source: Randomness, index: Tensor) -> Iterator[Randomness]:
    """The noise of the observations at `index`; at the end their numbers are used up in `source` too."""
    part = source_at(source, index)
    yield part
    for whole, used in _keyed(source, part):
        whole.used[index.to(whole.used.device)] = used


def _keyed(source: Randomness, part: Randomness) -> Iterator[tuple[KeyedNoise, Tensor]]:
    """Keyed noise with the counters of a part of it; nothing for other sources."""
    if isinstance(source, KeyedNoise) and isinstance(part, KeyedNoise):
        yield source, part.used
    elif isinstance(source, KeyedSobol) and isinstance(part, KeyedSobol):
        yield source.noise, part.noise.used


def draws_of(q: Proposal, x: Observations, k: int, generator: Randomness) -> Draws:
    """Draw k particles of a proposal, which may be the user's and accept a ``torch.Generator`` only.

    Such a proposal gets one generator for all observations, so that its draws depend on which are asked together.
    """
    if isinstance(generator, torch.Generator):
        return q.draw(x, k, generator=generator)
    try:
        return q.draw(x, k, generator=generator)
    except (TypeError, AttributeError) as error:
        if not any(name in str(error) for name in ("Generator", "KeyedNoise", "Sobol", "Iid")):
            raise
    source = as_source(generator)
    return q.draw(x, k, generator=source.generators[0] if isinstance(source, Iid) else source.generator)


def sampled(draw: Callable[[Observations], Tensor], x: Observations, source: Source) -> Tensor:
    """What a function that uses torch's global random state draws for x, seeded by a source.

    With keyed noise each observation is drawn on its own, from its own generator.

    Shapes: ``draw: (n, ...) -> (K, n, d)``.
    """
    keyed = source if isinstance(source, KeyedNoise) else getattr(source, "noise", None)
    if keyed is None:
        with global_state_from(source.generators[0] if isinstance(source, Iid) else source.generator):
            return draw(x)
    draws = []
    for i, generator in enumerate(keyed.generators()):
        with global_state_from(generator):
            draws.append(draw(rows_of(x, slice(i, i + 1))))
    return torch.cat(draws, 1)


def as_source(generator: Randomness) -> Source:
    """The source behind a ``generator=`` argument."""
    if isinstance(generator, (Iid, Sobol, KeyedNoise)):
        return generator
    if isinstance(generator, torch.Generator):
        return Iid((generator,))
    if isinstance(generator, Sequence) and generator and all(isinstance(g, torch.Generator) for g in generator):
        return Iid(tuple(generator))
    raise SettingError(
        f"generator={generator!r} is not a source of randomness; "
        "pass a torch.Generator (vaerdict.noise.seeded(0)) or a Sobol source."
    )


@contextmanager
def global_state_from(generator: torch.Generator) -> Iterator[None]:
    """Seed torch's global random state from a generator, for code that uses nothing else, and restore it at the end."""
    seed = int(torch.randint(2**31, (1,), generator=generator, device=generator.device))
    devices = list(range(torch.cuda.device_count())) if torch.cuda.is_initialized() else []
    with torch.random.fork_rng(devices=devices):
        # torch.manual_seed would also seed devices that are not forked, which are not restored
        torch.default_generator.manual_seed(seed)
        if devices:
            torch.cuda.manual_seed_all(seed)
        yield
