"""The paper's procedure: (1) fit models and keep the best, (2) fit proposals for it, (3) combine them."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from vaerdict import diagnostics
from vaerdict.core import (
    Latent,
    Model,
    Progress,
    Proposal,
    SettingError,
    log_mean_exp,
    silent,
)
from vaerdict.noise import Randomness, seeded
from vaerdict.procedure.posterior import Posterior, posterior
from vaerdict.procedure.weighing import weigh
from vaerdict.proposals import Family, Mixture, Normal, defensive, global_state_from
from vaerdict.refinement import refine
from vaerdict.training import CHI, IWAE, VAE, WW, Fit, Member, Recipe, Settings, as_model, train

log = logging.getLogger(__name__)


class Score(NamedTuple):
    """A model's place in the selection: its held-out evidence by its own encoder and by the best proposal at hand.

    ``iwelbo`` is by the model's own encoder, ``iwelbo_best`` by the better of that and a refined proposal; their
    ``gap`` is what a badly generalising encoder hides of a good model. ``behind`` is the distance to the winner, with
    the standard error of that paired difference. ``khat`` is the own encoder's median.
    """

    model: str
    seed: int
    iwelbo: float
    iwelbo_se: float
    iwelbo_best: float
    best_by: str
    gap: float
    behind: float
    behind_se: float
    khat: float


@dataclass(frozen=True, eq=False)
class _Scored:
    fit: Fit
    own: Tensor
    best: Tensor
    best_by: str
    khat: float


class ThreeStep:
    """Fit, select, combine; then ask.

    `model` is a module, each member starting from a copy of it, or a function that makes a fresh one. Step one trains
    it by `objectives` with encoders of the family `encoder` (diagonal Gaussians by default), step two fits `proposals`
    of every one of `families` for the model kept. After `fit`:
    `selection` is the table of step one, `model` the winner, `proposals` what step two fitted for it, `posterior(x, n)`
    the answer of step three.
    """

    def __init__(
        self,
        model: nn.Module | Callable[[], nn.Module],
        *,
        objectives: Sequence[Recipe] = (VAE, IWAE, WW, CHI),
        families: Sequence[Family] = (Normal(full=True),),
        proposals: Sequence[Recipe] = (IWAE, WW, CHI),
        encoder: Family | None = None,
        seeds: int | Sequence[int] = 1,
        settings: Settings | None = None,
        hidden: Sequence[int] = (128,),
        prior_share: float = 0.05,
        device: torch.device | str = "cpu",
    ) -> None:
        if not objectives or not families or not proposals:
            raise SettingError("give at least one objective, one family and one proposal recipe.")
        names = [r.name + f.suffix for f in families for r in proposals]
        if len(set(names)) < len(names):
            raise SettingError(f"proposals would share a name: {', '.join(names)}; drop one, or rename its recipe.")
        self.template = model
        self.objectives, self.families, self.recipes = tuple(objectives), tuple(families), tuple(proposals)
        self.seeds = tuple(range(seeds)) if isinstance(seeds, int) else tuple(seeds)
        self.encoder = encoder or Normal()
        self.settings = settings or Settings()
        self.hidden, self.prior_share, self.device = tuple(hidden), prior_share, device
        self.selection: list[Score] = []
        self.fits: list[Fit] = []
        self.proposals: dict[str, Proposal] = {}
        self._winner: Fit | None = None

    @property
    def model(self) -> Model:
        """The model kept by step one."""
        return as_model(self.winner.model)

    @property
    def winner(self) -> Fit:
        """The fit kept by step one, with the encoder it was trained with."""
        if self._winner is None:
            raise SettingError("nothing has been fitted yet; call fit(x_train, x_valid) first.")
        return self._winner

    def fit(
        self, x_train: Tensor, x_valid: Tensor, *, checkpoint: Path | None = None, progress: Progress = silent
    ) -> ThreeStep:
        """Steps one and two. `x_valid` decides when training ends and which model is kept: keep a test set apart."""
        folder = None if checkpoint is None else checkpoint / "models"
        members = [
            self._member(recipe, seed, x_train, self.encoder) for recipe in self.objectives for seed in self.seeds
        ]
        self.fits = train(
            members, x_train, x_valid, self.settings, device=self.device, checkpoint=folder, progress=progress
        )
        self._winner, self.selection = select(self.fits, x_valid.to(self.device))
        best = self.selection[0]
        log.info("kept %s (seed %d), held-out evidence %.3f", best.model, best.seed, best.iwelbo_best)
        self.proposals = self._fit_proposals(x_train, x_valid, checkpoint, progress)
        return self

    def mixture(self) -> Mixture:
        """Step three's proposal: what step two fitted, in equal shares, with a defensive share of the prior."""
        return defensive(self.proposals, self.model.prior, self.prior_share)

    def posterior(
        self,
        x: Tensor,
        n: int = 1000,
        *,
        tolerance: float | None = None,
        query: Callable[[Latent], Tensor] | None = None,
        budget: int | None = None,
        generator: Randomness | None = None,
        progress: Progress = silent,
    ) -> Posterior:
        """Weighted particles at x from the mixture of step three, n for each observation; see `vaerdict.posterior`."""
        mixture = self.mixture()
        return posterior(
            self.model,
            x.to(self.device),
            mixture.components if tolerance is None else self.proposals,
            n,
            shares=mixture.shares if tolerance is None else None,
            tolerance=tolerance,
            query=query,
            budget=budget,
            generator=generator,
            progress=progress,
        )

    def _fit_proposals(
        self, x_train: Tensor, x_valid: Tensor, checkpoint: Path | None, progress: Progress
    ) -> dict[str, Proposal]:
        folder = None if checkpoint is None else checkpoint / "proposals"
        named = {f"{r.name}{f.suffix}": (r, f) for f in self.families for r in self.recipes}
        seed = self.winner.seed
        members = [
            replace(self._member(recipe, seed, x_train, family), model=self.winner.model)
            for recipe, family in named.values()
        ]
        fits = train(
            members,
            x_train,
            x_valid,
            self.settings,
            learn_model=False,
            device=self.device,
            checkpoint=folder,
            progress=progress,
        )
        fitted = dict(zip(named, (fit.proposal for fit in fits), strict=True))
        return _best_first(self.model, fitted, x_valid.to(self.device))

    def _member(self, recipe: Recipe, seed: int, x: Tensor, family: Family) -> Member:
        generator = seeded(seed)
        model = self._fresh_model(generator)
        event = tuple(as_model(model).prior.event_shape)
        if len(event) != 1:
            raise SettingError(
                f"the model's prior has event shape {event}; encoders are made for one vector of latents, (d,)."
            )
        return Member(model, family.make(x, event[0], hidden=self.hidden, generator=generator), recipe, seed)

    def _fresh_model(self, generator: torch.Generator) -> nn.Module:
        if isinstance(self.template, nn.Module):
            return copy.deepcopy(self.template)
        with global_state_from(generator):
            return self.template()


