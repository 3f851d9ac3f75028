r"""Precisions :math:`\lambda` of the diagonal Gaussian closest to :math:`N(0, \Lambda^{-1})`, for each divergence."""

from __future__ import annotations

import math

import numpy as np
import torch
from scipy import optimize
from torch import Tensor

from vaerdict.core import DivergenceError, SettingError, ShapeError, check_count, log_mean_exp
from vaerdict.noise import Randomness, as_source

_MAX_STEPS = 200


def mean_field_reverse_kl(precision: Tensor) -> Tensor:
    r"""Minimiser of :math:`\mathrm{KL}(q\Vert p)`: :math:`\lambda_i = \Lambda_{ii}`, the conditional precisions.

    Shapes: ``(*batch, d, d) -> (*batch, d)``.
    """
    return _check(precision).diagonal(dim1=-2, dim2=-1).clone()


def mean_field_forward_kl(precision: Tensor) -> Tensor:
    r"""Minimiser of :math:`\mathrm{KL}(p\Vert q)`: :math:`\lambda_i = 1/(\Lambda^{-1})_{ii}`, the marginal precisions.

    Shapes: ``(*batch, d, d) -> (*batch, d)``.
    """
    return 1 / torch.linalg.inv(_check(precision)).diagonal(dim1=-2, dim2=-1)


def mean_field_chi_square(precision: Tensor) -> Tensor:
    r"""Minimiser of :math:`\chi^2(p\Vert q)`: in closed form for d = 2, else by `mean_field_chi_square_newton`.

    .. math:: \lambda_i = \Lambda_{ii}\bigl[\tfrac32 - \tfrac12\sqrt{1 + 8\rho^2}\bigr], \qquad
        \rho^2 = \frac{\Lambda_{12}^2}{\Lambda_{11}\Lambda_{22}}.

    Shapes: ``(*batch, d, d) -> (*batch, d)``.
    """
    precision = _check(precision)
    if precision.shape[-1] != 2:
        return mean_field_chi_square_newton(precision)
    diagonal = precision.diagonal(dim1=-2, dim2=-1)
    rho_squared = precision[..., 0, 1] ** 2 / diagonal.prod(-1)
    # 2(1 - rho^2) / (3/2 + root/2): the printed difference without its cancellation as rho tends to one
    return diagonal * (4 * (1 - rho_squared) / (3 + (1 + 8 * rho_squared).sqrt())).unsqueeze(-1)


def mean_field_chi_square_newton(precision: Tensor) -> Tensor:
    r"""Minimiser of :math:`\chi^2(p\Vert q)` in any dimension, by damped Newton steps.

    .. math:: \log(1 + \chi^2) = \log\det\Lambda
        - \tfrac12\log\det\mathrm{diag}(\lambda) - \tfrac12\log\det(2\Lambda - \mathrm{diag}(\lambda))

    is convex and self-concordant in :math:`\lambda`: a step divided by 1 + its decrement stays feasible and converges.

    Shapes: ``(*batch, d, d) -> (*batch, d)``. Reference: Boyd and Vandenberghe (2004), section 9.6.
    """
    precision = _check(precision)
    scale = precision.diagonal(dim1=-2, dim2=-1).sqrt()
    correlation = precision / (scale.unsqueeze(-1) * scale.unsqueeze(-2))
    lam = torch.linalg.eigvalsh(correlation)[..., :1].expand(scale.shape).clone()
    for _ in range(_MAX_STEPS):
        step, decrement = _newton_step(correlation, lam)
        lam = lam + torch.where(decrement < 0.25, step, step / (1 + decrement))
        if (decrement < 1e-7).all():  # convergence is quadratic: further steps change nothing
            return scale**2 * lam
    raise DivergenceError(f"no chi-square optimum after {_MAX_STEPS} Newton steps; the precision is close to singular.")


