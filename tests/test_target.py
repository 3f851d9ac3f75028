"""Models with bounded latents on R^d: densities, weights, rounding at the bounds, and a posterior in closed form."""

from __future__ import annotations

import math

import pytest
import torch
import torch.distributions as td
from torch import Tensor
from torch.distributions import constraints

from checks import assert_mean, assert_within
from vaerdict.core import Draws, Model, PriorDistribution, Proposal, SettingError
from vaerdict.distributions import Diagonal, Elliptical, StandardNormal
from vaerdict.inference.target import Target
from vaerdict.noise import Sobol, seeded
from vaerdict.proposals import Mixture, Prior
from vaerdict.refinement import refine
from vaerdict.samplers import smc

DOUBLE = torch.float64
ONE = torch.ones(1, dtype=DOUBLE)


class Mixed(td.Distribution):
    """One coordinate uniform in (-1, 2), one exponential, one normal."""

    arg_constraints = {}  # noqa: RUF012
    support = constraints.cat([constraints.interval(-1, 2), constraints.positive, constraints.real], dim=-1)

    def __init__(self) -> None:
        self.parts = [td.Uniform(-ONE, 2 * ONE), td.Exponential(ONE), td.Normal(0 * ONE, ONE)]
        super().__init__(event_shape=torch.Size((3,)))

    def log_prob(self, value: Tensor) -> Tensor:
        self._validate_sample(value)
        columns = zip(self.parts, value.split(1, -1), strict=True)
        return sum(part.log_prob(column).sum(-1) for part, column in columns)

    def sample(self, sample_shape: tuple[int, ...] = ()) -> Tensor:
        return torch.cat([part.sample(torch.Size(sample_shape)) for part in self.parts], -1)


PRIORS = {
    "box": td.Independent(td.Uniform(torch.tensor([-3.0, 10.0]).double(), torch.tensor([1.0, 11.0]).double()), 1),
    "coordinates": td.Uniform(-2 * ONE.expand(2), ONE.expand(2)),
    "half-normal": td.Independent(td.HalfNormal(torch.tensor([1.0, 5.0]).double()), 1),
    "log-normal": td.Independent(td.LogNormal(0 * ONE, ONE), 1),
    "beta": td.Independent(td.Beta(torch.tensor([0.5, 2.0]).double(), torch.tensor([1.0, 3.0]).double()), 1),
    "gamma": td.Independent(td.Gamma(torch.tensor([0.7, 4.0]).double(), torch.tensor([1.0, 2.0]).double()), 1),
    "exponential": td.Independent(td.Exponential(ONE), 1),
    "mixed": Mixed(),
}


class Linear:
    """x ~ N(sum of z, 1) for a given prior; counts the calls of `prepare`."""

    def __init__(self, prior: td.Distribution) -> None:
        self.prior, self.n_prepared = prior, 0

    def prepare(self, x: Tensor) -> Tensor:
        self.n_prepared += 1
        return x[..., 0]

    def log_joint(self, prepared: Tensor, z: Tensor) -> Tensor:
        prior = self.prior.log_prob(z)
        log_p = prior.sum(-1) if prior.dim() == z.dim() else prior
        return log_p - 0.5 * (prepared - z.sum(-1)).square()


class Around:
    """A normal proposal around the observation, which ignores the support of the latent."""

    def __init__(self, x: Tensor, d: int) -> None:
        self.q = Elliptical(x.expand(*x.shape[:-1], d), Diagonal(torch.ones_like(x).expand(*x.shape[:-1], d)))

    def draw(self, x: Tensor, k: int, *, generator) -> Draws:
        return self.q.draw(x, k, generator=generator)

    def log_prob(self, z: Tensor, x: Tensor) -> Tensor:
        return self.q.log_prob(z)

    def select(self, index: Tensor) -> Around:
        return Around(self.q.loc[..., :1].index_select(-2, index), self.q.loc.shape[-1])


@pytest.fixture(params=PRIORS)
def model(request) -> Linear:
    return Linear(PRIORS[request.param])


def size(model: Linear) -> int:
    return (model.prior.batch_shape + model.prior.event_shape)[0]


def test_the_wrapped_model_is_a_model_with_the_prepared_observations_of_the_original(model):
    x = torch.arange(4.0, dtype=DOUBLE).unsqueeze(-1)
    target = Target.of(model, x)
    assert isinstance(target, Model)
    assert isinstance(target.prior, PriorDistribution)
    assert isinstance(target.prior, Proposal)
    assert target.prior.event_shape == (size(model),)
    assert torch.equal(target.prepare(target.index[1:3]).value, x[1:3, 0])
    assert model.n_prepared == 1


