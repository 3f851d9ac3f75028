r"""Bounds and losses for M1+M2, whose particles have masses beside their weights.

Unlabelled images raise a bound on log p(x), labelled ones the same bound on log p(x, c). The particles of a bound have
log-masses :math:`\log m_i`, of sum one, beside their log-weights: with c drawn from q(c | z) every mass is 1/K; with c
summed exactly the masses are q(c | z_k)/K. Then

.. math:: \mathrm{ELBO} = \sum_i m_i \log w_i,\quad \mathrm{IWELBO} = \log\sum_i m_i w_i,\quad
          \mathrm{CUBO} = \tfrac12\log\sum_i m_i w_i^2,

and wake-wake's loss of q is :math:`-\sum_i v_i \log q(z_i, c_i, u_i \mid x)` with v proportional to :math:`m_i w_i`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from vaerdict.core import SettingError


class Particles(NamedTuple):
    """Weighted particles of some observations. Shapes: all ``(P, *batch)``."""

    log_w: Tensor
    log_q: Tensor
    log_mass: Tensor


def elbo_loss(p: Particles) -> Tensor:
    """Minus the ELBO, pathwise in model and q."""
    return -(p.log_mass.exp() * p.log_w).sum(0)


def iwelbo_loss(p: Particles) -> Tensor:
    """Minus the IWELBO, pathwise in model and q."""
    return -torch.logsumexp(p.log_w + p.log_mass, 0)


def wake_loss(p: Particles) -> Tensor:
    """Minus the IWELBO for the model, the wake-phase loss for q; needs particles that carry no gradient."""
    return iwelbo_loss(_of_model(p)) + _score_loss(torch.softmax((p.log_w + p.log_mass).detach(), 0), p)


def cubo_loss(p: Particles) -> Tensor:
    """Minus the IWELBO for the model, the CUBO's score loss for q; needs particles that carry no gradient."""
    return iwelbo_loss(_of_model(p)) + 0.5 * _score_loss(torch.softmax((2 * p.log_w + p.log_mass).detach(), 0), p)


def _of_model(p: Particles) -> Particles:
    """The particles with gradient in the model alone: log_w holds -log_q, whose gradient adding it back removes."""
    return p._replace(log_w=p.log_w + p.log_q - p.log_q.detach(), log_mass=p.log_mass.detach())


def _score_loss(coefficients: Tensor, p: Particles) -> Tensor:
    return -(coefficients * p.log_q).sum(0)


@dataclass(frozen=True)
class Rule:
    """How one row of the table is trained; `path` says whether particles carry gradient."""

    name: str
    loss: Callable[[Particles], Tensor]
    path: bool


RULES = {
    rule.name: rule
    for rule in (
        Rule("VAE", elbo_loss, True),
        Rule("IWAE", iwelbo_loss, True),
        Rule("WW", wake_loss, False),
        Rule("CHI", cubo_loss, False),
    )
}
"""The paper's four objectives. Gradients in q are pathwise for the first two and of score form for the others: the
doubly reparameterised forms leave out q(c | z), and pathwise CUBO diverges."""


def rule(name: str) -> Rule:
    """The rule of that name; an unknown one is refused with the list."""
    if name not in RULES:
        raise SettingError(f"no objective {name!r} for M1+M2; choose one of {', '.join(RULES)}.")
    return RULES[name]
