"""Every class of scvi-tools models that can be wrapped gives the reconstruction and KL terms of scvi-tools."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.distributions import Normal, kl_divergence

from vaerdict import core
from vaerdict.models.scvi import from_scvi
from vaerdict.noise import seeded
from vaerdict.optional import isolated

scvi = pytest.importorskip("scvi", reason="scvi-tools is not installed (extra `scvi`)")
anndata = pytest.importorskip("anndata")

N, GENES, REGIONS, D = 120, 12, 16, 3
PADDING = 2e-8 * GENES  # scvi-tools adds 1e-8 to the dispersion of every gene before its logarithm
COVARIATES = {
    "batch_key": "batch",
    "categorical_covariate_keys": ["chemistry"],
    "continuous_covariate_keys": ["age"],
}


def annotated(matrix: np.ndarray) -> Any:
    adata, order = anndata.AnnData(matrix.astype(np.float32)), np.arange(N)
    adata.obs["batch"] = np.array(["first", "second", "third"])[order % 3]
    adata.obs["chemistry"] = np.array(["v2", "v3"])[order // 2 % 2]
    adata.obs["type"] = np.array(["a", "b", "none"])[order // 4 % 3]
    adata.obs["age"] = np.linspace(-1, 1, N)
    adata.obs["depth"] = matrix.sum(1) / 100
    return adata


def cells(n_features: int = GENES, mean: float = 8.0) -> Any:
    """Negative-binomial counts of two kinds of cells."""
    draws = np.random.default_rng(0)
    rate = draws.gamma(2.0, mean / 2, (2, n_features))[np.arange(N) % 2]
    return annotated(draws.poisson(rate * draws.gamma(3.0, 1 / 3, (N, n_features))) + (np.arange(n_features) == 0))


def fitted(kind: Any, adata: Any, setup: dict[str, Any], **settings: Any) -> Any:
    with isolated(0):
        kind.setup_anndata(adata, **setup)
        model = kind(adata, n_latent=D, n_hidden=8, **settings)
        model.train(max_epochs=2, accelerator="cpu", enable_progress_bar=False, logger=False, early_stopping=False)
    return model


def scvi_of(setup: dict[str, Any] = COVARIATES, **settings: Any) -> Callable[[], Any]:
    return lambda: fitted(scvi.model.SCVI, cells(), setup, **settings)


def linear() -> Any:
    return fitted(scvi.model.LinearSCVI, cells(), {"batch_key": "batch"})


def poissonvi() -> Any:
    return fitted(scvi.external.POISSONVI, cells(REGIONS, 1.0), COVARIATES)


def peakvi(setup: dict[str, Any] = COVARIATES, **settings: Any) -> Callable[[], Any]:
    return lambda: fitted(scvi.model.PEAKVI, cells(REGIONS, 0.5), setup, **settings)


class Case(NamedTuple):
    """A model to fit, and its continuous latents."""

    make: Callable[[], Any]
    latents: tuple[str, ...] = ("z",)


CASES = {
    "SCVI": Case(scvi_of(encode_covariates=True)),
    "SCVI-library": Case(scvi_of(use_observed_lib_size=False), ("z", "l")),
    "SCVI-size-factor": Case(scvi_of({**COVARIATES, "size_factor_key": "depth"}, gene_likelihood="nb")),
    "LinearSCVI": Case(linear, ("z", "l")),
    "POISSONVI": Case(poissonvi),
    "PEAKVI": Case(peakvi(encode_covariates=True)),
    "PEAKVI-plain": Case(peakvi({}, model_depth=False, region_factors=False, latent_distribution="ln")),
}


@cache
def trained(name: str) -> Any:
    """The model of a case, trained once."""
    model = CASES[name].make()
    model.module = model.module.double()
    return model


@pytest.fixture(params=CASES)
def name(request) -> str:
    return request.param


@pytest.fixture
def model(name, monkeypatch) -> Any:
    """The model of a case in double precision, which scvi-tools leaves where it converts to float32."""
    model = trained(name)
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)
    return model


class Theirs(NamedTuple):
    """What scvi-tools computes at given latents. Shapes: ``(cells,)``."""

    log_likelihood: Tensor
    kl: dict[str, Tensor]


def by_scvi(model: Any, z: Any) -> Theirs:
    """The terms of the loss of scvi-tools, with the latents z in place of its draws."""
    module = model.module.eval()
    latents = {"z": z} if isinstance(z, Tensor) else z._asdict()
    with isolated(0), torch.no_grad():
        (tensors,) = model._make_data_loader(adata=model.adata, batch_size=N)
        like = next(module.parameters())
        tensors = {key: t.to(like) if t.is_floating_point() else t for key, t in tensors.items()}
        inferred = module.inference(**module._get_inference_input(tensors))
        inferred["z"] = module.z_encoder.z_transformation(latents["z"])
        inferred["library"] = latents.get("l", inferred.get("library"))
        generated = module.generative(**module._get_generative_input(tensors, inferred))
        loss = module.loss(tensors, inferred, generated)
    return Theirs(-sum(loss.reconstruction_loss.values()), dict(loss.kl_local))  # type: ignore[arg-type]


def kl_of(wrapped: Any, x: Tensor) -> Tensor:
    """KL(q || p) of latents with normal prior and encoder, in closed form. Shapes: ``-> (cells,)``."""
    priors, total = wrapped.latents(), torch.zeros(())
    for latent, q in wrapped.encode(wrapped.cells(x)).items():
        p = Normal(0, 1) if latent == "z" else priors[latent](x).base_dist
        total = total + kl_divergence(Normal(q.loc, q.root.scale), p).sum(-1)
    return total


def test_the_terms_of_the_loss_are_those_of_scvi(name, model):
    wrapped = from_scvi(model)
    x = wrapped.observations()
    z, log_q = wrapped.encoder.draw(x, 2, generator=seeded(1))
    assert CASES[name].latents == (("z",) if isinstance(z, Tensor) else z._fields)
    ours = wrapped.log_likelihood(wrapped.prepare(x), z)
    for k in range(2):
        theirs = by_scvi(model, core.map_latent(lambda t, k=k: t[k], z))
        torch.testing.assert_close(ours[k], theirs.log_likelihood, rtol=1e-11, atol=PADDING)
        torch.testing.assert_close(kl_of(wrapped, x), sum(theirs.kl.values()), rtol=1e-11, atol=0)
    torch.testing.assert_close(wrapped.encoder.log_prob(z, x), log_q)
    torch.testing.assert_close(wrapped.log_joint(x, z), ours + wrapped.log_prior(x, z))
