"""Two ranks over gloo learn what one process learns, and have equal parameters.

All tasks of the ranks run once, in one pair of processes; the tests read the results that each rank wrote.
"""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, multiprocessing
from torch import distributed as dist

from vaerdict.core import SettingError
from vaerdict.likelihoods import NegativeBinomial
from vaerdict.models import M1M2, recognition
from vaerdict.models.counts import CountModel
from vaerdict.noise import Iid, seeded
from vaerdict.proposals import Normal, OfCounts
from vaerdict.training import (
    AGG,
    IWAE,
    VAE,
    Fit,
    Lagging,
    Member,
    SemiData,
    SemiMember,
    SemiSettings,
    Settings,
    checkpoint,
    loop,
    semi_recipe,
    train,
    train_semisupervised,
)
from vaerdict.training.parallel import RankGroup, current_group, process_group
from vaerdict.training.semisupervised_stack import SemiStack, stack_data
from vaerdict.training.stacks import Stack

ROOT = Path(__file__).parent.parent
GENES, K = 6, 4
CPU = torch.device("cpu")
SETTINGS = Settings(n_particles=K, epochs=5, batch_size=16, check_every=1, patience=1, min_gain=0.5, score_particles=8)
SEMI = SemiSettings(n_particles=K, epochs=3, batch_size=8, labelled_batch=4, dropout=0.0, lr=1e-2)


class Killed(Exception):
    pass


@dataclass(frozen=True)
class BatchNoise(Iid):
    """Noise of the entire batch, equal on all ranks, of which a rank uses its part."""

    group: RankGroup

    def _sample(self, fn: Callable[..., Tensor], k: int, batch: Sequence[int], d: int, like: Tensor) -> Tensor:
        noise = super()._sample(fn, k, (*batch[:-1], batch[-1] * self.group.size), d, like)
        return noise[..., self.group.rank :: self.group.size, :]


def counts(n: int = 40) -> Tensor:
    g = seeded(0)
    x = torch.poisson(4 * torch.rand(n, GENES, generator=g, dtype=torch.double), generator=g)
    return x + (torch.arange(GENES) == 0)  # no cell is without counts


def member(recipe=IWAE, seed: int = 0) -> Member:
    x, g = counts(), seeded(seed)
    model = CountModel.start(x, 2, generator=g, likelihood=NegativeBinomial(), hidden=(8,)).double()
    return Member(model, OfCounts(Normal()).make(x, 2, hidden=(8,), generator=g), recipe, seed)


def semi_member(name: str, seed: int = 0) -> SemiMember:
    g = seeded(seed)
    model = M1M2(6, 3, d_z=2, d_u=2, hidden=(8,), generator=g).double()
    return SemiMember(model, recognition(model, hidden=(8,), generator=g).double(), semi_recipe(name), seed)


def images() -> SemiData:
    x = (torch.rand(24, 6, generator=seeded(5), dtype=torch.double) < 0.4).double()
    return SemiData(x, torch.arange(12), torch.arange(12) % 3)


# --------------------------------------------------------------------------------------- tasks of the ranks
def counts_steps(folder: Path) -> dict[str, Any]:
    """Steps of count models with the noise of the entire batch."""
    stack = Stack([member(), member(seed=1)], lr_theta=1e-2, lr_phi=1e-2, learn_model=True, device=CPU)
    stack.orders = [seeded(10), seeded(11)]
    stack.source = BatchNoise((seeded(20), seeded(21)), stack.group)
    x, first = counts(), None
    for _ in range(3):
        for index in stack.shuffled(len(x), 20):
            losses = stack.theta_loss(x[index], stack.proposal.noise(x[index], K, stack.source), None)
            gradient = stack.theta.flat.gradient(losses)
            first = (gradient, stack.group.mean(gradient)) if first is None else first
            stack.theta.step(gradient)
            stack.phi_step(x[index], K, None)
            stack.joint_step(x[index], K, None)
    assert first is not None
    return {
        "rank_gradient": first[0],
        "gradient": first[1],
        "theta": stack.theta.flat.values,
        "phi": stack.phi.flat.values,
    }


