r"""Bounds on the evidence, and losses with their gradients.

Every function takes log-weights :math:`\log w` of shape ``(K, *batch)`` and returns one number per observation. Each
bound is followed by its losses, which are named after their gradient estimator:

=========  =====================  ====================  ============================================
estimator  z carries gradient     q's parameters do     reference
=========  =====================  ====================  ============================================
pathwise   yes                    yes                   Kingma & Welling (2014), Burda et al. (2016)
stl        yes                    no (stopped)          Roeder et al. (2017)
dreg       yes                    no (stopped)          Tucker et al. (2019)
score      no                     yes                   Bornschein & Bengio (2015)
=========  =====================  ====================  ============================================

`Loss.z_grad` and `Loss.q_grad` say which of z and q must carry gradient where `log_w` is computed. All `dreg` and
`stl` losses have the form :math:`-\sum_k c_k \log w_k` with constant coefficients c, so that one backward pass through
z serves all of them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from vaerdict.core import SettingError, log_mean_exp


# --------------------------------------------------------------------------------------------------------- ELBO
def elbo(log_w: Tensor) -> Tensor:
    r"""Evidence lower bound :math:`\tfrac1K\sum_k \log w_k`; maximise in model and q.

    Shapes: ``(K, *batch) -> (*batch)``.

    >>> elbo(torch.tensor([[0.0], [2.0]]))
    tensor([1.])
    """
    return log_w.mean(0)


def elbo_loss(log_w: Tensor) -> Tensor:
    """Minus the ELBO: `pathwise` if q carries gradient, `stl` (less noise near the optimum) if q is stopped."""
    return -elbo(log_w)


# ------------------------------------------------------------------------------------------------------- IWELBO
def iwelbo(log_w: Tensor) -> Tensor:
    r"""Importance-weighted bound :math:`\log\tfrac1K\sum_k w_k`; maximise.

    It is the ELBO at K = 1 and tends to the log-evidence as K grows. Shapes: ``(K, *batch) -> (*batch)``.
    """
    return log_mean_exp(log_w)


def iwelbo_loss(log_w: Tensor) -> Tensor:
    """Minus the IWELBO, pathwise. Its signal-to-noise ratio in q falls with K (Rainforth et al., 2018): prefer dreg."""
    return -iwelbo(log_w)


def iwelbo_dreg_loss(log_w: Tensor) -> Tensor:
    r"""Surrogate with the gradient of the IWELBO in q: coefficients :math:`\tilde w_k^2`; needs q stopped."""
    return _path_loss(torch.softmax(log_w.detach(), 0).square(), log_w)


# ------------------------------------------------------------------------------------------------------ VR-IWAE
def vr_iwelbo(log_w: Tensor, alpha: float) -> Tensor:
    r"""VR-IWAE bound :math:`\tfrac1{1-\alpha}\log\tfrac1K\sum_k w_k^{1-\alpha}` (Daudel et al., 2023); maximise.

    It is the IWELBO at alpha = 0 and tends to the ELBO as alpha goes to 1. Shapes: ``(K, *batch) -> (*batch)``.
    """
    if not 0 <= alpha < 1:
        raise SettingError(f"alpha={alpha} must lie in [0, 1); alpha = 1 is the ELBO: use `elbo`.")
    return log_mean_exp((1 - alpha) * log_w) / (1 - alpha)


def vr_iwelbo_loss(log_w: Tensor, alpha: float) -> Tensor:
    """Minus the VR-IWAE bound, pathwise."""
    return -vr_iwelbo(log_w, alpha)


def vr_iwelbo_dreg_loss(log_w: Tensor, alpha: float) -> Tensor:
    r"""Surrogate with the VR-IWAE gradient in q: coefficients :math:`\alpha v_k + (1-\alpha) v_k^2`; needs q stopped.

    Here v are the normalised :math:`w^{1-\alpha}`.
    """
    v = torch.softmax((1 - alpha) * log_w.detach(), 0)
    return _path_loss(alpha * v + (1 - alpha) * v.square(), log_w)


# --------------------------------------------------------------------------------------------------- forward KL
def forward_kl(log_w: Tensor) -> Tensor:
    r"""Estimate of KL(p || q): :math:`\sum_k \tilde w_k \log w_k - \log\tfrac1K\sum_k w_k`; minimise in q.

    It is self-normalised, hence biased of order 1/K. Shapes: ``(K, *batch) -> (*batch)``.
    """
    weight = torch.softmax(log_w, 0)
    return (weight * torch.where(weight > 0, log_w, 0)).sum(0) - iwelbo(log_w)


def forward_kl_score_loss(log_w: Tensor, log_q: Tensor) -> Tensor:
    r"""The wake-phase loss :math:`-\sum_k \tilde w_k \log q(z_k)`; needs z detached and q carrying gradient."""
    return _score_loss(torch.softmax(log_w.detach(), 0), log_q)


def forward_kl_dreg_loss(log_w: Tensor) -> Tensor:
    r"""The wake-phase gradient through z: coefficients :math:`\tilde w_k - \tilde w_k^2`; needs q stopped, K >= 2."""
    weight = torch.softmax(log_w.detach(), 0)
    return _path_loss(weight - weight.square(), log_w)


# --------------------------------------------------------------------------------------------------------- CUBO
def cubo(log_w: Tensor) -> Tensor:
    r"""Chi upper bound :math:`\tfrac12\log\tfrac1K\sum_k w_k^2`; minimise in q.

    The K-sample value lies *below* the bound that it estimates (at K = 1 its mean is the ELBO). Pathwise descent on it
    therefore pulls q away from the posterior when K is small: prefer `cubo_dreg_loss` or `cubo_score_loss`.

    Shapes: ``(K, *batch) -> (*batch)``.
    """
    return 0.5 * log_mean_exp(2 * log_w)


def cubo_loss(log_w: Tensor) -> Tensor:
    """The CUBO itself, pathwise. It is consistent in K but collapses q at small K (see `cubo`)."""
    return cubo(log_w)


def cubo_score_loss(log_w: Tensor, log_q: Tensor) -> Tensor:
    r"""Surrogate :math:`-\tfrac12\sum_k v_k \log q(z_k)` with v the normalised squared weights; needs z detached.

    Its gradient is that of the CUBO up to the bias of self-normalisation, of order 1/K, which favours too little
    variance.
    """
    return 0.5 * _score_loss(torch.softmax(2 * log_w.detach(), 0), log_q)


def cubo_dreg_loss(log_w: Tensor) -> Tensor:
    r"""The gradient of the CUBO through z, with the normalised squared weights as coefficients; needs q stopped.

    With q *not* stopped the same expression ascends the CUBO. The bias is of order 1/K: at K = 1 the gradient is that
    of the ELBO, and the optimum moves from the reverse-KL to the chi-square one as K grows, without collapse.
    """
    return _path_loss(torch.softmax(2 * log_w.detach(), 0), log_w)


def _path_loss(coefficients: Tensor, log_w: Tensor) -> Tensor:
    # a weight of zero (log_w = -inf) has coefficient zero, and 0 * inf is NaN
    return -(coefficients * torch.where(coefficients > 0, log_w, 0)).sum(0)


def _score_loss(coefficients: Tensor, log_q: Tensor) -> Tensor:
    return -(coefficients * torch.where(coefficients > 0, log_q, 0)).sum(0)


# ------------------------------------------------------------------------------- pairs of bound and estimator
@dataclass(frozen=True, repr=False)
class Loss:
    """A bound with an estimator of its gradient in q, and whether z and q must carry gradient."""

    bound: str
    estimator: str
    fn: Callable[[Tensor, Tensor], Tensor]
    z_grad: bool
    q_grad: bool
    alpha: float | None = None

    @property
    def name(self) -> str:
        """A unique name, such as ``vr_iwelbo(0.5) by dreg``."""
        return f"{self.bound}{'' if self.alpha is None else f'({self.alpha:g})'} by {self.estimator}"

    def __call__(self, log_w: Tensor, log_q: Tensor) -> Tensor:
        """The loss of each observation. Shapes: ``(K, *batch), (K, *batch) -> (*batch)``."""
        return self.fn(log_w, log_q)

    def __repr__(self) -> str:
        alpha = "" if self.alpha is None else f", alpha={self.alpha:g}"
        return f"loss({self.bound!r}, {self.estimator!r}{alpha})"


@dataclass(frozen=True)
class _OfWeights:
    """A loss that ignores log q; a dataclass, so that losses can be compared and pickled."""

    fn: Callable[..., Tensor]
    alpha: float | None = None

    def __call__(self, log_w: Tensor, log_q: Tensor) -> Tensor:
        return self.fn(log_w) if self.alpha is None else self.fn(log_w, self.alpha)


_GRADIENT = {"pathwise": (True, True), "stl": (True, False), "dreg": (True, False), "score": (False, True)}

_LOSSES: dict[tuple[str, str], Callable[[Tensor, Tensor], Tensor]] = {
    ("elbo", "pathwise"): _OfWeights(elbo_loss),
    ("elbo", "stl"): _OfWeights(elbo_loss),
    ("iwelbo", "pathwise"): _OfWeights(iwelbo_loss),
    ("iwelbo", "dreg"): _OfWeights(iwelbo_dreg_loss),
    ("forward_kl", "score"): forward_kl_score_loss,
    ("forward_kl", "dreg"): _OfWeights(forward_kl_dreg_loss),
    ("cubo", "pathwise"): _OfWeights(cubo_loss),
    ("cubo", "score"): cubo_score_loss,
    ("cubo", "dreg"): _OfWeights(cubo_dreg_loss),
}

_INVALID = {
    ("elbo", "dreg"): "for the ELBO the doubly reparameterised estimator is `stl`",
    ("elbo", "score"): "its score estimator has needless variance where z is reparameterised; use `stl`",
    ("iwelbo", "stl"): "dropping the score term of the IWELBO is biased for K > 1; use `dreg`",
    ("iwelbo", "score"): "its score estimator has needless variance where z is reparameterised; use `dreg`",
    ("forward_kl", "pathwise"): "the path of z is not part of the gradient of KL(p || q); use `score` or `dreg`",
    ("forward_kl", "stl"): "the gradient of the forward KL is its score term; use `score` or `dreg`",
    ("cubo", "stl"): "dropping the score term is biased; use `dreg` or `score`",
    ("vr_iwelbo", "stl"): "dropping the score term is biased; use `dreg`",
    ("vr_iwelbo", "score"): "its score estimator has needless variance where z is reparameterised; use `dreg`",
}


def loss(bound: str, estimator: str, *, alpha: float | None = None) -> Loss:
    """Look up the loss for a bound and a gradient estimator; an invalid pair raises an error that names a valid one.

    >>> loss("iwelbo", "dreg").q_grad
    False
    """
    if (bound == "vr_iwelbo") != (alpha is not None):
        raise SettingError(
            f"alpha={alpha} with bound {bound!r}: alpha belongs to the bound 'vr_iwelbo', which needs it."
        )
    if alpha is not None and estimator in ("pathwise", "dreg"):
        vr_iwelbo(torch.zeros(1), alpha)  # raises if alpha is out of range
        fn = vr_iwelbo_loss if estimator == "pathwise" else vr_iwelbo_dreg_loss
        return Loss(bound, estimator, _OfWeights(fn, alpha), *_GRADIENT[estimator], alpha)
    if (bound, estimator) in _LOSSES:
        return Loss(bound, estimator, _LOSSES[bound, estimator], *_GRADIENT[estimator])
    if (bound, estimator) in _INVALID:
        raise SettingError(f"no loss for {bound!r} by {estimator!r}: {_INVALID[bound, estimator]}.")
    legal = ", ".join(f"{b} by {e}" for b, e in legal_pairs())
    raise SettingError(f"no loss for {bound!r} by {estimator!r}; choose one of {legal}.")


def legal_pairs() -> list[tuple[str, str]]:
    """Every bound with every gradient estimator that is valid for it."""
    return [*_LOSSES, ("vr_iwelbo", "pathwise"), ("vr_iwelbo", "dreg")]
