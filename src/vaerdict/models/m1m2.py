r"""The semi-supervised M1+M2 model (Kingma et al., 2014) and its recognition model.

.. math:: p(x, z, c, u) = p(x \mid z)\,p(z \mid c, u)\,p(c)\,p(u), \qquad
          q(z, c, u \mid x) = q(z \mid x)\,q(c \mid z)\,q(u \mid z, c).

The features x are images, tables or counts of genes (`BernoulliLikelihood`, `GaussianLikelihood`,
`NegativeBinomialLikelihood`). The class c is observed for labelled data and a latent otherwise. There may be more
classes than labels: the additional classes are learned from unlabelled data alone.

`M1M2` is an ordinary model with a discrete latent c, which `vaerdict.expect` sums over. `PerClass` is the model given
each class, for proposals of their own (`vaerdict.inference.class_posterior`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.distributions import OneHotCategorical
from torch.nn import functional as F

from vaerdict.core import Draws, Latent, SettingError, ShapeError, check_count, per_member
from vaerdict.distributions import Diagonal, Elliptical, StandardNormal
from vaerdict.models.counts import CountModel, moments
from vaerdict.models.pixels import UNIT_SCALE, BernoulliLikelihood, PixelLikelihood
from vaerdict.networks import CNN, MLP, Activation, Joint, no_dropout, stackable
from vaerdict.noise import Randomness, as_source
from vaerdict.priors import JointPrior

_SCALE_FLOOR = 1e-4


def _elliptical(out: Tensor, df: Tensor | None = None) -> Elliptical:
    """The diagonal normal, or Student-t, of a network's locations and raw scales. Shapes: ``(..., 2 d)``."""
    loc, raw = out.chunk(2, -1)
    return Elliptical(loc, Diagonal(F.softplus(raw + UNIT_SCALE) + _SCALE_FLOOR), df)


@dataclass(frozen=True)
class Architecture:
    """Sizes of the networks of an `M1M2` model and of its recognition model.

    Parameters
    ----------
    decoder, conditional
        Hidden layers of p(x | z) and of p(z | c, u).
    channels, padded
        The encoder's 3 x 3 convolutions of images, each followed by pooling, and whether they are padded.
    encoder
        Hidden layers of q(z | x), for images behind the convolutions. A perceptron repeats the last.
    classifier, auxiliary
        Hidden layers of q(c | z) and of q(u | z, c).

    Examples
    --------
    >>> large = Architecture(decoder=(784,), channels=(32, 64, 128))
    >>> large.encoder, Architecture.of((8,)).decoder
    ((128,), (8,))
    """

    decoder: tuple[int, ...] = (128,)
    conditional: tuple[int, ...] = (128,)
    channels: tuple[int, ...] = (16, 32, 32)
    padded: bool = True
    encoder: tuple[int, ...] = (128,)
    classifier: tuple[int, ...] = (128,)
    auxiliary: tuple[int, ...] = (128,)

    def __post_init__(self) -> None:
        for name in ("decoder", "conditional", "channels", "encoder", "classifier", "auxiliary"):
            for size in getattr(self, name):
                check_count(size, name=name)
        for name in ("conditional", "auxiliary"):
            if not getattr(self, name):
                raise SettingError(f"{name}=() has no layer; give the width of at least one.")

    @classmethod
    def of(cls, hidden: Sequence[int] | Architecture) -> Architecture:
        """The architecture itself, or one whose networks all have the same hidden layers."""
        if isinstance(hidden, Architecture):
            return hidden
        same = tuple(hidden)
        return cls(decoder=same, conditional=same, encoder=same, classifier=same, auxiliary=same)


