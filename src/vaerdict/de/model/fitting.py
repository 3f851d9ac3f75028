"""Steps one and two: models by several objectives, the best by refined held-out evidence, and its bootstrap refits.

Five particles in batches of 64 reached the held-out evidence
of ten in batches of 128 on PBMC 3k in half of the time. With a few hundred cells models overfit within some 15 epochs,
which the refined evidence of held-out cells shows: it stops the training, and the best epoch is kept.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vaerdict import diagnostics
from vaerdict.core import DataError, Progress, Proposal, log_mean_exp, prepared, silent
from vaerdict.de.analysis import MOST_TRAINING
from vaerdict.de.data import chunk_size
from vaerdict.de.model.group_prior import Expressing
from vaerdict.de.options import DEOptions
from vaerdict.models.counts import CountModel
from vaerdict.noise import seeded
from vaerdict.proposals import Normal, OfCounts
from vaerdict.training import RECIPES, Fit, Member, RefinedBound, Settings, refined_evidence, train
from vaerdict.training.data import ResampledRows, Rows

LATENTS, HIDDEN = 10, (128,)
SCORED = 200
"""Number of cells that score a model, and of draws for each."""

_SPLIT_SEED, _REFIT_SEED, _SCORE_SEED = 51, 30_000, 52

_FEWEST = 12  # cells to train, stop and score with


@dataclass(frozen=True)
class Effort:
    """The effort of training: objectives, epochs, bootstrap refits and the joint draws of each."""

    recipes: tuple[str, ...] = ("VAE", "IWAE")
    epochs: int = 150
    refits: int = 3
    refit_draws: int = 100
    n_particles: int = 5

    def settings(self, n_cells: int, **changes: Any) -> Settings:
        """Settings of models that train until the refined evidence of held-out cells stops rising."""
        base: dict[str, Any] = {
            "n_particles": self.n_particles,
            "epochs": self.epochs,
            "batch_size": 64 if n_cells < 5000 else 128,
            "lr_theta": 3e-3,
            "lr_phi": 3e-3,
            "patience": 3,
            "drops": 1,
            "check_every": 5 if n_cells < 1000 else 2,
            "joint": True,
            "graphs": True,
            "score": RefinedBound(100),
        }
        return Settings(**base | changes)


FULL = Effort()
QUICK = Effort(recipes=("IWAE",), epochs=20, refits=0)


def effort_of(options: DEOptions) -> Effort:
    """The effort that options ask for."""
    effort = QUICK if options.quick else FULL
    changes = {"recipes": options.objectives or None, "refits": 0 if options.quick else None}
    if options.refits is not None:
        changes["refits"] = options.refits
    return replace(effort, **{name: value for name, value in changes.items() if value is not None})


@dataclass(frozen=True, eq=False)
class Fitted:
    """The model that was kept, its encoder, one row per model trained, and its refits."""

    model: Expressing
    proposal: Proposal
    selection: list[dict[str, Any]]
    refits: list[tuple[Expressing, Proposal]]


@dataclass(frozen=True, eq=False)
class TrainingSplit:
    """Cells that train, that stop the training, and that score. Shapes: ``(n, p)`` each."""

    train: Tensor
    valid: Tensor
    test: Tensor

    @classmethod
    def of(cls, rows: Rows, seed: int) -> TrainingSplit:
        """A tenth of the cells each to stop and to score, at most 500; a quarter of few cells."""
        n = min(rows.n, MOST_TRAINING)
        if n < _FEWEST:
            raise DataError(f"{n} cells cannot train a model; at least {_FEWEST} are needed.")
        order = torch.randperm(rows.n, generator=seeded(1000 * seed + _SPLIT_SEED))[:n]
        size = min(500, n // 10 if n >= 100 else n // 4)
        parts = (order[2 * size :], order[size : 2 * size], order[:size])
        return cls(*(rows.take(part) for part in parts))


def fit(
    rows: Rows,
    n_batches: int,
    effort: Effort,
    *,
    seed: int,
    device: str = "cpu",
    folder: Path | None = None,
    progress: Progress = silent,
) -> Fitted:
    """Train by every objective, keep the model of the best evidence, and refit it to bootstrap resamples of its cells.

    The cells that train, `MOST_TRAINING` at most, are dense in memory. Models stay on the device.

    Shapes: ``rows (cells, genes + n_batches)``.
    """
    split = TrainingSplit.of(rows, seed)
    generator = seeded(seed)
    model = CountModel.start(split.train, LATENTS, generator=generator, hidden=HIDDEN, n_batches=n_batches)
    encoder = OfCounts(Normal(), n_batches).make(split.train, LATENTS, hidden=HIDDEN, generator=generator)
    members = [Member(model, encoder, RECIPES[name], seed) for name in effort.recipes]
    settings = effort.settings(len(split.train))
    fits = train(
        members,
        split.train,
        split.valid,
        settings,
        device=device,
        checkpoint=None if folder is None else folder / "models",
        progress=progress,
    )
    scores = [_row(each, split.test) for each in fits]
    best = max(range(len(scores)), key=lambda i: scores[i]["evidence_refined"])
    scores[best]["chosen"] = True
    refits = _refit(fits[best], split, effort, seed, device, folder, progress) if effort.refits else []
    return Fitted(*_parts(fits[best]), scores, [_parts(each) for each in refits])


def _refit(
    fit: Fit, split: TrainingSplit, effort: Effort, seed: int, device: str, folder: Path | None, progress: Progress
) -> list[Fit]:
    """Models of bootstrap resamples, started at the fit, for as many epochs as it took to its best."""
    n, n_cells = effort.refits, len(split.train)
    best = max(fit.history, key=lambda check: check[1])[0] if fit.history else 1
    seeds = [_REFIT_SEED + 1000 * seed + i for i in range(n)]
    resamples = torch.stack([torch.randint(n_cells, (n_cells,), generator=seeded(s)) for s in seeds])
    members = [Member(fit.model, fit.proposal, fit.member.recipe, s) for s in seeds]
    return train(
        members,
        ResampledRows(split.train, resamples.to(split.train.device)),
        split.valid.expand(n, -1, -1),
        effort.settings(n_cells, epochs=best, patience=None, check_every=best),
        per_member=True,
        device=device,
        checkpoint=None if folder is None else folder / "refits",
        progress=lambda done, total, what: progress(done, total, f"refits of {what}"),
    )


def _parts(fit: Fit) -> tuple[Expressing, Proposal]:
    assert isinstance(fit.model, Expressing)
    return fit.model, fit.proposal


def _row(fit: Fit, x: Tensor) -> dict[str, Any]:
    """Scores of a model on held-out cells: by its own encoder, and by proposals refined for each cell."""
    model, proposal = _parts(fit)
    return {
        "model": fit.name,
        "seed": fit.seed,
        **evidence(model, proposal, x[:SCORED]),
        "epochs": fit.epochs,
        "chosen": False,
    }


def evidence(model: Expressing, proposal: Proposal, x: Tensor) -> dict[str, float]:
    """Mean log-evidence of cells by the encoder and by refined proposals, with the median k-hat of the latter."""
    refined = refined_evidence(model, x, proposal, SCORED, generator=seeded(_SCORE_SEED))
    own = encoder_weights(model, proposal, x, SCORED, seed=_SCORE_SEED)
    return {
        "evidence_own": log_mean_exp(own).mean().item(),
        "evidence_refined": refined.log_evidence.mean().item(),
        "khat": refined.khat.nanmedian().item(),
    }


@torch.no_grad()
def encoder_weights(model: Expressing, proposal: Proposal, x: Tensor, n: int, *, seed: int) -> Tensor:
    """Log-weights of n draws of the encoder alone, some cells at a time. Shapes: ``(cells, p) -> (n, cells)``."""
    generator, parts = seeded(seed), []
    for block in x.split(max(1, chunk_size(x.device) // (n * x.shape[-1]))):
        z, log_q = proposal.draw(block, n, generator=generator)
        parts.append((model.log_joint(prepared(model, block), z) - log_q).double())
    return torch.cat(parts, 1)


def encoder_khat(model: Expressing, proposal: Proposal, x: Tensor, *, seed: int) -> float:
    """The median k-hat of the encoder alone on the cells x."""
    log_w = encoder_weights(model, proposal, x, SCORED, seed=seed)
    return diagnostics.khat(log_w).nanmedian().item()
