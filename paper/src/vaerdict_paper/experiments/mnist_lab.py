"""Data, trained models and fitted proposals of one variant and seed of the MNIST experiment."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from vaerdict.models.m1m2 import M1M2, Recognition, recognition
from vaerdict.noise import seeded
from vaerdict.training.semisupervised import SemiFit, train_semisupervised
from vaerdict.training.semisupervised_stack import SemiData, SemiMember, SemiSettings, semi_recipe
from vaerdict_paper.experiments.mnist_baselines import IMAGE
from vaerdict_paper.experiments.mnist_measure import UNSEEN
from vaerdict_paper.experiments.mnist_settings import MIXTURE, N_KNOWN, Preset, Variant
from vaerdict_paper.mnist_data import Mnist, MnistSplit, mnist_split

log = logging.getLogger("vaerdict.paper.mnist")  # below the logger that the commands print


class Lab:
    """The data of some seeds, the device, and the seconds of the stages."""

    def __init__(self, preset: Preset, images: Mnist, seeds: Sequence[int]) -> None:
        self.preset = preset
        self.device = torch.device(preset.device)
        self.splits = {seed: _split(preset, preset.first_split + seed, images) for seed in seeds}
        self.training = {seed: SemiData(s.x_train, s.labelled, s.y_labelled) for seed, s in self.splits.items()}
        self.stages: list[dict[str, Any]] = []

    def test(self, seed: int, n: int) -> tuple[Tensor, Tensor]:
        """The first n test digits of a seed, on the device."""
        split = self.splits[seed]
        return split.x_test[:n].to(self.device), split.y_test[:n].to(self.device)

    def held_out(self, seed: int) -> tuple[Tensor, Tensor]:
        """The held-out digits of a seed, on the device."""
        return self.splits[seed].x_held_out.to(self.device), self.splits[seed].y_held_out.to(self.device)

    def noise(self, seed: int) -> torch.Generator:
        """A generator on the device."""
        return seeded(seed, self.device)

    @contextmanager
    def stage(self, name: str, what: str) -> Iterator[None]:
        """Time a stage, until the device has finished it."""
        log.info("%s: %s", name, what)
        started = time.perf_counter()
        yield
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        device = torch.cuda.get_device_name() if self.device.type == "cuda" else "CPU"
        seconds = time.perf_counter() - started
        self.stages.append({"stage": name, "what": what, "seconds": seconds, "device": device})


def _split(preset: Preset, number: int, images: Mnist) -> MnistSplit:
    """The split of that number, shortened to the training images of the preset, all labelled ones among them."""
    split = mnist_split(number, n_labels=preset.n_labels, n_held_out=preset.n_held_out, unknown=UNSEEN, data=images)
    if preset.n_train is None:
        return split
    labelled = torch.zeros(len(split.x_train), dtype=torch.bool)
    labelled[split.labelled] = True
    rest = (~labelled).nonzero().flatten()[: max(0, preset.n_train - len(split.labelled))]
    x = torch.cat([split.x_train[split.labelled], split.x_train[rest]])
    return split._replace(x_train=x, labelled=torch.arange(len(split.labelled)))


# ------------------------------------------------------------------------------------------------------- training
@dataclass(frozen=True, eq=False)
class Trained:
    """A trained model with its recognition model."""

    name: str
    seed: int
    model: M1M2
    recognition: Recognition


@dataclass(frozen=True, eq=False)
class Proposals:
    """Recognition models fitted to one fixed model: as many by every objective."""

    networks: dict[str, list[Recognition]]

    @property
    def single(self) -> dict[str, Recognition]:
        """The first network by every objective."""
        return {name: networks[0] for name, networks in self.networks.items()}

    @property
    def mixture(self) -> dict[str, Recognition]:
        """The networks of the paper's mixture."""
        return {name: q for name, q in self.single.items() if name in MIXTURE}

    @property
    def ensembles(self) -> dict[str, dict[str, Recognition]]:
        """Several networks by one objective, the control for the mixture: ``3 IWAE``."""
        return {
            f"{len(networks)} {name}": {f"{name} {i}": q for i, q in enumerate(networks)}
            for name, networks in self.networks.items()
            if len(networks) > 1
        }


def trained_models(lab: Lab, variant: Variant, seed: int) -> list[Trained]:
    """A model by every objective of the variant."""
    members = []
    for name in variant.objectives:
        model = M1M2(
            lab.splits[seed].x_train.shape[1],
            N_KNOWN + variant.free,
            hidden=variant.architecture,
            generator=seeded(seed),
        )
        members.append(fresh_member(model, name, seed))
    with lab.stage("training", f"models of {variant.name}, {variant.epochs} epochs"):
        fits = _train(lab, variant, members, seed, variant.epochs, learn_model=True)
    return [Trained(n, seed, f.model, f.recognition) for n, f in zip(variant.objectives, fits, strict=True)]


def fitted_proposals(lab: Lab, variant: Variant, fits: Sequence[Trained]) -> dict[str, Proposals]:
    """Recognition models by every objective for each fixed model, all started from the one trained with it."""
    if not variant.proposals:
        return {fit.name: Proposals({}) for fit in fits}
    keys = [(fit, name, i) for i in range(variant.networks) for name in variant.proposals for fit in fits]
    members = [
        started(fresh_member(fit.model, name, 1000 * (i + 1) + fit.seed), fit.recognition) for fit, name, i in keys
    ]
    with lab.stage("proposals", f"proposals of {variant.name}, {lab.preset.proposal_epochs} epochs"):
        fitted = _train(lab, variant, members, fits[0].seed, lab.preset.proposal_epochs, learn_model=False)
    networks: dict[str, dict[str, list[Recognition]]] = {f.name: {q: [] for q in variant.proposals} for f in fits}
    for (fit, name, _), new in zip(keys, fitted, strict=True):
        networks[fit.name][name].append(new.recognition)
    return {name: Proposals(by_objective) for name, by_objective in networks.items()}


def fresh_member(model: M1M2, name: str, seed: int) -> SemiMember:
    """A member with a new recognition model: Student-t for CHI, as in the paper's applications."""
    q = recognition(model, image_shape=IMAGE, df=5.0 if name == "CHI" else None, generator=seeded(seed))
    return SemiMember(model, q, semi_recipe(name), seed)


def started(member: SemiMember, start: Recognition) -> SemiMember:
    """The member with the weights of its recognition model replaced by those of `start`; a Student-t keeps its df."""
    weights = {name: value.cpu() for name, value in start.state_dict().items() if name != "df"}
    missing, unexpected = member.recognition.load_state_dict(weights, strict=False)
    assert not unexpected
    assert set(missing) <= {"df"}
    return member


def _train(
    lab: Lab, variant: Variant, members: list[SemiMember], seed: int, epochs: int, *, learn_model: bool
) -> list[SemiFit]:
    settings = training_settings(lab.preset, variant, epochs)
    return train_semisupervised(members, *lab.training[seed], settings, learn_model=learn_model, device=lab.device)


def training_settings(preset: Preset, variant: Variant, epochs: int) -> SemiSettings:
    """The training settings of a variant's models, or of proposals for them."""
    return SemiSettings(
        n_particles=preset.n_particles,
        epochs=epochs,
        batch_size=preset.batch_size,
        dropout=variant.dropout,
        relaxed=variant.relaxed,
        shifts=variant.shifts,
        cooling=variant.cooling,
        labelled_bound=variant.labelled_bound,
        image_shape=IMAGE,
    )
