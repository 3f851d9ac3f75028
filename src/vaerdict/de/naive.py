"""A naive bootstrap of the counts, for comparison: it ignores over-dispersion of means and calls many genes falsely."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from vaerdict.de.analysis import Analysis
from vaerdict.de.contrasts import Contrast
from vaerdict.de.effects import ESTIMANDS
from vaerdict.de.model.averaging import Population, fixed_averages
from vaerdict.de.model.effect import group_lfc, populations, replicate_effect, sample_means, weighting
from vaerdict.decisions import discoveries

_DRAWS = 500
_PSEUDOCOUNT = 0.5  # half a count in a total keeps every mean above zero


def naive_columns(analysis: Analysis) -> list[dict[str, Tensor]]:
    """The columns ``naive_*`` of every contrast."""
    options, cells = analysis.options, populations(analysis.contrasts)
    estimand, totals = ESTIMANDS[options.scale], torch.from_numpy(analysis.counts.totals[analysis.place])
    groups = {name: Population(c, weighting(estimand)) for name, c in cells.items()}
    drawn = fixed_averages(
        analysis.compared, groups, _DRAWS, seed=options.seed, n_genes=analysis.n_genes, engine=analysis.engine
    )
    means = {name: mean + _PSEUDOCOUNT / totals[cells[name]].sum().item() for name, mean in drawn.items()}

    def lfc(contrast: Contrast) -> Tensor:
        a, b = (sample_means(side, means) for side in (contrast.a, contrast.b))
        if contrast.a.samples:
            return replicate_effect(a, b, estimand, seed=options.seed).lfc
        return group_lfc(a, b, estimand)

    draws = [lfc(contrast) for contrast in analysis.contrasts]
    mean = [one.mean(0) for one in draws]
    prob = [(one.abs() >= options.delta).double().mean(0) for one in draws]
    called = _called(prob, mean, options.level)
    return [{"naive_lfc": m, "naive_prob_de": p, "naive_is_de": c} for m, p, c in zip(mean, prob, called, strict=True)]


def _called(prob: Sequence[Tensor], mean: Sequence[Tensor], level: float) -> Sequence[Tensor]:
    """The genes called over all contrasts."""
    called = discoveries(torch.cat(list(prob)), level, ties=torch.cat(list(mean)).abs())
    return called.split([len(p) for p in prob])
