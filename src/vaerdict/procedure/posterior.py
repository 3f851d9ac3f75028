"""Weighted particles from a model's posterior, and what can be answered with them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from vaerdict import diagnostics, estimators
from vaerdict.core import (
    Estimate,
    Latent,
    Model,
    Progress,
    Proposal,
    SettingError,
    ShapeError,
    check_count,
    check_observations,
    map_latent,
    silent,
)
from vaerdict.decisions import check_probabilities
from vaerdict.diagnostics import Verdict
from vaerdict.noise import Randomness, seeded
from vaerdict.procedure.escalation import Escalation, climb, island_mcse
from vaerdict.procedure.weighing import weigh
from vaerdict.proposals import Mixture


class Decision(NamedTuple):
    """An action for each observation with the evidence for it.

    ``expected_loss`` covers every action; ``margin`` is how much worse the second-best action is, with its own
    Monte-Carlo error, and ``verdict`` (see `vaerdict.diagnostics.Verdict`) counts both the weights and that margin.
    """

    action: Tensor
    expected_loss: Estimate
    margin: Tensor
    margin_mcse: Tensor
    verdict: Tensor


@dataclass(frozen=True, eq=False)
class Posterior:
    """Particles with log-weights: the posterior of a model at some observations, as far as it is known.

    Shapes: ``z (K, *batch, d)``, ``log_w (K, *batch)``, ``source (K,)`` the place in `names` of a particle's proposal.
    """

    z: Latent
    log_w: Tensor
    source: Tensor
    names: tuple[str, ...] = ("q",)
    smooth: bool = True
    record: Escalation | None = field(default=None, repr=False)

    @cached_property
    def _psis(self) -> tuple[Tensor, Tensor]:
        return diagnostics.psis(self.log_w)

    @property
    def khat(self) -> Tensor:
        """Pareto shape of the weights' tail, NaN where it could not be assessed. Shapes: ``(*batch)``."""
        return self._psis[1]

    @cached_property
    def ess(self) -> Tensor:
        """Effective sample size of the weights. Shapes: ``(*batch)``."""
        return diagnostics.ess(self.log_w)

    @property
    def verdict(self) -> Tensor:
        """`Verdict` of each observation: ok (0), caution (1), refuse (2). Shapes: ``(*batch)``."""
        if self.record is not None:
            return self.record.verdict.to(self.log_w.device)
        return diagnostics.verdict(self.khat, self.ess, self.log_w.shape[0])

    @property
    def log_evidence(self) -> Tensor:
        """IWELBO with all particles: the estimate of log p(x). Shapes: ``(*batch)``."""
        return torch.logsumexp(self.log_w.double(), 0) - torch.log(
            torch.tensor(self.log_w.shape[0], dtype=torch.float64)
        )

    def expect(self, f: Callable[[Latent], Tensor]) -> Estimate:
        """Posterior expectation of f, by (multiple) importance sampling with Pareto-smoothed weights.

        Shapes: ``f: (K, *batch, d) -> (K, *batch, *out)``; the estimate is ``(*batch, *out)``.
        """
        values = f(self.z)
        if not isinstance(values, Tensor) or values.shape[: self.log_w.dim()] != self.log_w.shape:
            shape = tuple(values.shape) if isinstance(values, Tensor) else type(values).__name__
            raise ShapeError(
                f"f returned {shape}; it must return one value a particle, shape {tuple(self.log_w.shape)} first."
            )
        if len(self.names) > 1:
            return estimators.mis(values, self.log_w, self.source, smooth=self.smooth)
        estimate = (estimators.psis if self.smooth else estimators.snis)(values, self.log_w)
        if self.record is None or not self.record.islands.any():
            return estimate
        return self._with_island_errors(estimate, values)

    def _with_island_errors(self, estimate: Estimate, values: Tensor) -> Estimate:
        """Particles of sequential Monte Carlo are not independent: plain weights, errors from groups that never met."""
        assert self.record is not None
        moved = self.record.islands.to(self.log_w.device).nonzero().flatten()
        f, log_w = values[:, moved], self.log_w[:, moved]
        plain = estimators.snis(f, log_w)
        value, mcse = estimate.value.clone(), estimate.mcse.clone()
        spread = island_mcse(f, log_w, int(self.record.islands.max()))
        value[moved], mcse[moved] = plain.value, spread.maximum(diagnostics.least_mcse(f, plain.ess))
        return estimate._replace(value=value, mcse=mcse)

    def decide(
        self, loss: Callable[[Latent], Tensor] | Tensor, state: Callable[[Latent], Tensor] | None = None
    ) -> Decision:
        """The action of least posterior expected loss.

        `loss` is a function of the latent with one column an action, ``(K, *batch, d) -> (K, *batch, actions)``, or a
        matrix ``(actions, states)`` together with `state`, the probability of each state given the latent.
        """
        expected = self.expect(_loss_function(loss, state))
        if expected.value.dim() != self.log_w.dim():
            given = tuple(expected.value.shape[self.log_w.dim() - 1 :])
            raise ShapeError(f"the loss gives {given} for each particle; it must give one number an action.")
        if expected.value.shape[-1] < 2:
            raise SettingError("a decision needs at least two actions; the loss has one.")
        action = expected.value.argmin(-1)
        regret = _regret(_loss_function(loss, state), action)
        margin = self.expect(regret)
        chosen = _one_hot(action, margin.value)
        second = margin.value.masked_fill(chosen, torch.inf).argmin(-1, keepdim=True)
        gap, error = (t.gather(-1, second).squeeze(-1) for t in (margin.value, margin.mcse))
        # every other action must be clearly worse, not only the one that looks second best
        unsure = ((margin.value < 2 * margin.mcse) & ~chosen).any(-1).to(self.verdict) * Verdict.CAUTION
        return Decision(action, expected, gap, error, torch.maximum(self.verdict_on(regret), unsure))

    def verdict_on(self, f: Callable[[Latent], Tensor]) -> Tensor:
        """`Verdict` on the expectation of f: that of the weights, or worse where f makes their tail heavier.

        Shapes: ``-> (*batch)``.
        """
        khat = diagnostics.khat_of(f(self.z), self.log_w)
        worst = khat.reshape(*self.khat.shape, -1).nan_to_num(-torch.inf).amax(-1)
        own = diagnostics.verdict(torch.fmax(worst, self.khat), self.ess, self.log_w.shape[0])
        if self.record is not None:  # k-hat says nothing of particles that have been resampled and moved
            own = torch.where(self.record.islands.to(own.device) > 0, Verdict.OK, own)
        return torch.maximum(self.verdict, own.to(self.verdict))

    def resample(self, n: int, *, generator: torch.Generator) -> Latent:
        """Draw n particles for each observation in proportion to the weights (systematic resampling)."""
        weight = torch.softmax((self._psis[0] if self.smooth else self.log_w).double(), 0).cumsum(0)
        batch = self.log_w.shape[1:]
        start = torch.rand(1, *batch, generator=generator, dtype=torch.float64).to(weight)
        steps = torch.arange(check_count(n, name="n"), device=weight.device).reshape(-1, *(1,) * len(batch))
        points = ((steps + start) / n).movedim(0, -1).contiguous()
        index = (
            torch.searchsorted(weight.movedim(0, -1).contiguous(), points)
            .clamp_max(self.log_w.shape[0] - 1)
            .movedim(-1, 0)
        )
        return map_latent(
            lambda t: torch.gather(
                t, 0, index.reshape(*index.shape, *(1,) * (t.dim() - index.dim())).expand(n, *t.shape[1:])
            ),
            self.z,
        )

    def to_arviz(self, n: int | None = None, *, generator: torch.Generator | None = None) -> Any:
        """An arviz ``InferenceData``: n resampled latents in `posterior`, weights in `importance_diagnostics`.

        The latents of `posterior` are equally weighted; ``log_weight`` is that of the particles they were drawn from.
        """
        try:
            import arviz
            import xarray
        except ImportError as error:
            raise SettingError("the export needs arviz; install it with `pip install vaerdict[arviz]`.") from error

        z = self.resample(n or self.log_w.shape[0], generator=generator or seeded(0))
        parts = {"z": z} if isinstance(z, Tensor) else dict(zip(z._fields, z, strict=True))
        axes = [f"batch_{i}" for i in range(self.log_w.dim() - 1)]
        data = arviz.from_dict(
            posterior={name: _array(part)[None] for name, part in parts.items()},
            dims={name: [*axes, f"{name}_dim"] for name in parts},
        )
        columns = {"log_weight": (["particle", *axes], _array(self.log_w))}
        columns |= {"khat": (axes, _array(self.khat)), "ess": (axes, _array(self.ess))}
        data.add_groups(importance_diagnostics=xarray.Dataset(columns))
        return data


