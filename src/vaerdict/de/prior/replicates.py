r"""How every replicate moves the fold changes: the influence of cells, of samples, or of pairs.

The fold change of gene g is about :math:`\log_2 m_{ag} - \log_2 m_{bg}`. A cell i of group a with counts
:math:`x_{ig}` and library :math:`N_i` moves it by

.. math:: \frac{x_{ig} - m_{ag} N_i}{T_{ag} \ln 2}, \qquad T_{ag} = \sum_{i \in a} x_{ig},

and any linear function :math:`\sum_g w_g\, \mathrm{LFC}_g` by the weighted sum. The sum of the squares over cells is
the variance of that function between samples of cells from the same population.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from vaerdict.de.analysis import Analysis
from vaerdict.de.contrasts import Contrast, Side
from vaerdict.de.counts_likelihood import LOG2
from vaerdict.noise import seeded

MOST_CELLS = 1000
"""Cells of a side, or of its batch, whose influence is computed at most; of more, these many at random."""


class Influence(NamedTuple):
    """The influence of replicates on linear functions of fold changes, and the degrees of freedom between them.

    Shapes: ``values (replicates, p)``.
    """

    values: Tensor
    df: float


def degrees_of_freedom(analysis: Analysis, contrast: Contrast) -> float:
    """Degrees of freedom between the replicates of a contrast."""
    a, b = contrast.a, contrast.b
    if contrast.paired:
        return len(a.samples) - 1.0
    if a.samples:
        return len(a.samples) + len(b.samples) - 2.0
    return sum(contrast.used) - 2.0 * len(analysis.batches(a, b))


def influence(analysis: Analysis, contrast: Contrast, genes: np.ndarray, weights: Tensor) -> Influence:
    """The influence of every replicate on functions of the fold changes of `genes`. Shapes: ``weights (genes, p)``."""
    df = degrees_of_freedom(analysis, contrast)
    if contrast.paired:
        return Influence(_of_pairs(analysis, contrast, genes, weights), df)
    if contrast.a.samples:
        return Influence(_of_samples(analysis, contrast, genes, weights), df)
    return Influence(_of_cells(analysis, contrast, genes, weights), df)


def _of_cells(analysis: Analysis, contrast: Contrast, genes: np.ndarray, weights: Tensor) -> Tensor:
    """Shapes: ``-> (cells, p)``."""
    sides, columns = (contrast.a, contrast.b), torch.from_numpy(genes)
    batches = analysis.batches(*sides)
    sums = [[analysis.sums(side, batch, None, columns) for side in sides] for batch in batches]
    every = torch.stack([side.library for pair in sums for side in pair]).sum()
    totals = [[side.total + side.library / every for side in pair] for pair in sums]
    information = torch.stack([1 / (1 / a + 1 / b) for a, b in totals])
    parts = []
    for number, batch in enumerate(batches):
        share = information[number] / information.sum(0)
        for sign, side, of_side, total in zip((1, -1), sides, sums[number], totals[number], strict=True):
            moved = sign * (share / total / LOG2).unsqueeze(-1) * weights
            members = analysis.members(side, batch, None)
            parts.append(_deviations(analysis, members, genes, moved, of_side.rate))
    return torch.cat(parts)


def _deviations(analysis: Analysis, members: np.ndarray, genes: np.ndarray, moved: Tensor, rate: Tensor) -> Tensor:
    """Weighted deviations of cells from their side, scaled to the variance of all cells. Shapes: ``-> (cells, p)``."""
    n = len(members)
    if n > MOST_CELLS:
        chosen = torch.randperm(n, generator=seeded(analysis.options.seed))[:MOST_CELLS]
        members = np.sort(members[chosen.numpy()])
    library = torch.from_numpy(analysis.scan.totals[members])
    products = [
        torch.from_numpy(block[:, genes] @ moved.numpy()) for block in analysis.source.blocks(analysis.cells[members])
    ]
    deviations = torch.cat(products) - torch.outer(library, torch.ones(1, dtype=torch.float64)) * (rate @ moved)
    return deviations * math.sqrt(n / len(members) * n / max(n - 1, 1))


def _of_samples(analysis: Analysis, contrast: Contrast, genes: np.ndarray, weights: Tensor) -> Tensor:
    """Samples of a side have equal weights. Shapes: ``-> (samples, p)``."""
    parts = []
    for sign, side in ((1, contrast.a), (-1, contrast.b)):
        rates = torch.stack([_log_rate(analysis, side, sample, genes) for sample in sorted(side.samples)])
        parts.append(sign * _spread(rates) @ weights)
    return torch.cat(parts)


def _of_pairs(analysis: Analysis, contrast: Contrast, genes: np.ndarray, weights: Tensor) -> Tensor:
    """Fold changes within pairs are the replicates. Shapes: ``-> (pairs, p)``."""
    names = sorted(contrast.a.samples)
    a, b = (torch.stack([_log_rate(analysis, side, s, genes) for s in names]) for side in (contrast.a, contrast.b))
    return _spread(a - b) @ weights


def _log_rate(analysis: Analysis, side: Side, sample: str, genes: np.ndarray) -> Tensor:
    """Log2 rate of a sample with a cell more, which is as its side. Shapes: ``-> (genes,)``."""
    columns = torch.from_numpy(genes)
    own, whole = (analysis.sums(side, None, name, columns) for name in (sample, None))
    usual = (whole.total + 0.5) / (whole.library + 0.5)
    cell = whole.library / whole.n_cells
    return ((own.total + usual * cell) / (own.library + cell)).log2()


def _spread(values: Tensor) -> Tensor:
    """Deviations from the mean, as parts of it. Shapes: ``(n, genes) -> (n, genes)``."""
    n = len(values)
    return (values - values.mean(0)) / n * math.sqrt(n / (n - 1))
