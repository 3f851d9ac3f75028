"""Arms of the gene experiment: contrasts of many and of few cells, their floors, and cells of several donors.

Models are always trained on the training cells of a whole data set; only the cells that are compared are few.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from vaerdict.de import model as de_model
from vaerdict.de.effects import CENTRED, PROPORTION, Effect, Estimand
from vaerdict.de.metrics import fdp_floor
from vaerdict.noise import seeded
from vaerdict.training import Fit
from vaerdict_paper.experiments.genes_contrasts import (
    UNCERTAINTIES,
    ContrastDraws,
    MakePosterior,
    Sides,
    contrasts,
    draw_contrast,
    joint_lfc,
)
from vaerdict_paper.experiments.genes_fit import Problem, Training, as_counts, fit_model
from vaerdict_paper.experiments.genes_measure import DELTA, averaged, calibration, curve, measured

BASELINE_DRAWS = 1000
TRUE_RATES = "true rates"
"""The name of what the true rates of the cells compared tell, whose only uncertainty is the sample of cells."""

CALIBRATED = 50
"""Cells per group of the contrasts whose calibration is measured."""

ARMS = {"null": True, "effect": False}
"""Arms of the donors' data sets: whether no gene differs between the groups."""

_KEYS = ("model", "n_cells", "estimand", "uncertainty", "prior", "seed")
_PSEUDOCOUNT = 0.5


