"""Adapters for models of other libraries: scvi-tools' SCVI and LinearSCVI as models and proposals of this one."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils.fusion import fuse_linear_bn_eval

from vaerdict.core import DataError, Draws, SettingError, ShapeError, floating
from vaerdict.distributions import Diagonal, Elliptical, StandardNormal
from vaerdict.likelihoods import CountLikelihood, CountParameters, NegativeBinomial, Poisson, ZeroInflated
from vaerdict.models.counts import fixed_part
from vaerdict.noise import Randomness

_EPS = 1e-8  # added by scvi-tools to every mean before its logarithm, hence part of the fitted model
_LIKELIHOODS: dict[str, CountLikelihood] = {
    "nb": NegativeBinomial(),
    "zinb": ZeroInflated(per_cell=True),
    "poisson": Poisson(),
}
_ARGUMENTS = {
    "batch": "batch_index",
    "labels": "y",
    "extra_categorical_covs": "cat_covs",
    "extra_continuous_covs": "cont_covs",
    "size_factor": "size_factor",
}
"""The fields that scvi-tools registers besides the counts, and the arguments of its module that take them."""
_CATEGORICAL = ("batch_index", "y", "cat_covs")
_ENCODER_ARGUMENTS = ("batch_index", "cat_covs", "cont_covs")
_RATE_FIELDS = ("labels", "size_factor")  # fields that do not change normalised expression


def from_scvi(model: Any) -> ScviModel:
    """Wrap a fitted scvi-tools ``SCVI`` or ``LinearSCVI`` as a model, with its encoder as a proposal.

    Parameters
    ----------
    model
        A trained model with an observed library size (the default of scvi-tools) and an AnnData that holds the counts.
        It is copied, not changed.

    Returns
    -------
    The model with frozen parameters; its encoder is the attribute ``encoder``.

    Raises
    ------
    SettingError
        If the model is of another class, is not trained, has no counts, or has a latent library size.

    References
    ----------
    Lopez et al. (2018), Deep generative modeling for single-cell transcriptomics, Nature Methods 15.

    Examples
    --------
    >>> wrapped = from_scvi(model)                                  # doctest: +SKIP
    >>> x = wrapped.observations()                                  # doctest: +SKIP
    >>> vaerdict.posterior(wrapped, x, wrapped.encoder).khat        # doctest: +SKIP
    """
    _check_supported(model)
    module = copy.deepcopy(model.module).eval().requires_grad_(False)
    _fold_batch_norms(module)
    module.minified_data_type = None  # the copy is always given counts; the original may read stored latents
    if module.gene_likelihood != "zinb":
        module.decoder.px_dropout_decoder = _Unused()
    return ScviModel(module, _Registered(model, module))


def _fold_batch_norms(module: nn.Module) -> None:
    """Fold every batch norm into the linear layer before it.

    In evaluation the two are one linear map, whose second derivatives, which refinement needs, cost less.
    """
    for part in module.modules():
        if not isinstance(part, nn.Sequential):
            continue
        for (linear_name, linear), (norm_name, norm) in pairwise(list(part.named_children())):
            if isinstance(linear, nn.Linear) and isinstance(norm, nn.BatchNorm1d):
                setattr(part, linear_name, fuse_linear_bn_eval(linear, norm))
                setattr(part, norm_name, nn.Identity())


class PreparedCells(NamedTuple):
    """The terms of `ScviModel.log_joint` that depend on x alone.

    `covariates` maps the module's arguments to tensors. With a dispersion per gene and cell, `log_dispersion` and the
    `fixed` part of the log-likelihood depend on z and are None.

    Shapes: ``counts (*batch, genes)``, ``log_library (*batch, 1)``, ``covariates (*batch, width)`` each,
    ``log_dispersion (*batch, genes)``, ``fixed (*batch)``.
    """

    counts: Tensor
    log_library: Tensor
    covariates: Mapping[str, Tensor]
    log_dispersion: Tensor | None = None
    fixed: Tensor | None = None


class ScviModel(nn.Module):
    """A fitted scvi-tools model: log p(x, z) and the normalised expression of cells, with frozen parameters.

    An observation is the counts of a cell followed by its covariates, if the model has any, in the order of `columns`.
    `observations` makes such rows from an AnnData.
    """

    module: Any

    def __init__(self, module: nn.Module, source: _Registered) -> None:
        super().__init__()
        self.module, self._source = module, source
        self.encoder = ScviEncoder(module, source.columns)
        self.likelihood = _LIKELIHOODS[self.module.gene_likelihood]

    @property
    def prior(self) -> StandardNormal:
        """The prior of the latent cell state."""
        return StandardNormal(self.module.n_latent)

    @property
    def columns(self) -> Mapping[str, int]:
        """The number of columns of each registered field in an observation, in order, with the counts (``X``) first."""
        return self._source.columns

    def observations(self, adata: Any = None, indices: Any = None) -> Tensor:
        """The cells of the model's AnnData, or of another with the same registered fields; all, or those at `indices`.

        Shapes: ``-> (cells, genes + covariates)``, dense.
        """
        return self._source.rows(adata, indices).to(next(self.module.parameters()))

    def batches(self, adata: Any = None) -> np.ndarray | None:
        """The name of every cell's batch, or None if the model has only one. Shapes: ``-> (cells,)``."""
        return self._source.batches(adata) if "batch" in self.columns else None

    def prepare(self, x: Tensor) -> PreparedCells:
        """The terms that do not depend on z. Shapes: ``x (*batch, genes + covariates)``."""
        cells = _split(x, self.columns)
        if "size_factor" not in self.columns and not bool(cells.log_library.isfinite().all()):
            empty = int((~cells.log_library.isfinite()).sum())
            raise DataError(f"{empty} of {cells.log_library.numel()} cells have no counts; remove them first.")
        if self.module.dispersion == "gene-cell":
            return cells
        # the dispersion is per gene, perhaps per batch or label too, and is the same at any z
        at = self.conditional(cells, cells.counts.new_zeros(1, *x.shape[:-1], self.prior.d))
        log_r = None if at.log_dispersion is None else at.log_dispersion[0]
        fixed = fixed_part(self.likelihood, cells.counts, CountParameters(at.log_mean, log_r))
        return cells._replace(log_dispersion=log_r, fixed=fixed)

    def log_joint(self, x: Tensor | PreparedCells, z: Tensor) -> Tensor:
        """Log p(x, z). Shapes: ``(*batch, genes + covariates), (K, *batch, d) -> (K, *batch)``."""
        cells = self.prepare(x) if isinstance(x, Tensor) else x
        at = self.conditional(cells, z)
        if cells.fixed is None:
            return self.likelihood.log_prob(cells.counts, at).sum(-1) + self.prior.log_prob(z)
        return cells.fixed + self.likelihood.moving(cells.counts, at) + self.prior.log_prob(z)

    def conditional(self, x: Tensor | PreparedCells, z: Tensor) -> CountParameters:
        """The parameters of the counts given z, at the library sizes of x."""
        cells = self.prepare(x) if isinstance(x, Tensor) else x
        px, shape = self._decode(z, cells), (*z.shape[:-1], self.columns["X"])
        mean = px.mu if self.likelihood.dispersed else px.rate
        log_r = cells.log_dispersion
        if log_r is None and self.likelihood.dispersed:
            log_r = px.theta.log().reshape(shape)
        zero_logit = px.zi_logits.reshape(shape) if self.likelihood.inflated else None
        return CountParameters((mean + _EPS).log().reshape(shape), log_r, zero_logit)

    def sample(self, x: Tensor, z: Tensor, *, generator: torch.Generator) -> Tensor:
        """Draw counts given z at the library sizes of x, for predictive checks. Shapes: ``-> (K, *batch, genes)``."""
        return self.likelihood.sample(self.conditional(x, z), generator=generator)

    def expression(self, z: Tensor, x: Tensor | None = None) -> Tensor:
        """Normalised expression, the proportions of genes, as in ``get_normalized_expression``.

        Without the cells x it is averaged over batches. With a ``size_factor_key`` it is the mean count per unit of
        size factor and need not sum to one. Shapes: ``(K, *batch, d) -> (K, *batch, genes)``.
        """
        if x is not None:
            return self._scale(z, _split(x, self.columns))
        others = [key for key in self.columns if key not in ("X", "batch", *_RATE_FIELDS)]
        if others:
            raise SettingError(
                f"the decoder takes {', '.join(others)}, over which expression is not averaged; pass the cells x."
            )
        blank = _split(z.new_zeros(*z.shape[1:-1], sum(self.columns.values())), self.columns)
        batches = [torch.full_like(blank.log_library, b, dtype=torch.long) for b in range(max(1, self.module.n_batch))]
        scales = [self._scale(z, blank._replace(covariates={**blank.covariates, "batch_index": b})) for b in batches]
        return torch.stack(scales).mean(0) if len(scales) > 1 else scales[0]

    def _scale(self, z: Tensor, cells: PreparedCells) -> Tensor:
        return self._decode(z, cells).get_normalized("scale").reshape(*z.shape[:-1], -1)

    def _decode(self, z: Tensor, cells: PreparedCells) -> Any:
        """The distribution of counts, one row per particle and cell: scvi-tools loops over further axes."""
        lead = z.shape[:-1]
        covariates = _flat_covariates(cells, lead)
        if "size_factor" in covariates:
            covariates["size_factor"] = covariates["size_factor"].log()
        state = self.module.z_encoder.z_transformation(z.reshape(-1, z.shape[-1]))
        return self.module.generative(z=state, library=_flat(cells.log_library, lead), **covariates)["px"]


