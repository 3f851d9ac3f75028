"""`from_scvi`: the adapter of a fitted scvi-tools model, or the reason why there is none."""

from __future__ import annotations

import copy
from itertools import pairwise
from pkgutil import resolve_name
from typing import Any

from torch import nn
from torch.distributions import Distribution
from torch.nn.utils.fusion import fuse_linear_bn_eval

from vaerdict.core import SettingError
from vaerdict.models.scvi.base import ScviModel
from vaerdict.models.scvi.multivi import Multivi
from vaerdict.models.scvi.peakvi import Peakvi
from vaerdict.models.scvi.registered import Registered
from vaerdict.models.scvi.scanvi import Scanvi
from vaerdict.models.scvi.scvi import Scvi
from vaerdict.models.scvi.totalvi import Totalvi
from vaerdict.optional import require

ADAPTERS: dict[str, type[ScviModel]] = {
    "scvi.module.VAE": Scvi,
    "scvi.module.LDVAE": Scvi,
    "scvi.module.SCANVAE": Scanvi,
    "scvi.module.TOTALVAE": Totalvi,
    "scvi.module.PEAKVAE": Peakvi,
    "scvi.module.MULTIVAE": Multivi,
}
"""The adapter of each class of scvi-tools modules, which is that of ``model.module``. Subclasses are not included."""

_SPATIAL = "a cell is explained by its neighbours or by cells of other data, so that it has no posterior of its own"
_REASONS = {
    "MRVI": "the shift of its second cell state is a point estimate by attention over samples, not a latent",
    "AUTOZI": "its probabilities of zero inflation are latents of genes, which all cells share",
    "AmortizedLDA": "its topics are latents that all cells share",
    "RESOLVI": _SPATIAL,
    "SCVIVA": _SPATIAL,
    "DestVI": _SPATIAL,
    "Stereoscope": _SPATIAL,
    "Tangram": _SPATIAL,
    "GIMVI": _SPATIAL,
}


def from_scvi(model: Any) -> ScviModel:
    """Wrap a fitted scvi-tools model as a model of this library, with its encoder as a proposal.

    The classes are SCVI, LinearSCVI, SCANVI, TOTALVI, PEAKVI, POISSONVI and MULTIVI, with batches, covariates,
    dispersions, size factors and a latent library size where they have them. A model with one latent takes a tensor
    z; one with several (`vaerdict.models.scvi` says which) takes a named tuple.

    Parameters
    ----------
    model
        A trained model with an AnnData that holds the counts. It is copied, not changed.

    Returns
    -------
    The model with frozen parameters; its encoder is the attribute ``encoder``.

    Raises
    ------
    SettingError
        If the model is of another class, is not trained, has no counts, or has a setting that cannot be represented.

    References
    ----------
    Gayoso et al. (2022), A Python library for probabilistic analysis of single-cell omics data, Nature Biotechnology
    40.

    Examples
    --------
    >>> wrapped = from_scvi(model)                                  # doctest: +SKIP
    >>> x = wrapped.observations()                                  # doctest: +SKIP
    >>> vaerdict.posterior(wrapped, x, wrapped.encoder).khat        # doctest: +SKIP
    """
    adapter = _adapter(model)
    adapter.check(model.module)
    _check_fitted(model)
    # a distribution that the module keeps from its last minibatch has a graph, which cannot be copied
    kept = {id(value): None for value in vars(model.module).values() if isinstance(value, Distribution)}
    module = copy.deepcopy(model.module, kept).eval().requires_grad_(False)
    _fold_batch_norms(module)
    module.minified_data_type = None  # the copy is always given counts; the original may read stored latents
    return adapter(module, Registered(model, adapter.reads(module)))


def _adapter(model: Any) -> type[ScviModel]:
    require("scvi", "scvi")
    for path, adapter in ADAPTERS.items():
        if type(getattr(model, "module", None)) is resolve_name(path):
            return adapter
    name = type(model).__name__
    reason = next((reason for part, reason in _REASONS.items() if part in name), "there is no adapter for it")
    supported = "SCVI, LinearSCVI, SCANVI, TOTALVI, PEAKVI, POISSONVI and MULTIVI"
    raise SettingError(f"{name} cannot be wrapped: {reason}. {supported} can be; CONTRIBUTING.md shows how to add one.")


def _check_fitted(model: Any) -> None:
    from scvi.data._constants import ADATA_MINIFY_TYPE

    if not model.is_trained:
        raise SettingError("the scvi-tools model has not been trained; call its train() first.")
    if getattr(model, "minified_data_type", None) == ADATA_MINIFY_TYPE.LATENT_POSTERIOR:
        raise SettingError("the model's data were minified without their counts; load it with the full AnnData.")


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
