"""Rows of the gene experiment: contrasts and proposals measured against the truth behind the data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from vaerdict import diagnostics
from vaerdict.core import Proposal, log_mean_exp
from vaerdict.datasets.genes import CountData
from vaerdict.de import model as de_model
from vaerdict.de.effects import CENTRED, Effect, Estimand
from vaerdict.de.metrics import LEVELS, coverage, fdr_curve, interval_score, measure
from vaerdict.models.counts import CountModel
from vaerdict.noise import seeded
from vaerdict_paper.experiments.genes_contrasts import Sides, compared

DELTA = 0.5
"""A gene counts as changed if its true |log2 fold change| is at least this."""

INTERVAL = 0.9
_BINS = 10


def true_lfc(data: CountData, estimand: str, states: tuple[int, int] = (0, 1)) -> Tensor:
    """The true value of an estimand, by which genes are labelled: for `centred` the change of expression.

    Shapes: ``-> (genes,)``.
    """
    return data.lfc(*states, proportions=estimand != CENTRED.name).double()


def measured(effect: Effect, sides: Sides, estimand: Estimand) -> dict[str, Any]:
    """The metrics of one set of joint draws."""
    table = compared(effect, delta=DELTA, level=LEVELS[0], interval=INTERVAL)
    truth = true_lfc(sides.data, estimand.name, sides.states)
    return {
        "estimand": estimand.name,
        "delta": DELTA,
        **measure(table["prob_de"], table["lfc_mean"], truth, DELTA),
        **measured_table(table, truth, centred=estimand.centred),
        "mcse": table["mcse"].mean().item(),
    }


def measured_table(table: Mapping[str, Tensor], truth: Tensor, *, centred: bool) -> dict[str, float]:
    """How well estimates and 90 % intervals fit the truth: ``coverage``, ``width``, ``interval_score`` and others.

    Expression is known up to a factor. A centred change is therefore relative to that of the median gene.

    Shapes: ``lfc_low``, ``lfc_high`` and ``lfc_mean`` of the table, and ``truth``, ``(genes,)``.
    """
    target = truth - truth.quantile(0.5) if centred else truth
    low, high, mean = table["lfc_low"], table["lfc_high"], table["lfc_mean"]
    return {
        "coverage": coverage(low, high, target),
        "coverage_absolute": coverage(low, high, truth),
        "width": (high - low).mean().item(),
        "interval_score": interval_score(low, high, target, INTERVAL),
        "lfc_rmse": (mean - target).square().mean().sqrt().item(),
        "lfc_slope": ((mean * target).sum() / target.square().sum()).item(),
    }


def calibration(effect: Effect, sides: Sides, estimand: Estimand) -> list[list[float]]:
    """For ten bins of the probability: number of genes, sum of their probabilities, number of changed genes."""
    prob = (effect.lfc.abs() >= DELTA).double().mean(0)
    truth = true_lfc(sides.data, estimand.name, sides.states)
    index = (prob * _BINS).long().clamp_max(_BINS - 1)
    changed = (truth.abs() >= DELTA).double()
    columns = (torch.ones_like(prob), prob, changed)
    return [[c[index == i].sum().item() for c in columns] for i in range(_BINS)]


def curve(effect: Effect, sides: Sides, estimand: Estimand) -> dict[str, Any]:
    """Realised and expected FDR along the ranking, thinned."""
    lfc = effect.lfc
    prob = (lfc.abs() >= DELTA).double().mean(0)
    return fdr_curve(prob, lfc.mean(0), true_lfc(sides.data, estimand.name, sides.states), DELTA)


def averaged(rows: Sequence[dict[str, Any]], *keys: str) -> list[dict[str, Any]]:
    """One row for each combination of `keys`: numbers averaged, lists summed, other values from the first row."""
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault(tuple(row[key] for key in keys), []).append(row)
    return [
        {name: same[0][name] if name in keys else _average([row[name] for row in same]) for name in same[0]}
        | {"subsets": len(same)}
        for same in groups.values()
    ]


def _average(values: list[Any]) -> Any:
    if isinstance(values[0], list):
        return torch.tensor(values).sum(0).tolist()
    if isinstance(values[0], (int, float)) and not isinstance(values[0], bool):
        return sum(values) / len(values)
    return values[0]


@torch.no_grad()
def assessed(model: CountModel, q: Proposal, x: Tensor, n: int, *, seed: int) -> dict[str, Any]:
    """Held-out evidence, k-hat and effective share of a proposal with many draws. Shapes: ``x (cells, genes)``."""
    generators = [seeded(40_000 + seed + i) for i in range(len(x))]
    log_w = de_model.Proposed(model, x, q).particles(n, generators).log_w.double()
    khat, ess = diagnostics.khat(log_w), diagnostics.ess(log_w)
    ok = diagnostics.verdict(khat, ess, n) == diagnostics.Verdict.OK
    return {
        "iwelbo": log_mean_exp(log_w).mean().item(),
        "khat": khat.nanmedian().item(),
        "khat_share_ok": ok.double().mean().item(),
        "khat_quantiles": khat.nanquantile(torch.tensor([0.05, 0.25, 0.5, 0.75, 0.95]).to(khat)).tolist(),
        "ess": (ess / n).median().item(),
    }
