"""Pyro programs as models of this library, with their guides as proposals (extra ``pyro``).

A program is run with given values at its latent sites. The latent z of an observation holds the values of all of these
sites, flattened, in the order in which the model samples them.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributions as td
from torch import Tensor
from torch.distributions import constraints

from vaerdict.core import Draws, Proposal, SettingError, ShapeError, check_count
from vaerdict.distributions import Diagonal, Elliptical
from vaerdict.models.pyro_programs import (
    DataProgram,
    Message,
    Program,
    RowProgram,
    Site,
    arguments_of,
    frame_of,
    is_latent,
)
from vaerdict.noise import Iid, Randomness, as_source, global_state_from, sampled, seeded
from vaerdict.optional import require
from vaerdict.priors import Prior

_ELEMENTWISE = (
    constraints.greater_than,
    constraints.greater_than_eq,
    constraints.less_than,
    constraints.interval,
    constraints.half_open_interval,
)


def from_pyro(
    model: Callable[..., Any], guide: Callable[..., Any], x: Any = None, *, args: tuple[Any, ...] | None = None
) -> PyroModel:
    """Wrap a Pyro model as a model of this library, with its guide as a proposal.

    With `x` latents are local: all sample sites are inside one ``pyro.plate`` over the observations, as in a
    variational autoencoder, and every observation has its own posterior. With `args` the whole data set is one
    observation, and latents may be global: a regression, a hierarchical model.

    Parameters
    ----------
    model, guide
        Pyro programs with the same arguments and the same continuous latent sites. Parameters keep their present
        values: Pyro's parameters, modules and methods of modules are copied. Modules that a plain function uses are
        not copied; do not train them further. The guide may also be an ``AutoNormal``, which with `x` is a proposal
        for these observations only, and with `args` an automatic guide on a joint vector, such as
        ``AutoMultivariateNormal``.
    x
        Observations to try the programs with, ``(n, ...)``; one row is enough. The programs are called as
        ``model(x)``, with any number of rows; as ``model(*x)`` for a tuple and ``model(**x)`` for a mapping of tensors.
    args
        The arguments of the programs, in place of `x`.

    Returns
    -------
    PyroModel
        The model; its guide is the attribute ``guide``. Where `args` were given, ``observations()`` is the x to ask
        it with.

    Raises
    ------
    SettingError
        If the latents of model and guide differ, are discrete, have a support such as a simplex, or, with `x`, are
        outside the plate; if log p(x, z) is random (dropout) or, for an observation, depends on the others.

    Examples
    --------
    >>> wrapped = from_pyro(vae.model, vae.guide, x)                                  # doctest: +SKIP
    >>> vaerdict.posterior(wrapped, x, wrapped.guide).khat                            # doctest: +SKIP
    >>> fitted = from_pyro(regression, AutoNormal(regression), args=(covariates, y))  # doctest: +SKIP
    >>> slope_is_positive = lambda z: (fitted.sites(z)["slope"] > 0).double()         # doctest: +SKIP
    >>> vaerdict.expect(fitted, fitted.observations(), slope_is_positive)             # doctest: +SKIP
    """
    if (x is None) == (args is None):
        raise SettingError("from_pyro needs either x=, observations with latents of their own, or args=, all data.")
    for name, fn in (("model", model), ("guide", guide)):
        if not callable(fn):
            raise SettingError(
                f"the {name} is a {type(fn).__name__}; from_pyro needs a Pyro program, which is callable."
            )
    state = _parameters()
    model, guide = _copied(model, guide)
    program = RowProgram(model, state, x) if args is None else DataProgram(model, state, args)
    _inspect(program)
    wrapped = PyroModel(program, _as_proposal(guide, program))
    wrapped.check()
    return wrapped


def _parameters() -> dict[str, Any]:
    """A copy of Pyro's store of parameters."""
    state = require("pyro", "pyro").get_param_store().get_state()
    return {**state, "params": {name: t.detach().clone() for name, t in state["params"].items()}}


def _copied(model: Any, guide: Any) -> tuple[Any, Any]:
    """Copies that share what the originals share; the originals where something in them cannot be copied."""
    try:
        return copy.deepcopy((model, guide))
    except (RuntimeError, TypeError):  # a tensor that is not a leaf, or an object such as a lock
        return model, guide


