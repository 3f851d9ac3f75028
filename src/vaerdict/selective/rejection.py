r"""Selective prediction: reject scores, how well they reject, and thresholds chosen on held-out labels.

An item is rejected where its reject score is *above* the threshold. ``decisions.decide_or_reject(prob, cost)`` is
`one_minus_max` with the threshold `cost`. A label outside 0 .. classes - 1 marks an item that belongs to no class. Free
classes are classes of a model that no label names.

Choose thresholds on held-out labels, never on the labels that evaluate the result.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from vaerdict.core import DataError, SettingError, ShapeError
from vaerdict.decisions import check_probabilities

_COVERAGES = 20  # coverages at which a guaranteed risk is tested: more are finer and make the bound wider


# ------------------------------------------------------------------------------------------------ scores
def one_minus_max(prob: Tensor, free: Sequence[int] = ()) -> Tensor:
    """Probability that the most probable class is wrong, the classes `free` never being predicted.

    Shapes: ``(*batch, classes) -> (*batch)``.
    """
    return 1 - check_probabilities(prob)[..., _others(prob, free)].amax(-1)


def entropy(prob: Tensor) -> Tensor:
    r"""Entropy :math:`-\sum_c p_c \log p_c` in nats. Shapes: ``(*batch, classes) -> (*batch)``."""
    return torch.special.entr(check_probabilities(prob).clamp_min(0)).sum(-1)


def free_class(prob: Tensor, free: Sequence[int]) -> Tensor:
    """Probability of the classes `free`, which no label names. Shapes: ``(*batch, classes) -> (*batch)``."""
    return check_probabilities(prob)[..., list(free)].sum(-1)


class RejectScore(NamedTuple):
    """A reject score as a function of the class probabilities and the indices of the free classes, and its meaning."""

    function: Callable[[Tensor, Sequence[int]], Tensor]
    meaning: str


REJECT_SCORES: dict[str, RejectScore] = {
    "error": RejectScore(one_minus_max, "probability that the predicted class is wrong"),
    "entropy": RejectScore(lambda prob, free: entropy(prob), "entropy of the class probabilities"),
    "free": RejectScore(free_class, "probability of the free classes"),
}
"""Every reject score by name: the values of ``SelectiveClassifier(reject_by=...)``."""


def among_known(prob: Tensor, free: Sequence[int]) -> Tensor:
    """Probabilities given that the class is none of `free`; uniform where these have all the probability.

    Shapes: ``(*batch, classes) -> (*batch, classes - len(free))``.
    """
    joint = check_probabilities(prob)[..., _others(prob, free)]
    total = joint.sum(-1, keepdim=True)
    return torch.where(total > 0, joint / total, 1 / joint.shape[-1])


def _others(prob: Tensor, free: Sequence[int]) -> list[int]:
    return [c for c in range(prob.shape[-1]) if c not in set(free)]


def wrong(prob: Tensor, label: Tensor) -> Tensor:
    """Whether the most probable class differs from the label, always true for items of no class.

    Shapes: ``(n, classes), (n,) -> (n,)`` bool.
    """
    return check_probabilities(prob).argmax(-1) != check_labels(prob, label)


def accuracy(prob: Tensor, label: Tensor) -> float:
    """Share of correct predictions among the items that belong to one of the classes."""
    has_class = (label >= 0) & (label < prob.shape[-1])
    if not has_class.any():
        raise DataError("no item has a label among the classes; accuracy on the known classes has no meaning.")
    return 1 - float(wrong(prob, label)[has_class].double().mean())


# ------------------------------------------------------------------------------------------------ curves
class Sweep(NamedTuple):
    """Rejection of unseen items at rising thresholds: the first rejects everything, the last nothing.

    ``precision`` is the share of unseen items among the rejected (1 where nothing is rejected), ``recall`` the share
    rejected of the unseen items, ``false_alarms`` the share rejected of the others.

    Shapes: all ``(distinct scores + 1,)``.
    """

    threshold: Tensor
    precision: Tensor
    recall: Tensor
    false_alarms: Tensor


class RiskCoverage(NamedTuple):
    """Share of items accepted at each threshold, and of errors among them. Shapes: all ``(distinct scores,)``."""

    threshold: Tensor
    coverage: Tensor
    risk: Tensor

    @property
    def area(self) -> float:
        """Area under the curve: the mean over items of the risk of accepting all items with at most their score."""
        return float((self.coverage.diff(prepend=self.coverage.new_zeros(1)) * self.risk).sum())

    def accuracy_at(self, coverage: float) -> float:
        """Accuracy on the accepted items at the smallest coverage that is at least `coverage`."""
        return 1 - float(self.risk[_first_covering(self.coverage, coverage)])


def sweep(score: Tensor, unseen: Tensor) -> Sweep:
    """Precision, recall and false alarms of rejecting the `unseen` items, at every distinct score.

    Shapes: ``score, unseen (n,)``.
    """
    threshold, accepted, missed = _accepted(score, unseen)
    rejected, caught = accepted[-1] - accepted, missed[-1] - missed
    n_unseen, n_seen = missed[-1], accepted[-1] - missed[-1]
    if not n_unseen or not n_seen:
        raise DataError(f"of {len(score)} items {int(n_unseen)} are unseen; seen and unseen items are both needed.")
    precision = torch.where(rejected > 0, caught / rejected, 1.0)
    return Sweep(threshold, precision, caught / n_unseen, (rejected - caught) / n_seen)


def average_precision(score: Tensor, unseen: Tensor) -> float:
    r"""Mean precision over the unseen items, :math:`\sum_i (R_i - R_{i-1}) P_i`; ties are rejected together."""
    curve = sweep(score, unseen)
    return -float((curve.recall.diff() * curve.precision[:-1]).sum())


def auroc(score: Tensor, unseen: Tensor) -> float:
    """Probability that an unseen item scores above a seen one, ties counting one half."""
    curve = sweep(score, unseen)
    return -float(torch.trapezoid(curve.recall, curve.false_alarms))


def risk_coverage(score: Tensor, wrong: Tensor) -> RiskCoverage:
    """Risk among the accepted items against coverage (El-Yaniv and Wiener, 2010); ties are accepted together.

    Shapes: ``score, wrong (n,)``.
    """
    threshold, accepted, errors = (t[1:] for t in _accepted(score, wrong))
    return RiskCoverage(threshold, accepted / len(score), errors / accepted)


def _accepted(score: Tensor, mask: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Thresholds in rising order, and the number of items, and of items of the mask, that each accepts.

    Shapes: ``(n,), (n,) -> (distinct + 1,)`` each.
    """
    value, group = _check_scores(score, mask).unique(return_inverse=True)
    size = torch.bincount(group, minlength=len(value)).double()
    marked = torch.bincount(group[mask.bool()], minlength=len(value)).double()
    zero = size.new_zeros(1)
    threshold = torch.cat([value.new_full((1,), -torch.inf), value])
    return threshold, torch.cat([zero, size.cumsum(0)]), torch.cat([zero, marked.cumsum(0)])


