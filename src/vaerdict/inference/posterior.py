"""Weighted particles from a model's posterior, and the questions they answer: expectations, decisions, verdicts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from vaerdict import diagnostics
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
from vaerdict.inference.assess import Assessment, Query, evaluate, importance_weights
from vaerdict.inference.escalation import Escalation, escalate
from vaerdict.noise import Randomness, seeded
from vaerdict.proposals import Mixture
from vaerdict.samplers import gathered, systematic


class Decision(NamedTuple):
    """An action per observation with the evidence for it.

    ``expected_loss`` covers every action. ``margin`` is how much worse the second-best action is, with the standard
    error of that difference. ``verdict`` (see `vaerdict.diagnostics.Verdict`) includes both the weights and the margin.
    """

    action: Tensor
    expected_loss: Estimate
    margin: Tensor
    margin_mcse: Tensor
    verdict: Tensor


@dataclass(frozen=True, eq=False)
class Posterior:
    """The posterior of a model at some observations, as particles with log-weights.

    Shapes: ``z (K, *batch, d)``, ``log_w (K, *batch)``, ``source (K,)`` the index in `names` of a particle's proposal.
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
        """Pareto shape of the tail of the weights, NaN where it could not be assessed. Shapes: ``(*batch)``."""
        return self._psis[1]

    @cached_property
    def ess(self) -> Tensor:
        """Effective sample size of the weights. Shapes: ``(*batch)``."""
        return diagnostics.ess(self.log_w).masked_fill(self.failed, 0)

    @cached_property
    def failed(self) -> Tensor:
        """Observations for which no stage of escalation gave usable weights. Shapes: ``(*batch)``."""
        if self.record is None:
            return torch.zeros_like(self.log_w[0], dtype=torch.bool)
        return torch.tensor([not stage for stage in self.record.stage], device=self.log_w.device)

    @property
    def verdict(self) -> Tensor:
        """`Verdict` per observation: ok (0), caution (1), refuse (2). Shapes: ``(*batch)``."""
        if self.record is not None:
            return self.record.verdict.to(self.log_w.device)
        return diagnostics.verdict(self.khat, self.ess, self.log_w.shape[0])

    @property
    def log_evidence(self) -> Tensor:
        """IWELBO with all particles: the estimate of log p(x). Shapes: ``(*batch)``."""
        return log_mean_exp(self.log_w.double()).masked_fill(self.failed, -torch.inf)

    def expect(self, f: Query) -> Estimate:
        """Posterior expectation of f, by (multiple) importance sampling with Pareto-smoothed weights.

        NaN for observations that `failed`. Shapes: ``f: (K, *batch, d) -> (K, *batch, *out)``; the estimate is
        ``(*batch, *out)``.
        """
        return self._masked(self._assess(f).estimate)

    def verdict_on(self, f: Query) -> Tensor:
        """`Verdict` on the expectation of f: that of the weights, or worse where f makes their tail heavier.

        Shapes: ``-> (*batch)``.
        """
        return torch.maximum(self.verdict, self._assess(f).verdict)

    def _assess(self, f: Query) -> Assessment:
        source = self.source if len(self.names) > 1 else None
        islands = None if self.record is None else self.record.islands
        return Assessment(self._values(f), self.log_w, source, islands, self.smooth)

    def _values(self, f: Query) -> Tensor:
        """F at every particle, zero for observations that failed. Shapes: ``-> (K, *batch, *out)``."""
        if not self.failed.any():
            return evaluate(f, self.z, self.log_w)
        return self._zeroed(evaluate(f, map_latent(self._zeroed, self.z), self.log_w))

    def _zeroed(self, t: Tensor) -> Tensor:
        """Zero in place of the NaN of observations that failed, which f might not accept."""
        return t.masked_fill(expand_trailing(self.failed, t[0]), 0)

    def _masked(self, estimate: Estimate) -> Estimate:
        """The estimate with NaN for observations that failed."""
        failed = expand_trailing(self.failed, estimate.value)
        value, mcse = (t.masked_fill(failed, torch.nan) for t in estimate[:2])
        return Estimate(value, mcse, estimate.ess.masked_fill(self.failed, 0), estimate.khat)

    def decide(self, loss: Query | Tensor, state: Query | None = None) -> Decision:
        """The action of least posterior expected loss.

        `loss` is a function of the latent with one column per action, ``(K, *batch, d) -> (K, *batch, actions)``, or a
        matrix ``(actions, states)`` together with `state`, the probability of each state given the latent.

        A state that no draw has reached may still be costly. With a matrix that cost is known and included in the
        errors. With a function only the losses at the draws are known.
        """
        losses = _loss_function(loss, state)
        expected = self.expect(losses)
        if expected.value.dim() != self.log_w.dim():
            shape = tuple(expected.value.shape[self.log_w.dim() - 1 :])
            raise ShapeError(f"the loss gives {shape} for each particle; it must give one number per action.")
        if expected.value.shape[-1] < 2:
            raise SettingError("a decision needs at least two actions; the loss has one.")
        action = expected.value.argmin(-1)
        regret = self._assess(_regret(losses, action))
        margin = self._masked(regret.estimate)
        if isinstance(loss, Tensor) and state is not None:
            matrix, state_error = loss.to(margin.value), diagnostics.least_mcse(self._values(state), self.ess)
            expected = _with_state_error(expected, matrix, state_error)
            margin = _with_state_error(margin, matrix - matrix[action].unsqueeze(-2), state_error)
        chosen = torch.nn.functional.one_hot(action, margin.value.shape[-1]).bool()
        second = margin.value.masked_fill(chosen, torch.inf).argmin(-1, keepdim=True)
        gap, error = (t.gather(-1, second).squeeze(-1) for t in (margin.value, margin.mcse))
        # every other action must be clearly worse, not only the one that looks second best
        unsure = (~(margin.value >= 2 * margin.mcse) & ~chosen).any(-1).to(self.verdict) * Verdict.CAUTION
        verdict = torch.maximum(self.verdict, regret.verdict)
        return Decision(action, expected, gap, error, torch.maximum(verdict, unsure))

    def resample(self, n: int, *, generator: torch.Generator) -> Latent:
        """Draw n particles per observation in proportion to the weights (systematic resampling)."""
        log_w = (self._psis[0] if self.smooth else self.log_w).double()
        offset = torch.rand(log_w.shape[1:], generator=generator, dtype=torch.float64, device=generator.device)
        return gathered(self.z, systematic(log_w, offset.to(log_w.device), check_count(n, name="n")))

    def to_arviz(self, n: int | None = None, *, generator: torch.Generator | None = None) -> Any:
        """An arviz ``InferenceData``: n resampled latents in `posterior`, weights in `importance_diagnostics`.

        The latents of `posterior` are equally weighted. ``log_weight`` belongs to the particles they were drawn from.
        """
        try:
            import arviz
            import xarray
        except ImportError as error:
            raise SettingError("the export needs arviz; install it with `pip install vaerdict[arviz]`.") from error

        z = self.resample(n or self.log_w.shape[0], generator=generator or seeded(0))
        latents = {"z": z} if isinstance(z, Tensor) else dict(zip(z._fields, z, strict=True))
        axes = [f"batch_{i}" for i in range(self.log_w.dim() - 1)]
        data = arviz.from_dict(
            posterior={name: _array(latent)[None] for name, latent in latents.items()},
            dims={name: [*axes, f"{name}_dim"] for name in latents},
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
    query: Query | None = None,
    budget: int | None = None,
    generator: Randomness | None = None,
    smooth: bool = True,
    progress: Progress = silent,
) -> Posterior:
    """Weighted particles of a model's posterior.

    Parameters
    ----------
    model
        Any object with ``log_joint(x, z)`` and ``prior``.
    x
        Observations, ``(n_obs, p)``.
    proposals
        One proposal, or several by name, which are combined by multiple importance sampling.
    n
        Number of particles per observation.
    shares
        Share of the particles per proposal, equal by default. Not with `tolerance`.
    tolerance
        If given, each observation is escalated (see `vaerdict.inference.escalation`) until the Monte-Carlo error of
        `query` is at most `tolerance` and its weights are reliable. ``Posterior.record`` then holds the stage that
        answered, its cost and the reason per observation.
    query
        The quantity of interest, ``(K, m, d) -> (K, m, *out)`` for any subset of m observations; by default the latent
        in posterior standard deviations. Only with `tolerance`.
    budget
        Largest number of model evaluations per observation. Only with `tolerance`.
    generator
        Source of randomness, by default ``vaerdict.seeded(0)``.
    smooth
        Whether expectations use Pareto-smoothed weights.
    progress
        Called after each stage of escalation.

    Returns
    -------
    Posterior
        Particles ``z (n, n_obs, d)`` with ``log_w (n, n_obs)``.

    Examples
    --------
    >>> import torch, vaerdict as vd
    >>> model = vd.models.PPCA(torch.eye(3, 1), noise_scale=1.0)
    >>> x = torch.tensor([[1.0, 0.0, 0.0], [-2.0, 0.0, 0.0]])
    >>> answer = vd.posterior(model, x, {"exact": model.posterior(x), "PRIOR": vd.Prior(model.prior)}, n=500)
    >>> answer.z.shape, answer.expect(lambda z: z).value.shape
    (torch.Size([500, 2, 1]), torch.Size([2, 1]))
    >>> vd.Verdict.names(answer.verdict)
    ['OK', 'OK']
    """
    check_dtype(check_observations(x), model)
    n = check_count(n, name="n")
    generator = seeded(0, x.device) if generator is None else generator
    if shares is not None and (tolerance is not None or not isinstance(proposals, Mapping)):
        raise SettingError("shares= needs a mapping of several proposals and no tolerance=; leave it out.")
    if tolerance is not None:
        named = dict(proposals) if isinstance(proposals, Mapping) else {"q": proposals}
        z, log_w, record = escalate(
            model,
            x,
            named,
            n,
            query=query,
            tolerance=tolerance,
            budget=budget,
            generator=generator,
            smooth=smooth,
            progress=progress,
        )
        return Posterior(z, log_w, torch.zeros(n, dtype=torch.long, device=log_w.device), smooth=smooth, record=record)
    if query is not None or budget is not None:
        raise SettingError("query= and budget= belong to escalation; give a tolerance= too.")
    q = Mixture(proposals, shares) if isinstance(proposals, Mapping) else proposals
    z, log_w = importance_weights(model, x, q, n, generator=generator)
    if isinstance(q, Mixture):
        return Posterior(z, log_w, q.source(n).to(log_w.device), tuple(q.components), smooth)
    return Posterior(z, log_w, torch.zeros(n, dtype=torch.long, device=log_w.device), smooth=smooth)


