"""Priors as proposals: of one latent or several, fixed or given the observation, and how they are sampled."""

from __future__ import annotations

import copy
import inspect
import math
from collections import namedtuple
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from keyword import iskeyword
from types import FunctionType
from typing import Any

import torch
import torch.distributions as td
from torch import Tensor

from vaerdict.core import (
    Draws,
    Latent,
    Observations,
    Proposal,
    SettingError,
    ShapeError,
    check_count,
    device_of,
    map_latent,
    n_observations,
    parts_of,
    rows_of,
)
from vaerdict.distributions import Elliptical, StandardNormal, constrained_support, in_support
from vaerdict.functions import used_modules
from vaerdict.noise import Iid, KeyedNoise, KeyedSobol, Randomness, Sobol, Source, as_source, global_state_from

PriorLike = Any
"""A `PriorDistribution`, or a function of the observations (and of earlier latents) that returns one."""


def is_function(prior: object) -> bool:
    """Whether a prior is a function that returns a distribution."""
    return callable(prior) and not hasattr(prior, "log_prob")


def is_discrete(prior: object) -> bool:
    """Whether a distribution is that of a state: an index, or a one-hot vector."""
    return isinstance(prior, (td.Categorical, td.OneHotCategorical))


def batch_of(x: Observations) -> torch.Size:
    """The batch axes of observations: all but the last of a tensor ``(*batch, p)``, else the leading one."""
    return x.shape[:-1] if isinstance(x, Tensor) else torch.Size((n_observations(x),))


class Prior:
    """The prior of a model as a proposal: inefficient, but it covers the posterior. The defensive part of a mixture.

    `prior` is a distribution of vectors, a function of the observations that returns one for each of them, or a
    `JointPrior`. A tensor of observations is ``(*batch, p)``, or with `rows` ``(n, ...)``, such as images.
    """

    def __init__(self, prior: PriorLike, *, rows: bool = False) -> None:
        if not (is_function(prior) or is_discrete(prior)) and tuple(prior.event_shape) == () == tuple(
            getattr(prior, "batch_shape", (None,))
        ):
            raise ShapeError(
                f"the prior {prior} is of scalars, without an axis for the latent; use a distribution of vectors: "
                "Independent(Normal(torch.zeros(1), torch.ones(1)), 1)."
            )
        self.prior, self.rows = prior, rows

    def draw(self, x: Observations, k: int, *, generator: Randomness) -> Draws:
        """Draw k latents for each observation; the values of x matter to conditional priors only."""
        batch = torch.Size((n_observations(x),)) if self.rows else batch_of(x)
        z = self.sample(x, check_count(k), batch, as_source(generator))
        return Draws(z, self.log_prob(z, x))

    def sample(self, x: Observations, k: int, batch: Sequence[int], source: Source) -> Latent:
        """Draw k latents for each observation of a batch. Shapes: ``-> (K, *batch, d)``."""
        sample_at = getattr(self.prior, "sample_at", None)
        if sample_at is not None:
            return sample_at(x, k, batch, source)
        return _sample(self.prior, x, k, batch, source)

    def log_prob(self, z: Latent, x: Observations) -> Tensor:
        """Log p(z), minus infinity outside the support. Shapes: ``(K, *batch, d) -> (K, *batch)``."""
        return log_prior(self.prior, z, x)


def log_prior(prior: PriorLike, z: Latent, x: Observations) -> Tensor:
    """Log p(z), or log p(z | x) of a conditional prior; minus infinity outside the support.

    Shapes: ``(K, *batch, d) -> (K, *batch)``.
    """
    if isinstance(prior, Proposal):
        return prior.log_prob(z, x)
    prior = prior(x) if is_function(prior) else prior
    support = constrained_support(prior)
    inside = None if support is None else in_support(support, z)
    if inside is None or bool(inside.all()):
        return _log_density(prior, z)
    # a torch distribution raises for values outside its support
    if len(prior.batch_shape) + len(prior.event_shape) == 1:
        log_p = _log_density(prior, z[inside])
        return log_p.new_full(inside.shape, -torch.inf).masked_scatter(inside, log_p)
    with global_state_from(torch.Generator().manual_seed(0)):
        valid = prior.sample().to(z.device)
    return torch.where(inside, _log_density(prior, torch.where(inside.unsqueeze(-1), z, valid)), -torch.inf)


