"""TOTALVI: genes and surface proteins of a cell."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributions import Independent

from vaerdict.core import Latent
from vaerdict.distributions import Diagonal, Elliptical, StandardNormal
from vaerdict.likelihoods import CountParameters
from vaerdict.models.scvi.base import elliptical, normal, without_draws
from vaerdict.models.scvi.counts import CountsModel, Unused
from vaerdict.models.scvi.proteins import ProteinParameters
from vaerdict.models.scvi.registered import (
    BATCH,
    CATEGORICAL,
    CONTINUOUS,
    PANEL,
    PROTEINS,
    SIZE_FACTOR,
    Cells,
    Registered,
    flat,
)

_ENCODED = {PROTEINS: "y", BATCH: "batch_index", CATEGORICAL: "cat_covs", CONTINUOUS: "cont_covs"}
_DECODED = {BATCH: "batch_index", CATEGORICAL: "cat_covs", CONTINUOUS: "cont_covs", SIZE_FACTOR: "size_factor"}


class Totalvi(CountsModel):
    r"""Counts of genes and of proteins given a cell state and the background of each protein.

    .. math:: z \sim N(0, I), \quad b_p \sim N(\alpha_{ps}, \beta_{ps}^2), \quad
              y_p \mid z, b \sim \pi_p(z)\,\mathrm{NB}(e^{b_p}, r_p) + (1 - \pi_p(z))\,\mathrm{NB}(a_p(z)\,e^{b_p}, r_p)

    with the batch or panel s, a factor of each protein and batch, and genes as in SCVI. Latents are the named tuple
    ``(z, b)``, with ``l`` between them if the log library size is a latent. A protein that was not measured in a panel
    has no likelihood; its background keeps its prior, which is then also the encoder's distribution.

    The loss of scvi-tools has two more terms, which are no part of this density: a prior of the factors, which are
    parameters, and a weak penalty (1e-3) on :math:`\pi`.

    Reference: Gayoso et al. (2021), Joint probabilistic modeling of single-cell multi-omic data with totalVI, Nature
    Methods 18.
    """

    measured: Tensor
    """Which proteins were measured in each panel. Shapes: ``(panels, proteins)``."""

    def __init__(self, module: Any, source: Registered) -> None:
        super().__init__(module, source)
        masks = module.protein_batch_mask or {}
        everything = np.ones(module.n_input_proteins, dtype=bool)
        panels = [masks.get(str(i), everything) for i in range(max(1, module.n_panel))]
        self.register_buffer("measured", torch.from_numpy(np.stack(panels).astype(bool)))
        if not self.likelihood.inflated:
            module.decoder.px_dropout_decoder_gene = Unused()

    @classmethod
    def reads(cls, module: Any) -> Sequence[str]:
        """Counts of genes and proteins, batch, panel and covariates; size factors if they enter the likelihood."""
        panels = [PANEL] if module.panel_key == PANEL else []
        size_factors = [SIZE_FACTOR] if module.use_size_factor_key else []
        return ["X", PROTEINS, BATCH, *panels, CATEGORICAL, CONTINUOUS, *size_factors]

    def latents(self) -> Mapping[str, Any]:
        """The cell state, the log library size if it is not observed, and the log background of proteins."""
        library = {"l": self.library_prior} if self.latent_library else {}
        return {"z": StandardNormal(self.module.n_latent), **library, "b": self.background_prior}

    def background_prior(self, x: Tensor | Cells) -> Independent:
        """The prior of the log background, a normal per protein and panel. Shapes: ``-> over (*batch, proteins)``."""
        panel = self._panel(self.cells(x))
        return normal(self.module.background_pro_alpha.mT[panel], self.module.background_pro_log_beta.mT[panel].exp())

    def terms(self, cells: Cells) -> Mapping[str, Tensor]:
        """The library size, the dispersion and the constant part of the likelihood of genes."""
        library = cells.counts.sum(-1, keepdim=True)
        anywhere = cells.counts.new_zeros(1, *library.shape[:-1], self.module.n_latent)
        at = self._counts_at(cells, anywhere.shape[:-1], self._decode(cells, anywhere, library), None)
        return {"library": library, **self.count_terms(cells.counts, at)}

    def log_likelihood(self, cells: Cells, z: Latent) -> Tensor:
        """Log p(x, y | z, b), or given l too. Shapes: ``(*batch, p), (K, *batch, d) -> (K, *batch)``."""
        lead, log_library = z.z.shape[:-1], z.l if self.latent_library else None
        library = cells.terms["library"]
        out = self._decode(cells, z.z, library if log_library is None else torch.ones_like(library))
        proteins = ProteinParameters.read(out["py_"], lead)
        factor = out["per_batch_efficiency"].log().reshape(*lead, -1)
        log_r = out["py_"]["r"].log().expand_as(out["py_"]["mixing"]).reshape(*lead, -1)
        log_p = proteins.log_prob(cells.fields[PROTEINS], z.b + factor, log_r)
        log_p = torch.where(self.measured[self._panel(cells)], log_p, 0).sum(-1)
        return log_p + self.count_log_prob(cells, self._counts_at(cells, lead, out, log_library))

    def encode(self, cells: Cells) -> Mapping[str, Any]:
        """The encoder's normals of the cell state and of l, and of the background given the cell state."""
        lead = cells.counts.shape[:-1]
        arguments, panel = self.arguments(cells, lead, _ENCODED), self._panel(cells).reshape(-1, 1)
        with without_draws(cells.counts):
            out = self.module.inference(x=flat(cells.counts, lead), panel_index=panel, **arguments)
        names = {"z": "qz", "l": "ql"} if self.latent_library else {"z": "qz"}
        q = {name: elliptical(out[key], lead) for name, key in names.items()}
        return {**q, "b": lambda latents: self._encode_background(cells, latents["z"])}

    def scale(self, cells: Cells, state: Tensor) -> Tensor:
        """Normalised expression of given batches. Shapes: ``(K, *batch, d) -> (K, *batch, genes)``."""
        return self._decode(cells, state, torch.ones_like(state[..., :1]))["px_"]["scale"].reshape(
            *state.shape[:-1], -1
        )

    def foreground(self, z: Latent, x: Tensor) -> Tensor:
        """The probability that a protein is not background, as in ``get_protein_foreground_probability``.

        Shapes: ``(K, *batch, d) -> (K, *batch, proteins)``.
        """
        out = self._decode(self.cells(x), z.z, torch.ones_like(z.z[..., :1]))
        return (-ProteinParameters.read(out["py_"], z.z.shape[:-1]).background_logit).sigmoid()

    def _encode_background(self, cells: Cells, state: Tensor) -> Elliptical:
        out, prior = self._decode(cells, state, torch.ones_like(state[..., :1])), self.background_prior(cells).base_dist
        proteins, measured = ProteinParameters.read(out["py_"], state.shape[:-1]), self.measured[self._panel(cells)]
        scale = torch.where(measured, proteins.scale, prior.scale)
        return Elliptical(torch.where(measured, proteins.loc, prior.loc), Diagonal(scale))

    def _panel(self, cells: Cells) -> Tensor:
        return cells.fields[PANEL if PANEL in self.columns else BATCH].squeeze(-1)

    def _counts_at(self, cells: Cells, lead: torch.Size, out: Any, log_library: Tensor | None) -> CountParameters:
        px = out["px_"]
        return self.count_parameters(cells, lead, px["rate"], px["r"], px["dropout"], log_library)

    def _decode(self, cells: Cells, state: Tensor, library: Tensor) -> Any:
        """The parameters of genes and proteins, one row per particle and cell; the drawn background is not used."""
        lead = state.shape[:-1]
        arguments = self.arguments(cells, lead, _DECODED)
        state = self.module.encoder.z_transformation(state.reshape(-1, state.shape[-1]))
        with without_draws(state):
            return self.module.generative(z=state, library_gene=flat(library, lead), label=None, **arguments)
