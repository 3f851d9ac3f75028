"""A fitted model and every proposal for it: held-out evidence, contrasts with equal draws, AIS as printed."""

from __future__ import annotations

import time
from functools import partial
from typing import Any

from vaerdict.core import Proposal
from vaerdict.de import model as de_model
from vaerdict.de.effects import CENTRED
from vaerdict.noise import seeded
from vaerdict.proposals import Prior
from vaerdict.samplers import ais
from vaerdict.training import Fit, refined_evidence
from vaerdict_paper.experiments.genes_contrasts import MakePosterior, Sides, draw_contrast
from vaerdict_paper.experiments.genes_fit import PROPOSALS, Problem, as_counts
from vaerdict_paper.experiments.genes_measure import assessed, measured

TEMPERATURES, CHAINS, LEAPFROG = 500, 100, 5
"""The paper's AIS: 500 temperatures and 100 chains from the prior. Its transitions are not printed; here HMC."""

_ABOUT = {"uncertainty": "z+cells", "prior": "model", "weights": "snis"}


def model_row(problem: Problem, fit: Fit, khat_draws: int) -> dict[str, Any]:
    """A model's evidence on test cells, by its own encoder and by refined proposals."""
    model, x = as_counts(fit), problem.counts(problem.test)
    best = refined_evidence(model, x, fit.proposal, khat_draws, generator=seeded(50_000 + problem.seed))
    dispersion = model.log_dispersion
    return {
        **assessed(model, fit.proposal, x, khat_draws, seed=problem.seed),
        "iwelbo_refined": best.log_evidence.mean().item(),
        "khat_refined": best.khat.nanmedian().item(),
        "ess_refined": (best.ess / khat_draws).median().item(),
        "dispersion": None if dispersion is None else dispersion.exp().median().item(),
        "epochs": fit.epochs,
        "converged": fit.converged,
        "seconds_train": fit.seconds,
    }


def crossed_rows(
    problem: Problem, fit: Fit, fitted: dict[str, Proposal], base: dict[str, Any], n_draws: int, khat_draws: int
) -> list[dict[str, Any]]:
    """Every proposal on all cells with equal draws and weights, and the encoders also without weights."""
    model, test = as_counts(fit), problem.counts(problem.test)
    sides = Sides.of(problem.data, None, seed=problem.seed)
    x, rows = problem.counts(sides.cells), []

    def row(proposal: str, posterior: MakePosterior, **keys: Any) -> dict[str, Any]:
        drawn = draw_contrast(sides, posterior, n_draws, seed=problem.seed)
        metrics = measured(drawn.effect(CENTRED, "z+cells"), sides, CENTRED)
        return {**base, "proposal": proposal, "n_cells": "all", **_ABOUT, **drawn.diagnostics(), **metrics, **keys}

    for name, q in fitted.items():
        quality = assessed(model, q, test, khat_draws, seed=problem.seed)
        rows.append(row(name, partial(de_model.Proposed, model, x, q), **quality))
        if name in PROPOSALS:
            rows.append(row(name, partial(de_model.Proposed, model, x, q, weighted=False), **quality, weights="plugin"))
    quality = assessed(model, de_model.refined(model, test, fit.proposal).proposal, test, khat_draws, seed=problem.seed)
    return [*rows, row("REFINED", partial(de_model.refined, model, x, fit.proposal), **quality)]


def annealed_rows(problem: Problem, fit: Fit, base: dict[str, Any], ais_cells: int) -> list[dict[str, Any]]:
    """AIS on few cells per group and, on the same cells with as many draws, the refined proposal.

    The cells are the first of the small contrasts of that size.
    """
    model = as_counts(fit)
    sides = Sides.of(problem.data, ais_cells, seed=problem.seed)
    x = problem.counts(sides.cells)
    started = time.perf_counter()
    chains = ais(
        model,
        x,
        Prior(model.prior),
        n_chains=CHAINS,
        temperatures=TEMPERATURES,
        n_leapfrog=LEAPFROG,
        generator=seeded(60_000 + problem.seed),
    )
    seconds = time.perf_counter() - started
    evidence = refined_evidence(model, x, fit.proposal, 1000, generator=seeded(70_000 + problem.seed)).log_evidence
    about = {"n_cells": ais_cells, **_ABOUT, "beside_ais": True}
    cost = {
        "ais": chains.log_evidence.mean().item(),
        "ais_se": chains.standard_error.square().sum().sqrt().item() / len(x),
        "iwelbo_refined_ais_cells": evidence.mean().item(),
        "seconds_ais": seconds,
        "gradients_ais": int(chains.n_gradients.sum()),
        "temperatures": TEMPERATURES,
        "chains": CHAINS,
    }
    posteriors: dict[str, MakePosterior] = {
        "AIS": partial(de_model.Given, model, chains.z, chains.log_w.to(chains.z)),
        "REFINED": partial(de_model.refined, model, x, fit.proposal),
    }
    rows = []
    for name, posterior in posteriors.items():
        drawn = draw_contrast(sides, posterior, CHAINS, seed=problem.seed)
        metrics = measured(drawn.effect(CENTRED, "z+cells"), sides, CENTRED)
        rows.append(
            {**base, "proposal": name, **about, **drawn.diagnostics(), **metrics, **(cost if name == "AIS" else {})}
        )
    return rows
