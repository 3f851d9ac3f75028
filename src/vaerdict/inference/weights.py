"""Particles of a proposal with their log-weights under a model: the one place where the two meet."""

from __future__ import annotations

import torch
from torch import Tensor

from vaerdict.core import (
    Latent,
    Model,
    Proposal,
    check_log_joint,
    check_log_weights,
    evaluating,
    map_latent,
    prepared,
    restricted,
)
from vaerdict.noise import Randomness
from vaerdict.proposals import check_latent

_PART = 2**24  # particle features worked on at a time: what a likelihood spreads out in memory


@torch.no_grad()
def weigh(
    model: Model, x: Tensor, q: Proposal, n: int, *, strict: bool = True, generator: Randomness
) -> tuple[Latent, Tensor]:
    """Draw n particles of q for each observation and weigh them, some observations at a time.

    Memory beyond the answer stays bounded however many observations there are. Modules are evaluated, not trained.
    Weights that cannot be used raise an error; unless `strict`, they come back as they are.

    Shapes: ``x (n_obs, p) -> z (n, n_obs, d), log_w (n, n_obs)``.
    """
    with evaluating(model, q):
        z, log_w = _in_parts(model, x, q, n, generator)
    return z, check_log_weights(log_w) if strict else log_w


def _in_parts(model: Model, x: Tensor, q: Proposal, n: int, generator: Randomness) -> tuple[Latent, Tensor]:
    size = max(1, _PART // (n * x.shape[-1]))
    if x.shape[0] <= size:
        return _weigh_part(model, x, q, n, generator)
    z: Latent = None
    log_w = torch.empty(0)
    for rows in torch.arange(x.shape[0], device=x.device).split(size):
        part, weights = _weigh_part(model, x[rows], restricted(q, rows), n, generator)
        if z is None:
            z = map_latent(lambda t: t.new_empty(n, x.shape[0], *t.shape[2:]), part)
            log_w = weights.new_empty(n, x.shape[0])
        _fill(z, part, rows)
        log_w[:, rows] = weights
    return z, log_w


def _weigh_part(model: Model, x: Tensor, q: Proposal, n: int, generator: Randomness) -> tuple[Latent, Tensor]:
    z, log_q = check_latent(q.draw(x, n, generator=generator), model.prior)
    return z, check_log_joint(model.log_joint(prepared(model, x), z), log_q, z) - log_q


def _fill(whole: Latent, part: Latent, rows: Tensor) -> None:
    pairs = [(whole, part)] if isinstance(whole, Tensor) else zip(whole, part, strict=True)
    for target, values in pairs:
        target[:, rows] = values
