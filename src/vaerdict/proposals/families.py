"""Families of amortised approximate posteriors: networks that return a distribution for each observation."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vaerdict.core import Draws, SettingError, check_count, floating
from vaerdict.distributions import Diagonal, Elliptical, Noise, Triangular
from vaerdict.networks import MLP, LogNormalised, stackable
from vaerdict.noise import Randomness, Source, as_source

_SCALE_FLOOR = 1e-6
_UNIT_SCALE = math.log(math.e - 1)  # softplus(_UNIT_SCALE) == 1


@runtime_checkable
class Conditional(Protocol):
    """A distribution of latents for fixed observations: what an amortised proposal returns for x."""

    def noise(self, k: int, source: Source, /) -> Any:
        """Base noise for k particles of each observation: `Noise`, or whatever `transform` takes."""
        ...

    def transform(self, noise: Any, /) -> Tensor:
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
    """A kind of approximate posterior, which creates untrained proposals."""

    @property
    def suffix(self) -> str:
        """What follows the name of the objective in tables."""
        ...

    def make(self, x: Tensor, d: int, *, hidden: Sequence[int], generator: torch.Generator) -> Trainable:
        """Create an untrained proposal.

        Parameters
        ----------
        x
            Observations, from which the inputs are standardised. Shapes: ``(n, p)``.
        d
            Number of latents.
        hidden
            Sizes of the hidden layers.
        generator
            Source of the initial weights.
        """
        ...


class Trainable(nn.Module):
    """Base class of proposals that are networks; a subclass implements `forward`."""

    def forward(self, x: Tensor) -> Conditional:
        """The distribution of latents given x. Shapes: ``(*batch, p) -> distribution over (*batch, d)``."""
        raise SettingError(f"{type(self).__name__} must implement forward(x), which returns a distribution.")

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
    """A network that returns an elliptical distribution for x: normal or Student-t, diagonal or full rank."""

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
        """Base noise for k particles of each observation; the network is not evaluated."""
        zeros = floating(x.new_zeros(())).expand(*x.shape[:-1], self.d)
        return Elliptical(zeros, Diagonal(zeros), self._df(zeros)).noise(k, source)

    def _df(self, like: Tensor) -> Tensor | None:
        return None if self.log_df is None else self.log_df.exp().to(like.dtype)


def _positive(raw: Tensor) -> Tensor:
    return F.softplus(raw + _UNIT_SCALE) + _SCALE_FLOOR


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
        """What follows the name of the objective in tables, as in ``IWAE-full``."""
        return "-full" if self.full else ""

    def make(self, x: Tensor, d: int, *, hidden: Sequence[int], generator: torch.Generator) -> Amortised:
        """Create an untrained proposal; see `Family.make`."""
        return Amortised(_encoder(x, d, self.full, hidden, generator), d, full=self.full)


@dataclass(frozen=True)
class Student:
    """Multivariate Student-t proposals, whose tails are heavy enough for a finite chi-square divergence."""

    df: float = 5.0
    full: bool = False
    learn_df: bool = False

    def __post_init__(self) -> None:
        if not self.df > 0:
            raise SettingError(f"df={self.df} must be positive; 5 is a good start.")

    @property
    def suffix(self) -> str:
        """What follows the name of the objective in tables, as in ``CHI-t``."""
        return "-full-t" if self.full else "-t"

    def make(self, x: Tensor, d: int, *, hidden: Sequence[int], generator: torch.Generator) -> Amortised:
        """Create an untrained proposal; see `Family.make`."""
        encoder = _encoder(x, d, self.full, hidden, generator)
        return Amortised(encoder, d, full=self.full, df=self.df, learn_df=self.learn_df).to(floating(x[:1]))


def _encoder(x: Tensor, d: int, full: bool, hidden: Sequence[int], generator: torch.Generator) -> MLP:
    n_out = d + d * (d + 1) // 2 if full else 2 * d
    center, spread = center_and_spread(x)
    return MLP(x.shape[-1], n_out, hidden, generator=generator, center=center, spread=spread).to(center)


def center_and_spread(x: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation of the columns of x, with 1 for constant ones. Shapes: ``(n, p) -> (p,), (p,)``."""
    flat = floating(x.reshape(-1, x.shape[-1]))
    spread = flat.std(0) if flat.shape[0] > 1 else torch.ones_like(flat[0])
    # a column that is constant here may vary elsewhere, and rounding makes its standard deviation tiny but not zero
    low, high = flat.aminmax(dim=0)
    return flat.mean(0), torch.where((spread > 1e-6) & (high > low), spread, 1)


@dataclass(frozen=True)
class OfCounts:
    """Proposals of another family for counts, which are first transformed by `LogNormalised`.

    The last `n_batches` columns of x are not counts and are passed on unchanged.
    """

    family: Family = Normal()
    n_batches: int = 0

    @property
    def suffix(self) -> str:
        """The suffix of the family."""
        return self.family.suffix

    def make(self, x: Tensor, d: int, *, hidden: Sequence[int], generator: torch.Generator) -> Preprocessed:
        """Create an untrained proposal; see `Family.make`."""
        n_genes = x.shape[-1] - self.n_batches
        x = floating(x)
        view = LogNormalised(n_genes, x[..., :n_genes].sum(-1).double().median().to(x))
        return Preprocessed(view, self.family.make(view(x), d, hidden=hidden, generator=generator))


class Preprocessed(Trainable):
    """A proposal for x after a fixed transform `view`."""

    def __init__(self, view: nn.Module, proposal: Trainable) -> None:
        super().__init__()
        self.view, self.proposal = view, proposal
        self.stackable = stackable(view) and stackable(proposal)

    def forward(self, x: Tensor) -> Conditional:
        """The distribution of latents given ``view(x)``."""
        return self.proposal(self.view(x))

    def noise(self, x: Tensor, k: int, source: Source) -> Noise:
        """Base noise for k particles of each observation."""
        return self.proposal.noise(x, k, source)
