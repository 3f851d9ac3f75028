r"""Fold changes by a model: joint draws of every group's mean expression, and their uncertainty.

With samples as replicates, let :math:`y_{sg}` be the log2 mean expression of gene g in sample s. With the moderated
variance :math:`\tilde s_g^2` between samples (`vaerdict.de.moderation`),

.. math:: \mathrm{LFC}_g \sim \bar y_{ag} - \bar y_{bg} + \tilde s_g \sqrt{1/n_a + 1/n_b}\; t_{d_0 + d}.

Where every sample has cells in both groups, the differences within samples take the place of y.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from vaerdict.core import Progress, SettingError
from vaerdict.de.contrasts import Contrast, Side
from vaerdict.de.effects import Effect, Estimand
from vaerdict.de.model.averaging import Population, averages
from vaerdict.de.model.cell_weights import Bootstrap, Equal, OneCell, Weighting
from vaerdict.de.model.posterior import CellPosterior
from vaerdict.de.moderation import moderate
from vaerdict.engines import Engine

KHAT, ESS, LATENT = "\0k-hat", "\0ess", "\0latent"
"""Names of what is stored of the cells, beside the averages of populations, whose names the user gave."""

_EQUAL = "\0equal cells"  # follows the name of a population whose cells all have the same weight


# ----------------------------------------------------------------------------------------------------- averages
def populations(contrasts: Sequence[Contrast]) -> dict[str, Tensor]:
    """The cells of every population that is averaged."""
    return {k: v for c in contrasts for side in (c.a, c.b) for k, v in side.populations().items()}


def weighting(estimand: Estimand) -> Weighting:
    """How cells are weighted in a joint draw: a bootstrap of the group, or one random cell of a pair."""
    return OneCell() if estimand.pairs else Bootstrap()


def group_averages(
    posterior: CellPosterior,
    contrasts: Sequence[Contrast],
    estimand: Estimand,
    n_draws: int,
    *,
    seed: int,
    engine: Engine | None,
    progress: Progress,
) -> dict[str, Tensor]:
    """Averages of every population, its cells sampled and with equal weights; k-hat, ESS and latent of every cell."""
    cells = populations(contrasts)
    groups = {name: Population(c, weighting(estimand)) for name, c in cells.items()} | _equal(cells)
    result = averages(posterior, groups, n_draws, seed=seed, engine=engine, progress=progress)
    return {KHAT: result.khat, ESS: result.ess, LATENT: result.latent} | _single(result.expression)


def refit_averages(
    posterior: CellPosterior,
    contrasts: Sequence[Contrast],
    n_draws: int,
    *,
    seed: int,
    engine: Engine | None,
    progress: Progress,
) -> dict[str, Tensor]:
    """Averages of every population under a refit, all cells with equal weights."""
    groups = _equal(populations(contrasts))
    return _single(averages(posterior, groups, n_draws, seed=seed, engine=engine, progress=progress).expression)


def _equal(cells: Mapping[str, Tensor]) -> dict[str, Population]:
    return {name + _EQUAL: Population(c, Equal()) for name, c in cells.items()}


def _single(expression: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """In single precision, whether or not the averages went to disk in between."""
    return {name: values.float() for name, values in expression.items()}


# ------------------------------------------------------------------------------------------------- fold changes
def model_effect(
    contrast: Contrast,
    averages: Mapping[str, Tensor],
    refits: Sequence[Mapping[str, Tensor]],
    estimand: Estimand,
    *,
    seed: int,
) -> Effect:
    """Draws of the fold changes of a contrast from the posterior, its cells or samples, and the refits of the model."""
    ess = averages[ESS]
    ess = 1 / (1 / ess[~ess.isnan()]).mean().item()
    means = [_lfc(contrast, one, estimand, _EQUAL).mean(0) for one in refits]
    if contrast.a.samples:
        a, b = (sample_means(side, averages) for side in (contrast.a, contrast.b))
        full = replicate_effect(a, b, estimand, seed=seed).lfc
        fixed_cells = full[:1].expand_as(full)  # the error between samples is not one of particles
    else:
        full, fixed_cells = _lfc(contrast, averages, estimand), _lfc(contrast, averages, estimand, _EQUAL)
    n_effective = joint_effect(full, fixed_cells, ess, means).n_effective
    return Effect(full + refit_error(means, len(full), seed=seed) if means else full, n_effective)


def model_means(contrast: Contrast, averages: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Mean expression of both sides over draws and samples. Shapes: ``-> (genes,)`` each."""
    sides = (contrast.a, contrast.b)
    a, b = (torch.stack(list(sample_means(side, averages).values())).mean((0, 1)) for side in sides)
    return a, b


def _lfc(contrast: Contrast, averages: Mapping[str, Tensor], estimand: Estimand, kind: str = "") -> Tensor:
    a, b = (sample_means(side, averages, kind) for side in (contrast.a, contrast.b))
    return group_lfc(a, b, estimand)


def sample_means(side: Side, averages: Mapping[str, Tensor], kind: str = "") -> dict[str, Tensor]:
    """Averages of a side by sample, in double precision; of the whole side where there are no samples."""
    names = list(side.samples) or [side.name]
    return {s: averages[name + kind].double() for s, name in zip(names, side.populations(), strict=True)}


