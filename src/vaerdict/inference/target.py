r"""A model at given observations as a density of vectors without bounds: what refinement and samplers work on.

`Target` translates between the user's world and that of escalation:

- observations, which may be a tensor, a tuple or a mapping, become row numbers ``(n, 1)``;
- several latents become one vector, and discrete ones are summed out (`vaerdict.models.Enumerated`);
- a latent z of bounded support (a box, positive numbers) becomes :math:`u = T^{-1}(z)` with T the bijection of
  ``torch.distributions.biject_to``. Densities of u have the additional term
  :math:`\log|\det \partial T / \partial u|`, which cancels in log-weights:

.. math:: \log p(x, z) - \log q(z \mid x) = \log p(x, u) - \log q(u \mid x).
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
import torch.distributions as td
from torch import Tensor, nn
from torch.distributions.constraints import Constraint

from vaerdict.core import (
    Draws,
    Latent,
    Model,
    Observations,
    Proposal,
    SettingError,
    ShapeError,
    check_log_joint,
    device_of,
    n_observations,
    parts_of,
    prepared,
    restricted,
    rows_of,
)
from vaerdict.distributions import constrained_support, in_support
from vaerdict.inference.assess import Query
from vaerdict.models import Enumerated, discrete_latents
from vaerdict.noise import Randomness, as_source, draws_of, seeded
from vaerdict.priors import JointPrior, Prior, is_function, log_prior
from vaerdict.refinement import location

UserQuery = Callable[..., Tensor]
"""A quantity of interest, ``f(z)`` or ``f(z, x)``. Shapes: ``(K, m, d) -> (K, m, *out)`` for any m observations."""


def takes_observations(f: UserQuery) -> bool:
    """Whether a query is a function of the latent and the observations."""
    try:
        parameters = inspect.signature(f.forward if isinstance(f, nn.Module) else f).parameters.values()
    except (TypeError, ValueError):  # a built-in function has no signature
        return False
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    return len([p for p in positional if p.default is p.empty]) >= 2


def with_observations(f: UserQuery) -> Callable[[Latent, Observations], Tensor]:
    """A query as a function of the latent and the observations."""
    return f if takes_observations(f) else lambda z, x: f(z)


class _Rows(NamedTuple):
    """What `Target.prepare` returns: the user's prepared rows."""

    value: Any


class _Part(NamedTuple):
    """A continuous latent: its name (empty: not named), size, and the bijection onto its support if that is bounded."""

    name: str
    size: int
    support: Constraint | None
    transform: Any


class Point(NamedTuple):
    """A latent z, log|det dz/du|, and whether u is in the range that floating-point numbers can represent."""

    z: Latent
    log_det: Tensor | float
    representable: Tensor | None


@dataclass(frozen=True, eq=False)
class Space:
    """Vectors u without bounds in place of a model's latents; discrete ones are summed out.

    Shapes: ``u (K, n, d)``.
    """

    model: Model
    parts: tuple[_Part, ...]

    @classmethod
    def of(cls, model: Model, x: Observations) -> Space:
        """The space of a model; the first observation shows the shapes."""
        model = Enumerated(model, x) if discrete_latents(model, x) else model
        if isinstance(model, Enumerated) and not model.continuous:
            return cls(model, ())
        first = rows_of(x, slice(0, 1))
        z = Prior(model.prior).sample(first, 2, (1,), as_source(seeded(0)))
        named = _named(z, model)
        return cls(model, tuple(_part(name, t, *_distribution(model, name, z, first)) for name, t in named.items()))

    @classmethod
    def without_vectors(cls, model: Model, x: Observations) -> Space:
        """The space of a model whose latents are used as they are; only discrete ones are summed out."""
        return cls(Enumerated(model, x) if discrete_latents(model, x) else model, ())

    @property
    def sizes(self) -> list[int]:
        """The number of coordinates of each continuous latent."""
        return [part.size for part in self.parts]

    def at(self, u: Tensor) -> Point:
        """The latent of a vector."""
        named, log_det, representable = {}, 0.0, None
        for part, value in zip(self.parts, u.split(self.sizes, -1), strict=True):
            if part.transform is None:
                named[part.name] = value
                continue
            inside = (value.abs() <= _largest(value)).all(-1)
            value = torch.where(inside.unsqueeze(-1), value, 0.0)
            z = _constrained(part, value)
            change = part.transform.log_abs_det_jacobian(value, z)
            # transforms of single coordinates give one number for each
            log_det = log_det + (change.sum(-1) if change.dim() == value.dim() else change)
            representable = inside if representable is None else representable & inside
            named[part.name] = z
        return Point(self._joined(named), log_det, representable)

    def latent(self, u: Tensor) -> Latent:
        """The latent of a vector, strictly inside its support."""
        return self.at(u).z

    def unchecked(self, u: Tensor) -> Latent:
        """A vector cut into latents, without the maps onto their supports."""
        return self._joined({p.name: t.clone() for p, t in zip(self.parts, u.split(self.sizes, -1), strict=True)})

    def vector(self, z: Latent) -> Tensor:
        """The vector of a latent; where it is outside its support, numbers at which the density is zero."""
        named = _named(z, self.model)
        u = torch.cat([_unconstrained(part, named[part.name]) for part in self.parts], -1)
        if u.shape[-1] != sum(self.sizes):
            raise ShapeError(
                f"the proposal draws latents of size ({u.shape[-1]},), the model's prior has size "
                f"({sum(self.sizes)},); give both the same latent dimension."
            )
        return u

    def log_joint(self, prepared_x: Any, u: Tensor) -> Tensor:
        """Log p(x, u). Shapes: ``-> (K, n)``."""
        return self._density(u, lambda z: check_log_joint(self.model.log_joint(prepared_x, z), u[..., 0], z))

    def log_prior(self, u: Tensor, x: Observations) -> Tensor:
        """Log p(u | x). Shapes: ``-> (K, n)``."""
        return self._density(u, lambda z: log_prior(self.model.prior, z, x))

    @torch.no_grad()
    def evaluate(self, f: UserQuery, z: Latent, x: Observations) -> Tensor:
        """A query at latents and observations, averaged over discrete latents."""
        query = with_observations(f)
        if isinstance(self.model, Enumerated):
            return self.model.average(lambda latent: query(latent, x), x, z)
        return query(z, x)

    def _density(self, u: Tensor, log_density: Callable[[Latent], Tensor]) -> Tensor:
        z, log_det, representable = self.at(u)
        log_p = log_density(z) + log_det
        return log_p if representable is None else torch.where(representable, log_p, -torch.inf)

    def _joined(self, named: dict[str, Tensor]) -> Latent:
        if isinstance(self.model, Enumerated):
            return self.model.joined(named)
        return self.model.prior.Latent(**named) if isinstance(self.model.prior, JointPrior) else named[""]


