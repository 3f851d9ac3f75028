r"""An audit of the paper's released code: the effect of its loss and of its settings.

The losses and settings below are reproduced only to be measured. No module imports this one except the registry of
experiments. Three stages:

`sign`
    Minimising the released chi loss maximises the CUBO. Its derivative is compared with the exact one, and the variance
    that it fits to a Gaussian with the known chi-square optimum: it grows to about K/2 and then diverges.
`collapse`
    The pPCA model trained by that loss and by ours with 5 and 200 particles: the paper's unexplained collapse of the
    chi-VAE.
`settings`
    "5 particles" as released (the model had 80, or 2), encoders evaluated with dropout, and a mixture with 3750 draws
    against 1000; on several data sets, because the paper's own is not available.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from statistics import fmean, stdev
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from vaerdict.core import Proposal
from vaerdict.distributions import Diagonal, Elliptical, Noise
from vaerdict.models import PPCA
from vaerdict.noise import seeded
from vaerdict.objectives import Loss, elbo_loss, iwelbo_loss, loss
from vaerdict.proposals import Amortised, Mixture, Prior
from vaerdict.tasks import Task
from vaerdict.training import CHI, Fit, Member, Recipe, Settings, train
from vaerdict_paper.experiments import ppca
from vaerdict_paper.experiments.ppca import MIXTURE, THRESHOLDS, Problem, khat_summary, model_row, published
from vaerdict_paper.theory.gaussians import Gaussian, a_norm, gaussian_chi_square
from vaerdict_paper.theory.mean_field import mean_field_chi_square

Row = dict[str, Any]


def released_chi_loss(log_w: Tensor) -> Tensor:
    r"""The released :math:`-\sum_k v_k \log w_k` with constant v, the normalised squared weights; wrong as used.

    With z reparameterised and gradients through q, its gradient is minus that of `cubo`: minimising it maximises the
    bound. Without gradients through q the same line is `vaerdict.objectives.cubo_dreg_loss`, which is correct.

    Shapes: ``(K, *batch) -> (*batch)``.
    """
    return -(torch.softmax(2 * log_w.detach(), 0) * log_w).sum(0)


RELEASED_CHI = Loss("cubo", "released", lambda log_w, log_q: released_chi_loss(log_w), z_grad=True, q_grad=True)

RELEASED = {
    "VAE": Recipe("VAE", elbo_loss, loss("elbo", "pathwise")),
    "IWAE": Recipe("IWAE", iwelbo_loss, loss("iwelbo", "pathwise")),
    "WW": Recipe("WW", iwelbo_loss, loss("forward_kl", "score")),
    "CHI": Recipe("CHI", iwelbo_loss, RELEASED_CHI),
}
"""The released recipes: pathwise and score gradients, and the chi loss above."""

CHI_LOSSES = {"released": RELEASED_CHI, **{name: loss("cubo", name) for name in ("pathwise", "score", "dreg")}}
THETA_PARTICLES = {"VAE": 2, "IWAE": 80, "WW": 80, "CHI": 80}
"""Particles of the model's steps; the paper says 5."""

DROPOUT = 0.1
CORRELATION = 0.8
"""Correlation of the bivariate target with unit variances; its chi-square optimum has variance 1.37."""

START = 1.5
"""Initial scale of q, wider than the target as for an untrained encoder; derivatives are taken there too."""


@dataclass(frozen=True)
class Preset:
    """How much of the audit to run."""

    sign_particles: tuple[int, ...] = (5, 30, 200)
    sign_steps: tuple[int, ...] = (250, 500, 1000, 2000)
    replicates: int = 20
    collapse_particles: tuple[int, ...] = (5, 200)
    collapse_data_sets: int = 10
    data_sets: int = 20
    epochs: int = 100
    n_draws: int = 1000
    mixture_draws: int = 3750
    text_draws: int = 200
    score_draws: int = 2000
    khat_draws: int = 5000
    data_seed: int = 0

    def with_seeds(self, n: int) -> Preset:
        """The preset with n data sets."""
        return replace(self, data_sets=n, collapse_data_sets=n)


PRESETS = {
    "paper": Preset(data_seed=100),  # the number of data sets was chosen on others, 0 to 2
    "quick": Preset(
        sign_particles=(5, 30),
        sign_steps=(100, 400),
        replicates=2,
        collapse_particles=(5,),
        collapse_data_sets=1,
        data_sets=2,
        epochs=10,
        score_draws=200,
        khat_draws=500,
    ),
}


