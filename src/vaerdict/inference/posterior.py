"""Weighted particles from a model's posterior, and the questions they answer: expectations, decisions, verdicts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from vaerdict import diagnostics
from vaerdict.core import (
    Estimate,
    Latent,
    Model,
    Observations,
    Progress,
    Proposal,
    SettingError,
    ShapeError,
    check_count,
    check_dtype,
    check_model,
    check_observations,
    device_of,
    evaluating,
    expand_trailing,
    log_mean_exp,
    map_latent,
    silent,
)
from vaerdict.decisions import check_probabilities
from vaerdict.diagnostics import Verdict
from vaerdict.engines import Engine
from vaerdict.inference import shown
from vaerdict.inference.assess import Assessment, assess, checked_values, importance_weights
from vaerdict.inference.blocks import Settings, answered, named_proposals, noise_for
from vaerdict.inference.sampling import Escalation, Group
from vaerdict.inference.search import Scope
from vaerdict.inference.target import Space, Target, UserQuery, with_observations
from vaerdict.models import Enumerated
from vaerdict.noise import Randomness, as_source, seeded
from vaerdict.priors import JointPrior, Prior
from vaerdict.proposals import Mixture
from vaerdict.samplers import gathered, systematic

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_CONFIRMED_ERRORS = 4.0  # errors of their difference by which two independent answers may differ
_PROBES = 64  # draws of the prior at which a loss is evaluated to learn how large it may be


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


class Layout(NamedTuple):
    """Observations whose first `n` particles were drawn alike; `source` and `replicate` as in `assess`."""

    rows: Tensor
    n: int
    source: Tensor | None
    replicate: Tensor | None


@dataclass(frozen=True, eq=False, repr=False)
class Posterior:
    """The posterior of a model at some observations, as particles with log-weights.

    Shapes: ``z (K, *batch, d)``, ``log_w (K, *batch)``, ``source (K,)`` the index in `names` of a particle's proposal.

    After escalation observations may differ in their number of draws, ``record.draws``. K is then the largest of
    these, and the rest are copies of an observation's first particle with a log-weight of minus infinity.
    """

    z: Latent
    log_w: Tensor
    source: Tensor
    names: tuple[str, ...] = ("q",)
    smooth: bool = True
    record: Escalation | None = None
    layouts: tuple[Layout, ...] = ()
    probes: Latent = None
    space: Space | None = None
    x: Observations = None

    def __repr__(self) -> str:
        return shown.posterior_text(self)

    def _repr_html_(self) -> str:
        return shown.posterior_html(self)

    def plot(self, observation: int | None = None, *, ax: Axes | None = None) -> Axes:
        """The k-hat of all observations, or the marginal posteriors of the latents of one; returns matplotlib axes."""
        if observation is None:
            return shown.plot_khat(self, ax)
        return shown.plot_latents(self, self._psis[0] if self.smooth else self.log_w, observation, ax)

    @cached_property
    def _psis(self) -> tuple[Tensor, Tensor]:
        if self.record is None:
            return diagnostics.psis(self.log_w)
        smoothed, khat = self.log_w.clone(), torch.full_like(self.log_w[0], torch.nan, dtype=torch.float64)
        for rows, n, _, _ in self.layouts:
            smoothed[:n, rows], khat[rows] = diagnostics.psis(self.log_w[:n, rows])
        return smoothed, khat

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
        if self.record is None:
            return log_mean_exp(self.log_w.double())
        n = self.record.draws.to(self.log_w.device).clamp_min(1)
        return (self.log_w.double().logsumexp(0) - n.log()).masked_fill(self.failed, -torch.inf)

    def expect(self, f: UserQuery) -> Estimate:
        """Posterior expectation of ``f(z)`` or ``f(z, x)``, by importance sampling with Pareto-smoothed weights.

        NaN for observations that `failed`. Shapes: ``f: (K, *batch, d) -> (K, *batch, *out)``; the estimate is
        ``(*batch, *out)``.
        """
        return self.assess(f).estimate

    def verdict_on(self, f: UserQuery) -> Tensor:
        """`Verdict` on the expectation of f: that of the weights, or worse where f makes their tail heavier.

        Shapes: ``-> (*batch)``.
        """
        return torch.maximum(self.verdict, self.assess(f).verdict)

    def assess(self, f: UserQuery) -> Assessment:
        """The expectation of f with everything that is known about its error. Shapes: ``(*batch)`` first."""
        values = self._values(f)
        if self.record is None:
            source = self.source if len(self.names) > 1 else None
            probes = None if self.probes is None else self._evaluated(f, self.probes)
            return assess(values, self.log_w, source=source, probes=probes, smooth=self.smooth)
        answer: Assessment | None = None
        for rows, n, source, replicate in self.layouts:
            part = assess(
                values[:n, rows], self.log_w[:n, rows], source=source, replicate=replicate, smooth=self.smooth
            )
            answer = part.refused(self.log_w.shape[1]) if answer is None else answer
            answer = answer.replaced(rows, part)
        if answer is None:  # nothing was answered
            return assess(values, torch.zeros_like(self.log_w)).refused(self.log_w.shape[1])
        return answer

    def _values(self, f: UserQuery) -> Tensor:
        """F at every particle, zero for observations that failed. Shapes: ``-> (K, *batch, *out)``."""
        if not self.failed.any():
            return checked_values(self._evaluated(f, self.z), self.log_w)
        values = self._evaluated(f, map_latent(self._zeroed, self.z))
        return self._zeroed(checked_values(values, self.log_w))

    def _evaluated(self, f: UserQuery, z: Latent) -> Tensor:
        return f(z) if self.space is None else self.space.evaluate(f, z, self.x)

    def _zeroed(self, t: Tensor) -> Tensor:
        """Zero in place of the NaN of observations that failed, which f might not accept."""
        return t.masked_fill(expand_trailing(self.failed, t[0]), 0)

    def decide(self, loss: UserQuery | Tensor, state: UserQuery | None = None) -> Decision:
        """The action of least posterior expected loss.

        `loss` is a function of the latent (and the observation) with one column per action, ``(K, *batch, d) ->
        (K, *batch, actions)``, or a matrix ``(actions, states)`` together with `state`, the probability of each state.

        A state that few draws have reached may be costly. Where the loss of an action is the same at most draws, its
        error therefore includes what the largest loss seen elsewhere, at draws of any weight or of the prior, would add
        if a few more draws had met it (`diagnostics.events`).
        """
        losses = _loss_function(loss, state)
        expected = self.expect(losses)
        if expected.value.dim() != self.log_w.dim():
            shape = tuple(expected.value.shape[self.log_w.dim() - 1 :])
            raise ShapeError(f"the loss gives {shape} for each particle; it must give one number per action.")
        if expected.value.shape[-1] < 2:
            raise SettingError("a decision needs at least two actions; the loss has one.")
        action = expected.value.argmin(-1)
        regret = self.assess(_regret(losses, action))
        margin = regret.estimate
        if isinstance(loss, Tensor) and state is not None:
            matrix, state_error = loss.to(margin.value), self.assess(state).mcse
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
        """For arviz: n resampled latents in the group `posterior`, weights in `importance_diagnostics`.

        An xarray ``DataTree`` with arviz 1 and later, an ``InferenceData`` with earlier versions.
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
        draws = {name: _array(latent)[None] for name, latent in latents.items()}
        columns = {"log_weight": (["particle", *axes], _array(self.log_w))}
        columns |= {"khat": (axes, _array(self.khat)), "ess": (axes, _array(self.ess))}
        groups = {
            "posterior": arviz.dict_to_dataset(draws, dims={name: [*axes, f"{name}_dim"] for name in latents}),
            "importance_diagnostics": xarray.Dataset(columns),
        }
        inference_data = vars(arviz).get("InferenceData")  # arviz 1 has none, and warns of the name
        return inference_data(**groups) if inference_data else xarray.DataTree.from_dict(groups)


