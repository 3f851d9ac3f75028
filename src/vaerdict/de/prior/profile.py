r"""Fold changes predicted from clusters of cells that are not compared.

Cells that are not compared fall into clusters c. A gene's features are its log2 proportions in them about its own mean,

.. math:: \varphi_{gc} = \log_2 \frac{S_{gc} + a}{L_c\, r_g + a} - \text{mean over } c,

with counts S, library L, the rate r of the gene in all clusters, and a few counts a that keep rare genes near zero.
Genes that go up and down together between kinds of cells have similar features, so that the fold changes of other genes
tell, by a ridge regression over genes, what that of a gene would be.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from vaerdict.de.analysis import Analysis
from vaerdict.de.components import log_normalised, principal_components
from vaerdict.de.contrasts import Contrast
from vaerdict.de.prior.prediction import BLOCKS, FoldChanges, Prediction
from vaerdict.de.prior.replicates import influence
from vaerdict.noise import seeded
from vaerdict.optional import isolated, require

CLUSTERS = 15
"""Clusters of the other cells at most."""

_CELLS_PER_CLUSTER = 20  # on average, at least
_COMPONENTS = 20
_GENES = 2000  # the most variable ones, by which cells are clustered
_ADDED = 2.0  # counts
_LEAST_VARIATION = 1e-6  # of a direction of features, relative to the largest
_HEAVY = 4.0  # degrees of freedom of residuals over genes
_STEPS = 5
_MISFITS = 2.0 ** torch.arange(-4.0, 2.0).double()
_SCALES = 2.0 ** torch.arange(-7.0, 2.0).double()


def predict_by_profile(
    analysis: Analysis, contrast: Contrast, genes: np.ndarray, changes: FoldChanges, others: Any
) -> Prediction:
    """Predict the fold changes of `genes` from clusters of the other cells, whose counts of them are `others`."""
    return regressed(analysis, contrast, genes, changes, profiles(others, analysis.options.seed))


def profiles(counts: Any, seed: int) -> Tensor:
    """Features of genes by clusters of cells, in their main directions.

    Shapes: ``counts (cells, genes)`` sparse, ``-> (genes, p)``.
    """
    totals = np.asarray(counts.sum(1)).ravel()
    cluster = _clusters(counts, totals, seed)
    n = int(cluster.max()) + 1
    belongs = np.eye(n)[cluster]
    sums, library = torch.from_numpy(np.asarray(counts.T @ belongs)), torch.from_numpy(totals @ belongs)
    rate = sums.sum(1, keepdim=True) / library.sum()
    features = ((sums + _ADDED) / (library * rate + _ADDED)).log2()
    features = features - features.mean(1, keepdim=True)
    values, vectors = torch.linalg.eigh(features.mT @ features)
    return features @ vectors[:, values > _LEAST_VARIATION * values.max()]


def _clusters(counts: Any, totals: np.ndarray, seed: int) -> np.ndarray:
    """The cluster of each cell. Shapes: ``counts (cells, genes)`` sparse, ``-> (cells,)``."""
    _, sd = log_normalised(counts, totals)
    variable = np.sort(np.argsort(-sd, kind="stable")[:_GENES])
    components = principal_components(counts[:, variable], totals, _COMPONENTS, seed=seed)
    n = int(np.clip(len(totals) // _CELLS_PER_CLUSTER, 2, CLUSTERS))
    with isolated(seed):
        means = require("sklearn.cluster", "bio").KMeans(n, n_init=3, random_state=seed)
        return np.unique(means.fit_predict(components), return_inverse=True)[1]


# --------------------------------------------------------------------------------------- a regression over genes
class _Equations(NamedTuple):
    """Normal equations of a weighted regression over genes. Shapes: ``(p, p)``, ``(p,)``."""

    matrix: Tensor
    right: Tensor

    @classmethod
    def of(cls, features: Tensor, weight: Tensor, values: Tensor) -> _Equations:
        weighted = features * weight.unsqueeze(-1)
        return cls(weighted.mT @ features, weighted.mT @ values)

    def __sub__(self, other: _Equations) -> _Equations:
        return _Equations(self.matrix - other.matrix, self.right - other.right)

    def solve(self, scale: float) -> Tensor:
        return torch.linalg.solve(self.penalised(scale), self.right)

    def penalised(self, scale: float) -> Tensor:
        return self.matrix + torch.eye(len(self.right), dtype=self.matrix.dtype) / scale**2


def regressed(
    analysis: Analysis, contrast: Contrast, genes: np.ndarray, changes: FoldChanges, features: Tensor
) -> Prediction:
    """Regress the fold changes on features, for each block on the genes of the others.

    Genes count by their errors and by a common misfit, whose residuals have heavy tails.
    """
    weight, scale = _weights(changes, features)
    block = torch.randint(BLOCKS, (len(features),), generator=seeded(analysis.options.seed))
    every = _Equations.of(features, weight, changes.mode)
    parts = [_Equations.of(features[block == b], weight[block == b], changes.mode[block == b]) for b in range(BLOCKS)]
    coefficients = torch.stack([(every - part).solve(scale) for part in parts])
    operator = torch.linalg.solve(every.penalised(scale), (features * weight.unsqueeze(-1)).mT)
    moved = influence(analysis, contrast, genes, operator.mT)
    return Prediction(features, coefficients, block, moved.values, weight, moved.df)


def _weights(changes: FoldChanges, features: Tensor) -> tuple[Tensor, float]:
    """The weights of genes, and the scale of coefficients, of highest marginal likelihood. Shapes: ``-> (genes,)``."""
    variance, heavy = changes.error.square(), torch.ones_like(changes.mode)
    misfit, scale = 0.5, 0.5
    for _ in range(_STEPS):
        evidence = {
            (float(m), float(s)): _evidence(changes.mode, variance + m**2, heavy, features, float(s))
            for m in _MISFITS
            for s in _SCALES
        }
        misfit, scale = max(evidence, key=lambda pair: evidence[pair])
        total = variance + misfit**2
        weight = heavy / total
        residual = changes.mode - features @ _Equations.of(features, weight, changes.mode).solve(scale)
        heavy = (_HEAVY + 1) / (_HEAVY + residual.square() / total)
    return heavy / (variance + misfit**2), scale


def _evidence(values: Tensor, variance: Tensor, heavy: Tensor, features: Tensor, scale: float) -> float:
    """Log marginal likelihood of values whose coefficients are normal with a common scale."""
    weight = heavy / variance
    equations = _Equations.of(features, weight, values)
    penalised = equations.penalised(scale)
    explained = equations.right @ torch.linalg.solve(penalised, equations.right)
    log_det = torch.linalg.slogdet(penalised).logabsdet + 2 * len(equations.right) * np.log(scale)
    return float(0.5 * (weight.log().sum() - (weight * values.square()).sum() + explained - log_det))
