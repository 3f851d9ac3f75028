"""The training loop: epochs, annealing, lagging, convergence on held-out data, checkpoints."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from vaerdict.core import DataError, DivergenceError, Progress, SettingError, check_count, check_dtype, silent
from vaerdict.objectives import elbo_loss
from vaerdict.proposals import Trainable
from vaerdict.training.checkpoint import digest, load_checkpoint, save_checkpoint
from vaerdict.training.data import Matrix, Observations, observations
from vaerdict.training.fingerprint import fingerprint
from vaerdict.training.graphs import Step, recorded
from vaerdict.training.scores import OwnBound, Score
from vaerdict.training.stacks import Member, Stack, signature

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Settings:
    """How long and how finely to train.

    With `patience` a member's learning rates fall to `decay` of themselves whenever its held-out score (the IWELBO; of
    proposals for a fixed model the log effective sample size) has not gained `min_gain` nats for that many checks, and
    after `drops` such falls it has converged; `epochs` is then only a limit. Without, training takes `epochs` epochs,
    no more and no less. The best point on held-out data is what is returned with `patience`, the last one without, or
    where a recipe's annealing never reaches one. The model's steps draw `n_particles_theta` particles where that is
    given, and as many as the proposal's where it is not. With `joint` model and proposal take their steps together, by
    the same particles and one backward pass: half again as fast, for recipes whose losses allow it. With `graphs` a GPU
    replays steps from a CUDA graph where that can be: on one device, without annealing, lagging or compiling. Small
    models train several times faster so; a model whose Python code does something else from step to step would be
    replayed as it was in the first, which is why it is asked for.
    """

    n_particles: int = 30
    n_particles_theta: int | None = None
    epochs: int = 1000
    batch_size: int = 128
    lr_theta: float = 1e-2
    lr_phi: float = 3e-3
    patience: int | None = 8
    min_gain: float = 1e-4
    drops: int = 3
    decay: float = 0.3
    check_every: int = 2
    score_particles: int = 100
    score: Score = field(default_factory=OwnBound)
    joint: bool = False
    compile: bool = False
    graphs: bool = False

    def __post_init__(self) -> None:
        for name in ("n_particles", "epochs", "batch_size", "check_every", "score_particles"):
            check_count(getattr(self, name), name=name)
        if self.patience is not None:
            check_count(self.patience, name="patience")
        if not (self.lr_theta > 0 and self.lr_phi > 0 and 0 < self.decay < 1 and self.drops >= 0):
            raise SettingError(
                f"lr_theta={self.lr_theta}, lr_phi={self.lr_phi} must be positive, decay={self.decay} between 0 and 1, "
                f"drops={self.drops} not negative."
            )
        if self.n_particles_theta is not None:
            check_count(self.n_particles_theta, name="n_particles_theta")
        if self.joint and (self.compile or self.n_particles_theta not in (None, self.n_particles)):
            raise SettingError("joint steps share their particles and are not compiled; leave both settings out.")


@dataclass(frozen=True, eq=False)
class Fit:
    """A trained member: its modules, its held-out bound at every check, and how training ended."""

    member: Member
    model: nn.Module
    proposal: Trainable
    history: list[tuple[int, float]]
    converged: bool
    epochs: int
    seconds: float

    @property
    def name(self) -> str:
        """The recipe's name."""
        return self.member.recipe.name

    @property
    def seed(self) -> int:
        """The member's seed."""
        return self.member.seed


@dataclass
class _Course:
    """What is remembered of each member along the way."""

    epoch: int = 0
    seconds: float = 0.0
    history: list[list[tuple[int, float]]] = field(default_factory=list)
    since: list[int] = field(default_factory=list)
    falls: list[int] = field(default_factory=list)
    done_at: list[int | None] = field(default_factory=list)
    information: list[float] = field(default_factory=list)
    lagging: list[bool] = field(default_factory=list)
    record: list[float] = field(default_factory=list)

    @classmethod
    def start(cls, stack: Stack) -> _Course:
        m = len(stack.members)
        lag = stack.members[0].recipe.lagging is not None
        low = [float("-inf")] * m
        return cls(0, 0.0, [[] for _ in range(m)], [0] * m, [0] * m, [None] * m, low, [lag] * m, list(low))


