"""Runs of Pyro programs with given values at their latent sites, for many particles at once."""

from __future__ import annotations

import math
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from typing import Any, NamedTuple

import torch
import torch.distributions as td
from torch import Tensor
from torch.distributions import constraints

from vaerdict.core import Observations, evaluating, map_observations, parts_of
from vaerdict.distributions import in_support
from vaerdict.functions import used_modules
from vaerdict.optional import require

_LOCK = threading.RLock()  # handlers and parameters of Pyro belong to the process
_CHUNK = 2**22  # log-densities of sites that are held at a time


class Site(NamedTuple):
    """A latent site: the `part` of z that holds its value, which has the shape `shape` for one observation.

    In a program for several observations their axis is at `axis` of the value, counted from the right. `support` is
    that of each coordinate.
    """

    name: str
    shape: torch.Size
    axis: int | None
    part: slice
    support: Any

    @property
    def size(self) -> int:
        """The number of coordinates."""
        return math.prod(self.shape)

    @property
    def bounds(self) -> tuple[Tensor, Tensor]:
        """The ends of the support. Shapes: ``(size,)`` each."""
        ends = (getattr(self.support, "lower_bound", -math.inf), getattr(self.support, "upper_bound", math.inf))
        low, high = (torch.as_tensor(end, dtype=torch.float64).cpu().expand(self.size) for end in ends)
        return low, high


Message = Mapping[str, Any]
"""What Pyro knows about a sample site, such as its name, fn, value, mask, scale and cond_indep_stack."""


class _NoTransformError(Exception):
    """A site is no known transform of normal numbers."""


class _LastSiteError(Exception):
    """The program was run as far as needed."""


