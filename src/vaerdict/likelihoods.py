r"""Count likelihoods: log-probability, its parts that do and do not depend on the mean, and sampling.

The log-probability :math:`\log \mathrm{NB}(x; m, r)` has a part that depends on the mean,
:math:`x \log\frac{m}{r + m} + r \log\frac{r}{r + m}`, and a part that does not,
:math:`\log\Gamma(x + r) - \log\Gamma(r) - \log x!`, which is zero at x = 0. A model computes the second part once for
all particles of an observation, and its gamma functions only for positive counts.

The first part is computed as written. Expanded with :math:`x \log m` it would need one function less, but large terms
would cancel: in float32 and cells of 100,000 counts the error reached one nat.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from vaerdict.core import SettingError

_CACHED = 2**18  # entries that fit in the cache of a core


class CountParameters(NamedTuple):
    """Parameters of a count likelihood; those that a likelihood does not use may be None.

    `zero_logit` is the log odds of an extra zero, which does not depend on the mean.

    Shapes: ``log_mean (K, *batch, genes)``; the others broadcast to it.
    """

    log_mean: Tensor
    log_dispersion: Tensor | None = None
    zero_logit: Tensor | None = None


class CountLikelihood(Protocol):
    """A distribution of counts given its parameters; genes are independent."""

    @property
    def dispersed(self) -> bool:
        """Whether it needs a dispersion."""
        ...

    @property
    def inflated(self) -> bool:
        """Whether it needs a zero logit."""
        ...

    @property
    def per_cell(self) -> bool:
        """Whether the zero logit depends on the latent, as the mean does."""
        ...

    def log_prob(self, x: Tensor, parameters: CountParameters) -> Tensor:
        """Log-probability of every entry. Shapes: ``(*batch, genes) -> (K, *batch, genes)``."""
        ...

    def fixed(self, x: Tensor, parameters: CountParameters) -> Tensor:
        """The part of a cell's log-probability that does not depend on the mean; ``log_mean`` is ignored.

        Shapes: ``(*batch, genes) -> (*batch)``.
        """
        ...

    def moving(self, x: Tensor, parameters: CountParameters) -> Tensor:
        """The part of a cell's log-probability that depends on the mean. Shapes: ``(*batch, genes) -> (K, *batch)``."""
        ...

    def sample(self, parameters: CountParameters, *, generator: torch.Generator) -> Tensor:
        """Draw counts. Shapes: ``-> (K, *batch, genes)``."""
        ...


@dataclass(frozen=True)
class Poisson:
    """Counts with variance equal to the mean."""

    dispersed = False
    inflated = False
    per_cell = False

    def log_prob(self, x: Tensor, parameters: CountParameters) -> Tensor:
        """Log-probability of every entry."""
        return x * parameters.log_mean - parameters.log_mean.exp() - torch.lgamma(x + 1)

    def fixed(self, x: Tensor, parameters: CountParameters) -> Tensor:
        """Minus log x!."""
        return _sum_over_positive(lambda count: -torch.lgamma(count + 1), x)

    def moving(self, x: Tensor, parameters: CountParameters) -> Tensor:
        """x log m - m."""
        return torch.linalg.vecdot(parameters.log_mean, x) - parameters.log_mean.exp().sum(-1)

    def sample(self, parameters: CountParameters, *, generator: torch.Generator) -> Tensor:
        """Draw counts."""
        return torch.poisson(parameters.log_mean.exp(), generator=generator)


@dataclass(frozen=True)
class NegativeBinomial:
    """Counts with mean m and variance m + m^2 / r, where r is the dispersion of a gene."""

    dispersed = True
    inflated = False
    per_cell = False

    def log_prob(self, x: Tensor, parameters: CountParameters) -> Tensor:
        """Log-probability of every entry."""
        r, log_proportions = _required(parameters.log_dispersion).exp(), _log_proportions(parameters)
        return _constant(x, r, torch.lgamma(r)) + x * log_proportions.mean + r * log_proportions.dispersion

    def fixed(self, x: Tensor, parameters: CountParameters) -> Tensor:
        """The terms with gamma functions."""
        r = _required(parameters.log_dispersion).exp()
        return _sum_over_positive(_constant, x, r, torch.lgamma(r))

    def moving(self, x: Tensor, parameters: CountParameters) -> Tensor:
        """x log(m / (r + m)) + r log(r / (r + m))."""
        return _moving(x, parameters._replace(zero_logit=None))

    def sample(self, parameters: CountParameters, *, generator: torch.Generator) -> Tensor:
        """Draw counts: Poisson with a gamma-distributed rate."""
        r = _required(parameters.log_dispersion).exp().expand_as(parameters.log_mean).contiguous()
        rate = torch._standard_gamma(r, generator=generator) / r * parameters.log_mean.exp()
        return torch.poisson(rate, generator=generator)


