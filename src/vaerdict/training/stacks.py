"""One stack of members: its modules, its randomness, and single steps of model and proposal."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from vaerdict.core import Model, SettingError, check_log_joint, evaluating, log_mean_exp, log_normalise, prepared
from vaerdict.networks import Module, stack, stackable, unstack
from vaerdict.noise import Iid, seeded
from vaerdict.proposals import Prior, Trainable
from vaerdict.training.data import Observations, blocks
from vaerdict.training.flat import Adam, Flat
from vaerdict.training.parallel import current
from vaerdict.training.recipes import Recipe


@dataclass(frozen=True, eq=False)
class Member:
    """A model and a proposal to be trained together by a recipe, with a seed of their own."""

    model: nn.Module
    proposal: Trainable
    recipe: Recipe
    seed: int

    @property
    def name(self) -> str:
        """How messages call the member: ``IWAE, seed 3``."""
        return f"{self.recipe.name}, seed {self.seed}"


def as_model(module: nn.Module) -> Model:
    """The module as the model it is; one that lacks what a model offers is refused."""
    missing = [name for name in ("log_joint", "prior") if not hasattr(module, name)]
    if missing:
        lacks = " and no ".join(missing)
        raise SettingError(f"{type(module).__name__} has no {lacks}; a model offers log_joint(x, z) and prior.")
    return cast(Model, module)


def signature(member: Member) -> tuple[Any, ...] | None:
    """What members must share to be stacked, or None where one cannot be stacked at all."""
    modules = (member.model, member.proposal)
    if not all(stackable(m) for m in modules):
        return None
    phi = member.recipe.phi
    return (*(kind(m) for m in modules), phi.z_grad, phi.q_grad, member.recipe.lagging)


def kind(module: nn.Module) -> tuple[Any, ...]:
    """Everything about a module but the values of its tensors: parts, shapes, and plain attributes such as sizes."""
    tensors = [*module.named_parameters(), *module.named_buffers()]
    plain = [
        (name, type(part), tuple((k, _key(v)) for k, v in vars(part).items() if k[0] != "_" and k != "training"))
        for name, part in module.named_modules()
    ]
    return tuple(plain), tuple((name, tuple(t.shape), t.dtype, t.requires_grad) for name, t in tensors)


def _key(value: Any) -> Any:
    """The value where it can be compared by hash; else its identity, which keeps members apart: slower, never wrong."""
    try:
        hash(value)
    except TypeError:
        return id(value)
    return value


class Stack:
    """Members trained side by side. Each has generators of its own, so that what it learns does not depend on the rest.

    A batch is ``(members, n, p)``; a member that cannot be stacked is alone and sees ``(n, p)``. Where several ranks
    train together, each has noise of its own and the order of the data is one.
    """

    def __init__(
        self, members: Sequence[Member], *, lr_theta: float, lr_phi: float, learn_model: bool, device: torch.device
    ) -> None:
        self.members, self.device, self.group = list(members), device, current()
        self.stacked = len(members) > 1
        self.model = self._join([m.model for m in members]).to(device)
        self.density = as_model(self.model)
        self.proposal = self._join([m.proposal for m in members]).to(device)
        self.learn_model = learn_model and any(p.requires_grad for p in self.model.parameters())
        self.theta = Adam(Flat(self.model, len(members)), lr_theta, group=self.group)
        self.phi = Adam(Flat(self.proposal, len(members)), lr_phi, group=self.group)
        self.generators = [seeded(mixed(m.seed, self.group.purpose(m.recipe.name)), device) for m in members]
        self.orders = self.generators
        if self.group.size > 1:
            self.orders = [seeded(mixed(m.seed, f"{m.recipe.name} order"), device) for m in members]
        self.source = Iid(tuple(self.generators))
        self.theta_loss: Callable[..., Tensor] = self._theta_loss
        self.phi_loss: Callable[..., Tensor] = self._phi_loss
        self._by_loss = Alike.of([m.recipe.phi for m in members], device)
        self._by_theta = Alike.of([m.recipe.theta for m in members], device)

    @property
    def n_stacked(self) -> int | None:
        """The length of the member axis, None where there is none."""
        return len(self.members) if self.stacked else None

    def _join(self, modules: Sequence[Module]) -> Module:
        return stack(modules) if self.stacked else copy.deepcopy(modules[0])

    def compile(self) -> None:
        """Compile both losses; pays on long runs only (tens of seconds at the first step)."""
        self.theta_loss = torch.compile(self._theta_loss, dynamic=False)
        self.phi_loss = torch.compile(self._phi_loss, dynamic=False)

    def shuffled(self, n: int, size: int) -> Tensor:
        """Batches of one epoch, each member's in its own order; a remainder waits for the next epoch's order.

        Shapes: ``-> (batches, members, size)``, or ``(batches, size)`` where there is one member; of several ranks each
        gets its share of `size`.
        """
        n_batches = max(1, n // size)
        orders = [torch.randperm(n, generator=g, device=g.device)[: n_batches * size] for g in self.orders]
        index = self.group.shard(torch.stack(orders).reshape(len(orders), n_batches, -1).transpose(0, 1))
        return index if self.stacked else index[:, 0]

    def theta_step(self, x: Tensor, k: int, beta: Tensor | None) -> Tensor:
        """One step of the models; returns each member's loss before it."""
        losses = self.theta_loss(x, self.proposal.noise(x, k, self.source), beta)
        self.theta.step(self.theta.flat.gradient(losses))
        return losses.detach()

    def phi_step(self, x: Tensor, k: int, beta: Tensor | None, only: Tensor | None = None) -> Tensor:
        """One step of the proposals, of those marked in `only`; returns each member's loss before it."""
        losses = self.phi_loss(x, self.proposal.noise(x, k, self.source), beta)
        self.phi.step(self.phi.flat.gradient(losses), only)
        return losses.detach()

    def joint_step(self, x: Tensor, k: int, beta: Tensor | None) -> Tensor:
        r"""One step of models and proposals by the same particles; returns the losses of both.

        Where z carries gradient and q does not, every loss of q is :math:`-\sum_k c_k \log w_k`, and the model's
        gradient is that of :math:`-\sum_k a_k \log w_k`. So one backward pass weighted by a gives the model's gradient
        and, times c/a at z, what the proposal's needs.

        Shapes: ``-> (2, members)``.
        """
        q = self.proposal(x)
        path = q.transform(self.proposal.noise(x, k, self.source))
        z = path.detach().requires_grad_()
        log_q = q.detach().log_prob(z)
        log_w = self._log_weights(x, z, log_q, beta)
        leaf = log_w.detach().requires_grad_()
        losses = self._theta_losses(leaf), self._phi_losses(leaf, log_q.detach())
        a, c = (torch.autograd.grad(loss.sum(), leaf)[0] for loss in losses)
        *theta, at_z = torch.autograd.grad(log_w, [*self.theta.flat.parameters, z], a, allow_unused=True)
        ratio = torch.where(a == 0, 0, c / a).unsqueeze(-1)
        phi = torch.autograd.grad(path, self.phi.flat.parameters, at_z * ratio, allow_unused=True)
        self.theta.step(self.theta.flat.row(theta))
        self.phi.step(self.phi.flat.row(phi))
        return torch.stack(losses).detach()

    def _theta_loss(self, x: Tensor, noise: Any, beta: Tensor | None) -> Tensor:
        with torch.no_grad():
            q = self.proposal(x)
            z = q.transform(noise)
            log_q = q.log_prob(z)
        return self._theta_losses(self._log_weights(x, z, log_q, beta))

    def _theta_losses(self, log_w: Tensor) -> Tensor:
        return self._per_member(log_w, lambda index, part: self.members[index].recipe.theta(part), self._by_theta)

    def _phi_loss(self, x: Tensor, noise: Any, beta: Tensor | None) -> Tensor:
        loss = self.members[0].recipe.phi
        q = self.proposal(x)
        z = q.transform(noise)
        z = z if loss.z_grad else z.detach()
        log_q = (q if loss.q_grad else q.detach()).log_prob(z)
        return self._phi_losses(self._log_weights(x, z, log_q, beta), log_q)

    def _phi_losses(self, log_w: Tensor, log_q: Tensor) -> Tensor:
        both = torch.stack([log_w, log_q])
        return self._per_member(
            both, lambda index, part: self.members[index].recipe.phi(part[0], part[1]), self._by_loss
        )

    def _log_weights(self, x: Tensor, z: Tensor, log_q: Tensor, beta: Tensor | None) -> Tensor:
        """Log-weights with the KL term multiplied by beta: log p(x | z) + beta (log p(z) - log q(z | x))."""
        log_p = check_log_joint(self.density.log_joint(prepared(self.density, x), z), log_q, z)
        if beta is None:
            return log_p - log_q
        return log_p - (1 - beta) * Prior(self.density.prior).log_prob(z, x) - beta * log_q

    def _per_member(self, log_w: Tensor, fn: Callable[[int, Tensor], Tensor], groups: Alike) -> Tensor:
        """Mean loss of each member over its batch; members of one loss go through it together."""
        if not self.stacked:
            return fn(0, log_w).mean(-1, keepdim=True)
        if len(groups.members) == 1:
            return fn(0, log_w).mean(-1)
        parts = [
            fn(first, log_w.index_select(-2, own)).mean(-1)
            for first, own in zip(groups.first, groups.members, strict=True)
        ]
        return torch.cat(parts)[groups.order]

    @torch.no_grad()
    def score(self, x: Observations, k: int, *, chunk: int = 1024) -> Tensor:
        """What training must raise on held-out data, always on the same noise. Shapes: ``-> (members,)``.

        The IWELBO while the model learns. For a fixed model that hardly moves with the proposal, so that proposals
        alone are scored by the logarithm of their effective sample size.
        """
        source = self.same_noise("held out")
        total = torch.zeros(len(self.members), dtype=torch.float64, device=self.device)
        with evaluating(self.model, self.proposal):
            for batch in blocks(x, chunk, self.n_stacked):
                q = self.proposal(batch)
                z = q.transform(self.proposal.noise(batch, k, source))
                log_w = self._log_weights(batch, z, q.log_prob(z), None).double()
                total += (log_mean_exp(log_w) if self.learn_model else _log_ess(log_w)).sum(-1).reshape(-1)
        return total / x.n

    @torch.no_grad()
    def mutual_information(self, x: Observations, *, most: int = 512) -> Tensor:
        """Mutual information of x and z under q, in nats, up to log n for the n first observations, `most` at most.

        Shapes: ``-> (members,)``.
        """
        batch = x.block(slice(most), self.n_stacked)
        with evaluating(self.proposal):
            n, q = batch.shape[-2], self.proposal(batch)
        z = q.transform(self.proposal.noise(batch, 1, self.same_noise("information")))[0]
        every = z.movedim(-2, 0).unsqueeze(-2).expand(n, *z.shape)  # particle i against each observation j
        log_q = q.log_prob(every)
        own = log_q.diagonal(dim1=0, dim2=-1)
        return (own.mean(-1) - log_mean_exp(log_q, -1).mean(0)).reshape(-1)

    def buffers(self) -> dict[str, Tensor]:
        """Buffers of models and proposals by name; a step may change them, as it does running means."""
        return _buffers(self.model, self.proposal)

    def rows(self) -> list[Tensor]:
        """All that training may change, a row a member: parameters, and the buffers that members do not share.

        Shapes: each ``(members, ...)``.
        """
        rows = [self.theta.flat.values, self.phi.flat.values]
        if not self.stacked:
            return rows + [buffer[None] for buffer in self.buffers().values()]
        alone = _buffers(self.members[0].model, self.members[0].proposal)
        return rows + [buffer for name, buffer in self.buffers().items() if buffer.shape != alone[name].shape]

    def share_buffers(self) -> None:
        """Give every rank the first one's buffers: each saw batches of its own."""
        if self.group.size > 1:
            own = list(self.buffers().values())
            for buffer, first in zip(own, self.group.first([b.cpu() for b in own]), strict=True):
                buffer.copy_(first)

    def every_generator(self) -> list[torch.Generator]:
        """All that is random on this rank."""
        return self.generators if self.orders is self.generators else [*self.generators, *self.orders]

    def same_noise(self, purpose: str) -> Iid:
        """A source that starts anew at every call, and apart from what training draws."""
        return Iid(tuple(seeded(mixed(m.seed, purpose), self.device) for m in self.members))

    def separate(self) -> list[tuple[nn.Module, Trainable]]:
        """The members' modules, each on its own again, on the device they were trained on."""
        if not self.stacked:
            return [(self.model, self.proposal)]
        return [
            (
                unstack(self.model, m.model, i).to(self.device),
                unstack(self.proposal, m.proposal, i).to(self.device),
            )
            for i, m in enumerate(self.members)
        ]