class Program(ABC):
    """A Pyro program with the parameters it had when it was wrapped. A subclass says how particles are run."""

    x: Any
    sites: tuple[Site, ...] = ()
    plate: str | None = None
    last = ""
    like = torch.empty(0)

    def __init__(self, fn: Callable[..., Any], state: dict[str, Any]) -> None:
        self.fn, self.state = fn, state

    @property
    def d(self) -> int:
        """The number of latents."""
        return self.sites[-1].part.stop

    @property
    def unbounded(self) -> bool:
        """Whether the support is all of R^d."""
        return all(s.support is constraints.real for s in self.sites)

    @property
    def support(self) -> Any:
        """The support of z."""
        if len(self.sites) == 1 or self.unbounded:
            return constraints.independent(self.sites[0].support, 1)
        return constraints.cat([s.support for s in self.sites], -1, [s.size for s in self.sites])

    @abstractmethod
    def rows(self, n: int) -> Any:
        """The first observations that the program was wrapped with, repeated where there are fewer than n."""

    @abstractmethod
    def batch(self, x: Any) -> torch.Size:
        """The batch axes of observations."""

    @abstractmethod
    def over_particles(self, x: Any, inputs: Tensor, body: Callable[..., Tensor], *, once: bool) -> Tensor:
        """The result of ``body(arguments, inputs)`` for all particles and observations.

        With `once`, the body gets the program's arguments as they are, and all particles as leading axes of the inputs.

        Shapes: ``inputs (K, *batch, d) -> (K, *batch, *out)``.
        """

    # ------------------------------------------------------------------------------------------ densities and draws
    def log_prob(self, x: Any, z: Tensor, *, observed: bool = False) -> Tensor:
        """Log-density of the latents, or with `observed` of all sites; minus infinity outside the support."""
        once = len(self.sites) == 1 and not observed  # the distribution does not depend on the particle

        def density(arguments: tuple[Any, ...], inputs: Tensor) -> Tensor:
            values, n_lead = self.split(inputs), inputs.dim() - (1 if self.plate is None else 2)
            if once:
                messages = [{**self.first(arguments), "value": values[self.last]}]
            else:
                messages = self.run(arguments, lambda m: values[m["name"]], None if observed else self.last)
            return sum(self.per_row(m, n_lead) for m in messages if m["name"] in values or observed)  # type: ignore[return-value]

        with self.session():
            log_p = self.over_particles(x, z, density, once=once)
        return log_p if self.unbounded else torch.where(in_support(self.support, z), log_p, -torch.inf)

    def transform(self, x: Any, noise: Tensor) -> Tensor | None:
        """Draws of the latents from normal numbers; None where no transform is known. Shapes: ``(K, *batch, d)``."""

        def moved(arguments: tuple[Any, ...], inputs: Tensor) -> Tensor:
            eps = self.split(inputs)
            if len(self.sites) == 1:
                return self.join({self.last: _from_normal(self.first(arguments)["fn"], eps[self.last])}, inputs)
            messages = self.run(arguments, lambda m: _from_normal(m["fn"], eps[m["name"]]), self.last)
            return self.join({m["name"]: m["value"] for m in messages}, inputs)

        with self.session():
            try:
                return self.over_particles(x, noise, moved, once=len(self.sites) == 1)
            except _NoTransformError:
                return None

    def sample(self, x: Any, k: int) -> Tensor:
        """Draws of the latents by Pyro, from torch's global random state. Shapes: ``-> (K, *batch, d)``."""

        def drawn(arguments: tuple[Any, ...], inputs: Tensor) -> Tensor:
            if len(self.sites) == 1:
                return self.join({self.last: self.first(arguments)["fn"].sample(inputs.shape[:1])}, inputs)
            return self.join({m["name"]: m["value"] for m in self.run(arguments, None, self.last)}, inputs)

        with self.session():
            return self.over_particles(x, self.empty(x, k), drawn, once=len(self.sites) == 1)

    def empty(self, x: Any, k: int) -> Tensor:
        """Latents without values. Shapes: ``-> (K, *batch, d)``."""
        return self.like.new_empty(k, *self.batch(x), self.d)

    # --------------------------------------------------------------------------------------------------- one run
    @contextmanager
    def session(self, *, validate: bool = False) -> Iterator[None]:
        """Use the parameters of the program; unless validated, densities are NaN where distributions would raise."""
        pyro = require("pyro", "pyro")
        scope = pyro.get_param_store().scope(self.state)
        with _LOCK, scope, pyro.validation_enabled(validate), evaluating(*used_modules(self.fn)):
            yield

    def run(
        self, arguments: tuple[Any, ...], choose: Callable[[Message], Tensor] | None, last: str | None = None
    ) -> list[Message]:
        """Run the program, with the values of latents from `choose`, up to the site `last`; return its sample sites."""
        handler = _handler_type()(choose, last)
        args, kwargs = arguments
        try:
            with handler:
                self.fn(*args, **kwargs)
        except _LastSiteError:
            pass
        return handler.messages

    def first(self, arguments: tuple[Any, ...]) -> Message:
        """The only latent site; its value is arbitrary."""
        return self.run(arguments, lambda m: self.like.new_zeros(m["fn"].shape()), self.last)[-1]

    def split(self, z: Tensor) -> dict[str, Tensor]:
        """The values of the sites, in the layout of the program. Shapes: ``z (*lead, n, d)``, or ``(*lead, d)``."""
        values = {}
        for s in self.sites:
            value = z[..., s.part].reshape((*z.shape[:-1], *s.shape))
            values[s.name] = value if s.axis is None else value.movedim(z.dim() - 2, s.axis)
        return values

    def join(self, values: Mapping[str, Tensor], like: Tensor) -> Tensor:
        """The inverse of `split`; `like` has the shape of the result."""
        parts = []
        for s in self.sites:
            value = values[s.name] if s.axis is None else values[s.name].movedim(s.axis, like.dim() - 2)
            parts.append(value.reshape(*like.shape[:-1], s.size))
        return torch.cat(parts, -1)

    def per_row(self, message: Message, n_lead: int) -> Tensor:
        """Log-density of a site, summed over all but leading axes and observations. Shapes: ``-> (*lead, n)``."""
        log_p, mask = message["fn"].log_prob(message["value"]), message["mask"]
        if mask is not None:
            log_p = torch.where(torch.as_tensor(mask, device=log_p.device), log_p, 0)
        if self.plate is not None:
            log_p = log_p.movedim(frame_of(message, self.plate).dim, n_lead)
            n_lead += 1
        return log_p.reshape(*log_p.shape[:n_lead], -1).sum(-1)


class RowProgram(Program):
    """A program with a plate over observations. Particles are more rows of its arguments."""

    def __init__(self, fn: Callable[..., Any], state: dict[str, Any], x: Any) -> None:
        super().__init__(fn, state)
        self.x = x

    def rows(self, n: int) -> Any:
        """The first n observations."""
        return map_observations(lambda t: t[torch.arange(n, device=t.device) % len(t)], self.x)

    def batch(self, x: Any) -> torch.Size:
        """The leading axes of x that one observation does not have."""
        first, one = parts_of(x)[0], parts_of(self.x)[0]
        return first.shape[: first.dim() - one.dim() + 1]

    def over_particles(self, x: Any, inputs: Tensor, body: Callable[..., Tensor], *, once: bool) -> Tensor:
        """Run all particles at once, each a row of its own."""
        k, *batch, d = inputs.shape
        n = math.prod(batch)
        x = map_observations(lambda t: t.reshape(n, *t.shape[len(batch) :]), x)
        if once:
            out = body(arguments_of(x), inputs.reshape(k, n, d)).flatten(0, 1)
        else:
            repeated = map_observations(lambda t: t.expand(k, *t.shape).reshape(k * n, *t.shape[1:]), x)
            out = body(arguments_of(repeated), inputs.reshape(k * n, d))
        return out.reshape(k, *batch, *out.shape[1:])


