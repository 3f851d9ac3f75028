r"""A trained VAE as a model: any encoder and decoder, with a likelihood and a prior.

.. math:: \log p(x, z \mid c) = \log p(x \mid \mathrm{decoder}(z, c)) + \log p(z \mid c).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
import torch.distributions as td
from torch import Tensor, nn

from vaerdict.core import Observations, SettingError, ShapeError, evaluating, floating, rows_of
from vaerdict.distributions import StandardNormal
from vaerdict.functions import as_module, called, check_finite, check_repeatable, shown
from vaerdict.models.vae_likelihoods import Likelihood, Observed, likelihood_of
from vaerdict.noise import seeded
from vaerdict.priors import is_function, log_prior
from vaerdict.proposals.wrapped import Wrapped, check_spread

_PROBES = 256  # observations by which a model is checked


def from_vae(
    encoder: Callable[..., Any],
    decoder: Callable[..., Any],
    likelihood: str | Callable[[Any], td.Distribution] | None = None,
    prior: Any = None,
    *,
    spread: str | None = None,
    output: str | None = None,
    scale: float | Tensor | None = None,
    dispersion: float | Tensor | None = None,
    d: int | None = None,
) -> Autoencoder:
    r"""A model of a trained VAE, with its encoder as a proposal.

    Encoder and decoder are modules or functions (methods of a module too), used as they were trained: the decoder gets
    latents ``(m, d)``, with particles and observations in one batch axis. They are evaluated without dropout and with
    fixed batch statistics, and their parameters are left alone. At the first call with data everything is checked:
    shapes, the range of the data, the number of latents of encoder and prior, outputs that are not finite or change
    when asked again.

    A conditional VAE has observations ``(x, c, ...)``, a tuple of tensors with the same leading axis. The first is
    modelled. The others are conditions: ``encoder(x, c)``, ``decoder(z, c)``, ``prior(c)``. In a mapping
    ``{"x": x, "c": c}`` they are passed by name: ``encoder(x, c=c)``.

    Parameters
    ----------
    encoder
        Returns a pair of tensors ``(n, d)``, the mean and its spread, or a torch distribution over ``(n, d)``.
    decoder
        Returns the parameters of the likelihood for latents ``(m, d)``, in the shape of the observations, ``(m, ...)``,
        or flat, ``(m, p)``.
    likelihood
        ``"bernoulli"`` (values in [0, 1]; for grey values the cross-entropy, as is usual), ``"gaussian"``,
        ``"poisson"``, ``"nb"``, a function from the decoder's output to a torch distribution of x, or None for a
        decoder that returns a distribution.
    prior
        A distribution of vectors ``(d,)``, a function of the conditions that returns one over ``(n, d)``, or None for
        the standard normal.
    spread
        What the encoder returns beside the mean: "log_variance" (the default), "sd", "log_sd" or "variance".
    output
        What the decoder returns. For ``"bernoulli"`` "logits" (the default) or "probabilities"; for ``"poisson"`` and
        ``"nb"`` "log_mean" (the default) or "mean"; for ``"gaussian"``, beside the mean, "log_variance" (the default),
        "sd", "log_sd" or "variance". Without `spread` or `output`, values that may be either of the first two are
        refused: probabilities are never taken for logits.
    scale
        Standard deviation of a Gaussian likelihood whose decoder returns the mean alone, a number or one per feature.
        The loss :math:`\|x - \hat x\|^2 + \mathrm{KL}` is that of ``scale=0.5**0.5``.
    dispersion
        Dispersion r of a negative binomial (variance :math:`m + m^2 / r`) whose decoder returns the mean alone. A
        decoder may also return the pair (log_mean, log_dispersion), or (mean, dispersion) with ``output="mean"``.
    d
        The number of latents, if it is needed before the model has seen data.

    Returns
    -------
    Autoencoder
        A model with the attributes ``prior`` and ``encoder``, a proposal.

    Examples
    --------
    >>> import torch, vaerdict as vd
    >>> def encode(x):  # mean and log-variance
    ...     return x[:, :2], torch.full((len(x), 2), -1.0)
    >>> model = from_vae(encode, lambda z: z.repeat(1, 2), "gaussian", scale=0.5)
    >>> x = torch.zeros(3, 4)
    >>> z, log_q = model.encoder.draw(x, 5, generator=vd.seeded(0))
    >>> (model.log_joint(x, z) - log_q).shape
    torch.Size([5, 3])
    """
    for name, function in (("encoder", encoder), ("decoder", decoder)):
        if isinstance(function, type) or not callable(function):
            what = f"the class {function.__name__}" if isinstance(function, type) else f"a {type(function).__name__}"
            raise SettingError(f"{name}= is {what}; pass a module or a function.")
    check_spread(spread)
    return Autoencoder(
        Wrapped(_OfObservations(encoder), spread, name="the encoder"),
        decoder,
        likelihood_of(likelihood, output, scale, dispersion),
        _vectors(prior),
        d,
    )


# ---------------------------------------------------------------------------------------------------- observations
class Parts(NamedTuple):
    """Observations apart: what is modelled, and its conditions by position and by name."""

    x: Tensor
    conditions: tuple[Tensor, ...]
    named: dict[str, Tensor]

    @classmethod
    def of(cls, x: Observations) -> Parts:
        """The parts of a tensor, of a tuple, whose first item is modelled, or of a mapping, whose first entry is."""
        if isinstance(x, Tensor):
            return cls(floating(x), (), {})
        if isinstance(x, Mapping):
            (_, first), *rest = x.items()
            return cls(floating(first), (), dict(rest))
        return cls(floating(x[0]), tuple(x[1:]), {})

    def repeated(self, k: int) -> Parts:
        """The conditions of k particles, with particles and observations in one axis; x is left alone."""

        def repeat(t: Tensor) -> Tensor:
            return t.expand(k, *t.shape).reshape(-1, *t.shape[1:])

        return Parts(self.x, tuple(map(repeat, self.conditions)), {n: repeat(t) for n, t in self.named.items()})


class _OfObservations(nn.Module):
    """A function of x and its conditions as a function of the observations."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = as_module(function)

    def forward(self, observations: Observations) -> Any:
        x, conditions, named = Parts.of(observations)
        return self.function(x, *conditions, **named)


