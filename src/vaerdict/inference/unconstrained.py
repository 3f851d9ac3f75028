r"""A model whose latent has a bounded support, as a model on all of :math:`R^d`.

Refinement and samplers move latents freely. With a prior of bounded support (a box, positive numbers) they move u, with
:math:`z = T(u)` and T the bijection of ``torch.distributions.biject_to``. Densities of u have the additional term
:math:`\log|\det \partial T / \partial u|`, which cancels in log-weights:

.. math:: \log p(x, z) - \log q(z \mid x) = \log p(x, u) - \log q(u \mid x).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributions as td
from torch import Tensor
from torch.distributions.constraints import Constraint

from vaerdict.core import Draws, Model, Proposal, SettingError, check_log_joint, prepared, restricted
from vaerdict.distributions import constrained_support, in_support
from vaerdict.noise import Randomness
from vaerdict.proposals import Prior


def unconstrained(model: Model) -> Unconstrained | None:
    """The model on R^d; None where that is the model itself.

    None is returned for a prior that is not a torch distribution, has all of R^d as its support, or is discrete.

    Raises
    ------
    SettingError
        If the support has no bijection with R^d of the same dimension, such as the simplex of a Dirichlet.
    """
    support = constrained_support(model.prior)
    if support is None:
        return None
    assert isinstance(model.prior, td.Distribution)
    shape = model.prior.batch_shape + model.prior.event_shape
    try:
        transform = td.biject_to(support)
    except NotImplementedError:
        transform = None
    if transform is None or len(shape) != 1 or transform.inverse_shape(shape) != shape:
        raise SettingError(
            f"the prior {model.prior} has the support {support} and the shape {tuple(shape)}, for which no bijection "
            "with vectors of the same size is known; use a prior of unbounded vectors and map them in log_joint."
        )
    return Unconstrained(model, support, transform)


class _Point(NamedTuple):
    """T(u), log|det dT/du|, and whether u is in the range of T that floating-point numbers can represent."""

    z: Tensor
    log_det: Tensor
    representable: Tensor


@dataclass(frozen=True, eq=False)
class Unconstrained:
    """A model with latents u on R^d, and the maps between u and the latents z of the original. See `unconstrained`.

    Shapes: ``u, z (K, *batch, d)``.
    """

    model: Model
    support: Constraint
    transform: Any

    @property
    def prior(self) -> UnconstrainedPrior:
        """The prior of u."""
        return UnconstrainedPrior(self, Prior(self.model.prior))

    def prepare(self, x: Tensor) -> Any:
        """What the original model prepares."""
        return prepared(self.model, x)

    def log_joint(self, x: Any, u: Tensor) -> Tensor:
        """Log p(x, u). Shapes: ``-> (K, *batch)``."""
        z, log_det, representable = self._at(u)
        log_p = check_log_joint(self.model.log_joint(x, z), log_det, z)
        return torch.where(representable, log_p + log_det, -torch.inf)

    def constrain(self, u: Tensor) -> Tensor:
        """The latents z = T(u), strictly inside their support; the centre T(0) where T(u) would overflow."""
        z = self.transform(torch.where(u.abs() > _largest(u), 0.0, u))
        # rounding can reach a bound, where densities are zero or infinite: move by one unit in the last place
        rounded, centre = z.detach(), self.transform(u.new_zeros(u.shape[-1:]))
        return z + (rounded.nextafter(centre.detach()) - rounded)

    def unconstrain(self, z: Tensor) -> Tensor:
        """The latents u with T(u) = z; where z is outside the support, numbers at which the density is zero."""
        largest = _largest(z)
        u = self.transform.inv(z).clamp(-largest, largest)
        return torch.where(in_support(self.support, z).unsqueeze(-1), u, 2 * largest)

    def proposal(self, q: Proposal) -> UnconstrainedProposal:
        """A proposal for z as a proposal for u."""
        return UnconstrainedProposal(self, q)

    def query(self, f: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        """A function of z as a function of u."""
        return lambda u: f(self.constrain(u))

    def _at(self, u: Tensor) -> _Point:
        representable = (u.abs() <= _largest(u)).all(-1)
        u = torch.where(representable.unsqueeze(-1), u, 0.0)
        z = self.constrain(u)
        log_det = self.transform.log_abs_det_jacobian(u, z)
        # transforms of single coordinates give one number for each
        return _Point(z, log_det.sum(-1) if log_det.dim() == u.dim() else log_det, representable)


def _largest(u: Tensor) -> float:
    """The largest u for which exp(u) and exp(-u) are normal floating-point numbers."""
    return -math.log(torch.finfo(u.dtype).tiny)


@dataclass(frozen=True, eq=False)
class UnconstrainedProposal:
    """A proposal for z as a proposal for u. A draw outside the support of z has the weight zero."""

    space: Unconstrained
    base: Proposal

    def draw(self, x: Tensor, k: int, *, generator: Randomness) -> Draws:
        """Draw k particles for each observation."""
        z, log_q = self.base.draw(x, k, generator=generator)
        u = self.space.unconstrain(z)
        return Draws(u, log_q + self.space._at(u).log_det)

    def log_prob(self, u: Tensor, x: Tensor) -> Tensor:
        """Log q(u | x), arbitrary where the joint density is zero. Shapes: ``(K, *batch, d) -> (K, *batch)``."""
        z, log_det, _ = self.space._at(u)
        return self.base.log_prob(z, x) + log_det

    def select(self, index: Tensor) -> UnconstrainedProposal:
        """The proposal for the observations at `index` of the last batch axis."""
        return type(self)(self.space, restricted(self.base, index))


@dataclass(frozen=True, eq=False)
class UnconstrainedPrior(UnconstrainedProposal):
    """The prior of u, which is a proposal too."""

    @property
    def event_shape(self) -> torch.Size:
        """``(d,)``."""
        prior = self.space.model.prior
        assert isinstance(prior, td.Distribution)
        return prior.batch_shape + prior.event_shape

    def log_prob(self, u: Tensor, x: Tensor | None = None) -> Tensor:
        """Log p(u). Shapes: ``(K, *batch, d) -> (K, *batch)``."""
        return torch.where((u.abs() <= _largest(u)).all(-1), super().log_prob(u, u if x is None else x), -torch.inf)

    def sample(self, sample_shape: torch.Size | tuple[int, ...] = ()) -> Tensor:
        """Draw latents of shape ``(*sample_shape, d)`` from torch's global random state."""
        return self.space.unconstrain(self.space.model.prior.sample(torch.Size(sample_shape)))