def test_the_maps_are_inverses_and_stay_inside_the_support(model, generator):
    x = torch.arange(5.0, dtype=DOUBLE).unsqueeze(-1)
    target = Target.of(model, x)
    z = Prior(model.prior).draw(x, 200, generator=generator).z
    u = target.space.vector(z)
    torch.testing.assert_close(target.space.latent(u), z, rtol=1e-10, atol=1e-12)
    total = target.query(lambda t, rows: t.sum(-1) + rows[:, 0])(u, target.index)
    torch.testing.assert_close(total, z.sum(-1) + x[:, 0], rtol=1e-10, atol=1e-12)
    far = torch.linspace(-800, 800, 41, dtype=DOUBLE).reshape(-1, 1, 1).expand(-1, 1, size(model))
    assert (
        not target.prior.log_prob(far, target.index[:1]).isnan().any()
    )  # validated distributions raise outside their support


def test_log_weights_do_not_depend_on_the_coordinates(model, generator):
    x = torch.tensor([[0.3], [1.0], [4.0]], dtype=DOUBLE)
    target = Target.of(model, x)
    q = Mixture({"AROUND": Around(x, size(model)), "PRIOR": Prior(model.prior)})
    for base in (Prior(model.prior), q):
        z, log_q = base.draw(x, 400, generator=seeded(3))
        inside = (Prior(model.prior).log_prob(z, x) > -torch.inf).cpu()
        u, log_q_u = target.proposal(base).draw(target.index, 400, generator=seeded(3))
        log_w = target.log_joint(target.prepare(target.index), u) - log_q_u
        safe = torch.where(inside.unsqueeze(-1), z, z[inside][0])
        exact = torch.where(inside, model.log_joint(model.prepare(x), safe) - log_q, -torch.inf)
        torch.testing.assert_close(log_w, exact, rtol=1e-8, atol=1e-8)
        torch.testing.assert_close(
            log_q_u[inside], target.proposal(base).log_prob(u, target.index)[inside], rtol=1e-8, atol=1e-8
        )
    assert 0 < inside.double().mean() < 1  # the second proposal also draws outside


def test_the_density_of_the_prior_integrates_to_one(model):
    target = Target.of(model, torch.zeros(1, 1, dtype=DOUBLE))
    d = size(model)
    grid = torch.linspace(-60, 60, 481, dtype=DOUBLE) if d < 3 else torch.linspace(-30, 30, 121, dtype=DOUBLE)
    axes = torch.meshgrid(*[grid] * d, indexing="ij")
    log_p = target.prior.log_prob(torch.stack([a.flatten() for a in axes], -1).unsqueeze(1), target.index)
    mass = log_p.logsumexp(0) + d * math.log((grid[1] - grid[0]).item())
    assert mass.item() == pytest.approx(0, abs=1e-6)


@pytest.mark.parametrize(
    "prior",
    [
        StandardNormal(2),
        td.Normal(torch.zeros(2), torch.ones(2)),
        td.Independent(td.Laplace(torch.zeros(2), torch.ones(2)), 1),
        td.MultivariateNormal(torch.zeros(2), torch.eye(2)),
    ],
)
def test_vectors_of_an_unbounded_latent_are_the_latent(prior):
    space, u = Target.of(Linear(prior), torch.zeros(1, 1)).space, torch.ones(3, 1, 2)
    assert torch.equal(space.latent(u), u)
    assert torch.equal(space.vector(u), u)


@pytest.mark.parametrize("prior", [td.Dirichlet(torch.ones(3)), td.LKJCholesky(3), td.Exponential(torch.ones(2, 2))])
def test_supports_without_a_vector_of_the_same_size_are_refused(prior):
    with pytest.raises(SettingError, match=r"has the support .* use a prior of unbounded vectors"):
        Target.of(Linear(prior), torch.zeros(1, 1))