def _first_covering(coverage: Tensor, target: float) -> int:
    check_share(target, "coverage")
    return int((coverage < target - 1e-12).sum())


# ------------------------------------------------------------------------------------------------ thresholds
def coverage_threshold(score: Tensor, coverage: float) -> float:
    """The lowest threshold that accepts a share of at least `coverage` of the held-out items."""
    curve = risk_coverage(score, torch.zeros_like(score, dtype=torch.bool))
    return float(curve.threshold[_first_covering(curve.coverage, coverage)])


def risk_threshold(score: Tensor, wrong: Tensor, risk: float) -> float:
    """The highest threshold whose share of errors among the accepted held-out items is at most `risk`.

    Minus infinity (reject everything) where there is none. Because the threshold is selected on the same labels, the
    risk on new data can be larger; `guaranteed_risk_threshold` accepts fewer items and bounds that risk.
    """
    curve = risk_coverage(score, wrong)
    admissible = (curve.risk <= check_share(risk, "risk")).nonzero().flatten()
    return float(curve.threshold[admissible[-1]]) if len(admissible) else -math.inf


def guaranteed_risk_threshold(score: Tensor, wrong: Tensor, risk: float, *, confidence: float = 0.95) -> float:
    r"""The highest threshold for which the held-out labels prove an error rate of at most `risk`.

    If held-out and new items are independent draws from one distribution, then with probability at least `confidence`
    over the held-out items :math:`P(\text{wrong} \mid \text{accepted}) \le` `risk`. Given the j-th smallest score, the
    items below it are independent draws, so their number of errors is binomial. Twenty ranks j are tested, each at a
    twentieth of the level.

    Parameters
    ----------
    score
        Reject scores of held-out items, ``(n,)``.
    wrong
        Whether the prediction for each of them is wrong, ``(n,)``.
    risk
        Largest acceptable error rate among the accepted items.
    confidence
        Probability with which the bound holds.

    Returns
    -------
    float
        The threshold; minus infinity (reject everything) where nothing can be proved.

    References
    ----------
    Geifman and El-Yaniv (2017), Selective classification for deep neural networks.

    Examples
    --------
    >>> score = torch.linspace(0, 1, 200)
    >>> wrong = score > 0.9
    >>> round(guaranteed_risk_threshold(score, wrong, risk=0.05), 2)
    0.9
    """
    check_share(risk, "risk")
    if not 0 < confidence < 1:
        raise SettingError(f"confidence={confidence} must lie strictly between 0 and 1.")
    ranked = torch.cat([_check_scores(score, wrong).sort().values, score.new_full((1,), torch.inf)])
    ranks = [math.ceil(len(score) * j / _COVERAGES) for j in range(1, _COVERAGES)] + [len(score)]
    best = -math.inf
    for bound in ranked[ranks].unique():
        accepted = score < bound
        p_value = _binomial_cdf(int(wrong[accepted].sum()), int(accepted.sum()), risk)
        if p_value <= (1 - confidence) / _COVERAGES:
            best = float(torch.nextafter(bound, -bound.new_tensor(torch.inf)))
    return best


