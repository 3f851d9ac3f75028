r"""Theorem 1 and Proposition 1: bounds on the error of an estimated posterior expectation.

Theorem 1 rests on Chatterjee and Diaconis (2018): with :math:`n = e^{\mathrm{KL}(p\Vert q) + t}` draws,

.. math:: \epsilon^2 = e^{-t/4} + 2 \sqrt{P_p(\log w - \mathrm{KL} > t/2)}, \qquad
    P\Bigl(|\hat Q - Q| \ge \frac{2\sqrt\kappa\,\epsilon}{1 - \epsilon}\Bigr) \le \epsilon.

A union over numerator and denominator would only give :math:`2\epsilon`. But with X, Y their relative errors, each of
mean :math:`\epsilon^2` at most, the event lies in :math:`\{(X + Y)(1 - \epsilon)/(2\epsilon) + Y \ge 1\}`, and Markov's
inequality gives :math:`\epsilon`. Lemma 2 enters at t/2 with half of A, so that, once :math:`t/2 \ge t^*`,
:math:`\epsilon \le \sqrt3\, e^{-t/(8\gamma)}` with :math:`\gamma = \max(1, 4\lVert A\rVert_2)`.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from vaerdict.core import SettingError

_ROOT_3 = math.sqrt(3)
Number = Tensor | float


def deviation_bound(
    n: Number, kl: Number, a_norm: Number, kappa: Number, *, t_star: Number, printed: bool = False
) -> tuple[Tensor, Tensor]:
    r"""Theorem 1: the deviation of SNIS from the truth with n draws, and the probability of exceeding it.

    .. math:: P\Bigl(|\hat Q - Q| \ge \frac{2\sqrt{3\kappa}}{\beta^{1/8\gamma} - \sqrt3}\Bigr)
        \le \frac{\sqrt3}{\beta^{1/8\gamma}}, \qquad \beta = n e^{-\mathrm{KL}(p \Vert q)}.

    `a_norm` is the norm of the whole matrix A, `kappa` bounds the second moment of f under p, and `t_star` is
    `large_deviation_threshold` of `log_ratio_form`. The theorem needs :math:`\log\beta \ge 2t^*`, because it uses the
    tail at :math:`\frac12\log\beta`; the printed condition is :math:`\beta > \log t^*`. Where it does not apply, the
    bound is ``(inf, 1)``.

    Shapes: five times ``(*batch) -> (*batch), (*batch)``.
    """
    log_beta = _double(n).log() - _double(kl)
    t_star = _double(t_star)
    root = torch.exp(log_beta / (8 * _gamma(a_norm)))
    applies = (log_beta.exp() > t_star.log()) if printed else (log_beta >= 2 * t_star)
    applies = applies & (root > _ROOT_3)
    deviation = 2 * _ROOT_3 * _double(kappa).sqrt() / (root - _ROOT_3)
    return torch.where(applies, deviation, torch.inf), torch.where(applies, _ROOT_3 / root, 1.0)


def sufficient_sample_size(
    kl: Number,
    a_norm: Number,
    kappa: Number,
    *,
    deviation: Number,
    probability: Number,
    t_star: Number,
    printed: bool = False,
) -> Tensor:
    r"""Smallest number of draws for which `deviation_bound` gives `deviation` with failure probability `probability`.

    .. math:: n = e^{\mathrm{KL}} \max(r^{8\gamma}, e^{2t^*}), \qquad
        r = \sqrt3 \max\bigl(1/\delta,\ 1 + 2\sqrt\kappa/\text{deviation}\bigr),

    rounded up; infinite beyond the range of float64. Printed: :math:`\log t^*` in place of :math:`e^{2t^*}`.

    Shapes: six times ``(*batch) -> (*batch)``.
    """
    deviation, probability, t_star = _double(deviation), _double(probability), _double(t_star)
    if (deviation <= 0).any() or (probability <= 0).any() or (probability >= 1).any():
        raise SettingError(
            "deviation must be above 0 and probability strictly between 0 and 1; no finite n gives more."
        )
    root = torch.maximum(1 / probability, 1 + 2 * _double(kappa).sqrt() / deviation) * _ROOT_3
    log_condition = t_star.log().clamp(min=0).log() if printed else 2 * t_star
    log_beta = torch.maximum(8 * _gamma(a_norm) * root.log(), log_condition)
    return torch.exp(_double(kl) + log_beta).ceil()


def plugin_mse_bound(total_variation: Number, n: Number, *, printed: bool = False) -> Tensor:
    r"""Proposition 1: worst mean-square error of the plugin, over :math:`|f| \le 1`: :math:`4\,\mathrm{TV}^2 + 1/n`.

    The printed :math:`1/(2n)` fails for f = ±1 with even odds, whose variance is 1.

    Shapes: ``(*batch), (*batch) -> (*batch)``.
    """
    return 4 * _double(total_variation) ** 2 + (0.5 if printed else 1.0) / _double(n)


def snis_mse_bound(chi_square: Number, n: Number, *, printed: bool = False) -> Tensor:
    r"""Proposition 1: worst mean-square error of SNIS, over :math:`|f| \le 1`: :math:`4(1 + \chi^2)/n`.

    The cited theorem has :math:`E_q[w^2] = 1 + \chi^2`; the printed :math:`4\chi^2/n` is zero for q = p.

    Shapes: ``(*batch), (*batch) -> (*batch)``. Reference: Agapiou et al. (2017), theorem 2.1.
    """
    return 4 * (_double(chi_square) + (0.0 if printed else 1.0)) / _double(n)


def _gamma(a_norm: Number) -> Tensor:
    return (4 * _double(a_norm)).clamp(min=1)


def _double(value: Number) -> Tensor:
    return torch.as_tensor(value, dtype=torch.float64)
