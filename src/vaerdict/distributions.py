"""Distributions as a deterministic transform of base noise.

A distribution has ``draw`` and ``log_prob`` like any proposal but ignores x. An amortised proposal is a network that
returns a distribution.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
import torch.distributions as td
from torch import Tensor
from torch.distributions import constraints

from vaerdict.core import Draws, SettingError, ShapeError, check_count, floating, per_member
from vaerdict.noise import Randomness, Source, as_source

_LOG_2PI = math.log(2 * math.pi)


class Noise(NamedTuple):
    """Base noise: standard normals ``(K, *batch, d)`` and, for a Student-t, standard gammas ``(K, *batch, 1)``."""

    normal: Tensor
    gamma: Tensor | None = None


class Diagonal(NamedTuple):
    """A diagonal square root of a covariance. Shapes: ``scale (*batch, d)``."""

    scale: Tensor

    def apply(self, eps: Tensor) -> Tensor:
        """The root times eps."""
        return self.scale * eps

    def transpose_apply(self, vector: Tensor) -> Tensor:
        """The transposed root times a vector ``(*batch, d)``."""
        return self.scale * vector

    def square_norm(self, delta: Tensor) -> Tensor:
        """Squared Mahalanobis length of delta. Shapes: ``(K, *batch, d) -> (K, *batch)``."""
        return (delta / self.scale).square().sum(-1)

    def log_det(self) -> Tensor:
        """Log of the root's determinant. Shapes: ``-> (*batch)``."""
        return self.scale.log().sum(-1)

    def covariance(self) -> Tensor:
        """The covariance; for a Student-t the scale matrix. Shapes: ``-> (*batch, d, d)``."""
        return torch.diag_embed(self.scale.square())


class Triangular(NamedTuple):
    """A lower-triangular square root of a covariance. Shapes: ``tril (*batch, d, d)``."""

    tril: Tensor

    def apply(self, eps: Tensor) -> Tensor:
        """The root times eps."""
        return (self.tril @ eps.unsqueeze(-1)).squeeze(-1)

    def transpose_apply(self, vector: Tensor) -> Tensor:
        """The transposed root times a vector ``(*batch, d)``."""
        return (self.tril.mT @ vector.unsqueeze(-1)).squeeze(-1)

    def square_norm(self, delta: Tensor) -> Tensor:
        """Squared Mahalanobis length of delta. Shapes: ``(K, *batch, d) -> (K, *batch)``."""
        # particles are the right-hand sides of one solve per observation: (*batch, d, K)
        whitened = torch.linalg.solve_triangular(self.tril, delta.movedim(0, -1), upper=False)
        return whitened.square().sum(-2).movedim(-1, 0)

    def log_det(self) -> Tensor:
        """Log of the root's determinant. Shapes: ``-> (*batch)``."""
        return self.tril.diagonal(dim1=-2, dim2=-1).log().sum(-1)

    def covariance(self) -> Tensor:
        """The covariance; for a Student-t the scale matrix. Shapes: ``-> (*batch, d, d)``."""
        return self.tril @ self.tril.mT


Root = Diagonal | Triangular


def _map_root(fn: Callable[[Tensor], Tensor], root: Root) -> Root:
    return type(root)(fn(root[0]))


