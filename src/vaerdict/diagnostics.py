r"""Diagnostics of importance weights: PSIS and its k-hat, effective sample size, standard errors, verdicts.

Pareto-smoothed importance sampling replaces the largest weights of each observation by the quantiles of a generalised
Pareto distribution fitted to them. The shape of that fit, :math:`\hat k`, says which moments the weights have: those of
order below :math:`1/\hat k`. All functions are batched over observations, which are processed in chunks.

Reference: Vehtari, Simpson, Gelman, Yao and Gabry (2024), Pareto smoothed importance sampling, JMLR 25(72).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from enum import IntEnum
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from vaerdict.core import (
    DivergenceError,
    SettingError,
    ShapeError,
    check_count,
    check_log_weights,
    expand_trailing,
    log_normalise,
)

MAX_KHAT = 0.7
"""Above this shape no practical number of draws makes the estimate reliable."""

FEW_HITS = 20
"""Below this number of effective draws the probability of an event is not assessed by the delta method."""

_SHORTEST_TAIL = 5
_LOG_TINY = math.log(torch.finfo(torch.float64).tiny)
_EPS = torch.finfo(torch.float64).eps
_CHUNK = {"cpu": 2**21, "cuda": 2**25}


def psis(log_w: Tensor) -> tuple[Tensor, Tensor]:
    r"""Pareto-smoothed log-weights and their shape :math:`\hat k`.

    The smoothed weights are on the scale of the raw ones. Those of the tail are replaced by

    .. math:: w_{(i)} = \min\Bigl(w_{\max},\; u + \sigma\,\frac{(1 - p_i)^{-\hat k} - 1}{\hat k}\Bigr),
              \quad p_i = \frac{i - 1/2}{n},

    with u the cutoff; the others are unchanged. Self-normalising the result gives PSIS, and its mean still estimates
    the evidence. Where :math:`\hat k` is not finite (see `khat`) all weights are unchanged. Both results are detached;
    :math:`\hat k` is float64.

    Shapes: ``(K, *batch) -> (K, *batch), (*batch)``.
    """
    check_log_weights(log_w)
    columns = _columns(log_w)
    smoothed = columns.clone(memory_format=torch.contiguous_format)
    shape = torch.full_like(columns[0], math.nan, dtype=torch.float64)
    for chunk in _assessable_chunks(columns):
        tail = _tail(columns[:, chunk])
        k, scale = _fit(columns[:, chunk], tail)
        values = _smooth(tail, k, scale).to(log_w.dtype)
        smoothed[:, chunk].scatter_(0, tail.position, values)
        shape[chunk] = k
    return smoothed.reshape(log_w.shape), shape.reshape(log_w.shape[1:])


def khat(log_w: Tensor) -> Tensor:
    r"""Pareto shape :math:`\hat k` of the largest weights, in float64.

    The tail is the :math:`\lceil\min(K/5, 3\sqrt K)\rceil` largest weights, without those tied with the cutoff.

    - NaN: not assessed. The tail has at most four weights, because K is at most 20, weights are tied, or too many are
      zero.
    - ``+inf``: one weight exceeds the sum of all others although the fitted shape is at most 0.7. The fit then explains
      least the one point that decides the answer.

    Shapes: ``(K, *batch) -> (*batch)``.
    """
    check_log_weights(log_w)
    return _khat_of_columns(_columns(log_w)).reshape(log_w.shape[1:])


def khat_of(f: Tensor, log_w: Tensor) -> Tensor:
    r"""Shape :math:`\hat k` relevant to the mean of f: the larger of those of w and of :math:`w|f-\bar f|`.

    The error of a self-normalised mean is a sum of :math:`w (f - \bar f)`. A function with at most two values (an
    indicator), or with all values between 0 and 1 (a probability), cannot make that tail heavier, so its
    :math:`\hat k` is that of the weights; `events` says where few draws decide its mean. NaN: neither was assessed.

    Shapes: ``f (K, *batch, *out), log_w (K, *batch) -> (*batch, *out)``.
    """
    check_log_weights(log_w)
    _check_fits(f, log_w)
    n_out = math.prod(f.shape[log_w.dim() :])
    weights, values = _columns(log_w), _columns(f)
    shape = _khat_of_columns(weights).repeat_interleave(n_out)
    for chunk in _chunks(values):
        varied = chunk.start + _varied(values[:, chunk]).nonzero().squeeze(1)
        g, log_weight = values[:, varied].double(), weights[:, varied // n_out].double()
        distance = (g - (torch.softmax(log_weight, 0) * g).sum(0)).abs()
        shape[varied] = torch.fmax(shape[varied], _khat_of_columns(distance.log() + log_weight))
    return shape.reshape(f.shape[1:])


def khat_threshold(k: int) -> float:
    r"""Largest :math:`\hat k` at which k draws suffice, :math:`\min(1 - 1/\log_{10} k,\ 0.7)`."""
    return min(1 - 1 / math.log10(k), MAX_KHAT) if check_count(k) > 1 else -math.inf


def ess(log_w: Tensor) -> Tensor:
    r"""Effective sample size :math:`1/\sum_k \tilde w_k^2`, between 1 and K, in float64.

    Shapes: ``(K, *batch) -> (*batch)``.
    """
    check_log_weights(log_w)
    relative = (log_w - log_w.amax(0)).exp()
    return relative.sum(0).double().square() / relative.square().sum(0).double()


def mcse_snis(f: Tensor, log_w: Tensor, *, strata: Tensor | None = None) -> Tensor:
    r"""Standard error of the self-normalised estimate :math:`\bar f = \sum_k \tilde w_k f_k`, by the delta method.

    With :math:`e_k = \tilde w_k (f_k - \bar f)` it is :math:`(\sum_k e_k^2)^{1/2}` for independent draws. Where a fixed
    number :math:`n_j` of draws came from each component j of a mixture, `strata` names the component of each draw, and

    .. math:: \Bigl(\sum_j \frac{n_j}{n_j - 1} \sum_{k \in j} (e_k - \bar e_j)^2\Bigr)^{1/2}.

    NaN for a single draw.

    Shapes: ``f (K, *batch, *out), log_w (K, *batch), strata (K) -> (*batch, *out)``.
    """
    check_log_weights(log_w)
    _check_fits(f, log_w)
    f = f.to(torch.promote_types(f.dtype, log_w.dtype))
    if len(f) == 1:
        return torch.full_like(f[0], math.nan)
    weight = expand_trailing(log_normalise(log_w.double()).exp().to(f.dtype), f)
    error = (f - (weight * f).sum(0)) * weight
    if strata is not None:
        error = _within(error, strata)
    return torch.linalg.vector_norm(error, dim=0)


class Events(NamedTuple):
    """Effective draws in the smaller level set of a function with atoms, and the standard error due to so few of them.

    Shapes: ``(*batch, *out)``; ``inside`` is infinite and ``mcse`` zero where f has no atom.
    """

    inside: Tensor
    mcse: Tensor


def events(f: Tensor, log_w: Tensor, *, probes: Tensor | None = None) -> Events:
    r"""Effective draws inside the event that f differs from its most probable value, and the error they are worth.

    An indicator, or the loss of an action, equals one value (its atom) on most of the posterior. What matters is then
    the probability of the event that it does not, which :math:`c = \sum_A w / \max_A w` effective draws have hit. (The
    count by the largest weight is stricter than that by squares: the tail of the weights inside a rare event is short.)
    If c is below 20 the delta method cannot be trusted; it gives zero where no draw hits the event. With c hits of a
    Poisson variable the 97.5 % limit of its mean is :math:`c + 2 (1 + \sqrt{1 + c})` (to 2 %), which corresponds to a
    standard error of

    .. math:: s\,\bar w\,(1 + \sqrt{1 + c})

    with :math:`\bar w` the normalised weight of a hit, at least 1 / ESS, and s the largest difference of f from its
    atom at any draw of positive weight or any of the `probes`. A constant function has no event.

    A function with all values between 0 and 1 is the probability of an event given z. The event is then f, or its
    complement if that is less probable, and a draw hits it with weight w f.

    Shapes: ``f (K, *batch, *out), log_w (K, *batch), probes (M, *batch, *out)``.
    """
    check_log_weights(log_w)
    _check_fits(f, log_w)
    n_out = math.prod(f.shape[log_w.dim() :])
    values, weight = _columns(f), log_normalise(_columns(log_w).double()).exp()
    probed = None if probes is None else _columns(probes).double()
    inside, error = torch.full((2, values.shape[1]), math.inf, dtype=torch.float64, device=f.device)
    for chunk in _chunks(values):
        owner = torch.arange(chunk.start, chunk.stop, device=f.device) // n_out
        others = None if probed is None else probed[:, chunk]
        inside[chunk], error[chunk] = _events(values[:, chunk].double(), weight[:, owner], others)
    return Events(inside.reshape(f.shape[1:]), error.reshape(f.shape[1:]))


def _events(f: Tensor, weight: Tensor, probes: Tensor | None) -> tuple[Tensor, Tensor]:
    """The fields of `Events` for columns. Shapes: ``f, weight (K, n), probes (M, n) -> (n), (n)``."""
    candidates = torch.stack([f.amin(0), f.amax(0), f.gather(0, weight.argmax(0, keepdim=True))[0]])
    share, best = torch.stack([torch.where(f == a, weight, 0).sum(0) for a in candidates]).max(0)
    atom = candidates.gather(0, best.unsqueeze(0))[0]
    probability = _is_probability(f) if probes is None else _is_probability(f) & _is_probability(probes)
    atom = torch.where(probability, ((weight * f).sum(0) >= 0.5).double(), atom)
    distance = (f - atom).abs()
    hit = weight * torch.where(probability, distance, (distance > 0).double())
    largest = hit.amax(0)
    inside = hit.sum(0) / torch.where(largest > 0, largest, 1)
    span = torch.where(weight > 0, distance, 0).amax(0)
    if probes is not None:
        span = span.maximum((probes - atom).abs().amax(0))
    span = torch.where(probability, 1.0, span)
    each = largest.maximum(weight.square().sum(0))
    error = span * each * (1 + (1 + inside).sqrt())
    known = probability | ((share >= 0.5) & (span > 0))
    return torch.where(known, inside, math.inf), torch.where(known & (inside < FEW_HITS), error, 0.0)


class Verdict(IntEnum):
    """How far an answer can be trusted: OK, with CAUTION, or not at all (REFUSE)."""

    OK = 0
    CAUTION = 1
    REFUSE = 2

    @classmethod
    def names(cls, verdict: Tensor) -> list[str]:
        """The names of verdicts.

        >>> Verdict.names(torch.tensor([0, 2]))
        ['OK', 'REFUSE']
        """
        return [cls(v).name for v in verdict.flatten().tolist()]


def verdict(khat: Tensor, ess: Tensor, k: int) -> Tensor:
    r"""`Verdict` per observation from k draws, as integers, by the first row of the table that applies.

    ================================  ===================  =======  =================================================
    k-hat                             ESS                  verdict  because
    ================================  ===================  =======  =================================================
    any                               below 2              REFUSE   one draw dominates; the error cannot be estimated
    at most ``khat_threshold(k)``     10 or more           OK       the error is finite and its estimate reliable
    at most 0.7                       2 or more            CAUTION  more draws are needed
    above 0.7                         any                  REFUSE   no practical number of draws is enough
    not assessed, k above 20          k (to 1e-6)          OK       equal weights: q is proportional to p at each draw
    not assessed                      k/2 or more          CAUTION  even weights with an unknown tail
    not assessed                      below k/2            REFUSE   uneven weights with an unknown tail
    ================================  ===================  =======  =================================================

    Below an ESS of 10 the estimate of the standard error is uncertain by more than a fifth, and the standard error of
    a probability near one half exceeds 0.15.

    Shapes: ``khat (*batch, *out), ess (*batch) -> (*batch, *out)``.
    """
    ess = expand_trailing(ess, khat)
    missing = khat.isnan()
    equal = (ess >= (1 - 1e-6) * k) & (_tail_length(k) >= _SHORTEST_TAIL)
    good = torch.where(missing, equal, (khat <= khat_threshold(k)) & (ess >= 10))
    usable = torch.where(missing, ess >= k / 2, khat <= MAX_KHAT) & (ess >= 2)
    return torch.where(good, Verdict.OK, torch.where(usable, Verdict.CAUTION, Verdict.REFUSE))


class _Tail(NamedTuple):
    """The largest weights in descending order.

    ``excess`` is w/u - 1 over the cutoff u, and zero for a weight that does not exceed it. Unlike w - u it keeps its
    precision when the weights are nearly equal. Shapes: ``log_w, excess, position (n, batch)``; the rest ``(batch)``.
    """

    log_w: Tensor
    excess: Tensor
    position: Tensor
    cutoff: Tensor
    length: Tensor


def _columns(t: Tensor) -> Tensor:
    """All axes except the particles flattened. Shapes: ``(K, *batch) -> (K, n)``."""
    return t.detach().reshape(len(t), math.prod(t.shape[1:]))


def _khat_of_columns(columns: Tensor) -> Tensor:
    """K-hat of each column. Shapes: ``(K, n) -> (n)``."""
    shape = torch.full_like(columns[0], math.nan, dtype=torch.float64)
    for chunk in _assessable_chunks(columns):
        shape[chunk], _ = _fit(columns[:, chunk], _tail(columns[:, chunk]))
    return shape


def _chunks(columns: Tensor) -> Iterator[slice]:
    """Slices of columns that are wide enough to occupy the device and narrow enough to keep temporaries in cache."""
    k, n = columns.shape
    width = max(1, _CHUNK.get(columns.device.type, _CHUNK["cpu"]) // k)
    return (slice(start, min(start + width, n)) for start in range(0, n, width))


def _assessable_chunks(columns: Tensor) -> Iterator[slice]:
    """The chunks, or none where there are too few draws for a tail."""
    return _chunks(columns) if _tail_length(len(columns)) >= _SHORTEST_TAIL else iter(())


def _tail_length(k: int) -> int:
    return math.ceil(min(k / 5, 3 * math.sqrt(k)))


def _largest(log_w: Tensor, n: int) -> tuple[Tensor, Tensor]:
    """The n largest of each column in descending order, and their positions. Shapes: ``(K, b) -> (n, b), (n, b)``.

    They lie in the n groups of four with the largest maxima, so two short selections replace a long one.
    """
    k = len(log_w)
    if k % 4 or k < 8 * n:
        return log_w.topk(n, dim=0)
    stride = k // 4
    group = log_w.unflatten(0, (4, stride)).amax(0).topk(n, dim=0, sorted=False).indices
    position = torch.cat([group + stride * i for i in range(4)])
    value, order = log_w.gather(0, position).topk(n, dim=0)
    return value, position.gather(0, order)


def _tail(log_w: Tensor) -> _Tail:
    """Weights above the cutoff, which is the largest weight below the tail, or the smallest normal number if zero."""
    value, position = _largest(log_w, _tail_length(len(log_w)) + 1)
    value = value.double()
    cutoff = torch.maximum(value[-1], value[0] + _LOG_TINY)
    excess = torch.expm1(value[:-1] - cutoff).clamp_(min=0)
    return _Tail(value[:-1], excess, position[:-1], cutoff, (excess > 0).sum(0))


def _fit(log_w: Tensor, tail: _Tail) -> tuple[Tensor, Tensor]:
    """Shape and scale of each tail, the shape as documented in `khat`. Shapes: ``(K, b) -> (b), (b)``."""
    k, scale = _fit_pareto(tail.excess, tail.length)
    dominated = _dominated(log_w, tail.excess)
    k[dominated] = torch.where(k[dominated] > MAX_KHAT, k[dominated], math.inf)
    return torch.where(tail.length >= _SHORTEST_TAIL, k, math.nan), scale


def _dominated(log_w: Tensor, excess: Tensor) -> Tensor:
    """Columns in which one weight exceeds the sum of the others."""
    candidates = (excess[0] > excess[1:].sum(0)).nonzero().squeeze(1)  # a necessary condition that is cheap to check
    share = log_normalise(log_w[:, candidates].double()).amax(0)
    return candidates[share > -math.log(2)]


def _fit_pareto(x: Tensor, n: Tensor) -> tuple[Tensor, Tensor]:
    r"""Shape and scale of the generalised Pareto distribution of the n positive numbers in each column.

    The profile likelihood of :math:`b = -k/\sigma`, with :math:`k(b) = \frac1n \sum_i \log(1 - b x_i)`, is averaged
    over a grid of b. The shape is then shrunk towards 1/2 with the weight of ten observations.

    Shapes: ``x (T, b)`` in descending order and padded with zeros, ``n (b) -> (b), (b)``.

    Reference: Zhang and Stephens (2009), A new and efficient estimation method for the generalized Pareto
    distribution, Technometrics 51(3), with the shrinkage of Vehtari et al. (2024).
    """
    quartile = x.gather(0, (n - (n + 2) // 4).clamp(0, len(x) - 1).unsqueeze(0)).squeeze(0)
    spread = x[0] / quartile
    size = 30 + n.double().sqrt().floor()
    j = torch.arange(1, 31 + math.isqrt(len(x)), dtype=x.dtype, device=x.device).unsqueeze(1)
    b = (1 + spread / 3 * (1 - (size / (j - 0.5)).sqrt())) / x[0]
    k = _sum_log_factors(b, x, spread) / n
    log_likelihood = torch.where(j <= size, n * ((-b / k).log() - k - 1), -math.inf)
    weight = log_likelihood.softmax(0)
    weight = torch.where(weight >= 10 * _EPS, weight, 0)
    b = (weight * b).sum(0) / weight.sum(0)
    k = torch.log1p(-b * x).sum(0) / n
    return (n * k + 5) / (n + 10), -k / b


def _sum_log_factors(b: Tensor, x: Tensor, spread: Tensor) -> Tensor:
    r"""Sum over i of :math:`\log(1 - b x_i)`. Shapes: ``b (m, n), x (T, n) -> (m, n)``.

    Eight factors are multiplied before each logarithm, the costly step, unless the spread is so wide that the product
    could overflow.
    """
    n_factors = 1 if (spread > 1e30).any() else 8
    factors = functional.pad(x, (0, 0, 0, -len(x) % n_factors)).unflatten(0, (n_factors, -1)).unsqueeze(2)
    product = 1 - factors[0] * b
    for factor in factors[1:]:
        product.mul_(1 - factor * b)
    return product.log_().sum(0)


def _smooth(tail: _Tail, k: Tensor, scale: Tensor) -> Tensor:
    """Log of the fitted quantiles for the tail, the raw values where there is no fit or no tail."""
    rank = torch.arange(len(tail.log_w), dtype=torch.float64, device=k.device).unsqueeze(1)
    shape = torch.where(k.abs() < _EPS, _EPS, k)  # the exponential limit
    quantile = scale * torch.expm1(-shape * ((rank + 0.5) / tail.length).log()) / shape
    fitted = torch.minimum(tail.cutoff + quantile.log1p(), tail.log_w[0])
    return torch.where((rank < tail.length) & k.isfinite(), fitted, tail.log_w)


def _varied(f: Tensor) -> Tensor:
    """Columns with more than two distinct values that are no probabilities; raises where some are not finite."""
    if f.is_floating_point() and not f.isfinite().all():
        n_bad = int((~f.isfinite()).sum())
        raise DivergenceError(f"{n_bad} of {f.numel()} values of f are not finite; f must be finite on every particle.")
    low, high = f.amin(0), f.amax(0)
    return ~(((f == low) | (f == high)).all(0) | _is_probability(f))


def _is_probability(f: Tensor) -> Tensor:
    """Columns whose values are all between 0 and 1. Shapes: ``(K, n) -> (n)``."""
    return (f.amin(0) >= 0) & (f.amax(0) <= 1)


def _within(error: Tensor, strata: Tensor) -> Tensor:
    """Errors relative to the mean of their stratum, scaled so that their sum of squares is the stratified variance."""
    if strata.shape != error.shape[:1]:
        raise ShapeError(f"strata of shape {tuple(strata.shape)} must name one component per draw: ({len(error)},).")
    labels, member, counts = strata.unique(return_inverse=True, return_counts=True)
    if (counts < 2).any():
        single = labels[counts < 2].tolist()
        raise SettingError(f"strata {single} have one draw each, hence no variance; draw at least two from each.")
    n = expand_trailing(counts.to(error.dtype), error)
    mean = torch.zeros_like(error[: len(labels)]).index_add_(0, member, error) / n
    return (error - mean[member]) * (n / (n - 1)).sqrt()[member]


def _check_fits(f: Tensor, log_w: Tensor) -> None:
    if f.shape[: log_w.dim()] != log_w.shape:
        raise ShapeError(
            f"f of shape {tuple(f.shape)} must begin with the shape of log_w, {tuple(log_w.shape)}: (K, *batch, *out)."
        )