def tasks(preset: Preset, seeds: int | None = None) -> list[Task]:
    """All tasks of the audit, longest first; `seeds` overrides the number of data sets."""
    preset = preset if seeds is None else preset.with_seeds(seeds)
    settings = asdict(preset)
    collapse = [
        {"stage": "collapse", "k": k, "seed": seed, **settings}
        for k in sorted(preset.collapse_particles, reverse=True)
        for seed in range(preset.collapse_data_sets)
    ]
    sign = [{"stage": "sign", "k": k, "seed": 0, **settings} for k in sorted(preset.sign_particles, reverse=True)]
    return [{"stage": "settings", "seed": 0, **settings}, *collapse, *sign]


def data(preset: Preset, seeds: Sequence[int]) -> Iterator[Tensor]:
    """The training data of every data set, for the hash in the manifest."""
    return (Problem.of(_measures(preset, seed)).data.x_train for seed in range(preset.data_sets))


def work(task: Task) -> dict[str, Any]:
    """Do one task (see `tasks`)."""
    preset = preset_of(task)
    if task["stage"] == "sign":
        return {"derivatives": derivatives(task["k"]), "fits": fits(preset, task["k"])}
    if task["stage"] == "collapse":
        return {"collapse": collapse(preset, task["k"], task["seed"])}
    return settings(preset)


def preset_of(task: Task) -> Preset:
    """The preset a task was made from."""
    fields = {name: task[name] for name in Preset.__dataclass_fields__}
    return Preset(**{**fields, **{name: tuple(fields[name]) for name in _TUPLES}})


_TUPLES = ("sign_particles", "sign_steps", "collapse_particles")


# ---------------------------------------------------------------------------------------------------------- sign
def derivatives(k: int, *, n: int = 20_000, seed: int = 0) -> list[Row]:
    r"""Mean derivative in log s of each chi loss at target N(0, 1), q = N(0, s^2), beside the CUBO's own.

    .. math:: \frac{d}{d\log s}\,\tfrac12\log E_q[w^2] = 1 - \frac{s^2}{2s^2 - 1}.

    n losses of k particles, each with its own q, so that one backward pass gives n derivatives.
    """
    s = START
    noise = Noise(torch.randn(k, n, 1, generator=seeded(seed), dtype=torch.float64))
    rows = []
    for name, chi in CHI_LOSSES.items():
        log_scale = torch.full((n, 1), s, dtype=torch.float64).log().requires_grad_()
        q = Elliptical(torch.zeros_like(log_scale), Diagonal(log_scale.exp()))
        losses = _losses(chi, q, noise, lambda z: -0.5 * z.square().sum(-1))
        (each,) = torch.autograd.grad(losses.sum(), log_scale)
        exact, se = 1 - s**2 / (2 * s**2 - 1), (each.std() / n**0.5).item()
        rows.append({"k": k, "loss": name, "derivative": each.mean().item(), "se": se, "exact": exact})
    return rows


def fits(preset: Preset, k: int) -> list[Row]:
    """Variance of the mean-field normal that each chi loss fits to the bivariate target, as training proceeds."""
    return [row for name in CHI_LOSSES for row in _fit(preset, name, k)]


def _fit(preset: Preset, name: str, k: int, *, batch: int = 8, lr: float = 0.02) -> list[Row]:
    """Adam from a normal of scale `START`, all replicates in parallel, each with its own noise."""
    precision = torch.linalg.inv(_target())
    loc = torch.zeros(preset.replicates, 2, dtype=torch.float64, requires_grad=True)
    log_scale = torch.full_like(loc, START).log().requires_grad_()
    optimiser = torch.optim.Adam([loc, log_scale], lr=lr)
    generator, rows = seeded(k), []
    for step in range(1, max(preset.sign_steps) + 1):
        noise = Noise(torch.randn(k, batch, *loc.shape, generator=generator, dtype=loc.dtype))
        q = Elliptical(loc, Diagonal(log_scale.exp()))
        losses = _losses(CHI_LOSSES[name], q, noise, lambda z: -0.5 * ((z @ precision) * z).sum(-1))
        optimiser.zero_grad()
        losses.mean(0).sum().backward()
        optimiser.step()
        if step in preset.sign_steps:
            quality = _quality(loc.detach(), (2 * log_scale.detach()).exp())
            rows += [{"k": k, "loss": name, "steps": step, "seed": seed, **row} for seed, row in enumerate(quality)]
    return rows