class M1M2(nn.Module):
    """The generative model, with equal prior probabilities of all classes; can be stacked.

    A class is a row over all classes, one-hot or relaxed.

    Parameters
    ----------
    n_pixels
        The number of features of x.
    n_classes
        The number of classes.
    d_z, d_u
        The number of latents z and u.
    hidden
        Widths of the hidden layers of every network, or an `Architecture` that gives those of each.
    likelihood
        The distribution of pixels, by default `BernoulliLikelihood`.
    n_batches
        The number of batches that observations come from, 0 if there is one. They are one-hot columns of x behind the
        pixels, and inputs of decoder and encoder.
    generator
        Draws the initial weights.

    Examples
    --------
    >>> import torch, vaerdict as vd
    >>> model = M1M2(16, 3, d_z=2, d_u=2, hidden=(8,), generator=vd.seeded(0))
    >>> model.log_likelihood(torch.zeros(5, 16), torch.zeros(4, 5, 2)).shape
    torch.Size([4, 5])
    >>> answer = vd.expect(model, torch.zeros(2, 16), lambda latent: latent.c, tolerance=0.05, seed=0)
    >>> answer.value.shape
    torch.Size([2, 3])
    """

    stackable = True
    broadcasts_states = True
    rates: ClassVar[Mapping[str, float]] = {"log_dispersion": CountModel.rates["log_dispersion"]}
    """Learning rates relative to that of the networks."""

    def __init__(
        self,
        n_pixels: int,
        n_classes: int,
        *,
        d_z: int = 10,
        d_u: int = 10,
        hidden: Sequence[int] | Architecture = (128,),
        likelihood: PixelLikelihood | None = None,
        n_batches: int = 0,
        generator: torch.Generator,
    ) -> None:
        super().__init__()
        self.n_pixels, self.n_classes = check_count(n_pixels, name="n_pixels"), check_count(n_classes, name="n_classes")
        self.d_z, self.d_u = check_count(d_z, name="d_z"), check_count(d_u, name="d_u")
        self.likelihood: PixelLikelihood = likelihood or BernoulliLikelihood()
        self.n_batches, n_out = n_batches, self.likelihood.n_outputs(n_pixels)
        self.architecture = sizes = Architecture.of(hidden)
        self.decoder = MLP(d_z + n_batches, n_out, sizes.decoder, generator=generator, activation=F.selu)
        self.between = Joint(n_classes, d_u, 2 * d_z, sizes.conditional, generator=generator)
        self.log_dispersion = nn.Parameter(torch.zeros(n_pixels)) if self.likelihood.counts else None

    @torch.no_grad()
    def start(self, x: Tensor) -> M1M2:
        """Set proportions and dispersions of counts to moment estimates, if the model has them; returns the model.

        Shapes: ``x (n, p + n_batches)``.
        """
        if self.log_dispersion is not None:
            estimates = moments(x[..., : self.n_pixels], inflated=False)
            self.decoder.layers[-1].get_parameter("bias").copy_(estimates.log_proportion)
            self.log_dispersion.copy_(estimates.log_dispersion)
        return self

    def log_likelihood(self, x: Tensor, z: Tensor) -> Tensor:
        """Log p(x | z). Shapes: ``(*batch, p + n_batches), (K, *batch, d_z) -> (K, *batch)``."""
        if x.shape[-1] != self.n_pixels + self.n_batches:
            raise ShapeError(
                f"x has {x.shape[-1]} columns, the model {self.n_pixels} pixels, {self.n_batches} batches."
            )
        pixels, batch = x.tensor_split([self.n_pixels], -1)
        inputs = torch.cat([z, batch.expand(*z.shape[:-1], -1)], -1) if self.n_batches else z
        dispersion = None if self.log_dispersion is None else per_member(self.log_dispersion, 1)
        return self.likelihood.log_prob(pixels, self.decoder(inputs), dispersion)

    def conditional(self, c: Tensor, u: Tensor) -> Elliptical:
        """P(z | c, u). Shapes: ``(..., classes), (..., d_u) -> distribution over (..., d_z)``."""
        return _elliptical(self.between(c, u))

    def log_prior(self, z: Tensor, c: Tensor, u: Tensor) -> Tensor:
        """Log p(z | c, u) p(u) p(c). Shapes: that of the latents broadcast together, without the last axis."""
        log_p_z = self.conditional(c, u).log_prob(z)
        return log_p_z + StandardNormal(self.d_u).log_prob(u) - math.log(self.n_classes)

    @property
    def prior(self) -> JointPrior:
        """The prior of a one-hot class c, of u, and of z given both."""
        share = next(self.parameters()).new_ones(self.n_classes)
        return JointPrior(c=OneHotCategorical(share), u=StandardNormal(self.d_u), z=self.conditional)

    def log_joint(self, x: Tensor, latent: Latent) -> Tensor:
        """Log p(x, z, u, c). Shapes: ``(*batch, p)``, a named tuple of ``(K, *batch, size) -> (K, *batch)``.

        A class ``(S, K, *batch, classes)`` gives ``(S, K, *batch)``.
        """
        return self.log_likelihood(x, latent.z) + self.log_prior(latent.z, latent.c, latent.u)


