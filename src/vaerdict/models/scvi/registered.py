"""Cells of a fitted scvi-tools model as rows: the registered fields that it uses, side by side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from vaerdict.core import SettingError, ShapeError, floating

BATCH, LABELS, PANEL, CELL = "batch", "labels", "panel", "ind_x"
CATEGORICAL, CONTINUOUS, SIZE_FACTOR = "extra_categorical_covs", "extra_continuous_covs", "size_factor"
PROTEINS, REGIONS = "proteins", "atac"
_WHOLE = (BATCH, LABELS, PANEL, CATEGORICAL, CELL)


class Cells(NamedTuple):
    """Observations by registered field, and the terms of the likelihood that were computed from them.

    Shapes: ``fields (*batch, width)`` each; a term has the axes ``*batch`` first.
    """

    fields: Mapping[str, Tensor]
    terms: Mapping[str, Tensor] = {}

    @property
    def counts(self) -> Tensor:
        """The field ``X``. Shapes: ``(*batch, genes)``."""
        return self.fields["X"]


class Registered:
    """The user's model and its AnnData, from which cells are read. Copies of a wrapped model share it."""

    def __init__(self, model: Any, fields: Sequence[str]) -> None:
        self.model, manager = model, model.adata_manager
        present = [
            key for key in fields if key in manager.data_registry and (key != BATCH or model.summary_stats.n_batch > 1)
        ]
        self.columns = {key: _field(manager, key, [0]).shape[1] for key in present}

    def __deepcopy__(self, memo: Any) -> Registered:
        return self

    def rows(self, adata: Any, indices: Any) -> Tensor:
        """The fields of cells side by side. Shapes: ``-> (cells, columns)``."""
        if CELL in self.columns and adata is not None and adata is not self.model.adata:
            raise SettingError("modality_weights='cell' are those of the cells trained on; leave out adata.")
        manager = self._manager(adata)
        return torch.cat([_field(manager, key, indices) for key in self.columns], -1)

    def batches(self, adata: Any) -> np.ndarray:
        """The name of every cell's batch. Shapes: ``-> (cells,)``."""
        manager = self._manager(adata)
        names = [str(name) for name in manager.get_state_registry(BATCH).categorical_mapping]
        return np.array(names, dtype=object)[_field(manager, BATCH, None).long().flatten().numpy()]

    def _manager(self, adata: Any) -> Any:
        return self.model.get_anndata_manager(self.model._validate_anndata(adata), required=True)


def _field(manager: Any, key: str, indices: Any) -> Tensor:
    """A registered field of the cells at `indices`, or of all. Shapes: ``-> (cells, width)``."""
    rows = manager.get_from_registry(key)
    rows = rows.to_numpy() if hasattr(rows, "to_numpy") else rows
    rows = rows if indices is None else rows[np.asarray(indices)]
    rows = rows.toarray() if hasattr(rows, "toarray") else np.asarray(rows)
    return torch.from_numpy(rows.astype(np.float32)).reshape(len(rows), -1)


def split(x: Tensor, columns: Mapping[str, int]) -> Cells:
    """The fields of rows made by `Registered`; a model of one batch gets the batch index 0."""
    if x.shape[-1] != sum(columns.values()):
        expected = ", ".join(f"{width} of {key}" for key, width in columns.items())
        raise ShapeError(f"x has {x.shape[-1]} columns, the model takes {expected}; `observations()` makes such rows.")
    parts = floating(x).split(list(columns.values()), -1)
    fields = {key: t.long() if key in _WHOLE else t for key, t in zip(columns, parts, strict=True)}
    if BATCH not in fields:
        fields[BATCH] = torch.zeros_like(parts[0][..., :1], dtype=torch.long)
    return Cells(fields)


def flat(value: Tensor, lead: torch.Size) -> Tensor:
    """One row per particle and observation. Shapes: ``(*batch, c) -> (K * batch, c)``."""
    return value.expand(*lead, value.shape[-1]).reshape(-1, value.shape[-1])