def _quality(loc: Tensor, variance: Tensor) -> list[Row]:
    """Variance and chi-square of each replicate and of the optimum; None if the variance diverged or is infinite."""
    p, best = Gaussian(torch.zeros(2, dtype=torch.float64), _target()), _best_variance()
    at_best = gaussian_chi_square(p, Gaussian.diagonal(p.mean, torch.full_like(p.mean, best))).item()
    mean = variance.mean(-1)
    moderate = (variance.log10().abs() < 6).all(-1)
    chi_square = torch.full_like(mean, torch.inf)
    chi_square[moderate] = gaussian_chi_square(p, Gaussian.diagonal(loc[moderate], variance[moderate]))
    return [
        {"log10_variance": math.log10(v), "variance": v if ok else None, "best_variance": best}
        | {"chi_square": chi if math.isfinite(chi) else None, "best_chi_square": at_best}
        for v, ok, chi in zip(mean.tolist(), moderate.tolist(), chi_square.tolist(), strict=True)
    ]


def _target() -> Tensor:
    """Covariance of the bivariate target."""
    return torch.tensor([[1.0, CORRELATION], [CORRELATION, 1.0]], dtype=torch.float64)


def _best_variance() -> float:
    return 1 / mean_field_chi_square(torch.linalg.inv(_target()))[0].item()


def _losses(chi: Loss, q: Elliptical, noise: Noise, log_p: Callable[[Tensor], Tensor]) -> Tensor:
    z = q.transform(noise)
    z = z if chi.z_grad else z.detach()
    log_q = (q if chi.q_grad else q.detach()).log_prob(z)
    return chi(log_p(z) - log_q, log_q)


# ------------------------------------------------------------------------------------------------------ collapse
def collapse(preset: Preset, k: int, seed: int) -> list[Row]:
    """The chi model trained by the released loss and by ours, otherwise alike, with k particles for both steps."""
    measures = _measures(preset, seed)
    problem = Problem.of(measures)
    x = problem.data.x_train
    rows = []
    for name, recipe in (("released", RELEASED["CHI"]), ("ours", CHI)):
        member = replace(ppca.member(problem, "CHI", 0), recipe=recipe)
        (fit,) = train([member], x, x[:64], _schedule(preset, k))
        row = model_row(problem, measures, "CHI", fit, k)
        rows.append({"loss": name, "k_train": k, "seed": seed, **{key: row[key] for key in _COLLAPSE_KEYS}})
    paper = published()["ppca"].get(f"k{k}")
    printed = {} if paper is None else {f"published_{key}": paper[key]["CHI"] for key in ("khat", "mae", "a_norm")}
    behind = rows[1]["log_evidence"] - rows[0]["log_evidence"]
    return [{**rows[0], "behind": behind, **printed}, {**rows[1], "behind": 0.0}]


_COLLAPSE_KEYS = ("n_draws", "log_evidence", "iwelbo", "a_norm", "khat", "mae", "mae_inference", "mae_model")


def _measures(preset: Preset, seed: int) -> ppca.Preset:
    return ppca.Preset(
        n_draws=preset.n_draws,
        score_draws=preset.score_draws,
        khat_draws=preset.khat_draws,
        data_seed=preset.data_seed + seed,
    )


def _schedule(preset: Preset, k: int, k_theta: int | None = None) -> Settings:
    return Settings(
        n_particles=k,
        n_particles_theta=k_theta,
        epochs=preset.epochs,
        patience=None,
        lr_theta=1e-2,
        lr_phi=1e-2,
        check_every=preset.epochs,
    )


# ------------------------------------------------------------------------------------------------------ settings
@dataclass(frozen=True)
class Dropout:
    """ReLU followed by dropout, in training and in evaluation, with masks from its own generator.

    Every call draws new masks, so the density that a mixture evaluates is not that of its particles.
    """

    rate: float
    masks: torch.Generator = field(compare=False, repr=False)

    def __call__(self, h: Tensor) -> Tensor:
        """Shapes: ``(...) -> (...)``."""
        mask = torch.rand(h.shape, generator=self.masks, dtype=h.dtype) >= self.rate
        return F.relu(h) * mask / (1 - self.rate)


