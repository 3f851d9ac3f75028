"""The cost of the evidence of one observation: gradients and seconds for a standard error of 0.05 nats.

Annealed importance sampling against adaptive sequential Monte Carlo, each started from the prior and from a trained
encoder. Annealing has the paper's settings (500 temperatures with a linear schedule, ten leapfrog steps), and a sigmoid
schedule with a fifth and with twice as many temperatures; with more of them there are fewer chains. Costs are
scaled to the target by the empirical spread of repetitions, not by the standard error that a method reports; rows hold
both. `changes` compares rows that differ in one thing.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
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
from vaerdict_paper.benchmarks.timing import one_thread, watched

TARGET = 0.05
LEAPFROGS = 10
SCHEDULES = {"linear": linear_schedule, "sigmoid": sigmoid_schedule}
_PILOT_PARTICLES = 1024
_GROUPS = 8


Key = tuple[str, str, str]
"""Method, schedule and start."""


class Case(NamedTuple):
    """A model with fixed parameters, its trained encoder, observations, and their exact evidence if it is known."""

    name: str
    model: Model
    encoder: Proposal
    x: Tensor
    log_evidence: Tensor | None


class Sizes(NamedTuple):
    """Observations; annealed chains per observation and temperatures of the paper's setting; populations.

    `others` are other numbers of temperatures, whose chains are as many fewer or more. `particles` is the largest
    population, of which there are `repeats`.
    """

    observations: int
    chains: int
    temperatures: int
    others: tuple[int, ...]
    particles: int
    repeats: int


_QUICK = Sizes(2, 48, 50, (10,), 512, 6)
_ON = {"cpu": Sizes(4, 160, 500, (100, 1000), 16384, 6), "cuda": Sizes(6, 800, 500, (100, 1000), 16384, 24)}


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


def run(*, quick: bool = False, progress: Progress = silent) -> Iterator[dict[str, Any]]:
    """One row per model, sampler, schedule and start; ``device`` is where it ran, on a CPU with one thread."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    sizes = _QUICK if quick else _ON[device]
    with one_thread():
        for i, make in enumerate((_ppca, _counts)):
            case = make(quick, device)
            yield from _rows(case, sizes, lambda done, total, what, i=i: progress(i * total + done, 2 * total, what))


def _rows(case: Case, sizes: Sizes, progress: Progress) -> list[dict[str, Any]]:
    case = case._replace(x=case.x[: sizes.observations])
    starts = {"prior": Prior(case.model.prior), "encoder": case.encoder}
    numbers = sorted({sizes.temperatures, *sizes.others})
    methods: list[tuple[int | None, str, str]] = [(sizes.temperatures, "linear", "prior")]
    methods += [(number, "sigmoid", start) for start in starts for number in numbers]
    methods += [(None, "adaptive", start) for start in starts]
    estimates = {}
    for done, (number, schedule, start) in enumerate(methods, 1):
        if number is None:
            estimates[number, schedule, start] = _sequential(case, starts[start], sizes)
        else:
            chains = sizes.chains * sizes.temperatures // number
            estimates[number, schedule, start] = _annealed(case, starts[start], schedule, number, chains)
        progress(done, len(methods), f"{case.name}: {_name(number)} from the {start}")
    annealed = [m.log_z for (number, _, _), m in estimates.items() if number is not None]
    truth, truth_error = _truth(case, annealed)
    device = torch.cuda.get_device_name() if case.x.is_cuda else "CPU, 1 thread"
    return [
        {
            "case": case.name,
            "method": _name(number),
            "schedule": schedule,
            "start": start,
            "device": device,
            **_costs(m, truth, truth_error),
        }
        for (number, schedule, start), m in estimates.items()
    ]


def _name(temperatures: int | None) -> str:
    return "SMC" if temperatures is None else f"AIS-{temperatures}"