@dataclass(frozen=True)
class ZeroInflated:
    r"""Negative-binomial counts with extra zeros of log odds a.

    :math:`\log p(x) = \log\mathrm{NB}(x) - \log(1 + e^a) + 1\{x = 0\} \log(1 + e^a / \mathrm{NB}(0))`.

    With `per_cell` each cell and gene has its log odds, which depend on the latent as in scVI; otherwise each gene.
    """

    per_cell: bool = False
    dispersed = True
    inflated = True

    def log_prob(self, x: Tensor, parameters: CountParameters) -> Tensor:
        """Log-probability of every entry."""
        negative_binomial = NegativeBinomial().log_prob(x, parameters)
        zeros = _zero_term(x, parameters, _log_proportions(parameters))
        return negative_binomial + _log_not_inflated(parameters) + zeros

    def fixed(self, x: Tensor, parameters: CountParameters) -> Tensor:
        """The constant of the negative binomial, plus log(1 - P(extra zero)) unless `per_cell`."""
        constant = NegativeBinomial().fixed(x, parameters)
        return constant if self.per_cell else constant + _log_not_inflated(parameters).sum(-1)

    def moving(self, x: Tensor, parameters: CountParameters) -> Tensor:
        """The part that depends on the mean, plus log(1 - P(extra zero)) if `per_cell`."""
        total = _moving(x, parameters._replace(zero_logit=_required(parameters.zero_logit)))
        return total + _log_not_inflated(parameters).sum(-1) if self.per_cell else total

    def sample(self, parameters: CountParameters, *, generator: torch.Generator) -> Tensor:
        """Draw counts."""
        counts = NegativeBinomial().sample(parameters, generator=generator)
        u = torch.rand(counts.shape, generator=generator, device=counts.device, dtype=counts.dtype)
        return torch.where(u < torch.sigmoid(_required(parameters.zero_logit)), 0, counts)


def _constant(x: Tensor, r: Tensor, lgamma_r: Tensor) -> Tensor:
    """The part of log NB that does not depend on the mean."""
    return torch.lgamma(x + r) - lgamma_r - torch.lgamma(x + 1)


def _log_not_inflated(parameters: CountParameters) -> Tensor:
    """log(1 - P(extra zero))."""
    return F.logsigmoid(-_required(parameters.zero_logit))


def _sum_over_positive(f: Callable[..., Tensor], x: Tensor, *others: Tensor) -> Tensor:
    """Sum over genes of f, which is zero at x = 0 and evaluated only where x > 0. Shapes: ``-> (*batch)``.

    On a GPU f is evaluated everywhere, because finding the positive counts would synchronise with the host.
    """
    if x.is_cuda:
        return f(x, *others).sum(-1)
    rows, genes = x.reshape(-1, x.shape[-1]).nonzero(as_tuple=True)

    def entries(t: Tensor) -> Tensor:
        return t.index_select(0, genes) if t.dim() == 1 else t.expand_as(x).reshape(-1, x.shape[-1])[rows, genes]

    values = f(*(entries(t) for t in (x, *others)))
    return values.new_zeros(x[..., 0].numel()).index_add(0, rows, values).reshape(x.shape[:-1])


def _required(parameter: Tensor | None) -> Tensor:
    if parameter is None:
        raise SettingError("the likelihood needs a dispersion, and a zero-inflated one also a zero logit; pass them.")
    return parameter


# ------------------------------------------------------------------------- the part that depends on the mean
class _LogProportions(NamedTuple):
    """Logarithms of m / (r + m) and r / (r + m); NB(0) is the r-th power of the second."""

    mean: Tensor
    dispersion: Tensor


def _log_proportions(parameters: CountParameters) -> _LogProportions:
    log_ratio = parameters.log_mean - _required(parameters.log_dispersion)
    return _LogProportions(F.logsigmoid(log_ratio), F.logsigmoid(-log_ratio))


def _zero_term(x: Tensor, parameters: CountParameters, log_proportions: _LogProportions) -> Tensor:
    """log(1 + e^a / NB(0)) where x = 0, else 0."""
    log_zero = _required(parameters.log_dispersion).exp() * log_proportions.dispersion
    return torch.where(x == 0, -F.logsigmoid(log_zero - _required(parameters.zero_logit)), 0)


