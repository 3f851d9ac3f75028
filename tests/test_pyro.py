"""Pyro programs as models: densities, draws and posteriors against closed forms, frozen parameters, refusals."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributions as td
from torch import Tensor, nn

import vaerdict as vd
from checks import assert_mean, assert_within
from vaerdict.core import Model, PriorDistribution, Proposal, SettingError, ShapeError
from vaerdict.models.ppca import PPCA
from vaerdict.noise import Iid, KeyedNoise, Sobol, seeded
from vaerdict.optional import isolated

pyro = pytest.importorskip("pyro")
import pyro.distributions as dist  # noqa: E402
from pyro import poutine  # noqa: E402
from pyro.infer import autoguide  # noqa: E402

DOUBLE = torch.float64
PPCA_MODEL = PPCA(torch.randn(5, 2, generator=seeded(0), dtype=DOUBLE), 0.8).requires_grad_(False)
X = 1.5 * torch.randn(6, 5, generator=seeded(1), dtype=DOUBLE)


@pytest.fixture(autouse=True)
def empty_parameter_store():
    pyro.clear_param_store()
    yield
    pyro.clear_param_store()


def zeros(*shape: int) -> Tensor:
    return torch.zeros(*shape, dtype=DOUBLE)


def weighted(model: Any, x: Tensor, n: int, generator: torch.Generator) -> vd.Posterior:
    """Draws of the guide with their weights."""
    z, log_q = model.guide.draw(x, n, generator=generator)
    return vd.from_weights(model.log_joint(x, z) - log_q, z)


# ------------------------------------------------------------------------------------------- latents per observation
class VAE(nn.Module):
    """The linear-Gaussian model as in Pyro's tutorial; the guide is the exact posterior, shifted and scaled."""

    def __init__(self, shift: float = 0.0, scale: float = 1.0) -> None:
        super().__init__()
        self.decoder = nn.utils.skip_init(nn.Linear, 2, 5, bias=False, dtype=DOUBLE)
        self.decoder.weight.data.copy_(PPCA_MODEL.weight)
        self.dropout = nn.Dropout(0.5)
        self.shift, self.scale = shift, scale

    def model(self, x: Tensor) -> Tensor:
        pyro.module("decoder", self.decoder)
        with pyro.plate("data", x.shape[0]):
            z = pyro.sample("z", dist.Normal(x.new_zeros(len(x), 2), x.new_ones(len(x), 2)).to_event(1))
            mean = self.dropout(self.decoder(z))  # the identity in evaluation mode
            return pyro.sample("x", dist.Normal(mean, 0.8).to_event(1), obs=x)

    def guide(self, x: Tensor) -> None:
        with pyro.plate("data", len(x)):
            q = self.posterior(x)
            pyro.sample("z", dist.MultivariateNormal(q.loc + self.shift, scale_tril=self.scale * q.root.tril))

    def posterior(self, x: Tensor) -> Any:
        return PPCA_MODEL.posterior(x)


def test_the_model_is_that_of_the_program(generator):
    wrapped = vd.from_pyro(VAE().model, VAE().guide, X[:1])
    assert isinstance(wrapped, Model)
    assert isinstance(wrapped.prior, PriorDistribution)
    assert isinstance(wrapped.guide, Proposal)
    z = torch.randn(4, 6, 2, generator=generator, dtype=DOUBLE)
    torch.testing.assert_close(wrapped.log_joint(X, z), PPCA_MODEL.log_joint(X, z))
    torch.testing.assert_close(wrapped.prior.log_prob(z, X), PPCA_MODEL.prior.log_prob(z))
    torch.testing.assert_close(wrapped.prior.log_prob(z), PPCA_MODEL.prior.log_prob(z))
    torch.testing.assert_close(wrapped.encoder.log_prob(z, X), PPCA_MODEL.posterior(X).log_prob(z))
    torch.testing.assert_close(wrapped.sites(z)["z"], z)
    many = X.expand(3, *X.shape)  # searches of modes have more batch axes
    torch.testing.assert_close(
        wrapped.log_joint(many, z.unsqueeze(1).expand(4, 3, 6, 2))[:, 1], wrapped.log_joint(X, z)
    )


