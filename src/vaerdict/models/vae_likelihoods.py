"""Likelihoods of a VAE, by the output of its decoder."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
import torch.distributions as td
from torch import Tensor, nn

from vaerdict.core import DataError, SettingError, ShapeError
from vaerdict.distributions import Diagonal, Elliptical
from vaerdict.functions import as_module, called, check_finite, shown
from vaerdict.likelihoods import CountLikelihood, CountParameters, NegativeBinomial, Poisson
from vaerdict.models.counts import fixed_part
from vaerdict.models.pixels import BernoulliLikelihood
from vaerdict.proposals.wrapped import SPREADS


class Observed(NamedTuple):
    """What is modelled of the observations, as it is and flat, computed once for all particles.

    ``fixed`` is the part of the log-likelihood that does not depend on z.

    Shapes: ``x (n, ...)``, ``flat (n, p)``, ``fixed (n,)``.
    """

    x: Tensor
    flat: Tensor
    fixed: Tensor


def likelihood_of(likelihood: Any, output: str | None, scale: Any, dispersion: Any) -> Likelihood:
    """The likelihood of a name, of a function from the decoder's output to a distribution, or of None."""
    for name, value, owner in (("scale", scale, "gaussian"), ("dispersion", dispersion, "nb")):
        if value is not None and likelihood != owner:
            raise SettingError(f"{name}= belongs to likelihood={owner!r}; leave it out for {likelihood!r}.")
    names = ", ".join(map(repr, _NAMED))
    if isinstance(likelihood, str):
        if likelihood not in _NAMED:
            raise SettingError(f"likelihood={likelihood!r} is not known; use {names}, or {_FUNCTION}.")
        return _NAMED[likelihood](output, scale if dispersion is None else dispersion)
    if output is not None:
        raise SettingError(f"output={output!r} belongs to the named likelihoods; a function reads the output itself.")
    if likelihood is not None and not callable(likelihood):
        raise SettingError(f"likelihood= is {shown(likelihood)}; use {names}, or {_FUNCTION}.")
    return Likelihood(likelihood)


_FUNCTION = "a function from the decoder's output to a torch distribution"


class Likelihood(nn.Module):
    """The likelihood that a torch distribution gives, which the decoder returns, or a function of its output.

    The decoder is given latents ``(m, d)``, with m particles times observations, and its outputs are ``(m, ...)``.
    """

    def __init__(self, function: Callable[[Any], Any] | None = None) -> None:
        super().__init__()
        self.function = None if function is None else as_module(function)

    def check(self, x: Tensor) -> None:
        """Raise if x ``(n, p)`` does not fit."""

    def check_output(self, out: Any, data: Observed) -> None:
        """Raise if the output of the decoder for one particle per observation cannot be used."""
        q = self._distribution(out)
        shape = tuple(q.batch_shape + q.event_shape)
        if shape != tuple(data.x.shape):
            raise ShapeError(
                f"the likelihood is a {type(q).__name__} over {shape}, the observations are {tuple(data.x.shape)}; "
                "both must have one row per observation and the same features."
            )
        outside = ~q.support.check(data.x)  # type: ignore[union-attr]
        if bool(outside.any()):
            raise DataError(
                f"{int(outside.sum())} of {outside.numel()} values of x are outside the support of the likelihood, a "
                f"{type(q).__name__}; pass x as the decoder was trained on it, or use another likelihood."
            )

    def fixed(self, x: Tensor) -> Tensor:
        """The part of the log-likelihood that does not depend on z. Shapes: ``(n, p) -> (n,)``."""
        return x.new_zeros(x.shape[:-1])

    def log_prob(self, data: Observed, out: Any, k: int) -> Tensor:
        """The part of the log-likelihood that depends on z. Shapes: ``-> (K, n)``."""
        q = self._distribution(out)
        x = data.x.expand(k, *data.x.shape).reshape(-1, *data.x.shape[1:])
        try:
            if not getattr(q, "_validate_args", True) and not bool(q.support.check(x).all()):  # type: ignore[union-attr]
                raise ValueError("values are outside its support.")  # which torch checks unless it was told not to
            log_p = q.log_prob(x)
        except ValueError as error:
            reason = " ".join(str(error).split())[:200]
            raise DataError(f"x does not fit the likelihood, a {type(q).__name__}: {reason}") from error
        return log_p.reshape(len(x), -1).sum(-1).reshape(k, -1)

    def _distribution(self, out: Any) -> td.Distribution:
        q = out if self.function is None else called("the likelihood", self.function, out)
        if isinstance(q, td.Distribution):
            return q
        if self.function is None:
            raise SettingError(
                f"without likelihood= the decoder must return a torch distribution, not {shown(q)}; pass likelihood=, "
                f"one of {', '.join(map(repr, _NAMED))} or {_FUNCTION}."
            )
        raise SettingError(f"the function likelihood= returned {shown(q)}; it must return a torch distribution of x.")


