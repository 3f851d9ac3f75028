"""Checkpoints: resuming to equal bits, refusing other runs, and files that are replaced atomically."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from vaerdict.core import SettingError
from vaerdict.models.ppca import PPCA
from vaerdict.noise import seeded
from vaerdict.objectives import loss, vr_iwelbo_loss
from vaerdict.proposals import Conditional, Normal, Student, Trainable
from vaerdict.training import (
    AGG,
    CYCLIC,
    IWAE,
    AmortisedBound,
    Fit,
    Lagging,
    Member,
    RefinedBound,
    Settings,
    loop,
    optimiser,
    train,
    warm_up,
)
from vaerdict.training.checkpoint import digest, load_checkpoint, read_checkpoint, save_checkpoint, stable_name
from vaerdict.training.stacks import Stack

TRUE = PPCA(torch.randn(4, 2, generator=seeded(0)), 0.7)
X = TRUE.simulate(120, generator=seeded(1))[0]
SETTINGS = Settings(
    n_particles=4,
    epochs=6,
    batch_size=40,
    check_every=1,
    patience=1,
    drops=1,
    min_gain=0.1,
    score_particles=8,
    lr_phi=1e-2,
)


class Killed(Exception):
    pass


def member(recipe=IWAE, seed: int = 0, family=Normal(), noise: float = 1.0) -> Member:  # noqa: B008 - frozen value
    proposal = family.make(X, 2, hidden=(6,), generator=seeded(seed))
    return Member(PPCA(TRUE.weight, noise), proposal, recipe, seed)


LAGGING = replace(AGG, lagging=Lagging(inner=2, epochs=4))
MEMBERS = [member(), member(seed=1), member(CYCLIC), member(LAGGING), member(LAGGING, 1), member(IWAE, 0, Student())]


def run(folder: Path | None, members=MEMBERS, settings: Settings = SETTINGS, x: Tensor = X, **options) -> list[Fit]:
    return train(members, x[:80], x[80:], settings, checkpoint=folder, **options)


def kill_after(stack: int, epoch: int):
    def progress(done: int, total: int, name: str) -> None:
        if done == epoch and f"({stack} of" in name:
            raise Killed

    return progress


def outcome(fits: list[Fit]) -> tuple[list[Tensor], list[object]]:
    tensors = [t for f in fits for module in (f.model, f.proposal) for t in module.state_dict().values()]
    return tensors, [(f.name, f.seed, f.history, f.epochs, f.converged) for f in fits]


def assert_same(a: list[Fit], b: list[Fit]) -> None:
    (s, records), (t, others) = outcome(a), outcome(b)
    assert records == others
    assert all(torch.equal(u, v) for u, v in zip(s, t, strict=True))


@pytest.fixture(scope="module")
def uninterrupted() -> list[Fit]:
    fits = run(None)
    assert len({f.epochs for f in fits}) > 1  # some converge early, so that the state of each member matters
    assert any(f.converged for f in fits)
    return fits


@pytest.fixture
def save_every_epoch(monkeypatch):
    """A clock that advances by an hour at every reading."""
    monkeypatch.setattr(loop, "time", SimpleNamespace(perf_counter=itertools.count(0.0, 3600.0).__next__))


# ------------------------------------------------------------------------------------------------ resuming
@pytest.mark.parametrize("stack", [1, 2, 3])
@pytest.mark.parametrize("epoch", [1, 2, 3, 5])
def test_a_killed_run_resumes_to_equal_bits(stack, epoch, uninterrupted, tmp_path, save_every_epoch):
    with pytest.raises(Killed):
        run(tmp_path, progress=kill_after(stack, epoch))
    last = tmp_path / f"stack-{stack - 1}.safetensors"
    assert last.exists() == (epoch > 1)  # only the epoch of the kill is lost
    assert_same(run(tmp_path), uninterrupted)


def test_a_run_killed_before_its_first_checkpoint_starts_anew(uninterrupted, tmp_path):
    with pytest.raises(Killed):
        run(tmp_path, progress=kill_after(1, 3))
    assert not list(tmp_path.iterdir())
    assert_same(run(tmp_path), uninterrupted)


def test_a_run_killed_many_times_resumes_each_time(uninterrupted, tmp_path, save_every_epoch):
    kills = 0
    for stack, epoch in itertools.product((1, 2, 3), range(2, 7)):
        try:
            run(tmp_path, progress=kill_after(stack, epoch))
        except Killed:
            kills += 1
    assert kills >= 10
    assert_same(run(tmp_path), uninterrupted)


def test_a_finished_run_is_not_trained_again(uninterrupted, tmp_path, monkeypatch):
    assert_same(run(tmp_path), uninterrupted)
    monkeypatch.setattr(Stack, "phi_step", None)
    assert_same(run(tmp_path), uninterrupted)


def test_training_with_a_fixed_model_resumes(tmp_path, save_every_epoch):
    members = [member(), member(IWAE, 0, Student())]
    expected = run(None, members, learn_model=False)
    with pytest.raises(Killed):
        run(tmp_path, members, learn_model=False, progress=kill_after(2, 3))
    assert_same(run(tmp_path, members, learn_model=False), expected)


class Counting(Trainable):
    """An encoder with a running mean, as in batch norm, and a count of its batches."""

    def __init__(self) -> None:
        super().__init__()
        self.body = Normal().make(X, 2, hidden=(6,), generator=seeded(0))
        self.mean, self.n = nn.Buffer(torch.zeros(4)), nn.Buffer(torch.tensor(0))

    def forward(self, x: Tensor) -> Conditional:
        if self.training:
            self.mean.lerp_(x.mean(0), 0.1)
            self.n += 1
        return self.body(x - self.mean)


@pytest.mark.parametrize("epoch", [2, 5])
def test_buffers_are_restored(epoch, tmp_path, save_every_epoch):
    members = [Member(PPCA(TRUE.weight, 1.0), Counting(), IWAE, 0)]
    expected = run(None, members)
    assert expected[0].proposal.n > 0
    with pytest.raises(Killed):
        run(tmp_path, members, progress=kill_after(1, epoch))
    assert_same(run(tmp_path, members), expected)


def test_seconds_are_summed_over_interruptions(tmp_path, save_every_epoch):
    with pytest.raises(Killed):
        run(tmp_path, [member()], progress=kill_after(1, 4))
    saved = json.loads(read_notes(tmp_path / "stack-0.safetensors"))["state"]["seconds"]
    (fit,) = run(tmp_path, [member()])
    assert fit.seconds > saved > 0


# --------------------------------------------------------------------------------------------- fingerprints
def read_notes(path: Path) -> str:
    from safetensors import safe_open

    with safe_open(path, "pt") as file:
        return file.metadata()["notes"]


def mean_loss(log_w: Tensor, scale: float = 1.0) -> Tensor:
    return -scale * log_w.mean(0)


OTHER_RUNS = {
    "seed": {"members": [member(seed=1)]},
    "start of the model": {"members": [member(noise=2.0)]},
    "start of the proposal": {"members": [replace(member(), proposal=member(seed=5).proposal)]},
    "loss": {"members": [member(replace(IWAE, phi=loss("iwelbo", "pathwise")))]},
    "model's loss": {"members": [member(replace(IWAE, theta=mean_loss))]},
    "annealing": {"members": [member(replace(IWAE, annealing=warm_up()))]},
    "family": {"members": [member(IWAE, 0, Normal(full=True))]},
    "settings": {"settings": replace(SETTINGS, lr_phi=0.1)},
    "order of the data": {"x": X.flip(0)},
    "held-out data": {"x": torch.cat([X[:80], 2 * X[80:]])},
    "fixed model": {"learn_model": False},
}


REFUSED = (
    r"stack-0.safetensors belongs to another run \(members, data, settings or version differ\); "
    "choose another folder or delete it"
)


@pytest.mark.parametrize("difference", OTHER_RUNS)
def test_the_checkpoint_of_another_run_is_refused(difference, tmp_path):
    run(tmp_path, [member()])
    before = (tmp_path / "stack-0.safetensors").read_bytes()
    with pytest.raises(SettingError, match=REFUSED):
        run(tmp_path, **{"members": [member()], **OTHER_RUNS[difference]})
    assert (tmp_path / "stack-0.safetensors").read_bytes() == before


def test_a_checkpoint_of_parameters_laid_out_otherwise_is_refused(tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(optimiser, "_ALIGNED", 1)  # as in versions that did not pad parameters
        run(tmp_path, [member()])
    with pytest.raises(SettingError, match=REFUSED):
        run(tmp_path, [member()])


def test_partial_functions_are_identified_by_their_arguments(tmp_path):
    def with_alpha(alpha: float) -> list[Fit]:
        return run(tmp_path, [member(replace(IWAE, theta=partial(vr_iwelbo_loss, alpha=alpha)))])

    assert_same(with_alpha(0.1), with_alpha(0.1))
    with pytest.raises(SettingError, match="belongs to another run"):
        with_alpha(0.9)


def test_stable_names(tmp_path):
    name = stable_name(partial(mean_loss, scale=2.0))
    assert name == "test_checkpoint.mean_loss(scale=2.0)"
    assert stable_name(loss("iwelbo", "dreg").fn) != stable_name(loss("cubo", "dreg").fn)
    assert stable_name(partial(mean_loss, torch.ones(2))) != stable_name(partial(mean_loss, torch.zeros(2)))
    assert stable_name((AmortisedBound(), RefinedBound(3))).endswith("RefinedBound(n_observations=3, n_steps=15)]")
    assert stable_name(None) == "None"
    for nameless in (lambda log_w: log_w, partial(lambda log_w: log_w), TRUE.log_joint, kill_after(1, 1), object()):
        with pytest.raises(SettingError, match="has no name that a checkpoint could know it by"):
            stable_name(nameless)
    unnamed = [member(replace(IWAE, theta=lambda log_w: -log_w.mean(0)))]
    with pytest.raises(SettingError, match="or train without checkpoint"):
        run(tmp_path, unnamed)
    assert not list(tmp_path.iterdir())
    run(None, unnamed, replace(SETTINGS, epochs=1))


def test_compiling_does_not_change_the_fingerprint(tmp_path, monkeypatch):
    (fit,) = run(tmp_path, [member()])
    monkeypatch.setattr(Stack, "compile", lambda self: None)
    assert_same(run(tmp_path, [member()], replace(SETTINGS, compile=True)), [fit])


# ------------------------------------------------------------------------------------------------- files
def test_dots_are_part_of_a_checkpoints_name(tmp_path):
    for name, value in (("run-0.1", 1.0), ("run-0.2", 2.0)):
        save_checkpoint(tmp_path / name, {"t": torch.tensor(value)}, {})
    assert sorted(p.name for p in tmp_path.iterdir()) == ["run-0.1.safetensors", "run-0.2.safetensors"]
    assert read_checkpoint(tmp_path / "run-0.1")[0]["t"] == 1
    assert read_checkpoint(tmp_path / "run-0.2.safetensors")[0]["t"] == 2
    assert load_checkpoint(tmp_path / "run-0.3", {}) is None


def truncated(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def beheaded(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:4])


def emptied(path: Path) -> None:
    path.write_bytes(b"")


def other_tensors(path: Path) -> None:
    save_file({"a": torch.zeros(2)}, path)


@pytest.mark.parametrize("damage", [truncated, beheaded, emptied, other_tensors])
def test_a_damaged_file_is_refused(damage, tmp_path):
    run(tmp_path, [member()])
    damage(tmp_path / "stack-0.safetensors")
    with pytest.raises(SettingError, match=r"stack-0.safetensors is no checkpoint of vaerdict .*; delete it"):
        run(tmp_path, [member()])


def test_notes_without_a_fingerprint_are_refused(tmp_path):
    save_file({"a": torch.zeros(2)}, tmp_path / "stack-0.safetensors", {"notes": "{}"})
    with pytest.raises(SettingError, match="belongs to another run"):
        run(tmp_path, [member()])


def test_a_kill_while_writing_leaves_the_previous_checkpoint(tmp_path, monkeypatch):
    target, notes = tmp_path / "a", {"state": {"epoch": 1}, "fingerprint": {"run": 1}}
    save_checkpoint(target, {"t": torch.ones(3)}, notes)

    def killed_halfway(tensors, path, metadata) -> None:
        Path(path).write_bytes(b"half a checkpoint")
        raise Killed

    def killed_before_replacing(source, destination) -> None:
        raise Killed

    for name, replacement in (("safetensors.torch.save_file", killed_halfway), ("os.replace", killed_before_replacing)):
        with monkeypatch.context() as patch:
            patch.setattr(name, replacement)
            with pytest.raises(Killed):
                save_checkpoint(target, {"t": torch.zeros(3)}, notes)
    assert torch.equal(load_file(tmp_path / "a.safetensors")["t"], torch.ones(3))
    loaded = load_checkpoint(target, {"run": 1})
    assert loaded is not None
    assert loaded[1] == notes
    assert load_checkpoint(tmp_path / "none", {"run": 1}) is None


def test_digests_depend_on_values_shapes_and_types():
    t = torch.arange(6.0)
    values = [[t], [t.reshape(2, 3)], [t.double()], [t[:3], t[3:]], [t.flip(0)], [t + 1e-6], [], [torch.tensor(1.0)]]
    assert len({digest(v) for v in values}) == len(values)
    assert digest([t.reshape(2, 3).mT]) == digest([t.reshape(2, 3).mT.contiguous()])