def test_rounding_in_single_precision_neither_raises_nor_reaches_a_bound():
    prior = td.Independent(td.Uniform(torch.tensor([10.0, 0.0]), torch.tensor([11.0, 1e-3])), 1)
    target = Target.of(Linear(prior), torch.zeros(1, 1))
    u = torch.linspace(-200, 200, 2001).reshape(-1, 1, 1).expand(-1, 1, 2)
    z = target.space.latent(u)
    assert ((z > prior.base_dist.low) & (z < prior.base_dist.high)).all()
    log_p = target.log_joint(target.index, u)
    largest = -math.log(torch.finfo(torch.float32).tiny)
    assert torch.equal(log_p[:, 0].isfinite(), u[:, 0, 0].abs() <= largest)
    ends = torch.stack([prior.base_dist.low, prior.base_dist.high]).unsqueeze(1)
    assert target.space.vector(ends).abs().max() <= largest
    for limit in (torch.inf, 1e30):
        assert target.log_joint(target.index, torch.full((1, 1, 2), limit)) == -torch.inf


def test_gradients_are_those_of_the_wrapped_density(model):
    target = Target.of(model, torch.zeros(1, 1, dtype=DOUBLE))
    x = target.prepare(target.index)
    u = torch.linspace(-2, 2, 5, dtype=DOUBLE).reshape(-1, 1, 1).repeat(1, 1, size(model)).requires_grad_()
    assert torch.autograd.gradcheck(lambda t: target.log_joint(x, t), (u,), eps=1e-6, atol=1e-5)
    far = torch.full((1, 1, size(model)), 1e4, dtype=DOUBLE, requires_grad=True)
    assert (torch.autograd.grad(target.prior.log_prob(far, target.index).sum(), far)[0] == 0).all()


# ---------------------------------------------------------------------------------------------- a conjugate posterior
class Counts:
    """z ~ Gamma(2, 1), x ~ Poisson(z): the posterior is Gamma(2 + x, 2), the evidence (1 + x) 2^-(2 + x)."""

    prior = td.Independent(td.Gamma(2 * ONE, ONE), 1)

    def log_joint(self, x: Tensor, z: Tensor) -> Tensor:
        return self.prior.log_prob(z) + td.Poisson(z[..., 0]).log_prob(x[..., 0])

    def log_evidence(self, x: Tensor) -> Tensor:
        return (1 + x[:, 0]).log() - (2 + x[:, 0]) * math.log(2)


X = torch.tensor([[0.0], [3.0], [9.0]], dtype=DOUBLE)


def test_sampling_and_refinement_of_a_bounded_latent(generator):
    model, exact = Counts(), Counts().log_evidence(X)
    target = Target.of(model, X)
    result = smc(target, target.index, Prior(target.prior), n_particles=2048, generator=generator)
    assert_within(result.log_evidence, exact, result.standard_error, rate=1e-6)
    mean = (result.log_w.softmax(0) * target.query(lambda z: z[..., 0])(result.z, target.index)).sum(0)
    torch.testing.assert_close(mean, (2 + X[:, 0]) / 2, rtol=0.1, atol=0)
    local = refine(target, target.index, torch.zeros(3, 1, dtype=DOUBLE), generator=generator).distribution
    # the mode of log z under Gamma(a, b) is at log(a / b)
    torch.testing.assert_close(local.loc[:, 0], ((2 + X[:, 0]) / 2).log(), rtol=1e-4, atol=1e-4)


def test_draws_outside_the_support_have_weight_zero_and_leave_the_evidence_unbiased(generator):
    x = X[:1].expand(4, 1)  # half of the proposal is negative
    target = Target.of(Counts(), x)
    q = Mixture({"AROUND": target.proposal(Around(x, 1)), "PRIOR": Prior(target.prior)})
    u, log_q = q.select(torch.tensor([0, 2])).draw(target.index[:2], 20_000, generator=generator)
    ratio = (target.log_joint(target.index[:2], u) - log_q - Counts().log_evidence(x[:2])).exp()
    assert (ratio == 0).any()
    assert ratio.max() < 20
    assert_mean(ratio, 1.0, rate=1e-6)
    with pytest.raises(AssertionError, match="standard errors"):
        assert_mean(ratio[ratio > 0], 1.0, rate=1e-6)


def test_the_prior_keeps_sobol_points():
    target = Target.of(Linear(PRIORS["exponential"]), torch.zeros(100, 1, dtype=DOUBLE))
    prior, sources = Prior(target.prior), (Sobol(seeded(0)), seeded(0))
    sobol, iid = (target.space.latent(prior.draw(target.index, 256, generator=source).z) for source in sources)
    assert sobol.mean(0).var() < iid.mean(0).var() / 5
    assert_mean(sobol.mean(0), 1.0, rate=1e-6)
