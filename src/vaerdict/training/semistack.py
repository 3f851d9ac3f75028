"""One stack of M1+M2 members: settings, data, randomness, and a single step of all of them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from vaerdict.core import SettingError, check_count
from vaerdict.models.m1m2 import M1M2, Recognition
from vaerdict.networks import Dropout, stack, unstack
from vaerdict.noise import Iid, seeded
from vaerdict.training.flat import Adam, Flat
from vaerdict.training.parallel import current
from vaerdict.training.semibounds import Particles, Rule
from vaerdict.training.stacks import index_by, mixed


@dataclass(frozen=True, eq=False)
class SemiMember:
    """A generative and a recognition model to be trained together by a rule, with a seed of their own."""

    model: M1M2
    recognition: Recognition
    rule: Rule
    seed: int

    @property
    def name(self) -> str:
        """How messages call the member: ``IWAE, seed 3``."""
        return f"{self.rule.name}, seed {self.seed}"


@dataclass(frozen=True)
class SemiSettings:
    """How M1+M2 models are trained; the defaults are the paper's where it gives them.

    `relaxed` draws the class of an unlabelled image by straight-through Gumbel-softmax at `temperature`, as the paper
    does; otherwise classes are summed exactly. `classification` weighs the labelled images' cross-entropy. `dropout` is
    that of the encoder: the paper has it "between all hidden layers", and the other networks have but one. `shifts`
    moves every image by up to that many pixels either way at random, and then needs `image_shape`. The learning rate
    falls to zero along a half cosine over the last `cooling` share of the epochs.
    """

    n_particles: int = 30
    epochs: int = 100
    batch_size: int = 512
    labelled_batch: int = 128
    lr: float = 1e-3
    cooling: float = 0.0
    classification: float = 50.0
    dropout: float = 0.1
    relaxed: bool = True
    temperature: float = 0.5
    shifts: int = 0
    image_shape: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        for name in ("n_particles", "epochs", "batch_size", "labelled_batch"):
            check_count(getattr(self, name), name=name)
        if not (self.lr > 0 and self.temperature > 0 and self.classification >= 0):
            raise SettingError(
                f"lr={self.lr} and temperature={self.temperature} must be positive, classification="
                f"{self.classification} not negative."
            )
        if not (0 <= self.dropout < 1 and 0 <= self.cooling <= 1):
            raise SettingError(f"dropout={self.dropout} must lie in [0, 1), cooling={self.cooling} in [0, 1].")
        if self.shifts and self.image_shape is None:
            raise SettingError(f"shifts={self.shifts} moves images; say their image_shape too.")

    def rate(self, epoch: int) -> float:
        """The learning rate of an epoch, counted from zero."""
        done = (epoch - self.epochs * (1 - self.cooling)) / max(1.0, self.epochs * self.cooling)
        return self.lr * (0.5 + 0.5 * math.cos(math.pi * min(1.0, done)) if done > 0 else 1.0)


class Labelled(NamedTuple):
    """Images, the places of the labelled ones among them, and their labels."""

    x: Tensor
    labelled: Tensor
    labels: Tensor


class Together(NamedTuple):
    """The data of a stack: all images once, and for each member where its own are.

    Shapes: ``x (n_all, p)``, ``rows (members, n)``, ``labelled, labels (members, n_labelled)``.
    """

    x: Tensor
    rows: Tensor
    labelled: Tensor
    labels: Tensor


def together(data: Sequence[Labelled], device: torch.device) -> Together:
    """The data of several members on one device; a data set that members share is kept once."""
    sizes = {(len(own.x), len(own.labels)) for own in data}
    if len(sizes) > 1:
        raise SettingError(f"members of a stack need data of one size, not (images, labels) of {sorted(sizes)}.")
    unique = list({id(own.x): own.x for own in data}.values())
    places = [next(i for i, x in enumerate(unique) if x is own.x) for own in data]
    starts = torch.tensor(places, device=device)[:, None] * len(unique[0])
    labelled, labels = (torch.stack([own[i] for own in data]).to(device) for i in (1, 2))
    rows = starts + torch.arange(len(unique[0]), device=device)
    return Together(torch.cat([x.to(device) for x in unique]), rows, starts + labelled, labels)


class SemiStack:
    """Members trained side by side. Each has generators of its own, so that what it learns does not depend on the rest.

    A batch is ``(members, n, p)``: first the unlabelled images of a step, then the labelled ones.
    """

    def __init__(
        self, members: Sequence[SemiMember], data: Together, settings: SemiSettings, *, learn_model: bool
    ) -> None:
        device = data.x.device
        self.members, self.data, self.settings, self.group = list(members), data, settings, current()
        self.model = stack([m.model for m in members]).to(device).requires_grad_(learn_model)
        self.recognition = stack([m.recognition for m in members]).to(device)
        both = nn.ModuleList([self.model, self.recognition])
        self.adam = Adam(Flat(both, len(members)), settings.lr, group=self.group)
        self.path = members[0].rule.path
        self.generators = [seeded(mixed(m.seed, self.group.purpose(m.rule.name)), device) for m in members]
        self.orders = [seeded(mixed(m.seed, f"{m.rule.name} order"), device) for m in members]
        self.source = Iid(tuple(self.generators))
        self.drop = Dropout(settings.dropout, tuple(self.generators))
        groups = index_by([m.rule for m in members])
        self._by_rule = [(members[group[0]].rule, torch.tensor(group, device=device)) for group in groups]
        self._order = torch.tensor([i for group in groups for i in group], device=device).argsort()
        self.n_labelled = -(-min(settings.labelled_batch, data.labels.shape[1]) // self.group.size)

    def shuffled(self) -> Tensor:
        """Batches of one epoch, each member's in its own order, of several ranks each its share.

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
        """Each member's loss on unlabelled images followed by those with labels y.

        Shapes: ``x (members, n + n_labelled, p), y (members, n_labelled) -> (members,)``.
        """
        n, k = x.shape[1] - y.shape[1], self.settings.n_particles
        q_z = self.recognition.z_given(x, self.drop)
        path = q_z.transform(q_z.noise(k, self.source))
        z = path if self.path else path.detach()
        # what every class of an image shares
        log_p, log_q = self.model.log_likelihood(x, z), q_z.log_prob(z)
        log_class = self.recognition.log_class(z)
        known = torch.eye(self.model.n_classes, dtype=x.dtype, device=x.device)[y].expand(k, -1, -1, -1)
        if self.settings.relaxed:
            c = torch.cat([self._drawn(log_class[:, :, :n]), known], 2)
            of_class = (c[:, :, :n] * log_class[:, :, :n]).sum(-1)
            every = self._particles(z, c, log_p, log_q + nn.functional.pad(of_class, (0, y.shape[1])))
            free, given = (
                every._replace(log_w=every.log_w[:, :, part], log_q=every.log_q[:, :, part])
                for part in (slice(n), slice(n, None))
            )
        else:
            free = self._summed(z[:, :, :n], log_p[:, :, :n], log_q[:, :, :n], log_class[:, :, :n])
            given = self._particles(z[:, :, n:], known, log_p[:, :, n:], log_q[:, :, n:])
        seen = log_class[:, :, n:] if self.path else self.recognition.log_class(path[:, :, n:])
        crossed = -(seen * known).sum(-1).mean((0, 2))
        return self._bound(free) + self._bound(given) + self.settings.classification * crossed

    def _particles(self, z: Tensor, c: Tensor, log_p: Tensor, log_q: Tensor) -> Particles:
        """Particles with a u drawn for their z and c, each of mass 1/K. Shapes: ``z (..., K, members, n, d_z)``."""
        q_u = self.recognition.u_given(z, c)
        lead = q_u.loc.shape[:-3]
        eps = self.source.normal(math.prod(lead), q_u.loc.shape[-3:-1], self.model.d_u, like=z)
        u = q_u.loc + q_u.root.apply(eps.reshape(q_u.loc.shape))
        u = u if self.path else u.detach()
        log_q = log_q + q_u.log_prob(u)
        log_w = log_p + self.model.log_prior(z, c, u) - log_q
        return Particles(log_w, log_q, torch.full_like(log_w[..., :1, :1], -math.log(lead[-1])))

    def _summed(self, z: Tensor, log_p: Tensor, log_q: Tensor, log_class: Tensor) -> Particles:
        """Every particle once for each class, with the class's probability as its share of the particle's mass."""
        share = log_class.movedim(-1, 0)
        n = self.model.n_classes
        c = torch.eye(n, dtype=z.dtype, device=z.device).reshape(n, 1, 1, 1, n).expand(n, 1, len(self.members), 1, n)
        every = self._particles(z, c, log_p, log_q + share)
        return Particles(*(t.expand_as(every.log_w).flatten(0, 1) for t in (*every[:2], share + every.log_mass)))

    def _bound(self, p: Particles) -> Tensor:
        """Each member's mean loss over its batch; members of one rule go through it together."""
        if len(self._by_rule) == 1:
            return self._by_rule[0][0].loss(p).mean(-1)
        parts = [
            rule.loss(Particles(*(t[:, members] if t.shape[1] > 1 else t for t in p))).mean(-1)
            for rule, members in self._by_rule
        ]
        return torch.cat(parts)[self._order]

    def _drawn(self, log_class: Tensor) -> Tensor:
        """A class drawn from q(c | z): one-hot, and where particles carry gradient that of its relaxation."""
        uniform = self.source.uniform(len(log_class), log_class.shape[1:-1], log_class.shape[-1], like=log_class)
        tiny = torch.finfo(uniform.dtype).tiny
        gumbel = -(-uniform.clamp_min(tiny).log()).clamp_min(tiny).log()
        soft = torch.softmax((log_class + gumbel) / self.settings.temperature, -1)
        hard = torch.zeros_like(soft).scatter_(-1, soft.argmax(-1, keepdim=True), 1.0)
        return hard + soft - soft.detach() if self.path else hard

    def _shifted(self, x: Tensor) -> Tensor:
        """Every image moved by up to `shifts` pixels either way, black coming in. Shapes: as x."""
        reach = self.settings.shifts
        if not reach or self.settings.image_shape is None:
            return x
        return moved(x, self._integers(2 * reach + 1, (*x.shape[1:-1], 2)) - reach, reach, self.settings.image_shape)

    def _integers(self, high: int, shape: tuple[int, ...]) -> Tensor:
        """Random integers under `high`, each member's from its own generator. Shapes: ``-> (members, *shape)``."""
        return torch.stack([torch.randint(high, shape, generator=g, device=g.device) for g in self.generators])

    def separate(self) -> list[tuple[M1M2, Recognition]]:
        """The members' modules, each on its own again, on the device they were trained on."""
        device = self.data.x.device
        return [
            (unstack(self.model, m.model, i).to(device), unstack(self.recognition, m.recognition, i).to(device))
            for i, m in enumerate(self.members)
        ]


def moved(x: Tensor, offset: Tensor, reach: int, image_shape: tuple[int, int]) -> Tensor:
    """Every image moved up and left by its offset of at most `reach` pixels, black coming in.

    Shapes: ``x (*batch, height * width)``, ``offset (*batch, 2)``, as x.
    """
    height, width = image_shape
    padded = nn.functional.pad(x.unflatten(-1, (height, width)), (reach,) * 4).flatten(-2)
    wide = width + 2 * reach
    down, right = (offset + reach).unbind(-1)
    pixels = torch.arange(height, device=x.device)[:, None] * wide + torch.arange(width, device=x.device)
    return padded.gather(-1, (down * wide + right)[..., None] + pixels.flatten())
