"""The three steps for M1+M2: fit models on few labels and select one, fit proposals for it, answer p(c | x)."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from vaerdict.core import Progress, SettingError, silent
from vaerdict.inference.class_probabilities import (
    ClassPosterior,
    MakeProposal,
    amortised,
    chunk_size,
    class_posterior,
    plugin_classes,
    refined,
)
from vaerdict.models.m1m2 import M1M2, Recognition
from vaerdict.noise import CommonRandomNumbers, seeded
from vaerdict.training.semisupervised import SemiFit, train_semisupervised
from vaerdict.training.semisupervised_stack import SemiMember, SemiRecipe, SemiSettings

log = logging.getLogger(__name__)


class M1M2Score(NamedTuple):
    """One row of the selection table: the held-out evidence of a model and the share of rows with the verdict OK.

    ``behind`` is the difference from the selected model, with its paired standard error.
    """

    model: str
    iwelbo: float
    iwelbo_se: float
    behind: float
    behind_se: float
    certified: float


@dataclass(frozen=True, eq=False)
class M1M2Steps:
    """The result of the three steps: the selected model, its recognition models by name, and the selection table.

    The first recognition model is the one the model was trained with. All observations get the same noise, so that an
    answer does not depend on the other observations, up to rounding. At a kink of the decoder rounding can lead to a
    different refined proposal, which is equally valid.
    """

    model: M1M2
    recognitions: dict[str, Recognition]
    selection: tuple[M1M2Score, ...] = ()

    @property
    def recognition(self) -> Recognition:
        """The recognition model that the selected model was trained with."""
        return next(iter(self.recognitions.values()))

    def plugin(self, x: Tensor, k: int, *, seed: int) -> Tensor:
        """Class probabilities of `recognition` itself. Shapes: ``(n, p) -> (n, classes)``."""
        chunks = x.split(chunk_size(x, k, self.model.n_classes))
        return torch.cat([plugin_classes(self.recognition, rows, k, generator=_shared(seed, x)) for rows in chunks])

    def posterior(
        self,
        x: Tensor,
        k: int,
        *,
        seed: int,
        refine: bool = True,
        improve: bool = False,
        progress: Progress = silent,
    ) -> ClassPosterior:
        """P(c | x) by the mixture of all recognition models and the prior, refined where that is not reliable.

        One recognition model alone is not a stage, because its weights cannot reveal a class whose latents it never
        draws. With `refine` answers that are not reliable are refined per observation, and with `improve` refined
        proposals that are not reliable are improved by gradient steps. `progress` is called after each chunk.
        """
        answers, n_done = [], 0
        for rows in x.split(chunk_size(x, k, self.model.n_classes)):
            noise = _shared(seed, x)
            stages: dict[str, MakeProposal] = {"MIS": amortised(self.recognitions, self.model)}
            if refine:
                stages["REFINED"] = refined(self.model, self.recognition, improve=False, generator=noise)
            if improve:
                stages["IMPROVED"] = refined(self.model, self.recognition, improve=True, generator=noise)
            answers.append(class_posterior(self.model, rows, stages, k, generator=noise))
            n_done += len(rows)
            progress(n_done, len(x), "p(c | x) by importance sampling")
        return ClassPosterior.concatenated(answers)


def fit_m1m2_steps(
    make: Callable[[torch.Generator], tuple[M1M2, Recognition]],
    x: Tensor,
    labelled: Tensor,
    labels: Tensor,
    x_valid: Tensor,
    *,
    objectives: Sequence[SemiRecipe],
    proposals: Sequence[SemiRecipe] = (),
    settings: SemiSettings,
    k: int = 200,
    seed: int = 0,
    progress: Progress = silent,
) -> M1M2Steps:
    """Steps one and two: train by every objective, select the model with the most evidence, fit proposals for it.

    `make` returns a new model and recognition model. `labelled` are the rows of x that have a label, `labels` their
    classes. The evidence is measured on `x_valid` with k particles per class; `x_valid` may be empty with a single
    objective. Step two starts from the recognition model of the selected model and takes a third of the epochs.

    Shapes: ``x (n, p)``, ``labelled, labels (n_labelled,)``, ``x_valid (m, p)``.
    """
    if not objectives or (len(objectives) > 1 and not len(x_valid)):
        raise SettingError(
            f"{len(objectives)} objectives and {len(x_valid)} held-out rows; without held-out rows give one objective."
        )
    members = [SemiMember(*make(seeded(seed)), recipe, seed) for recipe in objectives]
    device = x.device
    fits = train_semisupervised(members, x, labelled, labels, settings, device=device, progress=progress)
    winner, selection = _select(fits, x_valid, k, seed) if len(x_valid) else (fits[0], ())
    recognitions = {winner.member.recipe.name: winner.recognition}
    recipes = [recipe for recipe in proposals if recipe is not winner.member.recipe]
    if recipes:
        shorter = replace(settings, epochs=max(1, settings.epochs // 3))
        members = [SemiMember(winner.model, copy.deepcopy(winner.recognition), recipe, seed) for recipe in recipes]
        fits = train_semisupervised(
            members, x, labelled, labels, shorter, learn_model=False, device=device, progress=progress
        )
        recognitions |= {fit.member.recipe.name: fit.recognition for fit in fits}
    return M1M2Steps(winner.model, recognitions, selection)


def _select(fits: Sequence[SemiFit], x: Tensor, k: int, seed: int) -> tuple[SemiFit, tuple[M1M2Score, ...]]:
    """The fit with the most held-out evidence, and the table it was selected from, best first."""
    answers = [M1M2Steps(f.model, {f.member.recipe.name: f.recognition}).posterior(x, k, seed=seed) for f in fits]
    order = sorted(range(len(fits)), key=lambda i: -float(answers[i].log_evidence.mean()))
    best = answers[order[0]].log_evidence
    log.info("selected %s, held-out evidence %.3f", fits[order[0]].member.recipe.name, float(best.mean()))
    return fits[order[0]], tuple(_row(fits[i].member.recipe.name, answers[i], best) for i in order)


def _row(name: str, answer: ClassPosterior, best: Tensor) -> M1M2Score:
    evidence, behind = answer.log_evidence, best - answer.log_evidence
    root_n = len(best) ** 0.5
    return M1M2Score(
        model=name,
        iwelbo=float(evidence.mean()),
        iwelbo_se=float(evidence.std()) / root_n,
        behind=float(behind.mean()),
        behind_se=float(behind.std()) / root_n,
        certified=float(answer.certified.double().mean()),
    )


def _shared(seed: int, like: Tensor) -> CommonRandomNumbers:
    return CommonRandomNumbers((seeded(seed, like.device),))
