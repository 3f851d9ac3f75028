"""Escalation: spend more on an observation only while its answer is not good enough, and refuse where nothing helps.

The stages, in order of cost:

1. the first proposal alone (PSIS; reported as `plugin` where the weights are so even that they do not matter),
2. the mixture of all proposals and the prior (MIS),
3. a proposal refined per observation by the curvature of the posterior (REFINED),
4. the same, improved by gradient steps on its bound (IMPROVED),
5. sequential Monte Carlo from the prior (SMC).

A stage answers when

- its verdict is ok: the k-hat of the query is below the sample-size-aware threshold (`vaerdict.diagnostics.verdict`),
- the Monte-Carlo error of the query is within the tolerance, and
- no other draws have found posterior mass that it missed.

Importance weights cannot reveal a mode that no draw has reached, so the ESS and k-hat of a proposal are never trusted
alone. An unbiased estimate of the evidence that covers part of the posterior lies below one that covers all of it.
Therefore optimisations are started from draws of the prior (mode search), and an answer whose evidence is clearly below
that of draws around the modes found, or of another stage, is rejected. A local proposal (REFINED, IMPROVED) with uneven
weights is rejected too: where the posterior bends away from its curvature, as a ring does, draws near the modes agree
with each other on the part they cover.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from vaerdict.core import Model, Progress, Proposal, SettingError, ShapeError, evaluating, restricted, silent
from vaerdict.diagnostics import MAX_KHAT, Verdict
from vaerdict.inference.assess import Assessment, Query, evaluate, importance_weights, standardised
from vaerdict.noise import Randomness, seeded
from vaerdict.proposals import Mixture, Prior, defensive
from vaerdict.refinement import location, refine, refine_elbo
from vaerdict.samplers import smc

PLUGIN, PSIS, MIS, REFINED, IMPROVED, SMC = STAGES = ("plugin", "PSIS", "MIS", "REFINED", "IMPROVED", "SMC")

_EVEN_ESS = 0.95  # ESS as a share of the draws above which weights do not matter
_LOCAL_ESS = 0.3  # ESS as a share of the draws below which the posterior does not have the shape of its curvature
_ISLANDS = 16
_MIN_DRAWS = 64  # every mode search and every island needs draws
_MISSING_EVIDENCE = 0.02  # nats of evidence, hence a share of the posterior, that may be missing
_SEARCHES = 16  # mode searches: a mode with half the prior mass uphill of it is missed by all once in 65,536 times
_NOT_TRIED = "no stage was tried"


@dataclass
class Escalation:
    """The course of an escalation, one entry per observation.

    ``stage`` is the stage whose particles are kept, ``reason`` says why they were accepted or refused. ``cost`` counts
    model evaluations: one per weighted draw and one per gradient. It excludes the trial points of line searches and
    the draws that compare two refined proposals. ``mcse`` and ``khat`` are the largest over the outputs of the query;
    ``islands`` is the number of independent groups of particles (0: all are independent). Where no stage gave usable
    weights, ``stage`` is empty and the particles are NaN.
    """

    stage: list[str]
    reason: list[str]
    verdict: Tensor
    cost: Tensor
    mcse: Tensor
    khat: Tensor
    ess: Tensor
    islands: Tensor

    def summary(self) -> dict[str, int]:
        """Number of observations answered per stage, and number refused."""
        answered = [s for s, v in zip(self.stage, self.verdict.tolist(), strict=True) if v == Verdict.OK]
        return {
            **{s: answered.count(s) for s in STAGES if s in answered},
            "refused": int((self.verdict == Verdict.REFUSE).sum()),
        }


def escalate(
    model: Model,
    x: Tensor,
    proposals: Mapping[str, Proposal],
    n: int,
    *,
    query: Query | None,
    tolerance: float,
    budget: int | None,
    generator: Randomness,
    smooth: bool = True,
    progress: Progress = silent,
) -> tuple[Tensor, Tensor, Escalation]:
    """Apply the stages to every observation until its answer is good enough.

    Parameters are those of `vaerdict.posterior`. The query is evaluated at the remaining observations only, so it must
    be a function of the latent and not of the observation's position.

    Returns
    -------
    z, log_w, record
        Particles ``(n, n_obs, d)``, log-weights ``(n, n_obs)`` and the `Escalation`.
    """
    if not tolerance > 0:
        raise SettingError(f"tolerance={tolerance} must be positive: it is the largest acceptable Monte-Carlo error.")
    if n < _MIN_DRAWS:
        raise SettingError(f"n={n} draws are too few to escalate with; use {_MIN_DRAWS} or more.")
    state = _EscalationState(model, x, proposals, n, query, tolerance, budget, generator, smooth)
    with evaluating(model, proposals):
        _check_model(model, x)
        stages = list(state.stages())
        for number, (name, run, expected_cost) in enumerate(stages):
            active = state.affordable(name, expected_cost)
            if len(active):
                state.update(active, name, run(active))
            progress(number + 1, len(stages), f"{name}: {len(active)} observations")
    return state.finish()


class _StageResult(NamedTuple):
    """Weighted particles of one stage, their cost in model evaluations, and the number of islands (0: none).

    Shapes: ``z (n, m, d)``, ``log_w (n, m)``, ``cost (m,)``.
    """

    z: Tensor
    log_w: Tensor
    cost: Tensor
    islands: int = 0

    @property
    def usable(self) -> Tensor:
        """Observations whose weights are not NaN or infinite and not all zero. Shapes: ``-> (m,)``."""
        return self.log_w.amax(0).isfinite().cpu()

    def select(self, mask: Tensor) -> _StageResult:
        """The result for the observations of the mask."""
        if bool(mask.all()):
            return self
        index = mask.to(self.log_w.device)
        return _StageResult(self.z[:, index], self.log_w[:, index], self.cost[mask], self.islands)

    def assess(self, query: Query | None, smooth: bool) -> Assessment:
        """The assessment of a query, by default the latent in posterior standard deviations."""
        values = standardised(self.z, self.log_w) if query is None else evaluate(query, self.z, self.log_w)
        islands = torch.full((self.log_w.shape[1],), self.islands)
        return Assessment(values, self.log_w, islands=islands, smooth=smooth)


class _StageReport(NamedTuple):
    """What is recorded of a stage, on the CPU. Shapes: all ``(m,)``.

    ``incomplete`` marks answers that miss posterior mass found by other draws, ``done`` those that are accepted.
    """

    verdict: Tensor
    khat: Tensor
    ess: Tensor
    mcse: Tensor
    incomplete: Tensor
    done: Tensor


@dataclass(eq=False)
class _EscalationState:
    """The best answer per observation so far, and the evidence that an answer must reach."""

    model: Model
    x: Tensor
    proposals: Mapping[str, Proposal]
    n: int
    query: Query | None
    tolerance: float
    budget: int | None
    generator: Randomness
    smooth: bool
    z: Tensor | None = None
    log_w: Tensor | None = None

    def __post_init__(self) -> None:
        self.proposals = {name: q for name, q in self.proposals.items() if name != "PRIOR"}  # stages add the prior
        m, double = self.x.shape[0], torch.float64
        self.record = Escalation(
            stage=[""] * m,
            reason=[_NOT_TRIED] * m,
            verdict=torch.full((m,), int(Verdict.REFUSE)),
            cost=torch.zeros(m),
            mcse=torch.full((m,), torch.inf, dtype=double),
            khat=torch.full((m,), torch.nan, dtype=double),
            ess=torch.zeros(m, dtype=double),
            islands=torch.zeros(m, dtype=torch.long),
        )
        self.closed = torch.zeros(m, dtype=torch.bool)
        self.incomplete = torch.zeros(m, dtype=torch.bool)
        self.log_evidence_floor = torch.full((m,), -torch.inf, dtype=double)

    # ------------------------------------------------------------------------------------------- bookkeeping
    def stages(self) -> Iterator[tuple[str, Callable[[Tensor], _StageResult], int]]:
        """Name, action and expected cost of each stage."""
        if self.proposals:
            yield PSIS, self._first_proposal, 2 * self.n
            yield MIS, self._mixture, self.n
        yield REFINED, self._refined, 2 * self.n
        yield IMPROVED, self._improved, 2 * self.n + 3600
        yield SMC, self._smc, 150 * self.n

    def affordable(self, name: str, expected_cost: int) -> Tensor:
        """Indices of the open observations whose budget covers a stage; the others are refused and closed."""
        active = (~self.closed).nonzero().flatten()
        if self.budget is None:
            return active
        within_budget = self.record.cost[active] + expected_cost <= self.budget
        for i in active[~within_budget].tolist():
            self.record.reason[i] = (
                f"the budget of {self.budget} evaluations ends before {name}; {self.record.reason[i]}"
            )
            self.record.verdict[i] = Verdict.REFUSE
            self.closed[i] = True
        return active[within_budget]

    def update(self, active: Tensor, name: str, result: _StageResult) -> None:
        """Assess the answers of a stage, record those that improve on earlier ones, close those that are accepted."""
        if self.z is None or self.log_w is None:
            self.z = result.z.new_full((self.n, self.x.shape[0], result.z.shape[-1]), torch.nan)
            self.log_w = result.log_w.new_zeros(self.n, self.x.shape[0])
        self.record.cost[active] += result.cost.to(self.record.cost)
        usable = result.usable
        self._record_failure(active[~usable], name)
        if not usable.any():
            return
        active, result = active[usable], result.select(usable)
        report = self._report(active, name, result)
        # an incomplete answer never outranks a complete one, however small its error looks
        earlier, comparable = self.record.mcse[active], self.incomplete[active] == report.incomplete
        better = report.done | torch.where(comparable, report.mcse < earlier, ~report.incomplete) | earlier.isinf()
        self.incomplete[active[better]] = report.incomplete[better]
        self._record(active, name, result, report, better)
        self.closed[active] = report.done

    def _report(self, active: Tensor, name: str, result: _StageResult) -> _StageReport:
        """Assess a stage, raise the evidence floor by what it found, and decide which answers are accepted."""
        answer = result.assess(self.query, self.smooth)
        self._raise_floor(active, answer)
        verdict, khat, ess, mcse = (t.cpu() for t in (answer.verdict, answer.khat, answer.estimate.ess, answer.mcse))
        incomplete = answer.log_evidence_high.cpu() + _MISSING_EVIDENCE < self.log_evidence_floor[active]
        done = (verdict == Verdict.OK) & (mcse <= self.tolerance) & ~incomplete
        if name in (REFINED, IMPROVED):
            done &= ess >= _LOCAL_ESS * self.n
        return _StageReport(verdict, khat, ess, mcse, incomplete, done)

    def _raise_floor(self, active: Tensor, answer: Assessment) -> None:
        self.log_evidence_floor[active] = self.log_evidence_floor[active].maximum(answer.log_evidence_low.cpu())

    def _record_failure(self, failed: Tensor, name: str) -> None:
        failure = f"{name} did not reach the posterior" if name == SMC else f"{name} gave no usable weights"
        for i in failed.tolist():
            earlier = self.record.reason[i]
            self.record.reason[i] = failure if earlier == _NOT_TRIED else f"{earlier}; {failure}"

    def _record(self, active: Tensor, name: str, result: _StageResult, report: _StageReport, better: Tensor) -> None:
        assert self.z is not None
        assert self.log_w is not None
        record, index = self.record, active[better]
        self.z[:, index] = result.z[:, better].to(self.z)
        self.log_w[:, index] = result.log_w[:, better].to(self.log_w)
        record.mcse[index], record.khat[index], record.ess[index] = (
            t[better] for t in (report.mcse, report.khat, report.ess)
        )
        record.verdict[index] = torch.where(report.done, Verdict.OK, Verdict.REFUSE)[better]
        record.islands[index] = result.islands
        for j, i in enumerate(active.tolist()):
            if better[j]:
                even = name == PSIS and report.ess[j].item() >= _EVEN_ESS * self.n
                record.stage[i] = PLUGIN if even else name
                record.reason[i] = self._reason(name, report, j)
            else:
                record.reason[i] += f"; {name} was no better"

    def _reason(self, name: str, report: _StageReport, j: int) -> str:
        khat, mcse, ess = report.khat[j].item(), report.mcse[j].item(), report.ess[j].item()
        if report.done[j]:
            assessed = "" if math.isnan(khat) else f"k-hat {khat:.2f}, "
            return f"{name}: {assessed}Monte-Carlo error {mcse:.2g} within {self.tolerance:g}"
        if report.incomplete[j]:
            return f"{name} misses posterior mass that other draws have found"
        if report.verdict[j] != Verdict.OK and name == SMC and not khat > MAX_KHAT:
            return f"{name}: independent groups of particles disagree on the evidence; more draws may help"
        if report.verdict[j] != Verdict.OK:
            return f"{name}: k-hat {khat:.2f} with ESS {ess:.0f} of {self.n} draws is not reliable"
        if mcse <= self.tolerance:
            return (
                f"{name}: ESS {ess:.0f} of {self.n} draws shows that the posterior does not have the proposal's shape"
            )
        factor = math.ceil((mcse / self.tolerance) ** 2)
        return f"{name}: Monte-Carlo error {mcse:.2g} exceeds {self.tolerance:g}; use about {factor} times the draws"

    def finish(self) -> tuple[Tensor, Tensor, Escalation]:
        """Particles, log-weights and the record."""
        if self.z is None or self.log_w is None:
            name, _, cost = next(self.stages())
            raise SettingError(
                f"budget={self.budget} evaluations per observation do not cover {name}, the first stage, which takes "
                f"{cost}; raise the budget, or lower n={self.n}."
            )
        return self.z, self.log_w, self.record

    # ------------------------------------------------------------------------------------------------ stages
    def _first_proposal(self, active: Tensor) -> _StageResult:
        """The first proposal alone; draws around the modes found set the evidence floor."""
        components, cost = self._mode_search(active)
        shares = {name: (0.5 if name in self.proposals else 1.0) for name in components}
        around_modes = self._weighted(Mixture(components, shares), active)
        usable = around_modes.usable
        if usable.any():
            self._raise_floor(active[usable], around_modes.select(usable).assess(None, self.smooth))
        first = next(iter(self._restricted_proposals(active).values()))
        return self._weighted(first, active, extra_cost=cost + self.n)

    def _mixture(self, active: Tensor) -> _StageResult:
        return self._weighted(defensive(self._restricted_proposals(active), self.model.prior), active)

    def _refined(self, active: Tensor) -> _StageResult:
        """Local proposals at the mode uphill of the first proposal and at the modes found by the search."""
        local = refine(self.model, self.x[active], self._start(active), generator=self.generator)
        return self._with_modes(active, REFINED, local.distribution, local.n_gradients.cpu())

    def _improved(self, active: Tensor) -> _StageResult:
        """The local proposal after gradient steps on its bound, with local proposals at the modes found."""
        x = self.x[active]
        local = refine(self.model, x, self._start(active), inflate=1.0, generator=self.generator)
        improved = refine_elbo(self.model, x, local.distribution, generator=self.generator)
        cost = local.n_gradients.cpu() + improved.n_gradients
        return self._with_modes(active, IMPROVED, improved.distribution, cost)

    def _smc(self, active: Tensor) -> _StageResult:
        result = smc(
            self.model,
            self.x[active],
            Prior(self.model.prior),
            n_particles=_ISLANDS * math.ceil(self.n / _ISLANDS),
            n_islands=_ISLANDS,
            strict=False,
            generator=self.generator,
        )
        cost = result.n_gradients.double().cpu()
        return _StageResult(result.z[: self.n], result.log_w[: self.n], cost, _ISLANDS)

    def _weighted(self, q: Proposal, active: Tensor, extra_cost: Tensor | float = 0.0) -> _StageResult:
        z, log_w = importance_weights(self.model, self.x[active], q, self.n, strict=False, generator=self.generator)
        return _StageResult(z, log_w, torch.full((len(active),), float(self.n)) + extra_cost)

    def _with_modes(self, active: Tensor, name: str, local: Proposal, cost: Tensor) -> _StageResult:
        components, search_cost = self._mode_search(active)
        shares = dict.fromkeys(components, 0.4 / _SEARCHES) | {name: 0.4, "PRIOR": 0.05}
        shares |= dict.fromkeys(self.proposals, 0.15 / max(1, len(self.proposals)))
        return self._weighted(Mixture({name: local, **components}, shares), active, extra_cost=cost + search_cost)

    def _mode_search(self, active: Tensor) -> tuple[dict[str, Proposal], Tensor]:
        """Local proposals at the modes uphill of draws from the prior, all proposals and the prior; and the cost."""
        x = self.x[active]
        modes = refine(self.model, x.expand(_SEARCHES, *x.shape), self._prior_draws(active, _SEARCHES), axis=1)
        local: dict[str, Proposal] = {f"MODE-{j}": modes.distribution.at(j) for j in range(_SEARCHES)}
        proposals = {**local, **self._restricted_proposals(active), "PRIOR": Prior(self.model.prior)}
        return proposals, modes.n_gradients.sum(0).cpu()

    def _start(self, active: Tensor) -> Tensor:
        """Where refinement starts: the location of the first proposal, or the mean of draws from the prior."""
        first = next(iter(self._restricted_proposals(active).values()), None)
        if first is None:
            return self._prior_draws(active, 64).mean(0)
        start = location(first, self.x[active], self.generator)
        lost = ~start.isfinite().all(-1, keepdim=True)
        return torch.where(lost, self._prior_draws(active, 64).mean(0), start) if lost.any() else start

    def _prior_draws(self, active: Tensor, k: int) -> Tensor:
        return Prior(self.model.prior).draw(self.x[active], k, generator=self.generator).z

    def _restricted_proposals(self, active: Tensor) -> dict[str, Proposal]:
        """The user's proposals; those made for given observations are restricted to the active ones."""
        return {name: restricted(q, active.to(self.x.device)) for name, q in self.proposals.items()}


def _check_model(model: Model, x: Tensor) -> None:
    """Raise where the model's latents are not one tensor, which refinement and SMC need, or log_joint is unusable."""
    z, _ = importance_weights(model, x[:1], Prior(model.prior), 2, strict=False, generator=seeded(0, x.device))
    if not isinstance(z, Tensor):
        raise ShapeError(
            f"the model's latents are a {type(z).__name__}; escalation needs one tensor (K, n_obs, d). Concatenate "
            "them in the model, or call `posterior` without a tolerance."
        )
