"""Draws the pictures of khat.md and counts.md and measures what their captions say (`make figures`).

k-hat: a normal posterior and narrower normal proposals, whose tail index is known, 1 - s^2. Shrinkage: the fold
changes of simulated genes, plain and as `vaerdict de` reports them. The pictures and concepts.json are written beside
this file; `make docs` makes the captions.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anndata as ad
import numpy as np
import pandas as pd
import torch
from matplotlib.figure import Figure
from torch.distributions import Normal
from verdicts import save

import vaerdict as vd
from vaerdict.report.figures import GREY, INK, OKABE_ITO, styled

if TYPE_CHECKING:
    from matplotlib.axes import Axes

FOLDER = Path(__file__).parent
SCALES = (0.9, 0.6, 0.3)  # of the proposals; the posterior has scale 1
DRAWS, REPEATS = (30, 100, 300, 1000, 3000, 10000), 400
N_CELLS, N_GENES, SHARE_CHANGED = 60, 2000, 0.2


def side_by_side(height: float) -> tuple[Figure, Any]:
    """A figure with two pairs of axes, outside of pyplot's registry."""
    figure = Figure(figsize=(8.4, height), layout="constrained")
    return figure, figure.subplots(1, 2)


# ------------------------------------------------------------------------------------------------------------ k-hat
def khat_picture() -> tuple[Figure, list[dict[str, float]]]:
    """Proposals beside the posterior, and the error of P(|z| > 1) by the number of draws."""
    figure, (left, right) = side_by_side(3.2)
    z = torch.linspace(-3.5, 3.5, 400).double()
    left.fill_between(z, Normal(0.0, 1.0).log_prob(z).exp(), color=GREY, alpha=0.35, label="posterior")
    truth, rows = math.erfc(1 / math.sqrt(2)), []
    for scale, colour in zip(SCALES, OKABE_ITO, strict=False):
        left.plot(z, Normal(0.0, scale).log_prob(z).exp(), color=colour, label=f"s = {scale:g}")
        error = [answer_error(scale, n, truth) for n in DRAWS]
        khat = 1 - scale**2
        right.loglog(DRAWS, error, color=colour, marker="o", markersize=4, label=f"k = {khat:.2f}")
        rows.append({"scale": scale, "k": khat, "khat": estimated_khat(scale), "error_last": error[-1]})
    exact = [math.sqrt(truth * (1 - truth) / n) for n in DRAWS]
    right.loglog(DRAWS, exact, color=INK, linestyle="--", linewidth=1, label="posterior itself")
    left.set(xlabel="z", ylabel="density", title="proposals narrower than the posterior")
    right.set(xlabel="draws", ylabel="error of P(|z| > 1)", title="root mean square error")
    right.set_xticks(DRAWS, [f"{n:,}" for n in DRAWS], rotation=30)
    right.set_yticks([0.01, 0.1], ["0.01", "0.1"])
    right.minorticks_off()
    for axis in (left, right):
        axis.legend(frameon=False, fontsize=8)
    return figure, rows


def log_weights(scale: float, n: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Draws of a proposal and their log-weights. Shapes: ``(n, REPEATS)`` both."""
    z = scale * torch.randn(n, REPEATS, generator=vd.seeded(seed), dtype=torch.float64)
    return z, Normal(0.0, 1.0).log_prob(z) - Normal(0.0, scale).log_prob(z)


def answer_error(scale: float, n: int, truth: float) -> float:
    """Root mean square error of the weighted answer over repetitions."""
    z, log_w = log_weights(scale, n, n)
    value = (torch.softmax(log_w, 0) * (z.abs() > 1)).sum(0)
    return (value - truth).square().mean().sqrt().item()


def estimated_khat(scale: float) -> float:
    """The mean of k-hat over repetitions, at the largest number of draws."""
    return vd.diagnostics.psis(log_weights(scale, DRAWS[-1], 1)[1])[1].mean().item()


# -------------------------------------------------------------------------------------------------------- shrinkage
def shrinkage_picture() -> tuple[Figure, dict[str, Any]]:
    """Plain and reported fold changes of simulated genes against the true ones."""
    adata, truth = simulated()
    table = vd.differential_expression(adata, "group", "A", "B", delta=0.5).table.set_index("gene")
    truth, tested = truth[table.index], adata[:, table.index]
    in_a = (adata.obs["group"] == "A").to_numpy()
    counts = np.asarray(tested.X)
    sums = [counts[mask].sum(0) + 0.5 for mask in (in_a, ~in_a)]
    plain = np.log2(sums[0] / adata.X[in_a].sum()) - np.log2(sums[1] / adata.X[~in_a].sum())
    figure, axes = side_by_side(3.8)
    abundance = np.log10(counts.sum(0) + 1)
    points: Any = None
    facts: dict[str, Any] = {"n_genes": len(table), "n_cells": N_CELLS}
    for axis, name, value in zip(axes, ("plain", "reported"), (plain, table["lfc_mean"].to_numpy()), strict=True):
        points = compared(axis, truth.to_numpy(), value, abundance, name)
        facts[name] = {"rmse": float(np.sqrt(np.mean((value - truth) ** 2)))}
    figure.colorbar(points, ax=axes, shrink=0.75, ticks=[1, 2, 3], format="%d", label="log10 counts", extend="max")
    low, high = table["lfc_low"], table["lfc_high"]
    facts["coverage"] = float(((low <= truth) & (truth <= high)).mean())
    facts["called"], facts["false"] = int(table["is_de"].sum()), int((table["is_de"] & (truth.abs() < 0.5)).sum())
    return figure, facts


def simulated() -> tuple[ad.AnnData, pd.Series]:
    """Negative binomial counts of two groups, a fifth of the genes changed, and the true log2 fold changes."""
    rng = np.random.default_rng(0)
    rate = np.exp(rng.normal(-1.5, 1.5, N_GENES))
    lfc = np.where(rng.random(N_GENES) < SHARE_CHANGED, rng.normal(0, 1.5, N_GENES), 0.0)
    in_a = np.arange(2 * N_CELLS) < N_CELLS
    depth = np.exp(rng.normal(0, 0.3, (2 * N_CELLS, 1)))
    mean = depth * rate * 2 ** np.where(in_a[:, None], lfc, 0.0)
    names = [f"g{i}" for i in range(N_GENES)]
    adata = ad.AnnData(
        rng.poisson(mean * rng.gamma(3.0, 1 / 3.0, mean.shape)).astype(np.float32),
        obs=pd.DataFrame({"group": np.where(in_a, "A", "B")}, index=[f"c{i}" for i in range(2 * N_CELLS)]),
        var=pd.DataFrame(index=names),
    )
    return adata, pd.Series(lfc, index=names)


def compared(axis: Axes, truth: np.ndarray, value: np.ndarray, abundance: np.ndarray, name: str) -> Any:
    """A point per gene, darker if it has fewer counts."""
    axis.plot([-5, 5], [-5, 5], color=GREY, linewidth=1, zorder=0)
    axis.set(xlim=(-5, 5), ylim=(-5, 5), xlabel="true log2 fold change", ylabel="estimate", title=name, aspect="equal")
    return axis.scatter(truth, value, c=abundance, cmap="viridis", s=6, vmax=3)


if __name__ == "__main__":
    with styled():
        khat, tails = khat_picture()
        shrinkage, genes = shrinkage_picture()
        for name, figure in {"khat": khat, "shrinkage": shrinkage}.items():
            save(figure, FOLDER / f"{name}.png")
    facts = {"khat": tails, "shrinkage": genes}
    (FOLDER / "concepts.json").write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")
