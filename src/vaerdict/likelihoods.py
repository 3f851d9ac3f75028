r"""Likelihoods of counts: log-probability, its split into what moves with the mean and what does not, draws.

With r fixed, :math:`\log \mathrm{NB}(x; m, r)` is :math:`x \log\frac{m}{r + m} + r \log\frac{r}{r + m}`, which moves
with the mean, plus :math:`\log\Gamma(x + r) - \log\Gamma(r) - \log x!`, which does not and is zero where x is. A model
computes the second once for all particles of an observation, its gamma functions only where counts are positive.

The first is computed as it stands. Written with :math:`x \log m` it would cost one function less, and in float32 large
terms would cancel: in cells of 100,000 counts that left errors of up to one nat.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from vaerdict.core import SettingError

_CACHED = 2**18  # entries that stay in a core's cache


class CountParameters(NamedTuple):
    """What a count's distribution depends on; what a likelihood does not use may be missing.

    `zero_logit` is the log odds of a count being dropped to zero whatever its mean.

    Shapes: ``log_mean (K, *batch, genes)``; the others broadcast to it.
    """

    log_mean: Tensor
    log_dispersion: Tensor | None = None
    zero_logit: Tensor | None = None


class CountLikelihood(Protocol):
    """A distribution of counts given its parameters, the genes independent of each other."""

    @property
    def dispersed(self) -> bool:
        """Whether it has a dispersion."""
        ...

    @property
    def inflated(self) -> bool:
        """Whether it has a zero logit."""
        ...

    @property
    def per_cell(self) -> bool:
        """Whether the zero logit moves with the latent, as the mean does."""
        ...

    def log_prob(self, x: Tensor, at: CountParameters) -> Tensor:
        """Log-probability of every entry. Shapes: ``(*batch, genes) -> (K, *batch, genes)``."""
        ...

    def fixed(self, x: Tensor, at: CountParameters) -> Tensor:
        """The part of a cell's log-probability that no mean changes; ``at.log_mean`` is not looked at.

        Shapes: ``(*batch, genes) -> (*batch)``.
        """
        ...

    def moving(self, x: Tensor, at: CountParameters) -> Tensor:
        """The rest of a cell's log-probability. Shapes: ``(*batch, genes) -> (K, *batch)``."""
        ...

    def sample(self, at: CountParameters, *, generator: torch.Generator) -> Tensor:
        """Draw counts. Shapes: ``-> (K, *batch, genes)``."""
        ...


@dataclass(frozen=True)
class Poisson:
    """Counts with variance equal to the mean."""

    dispersed = False
    inflated = False
    per_cell = False

    def log_prob(self, x: Tensor, at: CountParameters) -> Tensor:
        """Log-probability of every entry."""
        return x * at.log_mean - at.log_mean.exp() - torch.lgamma(x + 1)

    def fixed(self, x: Tensor, at: CountParameters) -> Tensor:
        """Minus log x!."""
        return _over_positive(lambda count: -torch.lgamma(count + 1), x)

    def moving(self, x: Tensor, at: CountParameters) -> Tensor:
        """x log m - m."""
        return torch.linalg.vecdot(at.log_mean, x) - at.log_mean.exp().sum(-1)

    def sample(self, at: CountParameters, *, generator: torch.Generator) -> Tensor:
        """Draw counts."""
        return torch.poisson(at.log_mean.exp(), generator=generator)


@dataclass(frozen=True)
class NegativeBinomial:
    """Counts of mean m and variance m + m^2 / r, with r the dispersion of a gene."""

    dispersed = True
    inflated = False
    per_cell = False

    def log_prob(self, x: Tensor, at: CountParameters) -> Tensor:
        """Log-probability of every entry."""
        r, shares = _given(at.log_dispersion).exp(), _shares(at)
        return _constant(x, r, torch.lgamma(r)) + x * shares.mean + r * shares.dispersion

    def fixed(self, x: Tensor, at: CountParameters) -> Tensor:
        """The terms with gamma functions, computed where counts are positive."""
        r = _given(at.log_dispersion).exp()
        return _over_positive(_constant, x, r, torch.lgamma(r))

    def moving(self, x: Tensor, at: CountParameters) -> Tensor:
        """x log(m / (r + m)) + r log(r / (r + m))."""
        return _moving(x, at._replace(zero_logit=None))

    def sample(self, at: CountParameters, *, generator: torch.Generator) -> Tensor:
        """Draw counts: Poisson with a gamma rate."""
        r = _given(at.log_dispersion).exp().expand_as(at.log_mean).contiguous()
        rate = torch._standard_gamma(r, generator=generator) / r * at.log_mean.exp()
        return torch.poisson(rate, generator=generator)


