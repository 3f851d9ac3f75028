"""Convergence on held-out data: checks, plateaus, the return to the best parameters, and divergence."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from vaerdict.core import DivergenceError
from vaerdict.training.data import Observations
from vaerdict.training.recipes import Member
from vaerdict.training.stacks import Stack

if TYPE_CHECKING:
    from vaerdict.training.loop import Settings


@dataclass
class TrainingState:
    """The progress of a stack, with one entry per member in every list; a checkpoint stores it as JSON."""

    epoch: int = 0
    seconds: float = 0.0
    history: list[list[tuple[int, float]]] = field(default_factory=list)
    checks_without_gain: list[int] = field(default_factory=list)
    n_drops: list[int] = field(default_factory=list)
    converged_at: list[int | None] = field(default_factory=list)
    information: list[float] = field(default_factory=list)
    lagging: list[bool] = field(default_factory=list)
    best_score: list[float] = field(default_factory=list)

    @classmethod
    def start(cls, stack: Stack) -> TrainingState:
        """The state before the first epoch."""
        m = len(stack.members)
        lagging = stack.members[0].recipe.lagging is not None
        low = [-math.inf] * m
        return cls(0, 0.0, [[] for _ in range(m)], [0] * m, [0] * m, [None] * m, low, [lagging] * m, list(low))


def check(stack: Stack, x_valid: Observations, settings: Settings, state: TrainingState, best: list[Tensor]) -> None:
    """Record the held-out scores, lower learning rates on a plateau, freeze converged members.

    `best` holds the rows of `Stack.rows` with the highest score so far and is updated in place.
    """
    scores = stack.group.mean(settings.score(stack, x_valid, settings.score_particles)).tolist()
    for i, score in enumerate(scores):
        if state.converged_at[i] is not None:
            continue
        best_score = state.best_score[i]
        if math.isnan(score) or score == math.inf:
            check_parameters(stack, state.epoch)
            raise _score_error(stack.members[i], score, state.epoch)
        state.history[i].append((state.epoch, score))
        if settings.patience is None or not _counts(stack.members[i], state.epoch, settings):
            continue
        if score > best_score:
            state.best_score[i] = score
            _copy_row(best, stack.rows(), i)
        # an annealing schedule is followed to its end, because it can cause plateaus of its own
        flat = stack.members[i].recipe.annealing is None and score <= best_score + settings.min_gain
        state.checks_without_gain[i] = state.checks_without_gain[i] + 1 if flat else 0
        if state.checks_without_gain[i] >= settings.patience:
            _drop_rates(stack, settings, state, best, i)


def _drop_rates(stack: Stack, settings: Settings, state: TrainingState, best: list[Tensor], i: int) -> None:
    """Return member i to its best parameters with lower learning rates, or freeze it after the last drop."""
    if state.best_score[i] == -math.inf:
        raise _score_error(stack.members[i], -math.inf, state.epoch)
    state.checks_without_gain[i], state.n_drops[i] = 0, state.n_drops[i] + 1
    _copy_row(stack.rows(), best, i)
    factor = settings.decay if state.n_drops[i] <= settings.drops else 0.0
    stack.theta.lr[i] *= factor
    stack.phi.lr[i] *= factor
    if factor == 0:
        state.converged_at[i] = state.epoch


def return_to_best(stack: Stack, settings: Settings, state: TrainingState, best: list[Tensor]) -> None:
    """Return every member to its best parameters; a member whose annealing let no check count keeps its last ones."""
    for i, member in enumerate(stack.members):
        if state.best_score[i] > -math.inf:
            _copy_row(stack.rows(), best, i)
        elif any(_counts(member, epoch, settings) for epoch, _ in state.history[i]):
            raise _score_error(member, -math.inf, state.epoch)


def _counts(member: Member, epoch: int, settings: Settings) -> bool:
    """Whether a check counts: not while annealing weighs the KL term by less than one."""
    annealing = member.recipe.annealing
    return annealing is None or annealing(epoch / settings.epochs) >= 1


def _copy_row(targets: list[Tensor], sources: list[Tensor], i: int) -> None:
    for target, source in zip(targets, sources, strict=True):
        target[i] = source[i]


def update_lagging(stack: Stack, x_valid: Observations, state: TrainingState) -> None:
    """End the lagging phase of members whose mutual information has stopped rising, or whose phase is over."""
    lagging = stack.members[0].recipe.lagging
    assert lagging is not None
    for i, value in enumerate(stack.group.mean(stack.mutual_information(x_valid, most=256)).tolist()):
        state.lagging[i] = state.lagging[i] and value > state.information[i] and state.epoch < lagging.epochs
        state.information[i] = max(value, state.information[i])


# ---------------------------------------------------------------------------------------------------- divergence
def check_losses(losses: Tensor, stack: Stack, epoch: int, per_batch: int) -> None:
    """Raise a `DivergenceError` for the first loss that is not finite. Shapes: ``losses (steps, members)``."""
    bad = (~torch.isfinite(losses)).nonzero()
    if len(bad):
        step, i = bad[0].tolist()
        raise DivergenceError(
            f"the loss of {stack.members[i].name} became {losses[step, i].item()} in epoch {epoch + 1}, "
            f"batch {step // per_batch + 1}; lower its learning rate, or use a `dreg` or `score` estimator."
        )


def check_parameters(stack: Stack, epoch: int) -> None:
    """Raise a `DivergenceError` if parameters are not finite, which no loss shows after the last step of an epoch."""
    finite = (adam.flat.values.isfinite().all(1).tolist() for adam in (stack.theta, stack.phi))
    for member, *flags in zip(stack.members, *finite, strict=True):
        if not all(flags):
            raise DivergenceError(
                f"the last step of {member.name}, in epoch {epoch}, left parameters that are not finite; lower its "
                "learning rate, or use a `dreg` or `score` estimator."
            )


def _score_error(member: Member, score: float, epoch: int) -> DivergenceError:
    event = "was -inf at every check up to" if score == -math.inf else f"became {score} in"
    return DivergenceError(
        f"the held-out score of {member.name} {event} epoch {epoch}: log_joint gives some observation of x_valid no "
        "finite density; look for values of another scale in x_valid, or lower the learning rate."
    )
