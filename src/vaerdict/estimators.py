r"""Posterior expectations from weighted particles, each with its error, effective sample size and k-hat.

Every estimator takes the values :math:`f(z_k)`, of shape ``(K, *batch, *out)``, and log-weights ``(K, *batch)``.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from vaerdict import diagnostics
from vaerdict.core import Estimate, ShapeError, WeightError, check_log_weights, expand_trailing


def plugin(f: Tensor, log_w: Tensor) -> Estimate:
    r"""The unweighted mean :math:`\tfrac1K\sum_k f(z_k)`: the expectation under q, not under the posterior.

    Its `mcse` says how well the mean under q is known and nothing of the bias of standing q in for the posterior;
    `ess` and `khat`, those of the weights it ignores, do.
    """
    f, log_w = _checked(f, log_w)
    mcse = f.std(0) / math.sqrt(f.shape[0]) if f.shape[0] > 1 else torch.full_like(f[0], torch.nan)
    return Estimate(f.mean(0), mcse, diagnostics.ess(log_w), diagnostics.khat(log_w))


def snis(f: Tensor, log_w: Tensor) -> Estimate:
    r"""Self-normalised importance sampling :math:`\sum_k \tilde w_k f(z_k)`.

    >>> snis(torch.tensor([[0.0], [1.0]]), torch.log(torch.tensor([[1.0], [3.0]]))).value
    tensor([0.7500], dtype=torch.float64)
    """
    f, log_w = _checked(f, log_w)
    return _weighted(f, log_w, diagnostics.khat(log_w))


def psis(f: Tensor, log_w: Tensor) -> Estimate:
    """Importance sampling with Pareto-smoothed weights: less variance, small bias (Vehtari et al., 2024)."""
    f, log_w = _checked(f, log_w)
    smoothed, khat = diagnostics.psis(log_w)
    return _weighted(f, smoothed, khat, raw=log_w)


def mis(f: Tensor, log_w: Tensor, source: Tensor, *, smooth: bool = False) -> Estimate:
    """Multiple importance sampling: particles drawn in strata from several proposals, balance-heuristic weights.

    `log_w` is measured against the whole mixture (`vaerdict.proposals.Mixture` does so) and `source` ``(K,)`` names
    the proposal of each particle, so that the error counts variance within the strata only.
    """
    f, log_w = _checked(f, log_w)
    if source.shape != log_w.shape[:1]:
        raise ShapeError(
            f"source has shape {tuple(source.shape)}; expected one entry for each of {log_w.shape[0]} particles."
        )
    smoothed, khat = diagnostics.psis(log_w) if smooth else (log_w, diagnostics.khat(log_w))
    return _weighted(f, smoothed, khat, source.to(log_w.device))


def _weighted(
    f: Tensor, log_w: Tensor, khat: Tensor, strata: Tensor | None = None, *, raw: Tensor | None = None
) -> Estimate:
    # smoothing can hide a single draw that outweighs all others: the ESS reported is that of the weights as they were
    ess = diagnostics.ess(log_w if raw is None else raw)
    weight = torch.softmax(log_w, 0)
    value = (expand_trailing(weight, f) * f).sum(0)
    return Estimate(value, diagnostics.mcse_snis(f, log_w, strata=strata), ess, khat)


def _checked(f: Tensor, log_w: Tensor) -> tuple[Tensor, Tensor]:
    check_log_weights(log_w)
    if f.shape[: log_w.dim()] != log_w.shape:
        raise ShapeError(
            f"f has shape {tuple(f.shape)}; it must begin with the shape of the log-weights, {tuple(log_w.shape)}."
        )
    f = f.double()
    bad = int((~torch.isfinite(f)).sum())
    if bad:
        raise WeightError(f"{bad} of {f.numel()} values of f are not finite; f must be finite on every particle.")
    return f, log_w.double()