def select(fits: Iterable[Fit], x_valid: Tensor, *, n: int = 1000) -> tuple[Fit, list[Score]]:
    """The fit with the best held-out evidence, and the table it was chosen from, best first.

    Every model is scored by its own encoder and by a proposal refined for each observation; the better counts.
    """
    scored = sorted((_score(fit, x_valid, n) for fit in fits), key=lambda s: -float(s.best.mean()))
    winner = scored[0]
    return winner.fit, [_row(s, winner) for s in scored]


def _score(fit: Fit, x: Tensor, n: int) -> _Scored:
    model = as_model(fit.model)
    generator = seeded(fit.seed, x.device)
    own = weigh(model, x, fit.proposal, n, generator=generator)[1].double()
    local = refine(model, x, fit.proposal, generator=generator).distribution
    refined = defensive({"own": fit.proposal, "refined": local}, model.prior)
    candidates = {"own encoder": own, "refined": weigh(model, x, refined, n, generator=generator)[1].double()}
    evidence = {name: log_mean_exp(log_w) for name, log_w in candidates.items()}
    best_by = max(evidence, key=lambda name: float(evidence[name].mean()))
    khat = diagnostics.khat(own)
    return _Scored(fit, evidence["own encoder"], evidence[best_by], best_by, float(khat.nanmedian()))


def _best_first(model: Model, proposals: Mapping[str, Proposal], x: Tensor, *, n: int = 1000) -> dict[str, Proposal]:
    """Proposals ordered by their effective sample size on held-out data: escalation asks the first one first."""
    size = {
        name: float(diagnostics.ess(weigh(model, x, q, n, generator=seeded(0, x.device))[1].double()).mean())
        for name, q in proposals.items()
    }
    return {name: proposals[name] for name in sorted(size, key=lambda name: -size[name])}


def _row(scored: _Scored, winner: _Scored) -> Score:
    behind = winner.best - scored.best
    n = len(behind) ** 0.5
    return Score(
        scored.fit.name,
        scored.fit.seed,
        float(scored.own.mean()),
        float(scored.own.std()) / n,
        float(scored.best.mean()),
        scored.best_by,
        float(scored.best.mean() - scored.own.mean()),
        float(behind.mean()),
        float(behind.std()) / n,
        scored.khat,
    )
