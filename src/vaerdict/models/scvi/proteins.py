"""Counts of surface proteins: a mixture of background and foreground, whose background is a latent."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor


class ProteinParameters(NamedTuple):
    """What the decoder says about proteins; the background is a latent, which the foreground multiplies.

    `loc` and `scale` are of the log background given the cell state. Shapes: ``(K, *batch, proteins)``.
    """

    loc: Tensor
    scale: Tensor
    fold: Tensor
    background_logit: Tensor

    @classmethod
    def read(cls, decoded: Mapping[str, Tensor], lead: torch.Size) -> ProteinParameters:
        """The decoder's output, one row per particle and cell, with the axes `lead`."""
        names = ("back_alpha", "back_beta", "fore_scale", "mixing")
        return cls(*(decoded[name].reshape(*lead, -1) for name in names))

    def log_prob(self, counts: Tensor, log_background: Tensor, dispersion: Tensor) -> Tensor:
        """Log-probability of each count given the log background. Shapes: ``-> (K, *batch, proteins)``."""
        from scvi.distributions import NegativeBinomialMixture

        mean = log_background.exp()
        mixture = NegativeBinomialMixture(
            mean, mean * self.fold, dispersion, mixture_logits=self.background_logit, validate_args=False
        )
        return mixture.log_prob(counts)
