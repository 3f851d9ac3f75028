"""Closed forms of pPCA against scipy and against its own simulations."""

from __future__ import annotations

import pytest
import torch
from scipy import stats
from torch import Tensor

from checks import assert_mean
from vaerdict.core import SettingError, ShapeError
from vaerdict.models.ppca import PPCA, LambdaPPCA, LinearGaussian
from vaerdict.networks import stack
from vaerdict.noise import seeded


def model_of(kind: str, seed: int = 0) -> LinearGaussian:
    g = seeded(seed)
    weight = torch.randn(5, 2, generator=g, dtype=torch.double)
    mean = torch.randn(5, generator=g, dtype=torch.double)
    if kind == "lambda":
        return LambdaPPCA(weight, 0.6 - 0.3 * seed, mean)
    return PPCA(weight, 0.3 + torch.rand(5, generator=g, dtype=torch.double), mean)


@pytest.fixture(params=["free", "lambda"])
def kind(request) -> str:
    return request.param


@pytest.fixture
def x(generator) -> Tensor:
    return 2 * torch.randn(4, 5, generator=generator, dtype=torch.double)


@torch.no_grad()
def test_the_evidence_is_the_marginal_normal_of_x(kind, x):
    model = model_of(kind)
    matrix = model.loading @ model.loading.mT + torch.diag(model.noise_sd**2)
    exact = stats.multivariate_normal(model.center.numpy(), matrix.numpy()).logpdf(x.numpy())
    torch.testing.assert_close(model.log_evidence(x), torch.as_tensor(exact))


@torch.no_grad()
def test_joint_is_posterior_times_evidence_at_every_z(kind, x, generator):
    model = model_of(kind)
    z = 3 * torch.randn(7, 4, 2, generator=generator, dtype=torch.double)
    torch.testing.assert_close(model.log_joint(x, z), model.posterior(x).log_prob(z) + model.log_evidence(x))
    likelihood = torch.distributions.Normal(model.center + z @ model.loading.mT, model.noise_sd).log_prob(x).sum(-1)
    torch.testing.assert_close(model.log_joint(x, z), likelihood + model.prior.log_prob(z))


@torch.no_grad()
def test_inflating_the_posterior_scales_its_covariance(kind, x):
    model = model_of(kind)
    wide, exact = model.posterior(x, inflate=1.5), model.posterior(x)
    torch.testing.assert_close(exact.covariance(), model.posterior_covariance().expand(4, 2, 2))
    torch.testing.assert_close(wide.covariance(), 1.5 * exact.covariance())
    assert torch.equal(wide.loc, exact.loc)


@torch.no_grad()
def test_tail_probability_is_that_of_the_posterior(kind, x):
    model = model_of(kind)
    nu = torch.tensor([-1.0, 0.0, 0.5], dtype=torch.double)
    posterior = model.posterior(x)
    sd = posterior.covariance()[:, 0, 0].sqrt().unsqueeze(1).numpy()
    exact = stats.norm.sf(nu.numpy(), posterior.loc[:, :1].numpy(), sd)
    torch.testing.assert_close(model.tail_probability(x, nu), torch.as_tensor(exact))
    assert model.tail_probability(x.expand(3, 4, 5), nu).shape == (3, 4, 3)


@torch.no_grad()
def test_thresholds_of_tails_may_be_a_float_a_sequence_or_a_tensor(kind, x):
    model = model_of(kind)
    expected = model.tail_probability(x, torch.tensor([0.3, 1.0], dtype=torch.double))
    assert torch.equal(model.tail_probability(x, [0.3, 1.0]), expected)
    assert torch.equal(model.tail_probability(x, 0.3), expected[:, 0])
    assert torch.equal(model.tail_probability(x, 1), expected[:, 1])
    assert torch.equal(model.tail_probability(x[0], 0.3), expected[0, 0])
    batch = x.expand(3, 4, 5)
    assert model.tail_probability(batch, 0.3).shape == (3, 4)
    assert model.tail_probability(batch, (0.3,)).shape == model.tail_probability(batch, torch.tensor(0.3)).shape


@torch.no_grad()
def test_simulated_pairs_come_from_the_model(kind, generator):
    model = model_of(kind)
    x, z = model.simulate(20_000, generator=generator)
    tail = model.tail_probability(x, torch.zeros(1, dtype=torch.double))[:, 0]
    assert_mean((z[:, 0] >= 0).double() - tail, 0.0, rate=1e-6)  # calibrated: the posterior is that of the simulator
    with pytest.raises(AssertionError, match="standard errors"):
        assert_mean((z[:, 0] >= 0.05).double() - tail, 0.0, rate=1e-6)
    entropy = torch.distributions.MultivariateNormal(
        model.center, model.loading @ model.loading.mT + torch.diag(model.noise_sd**2)
    ).entropy()
    assert_mean(model.log_evidence(x), -entropy.item(), rate=1e-6)