@dataclass(frozen=True)
class ZeroInflated:
    r"""Negative-binomial counts, some dropped to zero with log odds a.

    :math:`\log p(x) = \log\mathrm{NB}(x) - \log(1 + e^a) + 1\{x = 0\} \log(1 + e^a / \mathrm{NB}(0))`.

    With `per_cell` the log odds are of each cell and gene and move with the latent, as in scVI; otherwise they are of
    the gene.
    """

    per_cell: bool = False
    dispersed = True
    inflated = True

    def log_prob(self, x: Tensor, at: CountParameters) -> Tensor:
        """Log-probability of every entry."""
        return NegativeBinomial().log_prob(x, at) + _log_kept(at) + _gain_of_zeros(x, at, _shares(at))

    def fixed(self, x: Tensor, at: CountParameters) -> Tensor:
        """The negative binomial's constant and, where the log odds are of the gene, those of not being dropped."""
        constant = NegativeBinomial().fixed(x, at)
        return constant if self.per_cell else constant + _log_kept(at).sum(-1)

    def moving(self, x: Tensor, at: CountParameters) -> Tensor:
        """The rest."""
        total = _moving(x, at._replace(zero_logit=_given(at.zero_logit)))
        return total + _log_kept(at).sum(-1) if self.per_cell else total

    def sample(self, at: CountParameters, *, generator: torch.Generator) -> Tensor:
        """Draw counts."""
        counts = NegativeBinomial().sample(at, generator=generator)
        u = torch.rand(counts.shape, generator=generator, device=counts.device, dtype=counts.dtype)
        return torch.where(u < torch.sigmoid(_given(at.zero_logit)), 0, counts)


def _constant(x: Tensor, r: Tensor, lgamma_r: Tensor) -> Tensor:
    """What the mean does not change of log NB."""
    return torch.lgamma(x + r) - lgamma_r - torch.lgamma(x + 1)


def _log_kept(at: CountParameters) -> Tensor:
    return F.logsigmoid(-_given(at.zero_logit))


def _over_positive(f: Callable[..., Tensor], x: Tensor, *others: Tensor) -> Tensor:
    """Sum over genes of f, which is zero at zero, evaluated only where x is not. Shapes: ``-> (*batch)``.

    On a GPU everywhere: to know where x is not zero the host would have to wait, and f costs little there.
    """
    if x.is_cuda:
        return f(x, *others).sum(-1)
    rows, genes = x.reshape(-1, x.shape[-1]).nonzero(as_tuple=True)

    def entries(t: Tensor) -> Tensor:
        return t.index_select(0, genes) if t.dim() == 1 else t.expand_as(x).reshape(-1, x.shape[-1])[rows, genes]

    values = f(*(entries(t) for t in (x, *others)))
    return values.new_zeros(x[..., 0].numel()).index_add(0, rows, values).reshape(x.shape[:-1])


def _given(parameter: Tensor | None) -> Tensor:
    if parameter is None:
        raise SettingError("the likelihood needs a dispersion, and a zero-inflated one a zero logit; pass them.")
    return parameter


# ------------------------------------------------------------------------------- the part that every particle pays for
class _Shares(NamedTuple):
    """Logarithms of m / (r + m) and r / (r + m); NB(0) is the r-th power of the second."""

    mean: Tensor
    dispersion: Tensor


def _shares(at: CountParameters) -> _Shares:
    log_ratio = at.log_mean - _given(at.log_dispersion)
    return _Shares(F.logsigmoid(log_ratio), F.logsigmoid(-log_ratio))


def _gain_of_zeros(x: Tensor, at: CountParameters, shares: _Shares) -> Tensor:
    """What a zero gains by the chance of having been dropped."""
    log_zero = _given(at.log_dispersion).exp() * shares.dispersion
    return torch.where(x == 0, -F.logsigmoid(log_zero - _given(at.zero_logit)), 0)


