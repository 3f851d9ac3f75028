"""PEAKVI: whether regions of the genome are accessible."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.nn import functional as F

from vaerdict.distributions import StandardNormal
from vaerdict.models.scvi.base import ScviModel, elliptical, without_draws
from vaerdict.models.scvi.registered import BATCH, CATEGORICAL, CONTINUOUS, Cells, flat

_COVARIATES = {BATCH: "batch_index", CATEGORICAL: "cat_covs", CONTINUOUS: "cont_covs"}


class Peakvi(ScviModel):
    r"""Accessible regions given a cell state.

    .. math:: z \sim N(0, I), \qquad 1\{x_r > 0\} \mid z \sim \mathrm{Bernoulli}\bigl(p_r(z, s)\,d\,f_r\bigr)

    with covariates s and a factor per region, :math:`f_r`. The factor of a cell, d, is the output of a network of x
    and has no prior: as in scvi-tools it is a parameter that the cell itself determines, not a latent.

    Reference: Ashuach et al. (2022), PeakVI: a deep generative model for single-cell chromatin accessibility analysis,
    Cell Reports Methods 2.
    """

    @classmethod
    def reads(cls, module: Any) -> Sequence[str]:
        """Regions, batch and covariates."""
        return ["X", *_COVARIATES]

    def latents(self) -> Mapping[str, Any]:
        """The cell state."""
        return {"z": StandardNormal(self.module.n_latent)}

    def terms(self, cells: Cells) -> Mapping[str, Tensor]:
        """The factors of cells and regions, multiplied."""
        depth = self._infer(cells)["d"]
        factors = self.module.region_factors
        depth = depth.reshape(*cells.counts.shape[:-1], 1) if isinstance(depth, Tensor) else cells.counts.new_ones(1)
        return {"factor": depth if factors is None else depth * factors.sigmoid()}

    def log_likelihood(self, cells: Cells, z: Tensor) -> Tensor:
        """Log p(x | z). Shapes: ``(*batch, regions), (K, *batch, d) -> (K, *batch)``."""
        return accessible_log_prob(cells.counts, self.accessibility(z, cells) * cells.terms["factor"])

    def encode(self, cells: Cells) -> Mapping[str, Any]:
        """The encoder's normal of the cell state."""
        return {"z": elliptical(self._infer(cells)["qz"], cells.counts.shape[:-1])}

    def accessibility(self, z: Tensor, x: Tensor | Cells) -> Tensor:
        """The probability that a region is accessible, without the factors of cell and region.

        It is what ``get_normalized_accessibility`` returns. Shapes: ``(K, *batch, d) -> (K, *batch, regions)``.
        """
        cells, lead = self.cells(x), z.shape[:-1]
        state = self.module.z_encoder.z_transformation(z.reshape(-1, z.shape[-1]))
        out = self.module.generative(z=state, qz_m=None, **self.arguments(cells, lead, _COVARIATES))["px"]
        return out.reshape(*lead, -1)

    def _infer(self, cells: Cells) -> Any:
        lead = cells.counts.shape[:-1]
        arguments = {"cont_covs": None, "cat_covs": None, **self.arguments(cells, lead, _COVARIATES)}
        with without_draws(cells.counts):
            return self.module.inference(x=flat(cells.counts, lead), **arguments)


def accessible_log_prob(counts: Tensor, probability: Tensor) -> Tensor:
    """Log-probability of which regions have counts. Shapes: ``(*batch, regions), (K, *batch, regions) -> (K, *batch)``.

    Logarithms are at least -100, as in scvi-tools.
    """
    is_open = (counts > 0).to(probability).expand_as(probability)
    return -F.binary_cross_entropy(probability, is_open, reduction="none").sum(-1)
