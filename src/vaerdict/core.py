r"""Protocols of models and proposals, result records, errors and log-space helpers.

All parts of the library exchange log-weights :math:`\log w = \log p(x, z) - \log q(z \mid x)` of shape
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

Observations = Any
"""A tensor ``(n, ...)``, or a tuple or mapping of tensors with the same leading axis (an image and its condition)."""


class VaerdictError(Exception):
    """Base of every error raised on purpose; the command line prints it on one line and exits with code 2."""


class ShapeError(VaerdictError, ValueError):
    """Tensors whose shapes do not match."""


class WeightError(VaerdictError, ValueError):
    """Log-weights that cannot be used: NaN, +inf, or none of them finite."""


class DataError(VaerdictError, ValueError):
    """Observations that cannot be used: empty, or not finite."""


class SettingError(VaerdictError, ValueError):
    """A setting, or a combination of settings, that has no meaning."""


class DivergenceError(VaerdictError, ArithmeticError):
    """A computation that produced non-finite numbers; the message says where."""


class Draws(NamedTuple):
    """Particles from a proposal with their log-density under it.

    Shapes: ``z (K, *batch, d)``, ``log_q (K, *batch)``.
    """

    z: Latent
    log_q: Tensor


class Estimate(NamedTuple):
    """A posterior expectation with its diagnostics.

    ``mcse`` is the Monte-Carlo standard error, ``ess`` the effective sample size of the weights behind it and
    ``khat`` the Pareto shape of their tail (NaN: not assessed). ``value`` and ``mcse`` are ``(*batch, *out)``,
    ``ess`` and ``khat`` are ``(*batch)``.
    """

    value: Tensor
    mcse: Tensor
    ess: Tensor
    khat: Tensor


@runtime_checkable
class PriorDistribution(Protocol):
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
    """A joint density of observation and latent. It is deterministic: no randomness inside.

    A model may also offer ``prepare(x)``, which computes whatever depends on x alone. It is called once per batch, and
    its result is passed to ``log_joint`` in place of x for all particles, leapfrog steps and proposals.
    """

    @property
    def prior(self) -> Any:
        """The prior of the latent; an attribute is enough.

        A `PriorDistribution`, a function of the observations that returns one, or a `vaerdict.JointPrior`.
        """
        ...

    def log_joint(self, x: Any, z: Latent, /) -> Tensor:
        """Log p(x, z). Shapes: ``(*batch, p), (K, *batch, d) -> (K, *batch)``."""
        ...


@runtime_checkable
class Proposal(Protocol):
    """A distribution of latents given an observation that can be sampled and evaluated."""

    def draw(self, x: Observations, k: int, *, generator: Any) -> Draws:
        """Draw k particles for each observation; ``generator`` is a source of noise (see `vaerdict.noise`)."""
        ...

    def log_prob(self, z: Latent, x: Observations, /) -> Tensor:
        """Log q(z | x). Shapes: ``(K, *batch, d), (*batch, p) -> (K, *batch)``."""
        ...


def prepared(model: Model, x: Tensor) -> Any:
    """The first argument of ``model.log_joint`` for x: ``model.prepare(x)`` where the model offers it, else x."""
    prepare = getattr(model, "prepare", None)
    return x if prepare is None else prepare(x)


def restricted(q: Proposal, index: Tensor) -> Proposal:
    """The proposal for the observations at `index` of the last batch axis.

    A proposal made for fixed observations offers ``select(index)``; an amortised one is returned unchanged.
    """
    select = getattr(q, "select", None)
    return q if select is None else select(index)


def log_mean_exp(log_w: Tensor, dim: int = 0) -> Tensor:
    """Logarithm of the mean of exp(log_w) along `dim`, computed in log space."""
    return torch.logsumexp(log_w, dim) - math.log(log_w.shape[dim])


def log_normalise(log_w: Tensor, dim: int = 0) -> Tensor:
    """Log of the weights that sum to one along `dim`."""
    return torch.log_softmax(log_w, dim)


def check_log_weights(log_w: Tensor) -> Tensor:
    """Return `log_w` if it can be used, else raise with the number of unusable weights.

    Minus infinity is a weight of zero. It is allowed unless all weights of an observation are zero. No weight is
    dropped, clamped or replaced.

    Shapes: ``(K, *batch) -> (K, *batch)``.
    """
    if log_w.dim() == 0 or log_w.shape[0] == 0:
        raise ShapeError(f"log-weights of shape {tuple(log_w.shape)} hold no particle; draw at least one (k >= 1).")
    if not log_w.is_floating_point():
        raise WeightError(f"log-weights are {log_w.dtype}; they must be floating point, float32 or wider.")
    if bool(log_w.amax(0).isfinite().all()):  # a maximum propagates NaN and +inf: one pass in the common case
        return log_w
    n_nan, n_inf = int(torch.isnan(log_w).sum()), int(torch.isposinf(log_w).sum())
    where = _positions(~log_w.amax(0).isfinite())
    if n_nan or n_inf:
        raise WeightError(
            f"{n_nan} of {log_w.numel()} log-weights are NaN and {n_inf} are +inf{where}; "
            "look for an overflow in log_joint or a proposal scale that went to zero."
        )
    n_zero = int(torch.isneginf(log_w).all(0).sum())
    raise WeightError(
        f"{n_zero} observations have no particle with positive weight{where}; "
        "add a defensive share of the prior to the proposal, or draw more."
    )


def _positions(mask: Tensor, n_shown: int = 5) -> str:
    """Positions of the first true entries of a mask, in brackets; empty for a mask without axes."""
    if mask.dim() == 0:
        return ""
    index = mask.nonzero()
    shown = [str(i[0] if len(i) == 1 else tuple(i)) for i in index[:n_shown].tolist()]
    return f" (at {', '.join(shown)}{', ...' if len(index) > n_shown else ''})"


def check_log_joint(log_p: Tensor, log_q: Tensor, z: Latent) -> Tensor:
    """Return log p(x, z) if it and log q(z | x) hold one number per particle and observation, else raise.

    Any other shape would broadcast into meaningless weights.

    Shapes: ``log_p, log_q (K, *batch)``, ``z (K, *batch, d)``.
    """
    expected = z.shape[:-1] if isinstance(z, Tensor) else log_q.shape
    if log_q.shape != expected:
        raise ShapeError(
            f"{_latents(z)} need log q(z | x) of shape {tuple(expected)}, not {tuple(log_q.shape)}. A proposal made "
            "for fixed observations must offer select(index), which keeps those at `index` of the last batch axis."
        )
    if not isinstance(log_p, Tensor) or log_p.shape != expected:
        shown = f"shape {tuple(log_p.shape)}" if isinstance(log_p, Tensor) else f"a {type(log_p).__name__}"
        raise ShapeError(
            f"log_joint returned {shown} for {_latents(z)}; it must return one number per particle and observation, "
            f"shape {tuple(expected)}: sum over the features and latents only (dim=-1)."
        )
    return log_p


def _latents(z: Latent) -> str:
    return f"latents of shape {tuple(z.shape)}" if isinstance(z, Tensor) else f"latents {type(z).__name__}"


def check_count(k: int, *, name: str = "k") -> int:
    """Return `k` as an int if it is a positive whole number (of Python or NumPy), else raise."""
    try:
        count = 0 if isinstance(k, bool) else operator.index(k)
    except TypeError:
        count = 0
    if count < 1:
        raise SettingError(f"{name}={k!r} must be a whole number of at least 1.")
    return count


# ------------------------------------------------------------------------------------------------ observations
def map_observations(fn: Callable[[Tensor], Any], x: Observations) -> Any:
    """Apply `fn` to the tensor x, or to each tensor of the tuple or mapping x."""
    if isinstance(x, Tensor):
        return fn(x)
    if isinstance(x, Mapping):
        return {name: map_observations(fn, part) for name, part in x.items()}
    parts = [map_observations(fn, part) for part in x]
    return type(x)(*parts) if hasattr(x, "_fields") else tuple(parts)


def parts_of(x: Observations) -> list[Tensor]:
    """The tensors of observations, in order."""
    parts: list[Tensor] = []
    map_observations(parts.append, x)
    return parts


def n_observations(x: Observations) -> int:
    """The length of the leading axis."""
    return parts_of(x)[0].shape[0]


def rows_of(x: Observations, index: Tensor | slice) -> Observations:
    """The observations at `index`."""
    return map_observations(lambda t: t[index.to(t.device) if isinstance(index, Tensor) else index], x)


def device_of(x: Observations) -> torch.device:
    """Where the observations are."""
    return parts_of(x)[0].device


def check_observations(x: Observations, *, name: str = "x") -> Observations:
    """Return observations if they can be used, else raise `DataError` or `ShapeError`."""
    if isinstance(x, Tensor):
        return _check_part(x, name)
    if isinstance(x, Mapping):
        named = {f"{name}[{key!r}]": part for key, part in x.items()}
    elif isinstance(x, tuple):
        named = {f"{name}[{i}]": part for i, part in enumerate(x)}
    else:
        raise DataError(f"{name} is a {type(x).__name__}; pass a tensor (torch.as_tensor(...)).")
    if not named:
        raise DataError(f"{name} is an empty {type(x).__name__}; pass at least one tensor of observations.")
    for key, part in named.items():
        if not isinstance(part, Tensor):
            raise DataError(f"{key} is a {type(part).__name__}; pass a tensor (torch.as_tensor(...)).")
        _check_part(part, key, least_dims=1)
    lengths = {key: part.shape[0] for key, part in named.items()}
    if len(set(lengths.values())) > 1:
        shown = ", ".join(f"{key} {length}" for key, length in lengths.items())
        raise ShapeError(f"the parts of {name} differ in their number of observations ({shown}); give each row of all.")
    return x


def _check_part(x: Tensor, name: str, least_dims: int = 2) -> Tensor:
    if x.dim() < least_dims:
        raise ShapeError(f"{name} has shape {tuple(x.shape)}; expected (observations, features).")
    if x.numel() == 0:
        raise DataError(f"{name} of shape {tuple(x.shape)} is empty; at least one observation and feature are needed.")
    if x.is_floating_point() and not torch.isfinite(x).all():
        n_bad = int((~torch.isfinite(x)).sum())
        raise DataError(f"{name} holds {n_bad} non-finite values of {x.numel()}; remove or impute them first.")
    return x


def floating(x: Tensor) -> Tensor:
    """Return `x`, converted to the default floating-point type where it holds integers. Shapes: as x."""
    return x if x.is_floating_point() else x.to(torch.get_default_dtype())


def check_dtype(x: Tensor, module: object, *, name: str = "x") -> Tensor:
    """Return `x` if it has the floating-point type of a module's parameters, else raise with the conversion to use.

    Integers pass, and so does everything else where `module` is not a module or has no parameters.
    """
    if not isinstance(module, torch.nn.Module) or not isinstance(x, Tensor) or not x.is_floating_point():
        return x  # the parts of a structure may differ in type
    dtypes = {t.dtype: None for t in module.parameters() if t.is_floating_point()}
    if not dtypes or x.dtype in dtypes:
        return x
    dtype = next(iter(dtypes))
    cast = {torch.float32: f"{name}.float()", torch.float64: f"{name}.double()"}.get(dtype, f"{name}.to({dtype})")
    raise DataError(f"{name} is {x.dtype}, the parameters of {type(module).__name__} are {dtype}; pass {cast}.")


@contextmanager
def evaluating(*owners: object) -> Iterator[None]:
    """Put modules in evaluation mode (no dropout, fixed batch statistics) and restore their modes at the end.

    Each owner is a module, a mapping of modules, or an object with modules or mappings among its attributes.
    Threads that share a module in training mode must not use this context at the same time.
    """
    training = [m for owner in owners for m in _modules(owner) if m.training]
    for module in training:
        module.training = False
    try:
        yield
    finally:
        for module in training:
            module.training = True


def _modules(owner: object) -> list[torch.nn.Module]:
    if isinstance(owner, torch.nn.Module):
        return list(owner.modules())
    if isinstance(owner, Mapping):
        return [m for value in owner.values() for m in _modules(value)]
    attributes = getattr(owner, "__dict__", {}).values()
    return [m for value in attributes if isinstance(value, (torch.nn.Module, Mapping)) for m in _modules(value)]


def map_latent(fn: Callable[[Tensor], Tensor], z: Latent) -> Latent:
    """Apply `fn` to the tensor `z`, or to each tensor of the named tuple `z`."""
    if isinstance(z, Tensor):
        return fn(z)
    return type(z)(*(fn(tensor) for tensor in z))


def concat_latents(latents: list[Latent], dim: int = 0) -> Latent:
    """Concatenate latents of one type along `dim`, by default the particle axis."""
    first = latents[0]
    if isinstance(first, Tensor):
        return torch.cat(latents, dim)
    return type(first)(*(torch.cat(tensors, dim) for tensors in zip(*latents, strict=True)))


def expand_trailing(t: Tensor, like: Tensor) -> Tensor:
    """Append singleton axes to `t` until it has as many axes as `like`, so that it broadcasts over them."""
    return t.reshape(t.shape + (1,) * (like.dim() - t.dim()))


def per_member(parameter: Tensor, event_dims: int) -> Tensor:
    """Make a possibly stacked parameter broadcast over observations.

    A parameter is ``(*event)``, or ``(members, *event)`` in a stack of members. The latter becomes
    ``(members, 1, *event)``, which broadcasts with a batch ``(members, n)``.
    """
    return parameter.unsqueeze(-event_dims - 1) if parameter.dim() > event_dims else parameter


def saved_bytes(work: Callable[[], object]) -> int:
    """Bytes that autograd saves while `work` runs; each storage is counted once."""
    saved: dict[int, int] = {}

    def record(t: Tensor) -> Tensor:
        saved[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t.detach()  # saved with its graph, an output would keep itself alive

    with torch.autograd.graph.saved_tensors_hooks(record, lambda t: t):
        work()
    return sum(saved.values())


class Progress(Protocol):
    """A callback for the progress of long computations; the command line draws a bar with it."""

    def __call__(self, done: int, total: int, what: str, /) -> None:
        """Report that `done` of `total` steps of `what` are done."""
        ...


def silent(done: int, total: int, what: str, /) -> None:
    """Ignore the report: the default callback."""


def check_model(model: Any, x: Any = None) -> Any:
    """Return `model` if it has ``log_joint`` and ``prior``, else raise with what is missing.

    A model that offers ``check_data(x)`` is first asked whether it can be used with the observations.
    """
    if isinstance(model, type):
        raise SettingError(f"the model is the class {model.__name__}; pass an object of it, {model.__name__}(...).")
    if x is not None and hasattr(model, "check_data"):
        model.check_data(x)
    missing = [name for name in ("log_joint", "prior") if not hasattr(model, name)]
    if missing:
        raise SettingError(
            f"the model {type(model).__name__} has no {' and no '.join(missing)}; it needs log_joint(x, z), which "
            "returns (particles, observations), and prior, a distribution. "
            "vaerdict.from_vae(encoder, decoder, likelihood) makes a model of a trained VAE."
        )
    return model
