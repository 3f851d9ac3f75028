"""Simulated data of a small pPCA model and of counts, and members that train on them in a fraction of a second."""

from __future__ import annotations

import torch
from torch import Tensor

from vaerdict.datasets import appendix
from vaerdict.likelihoods import NegativeBinomial
from vaerdict.models.counts import CountModel
from vaerdict.models.ppca import PPCA
from vaerdict.noise import seeded
from vaerdict.proposals import Family, Normal, OfCounts
from vaerdict.training import IWAE, AmortisedBound, Fit, Member, Recipe, Settings, train
from vaerdict.training.stacks import Stack

CPU = torch.device("cpu")
TRUE = PPCA(torch.randn(5, 2, generator=seeded(0), dtype=torch.double), 0.7)
X = TRUE.simulate(300, generator=seeded(1))[0]
COUNTS = appendix(0, n_cells=120, n_genes=15).counts.clamp(0, 3)
SHORT = Settings(n_particles=5, epochs=3, batch_size=50, patience=None, check_every=2, score_particles=10)


def member(recipe: Recipe, seed: int, family: Family | None = None, dtype: torch.dtype = torch.double) -> Member:
    x = X.to(dtype)
    proposal = (family or Normal()).make(x, 2, hidden=(8,), generator=seeded(seed))
    return Member(PPCA(TRUE.weight.to(dtype), 1.0), proposal, recipe, seed)


def count_member(seed: int) -> Member:
    model = CountModel.start(COUNTS, 2, generator=seeded(seed), likelihood=NegativeBinomial(), hidden=(8,))
    return Member(model, OfCounts().make(COUNTS, 2, hidden=(8,), generator=seeded(seed)), IWAE, seed)


def short_train(members: list[Member], settings: Settings = SHORT, **options) -> list[Fit]:
    x = X.to(next(members[0].proposal.parameters()).dtype)
    return train(members, x[:200], x[200:], settings, **options)


def stack_of(*members: Member, lr: float = 1e-2, learn_model: bool = True) -> Stack:
    return Stack(members, lr_theta=lr, lr_phi=lr, learn_model=learn_model, device=CPU)


def tensors(fit: Fit | Member) -> list[Tensor]:
    return [t.detach().clone() for module in (fit.model, fit.proposal) for t in module.state_dict().values()]


def same_bits(a: Fit | Member, b: Fit | Member) -> bool:
    return all(torch.equal(s, t) for s, t in zip(tensors(a), tensors(b), strict=True))


def equal_to_rounding(a: Fit, b: Fit) -> bool:
    return all(torch.allclose(s, t, rtol=1e-9, atol=1e-11) for s, t in zip(tensors(a), tensors(b), strict=True))


def script(monkeypatch, scores: list[list[float]]) -> list[list[list[float]]]:
    """Replace held-out scores by these, one row per check; returns the learning rates at each check."""
    rates: list[list[list[float]]] = []
    rows = iter(scores)

    def score(self, stack, x, k):
        rates.append([stack.theta.lr.flatten().tolist(), stack.phi.lr.flatten().tolist()])
        return torch.tensor(next(rows), dtype=torch.double)

    monkeypatch.setattr(AmortisedBound, "__call__", score)
    return rates
