"""Approximate posteriors: amortised families, the prior, and mixtures of any proposals."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vaerdict import core
from vaerdict.core import (
    Draws,
    Latent,
    Proposal,
    SettingError,
    ShapeError,
    check_count,
    concat_latents,
    floating,
    restricted,
)
from vaerdict.distributions import Diagonal, Elliptical, Noise, StandardNormal, Triangular
from vaerdict.networks import MLP, LogNormalised, stackable
from vaerdict.noise import Iid, Randomness, Source, as_source, global_state_from

_SCALE_FLOOR = 1e-6
_UNIT = math.log(math.e - 1)  # softplus(_UNIT) == 1


@runtime_checkable
class Conditional(Protocol):
    """A distribution made for given observations: what an amortised proposal returns for x."""

    def noise(self, k: int, source: Source, /) -> Noise:
        """Base noise for k particles of each observation."""
        ...

    def transform(self, noise: Noise, /) -> Tensor:
        """Particles from base noise. Shapes: ``-> (K, *batch, d)``."""
        ...

    def log_prob(self, z: Tensor, /) -> Tensor:
        """Log-density at z. Shapes: ``(K, *batch, d) -> (K, *batch)``."""
        ...

    def detach(self) -> Conditional:
        """The same distribution with no gradient in its parameters."""
        ...


@runtime_checkable
class Family(Protocol):
    """A kind of approximate posterior: knows its name and how to make a fresh, trainable proposal of the kind."""

    @property
    def suffix(self) -> str:
        """What follows the objective's name in tables."""
        ...

    def make(self, x: Tensor, d: int, *, hidden: Sequence[int], generator: torch.Generator) -> Trainable:
        """A fresh proposal for observations like x with d latents."""
        ...


class Trainable(nn.Module):
    """Base of proposals that are networks: `forward` returns the distribution for x, the rest follows."""

    def forward(self, x: Tensor) -> Conditional:
        """The distribution of latents given x. Shapes: ``(*batch, p) -> distribution over (*batch, d)``."""
        raise SettingError(f"{type(self).__name__} must say which distribution it returns for x.")

    def noise(self, x: Tensor, k: int, source: Source) -> Noise:
        """Base noise for k particles of each observation."""
        return self(x).noise(k, source)

    def draw(self, x: Tensor, k: int, *, generator: Randomness) -> Draws:
        """Draw k particles for each observation. Shapes: ``(*batch, p) -> (K, *batch, d), (K, *batch)``."""
        check_count(k)
        q = self(x)
        z = q.transform(q.noise(k, as_source(generator)))
        return Draws(z, q.log_prob(z))

    def log_prob(self, z: Tensor, x: Tensor) -> Tensor:
        """Log q(z | x). Shapes: ``(K, *batch, d), (*batch, p) -> (K, *batch)``."""
        return self(x).log_prob(z)


class Amortised(Trainable):
    """A network that gives, for each x, an elliptical distribution: normal or Student-t, diagonal or full rank."""

    def __init__(
        self, encoder: nn.Module, d: int, *, full: bool, df: float | None = None, learn_df: bool = False
    ) -> None:
        super().__init__()
        self.encoder, self.d, self.full = encoder, d, full
        self.stackable = stackable(encoder)
        log_df = None if df is None else torch.tensor(math.log(df))
        if learn_df and log_df is not None:
            self.log_df = nn.Parameter(log_df)
        else:
            self.register_buffer("log_df", log_df)

    def forward(self, x: Tensor) -> Elliptical:
        """The distribution of latents given x."""
        loc, raw = self.encoder(x).tensor_split([self.d], -1)
        return Elliptical(loc, _triangular(raw, self.d) if self.full else Diagonal(_positive(raw)), self._df(loc))

    def noise(self, x: Tensor, k: int, source: Source) -> Noise:
        """Base noise for k particles of each observation; needs no pass through the network."""
        blank = floating(x.new_zeros(())).expand(*x.shape[:-1], self.d)
        return Elliptical(blank, Diagonal(blank), self._df(blank)).noise(k, source)

    def _df(self, like: Tensor) -> Tensor | None:
        return None if self.log_df is None else self.log_df.exp().to(like.dtype)


