"""Section 3 of the paper: models and proposals on simulated pPCA data, where exact answers are known.

Every seed has its own data set and its own initialisation, so that spreads and standard errors cover both. A task
trains all models of one seed and particle count, fits every proposal for every model, and measures each pair with equal
draws. `ppca_extensions.py` goes beyond the paper; `audit.py` examines its released code.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from importlib import resources
from typing import Any

import torch
from torch import Tensor

from vaerdict import diagnostics, estimators
from vaerdict.core import Proposal, log_mean_exp, restricted
from vaerdict.datasets import LinearGaussianData, linear_gaussian
from vaerdict.models import PPCA
from vaerdict.noise import seeded
from vaerdict.proposals import Mixture, Normal, Prior, Student
from vaerdict.tasks import Task
from vaerdict.training import CHI, IWAE, RECIPES, VAE, WW, Fit, Member, Settings, train
from vaerdict_paper.theory.gaussians import a_norm

THRESHOLDS = torch.logspace(-2, 1, 40, dtype=torch.float64)
"""The paper's 40 thresholds nu, geometric from 0.01 to 10."""

PROPOSALS = (VAE, IWAE, WW, CHI)
MIXTURE = ("IWAE", "WW", "CHI", "PRIOR")
"""The paper's mixture: three fitted proposals and the prior with equal weights."""


@dataclass(frozen=True)
class Preset:
    """How much of the experiment to run."""

    seeds: int = 5
    particles: tuple[int, ...] = (5, 200)
    epochs: int = 100
    n_draws: int = 200
    score_draws: int = 10_000
    khat_draws: int = 5_000
    khat_observations: int = 64
    beyond: bool = True
    flow: bool = True
    curve: tuple[int, ...] = (32, 64, 128, 256, 512, 1024, 2048, 4096)
    data_seed: int = 0
    loadings: str = "released"


PRESETS = {
    "paper": Preset(seeds=10, data_seed=100),  # data sets on which no setting was chosen
    "quick": Preset(
        seeds=1, particles=(5,), epochs=60, score_draws=1000, khat_draws=1000, flow=False, curve=(64, 256, 1024)
    ),
}


def tasks(preset: Preset, seeds: int | None = None) -> list[Task]:
    """All tasks of the experiment, longest first so that all workers end together.

    The tasks of a seed are the same with any number of seeds.
    """
    settings = {name: value for name, value in asdict(preset).items() if name != "seeds"}
    all_seeds = range(seeds or preset.seeds)
    counts = sorted(preset.particles, reverse=True)
    grid = [{"stage": "grid", "k": k, "seed": s, **settings} for k in counts for s in all_seeds]
    beyond = [{"stage": "beyond", "seed": s, **settings} for s in all_seeds] if preset.beyond else []
    return [*grid, *beyond, *({"stage": "floors", "seed": s, **settings} for s in all_seeds)]


def data(preset: Preset, seeds: Sequence[int]) -> Iterator[Tensor]:
    """The training data of every seed, for the hash in the manifest."""
    return (Problem.of(preset, seed).data.x_train for seed in seeds)


def work(task: Task) -> dict[str, Any]:
    """Do one task (see `tasks`)."""
    from vaerdict_paper.experiments import ppca_extensions

    stages = {"grid": grid, "beyond": ppca_extensions.beyond, "floors": ppca_extensions.floors}
    return stages[task["stage"]](preset_of(task), task)


def preset_of(task: Task) -> Preset:
    """The preset a task was made from."""
    fields = {name: task[name] for name in Preset.__dataclass_fields__ if name in task}
    return Preset(**{**fields, "particles": tuple(fields["particles"]), "curve": tuple(fields["curve"])})


def grid(preset: Preset, task: Task) -> dict[str, Any]:
    """Train every model of one seed at one particle count, fit every proposal for each, and measure all pairs."""
    k, seed = task["k"], task["seed"]
    problem = Problem.of(preset, seed)
    settings = training_settings(preset, k)
    names = list(RECIPES) if k == min(preset.particles) else [recipe.name for recipe in PROPOSALS]
    x = problem.data.x_train
    members = [member(problem, name, seed) for name in names] + [member(problem, "CHI", seed, Student())]
    fits = train(members, x, x[:64], settings)
    labels = [*names, "CHI-t"]
    models = [model_row(problem, preset, label, fit, k) for label, fit in zip(labels, fits, strict=True)]
    crossed = {label: fit for label, fit in zip(labels, fits, strict=True) if label in {r.name for r in PROPOSALS}}
    cross = [row for label, fit in crossed.items() for row in cross_rows(problem, preset, label, fit, k, settings)]
    return {"models": models, "cross": cross}


