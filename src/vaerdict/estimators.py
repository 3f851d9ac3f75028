r"""Posterior expectations from weighted particles, each with its standard error, effective sample size and k-hat.

Every estimator takes the values :math:`f(z_k)` ``(K, *batch, *out)`` and the log-weights ``(K, *batch)``, and returns
an `Estimate` in double precision. Observations are processed in chunks, so temporary copies stay small.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from vaerdict import diagnostics
from vaerdict.core import Estimate, ShapeError, WeightError, check_log_weights, expand_trailing

_CHUNK = 2**23  # values processed at a time: 64 MiB in double precision


def plugin(f: Tensor, log_w: Tensor) -> Estimate:
    r"""Unweighted mean :math:`\tfrac1K\sum_k f(z_k)`: the expectation under q, not under the posterior.

    `mcse` is the error of the mean under q. It does not include the bias of using q in place of the posterior; `ess`
    and `khat`, computed from the ignored weights, indicate that bias.
    """

    def rule(f: Tensor, log_w: Tensor) -> Estimate:
        ess = diagnostics.ess(log_w)
        several = f.shape[0] > 1 and f.numel() > 0
        mcse = f.std(0) / math.sqrt(f.shape[0]) if several else torch.full_like(f[0], torch.nan)
        mcse = torch.maximum(mcse, diagnostics.events(f, torch.zeros_like(log_w)).mcse)
        return Estimate(f.mean(0), mcse, ess, diagnostics.khat(log_w))

    return _in_chunks(rule, f, log_w)


def snis(f: Tensor, log_w: Tensor, *, probability: bool = True) -> Estimate:
    r"""Self-normalised importance sampling :math:`\sum_k \tilde w_k f(z_k)`; `probability` as in `diagnostics.events`.

    >>> snis(torch.tensor([[0.0], [1.0]]), torch.log(torch.tensor([[1.0], [3.0]]))).value
    tensor([0.7500], dtype=torch.float64)
    """
    return _in_chunks(lambda f, log_w: _weighted(f, log_w, smooth=False, probability=probability), f, log_w)


def psis(f: Tensor, log_w: Tensor, *, probability: bool = True) -> Estimate:
    """Importance sampling with Pareto-smoothed weights: less variance, small bias (Vehtari et al., 2024).

    Smoothing can hide a single draw that outweighs all others. Therefore `mcse` is the larger of the standard errors
    computed with the smoothed and with the raw weights, and `ess` is that of the raw weights. `probability` as in
    `diagnostics.events`.
    """
    return _in_chunks(lambda f, log_w: _weighted(f, log_w, smooth=True, probability=probability), f, log_w)


def mis(f: Tensor, log_w: Tensor, source: Tensor, *, smooth: bool = False) -> Estimate:
    """Multiple importance sampling: stratified draws from several proposals with balance-heuristic weights.

    Parameters
    ----------
    f
        Values ``(K, *batch, *out)``.
    log_w
        Log-weights ``(K, *batch)`` relative to the whole mixture, as from `vaerdict.proposals.Mixture`.
    source
        Index of each particle's proposal ``(K,)``. The error includes the variance within proposals only.
    smooth
        Whether the weights are Pareto-smoothed; `mcse` is then the larger of both errors, as in `psis`.

    Examples
    --------
    >>> f, log_w = torch.tensor([[0.0], [1.0], [0.0], [1.0]]), torch.zeros(4, 1)
    >>> mis(f, log_w, torch.tensor([0, 0, 1, 1])).value
    tensor([0.5000], dtype=torch.float64)
    """
    if source.shape != log_w.shape[:1]:
        raise ShapeError(
            f"source has shape {tuple(source.shape)}; expected one entry for each of {len(log_w)} particles."
        )
    strata: Tensor | None = source.to(log_w.device)
    if bool((torch.bincount(source) == 1).any()):
        strata = None  # the variance within a stratum of one draw is unknown: use the unstratified error
    return _in_chunks(lambda f, log_w: _weighted(f, log_w, smooth=smooth, strata=strata), f, log_w)


def _weighted(
    f: Tensor, log_w: Tensor, *, smooth: bool, strata: Tensor | None = None, probability: bool = True
) -> Estimate:
    """The weighted mean; its error is the largest of those by the raw weights, the smoothed ones and `events`."""
    weights, khat = diagnostics.psis(log_w) if smooth else (log_w, diagnostics.khat(log_w))
    value, ess = (expand_trailing(torch.softmax(weights, 0), f) * f).sum(0), diagnostics.ess(log_w)
    few = diagnostics.events(f, log_w, probability=probability)
    mcse = torch.maximum(diagnostics.mcse_snis(f, log_w, strata=strata), few.mcse)
    if smooth:
        mcse = torch.maximum(mcse, diagnostics.mcse_snis(f, weights, strata=strata))
    return Estimate(value, mcse, ess, khat)


def _in_chunks(rule: Callable[[Tensor, Tensor], Estimate], f: Tensor, log_w: Tensor) -> Estimate:
    """Apply a rule to chunks of observations and concatenate the estimates."""
    check_log_weights(log_w)
    if f.shape[: log_w.dim()] != log_w.shape:
        raise ShapeError(
            f"f has shape {tuple(f.shape)}; it must begin with the shape of the log-weights, {tuple(log_w.shape)}."
        )
    n_bad = f.numel() - int(torch.isfinite(f).sum())
    if n_bad:
        raise WeightError(f"{n_bad} of {f.numel()} values of f are not finite; f must be finite on every particle.")
    batch, out = log_w.shape[1:], f.shape[log_w.dim() :]
    n, size = math.prod(batch), max(1, _CHUNK // (log_w.shape[0] * max(1, math.prod(out))))
    pairs = zip(f.reshape(len(f), n, *out).split(size, 1), log_w.reshape(len(f), n).split(size, 1), strict=True)
    estimates = [rule(values.double(), weights.double()) for values, weights in pairs]
    value, mcse, ess, khat = (torch.cat(column) for column in zip(*estimates, strict=True))
    return Estimate(value.reshape(f.shape[1:]), mcse.reshape(f.shape[1:]), ess.reshape(batch), khat.reshape(batch))
