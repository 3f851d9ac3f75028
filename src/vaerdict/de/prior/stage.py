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
    kind, rows = analysis.options.prior, analysis.others(contrast)
    record: dict[str, Any] = {"kind": kind, "used": False, "reason": None, "n_other": len(rows)}
    reason, others = _too_few(len(rows), len(genes), degrees_of_freedom(analysis, contrast)), None
    if reason is None:
        others = analysis.source.counts_of(rows, genes)
        others = others[np.asarray(others.sum(1)).ravel() > 0]
        record["n_other"] = others.shape[0]
        reason = _too_few_other(others.shape[0])
    if reason is not None or others is None:
        return PriorOfContrast(None, {**record, "reason": reason})
    changes = FoldChanges(likelihood.mode - centre, likelihood.error)
    prediction = _predictor(kind)(analysis, contrast, genes, changes, others)
    learned = LearnedPrior(likelihood, centre, prediction, own, exact)
    return PriorOfContrast(learned, {**record, "used": True, **learned.summary._asdict()})


def _too_few(n_other: int, n_genes: int, df: float) -> str | None:
    """Why no prior can be learned."""
    if n_other < FEWEST_OTHER:
        return _too_few_other(n_other)
    if n_genes < FEWEST_GENES:
        return f"{n_genes} genes are expressed, and at least {FEWEST_GENES} are needed"
    if df < FEWEST_DF:
        return f"the replicates leave {df:g} degrees of freedom, and at least {FEWEST_DF} are needed"
    return None


def _too_few_other(n: int) -> str | None:
    if n >= FEWEST_OTHER:
        return None
    return f"{n} cells with counts are not compared, and at least {FEWEST_OTHER} are needed"


def _predictor(kind: str) -> Predictor:
    if kind == "profile":
        return predict_by_profile
    from vaerdict.de.model.prediction import predict_by_model

    return predict_by_model
