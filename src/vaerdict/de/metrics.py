"""Metrics of a list of genes with stated false discovery rates against a known truth, the same for every method."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from vaerdict.core import ShapeError
from vaerdict.decisions import expected_fdr, ranking

LEVELS = (0.05, 0.10, 0.20)
"""False discovery rates at which genes are called; `fdp` and `tpr` are those at the first."""


def measure(prob: Tensor, lfc: Tensor, truth_lfc: Tensor, delta: float) -> dict[str, Any]:
    """Metrics of probabilities that |LFC| >= delta; genes of equal probability are ranked by |lfc|.

    A gene is differentially expressed where its true |LFC|, on the scale of `truth_lfc`, is at least delta. ``brier``
    is the mean squared difference of probability and truth, a proper score: its expectation is least for probabilities
    that are right, which need not hold of ``fdr_mae``. Shapes: all ``(genes,)``.
    """
    order = ranking(prob.double(), lfc.abs().double())
    if truth_lfc.shape != prob.shape:
        raise ShapeError(f"one value per gene is needed: got {tuple(prob.shape)} and {tuple(truth_lfc.shape)}.")
    changed, stated = truth_lfc.abs() >= delta, expected_fdr(prob)
    hit = changed[order].double()
    fdp = 1 - hit.cumsum(0) / torch.arange(1, len(hit) + 1)
    return {
        "fdr_mae": 100 * (fdp - stated).abs().mean().item(),
        "brier": (prob.double() - changed.double()).square().mean().item(),
        **measure_ranked(order, stated, changed),
    }


def measure_ranked(order: Tensor, stated: Tensor, changed: Tensor) -> dict[str, Any]:
    r"""Metrics of a ranking whose first genes are called up to a level of `stated`.

    `stated` is the stated FDR of the first 1, 2, ... genes, or their adjusted p-values in the order of the ranking, NaN
    for genes that are never called, which come last. ``auprc`` is the average precision; ``fdp_05`` and ``tpr_05`` are
    those of the genes called at 5 %, and so on for `LEVELS`. An empty set has an FDP of zero; without any true gene
    `auprc` and `tpr` are NaN.

    Adjusted p-values bound the FDR of the genes called by them and are no estimates of it. Therefore only `measure`
    has ``brier`` and, as in the paper, ``fdr_mae``,
    :math:`100 \cdot \tfrac1G \sum_k |\mathrm{FDP}_k - \mathrm{FDR}_k|`.

    Shapes: ``order (genes,)``, ``stated (genes,)`` nondecreasing, ``changed (genes,)`` bool, by gene.
    """
    if not order.shape == stated.shape == changed.shape:
        raise ShapeError(
            f"one value per gene is needed: got {tuple(order.shape)}, {tuple(stated.shape)}, {tuple(changed.shape)}."
        )
    hit = changed[order].double()
    n_true, precision = hit.sum(), hit.cumsum(0) / torch.arange(1, len(hit) + 1)
    row: dict[str, Any] = {"auprc": ((precision * hit).sum() / n_true).item(), "n_true": int(n_true)}
    for level in LEVELS:
        size = int((stated <= level).sum())
        row[f"fdp{_suffix(level)}"] = 1 - precision[size - 1].item() if size else 0.0
        row[f"tpr{_suffix(level)}"] = (hit[:size].sum() / n_true).item()
        row[f"n_called{_suffix(level)}"] = size
    first = _suffix(LEVELS[0])
    return {**row, "fdp": row[f"fdp{first}"], "tpr": row[f"tpr{first}"]}


def _suffix(level: float) -> str:
    return f"_{round(100 * level):02d}"


def fdr_curve(prob: Tensor, lfc: Tensor, truth_lfc: Tensor, delta: float, points: int = 21) -> dict[str, Any]:
    """Achieved and expected FDR of the first k genes at some k, for figures. Shapes: all ``(genes,)``."""
    hit = (truth_lfc.abs() >= delta)[ranking(prob.double(), lfc.abs().double())].double()
    count = torch.arange(1, len(hit) + 1)
    chosen = torch.linspace(0, len(hit) - 1, min(points, len(hit))).round().long()
    fdp, fdr = 1 - hit.cumsum(0) / count, expected_fdr(prob)
    return {"k": count[chosen].tolist(), "fdp": fdp[chosen].tolist(), "fdr": fdr[chosen].tolist()}


def fdp_floor(prob: Tensor, lfc: Tensor, *, repeats: int = 200, generator: torch.Generator) -> float:
    """The mean `fdr_mae` of probabilities that are exactly right, due to the randomness of the FDP alone.

    Truths are drawn from the probabilities themselves. Shapes: ``prob, lfc (genes,)``.
    """
    drawn = torch.rand(repeats, len(prob), generator=generator, dtype=torch.float64) < prob.double()
    hit = drawn[:, ranking(prob.double(), lfc.abs().double())].double()
    fdp = 1 - hit.cumsum(1) / torch.arange(1, len(prob) + 1)
    return 100 * (fdp - expected_fdr(prob)).abs().mean().item()


def coverage(low: Tensor, high: Tensor, truth_lfc: Tensor) -> float:
    """Share of genes whose interval covers the true log2 fold change. Shapes: all ``(genes,)``."""
    return ((low <= truth_lfc) & (truth_lfc <= high)).double().mean().item()


def interval_score(low: Tensor, high: Tensor, truth_lfc: Tensor, interval: float = 0.9) -> float:
    r"""Mean over genes of the width of central intervals and their penalty for missing the true fold change.

    :math:`(u - l) + \tfrac{2}{\alpha} [(l - y)_+ + (y - u)_+]` with :math:`\alpha` = 1 - `interval`, a proper score
    (Gneiting and Raftery, 2007): its expectation is least for the quantiles of the right posterior, so that intervals
    that are too narrow are penalised as well as those that are too wide. Shapes: all ``(genes,)``.

    >>> interval_score(torch.tensor([-1.0]), torch.tensor([1.0]), torch.tensor([1.5]))
    12.0
    """
    missed = (low - truth_lfc).clamp_min(0) + (truth_lfc - high).clamp_min(0)
    return (high - low + 2 / (1 - interval) * missed).double().mean().item()