class PyroModel:
    """A Pyro model with frozen parameters: log p(x, z), the prior of its latents and its guide."""

    def __init__(self, program: Program, guide: Proposal) -> None:
        self._program, self.guide, self.prior = program, guide, PyroPrior(program)

    @property
    def encoder(self) -> Proposal:
        """The guide."""
        return self.guide

    def observations(self) -> Any:
        """The observations that the model was wrapped with; with ``args`` one row that stands for all data."""
        return self._program.x

    def sites(self, z: Tensor) -> dict[str, Tensor]:
        """The values of the latent sites by name. Shapes: ``(K, *batch, d) -> (K, *batch, *site)`` each."""
        return {s.name: z[..., s.part].reshape((*z.shape[:-1], *s.shape)) for s in self._program.sites}

    def log_joint(self, x: Any, z: Tensor) -> Tensor:
        """Log p(x, z), minus infinity outside the support. Shapes: ``(K, *batch, d) -> (K, *batch)``."""
        return self._program.log_prob(x, z, observed=True)

    @torch.no_grad()
    def check(self) -> None:
        """Raise where log p(x, z) is random, or that of an observation depends on the others."""
        x = self._program.rows(2)
        try:
            z = self.prior.draw(x, 2, generator=seeded(0)).z
            first, again = self.log_joint(x, z), self.log_joint(x, z)
        except RuntimeError as error:
            if "vmap" not in str(error):
                raise
            raise SettingError(
                "the model cannot be mapped over particles by torch.vmap; avoid .item() and `if` on latents."
            ) from error
        alone = self.log_joint(self._program.rows(1), z[:, :1])
        if not _close(first, again):
            raise SettingError("two runs of the model with the same latents differ; put modules in evaluation mode.")
        if not _close(first[:, :1], alone):
            raise SettingError("log p(x, z) of a row depends on the other rows; put modules in evaluation mode.")


def _close(a: Tensor, b: Tensor) -> bool:
    return torch.allclose(a.double(), b.double(), rtol=1e-3, atol=1e-3, equal_nan=True)


# ------------------------------------------------------------------------------------------------------- proposals
class PyroProposal:
    """A Pyro program as a distribution of its latents given x."""

    def __init__(self, program: Program) -> None:
        self._program = program

    @torch.no_grad()
    def draw(self, x: Any, k: int, *, generator: Randomness) -> Draws:
        """Draw k particles for each observation. Shapes: ``-> (K, *batch, d), (K, *batch)``."""
        source = as_source(generator)
        noise = source.normal(check_count(k), self._program.batch(x), self._program.d, like=self._program.like)
        z = self._program.transform(x, noise)
        if z is None:  # a site is no known transform of normal numbers; Pyro draws it
            z = sampled(lambda rows: self._program.sample(rows, k), x, source)
        return Draws(z, self.log_prob(z, x))

    def log_prob(self, z: Tensor, x: Any) -> Tensor:
        """Log q(z | x). Shapes: ``(K, *batch, d) -> (K, *batch)``."""
        return self._program.log_prob(x, z)


class PyroPrior(PyroProposal, td.Distribution):
    """The prior of a Pyro model's latents; it may depend on x."""

    def __init__(self, program: Program) -> None:
        PyroProposal.__init__(self, program)
        td.Distribution.__init__(self, event_shape=torch.Size((program.d,)), validate_args=False)

    @property
    def arg_constraints(self) -> dict[str, Any]:
        """Empty: the distribution has no parameters of its own."""
        return {}

    @property
    def support(self) -> Any:
        """The support of z."""
        return self._program.support

    def log_prob(self, z: Tensor, x: Any = None) -> Tensor:  # type: ignore[override]
        """Log p(z | x); without x, at the first of the observations that the model was wrapped with."""
        if x is None:
            x = self._program.rows(1)
            return super().log_prob(z.reshape(-1, 1, z.shape[-1]), x).reshape(z.shape[:-1])
        return super().log_prob(z, x)

    def sample(self, sample_shape: torch.Size | tuple[int, ...] = ()) -> Tensor:  # type: ignore[override]
        """Draw latents ``(*sample_shape, d)`` at the first observation, from torch's global random state."""
        source = Iid((torch.default_generator,))
        z = self.draw(self._program.rows(1), max(1, math.prod(sample_shape)), generator=source).z
        return z.reshape(*sample_shape, z.shape[-1])