def with_dropout(member: Member) -> Member:
    """The same member with dropout in its encoder, with masks from the member's seed."""
    proposal = copy.deepcopy(member.proposal)
    proposal.encoder.activation = Dropout(DROPOUT, seeded(60_000 + member.seed))  # type: ignore[union-attr]
    return replace(member, proposal=proposal)


def without_dropout(proposal: Amortised) -> Amortised:
    """The same encoder without dropout, as it should be evaluated."""
    out = copy.deepcopy(proposal)
    out.encoder.activation = F.relu  # type: ignore[assignment]
    return out


def settings(preset: Preset) -> dict[str, Any]:
    """Models and mixture with the released settings on several data sets, then the comparison over all of them."""
    models, draws = [], []
    for seed in range(preset.data_sets):
        problem = Problem.of(_measures(preset, seed))
        fitted = _released_models(preset, problem)
        models += _behind([_model_row(preset, problem, name, fit, seed) for name, fit in fitted.items()])
        draws += mixture_rows(preset, problem, fitted["IWAE"].model, seed)  # type: ignore[arg-type]
    return {
        "models": models,
        "draws": draws,
        "comparison": compared(models),
        "patterns": patterns(models),
        "mixture": mixture_gains(preset, draws),
    }


def _released_models(preset: Preset, problem: Problem) -> dict[str, Fit]:
    x = problem.data.x_train
    fitted: dict[str, Fit] = {}
    for k_theta in sorted(set(THETA_PARTICLES.values())):
        names = [name for name, k in THETA_PARTICLES.items() if k == k_theta]
        members = [_released(problem, name, 0) for name in names]
        fitted |= dict(zip(names, train(members, x, x[:64], _schedule(preset, 5, k_theta)), strict=True))
    return {name: fitted[name] for name in THETA_PARTICLES}


def _released(problem: Problem, name: str, seed: int) -> Member:
    return with_dropout(replace(ppca.member(problem, name, seed), recipe=RELEASED[name]))


@torch.no_grad()
def _model_row(preset: Preset, problem: Problem, name: str, fit: Fit, seed: int) -> Row:
    """A model and its own encoder with dropout, as the released code measures them."""
    model: PPCA = fit.model  # type: ignore[assignment]
    q: Any = fit.proposal
    x = problem.data.x_test
    khat = khat_summary(model, q, x[:64], preset.khat_draws, seed=seed)["khat"]
    norm = a_norm(model.posterior(x).covariance(), q(x).covariance()).mean().item()
    base = {"model": name, "k_train": 5, "k_theta": THETA_PARTICLES[name], "seed": seed}
    metrics = {"log_evidence": model.log_evidence(x).mean().item(), "khat": khat, "a_norm": norm}
    return {**base, **metrics, **tail_errors(problem, model, q, preset.n_draws, seed=seed)}


def _behind(rows: list[Row]) -> list[Row]:
    """The rows of one data set with their distance in held-out evidence from the best of them."""
    best = max(row["log_evidence"] for row in rows)
    return [{**row, "behind": best - row["log_evidence"]} for row in rows]


def mixture_rows(preset: Preset, problem: Problem, model: PPCA, seed: int) -> list[Row]:
    """Errors of single proposals and of the paper's mixture for one model, by draws, with and without dropout."""
    x = problem.data.x_train
    names = [name for name in MIXTURE if name != "PRIOR"]
    members = [replace(_released(problem, name, 1000), model=model) for name in names]
    fits = train(members, x, x[:64], _schedule(preset, 5), learn_model=False)
    dropped: dict[str, Any] = dict(zip(names, (fit.proposal for fit in fits), strict=True))
    rows = []
    for mode, named in (("on", dropped), ("off", {name: without_dropout(q) for name, q in dropped.items()})):
        mixture = Mixture({name: Prior(model.prior) if name == "PRIOR" else named[name] for name in MIXTURE})
        budgets = [(name, n) for n in (preset.n_draws, preset.text_draws) for name in (*names, "MIS")]
        for name, n in [*budgets, ("MIS", preset.mixture_draws)]:
            q = mixture if name == "MIS" else named[name]
            base = {"dropout": mode, "proposal": name, "n_draws": n, "seed": seed}
            rows.append({**base, **tail_errors(problem, model, q, n, seed=seed)})
    return rows


