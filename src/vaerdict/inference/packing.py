"""Structured observations and latents for training, which knows matrices and vectors only."""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from vaerdict.core import (
    Draws,
    Latent,
    Model,
    Observations,
    Proposal,
    SettingError,
    floating,
    map_observations,
    parts_of,
    prepared,
    restricted,
)
from vaerdict.inference.target import Space
from vaerdict.noise import Randomness, as_source
from vaerdict.priors import JointPrior, Prior, is_discrete, is_function


@dataclass(frozen=True)
class Packing:
    """How observations are packed into the columns of a matrix: the shape and type of every part, in order."""

    example: Observations

    @classmethod
    def of(cls, x: Observations) -> Packing:
        """The packing of observations like these."""
        return cls(map_observations(lambda t: t[:1].detach().cpu(), x))

    def pack(self, x: Observations) -> Tensor:
        """Observations as a matrix. Shapes: ``-> (n, p)``."""
        parts = [floating(t).reshape(len(t), -1) for t in parts_of(x)]
        dtype = next((t.dtype for t in parts_of(self.example) if t.is_floating_point()), torch.get_default_dtype())
        return torch.cat([t.to(dtype) for t in parts], -1)

    def unpack(self, matrix: Tensor) -> Observations:
        """The observations of a matrix. Shapes: ``(n, p) ->``."""
        examples = parts_of(self.example)
        columns = iter(matrix.split([math.prod(t.shape[1:]) for t in examples], -1))
        return map_observations(lambda t: next(columns).reshape(-1, *t.shape[1:]).to(t.dtype), self.example)

    def notes(self) -> list[dict[str, Any]]:
        """Shapes and types, for a file."""
        return [{"shape": list(t.shape[1:]), "dtype": str(t.dtype)} for t in parts_of(self.example)]


def needs_packing(model: Model, x: Observations) -> bool:
    """Whether observations are no matrix, or latents no vector with a distribution of its own."""
    prior = model.prior
    vectors = not (isinstance(prior, JointPrior) or is_function(prior) or is_discrete(prior))
    return not (isinstance(x, Tensor) and x.dim() == 2 and vectors)


class Packed(nn.Module):
    """A model of packed observations, with a vector without bounds as its latent."""

    def __init__(self, model: nn.Module, packing: Packing) -> None:
        super().__init__()
        device = next((t.device for t in model.parameters()), torch.device("cpu"))
        example = map_observations(lambda t: t.to(device), packing.example)
        self.space, self.packing = Space.of(model, example), packing  # type: ignore[arg-type]
        if not self.space.parts:
            raise SettingError("all latents of the model are discrete and are summed exactly; it needs no proposals.")
        self.model = self.space.model  # a submodule, so that it is trained, copied and moved

    def __deepcopy__(self, memo: dict[int, Any]) -> Packed:
        return Packed(copy.deepcopy(self.user_model, memo), self.packing)

    @property
    def user_model(self) -> Any:
        """The model that was packed."""
        model: Any = self.model
        return model.model if hasattr(model, "n_states") else model

    @property
    def prior(self) -> PackedPrior:
        """The prior of the vector."""
        return PackedPrior(self)

    def log_joint(self, x: Tensor, u: Tensor) -> Tensor:
        """Log p(x, u). Shapes: ``(n, p), (K, n, d) -> (K, n)``."""
        return self.space.log_joint(prepared(self.space.model, self.packing.unpack(x)), u)


@dataclass(frozen=True, eq=False)
class PackedPrior:
    """The prior of a `Packed` model."""

    model: Packed

    @property
    def event_shape(self) -> torch.Size:
        """``(d,)``."""
        return torch.Size((sum(self.model.space.sizes),))

    def draw(self, x: Tensor, k: int, *, generator: Randomness) -> Draws:
        """Draw k vectors for each observation."""
        rows, space = self.model.packing.unpack(x), self.model.space
        u = space.vector(Prior(space.model.prior).sample(rows, k, (len(x),), as_source(generator)))
        return Draws(u, self.log_prob(u, x))

    def log_prob(self, u: Tensor, x: Tensor) -> Tensor:
        """Log p(u | x). Shapes: ``(K, n, d), (n, p) -> (K, n)``."""
        return self.model.space.log_prior(u, self.model.packing.unpack(x))

    def sample(self, sample_shape: torch.Size | tuple[int, ...] = ()) -> Tensor:
        """Draw vectors from torch's global random state."""
        return self.model.space.vector(self.model.space.model.prior.sample(torch.Size(sample_shape)))


class Unpacked(nn.Module):
    """A proposal for vectors given packed observations as a proposal for the user's latents."""

    def __init__(self, model: Packed, proposal: Proposal) -> None:
        super().__init__()
        self.packed, self.proposal = model, proposal

    def draw(self, x: Observations, k: int, *, generator: Randomness) -> Draws:
        """Draw k particles for each observation."""
        u, log_q = self.proposal.draw(self.packed.packing.pack(x), k, generator=generator)
        z, log_det, _ = self.packed.space.at(u)
        return Draws(z, log_q - log_det)

    def log_prob(self, z: Latent, x: Observations) -> Tensor:
        """Log q(z | x). Shapes: ``-> (K, n)``."""
        u = self.packed.space.vector(z)
        return self.proposal.log_prob(u, self.packed.packing.pack(x)) - self.packed.space.at(u).log_det

    def select(self, index: Tensor) -> Unpacked:
        """The proposal for the observations at `index`."""
        return Unpacked(self.packed, restricted(self.proposal, index))
