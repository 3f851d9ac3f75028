"""The three steps for M1+M2: fit models on few labels and keep the best, fit proposals for it, answer p(c | x)."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from vaerdict.core import Progress, SettingError, silent
from vaerdict.inference.class_posterior import (
    ClassPosterior,
    Make,
    amortised,
    class_posterior,
    joined,
    part_size,
    plugin_classes,
    refined,
)
from vaerdict.models.m1m2 import M1M2, Recognition
from vaerdict.noise import Shared, seeded
from vaerdict.training.semibounds import Rule
from vaerdict.training.semistack import SemiMember, SemiSettings
from vaerdict.training.semisupervised import SemiFit, train_semisupervised

log = logging.getLogger(__name__)

Pair = tuple[M1M2, Recognition]


class ClassScore(NamedTuple):
    """A model's place in the selection: its held-out evidence, how far behind the winner, how much is certified.

    `behind_se` is the standard error of the paired difference.
    """

    model: str
    iwelbo: float
    iwelbo_se: float
    behind: float
    behind_se: float
    certified: float


@dataclass(frozen=True, eq=False)
class SemiSteps:
    """What the three steps leave: the model kept, recognition models for it, its own first, and the selection's table.

    Every observation is given the same noise, so that its answer does not depend on those it is asked with, up to
    rounding (which a kink of the decoder can magnify in a refined proposal, to another one as valid).
    """

    model: M1M2
    recognitions: dict[str, Recognition]
    selection: tuple[ClassScore, ...] = ()

    @property
    def own(self) -> Recognition:
        """The recognition model the kept model was trained with."""
        return next(iter(self.recognitions.values()))

    def plugin(self, x: Tensor, k: int, *, seed: int) -> Tensor:
        """What the model's own recognition model says of c. Shapes: ``(n, p) -> (n, classes)``."""
        parts = x.split(part_size(x, k, self.model.n_classes))
        return torch.cat([plugin_classes(self.own, part, k, generator=_shared(seed, x)) for part in parts])

    def posterior(self, x: Tensor, k: int, *, seed: int, improve: bool = False) -> ClassPosterior:
        """P(c | x) with its evidence: by the mixture of all proposals and the prior, refined where that will not do.

        The own recognition model alone is no rung: its weights cannot show a class whose latents it never draws.
        """
        parts = []
        for part in x.split(part_size(x, k, self.model.n_classes)):
            noise = _shared(seed, x)
            rungs: dict[str, Make] = {
                "MIS": amortised(self.recognitions, self.model),
                "REFINED": refined(self.model, self.own, improve=False, generator=noise),
            }
            if improve:
                rungs["IMPROVED"] = refined(self.model, self.own, improve=True, generator=noise)
            parts.append(class_posterior(self.model, part, rungs, k, generator=noise))
        return joined(parts)


def fit_semisteps(
    make: Callable[[torch.Generator], Pair],
    x: Tensor,
    labelled: Tensor,
    labels: Tensor,
    x_valid: Tensor,
    *,
    objectives: Sequence[Rule],
    proposals: Sequence[Rule] = (),
    settings: SemiSettings,
    k: int = 200,
    seed: int = 0,
    progress: Progress = silent,
) -> SemiSteps:
    """Steps one and two: train by every objective, keep the model of most held-out evidence, fit proposals for it.

    Step two starts from the winner's own recognition model and takes a third of the epochs. Without held-out rows there
    is nothing to choose by, and one objective is allowed.

    Shapes: ``x (n, p)``, ``labelled, labels (n_labelled,)``, ``x_valid (m, p)``.
    """
    if not objectives or (len(objectives) > 1 and not len(x_valid)):
        raise SettingError(f"{len(objectives)} objectives and {len(x_valid)} held-out rows; one objective needs none.")
    members = [SemiMember(*make(seeded(seed)), rule, seed) for rule in objectives]
    device = x.device
    fits = train_semisupervised(members, x, labelled, labels, settings, device=device, progress=progress)
    winner, selection = _select(fits, x_valid, k, seed) if len(x_valid) else (fits[0], ())
    recognitions = {winner.member.rule.name: winner.recognition}
    rules = [rule for rule in proposals if rule is not winner.member.rule]
    if rules:
        shorter = replace(settings, epochs=max(1, settings.epochs // 3))
        members = [SemiMember(winner.model, copy.deepcopy(winner.recognition), rule, seed) for rule in rules]
        fits = train_semisupervised(
            members, x, labelled, labels, shorter, learn_model=False, device=device, progress=progress
        )
        recognitions |= {fit.member.rule.name: fit.recognition for fit in fits}
    return SemiSteps(winner.model, recognitions, selection)


def _select(fits: Sequence[SemiFit], x: Tensor, k: int, seed: int) -> tuple[SemiFit, tuple[ClassScore, ...]]:
    """The fit with the most held-out evidence, and the table it was chosen from, best first."""
    found = [SemiSteps(f.model, {f.member.rule.name: f.recognition}).posterior(x, k, seed=seed) for f in fits]
    order = sorted(range(len(fits)), key=lambda i: -float(found[i].log_evidence.mean()))
    best = found[order[0]].log_evidence
    log.info("kept %s, held-out evidence %.3f", fits[order[0]].member.rule.name, float(best.mean()))
    rows = tuple(_row(fits[i].member.rule.name, found[i], best) for i in order)
    return fits[order[0]], rows


def _row(name: str, found: ClassPosterior, best: Tensor) -> ClassScore:
    evidence, behind = found.log_evidence, best - found.log_evidence
    root = len(best) ** 0.5
    return ClassScore(
        name,
        float(evidence.mean()),
        float(evidence.std()) / root,
        float(behind.mean()),
        float(behind.std()) / root,
        float(found.certified.double().mean()),
    )


def _shared(seed: int, like: Tensor) -> Shared:
    return Shared((seeded(seed, like.device),))