def semi_steps(folder: Path) -> dict[str, Any]:
    """Steps of M1+M2 with the noise of the entire batch, whose first images are also the labelled ones."""
    data = images()
    parameters: dict[str, Any] = {}
    for relaxed in (True, False):
        members = [semi_member("IWAE"), semi_member("VAE", 1)]
        stack = SemiStack(members, stack_data([data] * 2, CPU), replace(SEMI, relaxed=relaxed), learn_model=True)
        stack.source = BatchNoise((seeded(20), seeded(21)), stack.group)
        labelled = stack.group.shard(torch.arange(12).expand(2, -1))
        for index in itertools.chain(stack.shuffled(), stack.shuffled()):
            x = torch.cat([stack.data.x[index], data.x[labelled]], 1)
            stack.adam.step(stack.adam.flat.gradient(stack.losses(x, data.labels[labelled])))
        parameters[f"relaxed={relaxed}"] = stack.adam.flat.values
    return parameters


def values(fits: Sequence[Fit]) -> list[Tensor]:
    return [p.detach() for fit in fits for p in (*fit.model.parameters(), *fit.proposal.parameters())]


MEMBERS = [member(), member(VAE, 1), member(replace(AGG, lagging=Lagging(inner=2, epochs=3)), 2)]


def run(folder: Path | None = None, members: Sequence[Member] = MEMBERS, settings: Settings = SETTINGS) -> list[Fit]:
    return train(members, counts()[:32], counts()[32:], settings, checkpoint=folder)


def trained(folder: Path) -> dict[str, Any]:
    """A run in which each rank draws its own noise, and the same run killed after three epochs and resumed."""
    written: list[str] = []
    save, epoch, clock = checkpoint.save_checkpoint, loop._epoch, loop.time

    def recording_save(path: Path, *arguments: Any) -> None:
        written.append(path.name)
        save(path, *arguments)

    def killed_epoch(stack: Stack, x: Any, settings: Settings, state: Any, step: Any) -> None:
        if state.epoch == 3:
            raise Killed
        epoch(stack, x, settings, state, step)

    uninterrupted = run()
    checkpoint.save_checkpoint, loop._epoch = recording_save, killed_epoch
    # by the clock of the first rank, and only by that, a checkpoint is due after every epoch
    hours = itertools.count(0.0, 3600.0 if current_group().rank == 0 else 0.0)
    loop.time = SimpleNamespace(perf_counter=hours.__next__)  # type: ignore[assignment]
    try:
        with pytest.raises(Killed):
            run(folder / "checkpoint")
    finally:
        checkpoint.save_checkpoint, loop._epoch, loop.time = save, epoch, clock
    resumed = run(folder / "checkpoint")
    return {
        "uninterrupted": values(uninterrupted),
        "resumed": values(resumed),
        "history": [fit.history for fit in uninterrupted],
        "epochs": [fit.epochs for fit in uninterrupted],
        "written": written,
    }


def semi_trained(folder: Path) -> dict[str, Any]:
    reported: list[int] = []
    fits = train_semisupervised(
        [semi_member("WW"), semi_member("IWAE", 1)], *images(), SEMI, progress=lambda done, *_: reported.append(done)
    )
    parameters = [p.detach() for f in fits for p in (*f.model.parameters(), *f.recognition.parameters())]
    return {"values": parameters, "losses": [f.losses for f in fits], "reported": reported}


def randomness(folder: Path) -> dict[str, Any]:
    stack = Stack([member()], lr_theta=1e-2, lr_phi=1e-2, learn_model=True, device=CPU)
    return {"noise": stack.source.normal(1, (3,), 2, like=torch.ones(())), "order": stack.shuffled(8, 4)}


def refusals(folder: Path) -> dict[str, Any]:
    """Error messages of several ranks; a single process raises none of these errors."""
    rank = current_group().rank
    attempts: dict[str, Callable[[], object]] = {
        "starts": lambda: run(members=[member(seed=rank)]),
        "semi starts": lambda: train_semisupervised([semi_member("VAE", rank)], *images(), SEMI),
        "odd": lambda: run(settings=replace(SETTINGS, batch_size=15)),
    }
    messages = {}
    for name, attempt in attempts.items():
        try:
            messages[name] = repr(type(attempt()))
        except SettingError as error:
            messages[name] = str(error)
    return messages


TASKS = (counts_steps, semi_steps, trained, semi_trained, randomness, refusals)