class ScviEncoder(nn.Module):
    """The encoder of a fitted scvi-tools model as a proposal: a diagonal normal per cell."""

    module: Any

    def __init__(self, module: nn.Module, columns: Mapping[str, int]) -> None:
        super().__init__()
        self.module, self.columns = module, columns

    def forward(self, x: Tensor) -> Elliptical:
        """The distribution of latents given x. Shapes: ``(*batch, p) -> distribution over (*batch, d)``."""
        cells, lead = _split(x, self.columns), x.shape[:-1]
        covariates = {name: t for name, t in _flat_covariates(cells, lead).items() if name in _ENCODER_ARGUMENTS}
        with torch.random.fork_rng([x.device] if x.is_cuda else []):  # `inference` also draws from the global state
            q = self.module.inference(x=_flat(cells.counts, lead), **covariates)["qz"]
        return Elliptical(q.loc.reshape(*lead, -1), Diagonal(q.scale.reshape(*lead, -1)))

    def draw(self, x: Tensor, k: int, *, generator: Randomness) -> Draws:
        """Draw k particles per cell. Shapes: ``(*batch, p) -> (K, *batch, d), (K, *batch)``."""
        return self(x).draw(x, k, generator=generator)

    def log_prob(self, z: Tensor, x: Tensor) -> Tensor:
        """Log q(z | x). Shapes: ``(K, *batch, d), (*batch, p) -> (K, *batch)``."""
        return self(x).log_prob(z)