# ------------------------------------------------------------------------------------------------------ inspection
def _inspect(program: RowProgram | DataProgram) -> None:
    """Run a model and note its latent sites, and the plate over observations; raise where it cannot be used."""
    if isinstance(program, RowProgram):
        _trace(program, arguments_of(program.x))  # an error in the user's code is shown as it is
        runs = [_trace(program, arguments_of(program.rows(n)), n=n) for n in (2, 3)]
        program.plate = _plate(runs)
    else:
        runs = [_trace(program, (program.args, {})) for _ in range(2)]
        program.n_values = sum(m["fn"].log_prob(m["value"]).numel() for m in runs[0])
        _check_not_subsampled(runs[0])
    program.sites = _sites(runs[0], program.plate, "model")
    others = _sites(runs[1], program.plate, "model")
    if [s[:4] for s in program.sites] != [s[:4] for s in others]:
        raise SettingError("the latent sites of the model, or their shapes, change from run to run; fix them.")
    for site, other in zip(program.sites, others, strict=True):
        if not all(map(torch.equal, site.bounds, other.bounds)):
            raise SettingError(f"the bounds of the site {site.name!r} depend on other latents or on the observation.")
    values = {m["name"]: m["value"] for m in runs[0] if is_latent(m)}
    program.last = program.sites[-1].name
    program.like = torch.cat([value.reshape(-1)[:0] for value in values.values()])
    if isinstance(program, DataProgram):
        program.x = program.like.new_zeros(1, 1)


def _trace(program: Program, arguments: tuple[Any, ...], n: int | None = None) -> list[Message]:
    """The sample sites of a run in which Pyro draws the latents; with n, a failure is that of n rows."""
    with program.session(validate=True), torch.no_grad(), global_state_from(seeded(n or 0)):
        try:
            messages = program.run(arguments, None)
        except (ValueError, RuntimeError, IndexError) as error:
            if n is None:
                raise
            raise SettingError(
                f"the program runs on the rows given, but not on {n} of them ({error}); it must take any number: "
                "pyro.plate('data', len(x))."
            ) from error
    for m in messages:
        subsampled = math.prod((f.full_size or f.size) / f.size for f in m["cond_indep_stack"])
        if abs(float(m["scale"]) / subsampled - 1) > 1e-6:
            raise SettingError(f"the site {m['name']!r} is scaled by {float(m['scale']):g}; remove poutine.scale.")
    return messages


def _plate(runs: list[list[Message]]) -> str:
    """The plate whose size is the number of rows, 2 and 3, in which all sites must be."""
    sizes = [{f.name: f.size for m in run for f in m["cond_indep_stack"] if f.vectorized} for run in runs]
    names = [name for name in sizes[0] if (sizes[0][name], sizes[1].get(name)) == (2, 3)]
    if not names:
        others = "".join(f"; the plate {name!r} has {size} rows whatever x" for name, size in sizes[0].items())
        raise SettingError(
            f"the model has no plate over the observations{others}. Put its sites inside `with pyro.plate('data', "
            "len(x)):`, or pass the data as args= if the latents are global."
        )
    for m in runs[0]:
        if frame_of(m, names[0]) is None:
            kind = "latent" if is_latent(m) else "observed"
            raise SettingError(
                f"the {kind} site {m['name']!r} is outside the plate {names[0]!r} over the observations, so that they "
                "share it; pass the data as args= to treat all of them as one observation."
            )
    return names[0]


def _check_not_subsampled(messages: list[Message]) -> None:
    for f in (f for m in messages for f in m["cond_indep_stack"]):
        if f.full_size not in (None, f.size):
            raise SettingError(f"the plate {f.name!r} takes {f.size} of {f.full_size} rows at random; use all data.")


def _sites(messages: list[Message], plate: str | None, owner: str) -> tuple[Site, ...]:
    """The latent sites of a run."""
    sites, start = [], 0
    for m in filter(is_latent, messages):
        value, fn, axis = m["value"], m["fn"], None
        if type(getattr(fn, "base_dist", fn)).__name__ == "Delta":
            raise SettingError(f"the {owner}'s site {m['name']!r} is a point, which has no density.")
        if fn.support.is_discrete:
            raise SettingError(
                f"the {owner}'s latent site {m['name']!r} is discrete ({type(fn).__name__}); sum over it in the model."
            )
        rows = value
        if plate is not None:
            if frame_of(m, plate) is None:
                raise SettingError(f"the {owner}'s site {m['name']!r} is outside the plate {plate!r}.")
            axis = frame_of(m, plate).dim - fn.event_dim
            rows = value.movedim(axis, 0)[0]
        part = slice(start, start + rows.numel())
        sites.append(Site(m["name"], rows.shape, axis, part, _support(m, axis, owner)))
        start = part.stop
    if not sites:
        raise SettingError(f"the {owner} has no latent sample site.")
    return tuple(sites)


