r"""Posterior expectations from weighted particles, each with its error, effective sample size and k-hat.

Every estimator takes the values :math:`f(z_k)`, of shape ``(K, *batch, *out)``, and log-weights ``(K, *batch)``. All
work in double precision on some observations at a time, so that their copies stay small beside what they are given.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from vaerdict import diagnostics
from vaerdict.core import Estimate, ShapeError, WeightError, check_log_weights, expand_trailing

_PART = 2**23  # numbers worked on at a time: 64 MiB in double precision


def plugin(f: Tensor, log_w: Tensor) -> Estimate:
    r"""The unweighted mean :math:`\tfrac1K\sum_k f(z_k)`: the expectation under q, not under the posterior.

    Its `mcse` says how well the mean under q is known and nothing of the bias of standing q in for the posterior;
    `ess` and `khat`, those of the weights it ignores, do.
    """

    def rule(f: Tensor, log_w: Tensor) -> Estimate:
        ess = diagnostics.ess(log_w)
        several = f.shape[0] > 1 and f.numel() > 0
        mcse = f.std(0) / math.sqrt(f.shape[0]) if several else torch.full_like(f[0], torch.nan)
        mcse = torch.maximum(mcse, diagnostics.least_mcse(f, torch.full_like(ess, f.shape[0])))
        return Estimate(f.mean(0), mcse, ess, diagnostics.khat(log_w))

    return _in_parts(rule, f, log_w)


def snis(f: Tensor, log_w: Tensor) -> Estimate:
    r"""Self-normalised importance sampling :math:`\sum_k \tilde w_k f(z_k)`.

    >>> snis(torch.tensor([[0.0], [1.0]]), torch.log(torch.tensor([[1.0], [3.0]]))).value
    tensor([0.7500], dtype=torch.float64)
    """
    return _in_parts(lambda f, log_w: _weighted(f, log_w, smooth=False), f, log_w)


def psis(f: Tensor, log_w: Tensor) -> Estimate:
    """Importance sampling with Pareto-smoothed weights: less variance, small bias (Vehtari et al., 2024).

    Smoothing can hide a single draw that outweighs all others, so `ess` is that of the weights as they were.
    """
    return _in_parts(lambda f, log_w: _weighted(f, log_w, smooth=True), f, log_w)


def mis(f: Tensor, log_w: Tensor, source: Tensor, *, smooth: bool = False) -> Estimate:
    """Multiple importance sampling: particles drawn in strata from several proposals, balance-heuristic weights.

    `log_w` is measured against the whole mixture (`vaerdict.proposals.Mixture` does so) and `source` ``(K,)`` names
    the proposal of each particle, so that the error counts variance within the strata only.
    """
    if source.shape != log_w.shape[:1]:
        raise ShapeError(
            f"source has shape {tuple(source.shape)}; expected one entry for each of {len(log_w)} particles."
        )
    strata: Tensor | None = source.to(log_w.device)
    if bool((torch.bincount(source) == 1).any()):
        strata = None  # a stratum of one draw shows no variance: count the draws as if they were not stratified
    return _in_parts(lambda f, log_w: _weighted(f, log_w, smooth=smooth, strata=strata), f, log_w)


def _weighted(f: Tensor, log_w: Tensor, *, smooth: bool, strata: Tensor | None = None) -> Estimate:
    used, khat = diagnostics.psis(log_w) if smooth else (log_w, diagnostics.khat(log_w))
    value, ess = (expand_trailing(torch.softmax(used, 0), f) * f).sum(0), diagnostics.ess(log_w)
    mcse = torch.maximum(diagnostics.mcse_snis(f, used, strata=strata), diagnostics.least_mcse(f, ess))
    return Estimate(value, mcse, ess, khat)


def _in_parts(rule: Callable[[Tensor, Tensor], Estimate], f: Tensor, log_w: Tensor) -> Estimate:
    """Apply a rule to some observations at a time and put the answers together again."""
    check_log_weights(log_w)
    if f.shape[: log_w.dim()] != log_w.shape:
        raise ShapeError(
            f"f has shape {tuple(f.shape)}; it must begin with the shape of the log-weights, {tuple(log_w.shape)}."
        )
    bad = f.numel() - int(torch.isfinite(f).sum())
    if bad:
        raise WeightError(f"{bad} of {f.numel()} values of f are not finite; f must be finite on every particle.")
    batch, out = log_w.shape[1:], f.shape[log_w.dim() :]
    n, size = math.prod(batch), max(1, _PART // (log_w.shape[0] * max(1, math.prod(out))))
    pairs = zip(f.reshape(len(f), n, *out).split(size, 1), log_w.reshape(len(f), n).split(size, 1), strict=True)
    parts = [rule(values.double(), weights.double()) for values, weights in pairs]
    value, mcse, ess, khat = (torch.cat(column) for column in zip(*parts, strict=True))
    return Estimate(value.reshape(f.shape[1:]), mcse.reshape(f.shape[1:]), ess.reshape(batch), khat.reshape(batch))
