r"""Agreement of a model with held-out labels: errors of inference told from errors of the model.

Where the inference is certified, the estimated p(c | x) is that of the model. If held-out labels are then unlike draws
from it, the model does not describe the data, and better inference cannot help.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from vaerdict.core import DataError, SettingError
from vaerdict.decisions import check_probabilities
from vaerdict.diagnostics import Verdict
from vaerdict.noise import seeded
from vaerdict.selective import check_labels, check_share, wrong

_SIMULATED = 1999  # sets of labels drawn from the model, with which the real labels are compared
_MIN_P = 2 / (1 + _SIMULATED)
_MIN_CERTIFIED = 30  # number of certified rows below which all rows are compared with the labels
_CHUNK = 2**22  # labels simulated at a time


class Bin(NamedTuple):
    """Items of similar confidence: their number, mean confidence and accuracy."""

    n: int
    confidence: float
    accuracy: float


def reliability(prob: Tensor, label: Tensor, *, n_bins: int = 10) -> tuple[Bin, ...]:
    """Mean confidence (max p) and accuracy in `n_bins` equally wide bins of confidence, without empty bins."""
    confidence = check_probabilities(prob).amax(-1).double()
    correct = (~wrong(prob, label)).double()
    bin_index = (confidence * n_bins).long().clamp(0, n_bins - 1)
    masks = (bin_index == b for b in range(n_bins))
    return tuple(
        Bin(int(rows.sum()), float(confidence[rows].mean()), float(correct[rows].mean()))
        for rows in masks
        if rows.any()
    )


def calibration_error(bins: Sequence[Bin]) -> float:
    r"""Expected calibration error :math:`\sum_b \tfrac{n_b}{n} |\text{accuracy}_b - \text{confidence}_b|`."""
    return sum(b.n * abs(b.accuracy - b.confidence) for b in bins) / sum(b.n for b in bins)


def log_score(prob: Tensor, label: Tensor) -> Tensor:
    """Log-probability of each label, minus infinity where its probability is zero. Shapes: ``(n, classes) -> (n,)``."""
    outside = (check_labels(prob, label) < 0) | (label >= check_probabilities(prob).shape[-1])
    if outside.any():
        raise DataError(f"{int(outside.sum())} of {len(label)} labels name none of the {prob.shape[-1]} classes.")
    return prob.double().clamp_min(0).log().gather(-1, label.unsqueeze(-1)).squeeze(-1)


class Agreement(NamedTuple):
    """Whether the inference is certified, and whether p(c | x) of the model agrees with held-out labels.

    ``certified`` is the share of rows with the verdict OK, ``min_certified`` the share at which the inference counts as
    certified. ``n`` rows are compared with labels: the certified ones, or all if fewer than thirty are certified
    (``compared``). ``expected_accuracy`` is the mean of max p, which is the mean of ``accuracy`` if labels are drawn
    from p; ``accuracy_se`` is its standard error then. ``log_score`` is the mean log-probability of a label,
    ``plugin_gain`` how much higher that of the plugin estimate is (NaN: no plugin). ``p_value`` is that of the test of
    `model_agrees`, at ``level``.
    """

    certified: float
    min_certified: float
    compared: str
    n: int
    expected_accuracy: float
    accuracy: float
    accuracy_se: float
    log_score: float
    plugin_gain: float
    plugin_gain_se: float
    calibration_error: float
    bins: tuple[Bin, ...]
    p_value: float
    level: float

    @property
    def inference_certified(self) -> bool:
        """Whether the share of rows with the verdict OK is at least `min_certified`."""
        return self.certified >= self.min_certified

    @property
    def model_agrees(self) -> bool:
        """Whether the labels could have been drawn from the model's p(c | x), by a test at `level`."""
        return self.p_value > self.level

    @property
    def advice(self) -> str:
        """What to do next."""
        return ADVICE[self.inference_certified, self.model_agrees]

    @property
    def message(self) -> str:
        """Both verdicts, their numbers and the advice in one sentence."""
        inference = "inference certified" if self.inference_certified else "inference not certified"
        model = "model agrees with labels" if self.model_agrees else "model disagrees with labels"
        return (
            f"{inference} ({self.certified:.0%} of rows), {model} (on {self.n} {self.compared} rows it expects "
            f"{self.expected_accuracy:.1%} accuracy, with a standard error of {self.accuracy_se:.1%}, and has "
            f"{self.accuracy:.1%}; p = {self.p_value:.2g}): {self.advice}."
        )