@pytest.mark.parametrize("noise", [1e-3, 1e-4])
@torch.no_grad()
def test_evidence_in_single_precision_is_that_in_double(noise, generator):
    """With little noise the covariance of x is singular in float32; only the rounding of x may remain."""
    single = PPCA(torch.randn(10, 6, generator=generator), noise)
    double = PPCA(single.weight.double(), noise)
    with torch.no_grad():
        double.log_noise.copy_(single.log_noise)
    x = single.simulate(50, generator=generator)[0]
    assert single.log_evidence(x).dtype == torch.float32
    torch.testing.assert_close(single.log_evidence(x), double.log_evidence(x.double()).float(), rtol=1e-5, atol=1e-4)


def test_parameters_and_buffers_are_on_the_device_of_the_loadings(kind):
    loadings = torch.empty(3, 2, device="meta")
    model = LambdaPPCA(loadings, 0.5) if kind == "lambda" else PPCA(loadings, torch.tensor(0.5))
    assert {t.device.type for t in (*model.parameters(), *model.buffers())} == {"meta"}


@torch.no_grad()
def test_the_generator_may_be_on_another_device(kind):
    """Noise is drawn on the generator's device and moved to the model's."""
    x, z = model_of(kind).to("meta").simulate(4, generator=seeded(0))
    assert (x.device.type, x.shape) == ("meta", (4, 5))
    assert (z.device.type, z.shape) == ("meta", (4, 2))


@pytest.mark.parametrize("shared", [True, False])
@torch.no_grad()
def test_a_stack_agrees_with_its_members(kind, shared, generator):
    models = [model_of(kind, seed) for seed in range(3)]
    if shared:  # equal buffers are not repeated, so that the loadings have two axes
        for model in models[1:]:
            for name, buffer in model.named_buffers():
                buffer.copy_(models[0].get_buffer(name))
    stacked = stack(models)
    x = torch.randn(3, 4, 5, generator=generator, dtype=torch.double)
    z = torch.randn(6, 3, 4, 2, generator=generator, dtype=torch.double)
    nu = torch.tensor([0.0, 1.0], dtype=torch.double)
    posterior, tails = stacked.posterior(x), stacked.tail_probability(x, nu)
    for m, model in enumerate(models):
        torch.testing.assert_close(stacked.log_joint(x, z)[:, m], model.log_joint(x[m], z[:, m]))
        torch.testing.assert_close(stacked.log_evidence(x)[m], model.log_evidence(x[m]))
        torch.testing.assert_close(tails[m], model.tail_probability(x[m], nu))
        torch.testing.assert_close(posterior.loc[m], model.posterior(x[m]).loc)
        torch.testing.assert_close(posterior.covariance()[m], model.posterior(x[m]).covariance())


def test_lambda_sets_noise_and_off_diagonal_loadings():
    model = LambdaPPCA(torch.ones(3, 2, dtype=torch.double), 0.6)
    torch.testing.assert_close(model.noise_sd.square(), torch.full((3,), 1 / (1 - 0.36), dtype=torch.double))
    e = torch.tensor(0.6, dtype=torch.double).exp().item()
    torch.testing.assert_close(model.loading, torch.tensor([[1, e], [e, 1], [e, e]], dtype=torch.double))
    torch.testing.assert_close(model.lam.item(), 0.6)


def test_the_gradient_of_the_parameter(kind, x):
    model = model_of(kind)
    (name,) = dict(model.named_parameters())
    assert name == {"free": "log_noise", "lambda": "raw"}[kind]
    value = model.get_parameter(name).detach().requires_grad_()

    def evidence(v: Tensor) -> Tensor:
        return torch.func.functional_call(Evidence(model), {f"model.{name}": v}, (x,))

    assert torch.autograd.gradcheck(evidence, (value,))


class Evidence(torch.nn.Module):
    def __init__(self, model: LinearGaussian) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        return self.model.log_evidence(x)


@pytest.mark.parametrize(
    ("build", "error", "message"),
    [
        (lambda: PPCA(torch.ones(3), 1.0), ShapeError, r"weight has shape \(3,\); expected \(features, latents\)"),
        (lambda: LambdaPPCA(torch.ones(3), 0.1), ShapeError, r"base has shape \(3,\)"),
        (lambda: PPCA(torch.ones(3, 2), 0.0), SettingError, "minimum 0; it must be positive and finite"),
        (lambda: PPCA(torch.ones(3, 2), torch.tensor([1.0, torch.nan, 1.0])), SettingError, "positive and finite"),
        (lambda: PPCA(torch.ones(3, 2), 1.0, torch.zeros(2)), ShapeError, "one value for each of 3 features"),
        (lambda: LambdaPPCA(torch.ones(3, 2), 1.0), SettingError, r"lam=1.0 must lie in \(-1, 1\)"),
    ],
)
def test_invalid_models_are_refused(build, error, message):
    with pytest.raises(error, match=message):
        build()


@pytest.mark.parametrize("features", [1, 4])
def test_observations_and_latents_of_the_wrong_size_are_refused(features):
    model, x = PPCA(torch.ones(3, 2), 1.0), torch.zeros(6, features)
    for call in (model.log_evidence, model.posterior, lambda x: model.log_joint(x, torch.zeros(1, 6, 2))):
        with pytest.raises(ShapeError, match=f"x has {features} features, the model 3; pass the features"):
            call(x)
    with pytest.raises(ShapeError, match="z has 5 latents, the model 2; make both with the same latent dimension"):
        model.log_joint(torch.zeros(6, 3), torch.zeros(1, 6, 5))