class Prepared(NamedTuple):
    """The observations as `Autoencoder.log_joint` needs them, computed once for all particles."""

    observed: Observed
    parts: Parts


# ----------------------------------------------------------------------------------------------------------- model
class Autoencoder(nn.Module):
    """A trained VAE as a model; made by `from_vae`.

    `encoder` is its proposal. Observations are ``(n, ...)``, or a tuple or mapping; latents are ``(K, n, d)``.
    """

    def __init__(
        self, encoder: Wrapped, decoder: Callable[..., Any], likelihood: Likelihood, prior: Any, d: int | None
    ) -> None:
        super().__init__()
        self.encoder, self.decoder, self.likelihood = encoder, as_module(decoder), likelihood
        self.given_prior = as_module(prior) if is_function(prior) else prior
        self.d = d
        self.checked = False
        self.conditional = is_function(prior)

    @property
    def prior(self) -> Any:
        """The prior of z: a distribution, or with conditions a function of the observations that returns one."""
        if self.given_prior is None:
            if self.d is None:
                raise SettingError(
                    "the number of latents is not known before the model has seen data; pass it to from_vae, d=..., "
                    "or call check_data(x) first."
                )
            return StandardNormal(self.d)
        if not is_function(self.given_prior):
            return self.given_prior
        return self.prior_given if self.conditional else _vectors(self.given_prior())

    def prior_given(self, x: Observations) -> Any:
        """The prior given the conditions in x. Shapes: ``-> distribution over (n, d)``."""
        return self._prior_of(Parts.of(x))

    def _prior_of(self, parts: Parts) -> Any:
        prior = _vectors(self.given_prior(*parts.conditions, **parts.named))
        return prior if tuple(prior.batch_shape) else prior.expand(torch.Size((len(parts.x),)))

    def decode(self, z: Tensor, x: Observations = None) -> Any:
        """The decoder's output, given the conditions of the observations x if there are any.

        Shapes: ``(K, n, d) -> (K, n, ...)``, a tensor or a tuple of tensors.
        """
        out = self._decode(z, Parts(z, (), {}) if x is None else Parts.of(x))
        if isinstance(out, Tensor):
            return out.reshape(*z.shape[:-1], *out.shape[1:])
        if isinstance(out, (tuple, list)):
            return tuple(t.reshape(*z.shape[:-1], *t.shape[1:]) for t in out)
        raise SettingError(f"the decoder returned {shown(out)}, not tensors; call it with latents (m, d).")

    def _decode(self, z: Tensor, parts: Parts) -> Any:
        _, conditions, named = parts.repeated(z.shape[0])
        return self.decoder(z.reshape(-1, z.shape[-1]), *conditions, **named)

    def prepare(self, x: Observations) -> Prepared:
        """The terms that depend on x alone; raises where x does not fit the likelihood."""
        if not self.checked:
            self.check_data(x)
        return self._prepared(x)

    def _prepared(self, x: Observations) -> Prepared:
        parts = Parts.of(x)
        flat = parts.x.reshape(len(parts.x), -1)
        self.likelihood.check(flat)
        return Prepared(Observed(parts.x, flat, self.likelihood.fixed(flat)), parts)

    def log_joint(self, x: Any, z: Tensor) -> Tensor:
        """Log p(x, z), given the conditions. Shapes: ``(n, ...), (K, n, d) -> (K, n)``."""
        data, parts = x if isinstance(x, Prepared) else self.prepare(x)
        if z.shape[-1] != self.d:
            raise ShapeError(f"z has {z.shape[-1]} latents, the encoder {self.d}; make both with the same number.")
        out = self._decode(z, parts)
        prior = self._prior_of(parts) if self.conditional else self.prior
        return self.likelihood.log_prob(data, out, z.shape[0]) + data.fixed + log_prior(prior, z, data.flat)

    # --------------------------------------------------------------------------------------------------- checks
    @torch.no_grad()
    def check_data(self, x: Observations) -> None:
        """Raise if the model cannot be used with these observations; the first time, all its parts are checked."""
        parts = Parts.of(x)
        self.conditional = is_function(self.given_prior) and bool(parts.conditions or parts.named)
        self._prepared(x)
        if self.checked:
            return
        x = rows_of(x, slice(_PROBES))
        with evaluating(self):
            self._check_latents(self.encoder.check(x), x)
            self._check_decoder(x)
        self.checked = True

    def _check_latents(self, d: int, x: Observations) -> None:
        if self.d is not None and self.d != d:
            raise ShapeError(f"from_vae was given d={self.d}, but the encoder returns {d} latents; leave d= out.")
        self.d, n = d, Parts.of(x).x.shape[0]
        prior = called("the prior", self.prior_given, x) if self.conditional else self.prior
        batch = tuple(getattr(prior, "batch_shape", ()))
        if tuple(prior.event_shape) != (d,) or batch != ((n,) if self.conditional else ()):
            raise ShapeError(
                f"the prior has batch shape {batch} and event shape {tuple(prior.event_shape)}, the encoder returns "
                f"{d} latents; it must be a distribution of vectors ({d},)"
                + (f", one for each of {n} observations." if self.conditional else ".")
            )

    def _check_decoder(self, x: Observations) -> None:
        """Decode one draw of the encoder per observation, and half of them a second time."""
        data, parts = self._prepared(x)
        z = self.encoder.draw(x, 1, generator=seeded(0, data.flat.device)).z
        out = called("the decoder", self.decoder, z[0], *parts.conditions, **parts.named)
        self.likelihood.check_output(out, data)
        half = max(1, len(data.x) // 2)
        log_p = self.log_joint(Prepared(data, parts), z)[0]
        check_finite("log p(x, z), at latents drawn from the encoder,", log_p)
        check_repeatable(
            "the decoder", log_p[:half], self.log_joint(self._prepared(rows_of(x, slice(half))), z[:, :half])[0]
        )


def _vectors(prior: Any) -> Any:
    """A prior of vectors: ``Normal(zeros(d), ones(d))`` stands for independent coordinates."""
    if prior is None or (is_function(prior) and not isinstance(prior, type)):
        return prior
    if isinstance(prior, type) or not hasattr(prior, "log_prob"):
        what = f"the class {prior.__name__}" if isinstance(prior, type) else shown(prior)
        raise SettingError(f"the prior is {what}; pass a distribution of vectors (d,), or a function that returns one.")
    if isinstance(prior, td.Distribution) and not prior.event_shape and prior.batch_shape:
        return td.Independent(prior, 1)
    return prior