@pytest.mark.parametrize("source", [Iid, Sobol, KeyedNoise], ids=lambda s: s.__name__)
def test_draws_are_those_of_the_guide(source, generator):
    wrapped = vd.from_pyro(VAE().model, VAE(scale=1.5).guide, X)
    noise = {Iid: generator, Sobol: Sobol(generator), KeyedNoise: KeyedNoise(0, 0, torch.arange(6))}[source]
    z, log_q = wrapped.guide.draw(X, 512, generator=noise)
    torch.testing.assert_close(log_q, wrapped.guide.log_prob(z, X))
    posterior = PPCA_MODEL.posterior(X)
    eps = torch.linalg.solve_triangular(1.5 * posterior.root.tril, (z - posterior.loc).unsqueeze(-1), upper=False)
    assert_mean(eps, 0.0, rate=1e-6)
    assert_mean(eps.square(), 1.0, rate=1e-6)


def test_a_bad_guide_is_seen_and_the_answer_is_right():
    good = vd.from_pyro(VAE().model, VAE(scale=1.1).guide, X)
    bad = vd.from_pyro(VAE().model, VAE(shift=1.5, scale=0.4).guide, X)
    first, second = (weighted(m, X, 1000, seeded(0)) for m in (good, bad))
    assert (first.verdict == vd.Verdict.OK).all()
    assert (second.khat > 0.7).all()
    assert (second.verdict == vd.Verdict.REFUSE).all()
    answer = vd.expect(bad, X, lambda z: z, bad.guide, tolerance=0.05, seed=0)
    assert (answer.verdict == vd.Verdict.OK).all()
    assert_within(answer.value, PPCA_MODEL.posterior(X).loc, answer.mcse, rate=1e-6)
    with pytest.raises(AssertionError, match="standard errors"):
        assert_within(answer.value + 0.2, PPCA_MODEL.posterior(X).loc, answer.mcse, rate=1e-6)


class TwoLevels(nn.Module):
    """A scalar a, a vector b around it in a nested plate, and an observation of b; the guide draws b, then a."""

    def model(self, x: Tensor, noise: Tensor) -> None:
        with pyro.plate("data", len(x), dim=-2):
            a = pyro.sample("a", dist.Normal(zeros(1, 1), 1.0))
            with pyro.plate("features", 3, dim=-1):
                b = pyro.sample("b", dist.Normal(a, 0.5))
                pyro.sample("x", dist.Normal(b, noise), obs=x)

    def guide(self, x: Tensor, noise: Tensor) -> None:
        with pyro.plate("data", len(x), dim=-2):
            with pyro.plate("features", 3, dim=-1):
                b = pyro.sample("b", dist.Normal(0.8 * x, 0.6))
            pyro.sample("a", dist.StudentT(5.0, 0.8 * b.mean(-1, keepdim=True), 0.4))


def test_several_sites_nested_plates_and_observations_of_several_parts(generator):
    x, noise = (
        torch.randn(4, 3, generator=generator, dtype=DOUBLE),
        0.5 + torch.rand(4, 1, generator=generator).double(),
    )
    wrapped = vd.from_pyro(TwoLevels().model, TwoLevels().guide, (x, noise))
    z, log_q = wrapped.guide.draw((x, noise), 20_000, generator=generator)  # a Student-t is drawn by Pyro
    assert z.shape == (20_000, 4, 4)
    a, b = z[..., :1], z[..., 1:]
    prior = td.Normal(zeros(1), 1.0).log_prob(a).sum(-1) + td.Normal(a, 0.5).log_prob(b).sum(-1)
    torch.testing.assert_close(wrapped.prior.log_prob(z, (x, noise)), prior)
    joint = prior + td.Normal(b, noise).log_prob(x).sum(-1)
    torch.testing.assert_close(wrapped.log_joint((x, noise), z), joint)
    given = td.Normal(0.8 * x, 0.6).log_prob(b).sum(-1) + td.StudentT(5.0, 0.8 * b.mean(-1), 0.4).log_prob(a[..., 0])
    torch.testing.assert_close(log_q, given)
    assert {name: v.shape[2:] for name, v in wrapped.sites(z).items()} == {"a": (1,), "b": (3,)}
    variance = torch.ones(3, 3).double() + torch.diag_embed(0.25 + noise.square().expand(4, 3))
    evidence = td.MultivariateNormal(zeros(3), variance).log_prob(x)
    for i in range(4):
        assert_mean((joint - log_q - evidence)[:, i].exp(), 1.0, rate=1e-6)
    by_name = vd.from_pyro(TwoLevels().model, TwoLevels().guide, {"x": x, "noise": noise})
    torch.testing.assert_close(by_name.log_joint({"x": x, "noise": noise}, z), joint)