# -------------------------------------------------------------------------------------------- many and few cells
def contrast_rows(
    problem: Problem, fit: Fit, others: Sequence[Fit], base: dict[str, Any], *, n_draws: int, subsets: int
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Rows and curves of the groups compared with all cells and with few, by a fit and its refits `others`."""
    kinds = UNCERTAINTIES if others else UNCERTAINTIES[:2]
    base = {**base, "proposal": "REFINED", "weights": "snis"}
    rows, curves = [], []
    for n_cells, subset, sides in contrasts(problem.data, problem.seed, subsets):
        shared: dict[str, Any] = {**base, "n_cells": n_cells}
        common_prior = draw_contrast(sides, _posterior(problem, fit, sides, None), n_draws, seed=problem.seed)
        rows.append({**shared, **_row(common_prior, CENTRED, kinds[1]), "prior": "model"})
        posteriors = [_posterior(problem, f, sides, sides.labels) for f in (fit, *others)]
        drawn = draw_contrast(sides, posteriors[0], n_draws, seed=problem.seed, refits=posteriors[1:])
        shared["seconds_refits"] = base.get("seconds_refits", 0.0) + drawn.seconds_refits
        for estimand, kind, effect in drawn.effects(kinds):
            rows.append({**shared, **_row(drawn, estimand, kind, effect), "prior": "group"})
            if estimand is CENTRED and n_cells == CALIBRATED:
                rows[-1]["calibration"] = calibration(effect, sides, estimand)
            if estimand is CENTRED and subset == 0:
                curves.append({**shared, "uncertainty": kind, **curve(effect, sides, estimand)})
    return averaged(rows, *_KEYS), curves


def _posterior(problem: Problem, fit: Fit, sides: Sides, labels: Tensor | None) -> MakePosterior:
    return partial(de_model.refined, as_counts(fit), problem.counts(sides.cells), fit.proposal, labels=labels)


def _row(drawn: ContrastDraws, estimand: Estimand, kind: str, effect: Effect | None = None) -> dict[str, Any]:
    effect = drawn.effect(estimand, kind) if effect is None else effect
    return {"uncertainty": kind, **drawn.diagnostics(), **measured(effect, drawn.sides, estimand)}


# --------------------------------------------------------------------------------------------------------- floors
def floors(problem: Problem, *, subsets: int) -> dict[str, Any]:
    """Baselines and floors: raw proportions without a model, the true rates, and probabilities that are exact."""
    rows, curves = [], []
    for n_cells, subset, sides in contrasts(problem.data, problem.seed, subsets):
        shared = {"proposal": None, **problem.labels, "n_cells": n_cells, "uncertainty": "cells", "prior": None}
        counts, rate = problem.counts(sides.cells), problem.data.rate[sides.cells]
        for name, level in (("raw counts", counts), (TRUE_RATES, rate)):
            drawn = proportion_draws(level, sides.populations(de_model.Bootstrap()), seed=problem.seed)
            for estimand in (CENTRED, PROPORTION):
                effect = independent_effect(drawn, estimand)
                row = {"model": name, **shared, **measured(effect, sides, estimand), "n_draws": BASELINE_DRAWS}
                if estimand is CENTRED and n_cells == CALIBRATED:
                    row["calibration"] = calibration(effect, sides, estimand)
                rows.append(row)
                if name == TRUE_RATES:
                    rows.append({**_floor(effect, problem.seed), **shared, "estimand": estimand.name})
                if estimand is CENTRED and subset == 0:
                    curves.append({"model": name, **shared, **curve(effect, sides, estimand)})
    return {"cross": averaged(rows, *_KEYS), "curves": curves}


def proportion_draws(level: Tensor, populations: Mapping[str, de_model.Population], *, seed: int) -> dict[str, Tensor]:
    """Bootstrapped mean proportions of counts or rates; half a count in a group's total keeps a mean above zero.

    Shapes: ``level (cells, genes) -> {name: (draws, genes)}``.
    """
    proportions = level.double() / level.double().sum(-1, keepdim=True)
    drawn = de_model.fixed_averages(proportions, populations, BASELINE_DRAWS, seed=seed)
    return {name: mean + _PSEUDOCOUNT / level[populations[name].cells].sum().item() for name, mean in drawn.items()}


def independent_effect(drawn: Mapping[str, Tensor], estimand: Estimand) -> Effect:
    """Fold changes whose draws are independent."""
    lfc = estimand.lfc(drawn["a"], drawn["b"])
    return Effect(lfc, torch.full((lfc.shape[1],), float(len(lfc))).to(lfc))


def _floor(effect: Effect, seed: int) -> dict[str, Any]:
    """The FDR error of the probabilities by the true rates if they were exact."""
    prob, mean = (effect.lfc.abs() >= DELTA).double().mean(0), effect.lfc.mean(0)
    return {"model": "FDP floor", "fdr_mae": fdp_floor(prob, mean, generator=seeded(80_000 + seed))}


# --------------------------------------------------------------------------------------------------------- donors
def donor_arm(seed: int, arm: str, name: str, training: Training, *, n_draws: int, n_cells: int) -> dict[str, Any]:
    """Compare groups of different donors by raw counts and by a model, with cells or donors bootstrapped.

    Cells of one donor share its effects. A comparison that takes cells for replicates therefore calls differences
    between the donors of the two groups.
    """
    problem = Problem.of("donors", seed, null=ARMS[arm], n_cells=n_cells)
    sides = Sides.of(problem.data, None, seed=seed)
    counts = problem.counts(sides.cells)
    assert problem.data.donors is not None
    donors = problem.data.donors[sides.cells]
    replicates = {"cells": de_model.Bootstrap(), "donors": de_model.Bootstrap(donors)}
    # each replicate has its own prior: with a common mean the donors would look too much alike
    labels = {"cells": sides.labels, "donors": donors}
    shared = {"proposal": None, **problem.labels, "arm": arm, "n_cells": "all"}
    rows = []
    for kind, weighting in replicates.items():
        drawn = proportion_draws(counts, sides.populations(weighting), seed=problem.seed)
        metrics = measured(independent_effect(drawn, CENTRED), sides, CENTRED)
        rows.append({"model": "raw counts", **shared, "replicates": kind, "n_draws": BASELINE_DRAWS, **metrics})
    fit = fit_model(problem, name, training)
    for kind, weighting in replicates.items():
        posterior = de_model.refined(as_counts(fit), counts, fit.proposal, labels=labels[kind])
        populations = sides.populations(de_model.Equal()) | sides.populations(weighting, " weighted")
        averages = de_model.averages(posterior, populations, n_draws, seed=seed)
        metrics = measured(joint_lfc(averages, CENTRED, " weighted"), sides, CENTRED)
        rows.append({"model": name, **shared, "proposal": "REFINED", "replicates": kind, "n_draws": n_draws, **metrics})
    return {"donors": rows}