@dataclass(frozen=True, eq=False)
class Elliptical:
    r"""A multivariate normal, or with `df` a multivariate Student-t, with a location and a root of its scale matrix.

    :math:`z = \mu + R\,\epsilon` with :math:`\epsilon` standard normal, times :math:`\sqrt{\nu/\chi^2_\nu}` for a
    Student-t. With `heading` the base noise is first reflected so that its first coordinate moves z along that
    direction. The distribution of z is unchanged, but the first coordinate of a Sobol net, its most uniform one, then
    varies along the direction of interest.

    Shapes: ``loc (*batch, d)``, ``df ()`` or one value per stacked member, ``heading (*batch, d)``.
    """

    loc: Tensor
    root: Root
    df: Tensor | None = None
    heading: Tensor | None = None

    @property
    def batch_shape(self) -> torch.Size:
        """The shape of the observations this distribution was made for."""
        return self.loc.shape[:-1]

    @property
    def event_shape(self) -> torch.Size:
        """``(d,)``."""
        return self.loc.shape[-1:]

    def noise(self, k: int, source: Source) -> Noise:
        """Base noise for k particles of each observation."""
        if self.df is None:
            return Noise(source.normal(k, self.batch_shape, self.loc.shape[-1], like=self.loc))
        concentration = 0.5 * self.df.detach().to(self.loc)
        return Noise(*source.normal_gamma(k, self.batch_shape, self.loc.shape[-1], concentration))

    def transform(self, noise: Noise) -> Tensor:
        """Particles from base noise, differentiable in every parameter. Shapes: ``-> (K, *batch, d)``."""
        eps = noise.normal if self.heading is None else self._reflected(noise.normal)
        if self.df is not None and noise.gamma is not None:
            concentration = 0.5 * per_member(self.df, 0).unsqueeze(-1).expand_as(noise.gamma)
            gamma = _ImplicitGamma.apply(concentration, noise.gamma)
            eps = eps * (concentration / gamma).sqrt()
        return self.loc + self.root.apply(eps)

    def log_prob(self, z: Tensor, x: Tensor | None = None) -> Tensor:
        """Log-density at z. The argument x is ignored; it makes a distribution a proposal."""
        d = self.loc.shape[-1]
        square = self.root.square_norm(z - self.loc)
        if self.df is None:
            return -0.5 * (square + d * _LOG_2PI) - self.root.log_det()
        df = per_member(self.df, 0)
        nu = df.double()  # large gamma functions cancel
        constant = torch.lgamma(0.5 * (nu + d)) - torch.lgamma(0.5 * nu) - 0.5 * d * (nu * math.pi).log()
        return constant.to(square.dtype) - self.root.log_det() - 0.5 * (df + d) * torch.log1p(square / df)

    def draw(self, x: Tensor | None, k: int, *, generator: Randomness) -> Draws:
        """Draw k particles for each observation that the distribution was made for."""
        check_count(k)
        if x is not None and x.shape[: len(self.batch_shape)] != self.batch_shape:
            raise ShapeError(
                f"this distribution was made for observations of shape {tuple(self.batch_shape)}, "
                f"not {tuple(x.shape[:-1])}; make a new one for these observations."
            )
        z = self.transform(self.noise(k, as_source(generator)))
        return Draws(z, self.log_prob(z))

    def detach(self) -> Elliptical:
        """The same distribution with no gradient in its parameters."""
        df = None if self.df is None else self.df.detach()
        return replace(self, loc=self.loc.detach(), root=_map_root(Tensor.detach, self.root), df=df)

    def towards(self, direction: Tensor) -> Elliptical:
        """The same distribution with its first noise coordinate along `direction` ``(d,)`` or ``(*batch, d)``."""
        return replace(self, heading=direction.to(self.loc).expand_as(self.loc))

    def at(self, index: Tensor | slice | int) -> Elliptical:
        """The distributions of the observations at `index` of the first batch axis."""
        return self._map(lambda t: t[index])

    def select(self, index: Tensor) -> Elliptical:
        """The distributions of the observations at `index` of the last batch axis."""
        return self._map(lambda t: t.index_select(self.loc.dim() - 2, index))

    def _map(self, fn: Callable[[Tensor], Tensor]) -> Elliptical:
        heading = None if self.heading is None else fn(self.heading)
        return replace(self, loc=fn(self.loc), root=_map_root(fn, self.root), heading=heading)

    def scaled(self, factor: float) -> Elliptical:
        """The same location with the root multiplied by `factor`."""
        return replace(self, root=_map_root(lambda t: factor * t, self.root))

    def covariance(self) -> Tensor:
        """Covariance matrix; a Student-t needs df > 2. Shapes: ``-> (*batch, d, d)``."""
        if self.df is None:
            return self.root.covariance()
        if bool((self.df <= 2).any()):
            raise SettingError(f"a Student-t with df={self.df.min().item():g} has no covariance; it needs df > 2.")
        df = per_member(self.df, 0)[..., None, None]
        return df / (df - 2) * self.root.covariance()

    def _reflected(self, eps: Tensor) -> Tensor:
        """Apply the Householder reflection that maps the first axis onto the transposed root times the heading."""
        assert self.heading is not None
        along = self.root.transpose_apply(self.heading)
        unit = along / along.norm(dim=-1, keepdim=True).clamp_min(torch.finfo(along.dtype).tiny)
        first = torch.zeros_like(unit)
        first[..., 0] = 1
        # reflect onto the nearer of +unit and -unit, because subtracting nearly equal vectors loses digits
        mirror = first + torch.where(unit[..., :1] >= 0, unit, -unit)
        factor = 2 * (eps * mirror).sum(-1, keepdim=True) / mirror.square().sum(-1, keepdim=True)
        return eps - factor * mirror


