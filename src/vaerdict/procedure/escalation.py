"""Escalation: spend more on an observation only while its answer is not good enough, and refuse where nothing helps.

The rungs, in order of cost: the first proposal as it is (PSIS; `plugin` where its weights are so even that they do not
matter), the mixture of all proposals (MIS), a proposal refined for the observation by the posterior's curvature
(REFINED), the same improved by gradient steps on its bound (IMPROVED), and sequential Monte Carlo from the prior
(SMC). A rung answers when

1. its k-hat passes the sample-size-aware threshold (`vaerdict.diagnostics.verdict` says ok),
2. the Monte-Carlo error of the quantity asked for is within the tolerance, and
3. no other draws show posterior mass that it missed. Weights cannot show what no draw has hit, so a pilot's own ESS and
   k-hat are never trusted alone: an unbiased estimate of the evidence that covers part of the posterior lies below one
   that covers all of it. Scouts climb from draws of the prior to the modes they find, and a rung whose evidence is
   clearly below that of draws around those modes, or of another rung, is not believed. Nor is a local proposal
   (REFINED, IMPROVED) with uneven weights: where the posterior bends away from its curvature, as a ring does, draws
   near its modes agree with each other on the part they see.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from vaerdict import diagnostics, estimators
from vaerdict.core import (
    Latent,
    Model,
    Progress,
    Proposal,
    SettingError,
    log_mean_exp,
    restricted,
    silent,
)
from vaerdict.diagnostics import Verdict
from vaerdict.noise import Randomness
from vaerdict.procedure.weighing import weigh
from vaerdict.proposals import Mixture, Prior, defensive
from vaerdict.refinement import refine, refine_elbo
from vaerdict.samplers import smc

PLUGIN, PSIS, MIS, REFINED, IMPROVED, SMC = RUNGS = ("plugin", "PSIS", "MIS", "REFINED", "IMPROVED", "SMC")

_EVEN = 0.95  # share of the draws in the ESS above which weights do not matter
_SHAPED = 0.3  # and below which a posterior is not shaped as its own curvature says
_ISLANDS = 16
_FEWEST = 64  # every scout and every island needs draws of its own
_SLACK = 0.02  # nats of evidence, hence a share of the posterior, that may be missing
_SURE = 2.0  # standard errors of either side before evidence counts as different
_MARKOV = math.log(100)  # P(estimate > 100 x evidence) <= 1/100 however heavy the tail of the weights
_SCOUTS = 16  # starts from the prior: a mode that catches half of them is missed by all once in 65,536 times

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


@dataclass
class Escalation:
    """For each observation: which rung answered, the verdict, why, and at what cost in model evaluations.

    Cost counts draws that were weighed and gradients, one each; the trial points of line searches and the draws that
    compare two refined proposals come on top. ``mcse`` and ``khat`` are the worst over the outputs of the query.
    """

    rung: list[str]
    reason: list[str]
    verdict: Tensor
    cost: Tensor
    mcse: Tensor
    khat: Tensor
    ess: Tensor
    islands: Tensor

    def summary(self) -> dict[str, int]:
        """How many observations each rung answered, and how many were refused."""
        answered = [r for r, v in zip(self.rung, self.verdict.tolist(), strict=True) if v == Verdict.OK]
        return {
            **{r: answered.count(r) for r in RUNGS if r in answered},
            "refused": int((self.verdict == Verdict.REFUSE).sum()),
        }


def climb(
    model: Model,
    x: Tensor,
    proposals: Mapping[str, Proposal],
    n: int,
    *,
    query: Query | None,
    tolerance: float,
    budget: int | None,
    generator: Randomness,
    progress: Progress = silent,
) -> tuple[Tensor, Tensor, Escalation]:
    """Take every observation up the ladder until its answer is good enough; returns particles, log-weights, record.

    `query` is the quantity whose error matters; without one it is the latent itself, in posterior standard deviations.
    It is asked about the observations still climbing alone, so it must be a function of the latent, not of its place.
    """
    if not tolerance > 0:
        raise SettingError(f"tolerance={tolerance} must be positive: it is the largest acceptable Monte-Carlo error.")
    if n < _FEWEST:
        raise SettingError(f"n={n} draws are too few to escalate with; use {_FEWEST} or more.")
    ladder = _Ladder(model, x, proposals, n, query, tolerance, budget, generator)
    for number, (name, rung, expected_cost) in enumerate(ladder.rungs()):
        active = ladder.climbing(name, expected_cost)
        if len(active):
            ladder.settle(active, name, rung(active))
        progress(number + 1, ladder.n_rungs, f"{name}: {len(active)} observations")
    return ladder.finish()


class _Ladder:
    """The state of an escalation: the best answer of each observation so far and the evidence it must live up to."""

    def __init__(
        self,
        model: Model,
        x: Tensor,
        proposals: Mapping[str, Proposal],
        n: int,
        query: Query | None,
        tolerance: float,
        budget: int | None,
        generator: Randomness,
    ) -> None:
        self.model, self.x, self.n = model, x, n
        # every rung adds the prior itself
        self.proposals = {name: q for name, q in proposals.items() if name != "PRIOR"}
        self.query, self.tolerance, self.budget, self.generator = query, tolerance, budget, generator
        m = x.shape[0]
        self.record = Escalation(
            [""] * m,
            ["nothing was tried"] * m,
            torch.full((m,), int(Verdict.REFUSE)),
            torch.zeros(m),
            torch.full((m,), torch.inf),
            torch.full((m,), torch.nan),
            torch.zeros(m),
            torch.zeros(m, dtype=torch.long),
        )
        self.accepted = torch.zeros(m, dtype=torch.bool)
        self.missed = torch.zeros(m, dtype=torch.bool)
        self.bar = torch.full((m,), -torch.inf, dtype=torch.float64)  # evidence that is surely there
        self.z: Tensor | None = None
        self.log_w: Tensor | None = None

    @property
    def n_rungs(self) -> int:
        """How many rungs there are for these proposals."""
        return len(list(self.rungs()))

    def rungs(self) -> Iterator[tuple[str, Callable[[Tensor], Particles], int]]:
        """Name, action and expected cost of each rung."""
        if self.proposals:
            yield PSIS, self._first, 2 * self.n
            yield MIS, self._mixture, self.n
        yield REFINED, self._refined, 2 * self.n
        yield IMPROVED, self._improved, 2 * self.n + 3600
        yield SMC, self._smc, 30 * self.n

    def climbing(self, name: str, expected_cost: int) -> Tensor:
        """Observations that still need an answer and can pay for this rung."""
        active = (~self.accepted).nonzero().flatten()
        if self.budget is None:
            return active
        able = self.record.cost[active] + expected_cost <= self.budget
        for i in active[~able].tolist():
            self.record.reason[i] = (
                f"the budget of {self.budget} evaluations ends before {name}; {self.record.reason[i]}"
            )
            self.record.verdict[i] = Verdict.REFUSE
            self.accepted[i] = True
        return active[able]

    def settle(self, active: Tensor, name: str, found: Particles) -> None:
        """Judge a rung's answers, keep those better than what there was, and close the observations that are done."""
        judged = _judge(found, self.query)
        self.bar[active] = torch.maximum(self.bar[active], judged.surely)
        missed = judged.at_most + _SLACK < self.bar[active]
        done = (judged.verdict == Verdict.OK) & (judged.mcse <= self.tolerance) & ~missed
        if name in (REFINED, IMPROVED):
            done &= judged.ess >= _SHAPED * self.n
        # an answer that misses mass never outranks one that does not, however small its error looks
        lower = torch.where(self.missed[active] == missed, judged.mcse < self.record.mcse[active], ~missed)
        better = done | lower | torch.isinf(self.record.mcse[active])
        self.missed[active[better]] = missed[better]
        self._keep(active, found, judged, name, better, missed, done)
        self.record.cost[active] += found.cost.to(self.record.cost)
        self.accepted[active] = done

    def _keep(
        self,
        active: Tensor,
        found: Particles,
        judged: Judgement,
        name: str,
        better: Tensor,
        missed: Tensor,
        done: Tensor,
    ) -> None:
        if self.z is None or self.log_w is None:
            self.z = found.z.new_zeros(self.n, self.x.shape[0], found.z.shape[-1])
            self.log_w = found.log_w.new_zeros(self.n, self.x.shape[0])
        where = active[better]
        self.z[:, where] = found.z[:, better].to(self.z)
        self.log_w[:, where] = found.log_w[:, better].to(self.log_w)
        record = self.record
        for target, value in ((record.mcse, judged.mcse), (record.khat, judged.khat), (record.ess, judged.ess)):
            target[where] = value[better].to(target)
        record.verdict[where] = torch.where(done, Verdict.OK, Verdict.REFUSE)[better].to(record.verdict)
        record.islands[where] = found.islands
        for j, i in enumerate(active.tolist()):
            if better[j]:
                record.rung[i] = self._label(name, judged.ess[j].item())
                record.reason[i] = self._reason(name, judged, j, bool(missed[j]), bool(done[j]))
            else:
                record.reason[i] += f"; {name} did no better"

    def _label(self, name: str, ess: float) -> str:
        return PLUGIN if name == PSIS and ess >= _EVEN * self.n else name

    def _reason(self, name: str, judged: Judgement, j: int, missed: bool, done: bool) -> str:
        khat, mcse = judged.khat[j].item(), judged.mcse[j].item()
        if done:
            assessed = "" if math.isnan(khat) else f"k-hat {khat:.2f}, "
            return f"{name}: {assessed}Monte-Carlo error {mcse:.2g} within {self.tolerance:g}"
        if missed:
            return f"{name} misses posterior mass that other draws have found"
        if judged.verdict[j] != Verdict.OK and name == SMC:
            return f"{name}: groups of particles that never met disagree on the evidence; more draws may settle it"
        if judged.verdict[j] != Verdict.OK:
            return f"{name}: k-hat {khat:.2f} with ESS {judged.ess[j].item():.0f} of {self.n} draws is not reliable"
        if mcse <= self.tolerance:
            return f"{name}: with ESS {judged.ess[j].item():.0f} of {self.n} draws the posterior is of another shape"
        more = math.ceil((mcse / self.tolerance) ** 2)
        return f"{name}: Monte-Carlo error {mcse:.2g} exceeds {self.tolerance:g}; about {more} times the draws would do"

    def _weigh(self, q: Proposal, active: Tensor, extra: Tensor | float = 0.0) -> Particles:
        z, log_w = weigh(self.model, self.x[active], q, self.n, generator=self.generator)
        return Particles(z, log_w, torch.full((len(active),), float(self.n)) + extra)

    def _first(self, active: Tensor) -> Particles:
        """The first proposal alone; draws around the scouts' modes set the evidence it must live up to."""
        components, cost = self._scouts(active)
        shares = {name: (0.5 if name in self.proposals else 1.0) for name in components}
        check = self._weigh(Mixture(components, shares), active)
        self.bar[active] = torch.maximum(self.bar[active], _judge(check, None).surely)
        first = next(iter(self._proposals(active).values()))
        return self._weigh(first, active, extra=cost + self.n)

    def _mixture(self, active: Tensor) -> Particles:
        return self._weigh(defensive(self._proposals(active), self.model.prior), active)

    def _refined(self, active: Tensor) -> Particles:
        """Local proposals around the mode uphill of the first proposal and around the modes the scouts find."""
        local = refine(self.model, self.x[active], self._start(active), generator=self.generator)
        return self._around(active, REFINED, local.distribution, local.n_gradients.cpu())

    def _improved(self, active: Tensor) -> Particles:
        """The local proposal after gradient steps on its own bound; the scouts' modes stay in."""
        x = self.x[active]
        local = refine(self.model, x, self._start(active), inflate=1.0, generator=self.generator)
        better = refine_elbo(self.model, x, local.distribution, generator=self.generator)
        return self._around(active, IMPROVED, better.distribution, local.n_gradients.cpu() + better.n_gradients)

    def _start(self, active: Tensor) -> Proposal | Tensor:
        """Where refinement sets out from: the first proposal, or else the middle of the prior's draws."""
        first = next(iter(self._proposals(active).values()), None)
        if first is not None:
            return first
        return Prior(self.model.prior).draw(self.x[active], 64, generator=self.generator).z.mean(0)

    def _around(self, active: Tensor, name: str, local: Proposal, cost: Tensor) -> Particles:
        components, scouting = self._scouts(active)
        shares = dict.fromkeys(components, 0.4 / _SCOUTS) | {name: 0.4, "PRIOR": 0.05}
        shares |= dict.fromkeys(self.proposals, 0.15 / max(1, len(self.proposals)))
        return self._weigh(Mixture({name: local, **components}, shares), active, extra=cost + scouting)

    def _scouts(self, active: Tensor) -> tuple[dict[str, Proposal], Tensor]:
        """Every proposal, the prior, and local ones at the modes uphill of draws from the prior; the cost of these."""
        x, prior = self.x[active], Prior(self.model.prior)
        starts = prior.draw(x, _SCOUTS, generator=self.generator).z
        found = refine(self.model, x.expand(_SCOUTS, *x.shape), starts, axis=1)
        local: dict[str, Proposal] = {f"SCOUT-{j}": found.distribution.at(j) for j in range(_SCOUTS)}
        return {**local, **self._proposals(active), "PRIOR": prior}, found.n_gradients.sum(0).cpu()

    def _proposals(self, active: Tensor) -> dict[str, Proposal]:
        """The proposals given, those made for all observations cut to the ones that still climb."""
        return {name: restricted(q, active.to(self.x.device)) for name, q in self.proposals.items()}

    def _smc(self, active: Tensor) -> Particles:
        n = _ISLANDS * math.ceil(self.n / _ISLANDS)
        prior = Prior(self.model.prior)
        found = smc(self.model, self.x[active], prior, n_particles=n, n_islands=_ISLANDS, generator=self.generator)
        return Particles(found.z[: self.n], found.log_w[: self.n], found.n_gradients.double().cpu(), _ISLANDS)

    def finish(self) -> tuple[Tensor, Tensor, Escalation]:
        """Particles, log-weights and the record of the whole climb."""
        if self.z is None or self.log_w is None:
            name, _, cost = next(self.rungs())
            raise SettingError(
                f"budget={self.budget} evaluations for each observation do not pay for {name}, the first rung, which "
                f"takes {cost}; raise the budget, or lower n={self.n}."
            )
        return self.z, self.log_w, self.record


