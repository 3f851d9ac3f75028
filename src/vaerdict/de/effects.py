"""What a log2 fold change is of, and its summaries gene by gene: from joint draws, or from exact posteriors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from vaerdict.core import SettingError, ShapeError
from vaerdict.de.shrinkage import PosteriorOfChange

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


CENTRED = Estimand("centred", "log2 fold change relative to the genes that do not change", centred=True)
PROPORTION = Estimand("proportion", "log2 fold change of the share that a gene has of all counts")
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


GeneTable = dict[str, Tensor]
"""The columns of one contrast. Shapes: ``(genes,)`` each."""


def check_delta(delta: float) -> None:
    """A threshold of zero is refused."""
    if not delta > 0:
        raise SettingError(f"delta={delta} must be positive: every gene changes by at least zero.")


def summarise_draws(effect: Effect, *, delta: float = 0.5, interval: float = INTERVAL) -> GeneTable:
    r"""Summarise joint draws of log2 fold changes: the columns ``lfc_mean`` to ``lfsr``, ``lfdr`` and ``mcse``.

    ``lfdr`` is the probability that a gene does not change by delta in the direction in which it seems to.

    >>> effect = Effect(torch.tensor([[2.0, 0.0], [2.2, 0.1]]), torch.full((2,), 2.0))
    >>> summarise_draws(effect)["prob_de"]
    tensor([1., 0.], dtype=torch.float64)
    """
    check_delta(delta)
    if not 0 < interval < 1:
        raise SettingError(f"interval={interval} is no probability strictly between 0 and 1.")
    lfc = effect.lfc
    if lfc.dim() != 2 or effect.n_effective.shape != lfc.shape[1:]:
        raise ShapeError(
            f"draws {tuple(lfc.shape)} worth {tuple(effect.n_effective.shape)}; expected (draws, genes) and (genes,)."
        )
    low, median, high = _quantiles(lfc, [0.5 - interval / 2, 0.5, 0.5 + interval / 2])
    up, down = (lfc >= delta).double().mean(0), (lfc <= -delta).double().mean(0)
    prob = torch.maximum(up, down)
    return {
        "lfc_mean": lfc.mean(0),
        "lfc_median": median,
        "lfc_low": low,
        "lfc_high": high,
        "prob_de": prob,
        "prob_up": up,
        "prob_down": down,
        "lfsr": torch.minimum((lfc <= 0).double().mean(0), (lfc >= 0).double().mean(0)),
        "lfdr": 1 - prob,
        "mcse": probability_error(prob, effect.n_effective),
    }


def summarise_posterior(
    posterior: PosteriorOfChange, shown: PosteriorOfChange, centre: float, estimand: Estimand, delta: float
) -> GeneTable:
    """The same columns of exact posteriors of differences from the centre; `shown` gives fold changes and intervals.

    The fold change is the difference itself where the estimand is centred. The nodes of `node_values` are needed.
    """
    check_delta(delta)
    shift = 0.0 if estimand.centred else centre
    down, zero, up = node_values(centre, estimand, delta)
    prob_up, prob_down = posterior.above(up, or_equal=True), posterior.below(down, or_equal=True)
    levels = (0.5 - INTERVAL / 2, 0.5, 0.5 + INTERVAL / 2)
    low, median, high = (shown.quantile(level) + shift for level in levels)
    return {
        "lfc_mean": shown.mean + shift,
        "lfc_median": median,
        "lfc_low": low,
        "lfc_high": high,
        "prob_de": torch.maximum(prob_up, prob_down),
        "prob_up": prob_up,
        "prob_down": prob_down,
        "lfsr": torch.minimum(posterior.below(zero, or_equal=True), posterior.above(zero, or_equal=True)),
        "lfdr": torch.minimum(posterior.below(up), posterior.above(down)),
        "mcse": torch.zeros_like(prob_up),
    }


def node_values(centre: float, estimand: Estimand, delta: float) -> tuple[float, float, float]:
    """The fold changes -delta, zero and delta as differences from the centre."""
    shift = 0.0 if estimand.centred else centre
    return -delta - shift, -shift, delta - shift


def probability_error(prob: Tensor, n: Tensor) -> Tensor:
    """Monte-Carlo error of a probability from n draws; by the rule of succession never below 1 / (n + 2)."""
    return torch.maximum((prob * (1 - prob) / n).sqrt(), 1 / (n + 2))