def _positive(raw: Tensor) -> Tensor:
    return F.softplus(raw + _UNIT) + _SCALE_FLOOR


def _triangular(raw: Tensor, d: int) -> Triangular:
    diagonal, below = raw.tensor_split([d], -1)
    row, column = torch.tril_indices(d, d, -1, device=raw.device)
    tril = torch.diag_embed(_positive(diagonal))
    tril[..., row, column] = below / math.sqrt(d)
    return Triangular(tril)


@dataclass(frozen=True)
class Normal:
    """Gaussian proposals with a diagonal or a full-rank covariance."""

    full: bool = False

    @property
    def suffix(self) -> str:
        """What follows the objective's name in tables: ``IWAE-full``."""
        return "-full" if self.full else ""

    def make(self, x: Tensor, d: int, *, hidden: Sequence[int], generator: torch.Generator) -> Amortised:
        """A fresh proposal for observations like x with d latents."""
        return Amortised(_encoder(x, d, self.full, hidden, generator), d, full=self.full)


@dataclass(frozen=True)
class Student:
    """Multivariate Student-t proposals: heavier tails, so that the chi-square divergence is finite."""

    df: float = 5.0
    full: bool = False
    learn_df: bool = False

    def __post_init__(self) -> None:
        if not self.df > 0:
            raise SettingError(f"df={self.df} must be positive; 5 is a good start.")

    @property
    def suffix(self) -> str:
        """What follows the objective's name in tables: ``CHI-t``."""
        return "-full-t" if self.full else "-t"

    def make(self, x: Tensor, d: int, *, hidden: Sequence[int], generator: torch.Generator) -> Amortised:
        """A fresh proposal for observations like x with d latents."""
        encoder = _encoder(x, d, self.full, hidden, generator)
        return Amortised(encoder, d, full=self.full, df=self.df, learn_df=self.learn_df).to(floating(x[:1]))


def _encoder(x: Tensor, d: int, full: bool, hidden: Sequence[int], generator: torch.Generator) -> MLP:
    n_out = d + d * (d + 1) // 2 if full else 2 * d
    center, spread = center_and_spread(x)
    return MLP(x.shape[-1], n_out, hidden, generator=generator, center=center, spread=spread).to(center)


def center_and_spread(x: Tensor) -> tuple[Tensor, Tensor]:
    """What standardises the columns of x, leaving constant ones as they are. Shapes: ``(n, p) -> (p,), (p,)``."""
    flat = floating(x.reshape(-1, x.shape[-1]))
    spread = flat.std(0) if flat.shape[0] > 1 else torch.ones_like(flat[0])
    # a column that is constant here may vary elsewhere: dividing by its spread, which rounding keeps off zero, would
    # blow it up
    low, high = flat.aminmax(dim=0)
    return flat.mean(0), torch.where((spread > 1e-6) & (high > low), spread, 1)


@dataclass(frozen=True)
class OfCounts:
    """Proposals of another family that look at counts as `LogNormalised`; `n_batches` columns behind them pass as they
    are."""

    family: Family = Normal()
    n_batches: int = 0

    @property
    def suffix(self) -> str:
        """What follows the objective's name in tables: the family's."""
        return self.family.suffix

    def make(self, x: Tensor, d: int, *, hidden: Sequence[int], generator: torch.Generator) -> Viewed:
        """A fresh proposal for counts like x with d latents."""
        n_genes = x.shape[-1] - self.n_batches
        x = floating(x)
        view = LogNormalised(n_genes, x[..., :n_genes].sum(-1).double().median().to(x))
        return Viewed(view, self.family.make(view(x), d, hidden=hidden, generator=generator))