def takes_observations(prior: PriorLike) -> bool:
    """Whether a prior depends on the observations."""
    if isinstance(prior, JointPrior):
        return any("x" in arguments for arguments in prior.arguments.values())
    return is_function(prior)


def _log_density(prior: Any, z: Latent) -> Tensor:
    log_p = prior.log_prob(z)
    # Normal(zeros(d), ones(d)) gives one number per coordinate, which stands for independent coordinates
    per_coordinate = len(prior.event_shape) == 0 and isinstance(z, Tensor) and z.is_floating_point()
    return log_p.sum(-1) if per_coordinate and log_p.dim() == z.dim() else log_p


# ------------------------------------------------------------------------------------------------- several latents
@cache
def latent_type(*names: str) -> Any:
    """The named tuple of latents of these names."""
    return namedtuple("Latent", names)


class JointPrior:
    r"""The prior of several latents in ancestral order, :math:`p(a)\,p(b \mid a)\,p(c \mid a, b)`.

    Each keyword names a latent. Its value is a distribution, or a function that returns one and whose arguments are
    named after earlier latents, or ``x`` for the observations. Latents are vectors; a ``Categorical`` or
    ``OneHotCategorical`` is a discrete latent, which `vaerdict.expect` and `vaerdict.posterior` sum over exactly.

    A model with this prior gets its latents as a named tuple.

    Shapes: given latents ``(K, n, d)`` or observations of n rows, a function returns a distribution over
    ``(K, n, d)`` or ``(n, d)``; a vector is ``(K, n, d)`` in the named tuple, a ``Categorical`` ``(K, n)``.

    Examples
    --------
    >>> from torch.distributions import Categorical, Normal
    >>> prior = JointPrior(c=Categorical(logits=torch.zeros(3)), z=lambda c: Normal(c.unsqueeze(-1) * torch.ones(2), 1))
    >>> z = prior.draw(torch.zeros(5, 1), 4, generator=torch.Generator().manual_seed(0)).z
    >>> z.c.shape, z.z.shape, prior.discrete
    (torch.Size([4, 5]), torch.Size([4, 5, 2]), ('c',))
    """

    def __deepcopy__(self, memo: dict[int, Any]) -> JointPrior:
        closures = [name for name, f in self.latents.items() if isinstance(f, FunctionType) and used_modules(f)]
        if closures:
            raise SettingError(
                f"the prior of {', '.join(closures)} is a function that uses networks, which are not copied with it; "
                "make `prior` a property of the model that returns the JointPrior."
            )
        return JointPrior(**{name: copy.deepcopy(prior, memo) for name, prior in self.latents.items()})

    def __init__(self, **latents: PriorLike) -> None:
        if not latents:
            raise SettingError("a JointPrior needs at least one latent: JointPrior(z=distribution).")
        for name in latents:
            if name == "x" or not name.isidentifier() or iskeyword(name) or name.startswith("_"):
                raise SettingError(
                    f"a latent cannot be called {name!r}: x is the observations, and names are those of attributes."
                )
        self.latents = latents
        self.Latent = latent_type(*latents)
        self.arguments = {name: _arguments(name, prior, latents) for name, prior in latents.items()}

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the latents in ancestral order."""
        return tuple(self.latents)

    @property
    def event_shape(self) -> torch.Size:
        """Empty: the latents have a shape each."""
        return torch.Size(())

    @property
    def discrete(self) -> tuple[str, ...]:
        """The names of the discrete latents whose distribution is not a function."""
        return tuple(name for name, prior in self.latents.items() if is_discrete(prior))

    def at(self, name: str, latents: Mapping[str, Tensor], x: Observations) -> Any:
        """The distribution of a latent given earlier ones and the observations."""
        prior = self.latents[name]
        if not is_function(prior):
            return prior
        return prior(**{key: x if key == "x" else latents[key] for key in self.arguments[name]})

    def draw(self, x: Observations, k: int, *, generator: Randomness) -> Draws:
        """Draw k latents for each observation."""
        z = self.sample_at(x, check_count(k), batch_of(x), as_source(generator))
        return Draws(z, self.log_prob(z, x))

    def sample(self, sample_shape: torch.Size | tuple[int, ...] = ()) -> Latent:
        """Draw latents from torch's global random state; only where none depends on the observations."""
        if takes_observations(self):
            raise SettingError("the prior depends on the observations; draw from it by draw(x, k, generator=...).")
        k, batch = math.prod(sample_shape), torch.Size((1,))
        z = self.sample_at(torch.empty(1, 1), k, batch, Iid((torch.default_generator,)))
        return map_latent(lambda t: t[:, 0].reshape(*sample_shape, *t.shape[2:]), z)

    def sample_at(self, x: Observations, k: int, batch: Sequence[int], source: Source) -> Latent:
        """Draw k latents for each observation of a batch. Shapes: ``-> (K, *batch, d)`` each."""
        latents: dict[str, Tensor] = {}
        for name in self.names:

            def at(rows: Observations, given: Mapping[str, Tensor], name: str = name) -> Any:
                return self.at(name, given, rows)

            spec = at if is_function(self.latents[name]) else self.latents[name]
            latents[name] = _sample(spec, x, k, batch, source, latents)
        return self.Latent(**latents)

    def log_prob(self, z: Latent, x: Observations = None) -> Tensor:
        """Log p(z), or log p(z | x). Shapes: ``-> (K, *batch)``."""
        latents, total = z._asdict(), None
        for name in self.names:
            value, prior = latents[name], self.at(name, latents, x)
            term = log_prior(prior, value, x)
            total = term if total is None else total + term
        assert total is not None
        return total


