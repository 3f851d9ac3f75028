"""Does the model fit: zeros and variance of every gene and library of every cell, as observed and as it predicts.

Counts are drawn from the posterior predictive of cells that were seen, some forty times each. A right model covers 90 %
of the observations by its 90 % ranges; with fewer than 75 % a check fails, unless what it misses is small.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

from vaerdict.core import log_normalise
from vaerdict.de.cells import Proposed
from vaerdict.de.weighting import stream_seeds
from vaerdict.noise import seeded

_CELLS, _REPLICAS, _PARTICLES, _SHOWN = 200, 40, 100, 200
_STREAM = 7  # of randomness, apart from those of particles, weights and means
_COVERED = 0.75
_SMALL = {"zeros": 0.02, "variance": 0.15, "library": 0.05}
"""Typical misses that do no harm: in shares of zeros, and in natural logarithms of variances and libraries."""

_WORDS = {
    "zeros": "share of cells without the gene",
    "variance": "logarithm of the variance between cells of the counts of a gene",
    "library": "logarithm of the counts of a cell",
}


class Sampling(Protocol):
    """A model that draws counts."""

    def sample(self, x: Tensor, z: Tensor, *, generator: torch.Generator) -> Tensor:
        """Counts like those of x given z. Shapes: ``-> (K, *batch, genes)``."""
        ...


def predictive(model: Sampling, x: Tensor, posterior: Proposed, n_genes: int, *, seed: int) -> tuple[Tensor, Tensor]:
    """Counts of some cells, and replicas of them. Shapes: ``x (cells, p) -> (c, genes), (replicas, c, genes)``."""
    generator = seeded(stream_seeds(seed, _STREAM, 1)[0])
    cells = torch.randperm(len(x), generator=generator)[:_CELLS].sort().values
    out = []
    for some in cells.split(50):
        z = latents(posterior, some, _REPLICAS, seed=seed)
        out.append(model.sample(x[some], z, generator=generator).float())
    return x[cells][:, :n_genes], torch.cat(out, 1)


def latents(posterior: Proposed, cells: Tensor, n: int, *, seed: int) -> Tensor:
    """Draws of latents of equal weight. Shapes: ``(c,) -> (n, c, d)``."""
    seeds = stream_seeds(seed, _STREAM, posterior.n_cells)
    generators = [seeded(seeds[c]) for c in cells.tolist()]
    z, log_w = posterior.particles(cells, _PARTICLES, generators)
    weight = log_normalise(log_w).exp()
    picked = [torch.multinomial(w, n, replacement=True, generator=g) for w, g in zip(weight.T, generators, strict=True)]
    return z.gather(0, torch.stack(picked, 1).unsqueeze(-1).expand(-1, -1, z.shape[-1]))


def latent_means(posterior: Proposed, *, seed: int) -> Tensor:
    """The posterior mean of every cell's latent. Shapes: ``-> (cells, d)``."""
    seeds = stream_seeds(seed, _STREAM, posterior.n_cells)
    parts = []
    for some in torch.arange(posterior.n_cells).split(128):
        z, log_w = posterior.particles(some, _PARTICLES, [seeded(seeds[c]) for c in some.tolist()])
        parts.append((log_normalise(log_w).exp().unsqueeze(-1) * z).sum(0))
    return torch.cat(parts)


def predictive_checks(observed: Tensor, replicas: Tensor) -> list[dict[str, Any]]:
    """The three checks, as rows of the results file. Shapes: ``(c, genes), (replicas, c, genes)``."""
    mean = observed.mean(0)
    library = observed.sum(-1)
    return [
        _check("zeros", mean, _zeros(observed), _zeros(replicas)),
        _check("variance", mean, _log_variance(observed), _log_variance(replicas)),
        _check("library", library, library.log(), replicas.sum(-1).clamp_min(1).log()),
    ]


def _zeros(counts: Tensor) -> Tensor:
    return (counts == 0).float().mean(-2)


def _log_variance(counts: Tensor) -> Tensor:
    return (counts.var(-2) + 0.1).log()  # one count more or less of a rare gene is not worth a logarithm


def _check(name: str, x: Tensor, observed: Tensor, drawn: Tensor) -> dict[str, Any]:
    """One check. Shapes: ``x (n,)``, ``observed (n,)``, ``drawn (replicas, n)``."""
    low, middle, high = drawn.quantile(torch.tensor([0.05, 0.5, 0.95]), 0)
    inside = ((observed >= low) & (observed <= high)).float().mean().item()
    miss = (observed - middle).abs().median().item()
    order = x.argsort()
    shown = order[torch.linspace(0, len(order) - 1, min(len(order), _SHOWN)).round().long()]
    return {
        "name": name,
        "words": f"{_WORDS[name]}: {inside:.0%} lie in the 90 % range that the model predicts, "
        f"the typical miss is {miss:.2g}",
        "ok": inside >= _COVERED or miss <= _SMALL[name],
        "inside": inside,
        "miss": miss,
        "x": x[shown].tolist(),
        "observed": observed[shown].tolist(),
        "predicted_low": low[shown].tolist(),
        "predicted": middle[shown].tolist(),
        "predicted_high": high[shown].tolist(),
    }
