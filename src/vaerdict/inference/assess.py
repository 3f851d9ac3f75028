"""How good weighted particles are as an answer: their verdict, their error, and the evidence they vouch for."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from vaerdict import diagnostics, estimators
from vaerdict.core import Latent, expand_trailing, log_mean_exp
from vaerdict.diagnostics import Verdict
from vaerdict.samplers import by_island, log_standard_error

_SURE = 2.0  # standard errors of either side before evidence counts as different
_MARKOV = math.log(100)  # P(estimate > 100 x evidence) <= 1/100 however heavy the tail of the weights

Query = Callable[[Latent], Tensor]


class Particles(NamedTuple):
    """What a rung found: particles, log-weights, and what each observation paid in model evaluations.

    `islands` is the number of independent groups the particles fall in (particle i in group i modulo that number), 0
    where all are independent. Shapes: ``z (n, m, d)``, ``log_w (n, m)``, ``cost (m,)``.
    """

    z: Tensor
    log_w: Tensor
    cost: Tensor
    islands: int = 0

    @property
    def usable(self) -> Tensor:
        """Whether an observation has weights to judge by: none NaN or infinite, one positive. Shapes: ``-> (m,)``."""
        return self.log_w.amax(0).isfinite().cpu()

    def select(self, keep: Tensor) -> Particles:
        """What was found for the observations where `keep` is true."""
        if bool(keep.all()):
            return self
        at = keep.to(self.log_w.device)
        return Particles(self.z[:, at], self.log_w[:, at], self.cost[keep], self.islands)


class Judgement(NamedTuple):
    """How good a rung's answer is, one entry an observation.

    ``verdict`` and ``khat`` are those of the query times the weights; ``sound`` says whether the weights alone, and
    with them the error of the evidence, can be trusted.
    """

    verdict: Tensor
    khat: Tensor
    ess: Tensor
    mcse: Tensor
    log_evidence: Tensor
    error: Tensor
    sound: Tensor

    @property
    def surely(self) -> Tensor:
        """Evidence that is there at least: two standard errors down where these can be trusted, else by Markov."""
        return self.log_evidence - torch.where(self.sound, _SURE * self.error, _MARKOV)

    @property
    def at_most(self) -> Tensor:
        """Evidence these draws could still be made to agree with."""
        return self.log_evidence + _SURE * self.error


def judge(found: Particles, query: Query | None) -> Judgement:
    """Judge particles by a query, by default the latent itself in posterior standard deviations."""
    values = _standardised(found) if query is None else query(found.z)
    if found.islands:
        return _judge_islands(found, values)
    smoothed, own = diagnostics.psis(found.log_w)
    ess, n = diagnostics.ess(found.log_w), found.log_w.shape[0]
    khat = worst_khat(values, found.log_w)
    # smoothed weights can hide a draw that outweighs all others, and with it mass that was hit once: count both errors
    errors = [diagnostics.mcse_snis(values.double(), log_w.double()) for log_w in (smoothed, found.log_w)]
    mcse = _worst(torch.maximum(*errors).maximum(diagnostics.least_mcse(values, ess)), ess)
    error = (1 / ess - 1 / n).clamp_min(0).sqrt()
    verdict, sound = diagnostics.verdict(khat, ess, n), diagnostics.verdict(own, ess, n) != Verdict.REFUSE
    evidence = log_mean_exp(found.log_w.double())
    return Judgement(*(t.cpu() for t in (verdict, khat, ess, mcse, evidence, error.double(), sound)))


def _judge_islands(found: Particles, values: Tensor) -> Judgement:
    """Particles that have been resampled and moved are judged by the spread between groups that never met."""
    error = log_standard_error(log_mean_exp(by_island(found.log_w.double(), found.islands)))
    ess = diagnostics.ess(found.log_w)
    spread_mcse = island_mcse(values, found.log_w, found.islands)
    mcse = _worst(spread_mcse.maximum(diagnostics.least_mcse(values, ess)), error)
    khat = worst_khat(values, found.log_w)
    verdict = torch.where(error <= 0.25, verdict_after_moves(khat), Verdict.REFUSE)
    evidence, sound = log_mean_exp(found.log_w.double()), error <= 0.25
    return Judgement(*(t.cpu() for t in (verdict, khat, ess, mcse, evidence, error, sound)))


def island_mcse(f: Tensor, log_w: Tensor, islands: int) -> Tensor:
    """Standard error of a weighted mean from the spread of its means over independent groups of particles.

    Shapes: ``f (n, *batch, *out), log_w (n, *batch) -> (*batch, *out)``.
    """
    groups_w, groups_f = by_island(log_w.double(), islands), by_island(f.double(), islands)
    means = (expand_trailing(torch.softmax(groups_w, 0), groups_f) * groups_f).sum(0)
    weight = expand_trailing(torch.softmax(torch.logsumexp(groups_w, 0), 0), means)
    center = (weight * means).sum(0)
    return ((weight * (means - center)).square().sum(0) * islands / (islands - 1)).sqrt()


def _standardised(found: Particles) -> Tensor:
    """The latent in posterior standard deviations, as far as the weights know them."""
    mean = estimators.snis(found.z, found.log_w).value
    spread = estimators.snis((found.z - mean).square(), found.log_w).value.sqrt()
    return (found.z - mean) / spread.clamp_min(1e-12)


def worst_khat(values: Tensor, log_w: Tensor) -> Tensor:
    """The largest k-hat over the outputs of a query, NaN where none could be assessed.

    Shapes: ``values (K, *batch, *out), log_w (K, *batch) -> (*batch)``.
    """
    khat = diagnostics.khat_of(values, log_w).reshape(*log_w.shape[1:], -1)
    return torch.where(khat.isnan().all(-1), torch.nan, khat.masked_fill(khat.isnan(), -torch.inf).amax(-1))


def verdict_after_moves(khat: Tensor) -> Tensor:
    """`Verdict` on a query about particles that have been resampled and moved: is there a mean to be had?

    Of their weights k-hat says nothing any more, but still of a query without a mean. Shapes: ``(*batch)``.
    """
    return torch.where(khat > diagnostics.MAX_KHAT, Verdict.REFUSE, Verdict.OK)


def _worst(mcse: Tensor, like: Tensor) -> Tensor:
    """The largest error over the outputs of an observation."""
    return mcse.reshape(*like.shape, -1).amax(-1)