def _arguments(name: str, prior: PriorLike, latents: Iterable[str]) -> tuple[str, ...]:
    """The arguments of a function among the earlier latents and x."""
    if not is_function(prior):
        return ()
    earlier = [*list(latents)[: list(latents).index(name)], "x"]
    function = prior.forward if isinstance(prior, torch.nn.Module) else prior
    needed = [p.name for p in inspect.signature(function).parameters.values() if p.default is p.empty]
    unknown = [argument for argument in needed if argument not in earlier]
    if unknown or not needed:
        raise SettingError(
            f"the prior of {name} is a function of {', '.join(needed) or 'nothing'}; its arguments must be among "
            f"{', '.join(earlier)}: latents that come before it, and the observations x."
        )
    return tuple(needed)


# -------------------------------------------------------------------------------------------------------- sampling
def _sample(
    prior: PriorLike,
    x: Observations,
    k: int,
    batch: Sequence[int],
    source: Source,
    latents: Mapping[str, Tensor] | None = None,
) -> Latent:
    """Sample a distribution, or what a function of the observations and latents returns, from a source.

    Torch distributions use the global random state. Sobol points and keyed noise are kept where the distribution is a
    known transform of uniform or normal numbers.
    """
    function, device = is_function(prior), device_of(x)
    dist = _resolved(prior, x, latents)
    if isinstance(dist, StandardNormal):
        return source.normal(k, batch, dist.d, like=_like(x, latents))
    if isinstance(dist, Elliptical) and len(dist.batch_shape) > len(batch):  # one for each particle of earlier latents
        return dist.transform(dist.at(0).noise(k, source)).detach()
    if isinstance(dist, Proposal):
        return dist.draw(x, k, generator=source).z
    if isinstance(source, (Sobol, KeyedNoise)) and isinstance(dist, td.Distribution):
        z = _transformed(dist, k, batch, source, function)
        if z is not None:
            return z.to(device)
    if isinstance(source, (KeyedNoise, KeyedSobol)):
        return _by_row(prior, x, k, source if isinstance(source, KeyedNoise) else source.noise, latents)
    with global_state_from(source.generators[0] if isinstance(source, Iid) else source.generator):
        return map_latent(lambda t: t.to(device), dist.sample(_sample_shape(dist, k, batch, function)))


def _like(x: Observations, latents: Mapping[str, Tensor] | None) -> Tensor:
    """An empty tensor of the floating-point type of the earlier latents, or of the observations."""
    parts = [*(latents or {}).values(), *parts_of(x)]
    like = next((t for t in parts if t.is_floating_point()), None)
    return torch.empty(0, device=parts[0].device) if like is None else like.new_empty(0)


def _resolved(prior: Any, x: Observations, latents: Mapping[str, Tensor] | None) -> Any:
    if not is_function(prior):
        return prior
    return prior(x) if latents is None else prior(x, latents)


