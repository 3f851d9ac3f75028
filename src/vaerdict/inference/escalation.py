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

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from vaerdict.core import (
    Latent,
    Model,
    Observations,
    Progress,
    Proposal,
    SettingError,
    check_count,
    evaluating,
    log_normalise,
    map_latent,
    prepared,
    restricted,
    silent,
)
from vaerdict.diagnostics import Verdict
from vaerdict.inference.adaptation import Population, fit_kernels
from vaerdict.inference.assess import Weighted, checked_values, importance_weights
from vaerdict.inference.sampling import (
    ADAPTED,
    EXACT,
    REFINED,
    SMC,
    STAGES,
    TILTED,
    Escalation,
    Group,
    Sampling,
    Tolerance,
)
from vaerdict.inference.search import ModeSearch, Scope
from vaerdict.inference.target import Target, TargetProposal, UserQuery
from vaerdict.models import Enumerated
from vaerdict.noise import Randomness, Source, as_source, seeded, side_stream, source_at
from vaerdict.proposals import Kernels, Mixture, Prior
from vaerdict.samplers import gathered, smc, systematic

_MIN_DRAWS = 64
_WIDE, _WIDE_DF = 3.0, 2.0  # scale and degrees of freedom of the defensive kernels
_KERNEL_DF = 5.0
_PARTICLES, _ISLANDS, _TEMPERATURES = 256, 8, (0.15, 0.5)
_EXPLORED_SCALES, _TILT_ROUNDS, _REFITS = (1.0, 1.5, 2.0, 3.0), 2, 3
_BROAD = 2.5  # scale of the wide copies of fitted kernels
_ROUNDING = 1e-12  # relative distance of the query from its mean below which it is rounding
_REPEATED_SEARCHES = 8  # searches from draws of large weight
_LEAST_COST = {TILTED: lambda n: 4 * n, ADAPTED: lambda n: 5 * n, SMC: lambda n: 50 * _PARTICLES + 5 * n}


def escalate(
    model: Model,
    x: Observations,
    proposals: Mapping[str, Proposal],
    n: int,
    *,
    query: UserQuery | None,
    tolerance: float,
    rtol: float,
    budget: int | None,
    generator: Randomness,
    smooth: bool = True,
    keep: bool = True,
    latent: Latent | None = None,
    progress: Progress = silent,
) -> tuple[Escalation, list[Group]]:
    """Apply the stages to every observation until its answer is good enough.

    Most parameters are those of `vaerdict.posterior`. The query is evaluated at the remaining observations only, so it
    must be a function of latent and observation, and not of the observation's position. `latent` ``(n_obs, d)`` are
    latents whose weights are recorded.

    Returns
    -------
    record, groups
        The `Escalation`, and with `keep` the draws behind each answer.
    """
    if not (tolerance >= 0 and rtol >= 0 and tolerance + rtol > 0):
        raise SettingError(
            f"tolerance={tolerance} and rtol={rtol} must not be negative, and one must be positive: the larger of the "
            "two is the largest acceptable error."
        )
    if check_count(n, name="n") < _MIN_DRAWS:
        raise SettingError(f"n={n} draws are too few to escalate with; use {_MIN_DRAWS} or more.")
    if budget is not None and budget < n:
        raise SettingError(
            f"budget={budget} evaluations per observation do not cover n={n} draws; raise it, or lower n."
        )
    with evaluating(model, proposals):  # the query may use modules of the model
        target = Target.of(model, x)
        if not target.d:
            return _summed(target, query), []
        wrapped = {name: target.proposal(q) for name, q in proposals.items()}
        _check_latents(target, wrapped)
        state = _Stages(
            target,
            target.index,
            wrapped,
            as_source(generator),
            n=n,
            query=None if query is None else target.query(query),
            tolerance=Tolerance(tolerance, rtol),
            budget=budget,
            smooth=smooth,
            keep=keep,
            latent=None if latent is None else target.space.vector(map_latent(lambda t: t.unsqueeze(0), latent))[0],
        )
        for number, (name, run) in enumerate(state.stages.items(), 1):
            rows = state.rows_for(name)
            if len(rows):
                run(rows)
            progress(number, len(STAGES), f"{name}: {len(rows)} observations")
        record, groups = state.finish()
        groups = [Group(rows, draws._replace(z=target.space.latent(draws.z))) for rows, draws in groups]
    return record, groups


