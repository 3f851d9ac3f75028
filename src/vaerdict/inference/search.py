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
from vaerdict.noise import Randomness
from vaerdict.proposals import Kernels, Prior
from vaerdict.refinement import refine
from vaerdict.samplers import PathState, gathered, next_temperature, systematic

RANDOM_STARTS = 16
GUIDED_STARTS = 8
_CANDIDATES = 256  # draws of the prior from which the guided starts are chosen
_DF, _INFLATE = 10.0, 1.1
_LEAST_CURVATURE = 0.04  # relative to the prior's: a posterior five times as wide is believed
_LEAST_MASS = 0.01  # share of the posterior by its curvature above which a mode matters
_REPEATED = 0.01  # squared distance in standard deviations within which two kernels are the same
_NEGLIGIBLE = 1e-4  # share below which a mode gets no more draws than its mass asks for
_CHUNK = 2**24  # numbers held at a time
_SAME_MODE = 9.0  # squared distance in standard deviations, either's, within which two searches ended at one mode


@dataclass(frozen=True, eq=False)
class Scope:
    """What was searched before an answer was given, one entry per observation.

    ``modes`` is the number of modes found that hold a hundredth of the posterior or more, ``alone`` the share of
    searches that ended at such a mode as the only one. By Good and Turing, the latter estimates the probability that
    one more search would find yet another mode. ``basin`` is the largest share of the prior from which a missed mode
    may be reached: had it been larger, one of the searches would have found the mode with probability 95 %.

    Shapes: ``modes, alone (n_obs,)``.
    """

    modes: Tensor
    alone: Tensor
    searches: int
    basin: float

    def sentence(self, i: int) -> str:
        """The scope of observation i in words."""
        modes, alone = int(self.modes[i]), round(float(self.alone[i]) * self.searches)
        return (
            f"{modes} mode{'s' if modes > 1 else ''} found by {self.searches} searches, {alone} of which ended alone; "
            f"a mode reached from less than {self.basin:.0%} of the prior may be missing"
        )


@dataclass(frozen=True, eq=False)
class Modes:
    """Local proposals where searches ended, their scope and their cost in gradients, ``cost (m,)``."""

    kernels: Kernels
    scope: Scope
    cost: Tensor


def find_modes(model: Model, x: Tensor, starts: list[Tensor], *, generator: Randomness) -> Modes:
    """Search modes uphill of draws from the prior and of given starts.

    Sixteen starts are draws of the prior. Eight more are chosen among 256 draws of the prior in proportion to a power
    of the likelihood, the largest that keeps an effective size of eight: they begin where the posterior is.

    Shapes: ``x (m, p)``, ``starts (m, d)`` each.
    """
    z, log_w = importance_weights(model, x, Prior(model.prior), _CANDIDATES, strict=False, generator=generator)
    guided = _guided(z, log_w, GUIDED_STARTS)
    start = torch.cat([z[:RANDOM_STARTS], guided, *(s.unsqueeze(0) for s in starts)])
    end = refine(
        model,
        x.expand(len(start), *x.shape),
        torch.where(start.isfinite(), start, 0),
        axis=1,
        df=_DF,
        inflate=_INFLATE,
        least_curvature=_LEAST_CURVATURE,
    )
    loc, tril = end.distribution.loc, end.distribution.root[0]
    same = _same_mode(loc.double(), tril.double())
    volume = tril.double().diagonal(dim1=-2, dim2=-1).log().sum(-1)
    mass = _normalised(end.log_joint + volume - same.sum(0).log())
    return Modes(
        _merged(loc, tril, _shares(mass, same)),
        _scope(mass, same, len(start)),
        end.n_gradients.sum(0).cpu() + _CANDIDATES,
    )