class Recognition(nn.Module):
    """The recognition model; `recognition` makes one for a generative model.

    Parameters
    ----------
    encoder
        ``encoder(x, dropout)`` gives locations and raw scales of z. Shapes: ``(*batch, p) -> (*batch, 2 d_z)``.
    n_classes
        The number of classes.
    d_z, d_u
        The number of latents z and u.
    architecture
        The hidden layers of q(c | z) and q(u | z, c).
    df
        Degrees of freedom of q(z | x), a Student-t; None for a normal.
    generator
        Draws the initial weights.
    """

    df: Tensor | None

    def __init__(
        self,
        encoder: nn.Module,
        n_classes: int,
        *,
        d_z: int = 10,
        d_u: int = 10,
        architecture: Architecture | None = None,
        df: float | None = None,
        generator: torch.Generator,
    ) -> None:
        super().__init__()
        sizes = architecture or Architecture()
        self.stackable = stackable(encoder)
        self.n_classes, self.d_z, self.d_u = n_classes, d_z, d_u
        self.encoder = encoder
        self.classifier = MLP(d_z, n_classes, sizes.classifier, generator=generator, activation=F.selu)
        self.auxiliary = Joint(n_classes, d_z, 2 * d_u, sizes.auxiliary, generator=generator)
        self.register_buffer("df", None if df is None else torch.tensor(float(df)))

    def z_given(self, x: Tensor, dropout: Activation = no_dropout) -> Elliptical:
        """Q(z | x), with dropout in training. Shapes: ``(*batch, p) -> distribution over (*batch, d_z)``."""
        return _elliptical(self.encoder(x, dropout), self.df)

    def log_class(self, z: Tensor) -> Tensor:
        """Log q(c | z). Shapes: ``(..., d_z) -> (..., classes)``."""
        return torch.log_softmax(self.classifier(z), -1)

    def u_given(self, z: Tensor, c: Tensor) -> Elliptical:
        """Q(u | z, c). Shapes: ``(..., d_z), (..., classes) -> distribution over (..., d_u)``."""
        return _elliptical(self.auxiliary(c, z))


class CountEncoder(nn.Module):
    """A network of log(1 + counts), and of the batches behind them as they are; can be stacked."""

    stackable = True

    def __init__(self, network: nn.Module, n_genes: int) -> None:
        super().__init__()
        self.network, self.n_genes = network, n_genes

    def forward(self, x: Tensor, drop: Activation = no_dropout) -> Tensor:
        """Shapes: ``(..., n, genes + n_batches) -> (..., n, out)``."""
        counts, batch = x.tensor_split([self.n_genes], -1)
        return self.network(torch.cat([counts.log1p(), batch], -1), drop)


def recognition(
    model: M1M2,
    *,
    image_shape: tuple[int, int] | None = None,
    hidden: Sequence[int] | Architecture | None = None,
    df: float | None = None,
    generator: torch.Generator,
) -> Recognition:
    """A recognition model for `model` with fresh weights.

    Parameters
    ----------
    model
        The generative model.
    image_shape
        Height and width of the images for a convolutional encoder; None for a perceptron with two hidden layers.
    hidden
        Widths of the hidden layers of every network, or an `Architecture`; by default that of the model.
    df
        Degrees of freedom of q(z | x), a Student-t; None for a normal.
    generator
        Draws the initial weights.

    Examples
    --------
    >>> import torch, vaerdict as vd
    >>> model = M1M2(16, 3, d_z=2, d_u=2, hidden=(8,), generator=vd.seeded(0))
    >>> q = recognition(model, image_shape=(4, 4), generator=vd.seeded(1))
    >>> q.log_class(q.z_given(torch.zeros(5, 16)).loc).shape
    torch.Size([5, 3])
    """
    n_in, n_out = model.n_pixels + model.n_batches, 2 * model.d_z
    sizes = model.architecture if hidden is None else Architecture.of(hidden)
    if image_shape is None:
        layers = (*sizes.encoder, *sizes.encoder[-1:])
        encoder: nn.Module = MLP(n_in, n_out, layers, generator=generator, activation=F.selu)
        encoder = CountEncoder(encoder, model.n_pixels) if model.likelihood.counts else encoder
    elif math.prod(image_shape) != n_in:
        raise SettingError(f"image_shape={image_shape} does not hold the model's {n_in} pixels.")
    else:
        encoder = CNN(image_shape, n_out, sizes.channels, sizes.encoder, padded=sizes.padded, generator=generator)
    return Recognition(
        encoder, model.n_classes, d_z=model.d_z, d_u=model.d_u, architecture=sizes, df=df, generator=generator
    )


