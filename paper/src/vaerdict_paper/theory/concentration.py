r"""Lemma 2: concentration of a Gaussian quadratic form about its mean.

For symmetric A with eigenvalues :math:`\Lambda_i`, and b with coordinates :math:`\beta_i` in its eigenbasis, the form
:math:`v = \varepsilon^\top A\varepsilon + b^\top\varepsilon` has mean :math:`\operatorname{tr} A`, variance
:math:`\sigma^2 = 2\lVert A\rVert_F^2 + \lVert b\rVert^2` and, for :math:`2|\lambda|\lVert A\rVert_2 < 1`,

.. math:: \log E e^{\lambda (v - \operatorname{tr} A)}
    = \sum_i -\lambda\Lambda_i - \tfrac12\log(1 - 2\lambda\Lambda_i)
    + \frac{\lambda^2\beta_i^2}{2(1 - 2\lambda\Lambda_i)}
    \le \frac{\lambda^2 \sigma^2}{2 (1 - 2|\lambda|\lVert A\rVert_2)},

because :math:`-a - \frac12\log(1 - 2a) \le a^2/(1 - 2|a|)` (Laurent and Massart, 2000). Such a variable is sub-gamma;
Chernoff's bound at :math:`\lambda = t / (\sigma^2 + 2\lVert A\rVert_2 t)` gives the corrected tail. The paper bounds
:math:`\beta_i^2/(2(1 - 2\lambda\Lambda_i))` by :math:`\beta_i^2/4`, which would need :math:`2\lambda\Lambda_i \le -1`;
where it works, :math:`|\lambda\Lambda_i| \le \frac14`, the right bound is :math:`\beta_i^2`.
"""

from __future__ import annotations

import torch
from torch import Tensor


def sub_exponential_parameters(matrix: Tensor, vector: Tensor, *, printed: bool = False) -> tuple[Tensor, Tensor]:
    r"""Parameters for which v is sub-exponential.

    .. math:: E e^{\lambda(v - Ev)} \le e^{\nu^2\lambda^2/2} \text{ for } |\lambda| < 1/\alpha, \qquad
        \nu^2 = 4\lVert A\rVert_F^2 + 2\lVert b\rVert^2, \quad \alpha = 4\lVert A\rVert_2.

    The printed :math:`\nu^2 = 2\lVert A\rVert_F^2 + \lVert b\rVert^2/4` has a wrong b-term and lacks the 2 under
    :math:`\nu^2`, so it also fails at b = 0.

    Shapes: ``(*batch, d, d), (*batch, d) -> (*batch), (*batch)``. Reference: Wainwright (2019), definition 2.7.
    """
    spectral, frobenius, b = _norms(matrix, vector)
    nu_squared = 2 * frobenius + b / 4 if printed else 4 * frobenius + 2 * b
    return nu_squared.sqrt(), 4 * spectral


def concentration_bound(matrix: Tensor, vector: Tensor, t: Tensor | float, *, printed: bool = False) -> Tensor:
    r"""Bound on the probability that v is t or more away from its mean, at any t > 0.

    .. math:: P(|v - \operatorname{tr} A| \ge t) \le
        2\exp\Bigl\{-\frac{t^2}{4\lVert A\rVert_F^2 + 2\lVert b\rVert^2 + 4\lVert A\rVert_2 t}\Bigr\}.

    Half of it holds for each tail. Printed: not centred, :math:`P(|v| \ge t)`, and with the denominator
    :math:`8\lVert A\rVert_F^2 + \lVert b\rVert^2 + 4\lVert A\rVert_2 t`; at A = 0, b = 1, t = 3 it claims 2.5e-4 where
    the truth is 2.7e-3. Only the symmetric part of A matters to v, so the norms are taken of that.

    Shapes: ``(*batch, d, d), (*batch, d), (*batch) -> (*batch)``.
    """
    spectral, frobenius, b = _norms(matrix, vector)
    t = torch.as_tensor(t, dtype=torch.float64)
    spread = 8 * frobenius + b if printed else 4 * frobenius + 2 * b
    return (2 * torch.exp(-(t**2) / (spread + 4 * spectral * t))).clamp(max=1)


def large_deviation_threshold(matrix: Tensor, vector: Tensor, *, printed: bool = False) -> Tensor:
    r"""The :math:`t^*` from which the tail is exponential, :math:`\nu^2/\alpha` of `sub_exponential_parameters`.

    Corrected :math:`(2\lVert A\rVert_F^2 + \lVert b\rVert^2) / (2\lVert A\rVert_2)`, printed
    :math:`(8\lVert A\rVert_F^2 + \lVert b\rVert^2) / (16\lVert A\rVert_2)`; infinite if only A is
    zero, and zero if v is.

    Shapes: ``(*batch, d, d), (*batch, d) -> (*batch)``.
    """
    nu, alpha = sub_exponential_parameters(matrix, vector, printed=printed)
    return torch.where(nu > 0, nu**2 / alpha, 0.0)


def large_deviation_bound(matrix: Tensor, vector: Tensor, t: Tensor | float, *, printed: bool = False) -> Tensor:
    r"""The bound :math:`2 e^{-t / (8\lVert A\rVert_2)}` on the same probability for t above :math:`t^*`; one below it.

    Half of it holds for each tail. Printed: not centred, without the 2 for two tails, from a :math:`t^*` too small.

    Shapes: ``(*batch, d, d), (*batch, d), (*batch) -> (*batch)``.
    """
    t = torch.as_tensor(t, dtype=torch.float64)
    spectral, _, _ = _norms(matrix, vector)
    bound = (1 if printed else 2) * torch.exp(-t / (8 * spectral))
    applies = t > large_deviation_threshold(matrix, vector, printed=printed)
    return torch.where(applies, bound, 1.0).clamp(max=1)


def _norms(matrix: Tensor, vector: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Spectral norm, squared Frobenius norm of the symmetric part of `matrix`, and squared norm of `vector`."""
    symmetric = 0.5 * (matrix + matrix.mT).double()
    eigenvalues = torch.linalg.eigvalsh(symmetric)
    return eigenvalues.abs().amax(-1), (eigenvalues**2).sum(-1), (vector.double() ** 2).sum(-1)