def _array(tensor: Tensor) -> Any:
    return tensor.detach().cpu().numpy()


def posterior(
    model: Model,
    x: Observations,
    proposals: Any,
    n: int = 1000,
    *,
    shares: Mapping[str, float] | None = None,
    tolerance: float | None = None,
    rtol: float = 0.0,
    query: UserQuery | None = None,
    budget: int | None = None,
    seed: int | Randomness | None = None,
    smooth: bool = True,
    block: int | None = None,
    engine: Engine | None = None,
    progress: Progress = silent,
) -> Posterior:
    """Weighted particles of a model's posterior.

    Parameters
    ----------
    model
        Any object with ``log_joint(x, z)`` and ``prior``.
    x
        Observations: a tensor ``(n_obs, ...)``, or a tuple or mapping of tensors with one leading axis.
    proposals
        One proposal, or several by name, which are combined by multiple importance sampling. Whatever
        `vaerdict.as_proposal` accepts is a proposal.
    n
        Number of particles per observation; with a tolerance up to 16 times as many where they are needed.
    shares
        Share of the particles per proposal, equal by default. Not with `tolerance`.
    tolerance, rtol
        If a tolerance is given, each observation is escalated (see `vaerdict.inference.escalation`) until twice the
        Monte-Carlo error of `query` is at most `tolerance`, or `rtol` times its value if that is larger, and its
        weights are reliable. The error of an answer with the verdict OK is then within the tolerance in about 95 % of
        cases. ``Posterior.record`` holds the stage that answered, its cost and the reason per observation.
    query
        The quantity of interest, ``f(z)`` or ``f(z, x)``, ``(K, m, d) -> (K, m, *out)`` for any subset of m
        observations; by default the latent in posterior standard deviations. Only with `tolerance`.
    budget
        Largest number of model evaluations per observation; the first search for modes and the first draws are made
        whatever they cost. Only with `tolerance`.
    seed
        A whole number, with which results repeat and do not depend on which observations are asked together. By default
        every call differs. A ``torch.Generator`` or `vaerdict.Sobol` is used as a source of randomness.
    smooth
        Whether expectations use Pareto-smoothed weights.
    block
        Number of observations that are escalated at a time, by default 250, or 1000 on a GPU.
    engine
        Where blocks are escalated: ``vaerdict.engines.Threads()``, ``Local()`` (processes) or ``Ray()``. By default one
        after the other, in this thread.
    progress
        Called after each stage of escalation, or after each block if there are several.

    Returns
    -------
    Posterior
        Particles ``z (n, n_obs, d)`` with ``log_w (n, n_obs)``.

    Examples
    --------
    >>> import torch, vaerdict as vd
    >>> model = vd.models.PPCA(torch.eye(3, 1), noise_scale=1.0)
    >>> x = torch.tensor([[1.0, 0.0, 0.0], [-2.0, 0.0, 0.0]])
    >>> answer = vd.posterior(model, x, {"exact": model.posterior(x), "PRIOR": vd.Prior(model.prior)}, n=500, seed=0)
    >>> answer.z.shape, answer.expect(lambda z: z).value.shape
    (torch.Size([500, 2, 1]), torch.Size([2, 1]))
    >>> vd.Verdict.names(answer.verdict)
    ['OK', 'OK']
    """
    check_dtype(check_observations(x), check_model(model, x))
    n = check_count(n, name="n")
    if shares is not None and (tolerance is not None or not isinstance(proposals, Mapping)):
        raise SettingError("shares= needs a mapping of several proposals and no tolerance=; leave it out.")
    space = Space.without_vectors(model, x)
    if isinstance(space.model, Enumerated) and not space.model.continuous:
        raise SettingError("all latents of the model are discrete; vaerdict.expect sums over their states exactly.")
    if tolerance is not None:
        settings = Settings(n, query, tolerance, rtol, budget, smooth, keep=True)
        record, groups = answered(
            model, x, proposals, settings, seed=seed, block=block, engine=engine, progress=progress
        )
        return _escalated(Target.of(model, x), record, groups, smooth)
    if query is not None or budget is not None or rtol:
        raise SettingError("query=, rtol= and budget= belong to escalation; give a tolerance= too.")
    named = {name: _at_rows(q, space.model) for name, q in named_proposals(proposals).items()}
    q = Mixture(named, shares) if isinstance(proposals, Mapping) else named["q"]
    with evaluating(model, named):
        z, log_w = importance_weights(space.model, x, q, n, generator=noise_for(seed, x))
        probes = Prior(space.model.prior).sample(x, _PROBES, log_w.shape[1:], as_source(seeded(0, log_w.device)))
    source, names = torch.zeros(n, dtype=torch.long), ("q",)
    if isinstance(q, Mixture):
        source, names = q.source(n), tuple(q.components)
    same_kind = type(probes) is type(z)  # a prior may be of one tensor, where the latent is a tuple of its parts
    probes = probes if same_kind else None
    return Posterior(z, log_w, source.to(log_w.device), names, smooth, probes=probes, space=space, x=x)


