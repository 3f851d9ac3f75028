"""A pPCA model with a known posterior, and encoders of known quality."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from vaerdict.distributions import Elliptical
from vaerdict.models.ppca import PPCA
from vaerdict.noise import seeded
from vaerdict.proposals import Trainable

MODEL = PPCA(torch.randn(5, 2, generator=seeded(0), dtype=torch.double), 0.8).requires_grad_(False)


class Near(Trainable):
    """An encoder with the exact posterior, widened, and shifted by some of its standard deviations."""

    def __init__(self, inflate: float = 1.3, shift: float = 0.0, model: PPCA = MODEL) -> None:
        super().__init__()
        self.model, self.inflate, self.shift = model, inflate, shift

    def forward(self, x: Tensor) -> Elliptical:
        q = self.model.posterior(x, inflate=self.inflate)
        return replace(q, loc=q.loc + self.shift * q.root.apply(torch.ones_like(q.loc)))
