"""A pPCA model with a known posterior, encoders of known quality, and models with several modes."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor
from torch.distributions import Independent, Normal

from vaerdict.distributions import Elliptical, StandardNormal
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


class Plain:
    """The posterior is N(0, 1) for any x."""

    prior = StandardNormal(1)

    def log_joint(self, x: Tensor, z: Tensor) -> Tensor:
        return self.prior.log_prob(z) + 0 * x[..., 0]


class Folded:
    """x_0 = |z_0| + 0.1 e, x_1 = z_1 + 0.3 e: x does not depend on the sign of z_0, so P(z_0 > 0 | x) is one half."""

    prior = StandardNormal(2)

    def log_joint(self, x: Tensor, z: Tensor) -> Tensor:
        residual = torch.stack([(x[..., 0] - z[..., 0].abs()) / 0.1, (x[..., 1] - z[..., 1]) / 0.3], -1)
        return -0.5 * residual.square().sum(-1) + self.prior.log_prob(z)

    def simulate(self, n: int) -> Tensor:
        z, e = torch.randn(2, n, 2, generator=seeded(6), dtype=torch.double)
        return torch.stack([z[:, 0].abs() + 0.1 * e[:, 0], z[:, 1] + 0.3 * e[:, 1]], -1)


class Modes:
    """Narrow normals of equal weight at given points, moved by x, under a wide normal prior."""

    def __init__(self, loc: Tensor, sd: float, prior_sd: float = 3.0) -> None:
        self.loc, self.sd = loc, sd
        scale = torch.full(loc.shape[-1:], prior_sd, dtype=loc.dtype)
        self.prior = Independent(Normal(torch.zeros_like(scale), scale), 1)

    def log_joint(self, x: Tensor, z: Tensor) -> Tensor:
        square = ((z - x).unsqueeze(-2) - self.loc).square().sum(-1) / self.sd**2
        return torch.logsumexp(-0.5 * square, -1)
