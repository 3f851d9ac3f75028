"""The protocol of adapters: what one defines for its class of scvi-tools models, and what it gets for that."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributions import Independent, Normal

from vaerdict.core import Draws, Latent, check_count
from vaerdict.distributions import Diagonal, Elliptical
from vaerdict.models.scvi.registered import BATCH, Cells, Registered, flat, split
from vaerdict.noise import Randomness, Source, as_source
from vaerdict.priors import JointPrior, latent_type, log_prior


class ScviModel(nn.Module, ABC):
    """A fitted scvi-tools model with frozen parameters: log p(x, z) of cells, and its encoder as a proposal.

    An observation is the fields of a cell that the model reads, in the order of `columns`: the counts, what else was
    measured, and the covariates. `observations` makes such rows from an AnnData.

    An adapter defines `reads`, `latents`, `log_likelihood` and `encode`, and where needed `check` and `terms`.
    """

    module: Any

    def __init__(self, module: nn.Module, source: Registered) -> None:
        super().__init__()
        self.module, self._source = module, source

    # ------------------------------------------------------------------------------------ defined by an adapter
    @classmethod
    def check(cls, module: Any) -> None:
        """Raise a `SettingError` if the settings of the module cannot be represented exactly."""

    @classmethod
    @abstractmethod
    def reads(cls, module: Any) -> Sequence[str]:
        """The registered fields that the likelihood or the encoder uses, ``X`` first.

        Those that were not registered are skipped, and so is the batch if there is only one.
        """

    @abstractmethod
    def latents(self) -> Mapping[str, Any]:
        """The prior of each latent in ancestral order: a distribution, or a function of ``x`` and earlier latents.

        With the single latent ``z``, latents are tensors; with several, named tuples.
        """

    def terms(self, cells: Cells) -> Mapping[str, Tensor]:
        """What `log_likelihood` needs and depends on the cells alone; it is computed once for all particles."""
        return {}

    @abstractmethod
    def log_likelihood(self, cells: Cells, z: Latent) -> Tensor:
        """Log p(x | z). Shapes: ``(*batch, width), (K, *batch, d) -> (K, *batch)``."""

    @abstractmethod
    def encode(self, cells: Cells) -> Mapping[str, Any]:
        """The encoder's distribution of each continuous latent: an `Elliptical`, or a function of those before it.

        A function takes the mapping of latents drawn so far, ``(K, *batch, d)`` each.
        """

    # ------------------------------------------------------------------------------------------- shared by all
    @property
    def prior(self) -> Any:
        """The prior: a distribution of ``z``, or a `vaerdict.JointPrior` of several latents."""
        latents = self.latents()
        if list(latents) == ["z"]:
            return latents["z"]
        return JointPrior(**latents)

    @property
    def encoder(self) -> ScviEncoder | JointEncoder:
        """The encoder of the model as a proposal of its continuous latents."""
        return ScviEncoder(self) if list(self.latents()) == ["z"] else JointEncoder(self)

    @property
    def adata(self) -> Any:
        """The AnnData of the user's model."""
        return self._source.model.adata

    @property
    def columns(self) -> Mapping[str, int]:
        """The number of columns of each registered field in an observation, in order."""
        return self._source.columns

    def observations(self, adata: Any = None, indices: Any = None) -> Tensor:
        """The cells of the model's AnnData, or of another with the same registered fields; all, or those at `indices`.

        Shapes: ``-> (cells, sum of columns)``, dense.
        """
        return self._source.rows(adata, indices).to(next(self.module.parameters()))

    def batches(self, adata: Any = None) -> np.ndarray | None:
        """The name of every cell's batch, or None if the model has only one. Shapes: ``-> (cells,)``."""
        return self._source.batches(adata) if BATCH in self.columns else None

    def cells(self, x: Tensor | Cells) -> Cells:
        """The fields of observations; what `prepare` returned stays as it is."""
        return split(x, self.columns) if isinstance(x, Tensor) else x

    def prepare(self, x: Tensor | Cells) -> Cells:
        """The fields of observations, with what does not depend on z. Shapes: ``x (*batch, sum of columns)``."""
        if isinstance(x, Cells):
            return x
        cells = self.cells(x)
        return cells._replace(terms=self.terms(cells))

    def log_joint(self, x: Tensor | Cells, z: Latent) -> Tensor:
        """Log p(x, z). Shapes: ``(*batch, sum of columns), (K, *batch, d) -> (K, *batch)``."""
        cells = self.prepare(x)
        return self.log_likelihood(cells, z) + log_prior(self.prior, z, cells)

    def arguments(self, cells: Cells, lead: torch.Size, names: Mapping[str, str]) -> dict[str, Tensor]:
        """Fields as arguments of the module, one row per particle and cell: scvi-tools loops over further axes."""
        return {names[key]: flat(value, lead) for key, value in cells.fields.items() if key in names}