def test_a_prior_given_the_condition_and_the_same_numbers_in_any_block(generator):
    """Posterior of two levels with x given a shift: normal, by conditioning the joint normal of a, b and x."""

    def model(x: Tensor, shift: Tensor) -> None:
        with pyro.plate("data", len(x)):
            a = pyro.sample("a", dist.Normal(shift, 1.0))
            b = pyro.sample("b", dist.Normal(a, 0.5))
            pyro.sample("x", dist.Normal(b, 0.7), obs=x)

    def guide(x: Tensor, shift: Tensor) -> None:
        with pyro.plate("data", len(x)):
            b = pyro.sample("b", dist.Normal(x, 1.0))
            pyro.sample("a", dist.StudentT(5.0, b, 1.0))

    x = torch.randn(2, 5, generator=generator, dtype=DOUBLE) + 1
    observations = (x[0], 2 * x[1])
    wrapped = vd.from_pyro(model, guide, observations)
    answers = [
        vd.expect(wrapped, observations, lambda z, x: z, wrapped.guide, tolerance=0.05, seed=0, block=block)
        for block in (2, 5)
    ]
    assert torch.equal(answers[0].value, answers[1].value)
    gain = torch.tensor([1.0, 1.25], dtype=DOUBLE) / (1.25 + 0.49)
    exact = (2 * x[1] + gain.unsqueeze(-1) * (x[0] - 2 * x[1])).T
    assert_within(answers[0].value, exact, answers[0].mcse, rate=1e-6)
    assert not torch.allclose(answers[0].value, exact + 0.2, atol=0.05)


def test_modules_of_a_plain_function_are_evaluated_without_dropout():
    vae = VAE()

    def model(x: Tensor) -> None:
        vae.model(x)

    wrapped = vd.from_pyro(model, vae.guide, X)
    z = torch.randn(2, 6, 2, generator=seeded(0), dtype=DOUBLE)
    torch.testing.assert_close(wrapped.log_joint(X, z), PPCA_MODEL.log_joint(X, z))
    assert vae.training


def test_masks_count_and_the_scale_of_a_subsample_does_not():
    def model(x: Tensor) -> None:
        with pyro.plate("data", 1000, subsample=x):
            z = pyro.sample("z", dist.Normal(x.new_zeros(len(x)), 1.0))
            with poutine.mask(mask=x[:, 0] > 0):
                pyro.sample("x", dist.Normal(z, 1.0), obs=x[:, 1])
            pyro.factor("extra", 0.5 * z)
            pyro.deterministic("twice", 2 * z)

    def guide(x: Tensor) -> None:
        with pyro.plate("data", 1000, subsample=x):
            pyro.sample("z", dist.Normal(x.new_zeros(len(x)), 1.0))

    x = torch.tensor([[1.0, 0.3], [-1.0, 0.2]], dtype=DOUBLE)
    z = torch.linspace(-2, 2, 10, dtype=DOUBLE).reshape(5, 2, 1)
    standard = td.Normal(zeros(1), 1.0)
    expected = standard.log_prob(z[..., 0]) + 0.5 * z[..., 0]
    expected[:, 0] += standard.log_prob(0.3 - z[:, 0, 0])
    torch.testing.assert_close(vd.from_pyro(model, guide, x).log_joint(x, z), expected)