class _Named(Likelihood):
    """Base class of the likelihoods with a name. The decoder returns one tensor, or two where there is a `parameter`.

    `words` are what `output` may be, the default first. With the default, an output that could be what the second
    word says is refused.
    """

    name: str
    words: tuple[str, ...]
    parameter = ""  # the name of what the decoder may return beside the mean, or `from_vae` be given

    def __init__(self, output: str | None, value: float | Tensor | None = None) -> None:
        super().__init__()
        if output is not None and output not in self.words:
            words = " or ".join(map(repr, self.words))
            raise SettingError(f"output={output!r} is not known for likelihood={self.name!r}; use {words}.")
        self.output = output
        if isinstance(value, nn.Parameter):
            self.value: Tensor | None = value
        else:
            self.register_buffer("value", None if value is None else _positive(self.parameter, value))

    @property
    def word(self) -> str:
        """What the decoder returns."""
        return self.output or self.words[0]

    def check_output(self, out: Any, data: Observed) -> None:
        """Raise if the output has another shape than x, is not finite, or may have two meanings."""
        tensors = self._tensors(out)
        if not _same_features(tensors[0].shape, data.x.shape):
            raise ShapeError(
                f"the decoder returned {shown(tensors[0])} for {len(data.x)} latents, the observations are "
                f"{tuple(data.x.shape)}; one row must hold the features of one observation in the same order."
            )
        for tensor in tensors:
            check_finite("the decoder's output, at latents drawn from the encoder,", tensor)
        low, high = (f"{bound:.3g}" for bound in self._telling(tensors).aminmax())
        if self.output is None and self._may_be(self.words[1], tensors):
            raise SettingError(
                f"the decoder's output, {low} to {high}, may be {self.words[1]} where {self.words[0]} is expected; say "
                f"what it is: output={self.words[1]!r}, or output={self.words[0]!r}."
            )
        if not self._may_be(self.word, tensors):
            raise SettingError(
                f"the decoder's output, {low} to {high}, is no {self.word}; was it output={self.words[0]!r}?"
            )

    def _telling(self, tensors: tuple[Tensor, ...]) -> Tensor:
        """The tensor whose values tell what was returned."""
        return tensors[0]

    def _may_be(self, word: str, tensors: tuple[Tensor, ...]) -> bool:
        """Whether the output has the range that a word promises."""
        return word != self.words[1] or bool((tensors[0] >= 0).all())

    def _tensors(self, out: Any) -> tuple[Tensor, ...]:
        tensors = (out,) if isinstance(out, Tensor) else tuple(out) if isinstance(out, (tuple, list)) else ()
        if not all(isinstance(t, Tensor) for t in tensors) or not 1 <= len(tensors) <= 1 + bool(self.parameter):
            needed = f"one tensor, or a pair with the {self.parameter}" if self.parameter else "one tensor"
            raise SettingError(
                f"the decoder returned {shown(out)}; likelihood={self.name!r} needs {needed}. For anything else pass "
                f"{_FUNCTION}."
            )
        if self.parameter and len(tensors) == 1 and self.value is None:
            raise SettingError(
                f"the decoder returned a mean alone; likelihood={self.name!r} needs {self.parameter}= too."
            )
        if self.parameter and len(tensors) == 2 and self.value is not None:
            raise SettingError(f"the decoder returned its own {self.parameter}; leave out {self.parameter}=.")
        return tensors

    def _read(self, out: Any, data: Observed, k: int) -> tuple[Tensor, ...]:
        """The tensors of an output, flat over features. Shapes: ``-> (K, n, p)`` each."""
        shape = (k, *data.flat.shape)
        first, *others = (t.reshape(t.shape[0], -1) for t in self._tensors(out))
        try:
            return first.reshape(shape), *(t.expand_as(first).reshape(shape) for t in others)
        except RuntimeError:
            raise ShapeError(
                f"the decoder returned {shown(out)} for {k * len(data.x)} latents; one row must hold the "
                f"{data.flat.shape[-1]} features of one observation."
            ) from None

    def _value(self, x: Tensor) -> Tensor:
        """The parameter given to `from_vae`. Shapes: ``(n, p) -> (p,)``."""
        assert self.value is not None
        if self.value.numel() not in (1, x.shape[-1]):
            raise ShapeError(
                f"{self.parameter}= has shape {tuple(self.value.shape)}; pass a number, or one for each of "
                f"{x.shape[-1]} features."
            )
        return self.value.to(x).reshape(-1).expand(x.shape[-1])