class Viewed(Trainable):
    """A proposal that sees x through a fixed view of it."""

    def __init__(self, view: nn.Module, proposal: Trainable) -> None:
        super().__init__()
        self.view, self.proposal = view, proposal
        self.stackable = stackable(view) and stackable(proposal)

    def forward(self, x: Tensor) -> Conditional:
        """The distribution of latents given the view of x."""
        return self.proposal(self.view(x))

    def noise(self, x: Tensor, k: int, source: Source) -> Noise:
        """Base noise for k particles of each observation."""
        return self.proposal.noise(x, k, source)


class Prior:
    """The model's prior as proposal: poor, but it covers everything; the defensive component of a mixture."""

    def __init__(self, prior: core.Prior) -> None:
        if tuple(prior.event_shape) == () == tuple(getattr(prior, "batch_shape", (None,))):
            raise ShapeError(
                f"the prior {prior} is of a single number, without an axis for the latent; make it one of a vector: "
                "Independent(Normal(torch.zeros(1), torch.ones(1)), 1)."
            )
        self.prior = prior

    def draw(self, x: Tensor, k: int, *, generator: Randomness) -> Draws:
        """Draw k latents for each observation of x, without looking at it."""
        check_count(k)
        if isinstance(self.prior, StandardNormal):
            return self.prior.draw(x, k, generator=generator)
        z = core.map_latent(lambda t: t.to(x.device), _sample(self.prior, (k, *x.shape[:-1]), generator))
        return Draws(z, self.log_prob(z, x))

    def log_prob(self, z: Latent, x: Tensor) -> Tensor:
        """Log p(z). Shapes: ``(K, *batch, d) -> (K, *batch)``."""
        log_p = self.prior.log_prob(z)
        event_dims = len(self.prior.event_shape)
        # Normal(zeros(d), ones(d)) gives one number a coordinate: a prior written that way means their product
        return log_p.sum(-1) if event_dims == 0 and isinstance(z, Tensor) and log_p.dim() == z.dim() else log_p


def _sample(prior: core.Prior, shape: tuple[int, ...], generator: Randomness) -> Latent:
    """Sample a torch distribution, which only knows the global state, from a generator."""
    source = as_source(generator)
    with global_state_from(source.generators[0] if isinstance(source, Iid) else source.generator):
        return prior.sample(torch.Size(shape))


