"""Simulated cells whose fold changes are known: programmes of genes that move together, and the paper's section 5."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from scipy import sparse

from vaerdict.datasets.genes import section5
from vaerdict_paper.benchmarks.prior.designs import (
    FIRST,
    OTHER,
    OTHER_KINDS,
    SAME_KINDS,
    SAMPLES,
    SECOND,
    WRONG_KINDS,
    Case,
    Cells,
)

MODULES, SECTION5 = "simulated modules", "simulated, section 5"
DONORS = {"simulated modules, 4 v 4 donors": 4, "simulated modules, 8 v 8 donors": 8}
"""Donors a side, which are the replicates."""

OTHERS = {
    MODULES: (OTHER_KINDS, SAME_KINDS, WRONG_KINDS),
    **dict.fromkeys(DONORS, (OTHER_KINDS, WRONG_KINDS)),
    SECTION5: (SAME_KINDS, WRONG_KINDS),
}
"""The cells that are not compared. Types of section 5 are unrelated, so that those not compared are wrong kinds."""

N_GENES, N_MODULES, N_KINDS = 2000, 12, 5
TRUTH_CELLS, OTHER_CELLS, UNLABELLED = 200, 150, 100  # a side, of each other kind, of each kind compared
TRUTH_DONORS, DONOR_CELLS = 12, 60  # a side; cells of each donor that tells the truth
SECTION5_GENES, SECTION5_CELLS = 300, 1800

_IN_MODULE, _OWN = 0.6, 0.05  # shares of genes in a module, and with a change of their own
_ACTIVE = 0.6  # share of the modules in which a kind differs from the average
_CELL_SD, _DONOR_SD = 0.3, 0.15  # of the activity of a module, between cells and between donors


class _Genes(NamedTuple):
    """The genes of a simulation. `module` is -1 for those in none. Shapes: ``(genes,)`` each."""

    log_mean: np.ndarray
    module: np.ndarray
    loading: np.ndarray
    shape: np.ndarray
    donor_variance: np.ndarray

    def response(self, activity: np.ndarray) -> np.ndarray:
        """Logarithms of the factors by activities of modules. Shapes: ``(*, modules) -> (*, genes)``."""
        return np.where(self.module >= 0, activity[..., self.module] * self.loading, 0.0)

    def regrouped(self, rng: np.random.Generator) -> _Genes:
        """The same genes in other modules."""
        order = rng.permutation(N_GENES)
        return self._replace(module=self.module[order], loading=self.loading[order])


def _genes(rng: np.random.Generator) -> _Genes:
    module = np.where(rng.random(N_GENES) < _IN_MODULE, rng.integers(0, N_MODULES, N_GENES), -1)
    log_mean = rng.normal(0.0, 1.6, N_GENES)
    shape = np.exp(-rng.normal(np.log(0.3), 0.6, N_GENES))
    loading, variance = rng.normal(0.7, 0.35, N_GENES), np.exp(rng.normal(np.log(0.04), 0.9, N_GENES))
    return _Genes(log_mean - np.log(np.exp(log_mean).sum()), module, loading, shape, variance)


def _activity(n: int, rng: np.random.Generator) -> np.ndarray:
    """Activities of modules in n kinds. Shapes: ``-> (n, modules)``."""
    return rng.normal(0, 1, (n, N_MODULES)) * (rng.random((n, N_MODULES)) < _ACTIVE)


def _drawn(genes: _Genes, log_factor: np.ndarray, rng: np.random.Generator) -> Any:
    """Negative binomial cells of different depths, whose activities vary. Shapes: ``(cells, genes) -> same``."""
    n = len(log_factor)
    activity = rng.normal(0, _CELL_SD, (n, N_MODULES))
    rate = np.exp(genes.log_mean + log_factor + genes.response(activity))
    rate *= rng.gamma(genes.shape, 1 / genes.shape, (n, N_GENES))
    depth = 2500 * np.exp(rng.normal(0, 0.4, (n, 1)))
    return sparse.csr_matrix(rng.poisson(depth * rate), dtype=np.float32)


class _World(NamedTuple):
    """Genes, and the factors of both kinds compared. Shapes: ``compared (2, genes)``."""

    genes: _Genes
    compared: np.ndarray

    @classmethod
    def of(cls, rng: np.random.Generator) -> _World:
        """Two kinds that differ in the activity of modules, and in genes that go their own way."""
        genes = _genes(rng)
        own = rng.normal(0, 1, N_GENES) * (rng.random(N_GENES) < _OWN)
        return cls(genes, genes.response(_activity(2, rng)) + np.stack([own, np.zeros(N_GENES)]))

    @property
    def lfc(self) -> np.ndarray:
        """The true fold changes of mean expression: what varies between cells is the same in both kinds."""
        return (self.compared[0] - self.compared[1]) / math.log(2)

    def sides(self, n: int, rng: np.random.Generator) -> Any:
        """n cells of the first kind, and n of the second."""
        return _drawn(self.genes, np.repeat(self.compared, n, axis=0), rng)

    def other_cells(self, others: str, rng: np.random.Generator) -> Any:
        """Cells that are not compared; in wrong kinds genes fall into other modules."""
        genes = self.genes.regrouped(rng) if others == WRONG_KINDS else self.genes
        factor = np.repeat(genes.response(_activity(N_KINDS, rng)), OTHER_CELLS, axis=0)
        parts = [_drawn(genes, factor, rng)]
        if others == SAME_KINDS:
            parts.append(self.sides(UNLABELLED, rng))
        return sparse.vstack(parts, format="csr")


def modules(others: str, n: int, rng: np.random.Generator) -> Case:
    """Two kinds of cells, n of each, that differ in the activity of modules of genes; 5 % of genes go their own way."""
    world = _World.of(rng)
    compared, truth = world.sides(n, rng), Cells(world.sides(TRUTH_CELLS, rng), _both(TRUTH_CELLS))
    other = world.other_cells(others, rng)
    side = np.repeat([FIRST, SECOND, OTHER], [n, n, other.shape[0]])
    return Case(Cells(sparse.vstack([compared, other], format="csr"), side), truth, world.lfc)


def donors(k: int, others: str, n: int, rng: np.random.Generator) -> Case:
    """k donors a side, n cells of each, whose modules differ between the sides and vary between donors."""
    world = _World.of(rng)
    counts, unit = _of_donors(world, k, n, rng)
    more, more_unit = _of_donors(world, TRUTH_DONORS, DONOR_CELLS, rng)
    truth = Cells(more, _both(TRUTH_DONORS * DONOR_CELLS), more_unit, SAMPLES)
    other = world.other_cells(others, rng)
    unit = np.concatenate([unit, rng.choice(unit, other.shape[0])])
    side = np.concatenate([_both(k * n), np.full(other.shape[0], OTHER)])
    return Case(Cells(sparse.vstack([counts, other], format="csr"), side, unit, SAMPLES), truth, world.lfc)


def _of_donors(world: _World, k: int, n: int, rng: np.random.Generator) -> tuple[Any, np.ndarray]:
    """n cells of each of k donors of either kind, and the donor of each."""
    genes = world.genes
    between = rng.gamma(1 / genes.donor_variance, genes.donor_variance, (2 * k, N_GENES))
    factor = np.repeat(world.compared, k, axis=0) + np.log(np.maximum(between, 1e-12))
    factor += genes.response(rng.normal(0, _DONOR_SD, (2 * k, N_MODULES)))
    owner = np.repeat(np.arange(2 * k), n)
    return _drawn(genes, factor[owner], rng), np.array([f"donor {i}" for i in owner], dtype=object)


def five_types(others: str, n: int, rng: np.random.Generator) -> Case:
    """Two of the five types of the paper's section 5, n cells of each."""
    data = section5(int(rng.integers(2**30)), n_cells=SECTION5_CELLS, n_genes=SECTION5_GENES)
    label, counts = data.labels.numpy(), sparse.csr_matrix(data.counts.numpy())
    owned = [rng.permutation(np.flatnonzero(label == kind)) for kind in (1, 2)]
    compared, truth, given = (
        np.concatenate([own[start:end] for own in owned])
        for start, end in ((0, n), (n, n + TRUTH_CELLS), (n + TRUTH_CELLS, None))
    )
    other = np.flatnonzero(~np.isin(label, (1, 2)))
    if others == SAME_KINDS:
        other = np.concatenate([other, given])
    side = np.repeat([FIRST, SECOND, OTHER], [n, n, len(other)])
    analysed = Cells(counts[np.concatenate([compared, other])], side)
    return Case(analysed, Cells(counts[truth], _both(TRUTH_CELLS)), data.lfc(1, 2).double().numpy())


def _both(n: int) -> np.ndarray:
    return np.repeat([FIRST, SECOND], n)


SIMULATED: Mapping[str, Callable[[str, int, np.random.Generator], Case]] = {
    MODULES: modules,
    **{name: partial(donors, k) for name, k in DONORS.items()},
    SECTION5: five_types,
}
"""Cases by name, of the cells that are not compared and the number of those compared."""
