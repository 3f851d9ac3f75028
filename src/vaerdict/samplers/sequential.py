"""Adaptive sequential Monte Carlo from a start to the posterior, each observation at its own pace."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from vaerdict.core import (
    DivergenceError,
    Model,
    Progress,
    Proposal,
    SettingError,
    check_count,
    check_log_weights,
    log_mean_exp,
    silent,
)
from vaerdict.noise import Randomness, Source, as_source
from vaerdict.samplers.hmc import adapted, transition
from vaerdict.samplers.memory import chunks
from vaerdict.samplers.path import Path, State, check_batch
from vaerdict.samplers.resampling import covariance_root, gathered, next_temperature, relative_ess, systematic
from vaerdict.samplers.results import beside, by_island, log_standard_error

_TARGET_ACCEPTANCE = 0.8
_GAIN = 2.0
_RESAMPLE_BELOW = 0.9
_MOST_TEMPERATURES = 1000


class Settings(NamedTuple):
    """How the population is moved; see `smc`."""

    n_islands: int
    ess_target: float
    n_leapfrog: int
    n_moves: int


@dataclass(frozen=True)
class SMCResult:
    """Weighted particles of the posterior, whose mean weight estimates the evidence.

    Particle i belongs to island i modulo ``n_islands``; islands share temperatures and step sizes, not particles.

    Shapes: ``z (N, *batch, d)``, ``log_w (N, *batch)``; mean ``acceptance``, last ``step_size``, ``n_temperatures``,
    ``n_nonfinite`` rejected proposals and ``n_gradients`` spent ``(*batch)``.
    """

    z: Tensor
    log_w: Tensor
    acceptance: Tensor
    step_size: Tensor
    n_temperatures: Tensor
    n_nonfinite: Tensor
    n_gradients: Tensor
    n_islands: int

    @property
    def log_evidence(self) -> Tensor:
        """Estimate of log p(x). Shapes: ``-> (*batch)``."""
        return log_mean_exp(self.log_w)

    @property
    def standard_error(self) -> Tensor:
        """Standard error of `log_evidence`, from the spread of the islands' evidences. Shapes: ``-> (*batch)``."""
        return log_standard_error(log_mean_exp(by_island(self.log_w, self.n_islands)))


@torch.no_grad()
def smc(
    model: Model,
    x: Tensor,
    initial: Proposal,
    *,
    n_particles: int = 1024,
    n_islands: int = 16,
    ess_target: float = 0.7,
    n_leapfrog: int = 3,
    n_moves: int = 1,
    strict: bool = True,
    generator: Randomness,
    progress: Progress = silent,
    max_bytes: int | None = None,
) -> SMCResult:
    r"""Carry a population from `initial` to the posterior through temperatures found on the way.

    Each observation takes the step in temperature that keeps a share `ess_target` of its effective sample, resamples
    (systematically, within an island, below nine tenths), and moves all particles by Hamiltonian dynamics in the metric
    of their weighted covariance. Whitened so, a path of length :math:`\pi/2` makes a particle forget where it was; the
    step size starts there and shrinks when fewer than 80 % are accepted. An observation that has arrived at the
    posterior stops costing. One that is left without a usable weight, or has not arrived after 1000 temperatures,
    raises an error; unless `strict`, it is given up with weights NaN, and the others go on.

    Temperatures, metric and step sizes are tuned on the population itself, which biases the evidence by O(1/N) (Beskos
    et al., 2016); the standard error comes from islands that resample apart. The result repeats for the same seed and
    the same cut into chunks by `max_bytes` (None: see `memory.default_budget`).

    Shapes: ``x (*batch, p)``. Reference: Del Moral, Doucet & Jasra (2006); Dai et al. (2022).
    """
    settings = _checked(Settings(n_islands, ess_target, n_leapfrog, n_moves), n_particles)
    path, source, done, results = Path(model, initial, check_batch(x)), as_source(generator), 0, []
    for part in chunks(path, n_particles, generator=generator, max_bytes=max_bytes):
        population = _start(part, n_particles, settings, generator)
        finished: list[_Population] = []
        while population.index.numel():
            _reweigh(population, settings)
            lost = _lost(population, settings, strict)
            if lost.any():
                finished.append(population.select(lost).given_up())
                population = population.select(~lost)
            _move(population, settings, source)
            arrived = ~_anywhere(population.t < 1)
            if arrived.any():
                finished.append(population.select(arrived))
                population = population.select(~arrived)
                progress(done + part.x.shape[-2] - population.index.numel(), x.shape[-2], "SMC")
        done += part.x.shape[-2]
        results.append(_in_order(finished, settings))
    return beside(results)