def _escalated(target: Target, record: Escalation, groups: list[Group], smooth: bool) -> Posterior:
    """The draws of all observations in one tensor; where there are fewer than K, the rest have no weight."""
    n_obs, k = len(target.index), int(record.draws.max().clamp_min(1))
    like = groups[0].draws.log_w if groups else torch.empty(0, device=target.index.device)
    u, log_w = like.new_full((k, n_obs, target.d), torch.nan), like.new_zeros(k, n_obs)
    z, layouts = target.space.unchecked(u), []
    for rows, draws in groups:
        index, n = rows.to(log_w.device), len(draws.log_w)
        for whole, part in zip(_tensors(z), _tensors(draws.z), strict=True):
            whole[:n, index], whole[n:, index] = part, part[:1]
        log_w[:n, index], log_w[n:, index] = draws.log_w, -torch.inf
        layouts.append(Layout(index, n, draws.source, draws.replicate))
    source = torch.zeros(k, dtype=torch.long, device=log_w.device)
    return Posterior(
        z, log_w, source, smooth=smooth, record=record, layouts=tuple(layouts), space=target.space, x=target.x
    )


def _at_rows(q: Proposal, model: Model) -> Proposal:
    """The joint prior as that of the continuous latents; other proposals are unchanged."""
    joint = isinstance(q.prior if isinstance(q, Prior) else q, JointPrior)
    return Prior(model.prior, rows=True) if joint and isinstance(model, Enumerated) else q


