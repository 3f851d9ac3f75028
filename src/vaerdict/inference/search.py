r"""The search for modes: where the draws of an answer come from, and what its scope is.

Importance weights cannot reveal a mode that no draw has reached. Modes are therefore searched from draws of the prior,
and every answer states what was searched: how many modes were found, and how many searches ended alone.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from vaerdict.core import Model, log_normalise
from vaerdict.inference.assess import importance_weights
from vaerdict.noise import Iid, Sobol, Source, as_source, noise_of
from vaerdict.proposals import Kernels, Prior
from vaerdict.refinement import refine
from vaerdict.samplers import PathState, gathered, next_temperature, systematic

MAX_ALONE = 0.1
"""Largest share of searches that may end at a mode found only once."""

MAX_MISSING = 0.25
"""Largest share of the posterior that may be missing for an answer to be ok; with a single mode it is 0.17."""

_ROUNDS = (16, 32, 64)  # searches from random draws of the prior; later rounds only where there are several modes
_CANDIDATES = 64  # per random start: draws of the prior from which half as many guided starts are chosen
_DF, _INFLATE = 10.0, 1.1
_STEPS, _TOLERANCE = 25, 1e-3  # Newton steps of a search, and the gain in nats below which it ends
_LEAST_CURVATURE = 0.04  # relative to the prior's: a posterior five times as wide is believed
_LEAST_MASS = 0.01  # share of the posterior by its curvature above which a mode matters
_NEGLIGIBLE = 1e-4  # share below which a mode gets no more draws than its mass asks for
_SAME_MODE = 9.0  # squared distance in standard deviations, of both, within which two searches ended at one mode
_SAME_RIDGE, _SAME_LEVEL = 4.0, 1.0  # the same on a ridge: squared distance by its flattest direction, and nats
_REPEATED = 0.01  # squared distance within which two kernels are the same
_CHUNK = 2**23  # numbers held at a time


@dataclass(frozen=True, eq=False)
class Scope:
    """What was searched before an answer was given, one entry per observation.

    ``modes`` is the number of modes found that hold a hundredth of the posterior or more by their curvature (half as
    much as the largest, where that is less). ``alone``
    is the share of searches that ended at such a mode as the only one: by Good and Turing, it estimates the probability
    that one more search would find yet another mode. ``basin`` is the largest share of the prior from which a missed
    mode may be reached: had it been larger, one of the searches from random draws of the prior would have found the
    mode with probability 95 %. ``missing`` is the share of the posterior that such a mode could hold if its mass were
    as large for its basin as that of any mode found.

    Shapes: all ``(n_obs,)``.
    """

    modes: Tensor
    searches: Tensor
    alone: Tensor
    basin: Tensor
    missing: Tensor

    @property
    def sufficient(self) -> Tensor:
        """Whether few searches ended alone and little mass can be missing. Shapes: ``-> (n_obs,)``."""
        return (self.alone <= MAX_ALONE) & (self.missing <= MAX_MISSING)

    def sentence(self, i: int) -> str:
        """The scope of observation i in words."""
        modes, searches = int(self.modes[i]), int(self.searches[i])
        alone = round(float(self.alone[i]) * searches)
        return (
            f"{modes} mode{'s' if modes != 1 else ''} found by {searches} searches, {alone} of which ended alone; a "
            f"mode reached from less than {self.basin[i]:.0%} of the prior may be missing"
        )


class ModeSearch:
    """Searches of the modes of every posterior of a batch, and local proposals where they ended.

    Sixteen searches start from draws of the prior and one from a given point. Eight more start from draws of the prior
    chosen among 1024 in proportion to a power of the likelihood, the largest that keeps eight effective ones: they
    begin where the posterior is. Where more than one mode was found or the scope is not sufficient, a second round
    searches twice as often, and if that finds yet another mode or does not suffice, a third.

    Shapes: ``x (m, p)``, ``start (m, d)``; ``cost (m,)`` counts evaluations and gradients.
    """

    def __init__(self, model: Model, x: Tensor, start: Tensor, *, source: Source) -> None:
        self.model, self.x, self.source = model, x, source
        m, d = start.shape
        self.cost = torch.zeros(m, dtype=torch.float64)
        self.kernels = Kernels(start.new_zeros(0, m, d), start.new_zeros(0, m, d, d), start.new_zeros(0, m), _DF)
        # where searches ended: slots are filled for the observations of a round, with a value of -inf elsewhere
        self._loc, self._tril, self._value = self.kernels.loc, self.kernels.tril, self.kernels.log_share.double()
        whole, real = torch.zeros(m, dtype=torch.long), torch.zeros(m, dtype=torch.float64)
        self.scope = Scope(whole, whole.clone(), real, real.clone(), real.clone())
        rows, extra, n_random = torch.arange(m), [start.unsqueeze(0)], 0
        for n in _ROUNDS:
            n_random += n
            self.scope.basin[rows] = 1 - 0.05 ** (1 / n_random)
            new = self.extend(rows, torch.cat([*self._starts(rows, n), *extra]))
            several = (self.scope.modes[rows] > 1) if n == n_random else new
            rows, extra = rows[several | ~self.scope.sufficient[rows]], []
            if not len(rows):
                break

    def _starts(self, rows: Tensor, n: int) -> list[Tensor]:
        """Random and guided starts. Shapes: ``-> (n, m, d), (n / 2, m, d)``."""
        k = _CANDIDATES * n
        prior = Prior(self.model.prior)
        # a net leaves no part of the prior out that is larger than about 1 / k
        with noise_of(self.source, rows) as noise:
            net = _net_of(as_source(noise))
            z, log_lik = importance_weights(self.model, self.x[rows], prior, k, strict=False, generator=net)
        self.cost[rows] += k
        return [z[:n], _guided(z, log_lik, n // 2)]

    def extend(self, rows: Tensor, starts: Tensor) -> Tensor:
        """Search from more starts and return which observations have a mode that no earlier search had found.

        Shapes: ``rows (r,), starts (S, r, d) -> (r,)``.
        """
        x = self.x[rows]
        end = refine(
            self.model,
            x.expand(len(starts), *x.shape),
            torch.where(starts.isfinite(), starts, 0),
            axis=1,
            df=_DF,
            inflate=_INFLATE,
            least_curvature=_LEAST_CURVATURE,
            n_steps=_STEPS,
            tolerance=_TOLERANCE,
        )
        self.cost[rows] += end.n_gradients.sum(0).cpu()
        self.scope.searches[rows] += len(starts)
        n_before, index = len(self._loc), rows.to(self._loc.device)
        loc, tril = end.distribution.loc, end.distribution.root[0]
        self._loc, self._tril, self._value = (
            _appended(old, new, index, fill)
            for old, new, fill in (
                (self._loc, loc, 0.0),
                (self._tril, tril, 0.0),
                (self._value, end.log_joint.double(), -torch.inf),
            )
        )
        size = max(1, _CHUNK // (len(self._loc) ** 2 * loc.shape[-1]))
        new = [self._summarise(part, n_before) for part in rows.split(size)]
        return torch.cat(new)

    def _summarise(self, rows: Tensor, n_before: int) -> Tensor:
        """Kernels and scope of some observations from all their searches, and whether those since `n_before` gained."""
        index = rows.to(self._loc.device)
        loc, tril, value = self._loc[:, index], self._tril[:, index], self._value[:, index]
        usable = value.isfinite()
        tril = torch.where(usable[..., None, None], tril, torch.eye(loc.shape[-1]).to(tril))
        same = _same_mode(loc.double(), tril.double(), torch.where(usable, value, -torch.inf))
        size = same.sum(0)
        volume = tril.double().diagonal(dim1=-2, dim2=-1).log().sum(-1)
        log_mass = _normalised(value + volume - size.log())
        mass = torch.einsum("ijm,jm->im", same, log_mass.exp())  # of the mode at which each search ended
        matters = usable & (mass >= (0.5 * mass.amax(0)).clamp_max(_LEAST_MASS))
        alone = matters & (size == 1)
        scope = self.scope
        scope.modes[rows] = torch.where(matters, 1 / size, 0).sum(0).round().long().cpu()
        scope.alone[rows] = alone.sum(0).cpu() / scope.searches[rows].double()
        density = torch.where(matters, mass / size, 0).amax(0).cpu() * scope.searches[rows]
        scope.missing[rows] = (density * scope.basin[rows]).clamp_max(1)
        equal = torch.where(usable & (mass > _NEGLIGIBLE), 1 / size, 0)
        equal = torch.where(equal.sum(0) > 0, equal, 1.0)
        self._store(index, _merged(loc, tril, 0.5 * log_mass.exp() + 0.5 * equal / equal.sum(0)))
        known = same[:, :n_before].sum(1) > 0
        return (matters & ~known).any(0).cpu()

    def _store(self, index: Tensor, new: Kernels) -> None:
        """Replace the kernels of some observations; kernels that an observation does not have get no share."""
        missing = len(new.loc) - len(self.kernels.loc)
        if missing > 0:
            nobody = index[:0]
            self.kernels = Kernels(
                _appended(self.kernels.loc, new.loc[:missing, nobody], nobody, 0.0),
                _appended(self.kernels.tril, new.tril[:missing, nobody], nobody, 1.0).tril(),
                _appended(self.kernels.log_share, new.log_share[:missing, nobody], nobody, -torch.inf),
                _DF,
            )
        n, kernels = len(new.loc), self.kernels
        kernels.log_share[:, index] = -torch.inf
        kernels.loc[:n, index], kernels.tril[:n, index], kernels.log_share[:n, index] = new.loc, new.tril, new.log_share


def _net_of(source: Source) -> Sobol:
    """A Sobol source that takes its randomness from another source."""
    if isinstance(source, Sobol):
        return source
    return Sobol(source.generators[0]) if isinstance(source, Iid) else source.net()


def _appended(old: Tensor, new: Tensor, index: Tensor, fill: float) -> Tensor:
    """`old` with slots appended that are filled at `index`. Shapes: ``(S, m, ...), (T, r, ...) -> (S + T, m, ...)``."""
    slots = old.new_full((len(new), *old.shape[1:]), fill)
    slots[:, index] = new.to(slots)
    return torch.cat([old, slots])


def _guided(z: Tensor, log_lik: Tensor, n: int) -> Tensor:
    """Draws of the prior resampled by the largest power of the likelihood that leaves n effective ones."""
    log_lik = torch.nan_to_num(log_lik.double(), nan=-torch.inf, posinf=-torch.inf)
    log_lik = torch.where(log_lik.isneginf().all(0), 0.0, log_lik)
    nothing = torch.zeros_like(log_lik)
    state = PathState(z, nothing, log_lik, nothing, nothing)
    power = next_temperature(state, nothing, nothing[0], n / len(z))
    return gathered(z, systematic(state.log_increment(nothing[0], power), nothing[0] + 0.5, n))


def _same_mode(loc: Tensor, tril: Tensor, value: Tensor) -> Tensor:
    """Which searches ended at the same mode: near each other by the curvature at both, or linked by others that are.

    On a ridge, such as a ring, searches end anywhere. Two ends of nearly the same density are therefore near each other
    if their distance is within two standard deviations of the flattest direction at both.

    Shapes: ``loc (S, m, d), tril (S, m, d, d), value (S, m) -> (S, S, m)`` of zeros and ones.
    """
    delta = (loc[:, None] - loc[None]).movedim(0, -1)  # (S, m, d, S)
    square = torch.linalg.solve_triangular(tril, delta, upper=False).square().sum(-2).movedim(-1, 1)
    widest = torch.linalg.matrix_norm(tril, 2).square().unsqueeze(1)
    along = delta.square().sum(-2).movedim(-1, 1) / widest
    level = (value[:, None] - value[None]).abs() < _SAME_LEVEL
    near, near_along = (torch.maximum(t, t.transpose(0, 1)) for t in (square, along))
    usable = value.isfinite()
    linked = (near < _SAME_MODE) | ((near_along < _SAME_RIDGE) & level)
    linked = (linked & usable[:, None] & usable[None]).double().movedim(-1, 0)
    linked = linked.maximum(torch.eye(len(loc)).to(linked))
    for _ in range(math.ceil(math.log2(len(loc)))):
        linked = (linked @ linked > 0).double()
    return linked.movedim(0, -1)


def _normalised(log_mass: Tensor) -> Tensor:
    """Log-shares of the modes; equal where none is finite."""
    log_mass = torch.nan_to_num(log_mass, nan=-torch.inf, posinf=-torch.inf)
    return log_normalise(torch.where(log_mass.isneginf().all(0), 0.0, log_mass))


def _merged(loc: Tensor, tril: Tensor, share: Tensor) -> Kernels:
    """Kernels without those that repeat an earlier one; as many as the observation with the most has.

    Shapes: ``(S, m, d), (S, m, d, d), (S, m)``.
    """
    d, scale = loc.shape[-1], tril.double().diagonal(dim1=-2, dim2=-1)
    distance = ((loc.unsqueeze(1) - loc).double() / scale).square().sum(-1)
    repeats = (distance < _REPEATED) & ((scale / scale.unsqueeze(1)).log().abs() < 0.1).all(-1)
    first = repeats.double().argmax(1)  # of every kernel, the first that it repeats
    share = torch.zeros_like(share).scatter_add_(0, first, share)
    # in the order of the searches: an order by share would be left to rounding where modes are equal
    order = (share <= 0).byte().argsort(stable=True, dim=0)[: int((share > 0).sum(0).max())]
    loc = loc.gather(0, order.unsqueeze(-1).expand(*order.shape, d))
    tril = tril.gather(0, order[..., None, None].expand(*order.shape, d, d))
    return Kernels(loc, tril, share.gather(0, order).log().to(loc.dtype), _DF)
