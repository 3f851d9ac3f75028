"""Measurements of a model, a proposal or a classifier on MNIST: one flat row each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from vaerdict import selective
from vaerdict.classify.agreement import Agreement
from vaerdict.core import log_mean_exp
from vaerdict.inference.class_probabilities import ClassPosterior, MakeProposal, chunk_size, class_weights
from vaerdict.models.m1m2 import M1M2

UNSEEN = 9
"""The digit that is never labelled."""


PAPER_DRAWS = 100
"""Draws of the paper's IWELBO."""


class Weighted(NamedTuple):
    """Class probabilities with their evidence, and each digit's IWELBO with the paper's draws, if there are as many."""

    posterior: ClassPosterior
    iwelbo: Tensor | None


def weighted(model: M1M2, x: Tensor, make: MakeProposal, k: int, *, generator: torch.Generator) -> Weighted:
    """P(c | x) and bounds on log p(x) from the same k draws for each class, which share z where the proposal does."""
    answers, bounds = [], []
    for rows in x.split(chunk_size(x, k, model.n_classes)):
        log_w = class_weights(model, rows, make, k, generator=generator)
        answers.append(ClassPosterior.from_weights(log_w))
        bounds.append(iwelbo_of(torch.logsumexp(log_w.double(), -1), PAPER_DRAWS))
    bound = None if k < PAPER_DRAWS else torch.cat([b for b in bounds if b is not None])
    return Weighted(ClassPosterior.concatenated(answers), bound)


def iwelbo_of(log_w: Tensor, k: int) -> Tensor | None:
    """The IWELBO with k draws, averaged over as many disjoint sets of draws as there are; None if there are fewer.

    Draws of a mixture are sorted by component, so that every set takes its draws at equal distances.

    Shapes: ``(K, n) -> (n,)``.
    """
    n_sets = len(log_w) // k
    if not n_sets:
        return None
    return torch.stack([log_mean_exp(log_w[i::n_sets][:k]) for i in range(n_sets)]).mean(0)


def bounds_of(answer: Weighted, label: Tensor) -> dict[str, float]:
    """The IWELBO of all digits and of the known ones, with all draws and with the paper's.

    The model never sees a label of the unseen digit, whose images are easier than the average.
    """
    known = label != UNSEEN
    bounds = {"iwelbo": answer.posterior.log_evidence, f"iwelbo_{PAPER_DRAWS}": answer.iwelbo}
    return {
        f"{name}{suffix}": bound[digits].mean().item()
        for name, bound in bounds.items()
        if bound is not None
        for suffix, digits in (("", slice(None)), ("_known", known))
    }


def decisions_of(prob: Tensor, label: Tensor, n_known: int, suffix: str = "") -> dict[str, float]:
    """Accuracy on known digits, and average precision and AUROC of each reject score; keys end in `suffix`.

    With free classes (`prob` has more columns than there are known digits) accuracy is that among the known. If only
    known or only unseen digits are given, there is only an accuracy.
    """
    unseen, free = label == UNSEEN, range(n_known, prob.shape[-1])
    known = prob if not free else selective.among_known(prob, free)
    row = {f"accuracy{suffix}": selective.accuracy(known[~unseen], label[~unseen])}
    scores = {"": selective.one_minus_max(prob), "_entropy": selective.entropy(prob)}
    if free:
        scores["_free"] = selective.free_class(prob, free)
    for name, score in scores.items() if 0 < int(unseen.sum()) < len(label) else ():
        row[f"auprc{name}{suffix}"] = selective.average_precision(score, unseen)
        row[f"auroc{name}{suffix}"] = selective.auroc(score, unseen)
    return row


def weights_of(answer: ClassPosterior, n_draws: Sequence[int]) -> dict[str, float]:
    """Median k-hat, share of digits below the threshold, effective sample size as a share of draws, mean draws.

    `n_draws` are the draws of every stage of inference.
    """
    draws = torch.tensor(n_draws, dtype=torch.double, device=answer.ess.device)[answer.stage]
    return {
        "khat": answer.khat.nanmedian().item(),
        "khat_share_ok": answer.certified.double().mean().item(),
        "ess": (answer.ess / draws).mean().item(),
        "draws_mean": draws.mean().item(),
    }


