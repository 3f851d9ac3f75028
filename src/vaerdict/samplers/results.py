"""What results of samplers have in common: the error of an evidence, and putting chunks beside each other."""

from __future__ import annotations

from dataclasses import fields
from typing import Any, TypeVar

import torch
from torch import Tensor

from vaerdict.core import log_normalise

Result = TypeVar("Result", bound=Any)


def log_standard_error(log_w: Tensor) -> Tensor:
    r"""Standard error of ``log_mean_exp(log_w)`` over independent weights, by the delta method.

    :math:`\mathrm{sd}(w) / (\sqrt{K}\,\bar w)`. Trust it while it is small: one above 0.3 mostly says that a few
    weights carry the sum, and then it is too small.

    Shapes: ``(K, *batch) -> (*batch)``.
    """
    k = log_w.shape[0]
    if k < 2:
        return torch.full_like(log_w[0], torch.nan)
    share = log_normalise(log_w.double()).exp().square().sum(0)
    return ((k * share - 1).clamp_min(0) / (k - 1)).sqrt()


def by_island(t: Tensor, n_islands: int) -> Tensor:
    """Split particles, of which number i is in island i modulo `n_islands`, from islands; a rest is left out.

    Shapes: ``(N, *batch) -> (N / islands, islands, *batch)``.
    """
    n = len(t) // n_islands * n_islands
    return t[:n].reshape(-1, n_islands, *t.shape[1:])


def beside(results: list[Result]) -> Result:
    """Put the observations of several results of one kind beside each other; what is no tensor they share."""
    first = results[0]
    if len(results) == 1:
        return first
    columns = {f.name: [getattr(r, f.name) for r in results] for f in fields(first)}
    return type(first)(**{name: _cat(name, column) for name, column in columns.items()})


def _cat(name: str, column: list[Any]) -> Any:
    # observations lie along the last axis, but for the latents, which have their dimension behind it
    return torch.cat(column, -2 if name == "z" else -1) if isinstance(column[0], Tensor) else column[0]
