"""SCVI, LinearSCVI and POISSONVI, which share one module."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from vaerdict.core import DataError, Latent
from vaerdict.distributions import StandardNormal
from vaerdict.likelihoods import CountParameters
from vaerdict.models.scvi.base import elliptical, without_draws
from vaerdict.models.scvi.counts import CountsModel, Unused
from vaerdict.models.scvi.registered import (
    BATCH,
    CATEGORICAL,
    CONTINUOUS,
    LABELS,
    SIZE_FACTOR,
    Cells,
    Registered,
    flat,
)

_ENCODED = {BATCH: "batch_index", CATEGORICAL: "cat_covs", CONTINUOUS: "cont_covs"}
_DECODED = {**_ENCODED, LABELS: "y", SIZE_FACTOR: "size_factor"}


class Scvi(CountsModel):
    r"""Counts of genes, or fragments in regions, given a cell state and a library size.

    .. math:: z \sim N(0, I), \qquad x_g \mid z \sim \mathrm{ZINB}\bigl(\ell\,\rho_g(z, s), r_g, \pi_g(z, s)\bigr)

    with covariates s. The library size :math:`\ell` is observed, the total count or a size factor, and the latent is
    the tensor ``z``; or it is a second latent with a log-normal prior per batch, and latents are the named tuple
    ``(z, l)`` with the logarithm l.

    Reference: Lopez et al. (2018), Deep generative modeling for single-cell transcriptomics, Nature Methods 15.
    """

    def __init__(self, module: Any, source: Registered) -> None:
        super().__init__(module, source)
        if not self.likelihood.inflated:
            module.decoder.px_dropout_decoder = Unused()  # a third of the decoder's work

    @classmethod
    def reads(cls, module: Any) -> Sequence[str]:
        """Counts, batch and covariates; labels and size factors if they enter the likelihood."""
        labels = [LABELS] if module.dispersion == "gene-label" else []
        size_factors = [SIZE_FACTOR] if module.use_size_factor_key else []
        return ["X", BATCH, *labels, CATEGORICAL, CONTINUOUS, *size_factors]

    def latents(self) -> Mapping[str, Any]:
        """The cell state, and the log library size if it is not observed."""
        library = {"l": self.library_prior} if self.latent_library else {}
        return {"z": StandardNormal(self.module.n_latent), **library}

    def terms(self, cells: Cells) -> Mapping[str, Tensor]:
        """The log library size, the dispersion and the constant part of the likelihood."""
        log_library = cells.counts.sum(-1, keepdim=True).log()
        if not self.latent_library and SIZE_FACTOR not in self.columns and not bool(log_library.isfinite().all()):
            empty = int((~log_library.isfinite()).sum())
            raise DataError(f"{empty} of {log_library.numel()} cells have no counts; remove them first.")
        terms = {"log_library": log_library}
        if self.module.dispersion == "gene-cell":
            return terms
        # the dispersion is per gene, perhaps per batch or label too, and is the same at any z
        at = self._counts_at(
            cells, cells.counts.new_zeros(1, *log_library.shape[:-1], self.module.n_latent), log_library
        )
        return {**terms, **self.count_terms(cells.counts, at)}

    def log_likelihood(self, cells: Cells, z: Latent) -> Tensor:
        """Log p(x | z), or log p(x | z, l). Shapes: ``(*batch, p), (K, *batch, d) -> (K, *batch)``."""
        return self.count_log_prob(cells, self.conditional(cells, z))

    def encode(self, cells: Cells) -> Mapping[str, Any]:
        """The encoder's normals of the cell state, and of the log library size if it is a latent."""
        lead = cells.counts.shape[:-1]
        with without_draws(cells.counts):
            out = self.module.inference(x=flat(cells.counts, lead), **self.arguments(cells, lead, _ENCODED))
        names = {"z": "qz", "l": "ql"} if self.latent_library else {"z": "qz"}
        return {name: elliptical(out[key], lead) for name, key in names.items()}

    def conditional(self, x: Tensor | Cells, z: Latent) -> CountParameters:
        """The parameters of the counts given z, at the library sizes of x or of z."""
        cells = self.prepare(x)
        log_library = z.l if self.latent_library else cells.terms["log_library"]
        return self._counts_at(cells, self.state_of(z), log_library)

    def sample(self, x: Tensor, z: Latent, *, generator: torch.Generator) -> Tensor:
        """Draw counts given z at the library sizes of x, for predictive checks. Shapes: ``-> (K, *batch, genes)``."""
        return self.likelihood.sample(self.conditional(x, z), generator=generator)

    def scale(self, cells: Cells, state: Tensor) -> Tensor:
        """Normalised expression of given batches. Shapes: ``(K, *batch, d) -> (K, *batch, genes)``."""
        px = self._decode(cells, state, torch.zeros_like(state[..., :1]))
        return px.get_normalized("scale").reshape(*state.shape[:-1], -1)

    def _counts_at(self, cells: Cells, state: Tensor, log_library: Tensor) -> CountParameters:
        lead, latent = state.shape[:-1], self.latent_library
        px = self._decode(cells, state, torch.zeros_like(log_library) if latent else log_library)
        mean, dispersion = (px.mu, px.theta) if self.likelihood.dispersed else (px.rate, None)
        zero_logit = px.zi_logits if self.likelihood.inflated else None
        return self.count_parameters(cells, lead, mean, dispersion, zero_logit, log_library if latent else None)

    def _decode(self, cells: Cells, state: Tensor, log_library: Tensor) -> Any:
        """The distribution of counts, one row per particle and cell."""
        lead = state.shape[:-1]
        arguments = self.arguments(cells, lead, _DECODED)
        if "size_factor" in arguments:
            arguments["size_factor"] = arguments["size_factor"].log()
        state = self.module.z_encoder.z_transformation(state.reshape(-1, state.shape[-1]))
        return self.module.generative(z=state, library=flat(log_library, lead), **arguments)["px"]
