r"""The two protocols, the records every answer travels in, errors, and log-space helpers.

The one currency of the library is the log-weight :math:`\log w = \log p(x, z) - \log q(z \mid x)` of shape
``(K, *batch)``, particles first. Latents are ``(K, *batch, d)``, or a named tuple of such tensors.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

Latent = Any
"""A tensor ``(K, *batch, d)`` or a named tuple of such tensors."""


class VaerdictError(Exception):
    """Base of every error raised on purpose; the command line prints it in one line and exits 2."""


class ShapeError(VaerdictError, ValueError):
    """Tensors that do not fit together."""


class WeightError(VaerdictError, ValueError):
    """Log-weights that cannot be used: NaN, +inf, or none of them finite."""


class DataError(VaerdictError, ValueError):
    """Observations that cannot be used: empty, or not finite."""


class SettingError(VaerdictError, ValueError):
    """A setting, or a combination of settings, that has no meaning."""


class DivergenceError(VaerdictError, ArithmeticError):
    """A computation that left the finite numbers; says where."""


class Draws(NamedTuple):
    """Particles from a proposal with the log-density the proposal gave them.

    Shapes: ``z (K, *batch, d)``, ``log_q (K, *batch)``.
    """

    z: Latent
    log_q: Tensor


class Estimate(NamedTuple):
    """A posterior expectation with its evidence.

    ``mcse`` is the Monte-Carlo standard error, ``ess`` the effective sample size of the weights behind it and
    ``khat`` the Pareto shape of their tail (NaN: not assessed). ``value`` and ``mcse`` are ``(*batch, *out)``,
    ``ess`` and ``khat`` are ``(*batch)``.
    """

    value: Tensor
    mcse: Tensor
    ess: Tensor
    khat: Tensor


@runtime_checkable
class Prior(Protocol):
    """What a model's ``prior`` must offer; every ``torch.distributions.Distribution`` does."""

    @property
    def event_shape(self) -> torch.Size:
        """The shape of one latent."""
        ...

    def log_prob(self, value: Latent, /) -> Tensor:
        """Log p(z)."""
        ...

    def sample(self, sample_shape: torch.Size = ..., /) -> Latent:
        """Draw latents of shape ``(*sample_shape, *event_shape)``."""
        ...


@runtime_checkable
class Model(Protocol):
    """A joint density of observation and latent. Deterministic: no randomness inside.

    A model may also offer ``prepare(x)``: whatever depends on x alone, computed once per batch and passed to
    ``log_joint`` in place of x, so that particles, leapfrog steps and proposals do not pay for it again.
    """

    @property
    def prior(self) -> Prior:
        """The distribution of the latent before x is seen; a plain attribute will do."""
        ...

    def log_joint(self, x: Any, z: Latent, /) -> Tensor:
        """Log p(x, z). Shapes: ``(*batch, p), (K, *batch, d) -> (K, *batch)``."""
        ...


@runtime_checkable
class Proposal(Protocol):
    """A distribution of latents given an observation that can be sampled and evaluated."""

    def draw(self, x: Tensor, k: int, *, generator: Any) -> Draws:
        """Draw k particles for each observation; ``generator`` is a source of noise (see `vaerdict.noise`)."""
        ...

    def log_prob(self, z: Latent, x: Tensor, /) -> Tensor:
        """Log q(z | x). Shapes: ``(K, *batch, d), (*batch, p) -> (K, *batch)``."""
        ...


def prepared(model: Model, x: Tensor) -> Any:
    """What `model.log_joint` should be given for x: ``model.prepare(x)`` where the model offers it, else x."""
    prepare = getattr(model, "prepare", None)
    return x if prepare is None else prepare(x)


def restricted(q: Proposal, index: Tensor) -> Proposal:
    """The proposal for the observations at `index` of the last batch axis.

    One that was made for given observations offers ``select(index)``; an amortised one serves all as it is.
    """
    select = getattr(q, "select", None)
    return q if select is None else select(index)


def log_mean_exp(log_w: Tensor, dim: int = 0) -> Tensor:
    """Logarithm of the mean of exp(log_w) along `dim`, without leaving log space."""
    return torch.logsumexp(log_w, dim) - math.log(log_w.shape[dim])