def test_parameters_keep_the_values_they_had():
    vae, z = VAE(), torch.randn(3, 6, 2, generator=seeded(2), dtype=DOUBLE)

    def guide(x: Tensor) -> None:
        loc = pyro.param("loc", zeros(2))
        with pyro.plate("data", len(x)):
            pyro.sample("z", dist.Normal(loc.expand(len(x), 2), 1.0).to_event(1))

    wrapped = vd.from_pyro(vae.model, guide, X)
    before = wrapped.log_joint(X, z), wrapped.guide.log_prob(z, X)
    assert "loc" not in pyro.get_param_store()
    vae.decoder.weight.data.zero_()
    pyro.param("loc", zeros(2) + 3)
    assert torch.equal(wrapped.log_joint(X, z), before[0])
    assert torch.equal(wrapped.guide.log_prob(z, X), before[1])
    later = vd.from_pyro(vae.model, guide, X)
    assert not torch.equal(later.log_joint(X, z), before[0])
    assert not torch.equal(later.guide.log_prob(z, X), before[1])
    assert vae.training
    assert pyro.param("loc").tolist() == [3, 3]


def test_an_automatic_guide_of_local_latents_is_a_proposal_for_its_observations():
    vae = VAE()
    guide = autoguide.AutoNormal(vae.model)
    with isolated(0):
        guide(X)
    guide.locs.z = PPCA_MODEL.posterior(X).loc
    guide.scales.z = PPCA_MODEL.posterior(X).root.tril.diagonal(dim1=-2, dim2=-1)
    wrapped = vd.from_pyro(vae.model, guide, X)
    answer = vd.expect(wrapped, X, lambda z: z, wrapped.guide, tolerance=0.05, seed=0)
    assert_within(answer.value, PPCA_MODEL.posterior(X).loc, answer.mcse, rate=1e-6)
    with pytest.raises(ShapeError, match="made for observations"):
        wrapped.guide.draw(X[:3], 5, generator=seeded(0))


# ----------------------------------------------------------------------------------------------- global latents
COVARIATES = torch.randn(30, 2, generator=seeded(3), dtype=DOUBLE)
Y = COVARIATES @ torch.tensor([0.5, -1.0], dtype=DOUBLE) + 0.7 * torch.randn(30, generator=seeded(4), dtype=DOUBLE)


def regression(x: Tensor, y: Tensor) -> None:
    weight = pyro.sample("weight", dist.Normal(zeros(2), 1.0).to_event(1))
    sd = pyro.sample("sd", dist.HalfNormal(zeros(()) + 1.0))
    with pyro.plate("data", len(x)):
        pyro.sample("y", dist.Normal(x @ weight, sd), obs=y)


def exact_regression() -> tuple[Tensor, Tensor, Tensor]:
    """Log-evidence, and the posterior means of weight and sd, by quadrature over sd."""
    sd = torch.linspace(0.01, 4, 4000, dtype=DOUBLE)
    noise = sd.square()[:, None, None] * torch.eye(30, dtype=DOUBLE)
    marginal = td.MultivariateNormal(zeros(30), COVARIATES @ COVARIATES.T + noise)
    log_p = marginal.log_prob(Y) + td.HalfNormal(1.0).log_prob(sd)
    mean = torch.linalg.solve(
        COVARIATES.T @ COVARIATES + sd.square()[:, None, None] * torch.eye(2), (COVARIATES.T @ Y).expand(4000, 2)
    )
    share = log_p.softmax(0)
    return log_p.logsumexp(0) + (sd[1] - sd[0]).log(), share @ mean, share @ sd


@pytest.mark.parametrize("kind", ["AutoNormal", "AutoMultivariateNormal"])
def test_the_posterior_of_global_latents(kind, generator):
    guide = getattr(autoguide, kind)(regression, init_scale=0.15)
    with isolated(0):
        guide(COVARIATES, Y)
    evidence, weight, sd = exact_regression()
    start = torch.cat([weight, sd.log().unsqueeze(0)])
    if kind == "AutoNormal":
        guide.locs.weight, guide.locs.sd = weight, sd.log()
    else:
        guide.loc = nn.Parameter(start)
    wrapped = vd.from_pyro(regression, guide, args=(COVARIATES, Y))
    x = wrapped.observations()
    posterior = weighted(wrapped, x, 4000, generator)
    assert_mean((posterior.log_w - evidence).exp(), 1.0, rate=1e-6)
    assert (posterior.z[..., 2] > 0).all()
    answer = vd.expect(wrapped, x, lambda z: z, wrapped.guide, tolerance=0.02, seed=0)
    assert vd.Verdict.names(answer.verdict) == ["OK"]
    assert_within(answer.value[0], torch.cat([weight, sd.unsqueeze(0)]), answer.mcse[0], rate=1e-6)


