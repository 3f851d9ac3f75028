"""Every class of scvi-tools models that can be wrapped gives the reconstruction and KL terms of scvi-tools."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from inspect import signature
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.distributions import LogNormal, Normal, kl_divergence

from checks import assert_mean, assert_within
from vaerdict import core
from vaerdict.diagnostics import ess
from vaerdict.models.scvi import ADAPTERS, Scvi, from_scvi
from vaerdict.models.scvi.scanvi import ClassMixture
from vaerdict.noise import as_source, seeded
from vaerdict.optional import isolated
from vaerdict.priors import latent_type, log_prior
from vaerdict.refinement import refine

scvi = pytest.importorskip("scvi", reason="scvi-tools is not installed (extra `scvi`)")
anndata = pytest.importorskip("anndata")

N, GENES, REGIONS, PROTEINS, D = 120, 12, 16, 5, 3
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


def fitted(kind: Any, adata: Any, setup: dict[str, Any] | None, *, epochs: int = 2, **settings: Any) -> Any:
    with isolated(0):
        if setup is not None:
            kind.setup_anndata(adata, **setup)
        model = kind(adata, n_latent=D, n_hidden=8, **settings)
        quiet = {"accelerator": "cpu", "enable_progress_bar": False, "logger": False, "early_stopping": False}
        quiet |= {"reduce_lr_on_plateau": False} if kind is scvi.model.TOTALVI else {}
        if epochs:
            model.train(max_epochs=epochs, **quiet)
    return model


def scvi_of(setup: dict[str, Any] = COVARIATES, **settings: Any) -> Callable[[], Any]:
    return lambda: fitted(scvi.model.SCVI, cells(), setup, **settings)


def linear() -> Any:
    return fitted(scvi.model.LinearSCVI, cells(), {"batch_key": "batch"})


def poissonvi() -> Any:
    return fitted(scvi.external.POISSONVI, cells(REGIONS, 1.0), COVARIATES)


def peakvi(setup: dict[str, Any] = COVARIATES, **settings: Any) -> Callable[[], Any]:
    return lambda: fitted(scvi.model.PEAKVI, cells(REGIONS, 0.5), setup, **settings)


def scanvi(**settings: Any) -> Callable[[], Any]:
    setup = {**COVARIATES, "labels_key": "type", "unlabeled_category": "none"}
    return lambda: fitted(scvi.model.SCANVI, cells(), setup, **settings)


def proteins() -> np.ndarray:
    """Counts of proteins, of which the last was not measured in the first batch."""
    counts = np.random.default_rng(1).poisson(20.0, (N, PROTEINS))
    counts[::3, -1] = 0
    return counts.astype(np.float32)


def totalvi(setup: dict[str, Any] = COVARIATES, **settings: Any) -> Callable[[], Any]:
    def make() -> Any:
        adata = cells()
        adata.obsm["proteins"] = proteins()
        return fitted(scvi.model.TOTALVI, adata, {**setup, "protein_expression_obsm_key": "proteins"}, **settings)

    return make


def multivi(*, with_proteins: bool = False, size_factors: bool = False, **settings: Any) -> Callable[[], Any]:
    """Cells of which the first third has no regions, and the second no genes."""

    def make() -> Any:
        mudata = pytest.importorskip("mudata")
        genes, regions, surface = cells(), cells(REGIONS, 0.5), annotated(proteins())
        regions.X[: N // 3], genes.X[N // 3 : 2 * N // 3] = 0, 0
        modalities = {"rna": genes, "atac": regions} | ({"protein": surface} if with_proteins else {})
        with isolated(0):
            data = mudata.MuData(modalities)
            data.obs["rna_depth"], data.obs["atac_depth"] = np.linspace(50, 90, N), np.linspace(0.2, 0.9, N)
            keys = {"size_factor_key": ["rna_depth", "atac_depth"]} if size_factors else {}
            layers = {f"{name}_layer": name for name in modalities}
            covariates = dict.fromkeys(COVARIATES, "rna")
            scvi.model.MULTIVI.setup_mudata(data, **COVARIATES, **keys, modalities={**layers, **covariates})
        return fitted(scvi.model.MULTIVI, data, None, **settings)

    return make


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
    "SCANVI": Case(scanvi(), ("z2", "z1")),
    "SCANVI-library": Case(scanvi(use_observed_lib_size=False, gene_likelihood="nb"), ("z2", "z1", "l")),
    "TOTALVI": Case(totalvi(), ("z", "b")),
    "TOTALVI-library": Case(totalvi(use_observed_lib_size=False, gene_likelihood="zinb"), ("z", "l", "b")),
    "TOTALVI-size-factor": Case(totalvi({"size_factor_key": "depth"}, latent_distribution="ln"), ("z", "b")),
    "TOTALVI-panel": Case(
        totalvi({"panel_key": "chemistry"}, gene_dispersion="gene-batch", protein_dispersion="protein-batch"),
        ("z", "b"),
    ),
    "MULTIVI": Case(multivi(encode_covariates=True)),
    "MULTIVI-cell": Case(multivi(modality_weights="cell", gene_likelihood="poisson", size_factors=True)),
    "MULTIVI-proteins": Case(multivi(with_proteins=True, gene_likelihood="nb"), ("z", "b")),
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
    """The model of a case in double precision, to which scvi-tools is held where it would convert to float32."""
    model = trained(name)
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)
    return model


def tensors_of(model: Any) -> dict[str, Tensor]:
    (tensors,) = model._make_data_loader(adata=model.adata, batch_size=N)
    return {key: doubled(t) for key, t in tensors.items()}


def doubled(value: Any) -> Any:
    return value.double() if isinstance(value, Tensor) and value.is_floating_point() else value


def inferred_by_scvi(module: Any, tensors: dict[str, Tensor]) -> dict[str, Any]:
    inputs = module._get_inference_input(tensors)  # makes proteins in float32 where there are none
    return module.inference(**{key: doubled(value) for key, value in inputs.items()})


def loss_of_scvi(model: Any, latents: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """The reconstruction and KL terms of scvi-tools at given latents in place of its draws. Shapes: ``(cells,)``."""
    module = model.module.eval()
    with isolated(0), torch.no_grad():
        tensors = tensors_of(model)
        inferred = inferred_by_scvi(module, tensors)
        encoder = next(getattr(module, key) for key in ENCODERS if hasattr(module, key))
        inferred["z"] = encoder.z_transformation(latents["z"])
        if "l" in latents:
            inferred["library"], inferred["library_gene"] = latents["l"], latents["l"].exp()
        generated = module.generative(**module._get_generative_input(tensors, inferred))
        if "b" in latents:
            py, rate = generated["py_"], latents["b"].exp()
            py["rate_back"], py["rate_fore"] = rate, rate * py["fore_scale"]
        with patch.object(np, "float32", np.float64):  # the type of the mask of proteins
            loss = module.loss(tensors, inferred, generated)
    kl = {key: value for key, value in loss.kl_local.items() if key != "kl_divergence_paired"}
    if "kl_div_back_pro" in kl:
        kl["not of the density"] = -penalties(generated)
    return -sum(loss.reconstruction_loss.values()), sum(kl.values())  # type: ignore[return-value]


ENCODERS = ("z_encoder", "encoder", "z_encoder_accessibility")


def penalties(generated: Any) -> Tensor:
    """The terms that TOTALVI adds to the divergence of the background: of its factors and of the mixture."""
    factors = LogNormal(0.0, 1.0).log_prob(generated["per_batch_efficiency"])
    return -(factors + 1e-3 * torch.nn.functional.logsigmoid(generated["py_"]["mixing"])).sum(-1)


def kl_of(wrapped: Any, x: Tensor, latents: dict[str, Tensor]) -> Tensor:
    """KL(q || p) of normal latents given those before them, in closed form. Shapes: ``-> (cells,)``."""
    total = torch.zeros(N, dtype=x.dtype)
    for latent, prior in wrapped.latents().items():
        q = wrapped.encode(wrapped.cells(x))[latent]
        q = q(latents) if callable(q) else q
        if latent == "z":
            p = Normal(0, 1)
        else:
            p = prior(**{key: x if key == "x" else latents[key] for key in signature(prior).parameters}).base_dist
        total = total + kl_divergence(Normal(q.loc, q.root.scale), p).sum(-1)
    return total


@pytest.mark.parametrize("name", [name for name in CASES if "SCANVI" not in name], indirect=True)
def test_the_terms_of_the_loss_are_those_of_scvi(name, model):
    wrapped = from_scvi(model)
    x = wrapped.observations()
    z, _ = wrapped.encoder.draw(x, 2, generator=seeded(1))
    ours = wrapped.log_likelihood(wrapped.prepare(x), z)
    for k in range(2):
        latents = {"z": z[k]} if isinstance(z, Tensor) else {key: t[k] for key, t in z._asdict().items()}
        log_likelihood, kl = loss_of_scvi(model, latents)
        torch.testing.assert_close(ours[k], log_likelihood, rtol=1e-11, atol=PADDING)
        torch.testing.assert_close(kl_of(wrapped, x, latents), kl, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("name", ["SCANVI", "SCANVI-library"], indirect=True)
def test_the_terms_of_the_loss_of_a_scanvi(model, monkeypatch):
    wrapped, module = from_scvi(model), model.module.eval()
    x, classes = wrapped.observations(), torch.arange(2)[:, None, None]
    z, _ = wrapped.encoder.draw(x, 1, generator=seeded(1))
    prior, mixture = wrapped.latents(), wrapped.encode(wrapped.cells(x))["z2"](z._asdict())
    weight, log_class = mixture.log_weight.exp(), prior["y"].log_prob(classes)
    with isolated(0), torch.no_grad():
        tensors = tensors_of(model)
        inferred = inferred_by_scvi(module, tensors) | {"z": z.z1[0]}
        inferred["library"] = z.l[0] if "l" in z._fields else inferred["library"]
        generated = module.generative(**module._get_generative_input(tensors, inferred))
        theirs = module.encoder_z2_z1.forward
        monkeypatch.setattr(module.encoder_z2_z1, "forward", lambda *a: (theirs(*a)[0], z.z2[0].repeat(2, 1)))
        loss = module.loss(tensors, inferred, generated)
    log_joint = wrapped.log_joint(x, latent_type("y", *z._fields)(classes.expand(2, 1, N), *z))
    rest = log_class + prior["z2"].log_prob(z.z2) + (prior["l"](x).log_prob(z.l) if "l" in prior else 0)
    ours = (weight * (log_joint - rest)).sum(0) - wrapped.encode(wrapped.cells(x))["z1"].log_prob(z.z1)
    (reconstruction,), (kl,) = loss.reconstruction_loss.values(), loss.kl_local.values()
    torch.testing.assert_close(ours[0], -reconstruction, rtol=1e-11, atol=PADDING)
    divergence = kl_divergence(Normal(mixture.loc, mixture.scale), Normal(0, 1)).sum(-1) - log_class
    ours = (weight * (mixture.log_weight + divergence)).sum(0)[0]
    if "l" in prior:
        q = wrapped.encode(wrapped.cells(x))["l"]
        ours = ours + kl_divergence(Normal(q.loc, q.root.scale), prior["l"](x).base_dist).sum(-1)
    torch.testing.assert_close(ours, kl, rtol=1e-11, atol=1e-12)


def test_the_encoder_is_a_proposal_of_the_continuous_latents(name, model):
    wrapped = from_scvi(model)
    x = wrapped.observations()
    before = torch.get_rng_state()
    z, log_q = wrapped.encoder.draw(x, 3, generator=seeded(1))
    assert isinstance(wrapped.encoder, core.Proposal)
    assert CASES[name].latents == (("z",) if isinstance(z, Tensor) else z._fields)
    assert log_q.shape == (3, N)
    torch.testing.assert_close(wrapped.encoder.log_prob(z, x), log_q)
    if "y" in wrapped.latents():
        z = latent_type("y", *z._fields)(torch.zeros(3, N, dtype=torch.long), *z)
    log_p = wrapped.log_joint(x, z)
    assert log_p.shape == (3, N)
    assert bool(log_p.isfinite().all())
    torch.testing.assert_close(wrapped.log_joint(wrapped.prepare(x), z), log_p)
    folded = core.map_latent(lambda t: t.reshape(3, 4, N // 4, *t.shape[2:]), z)
    torch.testing.assert_close(wrapped.log_joint(x.reshape(4, N // 4, -1), folded).reshape(3, N), log_p)
    assert torch.equal(torch.get_rng_state(), before)


def test_covariates_matter(name, model):
    """Another batch, covariate or size factor changes the density of every cell; the index of a cell does not."""
    wrapped = from_scvi(model)
    x, z = wrapped.observations(), drawn(wrapped)
    log_p, start = wrapped.log_joint(x, z), 0
    covariates = {key: width for key, width in wrapped.columns.items() if key not in ("X", "proteins", "atac")}
    for key, width in wrapped.columns.items():
        if key in covariates:
            other = x.clone()
            column = other[:, start]
            other[:, start] = 1 - column.clamp_max(1) if key in WHOLE else column + 0.1
            changed = wrapped.log_joint(other, z) != log_p
            assert bool(changed.any()) == (key != "ind_x"), key
            assert float(changed.double().mean()) > 0.6 or key in ("ind_x", "size_factor"), key
        start += width
    assert set(covariates) >= ({"batch", "extra_categorical_covs", "extra_continuous_covs"} if name in MAIN else set())


WHOLE = ("batch", "panel", "extra_categorical_covs", "ind_x")
MAIN = ("SCVI", "POISSONVI", "PEAKVI", "SCANVI", "TOTALVI", "MULTIVI")


def drawn(wrapped: Any, k: int = 1) -> Any:
    """Latents from the encoder, in the first class where there are classes."""
    z = wrapped.encoder.draw(wrapped.observations(), k, generator=seeded(1)).z
    return with_class(z, torch.zeros(k, N, dtype=torch.long)) if "y" in wrapped.latents() else z


def with_class(z: Any, y: Tensor) -> Any:
    return latent_type("y", *z._fields)(y, *z)


def test_the_prior_is_that_of_the_joint_density(name, model):
    wrapped = from_scvi(model)
    if CASES[name].latents != ("z",):
        pytest.importorskip("vaerdict.priors")
    x, z = wrapped.observations(), drawn(wrapped, 2)
    names = ["z"] if isinstance(z, Tensor) else list(z._fields)
    assert list(wrapped.latents()) == names
    log_p = wrapped.prior.log_prob(z) if names == ["z"] else wrapped.prior.log_prob(z, x)
    torch.testing.assert_close(log_p, log_prior(wrapped.prior, z, wrapped.prepare(x)))


@pytest.mark.parametrize("make", [scvi_of({}), peakvi({}), totalvi({})])
def test_what_was_not_registered_does_not_matter(make):
    wrapped = from_scvi(make())
    other = wrapped._source.model.adata.copy()
    other.obs["batch"], other.obs["age"] = "first", 7.0
    assert set(wrapped.columns) <= {"X", "proteins"}
    assert torch.equal(wrapped.observations(other), wrapped.observations())


@pytest.mark.parametrize("name", ["TOTALVI"], indirect=True)
def test_proteins_that_were_not_measured_do_not_matter(model):
    wrapped = from_scvi(model)
    x, z = wrapped.observations(), drawn(wrapped)
    log_p, last = wrapped.log_joint(x, z), GENES + PROTEINS - 1
    x[:, last] += 3
    changed = wrapped.log_joint(x, z)[0] != log_p[0]
    assert torch.equal(changed, torch.arange(N) % 3 != 0)
    prior, q = wrapped.background_prior(x), wrapped.encode(wrapped.cells(x))["b"](z._asdict())
    assert torch.equal(q.loc[0, ::3, -1], prior.mean[::3, -1])
    assert not torch.equal(q.loc[0, 1::3, -1], prior.mean[1::3, -1])


@pytest.mark.parametrize("name", ["SCANVI", "SCANVI-library"], indirect=True)
def test_the_classes_of_a_scanvi(model):
    """One class at a time or all in front give the same density, and its softmax is the class probability."""
    wrapped = from_scvi(model)
    x = wrapped.observations()
    z = wrapped.encoder.draw(x, 3, generator=seeded(2)).z
    classes = torch.arange(2)[:, None, None].expand(2, 3, N)
    log_p = wrapped.log_joint(x, with_class(z, classes))
    assert list(wrapped.classes) == ["a", "b"]
    torch.testing.assert_close(log_p, torch.stack([wrapped.log_joint(x, with_class(z, y)) for y in classes]))
    torch.testing.assert_close(wrapped.class_probabilities(z), log_p.softmax(0).movedim(0, -1))
    assert float((log_p[0] - log_p[1]).abs().min()) > 0


def test_draws_of_a_mixture_over_classes_have_its_density():
    n = 50_000
    weight, loc = torch.tensor([0.2, 0.5, 0.3]).double(), torch.tensor([[-2.0, 0.0], [1.0, 1.0], [3.0, -1.0]]).double()
    scale = torch.tensor([[0.5, 1.0], [1.0, 0.7], [0.8, 0.8]]).double()
    mixture = ClassMixture(
        weight.log()[:, None, None].expand(3, n, 1), *(t[:, None, None].expand(3, n, 1, 2) for t in (loc, scale))
    )
    z = mixture.particles(n, (1,), as_source(seeded(0)))
    mean = (weight[:, None] * loc).sum(0)
    assert_within(z.mean(0)[0], mean, z.std(0)[0] / n**0.5, rate=1e-6)
    # the ratio to a normal with lighter tails is bounded and has mean one
    inside = Normal(torch.tensor([0.5, 0.0]).double(), 0.5)
    ratio = (inside.log_prob(z).sum(-1) - mixture.log_prob(z)).exp()
    assert_mean(ratio[:, 0], 1.0, rate=1e-6)
    with pytest.raises(AssertionError, match="standard errors"):
        assert_mean(1.1 * ratio[:, 0], 1.0, rate=1e-6)


@pytest.mark.parametrize("name", ["PEAKVI", "POISSONVI", "MULTIVI"], indirect=True)
def test_posteriors_of_one_latent_are_refined(model, generator):
    wrapped = from_scvi(model)
    x = wrapped.observations()[:20]
    local = refine(wrapped, x, wrapped.encoder)
    assert bool((local.log_joint > wrapped.log_joint(x, wrapped.encoder(x).loc[None])[0]).all())
    share = []
    for q in (wrapped.encoder, local.distribution):
        z, log_q = q.draw(x, 500, generator=generator)
        share.append(float(ess(wrapped.log_joint(x, z) - log_q).mean()) / 500)
    assert share[1] > 1.5 * share[0]


@pytest.mark.parametrize("name", ["SCANVI-library", "TOTALVI-library", "MULTIVI-proteins"], indirect=True)
def test_gradients_are_in_the_latents_alone(model):
    wrapped = from_scvi(model)
    x, z = wrapped.prepare(wrapped.observations()), drawn(wrapped)
    moving = [t.requires_grad_() for t in z if t.is_floating_point()]
    gradients = torch.autograd.grad(wrapped.log_joint(x, z).sum(), moving)
    steps = [1e-6 * torch.randn(t.shape, generator=seeded(i), dtype=t.dtype) for i, t in enumerate(moving)]
    ends = []
    for sign in (1, -1):
        shifted = iter(t.detach() + sign * step for t, step in zip(moving, steps, strict=True))
        ends.append(wrapped.log_joint(x, type(z)(*(next(shifted) if t.is_floating_point() else t for t in z))).sum())
    change = 2 * sum((g * step).sum() for g, step in zip(gradients, steps, strict=True))
    torch.testing.assert_close(change, ends[0] - ends[1], rtol=1e-5, atol=0)
    assert not any(p.requires_grad for p in wrapped.parameters())


@pytest.mark.parametrize("scale", [30.0, 1000.0])
def test_latents_far_from_all_cells_have_a_density(name, scale):
    """In single precision, where the exponentials of such latents overflow."""
    wrapped = from_scvi(trained(name)).float()
    x, z = wrapped.observations(), drawn(wrapped, 4)
    far = core.map_latent(lambda t: scale * t if t.is_floating_point() else t, z)
    assert not bool(wrapped.log_joint(x, far).isnan().any())


# ------------------------------------------------------------------------------------------- refused, and added
def autozi() -> Any:
    with isolated(0):
        scvi.model.AUTOZI.setup_anndata(adata := cells())
        return scvi.model.AUTOZI(adata)


def mrvi() -> Any:
    with isolated(0):
        kind = scvi.external.MRVI
        one_of_two = {"backend": "torch"} if "backend" in signature(kind.setup_anndata).parameters else {}
        kind.setup_anndata(adata := cells(), sample_key="batch", **one_of_two)
        return kind(adata)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (autozi, "AUTOZI cannot be wrapped: its probabilities of zero inflation are latents of genes"),
        (mrvi, "MRVI cannot be wrapped: the shift of its second cell state is a point estimate"),
        (type("SpatialStereoscope", (), {}), "SpatialStereoscope cannot be wrapped: a cell is explained by"),
        (type("RESOLVI", (), {}), "RESOLVI cannot be wrapped: a cell is explained by its neighbours"),
        (type("NEWVI", (), {}), "NEWVI cannot be wrapped: there is no adapter for it.*CONTRIBUTING.md"),
        (scanvi(dispersion="gene-label", epochs=0), "dispersion='gene-label' of a SCANVI takes the registered label"),
        (
            scanvi(latent_distribution="ln", epochs=0),
            "latent_distribution='ln' evaluates the density",
        ),
        (multivi(dispersion="gene-batch", epochs=0), "dispersion='gene-batch' of a MULTIVI is not used"),
    ],
)
def test_models_that_cannot_be_wrapped_are_refused(make, message):
    with pytest.raises(core.SettingError, match=message):
        from_scvi(make())


def test_weights_per_cell_are_of_the_cells_trained_on():
    wrapped = from_scvi(trained("MULTIVI-cell"))
    assert wrapped.observations(indices=[3]).shape == (1, sum(wrapped.columns.values()))
    with pytest.raises(core.SettingError, match="those of the cells trained on; leave out adata"):
        wrapped.observations(multivi(epochs=0)().adata)


class OwnVAE(scvi.module.VAE):
    """A module of a user."""


def test_an_adapter_can_be_added(monkeypatch):
    model = scvi_of()()
    model.module.__class__ = OwnVAE
    with pytest.raises(core.SettingError, match="SCVI cannot be wrapped: there is no adapter for it"):
        from_scvi(model)
    monkeypatch.setitem(ADAPTERS, f"{__name__}.OwnVAE", Scvi)
    assert isinstance(from_scvi(model), Scvi)