class DataProgram(Program):
    """A program that is run on all data. It is mapped over particles by `torch.vmap`."""

    def __init__(self, fn: Callable[..., Any], state: dict[str, Any], args: tuple[Any, ...]) -> None:
        super().__init__(fn, state)
        self.args, self.n_values = args, 1

    def rows(self, n: int) -> Any:
        """All data, n times."""
        return self.x.expand(n, 1)

    def batch(self, x: Any) -> torch.Size:
        """All axes but the last, which means nothing."""
        return x.shape[:-1]

    def over_particles(self, x: Any, inputs: Tensor, body: Callable[..., Tensor], *, once: bool) -> Tensor:
        """Map the program over particles."""
        arguments, flat = (self.args, {}), inputs.reshape(-1, inputs.shape[-1])
        if once:
            out = body(arguments, flat)
        else:
            chunk = max(1, _CHUNK // self.n_values)
            out = torch.vmap(lambda row: body(arguments, row), chunk_size=chunk)(flat)
        return out.reshape(*inputs.shape[:-1], *out.shape[1:])

    def sample(self, x: Any, k: int) -> Tensor:
        """Draws by Pyro, one run for each unless there is a single site: `torch.vmap` does not draw."""
        if len(self.sites) == 1:
            return super().sample(x, k)
        z = self.empty(x, k)
        with self.session():
            for row in z.reshape(-1, self.d):
                values = {m["name"]: m["value"] for m in self.run((self.args, {}), None, self.last)}
                row.copy_(self.join(values, row))
        return z


@cache
def _handler_type() -> Any:
    """The effect handler that gives latent sites their values and records all sample sites."""
    messenger = require("pyro.poutine.messenger", "pyro")

    class Handler(messenger.Messenger):
        def __init__(self, choose: Callable[[Message], Tensor] | None, last: str | None) -> None:
            super().__init__()
            self.choose, self.last = choose, last
            self.messages: list[Message] = []

        def _pyro_sample(self, message: Any) -> None:
            if self.choose is not None and is_latent(message):
                message["value"] = self.choose(message)

        def _pyro_post_sample(self, message: Any) -> None:
            if not _is_subsample(message) and not message["infer"].get("_deterministic"):
                self.messages.append(message)
            if message["name"] == self.last:
                raise _LastSiteError

    return Handler


def _is_subsample(message: Message) -> bool:
    return type(message["fn"]).__name__ == "_Subsample"  # the indices of a plate are a sample site too


def is_latent(message: Message) -> bool:
    """Whether a sample site is a latent one."""
    return not message["is_observed"] and not _is_subsample(message)


def frame_of(message: Message, plate: str) -> Any:
    """The plate over observations at a site; None where the site is outside of it."""
    return next((f for f in message["cond_indep_stack"] if f.name == plate), None)


def _from_normal(fn: Any, eps: Tensor) -> Tensor:
    """Draws of a distribution from standard normals of the same shape; raises where no transform is known."""
    if isinstance(fn, td.Normal):
        return fn.loc + fn.scale * eps
    if isinstance(fn, (td.MultivariateNormal, td.LowRankMultivariateNormal)):
        return fn.loc + (fn.scale_tril @ eps.unsqueeze(-1)).squeeze(-1)
    if isinstance(fn, td.TransformedDistribution):
        value: Any = _from_normal(fn.base_dist, eps)
        for transform in fn.transforms:
            value = transform(value)
        return value
    if type(fn).__name__ in ("Independent", "MaskedDistribution"):
        return _from_normal(fn.base_dist, eps)
    try:
        value = fn.icdf(torch.special.ndtr(eps.double()))
    except NotImplementedError as error:
        raise _NoTransformError from error
    rounded = value.to(eps.dtype)  # not up, which could reach the open end of a support
    return torch.where(rounded > value, rounded.nextafter(rounded.new_tensor(-torch.inf)), rounded)


def arguments_of(x: Observations) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
    """The positional and named arguments with which a program gets observations."""
    return ((), x) if isinstance(x, Mapping) else (x if isinstance(x, tuple) else (x,), {})
