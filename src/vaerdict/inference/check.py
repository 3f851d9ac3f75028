r"""Is ok ok for a model? Questions whose truth is known because the model itself has simulated it.

A latent :math:`z^*` drawn from the prior and an observation x drawn given it are a draw of the joint distribution.
Given x, therefore, :math:`z^*` is an exact draw of the posterior, also from modes that no search has found.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import reduce
from itertools import chain
from typing import Any

import numpy as np
import torch
from scipy import stats
from torch import Tensor

from vaerdict.core import (
    Latent,
    Model,
    Observations,
    Progress,
    SettingError,
    ShapeError,
    check_count,
    check_dtype,
    check_model,
    check_observations,
    evaluating,
    map_latent,
    n_observations,
    silent,
)
from vaerdict.diagnostics import Verdict
from vaerdict.inference.assess import checked_values
from vaerdict.inference.blocks import named_proposals, noise_for
from vaerdict.inference.escalation import escalate
from vaerdict.inference.sampling import Escalation
from vaerdict.inference.target import UserQuery, with_observations
from vaerdict.noise import fresh_seed, seeded
from vaerdict.priors import Prior, takes_observations

UNCOVERED = math.log(100)
"""A true latent whose log-weight is larger is not covered: the proposal has less than 1 % of the posterior density."""

MAX_UNCOVERED = 0.01
"""Largest share of latents that may be uncovered; the check fails if a 95 % interval lies above it."""

MIN_P = 0.001
"""The check fails if the p-value of calibration is smaller."""

_UNDECIDED = 0.1  # upper limit of the uncovered share above which the pairs show too little
_ROUNDING = 1e-6  # relative to the query, the least standard error

SampleX = Callable[[Latent, torch.Generator], Observations]
"""Draws one observation given each latent. Shapes: ``z (n, d), generator -> x (n, p)``."""


@dataclass(frozen=True, eq=False)
class CheckReport:
    """What `vaerdict.check` found; print it for a summary.

    ``x`` and ``z`` are the simulated pairs, ``record`` is the course of their escalation. Two tests per output of the
    query compare the ok answers with the query at the true latents: ``p_mean`` whether the answers are right on
    average, ``p_slope`` whether they differ between observations as much as the truth does. ``seconds`` is the time of
    all answers.

    Shapes: ``x (n, p)``, ``z (n, d)``, ``p_mean`` and ``p_slope (*out)``.
    """

    x: Observations
    z: Latent
    record: Escalation
    p_mean: Tensor
    p_slope: Tensor
    seconds: float

    @property
    def ok(self) -> Tensor:
        """Which answers were ok. Shapes: ``-> (n,)``."""
        return self.record.verdict == Verdict.OK

    @property
    def uncovered(self) -> Tensor:
        """Which ok answers came from draws that do not cover the true latent. Shapes: ``-> (n,)``."""
        return self.ok & ~(self.record.latent_log_w <= UNCOVERED)

    @property
    def missing(self) -> tuple[float, float]:
        """Clopper-Pearson interval (95 %) of the share of the posterior that ok answers miss, on average."""
        n, k = int(self.ok.sum()), int(self.uncovered.sum())
        return tuple(stats.binomtest(k, n).proportion_ci(0.95, method="exact")) if n else (0.0, 1.0)

    @property
    def p_value(self) -> float:
        """P-value of calibration: the least of all tests, times their number (Bonferroni)."""
        p = torch.cat([self.p_mean.flatten(), self.p_slope.flatten()])
        return min(1.0, float(p.min()) * len(p))

    @property
    def verdict(self) -> Verdict:
        """REFUSE if ok answers miss mass or are not calibrated, CAUTION if there are too few of them to tell."""
        low, high = self.missing
        if low > MAX_UNCOVERED or self.p_value < MIN_P:
            return Verdict.REFUSE
        return Verdict.CAUTION if high > _UNDECIDED else Verdict.OK

    def __str__(self) -> str:
        n, k, (low, high) = int(self.ok.sum()), int(self.uncovered.sum()), self.missing
        message = {
            Verdict.OK: "nothing speaks against the answers that are ok",
            Verdict.CAUTION: "too few answers are ok to tell; raise n_pairs=, or read record.reason",
            Verdict.REFUSE: "answers that are ok are not right for this model",
        }[self.verdict]
        counts = ", ".join(f"{int((self.record.verdict == v).sum())} {v.name}" for v in Verdict)
        return (
            f"{self.verdict.name}: {message}\n"
            f"answers      {counts}; {self.record.cost.mean():,.0f} evaluations each, {self.seconds:.0f} s in all\n"
            f"coverage     {k} of {n} true latents are not covered: ok answers miss {low:.1%} to {high:.1%} of the "
            "posterior (95 %)\n"
            f"calibration  p = {self.p_value:.2g} over {self.p_mean.numel()} output(s); smallest of the mean "
            f"{self.p_mean.min():.2g}, of the slope {self.p_slope.min():.2g}"
        )


def check(
    model: Model,
    query: UserQuery,
    proposals: Any = None,
    n: int = 1000,
    *,
    n_pairs: int = 100,
    sample_x: SampleX | None = None,
    tolerance: float = 0.02,
    rtol: float = 0.0,
    budget: int | None = None,
    seed: int | None = None,
    progress: Progress = silent,
) -> CheckReport:
    """Whether answers with the verdict OK are right for a model, by pairs (x, z) that are simulated from it.

    Each x is asked as by `vaerdict.expect`. Two properties are tested among the answers that are ok. Coverage: the
    draws behind an answer are dense enough at the true latent; where they are not, posterior mass was missed.
    Calibration: the query at the true latent agrees with the answers, on average and in slope.

    Parameters
    ----------
    model
        Any object with ``log_joint(x, z)`` and ``prior``.
    query
        The quantity of interest, ``f(z)`` or ``f(z, x)``, ``(K, m, d) -> (K, m, *out)`` for any subset of m
        observations.
    proposals
        One proposal, or several by name, which must serve any x: encoders, not proposals made for fixed observations.
    n
        Number of particles per observation and stage.
    n_pairs
        Number of pairs. With 100 ok answers, all covered, at most 3.6 % of the posterior is missed (95 %).
    sample_x
        Function ``(z, generator) -> x`` that draws an observation given each latent, ``(n_pairs, d) -> (n_pairs, p)``.
        By default pairs are from ``model.simulate(n_pairs, generator=generator)``, which returns ``(x, z)``.
    tolerance, rtol, budget
        As for `vaerdict.expect`.
    seed
        A whole number, with which the check repeats; by default every call differs.
    progress
        Called after each stage of escalation.

    Returns
    -------
    CheckReport
        The verdict with the evidence for it.

    Examples
    --------
    >>> import torch, vaerdict as vd
    >>> model = vd.models.PPCA(torch.eye(3, 1), noise_scale=1.0)
    >>> report = vd.check(model, lambda z: (z[..., 0] > 0).double(), n=500, n_pairs=50, tolerance=0.05, seed=0)
    >>> report.verdict.name, int(report.uncovered.sum())
    ('OK', 0)
    """
    like = _parameter(check_model(model))
    seed = fresh_seed() if seed is None else seed
    begin = time.perf_counter()
    with evaluating(model):
        x, z = simulated(model, sample_x, check_count(n_pairs, name="n_pairs"), seeded(seed, like.device))
        latents = map_latent(lambda t: t.unsqueeze(0), z)
        values = with_observations(query)(latents, x)
        truth = checked_values(values, values.new_zeros(1, n_observations(x), dtype=torch.double))[0]
        truth = truth.detach().double().cpu()
        record, _ = escalate(
            model,
            x,
            named_proposals(proposals),
            n,
            query=query,
            tolerance=tolerance,
            rtol=rtol,
            budget=budget,
            generator=noise_for(seed, x),
            keep=False,
            latent=z,
            progress=progress,
        )
    p_mean, p_slope = _calibration(truth, record)
    return CheckReport(x, z, record, p_mean, p_slope, time.perf_counter() - begin)


def _parameter(model: Model) -> Tensor:
    """A parameter or buffer of the model, whose type and device latents get; any number where it has none."""
    parameters, buffers = (getattr(model, name, tuple)() for name in ("parameters", "buffers"))
    return next((t for t in chain(parameters, buffers) if t.is_floating_point()), torch.empty(0))


@torch.no_grad()
def simulated(
    model: Model, sample_x: SampleX | None, n: int, generator: torch.Generator
) -> tuple[Observations, Latent]:
    """Pairs from the model. Shapes: ``-> x (n, p), z (n, d)``."""
    like = _parameter(model)
    if sample_x is not None:
        if takes_observations(model.prior):
            raise SettingError("the prior depends on the observations; give the model simulate(n, generator=...).")
        z = Prior(model.prior).draw(like.new_zeros(n, 1), 1, generator=generator).z
        z = map_latent(lambda t: t[0], z)
        x = sample_x(z, generator)
    elif hasattr(model, "simulate"):
        x, z = model.simulate(n, generator=generator)  # pyright: ignore[reportAttributeAccessIssue]
    else:
        raise SettingError(
            f"{type(model).__name__} has no simulate(n, generator=...), which returns (x, z); pass sample_x=, a "
            "function (z, generator) -> x that draws an observation given each latent."
        )
    check_dtype(check_observations(x), model)
    n_z = len(z if isinstance(z, Tensor) else z[0])
    if n_observations(x) != n or n_z != n:
        raise ShapeError(
            f"{n} pairs were asked for, but x has {n_observations(x)} rows and z has {n_z}; one per pair is needed."
        )
    return x, z


# ------------------------------------------------------------------------------------------------- calibration
def _calibration(truth: Tensor, record: Escalation) -> tuple[Tensor, Tensor]:
    """P-values per output of mean and slope of the ok answers; 1 with fewer than two of them."""
    out, ok = truth.shape[1:], record.verdict == Verdict.OK
    truth, value, mcse = (t[ok].reshape(-1, math.prod(out)) for t in (truth, record.value, record.mcse))
    p = torch.ones(2, truth.shape[-1], dtype=torch.float64)
    for j in range(truth.shape[-1] if len(truth) > 1 else 0):
        f, v, error = truth[:, j], value[:, j], mcse[:, j]
        indicator = ((f == 0) | (f == 1)).all() and ((v >= 0) & (v <= 1)).all()
        p[:, j] = p.new_tensor((_of_events if indicator else _of_numbers)(f, v, error))
    p_mean, p_slope = torch.nan_to_num(p, nan=0.0)  # a query that is not finite at the truth is not calibrated
    return p_mean.reshape(out), p_slope.reshape(out)


def _of_numbers(f: Tensor, value: Tensor, mcse: Tensor) -> tuple[float, float]:
    """T-tests that f - value has mean zero and is not correlated with the values. Shapes: ``(n,)`` each."""
    centred = value - value.mean()
    # the Monte-Carlo error is in both factors of the product, with opposite signs
    product = (f - value) * centred + mcse.square()
    scale = _ROUNDING * f.abs().max()
    return _t_test(f - value, mcse, scale), _t_test(product, mcse * centred, scale * centred.abs().max())


def _t_test(sample: Tensor, mcse: Tensor, rounding: Tensor) -> float:
    """Two-sided p-value of mean zero; the variance is that of the sample plus that of Monte Carlo."""
    n = len(sample)
    error = ((sample.var() + mcse.square().mean()) / n).sqrt() + rounding
    return float(2 * stats.t.sf(float(sample.mean().abs() / error.clamp_min(1e-300)), n - 1))


def _of_events(y: Tensor, prob: Tensor, mcse: Tensor) -> tuple[float, float]:
    """Exact tests of the number of events and of the number of times the less probable outcome was true.

    The second is too large where probabilities are too extreme, and too small where they are not extreme enough.

    Shapes: ``(n,)`` each.
    """
    likely = (prob > 0.5).double()
    return _count_test(y, prob, mcse), _count_test((y - likely).abs(), (prob - likely).abs(), mcse)


def _count_test(y: Tensor, prob: Tensor, mcse: Tensor) -> float:
    """Two-sided p-value of a sum of independent events; a probability of 0 or 1 is believed to within its error."""
    count, error = int(y.sum()), mcse.clamp_max(1)
    upper = _sum_pmf(prob.maximum(error))[count:].sum()
    lower = _sum_pmf(prob.minimum(1 - error))[: count + 1].sum()
    return min(1.0, 2 * float(min(upper, lower)))


def _sum_pmf(prob: Tensor) -> np.ndarray:
    """Probabilities of 0, ..., n events among n independent ones. Shapes: ``(n,) -> (n + 1,)``."""
    return reduce(np.convolve, [(1 - p, p) for p in prob.tolist()], np.ones(1))