def _moving(x: Tensor, parameters: CountParameters) -> Tensor:
    log_dispersion = _required(parameters.log_dispersion)
    return _Moving.apply(x, parameters.log_mean, log_dispersion, parameters.zero_logit)  # type: ignore[return-value]


class _Moving(torch.autograd.Function):
    """The part that depends on the mean, with explicit derivatives; on a CPU a few particles at a time.

    Autograd would save about ten tensors of the size of `log_mean`. This function saves none and works in the cache.
    Its derivatives can be differentiated again.
    """

    @staticmethod
    def forward(ctx, x: Tensor, *parameters: Tensor | None) -> Tensor:  # type: ignore[override]
        ctx.save_for_backward(x, *parameters)
        return torch.cat([_total(x, chunk) for chunk in _chunks(parameters)])

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        x, *parameters = ctx.saved_tensors
        if torch.is_grad_enabled():  # for second derivatives: all particles at once, so that autograd can follow
            slopes = [None if t is None else grad.unsqueeze(-1) * t for t in _slopes(x, CountParameters(*parameters))]
            return None, *(s if s is None else s.sum_to_size(p.shape) for s, p in zip(slopes, parameters, strict=True))
        gradients = [torch.empty_like(parameters[0])]
        gradients += [p if p is None else torch.zeros_like(p) for p in parameters[1:]]
        for i, (chunk, target) in enumerate(zip(_chunks(parameters), _chunks(gradients), strict=True)):
            weight = grad.narrow(0, i * _chunk_size(parameters), len(chunk.log_mean))
            in_mean, in_dispersion, in_logit = _slopes(x, chunk)
            torch.mul(in_mean, weight.unsqueeze(-1), out=target.log_mean)
            _add(target.log_dispersion, weight, in_dispersion)
            _add(target.zero_logit, weight, in_logit)
        return None, *gradients


def _total(x: Tensor, parameters: CountParameters) -> Tensor:
    log_proportions, r = _log_proportions(parameters), _required(parameters.log_dispersion).exp()
    total = torch.linalg.vecdot(log_proportions.mean, x) + torch.linalg.vecdot(log_proportions.dispersion, r)
    return total if parameters.zero_logit is None else total + _zero_term(x, parameters, log_proportions).sum(-1)


def _slopes(x: Tensor, parameters: CountParameters) -> tuple[Tensor, Tensor, Tensor | None]:
    """Derivatives of every entry in log mean, log dispersion and zero logit."""
    log_ratio = parameters.log_mean - _required(parameters.log_dispersion)
    r, log_proportion = _required(parameters.log_dispersion).exp(), F.logsigmoid(-log_ratio)
    if parameters.zero_logit is None:
        slope = torch.addcmul(x, x + r, torch.sigmoid(log_ratio), value=-1)
        return slope, r * log_proportion - slope, None
    extra_zero = torch.where(x == 0, torch.sigmoid(parameters.zero_logit - r * log_proportion), 0)
    slope = torch.addcmul(x, x + r, torch.sigmoid(log_ratio) * (1 - extra_zero), value=-1)
    return slope, r * log_proportion * (1 - extra_zero) - slope, extra_zero


def _chunk_size(parameters: Sequence[Tensor | None]) -> int:
    """The number of particles to compute at a time."""
    log_mean = _required(parameters[0])
    return log_mean.shape[0] if log_mean.is_cuda else max(1, _CACHED // max(1, log_mean[0].numel()))


def _chunks(parameters: Sequence[Tensor | None]) -> Iterator[CountParameters]:
    """The parameters of a few particles at a time; parameters without a particle axis are shared by all chunks."""
    log_mean, size = _required(parameters[0]), _chunk_size(parameters)

    def chunk(t: Tensor | None, start: int) -> Tensor | None:
        return t if t is None or t.dim() < log_mean.dim() or t.shape[0] == 1 else t[start : start + size]

    for start in range(0, log_mean.shape[0], size):
        yield CountParameters(log_mean[start : start + size], *(chunk(t, start) for t in parameters[1:]))


def _add(gradient: Tensor | None, weight: Tensor, slope: Tensor | None) -> None:
    """Add the weighted slopes of a chunk of particles to the gradient of a parameter."""
    if gradient is None or slope is None:
        return
    if gradient.dim() == 1:
        gradient += weight.flatten() @ slope.flatten(0, -2)
    else:
        gradient += (weight.unsqueeze(-1) * slope).sum_to_size(gradient.shape)