def _judge(found: Particles, query: Query | None) -> Judgement:
    values = _standardised(found) if query is None else query(found.z)
    if found.islands:
        return _judge_islands(found, values)
    smoothed, own = diagnostics.psis(found.log_w)
    ess, n = diagnostics.ess(found.log_w), found.log_w.shape[0]
    khat = _worst_khat(values, found.log_w)
    # smoothed weights can hide a draw that outweighs all others, and with it mass that was hit once: count both errors
    errors = [diagnostics.mcse_snis(values.double(), log_w.double()) for log_w in (smoothed, found.log_w)]
    mcse = _worst(torch.maximum(*errors).maximum(diagnostics.least_mcse(values, ess)), ess)
    error = (1 / ess - 1 / n).clamp_min(0).sqrt()
    verdict, sound = diagnostics.verdict(khat, ess, n), diagnostics.verdict(own, ess, n) != Verdict.REFUSE
    evidence = log_mean_exp(found.log_w.double())
    return Judgement(*(t.cpu() for t in (verdict, khat, ess, mcse, evidence, error.double(), sound)))


def _judge_islands(found: Particles, values: Tensor) -> Judgement:
    """Particles that have been resampled and moved are judged by the spread between groups that never met."""
    n = found.log_w.shape[0] // found.islands * found.islands
    by_island = found.log_w[:n].double().reshape(-1, found.islands, *found.log_w.shape[1:])
    spread = torch.softmax(log_mean_exp(by_island), 0)
    error = ((spread * found.islands - 1).square().sum(0) / (found.islands * (found.islands - 1))).sqrt()
    ess = diagnostics.ess(found.log_w)
    spread_mcse = island_mcse(values, found.log_w, found.islands)
    mcse = _worst(spread_mcse.maximum(diagnostics.least_mcse(values, ess)), error)
    khat = _worst_khat(values, found.log_w)  # nothing of the weights any more, but still of a query without a mean
    verdict = torch.where((error <= 0.25) & ~(khat > diagnostics.MAX_KHAT), Verdict.OK, Verdict.REFUSE)
    evidence, sound = log_mean_exp(found.log_w.double()), error <= 0.25
    return Judgement(*(t.cpu() for t in (verdict, khat, ess, mcse, evidence, error, sound)))


