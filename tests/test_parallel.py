"""Two ranks over gloo: what they learn together is what one process learns, and both know the same.

Everything the ranks do is done once, in one pair of processes; the tests look at what each of them wrote down.
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
    Labelled,
    Lagging,
    Member,
    Settings,
    loop,
    rule,
    train,
    train_semisupervised,
)
from vaerdict.training.parallel import Group, current, joined
from vaerdict.training.semistack import SemiMember, SemiSettings, SemiStack, together
from vaerdict.training.stacks import Stack

ROOT = Path(__file__).parent.parent
GENES, K = 6, 4
CPU = torch.device("cpu")
SETTINGS = Settings(n_particles=K, epochs=5, batch_size=16, check_every=1, patience=1, min_gain=0.5, score_particles=8)
SEMI = SemiSettings(n_particles=K, epochs=3, batch_size=8, labelled_batch=4, dropout=0.0, lr=1e-2)


class Killed(Exception):
    pass


@dataclass(frozen=True)
class Whole(Iid):
    """Noise for the whole batch, the same on all ranks, of which a rank uses its share."""

    group: Group

    def _each(self, k: int, batch: Sequence[int], make, like: Tensor) -> Tensor:
        whole = super()._each(k, (*batch[:-1], batch[-1] * self.group.size), make, like)
        return whole[..., self.group.rank :: self.group.size, :]


def counts(n: int = 40) -> Tensor:
    g = seeded(0)
    x = torch.poisson(4 * torch.rand(n, GENES, generator=g, dtype=torch.double), generator=g)
    return x + (torch.arange(GENES) == 0)  # no cell is empty


def member(recipe=IWAE, seed: int = 0) -> Member:
    x, g = counts(), seeded(seed)
    model = CountModel.start(x, 2, generator=g, likelihood=NegativeBinomial(), hidden=(8,)).double()
    return Member(model, OfCounts(Normal()).make(x, 2, hidden=(8,), generator=g), recipe, seed)


def semi_member(name: str, seed: int = 0) -> SemiMember:
    g = seeded(seed)
    model = M1M2(6, 3, d_z=2, d_u=2, hidden=(8,), generator=g).double()
    return SemiMember(model, recognition(model, hidden=(8,), generator=g).double(), rule(name), seed)


def images() -> Labelled:
    x = (torch.rand(24, 6, generator=seeded(5), dtype=torch.double) < 0.4).double()
    return Labelled(x, torch.arange(12), torch.arange(12) % 3)


# ------------------------------------------------------------------------------------------- what the ranks do
def counts_steps(folder: Path) -> dict[str, Any]:
    """Steps of count models with the noise of the whole batch, whoever draws it."""
    stack = Stack([member(), member(seed=1)], lr_theta=1e-2, lr_phi=1e-2, learn_model=True, device=CPU)
    stack.orders = [seeded(10), seeded(11)]
    stack.source = Whole((seeded(20), seeded(21)), stack.group)
    x, first = counts(), None
    for _ in range(3):
        for index in stack.shuffled(len(x), 20):
            losses = stack.theta_loss(x[index], stack.proposal.noise(x[index], K, stack.source), None)
            own = stack.theta.flat.gradient(losses)
            first = (own, stack.group.mean(own)) if first is None else first
            stack.theta.step(own)
            stack.phi_step(x[index], K, None)
            stack.joint_step(x[index], K, None)
    assert first is not None
    return {"own": first[0], "gradient": first[1], "theta": stack.theta.flat.values, "phi": stack.phi.flat.values}


def semi_steps(folder: Path) -> dict[str, Any]:
    """Steps of M1+M2 with the noise of the whole batch; its first images are the labelled ones too."""
    data = images()
    made: dict[str, Any] = {}
    for relaxed in (True, False):
        members = [semi_member("IWAE"), semi_member("VAE", 1)]
        team = SemiStack(members, together([data] * 2, CPU), replace(SEMI, relaxed=relaxed), learn_model=True)
        team.source = Whole((seeded(20), seeded(21)), team.group)
        places = team.group.shard(torch.arange(12).expand(2, -1))
        for index in itertools.chain(team.shuffled(), team.shuffled()):
            x = torch.cat([team.data.x[index], data.x[places]], 1)
            team.adam.step(team.adam.flat.gradient(team.losses(x, data.labels[places])))
        made[f"relaxed={relaxed}"] = team.adam.flat.values
    return made


def values(fits: Sequence[Fit]) -> list[Tensor]:
    return [p.detach() for fit in fits for p in (*fit.model.parameters(), *fit.proposal.parameters())]


MEMBERS = [member(), member(VAE, 1), member(replace(AGG, lagging=Lagging(inner=2, epochs=3)), 2)]


def go(checkpoint: Path | None = None, members: Sequence[Member] = MEMBERS, settings: Settings = SETTINGS) -> list[Fit]:
    return train(members, counts()[:32], counts()[32:], settings, checkpoint=checkpoint)


def trained(folder: Path) -> dict[str, Any]:
    """A run with noise of each rank's own, and the same run broken after three epochs and taken up again."""
    written: list[str] = []
    save, epoch, clock = loop.save_checkpoint, loop._epoch, loop.time

    def noted(path: Path, *rest: Any) -> None:
        written.append(path.name)
        save(path, *rest)

    def breaks(stack: Stack, x: Any, settings: Settings, course: Any, step: Any) -> None:
        if course.epoch == 3:
            raise Killed
        epoch(stack, x, settings, course, step)

    whole = go()
    loop.save_checkpoint, loop._epoch = noted, breaks
    # every epoch is late enough for a checkpoint, by the first rank's clock alone
    hours = itertools.count(0.0, 3600.0 if current().rank == 0 else 0.0)
    loop.time = SimpleNamespace(perf_counter=hours.__next__)  # type: ignore[assignment]
    try:
        with pytest.raises(Killed):
            go(folder / "checkpoint")
    finally:
        loop.save_checkpoint, loop._epoch, loop.time = save, epoch, clock
    again = go(folder / "checkpoint")
    return {
        "whole": values(whole),
        "again": values(again),
        "history": [fit.history for fit in whole],
        "epochs": [fit.epochs for fit in whole],
        "written": written,
    }


