"""MULTIVI: genes, accessible regions and surface proteins of cells in which some of them were measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributions import Independent

from vaerdict.core import Latent, SettingError
from vaerdict.distributions import Diagonal, Elliptical, StandardNormal
from vaerdict.likelihoods import CountParameters
from vaerdict.models.scvi.base import normal, without_draws
from vaerdict.models.scvi.counts import CountsModel, Unused
from vaerdict.models.scvi.peakvi import accessible_log_prob
from vaerdict.models.scvi.proteins import ProteinParameters
from vaerdict.models.scvi.registered import (
    BATCH,
    CATEGORICAL,
    CELL,
    CONTINUOUS,
    PROTEINS,
    REGIONS,
    SIZE_FACTOR,
    Cells,
    Registered,
    flat,
)

_COVARIATES = {BATCH: "batch_index", CATEGORICAL: "cat_covs", CONTINUOUS: "cont_covs"}


class Multivi(CountsModel):
    r"""Genes as in SCVI and regions as in PEAKVI given one cell state; what was not measured has no likelihood.

    A modality was measured in a cell that has any counts of it. The encoder is one normal, whose mean and variance
    are those of the modalities, weighted as scvi-tools does. The library size of genes and the factor of regions are
    outputs of networks of x, or size factors, and have no prior: as in scvi-tools they are parameters that the cell
    itself determines, not latents.

    With proteins, latents are the named tuple ``(z, b)`` with the log background b of each protein. Its distribution
    given z is an output of the decoder, from which scvi-tools draws in the likelihood: so it is the prior of b given
    z, and the encoder's distribution too. Proteins are otherwise as in TOTALVI.

    A dispersion other than ``"gene"`` is refused, because scvi-tools does not use it. Penalties that align the
    modalities are terms of training, not of this density.

    Reference: Ashuach et al. (2023), MultiVI: deep generative model for the integration of multimodal data, Nature
    Methods 20.
    """

    def __init__(self, module: Any, source: Registered) -> None:
        super().__init__(module, source)
        self.protein_decoder = module.z_decoder_pro if PROTEINS in self.columns else None
        module.z_decoder_pro = _NoProteins()  # draws the background, which here is given
        if not self.likelihood.inflated:
            module.z_decoder_expression.px_dropout_decoder = Unused()

    @classmethod
    def check(cls, module: Any) -> None:
        """Refuse models without genes, and dispersions that scvi-tools does not use."""
        super().check(module)
        if not module.n_input_genes:
            raise SettingError("this MULTIVI has no counts of genes; train a PEAKVI on the regions.")
        if module.gene_dispersion != "gene":
            raise SettingError(
                f"dispersion={module.gene_dispersion!r} of a MULTIVI is not used by its likelihood; train it with "
                "dispersion='gene'."
            )

    @classmethod
    def reads(cls, module: Any) -> Sequence[str]:
        """What was measured, batch and covariates; size factors and the index of cells if they are used."""
        size_factors = [SIZE_FACTOR] if module.use_size_factor_key else []
        index = [CELL] if module.modality_weights == "cell" else []
        return ["X", REGIONS, PROTEINS, *_COVARIATES, *size_factors, *index]

    def latents(self) -> Mapping[str, Any]:
        """The cell state, and the log background of proteins."""
        background = {} if self.protein_decoder is None else {"b": self.background_prior}
        return {"z": StandardNormal(self.module.n_latent), **background}

    def background_prior(self, z: Tensor, x: Tensor | Cells) -> Independent:
        """The distribution of the log background given the cell state. Shapes: ``-> over (K, *batch, proteins)``."""
        proteins = self._proteins(self.cells(x), z)
        return normal(proteins.loc, proteins.scale)

    def terms(self, cells: Cells) -> Mapping[str, Tensor]:
        """Library size, factors of regions, dispersion, and the constant part of the likelihood of genes."""
        lead, out = cells.counts.shape[:-1], self._infer(cells)
        library, factor = (out[key].reshape(*lead, 1) for key in ("libsize_expr", "libsize_acc"))
        if self.module.region_factors is not None:
            factor = factor * self.module.region_factors.sigmoid()
        at = CountParameters(library[None], self.module.px_r.expand(1, *cells.counts.shape))
        return {"log_library": library, "factor": factor, **self.count_terms(cells.counts, at)}

    def log_likelihood(self, cells: Cells, z: Latent) -> Tensor:
        """Log p(x | z), or log p(x | z, b). Shapes: ``(*batch, p), (K, *batch, d) -> (K, *batch)``."""
        state = self.state_of(z)
        out, lead = self._decode(cells, state, cells.terms["log_library"]), state.shape[:-1]
        at = self.count_parameters(cells, lead, out["px_rate"], out["px_r"], out["px_dropout"])
        total = _measured(cells, "X") * self.count_log_prob(cells, at)
        if REGIONS in self.columns:
            probability = out["p"].reshape(*lead, -1) * cells.terms["factor"]
            total = total + _measured(cells, REGIONS) * accessible_log_prob(cells.fields[REGIONS], probability)
        if self.protein_decoder is None:
            return total
        log_r = out["py_"]["r"].log().expand(len(out["px_rate"]), -1).reshape(*lead, -1)
        log_p = self._proteins(cells, state).log_prob(cells.fields[PROTEINS], z.b, log_r)
        return total + _measured(cells, PROTEINS) * log_p.sum(-1)

    def encode(self, cells: Cells) -> Mapping[str, Any]:
        """The encoder's normal of the cell state; the background keeps its prior given that state."""
        lead, out = cells.counts.shape[:-1], self._infer(cells)
        loc, scale = (t.reshape(*lead, -1) for t in (out["qz_m"], out["qz_v"].sqrt()))
        q = {"z": Elliptical(loc, Diagonal(scale))}
        return (
            q if self.protein_decoder is None else {**q, "b": lambda latents: self._encode_background(cells, latents)}
        )

    def scale(self, cells: Cells, state: Tensor) -> Tensor:
        """Normalised expression of given batches. Shapes: ``(K, *batch, d) -> (K, *batch, genes)``."""
        out = self._decode(cells, state, torch.zeros_like(state[..., :1]))
        return out["px_scale"].reshape(*state.shape[:-1], -1)

    def accessibility(self, z: Latent, x: Tensor) -> Tensor:
        """The probability that a region is accessible, without the factors of cell and region.

        Shapes: ``(K, *batch, d) -> (K, *batch, regions)``.
        """
        state = self.state_of(z)
        out = self._decode(self.cells(x), state, torch.zeros_like(state[..., :1]))
        return out["p"].reshape(*state.shape[:-1], -1)

    def _encode_background(self, cells: Cells, latents: Mapping[str, Tensor]) -> Elliptical:
        proteins = self._proteins(cells, latents["z"])
        return Elliptical(proteins.loc, Diagonal(proteins.scale))

    def _proteins(self, cells: Cells, state: Tensor) -> ProteinParameters:
        assert self.protein_decoder is not None
        lead = state.shape[:-1]
        arguments = self.arguments(cells, lead, _COVARIATES)
        decoded = self._decoded_state(state)
        inputs = torch.cat([decoded, arguments["cont_covs"]], -1) if "cont_covs" in arguments else decoded
        covariates = arguments["cat_covs"].split(1, -1) if "cat_covs" in arguments else ()
        return ProteinParameters.decode(self.protein_decoder, inputs, (arguments["batch_index"], *covariates), lead)

    def _decoded_state(self, state: Tensor) -> Tensor:
        return self.module.z_encoder_accessibility.z_transformation(state.reshape(-1, state.shape[-1]))

    def _decode(self, cells: Cells, state: Tensor, log_library: Tensor) -> Any:
        """The parameters of genes and regions, one row per particle and cell."""
        lead = state.shape[:-1]
        arguments = {**self.arguments(cells, lead, _COVARIATES), "libsize_expr": flat(log_library, lead)}
        return self.module.generative(z=self._decoded_state(state), qz_m=None, label=None, **arguments)

    def _infer(self, cells: Cells) -> Any:
        lead = cells.counts.shape[:-1]
        rows = {key: flat(value, lead) for key, value in cells.fields.items()}
        x = torch.cat([rows[key] for key in ("X", REGIONS) if key in rows], -1)
        with without_draws(x):
            return self.module.inference(
                x=x,
                y=rows.get(PROTEINS, x.new_zeros(len(x), 1)),
                batch_index=rows[BATCH],
                cont_covs=rows.get(CONTINUOUS),
                cat_covs=rows.get(CATEGORICAL),
                label=None,
                cell_idx=rows.get(CELL, rows[BATCH]).flatten(),
                size_factor=rows.get(SIZE_FACTOR),
            )


class _NoProteins(nn.Module):
    """Replaces the decoder of proteins where the module decodes genes and regions."""

    def forward(self, *inputs: Any) -> tuple[dict[str, Tensor], None]:
        """Return nothing about proteins."""
        return {}, None


def _measured(cells: Cells, key: str) -> Tensor:
    """One where a cell has any counts of a modality, else zero. Shapes: ``-> (*batch)``."""
    counts = cells.fields[key]
    return (counts.sum(-1) > 0).to(counts)
