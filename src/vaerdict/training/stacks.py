"""A stack of members: their modules as one, their randomness, and single steps of models and proposals."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from vaerdict.core import Model, SettingError, check_log_joint, evaluating, log_mean_exp, prepared
from vaerdict.networks import Module, stack, stackable, unstack
from vaerdict.noise import Iid, seeded
from vaerdict.proposals import Prior, Trainable
from vaerdict.training.data import Observations
from vaerdict.training.optimiser import Adam, FlatParameters
from vaerdict.training.parallel import current_group
from vaerdict.training.recipes import Member


def as_model(module: nn.Module) -> Model:
    """The module, typed as a `Model`; raises a `SettingError` if it lacks ``log_joint`` or ``prior``."""
    missing = [name for name in ("log_joint", "prior") if not hasattr(module, name)]
    if missing:
        lacks = " and no ".join(missing)
        raise SettingError(f"{type(module).__name__} has no {lacks}; a model offers log_joint(x, z) and prior.")
    return cast(Model, module)


def signature(member: Member) -> tuple[Any, ...] | None:
    """The key that is equal for members that can share a stack, or None for a member that cannot be stacked."""
    modules = (member.model, member.proposal)
    if not all(stackable(m) for m in modules):
        return None
    phi = member.recipe.phi
    return (*(structure(m) for m in modules), phi.z_grad, phi.q_grad, member.recipe.lagging)


def structure(module: nn.Module) -> tuple[Any, ...]:
    """Everything about a module but the values of its tensors: submodules, shapes, and attributes such as sizes."""
    tensors = [*module.named_parameters(), *module.named_buffers()]
    attributes = [
        (name, type(part), tuple((k, _key(v)) for k, v in vars(part).items() if k[0] != "_" and k != "training"))
        for name, part in module.named_modules()
    ]
    return tuple(attributes), tuple((name, tuple(t.shape), t.dtype, t.requires_grad) for name, t in tensors)


def _key(value: Any) -> Any:
    """The value if it can be hashed, else its identity, which puts members in separate stacks: slower, never wrong."""
    try:
        hash(value)
    except TypeError:
        return id(value)
    return value


class Stack:
    """Members trained side by side, each with its own generators, so that no result depends on the other members.

    A batch has shape ``(members, n, p)``. A single member is not stacked, and its batch has shape ``(n, p)``. With
    several ranks each rank has its own noise and all share one order of the data.
    """

    def __init__(
        self, members: Sequence[Member], *, lr_theta: float, lr_phi: float, learn_model: bool, device: torch.device
    ) -> None:
        self.members, self.device, self.group = list(members), device, current_group()
        self.stacked = len(members) > 1
        self.model = self._join([m.model for m in members]).to(device)
        self.density = as_model(self.model)
        self.proposal = self._join([m.proposal for m in members]).to(device)
        self.learn_model = learn_model and any(p.requires_grad for p in self.model.parameters())
        self.theta = Adam(FlatParameters(self.model, len(members)), lr_theta, group=self.group)
        self.phi = Adam(FlatParameters(self.proposal, len(members)), lr_phi, group=self.group)
        self.generators = [seeded(derived_seed(m.seed, self.group.purpose(m.recipe.name)), device) for m in members]
        self.orders = self.generators
        if self.group.size > 1:
            self.orders = [seeded(derived_seed(m.seed, f"{m.recipe.name} order"), device) for m in members]
        self.source = Iid(tuple(self.generators))
        self.theta_loss: Callable[..., Tensor] = self._theta_loss
        self.phi_loss: Callable[..., Tensor] = self._phi_loss
        self._phi_groups = LossGroups.of([m.recipe.phi for m in members], device)
        self._theta_groups = LossGroups.of([m.recipe.theta for m in members], device)

    @property
    def n_stacked(self) -> int | None:
        """The length of the member axis, or None if there is no such axis."""
        return len(self.members) if self.stacked else None

    def _join(self, modules: Sequence[Module]) -> Module:
        return stack(modules) if self.stacked else copy.deepcopy(modules[0])

    def compile(self) -> None:
        """Compile both losses. The first step then takes tens of seconds, which pays off in long runs only."""
        self.theta_loss = torch.compile(self._theta_loss, dynamic=False)
        self.phi_loss = torch.compile(self._phi_loss, dynamic=False)

    def shuffled(self, n: int, size: int) -> Tensor:
        """The batches of one epoch, each member's in its own order; the remainder of n / size is left out.

        Shapes: ``-> (batches, members, size)``, or ``(batches, size)`` for a single member; with several ranks each
        gets its part of `size`.
        """
        n_batches = max(1, n // size)
        orders = [torch.randperm(n, generator=g, device=g.device)[: n_batches * size] for g in self.orders]
        index = self.group.shard(torch.stack(orders).reshape(len(orders), n_batches, -1).transpose(0, 1))
        return index if self.stacked else index[:, 0]

    def theta_step(self, x: Tensor, k: int, beta: Tensor | None) -> Tensor:
        """Update the models; returns each member's loss before the step. Shapes: ``-> (members,)``."""
        losses = self.theta_loss(x, self.proposal.noise(x, k, self.source), beta)
        self.theta.step(self.theta.flat.gradient(losses))
        return losses.detach()

    def phi_step(self, x: Tensor, k: int, beta: Tensor | None, mask: Tensor | None = None) -> Tensor:
        """Update the proposals of members in `mask`; returns each member's loss before the step."""
        losses = self.phi_loss(x, self.proposal.noise(x, k, self.source), beta)
        self.phi.step(self.phi.flat.gradient(losses), mask)
        return losses.detach()

    def joint_step(self, x: Tensor, k: int, beta: Tensor | None) -> Tensor:
        r"""Update models and proposals with the same particles; returns the losses of both.

        Where z carries gradient and q does not, every loss of q is :math:`-\sum_k c_k \log w_k`, and the model's
        gradient is that of :math:`-\sum_k a_k \log w_k`. One backward pass weighted by a therefore gives the model's
        gradient and, multiplied by c/a at z, the gradient that the proposal needs.

        Shapes: ``-> (2, members)``.
        """
        q = self.proposal(x)
        path = q.transform(self.proposal.noise(x, k, self.source))
        z = path.detach().requires_grad_()
        log_q = q.detach().log_prob(z)
        log_w = self.log_weights(x, z, log_q, beta)
        leaf = log_w.detach().requires_grad_()
        losses = self._theta_losses(leaf), self._phi_losses(leaf, log_q.detach())
        a, c = (torch.autograd.grad(loss.sum(), leaf)[0] for loss in losses)
        *theta, at_z = torch.autograd.grad(log_w, [*self.theta.flat.parameters, z], a, allow_unused=True)
        ratio = torch.where(a == 0, 0, c / a).unsqueeze(-1)
        phi = torch.autograd.grad(path, self.phi.flat.parameters, at_z * ratio, allow_unused=True)
        self.theta.step(self.theta.flat.flatten(theta))
        self.phi.step(self.phi.flat.flatten(phi))
        return torch.stack(losses).detach()

    def _theta_loss(self, x: Tensor, noise: Any, beta: Tensor | None) -> Tensor:
        with torch.no_grad():
            q = self.proposal(x)
            z = q.transform(noise)
            log_q = q.log_prob(z)
        return self._theta_losses(self.log_weights(x, z, log_q, beta))

    def _theta_losses(self, log_w: Tensor) -> Tensor:
        return self._per_member(log_w, lambda index, part: self.members[index].recipe.theta(part), self._theta_groups)

    def _phi_loss(self, x: Tensor, noise: Any, beta: Tensor | None) -> Tensor:
        loss = self.members[0].recipe.phi
        q = self.proposal(x)
        z = q.transform(noise)
        z = z if loss.z_grad else z.detach()
        log_q = (q if loss.q_grad else q.detach()).log_prob(z)
        return self._phi_losses(self.log_weights(x, z, log_q, beta), log_q)

    def _phi_losses(self, log_w: Tensor, log_q: Tensor) -> Tensor:
        both = torch.stack([log_w, log_q])
        return self._per_member(
            both, lambda index, part: self.members[index].recipe.phi(part[0], part[1]), self._phi_groups
        )

    def log_weights(self, x: Tensor, z: Tensor, log_q: Tensor, beta: Tensor | None = None) -> Tensor:
        """Log-weights with the KL term multiplied by beta: log p(x | z) + beta (log p(z) - log q(z | x))."""
        log_p = check_log_joint(self.density.log_joint(prepared(self.density, x), z), log_q, z)
        if beta is None:
            return log_p - log_q
        return log_p - (1 - beta) * Prior(self.density.prior).log_prob(z, x) - beta * log_q

    def _per_member(self, log_w: Tensor, fn: Callable[[int, Tensor], Tensor], groups: LossGroups) -> Tensor:
        """Each member's mean loss over its batch; members with the same loss are evaluated together."""
        if not self.stacked:
            return fn(0, log_w).mean(-1, keepdim=True)
        if len(groups.members) == 1:
            return fn(0, log_w).mean(-1)
        losses = [
            fn(first, log_w.index_select(-2, members)).mean(-1)
            for first, members in zip(groups.first, groups.members, strict=True)
        ]
        return torch.cat(losses)[groups.order]

    @torch.no_grad()
    def mutual_information(self, x: Observations, *, most: int = 512) -> Tensor:
        """Mutual information of x and z under q over the first n observations, `most` at most, in nats; at most log n.

        Shapes: ``-> (members,)``.
        """
        batch = x.block(slice(most), self.n_stacked)
        with evaluating(self.proposal):
            n, q = batch.shape[-2], self.proposal(batch)
        z = q.transform(self.proposal.noise(batch, 1, self.same_noise("information")))[0]
        every = z.movedim(-2, 0).unsqueeze(-2).expand(n, *z.shape)  # particle i against each observation j
        log_q = q.log_prob(every)
        conditional = log_q.diagonal(dim1=0, dim2=-1)
        return (conditional.mean(-1) - log_mean_exp(log_q, -1).mean(0)).reshape(-1)

    def buffers(self) -> dict[str, Tensor]:
        """The buffers of models and proposals by name; a step may change them, as batch norm does."""
        return _buffers(self.model, self.proposal)

    def rows(self) -> list[Tensor]:
        """Everything that training may change, with a row per member: parameters, and buffers that are not shared.

        Shapes: each ``(members, ...)``.
        """
        rows = [self.theta.flat.values, self.phi.flat.values]
        if not self.stacked:
            return rows + [buffer[None] for buffer in self.buffers().values()]
        single = _buffers(self.members[0].model, self.members[0].proposal)
        return rows + [buffer for name, buffer in self.buffers().items() if buffer.shape != single[name].shape]

    def synchronise_buffers(self) -> None:
        """Copy the first rank's buffers to all ranks, whose buffers saw different batches."""
        if self.group.size > 1:
            buffers = list(self.buffers().values())
            for buffer, first in zip(buffers, self.group.first([b.cpu() for b in buffers]), strict=True):
                buffer.copy_(first)

    def every_generator(self) -> list[torch.Generator]:
        """All generators of this rank."""
        return self.generators if self.orders is self.generators else [*self.generators, *self.orders]

    def same_noise(self, purpose: str) -> Iid:
        """A source that draws the same noise after every call, independent of the noise of training."""
        return Iid(tuple(seeded(derived_seed(m.seed, purpose), self.device) for m in self.members))

    def separate(self) -> list[tuple[nn.Module, Trainable]]:
        """The model and proposal of each member, on the device of training."""
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
    modules = {"model": model, "proposal": proposal}.items()
    return {f"{part}.{name}": b for part, m in modules for name, b in m.named_buffers(remove_duplicate=False)}


class LossGroups(NamedTuple):
    """Members grouped by equal losses: the first of each group, all of them, and the order that undoes the grouping.

    Shapes: ``members`` each ``(size,)``, ``order (all,)``.
    """

    first: list[int]
    members: list[Tensor]
    order: Tensor

    @classmethod
    def of(cls, losses: Sequence[Any], device: torch.device) -> LossGroups:
        """Group the members by these losses, one per member."""
        groups: dict[Any, list[int]] = {}
        for i, loss in enumerate(losses):
            groups.setdefault(loss, []).append(i)
        indices = [torch.tensor(group, device=device) for group in groups.values()]
        order = torch.tensor([i for group in groups.values() for i in group], device=device).argsort()
        return cls([group[0] for group in groups.values()], indices, order)


def derived_seed(seed: int, purpose: str) -> int:
    """A seed for one purpose, so that recipes with one seed do not share their noise."""
    digest = 1469598103934665603
    for byte in f"{seed}/{purpose}".encode():
        digest = ((digest ^ byte) * 1099511628211) % 2**63
    return digest