class _ImplicitGamma(torch.autograd.Function):
    """Identity on standard gammas with their implicit derivative in the concentration (Figurnov et al., 2018)."""

    @staticmethod
    def forward(ctx, concentration: Tensor, gamma: Tensor) -> Tensor:  # type: ignore[override]
        ctx.save_for_backward(concentration, gamma)
        return gamma.clone()

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        concentration, gamma = ctx.saved_tensors
        return grad * torch._standard_gamma_grad(concentration.contiguous(), gamma.contiguous()), None


@dataclass(frozen=True)
class StandardNormal:
    """N(0, I) in d dimensions, both a prior and a proposal. Shapes: latents ``(K, *batch, d)``."""

    d: int

    @property
    def event_shape(self) -> torch.Size:
        """``(d,)``."""
        return torch.Size((self.d,))

    def log_prob(self, z: Tensor, x: Tensor | None = None) -> Tensor:
        """Log-density at z. Shapes: ``(K, *batch, d) -> (K, *batch)``."""
        return -0.5 * (z.square().sum(-1) + self.d * _LOG_2PI)

    def draw(self, x: Tensor, k: int, *, generator: Randomness) -> Draws:
        """Draw k particles for each observation of x ``(*batch, p)``."""
        z = as_source(generator).normal(check_count(k), x.shape[:-1], self.d, like=floating(x.new_empty(0)))
        return Draws(z, self.log_prob(z))

    def sample(
        self, sample_shape: torch.Size | tuple[int, ...] = (), *, generator: torch.Generator | None = None
    ) -> Tensor:
        """Draw latents of shape ``(*sample_shape, d)``."""
        return torch.randn(*sample_shape, self.d, generator=generator)


# -------------------------------------------------------------------------------------------------------- supports
def constrained_support(prior: object) -> constraints.Constraint | None:
    """The support of a torch distribution that is continuous and smaller than R^d; None for every other prior."""
    try:
        support = prior.support if isinstance(prior, td.Distribution) else None
    except NotImplementedError:
        return None
    return None if support is None or support.is_discrete or _is_real(support) else support


def _is_real(support: constraints.Constraint) -> bool:
    base = getattr(support, "base_constraint", None)  # of independent coordinates, or of the components of a mixture
    if base is not None:
        return _is_real(base)
    if isinstance(support, (constraints.cat, constraints.stack)):
        return all(_is_real(part) for part in support.cseq)
    return isinstance(support, type(constraints.real))


def in_support(support: constraints.Constraint, z: Tensor) -> Tensor:
    """Whether all coordinates of a latent satisfy a constraint. Shapes: ``(K, *batch, d) -> (K, *batch)``."""
    inside = support.check(z)
    return inside.all(-1) if inside.dim() == z.dim() else inside
