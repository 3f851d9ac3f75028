from __future__ import annotations

import pytest
import torch
import torch.distributions as td
from scipy import integrate, special, stats
from torch import Tensor

from checks import assert_mean
from vaerdict.core import SettingError, ShapeError
from vaerdict.distributions import Diagonal, Elliptical, Noise, StandardNormal, Triangular, constrained_support
from vaerdict.noise import Sobol, as_source, seeded

LOC = torch.tensor([[0.5, -1.0, 2.0], [0.0, 3.0, 1.0]], dtype=torch.double)
SCALE = torch.tensor([[0.7, 1.5, 0.3], [1.0, 0.2, 2.0]], dtype=torch.double)
TRIL = torch.diag_embed(SCALE) + torch.tensor([[0.0, 0, 0], [0.4, 0, 0], [-0.8, 0.6, 0]], dtype=torch.double)
ROOTS = {"diagonal": Diagonal(SCALE), "full": Triangular(TRIL)}
DFS = {"normal": None, "student": torch.tensor(4.5, dtype=torch.double)}


@pytest.fixture(params=ROOTS)
def root(request):
    return ROOTS[request.param]


@pytest.fixture(params=DFS)
def q(request, root):
    return Elliptical(LOC, root, DFS[request.param])


def scipy_distribution(q: Elliptical, i: int):
    matrix = q.root.covariance()[i].numpy()
    if q.df is None:
        return stats.multivariate_normal(q.loc[i].numpy(), matrix)
    return stats.multivariate_t(q.loc[i].numpy(), matrix, df=q.df.item())


def test_log_prob_agrees_with_scipy(q, generator):
    z = 3 * torch.randn(6, 2, 3, generator=generator, dtype=torch.double)
    ours = q.log_prob(z)
    assert ours.shape == (6, 2)
    for i in range(2):
        torch.testing.assert_close(ours[:, i], torch.as_tensor(scipy_distribution(q, i).logpdf(z[:, i].numpy())))


@pytest.mark.parametrize("df", [1e3, 1e5, 1e7])
def test_the_constant_of_a_nearly_normal_student_is_accurate_in_single_precision(df):
    z = torch.full((1, 1, 10), 0.5)
    ours = Elliptical(torch.zeros(1, 10), Diagonal(torch.ones(1, 10)), torch.tensor(df)).log_prob(z)
    exact = stats.multivariate_t(torch.zeros(10).numpy(), torch.eye(10).numpy(), df=df).logpdf(z[0, 0].numpy())
    assert ours.dtype == torch.float32
    assert ours.item() == pytest.approx(exact, abs=1e-4)


def test_draws_have_the_location_and_covariance_of_the_distribution(q, generator):
    draws = q.draw(LOC, 40_000, generator=generator)
    assert torch.equal(draws.log_q, q.log_prob(draws.z))
    # bounded functions of z: whether it lies in a half-space or an ellipsoid of probability one half
    side = (draws.z - LOC).sum(-1) > 0
    radius = q.root.square_norm(draws.z - LOC)
    median = stats.chi2(3).median() if q.df is None else 3 * stats.f(3, q.df.item()).median()
    for event in (side, radius < median):
        assert_mean(event.double(), 0.5, rate=1e-6)
        with pytest.raises(AssertionError, match="standard errors"):
            assert_mean(event.double(), 0.515, rate=1e-6)
    spread = torch.cov(draws.z[:, 0].mT)
    torch.testing.assert_close(spread, q.covariance()[0], rtol=0.1, atol=0.1)


def test_roots_agree_with_their_matrices(root, generator):
    eps = torch.randn(4, 2, 3, generator=generator, dtype=torch.double)
    matrix = TRIL if isinstance(root, Triangular) else torch.diag_embed(SCALE)
    torch.testing.assert_close(root.apply(eps), torch.einsum("bij,kbj->kbi", matrix, eps))
    torch.testing.assert_close(root.transpose_apply(eps[0]), torch.einsum("bji,bj->bi", matrix, eps[0]))
    torch.testing.assert_close(root.covariance(), matrix @ matrix.mT)
    torch.testing.assert_close(root.square_norm(root.apply(eps)), eps.square().sum(-1))
    torch.testing.assert_close(root.log_det(), torch.linalg.slogdet(matrix).logabsdet)


def test_gradients_of_transform_and_density_are_exact(generator):
    eps = torch.randn(5, 2, 3, generator=generator, dtype=torch.double)
    gamma = torch.rand(5, 2, 1, generator=generator, dtype=torch.double) + 0.5

    def moved(loc: Tensor, tril: Tensor) -> Tensor:
        return Elliptical(loc, Triangular(tril.tril()), DFS["student"]).transform(Noise(eps, gamma))

    def density(loc: Tensor, tril: Tensor, df: Tensor) -> Tensor:
        return Elliptical(loc, Triangular(tril.tril()), df).log_prob(eps)

    loc, tril = LOC.clone().requires_grad_(), TRIL.clone().requires_grad_()
    assert torch.autograd.gradcheck(moved, (loc, tril))
    assert torch.autograd.gradcheck(density, (loc, tril, torch.tensor(4.5, dtype=torch.double, requires_grad=True)))