def train(
    members: Sequence[Member],
    x_train: Tensor | Matrix,
    x_valid: Tensor | Matrix,
    settings: Settings | None = None,
    *,
    apart: bool = False,
    learn_model: bool = True,
    device: torch.device | str = "cpu",
    checkpoint: Path | None = None,
    progress: Progress = silent,
) -> list[Fit]:
    """Train members by their recipes, those of one shape side by side, and return them in the order given.

    Inputs are left untouched. Observations are tensors ``(n, p)`` or sparse matrices (scipy, CSR), of which batches are
    made dense; with `apart` tensors ``(members, n, p)``, a data set for each member. With `learn_model=False` the
    models stay fixed and only proposals learn. With `checkpoint`, a folder, training goes on where an earlier call with
    the same arguments was stopped. A loss or held-out score that is not finite stops everything with a
    `DivergenceError` that says whose, and when. Under ``torchrun`` (see `parallel.joined`) ranks share every batch and
    return the same fits; the first one reports progress and keeps the checkpoints.
    """
    settings = settings or Settings()
    if not members:
        raise SettingError("no members to train; give at least one (model, proposal, recipe, seed).")
    device = torch.device(device)
    own = len(members) if apart else None
    data, held_out = _data(members, x_train, x_valid, device, own)
    if settings.joint and learn_model:
        _check_joint(members)
    fits: dict[int, Fit] = {}
    groups = _grouped(members, settings, data.n, device)
    for number, group in enumerate(groups):
        stack = Stack(
            [members[i] for i in group],
            lr_theta=settings.lr_theta,
            lr_phi=settings.lr_phi,
            learn_model=learn_model,
            device=device,
        )
        path = None if checkpoint is None else checkpoint / f"stack-{number}"
        what = f"{'+'.join(dict.fromkeys(m.recipe.name for m in stack.members))} ({number + 1} of {len(groups)})"
        listen = partial(_hear, progress, what) if stack.group.rank == 0 else silent
        trained = _run(stack, data.of(group), held_out.of(group), settings, path, listen)
        fits.update(zip(group, trained, strict=True))
    return [fits[i] for i in range(len(members))]


def _data(
    members: Sequence[Member], x_train: Tensor | Matrix, x_valid: Tensor | Matrix, device: torch.device, own: int | None
) -> tuple[Observations, Observations]:
    """Both data sets, checked and brought to the device."""
    data, held_out = (
        observations(x, name=name, device=device, members=own)
        for x, name in ((x_train, "x_train"), (x_valid, "x_valid"))
    )
    if data.shape != held_out.shape:
        raise DataError(f"x_train has {tuple(data.shape)} features, x_valid {tuple(held_out.shape)}; they must agree.")
    for member in members:
        for module in (member.model, member.proposal):
            check_dtype(x_train, module, name="x_train")
            check_dtype(x_valid, module, name="x_valid")
    if isinstance(x_train, Tensor) and log.isEnabledFor(logging.INFO):
        axis = 0 if own is None else 1
        n_constant = int((x_train == x_train.narrow(axis, 0, 1)).all(axis).sum())
        log.info("%d features of x_train are constant; they do no harm", n_constant)
    return data, held_out


def _hear(progress: Progress, what: str, done: int, total: int, _: str) -> None:
    progress(done, total, what)


def _check_joint(members: Sequence[Member]) -> None:
    """Refuse losses of q that cannot be had from the model's backward pass without dividing by vanishing weights."""
    for recipe in {m.recipe for m in members}:
        phi, plain = recipe.phi, recipe.theta is elbo_loss
        if not (phi.z_grad and not phi.q_grad and (plain or phi.bound in ("iwelbo", "forward_kl", "cubo"))):
            raise SettingError(f"{recipe.name} ({phi.name}) cannot take joint steps; train it with joint=False.")


