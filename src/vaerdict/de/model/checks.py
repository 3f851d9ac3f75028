"""Posterior predictive checks: zeros and variance of every gene and library of every cell, observed and predicted.

Counts are drawn forty times from the posterior predictive of some cells. The 90 % ranges of a right model cover 90 % of
the observations; a check fails below 75 %, unless the typical miss is small.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

from vaerdict.core import log_normalise
from vaerdict.de.model.cell_weights import CHECKS
from vaerdict.de.model.posterior import CellPosterior
from vaerdict.noise import KeyedNoise, seeded
from vaerdict.training.data import Rows

_CELLS, _REPLICAS, _PARTICLES, _SHOWN = 200, 40, 100, 200
_AT_A_TIME = 10  # cells whose replicas are drawn together
_COVERED = 0.75
_SMALL = {"zeros": 0.02, "variance": 0.15, "library": 0.05}
"""Typical misses that are tolerated: in shares of zeros, and in natural logarithms of variances and libraries."""

_QUANTITIES = {
    "zeros": "share of cells without the gene",
    "variance": "logarithm of the variance of a gene's counts between cells",
    "library": "logarithm of the counts of a cell",
}


class Sampling(Protocol):
    """A model that draws counts."""

    def sample(self, x: Tensor, z: Tensor, *, generator: torch.Generator) -> Tensor:
        """Counts like those of x given z. Shapes: ``-> (K, *batch, genes)``."""
        ...


@torch.no_grad()
def predictive(
    model: Sampling, rows: Rows, posterior: CellPosterior, n_genes: int, *, seed: int
) -> tuple[Tensor, Tensor]:
    """Counts of some cells, and replicas of them. Shapes: ``rows (cells, p) -> (c, genes), (replicas, c, genes)``."""
    generator = KeyedNoise(seed, CHECKS, torch.zeros(1)).generator
    cells = torch.randperm(rows.n, generator=generator)[:_CELLS].sort().values
    observed, drawn = [], []
    for block in cells.split(_AT_A_TIME):
        x = rows.take(block)
        z = latents(posterior.select(block), block, _REPLICAS, seed=seed)
        observed.append(x[:, :n_genes].cpu())
        drawn.append(model.sample(x, z, generator=on(x.device, generator)).float().cpu())
    return torch.cat(observed), torch.cat(drawn, 1)


def on(device: torch.device, generator: torch.Generator) -> torch.Generator:
    """The generator, or one of the device that it seeds."""
    if generator.device.type == device.type:
        return generator
    return seeded(int(torch.randint(2**62, (1,), generator=generator)), device)


def latents(posterior: CellPosterior, cells: Tensor, n: int, *, seed: int) -> Tensor:
    """Draws of the latents of a posterior's cells, of equal weight. Shapes: ``(c,) -> (n, c, d)``."""
    source = KeyedNoise(seed, CHECKS, cells.to(posterior.device))
    z, log_w = posterior.particles(_PARTICLES, source)
    uniform = source.uniform(n, cells.shape, 1, like=log_w.double()).squeeze(-1)
    cumulative = log_normalise(log_w.double()).exp().cumsum(0)
    picked = torch.searchsorted(cumulative.mT.contiguous(), uniform.mT.contiguous()).mT.clamp_max(_PARTICLES - 1)
    return z.gather(0, picked.unsqueeze(-1).expand(-1, -1, z.shape[-1]))


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
    return (counts == 0).sum(-2) / counts.shape[-2]


def _log_variance(counts: Tensor) -> Tensor:
    variance = counts.var(-2) if counts.dim() == 2 else torch.stack([one.var(-2) for one in counts])
    return (variance + 0.1).log()  # one count more or less of a rare gene is not worth a logarithm


def _check(name: str, x: Tensor, observed: Tensor, drawn: Tensor) -> dict[str, Any]:
    """One check. Shapes: ``x (n,)``, ``observed (n,)``, ``drawn (replicas, n)``."""
    low, middle, high = drawn.quantile(torch.tensor([0.05, 0.5, 0.95]), 0)
    inside = ((observed >= low) & (observed <= high)).float().mean().item()
    miss = (observed - middle).abs().median().item()
    order = x.argsort()
    shown = order[torch.linspace(0, len(order) - 1, min(len(order), _SHOWN)).round().long()]
    return {
        "name": name,
        "message": f"{_QUANTITIES[name]}: {inside:.0%} lie in the 90 % range that the model predicts, "
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
