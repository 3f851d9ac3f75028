r"""Hamiltonian Monte Carlo on the path, batched over chains and observations.

The step size is an argument: a transition leaves :math:`\pi_t` invariant only if it was chosen without looking at the
state it moves. How to choose it all the same is the business of the callers: AIS takes it from pilot chains, SMC from
the whole population at earlier temperatures.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from vaerdict.noise import Source
from vaerdict.samplers.path import Path, State

_JITTER = 0.2


class Move(NamedTuple):
    """What a transition did: where the chains are, how likely each was to accept, how many left the finite numbers.

    Shapes: ``acceptance (K, *batch)``, ``n_nonfinite (*batch)``.
    """

    state: State
    acceptance: Tensor
    n_nonfinite: Tensor


def transition(
    path: Path, state: State, t: Tensor, step: Tensor, *, n_leapfrog: int, source: Source, root: Tensor | None = None
) -> Move:
    r"""One Metropolis-corrected Hamiltonian move that leaves :math:`\pi_t` invariant; `n_leapfrog` gradients.

    The step is jittered by a fifth around `step`, chain by chain, so that no chain sits on a period of its orbit.
    `root` is a square root R of the (estimated) covariance, and the mass matrix :math:`(R R^\top)^{-1}`. A proposal
    with a non-finite energy is rejected and counted.

    Shapes: ``t ()`` or ``(*batch)``, ``step (*batch)``, ``root (*batch, d, d)``. Reference: Neal (2011).
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
    """Energy lost between two points of phase space: log of the Metropolis ratio. Shapes: ``-> (K, *batch)``."""
    return log_to - log_from + 0.5 * (velocity_from.square() - velocity_to.square()).sum(-1)


def leapfrog(
    path: Path, state: State, velocity: Tensor, t: Tensor, step: Tensor, n: int, root: Tensor | None
) -> tuple[State, Tensor, Tensor]:
    """Follow the dynamics for n steps: final state, final velocity, and which chains left the finite numbers.

    Velocities are whitened, standard normal whatever the root. The first gradient is the state's own. A chain that
    leaves the finite numbers is put back on its start, so that the model never sees a NaN.

    Shapes: ``velocity (K, *batch, d)``, ``step (K, *batch)``.
    """
    start, step = state.z, step.unsqueeze(-1)
    diverged = torch.zeros_like(state.log_q, dtype=torch.bool)
    velocity = velocity + 0.5 * step * _transpose_apply(root, state.gradient(t))
    for left in reversed(range(n)):
        z = state.z + step * _apply(root, velocity)
        lost = ~torch.isfinite(z).all(-1)
        diverged |= lost
        state = path.evaluate(torch.where(lost.unsqueeze(-1), start, z))
        velocity = velocity + (1.0 if left else 0.5) * step * _transpose_apply(root, state.gradient(t))
    return state, velocity, diverged


def _apply(root: Tensor | None, v: Tensor) -> Tensor:
    if root is None:
        return v
    return torch.einsum("...ij,k...j->k...i", root, v.reshape(-1, *root.shape[:-1])).reshape(v.shape)


def _transpose_apply(root: Tensor | None, v: Tensor) -> Tensor:
    return _apply(None if root is None else root.mT, v)


def _choose(accept: Tensor, new: State, old: State) -> State:
    """The new state where accepted, else the old."""
    row = accept.unsqueeze(-1)
    return State(*(torch.where(row if a.dim() == row.dim() else accept, a, b) for a, b in zip(new, old, strict=True)))


def adapted(step: Tensor, acceptance: Tensor, *, target: float, gain: float) -> Tensor:
    r"""The step for the next temperature, :math:`\epsilon\,e^{\gamma (a - a^*)}`, from the mean acceptance over chains.

    Shapes: ``(*batch), (K, *batch) -> (*batch)``.
    """
    return step * torch.exp(gain * (acceptance.mean(0).to(step.dtype) - target))
