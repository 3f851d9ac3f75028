r"""Gaussian posterior and Gaussian proposal: the log-ratio as a quadratic form, and the divergences.

With :math:`p = N(a, \Sigma)`, :math:`q = N(b, D)` and :math:`z = a + \Sigma^{1/2}\varepsilon`, the log-ratio is

.. math:: \log\tfrac{p(z)}{q(z)} = c + \varepsilon^\top A \varepsilon + \beta^\top \varepsilon, \quad
    A = \tfrac12(\Sigma^{1/2} D^{-1} \Sigma^{1/2} - I), \quad \beta = \Sigma^{1/2} D^{-1} (a - b),

so the eigenvalues of A and the coordinates of :math:`\beta` in its eigenbasis determine all divergences.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from vaerdict.core import SettingError, ShapeError


class Gaussian(NamedTuple):
    """A multivariate normal; mean and covariance broadcast. Shapes: ``mean (*batch, d)``, ``cov (*batch, d, d)``."""

    mean: Tensor
    cov: Tensor

    @classmethod
    def diagonal(cls, mean: Tensor, variance: Tensor) -> Gaussian:
        """The normal with independent coordinates. Shapes: ``(*batch, d), (*batch, d)``."""
        return cls(mean, torch.diag_embed(variance))


class QuadraticForm(NamedTuple):
    r"""The random variable :math:`v = \varepsilon^\top A \varepsilon + b^\top \varepsilon` of a standard normal.

    Shapes: ``matrix (*batch, d, d)``, ``vector (*batch, d)``.
    """

    matrix: Tensor
    vector: Tensor


def a_matrix(posterior_cov: Tensor, proposal_cov: Tensor, *, half: bool = False) -> Tensor:
    r"""The mismatch of covariances :math:`A = \Sigma^{1/2} D^{-1} \Sigma^{1/2} - I`, zero if they agree.

    ``half=True`` gives A / 2, the matrix of the log-ratio's quadratic form. The paper calls both A: the matrix itself
    in its main text and in the :math:`\gamma` of Theorem 1, half of it in its proofs and Lemma 2.

    Shapes: ``(*batch, d, d), (*batch, d) or (*batch, d, d) -> (*batch, d, d)``; one axis less means variances.
    """
    sigma = _covariance(posterior_cov, name="posterior_cov")
    d = _covariance(_as_matrix(proposal_cov, sigma), name="proposal_cov")
    return _half_a(sigma, d) * (1 if half else 2)


def a_norm(posterior_cov: Tensor, proposal_cov: Tensor, *, half: bool = False) -> Tensor:
    r"""Spectral norm :math:`\lVert A \rVert_2` of `a_matrix`, the paper's measure of a proposal's quality.

    Shapes: ``(*batch, d, d), (*batch, d) or (*batch, d, d) -> (*batch)``.
    """
    return torch.linalg.eigvalsh(a_matrix(posterior_cov, proposal_cov, half=half)).abs().amax(-1)


def log_ratio_form(p: Gaussian, q: Gaussian, *, printed: bool = False) -> QuadraticForm:
    r"""The form v with :math:`\log p/q = \mathrm{KL}(p\Vert q) + v - \operatorname{tr} A` under p.

    The printed vector :math:`\Sigma^{1/2}D^{-1}b - \Sigma^{-1/2}a` has the wrong sign and lacks the cross term of the
    square, :math:`\Sigma^{1/2}D^{-1}a - \Sigma^{-1/2}a`: it changes when p and q are shifted together.

    Shapes: ``(*batch, d), (*batch, d, d)`` twice ``-> (*batch, d, d), (*batch, d)``.
    """
    sigma, d = _covariance(p.cov, name="covariance of p"), _covariance(q.cov, name="covariance of q")
    a, b = p.mean.double(), q.mean.double()
    slope = _solve(d, b) - _solve(sigma, a) if printed else _solve(d, a - b)
    return QuadraticForm(_half_a(sigma, d), _apply(_square_root(sigma), slope))


def gaussian_forward_kl(p: Gaussian, q: Gaussian) -> Tensor:
    r"""Forward KL of two Gaussians.

    .. math:: \mathrm{KL}(p\Vert q)
        = \sum_i \Lambda_i - \tfrac12\log(1 + 2\Lambda_i) + \frac{\beta_i^2}{2(1 + 2\Lambda_i)}.

    Shapes: ``(*batch, d), (*batch, d, d)`` twice ``-> (*batch)``.
    """
    eigenvalues, beta = _spectrum(p, q)
    quadratic = 0.5 * beta**2 / (1 + 2 * eigenvalues)
    return (eigenvalues - 0.5 * torch.log1p(2 * eigenvalues) + quadratic).sum(-1)


def gaussian_reverse_kl(p: Gaussian, q: Gaussian) -> Tensor:
    r"""Reverse KL of two Gaussians, :math:`\mathrm{KL}(q\Vert p)`.

    Shapes: ``(*batch, d), (*batch, d, d)`` twice ``-> (*batch)``.
    """
    return gaussian_forward_kl(q, p)


def gaussian_chi_square(p: Gaussian, q: Gaussian) -> Tensor:
    r"""Chi-square divergence :math:`E_q[(p/q)^2] - 1`, infinite if q is too narrow.

    .. math:: \log(1 + \chi^2) = \sum_i \frac{\beta_i^2}{1 - 4\Lambda_i^2} - \tfrac12\log(1 - 4\Lambda_i^2),
        \qquad \text{finite when every } \Lambda_i < \tfrac12, \text{ that is } 2\Sigma^{-1} \succ D^{-1}.

    Shapes: ``(*batch, d), (*batch, d, d)`` twice ``-> (*batch)``.
    """
    eigenvalues, beta = _spectrum(p, q)
    gap = 1 - 4 * eigenvalues**2
    exists = (gap > 0).all(-1)
    gap = torch.where(exists.unsqueeze(-1), gap, torch.ones_like(gap))
    log_second_moment = (beta**2 / gap - 0.5 * gap.log()).sum(-1)
    return torch.where(exists, log_second_moment.expm1(), torch.inf)


def normal_total_variation(mean_p: Tensor, scale_p: Tensor, mean_q: Tensor, scale_q: Tensor) -> Tensor:
    r"""Total variation distance :math:`\frac12\int |p - q|` of two univariate normals.

    The densities cross at the roots of a quadratic; the distance is the difference of the masses between them.

    Shapes: four times ``(*batch) -> (*batch)``.
    """
    ratio, shift = scale_p.double() / scale_q, (mean_p.double() - mean_q) / scale_q
    square, slope, constant = 0.5 * (ratio**2 - 1), ratio * shift, 0.5 * shift**2 - ratio.log()
    # Roots without cancellation: as the scales become equal, the first goes to infinity and the second stays exact.
    spread = (slope**2 - 4 * square * constant).clamp(min=0).sqrt()
    half = -0.5 * (slope + torch.where(slope < 0, -spread, spread))
    roots = torch.stack([half / square, constant / half])
    mass = torch.special.ndtr(roots) - torch.special.ndtr(ratio * roots + shift)
    return torch.where(half == 0, 0.0, (mass[1] - mass[0]).abs())


def _spectrum(p: Gaussian, q: Gaussian) -> tuple[Tensor, Tensor]:
    """Eigenvalues of the log-ratio's matrix and its vector in their basis."""
    matrix, vector = log_ratio_form(p, q)
    eigenvalues, basis = torch.linalg.eigh(matrix)
    return eigenvalues, _apply(basis.mT, vector)