@dataclass(frozen=True, eq=False)
class Target:
    """The density of vectors u given observations by row number. See the module.

    Shapes: ``u (K, *batch, d)``; the observations of a batch are row numbers ``(*batch, 1)``. A batch of several axes
    repeats the same rows along all but the last, as starts of a search do.
    """

    space: Space
    x: Observations

    @classmethod
    def of(cls, model: Model, x: Observations) -> Target:
        """The target of a model at observations."""
        return cls(Space.of(model, x), x)

    @cached_property
    def index(self) -> Tensor:
        """The row numbers of all observations. Shapes: ``(n, 1)``."""
        return torch.arange(n_observations(self.x), device=device_of(self.x)).unsqueeze(-1)

    @property
    def d(self) -> int:
        """The number of continuous latents in all."""
        return sum(self.space.sizes)

    @property
    def width(self) -> int:
        """How many numbers an observation consists of."""
        return sum(math.prod(t.shape[1:]) for t in parts_of(self.x))

    @property
    def prior(self) -> TargetPrior:
        """The prior of u."""
        return TargetPrior(self, Prior(self.space.model.prior))

    def rows(self, index: Tensor) -> Observations:
        """The observations at row numbers. Shapes: ``(*batch, 1)``."""
        while index.dim() > 2:
            index = index[0]
        return rows_of(self.x, index[:, 0])

    def prepare(self, index: Tensor) -> _Rows:
        """What the model prepares from the observations at row numbers."""
        return _Rows(prepared(self.space.model, self.rows(index)))

    def log_joint(self, x: _Rows | Tensor, u: Tensor) -> Tensor:
        """Log p(x, u). Shapes: ``-> (K, *batch)``."""
        rows = self.prepare(x) if isinstance(x, Tensor) else x
        # starts of a search take the place of particles
        return self.space.log_joint(rows.value, u.reshape(-1, *u.shape[-2:])).reshape(u.shape[:-1])

    def proposal(self, q: Proposal) -> TargetProposal:
        """A proposal for the user's latents as a proposal for u."""
        return TargetProposal(self, q)

    def query(self, f: UserQuery) -> Query:
        """A function of the user's latents and observations as a function of vectors and row numbers."""
        return lambda u, index: self.space.evaluate(f, self.space.latent(u), self.rows(index))


def _named(z: Latent, model: Model) -> dict[str, Tensor]:
    """The continuous latents by name; latents of all kinds are accepted from a model with discrete ones."""
    if isinstance(model, Enumerated):
        fields = getattr(z, "_fields", ())
        return {name: getattr(z, name) for name in model.continuous} if fields else model.parts(z)
    if isinstance(z, Tensor):
        return {"": z}
    if isinstance(model.prior, JointPrior):
        return z._asdict()
    raise ShapeError(
        f"the model's latents are a {type(z).__name__}; escalation needs one tensor (K, n_obs, d), or a JointPrior "
        "that names them. Or call `posterior` without a tolerance."
    )


def _distribution(model: Model, name: str, z: Latent, x: Observations) -> tuple[Any, bool]:
    """The prior of one latent at the first observation, and whether it depends on anything."""
    inner = model.model if isinstance(model, Enumerated) else model
    prior = inner.prior
    if isinstance(prior, JointPrior):
        full = model.full(z)._asdict() if isinstance(model, Enumerated) else z._asdict()
        return prior.at(name, full, x), is_function(prior.latents[name])
    return (prior(x), True) if is_function(prior) else (prior, False)


