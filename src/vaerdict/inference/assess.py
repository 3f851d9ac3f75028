"""Importance weights of particles, and their assessment: expectation, standard error and verdict in one place.

`Posterior`, `vaerdict.expect`, the classifier and the stages of escalation all take their errors and verdicts from
`assess`. Therefore the error that is reported is the error on which an answer was accepted or refused.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from vaerdict import diagnostics, estimators
from vaerdict.core import (
    Estimate,
    Latent,
    Model,
    Observations,
    Proposal,
    ShapeError,
    check_log_joint,
    check_log_weights,
    device_of,
    evaluating,
    expand_trailing,
    log_mean_exp,
    log_normalise,
    map_latent,
    n_observations,
    parts_of,
    prepared,
    restricted,
    rows_of,
)
from vaerdict.diagnostics import Verdict
from vaerdict.noise import Randomness, draws_of, noise_of
from vaerdict.proposals import check_latent

_CHUNK = 2**24  # particles times features evaluated at a time, which bounds the memory of a likelihood
_EVIDENCE_ERRORS = 2.0  # standard errors on either side before two estimates of the evidence differ
_MARKOV = math.log(100)  # P(estimate > 100 x evidence) <= 1/100 for any distribution of the weights

Query = Callable[[Any, Tensor], Tensor]
"""A quantity of interest as a function of latents and row numbers (see `Target`).