class Mixture:
    r"""A mixture of proposals drawn in strata and weighted by the balance heuristic (Veach & Guibas, 1995).

    Of k particles component j gives :math:`k_j \approx k\,\alpha_j`, and every particle is weighted by
    :math:`q(z \mid x) = \sum_j \tfrac{k_j}{k} q_j(z \mid x)`, whichever component it came from.
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
        """How many of k particles each component gives: largest remainders, and none of a positive share left out."""
        check_count(k)
        exact = {name: k * share for name, share in self.shares.items()}
        counts = {name: math.floor(value) for name, value in exact.items()}
        by_remainder = sorted(exact, key=lambda name: counts[name] - exact[name])
        for name in by_remainder[: k - sum(counts.values())]:
            counts[name] += 1
        left_out = [name for name, count in counts.items() if count == 0 and self.shares[name] > 0]
        if left_out:
            need = math.ceil(1 / min(self.shares[name] for name in left_out))
            raise SettingError(f"k={k} particles leave {', '.join(left_out)} without a draw; use k={need} or more.")
        return counts

    def source(self, k: int) -> Tensor:
        """The index of the component each of k particles comes from. Shapes: ``-> (K,)``."""
        return torch.repeat_interleave(torch.tensor(list(self.allocation(k).values())))

    def draw(self, x: Tensor, k: int, *, generator: Randomness) -> Draws:
        """Draw k particles for each observation, component after component."""
        counts = {name: count for name, count in self.allocation(k).items() if count}
        parts = {name: self.components[name].draw(x, count, generator=generator).z for name, count in counts.items()}
        _check_one_size(parts)
        z = concat_latents(list(parts.values()))
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


def _check_one_size(parts: Mapping[str, Latent]) -> None:
    sizes = {name: z.shape[-1] for name, z in parts.items() if isinstance(z, Tensor)}
    if len(set(sizes.values())) > 1:
        shown = ", ".join(f"{name} {size}" for name, size in sizes.items())
        raise ShapeError(f"components draw latents of different sizes ({shown}); make all with one latent dimension.")


def defensive(components: Mapping[str, Proposal], prior: core.Prior, share: float = 0.05) -> Mixture:
    """The components in equal shares with a defensive share of the prior."""
    if not 0 < share < 1:
        raise SettingError(f"share={share} of the prior must lie strictly between 0 and 1.")
    if not components or "PRIOR" in components:
        raise SettingError(
            f"components {sorted(components)} must be at least one, and leave the name PRIOR to the prior."
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
    r"""Shares of a mixture that minimise the second moment of its weights in a pilot, pooled over observations.

    The pilot's particles have joint density :math:`p` and were drawn from density :math:`q_0`. The objective

    .. math:: \sum_x \sum_k \frac{\tilde w_k^2}{\sum_j \alpha_j r_{jk}}, \quad r_{jk} = q_j(z_k) / q_0(z_k),

    is convex in the shares, and each step minimises a majorant of it: :math:`\alpha_j \propto \alpha_j \sqrt{g_j}`,
    with :math:`g` its negative gradient, no share going under its `floor`. Shares that end under `least` become zero:
    with `least` at 1/k or more, every share left can give one of k particles.

    Shapes: ``(K, *batch), (components, K, *batch), (K, *batch), (components,) -> (components,)``.
    """
    n = component_log_q.shape[0]
    lowest = _checked_floor(torch.zeros(n) if floor is None else torch.as_tensor(floor), n).to(log_q.device)
    if log_p.shape != log_q.shape or component_log_q.shape[1:] != log_q.shape:
        raise ShapeError(
            "log_p, component_log_q and log_q must be (K, *batch), (components, K, *batch) and (K, *batch); "
            f"got {tuple(log_p.shape)}, {tuple(component_log_q.shape)} and {tuple(log_q.shape)}."
        )
    weight = core.log_normalise(core.check_log_weights((log_p - log_q).detach().double())).exp().square().flatten()
    ratio = (component_log_q - log_q).detach().double().exp().flatten(1)
    shares = _fill(torch.ones_like(lowest), lowest)
    for _ in range(1000):
        gradient = ratio @ (weight / (shares @ ratio).square())
        last, shares = shares, _fill(shares * gradient.sqrt(), lowest)
        if (shares - last).abs().max() < 1e-6:
            break
    return _fill(torch.where(shares < min(least, shares.max().item()), 0, shares), lowest)


def _checked_floor(floor: Tensor, n: int) -> Tensor:
    if floor.shape != (n,) or not (floor >= 0).all() or not floor.sum() < 1:
        raise SettingError(
            f"floor={floor.tolist()} must hold {n} non-negative shares, one a component, of sum below 1."
        )
    return floor.double()


def _fill(size: Tensor, floor: Tensor) -> Tensor:
    """Shares proportional to `size` that sum to one, none under its floor."""
    held = torch.zeros_like(size, dtype=torch.bool)
    while True:
        free = size * (1 - floor[held].sum()) / size[~held].sum()
        below = held | (free < floor)
        if torch.equal(below, held):
            return torch.where(held, floor, free)
        held = below


def check_latent(draws: Draws, prior: core.Prior) -> Draws:
    """Return `draws` if they live in the space of `prior`, else raise naming both sizes."""
    event = tuple(prior.event_shape)
    if isinstance(draws.z, Tensor) and event and tuple(draws.z.shape[-len(event) :]) != event:
        raise ShapeError(
            f"the proposal draws latents of size {tuple(draws.z.shape[-len(event) :])}, "
            f"the model's prior lives in {event}; make both with the same latent dimension."
        )
    return draws
