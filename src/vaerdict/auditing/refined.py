r"""Draws of the encoder and of proposals refined per observation, with their importance weights.

Refinement has two parts. A mode search from the encoder's location gives a local Student-t (`vaerdict.refine`). Then
rounds of draws are weighted, and a Student-t with their weighted mean and covariance is added to the mixture, wider by
a factor of about 1.5: the posteriors of decoders with kinks are wider than their curvature at the mode. Answers come
from the last draws alone, whose proposal does not depend on them.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from vaerdict import diagnostics
from vaerdict.auditing.observed import Observed
from vaerdict.core import Proposal
from vaerdict.distributions import Elliptical, Triangular
from vaerdict.noise import Randomness
from vaerdict.proposals import Mixture
from vaerdict.refinement import refine

STEP = 40
"""The number of draws is a multiple of it: every component of the mixture then draws an even number."""

_ROUNDS = 3
_FIRST = {"LOCAL": 0.5, "WIDE": 0.4, "encoder": 0.05, "PRIOR": 0.05}
_SHARES = {"LOCAL": 0.1, "WIDE": 0.1, "encoder": 0.05, "PRIOR": 0.05, "MOMENTS": 0.7}
_DF, _WIDE = 8.0, 1.5
_LATENTS = 10  # with more latents the Student-t of the moments is less wide
_EFFECTIVE = 5.0  # effective draws per latent behind a covariance; where there are fewer, weights are flattened
_LEAST_VARIANCE = 1e-8  # along any direction, relative to the mean over directions
_BYTES = {"cpu": 2**28, "cuda": 2**33}


class Sample(NamedTuple):
    """Weighted draws of some observations, and what they are worth.

    `khat` is infinite and `ess` zero where no weight is usable; the log-weights there are zero.

    Shapes: ``z (n, m, d)``, ``log_p, log_w (n, m)``, the rest ``(m,)``.
    """

    z: Tensor
    log_p: Tensor
    log_w: Tensor
    khat: Tensor
    ess: Tensor
    verdict: Tensor

    @property
    def usable(self) -> Tensor:
        """Whether there are weights. Shapes: ``-> (m,)``."""
        return self.ess > 0

    @property
    def log_evidence(self) -> Tensor:
        """IWELBO of all draws, NaN where no weight is usable. Shapes: ``-> (m,)``."""
        value = torch.logsumexp(self.log_w, 0) - math.log(len(self.log_w))
        return torch.where(self.usable, value, torch.nan)


def weigh(observed: Observed, q: Proposal, n: int, *, generator: Randomness) -> Sample:
    """Draw n particles of q per observation and weight them; unusable weights do not raise."""
    z, log_q = q.draw(observed.x, n, generator=generator)
    return _weighted(observed, z, log_q)


def _weighted(observed: Observed, z: Tensor, log_q: Tensor) -> Sample:
    log_p = observed.log_joint(z)
    log_w = log_p.double() - log_q.double()
    usable = log_w.amax(0).isfinite()  # a maximum propagates NaN
    log_w = torch.where(usable, log_w, 0.0)
    khat = torch.where(usable, diagnostics.khat(log_w), torch.inf)
    ess = torch.where(usable, diagnostics.ess(log_w), 0.0)
    return Sample(z, log_p, log_w, khat, ess, diagnostics.verdict(khat, ess, len(z)))


class Refined(NamedTuple):
    """Draws of a refined mixture.

    `log_parts` are the log-densities of the draws under each component of the mixture, `source` is the component that
    each came from.

    Shapes: ``log_parts (components, n, m)``, ``source (n,)``.
    """

    sample: Sample
    mixture: Mixture
    log_parts: Tensor
    source: Tensor


def refined(observed: Observed, n: int, *, generator: Randomness) -> Refined:
    """Draw n particles per observation from a mixture fitted to its posterior; as many more are spent on the fit.

    `n` is a multiple of `STEP`.
    """
    start = observed.start(generator)
    local = refine(observed.target, observed.x, start, max_bytes=_BYTES.get(start.device.type)).distribution
    components: dict[str, Proposal] = {
        "LOCAL": local,
        "WIDE": local.scaled(_WIDE),
        "encoder": observed.encoder,
        "PRIOR": observed.target.prior,
    }
    q, fitted, pool = Mixture(components, _FIRST), list[Elliptical](), list[Refined]()
    for _ in range(_ROUNDS):
        pool.append(_draws(observed, q, max(STEP, n // _ROUNDS), generator))
        fitted.append(_moments(pool, fitted))
        q = Mixture({**components, "MOMENTS": fitted[-1]}, _SHARES)
    return _draws(observed, q, n, generator)


def _draws(observed: Observed, q: Mixture, n: int, generator: Randomness) -> Refined:
    """Draw from a mixture; every component is evaluated once at every draw."""
    counts, x = q.allocation(n), observed.x
    z = torch.cat([q.components[name].draw(x, k, generator=generator).z for name, k in counts.items() if k])
    log_parts = torch.cat([q.component_log_prob(part, x).double() for part in observed.chunks(z)], 1)
    sample = _weighted(observed, z, _log_density(log_parts, list(q.shares.values())))
    return Refined(sample, q, log_parts, q.source(n).to(z.device))


def _log_density(log_parts: Tensor, shares: list[float]) -> Tensor:
    """Log-density of a mixture from that of its components. Shapes: ``(components, n, m) -> (n, m)``."""
    log_share = torch.tensor(shares, dtype=torch.float64, device=log_parts.device).log()
    return torch.logsumexp(log_parts + log_share[:, None, None], 0)


def _moments(pool: list[Refined], fitted: list[Elliptical]) -> Elliptical:
    """A Student-t with the mean and covariance of all draws so far, weighted by the mixture of their proposals.

    All proposals share their first components; from the second on they have one more, fitted before.
    """
    z, log_p = (torch.cat([getattr(draws.sample, name) for draws in pool]) for name in ("z", "log_p"))
    base = torch.cat([draws.log_parts[: len(_FIRST)] for draws in pool], 1)
    parts = [torch.cat([base, q.log_prob(z).double().unsqueeze(0)]) for q in fitted]
    log_q = [_log_density(base, list(_FIRST.values())), *(_log_density(part, list(_SHARES.values())) for part in parts)]
    log_w = log_p.double() - torch.logsumexp(torch.stack(log_q), 0)
    d, like, z = z.shape[-1], z, z.double()
    weight = torch.softmax(_flattened(log_w, min(_EFFECTIVE * d, len(z) / 3)), 0)
    mean = torch.einsum("nm,nmi->mi", weight, z)
    centred = weight.sqrt().unsqueeze(-1) * (z - mean)
    covariance = torch.einsum("nmi,nmj->mij", centred, centred)
    least = _LEAST_VARIANCE * covariance.diagonal(dim1=-2, dim2=-1).mean(-1).clamp_min(torch.finfo(like.dtype).tiny)
    root = torch.linalg.cholesky(covariance + least[:, None, None] * torch.eye(d).to(covariance))
    wide = 1 + (_WIDE - 1) * min(1.0, math.sqrt(_LATENTS / d))
    tril = wide * math.sqrt((_DF - 2) / _DF) * root
    return Elliptical(mean.to(like), Triangular(tril.to(like)), torch.tensor(_DF).to(like))


def _flattened(log_w: Tensor, n_effective: float) -> Tensor:
    """The largest power of the weights, at most one, that leaves `n_effective` draws per observation."""
    lowest = torch.finfo(torch.double).min / 10
    log_w = torch.where(log_w.isfinite(), log_w, lowest)
    log_w = (log_w - log_w.amax(0)).clamp_min(lowest)
    low, high = torch.zeros_like(log_w[0]), torch.ones_like(log_w[0])
    for _ in range(20):
        middle = 0.5 * (low + high)
        enough = diagnostics.ess(log_w * middle) >= n_effective
        low, high = torch.where(enough, middle, low), torch.where(enough, high, middle)
    return log_w * torch.where(diagnostics.ess(log_w) >= n_effective, 1.0, low)
