"""Checks of the classifier's parameters: values that are unknown, out of range or do not fit each other."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vaerdict.classify.fitting import LIKELIHOODS
from vaerdict.classify.novelty import NOVELTY_SCORES
from vaerdict.core import SettingError
from vaerdict.selective import REJECT_SCORES

if TYPE_CHECKING:
    from vaerdict.classify.estimator import SelectiveClassifier

ESTIMATORS = ("plugin", "corrected")


def check_parameters(classifier: SelectiveClassifier) -> None:
    """Raise a `SettingError` that names the parameter, its value and the remedy."""
    _check_names(classifier)
    if classifier.cost is not None and not 0 <= classifier.cost <= 1:
        raise SettingError(f"cost={classifier.cost} must lie in [0, 1].")
    if not 0 < classifier.held_out < 1:
        raise SettingError(f"held_out={classifier.held_out} must lie strictly between 0 and 1.")
    if classifier.alpha is not None and not 0 < classifier.alpha < 1:
        raise SettingError(
            f"alpha={classifier.alpha} must lie strictly between 0 and 1: the share of labelled classes rejected."
        )
    if classifier.reject_by not in ("auto", "novelty", "error") and classifier.alpha is None:
        meaning = REJECT_SCORES[classifier.reject_by].meaning
        raise SettingError(
            f"reject_by={classifier.reject_by!r} ({meaning}) cannot be compared with cost=; give alpha= instead."
        )
    if classifier.reject_by == "free" and not classifier.n_free:
        raise SettingError("reject_by='free' is the probability of free classes; give n_free=1 or more.")
    if classifier.n_free < 0:
        raise SettingError(f"n_free={classifier.n_free} must not be negative.")
    if classifier.n_jobs == 0:
        raise SettingError("n_jobs=0 leaves no thread; use None for one, -1 for all.")


def _check_names(classifier: SelectiveClassifier) -> None:
    choices = {
        "estimator": ("auto", *ESTIMATORS),
        "reject_by": ("auto", "novelty", *REJECT_SCORES),
        "likelihood": ("auto", *LIKELIHOODS),
        "novelty": tuple(NOVELTY_SCORES),
    }
    for name, values in choices.items():
        value = getattr(classifier, name)
        if value not in values and not (name == "novelty" and callable(value)):
            raise SettingError(f"{name}={value!r} is unknown; choose one of {', '.join(values)}.")
    if not len(classifier.objectives):
        raise SettingError("objectives=() is empty; give at least one, for example ('VAE',).")
