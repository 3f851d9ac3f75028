"""The training loop: epochs, annealing, lagging, held-out checks and checkpoints."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from vaerdict.core import DataError, Progress, SettingError, check_count, check_dtype, silent
from vaerdict.objectives import elbo_loss
from vaerdict.proposals import Trainable
from vaerdict.training import convergence
from vaerdict.training.checkpoint import digest, fingerprint, load_checkpoint, restore_stack, save_stack
from vaerdict.training.convergence import TrainingState
from vaerdict.training.data import Matrix, Observations, as_observations
from vaerdict.training.optimiser import Step, make_graphed_step
from vaerdict.training.recipes import Member
from vaerdict.training.scores import AmortisedBound, HeldOutScore
from vaerdict.training.stacks import Stack, signature

_SAVE_INTERVAL = 5  # seconds between checkpoints
_CPU_ROWS, _GPU_ROWS = 32_768, 1_600_000  # particles x batch of a stack, beyond which stacking does not pay


@dataclass(frozen=True)
class Settings:
    """How long and with what precision to train.

    With `patience`, training of a member ends by convergence on held-out data, and `epochs` is a limit. Whenever the
    held-out score has not gained `min_gain` nats for `patience` checks, the member returns to its best parameters and
    its learning rates are multiplied by `decay`; after `drops` such drops the next plateau ends its training. The best
    parameters are returned. Without `patience` training takes `epochs` epochs and returns the last parameters, as it
    does for a recipe whose annealing never reaches one.

    Parameters
    ----------
    n_particles
        Particles per observation in steps of the proposal, and of the model unless `n_particles_theta` is given.
    n_particles_theta
        Particles per observation in steps of the model.
    epochs
        Number of epochs, or the limit with `patience`.
    batch_size
        Observations per step.
    lr_theta, lr_phi
        Learning rates of models and of proposals.
    patience
        Checks without gain before learning rates drop; None for a fixed number of epochs.
    min_gain
        Gain of the held-out score, in nats, that counts as progress.
    drops, decay
        Number of drops of the learning rates, and the factor of each.
    check_every
        Epochs between held-out checks.
    score_particles
        Particles per observation of the held-out score.
    score
        The held-out score: `AmortisedBound` (the IWELBO; for proposals of a fixed model the log effective sample size)
        or `RefinedBound`.
    joint
        Update model and proposal by the same particles and one backward pass, which takes about two thirds of the
        time. Not all losses allow it.
    compile
        Compile the losses with ``torch.compile``.
    graphs
        Replay steps from a CUDA graph: on one GPU, without annealing, lagging or `compile`. Small models train several
        times faster. A model whose Python code changes from step to step must not use it, because the first step is
        replayed.

    Examples
    --------
    >>> Settings(n_particles=10, epochs=50, patience=None).batch_size
    128
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
    score: HeldOutScore = field(default_factory=AmortisedBound)
    joint: bool = False
    compile: bool = False
    graphs: bool = False

    def __post_init__(self) -> None:
        for name in ("n_particles", "epochs", "batch_size", "check_every", "score_particles"):
            check_count(getattr(self, name), name=name)
        for name in ("patience", "n_particles_theta"):
            if getattr(self, name) is not None:
                check_count(getattr(self, name), name=name)
        if not (self.lr_theta > 0 and self.lr_phi > 0 and 0 < self.decay < 1 and self.drops >= 0):
            raise SettingError(
                f"lr_theta={self.lr_theta}, lr_phi={self.lr_phi} must be positive, decay={self.decay} between 0 and 1, "
                f"drops={self.drops} not negative."
            )
        if self.joint and (self.compile or self.n_particles_theta not in (None, self.n_particles)):
            raise SettingError("joint steps share their particles and are not compiled; leave both settings out.")


@dataclass(frozen=True, eq=False)
class Fit:
    """A trained member.

    Parameters
    ----------
    member
        The member as it was passed to `train`.
    model, proposal
        The trained modules, in evaluation mode.
    history
        The epoch and held-out score of every check.
    converged
        Whether training ended by convergence and not at the limit of epochs.
    epochs
        The number of epochs until then.
    seconds
        Training time, divided evenly over the members of a stack.
    """

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