def group_lfc(a: Mapping[str, Tensor], b: Mapping[str, Tensor], estimand: Estimand) -> Tensor:
    """Fold change of group over group in every joint draw. Shapes: ``{sample: (draws, genes)} -> (draws, genes)``."""
    return estimand.lfc(_geometric_mean(a), _geometric_mean(b))


def _geometric_mean(side: Mapping[str, Tensor]) -> Tensor:
    """Geometric mean over samples of equal weight. Shapes: ``-> (draws, genes)``."""
    return torch.stack(list(side.values())).log2().mean(0).exp2()


def joint_effect(full: Tensor, fixed_cells: Tensor, ess: float, refits: Sequence[Tensor] = ()) -> Effect:
    r"""Joint draws that also vary with the model, and the number of independent draws that they are worth.

    Each of R `refits`, the mean fold changes under a model fitted to a bootstrap resample, adds to all S draws of
    `full` its deviation from the refits' mean, stretched by :math:`\sqrt{R/(R-1)}` so that the variance is right on
    average. Only the deviations count: a resample holds fewer distinct cells, so that its model is the poorer estimate.

    The variance has parts from the refits, :math:`V_r`, from the latents, :math:`V_z`, and the rest from the cells,
    :math:`V_c`, known by R refits, by `ess` particles and by S draws:

    .. math:: n = \frac{V_r + V_z + V_c}{V_r / R + V_z / \mathrm{ESS} + V_c / S}.

    Shapes: ``full (draws, genes)``, ``fixed_cells (draws, genes)`` with the cells' weights held equal, and ``(genes,)``
    for each of `refits`; the answer has ``draws * R``.
    """
    if len(refits) == 1:
        raise SettingError("a single refit shows no spread; give at least two, six are a fair number, or none.")
    n_draws, within = len(full), full.var(0)
    from_z = torch.minimum(fixed_cells.var(0), within)
    error = from_z / ess + (within - from_z) / n_draws
    total, lfc = within, full
    if refits:
        means = torch.stack(list(refits))
        shift = (means - means.mean(0)) * math.sqrt(len(means) / (len(means) - 1))
        lfc = (full + shift.unsqueeze(1)).flatten(0, 1)
        total, error = total + means.var(0), error + means.var(0) / len(means)
    return Effect(lfc, torch.where(error > 0, total / error, float(n_draws)))


# ------------------------------------------------------------------------------------------ samples, and refits
class StudentLfc(NamedTuple):
    """A fold change between groups of samples: Student's t. Shapes: ``mean`` and ``scale`` ``(genes,)``."""

    mean: Tensor
    scale: Tensor
    df: float


def sample_lfc(a: Mapping[str, Tensor], b: Mapping[str, Tensor], estimand: Estimand) -> StudentLfc:
    """The fold change between groups of samples, from joint draws of every sample's mean expression.

    The error is that between samples, or that of the sample means themselves where it is larger, as it is when the
    samples happen to agree better than their cells allow.

    Shapes: ``{sample: (draws, genes)}``.
    """
    full = group_lfc(a, b, estimand)
    shared = sorted(a.keys() & b.keys())
    paired = len(shared) == len(a) == len(b)
    y_a, y_b = (torch.stack([side[s].mean(0).log2() for s in sorted(side)]) for side in (a, b))
    if paired:
        moderated, share = moderate((y_a - y_b).var(0), len(shared) - 1), 1 / len(shared)
    else:
        df = len(y_a) + len(y_b) - 2
        moderated, share = moderate((_squares(y_a) + _squares(y_b)) / df, df), 1 / len(y_a) + 1 / len(y_b)
    return StudentLfc(full.mean(0), torch.maximum(moderated.variance * share, full.var(0)).sqrt(), moderated.df)


def replicate_effect(a: Mapping[str, Tensor], b: Mapping[str, Tensor], estimand: Estimand, *, seed: int) -> Effect:
    """As many draws of the fold change between groups of samples. Shapes: ``{sample: (draws, genes)}``."""
    lfc, n = sample_lfc(a, b, estimand), len(next(iter(a.values())))
    noise = np.random.default_rng([seed, 42]).standard_t(lfc.df, size=(n, len(lfc.mean)))
    draws = lfc.mean + lfc.scale * torch.from_numpy(noise).to(lfc.mean)
    return Effect(draws, torch.full_like(lfc.scale, float(n)))


def refit_error(means: Sequence[Tensor], n_draws: int, *, seed: int) -> Tensor:
    """Draws of the model's own error, from the mean fold changes of few refits.

    Used as they are, three refits would be three points: where they happen to lie on both sides of zero, no draw would
    be near it, and a gene without evidence would look changed for sure. Therefore variances are moderated across genes
    here too, and the draws are Student's t. Shapes: ``means (genes,)`` each ``-> (draws, genes)``.
    """
    moderated = moderate(torch.stack(list(means)).var(0), len(means) - 1)
    noise = np.random.default_rng([seed, 43]).standard_t(moderated.df, size=(n_draws, len(moderated.variance)))
    return moderated.variance.sqrt() * torch.from_numpy(noise).to(moderated.variance)


def _squares(y: Tensor) -> Tensor:
    return (y - y.mean(0)).square().sum(0)