def agreement_row(agreement: Agreement, log_score_plugin: float) -> dict[str, Any]:
    """The verdicts that separate errors of inference from errors of the model, with their numbers."""
    return {
        "certified_share": agreement.certified,
        "n_held_out": agreement.n,
        "accuracy": agreement.accuracy,
        "confidence": agreement.expected_accuracy,
        "gap": agreement.expected_accuracy - agreement.accuracy,
        "gap_se": agreement.accuracy_se,
        "log_score": agreement.log_score,
        "log_score_plugin": log_score_plugin,
        "ece": agreement.calibration_error,
        "p_value": agreement.p_value,
        "inference": "certified" if agreement.inference_certified else "not certified",
        "model_verdict": "agrees" if agreement.model_agrees else "disagrees",
    }


def rule_rows(
    held_out: Tensor, prob: Tensor, label: Tensor, n_known: int, *, estimator: str, alpha: float = 0.05
) -> list[dict[str, Any]]:
    """Rejections of test digits by a conformal threshold chosen on held-out known digits, for each reject score."""
    scores = {"1 - max": selective.one_minus_max, "entropy": selective.entropy}
    free = range(n_known, prob.shape[-1])
    if free:
        scores = {"free class": lambda p: selective.free_class(p, free)}
    unseen = label == UNSEEN
    known = selective.among_known(prob, free) if free else prob
    rows = []
    for name, score in scores.items():
        threshold = selective.conformal_threshold(score(held_out), alpha)
        rejected = score(prob) > threshold
        accepted = ~rejected & ~unseen
        rows.append(
            {
                "estimator": estimator,
                "score": name,
                "rule": f"conformal {100 * alpha:g} %",
                "threshold": threshold,
                "rejected_known": rejected[~unseen].double().mean().item(),
                "rejected_unseen": rejected[unseen].double().mean().item(),
                "accuracy_accepted": selective.accuracy(known[accepted], label[accepted]),
                "coverage": (~rejected).double().mean().item(),
            }
        )
    return rows


def curve_rows(prob: Tensor, label: Tensor, score: Tensor, name: str, *, points: int = 150) -> list[dict[str, Any]]:
    """Precision against recall of rejecting the unseen digit, and risk against coverage with it counted as an error."""
    swept = selective.sweep(score, label == UNSEEN)
    curve = selective.risk_coverage(score, prob.argmax(-1) != label)
    pairs = {"precision-recall": (swept.recall, swept.precision), "risk-coverage": (curve.coverage, curve.risk)}
    return [
        {"kind": kind, "name": name, "x": _thinned(x, points), "y": _thinned(y, points)}
        for kind, (x, y) in pairs.items()
    ]


def _thinned(values: Tensor, points: int) -> list[float]:
    index = torch.linspace(0, len(values) - 1, min(points, len(values)), device=values.device).round().long()
    return [round(v, 5) for v in values[index].tolist()]


def digit_rows(
    x: Tensor, prob: Tensor, label: Tensor, score: Tensor, threshold: float, *, count: int = 16
) -> list[dict[str, Any]]:
    """Digits correctly rejected, wrongly rejected and wrongly accepted by a threshold: the clearest cases of each."""
    unseen, rejected = label == UNSEEN, score > threshold
    kinds = {
        "rejected": (unseen & rejected, True),
        "wrongly rejected": (~unseen & rejected, True),
        "wrongly accepted": (unseen & ~rejected, False),
    }
    rows = []
    for kind, (mask, descending) in kinds.items():
        cases = mask.nonzero().flatten()
        chosen = cases[score[cases].argsort(descending=descending)[:count]].tolist()
        rows += [
            {
                "kind": kind,
                "label": int(label[i]),
                "predicted": int(prob[i].argmax()),
                "score": float(score[i]),
                "pixels": "".join(f"{v:x}" for v in (15 * x[i]).round().int().tolist()),
            }
            for i in chosen
        ]
    return rows
