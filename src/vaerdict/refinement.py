r"""Per-observation refinement: from an encoder's answer to a proposal fitted to each observation.

Amortised proposals give up accuracy for speed. `refine` climbs to the mode of :math:`p(z \mid x)` and returns the local
Gaussian or Student-t there; `refine_elbo` improves any such answer by stochastic gradients on a bound. Both treat all
observations at once, and a batch may have any number of axes: observations, stacked members, classes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from vaerdict.core import (
    DivergenceError,
    Model,
    Progress,
    Proposal,
    SettingError,
    ShapeError,
    check_count,
    prepared,
    saved_bytes,
    silent,
)
from vaerdict.distributions import Diagonal, Elliptical, Noise, Triangular
from vaerdict.noise import Randomness, as_source
from vaerdict.objectives import Loss, iwelbo, loss

LogJoint = Callable[[Tensor], Tensor]
"""Log p(x, z) of given observations. Shapes: ``(K, *batch, d) -> (K, *batch)``."""

_BUDGET = 2**30  # bytes
_CANDIDATES = 6  # a pure Newton step and five dampings, a decade apart
_DAMPING, _LEAST_DAMPING = 1e-2, 1e-6  # relative to the stiffest direction
_KINK = 0.5  # nats: within one standard deviation of where Newton points
_FLAT = 1e-3  # of the prior's curvature: what a step takes a flat direction for
_LONG = 1e8  # the ratio of variances up to which a Cholesky factor keeps half of its digits
_LOST_DIGITS = 0.1  # twice the error of log q, in nats
_START_DRAWS = 32
_TEMPORARIES = 2  # peak memory over what autograd keeps, measured


class Refined(NamedTuple):
    """The local proposal at each observation's mode, whether it is a mode, and what finding it cost.

    Where `converged` is false the location is the best point found, never worse than the start. `n_gradients` counts
    backward passes: one for the gradient and d for the Hessian of every point visited.

    Shapes: ``converged``, ``n_steps`` and ``n_gradients`` are ``(*batch)``.
    """

    distribution: Elliptical
    converged: Tensor
    n_steps: Tensor
    n_gradients: Tensor


class Improved(NamedTuple):
    """A proposal improved by gradient steps, and by how much the IWELBO rose (zero: the start was kept).

    Shapes: ``gain (*batch)``, in nats, on fresh noise that is the same before and after.
    """

    distribution: Elliptical
    gain: Tensor
    n_steps: int
    n_gradients: int


# ------------------------------------------------------------------------------------------------ to the mode
def refine(
    model: Model,
    x: Tensor,
    start: Tensor | Proposal,
    *,
    df: float | None = 10.0,
    inflate: float = 1.1,
    n_steps: int = 50,
    tolerance: float = 1e-6,
    axis: int = 0,
    max_bytes: int | None = None,
    generator: Randomness | None = None,
    progress: Progress = silent,
) -> Refined:
    r"""Climb from `start` to the mode of each posterior and return the ellipse of its curvature there.

    Damped Newton steps (Levenberg-Marquardt), each observation with its own damping; a step that does not raise
    :math:`\log p(x, z)` is not taken. The answer is :math:`t_\nu(\hat z, s^2 H^{-1})` with H the negative Hessian at
    the mode, its eigenvalues raised to the prior's curvature, s = `inflate` and :math:`\nu` = `df` (None: a normal).

    An observation has converged when Newton's quadratic model promises less than `tolerance` nats, or when no step
    gains and that promise is under half a nat, as at a kink of a piecewise-linear decoder. One mode is found, the one
    uphill of the start: where the posterior may have several, put the answer in a mixture with a broader proposal.

    `start` is a tensor of locations, or a proposal: its location where it has one, else the mean of draws, which take
    `generator`. Chunks of `max_bytes` (default 1 GiB) are cut along the batch axis `axis`, and observations that have
    converged are dropped along it; other axes keep their places, so that they may carry meaning (members of a stack:
    ``axis=1``; classes behind images: ``axis=0``).

    Shapes: ``x (*batch, p)``, ``start (*batch, d)``.
    """
    _check_positive(inflate=inflate, tolerance=tolerance, df=1.0 if df is None else df)
    check_count(n_steps, name="n_steps")
    z = location(start, x, generator)
    axis = _check_axis(x, z, axis)
    n_bad = int((~z.isfinite()).any(-1).sum())
    if n_bad:
        raise DivergenceError(
            f"{n_bad} of {z[..., 0].numel()} locations to start from are not finite; mend the proposal."
        )
    parts = []
    for rows in _chunks(model, x, z, axis, max_bytes, copies=_CANDIDATES):
        parts.append(_climb(model, x.index_select(axis, rows), z.index_select(axis, rows), axis, n_steps, tolerance))
        progress(int(rows[-1]) + 1, z.shape[axis], "refining proposals")
    found = _Search(*(torch.cat(column, axis) for column in zip(*parts, strict=True)))
    root = Triangular((inflate * found.root()).to(z.dtype))
    q = Elliptical(found.z, root, None if df is None else torch.tensor(df).to(z))
    return Refined(q, found.converged(tolerance), found.n_steps, (found.n_steps + 1) * (z.shape[-1] + 1))


class _Search(NamedTuple):
    r"""Where each observation stands: a point, the quadratic model of log p about it, and the damping in force.

    Linear algebra is float64 whatever the model's dtype. `slope` is the gradient in the `basis` of eigenvectors of
    minus the Hessian, `curvature` its eigenvalues, `floor` the prior's curvature.
    """

    z: Tensor
    value: Tensor
    slope: Tensor
    curvature: Tensor
    basis: Tensor
    finite: Tensor
    floor: Tensor
    damping: Tensor
    stalled: Tensor
    n_steps: Tensor

    def steps(self, damping: Tensor) -> Tensor:
        """Damped Newton steps in the eigenbasis, one for each damping. Shapes: ``(C, *batch) -> (C, *batch, d)``.

        Along negative curvature a step goes uphill by the Newton length, and by the local length scale at least: that
        leaves a saddle, where the slope is zero.
        """
        size = self.curvature.abs()
        stiffness = torch.maximum(size, _FLAT * self.floor)
        stiffness = stiffness + damping.unsqueeze(-1) * stiffness.amax(-1, keepdim=True)
        length = self.slope.abs() / stiffness
        bent_up = self.curvature < -16 * torch.finfo(self.z.dtype).eps * size.amax(-1, keepdim=True)
        length = torch.where(bent_up, torch.maximum(length, stiffness.rsqrt()), length)
        return torch.where(self.slope < 0, -length, length)

    def promise(self, steps: Tensor) -> Tensor:
        """What the quadratic model gains by the steps, in nats. Shapes: ``(C, *batch, d) -> (C, *batch)``."""
        return (self.slope * steps - 0.5 * self.curvature * steps.square()).sum(-1)

    def threshold(self, tolerance: float) -> Tensor:
        """The least gain worth a step: `tolerance`, or what rounding of log p hides. Shapes: ``-> (*batch)``."""
        return (torch.finfo(self.z.dtype).eps * self.value.abs()).clamp_min(tolerance)

    def converged(self, tolerance: float) -> Tensor:
        """Whether the point is a mode, up to a kink. Shapes: ``-> (*batch)``."""
        promise = self.promise(self.steps(torch.zeros_like(self.damping)[None]))[0]
        return self.finite & ((promise <= self.threshold(tolerance)) | (self.stalled & (promise <= _KINK)))

    def unfinished(self, tolerance: float, n_steps: int) -> Tensor:
        """Whether another step may help. Shapes: ``-> (*batch)``."""
        return self.finite & ~self.stalled & (self.n_steps < n_steps) & ~self.converged(tolerance)

    def root(self) -> Tensor:
        """Lower-triangular root of the inverse curvature, floored by the prior's. Shapes: ``-> (*batch, d, d)``."""
        stiffness = torch.maximum(self.curvature, self.floor)
        half = self.basis * stiffness.rsqrt().unsqueeze(-2)
        lower, failed = torch.linalg.cholesky_ex(half @ half.mT)
        long = (failed != 0) | (stiffness.amax(-1) > _LONG * stiffness.amin(-1))
        if long.any():
            # QR of the square root keeps all digits and cannot fail, but on a GPU goes from matrix to matrix
            upper = torch.linalg.qr(half[long].mT).R
            lower[long] = (upper * upper.diagonal(dim1=-2, dim2=-1).sign().unsqueeze(-1)).mT
        return lower


