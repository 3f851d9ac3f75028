r"""The most variable genes, in two passes over blocks of cells: scanpy's ``seurat_v3``, without its copy of the counts.

A gene's variance is standardised by what a curve (loess) of variance against mean expects, counts being clipped at
:math:`\sqrt n` expected standard deviations above the mean. Reference: Stuart et al. (2019), Comprehensive integration
of single-cell data, Cell 177(7).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import numpy as np

from vaerdict.optional import isolated, require

_SPAN = 0.3  # of the genes that each point of the curve looks at, as there

Blocks = Callable[[], Iterable[Any]]
"""The counts from the first cell on, some cells at a time. Shapes: ``(c, genes)``, sparse rows, each."""


class GeneSums(NamedTuple):
    """Of every gene the sum of counts and that of their squares. Shapes: ``(genes,)`` each."""

    total: np.ndarray
    squares: np.ndarray

    @classmethod
    def of(cls, block: Any, clip: np.ndarray | None = None) -> GeneSums:
        """Those of some cells, counts above `clip` ``(genes,)`` taken for it. Shapes: ``block (c, genes)``."""
        values = block.data.astype(np.float64)
        values = values if clip is None else np.minimum(values, clip[block.indices])
        return cls(*(np.bincount(block.indices, v, block.shape[1]) for v in (values, values**2)))

    def plus(self, other: GeneSums) -> GeneSums:
        """Those of both."""
        return GeneSums(*(a + b for a, b in zip(self, other, strict=True)))

    def take(self, genes: np.ndarray) -> GeneSums:
        """Those of some genes."""
        return GeneSums(*(part[genes] for part in self))


def most_variable(sums: GeneSums, n: int, blocks: Blocks, n_top: int) -> np.ndarray:
    """The `n_top` genes of largest standardised variance, in order of their columns.

    Shapes: ``sums (genes,)`` over n cells, ``-> (n_top,)``.
    """
    mean = sums.total / n
    variance = (sums.squares / n - mean**2) * (n / (n - 1))
    sd = _expected_sd(mean, variance)
    clip = sd * np.sqrt(n) + mean
    clipped = GeneSums(np.zeros_like(mean), np.zeros_like(mean))
    for block in blocks():
        clipped = clipped.plus(GeneSums.of(block, clip))
    standardised = (n * mean**2 + clipped.squares - 2 * clipped.total * mean) / ((n - 1) * sd**2)
    return np.sort(np.argsort(-standardised)[:n_top])


def _expected_sd(mean: np.ndarray, variance: np.ndarray) -> np.ndarray:
    """The standard deviation that the curve expects of a gene of this mean; one where it does not vary."""
    varies, log_variance = variance > 0, np.zeros_like(mean)
    with isolated(0):
        curve = require("skmisc.loess", "bio").loess(
            np.log10(mean[varies]), np.log10(variance[varies]), span=_SPAN, degree=2
        )
        curve.fit()
    log_variance[varies] = curve.outputs.fitted_values
    return np.sqrt(10**log_variance)
