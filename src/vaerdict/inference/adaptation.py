"""Proposals fitted to weighted particles: Student-t kernels at the particles, each as wide as its neighbourhood."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from vaerdict.core import log_normalise
from vaerdict.proposals import Kernels
from vaerdict.samplers import gathered, systematic

_CHUNK = 2**23  # numbers held at a time
_NEIGHBOURS = 32  # the nearest 1/32 of a population sets the shape of a kernel
_LEAST_VARIANCE = 1e-8  # of a kernel along any direction, relative to that of its population


class Population(NamedTuple):
    """Weighted points for kernels, how many kernels to fit to them, and the share of these in the mixture.

    Shapes: ``z (N, m, d)``, ``log_w (N, m)``.
    """

    z: Tensor
    log_w: Tensor
    n_kernels: int
    share: float


def fit_kernels(populations: list[Population], *, df: float) -> Kernels:
    """Kernels centred at points of the populations, each as wide as its neighbourhood.

    Centres are resampled systematically in proportion to the weights. The scale matrix of a kernel is the second
    moment about its centre of the nearest 1/32 of its population, at least 2 d points, shrunk towards the shape of
    the whole.
    """
    loc, tril, log_share = [], [], []
    for p in populations:
        log_w = p.log_w.double()
        centres = gathered(p.z, systematic(log_w, torch.full_like(log_w[0], 0.5), p.n_kernels))
        loc.append(centres)
        tril.append(_local_roots(p.z, p.log_w, centres))
        log_share.append(torch.full_like(centres[..., 0], math.log(p.share / p.n_kernels)))
    return Kernels(torch.cat(loc), torch.cat(tril), log_normalise(torch.cat(log_share)), df)


def _local_roots(z: Tensor, log_w: Tensor, centres: Tensor) -> Tensor:
    """Root of the second moment about each centre of the points near it. Shapes: ``(J, m, d) -> (J, m, d, d)``."""
    n, _, d = z.shape
    n_near = min(n, max(2 * d, n // _NEIGHBOURS))
    size = max(1, _CHUNK // (len(centres) * (n + n_near * d)))
    parts = zip(z.double().split(size, 1), log_w.split(size, 1), centres.double().split(size, 1), strict=True)
    return torch.cat([_roots(*part, n_near) for part in parts], 1).to(z.dtype)


def _roots(z: Tensor, log_w: Tensor, centres: Tensor, n_near: int) -> Tensor:
    # every point counts a little, so that no direction is without extent where one weight dominates
    d, weight = z.shape[-1], 0.95 * log_normalise(log_w.double()).exp() + 0.05 / len(z)
    centred = z - (weight.unsqueeze(-1) * z).sum(0)
    whole = torch.einsum("nmi,nmj->mij", weight.unsqueeze(-1) * centred, centred)
    diagonal = whole.diagonal(dim1=-2, dim2=-1).mean(-1).clamp_min(torch.finfo(torch.double).tiny)
    whole = whole + _LEAST_VARIANCE * diagonal[:, None, None] * torch.eye(d).to(whole)
    root = torch.linalg.cholesky(whole)
    flat, flat_centres = (_whitened(root, t) for t in (z, centres))  # (m, n, d), (m, J, d)
    near = torch.cdist(flat_centres, flat).topk(n_near, largest=False).indices  # (m, J, near)
    m, n_centres = near.shape[:2]
    index = near.reshape(m, -1, 1)
    points = flat.gather(1, index.expand(-1, -1, d)).reshape(m, n_centres, n_near, d)
    shares = weight.mT.gather(1, index[..., 0]).reshape(m, n_centres, n_near)
    shares = shares / shares.sum(-1, keepdim=True)
    delta = points - flat_centres.unsqueeze(2)
    moment = torch.einsum("mjni,mjnk->mjik", shares.unsqueeze(-1) * delta, delta)
    spread = moment.diagonal(dim1=-2, dim2=-1).mean(-1).clamp_min(_LEAST_VARIANCE)
    intensity = d / (d + n_near)
    shrunk = (1 - intensity) * moment + (intensity * spread)[..., None, None] * torch.eye(d).to(moment)
    return (root.unsqueeze(1) @ torch.linalg.cholesky(shrunk)).movedim(1, 0)


def _whitened(root: Tensor, z: Tensor) -> Tensor:
    """Points in units of the root. Shapes: ``(m, d, d), (n, m, d) -> (m, n, d)``."""
    return torch.linalg.solve_triangular(root, z.movedim(0, -1), upper=False).mT
