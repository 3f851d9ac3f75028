"""Models fitted elsewhere, as models and proposals of this library: scvi-tools' SCVI and LinearSCVI."""

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

_EPS = 1e-8  # added by scvi-tools to every mean before its logarithm: part of the fitted model
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
"""What scvi-tools registers of a cell besides its counts, and the argument of its module that takes it."""
_CATEGORICAL = ("batch_index", "y", "cat_covs")
_OF_THE_ENCODER = ("batch_index", "cat_covs", "cont_covs")
_OF_THE_RATE = ("labels", "size_factor")  # fields that do not change normalised expression


def from_scvi(model: Any) -> ScviModel:
    """A fitted scvi-tools ``SCVI`` or ``LinearSCVI`` as a model with its encoder as a proposal; both frozen copies.

    >>> wrapped = from_scvi(model)                                  # doctest: +SKIP
    >>> x = wrapped.observations()                                  # doctest: +SKIP
    >>> vaerdict.posterior(wrapped, x, wrapped.encoder).khat        # doctest: +SKIP

    The library size must be observed, which is the default there, and the counts at hand. Reference: Lopez et al.
    (2018), Deep generative modeling for single-cell transcriptomics, Nature Methods 15.
    """
    _refuse_unsuitable(model)
    module = copy.deepcopy(model.module).eval().requires_grad_(False)
    _fold_batch_norms(module)
    module.minified_data_type = None  # ours is always given counts, the user's may read stored answers
    if module.gene_likelihood != "zinb":
        module.decoder.px_dropout_decoder = _Unused()
    return ScviModel(module, _Registered(model, module))


def _fold_batch_norms(module: nn.Module) -> None:
    """Put every batch norm into the linear layer before it.

    In evaluation the two are one linear map, which costs less to differentiate twice, as refinement does.
    """
    for part in module.modules():
        if not isinstance(part, nn.Sequential):
            continue
        for (place, linear), (name, norm) in pairwise(list(part.named_children())):
            if isinstance(linear, nn.Linear) and isinstance(norm, nn.BatchNorm1d):
                setattr(part, place, fuse_linear_bn_eval(linear, norm))
                setattr(part, name, nn.Identity())


class PreparedCells(NamedTuple):
    """What the likelihood of cells takes from x alone.

    `given` are the covariates by the module's argument. Where every cell has a dispersion of its own, it and the
    `fixed` part of the log-likelihood move with z and are missing here.

    Shapes: ``counts (*batch, genes)``, ``log_library (*batch, 1)``, ``given (*batch, width)`` each,
    ``log_dispersion (*batch, genes)``, ``fixed (*batch)``.
    """

    counts: Tensor
    log_library: Tensor
    given: Mapping[str, Tensor]
    log_dispersion: Tensor | None = None
    fixed: Tensor | None = None