def _support(message: Message, axis: int | None, owner: str) -> Any:
    """The support of the coordinates of a site."""
    support, shape = message["fn"].support, message["value"].shape
    while isinstance(support, constraints.independent):
        support = support.base_constraint
    if isinstance(support, type(constraints.real)):
        return constraints.real
    if not isinstance(support, _ELEMENTWISE):
        raise SettingError(
            f"the {owner}'s site {message['name']!r} has the support {support}; only real numbers and intervals are "
            "supported. Sample an unbounded vector and transform it in the model."
        )
    ends = {name: end for name, end in vars(support).items() if name in ("lower_bound", "upper_bound")}
    return type(support)(**{name: _of_first_row(end, shape, axis, message["name"]) for name, end in ends.items()})


def _of_first_row(end: Any, shape: torch.Size, axis: int | None, name: str) -> Any:
    """An end of an interval, for the first row if it is a tensor; raises where rows differ."""
    if not isinstance(end, Tensor):
        return end
    rows = end.expand(shape).movedim(axis, 0).flatten(1) if axis is not None else end.expand(shape).reshape(1, -1)
    if not bool((rows == rows[0]).all()):
        raise SettingError(f"the bounds of the site {name!r} depend on other latents or on the observation.")
    return rows[0].clone()


def _as_proposal(guide: Any, model: RowProgram | DataProgram) -> Proposal:
    """The guide as a proposal; raises where its sites are not those of the model."""
    if isinstance(guide, require("pyro.infer.autoguide", "pyro").AutoGuide):
        return _automatic(guide, model)
    program = copy.copy(model)
    program.fn = guide
    rows = arguments_of(model.rows(2)) if isinstance(model, RowProgram) else (model.args, {})
    messages = _trace(program, rows)
    sites = {s.name: s for s in _sites(messages, model.plate, "guide")}
    _check_names(sites, model)
    for s in model.sites:
        other = sites[s.name]
        if (other.shape, other.axis) != (s.shape, s.axis):
            raise ShapeError(
                f"the site {s.name!r} has the shape {tuple(s.shape)} for an observation in the model and "
                f"{tuple(other.shape)} in the guide; make them equal."
            )
        if bool((other.bounds[0] > s.bounds[0]).any()) or bool((other.bounds[1] < s.bounds[1]).any()):
            raise SettingError(f"the guide's site {s.name!r} covers only a part of the support in the model.")
    program.sites = tuple(s._replace(support=sites[s.name].support) for s in model.sites)
    program.last = next(m["name"] for m in reversed(messages) if is_latent(m))
    return PyroProposal(program)


def _check_names(names: Mapping[str, Any], model: Program) -> None:
    expected = {s.name for s in model.sites}
    if set(names) != expected:
        raise SettingError(
            f"the latent sites of the guide are {', '.join(sorted(names)) or 'none'}, those of the model "
            f"{', '.join(sorted(expected))}; they must be the same."
        )


def _automatic(guide: Any, model: RowProgram | DataProgram) -> Proposal:
    """An automatic guide as a proposal: a distribution of all latents, on their unbounded scale."""
    auto, kind = require("pyro.infer.autoguide", "pyro"), type(guide).__name__
    per_row = isinstance(model, RowProgram)
    if not isinstance(guide, auto.AutoNormal) and (per_row or not isinstance(guide, auto.AutoContinuous)):
        supported = "AutoNormal" if per_row else "AutoNormal or a guide on a joint vector (AutoMultivariateNormal, ...)"
        raise SettingError(f"{kind} has no density that from_pyro can use here; use {supported}.")
    if guide.prototype_trace is None:
        raise SettingError(f"the {kind} has not been run; train it first.")
    _check_names(dict(guide.prototype_trace.iter_stochastic_nodes()), model)
    with model.session(), torch.no_grad():
        if isinstance(guide, auto.AutoNormal):
            pairs = {s.name: guide._get_loc_and_scale(s.name) for s in model.sites}
            n = (pairs[model.last][0].shape[model.sites[-1].axis],) if per_row else ()
            loc, scale = (
                model.join({name: p[i] for name, p in pairs.items()}, torch.empty(*n, model.d)) for i in (0, 1)
            )
            if isinstance(model, RowProgram):
                if not model.unbounded:
                    raise SettingError("an AutoNormal of bounded latents per observation is not supported.")
                return Elliptical(loc, Diagonal(scale))
            q: Any = td.Independent(td.Normal(loc, scale), 1)
        else:
            q = guide.get_posterior(*model.args)  # type: ignore[union-attr]
    return Prior(q if model.unbounded else td.TransformedDistribution(q, [td.biject_to(model.support)]))
