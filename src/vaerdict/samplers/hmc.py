r"""Hamiltonian Monte Carlo on an annealing path, batched over chains and observations.

A transition leaves :math:`\pi_t` invariant only if its step size does not depend on the state that it moves. The step
size is therefore an argument: AIS takes it from pilot chains, SMC from the population at earlier temperatures.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from vaerdict.core import expand_trailing
from vaerdict.noise import Source
from vaerdict.samplers.tempering import AnnealingPath, PathState

_JITTER = 0.2


class Move(NamedTuple):
    """Result of a transition: state, acceptance probabilities, and the number of chains with non-finite proposals.

    Shapes: ``acceptance (K, *batch)``, ``n_nonfinite (*batch)``.
    """

    state: PathState
    acceptance: Tensor
    n_nonfinite: Tensor


def transition(
    path: AnnealingPath,
    state: PathState,
    t: Tensor,
    step: Tensor,
    *,
    n_leapfrog: int,
    source: Source,
    root: Tensor | None = None,
) -> Move:
    r"""One Metropolis-corrected Hamiltonian move that leaves :math:`\pi_t` invariant (Neal, 2011).

    The step size of each chain is jittered by up to a fifth, so that no chain stays on a periodic orbit. A proposal
    with a non-finite energy is rejected and counted.

    Parameters
    ----------
    path
        The annealing path.
    state
        The chains. Shapes: ``z (K, *batch, d)``.
    t
        Temperature. Shapes: ``()`` or ``(*batch)``.
    step
        Step size. Shapes: ``(*batch)``.
    n_leapfrog
        Leapfrog steps, with one gradient each.
    source
        Source of noise.
    root
        Square root R of the (estimated) covariance; the mass matrix is :math:`(R R^\top)^{-1}`. Shapes:
        ``(*batch, d, d)``.

    Returns
    -------
    Move
        The new state with its acceptance.
    """
    k, *batch, d = state.z.shape
    noise = source.normal(k, batch, d + 2, like=state.z)
    velocity, jitter, uniform = noise[..., :d], torch.special.ndtr(noise[..., d]), noise[..., d + 1]
    step = step.to(state.z.dtype) * (1 + _JITTER * (2 * jitter - 1))
    proposed, final, diverged = leapfrog(path, state, velocity, t, step, n_leapfrog, root)
    log_to = proposed.log_density(t)
    ratio = log_acceptance(state.log_density(t), log_to, velocity, final)
    finite = torch.isfinite(log_to) & ~diverged & ~ratio.isnan()
    ratio = torch.where(finite, ratio, -torch.inf)
    # the log of a uniform is the log of the normal distribution function at a normal
    moved = _choose(torch.special.log_ndtr(uniform) < ratio, proposed, state)
    return Move(moved, ratio.clamp_max(0).exp(), (~finite).sum(0))


def log_acceptance(log_from: Tensor, log_to: Tensor, velocity_from: Tensor, velocity_to: Tensor) -> Tensor:
    """Log of the Metropolis ratio of two points of phase space. Shapes: ``-> (K, *batch)``."""
    return log_to - log_from + 0.5 * (velocity_from.square() - velocity_to.square()).sum(-1)


def leapfrog(
    path: AnnealingPath, state: PathState, velocity: Tensor, t: Tensor, step: Tensor, n: int, root: Tensor | None
) -> tuple[PathState, Tensor, Tensor]:
    """Take n leapfrog steps; returns the final state, the final velocity, and which chains became non-finite.

    Velocities are whitened: standard normal for any root. The first gradient is taken from the state. A chain that
    becomes non-finite is reset to its start, so that the model is never evaluated at NaN.

    Shapes: ``velocity (K, *batch, d)``, ``step (K, *batch)``.
    """
    start, step = state.z, step.unsqueeze(-1)
    diverged = torch.zeros_like(state.log_q, dtype=torch.bool)
    velocity = velocity + 0.5 * step * _transpose_apply(root, state.gradient(t))
    for remaining in reversed(range(n)):
        z = state.z + step * _apply(root, velocity)
        nonfinite = ~torch.isfinite(z).all(-1)
        diverged |= nonfinite
        state = path.evaluate(torch.where(nonfinite.unsqueeze(-1), start, z))
        velocity = velocity + (1.0 if remaining else 0.5) * step * _transpose_apply(root, state.gradient(t))
    return state, velocity, diverged


def _apply(root: Tensor | None, v: Tensor) -> Tensor:
    if root is None:
        return v
    return torch.einsum("...ij,k...j->k...i", root, v.reshape(-1, *root.shape[:-1])).reshape(v.shape)


def _transpose_apply(root: Tensor | None, v: Tensor) -> Tensor:
    return _apply(None if root is None else root.mT, v)


def _choose(accept: Tensor, new: PathState, old: PathState) -> PathState:
    """The new state where accepted, else the old."""
    pairs = zip(new, old, strict=True)
    return PathState(*(torch.where(expand_trailing(accept, a), a, b) for a, b in pairs))


def adapted(step: Tensor, acceptance: Tensor, *, target: float, gain: float) -> Tensor:
    r"""The step size for the next temperature, :math:`\epsilon\,e^{\gamma (a - a^*)}`, from the mean acceptance a.

    Shapes: ``(*batch), (K, *batch) -> (*batch)``.
    """
    return step * torch.exp(gain * (acceptance.mean(0).to(step.dtype) - target))