def train(
    members: Sequence[Member],
    x_train: Tensor | Matrix,
    x_valid: Tensor | Matrix,
    settings: Settings | None = None,
    *,
    per_member: bool = False,
    learn_model: bool = True,
    device: torch.device | str = "cpu",
    checkpoint: Path | None = None,
    progress: Progress = silent,
) -> list[Fit]:
    """Train members by their recipes, and select parameters on held-out data.

    Members of one shape are trained side by side; each learns what it would learn alone, up to rounding. Under
    ``torchrun`` (see `vaerdict.training.parallel.process_group`) ranks share every batch and return the same fits; the
    first rank reports progress and writes the checkpoints.

    Parameters
    ----------
    members
        The models and proposals to train; they are copied, not changed.
    x_train, x_valid
        Training and held-out data: tensors ``(n, p)`` or scipy sparse matrices, whose batches are made dense.
    settings
        Epochs, learning rates, particles and convergence.
    per_member
        Whether each member has data of its own: tensors of shape ``(members, n, p)``.
    learn_model
        If False, models stay fixed and only proposals are trained.
    device
        The device to train on.
    checkpoint
        A folder. Training resumes where an earlier call with the same arguments was stopped.
    progress
        Called with epochs done, the limit of epochs, and the name of the stack.

    Returns
    -------
    One `Fit` per member, in the order of `members`.

    Raises
    ------
    DivergenceError
        If a loss or a held-out score is not finite; the message names the member and the epoch.

    Examples
    --------
    >>> import torch, vaerdict as vd
    >>> x, _ = vd.models.PPCA(torch.eye(3, 2), 0.5).simulate(60, generator=vd.seeded(0))
    >>> proposal = vd.Normal().make(x, 2, hidden=(4,), generator=vd.seeded(1))
    >>> member = vd.Member(vd.models.PPCA(torch.eye(3, 2), 1.0), proposal, vd.IWAE, seed=0)
    >>> settings = vd.Settings(n_particles=4, epochs=2, patience=None, score_particles=8)
    >>> (fit,) = train([member], x[:40], x[40:], settings)
    >>> fit.name, fit.epochs, len(fit.history)
    ('IWAE', 2, 1)
    """
    settings = settings or Settings()
    if not members:
        raise SettingError("no members to train; give at least one (model, proposal, recipe, seed).")
    device = torch.device(device)
    data, held_out = _check_data(members, x_train, x_valid, device, per_member)
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
        name = f"{'+'.join(dict.fromkeys(m.recipe.name for m in stack.members))} ({number + 1} of {len(groups)})"
        report = partial(_report, progress, name) if stack.group.rank == 0 else silent
        trained = _run(stack, data.of(group), held_out.of(group), settings, path, report)
        fits.update(zip(group, trained, strict=True))
    return [fits[i] for i in range(len(members))]


def _check_data(
    members: Sequence[Member],
    x_train: Tensor | Matrix,
    x_valid: Tensor | Matrix,
    device: torch.device,
    per_member: bool,
) -> tuple[Observations, Observations]:
    """Both data sets, checked and on the device."""
    data, held_out = (
        as_observations(x, name=name, device=device, members=len(members) if per_member else None)
        for x, name in ((x_train, "x_train"), (x_valid, "x_valid"))
    )
    if data.shape != held_out.shape:
        raise DataError(f"x_train has {tuple(data.shape)} features, x_valid {tuple(held_out.shape)}; they must agree.")
    for member in members:
        for module in (member.model, member.proposal):
            check_dtype(x_train, module, name="x_train")
            check_dtype(x_valid, module, name="x_valid")
    return data, held_out


def _report(progress: Progress, name: str, done: int, total: int, _: str) -> None:
    progress(done, total, name)


def _check_joint(members: Sequence[Member]) -> None:
    """Raise for losses of q that the model's backward pass gives only by division by vanishing weights."""
    for recipe in {m.recipe for m in members}:
        phi, trains_elbo = recipe.phi, recipe.theta is elbo_loss
        if not (phi.z_grad and not phi.q_grad and (trains_elbo or phi.bound in ("iwelbo", "forward_kl", "cubo"))):
            raise SettingError(f"{recipe.name} ({phi.name}) cannot take joint steps; train it with joint=False.")


def _grouped(members: Sequence[Member], settings: Settings, n: int, device: torch.device) -> list[list[int]]:
    """The members of each stack: of one signature, and no more than `stack_size`."""
    by_signature: dict[object, list[int]] = {}
    for i, member in enumerate(members):
        key = signature(member)
        by_signature.setdefault(("single", i) if key is None else key, []).append(i)
    k = max(settings.n_particles, settings.n_particles_theta or 1)
    size = stack_size(k * min(settings.batch_size, n), device)
    return [group[i : i + size] for group in by_signature.values() for i in range(0, len(group), size)]