def _tensors(z: Latent) -> tuple[Tensor, ...]:
    return (z,) if isinstance(z, Tensor) else tuple(z)


class Answer(NamedTuple):
    """A posterior expectation with its evidence, one entry per observation.

    ``mcse`` is the error on which the answer was accepted or refused, ``reason`` says why. ``khat`` is that of f times
    the weights, the largest over the outputs of f, NaN where it was not assessed. ``verdict`` is a `Verdict`, ``stage``
    the stage of escalation that answered, ``cost`` the number of model evaluations. ``draws`` is the number of draws
    behind the answer, ``inside`` how many effective ones are in the smaller level set of an indicator (infinite: f is
    not one). ``scope`` says where modes were searched.
    """

    value: Tensor
    mcse: Tensor
    ess: Tensor
    khat: Tensor
    verdict: Tensor
    stage: list[str]
    cost: Tensor
    reason: list[str]
    draws: Tensor
    inside: Tensor
    scope: Scope

    def __repr__(self) -> str:
        return shown.answer_text(self)

    def _repr_html_(self) -> str:
        return shown.answer_html(self)


def expect(
    model: Model,
    x: Observations,
    f: UserQuery,
    proposals: Any = None,
    n: int = 1000,
    *,
    tolerance: float = 0.02,
    rtol: float = 0.0,
    confirm: bool = False,
    budget: int | None = None,
    seed: int | Randomness | None = None,
    block: int | None = None,
    engine: Engine | None = None,
    progress: Progress = silent,
) -> Answer:
    """Posterior expectation E[f(z) | x] to within a tolerance, or a refusal with its reason, per observation.

    The verdict OK means: the error is within the tolerance (in about 95 % of cases) for the posterior mass that was
    found, and `Answer.scope` says how much could be missing.

    Parameters
    ----------
    model
        Any object with ``log_joint(x, z)`` and ``prior``. The prior is a distribution of vectors, a function of x that
        returns one, or a `vaerdict.JointPrior` of several latents; discrete latents are summed over exactly.
    x
        Observations: a tensor ``(n_obs, ...)``, or a tuple or mapping of tensors with one leading axis.
    f
        The quantity of interest, ``f(z)`` or ``f(z, x)``, ``(K, m, d) -> (K, m, *out)`` for any subset of m
        observations.
    proposals
        One proposal, or several by name, the best first. Whatever `vaerdict.as_proposal` accepts is a proposal. Without
        any, proposals are built from the prior and the curvature of the posterior.
    n
        Number of particles per observation and stage, at least 64; up to 16 times as many where they are needed.
    tolerance, rtol
        Largest acceptable error of any output of f, absolute or relative to its value, whichever is larger.
    confirm
        Whether to answer a second time with independent draws and searches, and to refuse where the two differ.
    budget
        Largest number of model evaluations per observation (and answer); the first search for modes and the first draws
        are made whatever they cost.
    seed
        A whole number, with which results repeat and do not depend on which observations are asked together. By default
        every call differs. A ``torch.Generator`` or `vaerdict.Sobol` is used as a source of randomness.
    block
        Number of observations that are answered at a time, which bounds the memory; by default 250, or 1000 on a GPU.
    engine
        Where blocks are answered: ``vaerdict.engines.Threads()``, ``Local()`` (processes) or ``Ray()``. By default one
        after the other, in this thread.
    progress
        Called after each stage of escalation, or after each block if there are several.

    Returns
    -------
    Answer
        Values and errors ``(n_obs, *out)`` with verdict, stage, cost, reason and scope per observation.

    Examples
    --------
    >>> import torch, vaerdict as vd
    >>> model = vd.models.PPCA(torch.eye(3, 1), noise_scale=1.0)
    >>> x = torch.tensor([[1.0, 0.0, 0.0], [-2.0, 0.0, 0.0]])
    >>> answer = vd.expect(model, x, lambda z: (z[..., 0] > 0).double(), n=500, tolerance=0.05, seed=0)
    >>> answer.value.shape, answer.stage, vd.Verdict.names(answer.verdict)
    (torch.Size([2]), ['REFINED', 'REFINED'], ['OK', 'OK'])
    """
    check_dtype(check_observations(x), check_model(model, x))
    settings = Settings(n, f, tolerance, rtol, budget, smooth=True, keep=False)
    answers = []
    for number in range(2 if confirm else 1):
        record, _ = answered(
            model, x, proposals, settings, seed=seed, stream=number, block=block, engine=engine, progress=progress
        )
        answers.append(_answer(record, device_of(x)))
    return _confirmed(*answers) if confirm else answers[0]