class _Stages(Sampling):
    """The stages of escalation: which proposals each of them samples from."""

    def __init__(
        self, model: Target, x: Tensor, proposals: Mapping[str, TargetProposal], source: Source, **settings: Any
    ) -> None:
        self.model, self.x, self.source = model, x, source
        self.proposals = {name: q for name, q in proposals.items() if name != "PRIOR"}  # stages add the prior
        self.search = ModeSearch(model, x, self._start(), source=source)
        super().__init__(
            model,
            x,
            source=source,
            scope=self.search.scope,
            cost=self.search.cost,
            d=self.search.kernels.loc.shape[-1],
            **settings,
        )

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
                self.sample(REFINED, part, self._mixture(part, given_share=given_share))
        rows = rows[~self.even[rows]]
        if not len(rows):
            return
        draws = self.draw(rows, self._mixture(rows), self.n)
        rows, draws, _ = self.usable(REFINED, rows, draws, self._mixture(rows))
        if not len(rows):
            return
        centre = torch.full_like(draws.log_w[0], 0.5, dtype=torch.float64)
        starts = gathered(draws.z, systematic(draws.log_w.double(), centre, _REPEATED_SEARCHES))
        before = self.search.cost.clone()
        gained = rows[self.search.extend(rows, starts)]
        self.record.cost += self.search.cost - before
        if len(gained):
            self.sample(REFINED, gained, self._mixture(gained))

    def _trusted(self, rows: Tensor) -> Tensor:
        """Observations whose weights would be more even if most draws came from the given proposals."""
        if not self.proposals:
            return torch.zeros(len(rows), dtype=torch.bool)
        q, other = self._mixture(rows), self._mixture(rows, given_share=0.6)
        draws, x = self.draw(rows, q, self.n // 4), self.x[rows]
        ratio = q.log_prob(draws.z, x) - other.log_prob(draws.z, x)
        log_w = log_normalise(torch.nan_to_num(draws.log_w.double(), nan=-torch.inf, posinf=-torch.inf))
        return ((2 * log_w + ratio).logsumexp(0) < (2 * log_w).logsumexp(0)).cpu()

    def _tilted(self, rows: Tensor) -> None:
        """Kernels where the query differs from its mean; where they do not answer, more draws without them."""
        self._sample_tilted(rows)
        rows = rows[~self.accepted[rows]]
        if len(rows):
            self.sample(REFINED, rows, self._mixture(rows), patient=True)

    def _sample_tilted(self, rows: Tensor) -> None:
        """Answer with kernels fitted to draws from wider and wider local proposals, and then to draws from these."""
        local = self._local(rows)
        q = Mixture({f"x{s}": local.scaled(s, _KERNEL_DF) for s in _EXPLORED_SCALES})
        draws = self.draw(rows, q, self.n)
        for _ in range(_TILT_ROUNDS):
            log_tilt = self._tilt_weights(draws, rows)
            found = log_tilt.amax(0).isfinite().nonzero().flatten()
            rows, draws, log_tilt = rows[found.cpu()], draws.select(found), log_tilt[:, found]
            if not len(rows):
                return
            kernels = fit_kernels([Population(draws.z, log_tilt, 32, 1.0)], df=_KERNEL_DF)
            q = self._mixture(rows, {"KERNELS": kernels}, {"KERNELS": 0.5})
            draws = draws.joined(self.draw(rows, q, self.n))
        self.sample(TILTED, rows, q)

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
            generator=side_stream(source_at(self.source, rows), 1),
        )
        self.record.cost[rows] += result.n_gradients.cpu()
        reached = result.log_w.amax(0).isfinite()
        self.add_reason(rows[~reached.cpu()], f"{SMC} did not reach the posterior")
        rows, z, log_w = rows[reached.cpu()], result.z[:, reached], result.log_w[:, reached]
        if not len(rows):
            return
        self.smc_evidence[rows] = result.log_evidence[reached].double().cpu()
        self.smc_error[rows] = result.standard_error[reached].double().cpu()
        particles = Weighted(z, log_w, torch.zeros(len(z), dtype=torch.long), None)
        populations = [Population(z, log_w, 96, 0.5), Population(z, self._query_weights(particles, rows), 32, 0.2)]
        populations += [Population(t[:, reached], torch.zeros_like(log_w), 32, 0.15) for t in result.tempered]
        self._refit(SMC, rows, self._kernel_mixture(rows, populations))

    def _refit(self, stage: str, rows: Tensor, q: Mixture) -> None:
        """Fit kernels to weighted draws a few times, each time to all of them, and answer from the last."""
        draws: Weighted | None = None
        for _ in range(_REFITS):
            new = self.draw(rows, q, self.n)
            rows, draws, _ = self.usable(stage, rows, new if draws is None else draws.joined(new), q)
            if not len(rows):
                return
            populations = [
                Population(draws.z, draws.log_w, 128, 0.5),
                Population(draws.z, 0.5 * draws.log_w, 48, 0.2),
                Population(draws.z, 0.2 * draws.log_w, 32, 0.1),
                Population(draws.z, self._query_weights(draws, rows), 48, 0.2),
            ]
            q = self._kernel_mixture(rows, populations)
        self.sample(stage, rows, q)

    def _kernel_mixture(self, rows: Tensor, populations: list[Population]) -> Mixture:
        kernels = fit_kernels(populations, df=_KERNEL_DF)
        return self._mixture(
            rows, {"KERNELS": kernels, "BROAD": kernels.scaled(_BROAD, _WIDE_DF)}, {"KERNELS": 0.6, "BROAD": 0.15}
        )

    def _query_weights(self, draws: Weighted, rows: Tensor) -> Tensor:
        """`_tilt_weights`, or the weights themselves where the query is the same at all draws."""
        log_tilt = self._tilt_weights(draws, rows)
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

    def _tilt_weights(self, draws: Weighted, rows: Tensor) -> Tensor:
        """Log-weights times the distance of the query from its mean, in units of its mean distance per output."""
        values = draws.values(self.query, self.x[rows]).double().reshape(*draws.log_w.shape, -1)
        log_w = torch.nan_to_num(draws.log_w.double(), nan=-torch.inf)
        weight = log_normalise(log_w).exp().unsqueeze(-1)
        distance = (values - (weight * values).sum(0)).abs()
        distance = torch.where(distance > _ROUNDING * distance.amax(0), distance, 0.0)
        relative = distance / (weight * distance).sum(0).clamp_min(torch.finfo(torch.double).tiny)
        return log_w + relative.sum(-1).log()

    def _restricted_proposals(self, rows: Tensor) -> dict[str, Proposal]:
        """The user's proposals; those made for given observations are restricted to some of them."""
        return {name: restricted(q, rows.to(self.x.device)) for name, q in self.proposals.items()}

    def _start(self) -> Tensor:
        """Where one more search starts: the location of the first proposal, or the mean of draws from the prior."""
        mean = Prior(self.model.prior).draw(self.x, 64, generator=self.source).z.mean(0)
        if not self.proposals:
            return mean
        start = next(iter(self.proposals.values())).location(self.x, self.source)
        return torch.where(start.isfinite().all(-1, keepdim=True), start, mean)


