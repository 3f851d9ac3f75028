r"""The appendix's proposition on M1+M2: divergences of a classifier that becomes certain.

With exact inference of z and u, the divergences of the joint posterior are those of :math:`q(c \mid z)` from
:math:`p(c \mid z)` averaged over z. As q becomes certain of one class, reverse KL stays below
:math:`-\log\min_c p(c \mid z)` while forward KL and chi-square diverge.

The paper bounds reverse KL by a constant plus at most :math:`\log C`. The "constant" is the cross-entropy
:math:`-\sum_c q\log p`, which depends on q, and :math:`\log C` alone is a bound only if p is uniform. For the average
over z to be bounded, :math:`-\log\min_c p(c \mid z)` must have a mean; full support at every z is not sufficient.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from vaerdict.core import SettingError, ShapeError


class CategoricalDivergences(NamedTuple):
    """The three divergences between p and q, each ``(*batch)``."""

    reverse_kl: Tensor
    forward_kl: Tensor
    chi_square: Tensor


def categorical_divergences(p: Tensor, q: Tensor) -> CategoricalDivergences:
    r"""Divergences of two categorical distributions; :math:`\chi^2(p\Vert q) = \sum_c p_c^2/q_c - 1`.

    A class without mass under the first argument adds zero; mass where the second has none gives infinity.

    Shapes: ``(*batch, C), (*batch, C) -> (*batch)`` three times.
    """
    p, q = torch.broadcast_tensors(_probabilities(p, name="p"), _probabilities(q, name="q"))
    excess = torch.where(p == q, 0.0, (p - q) ** 2 / q)
    return CategoricalDivergences(_kl(q, p), _kl(p, q), excess.sum(-1))


def reverse_kl_limit(p: Tensor) -> Tensor:
    r"""Largest reverse KL over all q, :math:`-\log\min_c p_c`, attained by certainty of the least likely class.

    Shapes: ``(*batch, C) -> (*batch)``.
    """
    return -_probabilities(p, name="p").amin(-1).log()


def divergences_under_certainty(p: Tensor, doubt: Tensor, *, label: int) -> CategoricalDivergences:
    r"""The divergences as q becomes certain: :math:`1 - \eta` on `label` and each doubt :math:`\eta` spread evenly.

    As :math:`\eta \to 0`: reverse KL :math:`\to -\log p_c`; forward KL :math:`\sim (1 - p_c)\log(1/\eta)`; chi-square
    :math:`\sim (C - 1)\,\eta^{-1}\sum_{j \ne c} p_j^2`.

    Shapes: ``(C), (n) -> (n)`` three times.
    """
    if p.dim() != 1 or doubt.dim() != 1:
        raise ShapeError(f"p {tuple(p.shape)} and doubt {tuple(doubt.shape)} must be vectors, (C) and (n).")
    if not 0 <= label < len(p):
        raise SettingError(f"label={label} is none of the {len(p)} classes; use 0 to {len(p) - 1}.")
    doubt = doubt.double().unsqueeze(-1)
    others = torch.arange(len(p), device=p.device) != label
    q = torch.where(others, doubt / (len(p) - 1), 1 - doubt)
    return categorical_divergences(p, q)


def _kl(p: Tensor, q: Tensor) -> Tensor:
    return (torch.xlogy(p, p) - torch.xlogy(p, q)).sum(-1)


def _probabilities(p: Tensor, *, name: str) -> Tensor:
    """Return `p` in float64 if its last axis holds probabilities, else raise."""
    p = p.double()
    error = (p.sum(-1) - 1).abs().max()
    if not (p >= 0).all() or not error <= 1e-6:
        raise SettingError(
            f"{name} is not a probability: smallest {float(p.min()):.3g}, sum off by {float(error):.2g}."
        )
    return p
