r"""Held-out scores, which decide when training has converged and which parameters are returned.

The bound of a member's proposal scores the proposal as much as the model: with a poor encoder a better model may have
a lower bound. `RefinedBound` gives every held-out observation a proposal of its own (Newton steps from the encoder's
location, then a Student-t with the curvature there), which brings the bound close to the evidence.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from vaerdict.core import Model, Proposal, check_count, evaluating, log_mean_exp, log_normalise, prepared
from vaerdict.diagnostics import ess, khat
from vaerdict.distributions import Elliptical
from vaerdict.noise import Randomness
from vaerdict.refinement import refine
from vaerdict.training.data import Observations, blocks
from vaerdict.training.stacks import Stack

_CHUNK = 1024  # held-out observations scored at a time
_ROWS = 2**15  # particles x observations drawn at a time
_NUMBERS = {"cpu": 2**22, "cuda": 2**28}  # particles x observations x features evaluated at a time


class HeldOutScore(Protocol):
    """A held-out score that training raises; a checkpoint identifies it by its `repr`."""

    def __call__(self, stack: Stack, x: Observations, k: int, /) -> Tensor:
        """The score of each member with k particles. Shapes: ``-> (members,)``."""
        ...


@dataclass(frozen=True)
class AmortisedBound:
    """The IWELBO with each member's proposal, on the same noise at every check.

    For a fixed model the IWELBO hardly depends on the proposal. Proposals that are trained alone are therefore scored
    by the logarithm of their effective sample size.
    """

    @torch.no_grad()
    def __call__(self, stack: Stack, x: Observations, k: int) -> Tensor:
        """The score of each member. Shapes: ``-> (members,)``."""
        source = stack.same_noise("held out")
        total = torch.zeros(len(stack.members), dtype=torch.float64, device=stack.device)
        with evaluating(stack.model, stack.proposal):
            for batch in blocks(x, _CHUNK, stack.n_stacked):
                q = stack.proposal(batch)
                z = q.transform(stack.proposal.noise(batch, k, source))
                log_w = stack.log_weights(batch, z, q.log_prob(z)).double()
                total += (log_mean_exp(log_w) if stack.learn_model else _log_ess(log_w)).sum(-1).reshape(-1)
        return total / x.n


@dataclass(frozen=True)
class RefinedBound:
    """The IWELBO with a refined proposal for each of the first `n_observations`, in at most `n_steps` Newton steps.

    It does not depend on the quality of the encoder. Proposals for a fixed model are therefore scored by
    `AmortisedBound`.
    """

    n_observations: int = 128
    n_steps: int = 15

    def __post_init__(self) -> None:
        check_count(self.n_observations, name="n_observations")
        check_count(self.n_steps, name="n_steps")

    def __call__(self, stack: Stack, x: Observations, k: int) -> Tensor:
        """The score of each member. Shapes: ``-> (members,)``."""
        if not stack.learn_model:
            return AmortisedBound()(stack, x, k)
        batch = x.block(slice(self.n_observations), stack.n_stacked)
        with evaluating(stack.model, stack.proposal):
            q = refine(stack.density, batch, stack.proposal, n_steps=self.n_steps, axis=batch.dim() - 2).distribution
            log_w = _log_weights(stack.density, batch, q, k, stack.same_noise("held out"))
        return log_mean_exp(log_w).mean(-1).reshape(-1)


def _log_ess(log_w: Tensor) -> Tensor:
    """Log effective sample size; -inf where no particle has weight. Shapes: ``(K, *batch) -> (*batch)``."""
    dead = log_w.amax(0) == -torch.inf
    return torch.where(dead, -torch.inf, -torch.logsumexp(2 * log_normalise(log_w), 0))


class RefinedEvidence(NamedTuple):
    """Log-evidence by refined proposals, with its diagnostics; `ess` counts draws. Shapes: ``(*batch)`` each."""

    log_evidence: Tensor
    khat: Tensor
    ess: Tensor


def refined_evidence(
    model: Model,
    x: Tensor,
    start: Tensor | Proposal,
    n: int = 1000,
    *,
    generator: Randomness,
    df: float | None = 10.0,
    inflate: float = 1.1,
    n_steps: int = 50,
) -> RefinedEvidence:
    """The IWELBO with a proposal refined for each observation: a score of the model alone.

    Parameters
    ----------
    model
        The model whose evidence is estimated.
    x
        Observations. Shape: ``(n_observations, p)``.
    start
        Where refinement starts: latents of shape ``(n_observations, d)``, or a proposal.
    n
        The number of draws per observation.
    generator
        The source of noise.
    df, inflate, n_steps
        Degrees of freedom, inflation of the scale and Newton steps of `vaerdict.refine`.

    Examples
    --------
    >>> import torch, vaerdict as vd
    >>> model = vd.models.PPCA(torch.eye(3, 2), 0.5)
    >>> x, _ = model.simulate(4, generator=vd.seeded(0))
    >>> estimate = refined_evidence(model, x, torch.zeros(4, 2), 2000, generator=vd.seeded(1))
    >>> bool((estimate.log_evidence - model.log_evidence(x)).abs().max() < 0.05)
    True
    """
    q = refine(model, x, start, df=df, inflate=inflate, n_steps=n_steps, generator=generator).distribution
    parts = []
    for rows in torch.arange(x.shape[0], device=x.device).split(max(1, _ROWS // check_count(n, name="n"))):
        log_w = _log_weights(model, x[rows], q.select(rows), n, generator)
        parts.append((log_mean_exp(log_w), khat(log_w), ess(log_w)))
    return RefinedEvidence(*(torch.cat(column) for column in zip(*parts, strict=True)))


@torch.no_grad()
def _log_weights(model: Model, x: Tensor, q: Elliptical, k: int, generator: Randomness) -> Tensor:
    z, log_q = q.draw(x, k, generator=generator)
    inputs, most = prepared(model, x), _NUMBERS.get(x.device.type, _NUMBERS["cpu"])
    size = max(1, most // x.numel())
    return (torch.cat([model.log_joint(inputs, part) for part in z.split(size)]) - log_q).double()