def _summed(target: Target, query: UserQuery | None) -> Escalation:
    """The exact answer for a model whose latents are all discrete."""
    model = target.space.model
    assert isinstance(model, Enumerated)
    if query is None:
        raise SettingError(
            "all latents of the model are discrete, and their posterior is a sum over states: ask for an expectation, "
            "expect(model, x, f)."
        )
    n, states = len(target.index), model.n_states
    nothing = torch.zeros(n, dtype=torch.float64)
    z = nothing.new_zeros(1, n, 0).to(target.index.device)
    with torch.no_grad():
        log_p = target.space.model.log_joint(prepared(target.space.model, target.x), z)[0].cpu()
    value = checked_values(target.space.evaluate(query, z, target.x), z.sum(-1))[0].double().cpu()
    usable = log_p.isfinite() & value.reshape(n, -1).isfinite().all(-1)
    value[~usable] = torch.nan
    reasons = (f"{EXACT}: summed over all {states} states", f"{EXACT}: the density or the query is not finite")
    return Escalation(
        stage=[EXACT] * n,
        reason=[reasons[0] if answered else reasons[1] for answered in usable.tolist()],
        verdict=torch.where(usable, Verdict.OK, Verdict.REFUSE),
        cost=nothing + states,
        value=value,
        mcse=torch.zeros_like(value),
        khat=torch.full_like(nothing, torch.nan),
        ess=torch.full_like(nothing, torch.inf),
        inside=torch.full_like(nothing, torch.inf),
        draws=nothing.long() + states,
        scope=Scope(*(nothing.long() if i < 2 else nothing.clone() for i in range(5))),
        latent_log_w=nothing.clone(),  # every state is covered
    )


def _check_latents(target: Target, proposals: Mapping[str, TargetProposal]) -> None:
    """Raise where the model gives no weights of the right shape, or a proposal draws latents of another size."""
    first, generator = target.index[:1], seeded(0, target.index.device)
    importance_weights(target, first, Prior(target.prior), 2, strict=False, generator=generator)
    for q in proposals.values():
        q.select(torch.zeros(1, dtype=torch.long, device=first.device)).draw(first, 2, generator=generator)
