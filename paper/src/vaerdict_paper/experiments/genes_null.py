"""Cells from donors, with changes and without any: what is called when cells, and when donors, count as replicates.

The two groups hold different donors. Cells of one donor share its effects, so that a comparison that takes cells for
replicates is sure of differences between the donors at hand, and calls them changes between the groups.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from vaerdict import de
from vaerdict_paper.experiments.genes_few import known_effect, proportion_draws
from vaerdict_paper.experiments.genes_fit import Problem, Training, fit_model
from vaerdict_paper.experiments.genes_grid import as_counts
from vaerdict_paper.experiments.genes_measure import Sides, measured

ARMS = {"null": True, "effect": False}
"""Whether no gene differs between the groups."""


def donor_arm(seed: int, arm: str, name: str, training: Training, *, n_draws: int, n_cells: int) -> dict[str, Any]:
    """Compare the groups of one data set by raw counts and by a model, cells or donors bootstrapped."""
    problem = Problem.of("donors", seed, null=ARMS[arm], n_cells=n_cells)
    sides = Sides.of(problem.data, None, seed=seed)
    owners = problem.data.donors
    assert owners is not None
    replicates = {"cells": de.Bootstrap(), "donors": de.Bootstrap(owners[sides.cells])}
    # the units that are bootstrapped have priors of their own: about a common mean donors would look too much alike
    labels = {"cells": sides.labels, "donors": owners[sides.cells]}
    shared = {"proposal": None, **problem.labels, "arm": arm, "n_cells": "all"}
    rows = []
    for kind, drawn in _raw(problem, sides, replicates).items():
        found = measured(known_effect(drawn, de.CENTRED), sides, de.CENTRED)
        rows.append({"model": "raw counts", **shared, "replicates": kind, **found})
    fit = fit_model(problem, name, training)
    for kind, weighting in replicates.items():
        posterior = de.refined(as_counts(fit), problem.counts(sides.cells), fit.proposal, labels=labels[kind])
        wanted = sides.populations(de.Equal()) | sides.populations(weighting, " drawn")
        answer = de.averages(posterior, wanted, n_draws, seed=seed)
        ess = 1 / (1 / answer.ess).mean().item()
        equal, full = (de.CENTRED.lfc(answer.expression["a" + s], answer.expression["b" + s]) for s in ("", " drawn"))
        found = measured(de.joint_effect(full, equal, ess), sides, de.CENTRED)
        rows.append({"model": name, **shared, "proposal": "REFINED", "replicates": kind, "n_draws": n_draws, **found})
    return {"donors": rows}


def _raw(problem: Problem, sides: Sides, replicates: Mapping[str, de.Weighting]) -> dict[str, dict[str, Tensor]]:
    counts = problem.counts(sides.cells)
    return {
        kind: proportion_draws(counts, sides.populations(weighting), seed=problem.seed)
        for kind, weighting in replicates.items()
    }