def changes(rows: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """What each change saves where nothing else changes, at equal accuracy: gradients and seconds before and after.

    The schedule of annealing, its number of temperatures, the sampler from the same start (adaptive populations against
    the annealing that needs the fewest gradients), and the start of the same sampler.
    """
    for case in dict.fromkeys(row["case"] for row in rows):
        of_case = {(row["method"], row["schedule"], row["start"]): row for row in rows if row["case"] == case}
        linear = next(key for key in of_case if key[1] == "linear")
        sigmoid = (linear[0], "sigmoid", linear[2])
        best = {start: _cheapest(of_case, start) for start in ("prior", "encoder")}
        pairs: list[tuple[str, Key, Key]] = [("schedule of AIS", linear, sigmoid)]
        if best["prior"][0] != linear[0]:  # others have the sigmoid schedule
            pairs.append(("number of temperatures", sigmoid, best["prior"]))
        for start, annealing in best.items():
            pairs.append((f"sampler, from the {start}", annealing, ("SMC", "adaptive", start)))
        pairs.append(("start of AIS", (*best["encoder"][:2], "prior"), best["encoder"]))
        pairs.append(("start of SMC", ("SMC", "adaptive", "prior"), ("SMC", "adaptive", "encoder")))
        for what, before, after in pairs:
            yield _change(case, what, of_case[before], of_case[after])


def _cheapest(rows: Mapping[Key, dict[str, Any]], start: str) -> Key:
    """The annealing from a start that needs the fewest gradients."""
    annealed = [key for key in rows if key[0] != "SMC" and key[2] == start]
    return min(annealed, key=lambda key: rows[key]["gradients"])


def _change(case: str, what: str, before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
    described = [f"{row['method']}, {row['schedule']}, from the {row['start']}" for row in (before, after)]
    ratios = {f"{cost}_ratio": before[cost] / after[cost] for cost in ("gradients", "seconds")}
    seconds = {"before_s": before["seconds"], "after_s": after["seconds"]}
    return {"case": case, "change": what, "before": described[0], "after": described[1], **seconds, **ratios}


def _annealed(case: Case, start: Proposal, schedule: str, temperatures: int, chains: int) -> Measured:
    """Independent chains in groups, each of which gives one estimate.

    A group is as large as the target needs, at most an eighth of the chains. The cost of pilot chains is not counted,
    which favours annealing.
    """
    t = SCHEDULES[schedule](temperatures)
    generator = seeded(0, case.x.device)
    with watched() as watch:
        result = ais(
            case.model, case.x, start, n_chains=chains, temperatures=t, n_leapfrog=LEAPFROGS, generator=generator
        )
    seconds = watch.wall if case.x.is_cuda else watch.cpu
    relative = log_standard_error(result.log_w).square().mean().item() * chains
    size = max(2, min(chains // _GROUPS, round(relative / TARGET**2)))
    groups = result.log_w[: chains // size * size].unflatten(0, (-1, size)).movedim(1, 0)
    rows = result.log_w.numel() + 16 * case.x.shape[0]
    return Measured(
        log_z=log_mean_exp(groups).cpu(),
        reported=log_standard_error(groups).cpu(),
        gradients=float(size * (1 + temperatures * LEAPFROGS)),
        seconds=seconds / rows * size,
        size=size,
    )


def _sequential(case: Case, start: Proposal, sizes: Sizes) -> Measured:
    """Repeated populations of the size that the target needs according to a pilot run."""
    generator = seeded(0, case.x.device)
    pilot = smc(case.model, case.x, start, n_particles=_PILOT_PARTICLES, generator=generator)
    needed = pilot.standard_error.square().mean().item() / TARGET**2 * _PILOT_PARTICLES
    size = min(sizes.particles, 64 * max(2, round(needed / 64)))
    x = case.x.repeat(sizes.repeats, 1)
    with watched() as watch:
        result = smc(case.model, x, start, n_particles=size, generator=generator)
    seconds = watch.wall if case.x.is_cuda else watch.cpu
    return Measured(
        log_z=result.log_evidence.unflatten(0, (sizes.repeats, -1)).cpu(),
        reported=result.standard_error.unflatten(0, (sizes.repeats, -1)).cpu(),
        gradients=result.n_gradients.double().mean().item(),
        seconds=seconds / x.shape[0],
        size=size,
    )


def _truth(case: Case, annealed: Sequence[Tensor]) -> tuple[Tensor, float]:
    """The exact evidence, or that of the annealed chains with the smallest standard error, and this error."""
    if case.log_evidence is not None:
        return case.log_evidence[: case.x.shape[0]].cpu(), 0.0
    errors = [log_standard_error(log_z).square().mean().div(log_z.shape[1]).sqrt().item() for log_z in annealed]
    best = min(range(len(errors)), key=errors.__getitem__)
    return log_mean_exp(annealed[best]), errors[best]


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
