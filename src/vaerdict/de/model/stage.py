"""The stage that trains a model, or takes a given one, and says what it makes of every contrast.

At most `MOST_TRAINING` cells are dense while models train, and a block of cells per worker while posteriors are refined
and averaged. Finished parts are stored in the cache, so that a run that was stopped goes on.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vaerdict.core import Proposal, SettingError
from vaerdict.de.analysis import MOST_TRAINING, Analysis
from vaerdict.de.contrasts import Contrast
from vaerdict.de.effects import ESTIMANDS, Effect
from vaerdict.de.model.agreement import share_contradicted
from vaerdict.de.model.averaging import support
from vaerdict.de.model.checks import predictive, predictive_checks
from vaerdict.de.model.effect import (
    ESS,
    KHAT,
    LATENT,
    group_averages,
    model_effect,
    model_means,
    refit_averages,
)
from vaerdict.de.model.fitting import SCORED, Fitted, effort_of, encoder_khat, evidence, fit
from vaerdict.de.model.group_prior import Expressing
from vaerdict.de.model.posterior import Modes, Streamed, find_modes, streamed
from vaerdict.de.shrinkage import NodeLikelihood
from vaerdict.de.stage_cache import StageCache
from vaerdict.models.scvi import Scvi, ScviModel, from_scvi
from vaerdict.models.scvi.saved import load_scvi
from vaerdict.noise import seeded


@dataclass(frozen=True, eq=False)
class ModelStage:
    """What a model says: its fold changes and columns of every contrast, the record of results.json, the latents."""

    effects: list[Effect]
    columns: list[dict[str, Tensor]]
    record: dict[str, Any]
    latent: np.ndarray

    def share_contradicted(self, number: int, likelihood: NodeLikelihood) -> float:
        """The share of the genes of a contrast whose counts contradict the model."""
        return share_contradicted(self.effects[number].lfc, likelihood)


def run_model(analysis: Analysis, cache: StageCache) -> ModelStage:
    """Fit a model or take the given one, infer every cell's latent, and average over groups."""
    options, contrasts = analysis.options, analysis.contrasts
    estimand, effort = ESTIMANDS[options.scale], effort_of(options)
    how: dict[str, Any] = {"seed": options.seed, "engine": analysis.engine}
    fitted = _fitted(analysis, cache)
    fits = ((fitted.model, fitted.proposal), *fitted.refits)
    posteriors = [_posterior(analysis, number, *fit, cache) for number, fit in enumerate(fits)]

    def average() -> dict[str, Tensor]:
        return group_averages(posteriors[0], contrasts, estimand, options.draws, progress=analysis.progress, **how)

    def average_refit(number: int) -> dict[str, Tensor]:
        progress = _renamed(analysis, f"cells, refit {number}")
        return refit_averages(posteriors[number], contrasts, effort.refit_draws, progress=progress, **how)

    averages = cache.stage("averages", average)
    refits = [
        cache.stage(f"averages-{number - 1}", partial(average_refit, number)) for number in range(1, len(posteriors))
    ]
    effects = [model_effect(c, averages, refits, estimand, seed=options.seed) for c in contrasts]
    sampler: Any = fitted.model  # a fitted model draws counts too
    replicas = predictive(sampler, analysis.compared, posteriors[0], analysis.n_genes, seed=options.seed)
    record = {
        "role": "decides" if options.model_decides else "checks",
        "refits": len(fitted.refits),
        "diagnostics": _diagnostics(analysis, fitted, averages),
        "selection": fitted.selection,
        "checks": predictive_checks(*replicas),
    }
    columns = [_columns(c, effect, averages) for c, effect in zip(contrasts, effects, strict=True)]
    return ModelStage(effects, columns, record, averages[LATENT].numpy())


def _columns(contrast: Contrast, effect: Effect, averages: Mapping[str, Tensor]) -> dict[str, Tensor]:
    mean_a, mean_b = model_means(contrast, averages)
    return {"model_lfc": effect.lfc.mean(0), "model_mean_a": mean_a, "model_mean_b": mean_b}


def _fitted(analysis: Analysis, cache: StageCache) -> Fitted:
    options, rows, scvi = analysis.options, analysis.rows, analysis.scvi
    if scvi is None:
        if rows.n > MOST_TRAINING:
            analysis.warnings.append(f"models were trained on {MOST_TRAINING} of {rows.n} cells, chosen at random.")
        effort = effort_of(options)
        return fit(
            rows,
            analysis.n_batches,
            effort if options.model_decides else replace(effort, refits=0),
            seed=options.seed,
            device=analysis.device,
            folder=cache.below("training"),
            progress=analysis.progress,
        )
    analysis.warnings.append("the model was given: its own error is not assessed and not in the intervals.")
    subset = rows.take(torch.randperm(rows.n, generator=seeded(options.seed))[:SCORED])
    row = {"model": analysis.model_name, "seed": None, **evidence(scvi, scvi.encoder, subset)}
    return Fitted(scvi, scvi.encoder, [row | {"epochs": None, "chosen": True}], [])


def _posterior(analysis: Analysis, number: int, model: Expressing, proposal: Proposal, cache: StageCache) -> Streamed:
    progress = _renamed(analysis, f"cells refined, refit {number}") if number else analysis.progress
    rows, labels = analysis.compared, analysis.read_labels.take(analysis.place).atoms()

    def find() -> dict[str, Tensor]:
        return find_modes(model, rows, proposal, engine=analysis.engine, progress=progress)._asdict()

    return streamed(model, rows, proposal, labels=labels, modes=Modes(**cache.stage(f"modes-{number}", find)))


def _renamed(analysis: Analysis, name: str) -> Any:
    """The progress of the analysis under another name."""
    return lambda done, total, _: analysis.progress(done, total, name)


def _diagnostics(analysis: Analysis, fitted: Fitted, averages: Mapping[str, Tensor]) -> list[dict[str, Any]]:
    """How well the cells of every group were sampled, by the encoder alone and by refined proposals."""
    options, khat, ess = analysis.options, averages[KHAT], averages[ESS]
    sides = {side.name: side for c in analysis.contrasts for side in (c.a, c.b)}
    rows: list[dict[str, Any]] = []
    for name, side in sides.items():
        sampled = support(khat[side.cells], ess[side.cells], options.draws)
        cells = analysis.compared.take(side.cells[:SCORED])
        rows.append(
            {
                "group": name,
                "n_cells": sampled.n_cells,
                "khat_encoder": encoder_khat(fitted.model, fitted.proposal, cells, seed=options.seed),
                "khat": sampled.khat,
                "share_ok": sampled.share_ok,
                "ess": sampled.ess / options.draws,
            }
        )
    return rows


# ------------------------------------------------------------------------------------------------- given models
def as_scvi(model: Any, adata: Any) -> Scvi:
    """A fitted scvi-tools model as the adapter of this library; a path is loaded with the data."""
    model = load_scvi(Path(model), adata) if isinstance(model, (str, Path)) else model
    wrapped = model if isinstance(model, ScviModel) else from_scvi(model)
    latents = ", ".join(wrapped.latents())
    if not isinstance(wrapped, Scvi) or latents != "z":
        raise SettingError(
            f"differential expression needs counts of genes given one cell state z; this {type(wrapped).__name__} has "
            f"the latents {latents}. Train an SCVI with use_observed_lib_size=True, or pass the SCVI that it was made "
            "from."
        )
    return wrapped
