"""Wrapped scvi-tools models give the numbers of scvi-tools, and refinement improves their posteriors."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from checks import assert_within
from vaerdict import core
from vaerdict.datasets.genes import appendix
from vaerdict.inference import posterior
from vaerdict.models.scvi import ScviModel, from_scvi
from vaerdict.noise import seeded
from vaerdict.optional import isolated
from vaerdict.refinement import refine

scvi = pytest.importorskip("scvi", reason="scvi-tools is not installed (extra `scvi`)")
anndata = pytest.importorskip("anndata")

N_CELLS, N_GENES, D = 200, 30, 5


def cells(n: int = N_CELLS, seed: int = 0) -> Any:
    data = appendix(seed, n_cells=n, n_genes=N_GENES)
    adata = anndata.AnnData(data.counts.numpy())
    order = np.arange(n)
    adata.obs["batch"] = np.array(["first", "second", "third"])[order % 3]
    adata.obs["type"] = np.array(["a", "b"])[data.labels.numpy()]
    adata.obs["chemistry"] = np.array(["v2", "v3"])[order // 2 % 2]
    adata.obs["age"] = np.linspace(-1, 1, n)
    adata.obs["depth"] = data.counts.sum(1).numpy() / 1000
    return adata


def fitted(adata: Any = None, *, epochs: int = 2, kind: Any = None, setup: Any = None, **settings: Any) -> Any:
    kind = kind or scvi.model.SCVI
    adata = cells() if adata is None else adata
    with isolated(0):
        kind.setup_anndata(adata, **(setup or {}))
        model = kind(adata, n_latent=D, **settings)
        split = {"external_indexing": np.split(np.arange(len(adata)), [len(adata) * 9 // 10])}
        model.train(
            max_epochs=epochs, accelerator="cpu", enable_progress_bar=False, logger=False, datasplitter_kwargs=split
        )
    return model


CASES: dict[str, dict[str, Any]] = {
    "zinb": {},
    "nb": {"gene_likelihood": "nb"},
    "poisson": {"gene_likelihood": "poisson"},
    "batch": {"gene_likelihood": "nb", "setup": {"batch_key": "batch"}, "encode_covariates": True, "n_layers": 2},
    "embedding": {"setup": {"batch_key": "batch"}, "batch_representation": "embedding", "encode_covariates": True},
    "gene-batch": {"dispersion": "gene-batch", "setup": {"batch_key": "batch"}},
    "gene-label": {"dispersion": "gene-label", "setup": {"labels_key": "type"}},
    "gene-cell": {"dispersion": "gene-cell"},
    "logistic normal": {"latent_distribution": "ln"},
    "size factor": {"setup": {"size_factor_key": "depth"}, "gene_likelihood": "nb"},
    "covariates": {
        "setup": {
            "batch_key": "batch",
            "categorical_covariate_keys": ["chemistry", "type"],
            "continuous_covariate_keys": ["age"],
        },
        "encode_covariates": True,
    },
    "linear": {"use_observed_lib_size": True},
}


@cache
def trained(case: str) -> Any:
    """The model of a case, trained once."""
    kind = scvi.model.LinearSCVI if case == "linear" else None
    return fitted(kind=kind, **CASES[case])


@pytest.fixture(params=CASES)
def model(request) -> Any:
    return trained(request.param)


def by_scvi(model: Any, z: Tensor) -> tuple[Tensor, Any, Tensor]:
    """Log p(x, z), q(z | x) and normalised expression as the module of scvi-tools computes them for each particle."""
    module = model.module.eval()
    with isolated(0), torch.no_grad():
        (tensors,) = model._make_data_loader(adata=model.adata, batch_size=N_CELLS)
        inferred = module.inference(**module._get_inference_input(tensors))
        log_p, scale = [], []
        for one in z:
            state = module.z_encoder.z_transformation(one)
            px = module.generative(**module._get_generative_input(tensors, {**inferred, "z": state}))["px"]
            prior = torch.distributions.Normal(0.0, 1.0).log_prob(one).sum(-1)
            log_p.append(px.log_prob(tensors["X"]).sum(-1) + prior)
            scale.append(px.get_normalized("scale"))
    return torch.stack(log_p), inferred["qz"], torch.stack(scale)


def test_the_wrapped_model_agrees_with_scvi(model):
    wrapped = from_scvi(model)
    assert isinstance(wrapped, core.Model)
    x = wrapped.observations()
    z = torch.randn(3, N_CELLS, D, generator=seeded(1))
    log_p, q, scale = by_scvi(model, z)
    integers = (x.long(),) if torch.equal(x, x.round()) else ()
    for observations in (x, wrapped.prepare(x), *integers):
        torch.testing.assert_close(wrapped.log_joint(observations, z), log_p, rtol=1e-4, atol=0)
    torch.testing.assert_close(wrapped.expression(z, x), scale, rtol=1e-4, atol=1e-8)
    assert isinstance(wrapped.encoder, core.Proposal)
    encoded = wrapped.encoder(x)
    torch.testing.assert_close(encoded.loc, q.loc)
    torch.testing.assert_close(encoded.root.scale, q.scale)
    torch.testing.assert_close(wrapped.encoder.log_prob(z, x), q.log_prob(z).sum(-1))


def test_other_latents_have_another_density():
    wrapped = from_scvi(trained("nb"))
    x = wrapped.observations()
    z = torch.randn(3, N_CELLS, D, generator=seeded(1))
    log_p, _, _ = by_scvi(trained("nb"), 1.01 * z)
    with pytest.raises(AssertionError, match="not close"):
        torch.testing.assert_close(wrapped.log_joint(x, z), log_p, rtol=1e-4, atol=0)


def test_batches_of_any_shape(model):
    wrapped = from_scvi(model)
    x = wrapped.observations()
    z = torch.randn(2, 3, 4, D, generator=seeded(2))
    folded = wrapped.log_joint(wrapped.prepare(x[:12].reshape(3, 4, -1)), z)
    flat = wrapped.log_joint(x[:12], z.reshape(2, 12, D))
    torch.testing.assert_close(folded.reshape(2, 12), flat)
    assert wrapped.encoder(x[:12].reshape(3, 4, -1)).loc.shape == (3, 4, D)


IN_DOUBLE = [name for name in CASES if name not in ("gene-batch", "gene-label")]  # there scvi-tools casts to float32


@pytest.mark.parametrize("name", IN_DOUBLE)
def test_gradients_are_in_z_alone(name):
    wrapped = from_scvi(trained(name)).double()
    x = wrapped.prepare(wrapped.observations()[:3])
    assert x.counts.dtype == torch.float64
    z = torch.randn(1, 3, D, generator=seeded(3), dtype=torch.float64, requires_grad=True)
    (gradient,) = torch.autograd.grad(wrapped.log_joint(x, z).sum(), z)
    step = 1e-6 * torch.randn(z.shape, generator=seeded(4), dtype=torch.float64)
    change = (wrapped.log_joint(x, z + step) - wrapped.log_joint(x, z - step)).sum()
    torch.testing.assert_close(2 * (gradient * step).sum(), change, rtol=1e-4, atol=0)
    assert not any(p.requires_grad for p in wrapped.parameters())


def test_the_users_model_is_not_changed():
    model = trained("nb")
    model.module.train()
    wrapped = from_scvi(model)
    assert model.module.training
    assert not wrapped.module.training
    assert all(p.requires_grad for p in model.module.parameters())
    assert isinstance(model.module.decoder.px_dropout_decoder, torch.nn.Linear)
    kinds = [[type(part) for part in module.modules()] for module in (model.module, wrapped.module)]
    assert torch.nn.BatchNorm1d in kinds[0]
    assert torch.nn.BatchNorm1d not in kinds[1]  # folded into the layer before it


def test_refinement_improves_the_encoders_posterior(generator):
    wrapped = from_scvi(fitted(epochs=100, gene_likelihood="nb"))
    x = wrapped.observations(indices=range(60))
    before = posterior(wrapped, x, wrapped.encoder, 500, seed=generator)
    local = refine(wrapped, x, wrapped.encoder)
    after = posterior(wrapped, x, local.distribution, 500, seed=generator)
    assert local.converged.double().mean() > 0.9
    assert after.khat.median() < 0.67 < 0.8 < before.khat.median()
    assert after.ess.mean() > 4 * before.ess.mean()


def test_expression_without_cells_is_averaged_over_batches():
    wrapped = from_scvi(trained("batch"))
    x = wrapped.observations()[:4]
    z = torch.randn(2, 4, D, generator=seeded(5))
    column = list(wrapped.columns).index("batch") - 1 + wrapped.columns["X"]
    each = []
    for batch in range(3):
        x[:, column] = batch
        each.append(wrapped.expression(z, x))
    assert (each[0] - each[1]).abs().max() > 1e-6
    torch.testing.assert_close(wrapped.expression(z), torch.stack(each).mean(0))
    torch.testing.assert_close(wrapped.expression(z).sum(-1), torch.ones(2, 4))
    with pytest.raises(core.SettingError, match="extra_categorical_covs, extra_continuous_covs"):
        from_scvi(trained("covariates")).expression(z)


def test_observations_have_the_covariates_after_the_counts():
    model = trained("covariates")
    wrapped = from_scvi(model)
    assert dict(wrapped.columns) == {"X": N_GENES, "batch": 1, "extra_categorical_covs": 2, "extra_continuous_covs": 1}
    x = wrapped.observations()
    assert torch.equal(x[:, :N_GENES], torch.as_tensor(model.adata.X))
    assert x[:6, N_GENES].tolist() == [0, 1, 2, 0, 1, 2]
    torch.testing.assert_close(x[:, -1], torch.linspace(-1, 1, N_CELLS))
    assert torch.equal(wrapped.observations(indices=[5, 3]), x[[5, 3]])


def test_names_of_batches():
    adata = cells()
    batched = from_scvi(fitted(adata, setup={"batch_key": "batch"}))
    few = adata[5:17].copy()
    assert list(batched.batches()) == [str(name) for name in adata.obs["batch"]]
    assert list(batched.batches(few)) == [str(name) for name in adata.obs["batch"][5:17]]
    assert from_scvi(fitted(adata)).batches() is None


def test_other_cells_may_be_sparse_or_dense():
    from scipy import sparse

    wrapped = from_scvi(trained("batch"))
    other = cells(50, seed=7)
    dense = wrapped.observations(other)
    assert dense.shape == (50, N_GENES + 1)
    other.X = sparse.csr_matrix(other.X)
    assert torch.equal(wrapped.observations(other.copy()), dense)


def test_sampled_counts_have_the_mean_of_the_model(generator):
    wrapped = from_scvi(trained("nb"))
    x = wrapped.observations()[:2]
    z = torch.zeros(20_000, 2, D)
    drawn = wrapped.sample(x, z, generator=generator).double()
    mean = wrapped.conditional(x, z[:1]).log_mean.exp()[0]
    error = drawn.std(0) / len(z) ** 0.5
    assert_within(drawn.mean(0), mean, error, rate=1e-6)
    with pytest.raises(AssertionError, match="standard errors off"):
        assert_within(drawn.mean(0), 1.05 * mean, error, rate=1e-6)


def minified() -> Any:
    model = fitted(epochs=1)
    with isolated(0):
        model.adata.obsm["X_latent_qzm"], model.adata.obsm["X_latent_qzv"] = model.get_latent_representation(
            return_dist=True
        )
        model.minify_adata()
    return model


def untrained() -> Any:
    with isolated(0):
        adata = cells()
        scvi.model.SCVI.setup_anndata(adata)
        return scvi.model.SCVI(adata)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (minified, "minified without their counts; load it with the full AnnData"),
        (untrained, "call its train\\(\\) first"),
        (lambda: fitted(epochs=1, gene_likelihood="normal"), "'normal' is not one of counts; train with nb"),
        (torch.nn.Identity, "Identity cannot be wrapped: there is no adapter for it. SCVI, LinearSCVI.* can be"),
    ],
)
def test_models_that_cannot_be_wrapped_are_refused(make, message):
    with pytest.raises(core.SettingError, match=message):
        from_scvi(make())


def test_a_minified_model_with_counts_can_be_wrapped():
    model = fitted(gene_likelihood="nb")
    before = from_scvi(model)
    x = before.observations()
    with isolated(0):
        model.adata.obsm["X_latent_qzm"], model.adata.obsm["X_latent_qzv"] = model.get_latent_representation(
            return_dist=True
        )
        model.minify_adata(minified_data_type="latent_posterior_parameters_with_counts")
    after = from_scvi(model)
    assert torch.equal(after.observations(), x)
    assert torch.equal(after.encoder(x).loc, before.encoder(x).loc)


def test_invalid_observations_are_refused():
    wrapped: ScviModel = from_scvi(trained("batch"))
    x = wrapped.observations()[:3]
    with pytest.raises(core.ShapeError, match="x has 30 columns, the model takes 30 of X, 1 of batch"):
        wrapped.prepare(x[:, :N_GENES])
    x[1, :N_GENES] = 0
    with pytest.raises(core.DataError, match="1 of 3 cells have no counts"):
        wrapped.prepare(x)
