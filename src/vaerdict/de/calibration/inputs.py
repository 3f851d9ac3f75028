"""The cells and the model that the tasks of a calibration read, stored where every worker finds them."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from scipy import sparse

from vaerdict.core import SettingError
from vaerdict.de import data
from vaerdict.de.analysis import MOST_OTHER, OTHER_CELLS
from vaerdict.de.contrasts import FEWEST_CELLS
from vaerdict.de.options import CalibrateOptions, DEOptions
from vaerdict.io import replacing, sha256, write_text
from vaerdict.models.scvi import Scvi
from vaerdict.optional import isolated, require

Labels = Mapping[str, np.ndarray]
"""Columns of obs as text, None where missing. Shapes: ``(cells,)`` each."""

SPLITTING = 63
"""The part of a seed by which cells are chosen and samples are split."""


class Cells(NamedTuple):
    """Cells of the groups to split and of others: counts and labels as an AnnData, and a hash of them.

    `model_layer` is the layer that a fitted model reads counts from.
    """

    adata: Any
    sha256: str
    warnings: list[str]
    model_layer: str | None

    def store(self, folder: Path) -> Path:
        """Write the AnnData to a folder, once."""
        names = [*self.adata.obs.columns, *self.adata.var.columns, *self.adata.var_names]
        names += self.adata.var.astype(str).to_numpy().ravel().tolist()
        digest = hashlib.sha256("\0".join([self.sha256, *map(str, names)]).encode()).hexdigest()
        path = folder / f"cells-{digest[:8]}.h5ad"
        if not path.exists():
            with isolated(0), replacing(path) as partial_file:
                self.adata.write_h5ad(partial_file)
        return path


def labels(adata: Any, how: CalibrateOptions, analysis: DEOptions) -> Labels:
    """The columns of obs that the options name."""
    roles = ("groupby", "within", "sample_key", "batch_key", "pair_by")
    keys = {role: getattr(analysis, role) for role in roles} | {"balance": how.balance}
    return {key: data.column(adata, key, role=role) for role, key in keys.items() if key is not None}


def groups_to_split(values: np.ndarray, groups: Sequence[str] | None, column: str) -> tuple[str, ...]:
    """The groups named, or the largest; each must have enough cells for two halves. Shapes: ``values (cells,)``."""
    present = [value for value in values if value is not None]
    if not present:
        raise SettingError(f"column {column!r} holds no label; name another with groupby.")
    names, sizes = np.unique(present, return_counts=True)
    groups = [groups] if isinstance(groups, str) else [] if groups is None else list(groups)
    named = groups or [names[sizes.argmax()]]
    chosen = dict.fromkeys(data.check_group(name, values, role="groups", column=column) for name in named)
    for group in chosen:
        n = int(sizes[names == group][0])
        if n < 2 * FEWEST_CELLS:
            raise SettingError(
                f"group {group!r} has {n} cells; two halves need at least {2 * FEWEST_CELLS}, and some hundred to tell "
                "anything: name a larger group."
            )
    return tuple(chosen)


def read_cells(adata: Any, labels: Labels, groups: Sequence[str], analysis: DEOptions, model: Path | None) -> Cells:
    """Read the cells of the groups and those others that the analysis itself would read.

    A model needs all its genes and the columns of obs that it was registered with, as they are.
    """
    pandas = require("pandas", "bio")
    rows = _rows(labels[analysis.groupby], groups, analysis)
    if model is None:
        warnings: list[str] = []
        names = data.gene_names(adata, analysis.gene_symbols, warnings)
        data.columns_of(analysis.keep_genes, names)
        matrix: Any = sparse.vstack(list(data.count_blocks(adata, analysis.layer, rows)), format="csr")
        var = pandas.DataFrame(index=names if analysis.gene_symbols is None else adata.var_names.astype(str))
        symbols = {} if analysis.gene_symbols is None else {analysis.gene_symbols: names}
        obs = _obs(adata, labels, rows)
        obs = obs.assign(**{key: adata.obs[key].to_numpy()[rows] for key in analysis.covariates})
        return _cells(matrix.astype(np.float32), obs, var.assign(**symbols), warnings)
    from vaerdict.models.scvi.saved import load_scvi

    adata = adata.to_memory() if getattr(adata, "isbacked", False) else adata
    setup = load_scvi(model, adata).adata_manager.registry["setup_args"]
    keys = [value for key, value in setup.items() if key.endswith(("_key", "_keys")) and value is not None]
    keys = [key for value in keys for key in ([value] if isinstance(value, str) else value)]
    layer, obs = setup.get("layer"), _obs(adata, labels, rows)
    obs = obs.assign(**{key: adata.obs[key].to_numpy()[rows] for key in keys})
    matrix = sparse.csr_matrix((adata.X if layer is None else adata.layers[layer])[rows])
    var = adata.var[[] if analysis.gene_symbols is None else [analysis.gene_symbols]]
    return _cells(matrix, obs, var, [], layer, sha256(model / "model.pt"))


def _rows(values: np.ndarray, groups: Sequence[str], analysis: DEOptions) -> np.ndarray:
    """The rows of the cells to split and of others at random: those that a prior is learned from."""
    members = np.array([value in groups for value in values])
    others = np.random.default_rng([analysis.seed, SPLITTING]).permutation(np.flatnonzero(~members))
    most = OTHER_CELLS if analysis.prior == "none" else MOST_OTHER
    return np.sort(np.concatenate([np.flatnonzero(members), others[:most]]))


def _obs(adata: Any, labels: Labels, rows: np.ndarray) -> Any:
    pandas = require("pandas", "bio")
    columns = {key: pandas.Categorical(values[rows]) for key, values in labels.items()}
    return pandas.DataFrame(columns, index=adata.obs_names[rows].astype(str))


def _cells(matrix: Any, obs: Any, var: Any, warnings: list[str], layer: str | None = None, model: str = "") -> Cells:
    sha = hashlib.sha256("\0".join([*obs.astype(str).to_numpy().ravel(), model]).encode())
    for array in (matrix.data, matrix.indices, matrix.indptr):
        sha.update(np.ascontiguousarray(array).tobytes())
    adata = require("anndata", "bio").AnnData(matrix, obs=obs, var=var)
    return Cells(adata, sha.hexdigest(), list(warnings), layer)


def model_folder(model: Any, folder: Path, temporary: Path) -> Path | None:
    """The folder of the model; one that was given in memory is found below `folder`, or else saved to `temporary`."""
    if model is None or isinstance(model, (str, Path)):
        return None if model is None else Path(model).resolve()
    from vaerdict.training.checkpoint import digest

    scvi = model._source.model if isinstance(model, Scvi) else model
    name = f"model-{digest(scvi.module.state_dict().values())[:8]}"
    if (folder / name / "model.pt").exists():
        return (folder / name).resolve()
    with isolated(0):
        scvi.save(str(temporary / name), overwrite=True)
    return temporary / name


def keep_model(saved: Path | None, folder: Path, temporary: Path) -> Path | None:
    """Where every worker finds the model: a copy below `folder` of one that was saved to `temporary`."""
    if saved is None or not saved.is_relative_to(temporary):
        return saved
    return write_text(folder / saved.name / "model.pt", (saved / "model.pt").read_bytes()).parent.resolve()
