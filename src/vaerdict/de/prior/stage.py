"""The prior of a contrast: whether there is one, what it predicts, and what results.json says of it."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from vaerdict.de.analysis import Analysis
from vaerdict.de.contrasts import Contrast
from vaerdict.de.counts_likelihood import LfcLikelihood
from vaerdict.de.prior.learned import LearnedPrior
from vaerdict.de.prior.prediction import FoldChanges, Predictor
from vaerdict.de.prior.profile import predict_by_profile
from vaerdict.de.prior.replicates import degrees_of_freedom

FEWEST_OTHER = 100
"""Cells that are not compared; fewer do not show which genes go together."""

FEWEST_GENES = 50
"""Genes; fewer do not show how much a prediction is worth."""

FEWEST_DF = 10
"""Degrees of freedom between replicates; with fewer, the chance that a prediction shares with the counts is unknown."""


class PriorOfContrast(NamedTuple):
    """The prior learned for a contrast, None where there is none, and its record in results.json."""

    learned: LearnedPrior | None
    record: dict[str, Any]


def learn_prior(
    analysis: Analysis,
    contrast: Contrast,
    genes: np.ndarray,
    likelihood: LfcLikelihood,
    centre: float,
    own: Tensor,
    exact: tuple[float, ...],
) -> PriorOfContrast:
    """Learn the prior of a contrast, or say why there is none.

    `own` are the shares of the counts' own prior, and `exact` the differences from the centre whose tails are asked
    for. Shapes: ``genes (n,)`` columns of the file, ``own (widths,)``.
    """
    kind, others = analysis.options.prior, analysis.others(contrast)
    record: dict[str, Any] = {"kind": kind, "used": False, "reason": None, "n_other": len(others)}
    df = degrees_of_freedom(analysis, contrast)
    if len(others) < FEWEST_OTHER:
        reason = f"{len(others)} cells of the file are not compared, and at least {FEWEST_OTHER} are needed"
    elif len(genes) < FEWEST_GENES:
        reason = f"{len(genes)} genes are expressed, and at least {FEWEST_GENES} are needed"
    elif df < FEWEST_DF:
        reason = f"the replicates leave {df:g} degrees of freedom, and at least {FEWEST_DF} are needed"
    else:
        changes = FoldChanges(likelihood.mode - centre, likelihood.error)
        prediction = _predictor(kind)(analysis, contrast, genes, changes, others)
        learned = LearnedPrior(likelihood, centre, prediction, own, exact)
        return PriorOfContrast(learned, {**record, "used": True, **learned.summary._asdict()})
    return PriorOfContrast(None, {**record, "reason": reason})


def _predictor(kind: str) -> Predictor:
    if kind == "profile":
        return predict_by_profile
    from vaerdict.de.model.prediction import predict_by_model

    return predict_by_model
