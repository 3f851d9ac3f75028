"""Annealed importance sampling (Neal, 2001) for a batch of observations."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
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
    check_count,
    check_log_weights,
    log_mean_exp,
    silent,
)
from vaerdict.noise import Randomness, as_source
from vaerdict.samplers.hmc import adapted, transition
from vaerdict.samplers.memory import chunks
from vaerdict.samplers.path import Path, State, check_batch
from vaerdict.samplers.results import beside, log_standard_error
from vaerdict.samplers.schedules import as_schedule

_TARGET_ACCEPTANCE = 0.65
_GAIN = 0.5


class Plan(NamedTuple):
    """How chains are annealed; see `ais`."""

    schedule: Tensor
    n_chains: int
    n_pilots: int
    n_leapfrog: int
    step_size: float | Tensor

    def for_observations(self, part: slice) -> Plan:
        """The plan for some of the observations."""
        return self._replace(step_size=self.step_size[..., part]) if isinstance(self.step_size, Tensor) else self

    def table(self, batch: torch.Size) -> Tensor | None:
        """The fixed step sizes, if they are. Shapes: ``-> (temperatures, *batch)``."""
        if not isinstance(self.step_size, Tensor):
            return None
        expected = (len(self.schedule) - 1, *batch)
        if tuple(self.step_size.shape) != expected:
            raise SettingError(
                f"step_size of shape {tuple(self.step_size.shape)} is no table for these temperatures and "
                f"observations; it needs shape {expected}."
            )
        return self.step_size


@dataclass(frozen=True)
class AISResult:
    """Weighted chains: posterior particles whose mean weight estimates the evidence.

    Shapes: ``z (K, *batch, d)``, ``log_w (K, *batch)``; mean ``acceptance``, ``n_nonfinite`` rejected proposals and
    ``n_gradients`` spent (pilots included) ``(*batch)``; ``step_size (temperatures, *batch)``. ``independent`` says
    whether the chains of an observation are: from one shared start they are not.
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
        """Estimate of log p(x), the log of an unbiased one. Shapes: ``-> (*batch)``."""
        return log_mean_exp(self.log_w)

    @property
    def standard_error(self) -> Tensor:
        """Standard error of `log_evidence`, NaN of chains that are not independent. Shapes: ``-> (*batch)``."""
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
    plan = Plan(as_schedule(temperatures), n_chains, n_pilots, check_count(n_leapfrog, name="n_leapfrog"), step_size)

    def start(part: Path, done: int) -> tuple[State, Tensor]:
        z, log_q = part.draw(n_chains, generator=generator)
        # pilots are spread over a second draw of the same size, which a start drawing in strata can give
        some = torch.linspace(0, n_chains - 1, n_pilots, device=z.device).long()
        others = part.draw(n_chains, generator=generator) if n_pilots else Draws(z, log_q)
        state = part.evaluate(torch.cat([z, others.z[some]]))
        # zero, but for starts whose draws were stratified: they carry the shares that were realised
        return state, state.log_q.double() - torch.cat([log_q, others.log_q[some]]).double()

    path = Path(model, initial, check_batch(x))
    return anneal(path, plan, start, generator=generator, progress=progress, max_bytes=max_bytes, what="AIS")


def anneal(
    path: Path,
    plan: Plan,
    start: Callable[[Path, int], tuple[State, Tensor]],
    *,
    generator: Randomness,
    progress: Progress,
    max_bytes: int | None,
    what: str,
) -> AISResult:
    """Run chains along a schedule, one chunk of observations after the other.

    `start` gives, for a chunk and the number of observations before it, the first state and log-weights.
    """
    parts = chunks(path, plan.n_chains + plan.n_pilots, generator=generator, max_bytes=max_bytes)
    n, done, results = len(plan.schedule) - 1, 0, []
    for i, part in enumerate(parts):

        def report(j: int, before: int = i * n) -> None:
            progress(before + j, len(parts) * n, what)

        here = plan.for_observations(slice(done, done + part.x.shape[-2]))
        results.append(_anneal_chunk(part, here, *start(part, done), generator, report))
        done += part.x.shape[-2]
    return beside(results)


def _anneal_chunk(
    path: Path, plan: Plan, state: State, log_w: Tensor, generator: Randomness, report: Callable[[int], None]
) -> AISResult:
    source, table = as_source(generator), plan.table(log_w.shape[1:])
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
