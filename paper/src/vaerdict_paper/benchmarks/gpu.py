"""The paper's three grids on an accelerator: seconds of a step, its shares of the ceilings, and what bounds it.

A grid is trained as stacks of members (see `vaerdict.training`); one row is one kind of stack, with five seeds and
otherwise at the sizes of the paper. The MNIST grid, networks as printed with five seeds in a stack, is a workload for
timing and not a preset. Images and counts are simulated, because times do not depend on their values. Seconds of a grid
are those of a step times the steps of all its epochs; early stopping may use fewer. Rows also have the measured time of
training the stack for these epochs, including held-out checks and start-up; MNIST rows have none.
Without a CUDA device everything runs on the CPU at the small sizes of `quick`, which only tests that it runs.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from vaerdict.core import Progress, silent
from vaerdict.models.m1m2 import M1M2
from vaerdict.noise import seeded
from vaerdict.proposals import Family, Normal
from vaerdict.training import RECIPES, Member, Settings, train
from vaerdict.training.data import PerMemberRows
from vaerdict.training.optimiser import allow_tf32, make_graphed_step
from vaerdict.training.semisupervised_stack import SemiData, SemiStack, stack_data
from vaerdict.training.stacks import Stack, signature
from vaerdict_paper.benchmarks.roofline import Ceilings, ceilings, demand, seconds_of, shares
from vaerdict_paper.experiments import genes_fit, mnist_lab, mnist_settings, ppca

log = logging.getLogger("vaerdict.paper.gpu")  # below the logger that the commands print

NEEDS_CUDA = True

Step = Callable[[Tensor], Tensor]


@dataclass(frozen=True, eq=False)
class Workload:
    """A stack to be trained: its step on the batch at `index`, and the number of steps in a grid.

    A step changes `state` in place; recording it must restore `state` and `generators`. Training replays the step
    from a CUDA graph. `train` trains the stack for all epochs; None leaves that out.
    """

    grid: str
    case: str
    members: int
    step: Step
    index: Tensor
    generators: Sequence[torch.Generator]
    state: list[Tensor]
    steps: int
    epochs: int
    stacks: int = 1
    tf32: bool = False
    train: Callable[[], object] | None = None


class Sizes(NamedTuple):
    """Sizes of the grids: seeds, particles, observations and their batches (None: as in the preset)."""

    seeds: int
    particles: int | None
    images: int
    batch: int | None


FULL = Sizes(5, None, 34_500, None)
SMALL = Sizes(1, 2, 64, 16)


def run(*, quick: bool = False, progress: Progress = silent) -> Iterator[dict[str, Any]]:
    """One row with the ceilings of the device, then one per stack."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    limits = ceilings(device, quick=quick)
    yield {"kind": "ceilings", **asdict(limits)}
    sizes = SMALL if quick or device.type == "cpu" else FULL
    makers = [make for grid in (_mnist, _genes, _ppca) for make in grid(sizes, device)]
    for done, make in enumerate(makers, 1):
        yield _row(make(), limits, device)
        if device.type == "cuda":
            torch.cuda.empty_cache()  # releases the memory of a graph
        progress(done, len(makers), "stacks")


def _row(work: Workload, limits: Ceilings, device: torch.device) -> dict[str, Any]:
    with allow_tf32(device if work.tf32 else torch.device("cpu")):
        eager = seconds_of(lambda: work.step(work.index), device)
        demands = demand(lambda: work.step(work.index), device)
        replayed = _replayed(work, device)
    seconds = eager if replayed is None else replayed
    near = shares(demands, seconds, limits, tf32=work.tf32, recorded=replayed is not None)
    return {
        "kind": "stack",
        "device": limits.device,
        "grid": work.grid,
        "case": work.case,
        "members": work.members,
        "step_s": seconds,
        "eager_s": eager,
        "graph_s": replayed,
        "recorded": replayed is not None,
        "epoch_s": seconds * work.steps,
        "grid_s": seconds * work.steps * work.epochs * work.stacks,
        "trained_s": _seconds(work.train, device),
        **demands._asdict(),
        "flops": demands.flop / seconds,
        "bytes_per_s": demands.bytes / seconds,
        "busy": None if demands.kernel_s is None else min(1.0, demands.kernel_s / seconds),
        **{f"{name}_share": value for name, value in near._asdict().items()},
        "bound": near.bound,
        "steps": work.steps,
        "epochs": work.epochs,
        "stacks": work.stacks,
        "tf32": work.tf32,
    }


