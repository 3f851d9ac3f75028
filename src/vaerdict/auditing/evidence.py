r"""Bounds on the log evidence of an observation, from below and from above.

With K draws of a proposal, :math:`\log\tfrac1K\sum_k w_k` is at most :math:`\log p(x)` in expectation. If one of the
draws is replaced by a draw of the posterior, the same expression is at least :math:`\log p(x)` in expectation. (The
tilted density :math:`\prod_k q(z_k)\, \tfrac1K\sum_k w_k / p(x)` is that of such draws; the expectation of
:math:`\log\tfrac1K\sum_k w_k` under it is :math:`\log p(x)` plus a Kullback-Leibler divergence.) Of a mixture whose
component j draws a fixed number, the draw to be replaced belongs to component j with probability
:math:`\alpha_j q_j(z) / q(z)`.

For pairs (x, z) that the model itself has simulated, z is a draw of the posterior and the upper bound is exact but for
Monte-Carlo error. For other observations, draws of one half are resampled by their weights and the bound is that of the
other half. This assumes that resampled draws are draws of the posterior: mass that no draw has reached is missed by
both bounds.

References: Burda, Grosse & Salakhutdinov (2016), Importance weighted autoencoders. Grosse, Ancha & Roy (2016),
Measuring the reliability of MCMC inference with bidirectional Monte Carlo. Sobolev & Vetrov (2019), Importance weighted
hierarchical variational inference.
"""

from __future__ import annotations

import torch
from torch import Tensor

from vaerdict.auditing.observed import Observed
from vaerdict.auditing.refined import Refined
from vaerdict.proposals import Mixture


def upper_bound(draws: Refined) -> Tensor:
    """Upper bound by draws resampled from the other half, averaged over both halves. Shapes: ``-> (m,)``."""
    sample, source = draws.sample, draws.source
    share = _responsibilities(draws.mixture, draws.log_parts)
    half = torch.arange(len(source), device=source.device) % 2 == 0  # every component has an even number of draws
    bounds = []
    for posterior, proposal in ((half, ~half), (~half, half)):
        log_w = sample.log_w[posterior]
        bound = _with_one_replaced(log_w, share[:, posterior], sample.log_w[proposal], source[proposal])
        bounds.append((torch.softmax(log_w, 0) * torch.nan_to_num(bound, neginf=0.0)).sum(0))
    return torch.where(sample.usable, torch.stack(bounds).mean(0), torch.nan)


def exact_upper_bound(observed: Observed, draws: Refined, z: Tensor) -> tuple[Tensor, Tensor]:
    """Upper bound by a latent that was simulated with x, and the log-weight of that latent.

    Shapes: ``z (m, d) -> (m,), (m,)``.
    """
    latent = z.unsqueeze(0)
    log_w = observed.log_joint(latent).double() - draws.mixture.log_prob(latent, observed.x).double()
    share = _responsibilities(draws.mixture, draws.mixture.component_log_prob(latent, observed.x).double())
    bound = _with_one_replaced(log_w, share, draws.sample.log_w, draws.source)[0]
    return torch.where(draws.sample.usable, bound, torch.nan), log_w[0]


def _responsibilities(mixture: Mixture, log_parts: Tensor) -> Tensor:
    """Probability that a draw came from each component. Shapes: ``(components, n, m)``, as given."""
    log_share = torch.tensor(list(mixture.shares.values()), dtype=torch.float64, device=log_parts.device).log()
    return torch.softmax(log_parts + log_share[:, None, None], 0)


def _with_one_replaced(log_w: Tensor, share: Tensor, others: Tensor, source: Tensor) -> Tensor:
    """Log of the mean weight when each of some draws replaces a draw of its component among the others.

    Shapes: ``log_w (n, m), share (components, n, m), others (k, m), source (k,) -> (n, m)``.
    """
    largest = torch.maximum(log_w.amax(0), others.amax(0))
    weight, rest = (log_w - largest).exp(), (others - largest).exp()
    total, bound = rest.sum(0), torch.zeros_like(log_w)
    for j, probability in enumerate(share):
        replaced = rest[(source == j).nonzero()[0, 0]]
        mean = (weight + (total - replaced).clamp_min(0)) / len(others)
        bound = bound + torch.where(probability > 0, probability * mean.log(), 0.0)
    return bound + largest
