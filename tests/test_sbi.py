"""Neural posterior estimates of sbi: densities, draws, leakage, and posteriors against exact ones."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributions as td
from torch import Tensor

import vaerdict as vd
from checks import assert_mean, assert_within
from vaerdict.core import DataError, Model, Proposal, SettingError, ShapeError
from vaerdict.noise import KeyedNoise, Sobol, seeded
from vaerdict.optional import isolated

pytest.importorskip("sbi")
with isolated(0):
    from sbi.inference import NPE
    from sbi.neural_nets import posterior_nn
    from sbi.utils import BoxUniform, MultipleIndependent

pytestmark = pytest.mark.filterwarnings("ignore:torch.triangular_solve")  # used by nflows

MIXING = torch.tensor([[1.0, 0.5], [0.0, 1.0], [0.3, -0.4]])
BOX = BoxUniform(-2 * torch.ones(2), 2 * torch.ones(2))


def simulated(n: int, seed: int) -> tuple[Tensor, Tensor]:
    with isolated(seed):
        theta = BOX.sample((n,))
        return theta, theta @ MIXING.T + 0.5 * torch.randn(n, 3)


def of_theta(theta: Tensor) -> td.Distribution:
    """The linear simulator with normal noise."""
    return td.Independent(td.Normal(theta @ MIXING.T, 0.5), 1)


def noisier(theta: Tensor) -> td.Distribution:
    """A simulator with three times the noise, whose posterior is wider than the estimate."""
    return td.Independent(td.Normal(theta @ MIXING.T, 1.5), 1)


@pytest.fixture(scope="module")
def posterior(tmp_path_factory) -> Any:
    """A posterior from a few epochs of training."""
    build = posterior_nn("maf", hidden_features=20, num_transforms=3)
    with isolated(0), contextlib.chdir(tmp_path_factory.mktemp("logs")):  # sbi writes logs
        npe = NPE(BOX, density_estimator=build, show_progress_bars=False)
        npe.append_simulations(*simulated(2000, 1))
        npe.train(max_num_epochs=20, training_batch_size=100, learning_rate=3e-3)
        return npe.build_posterior()


X = simulated(20, 2)[1]


def exact(x: Tensor, likelihood: Callable[[Tensor], td.Distribution] = of_theta) -> tuple[Tensor, Tensor]:
    """Posterior means and log-evidence by a sum over the box. Shapes: ``(n, 3) -> (n, 2), (n,)``."""
    side = (torch.arange(400) + 0.5) / 100 - 2
    grid = torch.cartesian_prod(side, side)
    log_lik = likelihood(grid).log_prob(x.unsqueeze(1)).double()
    return log_lik.softmax(1) @ grid.double(), log_lik.logsumexp(1) - math.log(len(grid))


def test_weights_are_unbiased_although_draws_leave_the_prior(posterior, generator):
    wrapped = vd.from_sbi(posterior, of_theta)
    assert isinstance(wrapped, Model)
    assert isinstance(wrapped.encoder, Proposal)
    z, log_q = wrapped.encoder.draw(X, 4000, generator=generator)
    answer = vd.from_weights(wrapped.log_joint(X, z) - log_q, z)
    leaked = ~answer.z.abs().le(2).all(-1)
    assert 0.01 < leaked.double().mean() < 0.5
    assert torch.equal(leaked, answer.log_w == -torch.inf)
    reliable = answer.khat < 0.5
    assert reliable.double().mean() > 0.5
    ratio = (answer.log_w - exact(X)[1]).exp()
    for i in reliable.nonzero().flatten():
        assert_mean(ratio[:, i], 1.0, rate=1e-6)
    with pytest.raises(AssertionError, match="standard errors"):  # with the leakage normalised away
        assert_mean(ratio[:, reliable] / (1 - leaked.double().mean()), 1.0, rate=1e-6)


def test_a_corrected_answer_is_the_exact_one_and_a_bad_posterior_is_seen(posterior):
    good, bad = vd.from_sbi(posterior, of_theta), vd.from_sbi(posterior, noisier)
    assert (vd.posterior(good, X, good.encoder, 1000, seed=0).verdict == vd.Verdict.OK).double().mean() > 0.7
    assert (vd.posterior(bad, X, bad.encoder, 1000, seed=0).verdict == vd.Verdict.REFUSE).double().mean() > 0.5
    for wrapped, likelihood in ((good, of_theta), (bad, noisier)):
        answer = vd.expect(wrapped, X, lambda z: z, wrapped.encoder, tolerance=0.05, seed=0)
        assert (answer.verdict == vd.Verdict.OK).double().mean() > 0.7
        assert_within(answer.value, exact(X, likelihood)[0], answer.mcse, rate=1e-6)


def test_answers_do_not_depend_on_the_block(posterior):
    wrapped = vd.from_sbi(posterior, of_theta)
    first, second = (vd.posterior(wrapped, X, wrapped.encoder, 200, seed=0, block=block) for block in (7, 20))
    torch.testing.assert_close(first.z, second.z, rtol=1e-4, atol=1e-5)  # products of matrices round by their size


@pytest.mark.parametrize("kind", ["maf", "nsf", "mdn", "zuko_maf"])
def test_draws_are_those_of_the_density_estimator(kind, generator):
    theta, x = simulated(200, 3)
    with isolated(0):
        estimator = posterior_nn(kind, hidden_features=8, num_transforms=2)(theta, x)
    encoder = vd.from_sbi(estimator, of_theta, prior=BOX).encoder
    for source in (generator, Sobol(generator), KeyedNoise(0, 0, torch.arange(5))):
        z, log_q = encoder.draw(x[:5], 4000, generator=source)
        torch.testing.assert_close(log_q, encoder.estimator.log_prob(z, x[:5]))
        # the density integrates to one, and so does the ratio of another, narrower one to it
        ratio = (td.Independent(td.Normal(z.mean(0), 0.5 * z.std(0)), 1).log_prob(z) - log_q).exp()
        assert_mean(ratio, 1.0, rate=1e-6)
    batches = encoder.log_prob(z.unsqueeze(1).expand(-1, 3, -1, -1), x[:5].expand(3, -1, -1))
    torch.testing.assert_close(batches[:, 1], log_q)


def test_forms_of_the_likelihood_agree(posterior):
    def log_density(x: Tensor, theta: Tensor) -> Tensor:
        return of_theta(theta).log_prob(x)

    z = 2.5 * torch.randn(7, 20, 2, generator=seeded(0))
    inside = z.abs().le(2).all(-1)
    expected = torch.where(inside, of_theta(z).log_prob(X) - 2 * torch.tensor(4.0).log(), -torch.inf)

    class Linear(torch.nn.Module):
        def forward(self, theta: Tensor) -> td.Distribution:
            return of_theta(theta)

    for likelihood in (of_theta, log_density, Linear(), lambda theta: td.Normal(theta @ MIXING.T, 0.5)):
        torch.testing.assert_close(vd.from_sbi(posterior, likelihood).log_joint(X, z), expected)


def test_other_priors_and_parameters_that_a_likelihood_rejects():
    with isolated(0):
        prior = MultipleIndependent(
            [td.Gamma(2 * torch.ones(1), torch.ones(1)), td.Uniform(torch.zeros(1), torch.ones(1))]
        )
        theta = prior.sample((100,))
        estimator = posterior_nn("maf", hidden_features=8, num_transforms=2)(theta, torch.randn(100, 1))
    wrapped = vd.from_sbi(estimator, lambda theta: td.Normal(theta[..., 1:], theta[..., :1]), prior=prior)
    z = torch.tensor([[0.5, 0.5], [-1.0, 0.5], [0.5, 1.5]]).unsqueeze(1)
    log_p = wrapped.log_joint(torch.zeros(1, 1), z)[:, 0]
    expected = td.Gamma(2.0, 1.0).log_prob(torch.tensor(0.5)) + td.Normal(0.5, 0.5).log_prob(torch.tensor(0.0))
    assert log_p[0] == pytest.approx(expected.item(), abs=1e-6)
    assert log_p[1:].isneginf().all()


def test_what_cannot_be_used_is_refused(posterior):
    estimator, wrapped = posterior.posterior_estimator, vd.from_sbi(posterior, of_theta)
    with pytest.raises(SettingError, match="needs the density of the simulator: likelihood="):
        vd.from_sbi(posterior)
    with pytest.raises(SettingError, match="pass that of the simulations as prior="):
        vd.from_sbi(estimator, of_theta)
    with pytest.raises(SettingError, match="a Linear has no density q"):
        vd.from_sbi(torch.nn.utils.skip_init(torch.nn.Linear, 1, 1), of_theta, prior=BOX)
    with pytest.raises(SettingError, match="likelihood is a Normal"):
        vd.from_sbi(posterior, td.Normal(0.0, 1.0))  # type: ignore[arg-type]
    with pytest.raises(SettingError, match="likelihood takes 3 arguments"):
        vd.from_sbi(posterior, lambda a, b, c: a)
    with pytest.raises(ShapeError, match="the prior has 3 parameters, the density estimator 2"):
        vd.from_sbi(posterior, of_theta, prior=BoxUniform(torch.zeros(3), torch.ones(3)))
    with pytest.raises(ShapeError, match=r"takes \(n, \*\(3,\)\)"):
        vd.posterior(wrapped, X[:, :2], wrapped.encoder, 100)
    with pytest.raises(DataError, match=r"pass x.float\(\)"):
        vd.posterior(wrapped, X.double(), wrapped.encoder, 100)
    z = torch.zeros(4, 20, 2)
    with pytest.raises(SettingError, match="A simulator, which returns draws of x, has no density"):
        vd.from_sbi(posterior, lambda theta: theta @ MIXING.T).log_joint(X, z)
    with pytest.raises(ShapeError, match=r"gave \(4, 20, 3\).*one log-density per particle and observation, \(4, 20\)"):
        vd.from_sbi(posterior, lambda x, theta: td.Normal(theta @ MIXING.T, 0.5).log_prob(x)).log_joint(X, z)