def hierarchical(y: Tensor) -> None:
    scale = pyro.sample("scale", dist.Gamma(zeros(()) + 3.0, 2.0))  # its draws are no transform of normal numbers
    with pyro.plate("groups", 4):
        mean = pyro.sample("mean", dist.Normal(0.0, scale))
        pyro.sample("y", dist.Normal(mean, 1.0), obs=y)


def test_dependent_sites_are_drawn_one_after_the_other():
    def guide(y: Tensor) -> None:
        with pyro.plate("groups", 4):
            pyro.sample("mean", dist.Normal(0.5 * y, 1.0))
        pyro.sample("scale", dist.LogNormal(zeros(()), 0.5))

    y = torch.tensor([1.0, -0.5, 0.3, 2.0], dtype=DOUBLE)
    wrapped = vd.from_pyro(hierarchical, guide, args=(y,))
    z = wrapped.prior.draw(wrapped.observations(), 1500, generator=seeded(0)).z
    sites = wrapped.sites(z)
    assert_mean(sites["scale"], 1.5, rate=1e-6)
    assert_mean(sites["mean"] / sites["scale"].unsqueeze(-1), 0.0, rate=1e-6)
    assert_mean((sites["mean"] / sites["scale"].unsqueeze(-1)).square(), 1.0, rate=1e-6)
    q = wrapped.guide.draw(wrapped.observations(), 2000, generator=seeded(0))
    by_name = wrapped.sites(q.z)
    expected = td.Normal(0.5 * y, 1.0).log_prob(by_name["mean"]).sum(-1)
    expected += td.LogNormal(zeros(()), 0.5).log_prob(by_name["scale"])
    torch.testing.assert_close(q.log_q, expected)
    grid = torch.linspace(1e-3, 20, 5000, dtype=DOUBLE)
    log_p = td.Normal(0.0, (grid.square() + 1).sqrt().unsqueeze(-1)).log_prob(y).sum(-1)
    log_p += td.Gamma(zeros(()) + 3.0, 2.0).log_prob(grid)
    answer = vd.expect(wrapped, wrapped.observations(), lambda z: wrapped.sites(z)["scale"], wrapped.guide, seed=0)
    assert_within(answer.value, log_p.softmax(0) @ grid, answer.mcse, rate=1e-6)


# ------------------------------------------------------------------------------------------------------- refusals
def one_site(distribution: Callable[[int], Any], name: str = "z", plate: bool = True) -> Callable[[Tensor], None]:
    """A program with one latent site."""

    def program(x: Tensor) -> None:
        with pyro.plate("data", len(x)) if plate else poutine.messenger.Messenger():
            pyro.sample(name, distribution(len(x)))

    return program


def normal(n: int) -> Any:
    return dist.Normal(zeros(n, 2), 1.0).to_event(1)


def global_scale(x: Tensor) -> None:
    pyro.sample("scale", dist.LogNormal(zeros(()), 1.0))
    one_site(normal)(x)


def fixed_size(x: Tensor) -> None:
    with pyro.plate("data", 6):
        pyro.sample("z", dist.Normal(zeros(6), 1.0))
        pyro.sample("x", dist.Normal(zeros(6), 1.0), obs=x[:, 0])


def two_rows(x: Tensor) -> None:
    if len(x) == 3:
        raise ValueError("three")
    PLAIN(x)


def tempered(x: Tensor) -> None:
    with poutine.scale(scale=0.1):
        one_site(normal)(x)


