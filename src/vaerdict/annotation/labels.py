r"""Class probabilities of cells: logistic regression on principal components, its temperature cross-validated.

The regression is fitted on all reference cells. Probabilities :math:`\operatorname{softmax}(\eta / T)` are calibrated
by the temperature T with the largest log score on cells that were left out in five folds (Guo et al., 2017).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from scipy import optimize, special

from vaerdict.annotation.calibration import ClassCalibration
from vaerdict.optional import isolated, require

_FOLDS = 5
_STRENGTHS = (0.1, 1.0, 10.0)  # inverse penalties among which cross-validation chooses
_MAX_CELLS = 20_000  # reference cells that the regression is fitted on
_STEPS = 500


@dataclass(frozen=True, eq=False)
class LabelProbabilities:
    """Probabilities of the types for every query cell, and how good they are on reference cells left out.

    Shapes: ``prob (cells, types)``, ``confusion (types, types)``: of left-out cells, types in rows, labels in columns.
    """

    types: np.ndarray
    prob: np.ndarray
    confusion: np.ndarray
    temperature: float
    calibration: ClassCalibration


def label_probabilities(
    reference: np.ndarray, types: np.ndarray, query: np.ndarray, *, seed: int
) -> LabelProbabilities:
    """Fit on the reference and predict the query. Shapes: ``(n, d), (n,), (m, d)``."""
    rng, scale = np.random.default_rng(seed), reference[:, 0].std() or 1.0
    names, code = np.unique(types, return_inverse=True)
    used = _at_most(code, _MAX_CELLS, rng)
    x, y = reference[used] / scale, code[used]
    strength, held_out = _cross_validated(x, y, rng)
    temperature = _temperature(held_out, y)
    with isolated(seed):
        logits = _logits(_regression(strength).fit(x, y), query / scale)
    prob = torch.from_numpy(special.softmax(held_out / temperature, 1))
    label = torch.from_numpy(y)
    confusion = np.zeros((len(names), len(names)), dtype=int)
    np.add.at(confusion, (y, prob.argmax(1).numpy()), 1)
    calibration = ClassCalibration.of(prob, label)
    return LabelProbabilities(names, special.softmax(logits / temperature, 1), confusion, temperature, calibration)


def _at_most(code: np.ndarray, most: int, rng: np.random.Generator) -> np.ndarray:
    """Rows, at random where there are more, with at least a fold's worth of every type. Shapes: ``(n,) -> (k,)``."""
    if len(code) <= most:
        return np.arange(len(code))
    order = rng.permutation(len(code))
    first = np.concatenate([order[code[order] == c][: 2 * _FOLDS] for c in np.unique(code)])
    return np.sort(np.union1d(first, order[:most]))


def _regression(strength: float) -> Any:
    return require("sklearn.linear_model", "sklearn").LogisticRegression(C=strength, max_iter=_STEPS)


def _logits(fitted: Any, x: np.ndarray) -> np.ndarray:
    scores = fitted.decision_function(x)
    return np.stack([-scores / 2, scores / 2], 1) if scores.ndim == 1 else scores


def _cross_validated(x: np.ndarray, y: np.ndarray, rng: np.random.Generator) -> tuple[float, np.ndarray]:
    """The penalty with the best log score on left-out cells, and their logits. Shapes: ``-> (n, types)``."""
    folds = require("sklearn.model_selection", "sklearn").StratifiedKFold(
        _FOLDS, shuffle=True, random_state=int(rng.integers(2**31))
    )
    best: tuple[float, float, np.ndarray] | None = None
    for strength in _STRENGTHS:
        logits = np.zeros((len(y), y.max() + 1))
        with isolated(0):
            for train, test in folds.split(x, y):
                logits[test] = _logits(_regression(strength).fit(x[train], y[train]), x[test])
        loss = _log_loss(logits, y)
        best = min((loss, strength, logits), best or (np.inf, 0.0, logits), key=lambda each: each[0])
    assert best is not None
    return best[1], best[2]


def _temperature(logits: np.ndarray, y: np.ndarray) -> float:
    """The temperature with the smallest log loss, between 1/10 and 10."""
    answer = optimize.minimize_scalar(lambda log_t: _log_loss(logits / np.exp(log_t), y), bounds=(-2.3, 2.3))
    return float(np.exp(answer.x))


def _log_loss(logits: np.ndarray, y: np.ndarray) -> float:
    return float((special.logsumexp(logits, 1) - logits[np.arange(len(y)), y]).mean())