class Bernoulli(_Named):
    """Values in [0, 1]; the decoder returns logits or probabilities."""

    name, words = "bernoulli", ("logits", "probabilities")

    def check(self, x: Tensor) -> None:
        """Raise for values outside [0, 1]."""
        _check_values(x, (x < 0) | (x > 1), "outside [0, 1]", "rescale x, or use another likelihood")

    def log_prob(self, data: Observed, out: Any, k: int) -> Tensor:
        """The cross-entropy, negated."""
        (logits,) = self._read(out, data, k)
        if self.word == "probabilities":
            logits = torch.special.logit(logits, torch.finfo(logits.dtype).eps)
        return BernoulliLikelihood().log_prob(data.flat, logits)

    def _may_be(self, word: str, tensors: tuple[Tensor, ...]) -> bool:
        return word != "probabilities" or bool(((tensors[0] >= 0) & (tensors[0] <= 1)).all())


class Gaussian(_Named):
    """Real values; the decoder returns a mean, and maybe its spread."""

    name, words, parameter = "gaussian", tuple(SPREADS), "scale"

    def log_prob(self, data: Observed, out: Any, k: int) -> Tensor:
        """The log-density."""
        mean, *others = self._read(out, data, k)
        sd = SPREADS[self.word](others[0]) if others else self._value(data.flat)
        return Elliptical(mean, Diagonal(sd.expand_as(mean))).log_prob(data.flat.expand_as(mean))

    def _telling(self, tensors: tuple[Tensor, ...]) -> Tensor:
        return tensors[-1]

    def _may_be(self, word: str, tensors: tuple[Tensor, ...]) -> bool:
        if len(tensors) == 1:
            return word == self.word
        return word not in ("sd", "variance") or bool((tensors[1] > 0).all())


class _Counts(_Named):
    """Base class of the likelihoods of counts; the decoder returns the mean or its logarithm."""

    words = ("log_mean", "mean")
    counts: CountLikelihood

    def check(self, x: Tensor) -> None:
        """Raise for values that are negative or not whole numbers."""
        wrong = (x < 0) | (x != x.round())
        _check_values(x, wrong, "negative or not whole numbers", "pass raw counts, neither normalised nor transformed")

    def fixed(self, x: Tensor) -> Tensor:
        """The terms with gamma functions, unless they depend on z."""
        if self.parameter and self.value is None:
            return super().fixed(x)
        return fixed_part(self.counts, x, CountParameters(x, self._log_dispersion(x)))

    def log_prob(self, data: Observed, out: Any, k: int) -> Tensor:
        """The log-probability, without the terms of `fixed`."""
        log_mean, *others = map(self._log, self._read(out, data, k))
        if others:
            return self.counts.log_prob(data.flat, CountParameters(log_mean, others[0])).sum(-1)
        return self.counts.moving(data.flat, CountParameters(log_mean, self._log_dispersion(data.flat)))

    def _log_dispersion(self, x: Tensor) -> Tensor | None:
        return self._value(x).log() if self.parameter else None

    def _log(self, t: Tensor) -> Tensor:
        return t if self.word == "log_mean" else t.clamp_min(torch.finfo(t.dtype).tiny).log()


class PoissonCounts(_Counts):
    """Counts with variance equal to the mean."""

    name, counts = "poisson", Poisson()


class NegativeBinomialCounts(_Counts):
    """Counts with mean m and variance m + m^2 / r; the decoder returns m, and maybe the dispersion r."""

    name, counts, parameter = "nb", NegativeBinomial(), "dispersion"


_NAMED: Mapping[str, type[_Named]] = {
    likelihood.name: likelihood for likelihood in (Bernoulli, Gaussian, PoissonCounts, NegativeBinomialCounts)
}


def _positive(name: str, value: float | Tensor) -> Tensor:
    tensor = value.detach().clone() if isinstance(value, Tensor) else torch.tensor(float(value))
    if not bool((tensor > 0).all()) or not bool(tensor.isfinite().all()):
        raise SettingError(f"{name}={value!r} must be positive and finite.")
    return tensor


def _same_features(output: torch.Size, x: torch.Size) -> bool:
    """Whether rows of an output have the features of x in their order: the same axes, or one of the two is flat."""
    mine, other = ([size for size in shape[1:] if size != 1] for shape in (output, x))
    flat = min(len(mine), len(other)) < 2 and output[1:].numel() == x[1:].numel()
    return len(output) > 0 and output[0] == x[0] and (mine == other or flat)


def _check_values(x: Tensor, wrong: Tensor, what: str, remedy: str) -> None:
    if bool(wrong.any()):
        example = x[wrong][0].item()
        raise DataError(f"{int(wrong.sum())} of {x.numel()} values of x are {what} (such as {example:.4g}); {remedy}.")