Shapes: ``(K, m, d), (m, 1) -> (K, m, *out)``.
"""


# ----------------------------------------------------------------------------------------------------- weights
@torch.no_grad()
def importance_weights(
    model: Model, x: Observations, q: Proposal, n: int, *, strict: bool = True, generator: Randomness
) -> tuple[Latent, Tensor]:
    """Draw n particles of q per observation and compute their log-weights under the model.

    Observations are processed in chunks, so memory beyond the result is bounded. Modules are in evaluation mode. With
    `strict`, unusable weights (NaN, infinite, or all zero for an observation) raise `WeightError`.

    Shapes: ``x (n_obs, p) -> z (n, n_obs, d), log_w (n, n_obs)``.
    """
    with evaluating(model, q):
        z, log_w = _in_chunks(model, x, q, n, generator)
    return z, check_log_weights(log_w) if strict else log_w


def _in_chunks(model: Model, x: Observations, q: Proposal, n: int, generator: Randomness) -> tuple[Latent, Tensor]:
    n_obs = n_observations(x)
    width = getattr(model, "width", None) or sum(math.prod(part.shape[1:]) for part in parts_of(x))
    size = max(1, _CHUNK // (n * width))
    if n_obs <= size:
        return _draw_and_weight(model, x, q, n, generator)
    z: Latent = None
    log_w = torch.empty(0)
    for rows in torch.arange(n_obs, device=device_of(x)).split(size):
        with noise_of(generator, rows) as noise:
            z_rows, log_w_rows = _draw_and_weight(model, rows_of(x, rows), restricted(q, rows), n, noise)
        if z is None:
            z = map_latent(lambda t: t.new_empty(n, n_obs, *t.shape[2:]), z_rows)
            log_w = log_w_rows.new_empty(n, n_obs)
        for target, values in [(z, z_rows)] if isinstance(z, Tensor) else zip(z, z_rows, strict=True):
            target[:, rows] = values
        log_w[:, rows] = log_w_rows
    return z, log_w


def _draw_and_weight(model: Model, x: Observations, q: Proposal, n: int, noise: Randomness) -> tuple[Latent, Tensor]:
    z, log_q = check_latent(draws_of(q, x, n, noise), model.prior)
    return z, check_log_joint(model.log_joint(prepared(model, x), z), log_q, z) - log_q


# -------------------------------------------------------------------------------------------------- assessment
class Assessment(NamedTuple):
    """The posterior expectation of a query from weighted particles, its error, and the verdict on it.

    ``inside`` counts the effective draws in the smaller level set of an indicator (infinite: f has none), the least
    over outputs. ``khat`` is the largest k-hat of the query times the weights over its outputs, NaN where none could be
    assessed; ``weight_khat`` is that of the weights. ``verdict`` is on the expectation, whatever its error.

    Shapes: ``value, mcse (*batch, *out)``, the others ``(*batch)``.
    """

    value: Tensor
    mcse: Tensor
    ess: Tensor
    weight_khat: Tensor
    khat: Tensor
    inside: Tensor
    verdict: Tensor
    log_evidence: Tensor
    log_evidence_se: Tensor

    @property
    def estimate(self) -> Estimate:
        """Value, error, ESS and the k-hat of the weights."""
        return Estimate(self.value, self.mcse, self.ess, self.weight_khat)

    @property
    def log_evidence_low(self) -> Tensor:
        """Lower bound on the log evidence: two standard errors down where these are reliable, else by Markov."""
        reliable = ~(self.weight_khat > diagnostics.MAX_KHAT) & (self.ess >= 2)
        return self.log_evidence - torch.where(reliable, _EVIDENCE_ERRORS * self.log_evidence_se, _MARKOV)

    @property
    def log_evidence_high(self) -> Tensor:
        """The largest log evidence that is compatible with these particles."""
        return self.log_evidence + _EVIDENCE_ERRORS * self.log_evidence_se

    def cpu(self) -> Assessment:
        """The same on the CPU."""
        return Assessment(*(t.cpu() for t in self))

    def refused(self, n: int) -> Assessment:
        """As many refusals as asked for, of the same query."""
        empty = Assessment(*(t.new_full((n, *t.shape[1:]), torch.nan if t.is_floating_point() else 0) for t in self))
        return empty._replace(ess=torch.zeros_like(empty.ess), verdict=torch.full_like(empty.verdict, Verdict.REFUSE))

    def replaced(self, index: Tensor, new: Assessment) -> Assessment:
        """These with the observations at `index` replaced."""
        return Assessment(*(t.index_copy(0, index, u) for t, u in zip(self, new, strict=True)))

    def select(self, index: Tensor) -> Assessment:
        """The assessment of the observations at `index` of the first batch axis."""
        return Assessment(*(t[index] for t in self))


def assess(
    values: Tensor,
    log_w: Tensor,
    *,
    source: Tensor | None = None,
    replicate: Tensor | None = None,
    probes: Tensor | None = None,
    bounded: bool = False,
    smooth: bool = True,
) -> Assessment:
    """Expectation, error, event counts and verdict of a query from weighted particles.

    Parameters
    ----------
    values
        The query at every particle, ``(K, *batch, *out)``.
    log_w
        Log-weights, ``(K, *batch)``.
    source
        Index of each particle's proposal, ``(K,)``, where a fixed number was drawn from each of several proposals; the
        error is then stratified.
    replicate
        Index of the independent randomisation that each particle belongs to, ``(K,)``, for quasi-Monte-Carlo draws:
        the error is then that between randomisations.
    probes
        The query at points that are not draws, ``(M, *batch, *out)``: what else it may be (see `diagnostics.events`).
    bounded
        Whether the query is known to be bounded, as probabilities are. It cannot then make the tail of the weights
        heavier, and its k-hat is theirs.
    smooth
        Whether the weights are Pareto-smoothed.
    """
    if source is None:
        value, mcse, ess, weight_khat = (estimators.psis if smooth else estimators.snis)(values, log_w)
    else:
        value, mcse, ess, weight_khat = estimators.mis(values, log_w, source, smooth=smooth)
    if replicate is not None:
        mcse = _replicate_mcse(values, log_w, replicate)
    few = diagnostics.events(values, log_w, probes=probes)
    mcse = mcse.maximum(few.mcse)
    khat = weight_khat if bounded else _over_outputs(diagnostics.khat_of(values, log_w), log_w)
    return Assessment(
        value=value,
        mcse=mcse,
        ess=ess,
        weight_khat=weight_khat,
        khat=khat,
        inside=few.inside.reshape(*log_w.shape[1:], -1).amin(-1),
        verdict=diagnostics.verdict(khat, ess, len(log_w)),
        log_evidence=log_mean_exp(log_w.double()),
        log_evidence_se=_log_evidence_se(log_w, ess, replicate),
    )


class Weighted(NamedTuple):
    """Weighted particles with what their error depends on; `source` and `replicate` as in `assess`.

    Shapes: ``z (K, m, d)``, ``log_w (K, m)``, the rest ``(K,)``.
    """

    z: Tensor
    log_w: Tensor
    source: Tensor
    replicate: Tensor | None = None

    def values(self, query: Query | None, x: Tensor) -> Tensor:
        """The query at every particle and its observation, by default the latent in posterior standard deviations."""
        return standardised(self.z, self.log_w) if query is None else checked_values(query(self.z, x), self.log_w)

    def assess(self, values: Tensor, smooth: bool) -> Assessment:
        """The assessment of a query with these values."""
        return assess(values, self.log_w, source=self.source, replicate=self.replicate, smooth=smooth)

    def select(self, index: Tensor) -> Weighted:
        """The particles of the observations at `index`."""
        return self._replace(z=self.z[:, index], log_w=self.log_w[:, index])

    def at(self, part: slice) -> Weighted:
        """Some of the particles."""
        return Weighted(*(None if t is None else t[part] for t in self))  # type: ignore[arg-type]

    def joined(self, other: Weighted) -> Weighted:
        """The particles of both."""
        pairs = zip(self, other, strict=True)
        return Weighted(*(None if a is None or b is None else torch.cat([a, b]) for a, b in pairs))  # type: ignore[arg-type]


def checked_values(values: Tensor, log_w: Tensor) -> Tensor:
    """Values of a query at every particle; raises where their shape does not begin with that of the log-weights.

    Where a weight is zero in float64 a value that is not finite is replaced by zero: draws in a far tail may overflow.
    """
    if not isinstance(values, Tensor) or values.shape[: log_w.dim()] != log_w.shape:
        shape = tuple(values.shape) if isinstance(values, Tensor) else type(values).__name__
        raise ShapeError(
            f"f returned {shape}; it must return one value per particle, shape {tuple(log_w.shape)} first."
        )
    if values.is_floating_point() and not bool(values.isfinite().all()):
        weightless = log_normalise(log_w.double()).exp() == 0
        values = torch.where(expand_trailing(weightless, values) & ~values.isfinite(), 0, values)
    return values


def standardised(z: Tensor, log_w: Tensor) -> Tensor:
    """The latent in estimated posterior standard deviations from its mean. Shapes: ``(K, *batch, d)``."""
    mean = estimators.snis(z, log_w).value
    spread = estimators.snis((z - mean).square(), log_w).value.sqrt()
    return (z - mean) / spread.clamp_min(1e-12)


def _over_outputs(t: Tensor, log_w: Tensor) -> Tensor:
    """The largest entry over the outputs of a query, NaN only where all are. Shapes: ``(*batch, *out) -> (*batch)``."""
    t = t.reshape(*log_w.shape[1:], -1)
    return torch.where(t.isnan().all(-1), torch.nan, t.masked_fill(t.isnan(), -torch.inf).amax(-1))


def _replicate_mcse(values: Tensor, log_w: Tensor, replicate: Tensor) -> Tensor:
    """Standard error of a weighted mean from its spread over independent replicates. Shapes: ``-> (*batch, *out)``."""
    f, weight = values.double(), log_normalise(log_w.double()).exp()
    mass = _by_replicate(weight, replicate)
    sums = _by_replicate(expand_trailing(weight, f) * f, replicate)
    residual = sums - expand_trailing(mass, sums) * sums.sum(0)
    return (residual.square().sum(0) * len(mass) / (len(mass) - 1)).sqrt()


def _by_replicate(t: Tensor, replicate: Tensor) -> Tensor:
    """Sums over the particles of each replicate. Shapes: ``(K, *rest) -> (replicates, *rest)``."""
    index = replicate.to(t.device)
    return t.new_zeros(int(index.max()) + 1, *t.shape[1:]).index_add_(0, index, t)


def _log_evidence_se(log_w: Tensor, ess: Tensor, replicate: Tensor | None) -> Tensor:
    """Standard error of the log evidence by the delta method. Shapes: ``-> (*batch)``."""
    if replicate is not None:
        mass = _by_replicate(log_normalise(log_w.double()).exp(), replicate)
        return mass.std(0) * len(mass) ** 0.5
    return (1 / ess - 1 / len(log_w)).clamp_min(0).sqrt()
