"""Bayes decisions: actions of least expected loss, the reject option, and sets with a bounded expected FDR."""

from __future__ import annotations

import torch
from torch import Tensor

from vaerdict.core import SettingError, ShapeError


def expected_loss(prob: Tensor, loss: Tensor) -> Tensor:
    """Expected loss of every action. Shapes: ``prob (*batch, states), loss (actions, states) -> (*batch, actions)``."""
    if loss.dim() != 2 or loss.shape[1] != prob.shape[-1]:
        raise ShapeError(
            f"loss has shape {tuple(loss.shape)}; expected (actions, states) with {prob.shape[-1]} states."
        )
    return prob @ loss.to(prob).mT


def bayes_action(prob: Tensor, loss: Tensor) -> Tensor:
    """The action of least expected loss, the first where several tie. Shapes: ``(*batch, states) -> (*batch)``.

    >>> bayes_action(torch.tensor([0.9, 0.1]), torch.tensor([[0.0, 1.0], [1.0, 0.0]])).item()
    0
    """
    return expected_loss(check_probabilities(prob), loss).argmin(-1)


def reject_loss(n_classes: int, cost: float) -> Tensor:
    """The 0-1 loss over `n_classes` with a last action, reject, that always costs `cost`.

    Shapes: ``-> (n_classes + 1, n_classes)``.
    """
    if not 0 <= cost <= 1:
        raise SettingError(
            f"cost={cost} of rejecting must lie in [0, 1]; above 1 - 1/n_classes rejecting is never optimal."
        )
    return torch.cat([1 - torch.eye(n_classes), torch.full((1, n_classes), cost)])


def decide_or_reject(prob: Tensor, cost: float) -> Tensor:
    """The most probable class, or -1 where it is wrong with probability above `cost`.

    Shapes: ``(*batch, classes) -> (*batch)``.
    """
    action = bayes_action(prob, reject_loss(prob.shape[-1], cost))
    return torch.where(action == prob.shape[-1], -1, action)


def expected_fdr(prob: Tensor) -> Tensor:
    """Posterior expected false discovery rate of the 1, 2, ... most probable hypotheses. Shapes: ``(n,) -> (n,)``."""
    if prob.dim() != 1:
        raise ShapeError(f"prob has shape {tuple(prob.shape)}; expected one probability per hypothesis, (n,).")
    ranked = check_probabilities(prob, sums_to_one=False).sort(descending=True).values.double()
    return (1 - ranked).cumsum(0) / torch.arange(1, len(ranked) + 1, device=prob.device)


def ranking(prob: Tensor, ties: Tensor | None = None) -> Tensor:
    """Indices from the most to the least probable hypothesis, ties in falling order of `ties`, then in input order.

    Probabilities estimated from draws are often exactly 0 or 1. An effect size as `ties` then decides their order.

    Shapes: ``(n,), (n,) -> (n,)``.
    """
    if ties is None:
        return prob.argsort(descending=True, stable=True)
    if ties.shape != prob.shape:
        raise ShapeError(f"ties has shape {tuple(ties.shape)}; expected one value per hypothesis, {tuple(prob.shape)}.")
    by_ties = ties.argsort(descending=True, stable=True)
    return by_ties[prob[by_ties].argsort(descending=True, stable=True)]


def discoveries(prob: Tensor, level: float, *, ties: Tensor | None = None) -> Tensor:
    """Largest set of hypotheses whose posterior expected FDR is at most `level`. Shapes: ``(n,) -> (n,)`` bool.

    Where only some of several equal probabilities fit in, those with the largest `ties` are included.
    """
    if not 0 <= level <= 1:
        raise SettingError(f"level={level} is not a false discovery rate; it must lie in [0, 1].")
    return q_values(prob, ties=ties) <= level


def q_values(prob: Tensor, *, ties: Tensor | None = None) -> Tensor:
    """The smallest posterior expected FDR at which each hypothesis is called. Shapes: ``(n,) -> (n,)``.

    Rounded to the precision of sums in the dtype of `prob`, so that a rate of one tenth is at most a level of 0.1.
    """
    rate = expected_fdr(prob).round(decimals=12 if prob.dtype == torch.float64 else 6)
    out = torch.empty_like(rate)
    out[ranking(prob, ties)] = rate.flip(0).cummin(0).values.flip(0)
    return out


def check_probabilities(prob: Tensor, *, sums_to_one: bool = True, slack: float = 1e-4) -> Tensor:
    """Return `prob` if it holds probabilities, else raise with the largest deviation."""
    if prob.numel() == 0:
        raise ShapeError("no probabilities were given.")
    low, high = prob.min().item(), prob.max().item()
    if not (low >= -slack and high <= 1 + slack):
        raise SettingError(f"probabilities range from {low:g} to {high:g}; they must lie in [0, 1].")
    if sums_to_one:
        off = (prob.sum(-1) - 1).abs().max().item()
        if not off <= slack:
            raise SettingError(
                f"sums of probabilities over states differ from one by up to {off:g}; normalise them first."
            )
    return prob