def _checked(settings: Settings, n_particles: int) -> Settings:
    for name in ("n_islands", "n_leapfrog", "n_moves"):
        check_count(getattr(settings, name), name=name)
    if not 0 < settings.ess_target < 1:
        raise SettingError(f"ess_target={settings.ess_target} is a share of the particles, between 0 and 1.")
    if settings.n_islands % 2:
        raise SettingError(f"n_islands={settings.n_islands} must be even: the two halves set each other's metric.")
    size, rest = divmod(check_count(n_particles, name="n_particles"), settings.n_islands)
    if rest or size < 2:
        fitting = max(2, size) * settings.n_islands
        raise SettingError(
            f"n_particles={n_particles} cannot be split over {settings.n_islands} islands of equal size, at least two "
            f"each; use n_particles={fitting}."
        )
    return settings


@dataclass
class _Population:
    """Observations on their way, with all that is known of each. Shapes: counters and ``t, step (*batch)``."""

    path: Path
    index: Tensor
    state: State
    log_w: Tensor
    t: Tensor
    step: Tensor
    acceptance: Tensor
    n_moves: Tensor
    n_nonfinite: Tensor

    def select(self, keep: Tensor) -> _Population:
        """The observations where `keep` is true."""
        at = keep.nonzero().squeeze(-1)
        state = State(*(a.index_select(self.t.dim(), at) for a in self.state))
        rest = {name: getattr(self, name).index_select(-1, at) for name in _PER_OBSERVATION}
        return _Population(self.path.select(at), state=state, **rest)

    def given_up(self) -> _Population:
        """The same without weights."""
        return replace(self, log_w=torch.full_like(self.log_w, torch.nan))


_PER_OBSERVATION = ("index", "log_w", "t", "step", "acceptance", "n_moves", "n_nonfinite")


def _start(path: Path, n_particles: int, settings: Settings, generator: Randomness) -> _Population:
    z, log_q = path.draw(n_particles, generator=generator)
    state = path.evaluate(z)
    # zero, but for starts whose draws were stratified: they carry the shares that were realised
    log_w = state.log_q.double() - log_q.double()
    zero = torch.zeros_like(log_w[0])
    index = torch.arange(path.x.shape[-2], device=z.device)
    count = torch.zeros_like(zero, dtype=torch.long)
    return _Population(path, index, state, log_w, zero, zero + _longest_step(settings), zero, count, count)


def _longest_step(settings: Settings) -> float:
    """A quarter of a period of the whitened dynamics in `n_leapfrog` steps: beyond it, particles turn back."""
    return 0.5 * math.pi / settings.n_leapfrog


def _reweigh(population: _Population, settings: Settings) -> None:
    """Take every observation to its next temperature."""
    p = population
    t = next_temperature(p.state, p.log_w, p.t, settings.ess_target)
    p.log_w, p.t = p.log_w + p.state.log_increment(p.t, t), t


