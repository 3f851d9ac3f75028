"""The cost of the evidence of one observation: gradients and seconds for a standard error of 0.05 nats.

Annealed importance sampling with the paper's settings (500 temperatures, ten leapfrog steps) against adaptive
sequential Monte Carlo, each started from the prior and from a trained encoder. Costs are scaled to the target by the
empirical spread of repetitions, not by the standard error that a method reports; rows hold both.
"""

from __future__ import annotations

import math
import time
from typing import Any, NamedTuple

import torch
from torch import Tensor

from vaerdict.core import Model, Progress, Proposal, log_mean_exp, silent
from vaerdict.datasets import linear_gaussian
from vaerdict.models.ppca import PPCA
from vaerdict.noise import seeded
from vaerdict.proposals import Normal, Prior
from vaerdict.samplers import ais, linear_schedule, log_standard_error, sigmoid_schedule, smc
from vaerdict.training import VAE, Member, Settings, train
from vaerdict_paper.benchmarks.escalation import SmallCountModel

TARGET = 0.05
LEAPFROGS = 10
SCHEDULES = {"linear": linear_schedule, "sigmoid": sigmoid_schedule}
_PILOT_PARTICLES = 1024
_GROUPS = 8


class Case(NamedTuple):
    """A model with fixed parameters, its trained encoder, observations, and their exact evidence if it is known."""

    name: str
    model: Model
    encoder: Proposal
    x: Tensor
    log_evidence: Tensor | None


class Sizes(NamedTuple):
    """Sizes: observations, annealed chains per observation, temperatures; largest population, repetitions."""

    observations: int
    chains: int
    temperatures: int
    particles: int
    repeats: int


class Measured(NamedTuple):
    """Repeated estimates with their reported standard errors and their cost.

    Shapes: ``log_z, reported (repeats, observations)``; gradients and seconds are those of one estimate of one
    observation.
    """

    log_z: Tensor
    reported: Tensor
    gradients: float
    seconds: float
    size: int