def _part(name: str, z: Tensor, prior: Any, dependent: bool) -> _Part:
    """One latent with the bijection onto its support, or an error where there is none.

    Raises
    ------
    SettingError
        If the support has no bijection with R^d of the same dimension, such as the simplex of a Dirichlet.
    """
    if z.dim() < 3 or not z.is_floating_point():
        raise SettingError(
            f"the prior {prior} draws {tuple(z.shape[2:])} {z.dtype} for each latent; latents are vectors of floating "
            "point numbers, or states of a Categorical or OneHotCategorical."
        )
    support = constrained_support(prior)
    if support is None:
        return _Part(name, z.shape[-1], None, None)
    assert isinstance(prior, td.Distribution)
    shape = z.shape[2:]
    try:
        transform = td.biject_to(support)
    except NotImplementedError:
        transform = None
    varies = dependent and any(isinstance(bound, Tensor) for bound in vars(support).values())
    if transform is None or len(shape) != 1 or transform.inverse_shape(shape) != shape or varies:
        raise SettingError(
            f"the prior {prior} has the support {support} and the shape {tuple(shape)}, for which no bijection "
            "with vectors of the same size is known; use a prior of unbounded vectors and map them in log_joint."
        )
    return _Part(name, z.shape[-1], support, transform)


def _constrained(part: _Part, u: Tensor) -> Tensor:
    """The latents z = T(u), strictly inside their support."""
    z = part.transform(u)
    # rounding can reach a bound, where densities are zero or infinite: move by one unit in the last place
    rounded, centre = z.detach(), part.transform(u.new_zeros(u.shape[-1:]))
    return z + (rounded.nextafter(centre.detach()) - rounded)


def _unconstrained(part: _Part, z: Tensor) -> Tensor:
    if part.transform is None:
        return z
    largest = _largest(z)
    u = part.transform.inv(z).clamp(-largest, largest)
    return torch.where(in_support(part.support, z).unsqueeze(-1), u, 2 * largest)  # type: ignore[arg-type]


def _largest(u: Tensor) -> float:
    """The largest u for which exp(u) and exp(-u) are normal floating-point numbers."""
    return -math.log(torch.finfo(u.dtype).tiny)


@dataclass(frozen=True, eq=False)
class TargetProposal:
    """A proposal for the user's latents as a proposal for u. A draw outside the support has the weight zero.

    Observations x are row numbers.
    """

    target: Target
    base: Proposal

    def draw(self, x: Tensor, k: int, *, generator: Randomness) -> Draws:
        """Draw k particles for each observation."""
        z, log_q = draws_of(self.base, self.target.rows(x), k, generator)
        u = self.target.space.vector(z)
        return Draws(u, log_q + self.target.space.at(u).log_det)

    def log_prob(self, u: Tensor, x: Tensor) -> Tensor:
        """Log q(u | x), arbitrary where the joint density is zero. Shapes: ``(K, *batch, d) -> (K, *batch)``."""
        z, log_det, _ = self.target.space.at(u)
        return self.base.log_prob(z, self.target.rows(x)) + log_det

    def select(self, index: Tensor) -> TargetProposal:
        """The proposal for the observations at `index` of the last batch axis."""
        return type(self)(self.target, restricted(self.base, index))

    def location(self, x: Tensor, generator: Randomness | None) -> Tensor:
        """Where a search may start: the location of the proposal, or the mean of its draws. Shapes: ``-> (n, d)``."""
        rows = self.target.rows(x)
        if all(part.transform is None and not part.name for part in self.target.space.parts):
            return location(self.base, rows, generator)
        assert generator is not None
        return self.draw(x, 32, generator=generator).z.mean(0)


@dataclass(frozen=True, eq=False)
class TargetPrior(TargetProposal):
    """The prior of u, which is a proposal too."""

    base: Prior

    @property
    def event_shape(self) -> torch.Size:
        """``(d,)``."""
        return torch.Size((self.target.d,))

    def draw(self, x: Tensor, k: int, *, generator: Randomness) -> Draws:
        """Draw k particles for each observation."""
        u = self.target.space.vector(self.base.sample(self.target.rows(x), k, x.shape[:-1], as_source(generator)))
        return Draws(u, self.log_prob(u, x))

    def log_prob(self, u: Tensor, x: Tensor) -> Tensor:
        """Log p(u | x). Shapes: ``(K, *batch, d) -> (K, *batch)``."""
        flat = u.reshape(-1, *u.shape[-2:])
        return self.target.space.log_prior(flat, self.target.rows(x)).reshape(u.shape[:-1])

    def sample(self, sample_shape: torch.Size | tuple[int, ...] = ()) -> Tensor:
        """Draw vectors of shape ``(*sample_shape, d)`` from torch's global random state."""
        return self.target.space.vector(self.base.prior.sample(torch.Size(sample_shape)))