@torch.no_grad()
def tail_errors(problem: Problem, model: PPCA, q: Proposal, n: int, *, seed: int) -> Row:
    """Mean absolute errors of P(z_1 >= nu | x) from n draws, against the generator's answer and the model's."""
    x = problem.data.x_test
    z, log_q = q.draw(x, n, generator=seeded(50_000 + seed))
    weight = torch.softmax((model.log_joint(x, z) - log_q).double(), 0)
    value = torch.stack([(weight * (z[..., 0] >= nu)).sum(0) for nu in THRESHOLDS], -1)
    exact = model.tail_probability(x, THRESHOLDS).double()
    return {
        "mae": (value - problem.truth).abs().mean().item(),
        "mae_inference": (value - exact).abs().mean().item(),
        "mae_model": (exact - problem.truth).abs().mean().item(),
    }


# ---------------------------------------------------------------------------------------- over all data sets
def compared(models: Sequence[Row]) -> list[Row]:
    """Mean and spread over data sets, and whether the released figure lies within two spreads of the mean.

    A distance below the last printed digit counts as zero.
    """
    rows = []
    for metric, figures in _released_figures().items():
        for name, figure in figures.items():
            values = [row[metric] for row in models if row["model"] == name]
            mean, spread = fmean(values), stdev(values) if len(values) > 1 else 0.0
            row = {"model": name, "metric": metric, "measured": mean, "spread": spread, "released": figure}
            rows.append({**row, "within": abs(mean - figure) <= max(2 * spread, _LAST_DIGIT[metric])})
    return rows


_LAST_DIGIT = {"behind": 0.01, "khat": 0.01, "mae": 0.001}


def _released_figures() -> dict[str, dict[str, float]]:
    """What the released code reports; only differences of the evidence, because it depends on the data set."""
    released = published()["ppca"]["released"]
    best = max(released["log_evidence"].values())
    behind = {name: best - value for name, value in released["log_evidence"].items()}
    return {"behind": behind, "khat": released["khat"], "mae": released["mae"]}


_PATTERNS: dict[str, Callable[[dict[str, Row]], bool]] = {
    "the VAE has the worst evidence": lambda by: by["VAE"]["behind"] == max(r["behind"] for r in by.values()),
    "the VAE has the worst MAE": lambda by: by["VAE"]["mae"] == max(r["mae"] for r in by.values()),
    "CHI has the best MAE": lambda by: by["CHI"]["mae"] == min(r["mae"] for r in by.values()),
    "WW has the highest k-hat": lambda by: by["WW"]["khat"] == max(r["khat"] for r in by.values()),
    "CHI has the lowest k-hat": lambda by: by["CHI"]["khat"] == min(r["khat"] for r in by.values()),
}
"""Orders of the models in the released figures."""


def patterns(models: Sequence[Row]) -> list[Row]:
    """The number of data sets that show each pattern of the released figures, and whether most do."""
    sets = [{row["model"]: row for row in models if row["seed"] == s} for s in dict.fromkeys(r["seed"] for r in models)]
    counts = {pattern: sum(map(shows, sets)) for pattern, shows in _PATTERNS.items()}
    return [
        {"pattern": pattern, "found_in": count, "data_sets": len(sets), "reproduced": 2 * count > len(sets)}
        for pattern, count in counts.items()
    ]


def mixture_gains(preset: Preset, draws: Sequence[Row]) -> list[Row]:
    """MAE of single proposals minus that of the mixture, with the released numbers of draws and with equal ones."""
    budgets = {
        "as released": ("on", preset.mixture_draws, preset.n_draws),
        "dropout off": ("off", preset.mixture_draws, preset.n_draws),
        "equal draws": ("on", preset.n_draws, preset.n_draws),
        "equal draws, dropout off": ("off", preset.n_draws, preset.n_draws),
        "equal draws of the text, dropout off": ("off", preset.text_draws, preset.text_draws),
    }
    mae = {(row["dropout"], row["proposal"], row["n_draws"], row["seed"]): row["mae"] for row in draws}
    return [
        {"setting": name, "against": rival, "n_mixture": ours, "n_rival": theirs, "seed": seed}
        | {"mae_mixture": mae[mode, "MIS", ours, seed], "mae_rival": mae[mode, rival, theirs, seed]}
        | {"gain": mae[mode, rival, theirs, seed] - mae[mode, "MIS", ours, seed]}
        for name, (mode, ours, theirs) in budgets.items()
        for rival in ("CHI", "IWAE")
        for seed in range(preset.data_sets)
    ]
