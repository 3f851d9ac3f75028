"""Small networks whose parameters may have a leading member axis, and stacks of modules.

A stack is a module of the same class with parameters ``(members, ...)``, called with a batch ``(members, n)``. Many
small models are then evaluated by one kernel launch.
"""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vaerdict.core import SettingError, ShapeError, per_member

Module = TypeVar("Module", bound=nn.Module)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Affine map, with one weight and bias per member of a stack.

    Shapes: ``x (..., n, in)``, ``weight (out, in)``, ``bias (out)``; in a stack ``x (..., members, n, in)``,
    ``weight (members, out, in)``, ``bias (members, out)``.
    """
    if x.shape[-1] != weight.shape[-1]:
        raise ShapeError(f"input has {x.shape[-1]} features, the layer takes {weight.shape[-1]}; got {tuple(x.shape)}.")
    if weight.dim() == 2:
        return F.linear(x, weight, bias)
    members = weight.shape[0]
    _check_members(x, members)
    # one product per member over all particles, instead of one per particle and member
    lead = x.shape[:-3]
    flat = x.movedim(-3, 0).reshape(members, -1, x.shape[-1])
    if flat.is_cuda and bias is not None:
        out = _Affine.apply(flat, weight, bias)
    else:
        out = flat @ weight.mT if bias is None else torch.baddbmm(bias.unsqueeze(1), flat, weight.mT)
    return out.reshape(members, *lead, x.shape[-2], -1).movedim(0, -3)


def _check_members(x: Tensor, members: int) -> None:
    if x.dim() < 3 or x.shape[-3] != members:
        raise ShapeError(f"a stack of {members} members needs input (..., {members}, n, in), got {tuple(x.shape)}.")


_SPLITS = 16


class _Affine(torch.autograd.Function):
    """Batched ``x @ weight.mT + bias`` as a GPU computes it best.

    The bias is added inside the product of each member. The gradient in the weights, a small matrix summed over very
    many rows, would occupy few processors as a single product: it is summed in ``_SPLITS`` blocks of rows.
    """

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:  # type: ignore[override]
        ctx.save_for_backward(x, weight)
        out = x.new_empty(*x.shape[:2], weight.shape[1])
        for member, rows in enumerate(x):
            torch.addmm(bias[member], rows, weight[member].mT, out=out[member])
        return out

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:  # type: ignore[override]
        x, weight = ctx.saved_tensors
        of_x, of_weight, of_bias = ctx.needs_input_grad
        members, rows = x.shape[:2]
        splits = math.gcd(rows, _SPLITS)
        left, right = (t.reshape(members * splits, rows // splits, -1) for t in (grad, x))
        return (
            grad @ weight if of_x else None,
            (left.mT @ right).reshape(members, splits, *weight.shape[1:]).sum(1) if of_weight else None,
            grad.sum(1) if of_bias else None,
        )


class Linear(nn.Module):
    """A linear layer that can be stacked and is initialised from a generator."""

    def __init__(self, n_in: int, n_out: int, *, generator: torch.Generator) -> None:
        super().__init__()
        bound = 1 / math.sqrt(n_in)
        self.weight = nn.Parameter(bound * (2 * torch.rand(n_out, n_in, generator=generator) - 1))
        self.bias = nn.Parameter(bound * (2 * torch.rand(n_out, generator=generator) - 1))

    def forward(self, x: Tensor) -> Tensor:
        """Shapes: ``(..., n, in) -> (..., n, out)``."""
        return linear(x, self.weight, self.bias)


Activation = Callable[[Tensor], Tensor]
"""An elementwise function; a `Dropout` is one."""


@dataclass(frozen=True)
class Dropout:
    """Zero a fraction `rate` of the hidden features and scale up the rest; one generator per member."""

    rate: float
    generators: tuple[torch.Generator, ...]

    def __call__(self, h: Tensor) -> Tensor:
        """Shapes: ``(..., n, d) -> (..., n, d)``, in a stack ``(..., members, n, d)``."""
        if self.rate == 0:
            return h
        if len(self.generators) == 1:
            return h * self._mask(h.shape, self.generators[0])
        # one mask per member, in the memory order of the output of a stacked linear layer
        shape = (*h.shape[:-3], *h.shape[-2:])
        return h * torch.stack([self._mask(shape, g) for g in self.generators]).movedim(0, -3)

    def _mask(self, shape: Sequence[int], generator: torch.Generator) -> Tensor:
        return (torch.rand(*shape, generator=generator, device=generator.device) >= self.rate) / (1 - self.rate)


def no_dropout(h: Tensor) -> Tensor:
    """The identity."""
    return h


class MLP(nn.Module):
    """A multilayer perceptron that can be stacked.

    Parameters
    ----------
    n_in, n_out, hidden
        Numbers of inputs and outputs, and sizes of the hidden layers.
    generator
        Source of the initial weights.
    activation
        Applied after every hidden layer.
    center, spread
        Inputs are standardised as ``(x - center) / spread`` first. Shapes: ``(in,)``.

    Examples
    --------
    >>> MLP(4, 2, (8,), generator=torch.Generator().manual_seed(0))(torch.zeros(3, 7, 4)).shape
    torch.Size([3, 7, 2])
    """

    stackable = True

    def __init__(
        self,
        n_in: int,
        n_out: int,
        hidden: Sequence[int] = (128,),
        *,
        generator: torch.Generator,
        activation: Activation = F.relu,
        center: Tensor | None = None,
        spread: Tensor | None = None,
    ) -> None:
        super().__init__()
        sizes = [n_in, *hidden, n_out]
        self.layers = nn.ModuleList(Linear(a, b, generator=generator) for a, b in itertools.pairwise(sizes))
        self.activation = activation
        self.center = nn.Buffer(torch.zeros(n_in) if center is None else center)
        self.spread = nn.Buffer(torch.ones(n_in) if spread is None else spread)

    @property
    def stacked(self) -> bool:
        """Whether the parameters have a member axis."""
        return self.layers[-1].get_parameter("bias").dim() == 2

    def forward(self, x: Tensor, drop: Activation = no_dropout) -> Tensor:
        """Shapes: ``(..., n, in) -> (..., n, out)``; `drop` is applied to every hidden layer."""
        center, spread = per_member(self.center, 1), per_member(self.spread, 1)
        if x.shape[-1] != center.shape[-1]:
            raise ShapeError(
                f"x has {x.shape[-1]} features, the network takes {center.shape[-1]}; got {tuple(x.shape)}."
            )
        h = (x - center) / spread
        for layer in self.layers[:-1]:
            h = drop(self.activation(layer(h)))
        return self.layers[-1](h)


class Joint(nn.Module):
    """A multilayer perceptron of a class and a vector; can be stacked.

    The first layer is the sum of a linear layer of each input, so that either input broadcasts after it: all classes
    for one vector, or one class for all vectors. The arguments are those of `MLP`.
    """

    stackable = True

    def __init__(
        self,
        n_classes: int,
        d: int,
        n_out: int,
        hidden: Sequence[int] = (128,),
        *,
        generator: torch.Generator,
        activation: Activation = F.selu,
    ) -> None:
        super().__init__()
        self.activation = activation
        self.of_class = Linear(n_classes, hidden[0], generator=generator)
        self.of_vector = Linear(d, hidden[0], generator=generator)
        self.rest = MLP(hidden[0], n_out, hidden[1:], generator=generator, activation=activation)

    def forward(self, c: Tensor, v: Tensor) -> Tensor:
        """Shapes: ``(..., n, classes), (..., n, d) -> (..., n, out)``."""
        return self.rest(self.activation(self.of_class(c) + self.of_vector(v)))


class CNN(nn.Module):
    """3 x 3 convolutions with 2 x 2 max-pooling on one-channel images, then an `MLP`; can be stacked.

    Images that have become too small are not pooled further. `hidden` are the hidden layers of the `MLP`. Without
    padding every convolution takes a pixel from each side.
    """

    stackable = True

    def __init__(
        self,
        image_shape: tuple[int, int],
        n_out: int,
        channels: Sequence[int] = (16, 32, 32),
        hidden: Sequence[int] = (128,),
        *,
        padded: bool = True,
        generator: torch.Generator,
        activation: Activation = F.selu,
    ) -> None:
        super().__init__()
        self.image_shape, self.activation, self.padding = tuple(image_shape), activation, int(padded)
        sizes = [1, *channels]
        self.convolutions = nn.ModuleList(Linear(9 * a, b, generator=generator) for a, b in itertools.pairwise(sizes))
        height, width = image_shape
        for _ in channels:
            height, width = height - 2 + 2 * self.padding, width - 2 + 2 * self.padding
            if min(height, width) < 1:
                raise SettingError(
                    f"images of {image_shape} are too small for {len(channels)} convolutions without padding; use "
                    "padded=True or fewer channels=."
                )
            height, width = (height // 2, width // 2) if min(height, width) > 1 else (height, width)
        self.head = MLP(sizes[-1] * height * width, n_out, hidden, generator=generator, activation=activation)

    def forward(self, x: Tensor, drop: Activation = no_dropout) -> Tensor:
        """Shapes: ``(..., n, height * width) -> (..., n, out)``; `drop` acts on the hidden layers of the `MLP`."""
        if x.shape[-1] != math.prod(self.image_shape):
            raise ShapeError(f"images have {x.shape[-1]} pixels, the network takes {self.image_shape} of them.")
        if not self.head.stacked:
            return self.head(self._features(x, lambda parameter: parameter), drop)
        _check_members(x, len(self.convolutions[0].get_parameter("weight")))
        # a convolution per member: grouped ones are slow
        each = (self._features(images, itemgetter(member)) for member, images in enumerate(x.unbind(-3)))
        return self.head(torch.stack(list(each), -3), drop)

    def _features(self, x: Tensor, of_member: Callable[[Tensor], Tensor]) -> Tensor:
        """The last convolution's outputs, with each parameter's values for one member."""
        h = x.reshape(-1, 1, *self.image_shape)
        # the stride of the only channel says that channels come last in memory, which is faster on a GPU
        h = h.as_strided(h.shape, (h.stride(0), 1, h.stride(2), h.stride(3)))
        for layer in self.convolutions:
            weight, bias = of_member(layer.get_parameter("weight")), of_member(layer.get_parameter("bias"))
            h = F.conv2d(h, weight.reshape(len(weight), -1, 3, 3), bias, padding=self.padding)
            h = self.activation(_pooled(h))
        return h.reshape(*x.shape[:-1], -1)


def _pooled(h: Tensor) -> Tensor:
    """The maximum of every 2 x 2 pixels, if the image is that large."""
    return F.max_pool2d(h, 2) if min(h.shape[-2:]) > 1 else h


def stackable(module: nn.Module) -> bool:
    """Whether `module` supports a leading member axis, declared by ``stackable = True``."""
    return bool(getattr(module, "stackable", False))


def stack(modules: Sequence[Module]) -> Module:
    """One module with the parameters of all along a leading member axis; equal buffers are shared."""
    if not modules:
        raise SettingError("a stack needs at least one module.")
    first = modules[0]
    if not all(type(m) is type(first) and stackable(m) for m in modules):
        kinds = sorted({type(m).__name__ for m in modules})
        raise SettingError(
            f"only modules of one stackable class can be stacked, not {', '.join(kinds)}; train them one by one."
        )
    out = copy.deepcopy(first)
    for name, _ in list(first.named_parameters()):
        values = [m.get_parameter(name).detach() for m in modules]
        if any(value.shape != values[0].shape for value in values):
            raise ShapeError(f"parameter {name!r} differs in shape between members; stack members of one shape.")
        _assign(out, name, nn.Parameter(torch.stack(values), requires_grad=first.get_parameter(name).requires_grad))
    for name, _ in list(first.named_buffers()):
        values = [m.get_buffer(name) for m in modules]
        equal = all(torch.equal(value, values[0]) for value in values)
        _assign(out, name, nn.Buffer(values[0].clone() if equal else torch.stack(values)))
    return out


def unstack(module: nn.Module, template: Module, index: int) -> Module:
    """Member `index` of a stack as a separate module; `template` is any of the stacked modules."""
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


class LogNormalised(nn.Module):
    """Counts scaled to one library size, then log(1 + x); columns after the genes are unchanged."""

    stackable = True

    def __init__(self, n_genes: int, library: Tensor) -> None:
        super().__init__()
        self.n_genes, self.library = n_genes, nn.Buffer(library)

    def forward(self, x: Tensor) -> Tensor:
        """Shapes: ``(..., n, genes + others) -> (..., n, genes + others)``."""
        counts, others = x.tensor_split([self.n_genes], -1)
        size = counts.sum(-1, keepdim=True).clamp_min(1)
        normalised = torch.log1p(counts * (per_member(self.library, 0).unsqueeze(-1) / size))
        return torch.cat([normalised, others], -1)
