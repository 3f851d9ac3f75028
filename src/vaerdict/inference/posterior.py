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
    check_dtype,
    check_observations,
    evaluating,
    expand_trailing,
    log_mean_exp,
    map_latent,
    silent,
)
from vaerdict.decisions import check_probabilities
from vaerdict.diagnostics import Verdict
from vaerdict.inference.assess import island_mcse, verdict_after_moves, worst_khat
from vaerdict.inference.escalation import Escalation, climb
from vaerdict.inference.weights import weigh
from vaerdict.noise import Randomness, seeded
from vaerdict.proposals import Mixture
from vaerdict.samplers import gathered, systematic


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
        return diagnostics.ess(self.log_w).masked_fill(self.blank, 0)

    @cached_property
    def blank(self) -> Tensor:
        """Observations at which escalation could weigh no particle: nothing is known of them. Shapes: ``(*batch)``."""
        if self.record is None:
            return torch.zeros_like(self.log_w[0], dtype=torch.bool)
        return torch.tensor([not rung for rung in self.record.rung], device=self.log_w.device)

    @property
    def verdict(self) -> Tensor:
        """`Verdict` of each observation: ok (0), caution (1), refuse (2). Shapes: ``(*batch)``."""
        if self.record is not None:
            return self.record.verdict.to(self.log_w.device)
        return diagnostics.verdict(self.khat, self.ess, self.log_w.shape[0])

    @property
    def log_evidence(self) -> Tensor:
        """IWELBO with all particles: the estimate of log p(x). Shapes: ``(*batch)``."""
        return log_mean_exp(self.log_w.double()).masked_fill(self.blank, -torch.inf)

    def expect(self, f: Callable[[Latent], Tensor]) -> Estimate:
        """Posterior expectation of f, by (multiple) importance sampling with Pareto-smoothed weights.

        NaN where the observation is `blank`. Shapes: ``f: (K, *batch, d) -> (K, *batch, *out)``; the estimate is
        ``(*batch, *out)``.
        """
        value, mcse, ess, khat = self._estimate(self._values(f))
        blank = expand_trailing(self.blank, value)
        value, mcse = (t.masked_fill(blank, torch.nan) for t in (value, mcse))
        return Estimate(value, mcse, ess.masked_fill(self.blank, 0), khat)

    def _values(self, f: Callable[[Latent], Tensor]) -> Tensor:
        """F at every particle, zero where the observation is blank. Shapes: ``-> (K, *batch, *out)``."""
        some_blank = bool(self.blank.any())
        values = f(map_latent(self._filled, self.z) if some_blank else self.z)
        if not isinstance(values, Tensor) or values.shape[: self.log_w.dim()] != self.log_w.shape:
            shape = tuple(values.shape) if isinstance(values, Tensor) else type(values).__name__
            raise ShapeError(
                f"f returned {shape}; it must return one value a particle, shape {tuple(self.log_w.shape)} first."
            )
        return self._filled(values) if some_blank else values

    def _filled(self, t: Tensor) -> Tensor:
        """Zero in place of what is not known, so that functions which check their input see nothing odd."""
        return t.masked_fill(expand_trailing(self.blank, t[0]), 0)

    def _estimate(self, values: Tensor) -> Estimate:
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

        A state that no draw has hit may still be costly. A matrix says how costly, and the errors count it; of a
        function only the losses that draws have met are known.
        """
        losses = _loss_function(loss, state)
        expected = self.expect(losses)
        if expected.value.dim() != self.log_w.dim():
            given = tuple(expected.value.shape[self.log_w.dim() - 1 :])
            raise ShapeError(f"the loss gives {given} for each particle; it must give one number an action.")
        if expected.value.shape[-1] < 2:
            raise SettingError("a decision needs at least two actions; the loss has one.")
        action = expected.value.argmin(-1)
        regret = _regret(losses, action)
        margin = self.expect(regret)
        if isinstance(loss, Tensor) and state is not None:
            matrix, unseen = loss.to(margin.value), diagnostics.least_mcse(self._values(state), self.ess)
            expected = _at_least(expected, matrix, unseen)
            margin = _at_least(margin, matrix - matrix[action].unsqueeze(-2), unseen)
        chosen = _one_hot(action, margin.value)
        second = margin.value.masked_fill(chosen, torch.inf).argmin(-1, keepdim=True)
        gap, error = (t.gather(-1, second).squeeze(-1) for t in (margin.value, margin.mcse))
        # every other action must be clearly worse, not only the one that looks second best
        unsure = (~(margin.value >= 2 * margin.mcse) & ~chosen).any(-1).to(self.verdict) * Verdict.CAUTION
        return Decision(action, expected, gap, error, torch.maximum(self.verdict_on(regret), unsure))

    def verdict_on(self, f: Callable[[Latent], Tensor]) -> Tensor:
        """`Verdict` on the expectation of f: that of the weights, or worse where f makes their tail heavier.

        Shapes: ``-> (*batch)``.
        """
        khat = worst_khat(self._values(f), self.log_w)
        own = diagnostics.verdict(khat, self.ess, self.log_w.shape[0])
        if self.record is not None:
            own = torch.where(self.record.islands.to(own.device) > 0, verdict_after_moves(khat), own)
        return torch.maximum(self.verdict, own.to(self.verdict))

    def resample(self, n: int, *, generator: torch.Generator) -> Latent:
        """Draw n particles for each observation in proportion to the weights (systematic resampling)."""
        log_w = (self._psis[0] if self.smooth else self.log_w).double()
        offset = torch.rand(log_w.shape[1:], generator=generator, dtype=torch.float64, device=generator.device)
        return gathered(self.z, systematic(log_w, offset.to(log_w.device), check_count(n, name="n")))

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

    With `tolerance` each observation is escalated (`vaerdict.inference.escalation`) until the Monte-Carlo error of
    `query`, by default the latent in posterior standard deviations, is within it and the weights can be trusted, or
    until `budget` model evaluations are spent; ``Posterior.record`` says which rung answered, at what cost, and why.

    Shapes: ``x (n_obs, p) -> z (n, n_obs, d), log_w (n, n_obs)``.
    """
    check_dtype(check_observations(x), model)
    n = check_count(n, name="n")
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
    with evaluating(model, named):  # f may well be a part of the model
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


def _at_least(estimate: Estimate, loss: Tensor, unseen: Tensor) -> Estimate:
    r"""An expected loss whose error is no less than that of its costliest state.

    Where the probability of state s is off by :math:`e_s`, that of action a is by :math:`e_s |L_{as} - \bar L_a|`.

    Shapes: ``loss (*batch, actions, states), unseen (*batch, states)``.
    """
    shift = (loss - estimate.value.unsqueeze(-1)).abs() * unseen.unsqueeze(-2)
    return estimate._replace(mcse=estimate.mcse.maximum(shift.amax(-1)))


def _regret(loss: Callable[[Latent], Tensor], action: Tensor) -> Callable[[Latent], Tensor]:
    """How much more each action costs than the chosen one, particle by particle: differences have less noise."""

    def regret(z: Latent) -> Tensor:
        values = loss(z)
        index = action.expand(values.shape[:-1]).unsqueeze(-1)
        return values - values.gather(-1, index)

    return regret


def _one_hot(action: Tensor, like: Tensor) -> Tensor:
    return torch.nn.functional.one_hot(action, like.shape[-1]).bool()