# -------------------------------------------------------------------------------------------------- for each class
class PerClass:
    """The model conditioned on each class: observations ``(classes, n, p)``, latents (z, u) concatenated.

    The class is the position along the first batch axis, as members are in a stack; `per_class` makes such
    observations without copying pixels. The joint density includes p(c), so that its integral over the latents is
    p(x, c).
    """

    def __init__(self, model: M1M2) -> None:
        self.model = model

    @property
    def prior(self) -> ClassPrior:
        """The prior of (z, u) given each class."""
        return ClassPrior(self.model)

    def log_joint(self, x: Tensor, latent: Tensor) -> Tensor:
        """Log p(x, z, u, c). Shapes: ``(classes, n, p), (K, classes, n, d) -> (K, classes, n)``."""
        log_prior = self.prior.log_prob(latent) - math.log(self.model.n_classes)
        return log_prior + self._log_likelihood(x, latent)

    def _log_likelihood(self, x: Tensor, latent: Tensor) -> Tensor:
        """Log p(x | z), computed once for particles whose z is the same for all classes, as a `ClassProposal` draws.

        Where latents carry gradient, that of each class is its own.
        """
        z = latent[..., : self.model.d_z]
        if z.requires_grad:
            return self.model.log_likelihood(x, z)
        common = (z == z[:, :1]).flatten(1).all(1)
        if not bool(common.any()):
            return self.model.log_likelihood(x, z)
        shared = self.model.log_likelihood(x[0], z[common, 0]).unsqueeze(1)
        if bool(common.all()):
            return shared.expand(z.shape[:-1])
        out = shared.new_empty(z.shape[:-1])
        out[common] = shared.expand(-1, z.shape[1], -1)
        out[~common] = self.model.log_likelihood(x, z[~common])
        return out


def per_class(x: Tensor, n_classes: int) -> Tensor:
    """Every observation once per class. Shapes: ``(n, p) -> (classes, n, p)``, a view."""
    return x.expand(n_classes, *x.shape)


@dataclass(frozen=True)
class ClassPrior:
    """P(z | c, u) p(u) for the class at each position of the first batch axis; a prior and a proposal in one."""

    model: M1M2

    @property
    def event_shape(self) -> torch.Size:
        """``(d_z + d_u,)``."""
        return torch.Size((self.model.d_z + self.model.d_u,))

    def log_prob(self, latent: Tensor, x: Tensor | None = None) -> Tensor:
        """Log p(z, u | c). Shapes: ``(K, classes, n, d) -> (K, classes, n)``."""
        z, u = latent.tensor_split([self.model.d_z], -1)
        return self.model.log_prior(z, _each_class(self.model, latent), u) + math.log(self.model.n_classes)

    def draw(self, x: Tensor, k: int, *, generator: Randomness) -> Draws:
        """Draw k latents per class and observation. Shapes: ``x (classes, n, p)``."""
        source = as_source(generator)
        u = source.normal(check_count(k), x.shape[:-1], self.model.d_u, like=x)
        q = self.model.conditional(_each_class(self.model, u), u)
        z = q.loc + q.root.apply(source.normal(k, x.shape[:-1], self.model.d_z, like=x))
        latent = torch.cat([z, u], -1)
        return Draws(latent, self.log_prob(latent))


class ClassProposal:
    """Q(z | x) q(u | z, c) for every class: a recognition model as a proposal of `PerClass`."""

    def __init__(self, q: Recognition) -> None:
        self.q = q

    def draw(self, x: Tensor, k: int, *, generator: Randomness) -> Draws:
        """Draw k latents per class and observation, with one z for all classes.

        The effect of z on the weights then cancels in the ratios of classes. Shapes: ``x (classes, n, p)``.
        """
        source, q_z = as_source(generator), self.q.z_given(x[0])
        z = q_z.transform(q_z.noise(check_count(k), source)).unsqueeze(1).expand(k, *x.shape[:-1], self.q.d_z)
        q_u = self.q.u_given(z, _each_class(self.q, z))
        u = q_u.loc + q_u.root.apply(source.normal(k, x.shape[:-1], self.q.d_u, like=x))
        return Draws(torch.cat([z, u], -1), q_z.log_prob(z[:, 0]).unsqueeze(1) + q_u.log_prob(u))

    def log_prob(self, latent: Tensor, x: Tensor) -> Tensor:
        """Log q(z, u | x, c). Shapes: ``(K, classes, n, d), (classes, n, p) -> (K, classes, n)``."""
        z, u = latent.tensor_split([self.q.d_z], -1)
        log_q_u = self.q.u_given(z, _each_class(self.q, z)).log_prob(u)
        return self.q.z_given(x[0]).log_prob(z) + log_q_u

    def locate(self, x: Tensor) -> Tensor:
        """The location of z, and of u given that. Shapes: ``(classes, n, p) -> (classes, n, d)``."""
        z = self.q.z_given(x[0]).loc.expand(*x.shape[:-1], self.q.d_z)
        return torch.cat([z, self.q.u_given(z, _each_class(self.q, z)).loc], -1)


def _each_class(module: M1M2 | Recognition, latent: Tensor) -> Tensor:
    """The one-hot class at each position of the first batch axis. Shapes: ``-> (classes, 1, classes)``."""
    n = module.n_classes
    if latent.dim() < 3 or latent.shape[-3] != n:
        raise ShapeError(f"latents {tuple(latent.shape)} have no batch axis of {n} classes; use `per_class`.")
    return torch.eye(n, dtype=latent.dtype, device=latent.device).unsqueeze(1)
