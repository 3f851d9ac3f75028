"""Class probabilities compared with labels that were not used for them."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from vaerdict.classify.agreement import Bin, calibration_error, log_score, reliability
from vaerdict.selective import accuracy

_LEAST_PROBABILITY = 1e-12  # in log scores, so that one cell cannot make a mean infinite


class ClassCalibration(NamedTuple):
    """Class probabilities of ``n`` cells compared with their labels.

    ``brier`` is the mean over cells of the squared distance between the probabilities and the one-hot label,
    ``log_loss`` minus the mean log-probability of the label, ``bins`` the reliability curve of the most probable class.
    """

    n: int
    accuracy: float
    brier: float
    log_loss: float
    calibration_error: float
    bins: tuple[Bin, ...]

    @classmethod
    def of(cls, prob: Tensor, label: Tensor) -> ClassCalibration:
        """Compare probabilities with labels. Shapes: ``(n, classes), (n,)``."""
        prob = prob.clamp_min(_LEAST_PROBABILITY)
        prob = prob / prob.sum(-1, keepdim=True)
        one_hot = torch.nn.functional.one_hot(label, prob.shape[-1])
        bins = reliability(prob, label)
        return cls(
            n=len(label),
            accuracy=accuracy(prob, label),
            brier=float((prob - one_hot).square().sum(-1).mean()),
            log_loss=-float(log_score(prob, label).mean()),
            calibration_error=calibration_error(bins),
            bins=bins,
        )

    def record(self) -> dict[str, Any]:
        """As results.json holds it."""
        return self._asdict() | {"bins": [b._asdict() for b in self.bins]}
