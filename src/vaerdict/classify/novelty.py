"""Novelty of rows for the classifier: which score, which rows calibrate it, and how many labels that needs."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from vaerdict.classify.fitting import corrected, plugin
from vaerdict.classify.preprocessing import scaling
from vaerdict.core import SettingError
from vaerdict.selective import (
    Diffusion,
    Learned,
    NearestClass,
    NearestNeighbours,
    Novelty,
    NoveltyScore,
    find_novel,
    find_novel_by_diffusion,
    from_function,
    one_minus_max,
)

if TYPE_CHECKING:
    from vaerdict.classify.estimator import SelectiveClassifier

NOVELTY_SCORES = {
    "diffusion": "how little of the labelled rows reaches the row through a graph of neighbours",
    "neighbours": "distance to the nearest labelled row",
    "class": "Mahalanobis distance to the nearest class",
    "learned": "a random forest that tells new from labelled rows (AdaDetect)",
    "evidence": "minus log p(x) under the model",
    "ambiguity": "probability that the predicted class is wrong",
}
"""Every novelty score by name, with its meaning: the values of ``SelectiveClassifier(novelty=...)``."""

FROM_MODEL = ("evidence", "ambiguity")
"""Scores that depend on the trained model; they are calibrated on held-out labels."""

_FROM_ROWS: dict[str, NoveltyScore] = {
    "neighbours": NearestNeighbours(),
    "class": NearestClass(),
    "learned": Learned(),
}
_MAX_LABELLED, _MAX_UNLABELLED = 5000, 2000
_MAX_FULL = 500  # labels up to which diffusion is calibrated by all of them, which takes time in proportion to them
_MIN_SCALED = 30  # unlabelled rows from which features are standardised by these alone


class Rows(NamedTuple):
    """Training rows that novelty and agreement need, as they were given: at most 5,000 labelled, 2,000 unlabelled.

    Shapes: ``labelled (n, features)``, ``codes (n,)``, ``held_out (n,)`` bool, ``unlabelled (m, features)``.
    """

    labelled: np.ndarray
    codes: np.ndarray
    held_out: np.ndarray
    unlabelled: np.ndarray


def rows_of(
    X: np.ndarray, labelled: np.ndarray, codes: np.ndarray, held_out: np.ndarray, random: np.random.RandomState
) -> Rows:
    """Draw the rows that are kept. `labelled` and `held_out` are indices of X, `codes` the classes of the former."""
    others = np.setdiff1d(np.arange(len(X)), labelled)
    others = np.sort(random.permutation(others)[:_MAX_UNLABELLED])
    kept = np.sort(random.permutation(len(labelled))[:_MAX_LABELLED])
    return Rows(X[labelled[kept]], codes[kept], np.isin(labelled[kept], held_out), X[others])


def n_calibration(novelty: str | NoveltyScore, n_labelled: int, n_held_out: int) -> int:
    """Number of labelled rows that calibrate a score.

    All for diffusion if there are at most 500, held-out ones for scores of the model, else half of them.
    """
    if novelty in FROM_MODEL:
        return n_held_out
    return n_labelled if novelty == "diffusion" and n_labelled <= _MAX_FULL else n_labelled // 2


def check_calibration(novelty: str | NoveltyScore, n: int, share: float, name: str) -> None:
    """Raise unless n calibration rows allow p-values of at most `share`, the value of the parameter `name`."""
    if not 0 < share < 1:
        raise SettingError(f"{name}={share} must lie strictly between 0 and 1.")
    n_needed = math.ceil(1 / share - 1e-9) - 1
    if n >= n_needed:
        return
    if novelty in FROM_MODEL:
        remedy = "give more labels or a larger held_out="
    else:
        remedy = f"give at least {n_needed if novelty == 'diffusion' else 2 * n_needed} labels"
    raise SettingError(
        f"{name}={share} needs at least {n_needed} calibration rows, but novelty={novelty!r} has {n}; {remedy}."
    )


def find(classifier: SelectiveClassifier, X: np.ndarray, fdr: float) -> Novelty:
    """Novelty of rows X ``(n, features)``, calibrated as `n_calibration` says."""
    name, seed, (labelled, codes, held_out, unlabelled) = classifier.novelty, classifier.seed_, classifier.rows_
    known = np.random.RandomState(seed).permutation(len(codes)) % 2 == 0
    if classifier.likelihood_ == "counts" and name not in FROM_MODEL:
        labelled, unlabelled, X = map(_log_normalised, (labelled, unlabelled, X))
    if name == "diffusion":
        score, labelled, X = _diffusion(labelled, unlabelled, X, scaled=classifier.likelihood_ != "bernoulli")
        if len(codes) <= _MAX_FULL:
            return find_novel_by_diffusion(labelled, X, diffusion=score, fdr=fdr)
    elif isinstance(name, str) and name in FROM_MODEL:
        score, known = _of_model(classifier, name), ~held_out
    else:
        score = _FROM_ROWS[name] if isinstance(name, str) else name
    return find_novel(score, labelled[known], codes[known], labelled[~known], X, fdr=fdr, seed=seed)


def _log_normalised(counts: np.ndarray) -> np.ndarray:
    """Logarithms of one plus counts per ten thousand of a row. Shapes: ``(n, features) -> (n, features)``."""
    return np.log1p(1e4 * counts / np.maximum(counts.sum(1, keepdims=True), 1))


def _of_model(classifier: SelectiveClassifier, name: str) -> NoveltyScore:
    def evidence(X: np.ndarray) -> np.ndarray:
        return -corrected(classifier, classifier.steps_, classifier._scaled(X), refine=False).log_evidence.numpy()

    def ambiguity(X: np.ndarray) -> np.ndarray:
        return one_minus_max(plugin(classifier, classifier.steps_, classifier._scaled(X)), classifier._free).numpy()

    return from_function(evidence if name == "evidence" else ambiguity)


def _diffusion(
    labelled: np.ndarray, unlabelled: np.ndarray, X: np.ndarray, *, scaled: bool
) -> tuple[Diffusion, np.ndarray, np.ndarray]:
    """Diffusion with unlabelled rows, and the labelled rows and X, scaled so that both are treated alike.

    Features are standardised by enough unlabelled rows, else by all rows together. Unlabelled rows that are asked about
    are not counted twice, because labelled rows have no copy among them either.
    """
    asked = {row.tobytes() for row in X}
    unlabelled = unlabelled[np.array([row.tobytes() not in asked for row in unlabelled], dtype=bool)]
    if scaled and len(unlabelled) >= _MIN_SCALED:
        center, spread = scaling(unlabelled, "gaussian")
        labelled, X, unlabelled = ((rows - center) / spread for rows in (labelled, X, unlabelled))
        scaled = False
    neighbours = min(10, len(labelled) + len(unlabelled) + len(X) - 1)
    return Diffusion(unlabelled, neighbours=neighbours, standardise=scaled), labelled, X