class _Unused(nn.Module):
    """Replaces the layer of dropout logits, a third of the decoder's work, where the likelihood does not use them."""

    def forward(self, *inputs: Any) -> None:
        """Return None."""


# ------------------------------------------------------------------------------------------------ observations
class _Registered:
    """The user's model and its AnnData, from which cells are read. Copies of a wrapped model share it."""

    def __init__(self, model: Any, module: Any) -> None:
        self.model = model
        fields = {key: _field(model.adata_manager, key, [0]) for key in _fields(model, module)}
        self.columns = {"X": module.n_input, **{key: rows.shape[1] for key, rows in fields.items()}}

    def __deepcopy__(self, memo: Any) -> _Registered:
        return self

    def rows(self, adata: Any, indices: Any) -> Tensor:
        manager = self._manager(adata)
        return torch.cat([_field(manager, key, indices) for key in self.columns], -1)

    def batches(self, adata: Any) -> np.ndarray:
        manager = self._manager(adata)
        names = [str(name) for name in manager.get_state_registry("batch").categorical_mapping]
        return np.array(names, dtype=object)[_field(manager, "batch", None).long().flatten().numpy()]

    def _manager(self, adata: Any) -> Any:
        return self.model.get_anndata_manager(self.model._validate_anndata(adata), required=True)