def run(*, quick: bool = False, progress: Progress = silent) -> list[dict[str, Any]]:
    """One row per model and method; ratios are to the cheapest annealing from the prior in the same run."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    cases = [_ppca(quick, device), _counts(quick, device)]
    sizes = Sizes(2, 48, 50, 512, 6) if quick else Sizes(6, 800, 500, 16384, 24)
    rows = []
    for i, case in enumerate(cases):
        rows += _rows(case, sizes, lambda done, total, what, i=i: progress(i * total + done, len(cases) * total, what))
    return rows


def _rows(case: Case, sizes: Sizes, progress: Progress) -> list[dict[str, Any]]:
    case = case._replace(x=case.x[: sizes.observations])
    starts = {"prior": Prior(case.model.prior), "encoder": case.encoder}
    annealing = f"AIS-{sizes.temperatures}"
    methods = [(annealing, schedule, "prior") for schedule in SCHEDULES]
    methods += [(annealing, "sigmoid", "encoder"), ("SMC", "adaptive", "prior"), ("SMC", "adaptive", "encoder")]
    estimates = {}
    for done, (method, schedule, start) in enumerate(methods, 1):
        measure = _sequential if method == "SMC" else _annealed
        estimates[method, schedule, start] = measure(case, starts[start], schedule, sizes)
        progress(done, len(methods), f"{case.name}: {method} from the {start}")
    truth, truth_error = _truth(case, estimates[annealing, "sigmoid", "prior"].log_z)
    rows = [
        {"case": case.name, "method": method, "schedule": schedule, "start": start, **_costs(m, truth, truth_error)}
        for (method, schedule, start), m in estimates.items()
    ]
    peers = [row for row in rows if row["method"] != "SMC" and row["start"] == "prior"]
    for row in rows:
        for cost in ("gradients", "seconds"):
            row[f"{cost}_ratio"] = min(peer[cost] for peer in peers) / row[cost]
    return rows


def _annealed(case: Case, start: Proposal, schedule: str, sizes: Sizes) -> Measured:
    """Independent chains in groups, each of which gives one estimate.

    A group is as large as the target needs, at most an eighth of the chains. The cost of pilot chains is not counted,
    which favours the peer.
    """
    t = SCHEDULES[schedule](sizes.temperatures)
    generator = seeded(0, case.x.device)
    began = time.perf_counter()
    result = ais(
        case.model, case.x, start, n_chains=sizes.chains, temperatures=t, n_leapfrog=LEAPFROGS, generator=generator
    )
    seconds = time.perf_counter() - began
    relative = log_standard_error(result.log_w).square().mean().item() * sizes.chains
    size = max(2, min(sizes.chains // _GROUPS, round(relative / TARGET**2)))
    groups = result.log_w[: sizes.chains // size * size].unflatten(0, (-1, size)).movedim(1, 0)
    rows = result.log_w.numel() + 16 * case.x.shape[0]
    return Measured(
        log_z=log_mean_exp(groups).cpu(),
        reported=log_standard_error(groups).cpu(),
        gradients=float(size * (1 + sizes.temperatures * LEAPFROGS)),
        seconds=seconds / rows * size,
        size=size,
    )


def _sequential(case: Case, start: Proposal, schedule: str, sizes: Sizes) -> Measured:
    """Repeated populations of the size that the target needs according to a pilot run."""
    generator = seeded(0, case.x.device)
    pilot = smc(case.model, case.x, start, n_particles=_PILOT_PARTICLES, generator=generator)
    needed = pilot.standard_error.square().mean().item() / TARGET**2 * _PILOT_PARTICLES
    size = min(sizes.particles, 64 * max(2, round(needed / 64)))
    x = case.x.repeat(sizes.repeats, 1)
    began = time.perf_counter()
    result = smc(case.model, x, start, n_particles=size, generator=generator)
    seconds = time.perf_counter() - began
    return Measured(
        log_z=result.log_evidence.unflatten(0, (sizes.repeats, -1)).cpu(),
        reported=result.standard_error.unflatten(0, (sizes.repeats, -1)).cpu(),
        gradients=result.n_gradients.double().mean().item(),
        seconds=seconds / x.shape[0],
        size=size,
    )


def _truth(case: Case, chains: Tensor) -> tuple[Tensor, float]:
    """The exact evidence, or that of all annealed chains from the prior, with its standard error."""
    if case.log_evidence is not None:
        return case.log_evidence[: case.x.shape[0]].cpu(), 0.0
    return log_mean_exp(chains), log_standard_error(chains).square().mean().sqrt().item() / math.sqrt(chains.shape[1])


def _costs(m: Measured, truth: Tensor, truth_error: float) -> dict[str, Any]:
    spread = m.log_z.var(0).mean().sqrt().item()
    scale = (spread / TARGET) ** 2
    bias = (m.log_z - truth).mean().item()
    return {
        "size": m.size,
        "gradients": m.gradients * scale,
        "seconds": m.seconds * scale,
        "se_empirical": spread,
        "se_claimed": m.reported.square().mean().sqrt().item(),
        "bias": bias,
        "bias_se": math.hypot(spread / math.sqrt(m.log_z.numel()), truth_error),
        "repeats": m.log_z.shape[0],
    }


def _ppca(quick: bool, device: str) -> Case:
    """The paper's linear-Gaussian data under their true model: 6 latents, 10 features, exact evidence."""
    data = linear_gaussian(0)
    model = PPCA(data.weight, data.noise_sd).requires_grad_(False)
    encoder = _encoder(model, data.x_train, data.x_test, 6, 10 if quick else 100)
    x = data.x_test.to(device)
    model = model.to(device)
    return Case("pPCA, 6 latents, 10 features", model, encoder.to(device), x, model.log_evidence(x).double())


def _counts(quick: bool, device: str) -> Case:
    """Negative-binomial counts of 100 genes from a decoder with fixed random weights, 10 latents, library 1000."""
    generator = seeded(0)
    model = SmallCountModel(100, 10, generator=generator).requires_grad_(False)
    for parameter in model.decoder.parameters():
        parameter *= 2.5  # cells that differ by more than noise
    x = _simulate(model, 2000, generator)
    encoder = _encoder(model, x[:1600], x[1600:], 10, 5 if quick else 50)
    return Case("NB counts, 10 latents, 100 genes", model.to(device), encoder.to(device), x[1600:].to(device), None)


def _simulate(model: SmallCountModel, n: int, generator: torch.Generator) -> Tensor:
    z = torch.randn(n, model.d, generator=generator)
    mean = 1000 * torch.softmax(model.decoder(z), -1)
    r = model.log_dispersion.exp().expand_as(mean).contiguous()
    return torch.poisson(torch._standard_gamma(r, generator=generator) / r * mean, generator=generator)


def _encoder(model: torch.nn.Module, x: Tensor, x_valid: Tensor, d: int, epochs: int) -> Any:
    """A diagonal Gaussian encoder fitted by the ELBO to a fixed model."""
    start = Normal().make(x, d, hidden=(64,), generator=seeded(1))
    settings = Settings(n_particles=10, epochs=epochs, patience=None, lr_phi=2e-3, check_every=epochs)
    return train([Member(model, start, VAE, 1)], x, x_valid, settings, learn_model=False)[0].proposal