def test_the_implicit_gradient_in_df_agrees_with_the_inverse_distribution_function(generator):
    u = torch.rand(40, 2, 1, generator=generator, dtype=torch.double)
    eps = torch.randn(40, 2, 3, generator=generator, dtype=torch.double)

    def at(df: float, *, grad: bool = False) -> tuple[Tensor, Tensor]:
        value = torch.tensor(df, dtype=torch.double, requires_grad=grad)
        gamma = torch.from_numpy(special.gammaincinv(0.5 * df, u.numpy()))
        return Elliptical(LOC, ROOTS["full"], value).transform(Noise(eps, gamma)).sum(), value

    total, df = at(4.5, grad=True)
    (gradient,) = torch.autograd.grad(total, df)
    numeric = (at(4.5 + 1e-5)[0] - at(4.5 - 1e-5)[0]) / 2e-5
    torch.testing.assert_close(gradient, numeric, rtol=5e-4, atol=0)  # the accuracy of torch's series for the gamma


def test_the_gradient_in_df_is_unbiased_for_that_of_the_expectation(generator):
    def expected(df: float) -> float:
        return integrate.quad(lambda t: 2 * stats.t(df).pdf(t) / (1 + t * t), 0, torch.inf, epsabs=1e-12)[0]

    df = torch.full((20_000, 1), 3.0, dtype=torch.double)  # one df per draw gives one gradient per draw
    df.requires_grad_()
    one = torch.ones(20_000, 1, 1, dtype=torch.double)
    q = Elliptical(torch.zeros_like(one), Diagonal(one), df.squeeze(-1))
    z = q.transform(q.noise(1, as_source(generator)))
    (gradient,) = torch.autograd.grad((1 / (1 + z.square())).sum(), df)
    exact = (expected(3.01) - expected(2.99)) / 0.02
    assert_mean(gradient, exact, rate=1e-6)
    with pytest.raises(AssertionError, match="standard errors"):
        assert_mean(gradient, 1.1 * exact, rate=1e-6)


@pytest.mark.parametrize("kind", ["diagonal", "full"])
def test_a_stack_of_members_equals_its_members(kind):
    locs = torch.stack([LOC, LOC + 1, 2 * LOC])
    roots = [SCALE, 2 * SCALE, 0.5 * SCALE] if kind == "diagonal" else [TRIL, 2 * TRIL, 0.5 * TRIL]
    make = Diagonal if kind == "diagonal" else Triangular
    dfs = torch.tensor([3.0, 5.0, 9.0], dtype=torch.double)
    x = torch.zeros(3, 2, 7, dtype=torch.double)
    stacked = Elliptical(locs, make(torch.stack(roots)), dfs)
    draws = stacked.draw(x, 4, generator=[seeded(s) for s in range(3)])
    for m in range(3):
        single = Elliptical(locs[m], make(roots[m]), dfs[m])
        alone = single.draw(x[m], 4, generator=seeded(m))
        torch.testing.assert_close(draws.z[:, m], alone.z, rtol=1e-13, atol=1e-13)
        torch.testing.assert_close(draws.log_q[:, m], alone.log_q, rtol=1e-13, atol=1e-13)
        torch.testing.assert_close(stacked.covariance()[m], single.covariance())


@pytest.mark.parametrize("direction", [[1.0, 0, 0], [-1.0, 2.0, 0.5], [0, 0, -3.0], [0.0, 0, 0]])
def test_towards_turns_the_first_coordinate_and_keeps_the_distribution(q, direction, generator):
    a = torch.tensor(direction, dtype=torch.double)
    turned = q.towards(a)
    noise = q.noise(6, as_source(generator))
    z = turned.transform(noise)
    torch.testing.assert_close(turned.log_prob(z), q.log_prob(z))
    # the reflection is orthogonal: the same Mahalanobis length, hence the same distribution
    torch.testing.assert_close(q.root.square_norm(z - LOC), q.root.square_norm(q.transform(noise) - LOC))
    others = Noise(noise.normal * torch.tensor([1.0, -2.0, 5.0]), noise.gamma)
    torch.testing.assert_close(turned.transform(others) @ a, z @ a)  # only the first coordinate moves z along a
    if a.any():
        first = Noise(noise.normal * torch.tensor([2.0, 1.0, 1.0]), noise.gamma)
        torch.testing.assert_close((turned.transform(first) - LOC) @ a, 2 * (z - LOC) @ a)


