r"""A prior with a mean of its own for each group, in place of the model's standard normal.

The posterior of a cell's latent is shrunk towards the prior's mean, which lies between the groups. For one cell that is
right; averaged over all cells of a group it is a bias, and fold changes are too small by about the share 1 / (1 + SNR)
of a latent that the prior decides. With :math:`z \sim N(m_a, I)` in group a nothing is shrunk towards other groups, and
the joint density changes by a factor that is linear in z on the log scale:

.. math:: \log p_a(x, z) = \log p(x, z) + m_a^\top z - \tfrac12 |m_a|^2.

The mean is estimated from the same cells. Its uncertainty moves all latents of a group together and is added to their
joint draws (`GroupMeans`); without it intervals would be too narrow where single cells are weak evidence.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from vaerdict.core import Model, SettingError, prepared
from vaerdict.de.model.cell_weights import MEANS
from vaerdict.distributions import Elliptical, StandardNormal
from vaerdict.noise import KeyedNoise

_AT_A_TIME = 4096  # cells whose covariances are spread out together
_PRIOR_CELLS = 1.0  # how many cells the belief in a mean of zero is worth


@runtime_checkable
class Expressing(Model, Protocol):
    """A model of counts with the expression that a latent implies."""

    def expression(self, z: Tensor, /) -> Tensor:
        """Normalised expression: the genes of a cell sum to one. Shapes: ``(K, *batch, d) -> (K, *batch, genes)``."""
        ...


class _Prepared(NamedTuple):
    """What `GroupedModel` computes from x once: what its model does, and the mean of each cell's prior."""

    x: Any
    mean: Tensor


@dataclass(frozen=True, eq=False)
class GroupedModel:
    """A model whose prior has a mean of its own for each cell, given in d columns behind those of x.

    Shapes: ``x (*batch, p + d)``.
    """

    model: Expressing

    def __post_init__(self) -> None:
        if not isinstance(self.model.prior, StandardNormal):
            raise SettingError(
                f"groups shift a standard normal prior, not a {type(self.model.prior).__name__}; leave the labels out."
            )

    @property
    def prior(self) -> StandardNormal:
        """The prior of a cell in no group."""
        prior = self.model.prior
        assert isinstance(prior, StandardNormal)
        return prior

    def prepare(self, x: Tensor) -> _Prepared:
        """Everything about x that does not move with z."""
        counts, mean = x.tensor_split([x.shape[-1] - self.prior.d], -1)
        return _Prepared(prepared(self.model, counts), mean)

    def log_joint(self, x: Tensor | _Prepared, z: Tensor) -> Tensor:
        """Log p(x, z) by each cell's own prior. Shapes: ``(*batch, p + d), (K, *batch, d) -> (K, *batch)``."""
        cells = self.prepare(x) if isinstance(x, Tensor) else x
        tilt = (z * cells.mean).sum(-1) - 0.5 * cells.mean.square().sum(-1)
        return self.model.log_joint(cells.x, z) + tilt

    def expression(self, z: Tensor) -> Tensor:
        """Normalised expression by the model."""
        return self.model.expression(z)


@dataclass(frozen=True, eq=False)
class GroupMeans:
    r"""The mean of each cell's prior, and how its latent moves with the uncertainty of that mean.

    About its estimate the mean of a group is :math:`N(0, C)`, and a mean that is larger by e moves the latent of a cell
    by :math:`\Sigma_n e`; `root` is :math:`\Sigma_n C^{1/2}`.

    Shapes: ``labels (cells,)``, ``mean (cells, d)``, ``root (cells, d, d)``.
    """

    labels: Tensor
    mean: Tensor
    root: Tensor

    def moves(self, n: int, seed: int) -> Tensor:
        """What n joint draws add to the latents of the cells, the same within a group. Shapes: ``-> (n, cells, d)``."""
        groups, place = self.labels.unique(return_inverse=True)
        eps = KeyedNoise(seed, MEANS, groups).normal(n, groups.shape, self.root.shape[-1], like=self.root)
        return torch.einsum("cij,ncj->nci", self.root, eps[:, place])

    def select(self, cells: Tensor) -> GroupMeans:
        """The means of some cells."""
        return GroupMeans(self.labels[cells], self.mean[cells], self.root[cells])


class Levels(NamedTuple):
    """The estimated mean of every group's prior, and the root of its covariance.

    Shapes: ``mean (groups, d)``, ``root (groups, d, d)``.
    """

    mean: Tensor
    root: Tensor

    def of(self, labels: Tensor, covariance: Tensor) -> GroupMeans:
        r"""For cells with posterior covariances :math:`\Sigma_n`. Shapes: ``labels (n,)``, ``covariance (n, d, d)``."""
        inside, group = labels >= 0, labels.clamp_min(0)
        mean, root = (part.to(covariance)[group] for part in self)
        root = torch.where(inside[:, None, None], covariance @ root, 0)
        return GroupMeans(labels, torch.where(inside[:, None], mean, 0), root)


def levels(q: Elliptical, inflate: float, labels: Tensor) -> Levels:
    r"""The mean of each group's prior from Gaussian posteriors of its cells under the common prior.

    With posterior means :math:`\mu_n` and covariances :math:`\Sigma_n` the evidence of n cells is largest at
    :math:`(I - \bar\Sigma) m = \bar\mu`, and has the curvature :math:`n (I - \bar\Sigma)`; a prior on m worth one cell
    keeps directions without evidence at zero. `inflate` is the factor on the root of q's scale over
    that of the posterior. Cells with a negative label are in no group.

    Shapes: ``q`` over ``(cells, d)``, ``labels (cells,)``.
    """
    d, n_groups = q.loc.shape[-1], max(1, int(labels.max()) + 1)
    n = torch.bincount(labels[labels >= 0], minlength=n_groups).double()
    total = q.loc.new_zeros(n_groups, d, dtype=torch.float64)
    spread = total.new_zeros(n_groups, d, d)
    for block in torch.arange(len(labels), device=labels.device).split(_AT_A_TIME):
        block = block[labels[block] >= 0]
        total.index_add_(0, labels[block], q.loc[block].double())
        spread.index_add_(0, labels[block], q.select(block).root.covariance().double() / inflate**2)
    eye = torch.eye(d, dtype=torch.float64, device=q.loc.device)
    precision = (n + _PRIOR_CELLS)[:, None, None] * eye - spread
    return Levels(torch.linalg.solve(precision, total), torch.linalg.cholesky(torch.linalg.inv(precision)))


def group_means(q: Elliptical, inflate: float, labels: Tensor) -> GroupMeans:
    """The mean of each cell's prior, its group's (`levels`); cells in no group keep a mean of zero.

    Shapes: ``q`` over ``(cells, d)``, ``labels (cells,)``.
    """
    return levels(q, inflate, labels).of(labels, q.root.covariance() / inflate**2)