# ------------------------------------------------------------------------------------------------------ encoders
class ScviEncoder(nn.Module):
    """The encoder of a model with one latent as a proposal: a diagonal normal per cell."""

    def __init__(self, model: ScviModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Elliptical:
        """The distribution of latents given x. Shapes: ``(*batch, p) -> distribution over (*batch, d)``."""
        return self.model.encode(self.model.cells(x))["z"]

    def draw(self, x: Tensor, k: int, *, generator: Randomness) -> Draws:
        """Draw k particles per cell. Shapes: ``(*batch, p) -> (K, *batch, d), (K, *batch)``."""
        return self(x).draw(x, k, generator=generator)

    def log_prob(self, z: Tensor, x: Tensor) -> Tensor:
        """Log q(z | x). Shapes: ``(K, *batch, d), (*batch, p) -> (K, *batch)``."""
        return self(x).log_prob(z)


class JointEncoder(nn.Module):
    """The encoder of a model with several latents as a proposal: the continuous ones, each given those before it."""

    def __init__(self, model: ScviModel) -> None:
        super().__init__()
        self.model = model

    def draw(self, x: Tensor, k: int, *, generator: Randomness) -> Draws:
        """Draw k particles per cell. Shapes: ``(*batch, p) -> named tuple of (K, *batch, d), (K, *batch)``."""
        source, latents, terms = as_source(generator), dict[str, Tensor](), list[Tensor]()
        for name, q in self._steps(x, latents):
            latents[name] = _particles(q, check_count(k), x.shape[:-1], source)
            terms.append(q.log_prob(latents[name]))
        names = [name for name in self.model.latents() if name in latents]  # the order of the prior
        return Draws(latent_type(*names)(*(latents[name] for name in names)), torch.stack(terms).sum(0))

    def log_prob(self, z: Latent, x: Tensor) -> Tensor:
        """Log q(z | x). Shapes: ``named tuple of (K, *batch, d), (*batch, p) -> (K, *batch)``."""
        latents = z._asdict()
        return torch.stack([q.log_prob(latents[name]) for name, q in self._steps(x, latents)]).sum(0)

    def _steps(self, x: Tensor, latents: Mapping[str, Tensor]) -> Iterator[tuple[str, Any]]:
        """The distribution of each latent given those that precede it."""
        for name, q in self.model.encode(self.model.cells(x)).items():
            yield name, q(latents) if callable(q) else q


def _particles(q: Any, k: int, batch: Sequence[int], source: Source) -> Tensor:
    """Draw from an `Elliptical`, which may already have an axis for particles, or by the `particles` of another."""
    if not isinstance(q, Elliptical):
        return q.particles(k, batch, source)
    return q.loc + q.root.apply(source.normal(k, batch, q.loc.shape[-1], like=q.loc))


# ------------------------------------------------------------------------------------------------- small helpers
def elliptical(q: Any, lead: torch.Size) -> Elliptical:
    """A diagonal normal of scvi-tools, one row per cell, with the batch axes of the cells."""
    return Elliptical(q.loc.reshape(*lead, -1), Diagonal(q.scale.reshape(*lead, -1)))


def normal(loc: Tensor, scale: Tensor) -> Independent:
    """Independent normals of the last axis.

    At states far from all cells too: values are not validated, and a scale whose square underflows is replaced.
    """
    scale = scale.clamp_min(torch.finfo(scale.dtype).tiny ** 0.5)
    return Independent(Normal(loc, scale, validate_args=False), 1, validate_args=False)


def without_draws(like: Tensor) -> Any:
    """A context in which scvi-tools may draw what is not used: the global random state is restored at its end."""
    return torch.random.fork_rng([like.device] if like.is_cuda else [])
