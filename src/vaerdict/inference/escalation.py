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

import torch
from torch import Tensor

from vaerdict.core import (
    Model,
    Progress,
    Proposal,
    SettingError,
    ShapeError,
    evaluating,
    restricted,
    silent,
)
from vaerdict.diagnostics import MAX_KHAT, Verdict
from vaerdict.inference.assess import Judgement, Particles, Query, judge
from vaerdict.inference.weights import weigh
from vaerdict.noise import Randomness, seeded
from vaerdict.proposals import Mixture, Prior, defensive
from vaerdict.refinement import location, refine, refine_elbo
from vaerdict.samplers import smc

PLUGIN, PSIS, MIS, REFINED, IMPROVED, SMC = RUNGS = ("plugin", "PSIS", "MIS", "REFINED", "IMPROVED", "SMC")

_EVEN = 0.95  # share of the draws in the ESS above which weights do not matter
_SHAPED = 0.3  # and below which a posterior is not shaped as its own curvature says
_ISLANDS = 16
_FEWEST = 64  # every scout and every island needs draws of its own
_SLACK = 0.02  # nats of evidence, hence a share of the posterior, that may be missing
_UNTRIED = "nothing was tried"
_SCOUTS = 16  # starts from the prior: a mode that catches half of them is missed by all once in 65,536 times


@dataclass
class Escalation:
    """For each observation: which rung answered, the verdict, why, and at what cost in model evaluations.

    Cost counts draws that were weighed and gradients, one each; the trial points of line searches and the draws that
    compare two refined proposals come on top. ``mcse`` and ``khat`` are the worst over the outputs of the query.
    Where no rung gave usable weights, ``rung`` is empty and the particles are NaN.
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
    with evaluating(model, proposals):
        _check_model(model, x)
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
            [_UNTRIED] * m,
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
        if self.z is None or self.log_w is None:
            self.z = found.z.new_full((self.n, self.x.shape[0], found.z.shape[-1]), torch.nan)
            self.log_w = found.log_w.new_zeros(self.n, self.x.shape[0])
        self.record.cost[active] += found.cost.to(self.record.cost)
        usable = found.usable
        self._fail(active[~usable], name)
        if usable.any():
            self._settle(active[usable], name, found.select(usable))

    def _fail(self, failed: Tensor, name: str) -> None:
        what = "did not reach the posterior" if name == SMC else "gave no usable weights"
        for i in failed.tolist():
            before = self.record.reason[i]
            self.record.reason[i] = f"{name} {what}" if before == _UNTRIED else f"{before}; {name} {what}"

    def _settle(self, active: Tensor, name: str, found: Particles) -> None:
        judged = judge(found, self.query)
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
        assert self.z is not None
        assert self.log_w is not None
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
        if judged.verdict[j] != Verdict.OK and name == SMC and not khat > MAX_KHAT:
            return f"{name}: groups of particles that never met disagree on the evidence; more draws may settle it"
        if judged.verdict[j] != Verdict.OK:
            return f"{name}: k-hat {khat:.2f} with ESS {judged.ess[j].item():.0f} of {self.n} draws is not reliable"
        if mcse <= self.tolerance:
            return f"{name}: with ESS {judged.ess[j].item():.0f} of {self.n} draws the posterior is of another shape"
        more = math.ceil((mcse / self.tolerance) ** 2)
        return f"{name}: Monte-Carlo error {mcse:.2g} exceeds {self.tolerance:g}; about {more} times the draws would do"

    def _weigh(self, q: Proposal, active: Tensor, extra: Tensor | float = 0.0) -> Particles:
        z, log_w = weigh(self.model, self.x[active], q, self.n, strict=False, generator=self.generator)
        return Particles(z, log_w, torch.full((len(active),), float(self.n)) + extra)

    def _first(self, active: Tensor) -> Particles:
        """The first proposal alone; draws around the scouts' modes set the evidence it must live up to."""
        components, cost = self._scouts(active)
        shares = {name: (0.5 if name in self.proposals else 1.0) for name in components}
        check = self._weigh(Mixture(components, shares), active)
        seen = check.usable
        if seen.any():
            self.bar[active[seen]] = self.bar[active[seen]].maximum(judge(check.select(seen), None).surely)
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

    def _start(self, active: Tensor) -> Tensor:
        """Where refinement sets out from: where the first proposal is, or else the middle of the prior's draws."""
        first = next(iter(self._proposals(active).values()), None)
        if first is None:
            return self._of_prior(active, 64).mean(0)
        start = location(first, self.x[active], self.generator)
        lost = ~start.isfinite().all(-1, keepdim=True)
        return torch.where(lost, self._of_prior(active, 64).mean(0), start) if lost.any() else start

    def _of_prior(self, active: Tensor, k: int) -> Tensor:
        return Prior(self.model.prior).draw(self.x[active], k, generator=self.generator).z

    def _around(self, active: Tensor, name: str, local: Proposal, cost: Tensor) -> Particles:
        components, scouting = self._scouts(active)
        shares = dict.fromkeys(components, 0.4 / _SCOUTS) | {name: 0.4, "PRIOR": 0.05}
        shares |= dict.fromkeys(self.proposals, 0.15 / max(1, len(self.proposals)))
        return self._weigh(Mixture({name: local, **components}, shares), active, extra=cost + scouting)

    def _scouts(self, active: Tensor) -> tuple[dict[str, Proposal], Tensor]:
        """Every proposal, the prior, and local ones at the modes uphill of draws from the prior; the cost of these."""
        x, prior = self.x[active], Prior(self.model.prior)
        found = refine(self.model, x.expand(_SCOUTS, *x.shape), self._of_prior(active, _SCOUTS), axis=1)
        local: dict[str, Proposal] = {f"SCOUT-{j}": found.distribution.at(j) for j in range(_SCOUTS)}
        return {**local, **self._proposals(active), "PRIOR": prior}, found.n_gradients.sum(0).cpu()

    def _proposals(self, active: Tensor) -> dict[str, Proposal]:
        """The proposals given, those made for all observations cut to the ones that still climb."""
        return {name: restricted(q, active.to(self.x.device)) for name, q in self.proposals.items()}

    def _smc(self, active: Tensor) -> Particles:
        n = _ISLANDS * math.ceil(self.n / _ISLANDS)
        prior = Prior(self.model.prior)
        found = smc(
            self.model,
            self.x[active],
            prior,
            n_particles=n,
            n_islands=_ISLANDS,
            strict=False,
            generator=self.generator,
        )
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


def _check_model(model: Model, x: Tensor) -> None:
    """Raise where the model's latents or log-densities are not of a kind that can be refined and moved."""
    z, _ = weigh(model, x[:1], Prior(model.prior), 2, strict=False, generator=seeded(0, x.device))
    if not isinstance(z, Tensor):
        raise ShapeError(
            f"the model's latents are a {type(z).__name__}; escalation moves one tensor (K, n_obs, d). Concatenate "
            "them in the model, or ask `posterior` without a tolerance."
        )
