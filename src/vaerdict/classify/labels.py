"""Rows, labels and splits: who is unlabelled, what is held out, how features are scaled, where a reject label goes."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from vaerdict.core import DataError

UNLABELLED = (-1, "-1", "")
"""What says in y that a row has no label; numpy turns the first into the second among strings."""

FEWEST_HELD_OUT = 20
"""Labels below which nothing is held out: they would decide by chance."""

_MOST_VALID = 200  # rows on which evidence is measured
_ROUNDING = 4  # last digits by which a constant that was computed may differ


def unlabelled(y: np.ndarray) -> np.ndarray:
    """Which rows have no label: -1, and among strings "-1" and "" too. Shapes: ``(n,) -> (n,)`` bool."""
    if y.dtype.kind in "OUS":
        return np.array([label in UNLABELLED for label in y.tolist()], dtype=bool)
    return y == -1


class Split(NamedTuple):
    """Rows to train on, which of them are `labelled` with which `codes`; rows held out with their codes; rows to
    measure evidence on: those held out, and unlabelled ones that take no part in training either."""

    train: np.ndarray
    labelled: np.ndarray
    codes: np.ndarray
    held_out: np.ndarray
    held_out_codes: np.ndarray
    valid: np.ndarray


def hold_out(n: int, labelled: np.ndarray, codes: np.ndarray, share: float, random: np.random.RandomState) -> Split:
    """Keep a random share of the labelled rows, and of the others, out of training.

    Drawn without regard to class, so that they are exchangeable with new rows; only a class that would lose its last
    label keeps all of them. With fewer than 20 held-out labels nothing is held out at all.
    """
    order = random.permutation(len(labelled))
    held = order[: round(share * len(labelled))]
    left = np.setdiff1d(order, held)
    held = held[np.isin(codes[held], codes[left])]
    if len(held) < FEWEST_HELD_OUT:
        held = held[:0]
    left = np.setdiff1d(order, held)
    n_others = min(round(share * (n - len(labelled))), _MOST_VALID)
    others = random.permutation(np.setdiff1d(np.arange(n), labelled))[:n_others]
    valid = np.concatenate([labelled[held], others if len(held) else others[:0]])
    train = np.setdiff1d(np.arange(n), valid)
    shown = random.permutation(valid)[:_MOST_VALID]
    return Split(train, labelled[left], codes[left], labelled[held], codes[held], shown)


def likelihood_of(X: np.ndarray) -> str:
    """Bernoulli for features in [0, 1], Gaussian for others."""
    return "bernoulli" if X.min() >= 0 and X.max() <= 1 else "gaussian"


def check_range(X: np.ndarray, likelihood: str) -> None:
    """Refuse Bernoulli features outside [0, 1]."""
    if likelihood == "bernoulli" and len(X) and not (X.min() >= 0 and X.max() <= 1):
        raise DataError(
            f"features reach from {X.min():g} to {X.max():g}; Bernoulli ones must lie in [0, 1]: "
            'clip them, or fit with likelihood="gaussian".'
        )


def scaling(X: np.ndarray, likelihood: str) -> tuple[np.ndarray, np.ndarray]:
    """Centre and spread to standardise by: none for Bernoulli, and no spread of a constant feature.

    A feature is constant where its values differ by rounding alone; the standard deviation of these is not quite zero.
    """
    if likelihood == "bernoulli":
        return np.zeros(X.shape[1]), np.ones(X.shape[1])
    spread, varies = X.std(0), np.ptp(X, 0) > _ROUNDING * np.finfo(X.dtype).eps * np.abs(X).max(0)
    return X.mean(0), np.where(varies & (spread > 0), spread, 1.0)


def with_rejects(label: np.ndarray, rejected: np.ndarray, reject_label: Any) -> np.ndarray:
    """Labels with some replaced; an array of objects where numbers and strings meet."""
    kinds = {np.asarray(reject_label).dtype.kind in "biuf", label.dtype.kind in "biuf"}
    action = label.astype(object if len(kinds) > 1 else np.result_type(label, np.asarray(reject_label)))
    action[rejected] = reject_label
    return action
