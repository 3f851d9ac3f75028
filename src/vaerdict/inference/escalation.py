"""Escalation: spend more on an observation only while its answer is not good enough, and refuse where nothing helps.

Modes are searched first (`vaerdict.inference.search`). Then importance sampling answers, from better and better
proposals:

1. local proposals at the modes, the given proposals, a wide Student-t and the prior (REFINED),
2. the same with kernels where the query varies, for rare events and queries decided in a tail (TILTED),
3. kernels fitted to weighted draws, for posteriors that do not have the shape of their curvature (ADAPTED),
4. kernels fitted to particles of sequential Monte Carlo from the prior, which finds mass that bends or hides (SMC).

Each stage begins with half of the draws asked for. Where the weights are reliable it then draws as many more as the
tolerance needs, up to 16 times those asked for. An answer is accepted when

- its k-hat is below the sample-size-aware threshold and its weights are even enough,
- twice its Monte-Carlo error is within the tolerance, by all draws and by those that were not used to plan their
  number,
- both groups of draws agree, and
- no other draws have found posterior mass that it missed.

The verdict on an accepted answer is ok unless the search for modes was insufficient (see `Scope`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from vaerdict.core import (
    Model,
    Progress,
    Proposal,
    SettingError,
    ShapeError,
    evaluating,
    log_normalise,
    prepared,
    restricted,
    silent,
)
from vaerdict.diagnostics import FEW_HITS, MAX_KHAT, Verdict, khat_threshold
from vaerdict.inference.adaptation import Population, fit_kernels
from vaerdict.inference.assess import Assessment, Query, Weighted, importance_weights
from vaerdict.inference.search import ModeSearch, Scope
from vaerdict.inference.unconstrained import unconstrained
from vaerdict.noise import Randomness, Sobol, as_source, seeded
from vaerdict.proposals import Kernels, Mixture, Prior, check_latent
from vaerdict.refinement import location
from vaerdict.samplers import gathered, smc, systematic

REFINED, TILTED, ADAPTED, SMC = STAGES = ("REFINED", "TILTED", "ADAPTED", "SMC")

_SIZES = (1, 1.5, 2, 3, 4, 6, 8, 12, 16)  # numbers of draws, relative to the number asked for
MAX_GROWTH = _SIZES[-1]
"""The number of draws of an answer is at most this many times the number asked for."""

_MIN_DRAWS = 64
_LEAST_ESS = {REFINED: 0.3, TILTED: 0.1, ADAPTED: 0.3, SMC: 0.1}  # share of the draws, with one or two latents
_LEAST_GROWTH = {REFINED: 1.0, TILTED: 1.0, ADAPTED: 2.0, SMC: 2.0}  # draws relative to those asked for
_FINITE_VARIANCE = 0.5  # largest k-hat of weights with a variance
_MISSING_EVIDENCE = 0.02  # nats of evidence, hence a share of the posterior, that may be missing
_EVIDENCE_ERRORS, _EVIDENCE_SLACK = 3.0, 0.05  # by which two estimates of the evidence may differ
_AGREEMENT = 4.0  # standard errors by which planned and fresh draws may differ
_SAFETY = 1.15  # more draws than the pilot asks for, because its error is itself uncertain
_REPLICATES = 16  # independent randomisations of a Sobol net
_BLOCK = 2**24  # numbers of particles held at a time
_WIDE, _WIDE_DF = 3.0, 2.0  # scale and degrees of freedom of the defensive kernels
_KERNEL_DF = 5.0
_PARTICLES, _ISLANDS, _TEMPERATURES = 256, 8, (0.15, 0.5)
_EXPLORED_SCALES, _TILT_ROUNDS, _REFITS = (1.0, 1.5, 2.0, 3.0), 2, 3
_BROAD = 2.5  # scale of the wide copies of fitted kernels
_RARE = 0.05  # share of the draws inside an event below which it is rare
_RARE_GROWTH = 4.0  # draws for a rare event before kernels are fitted to it
_REPEATED_SEARCHES = 8  # searches from draws of large weight
_LEAST_COST = {TILTED: lambda n: 4 * n, ADAPTED: lambda n: 5 * n, SMC: lambda n: 50 * _PARTICLES + 5 * n}
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
            **{s: answered.count(s) for s in STAGES if s in answered},
            "caution": int((self.verdict == Verdict.CAUTION).sum()),
            "refused": int((self.verdict == Verdict.REFUSE).sum()),
        }


class Tolerance(NamedTuple):
    """The largest acceptable error, absolute or relative to the answer, whichever is larger."""

    absolute: float
    relative: float

    def ratio(self, answer: Assessment) -> Tensor:
        """Twice the error over the tolerance, the largest over the outputs of the query. Shapes: ``-> (m,)``."""
        allowed = (self.relative * answer.value.abs()).clamp_min(self.absolute)
        return (2 * answer.mcse / allowed).reshape(len(answer.ess), -1).amax(-1)


class _Result(NamedTuple):
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

    def select(self, index: Tensor) -> _Result:
        """The result for the observations at `index`."""
        return _Result(self.answer.select(index), *(t[index] for t in self[1:]))


class Group(NamedTuple):
    """Observations ``rows (m,)`` whose draws were made alike, and these draws."""

    rows: Tensor
    draws: Weighted


def escalate(
    model: Model,
    x: Tensor,
    proposals: Mapping[str, Proposal],
    n: int,
    *,
    query: Query | None,
    tolerance: Tolerance,
    budget: int | None,
    generator: Randomness,
    smooth: bool = True,
    keep: bool = True,
    latent: Tensor | None = None,
    progress: Progress = silent,
) -> tuple[Escalation, list[Group]]:
    """Apply the stages to every observation until its answer is good enough.

    Most parameters are those of `vaerdict.posterior`. The query is evaluated at the remaining observations only, so it
    must be a function of the latent and not of the observation's position. `latent` ``(n_obs, d)`` are latents whose
    weights are recorded.

    Returns
    -------
    record, groups
        The `Escalation`, and with `keep` the draws behind each answer.
    """
    if not (tolerance.absolute >= 0 and tolerance.relative >= 0 and sum(tolerance) > 0):
        raise SettingError(
            f"tolerance={tolerance.absolute} and rtol={tolerance.relative} must not be negative, and one must be "
            "positive: the larger of the two is the largest acceptable error."
        )
    if n < _MIN_DRAWS:
        raise SettingError(f"n={n} draws are too few to escalate with; use {_MIN_DRAWS} or more.")
    if budget is not None and budget < n:
        raise SettingError(
            f"budget={budget} evaluations per observation do not cover n={n} draws; raise it, or lower n."
        )
    with evaluating(model, proposals):
        _check_latents(model, x, proposals)
        space = unconstrained(model)
        if space is not None:
            proposals = {name: space.proposal(q) for name, q in proposals.items()}
            query = None if query is None else space.query(query)
            latent = None if latent is None else space.unconstrain(latent)
        state = _EscalationState(
            space or model, x, proposals, n, query, tolerance, budget, generator, smooth, keep, latent
        )
        for number, (name, run) in enumerate(state.stages.items(), 1):
            rows = state.rows_for(name)
            if len(rows):
                run(rows)
            progress(number, len(STAGES), f"{name}: {len(rows)} observations")
        record, groups = state.finish()
        if space is not None:
            groups = [Group(rows, draws._replace(z=space.constrain(draws.z))) for rows, draws in groups]
    return record, groups


@dataclass(eq=False)
class _EscalationState:
    """The best answer per observation so far, and the evidence that an answer must reach."""

    model: Model
    x: Tensor
    proposals: Mapping[str, Proposal]
    n: int
    query: Query | None
    tolerance: Tolerance
    budget: int | None
    generator: Randomness
    smooth: bool
    keep: bool
    latent: Tensor | None
    groups: list[Group] = field(default_factory=list)
    patient: bool = False

    def __post_init__(self) -> None:
        self.proposals = {name: q for name, q in self.proposals.items() if name != "PRIOR"}  # stages add the prior
        self.sobol = isinstance(as_source(self.generator), Sobol)
        m, double = self.x.shape[0], torch.float64
        self.search = ModeSearch(self.model, self.x, self._start(), generator=self.generator)
        self.record = Escalation(
            stage=[""] * m,
            reason=[_NOT_TRIED] * m,
            verdict=torch.full((m,), int(Verdict.REFUSE)),
            cost=self.search.cost.clone(),
            value=torch.empty(0),
            mcse=torch.empty(0),
            khat=torch.full((m,), torch.nan, dtype=double),
            ess=torch.zeros(m, dtype=double),
            inside=torch.full((m,), torch.inf, dtype=double),
            draws=torch.zeros(m, dtype=torch.long),
            scope=self.search.scope,
            latent_log_w=torch.full((m,), torch.nan, dtype=double),
        )
        self.ratio = torch.full((m,), torch.inf, dtype=double)
        self.accepted, self.complete, self.even, self.tilt = (torch.zeros(m, dtype=torch.bool) for _ in range(4))
        self.group_of = torch.full((m,), -1)
        self.floor, self.smc_evidence, self.smc_error = (torch.full((m,), -torch.inf, dtype=double) for _ in range(3))

    # ------------------------------------------------------------------------------------------------ stages
    @property
    def stages(self) -> dict[str, Callable[[Tensor], None]]:
        """What each stage does to the observations at some rows."""
        return {REFINED: self._refined, TILTED: self._tilted, ADAPTED: self._adapted, SMC: self._smc}

    def rows_for(self, stage: str) -> Tensor:
        """The observations that a stage may help and whose budget covers it; the others are told so."""
        wanted = {
            REFINED: torch.ones_like(self.tilt),
            TILTED: self.tilt & self.complete,
        }.get(stage, ~self.accepted & ~(self.tilt & self.complete))
        rows = wanted.nonzero().flatten()
        if self.budget is None or stage == REFINED:
            return rows
        covered = self.record.cost[rows] + _LEAST_COST[stage](self.n) <= self.budget
        for i in rows[~covered & ~self.accepted[rows]].tolist():
            self.record.reason[i] += f"; the budget of {self.budget} evaluations ends before {stage}"
        return rows[covered]

    def _refined(self, rows: Tensor) -> None:
        """Local proposals at the modes; where their weights are uneven, modes are searched from large ones too."""
        trusted = self._trusted(rows)
        for part, given_share in ((rows[~trusted], 0.2), (rows[trusted], 0.6)):
            if len(part):
                self._sample(REFINED, part, self._mixture(part, given_share=given_share))
        rows = rows[~self.even[rows]]
        if not len(rows):
            return
        draws = self._draw(rows, self._mixture(rows), self.n)
        rows, draws, _ = self._usable(REFINED, rows, draws, self._mixture(rows))
        if not len(rows):
            return
        centre = torch.full_like(draws.log_w[0], 0.5, dtype=torch.float64)
        starts = gathered(draws.z, systematic(draws.log_w.double(), centre, _REPEATED_SEARCHES))
        before = self.search.cost.clone()
        gained = rows[self.search.extend(rows, starts)]
        self.record.cost += self.search.cost - before
        if len(gained):
            self._sample(REFINED, gained, self._mixture(gained))

    def _trusted(self, rows: Tensor) -> Tensor:
        """Observations whose weights would be more even if most draws came from the given proposals."""
        if not self.proposals:
            return torch.zeros(len(rows), dtype=torch.bool)
        q, other = self._mixture(rows), self._mixture(rows, given_share=0.6)
        draws, x = self._draw(rows, q, self.n // 4), self.x[rows]
        ratio = q.log_prob(draws.z, x) - other.log_prob(draws.z, x)
        log_w = log_normalise(torch.nan_to_num(draws.log_w.double(), nan=-torch.inf, posinf=-torch.inf))
        return ((2 * log_w + ratio).logsumexp(0) < (2 * log_w).logsumexp(0)).cpu()

    def _tilted(self, rows: Tensor) -> None:
        """Kernels where the query differs from its mean; where they do not answer, more draws without them."""
        self._sample_tilted(rows)
        rows = rows[~self.accepted[rows]]
        if len(rows):
            self._sample(REFINED, rows, self._mixture(rows), patient=True)

    def _sample_tilted(self, rows: Tensor) -> None:
        """Answer with kernels fitted to draws from wider and wider local proposals, and then to draws from these."""
        local = self._local(rows)
        q = Mixture({f"x{s}": local.scaled(s, _KERNEL_DF) for s in _EXPLORED_SCALES})
        draws = self._draw(rows, q, self.n)
        for _ in range(_TILT_ROUNDS):
            log_tilt = self._tilt_weights(draws)
            found = log_tilt.amax(0).isfinite().nonzero().flatten()
            rows, draws, log_tilt = rows[found.cpu()], draws.select(found), log_tilt[:, found]
            if not len(rows):
                return
            kernels = fit_kernels([Population(draws.z, log_tilt, 32, 1.0)], df=_KERNEL_DF)
            q = self._mixture(rows, {"KERNELS": kernels}, {"KERNELS": 0.5})
            draws = draws.joined(self._draw(rows, q, self.n))
        self._sample(TILTED, rows, q)

    def _adapted(self, rows: Tensor) -> None:
        self._refit(ADAPTED, rows, self._mixture(rows))

    def _smc(self, rows: Tensor) -> None:
        """Kernels at particles and tempered particles, and at those that matter for the query."""
        result = smc(
            self.model,
            self.x[rows],
            Prior(self.model.prior),
            n_particles=_PARTICLES,
            n_islands=_ISLANDS,
            keep=_TEMPERATURES,
            strict=False,
            generator=self.generator,
        )
        self.record.cost[rows] += result.n_gradients.cpu()
        reached = result.log_w.amax(0).isfinite()
        self._add_reason(rows[~reached.cpu()], f"{SMC} did not reach the posterior")
        rows, z, log_w = rows[reached.cpu()], result.z[:, reached], result.log_w[:, reached]
        if not len(rows):
            return
        self.smc_evidence[rows] = result.log_evidence[reached].double().cpu()
        self.smc_error[rows] = result.standard_error[reached].double().cpu()
        particles = Weighted(z, log_w, torch.zeros(len(z), dtype=torch.long), None)
        populations = [Population(z, log_w, 96, 0.5), Population(z, self._query_weights(particles), 32, 0.2)]
        populations += [Population(t[:, reached], torch.zeros_like(log_w), 32, 0.15) for t in result.tempered]
        self._refit(SMC, rows, self._kernel_mixture(rows, populations))

    def _refit(self, stage: str, rows: Tensor, q: Mixture) -> None:
        """Fit kernels to weighted draws a few times, each time to all of them, and answer from the last."""
        draws: Weighted | None = None
        for _ in range(_REFITS):
            new = self._draw(rows, q, self.n)
            rows, draws, _ = self._usable(stage, rows, new if draws is None else draws.joined(new), q)
            if not len(rows):
                return
            populations = [
                Population(draws.z, draws.log_w, 128, 0.5),
                Population(draws.z, 0.5 * draws.log_w, 48, 0.2),
                Population(draws.z, 0.2 * draws.log_w, 32, 0.1),
                Population(draws.z, self._query_weights(draws), 48, 0.2),
            ]
            q = self._kernel_mixture(rows, populations)
        self._sample(stage, rows, q)

    def _kernel_mixture(self, rows: Tensor, populations: list[Population]) -> Mixture:
        kernels = fit_kernels(populations, df=_KERNEL_DF)
        return self._mixture(
            rows, {"KERNELS": kernels, "BROAD": kernels.scaled(_BROAD, _WIDE_DF)}, {"KERNELS": 0.6, "BROAD": 0.15}
        )

    def _query_weights(self, draws: Weighted) -> Tensor:
        """`_tilt_weights`, or the weights themselves where the query is the same at all draws."""
        log_tilt = self._tilt_weights(draws)
        return torch.where(log_tilt.isneginf().all(0), draws.log_w.double(), log_tilt)

    # --------------------------------------------------------------------------------------------- proposals
    def _local(self, rows: Tensor) -> Kernels:
        return self.search.kernels.select(rows.to(self.x.device))

    def _mixture(
        self,
        rows: Tensor,
        kernels: Mapping[str, Kernels] | None = None,
        kernel_shares: Mapping[str, float] | None = None,
        *,
        given_share: float = 0.2,
    ) -> Mixture:
        """The local proposals, the given ones, and wide defensive ones, after the kernels of a stage if it has any."""
        local, given = self._local(rows), self._restricted_proposals(rows)
        shares = {REFINED: 0.8 - (given_share if given else 0), "WIDE": 0.1, "PRIOR": 0.1}
        shares |= dict.fromkeys(given, given_share / max(1, len(given)))
        wide = local.scaled(_WIDE, _WIDE_DF)
        components: dict[str, Proposal] = {REFINED: local, "WIDE": wide, "PRIOR": Prior(self.model.prior), **given}
        if kernels and kernel_shares:
            rest = 1 - sum(kernel_shares.values())
            shares = {name: rest * share for name, share in shares.items()} | dict(kernel_shares)
            components |= kernels
        return Mixture(components, shares)

    def _tilt_weights(self, draws: Weighted) -> Tensor:
        """Log-weights times the distance of the query from its mean, in units of its mean distance per output."""
        values = draws.values(self.query).double().reshape(*draws.log_w.shape, -1)
        log_w = torch.nan_to_num(draws.log_w.double(), nan=-torch.inf)
        weight = log_normalise(log_w).exp().unsqueeze(-1)
        distance = (values - (weight * values).sum(0)).abs()
        relative = distance / (weight * distance).sum(0).clamp_min(torch.finfo(torch.double).tiny)
        return log_w + relative.sum(-1).log()

    def _restricted_proposals(self, rows: Tensor) -> dict[str, Proposal]:
        """The user's proposals; those made for given observations are restricted to some of them."""
        return {name: restricted(q, rows.to(self.x.device)) for name, q in self.proposals.items()}

    def _start(self) -> Tensor:
        """Where one more search starts: the location of the first proposal, or the mean of draws from the prior."""
        mean = Prior(self.model.prior).draw(self.x, 64, generator=self.generator).z.mean(0)
        if not self.proposals:
            return mean
        start = location(next(iter(self.proposals.values())), self.x, self.generator)
        return torch.where(start.isfinite().all(-1, keepdim=True), start, mean)

    # ---------------------------------------------------------------------------------------------- sampling
    def _draw(self, rows: Tensor, q: Mixture, k: int) -> Weighted:
        """Draw k particles per observation, with a Sobol source in independent randomisations of the net."""
        n_parts = _REPLICATES if self.sobol else 1
        size = max(math.ceil(1 / min(q.shares.values())), k // n_parts)  # every component draws at least once
        parts = [
            importance_weights(self.model, self.x[rows], q, size, strict=False, generator=self.generator)
            for _ in range(n_parts)
        ]
        z, log_w = (torch.cat(column) for column in zip(*parts, strict=True))
        self.record.cost[rows] += len(z)
        source = q.source(size).repeat(n_parts).to(z.device)
        replicate = torch.arange(n_parts, device=z.device).repeat_interleave(size)
        return Weighted(z, log_w, source, replicate if self.sobol else None)

    def _sample(self, stage: str, rows: Tensor, q: Mixture, *, patient: bool = False) -> None:
        """Draw a pilot, and then as many draws as each observation needs; not `patient`, a rare event gets few."""
        self.patient = patient
        pilot = self._draw(rows, q, self.n // 2)
        rows, pilot, q = self._usable(stage, rows, pilot, q)
        if len(rows):
            self._advance(stage, rows, q, pilot, 0)

    def _usable(self, stage: str, rows: Tensor, draws: Weighted, q: Mixture) -> tuple[Tensor, Weighted, Mixture]:
        """The observations whose weights are not NaN or infinite and not all zero; the others are told so."""
        usable = draws.log_w.amax(0).isfinite()
        if bool(usable.all()):
            return rows, draws, q
        self._add_reason(rows[~usable.cpu()], f"{stage} gave no usable weights")
        index = usable.nonzero().flatten()
        return rows[index.cpu()], draws.select(index), q.select(index)

    def _advance(self, stage: str, rows: Tensor, q: Mixture, draws: Weighted, n_fresh: int) -> None:
        """Judge the draws, of which the last `n_fresh` were not used to plan their number; draw more where it helps."""
        rows, draws, q = self._usable(stage, rows, draws, q)
        result = self._judge(stage, rows, draws, n_fresh)
        n_next = self._planned(stage, rows, result, len(draws.z), n_fresh)
        final = (n_next == 0).nonzero().flatten()
        if len(final):
            index = final.to(self.x.device)
            self._record(stage, rows[final], q.select(index), draws.select(index), result.select(final))
        for size in n_next[n_next > 0].unique().tolist():
            members = (n_next == size).nonzero().flatten()
            for block in members.split(max(1, _BLOCK // (size * draws.z.shape[-1]))):
                index = block.to(self.x.device)
                part = q.select(index)
                fresh = self._draw(rows[block], part, size - len(draws.z))
                self._advance(stage, rows[block], part, draws.select(index).joined(fresh), len(fresh.z))

    def _judge(self, stage: str, rows: Tensor, draws: Weighted, n_fresh: int) -> _Result:
        """Assess draws by all of them and by the fresh ones alone, and compare with what others have found."""
        values, n = draws.values(self.query), len(draws.z)
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
        return _Result(answer, ratio, hits, sound, agrees, complete)

    def _least_ess(self, stage: str) -> float:
        """Share of effective draws below which a proposal does not fit; lower for many latents: weights multiply."""
        d = max(2, self.search.kernels.loc.shape[-1])
        return min(_LEAST_ESS[stage], max(0.1, _LEAST_ESS[stage] * math.sqrt(2 / d)))

    def _planned(self, stage: str, rows: Tensor, result: _Result, n: int, n_fresh: int) -> Tensor:
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
        if stage == REFINED and not self.patient:  # a rare event needs other draws rather than many
            rare = answer.inside < _RARE * answer.ess
            promising &= ~rare | (needed <= _RARE_GROWTH)
        total = (self.n * total).long()
        if self.budget is not None:
            promising &= self.record.cost[rows] + total - n <= self.budget
        return torch.where(promising & (total > n), total, 0)

    # ---------------------------------------------------------------------------------------------- recording
    def _record(self, stage: str, rows: Tensor, q: Mixture, draws: Weighted, result: _Result) -> None:
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

    def _reason(self, stage: str, result: _Result, j: int, n: int, i: int) -> str:
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

    def _add_reason(self, rows: Tensor, failure: str) -> None:
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
        z = Prior(self.model.prior).draw(self.x, 2, generator=self.generator).z
        values = Weighted(z, torch.zeros_like(z[..., 0]), torch.zeros(2)).values(self.query)
        return torch.full(values.shape[1:], torch.nan).double()


def _check_latents(model: Model, x: Tensor, proposals: Mapping[str, Proposal]) -> None:
    """Raise where latents are not one tensor, which refinement and SMC need, or proposals and model differ in size."""
    z, _ = importance_weights(model, x[:1], Prior(model.prior), 2, strict=False, generator=seeded(0, x.device))
    if not isinstance(z, Tensor):
        raise ShapeError(
            f"the model's latents are a {type(z).__name__}; escalation needs one tensor (K, n_obs, d). Concatenate "
            "them in the model, or call `posterior` without a tolerance."
        )
    for q in proposals.values():
        first = restricted(q, torch.zeros(1, dtype=torch.long, device=x.device))
        check_latent(first.draw(x[:1], 2, generator=seeded(0, x.device)), model.prior)
