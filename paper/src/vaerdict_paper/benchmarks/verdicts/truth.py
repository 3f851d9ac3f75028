"""The truth of every question: quadrature for one or two latents, otherwise many exact draws, with its error."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from vaerdict_paper.benchmarks.verdicts.questions import Functional, Question, Target, exceeds, generator_of, log_joint

N_DRAWS, CHUNK = 400_000, 20_000
PROBABILITY, TAIL = 0.3, 0.01
"""Mean over observations of the probabilities asked for."""

TOLERANCES = {"mean": 0.05, "product": 0.05, "probability": 0.02, "tail": 0.005}
"""Tolerances; those of the first two are in posterior standard deviations of the functional."""

_POINTS = {1: (200_001, 100_001), 2: (1200, 900)}
_SPAN = 40.0  # nats below the maximum where the grid ends

Weighted = tuple[Tensor, Tensor]
"""Points of one observation and their log-weights. Shapes: ``(n, d), (n)``."""


def questions(target: Target) -> list[Question]:
    """The four questions of a target with their answers."""
    return _by_draws(target) if target.sample is not None else _by_weights(target)


def _by_draws(target: Target) -> list[Question]:
    pilot = torch.cat(list(_draws(target, 0, N_DRAWS // 8)))
    equal = pilot.new_zeros(len(pilot))
    weighted = [(pilot[:, i], equal) for i in range(pilot.shape[1])]
    functionals = _functionals(target, weighted)
    sums = torch.zeros(2, len(functionals), len(target.x), dtype=torch.float64)
    for z in _draws(target, 1, N_DRAWS):
        values = torch.stack([f(z) for f in functionals.values()])
        sums += torch.stack([values.sum(1), values.square().sum(1)])
    mean, square = sums / N_DRAWS
    sd = (square - mean.square()).clamp_min(0).sqrt()
    error = sd / N_DRAWS**0.5
    error[2:].clamp_min_(1 / N_DRAWS)  # an event that no draw hit may still have a small probability
    return _questions(functionals, mean, sd, error)


def _draws(target: Target, stream: int, n: int) -> Iterator[Tensor]:
    assert target.sample is not None
    g = generator_of(stream, f"truth of {target.name}")
    for _ in range(n // CHUNK):
        yield target.sample(CHUNK, g)


def _by_weights(target: Target) -> list[Question]:
    if target.reference is not None:
        weighted = [target.reference(i) for i in range(len(target.x))]
        functionals = _functionals(target, weighted)
        mean, sd, error = (
            torch.stack(t, -1) for t in zip(*(_importance(functionals, w) for w in weighted), strict=True)
        )
        return _questions(functionals, mean, sd, error)
    fine, rough = ([grid(target, i, n) for i in range(len(target.x))] for n in _POINTS[len(target.box)])
    functionals = _functionals(target, fine)
    (mean, sd), (other, _) = (
        (torch.stack(t, -1) for t in zip(*(_moments(functionals, w) for w in grids), strict=True))
        for grids in (fine, rough)
    )
    return _questions(functionals, mean, sd, (mean - other).abs())


def _functionals(target: Target, weighted: list[Weighted]) -> dict[str, Functional]:
    return {
        "mean": target.mean,
        "product": target.product,
        "probability": exceeds(target.score, _threshold(target.score, weighted, PROBABILITY)),
        "tail": exceeds(target.tail, _threshold(target.tail, weighted, TAIL)),
    }


def _threshold(score: Functional, weighted: list[Weighted], probability: float) -> float:
    """The value that the score exceeds with a given probability, averaged over observations."""
    values = torch.cat([score(z) for z, _ in weighted])
    weights = torch.cat([log_w.softmax(0) for _, log_w in weighted]) / len(weighted)
    values, order = values.sort(descending=True)
    return values[int(torch.searchsorted(weights[order].cumsum(0), probability))].item()


def _questions(functionals: dict[str, Functional], mean: Tensor, sd: Tensor, error: Tensor) -> list[Question]:
    def tolerance(i: int, name: str) -> float:
        return TOLERANCES[name] * (sd[i].mean().item() if name in ("mean", "product") else 1)

    return [Question(name, f, tolerance(i, name), mean[i], error[i]) for i, (name, f) in enumerate(functionals.items())]


def _moments(functionals: dict[str, Functional], weighted: Weighted) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation of each functional. Shapes: ``-> (functionals), (functionals)``."""
    z, log_w = weighted
    weights = log_w.softmax(0)
    values = torch.stack([f(z) for f in functionals.values()])
    mean = values @ weights
    return mean, ((values - mean[:, None]).square() @ weights).sqrt()


def _importance(functionals: dict[str, Functional], weighted: Weighted) -> tuple[Tensor, Tensor, Tensor]:
    """Mean, standard deviation and standard error of each functional by self-normalised importance sampling."""
    z, log_w = weighted
    weights = log_w.softmax(0)
    mean, sd = _moments(functionals, weighted)
    values = torch.stack([f(z) for f in functionals.values()])
    return mean, sd, ((values - mean[:, None]).square() @ weights.square()).sqrt()


# ------------------------------------------------------------------------------------------------------ quadrature
def grid(target: Target, i: int, n: int) -> Weighted:
    """Midpoints of n cells per axis where the posterior of observation i is not negligible, with log-weights."""
    box = torch.tensor(target.box, dtype=torch.float64)
    for _ in range(3):
        z, width = _midpoints(box, 401 if len(box) == 2 else 20_001)
        inside = z[(log_w := log_joint(target.model, target.x[i : i + 1], z)) > log_w.max() - _SPAN]
        box = torch.stack([inside.amin(0) - width, inside.amax(0) + width], -1).clamp(
            torch.tensor(target.box).double()[:, :1], torch.tensor(target.box).double()[:, 1:]
        )
    z, _ = _midpoints(box, n)
    return z, log_joint(target.model, target.x[i : i + 1], z)


def _midpoints(box: Tensor, n: int) -> tuple[Tensor, Tensor]:
    """Midpoints of a regular grid and the widths of its cells. Shapes: ``(d, 2) -> (n**d, d), (d)``."""
    width = (box[:, 1] - box[:, 0]) / n
    axes = [low + w * (torch.arange(n, dtype=torch.float64) + 0.5) for low, w in zip(box[:, 0], width, strict=True)]
    return torch.cartesian_prod(*axes).reshape(-1, len(box)), width