def _guided(z: Tensor, log_lik: Tensor, n: int) -> Tensor:
    """Draws of the prior resampled by the largest power of the likelihood that leaves n effective ones."""
    log_lik = torch.nan_to_num(log_lik.double(), nan=-torch.inf, posinf=-torch.inf)
    log_lik = torch.where(log_lik.isneginf().all(0), 0.0, log_lik)
    nothing = torch.zeros_like(log_lik)
    state = PathState(z, nothing, log_lik, nothing, nothing)
    power = next_temperature(state, nothing, nothing[0], n / len(z))
    return gathered(z, systematic(state.log_increment(nothing[0], power), nothing[0] + 0.5, n))


def _same_mode(loc: Tensor, tril: Tensor) -> Tensor:
    """Which searches ended at the same mode: near each other by the curvature at both, or linked by others that are.

    Shapes: ``loc (S, m, d), tril (S, m, d, d) -> (S, S, m)`` of zeros and ones.
    """
    n, m, d = loc.shape
    parts = []
    for rows in torch.arange(m, device=loc.device).split(max(1, _CHUNK // (n * n * d))):
        delta = (loc[:, None, rows] - loc[None, :, rows]).movedim(0, -1)  # (S, rows, d, S)
        square = torch.linalg.solve_triangular(tril[:, rows], delta, upper=False).square().sum(-2).movedim(-1, 1)
        linked = (torch.maximum(square, square.transpose(0, 1)) < _SAME_MODE).double().movedim(-1, 0)
        for _ in range(math.ceil(math.log2(n))):
            linked = (linked @ linked > 0).double()
        parts.append(linked.movedim(0, -1))
    return torch.cat(parts, -1)


def _normalised(log_mass: Tensor) -> Tensor:
    """Log-shares of the modes; equal where none is finite."""
    log_mass = torch.nan_to_num(log_mass, nan=-torch.inf, posinf=-torch.inf)
    return log_normalise(torch.where(log_mass.isneginf().all(0), 0.0, log_mass))


def _shares(log_mass: Tensor, same: Tensor) -> Tensor:
    """Log-share of each kernel: half by the mass of its mode, half the same for every mode that is not negligible."""
    per_mode = _mode_mass(log_mass, same)
    equal = torch.where(per_mode > _NEGLIGIBLE, 1 / same.sum(0), 0)
    return (0.5 * log_mass.exp() + 0.5 * equal / equal.sum(0)).log()


def _merged(loc: Tensor, tril: Tensor, log_share: Tensor) -> Kernels:
    """Kernels without those that repeat an earlier one; as many as the observation with the most has.

    Shapes: ``(S, m, d), (S, m, d, d), (S, m)``.
    """
    delta = (loc.unsqueeze(1) - loc).double()
    scale = tril.double().diagonal(dim1=-2, dim2=-1)
    repeats = ((delta / scale).square().sum(-1) < _REPEATED) & ((scale / scale.unsqueeze(1)).log().abs() < 0.1).all(-1)
    first = repeats.double().argmax(1)  # of every kernel, the first that it repeats
    share = torch.zeros_like(log_share).scatter_add_(0, first, log_share.exp())
    order = share.argsort(0, descending=True)[: int((share > 0).sum(0).max())]
    d = loc.shape[-1]
    loc, tril = loc.gather(0, order.unsqueeze(-1).expand(*order.shape, d)), tril.gather(
        0, order[..., None, None].expand(*order.shape, d, d)
    )
    return Kernels(loc, tril, share.gather(0, order).log().to(loc.dtype), _DF)


def _scope(log_mass: Tensor, same: Tensor, n: int) -> Scope:
    matters, size = _mode_mass(log_mass, same) >= _LEAST_MASS, same.sum(0)
    modes = torch.where(matters, 1 / size, 0).sum(0).round().long()
    alone = (matters & (size == 1)).double().mean(0)
    return Scope(modes.cpu(), alone.cpu(), n, 1 - 0.05 ** (1 / RANDOM_STARTS))


def _mode_mass(log_mass: Tensor, same: Tensor) -> Tensor:
    """Share of the mode at which each search ended, by curvature. Shapes: ``(S, m) -> (S, m)``."""
    return torch.einsum("ijm,jm->im", same, log_mass.exp())
