"""Models of the classifier and how they are trained: settings, the three steps, cross-fitted probabilities."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from vaerdict.core import DataError, Progress, silent
from vaerdict.inference.class_probabilities import ClassPosterior
from vaerdict.inference.m1m2_steps import M1M2Steps, fit_m1m2_steps
from vaerdict.models.m1m2 import M1M2, Recognition, recognition
from vaerdict.models.pixels import (
    BernoulliLikelihood,
    GaussianLikelihood,
    NegativeBinomialLikelihood,
    PixelLikelihood,
)
from vaerdict.training.semisupervised_stack import SemiSettings, semi_recipe

if TYPE_CHECKING:
    from vaerdict.classify.estimator import SelectiveClassifier

LIKELIHOODS: dict[str, PixelLikelihood] = {
    "bernoulli": BernoulliLikelihood(),
    "gaussian": GaussianLikelihood(),
    "counts": NegativeBinomialLikelihood(),
}
_STEPS, _MIN_EPOCHS, _MAX_EPOCHS = 300, 30, 200
_FOLDS, _MANY, _MAX_COMPARED = 5, 1000, 200  # from `_MANY` labels on one fold of `_MAX_COMPARED` rows is enough


@contextmanager
def threads(n_jobs: int | None) -> Iterator[None]:
    """Let torch use `n_jobs` CPU threads (None: one, -1: one per core) and restore the number afterwards."""
    n_before = torch.get_num_threads()
    torch.set_num_threads(1 if n_jobs is None else n_jobs if n_jobs > 0 else os.cpu_count() or 1)
    try:
        yield
    finally:
        torch.set_num_threads(n_before)


def progress_of(verbose: int) -> Progress:
    """A callback that prints a line per tenth of the work, or none."""
    return _printed if verbose else silent


def _printed(done: int, total: int, what: str, /) -> None:
    if done == total or 10 * done // total > 10 * (done - 1) // total:
        print(f"[SelectiveClassifier] {what}: {done} of {total}", flush=True)


def new_model(classifier: SelectiveClassifier, generator: torch.Generator) -> tuple[M1M2, Recognition]:
    """A model and its recognition model with fresh weights."""
    d_z, d_u = classifier.latents
    hidden = tuple(classifier.hidden)
    model = M1M2(
        classifier.n_features_in_,
        len(classifier.classes_) + classifier.n_free,
        d_z=d_z,
        d_u=d_u,
        hidden=hidden,
        likelihood=LIKELIHOODS[classifier.likelihood_],
        generator=generator,
    )
    return model, recognition(model, image_shape=_image_shape(classifier), hidden=hidden, generator=generator)


def fit_steps(
    classifier: SelectiveClassifier,
    x: Tensor,
    labelled: np.ndarray,
    codes: np.ndarray,
    x_valid: Tensor,
    *,
    objectives: Sequence[str],
    proposals: Sequence[str],
) -> M1M2Steps:
    """Train on scaled rows x, of which `labelled` have the classes `codes`; rows `x_valid` select the objective.

    Shapes: ``x (n, p)``, ``labelled, codes (n_labelled,)``, ``x_valid (m, p)``.
    """
    device = classifier.device

    def make(generator: torch.Generator) -> tuple[M1M2, Recognition]:
        model, q = new_model(classifier, generator)
        return model.start(x), q

    steps = fit_m1m2_steps(
        make,
        x.float().to(device),
        torch.as_tensor(labelled).to(device),
        torch.as_tensor(codes).to(device),
        x_valid.float().to(device),
        objectives=[semi_recipe(name) for name in objectives],
        proposals=[semi_recipe(name) for name in proposals],
        settings=_settings(classifier, len(x)),
        k=classifier.n_draws,
        seed=classifier.seed_,
        progress=progress_of(classifier.verbose),
    )
    for module in (steps.model, *steps.recognitions.values()):
        module.double()  # so that answers do not depend on which rows are evaluated together
    return steps


def _settings(classifier: SelectiveClassifier, n: int) -> SemiSettings:
    epochs = min(_MAX_EPOCHS, max(_MIN_EPOCHS, math.ceil(_STEPS / max(1, n // classifier.batch_size))))
    only_elbo = set(classifier.objectives) == {"VAE"} and classifier.estimator == "plugin"
    return SemiSettings(
        n_particles=(1 if only_elbo else 5) if classifier.n_particles is None else classifier.n_particles,
        epochs=epochs if classifier.epochs is None else classifier.epochs,
        batch_size=classifier.batch_size,
        labelled_batch=max(1, classifier.batch_size // 2),
        lr=classifier.learning_rate,
        cooling=0.5,
        classification=classifier.classification_weight,
        shifts=classifier.shifts,
        image_shape=_image_shape(classifier),
    )


def _image_shape(classifier: SelectiveClassifier) -> tuple[int, int] | None:
    shape: Any = classifier.image_shape
    return None if shape is None else (shape[0], shape[1])


# ------------------------------------------------------------------------------------------------ answers
def plugin(classifier: SelectiveClassifier, steps: M1M2Steps, x: Tensor) -> Tensor:
    """P(c | x) of the recognition model. Shapes: ``(n, p) -> (n, classes)``."""
    return steps.plugin(x.to(classifier.device), classifier.n_draws, seed=classifier.seed_).double().cpu()


def corrected(classifier: SelectiveClassifier, steps: M1M2Steps, x: Tensor, *, refine: bool = True) -> ClassPosterior:
    """P(c | x) by importance sampling, with `refine` refined per row where that is not reliable."""
    progress = progress_of(classifier.verbose if refine else 0)
    answer = steps.posterior(
        x.to(classifier.device), classifier.n_draws, seed=classifier.seed_, refine=refine, progress=progress
    )
    return replace(answer, **{name: t.cpu() for name, t in answer.tensors.items()})


class CrossFitted(NamedTuple):
    """Both estimates of labelled rows by models that were not trained on them, the verdicts, and the labels.

    Shapes: ``plugin, corrected (n, classes)``, ``verdict, label (n,)``.
    """

    plugin: Tensor
    corrected: Tensor
    verdict: Tensor
    label: Tensor


def cross_fitted(classifier: SelectiveClassifier) -> CrossFitted:
    """Refit without each fifth of the labels and answer for it; from 1,000 labels on without 200 of them only.

    At most 200 labels are compared, and none that is the only one of its class.
    """
    rows = classifier.rows_
    order = np.random.RandomState(classifier.seed_).permutation(len(rows.codes))
    folds = np.array_split(order, _FOLDS) if len(order) < _MANY else [order[:_MAX_COMPARED]]
    parts: list[CrossFitted] = []
    for fold in folds:
        others = np.setdiff1d(order, fold)
        test = fold[np.isin(rows.codes[fold], rows.codes[others])][: _MAX_COMPARED // len(folds)]
        if not len(test):
            continue
        x = classifier._scaled(np.concatenate([rows.labelled[others], rows.unlabelled]))
        objective = classifier.selection_[0].model if classifier.selection_ else classifier.objectives[0]
        proposals = classifier.proposals if classifier.estimator_ == "corrected" else ()
        data = x, np.arange(len(others)), rows.codes[others], x[:0]
        steps = fit_steps(classifier, *data, objectives=[objective], proposals=proposals)
        x_test = classifier._scaled(rows.labelled[test])
        answer = corrected(classifier, steps, x_test)
        label = torch.as_tensor(rows.codes[test])
        parts.append(CrossFitted(plugin(classifier, steps, x_test), answer.prob, answer.verdict, label))
    if not parts:
        raise DataError(f"{len(order)} labels, none of a class with another label, cannot be compared with the model.")
    return CrossFitted(*(torch.cat(column) for column in zip(*parts, strict=True)))
