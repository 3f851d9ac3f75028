"""From group averages to genes: log2 fold changes, their probabilities and intervals, and the set at a target FDR."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from vaerdict.core import SettingError, ShapeError
from vaerdict.decisions import discoveries, q_values

_AT_A_TIME = 2**22  # numbers a quantile is taken of: older versions of torch refuse more than 2^24


@dataclass(frozen=True)
class Estimand:
    """What a log2 fold change is of, and the quantity in the population that it estimates.

    Normalised expression is a proportion: where some genes go up, the proportions of all others go down. `centred`
    takes the median over genes out of every joint draw. `pairs` compares one random cell of each group.
    """

    name: str
    target: str
    centred: bool = False
    pairs: bool = False

    def lfc(self, a: Tensor, b: Tensor) -> Tensor:
        """Log2 fold change of a over b in every joint draw. Shapes: ``(draws, genes), (draws, genes) -> same``."""
        return self.of(a.log2() - b.log2())

    def of(self, change: Tensor) -> Tensor:
        """Changes of proportions as this fold change. Shapes: ``(draws, genes) -> same``."""
        return change - _midpoint(change) if self.centred else change


def _midpoint(change: Tensor) -> Tensor:
    """The median over genes, of an even number the mean of the middle two. Shapes: ``(draws, genes) -> (draws, 1)``."""
    rows = change.split(max(1, _AT_A_TIME // change.shape[-1]))
    return torch.cat([some.quantile(0.5, -1, keepdim=True) for some in rows])


def _quantiles(lfc: Tensor, levels: Sequence[float]) -> Tensor:
    """Quantiles over the draws of each gene. Shapes: ``(draws, genes) -> (levels, genes)``."""
    columns = lfc.split(max(1, _AT_A_TIME // len(lfc)), 1)
    return torch.cat([some.quantile(lfc.new_tensor(levels), 0) for some in columns], 1)


CENTRED = Estimand("centred", "log2 fold change of mean expression, if half of the genes change no more", centred=True)
PROPORTION = Estimand("proportion", "log2 fold change of the mean proportion of each gene")
PAIR = Estimand("pair", "log2 ratio of the proportions in one random cell of each group, as in scvi-tools", pairs=True)
ESTIMANDS = {estimand.name: estimand for estimand in (CENTRED, PROPORTION, PAIR)}


INTERVAL = 0.9
"""The probability that the credible interval of a fold change holds, where nothing else is asked for."""


class Effect(NamedTuple):
    """Joint draws of the log2 fold changes with how many independent ones they are worth.

    Shapes: ``lfc (draws, genes)``, ``n_effective (genes,)``.
    """

    lfc: Tensor
    n_effective: Tensor


@dataclass(frozen=True, eq=False)
class Comparison:
    """The genes of group a against those of group b.

    A gene is differentially expressed where its |LFC| is at least `delta`; `level` is the target FDR. `table` holds one
    tensor a column: ``lfc_mean``, ``lfc_median`` and the credible interval ``lfc_low`` to ``lfc_high``; ``prob_up`` and
    ``prob_down``, that the LFC is at least delta or at most minus delta, and ``prob_de``, their sum, with its
    Monte-Carlo error ``mcse``; ``q_value``, the smallest posterior expected FDR at which the gene is called, and
    ``is_de``; ``mean_a`` and ``mean_b``, the groups' expression.
    """

    estimand: Estimand
    delta: float
    level: float
    table: dict[str, Tensor]


def comparison(
    effect: Effect,
    mean_a: Tensor,
    mean_b: Tensor,
    *,
    estimand: Estimand,
    delta: float = 0.5,
    level: float = 0.05,
    interval: float = INTERVAL,
) -> Comparison:
    r"""Summarise joint draws of log2 fold changes gene by gene.

    Genes of equal probability are ranked by :math:`|E\,\mathrm{LFC}|`.

    Parameters
    ----------
    effect
        Draws of the fold changes, ``(draws, genes)``, with their effective number.
    mean_a, mean_b
        Expression of both groups, ``(genes,)``.
    estimand
        What the fold change is of.
    delta
        Least |LFC| of a differentially expressed gene.
    level
        FDR of the genes called.
    interval
        Probability of the credible interval.

    Returns
    -------
    Comparison
        The columns ``lfc_mean`` to ``mean_b`` of `vaerdict.de.columns`.

    Examples
    --------
    >>> effect = Effect(torch.tensor([[2.0, 0.0], [2.2, 0.1]]), torch.full((2,), 2.0))
    >>> comparison(effect, torch.ones(2), torch.ones(2), estimand=PROPORTION).table["prob_de"]
    tensor([1., 0.], dtype=torch.float64)
    """
    if not delta > 0:
        raise SettingError(f"delta={delta} must be positive: every gene changes by at least zero.")
    if not 0 < interval < 1:
        raise SettingError(f"interval={interval} is no probability strictly between 0 and 1.")
    lfc = effect.lfc
    if lfc.dim() != 2 or mean_a.shape != lfc.shape[1:] or mean_b.shape != lfc.shape[1:]:
        raise ShapeError(
            f"draws {tuple(lfc.shape)} with means {tuple(mean_a.shape)} and {tuple(mean_b.shape)}; "
            "expected (draws, genes) and (genes,)."
        )
    low, median, high = _quantiles(lfc, [0.5 - interval / 2, 0.5, 0.5 + interval / 2])
    up, down = (lfc >= delta).double().mean(0), (lfc <= -delta).double().mean(0)
    prob, mean = (up + down).clamp_max(1), lfc.mean(0)
    table = {
        "lfc_mean": mean,
        "lfc_median": median,
        "lfc_low": low,
        "lfc_high": high,
        "prob_de": prob,
        "prob_up": up,
        "prob_down": down,
        "q_value": q_values(prob, ties=mean.abs()),
        "is_de": discoveries(prob, level, ties=mean.abs()),
        "mcse": probability_error(prob, effect.n_effective),
        "mean_a": mean_a,
        "mean_b": mean_b,
    }
    return Comparison(estimand, delta, level, table)


def probability_error(prob: Tensor, n: Tensor) -> Tensor:
    """Monte-Carlo error of a probability from n draws; by the rule of succession never below 1 / (n + 2)."""
    return torch.maximum((prob * (1 - prob) / n).sqrt(), 1 / (n + 2))