def _sample_shape(dist: Any, k: int, batch: Sequence[int], function: bool) -> torch.Size:
    """The axes of ``(K, *batch)`` that a distribution does not have itself."""
    shape = (k, *batch)
    if not function:
        return torch.Size(shape)
    scalar = is_discrete(dist) and not dist.event_shape
    own = len(dist.batch_shape) + len(dist.event_shape) - (0 if scalar else 1)
    return torch.Size(shape[: len(shape) - own])


def _by_row(prior: Any, x: Observations, k: int, source: KeyedNoise, latents: Mapping[str, Tensor] | None) -> Latent:
    """Sample each observation from its own generator, for distributions without a known transform."""
    draws = []
    for i, generator in enumerate(source.generators()):
        row = slice(i, i + 1)
        given = None if latents is None else {name: t[:, row] for name, t in latents.items()}
        rows = rows_of(x, row)
        dist = _resolved(prior, rows, given)
        with global_state_from(generator):
            draws.append(dist.sample(_sample_shape(dist, k, (1,), is_function(prior))))
    device = device_of(x)
    if isinstance(draws[0], Tensor):
        return torch.cat(draws, 1).to(device)
    return type(draws[0])(*(torch.cat(parts, 1).to(device) for parts in zip(*draws, strict=True)))


@torch.no_grad()
def _transformed(
    dist: td.Distribution, k: int, batch: Sequence[int], source: Sobol | KeyedNoise, function: bool
) -> Tensor | None:
    """Transform Sobol points or keyed noise to samples of a torch distribution; None where no transform is known.

    Shapes: ``-> (K, *batch, *event)``.
    """
    if isinstance(dist, td.Independent):
        return _transformed(dist.base_dist, k, batch, source, function)
    own = k, *batch
    size = dist.batch_shape + dist.event_shape
    event = size[len(own) - len(_sample_shape(dist, k, batch, function)) :]
    if isinstance(dist, (td.Categorical, td.OneHotCategorical)):
        return _categorical(dist, k, batch, source, function)
    if isinstance(dist, (td.MultivariateNormal, td.LowRankMultivariateNormal)):
        eps = source.normal(k, batch, math.prod(event), like=dist.loc).reshape(*own, *event)
        return dist.loc + (dist.scale_tril @ eps.unsqueeze(-1)).squeeze(-1)
    median = _median(dist)
    if median is not None:
        u = source.uniform(k, batch, math.prod(event), like=median.double()).reshape(*own, *event)
        return _rounded_down(dist.icdf(u), median.dtype)
    if not isinstance(dist, td.TransformedDistribution):
        return None
    z = _transformed(dist.base_dist, k, batch, source, function)
    for transform in dist.transforms:
        z = None if z is None else transform(z)
    return z


def _categorical(dist: Any, k: int, batch: Sequence[int], source: Sobol | KeyedNoise, function: bool) -> Tensor:
    """Invert the distribution function of a discrete distribution. Shapes: ``-> (K, *batch)`` or one-hot."""
    cumulative = dist.probs.double().cumsum(-1)
    if not function and cumulative.dim() > 1:
        raise ShapeError(f"a discrete prior with batch shape {tuple(dist.batch_shape)} must be a function of x.")
    u = source.uniform(k, batch, 1, like=cumulative)
    state = (u.to(cumulative.device) > cumulative / cumulative[..., -1:]).sum(-1)
    one_hot = isinstance(dist, td.OneHotCategorical)
    return torch.nn.functional.one_hot(state, cumulative.shape[-1]).to(dist.probs) if one_hot else state


def _median(prior: td.Distribution) -> Tensor | None:
    """The median of each coordinate; None for a distribution without an inverse distribution function."""
    half = torch.tensor(0.5, dtype=torch.float64)  # has no axes, so that the result has the dtype of the prior
    try:
        return prior.icdf(half)
    except NotImplementedError:
        return None


def _rounded_down(z: Tensor, dtype: torch.dtype) -> Tensor:
    """Convert from double precision without rounding up, which could reach the open end of a bounded support."""
    rounded = z.to(dtype)
    return torch.where(rounded > z, rounded.nextafter(rounded.new_tensor(-torch.inf)), rounded)