def _newton_step(precision: Tensor, lam: Tensor) -> tuple[Tensor, Tensor]:
    """Newton's step on the negative sum of log-determinants, and its decrement."""
    inverse = torch.linalg.inv(2 * precision - torch.diag_embed(lam))
    gradient = 1 / lam - inverse.diagonal(dim1=-2, dim2=-1)
    hessian = inverse**2 + torch.diag_embed(lam**-2)
    step = torch.linalg.solve(hessian, gradient.unsqueeze(-1)).squeeze(-1)
    return step, (gradient * step).sum(-1, keepdim=True).clamp(min=0).sqrt()


def mean_field_iwelbo(precision: Tensor, k: int, *, n_draws: int = 10_000, generator: Randomness) -> Tensor:
    r"""Maximiser of the IWELBO with k particles, by Nelder-Mead over :math:`\log\lambda` on fixed draws.

    .. math:: \frac1n \sum_{i=1}^n \log \frac1k \sum_{j=1}^k \frac{p(z_{ij})}{q(z_{ij})}, \qquad
        z_{ij} = \lambda^{-1/2} \varepsilon_{ij}.

    The default n is that of the paper. The error is of order :math:`(k/n)^{1/2}`: with more particles the bound is
    flatter in :math:`\lambda`, while its noise decreases more slowly.

    Shapes: ``(d, d) -> (d)``.
    """
    precision = _check_one(precision)
    check_count(k)
    eps = as_source(generator).normal(k, (check_count(n_draws, name="n_draws"),), len(precision), like=precision)
    return mean_field_iwelbo_on(eps, precision)


def mean_field_iwelbo_on(eps: Tensor, precision: Tensor) -> Tensor:
    r"""`mean_field_iwelbo` on given standard normals.

    Shapes: ``(k, n, d), (d, d) -> (d)``.
    """
    precision = _check_one(precision)
    offset = 0.5 * (eps**2).sum(-1) + 0.5 * torch.logdet(precision)

    def negative_iwelbo(log_lam: np.ndarray) -> float:
        log_precisions = torch.as_tensor(log_lam).to(precision)
        z = eps * torch.exp(-0.5 * log_precisions)
        log_w = offset - 0.5 * ((z @ precision) * z).sum(-1) - 0.5 * log_precisions.sum()
        return -log_mean_exp(log_w).mean().item()

    start = mean_field_reverse_kl(precision).log().cpu().numpy()
    return torch.as_tensor(np.exp(_nelder_mead(negative_iwelbo, start))).to(precision)


def _nelder_mead(fn, start: np.ndarray) -> np.ndarray:
    """Minimiser of `fn` from a simplex of side one half."""
    simplex = np.vstack([start, start - 0.5 * np.eye(len(start))])
    options = {"initial_simplex": simplex, "xatol": 1e-5, "fatol": 1e-10, "maxiter": 1000 * len(start)}
    result = optimize.minimize(fn, start, method="Nelder-Mead", options=options)
    if not (result.success and math.isfinite(result.fun)):
        raise DivergenceError(f"Nelder-Mead did not converge: {result.message} Use more draws or fewer dimensions.")
    return result.x


def _check_one(precision: Tensor) -> Tensor:
    precision = _check(precision)
    if precision.dim() != 2:
        raise ShapeError(
            f"precision has shape {tuple(precision.shape)}; the IWELBO optimum takes one (d, d) at a time."
        )
    return precision


def _check(precision: Tensor) -> Tensor:
    """Return `precision` in float64 if it is a batch of symmetric positive definite matrices, else raise."""
    if precision.dim() < 2 or precision.shape[-1] != precision.shape[-2]:
        raise ShapeError(f"precision has shape {tuple(precision.shape)}; expected square matrices (*batch, d, d).")
    precision = precision.double()
    if not torch.allclose(precision, precision.mT, rtol=1e-5) or (torch.linalg.cholesky_ex(precision).info != 0).any():
        raise SettingError("precision is not symmetric positive definite; pass the inverse of a covariance.")
    return precision