def training_settings(preset: Preset, k: int) -> Settings:
    """How the grid's models and proposals are trained, with k particles."""
    return Settings(
        n_particles=k,
        epochs=preset.epochs,
        patience=None,
        lr_theta=1e-2,
        lr_phi=1e-2,
        check_every=preset.epochs,
        graphs=True,
    )


def cross_rows(
    problem: Problem, preset: Preset, label: str, fit: Fit, k: int, settings: Settings
) -> list[dict[str, Any]]:
    """Fit new proposals of every kind for one fixed model, and measure each of them and their mixture."""
    seed = fit.seed + 1000
    members = [member(problem, r.name, seed) for r in PROPOSALS] + [member(problem, "CHI", seed, Student())]
    members = [replace(m, model=fit.model) for m in members]
    x = problem.data.x_train
    fitted = train(members, x, x[:64], settings, learn_model=False)
    model = as_ppca(fit.model)
    named: dict[str, Proposal] = dict(
        zip([*(r.name for r in PROPOSALS), "CHI-t"], (f.proposal for f in fitted), strict=True)
    )
    named["MIS"] = Mixture({n: Prior(model.prior) if n == "PRIOR" else named[n] for n in MIXTURE})
    base = {"model": label, "seed": fit.seed, "k_train": k, "training": "paper"}
    return [
        {**base, "proposal": name, **measure(problem, preset, model, q, seed=fit.seed)} for name, q in named.items()
    ]


def member(problem: Problem, name: str, seed: int, family: Normal | Student = Normal()) -> Member:  # noqa: B008 - frozen value
    """An untrained model (unit noise) with a new encoder of one hidden layer of 128 units."""
    encoder = family.make(problem.data.x_train, problem.data.weight.shape[1], hidden=(128,), generator=seeded(seed))
    return Member(PPCA(problem.data.weight, 1.0), encoder, RECIPES[name], seed)


def as_ppca(module: object) -> PPCA:
    """A trained module with its type."""
    assert isinstance(module, PPCA)
    return module


def model_row(
    problem: Problem, preset: Preset, label: str, fit: Fit, k: int, training: str = "paper"
) -> dict[str, Any]:
    """Metrics of a fitted model and of the encoder trained with it."""
    model, q = as_ppca(fit.model), fit.proposal
    x = problem.data.x_test
    with torch.no_grad():
        score = iwelbo_of(model, q, x, preset.score_draws, seed=fit.seed)
        log_evidence = model.log_evidence(x).mean().item()
        norm = a_norm(model.posterior(x).covariance().double(), q(x).covariance().double()).mean().item()
    return {
        "model": label,
        "seed": fit.seed,
        "k_train": k,
        "training": training,
        "epochs": fit.epochs,
        "log_evidence": log_evidence,
        "log_evidence_gap": log_evidence - problem.true_log_evidence,
        "iwelbo": score,
        "a_norm": norm,
        "log_noise": model.log_noise.detach().tolist(),
        **measure(problem, preset, model, q, seed=fit.seed),
    }


@dataclass(frozen=True, eq=False)
class Problem:
    """A data set and the exact answers of its generator on the test points."""

    data: LinearGaussianData
    truth: Tensor
    true_log_evidence: float

    @classmethod
    def of(cls, preset: Preset, seed: int = 0) -> Problem:
        """The problem of a seed."""
        return _problem(preset.data_seed + seed, preset.loadings)


@cache
def _problem(seed: int, loadings: str) -> Problem:
    data = linear_gaussian(seed, loadings=loadings)
    true = PPCA(data.weight.double(), data.noise_sd.double())
    x = data.x_test.double()
    with torch.no_grad():
        return Problem(data, true.tail_probability(x, THRESHOLDS), true.log_evidence(x).mean().item())


