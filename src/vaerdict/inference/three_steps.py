"""The three-step procedure: (1) fit models and select the best, (2) fit proposals for it, (3) combine them."""

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
    Model,
    Observations,
    Progress,
    Proposal,
    SettingError,
    check_model,
    check_observations,
    evaluating,
    log_mean_exp,
    map_observations,
    silent,
)
from vaerdict.inference.assess import importance_weights
from vaerdict.inference.packing import Packed, Packing, Unpacked, needs_packing
from vaerdict.inference.posterior import Posterior, posterior
from vaerdict.inference.target import UserQuery
from vaerdict.noise import Randomness, global_state_from, seeded
from vaerdict.proposals import Family, Levels, Mixture, Normal, defensive
from vaerdict.refinement import refine
from vaerdict.training import CHI, IWAE, VAE, WW, Fit, Member, Recipe, Settings, as_model, train
from vaerdict.training.checkpoint import file_of, read_checkpoint, save_checkpoint

log = logging.getLogger(__name__)

_FORMAT = "vaerdict three steps 1"


class ModelScore(NamedTuple):
    """One row of the selection table: the held-out evidence of a model.

    ``iwelbo`` is by the model's own encoder, ``iwelbo_best`` by the better of that and a refined proposal
    (``best_by``). Their difference ``gap`` is the evidence hidden by an encoder that generalises badly. ``behind`` is
    the difference from the selected model, with its paired standard error. ``khat`` is the encoder's median.
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
    """A fit with its held-out evidence per observation, by its encoder and by the better proposal."""

    fit: Fit
    by_encoder: Tensor
    best: Tensor
    best_by: str
    khat: float


class ThreeStep:
    """Fit models and select one, fit proposals for it, and answer by combining them.

    Parameters
    ----------
    model
        A module with ``log_joint`` and ``prior``, of which every member is trained from a copy, or a function that
        returns a new one.
    objectives
        Recipes by which step one trains the model.
    families
        Families of the proposals of step two.
    proposals
        Recipes by which step two trains a proposal of every family.
    encoder
        Family of the encoders of step one, by default diagonal Gaussians.
    seeds
        Number of seeds per objective, or the seeds.
    settings
        Settings of both trainings.
    hidden
        Sizes of the hidden layers of all encoders.
    prior_share
        Share of the prior in the mixture of step three.
    device
        Where to train and answer.

    Attributes
    ----------
    selection : list of ModelScore
        The table of step one, best first.
    model : Model
        The selected model.
    winner : Fit
        The selected model with its encoder and training history.
    fits : list of Fit
        All fits of step one.
    proposals : dict of str to Proposal
        The proposals of step two, the one with the largest held-out ESS first.

    Examples
    --------
    >>> import torch, vaerdict as vd
    >>> truth = vd.models.PPCA(torch.eye(3, 1), noise_scale=1.0)
    >>> x, _ = truth.simulate(60, generator=vd.seeded(0))
    >>> quick = vd.Settings(n_particles=4, epochs=2, batch_size=20)
    >>> model = vd.models.PPCA(torch.eye(3, 1), noise_scale=2.0)
    >>> steps = vd.ThreeStep(model, objectives=[vd.IWAE], proposals=[vd.WW], settings=quick)
    >>> answer = steps.fit(x[:40], x[40:]).posterior(x[:5], n=200)
    >>> list(steps.proposals), answer.names, answer.z.shape
    (['WW-full'], ('WW-full', 'PRIOR'), torch.Size([200, 5, 1]))
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
        self.selection: list[ModelScore] = []
        self.fits: list[Fit] = []
        self.proposals: dict[str, Proposal] = {}
        self._winner: Fit | None = None
        self._packing: Packing | None = None
        self._like = torch.zeros(0)

    @property
    def model(self) -> Model:
        """The model selected by step one."""
        model = self.winner.model
        return as_model(model.user_model if isinstance(model, Packed) else model)

    @property
    def winner(self) -> Fit:
        """The fit selected by step one, with the encoder it was trained with."""
        if self._winner is None:
            raise SettingError("nothing has been fitted yet; call fit(x_train, x_valid) first.")
        return self._winner

    def fit(
        self,
        x_train: Observations,
        x_valid: Observations,
        *,
        checkpoint: Path | None = None,
        progress: Progress = silent,
    ) -> ThreeStep:
        """Steps one and two: train and select a model, train proposals for it.

        Parameters
        ----------
        x_train
            Observations to train on, ``(n, p)``, or a tuple or mapping of tensors with one leading axis. Encoders get
            the columns of all parts.
        x_valid
            Held-out observations of the same kind, which decide when training ends and which model is selected.
            Evaluate the result on a third set.
        checkpoint
            Folder for resumable checkpoints of both steps.
        progress
            Called during training.

        Returns
        -------
        ThreeStep
            This object.
        """
        folder = None if checkpoint is None else checkpoint / "models"
        check_observations(x_train, name="x_train")
        check_observations(x_valid, name="x_valid")
        if needs_packing(check_model(self._new_model(seeded(0))), x_train):
            self._packing = Packing.of(x_train)
            x_train, x_valid = self._packing.pack(x_train), self._packing.pack(x_valid)
        self._like = x_train.new_zeros(2, *x_train.shape[1:], device="cpu")
        members = [
            self._member(recipe, seed, x_train, self.encoder) for recipe in self.objectives for seed in self.seeds
        ]
        self.fits = train(
            members, x_train, x_valid, self.settings, device=self.device, checkpoint=folder, progress=progress
        )
        self._winner, self.selection = select(self.fits, x_valid.to(self.device))
        best = self.selection[0]
        log.info("selected %s (seed %d), held-out evidence %.3f", best.model, best.seed, best.iwelbo_best)
        self.proposals = self._unpacked(self._fit_proposals(x_train, x_valid, checkpoint, progress))
        return self

    def _unpacked(self, proposals: dict[str, Proposal]) -> dict[str, Proposal]:
        """Proposals for the user's observations and latents."""
        model = self.winner.model
        if not isinstance(model, Packed):
            return proposals
        return {name: Unpacked(model, q) for name, q in proposals.items()}

    def mixture(self) -> Mixture:
        """The proposal of step three: those of step two in equal shares, with a defensive share of the prior."""
        return defensive(self.proposals, self.model.prior, self.prior_share)

    def posterior(
        self,
        x: Observations,
        n: int = 1000,
        *,
        tolerance: float | None = None,
        rtol: float = 0.0,
        query: UserQuery | None = None,
        budget: int | None = None,
        seed: int | Randomness | None = None,
        progress: Progress = silent,
    ) -> Posterior:
        """Weighted particles at x from the mixture of step three.

        Parameters
        ----------
        x
            Observations like those of `fit`.
        n
            Number of particles per observation.
        tolerance
            If given, each observation is escalated, starting from the first of `proposals`.
        rtol, query, budget, seed, progress
            As for `vaerdict.posterior`.
        """
        mixture = self.mixture()
        return posterior(
            self.model,
            map_observations(lambda t: t.to(self.device), x),
            mixture.components if tolerance is None else self.proposals,
            n,
            shares=mixture.shares if tolerance is None else None,
            tolerance=tolerance,
            rtol=rtol,
            query=query,
            budget=budget,
            seed=seed,
            progress=progress,
        )

    # ------------------------------------------------------------------------------------------------- files
    def save(self, path: str | Path) -> Path:
        """Write the result of `fit` to ``path.safetensors``: weights as tensors, the rest as JSON in the header.

        The file holds the selected model with its encoder, the selection table and the proposals, not the other fits.
        """
        modules = self._modules()
        notes = {
            "format": _FORMAT,
            "x": {"shape": list(self._like.shape), "dtype": str(self._like.dtype)},
            "parts": None if self._packing is None else self._packing.notes(),
            "settings": {"seeds": self.seeds, "hidden": self.hidden, "prior_share": self.prior_share},
            "selection": self.selection,
            "winner": {"name": self.winner.name, "seed": self.winner.seed}
            | {name: getattr(self.winner, name) for name in ("history", "converged", "epochs", "seconds")},
            "proposals": list(self.proposals),
        }
        save_checkpoint(
            Path(path), {name: t for prefix, m in modules.items() for name, t in _tensors(prefix, m)}, notes
        )
        return file_of(Path(path))

    @classmethod
    def load(
        cls,
        path: str | Path,
        model: nn.Module | Callable[[], nn.Module],
        *,
        like: Observations = None,
        **settings: Any,
    ) -> ThreeStep:
        """Read the file of `save`. It holds numbers and strings only; no code from it is run.

        Pass the same `model` and those parameters of `ThreeStep` that differed from their defaults, except `seeds`,
        `hidden` and `prior_share`, which are in the file. `fits` then holds the selected fit only. A fit of structured
        observations also needs `like`, some of them.
        """
        tensors, notes = read_checkpoint(Path(path))
        if notes.get("format") != _FORMAT:
            raise SettingError(f"{path} holds {notes.get('format')!r}, not {_FORMAT!r}; was it written by `save`?")
        steps = cls(model, **(notes["settings"] | settings))
        if notes["parts"] is not None:
            steps._packing = _packing_like(like, notes["parts"])
        steps._like = torch.zeros(notes["x"]["shape"], dtype=getattr(torch, notes["x"]["dtype"].split(".")[-1]))
        steps.selection = [ModelScore(*row) for row in notes["selection"]]
        steps._winner = steps._unfitted_winner(notes["winner"])
        steps.fits = [steps.winner]
        steps.proposals = steps._unpacked(steps._unfitted_proposals(notes["proposals"]))
        for name, module in steps._modules().items():
            _fill(module, {n.removeprefix(f"{name}."): t for n, t in tensors.items() if n.startswith(f"{name}.")}, name)
            module.eval().to(steps.device)
        return steps

    def _modules(self) -> dict[str, nn.Module]:
        # proposals go by number, because the user's names of recipes may not be valid names of tensors
        bare = (q.proposal if isinstance(q, Unpacked) else q for q in self.proposals.values())
        numbered = {f"proposal {i}": cast(nn.Module, q) for i, q in enumerate(bare)}
        return {"model": self.winner.model, "encoder": self.winner.proposal, **numbered}

    def _unfitted_winner(self, notes: dict[str, Any]) -> Fit:
        """The selected fit, with weights yet to be read."""
        recipe = next((r for r in self.objectives if r.name == notes["name"]), None)
        if recipe is None:
            names = ", ".join(r.name for r in self.objectives)
            raise SettingError(f"the file holds a model fitted by {notes['name']}; objectives={names} must include it.")
        member = self._member(recipe, notes["seed"], self._like, self.encoder)
        history = [(int(epoch), float(score)) for epoch, score in notes["history"]]
        model, proposal = copy.deepcopy((member.model, member.proposal))
        return Fit(member, model, proposal, history, notes["converged"], notes["epochs"], notes["seconds"])

    def _unfitted_proposals(self, names: list[str]) -> dict[str, Proposal]:
        """New proposals of these names, with weights yet to be read."""
        named = self._named()
        if set(named) != set(names):
            raise SettingError(
                f"the file holds proposals {', '.join(sorted(names))}, but families= and proposals= make "
                f"{', '.join(sorted(named))}; pass `load` those of the fit."
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
        return _best_first(as_model(self.winner.model), fitted, x_valid.to(self.device))

    def _named(self) -> dict[str, tuple[Recipe, Family]]:
        """Recipe and family of each proposal of step two, by its name."""
        return {f"{r.name}{f.suffix}": (r, f) for f in self.families for r in self.recipes}

    def _member(self, recipe: Recipe, seed: int, x: Tensor, family: Family) -> Member:
        generator = seeded(seed)
        model = self._new_model(generator)
        if self._packing is not None:
            model = Packed(model, self._packing)
            family = Levels(tuple(model.space.sizes), family) if len(model.space.sizes) > 1 else family
        event = tuple(as_model(model).prior.event_shape)
        if len(event) != 1:
            raise SettingError(f"the model's prior has event shape {event}; encoders need one vector of latents, (d,).")
        return Member(model, family.make(x, event[0], hidden=self.hidden, generator=generator), recipe, seed)

    def _new_model(self, generator: torch.Generator) -> nn.Module:
        if isinstance(self.template, nn.Module):
            return copy.deepcopy(self.template)
        with global_state_from(generator):
            return self.template()


def _packing_like(like: Observations, notes: list[dict[str, Any]]) -> Packing:
    """The packing of observations, which must be like those of the fit."""
    if like is None:
        raise SettingError("the fit is of structured observations; pass `load` some of them as like=.")
    packing = Packing.of(check_observations(like, name="like"))
    if packing.notes() != notes:
        raise SettingError(
            f"like= has the parts {packing.notes()}, the fit has {notes}; pass observations of its kind."
        )
    return packing


def _tensors(prefix: str, module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for name, tensor in module.state_dict().items():
        yield f"{prefix}.{name}", tensor.detach().clone()  # parameters may be views of one matrix


def _fill(module: nn.Module, state: dict[str, Tensor], name: str) -> None:
    """Load a state into a module, which must have exactly these tensors."""
    saved, new = ({key: (tuple(t.shape), t.dtype) for key, t in s.items()} for s in (state, module.state_dict()))
    different = sorted(key for key in saved.keys() | new.keys() if saved.get(key) != new.get(key))
    if different:
        raise SettingError(
            f"the {name} in the file differs from the one made by `load` in {', '.join(different[:5])}: "
            f"{saved.get(different[0], 'none')} against {new.get(different[0], 'none')}; pass `load` the model, "
            "families and hidden sizes of the fit."
        )
    module.load_state_dict(state)


def select(fits: Iterable[Fit], x_valid: Tensor, *, n: int = 1000) -> tuple[Fit, list[ModelScore]]:
    """The fit with the largest held-out evidence, and the table it was selected from, best first.

    Every model is scored by its own encoder and by a proposal refined per observation; the better one counts.
    """
    scored = sorted((_score(fit, x_valid, n) for fit in fits), key=lambda s: -float(s.best.mean()))
    winner = scored[0]
    return winner.fit, [_row(s, winner) for s in scored]


def _score(fit: Fit, x: Tensor, n: int) -> _Scored:
    model = as_model(fit.model)
    generator = seeded(fit.seed, x.device)
    by_encoder = importance_weights(model, x, fit.proposal, n, generator=generator)[1].double()
    with evaluating(model, fit.proposal):
        local = refine(model, x, fit.proposal, generator=generator).distribution
    mixture = defensive({"encoder": fit.proposal, "refined": local}, model.prior)
    by_refined = importance_weights(model, x, mixture, n, generator=generator)[1].double()
    evidence = {"own encoder": log_mean_exp(by_encoder), "refined": log_mean_exp(by_refined)}
    best_by = max(evidence, key=lambda name: float(evidence[name].mean()))
    khat = diagnostics.khat(by_encoder)
    return _Scored(fit, evidence["own encoder"], evidence[best_by], best_by, float(khat.nanmedian()))


def _best_first(model: Model, proposals: Mapping[str, Proposal], x: Tensor, *, n: int = 1000) -> dict[str, Proposal]:
    """Proposals in falling order of held-out ESS, because mode searches start from the first."""
    ess = {}
    for name, q in proposals.items():
        log_w = importance_weights(model, x, q, n, generator=seeded(0, x.device))[1].double()
        ess[name] = float(diagnostics.ess(log_w).mean())
    return {name: proposals[name] for name in sorted(ess, key=lambda name: -ess[name])}


def _row(scored: _Scored, winner: _Scored) -> ModelScore:
    behind = winner.best - scored.best
    root_n = len(behind) ** 0.5
    return ModelScore(
        model=scored.fit.name,
        seed=scored.fit.seed,
        iwelbo=float(scored.by_encoder.mean()),
        iwelbo_se=float(scored.by_encoder.std()) / root_n,
        iwelbo_best=float(scored.best.mean()),
        best_by=scored.best_by,
        gap=float(scored.best.mean() - scored.by_encoder.mean()),
        behind=float(behind.mean()),
        behind_se=float(behind.std()) / root_n,
        khat=scored.khat,
    )
