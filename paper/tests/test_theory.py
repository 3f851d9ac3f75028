"""Gaussian log-ratios and divergences, mean-field optima, and the proposition on M1+M2."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy import integrate, stats
from torch import Tensor
from torch.distributions import MultivariateNormal, kl_divergence

from checks import assert_mean
from vaerdict.core import DivergenceError, SettingError, ShapeError
from vaerdict.noise import seeded
from vaerdict_paper.theory.categorical import categorical_divergences, divergences_under_certainty, reverse_kl_limit
from vaerdict_paper.theory.gaussians import (
    Gaussian,
    a_matrix,
    a_norm,
    gaussian_chi_square,
    gaussian_forward_kl,
    gaussian_reverse_kl,
    log_ratio_form,
    normal_total_variation,
)
from vaerdict_paper.theory.mean_field import (
    _nelder_mead,
    mean_field_chi_square,
    mean_field_chi_square_newton,
    mean_field_forward_kl,
    mean_field_iwelbo,
    mean_field_reverse_kl,
)


def randn(*shape: int, generator: torch.Generator) -> Tensor:
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def random_spd(*batch: int, d: int, generator: torch.Generator) -> Tensor:
    factor = randn(*batch, d, 2 * d, generator=generator)
    return factor @ factor.mT / (2 * d) + 0.1 * torch.eye(d, dtype=torch.float64)


def random_pair(n: int, d: int, generator: torch.Generator) -> tuple[Gaussian, Gaussian]:
    def one() -> Gaussian:
        return Gaussian(randn(n, d, generator=generator), random_spd(n, d=d, generator=generator))

    return one(), one()


def bivariate(rho: float, a: float = 1.0, b: float = 1.0) -> Tensor:
    off = rho * math.sqrt(a * b)
    return torch.tensor([[a, off], [off, b]], dtype=torch.float64)


# The Gaussian log-ratio


def test_a_matrix_of_one_dimension():
    sigma, d = torch.tensor([[2.0]]), torch.tensor([8.0])
    assert a_matrix(sigma, d).item() == pytest.approx(-0.75)
    assert a_matrix(sigma, d, half=True).item() == pytest.approx(-0.375)
    assert a_norm(sigma, d).item() == pytest.approx(0.75)
    assert a_norm(sigma, d).dtype == torch.float64


def test_a_norm_is_batched_and_reads_variances_or_covariances(generator):
    sigma, variance = (
        random_spd(5, 4, d=3, generator=generator),
        0.5 + torch.rand(5, 4, 3, generator=generator).double(),
    )
    norm = a_norm(sigma, variance)
    assert norm.shape == (5, 4)
    torch.testing.assert_close(norm, a_norm(sigma, torch.diag_embed(variance)))
    eigenvalues = torch.linalg.eigvals(torch.diag_embed(1 / variance) @ sigma).real - 1
    torch.testing.assert_close(norm, eigenvalues.abs().amax(-1))
    torch.testing.assert_close(a_norm(sigma, sigma), torch.zeros(5, 4).double(), atol=1e-12, rtol=0)


def test_covariances_that_cannot_be_are_refused(generator):
    sigma = random_spd(d=3, generator=generator)
    with pytest.raises(ShapeError, match="expand what is shared"):
        a_norm(sigma, torch.ones(7, 3))
    with pytest.raises(ShapeError, match="square"):
        a_norm(torch.ones(3), torch.ones(3))
    with pytest.raises(SettingError, match="one axis less"):
        a_norm(sigma, torch.rand(3, 3, generator=generator))  # three observations' variances, posterior not expanded
    with pytest.raises(SettingError, match="1 matrices that are not positive definite"):
        a_norm(sigma, torch.tensor([1.0, 0.0, 1.0]))


def test_quadratic_form_is_the_log_ratio_and_the_printed_one_is_not(generator):
    p, q = random_pair(50, 3, generator)
    eps = randn(200, 50, 3, generator=generator)
    eigenvalues, basis = torch.linalg.eigh(p.cov)
    z = p.mean + torch.einsum("nij,nj,nkj,snk->sni", basis, eigenvalues.sqrt(), basis, eps)
    log_ratio = MultivariateNormal(*p).log_prob(z) - MultivariateNormal(*q).log_prob(z)

    def rebuilt(printed: bool) -> Tensor:
        matrix, vector = log_ratio_form(p, q, printed=printed)
        v = torch.einsum("sni,nij,snj->sn", eps, matrix, eps) + torch.einsum("sni,ni->sn", eps, vector)
        return v - torch.einsum("nii->n", matrix) + gaussian_forward_kl(p, q)

    torch.testing.assert_close(rebuilt(False), log_ratio, rtol=1e-9, atol=1e-9)
    printed_error = (rebuilt(True) - log_ratio).abs().mean(0)
    assert (printed_error > 0.3).all()  # off by more than 0.3 nats on average in each of the 50 instances


def test_the_form_does_not_move_with_a_shift_of_both(generator):
    p, q = random_pair(20, 2, generator)
    moved = Gaussian(p.mean + 10, p.cov), Gaussian(q.mean + 10, q.cov)
    torch.testing.assert_close(log_ratio_form(*moved).vector, log_ratio_form(p, q).vector)
    shift = log_ratio_form(*moved, printed=True).vector - log_ratio_form(p, q, printed=True).vector
    assert (shift.norm(dim=-1) > 1).all()


# Divergences


def test_kl_agrees_with_torch(generator):
    p, q = random_pair(100, 4, generator)
    torch.testing.assert_close(gaussian_forward_kl(p, q), kl_divergence(MultivariateNormal(*p), MultivariateNormal(*q)))
    torch.testing.assert_close(gaussian_reverse_kl(p, q), kl_divergence(MultivariateNormal(*q), MultivariateNormal(*p)))


def test_a_shared_covariance_broadcasts(generator):
    mean, cov = randn(3, 3, generator=generator), random_spd(d=3, generator=generator)
    one, many = Gaussian(mean, cov), Gaussian(mean, cov.expand(3, 3, 3))
    q = Gaussian.diagonal(torch.zeros(3, 3).double(), 2 + torch.rand(3, 3, generator=generator).double())
    for divergence in (gaussian_forward_kl, gaussian_reverse_kl, gaussian_chi_square):
        torch.testing.assert_close(divergence(one, q), divergence(many, q))
        torch.testing.assert_close(divergence(q, one), divergence(q, many))


@pytest.mark.parametrize(("shift", "scale"), [(0.0, 1.0), (0.0, 0.8), (0.7, 1.5), (-2.0, 0.9), (1.0, 4.0)])
def test_chi_square_and_total_variation_against_quadrature(shift, scale):
    p, q = stats.norm(0, 1), stats.norm(shift, scale)
    pair = Gaussian(torch.zeros(1), torch.ones(1, 1)), Gaussian(torch.tensor([shift]), torch.tensor([[scale**2]]))
    second_moment = integrate.quad(lambda z: np.exp(2 * p.logpdf(z) - q.logpdf(z)), -40, 40, limit=500)[0]
    assert gaussian_chi_square(*pair).item() == pytest.approx(second_moment - 1, rel=1e-5, abs=1e-6)
    apart = integrate.quad(lambda z: 0.5 * abs(p.pdf(z) - q.pdf(z)), -40, 40, limit=2000, points=[-3, 0, 3])[0]
    tv = normal_total_variation(*(torch.tensor(v, dtype=torch.float64) for v in (0.0, 1.0, shift, scale)))
    assert tv.item() == pytest.approx(apart, abs=1e-6)


def test_total_variation_as_the_scales_meet():
    shift = torch.tensor([0.0, 1e-3, 1.0, 8.0], dtype=torch.float64)
    exact = 2 * torch.special.ndtr(shift / 2) - 1
    one = torch.ones_like(shift)
    torch.testing.assert_close(normal_total_variation(0 * one, one, shift, one), exact)
    torch.testing.assert_close(
        normal_total_variation(0 * one, one, shift, one * (1 + 1e-12)), exact, atol=1e-11, rtol=0
    )


def test_chi_square_by_importance_weights(generator):
    p = Gaussian(randn(3, generator=generator), random_spd(d=3, generator=generator))
    q = Gaussian(p.mean + 0.2, 1.7 * p.cov)  # wider in every direction: bounded weights
    eps = randn(200_000, 3, generator=generator)
    z = q.mean + eps @ torch.linalg.cholesky(q.cov).T
    w_squared = torch.exp(2 * (MultivariateNormal(*p).log_prob(z) - MultivariateNormal(*q).log_prob(z)))
    expected = 1 + gaussian_chi_square(p, q).item()
    assert_mean(w_squared, expected, rate=1e-6)
    with pytest.raises(AssertionError, match="standard errors"):
        assert_mean(1.02 * w_squared, expected, rate=1e-6)


def test_chi_square_is_infinite_for_a_proposal_too_narrow():
    p = Gaussian(torch.zeros(2), torch.eye(2))
    variances = torch.tensor([[0.1, 1.0], [0.499, 1.0], [0.501, 1.0], [9.0, 9.0]])
    chi_square = gaussian_chi_square(p, Gaussian.diagonal(torch.zeros(4, 2), variances))
    assert chi_square.isinf().tolist() == [True, True, False, False]


# Mean-field optima


def log_divergence(name: str, precision: Tensor, lam: Tensor) -> Tensor:
    zero = torch.zeros(lam.shape[-1], dtype=torch.float64)
    p, q = Gaussian(zero, torch.linalg.inv(precision)), Gaussian.diagonal(zero, 1 / lam)
    return {"rkl": gaussian_reverse_kl, "fkl": gaussian_forward_kl, "chi": gaussian_chi_square}[name](p, q).log()


@pytest.mark.parametrize("d", [2, 5])
@pytest.mark.parametrize(
    ("name", "optimum"),
    [("rkl", mean_field_reverse_kl), ("fkl", mean_field_forward_kl), ("chi", mean_field_chi_square)],
)
def test_optimum_is_a_minimum(name, optimum, d, generator):
    precision = random_spd(40, d=d, generator=generator)
    lam = optimum(precision)
    best = log_divergence(name, precision, lam)
    for size in (1e-3, 0.03, 0.3):
        for _ in range(10):
            assert (
                log_divergence(name, precision, lam * torch.exp(size * randn(40, d, generator=generator))) > best
            ).all()
    # Flat: along each coordinate a central difference vanishes to second order.
    for i in range(d):
        step = torch.exp(1e-4 * torch.eye(d, dtype=torch.float64)[i])
        slope = log_divergence(name, precision, lam * step) - log_divergence(name, precision, lam / step)
        assert (slope.abs() / 2e-4 < 1e-4).all()


@pytest.mark.parametrize("rho", [0.0, 0.3, -0.8, 0.99, 0.999999])
def test_bivariate_closed_forms(rho):
    precision = bivariate(rho, 2.0, 5.0)
    diagonal = torch.tensor([2.0, 5.0], dtype=torch.float64)
    t = (mean_field_chi_square(precision) / diagonal)[0].item()
    assert t == pytest.approx(1.5 - 0.5 * math.sqrt(1 + 8 * rho**2), abs=1e-12)  # as printed
    assert t**2 - 3 * t + 2 - 2 * rho**2 == pytest.approx(0, abs=1e-12)
    torch.testing.assert_close(mean_field_chi_square_newton(precision), t * diagonal, rtol=1e-8, atol=0)
    torch.testing.assert_close(mean_field_forward_kl(precision), (1 - rho**2) * diagonal, rtol=1e-9, atol=0)
    torch.testing.assert_close(mean_field_reverse_kl(precision), diagonal)


@pytest.mark.parametrize("rho", [0.2, 0.6, 0.95])
def test_the_norm_of_a_prefers_forward_kl_and_chi_square(rho):
    cov = torch.linalg.inv(bivariate(rho))
    norms = [
        a_norm(cov, 1 / optimum(bivariate(rho))).item()
        for optimum in (mean_field_reverse_kl, mean_field_forward_kl, mean_field_chi_square)
    ]
    assert norms[0] == pytest.approx(rho / (1 - rho))
    assert norms[1] == pytest.approx(rho)
    assert max(norms[1:]) < norms[0]


def test_chi_square_newton_in_ten_dimensions_and_badly_scaled(generator):
    scale = torch.logspace(-3, 3, 10, dtype=torch.float64)
    precision = random_spd(20, d=10, generator=generator)
    lam = mean_field_chi_square_newton(precision)
    torch.testing.assert_close(
        lam * torch.linalg.inv(2 * precision - lam.diag_embed()).diagonal(dim1=1, dim2=2), lam * 0 + 1
    )
    scaled = mean_field_chi_square_newton(scale[:, None] * precision * scale)
    torch.testing.assert_close(scaled, scale**2 * lam)
    singular = torch.ones(3, 3, dtype=torch.float64) + 1e-12 * torch.eye(3, dtype=torch.float64)
    with pytest.raises(DivergenceError, match="close to singular"):
        mean_field_chi_square_newton(singular)


def test_iwelbo_optimum_with_one_particle_is_reverse_kl():
    """60 independent optima; with one particle their mean is the reverse-KL optimum up to a bias of 1 / n_draws."""
    precision = bivariate(0.7, 2.0, 5.0)
    optima = torch.stack([mean_field_iwelbo(precision, 1, n_draws=2000, generator=seeded(s)) for s in range(60)])
    error = (optima / mean_field_reverse_kl(precision)).log()[:, 0]
    assert_mean(error, 0.0, rate=1e-6)
    with pytest.raises(AssertionError, match="standard errors"):
        assert_mean(error + 0.05, 0.0, rate=1e-6)


def test_iwelbo_optimum_moves_from_reverse_kl_to_chi_square():
    precision = bivariate(0.8)
    chi, reverse = mean_field_chi_square(precision)[0].item(), mean_field_reverse_kl(precision)[0].item()
    path = [mean_field_iwelbo(precision, k, generator=seeded(k)).mean().item() for k in (1, 5, 20)]
    assert path == pytest.approx([reverse, 0.349, 0.273], rel=0.2)  # the last two: means of 10 runs, errors below 0.005
    assert path[0] > path[1] > path[2]
    assert path[2] - chi < 0.1 * (reverse - chi)


def test_iwelbo_optimum_repeats_with_its_seed_and_refuses_nonsense(generator):
    precision = bivariate(0.5)
    first, again, other = (mean_field_iwelbo(precision, 3, n_draws=500, generator=seeded(s)) for s in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert first.shape == (2,)
    assert first.dtype == torch.float64
    with pytest.raises(SettingError, match="k=0"):
        mean_field_iwelbo(precision, 0, generator=generator)
    with pytest.raises(ShapeError, match="one \\(d, d\\) at a time"):
        mean_field_iwelbo(precision.expand(3, 2, 2), 5, generator=generator)
    with pytest.raises(DivergenceError, match="Nelder-Mead did not converge"):
        _nelder_mead(lambda x: -float(x.sum()), np.zeros(2))
    with pytest.raises(SettingError, match="positive definite"):
        mean_field_chi_square(bivariate(1.2))
    with pytest.raises(ShapeError, match="square"):
        mean_field_reverse_kl(torch.ones(3))


# The proposition on M1+M2


def test_certainty_costs_reverse_kl_little_and_the_others_without_end():
    p = torch.tensor([0.9, 0.07, 0.02, 0.01], dtype=torch.float64)
    doubt = 10.0 ** -torch.arange(1.0, 13.0, dtype=torch.float64)
    for label in range(4):
        divergences = divergences_under_certainty(p, doubt, label=label)
        assert (divergences.reverse_kl <= reverse_kl_limit(p)).all()
        assert divergences.reverse_kl[-1].item() == pytest.approx(-math.log(p[label]), abs=1e-9)
        growth = divergences.forward_kl.diff() / math.log(10)
        torch.testing.assert_close(growth[3:], (1 - p[label]).expand(8), rtol=1e-3, atol=1e-4)
        leading = 3 / doubt * (p**2).sum().sub(p[label] ** 2)
        torch.testing.assert_close(
            divergences.chi_square[-4:] / leading[-4:], torch.ones(4).double(), rtol=1e-5, atol=0
        )


def test_the_bound_on_reverse_kl_is_minus_log_of_the_smallest_probability(generator):
    p = torch.softmax(2 * randn(1000, 5, generator=generator), -1)
    q = torch.softmax(9 * randn(1000, 5, generator=generator), -1)
    assert (categorical_divergences(p, q).reverse_kl <= reverse_kl_limit(p)).all()
    certain = torch.nn.functional.one_hot(p.argmin(-1), 5)
    reached = categorical_divergences(p, certain)
    torch.testing.assert_close(reached.reverse_kl, reverse_kl_limit(p))
    assert (reached.reverse_kl > math.log(5)).all()  # log C is no bound
    assert reached.forward_kl.isinf().all()
    assert reached.chi_square.isinf().all()
    uniform_p = torch.full((1000, 5), 0.2)
    assert (categorical_divergences(uniform_p, q).reverse_kl <= math.log(5) + 1e-9).all()  # unless p is uniform


def test_categorical_divergences_by_hand():
    p, q = torch.tensor([0.5, 0.5, 0.0]), torch.tensor([0.25, 0.75, 0.0])
    reverse, forward, chi_square = categorical_divergences(p, q)
    assert reverse.item() == pytest.approx(0.25 * math.log(0.5) + 0.75 * math.log(1.5))
    assert forward.item() == pytest.approx(0.5 * math.log(2) + 0.5 * math.log(2 / 3))
    assert chi_square.item() == pytest.approx(0.25 / 0.25 + 0.25 / 0.75 - 1)
    with pytest.raises(SettingError, match="q is not a probability"):
        categorical_divergences(p, 2 * q)
    with pytest.raises(SettingError, match="label=3"):
        divergences_under_certainty(p, torch.tensor([0.1]), label=3)
    with pytest.raises(ShapeError, match="must be vectors"):
        divergences_under_certainty(p.expand(2, 3), torch.tensor([0.1]), label=0)
