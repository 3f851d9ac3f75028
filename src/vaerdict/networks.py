"""Small networks whose parameters may carry a leading member axis, and the stacking of modules into one.

A stack is no new kind of object: it is the same module with parameters ``(members, ...)`` that is given a batch
``(members, n)``. Many small models then cost one launch instead of many.
"""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vaerdict.core import SettingError, ShapeError, per_member

Module = TypeVar("Module", bound=nn.Module)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Affine map, each member of a stack with its own.

    Shapes: ``x (..., n, in)``, ``weight (out, in)``, ``bias (out)``; in a stack ``x (..., members, n, in)``,
    ``weight (members, out, in)``, ``bias (members, out)``.
    """
    if x.shape[-1] != weight.shape[-1]:
        raise ShapeError(f"input has {x.shape[-1]} features, the layer takes {weight.shape[-1]}; got {tuple(x.shape)}.")
    if weight.dim() == 2:
        return F.linear(x, weight, bias)
    members = weight.shape[0]
    if x.dim() < 3 or x.shape[-3] != members:
        raise ShapeError(f"a stack of {members} members needs input (..., {members}, n, in), got {tuple(x.shape)}.")
    # one product a member with all particles in it, instead of one a particle and member
    lead = x.shape[:-3]
    flat = x.movedim(-3, 0).reshape(members, -1, x.shape[-1])
    out = flat @ weight.mT if bias is None else torch.baddbmm(bias.unsqueeze(1), flat, weight.mT)
    return out.reshape(members, *lead, x.shape[-2], -1).movedim(0, -3)


class Linear(nn.Module):
    """A linear layer that can be stacked and draws its start from a generator."""

    def __init__(self, n_in: int, n_out: int, *, generator: torch.Generator) -> None:
        super().__init__()
        reach = 1 / math.sqrt(n_in)
        self.weight = nn.Parameter(reach * (2 * torch.rand(n_out, n_in, generator=generator) - 1))
        self.bias = nn.Parameter(reach * (2 * torch.rand(n_out, generator=generator) - 1))

    def forward(self, x: Tensor) -> Tensor:
        """Shapes: ``(..., n, in) -> (..., n, out)``."""
        return linear(x, self.weight, self.bias)


class MLP(nn.Module):
    """A multilayer perceptron that can be stacked; inputs are first standardised if `center` and `spread` are given.

    Shapes: ``(..., n, in) -> (..., n, out)``.
    """

    stackable = True

    def __init__(
        self,
        n_in: int,
        n_out: int,
        hidden: Sequence[int] = (128,),
        *,
        generator: torch.Generator,
        activation: Callable[[Tensor], Tensor] = F.relu,
        center: Tensor | None = None,
        spread: Tensor | None = None,
    ) -> None:
        super().__init__()
        sizes = [n_in, *hidden, n_out]
        self.layers = nn.ModuleList(Linear(a, b, generator=generator) for a, b in itertools.pairwise(sizes))
        self.activation = activation
        self.center = nn.Buffer(torch.zeros(n_in) if center is None else center)
        self.spread = nn.Buffer(torch.ones(n_in) if spread is None else spread)

    def forward(self, x: Tensor) -> Tensor:
        """Shapes: ``(..., n, in) -> (..., n, out)``."""
        center, spread = per_member(self.center, 1), per_member(self.spread, 1)
        if x.shape[-1] != center.shape[-1]:
            raise ShapeError(
                f"x has {x.shape[-1]} features, the network takes {center.shape[-1]}; got {tuple(x.shape)}."
            )
        h = (x - center) / spread
        for layer in self.layers[:-1]:
            h = self.activation(layer(h))
        return self.layers[-1](h)


def stackable(module: nn.Module) -> bool:
    """Whether every part of `module` understands a leading member axis (it says so with ``stackable = True``)."""
    return bool(getattr(module, "stackable", False))


def stack(modules: Sequence[Module]) -> Module:
    """One module with the parameters of all along a leading member axis; buffers that are equal in all are shared."""
    if not modules:
        raise SettingError("a stack needs at least one module.")
    first = modules[0]
    if not all(type(m) is type(first) and stackable(m) for m in modules):
        kinds = sorted({type(m).__name__ for m in modules})
        raise SettingError(
            f"only modules of one stackable kind can be stacked, not {', '.join(kinds)}; keep them apart."
        )
    out = copy.deepcopy(first)
    for name, _ in list(first.named_parameters()):
        parts = [m.get_parameter(name).detach() for m in modules]
        if any(p.shape != parts[0].shape for p in parts):
            raise ShapeError(f"parameter {name!r} differs in shape between members; stack members of one shape.")
        _assign(out, name, nn.Parameter(torch.stack(parts), requires_grad=first.get_parameter(name).requires_grad))
    for name, _ in list(first.named_buffers()):
        parts = [m.get_buffer(name) for m in modules]
        shared = all(torch.equal(p, parts[0]) for p in parts)
        _assign(out, name, nn.Buffer(parts[0].clone() if shared else torch.stack(parts)))
    return out


def unstack(module: nn.Module, template: Module, index: int) -> Module:
    """Member `index` of a stack as a module of its own, shaped like `template` (any of the modules stacked)."""
    out = copy.deepcopy(template)
    with torch.no_grad():
        for name, parameter in out.named_parameters():
            parameter.copy_(module.get_parameter(name)[index])
        for name, buffer in out.named_buffers():
            source = module.get_buffer(name)
            buffer.copy_(source if source.shape == buffer.shape else source[index])
    return out


def _assign(module: nn.Module, name: str, value: Tensor) -> None:
    *path, leaf = name.split(".")
    setattr(module.get_submodule(".".join(path)), leaf, value)