def test_sobol_estimates_are_more_accurate_along_the_heading(generator):
    a = torch.tensor([1.0, 1.0, 1.0], dtype=torch.double)
    q = Elliptical(LOC, ROOTS["full"])
    exact = 0.5
    error = {}
    for name, distribution in {"default": q, "turned": q.towards(a)}.items():
        above = [(distribution.draw(LOC, 256, generator=Sobol(generator)).z - LOC) @ a > 0 for _ in range(40)]
        error[name] = (torch.stack([event.double().mean(0) for event in above]) - exact).square().mean().sqrt()
    assert error["turned"] <= 1 / 256
    assert error["turned"] < 0.3 * error["default"]


def test_a_detached_distribution_has_the_same_density_and_no_gradient(generator):
    loc, tril = LOC.clone().requires_grad_(), TRIL.clone().requires_grad_()
    q = Elliptical(loc, Triangular(tril), torch.tensor(3.0, dtype=torch.double, requires_grad=True))
    z = q.draw(None, 3, generator=generator).z
    assert z.requires_grad
    stopped = q.detach().log_prob(z.detach())
    assert not stopped.requires_grad
    assert torch.equal(stopped, q.log_prob(z.detach()))
    assert q.detach().log_prob(z).requires_grad  # through z


def test_scaled_multiplies_the_root(q):
    torch.testing.assert_close(q.scaled(2.0).covariance(), 4 * q.covariance())
    assert torch.equal(q.scaled(2.0).loc, q.loc)


def test_a_student_with_few_degrees_of_freedom_has_no_covariance():
    with pytest.raises(SettingError, match="has no covariance"):
        Elliptical(LOC, ROOTS["diagonal"], torch.tensor(1.5)).covariance()


def test_at_indexes_the_first_batch_axis(q, generator):
    z = q.towards(LOC[0]).draw(None, 4, generator=generator).z
    for index in (torch.tensor([1]), slice(1, 2), torch.tensor([False, True])):
        second = q.towards(LOC[0]).at(index)
        assert second.batch_shape == (1,)
        torch.testing.assert_close(second.log_prob(z[:, 1:]), q.log_prob(z)[:, 1:])
        assert torch.equal(second.covariance(), q.covariance()[1:])


def test_a_distribution_is_drawn_for_the_observations_it_was_made_for(q, generator):
    assert (q.batch_shape, q.event_shape) == ((2,), (3,))
    with pytest.raises(ShapeError, match=r"made for observations of shape \(2,\), not \(5,\); make a new one"):
        q.draw(torch.zeros(5, 4), 3, generator=generator)
    with pytest.raises(SettingError, match="k=0 must be a whole number"):
        q.draw(None, 0, generator=generator)


def test_standard_normal_is_a_prior_and_a_proposal(generator):
    prior = StandardNormal(3)
    z, log_q = prior.draw(torch.zeros(2, 7), 4, generator=generator)
    assert z.shape == (4, 2, 3)
    expected = stats.multivariate_normal(torch.zeros(3)).logpdf(z.numpy())
    torch.testing.assert_close(log_q, torch.as_tensor(expected).float())
    assert prior.draw(torch.zeros(2, 7, dtype=torch.long), 4, generator=generator).z.dtype == torch.float32
    assert prior.event_shape == prior.sample((), generator=generator).shape
    assert prior.sample((5, 2), generator=generator).shape == (5, 2, 3)
    with pytest.raises(SettingError, match="k=0"):
        prior.draw(torch.zeros(2, 7), 0, generator=generator)


def test_select_indexes_the_last_batch_axis(generator):
    loc = torch.randn(2, 5, 3, generator=generator, dtype=torch.float64)
    tril = torch.eye(3, dtype=torch.float64).expand(2, 5, 3, 3) * torch.arange(1.0, 6.0).double()[:, None, None]
    index = torch.tensor([4, 1])
    z = torch.randn(7, 2, 5, 3, generator=generator, dtype=torch.float64)
    for root in (Triangular(tril), Diagonal(tril.diagonal(dim1=-2, dim2=-1))):
        q = Elliptical(loc, root, torch.tensor(4.0, dtype=torch.float64)).towards(torch.ones(3))
        selected = q.select(index)
        torch.testing.assert_close(selected.log_prob(z[:, :, index]), q.log_prob(z)[:, :, index])
        assert selected.heading is not None
        assert selected.heading.shape == (2, 2, 3)


def test_a_mixture_has_the_support_of_its_components():
    def mixture(components: td.Distribution) -> td.MixtureSameFamily:
        return td.MixtureSameFamily(td.Categorical(torch.ones(3)), td.Independent(components, 1))

    assert constrained_support(mixture(td.Normal(torch.zeros(3, 2), 1.0))) is None
    assert constrained_support(mixture(td.LogNormal(torch.zeros(3, 2), 1.0))) is not None
