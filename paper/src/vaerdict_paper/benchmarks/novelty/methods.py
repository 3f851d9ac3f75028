"""Methods that rank query rows by novelty: those of `vaerdict.selective`, scores of M1+M2, and their rivals."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from sklearn.ensemble import IsolationForest, RandomForestClassifier
from sklearn.linear_model import LogisticRegression
from sklearn.neighbors import LocalOutlierFactor, NearestNeighbors
from sklearn.semi_supervised import SelfTrainingClassifier

from vaerdict.selective import (
    ConformalUnits,
    Diffusion,
    Learned,
    NearestClass,
    NearestNeighbours,
    Novelty,
    NoveltyScore,
    find_novel,
    find_novel_by_diffusion,
)
from vaerdict_paper.benchmarks.novelty.tables import Answer, Problem

FDR = 0.1
BY_FDR, BY_PREDICT, BY_PROBABILITY, BY_QUANTILE = "FDR 10 %", "predict", "max p < 0.5", "beyond 95 % of labelled rows"


Method = Callable[[Problem], Answer | None]
"""Judges the query rows; None where a method does not apply."""


def _by_fdr(found: Novelty) -> Answer:
    return Answer(found.score, found.novel, BY_FDR)


# ------------------------------------------------------------------------------------------------------ ours
def diffusion(given: Problem) -> Answer:
    """Full conformal diffusion: all labels are sources and calibrate."""
    graph = Diffusion(given.unlabelled, standardise=False)
    return _by_fdr(find_novel_by_diffusion(given.labelled, given.query, diffusion=graph, fdr=FDR))


def halves(given: Problem, score: NoveltyScore) -> Answer:
    """Split conformal: a random half of the labels is known, the other half calibrates."""
    n = len(given.labelled) // 2
    known, calibration = given.labelled[:n], given.labelled[n:]
    return _by_fdr(find_novel(score, known, given.classes[:n], calibration, given.query, fdr=FDR, seed=given.seed))


@dataclass(frozen=True)
class AgainstUnlabelled:
    """A classifier of known rows against unlabelled training rows (positive-unlabelled learning)."""

    unlabelled: np.ndarray
    classifier: Any

    def __call__(self, known: np.ndarray, classes: np.ndarray, pool: np.ndarray, /) -> np.ndarray:
        """Shapes: ``(n_known, d), (n_known,), (n_pool, d) -> (n_pool,)``."""
        side = np.repeat([0, 1], [len(known), len(self.unlabelled)])
        return self.classifier.fit(np.concatenate([known, self.unlabelled]), side).predict_proba(pool)[:, 1]


def _forest(seed: int) -> RandomForestClassifier:
    return RandomForestClassifier(100, max_depth=10, class_weight="balanced_subsample", random_state=seed)


def _forest_against_unlabelled(given: Problem) -> Answer:
    return halves(given, AgainstUnlabelled(given.unlabelled, _forest(given.seed)))


def _regression_against_unlabelled(given: Problem) -> Answer:
    regression = LogisticRegression(C=0.1, class_weight="balanced", max_iter=500)
    return halves(given, AgainstUnlabelled(given.unlabelled, regression))


# ------------------------------------------------------------------------------------------------------ rivals
def _ada_detect(given: Problem) -> Answer:
    return halves(given, Learned(_forest(given.seed), seed=given.seed))


def _isolation_forest(given: Problem) -> Answer:
    fitted = IsolationForest(n_estimators=200, random_state=given.seed).fit(given.labelled)
    return Answer(-fitted.score_samples(given.query), fitted.predict(given.query) < 0, BY_PREDICT)


def _local_outlier_factor(given: Problem) -> Answer:
    fitted = LocalOutlierFactor(min(20, len(given.labelled) - 1), novelty=True).fit(given.labelled)
    return Answer(-fitted.score_samples(given.query), fitted.predict(given.query) < 0, BY_PREDICT)


def _nearest_neighbour(given: Problem) -> Answer:
    fitted = NearestNeighbors(n_neighbors=1).fit(given.labelled)
    score, among_labelled = fitted.kneighbors(given.query)[0][:, 0], fitted.kneighbors()[0][:, 0]
    return Answer(score, score > np.quantile(among_labelled, 0.95), BY_QUANTILE)


def _regression(given: Problem) -> Answer | None:
    if len(np.unique(given.classes)) < 2:
        return None
    prob = LogisticRegression(max_iter=500).fit(given.labelled, given.classes).predict_proba(given.query)
    return Answer(1 - prob.max(1), prob.max(1) < 0.5, BY_PROBABILITY)


def _self_training(given: Problem) -> Answer | None:
    if len(np.unique(given.classes)) < 2:
        return None
    rows = np.concatenate([given.labelled, given.unlabelled])
    classes = np.concatenate([given.classes, np.full(len(given.unlabelled), -1)])
    fitted = SelfTrainingClassifier(LogisticRegression(max_iter=200), threshold=0.9).fit(rows, classes)
    prob = fitted.predict_proba(given.query)
    return Answer(1 - prob.max(1), prob.max(1) < 0.5, BY_PROBABILITY)


OURS: dict[str, Method] = {
    "diffusion": diffusion,
    "diffusion, half of the labels": lambda given: halves(given, Diffusion(given.unlabelled, standardise=False)),
    "diffusion, no unlabelled rows": lambda given: _by_fdr(
        find_novel_by_diffusion(given.labelled, given.query, diffusion=Diffusion(standardise=False), fdr=FDR)
    ),
    "conformal units": lambda given: halves(given, ConformalUnits(seed=given.seed)),
    "nearest neighbours": lambda given: halves(given, NearestNeighbours()),
    "nearest class": lambda given: halves(given, NearestClass()),
    "forest v unlabelled": _forest_against_unlabelled,
    "regression v unlabelled": _regression_against_unlabelled,
}
RIVALS: dict[str, Method] = {
    "AdaDetect, random forest": _ada_detect,
    "IsolationForest": _isolation_forest,
    "1-NN distance": _nearest_neighbour,
    "LOF": _local_outlier_factor,
    "logistic regression": _regression,
    "self-training": _self_training,
}


def answers(given: Problem) -> Iterator[tuple[str, Callable[[], Answer | None]]]:
    """The name of each method, and the call that judges the problem."""
    for name, method in (OURS | RIVALS).items():
        yield name, lambda method=method: method(given)