def _half_a(sigma: Tensor, d: Tensor) -> Tensor:
    root = _square_root(sigma)
    whitened = root @ torch.cholesky_solve(root, torch.linalg.cholesky(d))
    identity = torch.eye(root.shape[-1], dtype=root.dtype, device=root.device)
    return 0.5 * (0.5 * (whitened + whitened.mT) - identity)


def _square_root(cov: Tensor) -> Tensor:
    eigenvalues, basis = torch.linalg.eigh(cov)
    return (basis * eigenvalues.sqrt().unsqueeze(-2)) @ basis.mT


def _apply(matrix: Tensor, vector: Tensor) -> Tensor:
    return (matrix @ vector.unsqueeze(-1)).squeeze(-1)


def _solve(cov: Tensor, vector: Tensor) -> Tensor:
    return torch.cholesky_solve(vector.unsqueeze(-1), torch.linalg.cholesky(cov)).squeeze(-1)


def _as_matrix(cov: Tensor, like: Tensor) -> Tensor:
    """Read `cov` as variances if it has one axis less than `like`, as a covariance if it has as many."""
    matrix = torch.diag_embed(cov) if cov.dim() == like.dim() - 1 else cov
    if matrix.dim() != like.dim() or matrix.shape[-2:] != like.shape[-2:]:
        raise ShapeError(
            f"proposal_cov of shape {tuple(cov.shape)} does not match posterior_cov of shape {tuple(like.shape)}; "
            "pass variances (*batch, d) or covariances (*batch, d, d), and expand what is shared over the batch."
        )
    return matrix


def _covariance(cov: Tensor, *, name: str) -> Tensor:
    """Return `cov` in float64 if it is a batch of symmetric positive definite matrices, else raise."""
    if cov.dim() < 2 or cov.shape[-1] != cov.shape[-2]:
        raise ShapeError(f"{name} has shape {tuple(cov.shape)}; expected square matrices (*batch, d, d).")
    cov = cov.double()
    scale = cov.abs().amax((-2, -1), keepdim=True)
    if not ((cov - cov.mT).abs() <= 1e-5 * scale).all():
        raise SettingError(f"{name} is not symmetric; variances (*batch, d) have one axis less than covariances.")
    n_bad = int((torch.linalg.cholesky_ex(cov).info != 0).sum())
    if n_bad:
        raise SettingError(
            f"{name} holds {n_bad} matrices that are not positive definite; look for a variance of zero."
        )
    return cov
