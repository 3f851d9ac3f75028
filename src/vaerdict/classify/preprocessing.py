"""Preprocessing for the classifier: unlabelled rows, held-out rows, scaling of features, reject labels."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from vaerdict.core import DataError

UNLABELLED = (-1, "-1", "", None)
"""Values of y that mark a row without a label, beside NaN; numpy turns the first into the second among strings."""

MIN_HELD_OUT = 20
"""Number of held-out labels below which none are held out, because their choices would be random."""

_MAX_VALID = 200  # rows on which evidence is measured
_ROUNDING = 4  # units in the last place by which the values of a computed constant may differ


def unlabelled(y: np.ndarray) -> np.ndarray:
    """Which rows have no label: -1, NaN, None, and among strings "-1" and "". Shapes: ``(n,) -> (n,)`` bool."""
    if y.dtype.kind in "OUS":
        return np.array([label in UNLABELLED or label != label for label in y.tolist()], dtype=bool)
    return (y == -1) | (y != y)


def without_missing(y: Any) -> Any:
    """Labels with None and NaN replaced by -1 (by "" among strings); other values, of any shape, are returned as is."""
    labels = np.asarray(y)
    if labels.ndim != 1 or labels.dtype.kind not in "Of":
        return y
    missing = np.array([label is None or label != label for label in labels.tolist()], dtype=bool)
    if not missing.any():
        return y
    present = np.array(labels[~missing].tolist())
    filled = np.empty(len(labels), dtype=present.dtype if present.dtype.kind in "Uif" else object)
    filled[missing], filled[~missing] = "" if present.dtype.kind == "U" else -1, present
    return filled


class Split(NamedTuple):
    """Row indices: ``train``, of which ``labelled`` have the classes ``codes``; ``held_out`` with ``held_out_codes``.

    ``valid`` are the rows on which evidence is measured: held-out rows and unlabelled rows outside of training.
    """

    train: np.ndarray
    labelled: np.ndarray
    codes: np.ndarray
    held_out: np.ndarray
    held_out_codes: np.ndarray
    valid: np.ndarray


def hold_out(n: int, labelled: np.ndarray, codes: np.ndarray, share: float, random: np.random.RandomState) -> Split:
    """Hold a random share of the labelled rows, and of the unlabelled ones, out of training; a share of 0 holds none.

    Rows are drawn without regard to class, so that they are exchangeable with new rows. A class that would lose its
    last label keeps all of them. With fewer than 20 held-out labels no row is held out.

    `labelled` are the labelled rows among n and `codes` their classes. Shapes: both ``(n_labelled,)``.
    """
    order = random.permutation(len(labelled))
    held_out = order[: round(share * len(labelled))]
    held_out = held_out[np.isin(codes[held_out], codes[np.setdiff1d(order, held_out)])]
    if len(held_out) < MIN_HELD_OUT:
        held_out = held_out[:0]
    rest = np.setdiff1d(order, held_out)
    n_others = min(round(share * (n - len(labelled))), _MAX_VALID)
    others = random.permutation(np.setdiff1d(np.arange(n), labelled))[:n_others]
    valid = np.concatenate([labelled[held_out], others if len(held_out) else others[:0]])
    train = np.setdiff1d(np.arange(n), valid)
    valid = random.permutation(valid)[:_MAX_VALID]
    return Split(train, labelled[rest], codes[rest], labelled[held_out], codes[held_out], valid)


def likelihood_of(X: np.ndarray) -> str:
    """Bernoulli for features in [0, 1], Gaussian for others."""
    return "bernoulli" if X.min() >= 0 and X.max() <= 1 else "gaussian"


def check_range(X: np.ndarray, likelihood: str) -> None:
    """Raise where Bernoulli features lie outside [0, 1], or counts are negative or no whole numbers."""
    if likelihood == "counts" and not np.array_equal(X, np.maximum(np.round(X), 0)):
        raise DataError('some counts are negative or no whole numbers; give raw counts, or fit with "gaussian".')
    if likelihood == "bernoulli" and len(X) and not (X.min() >= 0 and X.max() <= 1):
        raise DataError(
            f"features reach from {X.min():g} to {X.max():g}; Bernoulli features must lie in [0, 1]: "
            'clip them, or fit with likelihood="gaussian".'
        )


def scaling(X: np.ndarray, likelihood: str) -> tuple[np.ndarray, np.ndarray]:
    """Centre and spread by which features are standardised: 0 and 1 but for Gaussian, a spread of 1 for constants.

    A feature is constant if its values differ by rounding only; their standard deviation is then not exactly zero.
    """
    if likelihood != "gaussian":
        return np.zeros(X.shape[1]), np.ones(X.shape[1])
    spread, varies = X.std(0), np.ptp(X, 0) > _ROUNDING * np.finfo(X.dtype).eps * np.abs(X).max(0)
    return X.mean(0), np.where(varies & (spread > 0), spread, 1.0)


def with_rejects(label: np.ndarray, rejected: np.ndarray, reject_label: Any) -> np.ndarray:
    """Labels with the rejected ones replaced; an array of objects if numbers and strings are mixed."""
    kinds = {np.asarray(reject_label).dtype.kind in "biuf", label.dtype.kind in "biuf"}
    action = label.astype(object if len(kinds) > 1 else np.result_type(label, np.asarray(reject_label)))
    action[rejected] = reject_label
    return action
