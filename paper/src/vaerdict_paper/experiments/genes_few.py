"""Contrasts of many and of few cells with each kind of uncertainty, the floors under them, and the raw-count baseline.

The model is always the one trained on the training cells of all; what is few is the cells of the contrast.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from vaerdict import de
from vaerdict.de.metrics import fdp_floor
from vaerdict.noise import seeded
from vaerdict.training import Fit
from vaerdict_paper.experiments.genes_fit import Problem, Training, fit_model, fit_refits
from vaerdict_paper.experiments.genes_grid import as_counts, model_row
from vaerdict_paper.experiments.genes_measure import (
    DELTA,
    UNCERTAINTIES,
    Drawn,
    Made,
    Sides,
    answers,
    averaged,
    calibration,
    curve,
    draw,
    measured,
)

FEW = (50, 20)
"""Cells a side of the small contrasts."""

BASELINE_DRAWS = 1000
CALIBRATED = 50
"""Cells a side of the contrasts whose probabilities are held against frequencies."""

_APART = ("model", "n_cells", "estimand", "uncertainty", "prior", "seed")
_PSEUDOCOUNT = 0.5


def contrasts(problem: Problem, subsets: int) -> list[tuple[int | str, int, Sides]]:
    """All cells once, and several random choices of few: how many a side, which choice, and the cells."""
    every = [("all", None, 0), *((n, n, j) for n in FEW for j in range(subsets))]
    return [(name, j, Sides.of(problem.data, n, seed=problem.seed, subset=j)) for name, n, j in every]


def few(
    problem: Problem, name: str, training: Training, *, n_draws: int, refits: int, subsets: int, khat_draws: int = 0
) -> dict[str, Any]:
    """Train a model and its refits, and compare the groups with all cells and with few; the row of the model too where
    `khat_draws` are asked for."""
    fit = fit_model(problem, name, training)
    started = time.perf_counter()
    others = fit_refits(problem, fit, training, refits) if refits else []
    seconds = time.perf_counter() - started
    kinds = UNCERTAINTIES if others else UNCERTAINTIES[:2]
    base = {"model": name, "proposal": "REFINED", "weights": "snis", **problem.labels, "seconds_train": fit.seconds}
    rows, curves = [], []
    for n_cells, subset, sides in contrasts(problem, subsets):
        here: dict[str, Any] = {**base, "n_cells": n_cells}
        plain = draw(sides, _posterior(problem, fit, sides, None), n_draws, seed=problem.seed)
        rows.append({**here, **_row(plain, de.CENTRED, kinds[1]), "prior": "model"})
        made = [_posterior(problem, f, sides, sides.labels) for f in (fit, *others)]
        drawn = draw(sides, made[0], n_draws, seed=problem.seed, refits=made[1:])
        here["seconds_refits"] = seconds + drawn.seconds_refits
        for estimand, kind, effect in answers(drawn, kinds):
            rows.append({**here, **_row(drawn, estimand, kind, effect), "prior": "group"})
            if estimand is de.CENTRED and n_cells == CALIBRATED:
                rows[-1]["calibration"] = calibration(effect, sides, estimand)
            if estimand is de.CENTRED and subset == 0:
                curves.append({**here, "uncertainty": kind, **curve(effect, sides, estimand)})
    models = [{"model": name, **problem.labels, **model_row(problem, fit, khat_draws)}] if khat_draws else []
    return {"models": models, "cross": averaged(rows, *_APART), "curves": curves}


def _posterior(problem: Problem, fit: Fit, sides: Sides, labels: Tensor | None) -> Made:
    return partial(de.refined, as_counts(fit), problem.counts(sides.cells), fit.proposal, labels=labels)


def _row(drawn: Drawn, estimand: de.Estimand, kind: str, effect: de.Effect | None = None) -> dict[str, Any]:
    effect = drawn.effect(estimand, kind) if effect is None else effect
    return {"uncertainty": kind, **drawn.diagnostics(), **measured(effect, drawn.sides, estimand)}


# ---------------------------------------------------------------------------------------------------- floors
def floors(problem: Problem, *, subsets: int) -> dict[str, Any]:
    """What the cells allow: raw proportions without a model, the true rates, and probabilities that are right."""
    rows, curves = [], []
    for n_cells, subset, sides in contrasts(problem, subsets):
        shared = {"proposal": None, **problem.labels, "n_cells": n_cells, "uncertainty": "cells", "prior": None}
        counts, rate = problem.counts(sides.cells), problem.data.rate[sides.cells]
        for name, level in (("raw counts", counts), ("oracle", rate)):
            drawn = proportion_draws(level, sides.populations(de.Bootstrap()), seed=problem.seed)
            for estimand in (de.CENTRED, de.PROPORTION):
                effect = known_effect(drawn, estimand)
                row = {"model": name, **shared, **measured(effect, sides, estimand), "n_draws": BASELINE_DRAWS}
                if estimand is de.CENTRED and n_cells == CALIBRATED:
                    row["calibration"] = calibration(effect, sides, estimand)
                rows.append(row)
                if name == "oracle":
                    rows.append({**_floor(effect, problem.seed), **shared, "estimand": estimand.name})
                if estimand is de.CENTRED and subset == 0:
                    curves.append({"model": name, **shared, **curve(effect, sides, estimand)})
    return {"cross": averaged(rows, *_APART), "curves": curves}


def proportion_draws(level: Tensor, populations: Mapping[str, de.Population], *, seed: int) -> dict[str, Tensor]:
    """Bootstrapped mean proportions of counts or rates; half a count in a group's total keeps a mean above zero.

    Shapes: ``level (cells, genes) -> {name: (draws, genes)}``.
    """
    share = level.double() / level.double().sum(-1, keepdim=True)
    drawn = de.fixed_averages(share, populations, BASELINE_DRAWS, seed=seed)
    return {name: mean + _PSEUDOCOUNT / level[populations[name].cells].sum().item() for name, mean in drawn.items()}


def known_effect(drawn: Mapping[str, Tensor], estimand: de.Estimand) -> de.Effect:
    """Fold changes whose draws are all independent."""
    lfc = estimand.lfc(drawn["a"], drawn["b"])
    return de.Effect(lfc, torch.full((lfc.shape[1],), float(len(lfc))).to(lfc))


def _floor(effect: de.Effect, seed: int) -> dict[str, Any]:
    """The FDR error of the oracle's probabilities if they were exactly right."""
    prob, mean = (effect.lfc.abs() >= DELTA).double().mean(0), effect.lfc.mean(0)
    return {"model": "FDP floor", "fdr_mae": fdp_floor(prob, mean, generator=seeded(80_000 + seed))}
