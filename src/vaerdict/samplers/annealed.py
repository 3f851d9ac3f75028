"""Annealed importance sampling (Neal, 2001) and bidirectional Monte Carlo for a batch of observations."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from vaerdict.core import (
    Draws,
    Model,
    Progress,
    Proposal,
    SettingError,
    ShapeError,
    check_count,
    check_log_weights,
    log_mean_exp,
    silent,
)
from vaerdict.noise import Randomness, as_source
from vaerdict.samplers.chunks import chunks, concat_results
from vaerdict.samplers.hmc import adapted, transition
from vaerdict.samplers.tempering import AnnealingPath, PathState, as_schedule, check_batch
from vaerdict.samplers.weights import log_standard_error

_TARGET_ACCEPTANCE = 0.65
_GAIN = 0.5


class _Plan(NamedTuple):
    """Settings of the chains; see `ais`."""

    schedule: Tensor
    n_chains: int
    n_pilots: int
    n_leapfrog: int
    step_size: float | Tensor

    def for_observations(self, index: slice) -> _Plan:
        """The plan for the observations at `index`."""
        return self._replace(step_size=self.step_size[..., index]) if isinstance(self.step_size, Tensor) else self

    def step_table(self, batch: torch.Size) -> Tensor | None:
        """The step sizes if they are fixed, else None. Shapes: ``-> (temperatures, *batch)``."""
        if not isinstance(self.step_size, Tensor):
            return None
        expected = (len(self.schedule) - 1, *batch)
        if tuple(self.step_size.shape) != expected:
            raise SettingError(
                f"step_size has shape {tuple(self.step_size.shape)}; one per transition and observation is {expected}."
            )
        return self.step_size


@dataclass(frozen=True)
class AISResult:
    """Weighted chains: posterior particles whose mean weight estimates the evidence.

    Shapes: ``z (K, *batch, d)``, ``log_w (K, *batch)``; mean ``acceptance``, ``n_nonfinite`` rejected proposals and
    ``n_gradients`` used (pilots included) ``(*batch)``; ``step_size (temperatures, *batch)``. ``independent`` is false
    for chains with a common start.
    """

    z: Tensor
    log_w: Tensor
    acceptance: Tensor
    step_size: Tensor
    n_nonfinite: Tensor
    n_gradients: Tensor
    independent: bool = True

    @property
    def log_evidence(self) -> Tensor:
        """Logarithm of an unbiased estimate of p(x). Shapes: ``-> (*batch)``."""
        return log_mean_exp(self.log_w)

    @property
    def standard_error(self) -> Tensor:
        """Standard error of `log_evidence`; NaN unless the chains are independent. Shapes: ``-> (*batch)``."""
        error = log_standard_error(self.log_w)
        return error if self.independent else torch.full_like(error, torch.nan)


@torch.no_grad()
def ais(
    model: Model,
    x: Tensor,
    initial: Proposal,
    *,
    n_chains: int = 100,
    temperatures: int | Tensor = 500,
    n_leapfrog: int = 10,
    step_size: float | Tensor = 0.1,
    n_pilots: int = 16,
    generator: Randomness,
    progress: Progress = silent,
    max_bytes: int | None = None,
) -> AISResult:
    r"""Anneal independent chains from `initial` to the posterior and compute their importance weights.

    :math:`\log w = \sum_i (t_i - t_{i-1}) [\log p(x, z_{i-1}) - \log q_0(z_{i-1} \mid x)]`, with a Hamiltonian move at
    :math:`t_i` after each term. The mean of w is unbiased for p(x), so ``log_evidence`` is low on average.

    A step size tuned on a chain's own acceptance would depend on its state, and the move would no longer leave the
    target invariant. Therefore `n_pilots` additional chains run alongside. Their acceptance sets the step size of each
    observation at the next temperature and their weights are discarded, so that the other chains stay exactly unbiased.

    Parameters
    ----------
    model
        The joint density.
    x
        Observations. Shapes: ``(*batch, p)``.
    initial
        Proposal at which the chains start.
    n_chains, n_pilots
        Chains per observation, and additional chains that tune the step size.
    temperatures
        Number of transitions of a sigmoid schedule, or a schedule from 0 to 1. Shapes: ``(transitions + 1,)``.
    n_leapfrog
        Leapfrog steps per transition.
    step_size
        First step size, or a table ``(transitions, *batch)``, such as that of an earlier result, which is used without
        pilots.
    generator
        Source of noise.
    progress
        Called after each transition.
    max_bytes
        Memory per chunk of observations (None: see `chunks.default_budget`). Results repeat for the same seed and the
        same chunks.

    Returns
    -------
    AISResult
        Particles, log-weights and cost.

    References
    ----------
    Neal (2001); Wu et al. (2016).

    Examples
    --------
    >>> from vaerdict.models.ppca import PPCA
    >>> from vaerdict.proposals import Prior
    >>> model, x = PPCA(torch.eye(3, 2), 1.0), torch.ones(5, 3)
    >>> g = torch.Generator().manual_seed(0)
    >>> ais(model, x, Prior(model.prior), n_chains=4, temperatures=3, generator=g).log_w.shape
    torch.Size([4, 5])
    """
    check_count(n_chains, name="n_chains")
    n_pilots = 0 if isinstance(step_size, Tensor) else check_count(n_pilots, name="n_pilots")
    plan = _Plan(as_schedule(temperatures), n_chains, n_pilots, check_count(n_leapfrog, name="n_leapfrog"), step_size)

    def start(chunk: AnnealingPath, n_before: int) -> tuple[PathState, Tensor]:
        z, log_q = chunk.draw(n_chains, generator=generator)
        # pilots are spread over a second draw of the same size, because a stratified start may not draw fewer
        index = torch.linspace(0, n_chains - 1, n_pilots, device=z.device).long()
        pilots = chunk.draw(n_chains, generator=generator) if n_pilots else Draws(z, log_q)
        state = chunk.evaluate(torch.cat([z, pilots.z[index]]))
        # not zero for stratified starts, whose draws are weighted by the realised shares
        return state, state.log_q.double() - torch.cat([log_q, pilots.log_q[index]]).double()

    path = AnnealingPath(model, initial, check_batch(x))
    return _anneal(path, plan, start, generator=generator, progress=progress, max_bytes=max_bytes, what="AIS")


def _anneal(
    path: AnnealingPath,
    plan: _Plan,
    start: Callable[[AnnealingPath, int], tuple[PathState, Tensor]],
    *,
    generator: Randomness,
    progress: Progress,
    max_bytes: int | None,
    what: str,
) -> AISResult:
    """Run chains along a schedule, one chunk of observations after the other.

    `start` returns the first state and log-weights of a chunk, given the number of observations before it.
    """
    pieces = chunks(path, plan.n_chains + plan.n_pilots, generator=generator, max_bytes=max_bytes)
    n, n_before, results = len(plan.schedule) - 1, 0, []
    for i, chunk in enumerate(pieces):

        def report(j: int, before: int = i * n) -> None:
            progress(before + j, len(pieces) * n, what)

        chunk_plan = plan.for_observations(slice(n_before, n_before + chunk.x.shape[-2]))
        results.append(_anneal_chunk(chunk, chunk_plan, *start(chunk, n_before), generator, report))
        n_before += chunk.x.shape[-2]
    return concat_results(results)


def _anneal_chunk(
    path: AnnealingPath,
    plan: _Plan,
    state: PathState,
    log_w: Tensor,
    generator: Randomness,
    report: Callable[[int], None],
) -> AISResult:
    source, table = as_source(generator), plan.step_table(log_w.shape[1:])
    step = torch.zeros_like(log_w[0]) + plan.step_size if table is None else table[0]
    steps, acceptance, n_nonfinite = [], torch.zeros_like(log_w[0]), torch.zeros_like(log_w[0], dtype=torch.long)
    for i, (t_from, t_to) in enumerate(pairwise(plan.schedule.to(log_w.device))):
        step = step if table is None else table[i]
        log_w = log_w + state.log_increment(t_from, t_to)
        move = transition(path, state, t_to, step, n_leapfrog=plan.n_leapfrog, source=source)
        state = move.state
        steps.append(step)
        acceptance += move.acceptance[: plan.n_chains].mean(0)
        n_nonfinite += move.n_nonfinite
        if table is None:
            step = adapted(step, move.acceptance[plan.n_chains :], target=_TARGET_ACCEPTANCE, gain=_GAIN)
        report(i + 1)
    n_gradients = torch.full_like(n_nonfinite, log_w.shape[0] * (1 + len(steps) * plan.n_leapfrog))
    z, log_w = state.z[: plan.n_chains], check_log_weights(log_w[: plan.n_chains])
    return AISResult(z, log_w, acceptance / len(steps), torch.stack(steps), n_nonfinite, n_gradients)


# -------------------------------------------------------------------------------------- bidirectional Monte Carlo
@dataclass(frozen=True)
class Sandwich:
    """Forward and reverse annealing, which bound log p(x) from below and above; ``reverse`` estimates -log p(x).

    Each bound holds with high probability: the lower exceeds log p(x) by b nats with probability at most exp(-b), and
    likewise for the upper. All chains of ``reverse`` start at one latent, so that their spread does not show the error:
    its ``standard_error`` is NaN.
    """

    forward: AISResult
    reverse: AISResult

    @property
    def lower(self) -> Tensor:
        """Stochastic lower bound of log p(x). Shapes: ``-> (*batch)``."""
        return self.forward.log_evidence

    @property
    def upper(self) -> Tensor:
        """Stochastic upper bound of log p(x). Shapes: ``-> (*batch)``."""
        return -self.reverse.log_evidence

    @property
    def gap(self) -> Tensor:
        """Upper minus lower bound; its expectation bounds the error of either. Shapes: ``-> (*batch)``."""
        return self.upper - self.lower


@torch.no_grad()
def bdmc(
    model: Model,
    x: Tensor,
    z_true: Tensor,
    initial: Proposal,
    *,
    n_chains: int = 100,
    temperatures: int | Tensor = 500,
    n_leapfrog: int = 10,
    step_size: float = 0.1,
    n_pilots: int = 16,
    generator: Randomness,
    progress: Progress = silent,
    max_bytes: int | None = None,
) -> Sandwich:
    r"""Bound log p(x) from both sides for data simulated from the model with latents `z_true`.

    Forward annealing gives w with E w = p(x). The latent that generated x is an exact posterior draw; annealing from it
    back to `initial` gives v with E v = 1/p(x). By Jensen's inequality
    :math:`E \log \bar w \le \log p(x) \le -E \log \bar v`. The reverse chains use the step sizes of the forward chains,
    which do not depend on `z_true`.

    Parameters
    ----------
    model, x, initial
        See `ais`.
    z_true
        The latents that generated x. Shapes: ``(*batch, d)``.
    n_chains, temperatures, n_leapfrog, step_size, n_pilots, generator, progress, max_bytes
        See `ais`.

    Returns
    -------
    Sandwich
        Both bounds.

    References
    ----------
    Grosse, Ghahramani & Adams (2015).
    """
    if z_true.shape[:-1] != x.shape[:-1]:
        raise ShapeError(f"z_true {tuple(z_true.shape)} and x {tuple(x.shape)} must describe the same observations.")
    schedule = as_schedule(temperatures)
    forward = ais(
        model, x, initial, n_chains=n_chains, temperatures=schedule, n_leapfrog=n_leapfrog, step_size=step_size,
        n_pilots=n_pilots, generator=generator, progress=progress, max_bytes=max_bytes,
    )  # fmt: skip

    def start(chunk: AnnealingPath, n_before: int) -> tuple[PathState, Tensor]:
        z = z_true[..., n_before : n_before + chunk.x.shape[-2], :]
        state = chunk.evaluate(z.expand(n_chains, *z.shape))
        return state, torch.zeros_like(state.log_q, dtype=torch.float64)

    # in reverse, a move at t[i] follows the weight from t[i+1] and uses the step size of t[i]; at 0 any is valid
    steps = torch.cat([forward.step_size[:1], forward.step_size[:-1]]).flip(0)
    plan, path = _Plan(schedule.flip(0), n_chains, 0, n_leapfrog, steps), AnnealingPath(model, initial, x)
    reverse = _anneal(
        path, plan, start, generator=generator, progress=progress, max_bytes=max_bytes, what="reverse AIS"
    )
    return Sandwich(forward, replace(reverse, independent=False))
