r"""M1+M2 in training: its losses, settings and data, and a stack of members that takes steps together.

Unlabelled images raise a bound on log p(x), labelled ones the same bound on log p(x, c). The particles of a bound have
log-masses :math:`\log m_i`, of sum one, beside their log-weights. With c drawn from q(c | z) every mass is 1/K; with c
summed exactly the masses are q(c | z_k)/K. Then

.. math:: \mathrm{ELBO} = \sum_i m_i \log w_i,\quad \mathrm{IWELBO} = \log\sum_i m_i w_i,\quad
          \mathrm{CUBO} = \tfrac12\log\sum_i m_i w_i^2,

and the loss of q in wake-wake is :math:`-\sum_i v_i \log q(z_i, c_i, u_i \mid x)` with v proportional to
:math:`m_i w_i`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from vaerdict.core import SettingError, check_count
from vaerdict.models.m1m2 import M1M2, Recognition
from vaerdict.networks import Dropout, stack, unstack
from vaerdict.noise import Iid, seeded
from vaerdict.objectives import cubo_score_loss, forward_kl_score_loss
from vaerdict.training.optimiser import Adam, FlatParameters
from vaerdict.training.parallel import current_group
from vaerdict.training.stacks import LossGroups, derived_seed


# -------------------------------------------------------------------------------------------------------- losses
class SemiParticles(NamedTuple):
    """Particles of M1+M2 with their log-masses. Shapes: all ``(P, *batch)``."""

    log_w: Tensor
    log_q: Tensor
    log_mass: Tensor


def semi_elbo_loss(p: SemiParticles) -> Tensor:
    """Minus the ELBO, pathwise in model and q."""
    return -(p.log_mass.exp() * p.log_w).sum(0)


def semi_iwelbo_loss(p: SemiParticles) -> Tensor:
    """Minus the IWELBO, pathwise in model and q."""
    return -torch.logsumexp(p.log_w + p.log_mass, 0)


def semi_wake_loss(p: SemiParticles) -> Tensor:
    """Minus the IWELBO for the model, the wake-phase loss for q; needs particles that carry no gradient."""
    return semi_iwelbo_loss(_of_model(p)) + forward_kl_score_loss(p.log_w + p.log_mass, p.log_q)


def semi_cubo_loss(p: SemiParticles) -> Tensor:
    """Minus the IWELBO for the model, the CUBO's score loss for q; needs particles that carry no gradient."""
    return semi_iwelbo_loss(_of_model(p)) + cubo_score_loss(p.log_w + 0.5 * p.log_mass, p.log_q)


def _of_model(p: SemiParticles) -> SemiParticles:
    """The particles with gradient in the model alone: adding log_q to log_w removes the gradient of q from it."""
    return p._replace(log_w=p.log_w + p.log_q - p.log_q.detach(), log_mass=p.log_mass.detach())


@dataclass(frozen=True)
class SemiRecipe:
    """How an M1+M2 member is trained; `pathwise` says whether particles carry gradient."""

    name: str
    loss: Callable[[SemiParticles], Tensor]
    pathwise: bool


SEMI_RECIPES = {
    recipe.name: recipe
    for recipe in (
        SemiRecipe("VAE", semi_elbo_loss, True),
        SemiRecipe("IWAE", semi_iwelbo_loss, True),
        SemiRecipe("WW", semi_wake_loss, False),
        SemiRecipe("CHI", semi_cubo_loss, False),
    )
}
"""The paper's four objectives. Gradients in q are pathwise for the first two and of score form for the others, because
the doubly reparameterised forms leave out q(c | z), and the pathwise CUBO diverges."""


def semi_recipe(name: str) -> SemiRecipe:
    """The recipe of that name; raises a `SettingError` that lists the names if there is none."""
    if name not in SEMI_RECIPES:
        raise SettingError(f"no objective {name!r} for M1+M2; choose one of {', '.join(SEMI_RECIPES)}.")
    return SEMI_RECIPES[name]


# --------------------------------------------------------------------------------------------- members and settings
@dataclass(frozen=True, eq=False)
class SemiMember:
    """A generative model and a recognition model that are trained together, with the seed of their randomness."""

    model: M1M2
    recognition: Recognition
    recipe: SemiRecipe
    seed: int

    @property
    def name(self) -> str:
        """The name in messages: ``IWAE, seed 3``."""
        return f"{self.recipe.name}, seed {self.seed}"