def island_mcse(f: Tensor, log_w: Tensor, islands: int) -> Tensor:
    """Standard error of a weighted mean from the spread of its means over independent groups of particles.

    Shapes: ``f (n, *batch, *out), log_w (n, *batch) -> (*batch, *out)``.
    """
    n = log_w.shape[0] // islands * islands
    groups_w = log_w[:n].double().reshape(-1, islands, *log_w.shape[1:])
    groups_f = f[:n].double().reshape(-1, islands, *f.shape[1:])
    within = torch.softmax(groups_w, 0)
    means = (within.reshape(*within.shape, *(1,) * (groups_f.dim() - within.dim())) * groups_f).sum(0)
    weight = torch.softmax(torch.logsumexp(groups_w, 0), 0)
    weight = weight.reshape(*weight.shape, *(1,) * (means.dim() - weight.dim()))
    center = (weight * means).sum(0)
    return ((weight * (means - center)).square().sum(0) * islands / (islands - 1)).sqrt()


def _standardised(found: Particles) -> Tensor:
    """The latent in posterior standard deviations, as far as the weights know them."""
    mean = estimators.snis(found.z, found.log_w).value
    spread = estimators.snis((found.z - mean).square(), found.log_w).value.sqrt()
    return (found.z - mean) / spread.clamp_min(1e-12)


def _worst_khat(values: Tensor, log_w: Tensor) -> Tensor:
    """The largest k-hat over the outputs of the query, NaN where none could be assessed. Shapes: ``-> (m,)``."""
    khat = diagnostics.khat_of(values, log_w).reshape(log_w.shape[1], -1)
    return torch.where(khat.isnan().all(-1), torch.nan, khat.nan_to_num(-torch.inf).amax(-1))


def _worst(mcse: Tensor, like: Tensor) -> Tensor:
    """The largest error over the outputs of an observation."""
    return mcse.reshape(*like.shape, -1).amax(-1)