def semi_trained(folder: Path) -> dict[str, Any]:
    heard: list[int] = []
    fits = train_semisupervised(
        [semi_member("WW"), semi_member("IWAE", 1)], *images(), SEMI, progress=lambda done, *_: heard.append(done)
    )
    every = [p.detach() for f in fits for p in (*f.model.parameters(), *f.recognition.parameters())]
    return {"values": every, "losses": [f.losses for f in fits], "heard": heard}


def randomness(folder: Path) -> dict[str, Any]:
    stack = Stack([member()], lr_theta=1e-2, lr_phi=1e-2, learn_model=True, device=CPU)
    return {"noise": stack.source.normal(1, (3,), 2, like=torch.ones(())), "order": stack.shuffled(8, 4)}


def refusals(folder: Path) -> dict[str, Any]:
    """Messages where there are several ranks; alone nothing is refused."""
    rank = current().rank
    tries: dict[str, Callable[[], object]] = {
        "starts": lambda: go(members=[member(seed=rank)]),
        "semi starts": lambda: train_semisupervised([semi_member("VAE", rank)], *images(), SEMI),
        "odd": lambda: go(settings=replace(SETTINGS, batch_size=15)),
    }
    said = {}
    for name, attempt in tries.items():
        try:
            said[name] = repr(type(attempt()))
        except SettingError as error:
            said[name] = str(error)
    return said


TASKS = (counts_steps, semi_steps, trained, semi_trained, randomness, refusals)