class ScviModel(nn.Module):
    """A fitted scvi-tools model: log p(x, z) of cells and their normalised expression; nothing random, nothing learned.

    An observation is the counts of a cell and behind them, where the model has them, its covariates, in the order of
    `columns`; `observations` makes such rows from an AnnData.
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
        """How many columns of an observation each registered field takes, in order: the counts (``X``) first."""
        return self._source.columns

    def observations(self, adata: Any = None, indices: Any = None) -> Tensor:
        """Cells of the model's AnnData, or of another with the same registered fields; all, or those at `indices`.

        Shapes: ``-> (cells, genes + covariates)``, dense.
        """
        return self._source.rows(adata, indices).to(next(self.module.parameters()))

    def batches(self, adata: Any = None) -> np.ndarray | None:
        """The registered batch of every cell, by name; None where the model has one only. Shapes: ``-> (cells,)``."""
        return self._source.batches(adata) if "batch" in self.columns else None

    def prepare(self, x: Tensor) -> PreparedCells:
        """Everything about x that does not move with z. Shapes: ``x (*batch, genes + covariates)``."""
        cells = _split(x, self.columns)
        if "size_factor" not in self.columns and not bool(cells.log_library.isfinite().all()):
            empty = int((~cells.log_library.isfinite()).sum())
            raise DataError(f"{empty} of {cells.log_library.numel()} cells have no counts at all; remove them first.")
        if self.module.dispersion == "gene-cell":
            return cells
        # the dispersion is of the gene, perhaps in the cell's batch or label: any z shows it
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
        """The parameters of every count given z, at the library sizes of x."""
        cells = self.prepare(x) if isinstance(x, Tensor) else x
        px, shape = self._decode(z, cells), (*z.shape[:-1], self.columns["X"])
        mean = px.mu if self.likelihood.dispersed else px.rate
        log_r = cells.log_dispersion
        if log_r is None and self.likelihood.dispersed:
            log_r = px.theta.log().reshape(shape)
        zero_logit = px.zi_logits.reshape(shape) if self.likelihood.inflated else None
        return CountParameters((mean + _EPS).log().reshape(shape), log_r, zero_logit)

    def sample(self, x: Tensor, z: Tensor, *, generator: torch.Generator) -> Tensor:
        """Counts like those of x given z, for predictive checks. Shapes: ``-> (K, *batch, genes)``."""
        return self.likelihood.sample(self.conditional(x, z), generator=generator)

    def expression(self, z: Tensor, x: Tensor | None = None) -> Tensor:
        """Normalised expression, as ``get_normalized_expression`` has it: the proportions of genes.

        Without the cells x it is averaged over batches. With a ``size_factor_key`` it is the mean count a unit of size
        factor and need not sum to one. Shapes: ``(K, *batch, d) -> (K, *batch, genes)``.
        """
        if x is not None:
            return self._scale(z, _split(x, self.columns))
        others = [key for key in self.columns if key not in ("X", "batch", *_OF_THE_RATE)]
        if others:
            raise SettingError(
                f"the decoder takes {', '.join(others)}, of which no average is natural: pass the cells x."
            )
        blank = _split(z.new_zeros(*z.shape[1:-1], sum(self.columns.values())), self.columns)
        batches = [torch.full_like(blank.log_library, b, dtype=torch.long) for b in range(max(1, self.module.n_batch))]
        each = [self._scale(z, blank._replace(given={**blank.given, "batch_index": b})) for b in batches]
        return torch.stack(each).mean(0) if len(each) > 1 else each[0]

    def _scale(self, z: Tensor, cells: PreparedCells) -> Tensor:
        return self._decode(z, cells).get_normalized("scale").reshape(*z.shape[:-1], -1)

    def _decode(self, z: Tensor, cells: PreparedCells) -> Any:
        """Their distribution of the counts, a row for each particle and cell: on three axes the BatchNorm loops."""
        lead = z.shape[:-1]
        given = _flat_covariates(cells, lead)
        if "size_factor" in given:
            given["size_factor"] = given["size_factor"].log()
        state = self.module.z_encoder.z_transformation(z.reshape(-1, z.shape[-1]))
        return self.module.generative(z=state, library=_flat(cells.log_library, lead), **given)["px"]


class ScviEncoder(nn.Module):
    """The encoder of a fitted scvi-tools model as a proposal: a diagonal normal for each cell."""

    module: Any

    def __init__(self, module: nn.Module, columns: Mapping[str, int]) -> None:
        super().__init__()
        self.module, self.columns = module, columns

    def forward(self, x: Tensor) -> Elliptical:
        """The distribution of latents given x. Shapes: ``(*batch, p) -> distribution over (*batch, d)``."""
        cells, lead = _split(x, self.columns), x.shape[:-1]
        given = {name: t for name, t in _flat_covariates(cells, lead).items() if name in _OF_THE_ENCODER}
        with torch.random.fork_rng([x.device] if x.is_cuda else []):  # it also draws, from the global state
            q = self.module.inference(x=_flat(cells.counts, lead), **given)["qz"]
        return Elliptical(q.loc.reshape(*lead, -1), Diagonal(q.scale.reshape(*lead, -1)))

    def draw(self, x: Tensor, k: int, *, generator: Randomness) -> Draws:
        """Draw k particles for each cell. Shapes: ``(*batch, p) -> (K, *batch, d), (K, *batch)``."""
        return self(x).draw(x, k, generator=generator)

    def log_prob(self, z: Tensor, x: Tensor) -> Tensor:
        """Log q(z | x). Shapes: ``(K, *batch, d), (*batch, p) -> (K, *batch)``."""
        return self(x).log_prob(z)


class _Unused(nn.Module):
    """In place of the layer of drop-out logits where no likelihood asks for them: a third of the decoder's work."""

    def forward(self, *inputs: Any) -> None:
        """Nothing."""


