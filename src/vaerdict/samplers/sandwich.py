"""Bidirectional Monte Carlo: the evidence of simulated data between a lower and an upper bound."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from vaerdict.core import Model, Progress, Proposal, ShapeError, silent
from vaerdict.noise import Randomness
from vaerdict.samplers.annealed import AISResult, Plan, ais, anneal
from vaerdict.samplers.path import Path, State
from vaerdict.samplers.schedules import as_schedule


@dataclass(frozen=True)
class Sandwich:
    """The two runs around log p(x); ``reverse`` estimates its negative.

    Each bound holds up to chance: the lower is above the truth by b nats with probability at most exp(-b), and likewise
    the upper below it. The chains of ``reverse`` all set out from one latent, so their spread does not show its error:
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
        """Upper minus lower: a bound on the error of either, in expectation. Shapes: ``-> (*batch)``."""
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
    r"""Bound log p(x) from both sides for data simulated from the model, of which the latents `z_true` are known.

    Forward annealing gives w with E w = p(x). The latent that made x is an exact posterior draw; annealing back from it
    to `initial` gives v with E v = 1/p(x). By Jensen's inequality
    :math:`E \log \bar w \le \log p(x) \le -E \log \bar v`. The way back uses the step sizes of the way forth, which
    do not depend on `z_true`.

    Shapes: ``x (*batch, p)``, ``z_true (*batch, d)``. Reference: Grosse, Ghahramani & Adams (2015).
    """
    if z_true.shape[:-1] != x.shape[:-1]:
        raise ShapeError(f"z_true {tuple(z_true.shape)} and x {tuple(x.shape)} must describe the same observations.")
    schedule = as_schedule(temperatures)
    forward = ais(
        model, x, initial, n_chains=n_chains, temperatures=schedule, n_leapfrog=n_leapfrog, step_size=step_size,
        n_pilots=n_pilots, generator=generator, progress=progress, max_bytes=max_bytes,
    )  # fmt: skip

    def start(part: Path, done: int) -> tuple[State, Tensor]:
        z = z_true[..., done : done + part.x.shape[-2], :]
        state = part.evaluate(z.expand(n_chains, *z.shape))
        return state, torch.zeros_like(state.log_q, dtype=torch.float64)

    # on the way back a move at t[i] follows the weight from t[i+1], so its step is the one of t[i]; at 0 any will do
    steps = torch.cat([forward.step_size[:1], forward.step_size[:-1]]).flip(0)
    plan, path = Plan(schedule.flip(0), n_chains, 0, n_leapfrog, steps), Path(model, initial, x)
    reverse = anneal(path, plan, start, generator=generator, progress=progress, max_bytes=max_bytes, what="reverse AIS")
    return Sandwich(forward, replace(reverse, independent=False))