@dataclass(frozen=True)
class SemiSettings:
    """How M1+M2 models are trained. The defaults are the paper's where it gives them.

    Parameters
    ----------
    n_particles
        Particles per image.
    epochs
        Number of epochs.
    batch_size, labelled_batch
        Images per step, and labelled images per step in addition.
    lr
        The learning rate.
    cooling
        The last fraction of the epochs, over which the learning rate falls to zero along a half cosine.
    labelled_bound
        The weight of the mean bound of labelled images, given their labels, beside that of all images without labels.
        With 1 a few labelled images count as much as all images. None is the share of labelled images: every image
        counts once without its label, and a labelled one once more with its label. (In the sum of Kingma et al. (2014)
        a labelled image counts only with its label.)
    classification
        The weight of the cross-entropy of labelled images.
    dropout
        Dropout of the encoder. The paper has it "between all hidden layers"; the other networks have only one.
    relaxed
        Draw the class of an unlabelled image by straight-through Gumbel-softmax, as the paper does, instead of summing
        over classes exactly.
    temperature
        The temperature of the Gumbel-softmax.
    shifts
        Move every image at random by up to this many pixels along each axis; needs `image_shape`.
    image_shape
        Height and width of the images.
    """

    n_particles: int = 30
    epochs: int = 100
    batch_size: int = 512
    labelled_batch: int = 128
    lr: float = 1e-3
    cooling: float = 0.0
    labelled_bound: float | None = 1.0
    classification: float = 50.0
    dropout: float = 0.1
    relaxed: bool = True
    temperature: float = 0.5
    shifts: int = 0
    image_shape: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        for name in ("n_particles", "epochs", "batch_size", "labelled_batch"):
            check_count(getattr(self, name), name=name)
        if not (self.lr > 0 and self.temperature > 0 and self.classification >= 0 and (self.labelled_bound or 0) >= 0):
            raise SettingError(
                f"lr={self.lr} and temperature={self.temperature} must be positive, classification="
                f"{self.classification} and labelled_bound={self.labelled_bound} not negative."
            )
        if not (0 <= self.dropout < 1 and 0 <= self.cooling <= 1):
            raise SettingError(f"dropout={self.dropout} must lie in [0, 1), cooling={self.cooling} in [0, 1].")
        if self.shifts and self.image_shape is None:
            raise SettingError(f"shifts={self.shifts} moves images; give their image_shape too.")

    def rate(self, epoch: int) -> float:
        """The learning rate of an epoch, counted from zero."""
        done = (epoch - self.epochs * (1 - self.cooling)) / max(1.0, self.epochs * self.cooling)
        return self.lr * (0.5 + 0.5 * math.cos(math.pi * min(1.0, done)) if done > 0 else 1.0)


# ---------------------------------------------------------------------------------------------------------- data
class SemiData(NamedTuple):
    """Images, the positions of the labelled ones among them, and their labels.

    Shapes: ``x (n, p)``, ``labelled (n_labelled,)``, ``labels (n_labelled,)``.
    """

    x: Tensor
    labelled: Tensor
    labels: Tensor


class StackedData(NamedTuple):
    """The data of a stack: all images once, and the positions of each member's.

    Shapes: ``x (n_all, p)``, ``rows (members, n)``, ``labelled, labels (members, n_labelled)``.
    """

    x: Tensor
    rows: Tensor
    labelled: Tensor
    labels: Tensor


def stack_data(data: Sequence[SemiData], device: torch.device) -> StackedData:
    """The data of several members on one device; images that members share are stored once."""
    sizes = {(len(one.x), len(one.labels)) for one in data}
    if len(sizes) > 1:
        raise SettingError(f"members of a stack need data of one size, not (images, labels) of {sorted(sizes)}.")
    unique = list({id(one.x): one.x for one in data}.values())
    positions = [next(i for i, x in enumerate(unique) if x is one.x) for one in data]
    starts = torch.tensor(positions, device=device)[:, None] * len(unique[0])
    labelled, labels = (torch.stack([one[i] for one in data]).to(device) for i in (1, 2))
    rows = starts + torch.arange(len(unique[0]), device=device)
    return StackedData(torch.cat([x.to(device) for x in unique]), rows, starts + labelled, labels)


