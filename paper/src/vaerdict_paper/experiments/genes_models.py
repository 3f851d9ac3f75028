"""A model of one data set and all that is measured of it, so that it is trained and refitted once."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from vaerdict_paper.experiments.genes_arms import contrast_rows
from vaerdict_paper.experiments.genes_fit import Problem, Training, fit_model, fit_proposals, fit_refits
from vaerdict_paper.experiments.genes_grid import annealed_rows, crossed_rows, model_row

_AIS_KEYS = ("ais", "ais_se", "iwelbo_refined_ais_cells", "seconds_ais", "gradients_ais")


@dataclass(frozen=True)
class Measures:
    """What is measured of a model.

    `proposals` says whether every proposal is fitted and crossed with the model. Zero `refits` leave the uncertainty of
    the model out, and zero `ais_cells` per group leave out AIS.
    """

    n_draws: int
    khat_draws: int
    refits: int
    subsets: int
    ais_cells: int = 0
    proposals: bool = True


def measure_model(
    problem: Problem,
    name: str,
    training: Training,
    asked: Measures,
    *,
    training_of_proposals: Training | None = None,
) -> dict[str, Any]:
    """Train a model, then measure its evidence, its contrasts by refined proposals, all proposals, and AIS."""
    fit = fit_model(problem, name, training)
    base: dict[str, Any] = {"model": name, **problem.labels}
    row = {**base, **model_row(problem, fit, asked.khat_draws)}
    started = time.perf_counter()
    others = fit_refits(problem, fit, training, asked.refits) if asked.refits else []
    seconds = {"seconds_train": fit.seconds, "seconds_refits": time.perf_counter() - started}
    sizes = {"n_draws": asked.n_draws, "subsets": asked.subsets}
    cross, curves = contrast_rows(problem, fit, others, {**base, **seconds}, **sizes)
    if asked.proposals:
        started = time.perf_counter()
        fitted = fit_proposals(problem, fit, training_of_proposals or training)
        row["seconds_step_two"] = time.perf_counter() - started
        cross += crossed_rows(problem, fit, fitted, base, asked.n_draws, asked.khat_draws)
    if asked.ais_cells:
        annealed = annealed_rows(problem, fit, base, asked.ais_cells)
        row |= {key: annealed[0][key] for key in _AIS_KEYS}
        cross += annealed
    return {"models": [row], "cross": cross, "curves": curves}