def _answer(record: Escalation, device: torch.device) -> Answer:
    columns = {name: getattr(record, name) for name in Answer._fields}
    for name in ("value", "mcse", "ess", "khat", "verdict"):
        columns[name] = columns[name].to(device)
    return Answer(**columns)


def _confirmed(first: Answer, second: Answer) -> Answer:
    """The first answer, with the worse verdict of both and a refusal where they differ."""
    distance = ((first.value - second.value).abs() / torch.hypot(first.mcse, second.mcse)).reshape(len(first.ess), -1)
    errors = torch.nan_to_num(distance, nan=0.0).amax(-1)
    differ = errors > _CONFIRMED_ERRORS
    verdict = torch.where(differ, Verdict.REFUSE, torch.maximum(first.verdict, second.verdict))
    reasons = []
    for i, reason in enumerate(first.reason):
        if differ[i]:
            reason += f"; a second answer differs by {errors[i]:.1f} errors"
        elif second.verdict[i] > first.verdict[i]:
            reason += f"; a second answer was not accepted ({second.reason[i]})"
        reasons.append(reason)
    return first._replace(verdict=verdict, reason=reasons, cost=first.cost + second.cost)


def _loss_function(loss: UserQuery | Tensor, state: UserQuery | None) -> Callable[[Latent, Observations], Tensor]:
    if not isinstance(loss, Tensor):
        return with_observations(loss)
    if state is None:
        raise SettingError(
            "a loss matrix (actions, states) needs `state`, the probability of each state given the latent."
        )
    matrix, prob_of = loss, with_observations(state)

    def expected(z: Latent, x: Observations) -> Tensor:
        prob = check_probabilities(prob_of(z, x))
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


def _regret(loss: Callable[[Latent, Observations], Tensor], action: Tensor) -> UserQuery:
    """How much more each action costs than the chosen one at each particle; differences have less noise."""

    def regret(z: Latent, x: Observations) -> Tensor:
        values = loss(z, x)
        index = action.expand(values.shape[:-1]).unsqueeze(-1)
        return values - values.gather(-1, index)

    return regret