def _climb(model: Model, x: Tensor, z: Tensor, axis: int, n_steps: int, tolerance: float) -> _Search:
    """Take steps until none helps; whenever fewer than half of the rows are unfinished, go on with these alone."""
    state = _begin(_log_joint(model, x), _prior_curvature(model, z), z)
    while (rows := _rows_of(state.unfinished(tolerance, n_steps), axis)).numel():
        log_p = _log_joint(model, x.index_select(axis, rows))
        part = _Search(*(field.index_select(axis, rows) for field in state))
        unfinished = part.unfinished(tolerance, n_steps)
        while 2 * _rows_of(unfinished, axis).numel() > rows.numel():
            part = _advance(log_p, part, unfinished, tolerance)
            unfinished = part.unfinished(tolerance, n_steps)
        state = _Search(*(field.index_copy(axis, rows, new) for field, new in zip(state, part, strict=True)))
    return state


def _rows_of(mask: Tensor, axis: int) -> Tensor:
    """Indices along `axis` at which any entry of the mask holds."""
    return mask.movedim(axis, 0).reshape(mask.shape[axis], -1).any(1).nonzero().flatten()


def _begin(log_p: LogJoint, floor: Tensor, z: Tensor) -> _Search:
    damping = torch.full(z.shape[:-1], _DAMPING, dtype=torch.float64, device=z.device)
    n_steps = torch.zeros_like(damping, dtype=torch.long)
    local = _expand(log_p, z, floor)
    return _Search(*local, floor=floor, damping=damping, stalled=n_steps.bool(), n_steps=n_steps)


