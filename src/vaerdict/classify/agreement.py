r"""Whose error is it: the sampler's or the model's? Certified inference compared with held-out labels.

Where the inference is certified, the p(c | x) it gives is the model's own. If labels then look unlike draws from it, no
better sampler will help: the model is wrong about the data.
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

_SIMULATED = 1999  # label sets drawn from the model to judge the real one
_LEAST_P = 2 / (1 + _SIMULATED)
_FEWEST = 30  # certified rows below which all rows are compared with the labels
_CHUNK = 2**22  # labels simulated at a time


class Bin(NamedTuple):
    """Items of like confidence: how many, how confident on average, how accurate."""

    n: int
    confidence: float
    accuracy: float


def reliability(prob: Tensor, label: Tensor, *, n_bins: int = 10) -> tuple[Bin, ...]:
    """Mean confidence, max p, against accuracy in `n_bins` equally wide bins of confidence; empty bins left out."""
    confidence = check_probabilities(prob).amax(-1).double()
    right = (~wrong(prob, label)).double()
    place = (confidence * n_bins).long().clamp(0, n_bins - 1)
    members = (place == b for b in range(n_bins))
    return tuple(
        Bin(int(rows.sum()), float(confidence[rows].mean()), float(right[rows].mean()))
        for rows in members
        if rows.any()
    )


def calibration_error(bins: Sequence[Bin]) -> float:
    r"""Expected calibration error :math:`\sum_b \tfrac{n_b}{n} |\text{accuracy}_b - \text{confidence}_b|`."""
    return sum(b.n * abs(b.accuracy - b.confidence) for b in bins) / sum(b.n for b in bins)


def log_score(prob: Tensor, label: Tensor) -> Tensor:
    """Log-probability given to each label, minus infinity where that was zero. Shapes: ``(n, classes) -> (n,)``."""
    outside = (check_labels(prob, label) < 0) | (label >= check_probabilities(prob).shape[-1])
    if outside.any():
        raise DataError(f"{int(outside.sum())} of {len(label)} labels name none of the {prob.shape[-1]} classes.")
    return prob.double().clamp_min(0).log().gather(-1, label.unsqueeze(-1)).squeeze(-1)


class Agreement(NamedTuple):
    """Whether the inference is certified, and whether the model's own p(c | x) agrees with held-out labels.

    `certified` is the share of rows with the verdict ok and `n` the number compared with labels: the certified rows,
    or all where fewer than thirty are (`compared` says which). ``expected_accuracy`` is the mean of max p, which
    ``accuracy`` would be if labels were drawn from p; ``accuracy_se`` is its standard error in that case. `p_value` is
    that of the test behind `model_agrees`, at `level`. ``log_score`` is the mean log-probability of a label and
    ``plugin_gain`` how much higher the plugin's is, with its standard error (NaN: no plugin given).
    """

    certified: float
    needed: float
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
        """Whether enough rows have the verdict ok."""
        return self.certified >= self.needed

    @property
    def model_agrees(self) -> bool:
        """Whether the labels could have been drawn from the model's p(c | x), by a test at `level`."""
        return self.p_value > self.level

    @property
    def advice(self) -> str:
        """What to do next."""
        return ADVICE[self.inference_certified, self.model_agrees]

    @property
    def words(self) -> str:
        """All of it in one plain sentence."""
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
        "the error is the model's, so more draws or a better encoder will not mend it; change the model (a free class, "
        "another likelihood, more latents), or decide by whichever estimate has the better held-out log score"
    ),
    (False, True): (
        "nothing speaks against the model, but rows that are not certified may be off; draw more or refine their "
        "proposals, and reject what stays refused"
    ),
    (False, False): (
        "an error of the sampler can look like one of the model; draw more or refine the proposals until most rows are "
        "certified, then compare again"
    ),
}
"""What to do next, by (inference certified, model agrees)."""


def agreement(
    prob: Tensor,
    label: Tensor,
    verdict: Tensor,
    *,
    plugin: Tensor | None = None,
    needed: float = 0.95,
    level: float = 0.01,
    generator: torch.Generator | None = None,
) -> Agreement:
    """Compare corrected p(c | x) with held-out labels, and tell errors of inference from errors of the model.

    If the model is right and the rows independent, labels are draws from `prob`. Such labels are simulated, and the
    real ones disagree where their accuracy or their log score is too far from its mean among these: a model that
    agrees is called wrong with probability at most `level`. Few labels show gross disagreement only. Leave out classes
    that labels never name (`among_known`).

    Shapes: ``prob, plugin (n, classes)``, ``label, verdict (n,)``.
    """
    if not _LEAST_P <= level < 1:
        raise SettingError(f"level={level} of the test must lie in [{_LEAST_P:g}, 1); simulation shows nothing below.")
    certified = verdict == Verdict.OK
    some = certified if int(certified.sum()) >= _FEWEST else torch.ones_like(certified)
    p, y = check_probabilities(prob[some]).double(), label[some]
    score, bins, right = log_score(p, y), reliability(p, y), (~wrong(p, y)).double()
    gain = log_score(plugin[some], y) - score if plugin is not None else torch.full_like(score, torch.nan)
    most = p.amax(-1)
    return Agreement(
        certified=float(certified.double().mean()),
        needed=check_share(needed, "needed"),
        compared="certified" if bool(certified[some].all()) else "certified or uncertified",
        n=len(y),
        expected_accuracy=float(most.mean()),
        accuracy=float(right.mean()),
        accuracy_se=float((most * (1 - most)).clamp_min(0).sum().sqrt()) / len(y),
        log_score=float(score.mean()),
        plugin_gain=float(gain.mean()),
        plugin_gain_se=float(gain.std()) / math.sqrt(len(y)) if len(y) > 1 else math.nan,
        calibration_error=calibration_error(bins),
        bins=bins,
        p_value=_simulation_test(p, y, seeded(0, p.device) if generator is None else generator),
        level=level,
    )


def _simulation_test(prob: Tensor, label: Tensor, generator: torch.Generator) -> float:
    """P-value of labels being draws from `prob`, by accuracy and by log score, each two-sided and bearing half."""
    best, log_p = prob.argmax(-1, keepdim=True), prob.clamp_min(0).log()

    def statistics(labels: Tensor, rows: slice) -> Tensor:  # (rows, draws) -> (2, draws)
        return torch.stack([(labels == best[rows]).double().sum(0), log_p[rows].gather(-1, labels).sum(0)])

    mean = torch.stack([prob.amax(-1).sum(), -torch.special.entr(prob.clamp_min(0)).sum()]).unsqueeze(1)
    drawn = torch.zeros(2, _SIMULATED, dtype=torch.float64, device=prob.device)
    step = max(1, _CHUNK // _SIMULATED)
    for start in range(0, len(prob), step):
        rows = slice(start, start + step)
        drawn += statistics(torch.multinomial(prob[rows], _SIMULATED, True, generator=generator), rows)
    distance = (statistics(label.unsqueeze(1), slice(None)) - mean).abs()
    as_far = ((drawn - mean).abs() >= distance - 1e-9 * len(prob)).sum(1)
    return min(1.0, 2 * float((1 + as_far).min()) / (1 + _SIMULATED))