# ------------------------------------------------------------------------------------------------ observations
class _Registered:
    """Where cells come from: the user's model and the AnnData it knows. Copies of a wrapped model share it."""

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
    """The registered fields besides the counts that the likelihood or the encoder looks at."""
    used = {
        "batch": module.n_batch > 1,
        "labels": module.dispersion == "gene-label",
        "size_factor": module.use_size_factor_key,
    }
    return [key for key in _ARGUMENTS if key in model.adata_manager.data_registry and used.get(key, True)]


def _field(manager: Any, key: str, indices: Any) -> Tensor:
    """A registered field of some cells. Shapes: ``-> (cells, width)``."""
    rows = manager.get_from_registry(key)
    rows = rows.to_numpy() if hasattr(rows, "to_numpy") else rows
    rows = rows if indices is None else rows[np.asarray(indices)]
    rows = rows.toarray() if hasattr(rows, "toarray") else np.asarray(rows)
    return torch.from_numpy(rows.astype(np.float32)).reshape(len(rows), -1)


def _split(x: Tensor, columns: Mapping[str, int]) -> PreparedCells:
    if x.shape[-1] != sum(columns.values()):
        wanted = ", ".join(f"{width} of {key}" for key, width in columns.items())
        raise ShapeError(f"x has {x.shape[-1]} columns, the model takes {wanted}; `observations()` makes such rows.")
    x = floating(x)
    counts, *rest = x.split(list(columns.values()), -1)
    names = [_ARGUMENTS[key] for key in list(columns)[1:]]
    given = {name: t.long() if name in _CATEGORICAL else t for name, t in zip(names, rest, strict=True)}
    if "batch_index" not in given:
        given["batch_index"] = torch.zeros_like(counts[..., :1], dtype=torch.long)
    return PreparedCells(counts, counts.sum(-1, keepdim=True).log(), given)


def _flat_covariates(cells: PreparedCells, lead: torch.Size) -> dict[str, Tensor]:
    return {name: _flat(value, lead) for name, value in cells.given.items()}


def _flat(value: Tensor, lead: torch.Size) -> Tensor:
    """A row for each particle and observation. Shapes: ``(*batch, c) -> (K * batch, c)``."""
    return value.expand(*lead, value.shape[-1]).reshape(-1, value.shape[-1])


# ---------------------------------------------------------------------------------------------------- refusals
def _refuse_unsuitable(model: Any) -> None:
    """Raise, with the remedy, where a model has other latents, no counts or no parameters worth asking."""
    try:
        from scvi.data._constants import ADATA_MINIFY_TYPE
        from scvi.model import SCANVI, SCVI, LinearSCVI
    except ImportError as error:
        raise SettingError("this needs scvi-tools 1.4; install it with `pip install vaerdict[scvi]`.") from error
    if isinstance(model, SCANVI):
        raise SettingError(
            "the prior of a SCANVI's cell state depends on a label and on a second latent state, which this does not "
            "handle; give the SCVI that it was made from, or train one on the same data."
        )
    if not isinstance(model, (SCVI, LinearSCVI)):
        raise SettingError(
            f"a {type(model).__name__} has other latents than one cell state with a standard normal prior; "
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
