"""Data sets of the gene experiment, and how its models, proposals and refits are trained.

Model and encoder have one hidden layer of 128 units and ten latents, as in scVI; the decoder's activation is smooth
(SiLU), so that posteriors can be refined by their curvature. A model trains until its evidence on validation cells, by
proposals refined for each of them, stops rising. The likelihood is a negative binomial, zero-inflated for the simulator
that zeroes entries. Step size and patience were chosen by that evidence on two data sets of the appendix.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from vaerdict.core import Proposal
from vaerdict.datasets.genes import SIMULATORS, CountData
from vaerdict.likelihoods import CountLikelihood, NegativeBinomial, ZeroInflated
from vaerdict.models.counts import CountModel
from vaerdict.noise import seeded
from vaerdict.proposals import Family, Mixture, Normal, OfCounts, Prior
from vaerdict.training import IWAE, RECIPES, Fit, Member, Recipe, RefinedBound, Settings, train

LATENTS, HIDDEN = 10, (128,)
PROPOSALS = ("VAE", "IWAE", "WW", "CHI")
MIXTURE = ("IWAE", "WW", "CHI", "PRIOR")
"""The paper's mixture: three fitted proposals and the prior with equal weights."""

_SPLIT_SEED, _PROPOSAL_SEED, _REFIT_SEED = 10_000, 20_000, 30_000


@dataclass(frozen=True)
class Training:
    """Length, particles and device of the training of models, proposals and refits; all else runs on the CPU."""

    n_particles: int = 30
    epochs: int = 200
    proposal_epochs: int = 60
    refit_epochs: int = 25
    batch_size: int = 128
    lr: float = 3e-3
    device: str = "cpu"

    def settings(self, **changes: Any) -> Settings:
        """Settings for models that are trained until their refined evidence stops rising."""
        base: dict[str, Any] = {
            "n_particles": self.n_particles,
            "epochs": self.epochs,
            "batch_size": self.batch_size,
            "lr_theta": self.lr,
            "lr_phi": self.lr,
            "patience": 4,
            "drops": 1,
            "check_every": 5,
            "joint": True,
            "graphs": True,
            "score": RefinedBound(100),
        }
        return Settings(**base | changes)


@dataclass(frozen=True, eq=False)
class Problem:
    """A simulated data set with its training, validation and test cells. Shapes: indices ``(n,)``."""

    simulator: str
    seed: int
    data: CountData
    train: Tensor
    valid: Tensor
    test: Tensor

    @classmethod
    def of(cls, simulator: str, seed: int, **sizes: Any) -> Problem:
        """The data set of a seed; at most 500 cells or 10 % each validate and test, the others train."""
        data = SIMULATORS[simulator](seed, **sizes)
        n = len(data.counts)
        order = torch.randperm(n, generator=seeded(_SPLIT_SEED + seed))
        m = min(500, n // 10)
        return cls(simulator, seed, data, order[2 * m :], order[m : 2 * m], order[:m])

    @property
    def likelihood(self) -> CountLikelihood:
        """Zero-inflated if the simulator zeroes entries."""
        return ZeroInflated() if self.simulator == "released" else NegativeBinomial()

    @property
    def labels(self) -> dict[str, Any]:
        """The keys that identify this data set in every row."""
        return {"simulator": self.simulator, "dataset": f"{self.simulator}-{self.seed}", "seed": self.seed}

    def counts(self, cells: Tensor) -> Tensor:
        """Counts of the given cells."""
        return self.data.counts[cells]


def start(problem: Problem, recipe: Recipe, family: Family = Normal()) -> Member:  # noqa: B008 - frozen value
    """An untrained model for the training cells of a data set with an encoder, to be trained by a recipe."""
    x = problem.counts(problem.train)
    generator = seeded(problem.seed)
    model = CountModel.start(
        x, LATENTS, generator=generator, likelihood=problem.likelihood, hidden=HIDDEN, activation=F.silu
    )
    return Member(model, _encoder(x, family, generator), recipe, problem.seed)


def fit_model(problem: Problem, name: str, training: Training) -> Fit:
    """Train one model by its recipe."""
    x, x_valid = problem.counts(problem.train), problem.counts(problem.valid)
    (fit,) = _trained([start(problem, RECIPES[name])], x, x_valid, training.settings(), device=training.device)
    return fit


def as_counts(fit: Fit) -> CountModel:
    """The fitted model with its type."""
    assert isinstance(fit.model, CountModel)
    return fit.model


def fit_proposals(problem: Problem, fit: Fit, training: Training) -> dict[str, Proposal]:
    """Step two: new diagonal proposals by every recipe and a full-rank one for a fixed model, and their mixture."""
    x, seed = problem.counts(problem.train), _PROPOSAL_SEED + problem.seed
    kinds: list[tuple[str, Recipe, Family]] = [(name, RECIPES[name], Normal()) for name in PROPOSALS]
    kinds.append(("IWAE-full", IWAE, Normal(full=True)))
    members = [Member(fit.model, _encoder(x, family, seeded(seed)), recipe, seed) for _, recipe, family in kinds]
    settings = training.settings(epochs=training.proposal_epochs, patience=2)
    x_valid = problem.counts(problem.valid)
    fitted = _trained(members, x, x_valid, settings, learn_model=False, device=training.device)
    named: dict[str, Proposal] = {name: f.proposal for (name, _, _), f in zip(kinds, fitted, strict=True)}
    prior = Prior(as_counts(fit).prior)
    named["MIS"] = Mixture({name: prior if name == "PRIOR" else named[name] for name in MIXTURE})
    return named


def fit_refits(problem: Problem, fit: Fit, training: Training, n: int) -> list[Fit]:
    """Models of bootstrap resamples of the training cells, started from the fit, for a fixed number of epochs."""
    x, seeds = problem.counts(problem.train), range(_REFIT_SEED + problem.seed, _REFIT_SEED + problem.seed + n)
    resampled = torch.stack([x[torch.randint(len(x), (len(x),), generator=seeded(s))] for s in seeds])
    held_out = problem.counts(problem.valid).expand(n, -1, -1)
    members = [Member(fit.model, fit.proposal, fit.member.recipe, s) for s in seeds]
    epochs = training.refit_epochs
    settings = training.settings(epochs=epochs, patience=None, check_every=epochs)
    return _trained(members, resampled, held_out, settings, per_member=True, device=training.device)


def _trained(members: list[Member], x: Tensor, x_valid: Tensor, settings: Settings, **options: Any) -> list[Fit]:
    """Train, and move the fits to the CPU."""
    fits = train(members, x, x_valid, settings, **options)
    for fit in fits:
        fit.model.cpu()
        fit.proposal.cpu()
    return fits


def _encoder(x: Tensor, family: Family, generator: torch.Generator) -> Any:
    return OfCounts(family).make(x, LATENTS, hidden=HIDDEN, generator=generator)