def random_mean(x: Tensor) -> None:
    with pyro.plate("data", len(x)):
        z = pyro.sample("z", normal(len(x)))
        pyro.sample("x", dist.Normal(z + torch.randn(2), 1.0).to_event(1), obs=x[:, :2])


def coupled(x: Tensor) -> None:
    with pyro.plate("data", len(x)):
        z = pyro.sample("z", normal(len(x)))
        pyro.sample("x", dist.Normal(z - z.mean(0), 1.0).to_event(1), obs=x[:, :2])


PLAIN = one_site(normal)
REFUSED: dict[str, tuple[Any, Any, str]] = {
    "no plate": (one_site(normal, plate=False), PLAIN, "no plate over the observations"),
    "global latent": (global_scale, PLAIN, "latent site 'scale' is outside the plate 'data'.*args="),
    "fixed size": (fixed_size, PLAIN, r"'data' has 6 rows whatever x.*pyro.plate\('data', len\(x\)\)"),
    "two rows": (two_rows, PLAIN, r"but not on 3 of them.*pyro.plate\('data', len\(x\)\)"),
    "other sites": (PLAIN, one_site(normal, "u"), "sites of the guide are u, those of the model z"),
    "guide outside plate": (PLAIN, one_site(normal, plate=False), "guide's site 'z' is outside the plate"),
    "discrete model": (one_site(lambda n: dist.Poisson(torch.ones(n)).mask(True)), PLAIN, "discrete.*sum over it"),
    "discrete guide": (PLAIN, one_site(lambda n: dist.Categorical(torch.ones(n, 3))), "guide's latent site 'z' is dis"),
    "point": (PLAIN, one_site(lambda n: dist.Delta(zeros(n, 2)).to_event(1)), "has no density"),
    "other size": (
        PLAIN,
        one_site(lambda n: dist.Normal(zeros(n, 3), 1.0).to_event(1)),
        r"\(2,\).*\(3,\) in the guide",
    ),
    "simplex": (one_site(lambda n: dist.Dirichlet(torch.ones(n, 3))), PLAIN, "real numbers and intervals"),
    "narrow guide": (PLAIN, one_site(lambda n: dist.HalfNormal(torch.ones(n, 2)).to_event(1)), "only a part"),
    "tempered": (tempered, PLAIN, "scaled by 0.1; remove poutine.scale"),
    "random": (random_mean, PLAIN, "two runs of the model"),
    "coupled": (coupled, PLAIN, "depends on the other rows"),
    "not callable": (PLAIN, None, "guide is a NoneType"),
    "automatic": (PLAIN, autoguide.AutoMultivariateNormal(PLAIN), "use AutoNormal"),
    "not run": (PLAIN, autoguide.AutoNormal(PLAIN), "has not been run; train it first"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_used_is_refused_in_one_line(case):
    model, guide, message = REFUSED[case]
    with isolated(0), pytest.raises((SettingError, ShapeError)) as error:
        vd.from_pyro(model, guide, X)
    assert re.search(message, str(error.value))
    assert "\n" not in str(error.value).split("(")[0]


def test_all_data_are_refused_in_parts_and_without_a_way_to_map_particles():
    def half(y: Tensor) -> None:
        mean = pyro.sample("mean", dist.Normal(zeros(()), 1.0))
        with pyro.plate("data", 30, subsample_size=10) as rows:
            pyro.sample("y", dist.Normal(mean, 1.0), obs=y[rows])

    def branching(y: Tensor) -> None:
        mean = pyro.sample("mean", dist.Normal(zeros(()), 1.0))
        with pyro.plate("data", 30):
            pyro.sample("y", dist.Normal(mean if mean > 0 else 0 * mean, 1.0), obs=y)

    def guide(y: Tensor) -> None:
        pyro.sample("mean", dist.Normal(zeros(()), 1.0))

    with pytest.raises(SettingError, match="takes 10 of 30 rows at random"):
        vd.from_pyro(half, guide, args=(Y,))
    with pytest.raises(SettingError, match="cannot be mapped over particles"):
        vd.from_pyro(branching, guide, args=(Y,))
    with pytest.raises(SettingError, match=r"either x=.* or args="):
        vd.from_pyro(regression, guide)
