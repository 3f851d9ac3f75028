r"""Fold changes predicted by a model of counts, without the counts of the gene itself.

The model has learned from cells that are not compared how the proportions of all genes depend on a cell's state z, or
is a given one. The state of each compared cell is inferred from the genes outside a block, and its decoder tells the
proportions :math:`\rho_{ig}` of the genes inside. The prediction of a gene is its change between the groups' means,

.. math:: u_g = s\,\log_2 \frac{\bar\rho_{ag}}{\bar\rho_{bg}},

with a slope s by the genes of the other blocks. A cell moves it by :math:`s (\rho_{ig} - \bar\rho_{ag}) / (n_a
\bar\rho_{ag} \ln 2)`. These influences have few main directions; in them and along u itself the prediction is a linear
function of the cells, as `vaerdict.de.prior.prediction` needs it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from vaerdict.de.analysis import Analysis
from vaerdict.de.contrasts import Contrast
from vaerdict.de.counts_likelihood import LOG2
from vaerdict.de.model.fitting import Effort, fit
from vaerdict.de.model.group_prior import Expressing
from vaerdict.de.prior.prediction import BLOCKS, FoldChanges, Prediction
from vaerdict.de.prior.replicates import degrees_of_freedom
from vaerdict.likelihoods import CountParameters
from vaerdict.noise import seeded
from vaerdict.refinement import refine
from vaerdict.training.data import sparse_rows

MOST_CELLS = 500
"""Cells of a side whose states are inferred at most; of more, these many at random."""

_EFFORT = Effort(recipes=("VAE",), epochs=40, refits=0, n_particles=1)
_DIRECTIONS = 20
_MISFIT = 0.3  # of predicted fold changes, when genes are weighted for the slope
_LEAST_PROPORTION = 1e-9
_STEPS = 25  # of the search for a cell's state


def predict_by_model(
    analysis: Analysis, contrast: Contrast, genes: np.ndarray, changes: FoldChanges, others: Any
) -> Prediction:
    """Predict the fold changes of `genes` by a model of the other cells with counts `others`, or by the given model."""
    model, cells = _model_and_cells(analysis, contrast, genes, others)
    block = torch.randint(BLOCKS, (len(genes),), generator=seeded(analysis.options.seed))
    proportions = _proportions(model, cells, block)
    weight = 1 / (changes.error.square() + _MISFIT**2)
    means = [proportions[cells.first == side].mean(0) for side in (True, False)]
    change = (means[0] / means[1]).log2()
    lines = torch.stack(
        [_line(change[block != b], changes.mode[block != b], weight[block != b]) for b in range(BLOCKS)]
    )
    moved = _influence(proportions, cells) * lines[:, 1].mean()
    features = _features(change, moved, weight)
    coefficients = torch.cat([lines, lines.new_zeros(BLOCKS, features.shape[1] - 2)], -1)
    values = torch.linalg.lstsq(features, moved.mT).solution.mT
    return Prediction(features, coefficients, block, values, weight, degrees_of_freedom(analysis, contrast))


class _Cells(NamedTuple):
    """Cells compared as a model takes them, which side they are on, and the replicate of each.

    The first `n_counts` columns are counts, of which `genes` are those of the genes to predict. Shapes: ``x (cells,
    p)``, ``first, replicate (cells,)``.
    """

    x: Tensor
    n_counts: int
    genes: Tensor
    first: Tensor
    replicate: Tensor


def _model_and_cells(
    analysis: Analysis, contrast: Contrast, genes: np.ndarray, others: Any
) -> tuple[Expressing, _Cells]:
    """The given model, or one trained on the other cells, and the compared cells as it takes them."""
    device, seed = torch.device(analysis.device), analysis.options.seed
    members, first, replicate = _members(contrast, seed)
    rows = analysis.cells[members]
    order = np.argsort(rows)
    if analysis.scvi is not None:
        x = torch.from_numpy(np.concatenate([part.toarray() for part in analysis.source.observations(rows[order])]))
        x, model, columns = x.to(device), analysis.scvi, torch.from_numpy(genes)
        n_counts = analysis.scvi.columns["X"]
        kept = torch.ones(len(order), dtype=torch.bool)
    else:
        fitted = fit(
            sparse_rows(others.astype(np.float32), device),
            0,
            _EFFORT,
            seed=seed,
            device=analysis.device,
            progress=analysis.progress,
        )
        x = torch.from_numpy(analysis.source.counts_of(rows[order], genes).toarray()).float()
        kept = x.sum(-1) > 0
        x, model, columns = x[kept].to(device), fitted.model, torch.arange(len(genes))
        n_counts = len(genes)
    return model, _Cells(x, n_counts, columns, first[order][kept], replicate[order][kept])


def _members(contrast: Contrast, seed: int) -> tuple[np.ndarray, Tensor, Tensor]:
    """Cells of both sides, whether they are on the first, and a number for the replicate of each."""
    generator, parts = seeded(seed), []
    for is_first, side in ((True, contrast.a), (False, contrast.b)):
        cells = side.cells[torch.randperm(len(side.cells), generator=generator)[:MOST_CELLS]]
        names = [str(int(cell)) for cell in cells]
        if side.samples:
            owner = {int(cell): name for name, own in side.samples.items() for cell in own}
            names = [owner[int(cell)] + ("" if contrast.paired else f"\0{is_first}") for cell in cells]
        parts.append((cells.numpy(), np.full(len(cells), is_first), names))
    cells, first, names = (np.concatenate(part) for part in zip(*parts, strict=True))
    return cells, torch.from_numpy(first), torch.from_numpy(np.unique(names, return_inverse=True)[1])


# ---------------------------------------------------------------------------------------------- without own counts
@dataclass(frozen=True, eq=False)
class _Masked:
    """A model of counts that sees some of its genes alone. Shapes: ``seen (genes,)`` columns."""

    model: Any
    seen: Tensor

    @property
    def prior(self) -> Any:
        """The prior of the model."""
        return self.model.prior

    def log_joint(self, x: Tensor, z: Tensor) -> Tensor:
        """Log p(x, z) of the genes that are seen, up to a constant. Shapes: ``-> (K, cells)``."""
        at = self.model.conditional(x, z)
        others = (part if part is None or part.shape[-1] == 1 else part[..., self.seen] for part in at[1:])
        parts = CountParameters(at.log_mean[..., self.seen], *others)
        return self.model.likelihood.moving(x[..., self.seen], parts) + self.prior.log_prob(z)


def _proportions(model: Any, cells: _Cells, block: Tensor) -> Tensor:
    """Proportions of every gene by states inferred from the genes of other blocks. Shapes: ``-> (cells, genes)``."""
    out = torch.empty(len(cells.x), len(block), dtype=torch.float64)
    for b in range(BLOCKS):
        hidden = torch.zeros(cells.n_counts, dtype=torch.bool)
        hidden[cells.genes[block == b]] = True
        masked = _Masked(model, (~hidden).nonzero().squeeze(-1).to(cells.x.device))
        start = cells.x.new_zeros(len(cells.x), model.prior.event_shape[-1])
        state = refine(masked, cells.x, start, n_steps=_STEPS).distribution.loc
        with torch.no_grad():
            decoded = model.expression(state.unsqueeze(0)).squeeze(0)[:, cells.genes[block == b].to(cells.x.device)]
        out[:, block == b] = decoded.double().cpu()
    return out.clamp_min(_LEAST_PROPORTION)


def _line(x: Tensor, y: Tensor, weight: Tensor) -> Tensor:
    """Intercept and slope of a weighted regression. Shapes: ``(genes,) -> (2,)``."""
    design = torch.stack([torch.ones_like(x), x], -1)
    weighted = design * weight.unsqueeze(-1)
    return torch.linalg.lstsq(weighted.mT @ design, (weighted.mT @ y).unsqueeze(-1)).solution.squeeze(-1)


def _influence(proportions: Tensor, cells: _Cells) -> Tensor:
    """How every replicate moves the change between the groups. Shapes: ``-> (replicates, genes)``."""
    moved = torch.empty_like(proportions)
    for sign, side in ((1, cells.first), (-1, ~cells.first)):
        mine, n = proportions[side], int(side.sum())
        moved[side] = sign * (mine / mine.mean(0) - 1) / (n * LOG2)
    n = int(cells.replicate.max()) + 1
    summed = moved.new_zeros(n, moved.shape[1]).index_add_(0, cells.replicate, moved)
    return summed * (n / max(1, n - 2)) ** 0.5


def _features(change: Tensor, moved: Tensor, weight: Tensor) -> Tensor:
    """One, the change, and the main directions of the influences apart from both. Shapes: ``-> (genes, p)``."""
    given = torch.stack([torch.ones_like(change), change], -1)
    root = weight.sqrt().unsqueeze(-1)
    basis = torch.linalg.qr(root * given).Q
    weighted = moved.mT * root
    apart = weighted - basis @ (basis.mT @ weighted)
    directions = torch.linalg.svd(apart, full_matrices=False)
    kept = directions.S[:_DIRECTIONS] > 1e-6 * directions.S[0]
    return torch.cat([given, directions.U[:, :_DIRECTIONS][:, kept] / root * root.mean()], -1)
