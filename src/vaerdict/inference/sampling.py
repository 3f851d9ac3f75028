"""Importance sampling from a given proposal until each answer is good enough, and the best answer of all so far.

A pilot of half of the draws asked for says how many are needed. An answer is accepted by all draws and by those that
were not used to plan their number.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple

import torch
from torch import Tensor

from vaerdict.core import Model, prepared
from vaerdict.diagnostics import FEW_HITS, MAX_KHAT, Verdict, khat_threshold
from vaerdict.inference.assess import Assessment, Query, Weighted, importance_weights
from vaerdict.inference.search import Scope
from vaerdict.noise import Sobol, Source, noise_of
from vaerdict.proposals import Mixture, Prior

REFINED, TILTED, ADAPTED, SMC = STAGES = ("REFINED", "TILTED", "ADAPTED", "SMC")
EXACT = "EXACT"
"""In place of a stage: all latents are discrete, and the answer is a sum over their states."""

_SIZES = (1, 1.5, 2, 3, 4, 6, 8, 12, 16)  # numbers of draws, relative to the number asked for
MAX_GROWTH = _SIZES[-1]
"""The number of draws of an answer is at most this many times the number asked for."""

_LEAST_ESS = {REFINED: 0.3, TILTED: 0.1, ADAPTED: 0.3, SMC: 0.1}  # share of the draws, with one or two latents
_LEAST_GROWTH = {REFINED: 1.0, TILTED: 1.0, ADAPTED: 2.0, SMC: 2.0}  # draws relative to those asked for
_FINITE_VARIANCE = 0.5  # largest k-hat of weights with a variance
_MISSING_EVIDENCE = 0.02  # nats of evidence, hence a share of the posterior, that may be missing
_EVIDENCE_ERRORS, _EVIDENCE_SLACK = 3.0, 0.05  # by which two estimates of the evidence may differ
_AGREEMENT = 4.0  # standard errors by which planned and fresh draws may differ
_SAFETY = 1.15  # more draws than the pilot asks for, because its error is itself uncertain
_REPLICATES = 16  # independent randomisations of a Sobol net
_BLOCK = 2**24  # numbers of particles held at a time
_RARE = 0.05  # share of the draws inside an event below which it is rare
_RARE_GROWTH = 4.0  # draws for a rare event before kernels are fitted to it
_NOT_TRIED = "no stage was tried"


@dataclass
class Escalation:
    """The course of an escalation, one entry per observation.

    ``stage`` is the stage whose answer is kept, ``reason`` says why it was accepted or refused. ``cost`` counts model
    evaluations: one per weighted draw and one per gradient, without the trial points of line searches. ``value`` and
    ``mcse`` are those of the query, ``khat`` is the largest and ``inside`` the least over its outputs (see
    `Assessment`). ``draws`` is the number of draws behind the answer. ``scope`` says where modes were searched. Where
    no stage gave usable weights, ``stage`` is empty and the value is NaN.

    ``latent_log_w`` are the log-weights of given latents under the proposal that answered, minus the log evidence; NaN
    without such latents.
    """

    stage: list[str]
    reason: list[str]
    verdict: Tensor
    cost: Tensor
    value: Tensor
    mcse: Tensor
    khat: Tensor
    ess: Tensor
    inside: Tensor
    draws: Tensor
    scope: Scope
    latent_log_w: Tensor

    def summary(self) -> dict[str, int]:
        """Number of observations answered per stage, with caution, and refused."""
        answered = [s for s, v in zip(self.stage, self.verdict.tolist(), strict=True) if v == Verdict.OK]
        return {
            **{s: answered.count(s) for s in (EXACT, *STAGES) if s in answered},
            "caution": int((self.verdict == Verdict.CAUTION).sum()),
            "refused": int((self.verdict == Verdict.REFUSE).sum()),
        }


def joined(records: list[Escalation]) -> Escalation:
    """The records of several groups of observations as one."""
    if len(records) == 1:
        return records[0]
    columns = {f.name: [getattr(r, f.name) for r in records] for f in fields(Escalation)}
    scope = Scope(*(torch.cat([getattr(s, f.name) for s in columns["scope"]]) for f in fields(Scope)))
    whole: dict[str, Any] = {name: [entry for part in columns[name] for entry in part] for name in ("stage", "reason")}
    whole |= {name: torch.cat(column) for name, column in columns.items() if name not in ("scope", *whole)}
    return Escalation(**whole, scope=scope)


class Tolerance(NamedTuple):
    """The largest acceptable error, absolute or relative to the answer, whichever is larger."""

    absolute: float
    relative: float

    def ratio(self, answer: Assessment) -> Tensor:
        """Twice the error over the tolerance, the largest over the outputs of the query. Shapes: ``-> (m,)``."""
        allowed = (self.relative * answer.value.abs()).clamp_min(self.absolute)
        return (2 * answer.mcse / allowed).reshape(len(answer.ess), -1).amax(-1)


class Result(NamedTuple):
    """The assessment of some observations, and which conditions it meets; `hits` is ``inside`` of the fresh draws.

    Shapes: all but `answer` ``(m,)``.
    """

    answer: Assessment
    ratio: Tensor
    hits: Tensor
    sound: Tensor
    agrees: Tensor
    complete: Tensor

    @property
    def accepted(self) -> Tensor:
        """Whether all conditions are met."""
        return self.sound & self.agrees & self.complete & (self.ratio <= 1)

    def select(self, index: Tensor) -> Result:
        """The result for the observations at `index`."""
        return Result(self.answer.select(index), *(t[index] for t in self[1:]))


class Group(NamedTuple):
    """Observations ``rows (m,)`` whose draws were made alike, and these draws."""

    rows: Tensor
    draws: Weighted


@dataclass(eq=False)
class Sampling:
    """The best answer per observation so far, and the evidence that an answer must reach.

    ``cost`` is what the search of modes has cost, ``(n_obs,)``; ``d`` the number of latents.
    """

    model: Model
    x: Tensor
    n: int
    query: Query | None
    tolerance: Tolerance
    budget: int | None
    source: Source
    smooth: bool
    keep: bool
    latent: Tensor | None
    scope: Scope
    cost: Tensor
    d: int
    groups: list[Group] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.sobol = isinstance(self.source, Sobol)
        m, double = self.x.shape[0], torch.float64
        self.record = Escalation(
            stage=[""] * m,
            reason=[_NOT_TRIED] * m,
            verdict=torch.full((m,), int(Verdict.REFUSE)),
            cost=self.cost.clone(),
            value=torch.empty(0),
            mcse=torch.empty(0),
            khat=torch.full((m,), torch.nan, dtype=double),
            ess=torch.zeros(m, dtype=double),
            inside=torch.full((m,), torch.inf, dtype=double),
            draws=torch.zeros(m, dtype=torch.long),
            scope=self.scope,
            latent_log_w=torch.full((m,), torch.nan, dtype=double),
        )
        self.ratio = torch.full((m,), torch.inf, dtype=double)
        self.accepted, self.complete, self.even, self.tilt = (torch.zeros(m, dtype=torch.bool) for _ in range(4))
        self.group_of = torch.full((m,), -1)
        self.floor, self.smc_evidence, self.smc_error = (torch.full((m,), -torch.inf, dtype=double) for _ in range(3))

    def draw(self, rows: Tensor, q: Mixture, k: int) -> Weighted:
        """Draw k particles per observation, with a Sobol source in independent randomisations of the net."""
        n_parts = _REPLICATES if self.sobol else 1
        size = max(math.ceil(1 / min(q.shares.values())), k // n_parts)  # every component draws at least once
        with noise_of(self.source, rows) as noise:
            parts = [
                importance_weights(self.model, self.x[rows], q, size, strict=False, generator=noise)
                for _ in range(n_parts)
            ]
        z, log_w = (torch.cat(column) for column in zip(*parts, strict=True))
        self.record.cost[rows] += len(z)
        source = q.source(size).repeat(n_parts).to(z.device)
        replicate = torch.arange(n_parts, device=z.device).repeat_interleave(size)
        return Weighted(z, log_w, source, replicate if self.sobol else None)

    def sample(self, stage: str, rows: Tensor, q: Mixture, *, patient: bool = False) -> None:
        """Draw a pilot, and then as many draws as each observation needs; not `patient`, a rare event gets few."""
        pilot = self.draw(rows, q, self.n // 2)
        rows, pilot, q = self.usable(stage, rows, pilot, q)
        if len(rows):
            self._advance(stage, rows, q, pilot, 0, patient)

    def usable(self, stage: str, rows: Tensor, draws: Weighted, q: Mixture) -> tuple[Tensor, Weighted, Mixture]:
        """The observations whose weights are not NaN or infinite and not all zero; the others are told so."""
        usable = draws.log_w.amax(0).isfinite()
        if bool(usable.all()):
            return rows, draws, q
        self.add_reason(rows[~usable.cpu()], f"{stage} gave no usable weights")
        index = usable.nonzero().flatten()
        return rows[index.cpu()], draws.select(index), q.select(index)

    def _advance(self, stage: str, rows: Tensor, q: Mixture, draws: Weighted, n_fresh: int, patient: bool) -> None:
        """Judge the draws, of which the last `n_fresh` were not used to plan their number; draw more where it helps."""
        rows, draws, q = self.usable(stage, rows, draws, q)
        if not len(rows):
            return
        result = self._judge(stage, rows, draws, n_fresh)
        n_next = self._planned(stage, rows, result, len(draws.z), n_fresh, patient)
        final = (n_next == 0).nonzero().flatten()
        if len(final):
            index = final.to(self.x.device)
            self._record(stage, rows[final], q.select(index), draws.select(index), result.select(final))
        for size in n_next[n_next > 0].unique().tolist():
            members = (n_next == size).nonzero().flatten()
            for block in members.split(max(1, _BLOCK // (size * draws.z.shape[-1]))):
                index = block.to(self.x.device)
                part = q.select(index)
                fresh = self.draw(rows[block], part, size - len(draws.z))
                self._advance(stage, rows[block], part, draws.select(index).joined(fresh), len(fresh.z), patient)

    def _judge(self, stage: str, rows: Tensor, draws: Weighted, n_fresh: int) -> Result:
        """Assess draws by all of them and by the fresh ones alone, and compare with what others have found."""
        values, n = draws.values(self.query, self.x[rows]), len(draws.z)
        answer = draws.assess(values, self.smooth).cpu()
        ratio, hits = self.tolerance.ratio(answer), answer.inside
        agrees = torch.full_like(ratio, bool(n_fresh), dtype=torch.bool)
        if n_fresh:
            planned, fresh = (
                draws.at(part).assess(values[part], self.smooth).cpu()
                for part in (slice(n - n_fresh), slice(n - n_fresh, n))
            )
            ratio = ratio.maximum(self.tolerance.ratio(answer._replace(mcse=fresh.mcse * (n_fresh / n) ** 0.5)))
            error, hits = torch.hypot(planned.mcse, fresh.mcse), fresh.inside
            agrees = ((planned.value - fresh.value).abs() <= _AGREEMENT * error).reshape(len(rows), -1).all(-1)
        self.floor[rows] = self.floor[rows].maximum(answer.log_evidence_low)
        complete = answer.log_evidence_high + _MISSING_EVIDENCE >= self.floor[rows]
        if stage == SMC:
            allowed = _EVIDENCE_ERRORS * torch.hypot(answer.log_evidence_se, self.smc_error[rows]) + _EVIDENCE_SLACK
            complete &= (answer.log_evidence - self.smc_evidence[rows]).abs() <= allowed
        sound = (answer.verdict == Verdict.OK) & (answer.ess >= self._least_ess(stage) * n)
        if stage in (ADAPTED, SMC):  # kernels fitted to draws may miss a tail; the variance must be finite
            sound &= ~(answer.khat > _FINITE_VARIANCE)
        return Result(answer, ratio, hits, sound, agrees, complete)

    def _least_ess(self, stage: str) -> float:
        """Share of effective draws below which a proposal does not fit; lower for many latents: weights multiply."""
        d = max(2, self.d)
        return min(_LEAST_ESS[stage], max(0.1, _LEAST_ESS[stage] * math.sqrt(2 / d)))

    def _planned(self, stage: str, rows: Tensor, result: Result, n: int, n_fresh: int, patient: bool) -> Tensor:
        """The number of draws that each observation needs in all, 0 where it has enough or more would not help."""
        answer, least_ess = result.answer, self._least_ess(stage) * n
        if n_fresh:
            promising = result.sound & result.complete & result.agrees & ~result.accepted
        else:  # a pilot is too small to be sound
            promising = ~(answer.khat > MAX_KHAT) & (answer.ess >= 0.7 * least_ess) & result.complete
        # hits of a rare event must first become enough, among the next draws alone too; until then errors fall as 1/n
        few = (result.hits < FEW_HITS) | (answer.inside < FEW_HITS)
        growth = torch.where(few, (1 + FEW_HITS / answer.inside).minimum(result.ratio), result.ratio**2)
        needed = (_SAFETY * n / self.n * growth).clamp_min(max(_LEAST_GROWTH[stage], 1.5 * n / self.n))
        sizes = torch.tensor(_SIZES).double()
        total = sizes[torch.searchsorted(sizes, needed).clamp_max(len(sizes) - 1)]
        # where the pilot asks for a little more than is allowed, the rest of the draws will tell
        promising &= needed <= (sizes[-1] if n_fresh else 2 * sizes[-1])
        if stage == REFINED and not patient:  # a rare event needs other draws rather than many
            rare = answer.inside < _RARE * answer.ess
            promising &= ~rare | (needed <= _RARE_GROWTH)
        total = (self.n * total).long()
        if self.budget is not None:
            promising &= self.record.cost[rows] + total - n <= self.budget
        return torch.where(promising & (total > n), total, 0)

    # ---------------------------------------------------------------------------------------------- recording
    def _record(self, stage: str, rows: Tensor, q: Mixture, draws: Weighted, result: Result) -> None:
        """Keep the answers that improve on earlier ones; an incomplete one never outranks a complete one."""
        answer, accepted = result.answer, result.accepted
        query_alone = (answer.weight_khat <= MAX_KHAT) & (answer.ess >= self._least_ess(stage) * len(draws.z))
        if stage == REFINED:
            self.even[rows] = query_alone
            self.tilt[rows] = query_alone & ((answer.inside < FEW_HITS) | ~accepted)
        comparable = self.complete[rows] == result.complete
        smaller = torch.where(comparable, result.ratio < self.ratio[rows], result.complete)
        better = accepted | (~self.accepted[rows] & (smaller | self.ratio[rows].isinf()))
        scope_ok = self.record.scope.sufficient[rows]
        for j, i in enumerate(rows.tolist()):
            if better[j]:
                self.record.stage[i], self.record.reason[i] = stage, self._reason(stage, result, j, len(draws.z), i)
            elif not self.accepted[i]:
                self.record.reason[i] += f"; {stage} was no better"
        index, rows = better.nonzero().flatten(), rows[better]
        if not len(rows):
            return
        answer, record = answer.select(index), self.record
        if not record.value.numel():
            shape = (len(self.x), *answer.value.shape[1:])
            record.value, record.mcse = torch.full(shape, torch.nan).double(), torch.full(shape, torch.inf).double()
        record.value[rows], record.mcse[rows] = answer.value, answer.mcse
        record.khat[rows], record.ess[rows], record.inside[rows] = answer.khat, answer.ess, answer.inside
        record.draws[rows] = len(draws.z)
        verdict = torch.where(scope_ok[better], Verdict.OK, Verdict.CAUTION)
        record.verdict[rows] = torch.where(accepted[better], verdict, Verdict.REFUSE)
        self.ratio[rows], self.accepted[rows], self.complete[rows] = (
            t[better] for t in (result.ratio, accepted, result.complete)
        )
        device_index = index.to(self.x.device)
        if self.latent is not None:
            latent = self.latent[rows].unsqueeze(0)
            log_p = self.model.log_joint(prepared(self.model, self.x[rows]), latent)
            log_q = q.select(device_index).log_prob(latent, self.x[rows])
            record.latent_log_w[rows] = (log_p - log_q)[0].double().cpu() - answer.log_evidence
        if self.keep:
            self.group_of[rows] = len(self.groups)
            self.groups.append(Group(rows, draws.select(device_index)))

    def _reason(self, stage: str, result: Result, j: int, n: int, i: int) -> str:
        answer = result.answer
        khat, ess, ratio = answer.khat[j].item(), answer.ess[j].item(), result.ratio[j].item()
        if result.accepted[j]:
            parts = [] if math.isnan(khat) else [f"k-hat {khat:.2f}"]
            parts += [f"twice the error is {ratio:.2g} of the tolerance with {n} draws"]
            if answer.inside[j] < FEW_HITS:
                parts += [f"{answer.inside[j]:.1f} effective draws inside the event"]
            return f"{stage}: {', '.join(parts)}; {self.record.scope.sentence(i)}"
        if not result.complete[j]:
            return f"{stage} misses posterior mass that other draws have found, or found mass that they miss"
        largest = _FINITE_VARIANCE if stage in (ADAPTED, SMC) else MAX_KHAT
        if not khat <= largest or (ratio <= 1 and khat > khat_threshold(n)):
            infinite = answer.weight_khat[j] <= largest < khat
            what = "a moment of the query may be infinite" if infinite else "is not reliable"
            return f"{stage}: k-hat {khat:.2f} with ESS {ess:.0f} of {n} draws: {what}"
        if not result.sound[j] and khat <= khat_threshold(n):
            return f"{stage}: ESS {ess:.0f} of {n} draws shows that the posterior does not have the proposal's shape"
        if ratio <= 1:
            return f"{stage}: two groups of draws disagree by more than {_AGREEMENT:g} standard errors"
        needed = n * ratio**2 / self.n
        return f"{stage}: twice the error is {ratio:.2g} times the tolerance; use about {needed:.0f} times n={self.n}"

    def add_reason(self, rows: Tensor, failure: str) -> None:
        """Tell some observations why a stage did not answer."""
        for i in rows.tolist():
            earlier = self.record.reason[i]
            self.record.reason[i] = failure if earlier in (_NOT_TRIED, failure) else f"{earlier}; {failure}"

    def finish(self) -> tuple[Escalation, list[Group]]:
        """The record, and the draws behind each answer."""
        record, failed = self.record, torch.tensor([not stage for stage in self.record.stage])
        if not record.value.numel():
            record.value = record.mcse = self._query_shape()
        record.mcse[failed] = torch.nan
        groups = []
        for number, group in enumerate(self.groups):
            kept = (self.group_of[group.rows] == number).nonzero().flatten()
            if len(kept):
                groups.append(Group(group.rows[kept], group.draws.select(kept.to(self.x.device))))
        return record, groups

    def _query_shape(self) -> Tensor:
        """NaN in the shape of the answers. Shapes: ``-> (n_obs, *out)``."""
        z = Prior(self.model.prior).draw(self.x, 2, generator=self.source).z
        values = Weighted(z, torch.zeros_like(z[..., 0]), torch.zeros(2)).values(self.query, self.x)
        return torch.full(values.shape[1:], torch.nan).double()
