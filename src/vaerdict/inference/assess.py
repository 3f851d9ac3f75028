"""Importance weights of particles, and their assessment: expectation, standard error and verdict in one place.

`Posterior`, `vaerdict.expect` and the stages of escalation all take their errors and verdicts from `Assessment`.
Therefore the error that is reported is the error on which an answer was accepted or refused.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from vaerdict import diagnostics, estimators
from vaerdict.core import (
    Estimate,
    Latent,
    Model,
    Proposal,
    ShapeError,
    check_log_joint,
    check_log_weights,
    evaluating,
    expand_trailing,
    log_mean_exp,
    map_latent,
    prepared,
    restricted,
)
from vaerdict.diagnostics import Verdict
from vaerdict.noise import Randomness
from vaerdict.proposals import check_latent
from vaerdict.samplers import by_island, log_standard_error

_CHUNK = 2**24  # particles times features evaluated at a time, which bounds the memory of a likelihood
_EVIDENCE_ERRORS = 2.0  # standard errors on either side before two estimates of the evidence differ
_MARKOV = math.log(100)  # P(estimate > 100 x evidence) <= 1/100 for any distribution of the weights
_MAX_ISLAND_SPREAD = 0.25  # standard error of the log evidence between islands above which they disagree

Query = Callable[[Latent], Tensor]
"""A quantity of interest as a function of the latent. Shapes: ``(K, *batch, d) -> (K, *batch, *out)``."""


# ----------------------------------------------------------------------------------------------------- weights
@torch.no_grad()
def importance_weights(
    model: Model, x: Tensor, q: Proposal, n: int, *, strict: bool = True, generator: Randomness
) -> tuple[Latent, Tensor]:
    """Draw n particles of q per observation and compute their log-weights under the model.

    Observations are processed in chunks, so memory beyond the result is bounded. Modules are in evaluation mode. With
    `strict`, unusable weights (NaN, infinite, or all zero for an observation) raise `WeightError`.

    Shapes: ``x (n_obs, p) -> z (n, n_obs, d), log_w (n, n_obs)``.
    """
    with evaluating(model, q):
        z, log_w = _in_chunks(model, x, q, n, generator)
    return z, check_log_weights(log_w) if strict else log_w


def _in_chunks(model: Model, x: Tensor, q: Proposal, n: int, generator: Randomness) -> tuple[Latent, Tensor]:
    size = max(1, _CHUNK // (n * x.shape[-1]))
    if x.shape[0] <= size:
        return _draw_and_weight(model, x, q, n, generator)
    z: Latent = None
    log_w = torch.empty(0)
    for rows in torch.arange(x.shape[0], device=x.device).split(size):
        z_rows, log_w_rows = _draw_and_weight(model, x[rows], restricted(q, rows), n, generator)
        if z is None:
            z = map_latent(lambda t: t.new_empty(n, x.shape[0], *t.shape[2:]), z_rows)
            log_w = log_w_rows.new_empty(n, x.shape[0])
        for target, values in [(z, z_rows)] if isinstance(z, Tensor) else zip(z, z_rows, strict=True):
            target[:, rows] = values
        log_w[:, rows] = log_w_rows
    return z, log_w


def _draw_and_weight(model: Model, x: Tensor, q: Proposal, n: int, generator: Randomness) -> tuple[Latent, Tensor]:
    z, log_q = check_latent(q.draw(x, n, generator=generator), model.prior)
    return z, check_log_joint(model.log_joint(prepared(model, x), z), log_q, z) - log_q


# -------------------------------------------------------------------------------------------------- assessment
@dataclass(frozen=True, eq=False)
class Assessment:
    """The posterior expectation of a query from weighted particles, its error, and the verdict on it.

    Each quantity is computed when it is first read.

    Parameters
    ----------
    values
        The query at every particle, ``(K, *batch, *out)``.
    log_w
        Log-weights, ``(K, *batch)``.
    source
        Index of each particle's proposal, ``(K,)``, where a fixed number was drawn from each of several proposals; the
        error is then stratified.
    islands
        Number of independent groups of particles per observation, ``(n_obs,)``: particle i is in group i modulo that
        number, which is the same wherever it is positive. 0: all particles of the observation are independent.
        Particles of sequential Monte Carlo come in such groups. Their mean uses the raw weights, and their errors are
        those between groups.
    smooth
        Whether the weights of independent particles are Pareto-smoothed.
    """

    values: Tensor
    log_w: Tensor
    source: Tensor | None = None
    islands: Tensor | None = None
    smooth: bool = True

    @cached_property
    def estimate(self) -> Estimate:
        """Value and standard error ``(*batch, *out)``; ESS and k-hat of the weights ``(*batch)``."""
        if self.source is not None:
            return estimators.mis(self.values, self.log_w, self.source, smooth=self.smooth)
        estimate = (estimators.psis if self.smooth else estimators.snis)(self.values, self.log_w)
        grouped, n_islands = self._grouped
        if not n_islands:
            return estimate
        f, log_w = self.values[:, grouped], self.log_w[:, grouped]
        unsmoothed = estimators.snis(f, log_w)
        value, mcse = estimate.value.clone(), estimate.mcse.clone()
        value[grouped] = unsmoothed.value
        mcse[grouped] = island_mcse(f, log_w, n_islands).maximum(diagnostics.least_mcse(f, unsmoothed.ess))
        return estimate._replace(value=value, mcse=mcse)

    @property
    def mcse(self) -> Tensor:
        """The largest standard error over the outputs of the query. Shapes: ``-> (*batch)``."""
        return self.estimate.mcse.reshape(*self.log_w.shape[1:], -1).amax(-1)

    @cached_property
    def khat(self) -> Tensor:
        """The largest k-hat of the query times the weights over its outputs, NaN where none could be assessed.

        Shapes: ``-> (*batch)``.
        """
        khat = diagnostics.khat_of(self.values, self.log_w).reshape(*self.log_w.shape[1:], -1)
        return torch.where(khat.isnan().all(-1), torch.nan, khat.masked_fill(khat.isnan(), -torch.inf).amax(-1))

    @cached_property
    def verdict(self) -> Tensor:
        """`Verdict` on the expectation, whatever its error. Shapes: ``-> (*batch)``.

        K-hat of resampled and moved particles says nothing about their weights, but it still detects a query without a
        mean. These are refused for that, or because their groups disagree on the evidence.
        """
        verdict = diagnostics.verdict(self.khat, self.estimate.ess, len(self.log_w))
        grouped, n_islands = self._grouped
        if n_islands:
            refused = (self.khat > diagnostics.MAX_KHAT) | ~(self.log_evidence_se <= _MAX_ISLAND_SPREAD)
            verdict[grouped] = torch.where(refused, Verdict.REFUSE, Verdict.OK)[grouped]
        return verdict

    @property
    def log_evidence(self) -> Tensor:
        """Estimate of log p(x). Shapes: ``-> (*batch)``."""
        return log_mean_exp(self.log_w.double())

    @cached_property
    def log_evidence_se(self) -> Tensor:
        """Standard error of `log_evidence`. Shapes: ``-> (*batch)``."""
        error = (1 / self.estimate.ess - 1 / len(self.log_w)).clamp_min(0).sqrt()
        grouped, n_islands = self._grouped
        if n_islands:
            per_island = log_mean_exp(by_island(self.log_w[:, grouped].double(), n_islands))
            error[grouped] = log_standard_error(per_island)
        return error

    @property
    def log_evidence_low(self) -> Tensor:
        """Lower bound on the log evidence: two standard errors down where these are reliable, else by Markov.

        Shapes: ``-> (*batch)``.
        """
        reliable = diagnostics.verdict(self.estimate.khat, self.estimate.ess, len(self.log_w)) != Verdict.REFUSE
        grouped, n_islands = self._grouped
        if n_islands:
            reliable[grouped] = (self.log_evidence_se <= _MAX_ISLAND_SPREAD)[grouped]
        return self.log_evidence - torch.where(reliable, _EVIDENCE_ERRORS * self.log_evidence_se, _MARKOV)

    @property
    def log_evidence_high(self) -> Tensor:
        """The largest log evidence that is compatible with these particles. Shapes: ``-> (*batch)``."""
        return self.log_evidence + _EVIDENCE_ERRORS * self.log_evidence_se

    @cached_property
    def _grouped(self) -> tuple[Tensor, int]:
        """Observations whose particles come in islands, and how many islands these are (0: none)."""
        if self.islands is None:
            return torch.empty(0, dtype=torch.long), 0
        return self.islands.to(self.log_w.device).nonzero().flatten(), int(self.islands.max())


def evaluate(query: Query, z: Latent, log_w: Tensor) -> Tensor:
    """The query at every particle; raises where its shape does not begin with that of the log-weights."""
    values = query(z)
    if not isinstance(values, Tensor) or values.shape[: log_w.dim()] != log_w.shape:
        shape = tuple(values.shape) if isinstance(values, Tensor) else type(values).__name__
        raise ShapeError(
            f"f returned {shape}; it must return one value per particle, shape {tuple(log_w.shape)} first."
        )
    return values


def standardised(z: Tensor, log_w: Tensor) -> Tensor:
    """The latent in estimated posterior standard deviations from its mean. Shapes: ``(K, *batch, d)``."""
    mean = estimators.snis(z, log_w).value
    spread = estimators.snis((z - mean).square(), log_w).value.sqrt()
    return (z - mean) / spread.clamp_min(1e-12)


def island_mcse(f: Tensor, log_w: Tensor, n_islands: int) -> Tensor:
    """Standard error of a weighted mean from the spread of its means over independent groups of particles.

    Shapes: ``f (n, *batch, *out), log_w (n, *batch) -> (*batch, *out)``.
    """
    groups_w, groups_f = by_island(log_w.double(), n_islands), by_island(f.double(), n_islands)
    means = (expand_trailing(torch.softmax(groups_w, 0), groups_f) * groups_f).sum(0)
    weight = expand_trailing(torch.softmax(torch.logsumexp(groups_w, 0), 0), means)
    center = (weight * means).sum(0)
    return ((weight * (means - center)).square().sum(0) * n_islands / (n_islands - 1)).sqrt()