def _lost(population: _Population, settings: Settings, strict: bool) -> Tensor:
    """Observations that cannot go on: no usable weight, or no temperature left; if `strict`, raises. Shapes: ``(n,)``.

    Along other batch axes one is enough: an observation is worked on as a whole.
    """
    p = population
    late = (p.n_moves >= _MOST_TEMPERATURES * settings.n_moves) & (p.t < 1)
    if strict:
        check_log_weights(p.log_w)
    if strict and bool(late.any()):
        raise DivergenceError(
            f"{int(late.sum())} observations did not reach the posterior within {_MOST_TEMPERATURES} temperatures; "
            f"the smallest stands at {p.t.min().item():.3g}. Start nearer to the posterior, or lower ess_target."
        )
    return _anywhere(late | ~p.log_w.amax(0).isfinite())


def _anywhere(mask: Tensor) -> Tensor:
    """The observations at which a mask holds on any other batch axis. Shapes: ``(*batch) -> (n,)``."""
    return mask.reshape(mask.shape[:-1].numel(), mask.shape[-1]).any(0)


def _move(population: _Population, settings: Settings, source: Source) -> None:
    """Make every population fit its temperature: resample, move, tune."""
    p = population
    if not p.index.numel():
        return
    root = _crossed_roots(p.state.z, p.log_w)
    _resample(p, settings, source)
    for _ in range(settings.n_moves):
        move = transition(p.path, p.state, p.t, p.step, n_leapfrog=settings.n_leapfrog, source=source, root=root)
        p.state, p.n_moves = move.state, p.n_moves + 1
        p.acceptance, p.n_nonfinite = p.acceptance + move.acceptance.mean(0), p.n_nonfinite + move.n_nonfinite
        step = adapted(p.step, move.acceptance, target=_TARGET_ACCEPTANCE, gain=_GAIN)
        p.step = step.clamp_max(_longest_step(settings))


def _crossed_roots(z: Tensor, log_w: Tensor) -> Tensor:
    """Covariance roots for even and odd particles, each taken from the others.

    A particle that shaped its own metric would be moved by a kernel that depends on it: at N = 512 and d = 6 that alone
    biased the log-evidence by a quarter of its standard error. Islands are all even or all odd.

    Shapes: ``-> (2, *batch, d, d)``.
    """
    return covariance_root(z.unflatten(0, (-1, 2)), log_w.unflatten(0, (-1, 2))).flip(0)


def _resample(population: _Population, settings: Settings, source: Source) -> None:
    """Resample the islands that need it; their particles then share the island's mean weight."""
    p, shape = population, population.log_w.shape
    log_w = by_island(p.log_w, settings.n_islands)
    needed = relative_ess(log_w) < _RESAMPLE_BELOW
    offset = torch.special.ndtr(source.normal(settings.n_islands, p.t.shape, 1, like=p.log_w).squeeze(-1))
    stay = torch.arange(log_w.shape[0], device=log_w.device).reshape(-1, *(1,) * (log_w.dim() - 1))
    ancestors = torch.where(needed, systematic(log_w, offset), stay)
    island = torch.arange(settings.n_islands, device=log_w.device).reshape(-1, *(1,) * (log_w.dim() - 2))
    p.state = gathered(p.state, (ancestors * settings.n_islands + island).reshape(shape))
    p.log_w = torch.where(needed, log_mean_exp(log_w), log_w).reshape(shape)


def _in_order(finished: list[_Population], settings: Settings) -> SMCResult:
    """The result of a chunk, its observations back in their order."""
    order = torch.cat([p.index for p in finished]).argsort()

    def column(name: str) -> Tensor:
        return torch.cat([getattr(p, name) for p in finished], -1).index_select(-1, order)

    z, log_w, n_moves = torch.cat([p.state.z for p in finished], -2), column("log_w"), column("n_moves")
    return SMCResult(
        z=z.index_select(-2, order),
        log_w=log_w,
        acceptance=column("acceptance") / n_moves,
        step_size=column("step"),
        n_temperatures=n_moves // settings.n_moves,
        n_nonfinite=column("n_nonfinite"),
        n_gradients=log_w.shape[0] * (1 + n_moves * settings.n_leapfrog),
        n_islands=settings.n_islands,
    )