def _advance(log_p: LogJoint, at: _Search, unfinished: Tensor, tolerance: float) -> _Search:
    """One step of every unfinished observation: the best of several dampings, if it is better than staying."""
    decades = 10.0 ** torch.arange(_CANDIDATES - 1, device=at.z.device, dtype=torch.float64)
    damped = decades.reshape(-1, *[1] * at.damping.dim()) * at.damping
    steps = at.steps(torch.cat([torch.zeros_like(damped[:1]), damped]))
    trial = at.z + (at.basis @ steps.unsqueeze(-1)).squeeze(-1).to(at.z.dtype)
    with torch.no_grad():
        # the model's particle axis carries the candidates
        value = log_p(trial).double()
    value, best = torch.nan_to_num(value, nan=-torch.inf, posinf=-torch.inf).max(0)
    taken = unfinished & (value > at.value)
    chosen = trial.gather(0, best[None, ..., None].expand_as(trial[:1]))[0]
    z = torch.where(taken.unsqueeze(-1), chosen, at.z)
    # the next range of dampings starts a decade below the one that won, above all that lost, anew after pure Newton
    damping = (at.damping * 10.0 ** torch.where(taken, best - 2, _CANDIDATES - 1)).clamp_min(_LEAST_DAMPING)
    stuck = unfinished & ~taken & (at.promise(steps)[-1] <= at.threshold(tolerance))
    return _Search(
        *_expand(log_p, z, at.floor),
        floor=at.floor,
        damping=torch.where(unfinished & ~(taken & (best == 0)), damping, _DAMPING),
        stalled=at.stalled | stuck,
        n_steps=at.n_steps + unfinished,
    )


def _expand(log_p: LogJoint, z: Tensor, floor: Tensor) -> tuple[Tensor, ...]:
    """The fields of `_Search` up to `finite`: the quadratic model about z, the prior's where it is not finite."""
    value, gradient, hessian = (t.double() for t in _derivatives(lambda t: log_p(t[None])[0], z))
    finite = value.isfinite() & gradient.isfinite().all(-1) & hessian.isfinite().flatten(-2).all(-1)
    prior = torch.diag_embed(floor.expand_as(gradient))
    curvature, basis = torch.linalg.eigh(torch.where(finite[..., None, None], -hessian, prior))
    slope = (basis.mT @ torch.where(finite.unsqueeze(-1), gradient, 0).unsqueeze(-1)).squeeze(-1)
    return z, value, slope, curvature, basis, finite


