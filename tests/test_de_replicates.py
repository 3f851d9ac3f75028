"""The influence of cells, samples and pairs on fold changes, by finite differences."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from test_de_prior import modular, read
from vaerdict.de.prior import replicates
from vaerdict.noise import seeded


def functions(n: int) -> Tensor:
    return torch.randn(n, 3, generator=seeded(5), dtype=torch.float64)


def change(counts: np.ndarray, library: np.ndarray, first: np.ndarray, weight: np.ndarray) -> np.ndarray:
    rates = [(weight[side] @ counts[side]) / (weight[side] @ library[side]) for side in (first, ~first)]
    return np.log2(rates[0]) - np.log2(rates[1])


@pytest.mark.parametrize("batches", [False, True])
def test_the_influence_of_cells_is_a_derivative(batches):
    """Of every function of fold changes, by a cell that counts a little more; batches by their information."""
    adata = modular(n=40, genes=60)
    adata.X[:80] *= 20  # beside which a count shared by all genes is nothing
    made = read(adata, **({"batch": "batch"} if batches else {}))
    weights, genes = functions(60), np.arange(60)
    found = replicates.influence(made, made.contrasts[0], genes, weights)
    counts, library, first = adata.X[:80].astype(float), adata.X[:80].sum(1), np.arange(80) < 40
    batch = adata.obs["batch"].to_numpy()[:80] if batches else np.ones(80)
    sums = {b: [counts[(batch == b) & side].sum(0) for side in (first, ~first)] for b in np.unique(batch)}
    information = {b: 1 / (1 / x + 1 / y) for b, (x, y) in sums.items()}
    rows, factor = [], []
    for b in np.unique(batch):
        share = information[b] / sum(information.values())
        for i in [*np.flatnonzero((batch == b) & first), *np.flatnonzero((batch == b) & ~first)]:
            inside, more = batch == b, np.where(np.arange(80) == i, 1 + 1e-4, 1.0)
            ends = (change(counts[inside], library[inside], first[inside], w[inside]) for w in (more, np.ones(80)))
            rows.append(share * np.subtract(*ends) / 1e-4)
            n = (inside & (first == first[i])).sum()
            factor.append(math.sqrt(n / (n - 1)))
    expected = np.array(factor)[:, None] * (np.array(rows) @ weights.numpy())
    assert found.df == 80 - 2 * len(sums)
    assert np.abs(found.values.numpy() - expected).max() < 0.005 * np.abs(expected).max()


@pytest.mark.parametrize("paired", [False, True])
def test_the_influence_of_samples_is_what_leaving_one_out_changes(paired):
    """Samples of a side count alike, large or small, and those of a pair together."""
    adata = modular(n=70, genes=60)
    adata = adata[[*range(4), *range(7, 140)]].copy()  # three cells fewer of some samples
    key = "patient" if paired else "sample"
    made = read(adata, sample=key)
    found = replicates.influence(made, made.contrasts[0], np.arange(60), functions(60)).values.numpy()
    group, sample = adata.obs["group"].to_numpy(), adata.obs[key].to_numpy()
    rates: dict[str, np.ndarray] = {}
    for side in ("A", "B"):
        x = adata.X[group == side].astype(float)
        cell, usual = x.sum() / len(x), (x.sum(0) + 0.5) / (x.sum() + 0.5)
        names = sorted(set(sample[group == side]))
        own = [x[sample[group == side] == name] for name in names]
        rates[side] = np.array([np.log2((o.sum(0) + usual * cell) / (o.sum() + cell)) for o in own])
    sides = [rates["A"] - rates["B"]] if paired else [rates["A"], -rates["B"]]
    expected = []
    for values in sides:
        n = len(values)
        without = np.array([np.delete(values, i, 0).mean(0) for i in range(n)])
        expected += list((values.mean(0) - without) * (n - 1) / n * math.sqrt(n / (n - 1)))
    assert found == pytest.approx(np.array(expected) @ functions(60).numpy(), abs=1e-8)
