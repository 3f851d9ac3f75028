"""The part that models of gene counts share: the count likelihood of scvi-tools and its library size."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributions import Independent

from vaerdict.core import Latent, SettingError
from vaerdict.likelihoods import CountLikelihood, CountParameters, NegativeBinomial, Poisson, ZeroInflated
from vaerdict.models.counts import fixed_part
from vaerdict.models.scvi.base import ScviModel, normal
from vaerdict.models.scvi.registered import BATCH, CATEGORICAL, CONTINUOUS, Cells, Registered

_EPS = 1e-8  # added by scvi-tools to the mean of a negative binomial before its logarithm: part of the fitted model
_LIKELIHOODS: dict[str, CountLikelihood] = {
    "nb": NegativeBinomial(),
    "zinb": ZeroInflated(per_cell=True),
    "poisson": Poisson(),
}


class CountsModel(ScviModel):
    """An adapter whose field ``X`` holds counts of genes. It defines `scale` too."""

    state = "z"
    """The latent that is decoded."""

    def __init__(self, module: Any, source: Registered) -> None:
        super().__init__(module, source)
        self.likelihood = _LIKELIHOODS[module.gene_likelihood]

    @classmethod
    def check(cls, module: Any) -> None:
        """Raise a `SettingError` if the likelihood is not one of counts."""
        if module.gene_likelihood not in _LIKELIHOODS:
            raise SettingError(
                f"gene_likelihood={module.gene_likelihood!r} is not one of counts; "
                f"train with {', '.join(_LIKELIHOODS)}."
            )

    @abstractmethod
    def scale(self, cells: Cells, state: Tensor) -> Tensor:
        """Normalised expression of given batches. Shapes: ``(K, *batch, d) -> (K, *batch, genes)``."""

    def expression(self, z: Latent, x: Tensor | None = None) -> Tensor:
        """Normalised expression, the proportions of genes, as in ``get_normalized_expression``.

        Without the cells x it is averaged over batches. With a ``size_factor_key`` it is the mean count per unit of
        size factor and need not sum to one. Shapes: ``(K, *batch, d) -> (K, *batch, genes)``.
        """
        state = self.state_of(z)
        if x is not None:
            return self.scale(self.cells(x), state)
        others = [key for key in (CATEGORICAL, CONTINUOUS) if key in self.columns]
        if others:
            raise SettingError(
                f"the decoder takes {', '.join(others)}, over which expression is not averaged; pass the cells x."
            )
        blank = self.cells(state.new_zeros(*state.shape[1:-1], sum(self.columns.values()))).fields
        batches = [torch.full_like(blank[BATCH], b) for b in range(max(1, self.module.n_batch))]
        scales = [self.scale(Cells({**blank, BATCH: batch}), state) for batch in batches]
        return torch.stack(scales).mean(0) if len(scales) > 1 else scales[0]

    def state_of(self, z: Latent) -> Tensor:
        """The latent that is decoded. Shapes: ``-> (K, *batch, d)``."""
        return z if isinstance(z, Tensor) else getattr(z, self.state)

    @property
    def latent_library(self) -> bool:
        """Whether the logarithm of the library size is a latent, ``l``."""
        return not getattr(self.module, "use_observed_lib_size", True)

    def library_prior(self, x: Tensor | Cells) -> Independent:
        """The prior of the log library size, a normal per batch. Shapes: ``-> distribution over (*batch, 1)``."""
        batch = self.cells(x).fields[BATCH]
        return normal(self.module.library_log_means[0][batch], self.module.library_log_vars[0][batch].sqrt())

    def count_terms(self, counts: Tensor, at: CountParameters) -> Mapping[str, Tensor]:
        """The dispersion, and the part of the log-likelihood that depends on nothing else, given one particle of each.

        They are the same for all latents, unless the dispersion is per gene and cell.
        """
        log_r = None if at.log_dispersion is None else at.log_dispersion[0]
        fixed = fixed_part(self.likelihood, counts, CountParameters(at.log_mean, log_r))
        return {"fixed": fixed} if log_r is None else {"fixed": fixed, "log_dispersion": log_r}

    def count_parameters(
        self,
        cells: Cells,
        lead: torch.Size,
        mean: Tensor,
        dispersion: Tensor | None = None,
        zero_logit: Tensor | None = None,
        log_library: Tensor | None = None,
    ) -> CountParameters:
        """The parameters of the counts, from those of scvi-tools with one row per particle and cell.

        A latent library size may be too large for floating point; the mean is then of a library of one, and
        `log_library` is added to its logarithm. Shapes: ``lead`` is ``(K, *batch)``, ``-> (K, *batch, genes)``.
        """
        dispersed, shape = self.likelihood.dispersed, (*lead, mean.shape[-1])
        smallest = torch.finfo(mean.dtype).tiny
        if log_library is None:
            log_mean = ((mean + _EPS) if dispersed else mean.clamp_min(smallest)).log().reshape(shape)
        else:
            log_mean = mean.clamp_min(smallest).log().reshape(shape) + log_library
            log_mean = padded(log_mean) if dispersed else log_mean
        log_r = cells.terms.get("log_dispersion")
        if log_r is None and dispersed and dispersion is not None:
            log_r = dispersion.log().expand_as(mean).reshape(shape)
        logit = zero_logit.reshape(shape) if self.likelihood.inflated and zero_logit is not None else None
        return CountParameters(log_mean, log_r, logit)

    def count_log_prob(self, cells: Cells, at: CountParameters) -> Tensor:
        """Log-probability of the counts of genes. Shapes: ``-> (K, *batch)``."""
        if "fixed" not in cells.terms:
            return self.likelihood.log_prob(cells.counts, at).sum(-1)
        return cells.terms["fixed"] + self.likelihood.moving(cells.counts, at)


def padded(log_mean: Tensor) -> Tensor:
    """The logarithm of a mean to which scvi-tools adds 1e-8."""
    return torch.logaddexp(log_mean, log_mean.new_tensor(math.log(_EPS)))


class Unused(nn.Module):
    """Replaces a layer whose output the likelihood does not use, such as that of the zero logits."""

    def forward(self, *inputs: Any) -> None:
        """Return None."""