def _array(tensor: Tensor) -> Any:
    return tensor.detach().cpu().numpy()


def posterior(
    model: Model,
    x: Tensor,
    proposals: Proposal | Mapping[str, Proposal],
    n: int = 1000,
    *,
    shares: Mapping[str, float] | None = None,
    tolerance: float | None = None,
    query: Callable[[Latent], Tensor] | None = None,
    budget: int | None = None,
    generator: Randomness | None = None,
    smooth: bool = True,
    progress: Progress = silent,
) -> Posterior:
    """Weighted particles of the model's posterior at x, n for each observation, from one proposal or several.

    Several proposals are combined by multiple importance sampling in the given shares, equal by default.

    With `tolerance` each observation is escalated (`vaerdict.procedure.escalation`) until the Monte-Carlo error of
    `query`, by default the latent in posterior standard deviations, is within it and the weights can be trusted, or
    until `budget` model evaluations are spent; ``Posterior.record`` says which rung answered, at what cost, and why.

    Shapes: ``x (n_obs, p) -> z (n, n_obs, d), log_w (n, n_obs)``.
    """
    check_observations(x)
    check_count(n, name="n")
    generator = seeded(0, x.device) if generator is None else generator
    if shares is not None and (tolerance is not None or not isinstance(proposals, Mapping)):
        raise SettingError("shares belong to a mapping of several proposals, without a tolerance; leave them out.")
    if tolerance is not None:
        named = dict(proposals) if isinstance(proposals, Mapping) else {"q": proposals}
        z, log_w, record = climb(
            model, x, named, n, query=query, tolerance=tolerance, budget=budget, generator=generator, progress=progress
        )
        return Posterior(z, log_w, torch.zeros(n, dtype=torch.long, device=log_w.device), smooth=smooth, record=record)
    if query is not None or budget is not None:
        raise SettingError("query and budget belong to escalation; give a tolerance too.")
    q = Mixture(proposals, shares) if isinstance(proposals, Mapping) else proposals
    z, log_w = weigh(model, x, q, n, generator=generator)
    if isinstance(q, Mixture):
        return Posterior(z, log_w, q.source(n).to(log_w.device), tuple(q.components), smooth)
    return Posterior(z, log_w, torch.zeros(n, dtype=torch.long, device=log_w.device), smooth=smooth)