def log_normalise(log_w: Tensor, dim: int = 0) -> Tensor:
    """Log of the weights that sum to one along `dim`."""
    return torch.log_softmax(log_w, dim)


def check_log_weights(log_w: Tensor) -> Tensor:
    """Return `log_w` if it can be used, else raise with a count of what cannot.

    Minus infinity is a weight of zero and is allowed, unless an observation has no other weight. Nothing is
    dropped, clamped or replaced.

    Shapes: ``(K, *batch) -> (K, *batch)``.
    """
    if log_w.dim() == 0 or log_w.shape[0] == 0:
        raise ShapeError(f"log-weights of shape {tuple(log_w.shape)} hold no particle; draw at least one (k >= 1).")
    if not log_w.is_floating_point():
        raise WeightError(f"log-weights are {log_w.dtype}; they must be floating point, float32 or wider.")
    if bool(log_w.amax(0).isfinite().all()):  # a maximum keeps NaN and +inf, so the common case takes one pass
        return log_w
    n_nan, n_inf = int(torch.isnan(log_w).sum()), int(torch.isposinf(log_w).sum())
    where = _places(~log_w.amax(0).isfinite())
    if n_nan or n_inf:
        raise WeightError(
            f"{n_nan} of {log_w.numel()} log-weights are NaN and {n_inf} are +inf{where}; "
            "look for an overflow in log_joint or a proposal scale that went to zero."
        )
    n_dead = int(torch.isneginf(log_w).all(0).sum())
    raise WeightError(
        f"{n_dead} observations have no particle with positive weight{where}; "
        "add a defensive share of the prior to the proposal, or draw more."
    )


def _places(bad: Tensor, most: int = 5) -> str:
    """Where the first observations that a mask names lie, in brackets; nothing where there is but one."""
    if bad.dim() == 0:
        return ""
    index = bad.nonzero()
    shown = [str(i[0] if len(i) == 1 else tuple(i)) for i in index[:most].tolist()]
    return f" (at {', '.join(shown)}{', ...' if len(index) > most else ''})"


def check_log_joint(log_p: Tensor, log_q: Tensor, z: Latent) -> Tensor:
    """Return log p(x, z) if it gives one number a particle and observation, as log q does, else raise.

    Any other shape would broadcast, and give weights that mean nothing.

    Shapes: ``log_p, log_q (K, *batch)``, ``z (K, *batch, d)``.
    """
    wanted = z.shape[:-1] if isinstance(z, Tensor) else log_q.shape
    if log_q.shape != wanted:
        raise ShapeError(f"{_latents(z)} should get log q(z | x) of shape {tuple(wanted)}, not {tuple(log_q.shape)}.")
    if not isinstance(log_p, Tensor) or log_p.shape != wanted:
        shown = f"shape {tuple(log_p.shape)}" if isinstance(log_p, Tensor) else f"a {type(log_p).__name__}"
        raise ShapeError(
            f"log_joint returned {shown} for {_latents(z)}; it must return one number a particle and observation, "
            f"shape {tuple(wanted)}: sum over the features and latents alone (dim=-1)."
        )
    return log_p


def _latents(z: Latent) -> str:
    return f"latents of shape {tuple(z.shape)}" if isinstance(z, Tensor) else f"latents {type(z).__name__}"


def check_count(k: int, *, name: str = "k") -> int:
    """Return `k` as an int if it is a positive whole number, numpy's too, else raise."""
    try:
        count = 0 if isinstance(k, bool) else operator.index(k)
    except TypeError:
        count = 0
    if count < 1:
        raise SettingError(f"{name}={k!r} must be a whole number of at least 1.")
    return count


def check_observations(x: Tensor, *, name: str = "x") -> Tensor:
    """Return observations `x` of shape ``(n, p)`` if they can be used, else raise `DataError` naming the trouble."""
    if not isinstance(x, Tensor):
        raise DataError(f"{name} is a {type(x).__name__}; pass a tensor (torch.as_tensor(...)).")
    if x.dim() < 2:
        raise ShapeError(f"{name} has shape {tuple(x.shape)}; expected (observations, features).")
    if x.numel() == 0:
        raise DataError(f"{name} of shape {tuple(x.shape)} is empty; at least one observation and feature are needed.")
    if x.is_floating_point() and not torch.isfinite(x).all():
        bad = int((~torch.isfinite(x)).sum())
        raise DataError(f"{name} holds {bad} non-finite values of {x.numel()}; remove or impute them first.")
    return x