def rank_process(rank: int, folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    results = {task.__name__: task(folder) for task in TASKS}
    torch.save(results, folder / f"{rank}.pt")
    dist.destroy_process_group()


# ------------------------------------------------------------------------------------------------------- tests
@pytest.fixture(scope="module")
def ranks(tmp_path_factory) -> list[dict[str, Any]]:
    """The results of two ranks, by task."""
    folder = tmp_path_factory.mktemp("ranks")
    multiprocessing.spawn(rank_process, (folder,), nprocs=2)
    return [torch.load(folder / f"{rank}.pt") for rank in range(2)]


def test_the_mean_gradient_of_two_half_batches_is_that_of_the_batch(ranks, tmp_path):
    """In double precision, to 1e-12 of the largest entry: the order of summation differs."""
    alone = counts_steps(tmp_path)
    a, b = (rank["counts_steps"] for rank in ranks)
    scale = alone["gradient"].abs().max().item()
    assert torch.equal(a["gradient"], b["gradient"])
    torch.testing.assert_close(a["gradient"], alone["gradient"], rtol=0, atol=1e-12 * scale)
    assert (a["rank_gradient"] - alone["gradient"]).abs().max() > 1e-2 * scale  # that of one half batch differs


def test_two_ranks_take_the_steps_of_one_process(ranks, tmp_path):
    """After a dozen steps of Adam parameters agree within 1e-9, and to the bit between the ranks."""
    for task in (counts_steps, semi_steps):
        alone, (a, b) = task(tmp_path), (rank[task.__name__] for rank in ranks)
        for name in alone.keys() - {"rank_gradient"}:
            assert torch.equal(a[name], b[name]), name
            torch.testing.assert_close(a[name], alone[name], rtol=0, atol=1e-9)


def test_ranks_end_with_equal_parameters_and_histories(ranks):
    a, b = (rank["trained"] for rank in ranks)
    assert all(torch.equal(p, q) for p, q in zip(a["uninterrupted"], b["uninterrupted"], strict=True))
    assert a["history"] == b["history"]
    assert a["epochs"] == b["epochs"]
    assert not all(
        torch.equal(p, q) for p, q in zip(a["uninterrupted"], values(run()), strict=True)
    )  # ranks draw other noise


def test_the_first_rank_writes_the_checkpoint_and_all_ranks_resume_from_it(ranks):
    a, b = (rank["trained"] for rank in ranks)
    assert a["written"] == ["stack-0"] * 3
    assert b["written"] == []
    for rank in (a, b):
        assert all(torch.equal(p, q) for p, q in zip(rank["uninterrupted"], rank["resumed"], strict=True))


def test_m1m2_has_equal_parameters_on_all_ranks_and_the_first_rank_reports(ranks):
    a, b = (rank["semi_trained"] for rank in ranks)
    assert all(torch.equal(p, q) for p, q in zip(a["values"], b["values"], strict=True))
    assert a["losses"] == b["losses"]
    assert (a["reported"], b["reported"]) == ([1, 2, 3] * 2, [])  # for each of two stacks


def test_ranks_draw_their_own_noise_and_share_the_order_of_the_data(ranks):
    a, b = (rank["randomness"] for rank in ranks)
    assert not torch.isclose(a["noise"], b["noise"]).any()
    assert a["order"].shape == (2, 2)
    assert sorted(torch.cat([a["order"], b["order"]]).flatten().tolist()) == list(range(8))


def test_ranks_with_different_inputs_are_refused_on_every_rank(ranks):
    for rank in ranks:
        messages = rank["refusals"]
        assert "starting points or data differ between ranks; give every rank the same" in messages["starts"]
        assert "starting points differ between ranks" in messages["semi starts"]
        assert "a batch of 15 cannot be split evenly over 2 ranks; use a batch_size of 14 or 16." in messages["odd"]


def test_a_group_of_one(monkeypatch):
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    with process_group() as group:
        assert group == current_group() == RankGroup()
    x = torch.arange(3.0)
    assert group.mean(x) is x
    assert group.shard(x) is x
    assert group.first("a") == "a"
    assert group.gather("a") == ["a"]
    group.check_equal(lambda: "a", what="letters")


def test_the_example_runs_under_torchrun():
    arguments = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "examples/train_parallel.py"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *arguments], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("2 ranks") == 1  # only the first rank prints