def be_a_rank(rank: int, folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    done = {task.__name__: task(folder) for task in TASKS}
    torch.save(done, folder / f"{rank}.pt")
    dist.destroy_process_group()


# ------------------------------------------------------------------------------------------------------- tests
@pytest.fixture(scope="module")
def ranks(tmp_path_factory) -> list[dict[str, Any]]:
    """What two ranks found, by task."""
    folder = tmp_path_factory.mktemp("ranks")
    multiprocessing.spawn(be_a_rank, (folder,), nprocs=2)
    return [torch.load(folder / f"{rank}.pt") for rank in range(2)]


def test_the_mean_gradient_of_half_batches_is_that_of_the_whole(ranks, tmp_path):
    """In double precision up to the order of summation: 1e-12 of the largest entry."""
    alone = counts_steps(tmp_path)
    a, b = (rank["counts_steps"] for rank in ranks)
    scale = alone["gradient"].abs().max().item()
    assert torch.equal(a["gradient"], b["gradient"])
    torch.testing.assert_close(a["gradient"], alone["gradient"], rtol=0, atol=1e-12 * scale)
    assert (a["own"] - alone["gradient"]).abs().max() > 1e-2 * scale  # half a batch alone has another


def test_two_ranks_take_the_steps_of_one_process(ranks, tmp_path):
    """After a dozen steps of Adam parameters agree within 1e-9, and in every bit between the ranks."""
    for task in (counts_steps, semi_steps):
        alone, (a, b) = task(tmp_path), (rank[task.__name__] for rank in ranks)
        for name in alone.keys() - {"own"}:
            assert torch.equal(a[name], b[name]), name
            torch.testing.assert_close(a[name], alone[name], rtol=0, atol=1e-9)


def test_ranks_end_with_the_same_parameters_by_the_same_decisions(ranks):
    a, b = (rank["trained"] for rank in ranks)
    assert all(torch.equal(p, q) for p, q in zip(a["whole"], b["whole"], strict=True))
    assert a["history"] == b["history"]
    assert a["epochs"] == b["epochs"]
    assert not all(torch.equal(p, q) for p, q in zip(a["whole"], values(go()), strict=True))  # noise of their own


def test_the_first_rank_keeps_the_checkpoint_and_all_go_on_from_it(ranks):
    a, b = (rank["trained"] for rank in ranks)
    assert a["written"] == ["stack-0"] * 3
    assert b["written"] == []
    for rank in (a, b):
        assert all(torch.equal(p, q) for p, q in zip(rank["whole"], rank["again"], strict=True))


def test_m1m2_is_trained_alike_on_all_ranks_and_the_first_one_says_so(ranks):
    a, b = (rank["semi_trained"] for rank in ranks)
    assert all(torch.equal(p, q) for p, q in zip(a["values"], b["values"], strict=True))
    assert a["losses"] == b["losses"]
    assert (a["heard"], b["heard"]) == ([1, 2, 3] * 2, [])  # each of two stacks


def test_ranks_draw_noise_of_their_own_and_split_one_order(ranks):
    a, b = (rank["randomness"] for rank in ranks)
    assert not torch.isclose(a["noise"], b["noise"]).any()
    assert a["order"].shape == (2, 2)
    assert sorted(torch.cat([a["order"], b["order"]]).flatten().tolist()) == list(range(8))


def test_what_cannot_be_trained_together_is_refused_on_every_rank(ranks):
    for rank in ranks:
        said = rank["refusals"]
        assert "starting points or data differ between ranks; give every rank the same" in said["starts"]
        assert "starting points differ between ranks" in said["semi starts"]
        assert "a batch of 15 cannot be split evenly over 2 ranks; use a batch_size of 14 or 16." in said["odd"]


def test_a_group_of_one_does_nothing(monkeypatch):
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    with joined() as group:
        assert group == current() == Group()
    x = torch.arange(3.0)
    assert group.mean(x) is x
    assert group.shard(x) is x
    assert group.first("a") == "a"
    assert group.every("a") == ["a"]
    group.check_alike(lambda: "a", what="letters")


def test_the_example_runs_under_torchrun():
    words = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "examples/train_parallel.py"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *words], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("2 ranks") == 1  # the first rank speaks for both
