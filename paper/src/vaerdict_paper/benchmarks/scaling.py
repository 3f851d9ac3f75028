"""Cost as a function of size: CPU seconds of one thread over a factor of sixteen, and the fitted exponent.

The exponent is the least-squares slope of log seconds on log size. Dispatch dominates at small sizes: an exponent below
one shows that arithmetic does not dominate yet. The standard error shows how well a power law fits. The cases called
differential expression time the importance-weighted averages of the model stage of `vaerdict de`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from vaerdict import diagnostics
from vaerdict.core import Progress, silent
from vaerdict.de.model import Proposed
from vaerdict.models.counts import CountModel
from vaerdict.noise import seeded
from vaerdict.proposals import OfCounts, Trainable
from vaerdict.refinement import refine
from vaerdict.training import IWAE, Member, Settings, train
from vaerdict_paper.benchmarks.counts import sparse_counts
from vaerdict_paper.benchmarks.timing import median_seconds, one_thread
from vaerdict_paper.experiments.genes_contrasts import compare_groups

FACTORS = (1, 2, 4, 8, 16)
REPEATS = 3

_D, _HIDDEN = 10, (128,)
_STEPS = 2  # Newton steps of every refinement, at all sizes

Work = Callable[[], Any]


@dataclass(frozen=True)
class Case:
    """A task to be timed at several sizes: `make` prepares it for one size and returns what is timed."""

    what: str
    over: str
    base: int
    make: Callable[[int], Work]


class PowerLaw(NamedTuple):
    """Seconds are proportional to size to the power `exponent`, with standard error `se`."""

    exponent: float
    se: float


def run(*, quick: bool = False, progress: Progress = silent) -> Iterator[dict[str, Any]]:
    """One row per task and dimension: sizes, median CPU seconds at each, the exponent with its standard error."""
    cases, factors, repeats = _cases(quick), FACTORS[:3] if quick else FACTORS, 1 if quick else REPEATS
    for done, case in enumerate(cases, 1):
        sizes = [factor * case.base for factor in factors]
        with one_thread():
            seconds = [median_seconds(case.make(size), repeats, cpu=True) for size in sizes]
        fit = power_law(sizes, seconds)
        yield {
            "case": case.what,
            "over": case.over,
            "low": sizes[0],
            "high": sizes[-1],
            "seconds_low": seconds[0],
            "seconds_high": seconds[-1],
            "exponent": fit.exponent,
            "exponent_se": fit.se,
            "sizes": sizes,
            "seconds": seconds,
            "repeats": repeats,
        }
        progress(done, len(cases), "cases")


def power_law(sizes: Sequence[float], seconds: Sequence[float]) -> PowerLaw:
    r"""Least squares of :math:`\log t = a + b \log n`: b and its standard error (NaN for two sizes)."""
    x = torch.tensor(sizes, dtype=torch.float64).log()
    y = torch.tensor(seconds, dtype=torch.float64).log()
    x, y = x - x.mean(), y - y.mean()
    slope = (x @ y / (x @ x)).item()
    free = len(x) - 2
    residual = (y - slope * x).square().sum().item()
    return PowerLaw(slope, math.sqrt(residual / free / (x @ x).item()) if free > 0 else math.nan)


def _cases(quick: bool) -> list[Case]:
    """All tasks; sizes that are not varied are fixed here."""
    cut = 8 if quick else 1
    n, genes = 500 // cut, 200 // cut
    return [
        Case("training epoch, IWELBO", "cells", 4 * n, lambda m: _epoch(m, genes, 5)),
        Case("training epoch, IWELBO", "genes", genes, lambda m: _epoch(n, m, 5)),
        Case("training epoch, IWELBO", "particles", 5, lambda m: _epoch(n, genes, m)),
        Case("refinement to the mode", "cells", n // 2, lambda m: _refinement(m, genes)),
        Case("refinement to the mode", "genes", genes, lambda m: _refinement(n // 4, m)),
        Case("differential expression", "cells", n // 2, lambda m: _averaging(m, genes, 50)),
        Case("differential expression", "genes", genes, lambda m: _averaging(n // 4, m, 50)),
        Case("differential expression", "draws", 25, lambda m: _averaging(n // 4, genes, m)),
        Case("Pareto smoothing", "observations", n, lambda m: _smoothing(1000 // cut, m)),
        Case("Pareto smoothing", "draws", 500 // cut, lambda m: _smoothing(m, n)),
    ]


def _epoch(n: int, genes: int, k: int) -> Work:
    x, model, q = _problem(n, genes)
    settings = Settings(n_particles=k, epochs=1, patience=None, check_every=1, joint=True, score_particles=1)
    return partial(train, [Member(model, q, IWAE, 0)], x, x[:1], settings)


def _refinement(n: int, genes: int) -> Work:
    x, model, q = _problem(n, genes)
    return partial(refine, model, x, q, n_steps=_STEPS, tolerance=1e-12)


def _averaging(n: int, genes: int, n_draws: int) -> Work:
    """Weighting and averaging only; draws of the encoder cost as much as those of any proposal."""
    x, model, q = _problem(n, genes)
    a, b = torch.arange(n).tensor_split([n // 2])
    return partial(compare_groups, Proposed(model, x, q), a, b, n_draws=n_draws)


def _smoothing(k: int, n: int) -> Work:
    return partial(diagnostics.psis, torch.randn(k, n, generator=seeded(0), dtype=torch.float64))


def _problem(n: int, genes: int) -> tuple[Tensor, CountModel, Trainable]:
    x = sparse_counts(n, genes)
    model = CountModel.start(x, _D, generator=seeded(0), hidden=_HIDDEN)
    return x, model, OfCounts().make(x, _D, hidden=_HIDDEN, generator=seeded(1))
