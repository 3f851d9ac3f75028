"""Nearest neighbours among latents, which people cluster and draw maps by."""

from __future__ import annotations

import torch
from torch import Tensor

_NUMBERS = 2**24  # distances computed at a time


def share_kept(before: Tensor, after: Tensor, k: int) -> Tensor:
    """Share of the k nearest neighbours of each observation that are the same in both. Shapes: ``(n, d) -> (n,)``.

    >>> points = torch.tensor([[0.0], [1.0], [3.0], [7.0]])
    >>> share_kept(points, -points, 2)
    tensor([1., 1., 1., 1.])
    """
    n = len(before)
    parts = []
    for rows in torch.arange(n).split(max(1, _NUMBERS // n)):
        first, second = (_nearest(t.double(), rows, k) for t in (before, after))
        parts.append((first.unsqueeze(-1) == second.unsqueeze(-2)).any(-1).float().mean(-1))
    return torch.cat(parts)


def _nearest(points: Tensor, rows: Tensor, k: int) -> Tensor:
    """The k nearest other points of those at `rows`. Shapes: ``-> (rows, k)``."""
    distance = torch.cdist(points[rows], points)
    distance[torch.arange(len(rows)), rows] = torch.inf
    return distance.topk(k, largest=False).indices