class Answer(NamedTuple):
    """A posterior expectation with its evidence, one entry per observation.

    ``mcse`` is the error on which the answer was accepted or refused, ``reason`` says why. ``khat`` is that of f times
    the weights, the largest over the outputs of f, NaN where it was not assessed. ``verdict`` is a `Verdict`, ``stage``
    the stage of escalation that answered, ``cost`` the number of model evaluations.
    """

    value: Tensor
    mcse: Tensor
    ess: Tensor
    khat: Tensor
    verdict: Tensor
    stage: list[str]
    cost: Tensor
    reason: list[str]


def expect(
    model: Model,
    x: Tensor,
    f: Query,
    proposals: Proposal | Mapping[str, Proposal] | None = None,
    n: int = 1000,
    *,
    tolerance: float = 0.02,
    budget: int | None = None,
    generator: Randomness | None = None,
    progress: Progress = silent,
) -> Answer:
    """Posterior expectation E[f(z) | x] to within a tolerance, or a refusal with its reason, per observation.

    Parameters
    ----------
    model
        Any object with ``log_joint(x, z)`` and ``prior``.
    x
        Observations, ``(n_obs, p)``.
    f
        The quantity of interest, ``(K, m, d) -> (K, m, *out)`` for any subset of m observations.
    proposals
        One proposal, or several by name, the best first. Without any, proposals are built from the prior and the
        curvature of the posterior.
    n
        Number of particles per observation and stage, at least 64.
    tolerance
        Largest acceptable Monte-Carlo standard error of any output of f.
    budget
        Largest number of model evaluations per observation.
    generator
        Source of randomness, by default ``vaerdict.seeded(0)``.
    progress
        Called after each stage of escalation.

    Returns
    -------
    Answer
        Values and errors ``(n_obs, *out)`` with verdict, stage, cost and reason per observation.

    Examples
    --------
    >>> import torch, vaerdict as vd
    >>> model = vd.models.PPCA(torch.eye(3, 1), noise_scale=1.0)
    >>> x = torch.tensor([[1.0, 0.0, 0.0], [-2.0, 0.0, 0.0]])
    >>> answer = vd.expect(model, x, lambda z: (z[..., 0] > 0).double(), n=500, tolerance=0.05)
    >>> answer.value.shape, answer.stage, vd.Verdict.names(answer.verdict)
    (torch.Size([2]), ['REFINED', 'REFINED'], ['OK', 'OK'])
    """
    named: Proposal | Mapping[str, Proposal] = {} if proposals is None else proposals
    with evaluating(model, named):  # f may use modules of the model
        answer = posterior(
            model, x, named, n, tolerance=tolerance, query=f, budget=budget, generator=generator, progress=progress
        )
        estimate, record = answer.expect(f), answer.record
    assert record is not None
    estimate = estimate._replace(khat=record.khat.to(estimate.khat))
    return Answer(*estimate, answer.verdict, record.stage, record.cost, record.reason)


def _loss_function(loss: Query | Tensor, state: Query | None) -> Query:
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


def _with_state_error(estimate: Estimate, loss: Tensor, state_error: Tensor) -> Estimate:
    r"""An expected loss whose error is at least that caused by its costliest state.

    An error :math:`e_s` of the probability of state s changes the loss of action a by :math:`e_s |L_{as} - \bar L_a|`.

    Shapes: ``loss (*batch, actions, states), state_error (*batch, states)``.
    """
    shift = (loss - estimate.value.unsqueeze(-1)).abs() * state_error.unsqueeze(-2)
    return estimate._replace(mcse=estimate.mcse.maximum(shift.amax(-1)))


def _regret(loss: Query, action: Tensor) -> Query:
    """How much more each action costs than the chosen one at each particle; differences have less noise."""

    def regret(z: Latent) -> Tensor:
        values = loss(z)
        index = action.expand(values.shape[:-1]).unsqueeze(-1)
        return values - values.gather(-1, index)

    return regret
