"""A mixture of Student-t kernels for each observation."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from vaerdict.core import Draws, check_count
from vaerdict.noise import Randomness, as_source

_CHUNK = 2**22  # numbers held at a time


@dataclass(frozen=True, eq=False)
class Kernels:
    r"""The density :math:`\sum_j \pi_j\, t_\nu(z; c_j, R_j R_j^\top)`, with kernels and shares for each observation.

    Shapes: ``loc (J, *batch, d)``, ``tril (J, *batch, d, d)``, ``log_share (J, *batch)``.
    """

    loc: Tensor
    tril: Tensor
    log_share: Tensor
    df: float

    def draw(self, x: Tensor, k: int, *, generator: Randomness) -> Draws:
        """Draw k particles for each observation; the kernel of a particle is chosen by one coordinate of the noise."""
        d, concentration = self.loc.shape[-1], torch.tensor(0.5 * self.df).to(self.loc)
        eps, gamma = as_source(generator).normal_gamma(check_count(k), self.loc.shape[1:-1], d + 1, concentration)
        cumulative = self.log_share.double().exp().cumsum(0).movedim(0, -1).contiguous()
        level = torch.special.ndtr(eps[..., d].double()) * cumulative[..., -1]
        kernel = torch.searchsorted(cumulative, level.movedim(0, -1).contiguous()).clamp_max(len(self.loc) - 1)
        kernel = kernel.movedim(-1, 0)
        scaled = eps[..., :d] * (concentration / gamma).sqrt()
        loc = self.loc.gather(0, kernel.unsqueeze(-1).expand(*kernel.shape, d))
        z = torch.empty_like(loc)
        size = max(1, _CHUNK // max(1, math.prod(self.tril.shape[1:])))
        for rows in torch.arange(k, device=z.device).split(size):
            root = self.tril.gather(0, kernel[rows, ..., None, None].expand(*kernel[rows].shape, d, d))
            z[rows] = loc[rows] + (root @ scaled[rows].unsqueeze(-1)).squeeze(-1)
        return Draws(z, self.log_prob(z))

    def log_prob(self, z: Tensor, x: Tensor | None = None) -> Tensor:
        """Log-density at z. Shapes: ``(K, *batch, d) -> (K, *batch)``."""
        d, total = z.shape[-1], None
        for part in torch.arange(len(self.loc), device=z.device).split(max(1, _CHUNK // z.numel())):
            tril = self.tril[part]
            whitened = torch.linalg.solve_triangular(
                tril, (z.unsqueeze(1) - self.loc[part]).movedim(0, -1), upper=False
            )
            square = whitened.square().sum(-2).movedim(-1, 0)
            log_det = tril.diagonal(dim1=-2, dim2=-1).log().sum(-1)
            term = self.log_share[part] - log_det - 0.5 * (self.df + d) * torch.log1p(square / self.df)
            summed = torch.logsumexp(term, 1)
            total = summed if total is None else torch.logaddexp(total, summed)
        assert total is not None
        constant = math.lgamma(0.5 * (self.df + d)) - math.lgamma(0.5 * self.df) - 0.5 * d * math.log(self.df * math.pi)
        return total + constant

    def select(self, index: Tensor) -> Kernels:
        """The kernels of the observations at `index` of the last batch axis."""
        axis = self.log_share.dim() - 1
        loc, tril, log_share = (t.index_select(axis, index.to(t.device)) for t in (self.loc, self.tril, self.log_share))
        return Kernels(loc, tril, log_share, self.df)

    def scaled(self, factor: float, df: float) -> Kernels:
        """The same centres and shares with roots multiplied by `factor` and other degrees of freedom."""
        return Kernels(self.loc, factor * self.tril, self.log_share, df)