def iwelbo_of(model: PPCA, q: Proposal, x: Tensor, n: int, *, seed: int) -> float:
    """Held-out IWELBO with n draws, computed in parts that fit in memory."""
    generator = seeded(10_000 + seed)
    total = 0.0
    for part in x.split(max(1, 2_000_000 // n)):
        z, log_q = q.draw(part, n, generator=generator)
        total += log_mean_exp((model.log_joint(part, z) - log_q).double()).sum().item()
    return total / x.shape[0]


def tail_indicator(z: Tensor) -> Tensor:
    """The paper's queries f_nu(z) = 1{z_1 >= nu}. Shapes: ``(K, n, d) -> (K, n, 40)``."""
    return (z[..., :1] >= THRESHOLDS.to(z)).double()


@torch.no_grad()
def measure(
    problem: Problem,
    preset: Preset,
    model: PPCA,
    q: Proposal,
    *,
    seed: int,
    n_draws: int | None = None,
    smooth: bool = False,
    source: Any = seeded,
    with_khat: bool = True,
) -> dict[str, Any]:
    """Errors of P(z_1 >= nu | x), split into those of the model and of the sampler, and diagnostics.

    Parameters
    ----------
    problem, preset
        The data with exact answers, and the numbers of draws.
    model, q
        The model and the proposal that is weighted for it.
    seed
        The seed of the draws.
    n_draws
        The number of draws; that of the preset by default.
    smooth
        Whether weights are Pareto-smoothed.
    source
        Makes the randomness from a seed: `seeded` for i.i.d. draws, or a Sobol source.
    with_khat
        Whether k-hat is computed too.
    """
    x, n = problem.data.x_test, n_draws or preset.n_draws
    exact = _exact_tail(model, x)
    z, log_q = q.draw(x, n, generator=source(20_000 + seed))
    log_w, f = model.log_joint(x, z) - log_q, tail_indicator(z)
    estimate = _estimate(f, log_w, q, n, smooth)
    inference = (estimate.value - exact).abs()
    return {
        "n_draws": n,
        "mae": (estimate.value - problem.truth).abs().mean().item(),
        "mae_inference": inference.mean().item(),
        "mae_model": (exact - problem.truth).abs().mean().item(),
        "mae_plugin": (estimators.plugin(f, log_w).value - problem.truth).abs().mean().item(),
        "within_2_mcse": (inference <= 2 * estimate.mcse)[(exact - 0.5).abs() <= 0.48].double().mean().item(),
        "ess": estimate.ess.mean().item(),
        **(khat_summary(model, q, x[: preset.khat_observations], preset.khat_draws, seed=seed) if with_khat else {}),
    }


def _exact_tail(model: PPCA, x: Tensor) -> Tensor:
    return PPCA(model.weight.double(), model.noise_sd.double()).tail_probability(x.double(), THRESHOLDS)


def _estimate(f: Tensor, log_w: Tensor, q: Proposal, n: int, smooth: bool) -> Any:
    if isinstance(q, Mixture):
        return estimators.mis(f, log_w, q.source(n), smooth=smooth)
    return (estimators.psis if smooth else estimators.snis)(f, log_w)


@torch.no_grad()
def khat_summary(model: PPCA, q: Proposal, x: Tensor, n: int, *, seed: int) -> dict[str, Any]:
    """Median and quantiles of k-hat over the first test points with many draws, and the share whose verdict is ok.

    A few observations at a time, because a flow needs hundreds of numbers per particle.
    """
    generator = seeded(30_000 + seed)
    khats, verdicts = [], []
    for rows in torch.arange(len(x)).split(8):
        z, log_q = restricted(q, rows).draw(x[rows], n, generator=generator)
        log_w = model.log_joint(x[rows], z) - log_q
        khats.append(diagnostics.khat(log_w))
        verdicts.append(diagnostics.verdict(khats[-1], diagnostics.ess(log_w), n))
    khat = torch.cat(khats)
    return {
        "khat": khat.nanmedian().item(),
        "khat_share_ok": (torch.cat(verdicts) == diagnostics.Verdict.OK).double().mean().item(),
        "khat_quantiles": khat.nanquantile(_QUANTILES.to(khat)).tolist(),
    }


_QUANTILES = torch.tensor([0.05, 0.25, 0.5, 0.75, 0.95])


def published() -> Mapping[str, Any]:
    """The paper's numbers (``paper.toml``)."""
    return tomllib.loads(resources.files("vaerdict_paper.experiments").joinpath("paper.toml").read_text())
