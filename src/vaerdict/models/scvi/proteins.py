"""Counts of surface proteins: a mixture of background and foreground, whose background is a latent."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vaerdict.likelihoods import CountParameters, NegativeBinomial
from vaerdict.models.scvi.counts import padded


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

    @classmethod
    def decode(cls, decoder: Any, inputs: Tensor, categories: Sequence[Tensor], lead: torch.Size) -> ProteinParameters:
        """The output of MULTIVI's decoder of proteins, which itself would draw the background."""

        def layers(first: nn.Module, *second: nn.Module) -> list[Tensor]:
            hidden = torch.cat([first(inputs, *categories), inputs], -1)
            return [layer(hidden, *categories) for layer in second]

        loc, log_scale = layers(decoder.py_back_decoder, decoder.py_back_mean_log_alpha, decoder.py_back_mean_log_beta)
        (increment,) = layers(decoder.py_fore_decoder, decoder.py_fore_scale_decoder)
        (logit,) = layers(decoder.sigmoid_decoder, decoder.py_background_decoder)
        return cls(*(t.reshape(*lead, -1) for t in (loc, log_scale.exp(), increment + 1 + 1e-8, logit)))

    def log_prob(self, counts: Tensor, log_background: Tensor, log_dispersion: Tensor) -> Tensor:
        """Log-probability of each count given the log background. Shapes: ``-> (K, *batch, proteins)``."""
        background, foreground = (
            NegativeBinomial().log_prob(counts, CountParameters(padded(log_mean), log_dispersion))
            for log_mean in (log_background, log_background + self.fold.log())
        )
        logit = self.background_logit
        return torch.logaddexp(F.logsigmoid(logit) + background, F.logsigmoid(-logit) + foreground)
