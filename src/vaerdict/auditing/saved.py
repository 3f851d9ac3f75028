"""The audit of a saved scvi-tools model on the cells of a file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from vaerdict.auditing.pipeline import audit
from vaerdict.auditing.quantities import default_quantities
from vaerdict.auditing.result import Audit
from vaerdict.core import Progress, check_count, silent
from vaerdict.de.data import column, open_data
from vaerdict.engines import Engine
from vaerdict.io import sha256
from vaerdict.models.scvi import ScviModel, from_scvi
from vaerdict.models.scvi.saved import load_scvi
from vaerdict.runs import RunFolder

N_CELLS = 10_000
"""Cells that are audited at most by default."""


def audit_saved(
    folder: str | Path,
    data: str | Path,
    *,
    groupby: str | None = None,
    n_cells: int = N_CELLS,
    seed: int = 0,
    device: str = "cpu",
    engine: Engine | None = None,
    progress: Progress = silent,
    out: str | Path | None = None,
    force: bool = False,
) -> Audit:
    """Audit the encoder of a model that scvi-tools' ``model.save()`` wrote.

    Parameters
    ----------
    folder
        The folder of the model. Its file is read without running code from it.
    data
        An .h5ad file with the registered fields of the model.
    groupby
        Column of obs by which results are listed.
    n_cells
        Number of cells, chosen at random where the file has more.
    seed, device, engine, progress
        Seed of everything random, where to compute, where blocks of cells run, and a callback.
    out, force
        The folder that `Audit.report` is going to write to, and whether to replace the run that it holds.
    """
    run_folder = RunFolder.of(out, "audit", force=force)
    backed = open_data(data)
    labels = None if groupby is None else column(backed, groupby, role="groupby")
    adata = backed.to_memory()
    backed.file.close()
    model = from_scvi(load_scvi(folder, adata)).to(device)
    if out is not None:
        settings = {"groupby": groupby, "n_cells": n_cells, "seed": seed}
        run_folder.claim({"settings": settings, "data": sha256(data), "model": sha256(Path(folder) / "model.pt")})
    cells = np.arange(len(adata))
    if len(cells) > check_count(n_cells, name="n_cells"):
        cells = np.sort(np.random.default_rng(seed).choice(len(cells), n_cells, replace=False))
    x: Any = model.observations(indices=cells).to(device)
    return audit(
        model,
        x,
        quantities=default_quantities(model, *_features(model, adata)),
        groups=None if labels is None else labels[cells].tolist(),
        names=adata.obs_names[cells].tolist(),
        seed=seed,
        engine=engine,
        title=f"{type(model._source.model).__name__} in {Path(folder).name}",
        noun="cells",
        progress=progress,
    )


def _features(model: ScviModel, adata: Any) -> tuple[list[str], list[str]]:
    """The names of genes and of regions; a model of both has the genes first."""
    names, n_genes = adata.var_names.astype(str).tolist(), getattr(model.module, "n_input_genes", None)
    return (names, names) if n_genes is None else (names[:n_genes], names[n_genes:])