def _buffers(model: nn.Module, proposal: nn.Module) -> dict[str, Tensor]:
    parts = {"model": model, "proposal": proposal}.items()
    return {f"{part}.{name}": b for part, m in parts for name, b in m.named_buffers(remove_duplicate=False)}


def _log_ess(log_w: Tensor) -> Tensor:
    """Log effective sample size; none where no particle has weight. Shapes: ``(K, *batch) -> (*batch)``."""
    dead = log_w.amax(0) == -torch.inf
    return torch.where(dead, -torch.inf, -torch.logsumexp(2 * log_normalise(log_w), 0))


class Alike(NamedTuple):
    """Members that share something, on the device: the first of each group, all of them, and how to restore the order.

    Shapes: ``members`` each ``(size,)``, ``order (all,)``.
    """

    first: list[int]
    members: list[Tensor]
    order: Tensor

    @classmethod
    def of(cls, values: Sequence[Any], device: torch.device) -> Alike:
        """Members grouped by equal values."""
        groups = index_by(values)
        order = torch.tensor([i for group in groups for i in group], device=device).argsort()
        return cls([group[0] for group in groups], [torch.tensor(group, device=device) for group in groups], order)


def index_by(values: Sequence[Any]) -> list[list[int]]:
    """Positions of equal values, grouped in order of first appearance."""
    groups: dict[Any, list[int]] = {}
    for i, value in enumerate(values):
        groups.setdefault(value, []).append(i)
    return list(groups.values())


def mixed(seed: int, purpose: str) -> int:
    """A seed for one purpose of one member: different recipes with one seed must not share their noise."""
    digest = 1469598103934665603
    for byte in f"{seed}/{purpose}".encode():
        digest = ((digest ^ byte) * 1099511628211) % 2**63
    return digest
