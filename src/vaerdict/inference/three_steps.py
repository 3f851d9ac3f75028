"""The paper's procedure: (1) fit models and keep the best, (2) fit proposals for it, (3) combine them."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from vaerdict import diagnostics
from vaerdict.core import (
    Latent,
    Model,
    Progress,
    Proposal,
    SettingError,
    evaluating,
    log_mean_exp,
    silent,
)
from vaerdict.inference.posterior import Posterior, posterior
from vaerdict.inference.weights import weigh
from vaerdict.noise import Randomness, global_state_from, seeded
from vaerdict.proposals import Family, Mixture, Normal, defensive
from vaerdict.refinement import refine
from vaerdict.training import CHI, IWAE, VAE, WW, Fit, Member, Recipe, Settings, as_model, train
from vaerdict.training.checkpoint import file_of, read_checkpoint, save_checkpoint

log = logging.getLogger(__name__)

_FORMAT = "vaerdict three steps 1"


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
    the answer of step three. `save(path)` writes it to a file, `ThreeStep.load(path, model, ...)` reads that.
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
        names = [f"{r.name}{f.suffix}" for f in families for r in proposals]
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
        self._like = torch.zeros(0)

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
        self._like = x_train.new_zeros(2, *x_train.shape[1:], device="cpu")
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

    # ----------------------------------------------------------------------------------------------- keeping
    def save(self, path: str | Path) -> Path:
        """Write what `fit` found to ``path.safetensors``: weights, and the rest as JSON in its header.

        Kept are the winner with its encoder, the selection and the proposals; the fits that lost are not.
        """
        modules = self._modules()
        notes = {
            "format": _FORMAT,
            "x": {"shape": list(self._like.shape), "dtype": str(self._like.dtype)},
            "settings": {"seeds": self.seeds, "hidden": self.hidden, "prior_share": self.prior_share},
            "selection": self.selection,
            "winner": {"name": self.winner.name, "seed": self.winner.seed}
            | {name: getattr(self.winner, name) for name in ("history", "converged", "epochs", "seconds")},
            "proposals": list(self.proposals),
        }
        save_checkpoint(Path(path), {name: t for part, m in modules.items() for name, t in _tensors(part, m)}, notes)
        return file_of(Path(path))

    @classmethod
    def load(cls, path: str | Path, model: nn.Module | Callable[[], nn.Module], **how: Any) -> ThreeStep:
        """What `save` wrote, ready to answer; reads numbers and strings, runs no code from the file.

        Give the same `model`, and of the settings of `ThreeStep` those that were not left at their defaults: seeds,
        hidden and prior_share are in the file. Of `fits` only the winner is there.
        """
        tensors, notes = read_checkpoint(Path(path))
        if notes.get("format") != _FORMAT:
            raise SettingError(f"{path} holds {notes.get('format')!r}, not {_FORMAT!r}; was it written by `save`?")
        steps = cls(model, **(notes["settings"] | how))
        steps._like = torch.zeros(notes["x"]["shape"], dtype=getattr(torch, notes["x"]["dtype"].split(".")[-1]))
        steps.selection = [Score(*row) for row in notes["selection"]]
        steps._winner = steps._as_saved(notes["winner"])
        steps.fits = [steps.winner]
        steps.proposals = steps._unfitted(notes["proposals"])
        for part, module in steps._modules().items():
            _fill(module, {n.removeprefix(f"{part}."): t for n, t in tensors.items() if n.startswith(f"{part}.")}, part)
            module.eval().to(steps.device)
        return steps

    def _modules(self) -> dict[str, nn.Module]:
        # names of recipes are the user's: proposals go by number, for not every text is a name of a tensor
        numbered = {f"proposal {i}": cast(nn.Module, q) for i, q in enumerate(self.proposals.values())}
        return {"model": self.winner.model, "encoder": self.winner.proposal, **numbered}

    def _as_saved(self, notes: dict[str, Any]) -> Fit:
        """The winner with its weights yet to be filled in."""
        recipe = next((r for r in self.objectives if r.name == notes["name"]), None)
        if recipe is None:
            names = ", ".join(r.name for r in self.objectives)
            raise SettingError(f"the file keeps a model fitted by {notes['name']}; objectives={names} must name it.")
        member = self._member(recipe, notes["seed"], self._like, self.encoder)
        history = [(int(epoch), float(score)) for epoch, score in notes["history"]]
        model, proposal = copy.deepcopy((member.model, member.proposal))
        return Fit(member, model, proposal, history, notes["converged"], notes["epochs"], notes["seconds"])

    def _unfitted(self, names: list[str]) -> dict[str, Proposal]:
        """Fresh proposals of these names."""
        named = self._named()
        if set(named) != set(names):
            raise SettingError(
                f"the file keeps proposals {', '.join(sorted(names))}, families and proposals given here make "
                f"{', '.join(sorted(named))}; give `load` those of the fit."
            )
        seed = self.winner.seed
        return {name: self._member(named[name][0], seed, self._like, named[name][1]).proposal for name in names}

    def _fit_proposals(
        self, x_train: Tensor, x_valid: Tensor, checkpoint: Path | None, progress: Progress
    ) -> dict[str, Proposal]:
        folder = None if checkpoint is None else checkpoint / "proposals"
        named, seed = self._named(), self.winner.seed
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

    def _named(self) -> dict[str, tuple[Recipe, Family]]:
        """What step two fits, by the names of its proposals."""
        return {f"{r.name}{f.suffix}": (r, f) for f in self.families for r in self.recipes}

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


def _tensors(part: str, module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for name, tensor in module.state_dict().items():
        yield f"{part}.{name}", tensor.detach().clone()  # parameters may be views of one matrix


def _fill(module: nn.Module, state: dict[str, Tensor], part: str) -> None:
    """Load a state into a module that must have exactly these tensors."""
    own = module.state_dict()
    shapes = [{name: (tuple(t.shape), t.dtype) for name, t in tensors.items()} for tensors in (state, own)]
    other = sorted(name for name in state.keys() | own.keys() if shapes[0].get(name) != shapes[1].get(name))
    if other:
        raise SettingError(
            f"the {part} in the file differs from that made here in {', '.join(other[:5])}: "
            f"{shapes[0].get(other[0], 'none')} against {shapes[1].get(other[0], 'none')}; give `load` the model, "
            "families and hidden sizes of the fit."
        )
    module.load_state_dict(state)


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
    with evaluating(model, fit.proposal):
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
