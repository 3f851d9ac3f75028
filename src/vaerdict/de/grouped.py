r"""A prior that knows the groups: the model's standard normal about a mean of each group's own.

Given a single cell, the latent is drawn towards the prior's mean, which lies between the groups. In one cell that is
sound; averaged over all cells of a group it is a bias, and fold changes come out too small by about the share
1 / (1 + SNR) of a cell's latent that the prior decides. With :math:`z \sim N(m_a, I)` in group a nothing is drawn
towards the other groups, and the joint density changes by a factor that is linear in z on the log scale:

.. math:: \log p_a(x, z) = \log p(x, z) + m_a^\top z - \tfrac12 |m_a|^2.

The mean is an estimate from the same cells. What is not known of it moves all latents of a group together, and is
added to their joint draws (`GroupMeans`); without it intervals would be too narrow where single cells say little.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from vaerdict.core import Model, SettingError, prepared
from vaerdict.de.weighting import stream_seeds
from vaerdict.distributions import Elliptical, StandardNormal
from vaerdict.noise import seeded

_MEANS = 3  # the stream of randomness of the groups' means
_PRIOR_CELLS = 1.0  # how many cells the belief in a mean of zero is worth


@runtime_checkable
class Expressing(Model, Protocol):
    """A model of counts that says what a latent means for the genes."""

    def expression(self, z: Tensor, /) -> Tensor:
        """Normalised expression: the genes of a cell sum to one. Shapes: ``(K, *batch, d) -> (K, *batch, genes)``."""
        ...


class _Known(NamedTuple):
    """What `GroupedModel` needs of x: what the model does, and the mean of each cell's prior."""

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

    def prepare(self, x: Tensor) -> _Known:
        """Everything about x that does not move with z."""
        counts, mean = x.tensor_split([x.shape[-1] - self.prior.d], -1)
        return _Known(prepared(self.model, counts), mean)

    def log_joint(self, x: Tensor | _Known, z: Tensor) -> Tensor:
        """Log p(x, z) by each cell's own prior. Shapes: ``(*batch, p + d), (K, *batch, d) -> (K, *batch)``."""
        known = self.prepare(x) if isinstance(x, Tensor) else x
        tilt = (z * known.mean).sum(-1) - 0.5 * known.mean.square().sum(-1)
        return self.model.log_joint(known.x, z) + tilt

    def expression(self, z: Tensor) -> Tensor:
        """The model's."""
        return self.model.expression(z)


@dataclass(frozen=True, eq=False)
class GroupMeans:
    r"""The mean of each cell's prior, and how its latent moves with what is not known of that mean.

    About its estimate the mean of a group is :math:`N(0, C)`, and a mean that is larger by e moves the latent of a cell
    by :math:`\Sigma_n e`; `root` is :math:`\Sigma_n C^{1/2}`.

    Shapes: ``labels (cells,)``, ``mean (cells, d)``, ``root (cells, d, d)``.
    """

    labels: Tensor
    mean: Tensor
    root: Tensor

    def moves(self, cells: Tensor, n: int, seed: int) -> Tensor:
        """What n joint draws add to the latents of some cells, alike in a group. Shapes: ``(c,) -> (n, c, d)``."""
        label, root = self.labels[cells], self.root[cells]
        out = root.new_zeros(n, *root.shape[:-1])
        for own in label[label >= 0].unique().tolist():
            generator = seeded(stream_seeds(seed, _MEANS, own + 1)[-1])
            eps = torch.randn(n, root.shape[-1], generator=generator, dtype=torch.float64).to(root)
            out[:, label == own] = torch.einsum("cij,nj->nci", root[label == own], eps)
        return out


def group_means(q: Elliptical, inflate: float, labels: Tensor) -> GroupMeans:
    r"""The mean of each cell's prior, its group's, from Gaussian posteriors under the common prior.

    With posterior means :math:`\mu_n` and covariances :math:`\Sigma_n` the evidence of n cells is largest at
    :math:`(I - \bar\Sigma) m = \bar\mu`, and has the curvature :math:`n (I - \bar\Sigma)`; a prior on m worth one cell
    keeps directions about which the cells know nothing at zero. `inflate` is the factor on the root of q's scale over
    that of the posterior. Cells with a negative label are in no group and keep a mean of zero.

    Shapes: ``q`` over ``(cells, d)``, ``labels (cells,)``.
    """
    covariance = q.root.covariance().double() / inflate**2
    mean, root = torch.zeros_like(q.loc), torch.zeros_like(covariance)
    eye = torch.eye(q.loc.shape[-1], dtype=torch.float64, device=q.loc.device)
    for label in labels[labels >= 0].unique():
        cells = labels == label
        known = int(cells.sum()) * (eye - covariance[cells].mean(0)) + _PRIOR_CELLS * eye
        mean[cells] = torch.linalg.solve(known, q.loc[cells].double().sum(0)).to(mean)
        root[cells] = covariance[cells] @ torch.linalg.cholesky(torch.linalg.inv(known))
    return GroupMeans(labels, mean, root.to(q.loc))
