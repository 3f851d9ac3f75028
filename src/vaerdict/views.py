"""What encoders see of observations that no network should be given raw."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from vaerdict.core import per_member


class LogNormalised(nn.Module):
    """Counts scaled to one library size, then log(1 + x); columns behind the genes pass as they are.

    Shapes: ``(..., n, genes + others) -> (..., n, genes + others)``.
    """

    stackable = True

    def __init__(self, n_genes: int, library: Tensor) -> None:
        super().__init__()
        self.n_genes, self.library = n_genes, nn.Buffer(library)

    def forward(self, x: Tensor) -> Tensor:
        """The view of x."""
        counts, others = x.tensor_split([self.n_genes], -1)
        size = counts.sum(-1, keepdim=True).clamp_min(1)
        seen = torch.log1p(counts * (per_member(self.library, 0).unsqueeze(-1) / size))
        return torch.cat([seen, others], -1)
