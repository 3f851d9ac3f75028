"""Training of M1+M2 models on labelled and unlabelled data, many members side by side (see `semibounds`)."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from vaerdict.core import DataError, DivergenceError, Progress, SettingError, check_observations, silent
from vaerdict.models.m1m2 import M1M2, Recognition
from vaerdict.training.checkpoint import digest
from vaerdict.training.graphs import recorded, tensor_cores
from vaerdict.training.semistack import Labelled, SemiMember, SemiSettings, SemiStack, Together, together
from vaerdict.training.stacks import kind


@dataclass(frozen=True, eq=False)
class SemiFit:
    """A trained member with its mean loss in every epoch."""

    member: SemiMember
    model: M1M2
    recognition: Recognition
    losses: list[float]
    seconds: float


def train_semisupervised(
    members: Sequence[SemiMember],
    x: Tensor,
    labelled: Tensor,
    labels: Tensor,
    settings: SemiSettings | None = None,
    *,
    learn_model: bool = True,
    device: torch.device | str = "cpu",
    max_members: int = 20,
    progress: Progress = silent,
) -> list[SemiFit]:
    """Train members, those of one kind side by side on `device`, and return them in the order given.

    `x` holds all images, and ``x[labelled]`` those with `labels`; every image, labelled or not, counts as unlabelled
    too. With `learn_model=False` the generative models stay fixed and only recognition models learn. A loss that is not
    finite stops everything with a `DivergenceError` that says whose, and when.

    Shapes: ``x (n, p)``, ``labelled (n_labelled,)``, ``labels (n_labelled,)``.
    """
    data = [Labelled(x, labelled, labels)] * len(members)
    return train_each(
        members,
        data,
        settings,
        learn_model=learn_model,
        device=device,
        max_members=max_members,
        progress=progress,
    )


def train_each(
    members: Sequence[SemiMember],
    data: Sequence[Labelled],
    settings: SemiSettings | None = None,
    *,
    learn_model: bool = True,
    device: torch.device | str = "cpu",
    max_members: int = 20,
    progress: Progress = silent,
) -> list[SemiFit]:
    """Train every member on data of its own, all of one size; see `train_semisupervised`."""
    settings = settings or SemiSettings()
    if not members or len(members) != len(data):
        raise SettingError(
            f"{len(members)} members and {len(data)} data sets; give as many as the other, at least one."
        )
    for member, own in zip(members, data, strict=True):
        _check(member, own, settings)
    groups: dict[Any, list[int]] = {}
    for i, m in enumerate(members):
        groups.setdefault((m.rule.path, kind(m.model), kind(m.recognition)), []).append(i)
    stacks = [g[i : i + max_members] for g in groups.values() for i in range(0, len(g), max_members)]
    fits: dict[int, SemiFit] = {}
    for number, group in enumerate(stacks):
        chosen = [members[i] for i in group]
        what = f"{'+'.join(dict.fromkeys(m.rule.name for m in chosen))} ({number + 1} of {len(stacks)})"
        own = together([data[i] for i in group], torch.device(device))
        with tensor_cores(torch.device(device)):
            trained = _run(chosen, own, settings, learn_model, progress, what)
        fits.update(zip(group, trained, strict=True))
    return [fits[i] for i in range(len(members))]


def _check(member: SemiMember, data: Labelled, settings: SemiSettings) -> None:
    x, labelled, labels = data
    check_observations(x)
    if not len(labels) or labels.shape != labelled.shape:
        raise DataError(f"{len(labelled)} labelled images have {len(labels)} labels; at least one is needed, one each.")
    first, last = int(labelled.min()), int(labelled.max())
    if first < 0 or last >= len(x):
        raise DataError(f"labelled reaches from {first} to {last}; there are {len(x)} images, counted from 0.")
    lowest, highest, n_classes = int(labels.min()), int(labels.max()), member.model.n_classes
    if lowest < 0 or highest >= n_classes:
        raise DataError(f"labels reach from {lowest} to {highest}; the model has {n_classes} classes, counted from 0.")
    if settings.image_shape is not None and math.prod(settings.image_shape) != x.shape[-1]:
        raise SettingError(f"image_shape={settings.image_shape} does not hold {x.shape[-1]} pixels.")


def _run(
    members: Sequence[SemiMember],
    data: Together,
    settings: SemiSettings,
    learn_model: bool,
    progress: Progress,
    what: str,
) -> list[SemiFit]:
    started = time.perf_counter()
    team = SemiStack(members, data, settings, learn_model=learn_model)
    group = team.group
    group.check_alike(lambda: digest([team.adam.flat.values]), what="starting points")
    step = team.step  # several ranks talk within a step, which is not recorded
    if group.size == 1:
        step = recorded(step, (team.shuffled()[0],), team.generators, team.adam.tensors())
    history: list[list[float]] = []
    for epoch in range(settings.epochs):
        team.adam.lr.fill_(settings.rate(epoch))
        batches = team.shuffled()
        total = torch.zeros(len(members), device=data.x.device)
        for index in batches:
            total += step(index)
        history.append((group.mean(total) / len(batches)).tolist())
        _stop_if_not_finite(history[-1], members, epoch)
        if group.rank == 0:
            progress(epoch + 1, settings.epochs, what)
    _stop_if_not_finite(team.adam.flat.values.sum(1).tolist(), members, settings.epochs - 1, "sum of parameters")
    seconds = (time.perf_counter() - started) / len(members)
    return [
        SemiFit(m, model.eval(), q.eval(), [losses[i] for losses in history], seconds)
        for i, (m, (model, q)) in enumerate(zip(members, team.separate(), strict=True))
    ]


def _stop_if_not_finite(values: list[float], members: Sequence[SemiMember], epoch: int, what: str = "loss") -> None:
    for value, member in zip(values, members, strict=True):
        if not math.isfinite(value):
            raise DivergenceError(
                f"the {what} of {member.name} became {value} in epoch {epoch + 1}; lower the learning rate."
            )
