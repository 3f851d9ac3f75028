"""Undone changes: of two groups that differ, some genes are made to agree while the genes around them still differ.

A prior that predicts a gene's fold change from other genes predicts one for these genes too. Whoever calls them has
followed the prediction against their counts.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch

from vaerdict.de import analysis
from vaerdict.de.calibration.halves import kept_shares, thinned
from vaerdict.de.contrasts import Labels
from vaerdict.de.data import column
from vaerdict.de.options import DEOptions
from vaerdict.de.shrinkage import centre_of
from vaerdict.tasks import Task

UNDONE_SHARE = 0.1
"""Share of the clearly changed genes whose change is undone."""

CLEAR = 2.0
"""A change is clear where the estimate by all cells lies this many standard errors beyond delta."""

# options of the analysis that the likelihood of the counts depends on
_KEPT = ("within", "batch_key", "covariates", "delta", "min_cells")


def undo_changes(cells: Any, task: Task, rng: np.random.Generator) -> tuple[Any, dict[str | None, np.ndarray]]:
    r"""Counts in which a random `UNDONE_SHARE` of the genes that clearly differ between two groups do not.

    The fold change of a gene is the mode :math:`\hat\lambda_g` of its count likelihood by all cells of both groups,
    about the centre c of all genes. The counts of the side with the larger rate are thinned by
    :math:`2^{-|\hat\lambda_g - c|}`, so that the expected rates of all cells agree on the centred scale. Where types
    are compared one by one, each has undone genes of its own.

    Parameters
    ----------
    cells
        AnnData of the counts, of the `groups` compared and of others.
    task
        Names the two `groups` and holds the `options` of the analysis.
    rng
        Chooses the genes and the molecules that remain.

    Returns
    -------
    counts, undone
        The counts of all cells ``(cells, genes)``, and for each type the columns of the undone genes.
    """
    group = column(cells, task["groupby"], role="groupby")
    side = np.select([group == name for name in task["groups"]], [0, 1], -1)
    within = None if task["options"]["within"] is None else column(cells, task["options"]["within"], role="within")
    counts, undone = cells.X, dict[str | None, np.ndarray]()
    for kind, change in _clear_changes(cells[side >= 0], task).items():
        genes = np.flatnonzero(change)
        genes = rng.choice(genes, math.ceil(UNDONE_SHARE * len(genes)), replace=False)
        taken_back = np.zeros(len(change))
        taken_back[genes] = -change[genes]
        inside = side if kind is None or within is None else np.where(within == kind, side, -1)
        counts, undone[kind] = thinned(counts, inside, kept_shares(taken_back), rng), np.sort(genes)
    return counts, undone


def _clear_changes(cells: Any, task: Task) -> dict[str | None, np.ndarray]:
    """For each type the fold changes of the genes that clearly differ, zero for others. Shapes: ``(genes,)``."""
    kept = {name: task["options"][name] for name in _KEPT}
    options = DEOptions(groupby=task["groupby"], pairs=(tuple(task["groups"]),), prior="none", **kept)
    within = None if options.within is None else column(cells, options.within, role="within")
    labels = Labels(
        options.groupby, column(cells, options.groupby, role="groupby"), within, batch=_batches(cells, task)
    )
    read, changes = analysis.read(cells, options, labels, None), {}
    for contrast in read.contrasts:
        genes = read.genes(contrast).expressed
        likelihood = read.likelihood(contrast, genes)
        lfc = likelihood.mode - centre_of(likelihood.mode, likelihood.error)
        clear = lfc.abs() - CLEAR * likelihood.error > options.delta
        change = np.zeros(cells.n_vars)
        change[genes] = torch.where(clear, lfc, 0.0).numpy()
        changes[contrast.within] = change
    return changes


def _batches(cells: Any, task: Task) -> np.ndarray | None:
    """The batches within which counts are compared: those named, or those of a given model. Shapes: ``-> (cells,)``."""
    key = task["options"]["batch_key"]
    if key is not None or task["model"] is None:
        return None if key is None else column(cells, key, role="batch_key")
    from vaerdict.de.model.stage import as_scvi

    cells = cells.copy()
    if task["model_layer"] is not None:
        cells.layers[task["model_layer"]] = cells.X
    return as_scvi(task["model"], cells).batches(cells)