ADVICE: dict[tuple[bool, bool], str] = {
    (True, True): "use the probabilities as they are and reject by expected cost",
    (True, False): (
        "the error is that of the model, so more draws or a better encoder will not help; change the model (a free "
        "class, another likelihood, more latents), or decide by the estimate with the better held-out log score"
    ),
    (False, True): (
        "there is no evidence against the model, but rows that are not certified may be wrong; draw more or refine "
        "their proposals, and reject rows that are still refused"
    ),
    (False, False): (
        "an error of inference can look like an error of the model; draw more or refine the proposals until most rows "
        "are certified, then compare again"
    ),
}
"""What to do next, by (inference certified, model agrees)."""


def agreement(
    prob: Tensor,
    label: Tensor,
    verdict: Tensor,
    *,
    plugin: Tensor | None = None,
    min_certified: float = 0.95,
    level: float = 0.01,
    generator: torch.Generator | None = None,
) -> Agreement:
    """Compare p(c | x) with held-out labels, and tell errors of inference from errors of the model.

    If the model is right and the rows are independent, labels are draws from `prob`. Such labels are simulated, and the
    model disagrees if the accuracy or the log score of the real labels is too far from the mean of the simulated ones.
    A small number of labels can show gross disagreement only.

    Parameters
    ----------
    prob
        Class probabilities by importance sampling, ``(n, classes)``, without free classes (see
        `vaerdict.selective.among_known`).
    label
        Held-out labels, ``(n,)``.
    verdict
        `Verdict` on each row of `prob`, ``(n,)``.
    plugin
        Class probabilities of the plugin estimate, ``(n, classes)``, to be compared by log score.
    min_certified
        Share of rows with the verdict OK at which the inference counts as certified.
    level
        Largest probability of finding disagreement with a model that is right.
    generator
        Source of randomness of the simulation, by default ``vaerdict.seeded(0)``.

    Returns
    -------
    Agreement
        Both verdicts with their numbers.

    Examples
    --------
    >>> prob = torch.tensor([[0.9, 0.1]]).expand(100, 2)
    >>> label = torch.tensor([0] * 92 + [1] * 8)
    >>> answer = agreement(prob, label, torch.full((100,), int(Verdict.OK)))
    >>> answer.inference_certified, answer.model_agrees
    (True, True)
    """
    if not _MIN_P <= level < 1:
        raise SettingError(f"level={level} of the test must lie in [{_MIN_P:g}, 1), the range of simulated p-values.")
    certified = verdict == Verdict.OK
    rows = certified if int(certified.sum()) >= _MIN_CERTIFIED else torch.ones_like(certified)
    p, y = check_probabilities(prob[rows]).double(), label[rows]
    score, bins, correct = log_score(p, y), reliability(p, y), (~wrong(p, y)).double()
    gain = log_score(plugin[rows], y) - score if plugin is not None else torch.full_like(score, torch.nan)
    confidence = p.amax(-1)
    return Agreement(
        certified=float(certified.double().mean()),
        min_certified=check_share(min_certified, "min_certified"),
        compared="certified" if bool(certified[rows].all()) else "certified or uncertified",
        n=len(y),
        expected_accuracy=float(confidence.mean()),
        accuracy=float(correct.mean()),
        accuracy_se=float((confidence * (1 - confidence)).clamp_min(0).sum().sqrt()) / len(y),
        log_score=float(score.mean()),
        plugin_gain=float(gain.mean()),
        plugin_gain_se=float(gain.std()) / math.sqrt(len(y)) if len(y) > 1 else math.nan,
        calibration_error=calibration_error(bins),
        bins=bins,
        p_value=_simulation_test(p, y, seeded(0, p.device) if generator is None else generator),
        level=level,
    )


def _simulation_test(prob: Tensor, label: Tensor, generator: torch.Generator) -> float:
    """P-value of labels being draws from `prob`: two-sided tests of accuracy and log score, Bonferroni-corrected."""
    best, log_p = prob.argmax(-1, keepdim=True), prob.clamp_min(0).log()

    def statistics(labels: Tensor, rows: slice) -> Tensor:  # (rows, draws) -> (2, draws)
        return torch.stack([(labels == best[rows]).double().sum(0), log_p[rows].gather(-1, labels).sum(0)])

    mean = torch.stack([prob.amax(-1).sum(), -torch.special.entr(prob.clamp_min(0)).sum()]).unsqueeze(1)
    simulated = torch.zeros(2, _SIMULATED, dtype=torch.float64, device=prob.device)
    step = max(1, _CHUNK // _SIMULATED)
    for start in range(0, len(prob), step):
        rows = slice(start, start + step)
        simulated += statistics(torch.multinomial(prob[rows], _SIMULATED, True, generator=generator), rows)
    distance = (statistics(label.unsqueeze(1), slice(None)) - mean).abs()
    n_as_far = ((simulated - mean).abs() >= distance - 1e-9 * len(prob)).sum(1)
    return min(1.0, 2 * float((1 + n_as_far).min()) / (1 + _SIMULATED))
