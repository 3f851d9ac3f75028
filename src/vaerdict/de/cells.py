"""Where the latents of cells come from: a model with a proposal for its cells, or particles that are already there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from vaerdict.core import Proposal, ShapeError, check_log_weights, prepared, restricted
from vaerdict.de.grouped import Expressing, GroupedModel, GroupMeans, group_means
from vaerdict.proposals import check_latent, defensive
from vaerdict.refinement import refine


class Particles(NamedTuple):
    """Latents of cells with their log-weights. Shapes: ``z (n, cells, d)``, ``log_w (n, cells)``."""

    z: Tensor
    log_w: Tensor


class CellPosterior(Protocol):
    """Weighted particles of every cell's latent, and what they mean for its genes."""

    @property
    def n_cells(self) -> int:
        """How many cells there are."""
        ...

    def particles(self, cells: Tensor, n: int, generators: Sequence[torch.Generator], /) -> Particles:
        """Particles of some cells, each cell's from its own generator. Shapes: ``cells (c,) -> z (n, c, d)``."""
        ...

    def expression(self, z: Tensor, /) -> Tensor:
        """Normalised expression. Shapes: ``(n, c, d) -> (n, c, genes)``."""
        ...


def moved(posterior: CellPosterior, z: Tensor, cells: Tensor, seed: int) -> Tensor:
    """Joint draws of the latents of some cells with what these share, where the posterior offers ``moved`` for it.

    Shapes: ``z (n, c, d)``, ``cells (c,)``, as z.
    """
    move = getattr(posterior, "moved", None)
    return z if move is None else move(z, cells, seed)


@dataclass(frozen=True, eq=False)
class Proposed:
    """The posterior of a fitted model at cells x, by a proposal; without weights, the proposal stands in for it.

    Particles are of each cell given the means of its prior; what is not known of these comes with `moved`.

    Shapes: ``x (cells, genes)``.
    """

    model: Expressing
    x: Tensor
    proposal: Proposal
    weighted: bool = True
    means: GroupMeans | None = None

    @property
    def n_cells(self) -> int:
        """How many cells there are."""
        return len(self.x)

    @torch.no_grad()
    def particles(self, cells: Tensor, n: int, generators: Sequence[torch.Generator], /) -> Particles:
        """Draw from the proposal and weigh."""
        x, q = self.x[cells], restricted(self.proposal, cells)
        z, log_q = check_latent(q.draw(x, n, generator=generators), self.model.prior)
        if not self.weighted:
            return Particles(z, torch.zeros_like(log_q))
        return Particles(z, check_log_weights(self.model.log_joint(prepared(self.model, x), z) - log_q))

    def moved(self, z: Tensor, cells: Tensor, seed: int, /) -> Tensor:
        """Joint draws moved by what is not known of the groups' means. Shapes: ``z (n, c, d)``, as z."""
        return z if self.means is None else z + self.means.moves(cells, len(z), seed)

    @torch.no_grad()
    def expression(self, z: Tensor, /) -> Tensor:
        """The model's."""
        return self.model.expression(z)


@dataclass(frozen=True, eq=False)
class Given:
    """Particles that are already there, such as those of annealed importance sampling.

    Shapes: ``z (n, cells, d)``, ``log_w (n, cells)``.
    """

    model: Expressing
    z: Tensor
    log_w: Tensor

    @property
    def n_cells(self) -> int:
        """How many cells there are."""
        return self.log_w.shape[1]

    def particles(self, cells: Tensor, n: int, generators: Sequence[torch.Generator], /) -> Particles:
        """Those of the cells; all of them, for there are no others."""
        if n != len(self.log_w):
            raise ShapeError(f"n={n} particles were asked for, {len(self.log_w)} are there; ask for as many.")
        return Particles(self.z[:, cells], self.log_w[:, cells])

    @torch.no_grad()
    def expression(self, z: Tensor, /) -> Tensor:
        """The model's."""
        return self.model.expression(z)


_INFLATE = 1.1


def refined(
    model: Expressing,
    x: Tensor,
    start: Tensor | Proposal,
    *,
    labels: Tensor | None = None,
    prior_share: float = 0.05,
) -> Proposed:
    """The posterior at cells x by a Student-t fitted to each cell, with a defensive share of the prior.

    `start` is an encoder, or a tensor of locations, to climb from. With `labels`, a number for each cell's group and
    negative for none, the prior has a mean of its own in each group (`vaerdict.de.grouped`). Where donors are the
    replicates, each needs a label of its own: about a mean they share, donors look more alike than they are.

    Shapes: ``x (cells, genes)``, ``start (cells, d)``, ``labels (cells,)``.
    """
    q = refine(model, x, start, inflate=_INFLATE).distribution
    if labels is None:
        return Proposed(model, x, defensive({"REFINED": q}, model.prior, prior_share))
    means = group_means(q, _INFLATE, labels)
    grouped, known = GroupedModel(model), torch.cat([x, means.mean], -1)
    nearer = q.loc + (q.root.covariance() @ means.mean.unsqueeze(-1)).squeeze(-1) / _INFLATE**2
    q = refine(grouped, known, nearer, inflate=_INFLATE).distribution
    return Proposed(grouped, known, defensive({"REFINED": q}, model.prior, prior_share), means=means)