def stack_size(rows: int, device: torch.device) -> int:
    """The number of members to stack when each passes `rows` rows (particles x batch) through its networks.

    On a CPU stacking saves the dispatch of small operations, which pays up to about 30,000 rows in all. A GPU is filled
    by about fifty times as many.
    """
    return max(1, (_CPU_ROWS if device.type == "cpu" else _GPU_ROWS) // rows)


def _run(
    stack: Stack, x: Observations, x_valid: Observations, settings: Settings, path: Path | None, progress: Progress
) -> list[Fit]:
    group = stack.group
    initial = [adam.flat.values for adam in (stack.theta, stack.phi)]
    group.check_equal(lambda: (digest(initial), x.n), what="starting points or data")
    state = TrainingState.start(stack)
    best = [row.clone() for row in stack.rows()]
    run = {} if path is None else fingerprint(stack, x, x_valid, settings)
    saved = None if path is None else group.first(load_checkpoint(path, run) if group.rank == 0 else None)
    if saved is not None:
        restore_stack(stack, best, saved[0])
        state = TrainingState(**saved[1]["state"])
        state.history = [[(int(e), float(s)) for e, s in member] for member in state.history]
    if settings.compile:
        stack.compile()
    step = _graphed_step(stack, x, settings)
    started = time.perf_counter() - state.seconds
    last_save = time.perf_counter()
    while state.epoch < settings.epochs and not all(epoch is not None for epoch in state.converged_at):
        _epoch(stack, x, settings, state, step)
        state.epoch += 1
        if any(state.lagging):
            convergence.update_lagging(stack, x_valid, state)
        if state.epoch % settings.check_every == 0 or state.epoch == settings.epochs:
            convergence.check(stack, x_valid, settings, state, best)
        state.seconds = time.perf_counter() - started
        progress(state.epoch, settings.epochs, "")
        late = time.perf_counter() - last_save > _SAVE_INTERVAL
        if path is not None and group.first(late or state.epoch == settings.epochs):
            save_stack(stack, best, path, {"fingerprint": run, "state": asdict(state)})
            last_save = time.perf_counter()
    progress(settings.epochs, settings.epochs, "")
    if settings.patience is not None:
        convergence.return_to_best(stack, settings, state, best)
    if path is not None:
        save_stack(stack, best, path, {"fingerprint": run, "state": asdict(state)})
    return _fits(stack, state)


def _epoch(stack: Stack, x: Observations, settings: Settings, state: TrainingState, step: Step | None) -> None:
    size = min(settings.batch_size, x.n)
    batches = stack.shuffled(x.n, size)
    beta = _beta(stack, state.epoch / settings.epochs)
    losses: list[Tensor] = []
    for index in batches:
        if any(state.lagging):
            _lagging_steps(stack, x, size, settings, state, beta)
        batch = x.take(index)
        # a replayed step writes its losses to the same memory every time
        losses += _take_step(stack, batch, settings, beta) if step is None else step(batch).clone()
    stack.synchronise_buffers()
    all_losses = stack.group.mean(torch.stack(losses))
    convergence.check_losses(all_losses, stack, state.epoch, len(losses) // len(batches))


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


def _graphed_step(stack: Stack, x: Observations, settings: Settings) -> Step | None:
    """The step on a batch as a CUDA graph, or None if the settings, recipes or device do not allow one."""
    unscheduled = all(m.recipe.annealing is None and m.recipe.lagging is None for m in stack.members)
    on_one_gpu = stack.device.type == "cuda" and stack.group.size == 1
    if not (settings.graphs and unscheduled and on_one_gpu) or settings.compile:
        return None
    index = torch.arange(min(settings.batch_size, x.n), device=stack.device)
    example = x.take(index.repeat(len(stack.members), 1) if stack.stacked else index)
    state = [*stack.theta.tensors(), *stack.phi.tensors(), *stack.buffers().values()]
    return make_graphed_step(lambda x: _take_step(stack, x, settings, None), (example,), stack.generators, state)


def _beta(stack: Stack, done: float) -> Tensor | None:
    """The weight of each member's KL term, or None if all are one. Shapes: ``-> (members, 1)`` or ``(1,)``."""
    weights = [1.0 if m.recipe.annealing is None else m.recipe.annealing(done) for m in stack.members]
    if all(w == 1 for w in weights):
        return None
    beta = torch.tensor(weights, dtype=stack.phi.flat.values.dtype, device=stack.device)
    return beta[:, None] if stack.stacked else beta


def _lagging_steps(
    stack: Stack, x: Observations, size: int, settings: Settings, state: TrainingState, beta: Tensor | None
) -> None:
    """Additional steps of the proposals of members in their lagging phase, before the model's step."""
    lagging = stack.members[0].recipe.lagging
    assert lagging is not None
    mask = torch.tensor(state.lagging, device=stack.device)
    # the generators of the other members are restored: trained alone they would not have drawn this noise
    generators = zip(stack.generators, stack.orders, state.lagging, strict=True)
    idle = [(g, g.get_state()) for noise, order, lags in generators if not lags for g in {noise, order}]
    for index in stack.shuffled(x.n, size)[: lagging.inner]:
        stack.phi_step(x.take(index), settings.n_particles, beta, mask)
    for generator, generator_state in idle:
        generator.set_state(generator_state)


def _fits(stack: Stack, state: TrainingState) -> list[Fit]:
    convergence.check_parameters(stack, state.epoch)
    fits = []
    for i, (model, proposal) in enumerate(stack.separate()):
        converged_at = state.converged_at[i]
        fits.append(
            Fit(
                stack.members[i],
                model.eval(),
                proposal.eval(),
                state.history[i],
                converged=converged_at is not None,
                epochs=state.epoch if converged_at is None else converged_at,
                seconds=state.seconds / len(stack.members),
            )
        )
    return fits