def _moving(x: Tensor, at: CountParameters) -> Tensor:
    return _Moving.apply(x, at.log_mean, _given(at.log_dispersion), at.zero_logit)  # type: ignore[return-value]


class _Moving(torch.autograd.Function):
    """The moving part with its derivatives written out, on a CPU a few particles at a time.

    Autograd would keep some ten tensors of the size of `log_mean`, and fetch them from memory again; this keeps none
    and works in the cache. The derivatives can be differentiated again.
    """

    @staticmethod
    def forward(ctx, x: Tensor, *parameters: Tensor | None) -> Tensor:  # type: ignore[override]
        ctx.save_for_backward(x, *parameters)
        return torch.cat([_total(x, part) for part in _parts(parameters)])

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        x, *parameters = ctx.saved_tensors
        if torch.is_grad_enabled():  # to be differentiated again: all at once, for autograd to follow
            slopes = [None if t is None else grad.unsqueeze(-1) * t for t in _slopes(x, CountParameters(*parameters))]
            return None, *(s if s is None else s.sum_to_size(p.shape) for s, p in zip(slopes, parameters, strict=True))
        found = [torch.empty_like(parameters[0]), *(p if p is None else torch.zeros_like(p) for p in parameters[1:])]
        for number, (part, into) in enumerate(zip(_parts(parameters), _parts(found), strict=True)):
            weight = grad.narrow(0, number * _particles(parameters), len(part.log_mean))
            in_mean, in_dispersion, in_logit = _slopes(x, part)
            torch.mul(in_mean, weight.unsqueeze(-1), out=into.log_mean)
            _add(into.log_dispersion, weight, in_dispersion)
            _add(into.zero_logit, weight, in_logit)
        return None, *found


def _total(x: Tensor, at: CountParameters) -> Tensor:
    shares = _shares(at)
    total = torch.linalg.vecdot(shares.mean, x) + torch.linalg.vecdot(
        shares.dispersion, _given(at.log_dispersion).exp()
    )
    return total if at.zero_logit is None else total + _gain_of_zeros(x, at, shares).sum(-1)


def _slopes(x: Tensor, at: CountParameters) -> tuple[Tensor, Tensor, Tensor | None]:
    """Derivatives of the moving part of every entry in the logarithms of mean and dispersion, and in the zero logit."""
    log_ratio = at.log_mean - _given(at.log_dispersion)
    r, log_share = _given(at.log_dispersion).exp(), F.logsigmoid(-log_ratio)
    if at.zero_logit is None:
        slope = torch.addcmul(x, x + r, torch.sigmoid(log_ratio), value=-1)
        return slope, r * log_share - slope, None
    dropped = torch.where(x == 0, torch.sigmoid(at.zero_logit - r * log_share), 0)
    slope = torch.addcmul(x, x + r, torch.sigmoid(log_ratio) * (1 - dropped), value=-1)
    return slope, r * log_share * (1 - dropped) - slope, dropped


def _particles(parameters: Sequence[Tensor | None]) -> int:
    """How many particles to treat at a time."""
    log_mean = _given(parameters[0])
    return log_mean.shape[0] if log_mean.is_cuda else max(1, _CACHED // max(1, log_mean[0].numel()))


def _parts(parameters: Sequence[Tensor | None]) -> Iterator[CountParameters]:
    """The parameters of a few particles at a time; those without a particle axis are the same in all."""
    log_mean, size = _given(parameters[0]), _particles(parameters)

    def some(t: Tensor | None, start: int) -> Tensor | None:
        return t if t is None or t.dim() < log_mean.dim() or t.shape[0] == 1 else t[start : start + size]

    for start in range(0, log_mean.shape[0], size):
        yield CountParameters(log_mean[start : start + size], *(some(t, start) for t in parameters[1:]))


def _add(target: Tensor | None, weight: Tensor, slope: Tensor | None) -> None:
    """Add the slopes of some particles, weighted, to a gradient of the shape of its parameter."""
    if target is None or slope is None:
        return
    if target.dim() == 1:
        target += weight.flatten() @ slope.flatten(0, -2)
    else:
        target += (weight.unsqueeze(-1) * slope).sum_to_size(target.shape)