def _replayed(work: Workload, device: torch.device) -> float | None:
    """Seconds of the step as a CUDA graph; None without a CUDA device, or if it cannot be recorded."""
    if device.type != "cuda":
        return None
    try:
        step = make_graphed_step(work.step, (work.index,), work.generators, work.state)
    except RuntimeError as error:
        log.warning("%s, %s: cannot be recorded as a CUDA graph: %s", work.grid, work.case, error)
        return None
    return seconds_of(lambda: step(work.index), device)


def _seconds(work: Callable[[], object] | None, device: torch.device) -> float | None:
    """Seconds of a complete training; None without a CUDA device."""
    if work is None or device.type != "cuda":
        return None
    started = time.perf_counter()
    work()
    torch.cuda.synchronize(device)
    return time.perf_counter() - started


Maker = Callable[[], Workload]


# -------------------------------------------------------------------------------------------------------- MNIST
def _mnist(sizes: Sizes, device: torch.device) -> Iterator[Maker]:
    """Models in their stacks (VAE with IWAE, WW, CHI), and the proposals that are fitted to each of them.

    Particles, batches, labels and epochs are those of presets, but no preset trains these networks in these stacks.
    """
    paper = mnist_settings.PRESETS["paper"]
    preset = replace(
        paper, n_particles=sizes.particles or paper.n_particles, batch_size=sizes.batch or paper.batch_size
    )
    data = _images(sizes.images, preset.n_labels if sizes.particles is None else 18)
    make = partial(_semi, preset=preset, data=data, device=device)
    for names in (("VAE", "IWAE"), ("WW",), ("CHI",)):
        keys = [(name, seed) for name in names for seed in range(sizes.seeds)]
        yield partial(make, keys, epochs=mnist_settings.AS_PRINTED.epochs, learn_model=True)
        # proposals by these rules for the models of all four rules, twenty in a stack
        n = len(names)
        keys = [(name, i) for name in names for i in range(len(mnist_settings.FOUR) * sizes.seeds // n)]
        yield partial(
            make, keys, epochs=preset.proposal_epochs, learn_model=False, stacks=n * mnist_settings.OURS.networks
        )


def _semi(
    keys: list[tuple[str, int]],
    *,
    preset: mnist_settings.Preset,
    data: SemiData,
    device: torch.device,
    epochs: int,
    learn_model: bool,
    stacks: int = 1,
) -> Workload:
    members = []
    for name, seed in keys:
        model = M1M2(data.x.shape[1], mnist_settings.N_KNOWN, generator=seeded(seed))
        members.append(mnist_lab.fresh_member(model, name, seed))
    settings = mnist_lab.training_settings(preset, mnist_settings.AS_PRINTED, epochs)
    stack = SemiStack(members, stack_data([data] * len(members), device), settings, learn_model=learn_model)
    batches = stack.shuffled()
    kind = "models" if learn_model else "proposals"
    return Workload(
        "MNIST",
        f"{kind} by {_names(keys)}",
        len(members),
        stack.step,
        batches[0],
        stack.generators,
        stack.adam.tensors(),
        len(batches),
        epochs,
        stacks,
        tf32=True,
    )


def _images(n: int, n_labels: int) -> SemiData:
    x = torch.rand(n, 784, generator=seeded(0))
    return SemiData(x, torch.arange(n_labels), torch.arange(n_labels) % mnist_settings.N_KNOWN)


def _names(keys: Sequence[tuple[str, int]]) -> str:
    return " and ".join(dict.fromkeys(name for name, _ in keys))


# --------------------------------------------------------------------------------------------- genes and pPCA
def _genes(sizes: Sizes, device: torch.device) -> Iterator[Maker]:
    """Models of all seeds and recipes in one stack, then new proposals of every recipe for each of them in another.

    The experiment trains one model per task on CPU cores; this is the same computation in stacks.
    """
    paper = genes_fit.Training()
    training = replace(
        paper, n_particles=sizes.particles or paper.n_particles, batch_size=sizes.batch or paper.batch_size
    )
    for simulator in ("appendix", "released"):
        yield partial(_count_models, simulator, training, sizes, device)
        yield partial(_count_proposals, simulator, Normal(), genes_fit.PROPOSALS, training, sizes, device)
        yield partial(_count_proposals, simulator, Normal(full=True), ("IWAE",), training, sizes, device)


def _count_models(simulator: str, training: genes_fit.Training, sizes: Sizes, device: torch.device) -> Workload:
    problems = [genes_fit.Problem.of(simulator, seed) for seed in range(sizes.seeds)]
    members = [(genes_fit.start(p, RECIPES[name]), p) for name in genes_fit.PROPOSALS for p in problems]
    return _stacked("genes", f"models, {simulator}", members, training.settings(), device)


def _count_proposals(
    simulator: str,
    family: Family,
    recipes: Sequence[str],
    training: genes_fit.Training,
    sizes: Sizes,
    device: torch.device,
) -> Workload:
    problems = [genes_fit.Problem.of(simulator, seed) for seed in range(sizes.seeds)]
    models = [(genes_fit.start(p, RECIPES["IWAE"]).model, p) for _ in genes_fit.PROPOSALS for p in problems]
    members = [
        (Member(model, genes_fit.start(p, RECIPES[name], family).proposal, RECIPES[name], p.seed), p)
        for name in recipes
        for model, p in models
    ]
    kind = "full-rank proposals" if family == Normal(full=True) else "proposals"
    settings = training.settings(epochs=training.proposal_epochs)
    return _stacked("genes", f"{kind}, {simulator}", members, settings, device, learn_model=False)


def _ppca(sizes: Sizes, device: torch.device) -> Iterator[Maker]:
    """The four models of all seeds at both particle counts, and the proposals for them."""
    preset = ppca.PRESETS["paper"]
    for k in preset.particles:
        settings = ppca.training_settings(preset, sizes.particles or k)
        yield partial(_linear, settings, sizes, device, learn_model=True)
        yield partial(_linear, settings, sizes, device, learn_model=False)


def _linear(settings: Settings, sizes: Sizes, device: torch.device, *, learn_model: bool) -> Workload:
    problems = [ppca.Problem.of(ppca.PRESETS["paper"], seed) for seed in range(sizes.seeds)]
    per_model = 1 if learn_model else len(ppca.PROPOSALS)
    members = [
        (ppca.member(problem, recipe.name, seed), problem)
        for recipe in ppca.PROPOSALS
        for _ in range(per_model)
        for seed, problem in enumerate(problems)
    ]
    kind = "models" if learn_model else "proposals"
    case = f"{kind}, {settings.n_particles} particles"
    return _stacked("pPCA", case, members, settings, device, learn_model=learn_model)


def _stacked(
    grid: str,
    case: str,
    members: Sequence[tuple[Member, Any]],
    settings: Settings,
    device: torch.device,
    *,
    learn_model: bool = True,
) -> Workload:
    """A stack in which every member has the data set of its problem."""
    assert len({signature(member) for member, _ in members}) == 1
    stack = Stack(
        [member for member, _ in members],
        lr_theta=settings.lr_theta,
        lr_phi=settings.lr_phi,
        learn_model=learn_model,
        device=device,
    )
    parts = [_data(problem) for _, problem in members]
    x = PerMemberRows(torch.stack([train for train, _ in parts]).to(device))
    held_out = torch.stack([valid for _, valid in parts])
    k, batches = settings.n_particles, stack.shuffled(x.n, settings.batch_size)

    def step(index: Tensor) -> Tensor:
        batch = x.take(index)
        if learn_model and settings.joint:
            return stack.joint_step(batch, k, None)
        if learn_model:
            stack.theta_step(batch, k, None)
        return stack.phi_step(batch, k, None)

    def train_all() -> object:
        fixed = replace(settings, patience=None)
        return train(
            [member for member, _ in members],
            x.x,
            held_out,
            fixed,
            per_member=True,
            learn_model=learn_model,
            device=device,
        )

    state = [*stack.theta.tensors(), *stack.phi.tensors()]
    shape = (grid, case, len(members), step, batches[0], stack.generators, state)
    return Workload(*shape, len(batches), settings.epochs, train=train_all)


def _data(problem: ppca.Problem | genes_fit.Problem) -> tuple[Tensor, Tensor]:
    """Training and held-out data. Shapes: ``(n, p)`` each."""
    if isinstance(problem, genes_fit.Problem):
        return problem.counts(problem.train), problem.counts(problem.valid)
    return problem.data.x_train, problem.data.x_train[:64]