def conformal_threshold(score: Tensor, alpha: float) -> float:
    r"""The threshold that rejects a new item of a known class with probability at most `alpha`.

    The :math:`\lceil (n + 1)(1 - \alpha) \rceil`-th smallest of the n held-out scores, infinity where that exceeds n.
    The guarantee is exact in finite samples if the held-out items, all of known classes and none used in training, and
    the new item are exchangeable. The probability is over both; it is not per class or given x. There is no guarantee
    on the share of unseen items that is rejected.

    Reference: Vovk, Gammerman and Shafer (2005), Algorithmic learning in a random world.
    """
    if not 0 < alpha < 1:
        raise SettingError(f"alpha={alpha} must lie strictly between 0 and 1: it is the share of known items rejected.")
    ranked = _check_scores(score, score).sort().values
    place = math.ceil((len(score) + 1) * (1 - alpha) - 1e-9)
    return float(ranked[place - 1]) if place <= len(score) else math.inf


def _binomial_cdf(successes: int, trials: int, rate: float) -> float:
    """P(at most `successes`); 1 with no trials."""
    binomial = torch.distributions.Binomial(trials, torch.tensor(rate, dtype=torch.float64))
    return float(binomial.log_prob(torch.arange(successes + 1, dtype=torch.float64)).exp().sum().clamp_max(1))


# ------------------------------------------------------------------------------------------------ checks
def _check_scores(score: Tensor, mask: Tensor) -> Tensor:
    if score.dim() != 1 or score.shape != mask.shape or not len(score):
        raise ShapeError(
            f"scores of shape {tuple(score.shape)} and a mask of shape {tuple(mask.shape)}; expected (n,) both, n >= 1."
        )
    if score.isnan().any():
        raise DataError(f"{int(score.isnan().sum())} of {len(score)} reject scores are NaN; they cannot be ranked.")
    return score


def check_labels(prob: Tensor, label: Tensor) -> Tensor:
    """Return `label` ``(n,)`` if it fits `prob` ``(n, classes)``, else raise."""
    if prob.dim() != 2 or label.shape != prob.shape[:1]:
        raise ShapeError(f"prob {tuple(prob.shape)} and label {tuple(label.shape)}; expected (n, classes) and (n,).")
    return label


def check_share(value: float, name: str) -> float:
    """Return `value` if it lies in [0, 1], else raise."""
    if not 0 <= value <= 1:
        raise SettingError(f"{name}={value} must lie in [0, 1].")
    return value