# --------------------------------------------------------------------------------------------------------- stack
class SemiStack:
    """M1+M2 members trained side by side, each with its own generators: no result depends on the other members.

    A batch is ``(members, n, p)``: first the unlabelled images of a step, then the labelled ones.
    """

    def __init__(
        self, members: Sequence[SemiMember], data: StackedData, settings: SemiSettings, *, learn_model: bool
    ) -> None:
        device = data.x.device
        self.members, self.data, self.settings, self.group = list(members), data, settings, current_group()
        self.model = stack([m.model for m in members]).to(device).requires_grad_(learn_model)
        self.recognition = stack([m.recognition for m in members]).to(device)
        both = nn.ModuleList([self.model, self.recognition])
        self.adam = Adam(FlatParameters(both, len(members)), settings.lr, group=self.group)
        self.pathwise = members[0].recipe.pathwise
        self.generators = [seeded(derived_seed(m.seed, self.group.purpose(m.recipe.name)), device) for m in members]
        self.orders = [seeded(derived_seed(m.seed, f"{m.recipe.name} order"), device) for m in members]
        self.source = Iid(tuple(self.generators))
        self.dropout = Dropout(settings.dropout, tuple(self.generators))
        self._groups = LossGroups.of([m.recipe for m in members], device)
        share = data.labels.shape[1] / data.rows.shape[1]
        self.labelled_bound = share if settings.labelled_bound is None else settings.labelled_bound
        self.n_labelled = -(-min(settings.labelled_batch, data.labels.shape[1]) // self.group.size)

    def shuffled(self) -> Tensor:
        """The batches of one epoch, each member's in its own order; with several ranks each gets its part.

        Shapes: ``-> (batches, members, size)``.
        """
        n = self.data.rows.shape[1]
        size = min(self.settings.batch_size, n)
        n_batches = n // size
        orders = [torch.randperm(n, generator=g, device=g.device)[: n_batches * size] for g in self.orders]
        rows = self.data.rows.gather(1, torch.stack(orders))
        return self.group.shard(rows.reshape(len(orders), n_batches, size).transpose(0, 1))

    def step(self, index: Tensor) -> Tensor:
        """One step of all members on the images at `index`; returns each member's loss before it.

        Shapes: ``(members, size) -> (members,)``.
        """
        pick = self._integers(self.data.labels.shape[1], (self.n_labelled,))
        x = self.data.x[torch.cat([index, self.data.labelled.gather(1, pick)], 1)]
        losses = self.losses(self._shifted(x), self.data.labels.gather(1, pick))
        self.adam.step(self.adam.flat.gradient(losses))
        return losses.detach()

    def losses(self, x: Tensor, y: Tensor) -> Tensor:
        """Each member's loss on unlabelled images followed by images with labels y.

        Shapes: ``x (members, n + n_labelled, p), y (members, n_labelled) -> (members,)``.
        """
        n, k = x.shape[1] - y.shape[1], self.settings.n_particles
        q_z = self.recognition.z_given(x, self.dropout)
        path = q_z.transform(q_z.noise(k, self.source))
        z = path if self.pathwise else path.detach()
        # terms that do not depend on the class
        log_p, log_q = self.model.log_likelihood(x, z), q_z.log_prob(z)
        log_class = self.recognition.log_class(z)
        one_hot = torch.eye(self.model.n_classes, dtype=x.dtype, device=x.device)[y].expand(k, -1, -1, -1)
        if self.settings.relaxed:
            c = torch.cat([self._drawn(log_class[:, :, :n]), one_hot], 2)
            of_class = (c[:, :, :n] * log_class[:, :, :n]).sum(-1)
            every = self._particles(z, c, log_p, log_q + nn.functional.pad(of_class, (0, y.shape[1])))
            unlabelled, labelled = (
                every._replace(log_w=every.log_w[:, :, part], log_q=every.log_q[:, :, part])
                for part in (slice(n), slice(n, None))
            )
        else:
            unlabelled = self._summed(z[:, :, :n], log_p[:, :, :n], log_q[:, :, :n], log_class[:, :, :n])
            labelled = self._particles(z[:, :, n:], one_hot, log_p[:, :, n:], log_q[:, :, n:])
        predicted = log_class[:, :, n:] if self.pathwise else self.recognition.log_class(path[:, :, n:])
        cross_entropy = -(predicted * one_hot).sum(-1).mean((0, 2))
        bound = self._bound(unlabelled) + self.labelled_bound * self._bound(labelled)
        return bound + self.settings.classification * cross_entropy

    def _particles(self, z: Tensor, c: Tensor, log_p: Tensor, log_q: Tensor) -> SemiParticles:
        """Particles with a u drawn for their z and c, each of mass 1/K. Shapes: ``z (..., K, members, n, d_z)``."""
        q_u = self.recognition.u_given(z, c)
        lead = q_u.loc.shape[:-3]
        eps = self.source.normal(math.prod(lead), q_u.loc.shape[-3:-1], self.model.d_u, like=z)
        u = q_u.loc + q_u.root.apply(eps.reshape(q_u.loc.shape))
        u = u if self.pathwise else u.detach()
        log_q = log_q + q_u.log_prob(u)
        log_w = log_p + self.model.log_prior(z, c, u) - log_q
        return SemiParticles(log_w, log_q, torch.full_like(log_w[..., :1, :1], -math.log(lead[-1])))

    def _summed(self, z: Tensor, log_p: Tensor, log_q: Tensor, log_class: Tensor) -> SemiParticles:
        """Every particle once per class, with the probability of the class as its part of the particle's mass."""
        log_share = log_class.movedim(-1, 0)
        n = self.model.n_classes
        c = torch.eye(n, dtype=z.dtype, device=z.device).reshape(n, 1, 1, 1, n).expand(n, 1, len(self.members), 1, n)
        every = self._particles(z, c, log_p, log_q + log_share)
        return SemiParticles(
            *(t.expand_as(every.log_w).flatten(0, 1) for t in (*every[:2], log_share + every.log_mass))
        )

    def _bound(self, p: SemiParticles) -> Tensor:
        """Each member's mean loss over its batch; members of one recipe are evaluated together."""
        if len(self._groups.members) == 1:
            return self.members[0].recipe.loss(p).mean(-1)
        losses = [
            self.members[first].recipe.loss(SemiParticles(*(t[:, group] if t.shape[1] > 1 else t for t in p))).mean(-1)
            for first, group in zip(self._groups.first, self._groups.members, strict=True)
        ]
        return torch.cat(losses)[self._groups.order]

    def _drawn(self, log_class: Tensor) -> Tensor:
        """A class drawn from q(c | z): one-hot, with the gradient of its relaxation if particles carry gradient."""
        uniform = self.source.uniform(len(log_class), log_class.shape[1:-1], log_class.shape[-1], like=log_class)
        tiny = torch.finfo(uniform.dtype).tiny
        gumbel = -(-uniform.clamp_min(tiny).log()).clamp_min(tiny).log()
        soft = torch.softmax((log_class + gumbel) / self.settings.temperature, -1)
        hard = torch.zeros_like(soft).scatter_(-1, soft.argmax(-1, keepdim=True), 1.0)
        return hard + soft - soft.detach() if self.pathwise else hard

    def _shifted(self, x: Tensor) -> Tensor:
        """Every image moved by up to `shifts` pixels along each axis, padded with zeros. Shapes: as x."""
        reach = self.settings.shifts
        if not reach or self.settings.image_shape is None:
            return x
        offset = self._integers(2 * reach + 1, (*x.shape[1:-1], 2)) - reach
        return shift_images(x, offset, reach, self.settings.image_shape)

    def _integers(self, high: int, shape: tuple[int, ...]) -> Tensor:
        """Random integers below `high`, each member's from its own generator. Shapes: ``-> (members, *shape)``."""
        return torch.stack([torch.randint(high, shape, generator=g, device=g.device) for g in self.generators])

    def separate(self) -> list[tuple[M1M2, Recognition]]:
        """The models of each member, on the device of training."""
        device = self.data.x.device
        return [
            (unstack(self.model, m.model, i).to(device), unstack(self.recognition, m.recognition, i).to(device))
            for i, m in enumerate(self.members)
        ]


def shift_images(x: Tensor, offset: Tensor, reach: int, image_shape: tuple[int, int]) -> Tensor:
    """Every image moved up and left by its offset of at most `reach` pixels, padded with zeros.

    Shapes: ``x (*batch, height * width)``, ``offset (*batch, 2)``, as x.
    """
    height, width = image_shape
    padded = nn.functional.pad(x.unflatten(-1, (height, width)), (reach,) * 4).flatten(-2)
    wide = width + 2 * reach
    down, right = (offset + reach).unbind(-1)
    pixels = torch.arange(height, device=x.device)[:, None] * wide + torch.arange(width, device=x.device)
    return padded.gather(-1, (down * wide + right)[..., None] + pixels.flatten())