def _derivatives(f: Callable[[Tensor], Tensor], z: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Value, gradient and Hessian of a function that treats observations apart.

    The d rows of the Hessian by d backward passes in turn: on a CPU quicker than batching them by vmap (1.6 times)
    or over particles (2 times), and any module that can be differentiated twice will do.

    Shapes: ``(*batch, d) -> (*batch), (*batch, d), (*batch, d, d)``.
    """
    with torch.enable_grad():
        z = z.detach().requires_grad_()
        value = f(z)
        gradient = _gradient(value.sum(), z, create_graph=True)
        rows = [_gradient(gradient[..., i].sum(), z) for i in range(z.shape[-1])]
    hessian = torch.stack(rows, -2)
    return value.detach(), gradient.detach(), 0.5 * (hessian + hessian.mT)


def _gradient(y: Tensor, z: Tensor, *, create_graph: bool = False) -> Tensor:
    if not y.requires_grad:  # constant in z, as the gradient of what is linear
        return torch.zeros_like(z)
    return torch.autograd.grad(y, z, retain_graph=True, create_graph=create_graph, materialize_grads=True)[0]


def _prior_curvature(model: Model, z: Tensor) -> Tensor:
    """The least eigenvalue of the prior's negative Hessian at z, one where it has none: no curvature below is believed.

    However small it is, it sets a scale. Shapes: ``(*batch, d) -> (*batch, 1)``.
    """
    hessian = _derivatives(lambda t: model.prior.log_prob(t[None]), z)[2].double()
    least = torch.linalg.eigvalsh(-torch.where(hessian.isfinite(), hessian, 0))[..., :1]
    return torch.where(least > 0, least, 1)


# ------------------------------------------------------------------------------------------- by gradient steps
STAGES: tuple[tuple[Loss, int], ...] = ((loss("elbo", "stl"), 300), (loss("iwelbo", "dreg"), 150))
"""What `refine_elbo` descends, and for how many steps each."""


def refine_elbo(
    model: Model,
    x: Tensor,
    start: Elliptical,
    *,
    generator: Randomness,
    stages: Sequence[tuple[Loss, int]] = STAGES,
    k: int = 8,
    lr: float = 0.03,
    n_groups: int = 128,
    axis: int = 0,
    max_bytes: int | None = None,
    progress: Progress = silent,
) -> Improved:
    r"""Improve `start` by gradient steps on its own location and full-rank root for every observation.

    With start :math:`(\mu_0, R_0)` the parameters are m and a triangular T in :math:`\mu = \mu_0 + R_0 m`,
    :math:`R = R_0 T`, so that `lr` is in standard deviations of the start whatever its scale. Adam with k fresh
    particles a step and a rate that falls to zero within each stage; a Student-t keeps its `df`. At the end the better
    of before and after is kept for each observation: by the IWELBO of k particles, the mean over `n_groups` of them on
    fresh noise, the same for both. (One IWELBO of all particles would be evidence plus noise for either.)

    Start from a Student-t, as `refine` gives it: a normal fitted so has a higher effective sample size than Laplace's,
    but also lighter tails and a higher k-hat.

    For `axis` and `max_bytes` see `refine`. Shapes: ``x (*batch, p)``, ``start`` over ``(*batch, d)``.
    """
    _check_positive(lr=lr)
    n_steps = sum(check_count(count, name="steps of a stage") for _, count in stages)
    check_count(n_groups, name="n_groups")
    loc, tril, df = start.loc.detach(), _tril(start.detach()), start.detach().df
    axis = _check_axis(x, loc, axis)
    parts = []
    for rows in _chunks(model, x, loc, axis, max_bytes, copies=check_count(k)):
        before = Elliptical(loc.index_select(axis, rows), Triangular(tril.index_select(axis, rows)), df)
        log_p = _log_joint(model, x.index_select(axis, rows))
        after = _descend(log_p, before, stages, k, lr, generator)
        noises = (before.noise(k, as_source(generator)) for _ in range(n_groups))
        sound = _sound(after, before.noise(k, as_source(generator)).normal)
        parts.append(_better(log_p, before, after, noises, sound))
        progress(int(rows[-1]) + 1, loc.shape[axis], "improving proposals")
    loc, tril, gain = (torch.cat(column, axis) for column in zip(*parts, strict=True))
    return Improved(Elliptical(loc, Triangular(tril), df), gain, n_steps, n_steps * k)


def _descend(
    log_p: LogJoint, start: Elliptical, stages: Sequence[tuple[Loss, int]], k: int, lr: float, generator: Randomness
) -> Elliptical:
    source = as_source(generator)
    shift, raw = torch.zeros_like(start.loc).requires_grad_(), torch.zeros_like(_tril(start)).requires_grad_()
    for objective, n_steps in stages:
        optimizer = torch.optim.Adam([shift, raw], lr)
        for step in range(n_steps):
            optimizer.param_groups[0]["lr"] = lr * (1 - step / n_steps)
            with torch.enable_grad():
                q = _moved(start, shift, raw)
                total = _loss(log_p, q, q.noise(k, source), objective).sum()
                gradients = torch.autograd.grad(total, [shift, raw])
            # an observation whose bound left the finite numbers adds nothing to its momentum; the others do not notice
            shift.grad, raw.grad = (torch.where(g.isfinite(), g, 0) for g in gradients)
            optimizer.step()
    return _moved(start, shift, raw).detach()


def _moved(start: Elliptical, shift: Tensor, raw: Tensor) -> Elliptical:
    """The start shifted and stretched in its own coordinates."""
    stretch = raw.tril(-1) + torch.diag_embed(raw.diagonal(dim1=-2, dim2=-1).exp())
    return Elliptical(start.loc + start.root.apply(shift), Triangular(_tril(start) @ stretch), start.df)


def _loss(log_p: LogJoint, q: Elliptical, noise: Noise, objective: Loss) -> Tensor:
    """The objective's loss of each observation, z and q carrying the gradient it asks for. Shapes: ``-> (*batch)``."""
    z = q.transform(noise) if objective.z_grad else q.transform(noise).detach()
    log_q = (q if objective.q_grad else q.detach()).log_prob(z)
    return objective(log_p(z) - log_q, log_q)


@torch.no_grad()
def _better(
    log_p: LogJoint, before: Elliptical, after: Elliptical, noises: Iterator[Noise], sound: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Location and root of the higher mean IWELBO on the same noise, and the gain; `after` only where it is sound."""
    bounds = [torch.stack([_iwelbo(log_p, q, noise) for q in (before, after)]) for noise in noises]
    old, new = torch.stack(bounds).mean(0)
    keep = (new > old) & sound
    loc = torch.where(keep.unsqueeze(-1), after.loc, before.loc)
    tril = torch.where(keep[..., None, None], _tril(after), _tril(before))
    return loc, tril, torch.where(keep, new - old, 0)


def _iwelbo(log_p: LogJoint, q: Elliptical, noise: Noise) -> Tensor:
    z = q.transform(noise)
    bound = iwelbo(log_p(z) - q.log_prob(z))
    return torch.where(bound.isnan(), -torch.inf, bound)


def _sound(q: Elliptical, eps: Tensor) -> Tensor:
    """Whether log q keeps its digits: with too ill-conditioned a root it would report evidence that is not there."""
    back = q.root.square_norm(q.loc + q.root.apply(eps) - q.loc)
    return ((back - eps.square().sum(-1)).abs() < _LOST_DIGITS).all(0)


def _tril(q: Elliptical) -> Tensor:
    return torch.diag_embed(q.root.scale) if isinstance(q.root, Diagonal) else q.root.tril


# --------------------------------------------------------------------------------------- towards a question
def gradient_direction(f: Callable[[Tensor], Tensor], distribution: Elliptical) -> Tensor:
    r"""The direction in which the query f changes fastest at the location: :math:`\nabla f(\mu)`.

    ``distribution.towards(gradient_direction(f, distribution))`` gives the same law with its first noise coordinate
    along the query, which a Sobol net integrates best. For an indicator pass the smooth score it cuts: of
    :math:`1\{z_1 \ge \nu\}` the score is ``lambda z: z[..., 0]``.

    Shapes: ``f: (1, *batch, d) -> (1, *batch)``; returns ``(*batch, d)``.
    """
    with torch.enable_grad():
        z = distribution.loc.detach()[None].requires_grad_()
        value = f(z)
        if value.shape != z.shape[:-1]:
            raise ShapeError(
                f"f gives {tuple(value.shape)} for latents {tuple(z.shape)}; one number a latent is needed."
            )
        direction = torch.autograd.grad(value.sum(), z, allow_unused=True)[0] if value.requires_grad else None
    if direction is None or not direction.any():
        raise SettingError("f does not change with z at any location; pass the smooth score an indicator is cut from.")
    return direction[0]


# ------------------------------------------------------------------------------------------ starts and chunks
def _log_joint(model: Model, x: Tensor) -> LogJoint:
    return partial(model.log_joint, prepared(model, x))


def location(start: Tensor | Proposal, x: Tensor, generator: Randomness | None) -> Tensor:
    """Where to begin: the tensor itself, the location of what the proposal gives for x, or the mean of its draws.

    Shapes: ``x (*batch, p) -> (*batch, d)``.
    """
    if isinstance(start, Tensor):
        return start.detach()
    with torch.no_grad():
        # every module has a forward; one that was not written raises
        speaks = getattr(type(start), "forward", nn.Module.forward) is not nn.Module.forward
        given = start.forward(x) if speaks else start  # type: ignore[attr-defined]
        if isinstance(given, Elliptical):
            return given.loc.detach()
        if generator is None:
            raise SettingError(f"{type(start).__name__} has no location, so it must be drawn from: pass `generator`.")
        z = start.draw(x, _START_DRAWS, generator=generator).z
    if not isinstance(z, Tensor):
        raise ShapeError(f"refinement moves one tensor of latents, not a {type(z).__name__}; fix or join the others.")
    return z.mean(0)


def _check_axis(x: Tensor, loc: Tensor, axis: int) -> int:
    batch = loc.shape[:-1]
    if not batch or x.shape[: len(batch)] != batch:
        raise ShapeError(
            f"locations {tuple(loc.shape)} and observations {tuple(x.shape)} do not fit: "
            "expected (*batch, d) and (*batch, p) with at least one batch axis."
        )
    if not -len(batch) <= axis < len(batch):
        raise ShapeError(f"axis={axis} is none of the {len(batch)} batch axes {tuple(batch)}.")
    return axis % len(batch)


def _check_positive(**settings: float) -> None:
    for name, value in settings.items():
        if not value > 0:
            raise SettingError(f"{name}={value} must be positive.")


def _chunks(model: Model, x: Tensor, z: Tensor, axis: int, max_bytes: int | None, *, copies: int) -> Iterator[Tensor]:
    """Indices along `axis`, as many at a time as fit `max_bytes` when each works on `copies` particles."""
    budget = _BUDGET if max_bytes is None else check_count(max_bytes, name="max_bytes")
    each = max(1, _TEMPORARIES * copies * _bytes_each(model, x, z, axis))
    yield from torch.arange(z.shape[axis], device=z.device).split(max(1, budget // each))


def _bytes_each(model: Model, x: Tensor, z: Tensor, axis: int) -> int:
    """What autograd keeps for one more entry along `axis`: two entries minus one, so that parameters do not count."""
    parts = ((x.narrow(axis, 0, m), z.narrow(axis, 0, m)) for m in (1, min(2, z.shape[axis])))
    one, two = (saved_bytes(partial(_try_gradient, model, *part)) for part in parts)
    return two - one


def _try_gradient(model: Model, x: Tensor, z: Tensor) -> None:
    """Take a gradient that can be differentiated again, as `_derivatives` will, or say why there is none."""
    with torch.enable_grad():
        z = z.detach().requires_grad_()
        log_p = _log_joint(model, x)(z[None])
        if log_p.shape != (1, *z.shape[:-1]):
            raise ShapeError(
                f"log_joint gives {tuple(log_p.shape)} for latents {(1, *z.shape)}; expected {(1, *z.shape[:-1])}."
            )
        gradient = (
            torch.autograd.grad(log_p.sum(), z, create_graph=True, allow_unused=True) if log_p.requires_grad else [None]
        )
    if gradient[0] is None:
        raise SettingError("log_joint carries no gradient in z; write it in torch operations, with nothing detached.")
