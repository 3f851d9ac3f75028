"""Proposals from what is at hand: a torch distribution, a function of x that returns one, a flow, or an encoder."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributions as td
from torch import Tensor, nn

from vaerdict.core import (
    Draws,
    Observations,
    Proposal,
    SettingError,
    ShapeError,
    check_count,
    device_of,
    evaluating,
    n_observations,
    rows_of,
)
from vaerdict.distributions import Diagonal, Elliptical, Triangular, constrained_support, in_support
from vaerdict.functions import as_module, called, check_finite, check_repeatable, shown
from vaerdict.noise import Randomness, Source, as_source, global_state_from, seeded
from vaerdict.priors import Prior

SPREADS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "log_variance": lambda t: (0.5 * t).exp(),
    "sd": lambda t: t,
    "log_sd": Tensor.exp,
    "variance": Tensor.sqrt,
}
"""What a network may return beside a mean, the default first, and its standard deviation."""

_PROBES = 256  # observations by which a function is checked at its first call
_FORMS = (
    "pass a torch distribution, a function x -> distribution, an encoder that returns (mean, log_variance), a flow, or "
    "an object with draw(x, k, generator=...) and log_prob(z, x)."
)


def as_proposal(thing: Any, *, spread: str | None = None) -> Proposal:
    """A proposal from a torch distribution, a function of x, a normalising flow or an encoder.

    Draws come from the noise of the library, and networks are evaluated without dropout and with fixed batch
    statistics. At its first call a function is checked: its output must be finite, have one row per observation and be
    the same when it is asked again.

    Parameters
    ----------
    thing
        One of

        - a torch distribution over ``(d,)``, the same for all observations, or over ``(n, d)``, made for n of them;
        - a function of the observations that returns such a distribution, such as a flow of zuko;
        - an encoder, a function that returns a pair of tensors ``(n, d)``, the mean and its spread;
        - a proposal, which is returned unchanged.

        A function gets x as it is. An encoder of several arguments is called by one: ``lambda x: encoder(*x)``.
    spread
        What an encoder returns beside the mean: "log_variance" (the default), "sd", "log_sd" or "variance". Without it,
        an encoder whose second output is positive everywhere is refused, because it may be either of the first two.

    Returns
    -------
    Proposal
        An object with ``draw`` and ``log_prob``, and with ``select`` if it was made for fixed observations.

    Raises
    ------
    SettingError, ShapeError
        If `thing` cannot be used. The message says what is missing.

    Examples
    --------
    >>> import torch, vaerdict as vd
    >>> q = as_proposal(lambda x: (x[:, :2], torch.full((len(x), 2), -1.0)))
    >>> draws = q.draw(torch.zeros(5, 3), 4, generator=vd.seeded(0))
    >>> draws.z.shape, draws.log_q.shape
    (torch.Size([4, 5, 2]), torch.Size([4, 5]))
    """
    check_spread(spread)
    if isinstance(thing, type):
        raise SettingError(f"the proposal is the class {thing.__name__}; pass an object of it, {thing.__name__}(...).")
    if isinstance(thing, Proposal):
        return thing
    if isinstance(thing, td.Distribution):
        q = _vectors(thing)
        return Prior(q) if isinstance(q, td.Distribution) and not q.batch_shape else fixed(q)
    if callable(thing) and not _without_forward(thing):
        return Wrapped(thing, spread)
    missing = [name for name in ("draw", "log_prob") if not hasattr(thing, name)]
    raise SettingError(f"the proposal, a {type(thing).__name__}, has no {' and no '.join(missing)}; {_FORMS}")


def check_spread(spread: str | None) -> None:
    """Raise unless `spread` is None or names what an encoder returns beside its mean."""
    if spread is not None and spread not in SPREADS:
        raise SettingError(f"spread={spread!r} is not known; use one of {', '.join(map(repr, SPREADS))}.")


def _without_forward(thing: object) -> bool:
    return isinstance(thing, nn.Module) and type(thing).forward is nn.Module.forward


# ------------------------------------------------------------------------------------------------------- functions
class Wrapped(nn.Module):
    """A function of the observations, or a module, as a proposal; see `as_proposal`."""

    def __init__(
        self, function: Callable[[Any], Any], spread: str | None = None, *, name: str = "the proposal"
    ) -> None:
        super().__init__()
        self.function, self.spread, self.name = as_module(function), spread, name
        self.checked = False

    def forward(self, x: Observations) -> Elliptical | td.Distribution:
        """The distribution of latents given x. Shapes: ``(n, ...) -> distribution over (n, d)``."""
        if not self.checked:
            self.check(x)
        return self._distribution(x)

    def draw(self, x: Observations, k: int, *, generator: Randomness) -> Draws:
        """Draw k particles for each observation. Shapes: ``(n, ...) -> (K, n, d), (K, n)``."""
        q = self(x)
        z = _sample(q, check_count(k), as_source(generator), x, self._distribution)
        return Draws(z, _log_prob(q, z))

    def log_prob(self, z: Tensor, x: Observations) -> Tensor:
        """Log q(z | x), minus infinity outside the support. Shapes: ``(K, n, d), (n, ...) -> (K, n)``."""
        return _log_prob(self(x), z)

    @torch.no_grad()
    def check(self, x: Observations) -> int:
        """Raise if the output for x cannot be used; return the number of latents."""
        x = rows_of(x, slice(_PROBES))
        half = rows_of(x, slice(max(1, n_observations(x) // 2)))
        with evaluating(self):
            q, again = self._distribution(x, first=True), self._distribution(half)
            z = _sample(q, 1, as_source(seeded(0)), x, self._distribution)
            check_finite(f"the draws of {self.name}", z[0])
            log_q, log_again = _log_prob(q, z)[0], _log_prob(again, z[:, : n_observations(half)])[0]
        check_repeatable(self.name, log_q[: len(log_again)], log_again)
        self.checked = True
        return z.shape[-1]

    def _distribution(self, x: Observations, *, first: bool = False) -> Elliptical | td.Distribution:
        out = called(self.name, self.function, x) if first else self.function(x)
        n = n_observations(x)
        if isinstance(out, (tuple, list)) and len(out) == 2 and all(isinstance(t, Tensor) for t in out):
            out = self._normal(*out, n=n, first=first)
        elif isinstance(out, td.Distribution):
            out = _vectors(out, self.name)
        elif not isinstance(out, Elliptical):
            raise SettingError(
                f"{self.name} returned {shown(out)}; it must return (mean, log_variance), both (observations, d), "
                "or a torch distribution. One tensor of both is split by lambda x: encoder(x).chunk(2, -1)."
            )
        if tuple(out.batch_shape) == () and isinstance(out, td.Distribution):
            out = out.expand(torch.Size((n,)))
        if tuple(out.batch_shape) != (n,):
            raise ShapeError(
                f"{self.name} returned a distribution with batch shape {tuple(out.batch_shape)} for {n} observations; "
                f"it must have one row per observation, batch shape ({n},) and event shape (latents,)."
            )
        return out

    def _normal(self, mean: Tensor, second: Tensor, *, n: int, first: bool) -> Elliptical:
        if mean.dim() != 2 or mean.shape[0] != n or second.shape != mean.shape:
            raise ShapeError(
                f"{self.name} returned tensors of shapes {tuple(mean.shape)} and {tuple(second.shape)} for {n} "
                f"observations; mean and spread must both be (observations, latents), ({n}, d)."
            )
        if first:
            check_finite(f"the mean of {self.name}", mean)
            check_finite(f"the second output of {self.name}", second)
            self._check_spread(second)
        return Elliptical(mean, Diagonal(SPREADS[self.spread or "log_variance"](second)))

    def _check_spread(self, second: Tensor) -> None:
        if self.spread is None and bool((second > 0).all()):
            raise SettingError(
                f"the second output of {self.name} is positive everywhere ({second.min():.3g} to {second.max():.3g}), "
                "as a standard deviation is; say what it is: spread='sd', or spread='log_variance'."
            )
        if self.spread in ("sd", "variance") and not bool((second > 0).all()):
            raise SettingError(
                f"{int((second <= 0).sum())} of {second.numel()} values of the {self.spread} of {self.name} are not "
                "positive; was it spread='log_variance' or 'log_sd'?"
            )


# --------------------------------------------------------------------------------------------------- distributions
def _vectors(q: td.Distribution, name: str = "the proposal") -> Elliptical | td.Distribution:
    """A distribution of vectors; a normal one as `Elliptical` where it is made for several observations."""
    try:
        discrete = bool(q.support is not None and q.support.is_discrete)
    except NotImplementedError:
        discrete = False
    if discrete:
        raise SettingError(
            f"{name} is a {type(q).__name__}, which is discrete; discrete latents are summed exactly and need no "
            "proposal: give one for the continuous latents only."
        )
    if not q.event_shape and q.batch_shape:  # Normal(zeros(n, d), ones(n, d)) stands for independent coordinates
        q = td.Independent(q, 1)
    if len(q.event_shape) != 1 or len(q.batch_shape) > 1:
        raise ShapeError(
            f"{name} is a {type(q).__name__} with batch shape {tuple(q.batch_shape)} and event shape "
            f"{tuple(q.event_shape)}; it must be over vectors, event shape (latents,), for one or n observations: "
            "Independent(Normal(mean, sd), 1) with mean (n, latents)."
        )
    base = q.base_dist if isinstance(q, td.Independent) else q
    if q.batch_shape and isinstance(base, td.Normal):
        return Elliptical(base.loc, Diagonal(base.scale))
    if q.batch_shape and isinstance(q, td.MultivariateNormal):
        return Elliptical(q.loc, Triangular(q.scale_tril))
    return q


def fixed(q: Elliptical | td.Distribution) -> Proposal:
    """The proposal of a distribution that was made for fixed observations, over ``(n, d)``."""
    if isinstance(q, Elliptical):
        return q
    _rows(q, torch.zeros(1, dtype=torch.long))  # raises where rows cannot be selected
    return Fixed(q)


class Fixed:
    """A torch distribution over ``(n, d)`` as a proposal for the n observations that it was made for."""

    def __init__(self, q: td.Distribution) -> None:
        self.q = q

    def draw(self, x: Observations, k: int, *, generator: Randomness) -> Draws:
        """Draw k particles for each observation."""
        self._check(x)
        index = torch.arange(self.q.batch_shape[0], device=device_of(x)).unsqueeze(-1)
        z = _sample(self.q, check_count(k), as_source(generator), index, lambda i: _rows(self.q, i[:, 0]))
        return Draws(z, _log_prob(self.q, z))

    def log_prob(self, z: Tensor, x: Observations) -> Tensor:
        """Log-density at z, minus infinity outside the support. Shapes: ``(K, n, d) -> (K, n)``."""
        self._check(x)
        return _log_prob(self.q, z)

    def select(self, index: Tensor) -> Fixed:
        """The distributions of the observations at `index`."""
        return Fixed(_rows(self.q, index))

    def _check(self, x: Observations) -> None:
        if x is not None and n_observations(x) != self.q.batch_shape[0]:
            raise ShapeError(
                f"this distribution was made for {self.q.batch_shape[0]} observations, not {n_observations(x)}; "
                "make a new one, or pass the function that makes it: x -> distribution."
            )


def _rows(q: td.Distribution, index: Tensor) -> Any:
    """The distribution with the rows `index` of its parameters."""
    if isinstance(q, td.Independent):
        return td.Independent(_rows(q.base_dist, index), q.reinterpreted_batch_ndims)
    if isinstance(q, td.MixtureSameFamily):
        return td.MixtureSameFamily(_rows(q.mixture_distribution, index), _rows(q.component_distribution, index))
    # of equivalent parameters one is enough
    names = set(q.arg_constraints) - {"covariance_matrix", "precision_matrix"}
    names -= {"probs"} if "logits" in names else set()
    try:
        values = {name: getattr(q, name) for name in names}
        kept = {name: t.expand(_full_shape(q, name, t)).index_select(0, index) for name, t in values.items()}
        if kept:
            return type(q)(**kept)
    except (AttributeError, TypeError, ValueError):
        pass
    raise SettingError(
        f"the rows of a {type(q).__name__} cannot be selected, which a proposal for fixed observations needs; pass the "
        "function that makes it: x -> distribution."
    )


def _full_shape(q: td.Distribution, name: str, t: Tensor) -> torch.Size:
    event_dims = q.arg_constraints[name].event_dim
    return q.batch_shape + t.shape[t.dim() - event_dims :]


def _sample(q: Any, k: int, source: Source, x: Observations, at: Callable[[Observations], Any]) -> Tensor:
    """Draw k particles per row of a distribution from a source. Shapes: ``-> (K, n, d)``.

    `at` gives the distribution at some of the observations: one without a known transform is sampled row by row.
    """
    if isinstance(q, Elliptical):
        return q.transform(q.noise(k, source))
    if hasattr(q, "base") and hasattr(q, "transform"):  # a flow of zuko
        return q.transform.inv(_sample(_vectors(q.base), k, source, x, lambda rows: at(rows).base))
    n = n_observations(x)
    return Prior(lambda rows: q if n_observations(rows) == n else at(rows)).sample(x, k, (n,), source)


def _log_prob(q: Any, z: Tensor) -> Tensor:
    """Log-density, minus infinity outside the support. Shapes: ``(K, n, d) -> (K, n)``."""
    support = constrained_support(q)
    inside = None if support is None else in_support(support, z)
    if inside is None or bool(inside.all()):
        return q.log_prob(z)
    # a torch distribution raises for values outside its support: they are replaced by values inside
    with global_state_from(seeded(0)):
        log_q = q.log_prob(torch.where(inside.unsqueeze(-1), z, q.sample()))
    return torch.where(inside, log_q, -torch.inf)
