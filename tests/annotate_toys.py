"""Simulated reference and query for tests of annotation: negative binomial counts of a few types of cells."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

TYPES = ("alpha", "beta", "gamma", "delta")
N_GENES = 200
DISPERSION = 0.2

_MARKED = 30  # genes of each type that are higher in it
_LIBRARY = 1000.0


def markers(kind: str) -> list[str]:
    """The genes that are higher in a type."""
    first = _MARKED * TYPES.index(kind)
    return [f"g{i}" for i in range(first, first + _MARKED)]


def cells(kinds: np.ndarray, *, seed: int, fold: float = 4.0, shift: float = 0.0, prefix: str = "c") -> Any:
    """Counts of cells of the types given, as AnnData with the types in ``obs["cell_type"]``.

    `fold` is the change of a type's marker genes. `shift` is the standard deviation of log changes of all genes that
    are common to these cells: a batch effect. Shapes: ``kinds (n,)``.
    """
    ad, pd = pytest.importorskip("anndata"), pytest.importorskip("pandas")
    rng = np.random.default_rng(seed)
    rate = np.tile(np.exp(np.random.default_rng(0).normal(0, 1, N_GENES)), (len(TYPES), 1))
    for row, kind in enumerate(TYPES):
        rate[row, [int(gene[1:]) for gene in markers(kind)]] *= fold
    rate *= np.exp(shift * rng.normal(size=N_GENES))
    rate *= _LIBRARY / rate.sum(1, keepdims=True)
    mean = rate[[TYPES.index(kind) for kind in kinds]] * np.exp(rng.normal(0, 0.3, (len(kinds), 1)))
    counts = rng.poisson(mean * rng.gamma(1 / DISPERSION, DISPERSION, mean.shape))
    return ad.AnnData(
        counts.astype(np.float32),
        obs=pd.DataFrame({"cell_type": list(kinds)}, index=[f"{prefix}{i}" for i in range(len(kinds))]),
        var=pd.DataFrame(index=[f"g{i}" for i in range(N_GENES)]),
    )


def pair(
    n: int = 300, *, hidden: str | None = "delta", shift: float = 0.0, fold: float = 4.0, seed: int = 2
) -> tuple[Any, Any]:
    """Reference and query of `n` cells each; the reference has none of the type `hidden`.

    The query's ``obs["cell_type"]`` is the truth. `shift` is a batch effect of the query.
    """
    known = [kind for kind in TYPES if kind != hidden]
    rng = np.random.default_rng([seed, 0])
    reference, query = rng.choice(known, n), rng.choice(TYPES if hidden else known, n)
    return (
        cells(reference, seed=2 * seed, fold=fold, prefix="r"),
        cells(query, seed=2 * seed + 1, fold=fold, shift=shift, prefix="q"),
    )