def floating(x: Tensor) -> Tensor:
    """`x` itself, or in the default floating-point type where it holds integers, as counts may. Shapes: as x."""
    return x if x.is_floating_point() else x.to(torch.get_default_dtype())


def check_dtype(x: Tensor, module: object, *, name: str = "x") -> Tensor:
    """Return `x` if it has the floating-point type of a module's parameters, else raise with the conversion.

    Integers, and what is no module or has no parameter, pass: there is nothing to compare.
    """
    if not isinstance(module, torch.nn.Module) or not isinstance(x, Tensor) or not x.is_floating_point():
        return x
    kinds = {t.dtype: None for t in module.parameters() if t.is_floating_point()}
    if not kinds or x.dtype in kinds:
        return x
    wanted = next(iter(kinds))
    how = {torch.float32: f"{name}.float()", torch.float64: f"{name}.double()"}.get(wanted, f"{name}.to({wanted})")
    raise DataError(f"{name} is {x.dtype}, the parameters of {type(module).__name__} are {wanted}; pass {how}.")


@contextmanager
def evaluating(*parts: object) -> Iterator[None]:
    """Modules in evaluation mode (no dropout, fixed batch statistics), and back in the modes they were in.

    Each part is a module, a mapping, or an object that holds some in its attributes; what holds none is left alone.
    Threads that share a module in training mode must not do this at the same time.
    """
    training = [m for part in parts for m in _modules(part) if m.training]
    for module in training:
        module.training = False
    try:
        yield
    finally:
        for module in training:
            module.training = True


def _modules(part: object) -> list[torch.nn.Module]:
    if isinstance(part, torch.nn.Module):
        return list(part.modules())
    if isinstance(part, Mapping):
        return [m for value in part.values() for m in _modules(value)]
    held = getattr(part, "__dict__", {}).values()
    return [m for value in held if isinstance(value, (torch.nn.Module, Mapping)) for m in _modules(value)]


def map_latent(fn: Callable[[Tensor], Tensor], z: Latent) -> Latent:
    """Apply `fn` to the tensor, or to each tensor of the named tuple, that `z` is."""
    if isinstance(z, Tensor):
        return fn(z)
    return type(z)(*(fn(part) for part in z))


def concat_latents(parts: list[Latent], dim: int = 0) -> Latent:
    """Concatenate latents of one kind along `dim`, particles by default."""
    first = parts[0]
    if isinstance(first, Tensor):
        return torch.cat(parts, dim)
    return type(first)(*(torch.cat(column, dim) for column in zip(*parts, strict=True)))


def expand_trailing(t: Tensor, like: Tensor) -> Tensor:
    """Append singleton axes to `t` until it has as many axes as `like`, so that it broadcasts over the extra ones."""
    return t.reshape(t.shape + (1,) * (like.dim() - t.dim()))


def per_member(parameter: Tensor, event_dims: int) -> Tensor:
    """Make a possibly stacked parameter broadcast over observations.

    A parameter is ``(*event)``, or ``(members, *event)`` in a stack of members. The second becomes
    ``(members, 1, *event)``, which lines up with a batch ``(members, n)``.
    """
    return parameter.unsqueeze(-event_dims - 1) if parameter.dim() > event_dims else parameter


def saved_bytes(work: Callable[[], object]) -> int:
    """Bytes that autograd keeps for what `work` computes, each piece of memory counted once."""
    saved: dict[int, int] = {}

    def note(t: Tensor) -> Tensor:
        saved[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t.detach()  # kept with its graph, a saved output would keep itself alive

    with torch.autograd.graph.saved_tensors_hooks(note, lambda t: t):
        work()
    return sum(saved.values())


class Progress(Protocol):
    """A listener to long work; the command line draws a bar from it, the library passes it on."""

    def __call__(self, done: int, total: int, what: str, /) -> None:
        """Hear that `done` of `total` steps of `what` are done."""
        ...


def silent(done: int, total: int, what: str, /) -> None:
    """The listener that does not listen: the default everywhere."""
