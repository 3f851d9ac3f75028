"""`as_proposal`: what people have as proposals, densities against the distributions themselves, and refusals."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.distributions import (
    Beta,
    Categorical,
    Dirichlet,
    Distribution,
    Gamma,
    Independent,
    LogNormal,
    LowRankMultivariateNormal,
    MixtureSameFamily,
    MultivariateNormal,
    Normal,
    StudentT,
    TransformedDistribution,
    Uniform,
)
from torch.distributions.transforms import AffineTransform

from checks import assert_mean
from vaerdict import inference
from vaerdict.core import SettingError, ShapeError
from vaerdict.distributions import Elliptical
from vaerdict.models.ppca import PPCA
from vaerdict.noise import Sobol, global_state_from, seeded
from vaerdict.proposals import Normal as NormalFamily
from vaerdict.proposals import Prior, as_proposal

N, D = 6, 2
X = torch.randn(N, 3, generator=seeded(2))
LOC, POSITIVE = X[:, :D], X[:, :D].exp() + 0.5
ROWS = torch.tensor([4, 1])


def linear(n_in: int, n_out: int) -> nn.Linear:
    with global_state_from(seeded(3)):
        return nn.Linear(n_in, n_out)


LAYER = linear(3, 2 * D)
TRIL = torch.tensor([[1.0, 0.0], [0.5, 0.7]])
FUNCTIONS: dict[str, Callable[[Tensor], Distribution]] = {
    "Normal": lambda x: Normal(x[:, :D], x[:, :D].exp() + 0.5),
    "Independent Normal": lambda x: Independent(Normal(x[:, :D], x[:, :D].exp() + 0.5), 1),
    "MultivariateNormal": lambda x: MultivariateNormal(x[:, :D], scale_tril=TRIL),
    "LowRank": lambda x: LowRankMultivariateNormal(x[:, :D], x[:, :D, None], x[:, :D].exp() + 0.5),
    "StudentT": lambda x: Independent(StudentT(9.0, x[:, :D], x[:, :D].exp() + 0.5), 1),
    "LogNormal": lambda x: LogNormal(x[:, :D], 0.3 * torch.ones(D)),
    "Gamma": lambda x: Independent(Gamma(x[:, :D].exp() + 0.5, 2.0), 1),
    "Beta": lambda x: Independent(Beta(x[:, :D].exp() + 0.5, torch.ones(())), 1),
    "Uniform": lambda x: Uniform(x[:, :D], x[:, :D] + 1.0),
    "Dirichlet": lambda x: Dirichlet(x[:, :D].exp() + 0.5),
    "Mixture": lambda x: MixtureSameFamily(
        Categorical(logits=x), Independent(Normal(x[:, :, None] + torch.tensor([-1.0, 1.0]), 1.0), 1)
    ),
}


def density(q: Distribution, z: Tensor) -> Tensor:
    log_q = q.log_prob(z)
    return log_q.sum(-1) if log_q.dim() == 3 else log_q


# ---------------------------------------------------------------------------------------------------- distributions
@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_distribution_made_for_fixed_observations(name):
    dist = FUNCTIONS[name](X)
    q = as_proposal(dist)
    z, log_q = q.draw(X, 5, generator=seeded(0))
    assert z.shape == (5, N, D)
    torch.testing.assert_close(log_q, density(dist, z))
    torch.testing.assert_close(q.log_prob(z, X), log_q)
    part = q.select(ROWS)  # type: ignore[attr-defined]
    torch.testing.assert_close(part.log_prob(z[:, ROWS], X[ROWS]), log_q[:, ROWS])
    assert part.draw(X[ROWS], 3, generator=seeded(0)).z.shape == (3, 2, D)
    with pytest.raises(ShapeError, match="made for"):
        q.draw(X[:4], 5, generator=seeded(0))


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_function_that_returns_it(name):
    """The density is that of the distribution at x, and draws have its means (false-alarm rate 1e-6)."""
    dist, q = FUNCTIONS[name](X), as_proposal(FUNCTIONS[name])
    z, log_q = q.draw(X, 4000, generator=seeded(0))
    torch.testing.assert_close(log_q, density(dist, z))
    torch.testing.assert_close(q.log_prob(z[:, ROWS], X[ROWS]), log_q[:, ROWS])
    score = (z - dist.mean)[:, 0, 0]
    assert_mean(score, 0.0, rate=1e-6)
    with pytest.raises(AssertionError, match="standard errors"):
        assert_mean(score + 0.2 * score.std(), 0.0, rate=1e-6)


@pytest.mark.parametrize("name", ["LogNormal", "Gamma", "Uniform", "Dirichlet"])
def test_outside_the_support_the_density_is_zero(name):
    q = as_proposal(FUNCTIONS[name](X))
    z = q.draw(X, 3, generator=seeded(0)).z
    inside, z[0] = z.clone(), -9.0
    log_q = q.log_prob(z, X)
    assert torch.isneginf(log_q[0]).all()
    torch.testing.assert_close(log_q[1:], q.log_prob(inside, X)[1:])


def test_one_distribution_for_all_observations():
    for dist in (Independent(Normal(LOC[0], POSITIVE[0]), 1), Normal(LOC[0], POSITIVE[0])):
        q = as_proposal(dist)
        assert isinstance(q, Prior)
        z, log_q = q.draw(X, 5, generator=seeded(0))
        assert z.shape == (5, N, D)
        torch.testing.assert_close(log_q, Normal(LOC[0], POSITIVE[0]).log_prob(z).sum(-1))


def test_a_proposal_is_returned_unchanged():
    q = NormalFamily().make(X, D, hidden=(4,), generator=seeded(0))
    assert as_proposal(q) is q
    assert as_proposal(Prior(Normal(LOC[0], 1.0))).log_prob is not None


# ---------------------------------------------------------------------------------------------------------- encoders
@pytest.mark.parametrize("spread", ["log_variance", "sd", "log_sd", "variance"])
def test_an_encoder_that_returns_a_mean_and_a_spread(spread):
    sd = LAYER(X)[:, D:].sigmoid()
    second = {"log_variance": lambda s: 2 * s.log(), "sd": lambda s: s, "log_sd": torch.log, "variance": torch.square}

    def encoder(x: Tensor) -> tuple[Tensor, Tensor]:
        return LAYER(x)[:, :D], second[spread](LAYER(x)[:, D:].sigmoid())

    q = as_proposal(encoder, spread=spread)
    z, log_q = q.draw(X, 5, generator=seeded(0))
    torch.testing.assert_close(log_q, Normal(LAYER(X)[:, :D], sd).log_prob(z).sum(-1))
    assert isinstance(q(X), Elliptical)  # type: ignore[operator]  # a location, from which modes are searched


def test_draws_are_those_of_the_library_for_the_same_noise():
    """A Sobol net stays a net: the mean of 256 draws is as near as no independent ones would be."""
    q = as_proposal(lambda x: Normal(x[:, :D], 1.0))
    z = q.draw(X, 256, generator=Sobol(seeded(0))).z
    assert (z.mean(0) - X[:, :D]).abs().max() < 0.02  # one standard error of independent draws is 0.06


def test_a_flow():
    zuko = pytest.importorskip("zuko")
    with global_state_from(seeded(0)):
        flow = zuko.flows.NSF(D, context=3, transforms=2, hidden_features=(8,))
    q = as_proposal(flow)
    for generator in (seeded(0), Sobol(seeded(0))):
        z, log_q = q.draw(X, 64, generator=generator)
        torch.testing.assert_close(log_q, flow(X).log_prob(z))
        # the draws are those of the flow: back in its base they are standard normal (false-alarm rate 1e-6)
        base = flow(X).transform(z)
        assert_mean(base[..., 0], 0.0, rate=1e-6)
        assert_mean(base.square(), 1.0, rate=1e-6)
    with global_state_from(seeded(0)):
        unconditional = zuko.flows.NSF(D, transforms=1, hidden_features=(8,))
    z, log_q = as_proposal(unconditional()).draw(X, 4, generator=seeded(0))
    assert z.shape == (4, N, D)
    torch.testing.assert_close(log_q, unconditional().log_prob(z))


def test_observations_with_conditions_come_as_they_are():
    q = as_proposal(lambda x: Normal(x[0][:, :D] + x[1], 1.0))
    z, log_q = q.draw((X, LOC), 5, generator=seeded(0))
    torch.testing.assert_close(log_q, Normal(X[:, :D] + LOC, 1.0).log_prob(z).sum(-1))
    named = as_proposal(lambda x: Normal(x["x"][:, :D] + x["c"], 1.0))
    torch.testing.assert_close(named.log_prob(z, {"x": X, "c": LOC}), log_q)


def test_dropout_and_batch_norm_are_off_and_modules_are_left_alone():
    network = nn.Sequential(nn.BatchNorm1d(3), LAYER, nn.Dropout(0.5)).train()
    before = copy.deepcopy(network.state_dict())
    model = PPCA(torch.eye(3, D), 1.0)
    expected = inference.posterior(
        model, X, as_proposal(lambda x: Normal(LAYER(x / (1 + 1e-5) ** 0.5)[:, :D], 1.0)), 20, seed=0
    )
    found = inference.posterior(model, X, as_proposal(lambda x: Normal(network(x)[:, :D], 1.0)), 20, seed=0)
    torch.testing.assert_close(found.log_w, expected.log_w, rtol=1e-4, atol=1e-4)
    assert network.training
    assert all(torch.equal(t, before[name]) for name, t in network.state_dict().items())


def test_answers_from_each_kind():
    """Posterior means of pPCA within their tolerance, which holds in 95 % of cases or more: twice it is allowed."""
    model = PPCA(torch.tensor([[1.0, 0.5], [0.0, 1.0], [-0.5, 0.5]]), 0.8).requires_grad_(False)
    exact = model.posterior(X)
    for thing in (
        Independent(Normal(exact.loc, 0.8), 1),
        lambda x: MultivariateNormal(model.posterior(x).loc, 0.6 * torch.eye(D)),
        Independent(Normal(torch.zeros(D), torch.ones(D)), 1),
        lambda x: (model.posterior(x).loc, -torch.ones(len(x), D)),
    ):
        answer = inference.expect(model, X, lambda z: z, as_proposal(thing), 256, tolerance=0.1, seed=0)
        assert (answer.verdict == 0).all()
        assert (answer.value - exact.loc).abs().max() < 0.2


# ---------------------------------------------------------------------------------------------------------- refusals
class Half:
    """An object that can be sampled but has no density."""

    def draw(self, x: Tensor, k: int, *, generator: torch.Generator) -> None: ...


class NoForward(nn.Module):
    pass


AT_ONCE = [
    (LAYER.weight, SettingError, r"the proposal, a Parameter, has no draw and no log_prob; pass a torch distribution"),
    (Half(), SettingError, r"the proposal, a Half, has no log_prob; pass"),
    (NoForward(), SettingError, r"the proposal, a NoForward, has no draw and no log_prob"),
    (NoForward, SettingError, r"the proposal is the class NoForward; pass an object of it"),
    (Normal(0.0, 1.0), ShapeError, r"Normal with batch shape \(\) and event shape \(\); it must be over vectors"),
    (Normal(torch.zeros(2, 3, 4), 1.0), ShapeError, r"Independent with batch shape \(2, 3\)"),
    (Categorical(torch.ones(N, 3)), SettingError, r"is a Categorical, which is discrete"),
    (
        TransformedDistribution(Independent(Normal(LOC, 1.0), 1), AffineTransform(LOC, 2.0, event_dim=1)),
        SettingError,
        r"the rows of a TransformedDistribution cannot be selected.*pass the function that makes it",
    ),
]


@pytest.mark.parametrize(("thing", "error", "message"), AT_ONCE)
def test_what_is_no_proposal(thing, error, message):
    with pytest.raises(error, match=message):
        as_proposal(thing)


AT_THE_FIRST_CALL = [
    (LAYER, SettingError, r"returned a tensor of shape \(6, 4\); it must return \(mean, log_variance\)"),
    (lambda x: None, SettingError, r"the proposal returned a NoneType; it must return"),
    (lambda x: Normal(LOC, 1.0), ShapeError, r"batch shape \(6,\) for 3 observations; it must have one row"),
    (lambda x: Normal(LOC[:3], 1.0), ShapeError, r"batch shape \(3,\) for 6 observations; it must have one row"),
    (lambda x, c: x, SettingError, r"the proposal failed on a tensor of shape \(6, 3\): .*argument"),
    (lambda x: (LOC / 0 * 0, -POSITIVE), SettingError, r"mean of the proposal holds 12 non-finite values of 12"),
    (lambda x: (LOC, POSITIVE), SettingError, r"positive everywhere .*spread='sd', or spread='log_variance'"),
    (lambda x: Normal(x[:, :D] * len(x), 1.0), SettingError, r"gives another output when the same observations"),
]


@pytest.mark.parametrize(("thing", "error", "message"), AT_THE_FIRST_CALL)
def test_functions_that_return_something_else(thing, error, message):
    q = as_proposal(thing)
    with pytest.raises(error, match=message) as caught:
        q.draw(X, 3, generator=seeded(0))
    assert "\n" not in str(caught.value)


def test_spreads_have_names():
    with pytest.raises(SettingError, match="spread='std' is not known; use one of 'log_variance', 'sd'"):
        as_proposal(LAYER, spread="std")
