"""Annealed importance sampling (Neal, 2001) for a batch of observations."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from vaerdict.core import Model, Progress, Proposal, SettingError, check_count, check_log_weights, log_mean_exp, silent
from vaerdict.noise import Randomness, as_source
from vaerdict.samplers.hmc import adapted, transition
from vaerdict.samplers.memory import chunks
from vaerdict.samplers.path import Path, State, check_batch, concat_states
from vaerdict.samplers.results import beside, log_standard_error
from vaerdict.samplers.schedules import as_schedule

_TARGET_ACCEPTANCE = 0.65
_GAIN = 0.1


@dataclass(frozen=True)
class AISResult:
    """Weighted chains: posterior particles whose mean weight estimates the evidence.

    Shapes: ``z (K, *batch, d)``, ``log_w (K, *batch)``; mean ``acceptance``, ``n_nonfinite`` rejected proposals and
    ``n_gradients`` spent (pilots included) ``(*batch)``; ``step_size (temperatures, *batch)``.
    """

    z: Tensor
    log_w: Tensor
    acceptance: Tensor
    step_size: Tensor
    n_nonfinite: Tensor
    n_gradients: Tensor

    @property
    def log_evidence(self) -> Tensor:
        """Estimate of log p(x), the log of an unbiased one. Shapes: ``-> (*batch)``."""
        return log_mean_exp(self.log_w)

    @property
    def standard_error(self) -> Tensor:
        """Standard error of `log_evidence`. Shapes: ``-> (*batch)``."""
        return log_standard_error(self.log_w)


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
    r"""Anneal independent chains from `initial` to the posterior and weigh them.

    :math:`\log w = \sum_i (t_i - t_{i-1}) [\log p(x, z_{i-1}) - \log q_0(z_{i-1} \mid x)]`, with a Hamiltonian move at
    :math:`t_i` after each term. The mean of w is unbiased for p(x), so ``log_evidence`` is low on average.

    A step size tuned on a chain's own acceptance would depend on its state, and the move would no longer leave the
    target invariant. So `n_pilots` further chains run alongside, whose acceptance sets the step of the next temperature
    for each observation and whose weights are thrown away: the others stay exactly unbiased. A `step_size` table
    ``(temperatures, *batch)``, such as an earlier result's, is used as it is, without pilots.

    Observations are worked on together as far as `max_bytes` allow (None: see `memory.default_budget`). The result
    repeats for the same seed and the same cut; another cut uses the random numbers in another order.

    Shapes: ``x (*batch, p)``. Reference: Neal (2001), Wu et al. (2016).
    """
    check_count(n_chains, name="n_chains")
    n_pilots = 0 if isinstance(step_size, Tensor) else check_count(n_pilots, name="n_pilots")
    path, schedule = Path(model, initial, check_batch(x)), as_schedule(temperatures)

    def start(part: Path, done: int) -> tuple[State, Tensor]:
        draws = [part.draw(k, generator=generator) for k in (n_chains, n_pilots) if k]
        state = concat_states(part.evaluate(z) for z, _ in draws)
        return state, state.log_q.double() - torch.cat([log_q for _, log_q in draws]).double()

    return anneal(
        path, schedule, start, n_chains=n_chains, n_pilots=n_pilots, n_leapfrog=n_leapfrog, step_size=step_size,
        generator=generator, progress=progress, max_bytes=max_bytes, what="AIS",
    )  # fmt: skip


def anneal(
    path: Path,
    schedule: Tensor,
    start: Callable[[Path, int], tuple[State, Tensor]],
    *,
    n_chains: int,
    n_pilots: int,
    n_leapfrog: int,
    step_size: float | Tensor,
    generator: Randomness,
    progress: Progress,
    max_bytes: int | None,
    what: str,
) -> AISResult:
    """Run chains along a schedule, one chunk of observations after the other.

    `start` gives, for a chunk and the number of observations before it, the first state and log-weights.
    """
    check_count(n_leapfrog, name="n_leapfrog")
    parts = chunks(path, n_chains + n_pilots, generator=generator, max_bytes=max_bytes)
    n, done, results = len(schedule) - 1, 0, []
    for i, part in enumerate(parts):
        state, log_w = start(part, done)
        size = part.x.shape[-2]
        table = step_size[..., done : done + size] if isinstance(step_size, Tensor) else step_size
        done += size

        def report(j: int, before: int = i * n) -> None:
            progress(before + j, len(parts) * n, what)

        results.append(_anneal_chunk(part, schedule, state, log_w, n_chains, n_leapfrog, table, generator, report))
    return beside(results)


def _anneal_chunk(
    path: Path, schedule: Tensor, state: State, log_w: Tensor, n_chains: int, n_leapfrog: int,
    step_size: float | Tensor, generator: Randomness, report: Callable[[int], None],
) -> AISResult:  # fmt: skip
    source = as_source(generator)
    table = _check_table(step_size, schedule, log_w.shape[1:]) if isinstance(step_size, Tensor) else None
    step = torch.zeros_like(log_w[0]) + step_size if table is None else table[0]
    steps, acceptance, n_nonfinite = [], torch.zeros_like(log_w[0]), torch.zeros_like(log_w[0], dtype=torch.long)
    for i, (t_from, t_to) in enumerate(pairwise(schedule.to(log_w.device))):
        step = step if table is None else table[i]
        log_w = log_w + state.log_increment(t_from, t_to)
        move = transition(path, state, t_to, step, n_leapfrog=n_leapfrog, source=source)
        state = move.state
        steps.append(step)
        acceptance += move.acceptance[:n_chains].mean(0)
        n_nonfinite += move.n_nonfinite
        if table is None:
            step = adapted(step, move.acceptance[n_chains:], target=_TARGET_ACCEPTANCE, gain=_GAIN)
        report(i + 1)
    n_gradients = torch.full_like(n_nonfinite, log_w.shape[0] * (1 + len(steps) * n_leapfrog))
    log_w = check_log_weights(log_w[:n_chains])
    return AISResult(state.z[:n_chains], log_w, acceptance / len(steps), torch.stack(steps), n_nonfinite, n_gradients)


def _check_table(table: Tensor, schedule: Tensor, batch: torch.Size) -> Tensor:
    expected = (len(schedule) - 1, *batch)
    if tuple(table.shape) != expected:
        raise SettingError(
            f"step_size of shape {tuple(table.shape)} is no table for these temperatures and observations; "
            f"it needs shape {expected}."
        )
    return table