class Answer(NamedTuple):
    """A posterior expectation with everything that speaks for or against it, one entry an observation.

    ``khat`` is that of f times the weights, the worst over f's outputs, NaN where it was not assessed. ``rung`` names
    what answered, ``cost`` counts model evaluations, ``reason`` says why, ``verdict`` is a `Verdict`.
    """

    value: Tensor
    mcse: Tensor
    ess: Tensor
    khat: Tensor
    verdict: Tensor
    rung: list[str]
    cost: Tensor
    reason: list[str]


def expect(
    model: Model,
    x: Tensor,
    f: Callable[[Latent], Tensor],
    proposals: Proposal | Mapping[str, Proposal] | None = None,
    n: int = 1000,
    *,
    tolerance: float = 0.02,
    budget: int | None = None,
    generator: Randomness | None = None,
    progress: Progress = silent,
) -> Answer:
    """E[f(z) | x] to within `tolerance`, or an honest refusal, for each observation.

    Without proposals the model's own curvature and its prior are all there is to start from. Shapes: ``x (n_obs, p)``,
    ``f: (K, n_obs, d) -> (K, n_obs, *out)``.
    """
    named: Proposal | Mapping[str, Proposal] = {} if proposals is None else proposals
    answer = posterior(
        model, x, named, n, tolerance=tolerance, query=f, budget=budget, generator=generator, progress=progress
    )
    estimate, record = answer.expect(f), answer.record
    assert record is not None
    estimate = estimate._replace(khat=record.khat.to(estimate.khat))
    return Answer(*estimate, answer.verdict, record.rung, record.cost, record.reason)


def _loss_function(
    loss: Callable[[Latent], Tensor] | Tensor, state: Callable[[Latent], Tensor] | None
) -> Callable[[Latent], Tensor]:
    if not isinstance(loss, Tensor):
        return loss
    if state is None:
        raise SettingError(
            "a loss matrix (actions, states) needs `state`, the probability of each state given the latent."
        )
    matrix = loss

    def expected(z: Latent) -> Tensor:
        prob = check_probabilities(state(z))
        if matrix.shape[-1] != prob.shape[-1]:
            raise ShapeError(f"the loss has {matrix.shape[-1]} states, `state` returned {prob.shape[-1]}.")
        return prob.double() @ matrix.to(prob.device).double().mT

    return expected


def _regret(loss: Callable[[Latent], Tensor], action: Tensor) -> Callable[[Latent], Tensor]:
    """How much more each action costs than the chosen one, particle by particle: differences have less noise."""

    def regret(z: Latent) -> Tensor:
        values = loss(z)
        index = action.expand(values.shape[:-1]).unsqueeze(-1)
        return values - values.gather(-1, index)

    return regret


def _one_hot(action: Tensor, like: Tensor) -> Tensor:
    return torch.nn.functional.one_hot(action, like.shape[-1]).bool()
