"""Adaptive sequential Monte Carlo along an annealing path, with separate temperatures for each observation."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
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
from vaerdict.noise import Randomness, Source, as_source, side_stream, source_at, sources_joined
from vaerdict.samplers.chunks import chunks, concat_results
from vaerdict.samplers.hmc import adapted, transition
from vaerdict.samplers.tempering import AnnealingPath, PathState, check_batch
from vaerdict.samplers.weights import (
    by_island,
    covariance_root,
    gathered,
    largest_correlation,
    log_standard_error,
    next_temperature,
    relative_ess,
    systematic,
)

_DECORRELATED = 0.5
_TARGET_ACCEPTANCE = 0.8
_GAIN = 2.0
_RESAMPLE_BELOW = 0.9
_MAX_TEMPERATURES = 1000


class _Settings(NamedTuple):
    """Settings of the moves; see `smc`."""

    n_islands: int
    ess_target: float
    n_leapfrog: int
    max_moves: int
    keep: tuple[float, ...]


@dataclass(frozen=True)
class SMCResult:
    """Weighted posterior particles, whose mean weight estimates the evidence.

    Particle i belongs to island i modulo ``n_islands``; islands share temperatures and step sizes, but not particles.

    ``decorrelated`` is the share of temperatures at which the moves made the particles forget where they were. A low
    share means that the moves failed to explore: islands then share their error, and the standard error is too small.
    Well separated modes lower the share too, because no move crosses between them. ``tempered`` holds equally weighted
    particles at the temperatures that were asked for, and NaN where an observation failed before it reached one.

    Shapes: ``z (N, *batch, d)``, ``log_w (N, *batch)``, ``tempered (temperatures, N, *batch, d)``; mean ``acceptance``,
    ``decorrelated``, last ``step_size``, ``n_temperatures``, ``n_nonfinite`` rejected proposals and ``n_gradients``
    used ``(*batch)``.
    """

    z: Tensor
    log_w: Tensor
    tempered: Tensor
    acceptance: Tensor
    decorrelated: Tensor
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
        """Standard error of `log_evidence` from the spread over islands. Shapes: ``-> (*batch)``."""
        return log_standard_error(log_mean_exp(by_island(self.log_w, self.n_islands)))


@torch.no_grad()
def smc(
    model: Model,
    x: Tensor,
    initial: Proposal,
    *,
    n_particles: int = 1024,
    n_islands: int = 16,
    ess_target: float = 0.8,
    n_leapfrog: int = 6,
    max_moves: int = 4,
    keep: Sequence[float] = (),
    strict: bool = True,
    generator: Randomness,
    progress: Progress = silent,
    max_bytes: int | None = None,
) -> SMCResult:
    r"""Move a population of particles from `initial` to the posterior along adaptive temperatures.

    Each observation takes the step in temperature that keeps a fraction `ess_target` of its effective sample size,
    resamples systematically the islands whose relative effective size is below 0.9, and moves all particles by
    Hamiltonian dynamics in the metric of their weighted covariance. In whitened coordinates a trajectory of length
    :math:`\pi/2` makes a particle independent of its start where the density is normal. The step size is such that a
    trajectory has that length, or shorter so that the acceptance stays near 80 %.

    Along a curved posterior one trajectory is not enough. Moves are therefore repeated until the particles have
    decorrelated from their positions after resampling: until no whitened coordinate has a correlation above 0.5.
    Observations that have decorrelated or reached the posterior cost nothing further.

    Temperatures, metric and step sizes are tuned on the population itself, which biases the evidence by O(1/N) (Beskos
    et al., 2016). The standard error comes from islands that resample separately.

    Parameters
    ----------
    model
        The joint density.
    x
        Observations. Shapes: ``(*batch, p)``.
    initial
        Proposal at which the particles start.
    n_particles, n_islands
        Particles per observation, and the even number of islands that they are split over.
    ess_target
        Fraction of the effective sample size to keep at each change of temperature.
    n_leapfrog, max_moves
        Leapfrog steps per move, and largest number of moves per temperature; twice as many at the posterior.
    keep
        Temperatures in (0, 1]. The population at the first temperature that is not below each of them is resampled to
        equal weights and returned as `tempered`.
    strict
        Whether an observation without a usable weight, or one that has not reached the posterior after 1000
        temperatures, is an error. If false, its weights are NaN and the others continue.
    generator
        Source of noise.
    progress
        Called when observations reach the posterior.
    max_bytes
        Memory per chunk of observations (None: see `chunks.default_budget`). Results repeat for the same seed and the
        same chunks.

    Returns
    -------
    SMCResult
        Particles, log-weights and cost.

    References
    ----------
    Del Moral, Doucet & Jasra (2006); Dai et al. (2022).

    Examples
    --------
    >>> from vaerdict.models.ppca import PPCA
    >>> from vaerdict.proposals import Prior
    >>> model, x = PPCA(torch.eye(3, 2), 1.0), torch.ones(5, 3)
    >>> result = smc(model, x, Prior(model.prior), n_particles=64, generator=torch.Generator().manual_seed(0))
    >>> result.z.shape, result.log_evidence.shape
    (torch.Size([64, 5, 2]), torch.Size([5]))
    """
    settings = _checked(_Settings(n_islands, ess_target, n_leapfrog, max_moves, tuple(keep)), n_particles)
    path, n_before, results = AnnealingPath(model, initial, check_batch(x)), 0, []
    for chunk in chunks(path, n_particles, generator=generator, max_bytes=max_bytes):
        n = chunk.x.shape[-2]
        span = torch.arange(n_before, n_before + n, device=chunk.x.device)
        population = _start(chunk, n_particles, settings, source_at(generator, span))
        finished: list[_Population] = []
        while population.index.numel():
            _reweight(population, settings)
            failed = _failed(population, strict)
            if failed.any():
                finished.append(population.select(failed).without_weights())
                population = population.select(~failed)
            population = _move(population, settings)
            _keep(population, settings)
            arrived = ~_any_axis(population.t < 1)
            if arrived.any():
                finished.append(population.select(arrived))
                population = population.select(~arrived)
                progress(n_before + n - population.index.numel(), x.shape[-2], "SMC")
        n_before += n
        results.append(_chunk_result(_joined(finished, chunk), settings))
    return concat_results(results)


def _checked(settings: _Settings, n_particles: int) -> _Settings:
    for name in ("n_islands", "n_leapfrog", "max_moves"):
        check_count(getattr(settings, name), name=name)
    if not 0 < settings.ess_target < 1:
        raise SettingError(f"ess_target={settings.ess_target} is a fraction of the particles, between 0 and 1.")
    if not all(0 < t <= 1 for t in settings.keep):
        raise SettingError(f"keep={settings.keep} holds temperatures of populations to return, above 0 and at most 1.")
    if settings.n_islands % 2:
        raise SettingError(f"n_islands={settings.n_islands} must be even: each half sets the metric of the other.")
    size, rest = divmod(check_count(n_particles, name="n_particles"), settings.n_islands)
    if rest or size < 2:
        raise SettingError(
            f"n_particles={n_particles} cannot be split over {settings.n_islands} islands of equal size, at least two "
            f"each; use n_particles={max(2, size) * settings.n_islands}."
        )
    return settings


@dataclass
class _Population:
    """Particles, temperatures and counters of the unfinished observations.

    ``start`` and ``root`` are the positions and the metric before the moves at the present temperature, ``reached``
    says whether they have been forgotten.

    Shapes: ``start (N, *batch, d)``, ``root (2, *batch, d, d)``; ``t``, ``step``, ``reached``, counters ``(*batch)``.
    """

    path: AnnealingPath
    source: Source
    index: Tensor
    state: PathState
    log_w: Tensor
    t: Tensor
    step: Tensor
    start: Tensor
    root: Tensor
    reached: Tensor
    tempered: Tensor
    acceptance: Tensor
    n_moves: Tensor
    n_temperatures: Tensor
    n_decorrelated: Tensor
    n_nonfinite: Tensor

    def select(self, mask: Tensor) -> _Population:
        """The observations where `mask` is true."""
        if bool(mask.all()):
            return self
        index = mask.nonzero().squeeze(-1)
        state = PathState(*(a.index_select(self.t.dim(), index) for a in self.state))
        columns = {name: getattr(self, name).index_select(axis, index) for name, axis in _OBSERVATION_AXIS.items()}
        return _Population(self.path.select(index), as_source(source_at(self.source, index)), state=state, **columns)

    def without_weights(self) -> _Population:
        """The population with weights NaN."""
        return replace(self, log_w=torch.full_like(self.log_w, torch.nan))


_OBSERVATION_AXIS = {
    **dict.fromkeys(("index", "log_w", "t", "step", "reached", "acceptance"), -1),
    **dict.fromkeys(("n_moves", "n_temperatures", "n_decorrelated", "n_nonfinite"), -1),
    **dict.fromkeys(("start", "tempered"), -2),
    "root": -3,
}


def _joined(populations: list[_Population], path: AnnealingPath) -> _Population:
    """All observations of several populations, in the order of the path."""
    if len(populations) == 1:
        return populations[0]
    order, batch_axis = torch.cat([p.index for p in populations]).argsort(), populations[0].t.dim()

    def column(tensors: Iterable[Tensor], axis: int) -> Tensor:
        return torch.cat(tuple(tensors), axis).index_select(axis, order)

    states = zip(*(p.state for p in populations), strict=True)
    columns = {name: column((getattr(p, name) for p in populations), axis) for name, axis in _OBSERVATION_AXIS.items()}
    source = sources_joined([p.source for p in populations], order)
    state = PathState(*(column(tensors, batch_axis) for tensors in states))
    return _Population(path, source, state=state, **columns)


def _start(path: AnnealingPath, n_particles: int, settings: _Settings, generator: Randomness) -> _Population:
    z, log_q = path.draw(n_particles, generator=generator)
    state = path.evaluate(z)
    # not zero for stratified starts, whose draws are weighted by the realised shares
    log_w = state.log_q.double() - log_q.double()
    zero = torch.zeros_like(log_w[0])
    count = torch.zeros_like(zero, dtype=torch.long)
    return _Population(
        path,
        as_source(generator),
        index=torch.arange(path.x.shape[-2], device=z.device),
        state=state,
        log_w=log_w,
        t=zero,
        step=zero + _longest_step(settings),
        start=z,
        root=z.new_zeros(2, *zero.shape, z.shape[-1], z.shape[-1]),
        reached=torch.zeros_like(zero, dtype=torch.bool),
        tempered=z.new_full((len(settings.keep), *z.shape), torch.nan),
        acceptance=zero,
        n_moves=count,
        n_temperatures=count,
        n_decorrelated=count,
        n_nonfinite=count,
    )


def _longest_step(settings: _Settings) -> float:
    """The step of a quarter period of the whitened dynamics; on longer trajectories particles turn back."""
    return 0.5 * math.pi / settings.n_leapfrog


def _reweight(population: _Population, settings: _Settings) -> None:
    """Change every observation to its next temperature."""
    p = population
    t = next_temperature(p.state, p.log_w, p.t, settings.ess_target)
    p.log_w, p.t = p.log_w + p.state.log_increment(p.t, t), t


def _failed(population: _Population, strict: bool) -> Tensor:
    """Observations without a usable weight or with too many temperatures; an error if `strict`. Shapes: ``-> (n,)``.

    An observation fails if it does so at any position of the other batch axes.
    """
    p = population
    late = (p.n_temperatures >= _MAX_TEMPERATURES) & (p.t < 1)
    if strict:
        check_log_weights(p.log_w)
    if strict and bool(late.any()):
        raise DivergenceError(
            f"{int(late.sum())} observations did not reach the posterior within {_MAX_TEMPERATURES} temperatures; "
            f"the lowest is at {p.t.min().item():.3g}. Start nearer to the posterior, or lower ess_target."
        )
    return _any_axis(late | ~p.log_w.amax(0).isfinite())


def _any_axis(mask: Tensor) -> Tensor:
    """Whether the mask is true anywhere on the other batch axes. Shapes: ``(*batch) -> (n,)``."""
    return mask.reshape(mask.shape[:-1].numel(), mask.shape[-1]).any(0)


def _move(population: _Population, settings: _Settings) -> _Population:
    """Resample every observation and move it at its temperature until it has decorrelated or used its moves."""
    p, path, n_moves = population, population.path, 0
    if not p.index.numel():
        return p
    p.root = _crossed_roots(p.state.z, p.log_w)
    _resample(p, settings)
    p.start, p.reached = p.state.z, torch.zeros_like(p.reached)
    stopped: list[_Population] = []
    while p.index.numel():
        _move_once(p, settings)
        n_moves += 1
        at_limit = n_moves >= torch.where(_any_axis(p.t < 1), settings.max_moves, 2 * settings.max_moves)
        stop = at_limit | ~_any_axis(~p.reached)
        if stop.any():
            stopped.append(p.select(stop))
            p = p.select(~stop)
    p = _joined(stopped, path)
    p.n_temperatures, p.n_decorrelated = p.n_temperatures + 1, p.n_decorrelated + p.reached
    return p


def _move_once(population: _Population, settings: _Settings) -> None:
    """Move every observation, tune its step size, and compare the particles with where they started."""
    p = population
    move = transition(p.path, p.state, p.t, p.step, n_leapfrog=settings.n_leapfrog, source=p.source, root=p.root)
    p.state, p.n_moves = move.state, p.n_moves + 1
    p.acceptance, p.n_nonfinite = p.acceptance + move.acceptance.mean(0), p.n_nonfinite + move.n_nonfinite
    step = adapted(p.step, move.acceptance, target=_TARGET_ACCEPTANCE, gain=_GAIN)
    p.step = step.clamp_max(_longest_step(settings))
    p.reached = p.reached | (largest_correlation(p.state.z, p.start, p.root) < _DECORRELATED)


def _crossed_roots(z: Tensor, log_w: Tensor) -> Tensor:
    """Covariance roots for even and odd particles, each estimated from the other half.

    With a metric estimated from the particle itself, the kernel would depend on the state that it moves: at N = 512 and
    d = 6 this alone biased the log-evidence by a quarter of its standard error. The particles of an island are all even
    or all odd.

    Shapes: ``-> (2, *batch, d, d)``.
    """
    return covariance_root(z.unflatten(0, (-1, 2)), log_w.unflatten(0, (-1, 2))).flip(0)


def _resample(population: _Population, settings: _Settings) -> None:
    """Resample islands of low effective size; their particles then have the mean weight of the island."""
    p, shape = population, population.log_w.shape
    log_w = by_island(p.log_w, settings.n_islands)
    resampled = relative_ess(log_w) < _RESAMPLE_BELOW
    offset = torch.special.ndtr(p.source.normal(settings.n_islands, p.t.shape, 1, like=p.log_w).squeeze(-1))
    identity = torch.arange(log_w.shape[0], device=log_w.device).reshape(-1, *(1,) * (log_w.dim() - 1))
    ancestors = torch.where(resampled, systematic(log_w, offset), identity)
    island = torch.arange(settings.n_islands, device=log_w.device).reshape(-1, *(1,) * (log_w.dim() - 2))
    p.state = gathered(p.state, (ancestors * settings.n_islands + island).reshape(shape))
    p.log_w = torch.where(resampled, log_mean_exp(log_w), log_w).reshape(shape)


def _keep(population: _Population, settings: _Settings) -> None:
    """Store equally weighted particles of the observations that have just reached a temperature to keep."""
    p = population
    for i, t in enumerate(settings.keep):
        reached = (p.t >= t) & p.tempered[i, 0, ..., 0].isnan()
        if reached.any():
            noise = as_source(side_stream(p.source, i))  # not every observation is here
            offset = torch.special.ndtr(noise.normal(1, p.t.shape, 1, like=p.log_w))[0, ..., 0]
            z = gathered(p.state.z, systematic(p.log_w, offset))
            p.tempered[i] = torch.where(reached.unsqueeze(-1), z, p.tempered[i])


def _chunk_result(population: _Population, settings: _Settings) -> SMCResult:
    p = population
    return SMCResult(
        z=p.state.z,
        log_w=p.log_w,
        tempered=p.tempered,
        acceptance=p.acceptance / p.n_moves,
        decorrelated=p.n_decorrelated.to(p.acceptance) / p.n_temperatures,
        step_size=p.step,
        n_temperatures=p.n_temperatures,
        n_nonfinite=p.n_nonfinite,
        n_gradients=p.log_w.shape[0] * (1 + p.n_moves * settings.n_leapfrog),
        n_islands=settings.n_islands,
    )
