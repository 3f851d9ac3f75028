"""Scores of a fitted M1+M2: ambiguity between classes, evidence, and distance and diffusion among its latents."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import numpy as np
import torch

import vaerdict as vd
from vaerdict.inference.class_probabilities import amortised, class_posterior
from vaerdict.noise import CommonRandomNumbers, seeded
from vaerdict.selective import Diffusion, NearestClass, NearestNeighbours, from_function
from vaerdict_paper.benchmarks.novelty.methods import halves
from vaerdict_paper.benchmarks.novelty.tables import Answer, Problem

N_DRAWS, _CHUNK = 25, 200


def answers(given: Problem) -> Iterator[tuple[str, Callable[[], Answer | None]]]:
    """The name of each score, and the call that judges the problem, after one fit for all of them.

    The model is fitted by the first half of the labels and all unlabelled rows; the other half calibrates. With a
    single known class it has a free class, whose probability is then a score too, in place of ambiguity.
    """
    classifier = _fitted(given)
    latents = given._replace(
        labelled=_latents(classifier, given.labelled),
        unlabelled=_latents(classifier, given.unlabelled),
        query=_latents(classifier, given.query),
    )
    if classifier.n_free:
        yield "M1+M2: free class", partial(halves, given, from_function(partial(_free, classifier)))
    else:
        yield "M1+M2: ambiguity", partial(halves, given, from_function(partial(_ambiguity, classifier)))
    yield "M1+M2: evidence", partial(halves, given, from_function(partial(_surprise, classifier)))
    yield "M1+M2: nearest neighbours in z", partial(halves, latents, NearestNeighbours())
    yield "M1+M2: nearest class in z", partial(halves, latents, NearestClass())
    yield "M1+M2: diffusion in z", partial(halves, latents, Diffusion(latents.unlabelled))


def _fitted(given: Problem) -> vd.SelectiveClassifier:
    n = len(given.labelled) // 2
    rows = np.concatenate([given.labelled[:n], given.unlabelled])
    classes = np.concatenate([given.classes[:n], np.full(len(given.unlabelled), -1)])
    n_free = int(len(np.unique(given.classes[:n])) < 2)
    few = 1 / len(rows)  # too few labels to be held out, since the other half calibrates
    classifier = vd.SelectiveClassifier(
        objectives=("VAE",), proposals=(), n_free=n_free, n_draws=N_DRAWS, held_out=few, random_state=given.seed
    )
    return classifier.fit(rows, classes)


def _scaled(classifier: vd.SelectiveClassifier, rows: np.ndarray) -> torch.Tensor:
    return torch.tensor((rows - classifier.center_) / classifier.spread_)


@torch.no_grad()
def _latents(classifier: vd.SelectiveClassifier, rows: np.ndarray) -> np.ndarray:
    """Locations of q(z | x). Shapes: ``(n, d) -> (n, d_z)``."""
    return classifier.steps_.recognition.z_given(_scaled(classifier, rows)).loc.numpy()


def _ambiguity(classifier: vd.SelectiveClassifier, rows: np.ndarray) -> np.ndarray:
    return 1 - classifier.predict_proba(rows).max(1)


def _free(classifier: vd.SelectiveClassifier, rows: np.ndarray) -> np.ndarray:
    prob = classifier.steps_.plugin(_scaled(classifier, rows), N_DRAWS, seed=0)
    return prob[:, len(classifier.classes_) :].sum(1).numpy()


@torch.no_grad()
def _surprise(classifier: vd.SelectiveClassifier, rows: np.ndarray) -> np.ndarray:
    """Minus log p(x), by importance sampling with the recognition model and the prior. Shapes: ``(n, d) -> (n,)``."""
    model, stage = classifier.steps_.model, {"MIS": amortised(classifier.steps_.recognitions, classifier.steps_.model)}
    parts = [
        class_posterior(model, chunk, stage, N_DRAWS, generator=CommonRandomNumbers((seeded(0),))).log_evidence
        for chunk in _scaled(classifier, rows).split(_CHUNK)
    ]
    return -torch.cat(parts).numpy()
