"""Training of M1+M2 models on labelled and unlabelled data, many members side by side."""

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
from vaerdict.training.optimiser import allow_tf32, make_graphed_step
from vaerdict.training.semisupervised_stack import (
    SemiData,
    SemiMember,
    SemiSettings,
    SemiStack,
    StackedData,
    stack_data,
)
from vaerdict.training.stacks import structure


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
    """Train M1+M2 members on partly labelled images. Members of one structure are trained side by side.

    Parameters
    ----------
    members
        The generative and recognition models to train; they are copied, not changed.
    x
        All images. Every image, labelled or not, also counts as unlabelled. Shape: ``(n, p)``.
    labelled
        Positions of the labelled images. Shape: ``(n_labelled,)``.
    labels
        Their classes, counted from 0. Shape: ``(n_labelled,)``.
    settings
        Epochs, learning rate, particles and weights of the losses.
    learn_model
        If False, generative models stay fixed and only recognition models are trained.
    device
        The device to train on.
    max_members
        The most members trained side by side.
    progress
        Called with epochs done, the number of epochs, and the name of the stack.

    Returns
    -------
    One `SemiFit` per member, in the order of `members`.

    Raises
    ------
    DivergenceError
        If a loss is not finite; the message names the member and the epoch.

    Examples
    --------
    >>> import torch, vaerdict as vd
    >>> from vaerdict.models import M1M2, recognition
    >>> from vaerdict.training import SemiMember, SemiSettings, semi_recipe
    >>> x = torch.eye(4).repeat(5, 1)
    >>> model = M1M2(4, 2, d_z=2, d_u=2, hidden=(8,), generator=vd.seeded(0))
    >>> member = SemiMember(model, recognition(model, hidden=(8,), generator=vd.seeded(1)), semi_recipe("IWAE"), seed=0)
    >>> labelled, labels = torch.arange(4), torch.tensor([0, 0, 1, 1])
    >>> (fit,) = train_semisupervised([member], x, labelled, labels, SemiSettings(n_particles=2, epochs=3))
    >>> len(fit.losses)
    3
    """
    return train_semisupervised_each(
        members,
        [SemiData(x, labelled, labels)] * len(members),
        settings,
        learn_model=learn_model,
        device=device,
        max_members=max_members,
        progress=progress,
    )


def train_semisupervised_each(
    members: Sequence[SemiMember],
    data: Sequence[SemiData],
    settings: SemiSettings | None = None,
    *,
    learn_model: bool = True,
    device: torch.device | str = "cpu",
    max_members: int = 20,
    progress: Progress = silent,
) -> list[SemiFit]:
    """Train every member on its own data, all of one size; for the other parameters see `train_semisupervised`."""
    settings = settings or SemiSettings()
    if not members or len(members) != len(data):
        raise SettingError(f"{len(members)} members and {len(data)} data sets; give as many of each, at least one.")
    for member, member_data in zip(members, data, strict=True):
        _check(member, member_data, settings)
    groups: dict[Any, list[int]] = {}
    for i, m in enumerate(members):
        groups.setdefault((m.recipe.pathwise, structure(m.model), structure(m.recognition)), []).append(i)
    stacks = [g[i : i + max_members] for g in groups.values() for i in range(0, len(g), max_members)]
    fits: dict[int, SemiFit] = {}
    for number, group in enumerate(stacks):
        chosen = [members[i] for i in group]
        name = f"{'+'.join(dict.fromkeys(m.recipe.name for m in chosen))} ({number + 1} of {len(stacks)})"
        stacked = stack_data([data[i] for i in group], torch.device(device))
        with allow_tf32(torch.device(device)):
            trained = _run(chosen, stacked, settings, learn_model, progress, name)
        fits.update(zip(group, trained, strict=True))
    return [fits[i] for i in range(len(members))]


def _check(member: SemiMember, data: SemiData, settings: SemiSettings) -> None:
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
    data: StackedData,
    settings: SemiSettings,
    learn_model: bool,
    progress: Progress,
    name: str,
) -> list[SemiFit]:
    started = time.perf_counter()
    stack = SemiStack(members, data, settings, learn_model=learn_model)
    group = stack.group
    group.check_equal(lambda: digest([stack.adam.flat.values]), what="starting points")
    step = stack.step  # with several ranks a step communicates, which a CUDA graph cannot record
    if group.size == 1:
        step = make_graphed_step(step, (stack.shuffled()[0],), stack.generators, stack.adam.tensors())
    history: list[list[float]] = []
    for epoch in range(settings.epochs):
        stack.adam.lr.fill_(settings.rate(epoch))
        batches = stack.shuffled()
        total = torch.zeros(len(members), device=data.x.device)
        for index in batches:
            total += step(index)
        history.append((group.mean(total) / len(batches)).tolist())
        _check_finite(history[-1], members, epoch)
        if group.rank == 0:
            progress(epoch + 1, settings.epochs, name)
    _check_finite(stack.adam.flat.values.sum(1).tolist(), members, settings.epochs - 1, "sum of parameters")
    seconds = (time.perf_counter() - started) / len(members)
    return [
        SemiFit(m, model.eval(), q.eval(), [losses[i] for losses in history], seconds)
        for i, (m, (model, q)) in enumerate(zip(members, stack.separate(), strict=True))
    ]


def _check_finite(values: list[float], members: Sequence[SemiMember], epoch: int, what: str = "loss") -> None:
    for value, member in zip(values, members, strict=True):
        if not math.isfinite(value):
            raise DivergenceError(
                f"the {what} of {member.name} became {value} in epoch {epoch + 1}; lower the learning rate."
            )
