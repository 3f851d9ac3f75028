"""Mixtures of proposals, and their optimal shares."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from vaerdict import core
from vaerdict.core import Draws, Latent, Proposal, SettingError, ShapeError, check_count, concat_latents, restricted
from vaerdict.noise import Randomness, draws_of
from vaerdict.priors import Prior, PriorLike


class Mixture:
    r"""A mixture of proposals with stratified draws, weighted by the balance heuristic (Veach & Guibas, 1995).

    Component j draws :math:`k_j \approx k\,\alpha_j` of k particles, with :math:`\alpha_j` its share. The density of
    every particle is :math:`q(z \mid x) = \sum_j \tfrac{k_j}{k} q_j(z \mid x)`, whichever component drew it.
    """

    def __init__(self, components: Mapping[str, Proposal], shares: Mapping[str, float] | None = None) -> None:
        if not components:
            raise SettingError("a mixture needs at least one component.")
        self.components = dict(components)
        shares = dict.fromkeys(components, 1.0) if shares is None else shares
        if set(shares) != set(components):
            raise SettingError(f"shares name {sorted(shares)}, components are {sorted(components)}; they must match.")
        if any(not s >= 0 for s in shares.values()) or not sum(shares.values()) > 0:
            raise SettingError(f"shares {dict(shares)} must be non-negative with a positive sum.")
        total = sum(shares.values())
        self.shares = {name: shares[name] / total for name in components}

    def allocation(self, k: int) -> dict[str, int]:
        """Particles per component, by largest remainders; an error if a positive share would draw none."""
        check_count(k)
        exact = {name: k * share for name, share in self.shares.items()}
        counts = {name: math.floor(value) for name, value in exact.items()}
        by_remainder = sorted(exact, key=lambda name: counts[name] - exact[name])
        for name in by_remainder[: k - sum(counts.values())]:
            counts[name] += 1
        missing = [name for name, count in counts.items() if count == 0 and self.shares[name] > 0]
        if missing:
            k_min = math.ceil(1 / min(self.shares[name] for name in missing))
            raise SettingError(f"k={k} particles leave {', '.join(missing)} without a draw; use k={k_min} or more.")
        return counts

    def source(self, k: int) -> Tensor:
        """The index of the component that draws each of k particles. Shapes: ``-> (K,)``."""
        return torch.repeat_interleave(torch.tensor(list(self.allocation(k).values())))

    def draw(self, x: Tensor, k: int, *, generator: Randomness) -> Draws:
        """Draw k particles for each observation, sorted by component."""
        counts = {name: count for name, count in self.allocation(k).items() if count}
        latents = {name: draws_of(self.components[name], x, count, generator).z for name, count in counts.items()}
        _check_sizes(latents)
        z = concat_latents(list(latents.values()))
        return Draws(z, self._log_density(z, x, {name: count / k for name, count in counts.items()}))

    def log_prob(self, z: Latent, x: Tensor) -> Tensor:
        """Log-density of the mixture with its nominal shares. Shapes: ``(K, *batch, d) -> (K, *batch)``."""
        return self._log_density(z, x, {name: share for name, share in self.shares.items() if share > 0})

    def select(self, index: Tensor) -> Mixture:
        """The mixture for the observations at `index` of the last batch axis."""
        return Mixture({name: restricted(q, index) for name, q in self.components.items()}, self.shares)

    def component_log_prob(self, z: Latent, x: Tensor) -> Tensor:
        """Log-density under each component. Shapes: ``(K, *batch, d) -> (components, K, *batch)``."""
        return torch.stack([q.log_prob(z, x) for q in self.components.values()])

    def _log_density(self, z: Latent, x: Tensor, shares: Mapping[str, float]) -> Tensor:
        total: Tensor | None = None
        for name, share in shares.items():
            term = math.log(share) + self.components[name].log_prob(z, x)
            total = term if total is None else torch.logaddexp(total, term)
        assert total is not None
        return total


def by_rows(q: Proposal) -> Proposal:
    """A proposal for observations ``(n, ...)`` of any number of axes: only priors need to know."""
    if isinstance(q, Prior):
        return Prior(q.prior, rows=True)
    if isinstance(q, Mixture):
        return Mixture({name: by_rows(component) for name, component in q.components.items()}, q.shares)
    return q


def _check_sizes(latents: Mapping[str, Latent]) -> None:
    sizes = {name: z.shape[-1] for name, z in latents.items() if isinstance(z, Tensor)}
    if len(set(sizes.values())) > 1:
        shown = ", ".join(f"{name} {size}" for name, size in sizes.items())
        raise ShapeError(f"components draw latents of different sizes ({shown}); give all the same latent dimension.")


def defensive(components: Mapping[str, Proposal], prior: PriorLike, share: float = 0.05) -> Mixture:
    """A mixture of the components in equal shares and the prior, named PRIOR, with the given share."""
    if not 0 < share < 1:
        raise SettingError(f"share={share} of the prior must lie strictly between 0 and 1.")
    if not components or "PRIOR" in components:
        raise SettingError(
            f"components {sorted(components)} must have at least one entry and none called PRIOR, which is the prior."
        )
    each = (1 - share) / len(components)
    return Mixture({**components, "PRIOR": Prior(prior)}, {**dict.fromkeys(components, each), "PRIOR": share})


def optimal_shares(
    log_p: Tensor,
    component_log_q: Tensor,
    log_q: Tensor,
    floor: Sequence[float] | Tensor | None = None,
    *,
    least: float = 0.01,
) -> Tensor:
    r"""Shares of a mixture that minimise the second moment of its weights in a pilot run, summed over observations.

    The objective

    .. math:: \sum_x \sum_k \frac{\tilde w_k^2}{\sum_j \alpha_j r_{jk}}, \quad r_{jk} = q_j(z_k) / q_0(z_k),

    with :math:`q_0` the density that the pilot drew from, is convex in the shares. Each step minimises a majorant:
    :math:`\alpha_j \propto \alpha_j \sqrt{g_j}` with :math:`g` the negative gradient.

    Parameters
    ----------
    log_p
        Log p(x, z) of the particles of the pilot. Shapes: ``(K, *batch)``.
    component_log_q
        Their log-density under each component. Shapes: ``(components, K, *batch)``.
    log_q
        Their log-density under the pilot. Shapes: ``(K, *batch)``.
    floor
        Smallest share of each component, by default zero. Shapes: ``(components,)``.
    least
        Shares that end below this value become zero. With ``least >= 1 / k``, every remaining share draws at least
        one of k particles.

    Returns
    -------
    Tensor
        Shares that sum to one. Shapes: ``(components,)``.

    Examples
    --------
    >>> log_q = torch.zeros(2, 4, 1)  # two equal components
    >>> optimal_shares(log_q[0], log_q, log_q[0])
    tensor([0.5000, 0.5000], dtype=torch.float64)
    """
    n = component_log_q.shape[0]
    minimum = _checked_floor(torch.zeros(n) if floor is None else torch.as_tensor(floor), n).to(log_q.device)
    if log_p.shape != log_q.shape or component_log_q.shape[1:] != log_q.shape:
        raise ShapeError(
            "log_p, component_log_q and log_q must be (K, *batch), (components, K, *batch) and (K, *batch); "
            f"got {tuple(log_p.shape)}, {tuple(component_log_q.shape)} and {tuple(log_q.shape)}."
        )
    weight = core.log_normalise(core.check_log_weights((log_p - log_q).detach().double())).exp().square().flatten()
    ratio = (component_log_q - log_q).detach().double().exp().flatten(1)
    shares = _normalised(torch.ones_like(minimum), minimum)
    for _ in range(1000):
        gradient = ratio @ (weight / (shares @ ratio).square())
        last, shares = shares, _normalised(shares * gradient.sqrt(), minimum)
        if (shares - last).abs().max() < 1e-6:
            break
    return _normalised(torch.where(shares < min(least, shares.max().item()), 0, shares), minimum)


def _checked_floor(floor: Tensor, n: int) -> Tensor:
    if floor.shape != (n,) or not (floor >= 0).all() or not floor.sum() < 1:
        raise SettingError(
            f"floor={floor.tolist()} must hold {n} non-negative shares, one per component, with a sum below 1."
        )
    return floor.double()


def _normalised(size: Tensor, floor: Tensor) -> Tensor:
    """Shares proportional to `size` that sum to one, none below its floor."""
    at_floor = torch.zeros_like(size, dtype=torch.bool)
    while True:
        free = size * (1 - floor[at_floor].sum()) / size[~at_floor].sum()
        below = at_floor | (free < floor)
        if torch.equal(below, at_floor):
            return torch.where(at_floor, floor, free)
        at_floor = below


def check_latent(draws: Draws, prior: PriorLike) -> Draws:
    """Return `draws` if their latents have the shape of the prior, else raise; a conditional prior is not checked."""
    event = tuple(getattr(prior, "event_shape", ()))
    if isinstance(draws.z, Tensor) and event and tuple(draws.z.shape[-len(event) :]) != event:
        raise ShapeError(
            f"the proposal draws latents of size {tuple(draws.z.shape[-len(event) :])}, "
            f"the model's prior has size {event}; give both the same latent dimension."
        )
    return draws