def _grouped(members: Sequence[Member], settings: Settings, n: int, device: torch.device) -> list[list[int]]:
    """Stacks of members of one shape, no larger than pays."""
    by_signature: dict[object, list[int]] = {}
    for i, member in enumerate(members):
        key = signature(member)
        by_signature.setdefault(("alone", i) if key is None else key, []).append(i)
    k = max(settings.n_particles, settings.n_particles_theta or 1)
    size = stack_size(k * min(settings.batch_size, n), device)
    return [group[i : i + size] for group in by_signature.values() for i in range(0, len(group), size)]


def stack_size(rows: int, device: torch.device) -> int:
    """How many members to stack when each pushes `rows` rows (particles x batch) through its networks.

    On a CPU stacking saves the dispatch of small operations and pays until the arithmetic outweighs it, at some
    30,000 rows in all; a GPU is filled by about fifty times as many.
    """
    budget = 32_768 if device.type == "cpu" else 1_600_000
    return max(1, budget // rows)


def _run(
    stack: Stack, x: Observations, x_valid: Observations, settings: Settings, path: Path | None, progress: Progress
) -> list[Fit]:
    group = stack.group
    starts = [adam.flat.values for adam in (stack.theta, stack.phi)]
    group.check_alike(lambda: (digest(starts), x.n), what="starting points or data")
    course = _Course.start(stack)
    best = [row.clone() for row in stack.rows()]
    run = {} if path is None else fingerprint(stack, x, x_valid, settings)
    saved = None if path is None else group.first(load_checkpoint(path, run) if group.rank == 0 else None)
    if saved is not None:
        course = _resume(stack, best, saved)
    if settings.compile:
        stack.compile()
    step = _recorded(stack, x, settings)
    started = time.perf_counter() - course.seconds
    last_save = time.perf_counter()
    while course.epoch < settings.epochs and not all(d is not None for d in course.done_at):
        _epoch(stack, x, settings, course, step)
        course.epoch += 1
        if any(course.lagging):
            _end_lagging(stack, x_valid, course)
        if course.epoch % settings.check_every == 0 or course.epoch == settings.epochs:
            _check(stack, x_valid, settings, course, best)
        course.seconds = time.perf_counter() - started
        progress(course.epoch, settings.epochs, "")
        if path is not None and group.first(time.perf_counter() - last_save > 5 or course.epoch == settings.epochs):
            _save(stack, best, course, path, run)
            last_save = time.perf_counter()
    progress(settings.epochs, settings.epochs, "")
    if settings.patience is not None:
        _return_to_best(stack, settings, course, best)
    if path is not None:
        _save(stack, best, course, path, run)
    return _fits(stack, course)


def _epoch(stack: Stack, x: Observations, settings: Settings, course: _Course, step: Step | None) -> None:
    size = min(settings.batch_size, x.n)
    batches = stack.shuffled(x.n, size)
    beta = _beta(stack, course.epoch / settings.epochs)
    losses: list[Tensor] = []
    for index in batches:
        if any(course.lagging):
            _lag(stack, x, size, settings, course, beta)
        batch = x.take(index)
        # what is replayed writes its losses to the same place every time
        losses += _take_step(stack, batch, settings, beta) if step is None else step(batch).clone()
    stack.share_buffers()
    _stop_if_not_finite(stack.group.mean(torch.stack(losses)), stack, course.epoch, len(losses) // len(batches))


def _take_step(stack: Stack, batch: Tensor, settings: Settings, beta: Tensor | None) -> Tensor:
    """One step of models and proposals, or of proposals alone; returns the losses of each.

    Shapes: ``-> (2, members)`` or ``(1, members)``.
    """
    if stack.learn_model and settings.joint:
        return stack.joint_step(batch, settings.n_particles, beta)
    losses = []
    if stack.learn_model:
        losses.append(stack.theta_step(batch, settings.n_particles_theta or settings.n_particles, beta))
    losses.append(stack.phi_step(batch, settings.n_particles, beta))
    return torch.stack(losses)


def _recorded(stack: Stack, x: Observations, settings: Settings) -> Step | None:
    """The step on a batch as a CUDA graph; None where it is not wanted or cannot be one."""
    free = all(m.recipe.annealing is None and m.recipe.lagging is None for m in stack.members)
    here = stack.device.type == "cuda" and stack.group.size == 1
    if not (settings.graphs and free and here) or settings.compile:
        return None
    index = torch.arange(min(settings.batch_size, x.n), device=stack.device)
    batch = x.take(index.repeat(len(stack.members), 1) if stack.stacked else index)
    state = [*stack.theta.tensors(), *stack.phi.tensors(), *stack.buffers().values()]
    return recorded(lambda some: _take_step(stack, some, settings, None), (batch,), stack.generators, state)


def _beta(stack: Stack, done: float) -> Tensor | None:
    """Weight of each member's KL term, or None where all are one."""
    weights = [1.0 if m.recipe.annealing is None else m.recipe.annealing(done) for m in stack.members]
    if all(w == 1 for w in weights):
        return None
    beta = torch.tensor(weights, dtype=stack.phi.flat.values.dtype, device=stack.device)
    return beta[:, None] if stack.stacked else beta


def _lag(stack: Stack, x: Observations, size: int, settings: Settings, course: _Course, beta: Tensor | None) -> None:
    """Let the proposals of members still in their lagging phase catch up before the model moves."""
    lagging = stack.members[0].recipe.lagging
    assert lagging is not None
    only = torch.tensor(course.lagging, device=stack.device)
    # what the others draw meanwhile must not count: alone they would not have drawn it
    both = zip(stack.generators, stack.orders, course.lagging, strict=True)
    idle = [(g, g.get_state()) for noise, order, lags in both if not lags for g in {noise, order}]
    for index in stack.shuffled(x.n, size)[: lagging.inner]:
        stack.phi_step(x.take(index), settings.n_particles, beta, only)
    for generator, state in idle:
        generator.set_state(state)


def _check(stack: Stack, x_valid: Observations, settings: Settings, course: _Course, best: list[Tensor]) -> None:
    """Record the held-out bound, lower learning rates on a plateau, freeze what has converged."""
    scores = stack.group.mean(settings.score(stack, x_valid, settings.score_particles)).tolist()
    for i, score in enumerate(scores):
        if course.done_at[i] is not None:
            continue
        record = course.record[i]
        if math.isnan(score) or score == math.inf:
            _stop_if_ruined(stack, course.epoch)
            raise _no_score(stack.members[i], score, course.epoch)
        course.history[i].append((course.epoch, score))
        if settings.patience is None or not _counts(stack.members[i], course.epoch, settings):
            continue
        if score > record:
            course.record[i] = score
            _copy_row(best, stack.rows(), i)
        # a schedule is followed to its end: what looks like a plateau may be one of its own
        flat = stack.members[i].recipe.annealing is None and score <= record + settings.min_gain
        course.since[i] = course.since[i] + 1 if flat else 0
        if course.since[i] >= settings.patience:
            _fall(stack, settings, course, best, i)


def _fall(stack: Stack, settings: Settings, course: _Course, best: list[Tensor], i: int) -> None:
    """Member i is on a plateau: go back to its best point and on from there with finer steps, or call it converged."""
    if course.record[i] == -math.inf:
        raise _no_score(stack.members[i], -math.inf, course.epoch)
    course.since[i], course.falls[i] = 0, course.falls[i] + 1
    _copy_row(stack.rows(), best, i)
    factor = settings.decay if course.falls[i] <= settings.drops else 0.0
    stack.theta.lr[i] *= factor
    stack.phi.lr[i] *= factor
    if factor == 0:
        course.done_at[i] = course.epoch


def _return_to_best(stack: Stack, settings: Settings, course: _Course, best: list[Tensor]) -> None:
    """Every member at its best point; one whose schedule let no check count stays where it is."""
    for i, member in enumerate(stack.members):
        if course.record[i] > -math.inf:
            _copy_row(stack.rows(), best, i)
        elif any(_counts(member, epoch, settings) for epoch, _ in course.history[i]):
            raise _no_score(member, -math.inf, course.epoch)


def _counts(member: Member, epoch: int, settings: Settings) -> bool:
    """Whether a check counts: a point reached while the KL term has another weight is no candidate."""
    annealing = member.recipe.annealing
    return annealing is None or annealing(epoch / settings.epochs) >= 1


def _copy_row(targets: list[Tensor], sources: list[Tensor], i: int) -> None:
    for target, source in zip(targets, sources, strict=True):
        target[i] = source[i]


def _no_score(member: Member, score: float, epoch: int) -> DivergenceError:
    seen = "was -inf at every check up to" if score == -math.inf else f"became {score} in"
    return DivergenceError(
        f"the held-out score of {member.name} {seen} epoch {epoch}: log_joint gives some observation of x_valid no "
        "finite density; look for values of another scale in x_valid, or lower the learning rate."
    )


def _end_lagging(stack: Stack, x_valid: Observations, course: _Course) -> None:
    lagging = stack.members[0].recipe.lagging
    assert lagging is not None
    for i, value in enumerate(stack.group.mean(stack.mutual_information(x_valid, most=256)).tolist()):
        course.lagging[i] = course.lagging[i] and value > course.information[i] and course.epoch < lagging.epochs
        course.information[i] = max(value, course.information[i])


def _stop_if_not_finite(losses: Tensor, stack: Stack, epoch: int, per_batch: int) -> None:
    bad = (~torch.isfinite(losses)).nonzero()
    if len(bad):
        step, who = bad[0].tolist()
        raise DivergenceError(
            f"the loss of {stack.members[who].name} became {losses[step, who].item()} in epoch {epoch + 1}, "
            f"batch {step // per_batch + 1}; lower its learning rate, or use a `dreg` or `score` estimator."
        )


def _stop_if_ruined(stack: Stack, epoch: int) -> None:
    """The last step of an epoch has no later loss that would tell of it."""
    finite = (adam.flat.values.isfinite().all(1).tolist() for adam in (stack.theta, stack.phi))
    for member, *sound in zip(stack.members, *finite, strict=True):
        if not all(sound):
            raise DivergenceError(
                f"the last step of {member.name}, in epoch {epoch}, left parameters that are not finite; lower its "
                "learning rate, or use a `dreg` or `score` estimator."
            )


def _fits(stack: Stack, course: _Course) -> list[Fit]:
    _stop_if_ruined(stack, course.epoch)
    fits = []
    for i, (model, proposal) in enumerate(stack.separate()):
        done_at = course.done_at[i]
        fits.append(
            Fit(
                stack.members[i],
                model.eval(),
                proposal.eval(),
                course.history[i],
                converged=done_at is not None,
                epochs=course.epoch if done_at is None else done_at,
                seconds=course.seconds / len(stack.members),
            )
        )
    return fits


def _save(stack: Stack, best: list[Tensor], course: _Course, path: Path, run: dict[str, object]) -> None:
    tensors = {f"theta.{k}": v for k, v in stack.theta.state().items()} | {
        f"phi.{k}": v for k, v in stack.phi.state().items()
    }
    tensors |= {f"best.{i}": row for i, row in enumerate(best)}
    tensors |= {f"buffer.{name}": buffer.clone() for name, buffer in stack.buffers().items()}
    of_ranks = stack.group.every([g.get_state() for g in stack.every_generator()])
    tensors |= {f"generator.{i}": state for i, state in enumerate(state for states in of_ranks for state in states)}
    if stack.group.rank == 0:
        save_checkpoint(path, tensors, {"fingerprint": run, "course": asdict(course)})


def _resume(stack: Stack, best: list[Tensor], saved: tuple[dict[str, Tensor], dict]) -> _Course:
    tensors, notes = saved
    stack.theta.load({k.removeprefix("theta."): v for k, v in tensors.items() if k.startswith("theta.")})
    stack.phi.load({k.removeprefix("phi."): v for k, v in tensors.items() if k.startswith("phi.")})
    for i, row in enumerate(best):
        row.copy_(tensors[f"best.{i}"])
    for name, buffer in stack.buffers().items():
        buffer.copy_(tensors[f"buffer.{name}"])
    generators = stack.every_generator()
    for i, generator in enumerate(generators, stack.group.rank * len(generators)):
        generator.set_state(tensors[f"generator.{i}"].cpu())
    course = _Course(**notes["course"])
    course.history = [[(int(e), float(s)) for e, s in member] for member in course.history]
    return course