def _fields(model: Any, module: Any) -> list[str]:
    """The registered fields besides the counts that the likelihood or the encoder uses."""
    used = {
        "batch": module.n_batch > 1,
        "labels": module.dispersion == "gene-label",
        "size_factor": module.use_size_factor_key,
    }
    return [key for key in _ARGUMENTS if key in model.adata_manager.data_registry and used.get(key, True)]


def _field(manager: Any, key: str, indices: Any) -> Tensor:
    """A registered field of the cells at `indices`, or of all. Shapes: ``-> (cells, width)``."""
    rows = manager.get_from_registry(key)
    rows = rows.to_numpy() if hasattr(rows, "to_numpy") else rows
    rows = rows if indices is None else rows[np.asarray(indices)]
    rows = rows.toarray() if hasattr(rows, "toarray") else np.asarray(rows)
    return torch.from_numpy(rows.astype(np.float32)).reshape(len(rows), -1)


def _split(x: Tensor, columns: Mapping[str, int]) -> PreparedCells:
    if x.shape[-1] != sum(columns.values()):
        expected = ", ".join(f"{width} of {key}" for key, width in columns.items())
        raise ShapeError(f"x has {x.shape[-1]} columns, the model takes {expected}; `observations()` makes such rows.")
    x = floating(x)
    counts, *rest = x.split(list(columns.values()), -1)
    names = [_ARGUMENTS[key] for key in list(columns)[1:]]
    covariates = {name: t.long() if name in _CATEGORICAL else t for name, t in zip(names, rest, strict=True)}
    if "batch_index" not in covariates:
        covariates["batch_index"] = torch.zeros_like(counts[..., :1], dtype=torch.long)
    return PreparedCells(counts, counts.sum(-1, keepdim=True).log(), covariates)


def _flat_covariates(cells: PreparedCells, lead: torch.Size) -> dict[str, Tensor]:
    return {name: _flat(value, lead) for name, value in cells.covariates.items()}


def _flat(value: Tensor, lead: torch.Size) -> Tensor:
    """One row per particle and observation. Shapes: ``(*batch, c) -> (K * batch, c)``."""
    return value.expand(*lead, value.shape[-1]).reshape(-1, value.shape[-1])


# ------------------------------------------------------------------------------------------------------ checks
def _check_supported(model: Any) -> None:
    """Raise a `SettingError` with the remedy if a model has other latents, no counts, or is not trained."""
    try:
        from scvi.data._constants import ADATA_MINIFY_TYPE
        from scvi.model import SCANVI, SCVI, LinearSCVI
    except ImportError as error:
        raise SettingError("from_scvi needs scvi-tools 1.4; install it with `pip install vaerdict[scvi]`.") from error
    if isinstance(model, SCANVI):
        raise SettingError(
            "the prior of a SCANVI's cell state depends on a label and on a second latent state, which from_scvi does "
            "not support; pass the SCVI that it was made from, or train one on the same data."
        )
    if not isinstance(model, (SCVI, LinearSCVI)):
        raise SettingError(
            f"{type(model).__name__} has other latents than one cell state with a standard normal prior; "
            "SCVI and LinearSCVI can be wrapped."
        )
    module: Any = model.module
    if not model.is_trained:
        raise SettingError("the scvi-tools model has not been trained; call its train() first.")
    if model.minified_data_type == ADATA_MINIFY_TYPE.LATENT_POSTERIOR:
        raise SettingError("the model's data were minified without their counts; load it with the full AnnData.")
    if not module.use_observed_lib_size:
        raise SettingError("the library size is a latent of this model; train it with use_observed_lib_size=True.")
    if module.gene_likelihood not in _LIKELIHOODS:
        raise SettingError(
            f"gene_likelihood={module.gene_likelihood!r} is not one of counts; train with {', '.join(_LIKELIHOODS)}."
        )
