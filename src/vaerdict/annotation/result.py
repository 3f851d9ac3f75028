"""What `annotate` returns, and the files it writes: each whole or not at all."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from vaerdict.annotation.columns import CELLS
from vaerdict.core import DataError, SettingError
from vaerdict.csv_files import read_table, write_table
from vaerdict.diagnostics import Verdict
from vaerdict.io import manifest, replacing, write_json
from vaerdict.optional import isolated, require
from vaerdict.runs import prepare_save

if TYPE_CHECKING:
    import pandas

TABLE, PARQUET, ANNOTATED = "cells.csv", "cells.parquet", "annotated.h5ad"
"""The table of cells, twice, and the query with its columns in obs."""

MAP, PREFIX = "X_vaerdict", "vaerdict_"
"""Where annotated.h5ad holds principal components of the cells, and how its columns of obs begin."""


@dataclass(frozen=True, eq=False)
class Annotation:
    """A call for every cell of the query, with the evidence for it.

    Attributes
    ----------
    table
        A row for each cell, with the columns of `vaerdict.annotation.columns`.
    results
        Everything else, as results.json holds it.
    features
        Principal components of the query cells, NaN for cells without counts, ``(cells, d)``.
    """

    table: pandas.DataFrame
    results: dict[str, Any]
    features: np.ndarray = field(repr=False)
    data_sha256: str = field(repr=False)
    source: Any = field(default=None, repr=False)

    @classmethod
    def load(cls, path: str | Path) -> Annotation:
        """Read what `save`, or the command `vaerdict annotate`, wrote to a folder."""
        from vaerdict.report.records import read_run

        out = Path(path)
        results, noted = read_run(out)
        if "data_sha256" not in (noted or {}):
            raise DataError(f"{out} does not hold a whole run (no manifest.json); run `vaerdict annotate` again.")
        return cls(read_cells(out), results, read_features(out), (noted or {})["data_sha256"])

    @property
    def verdict(self) -> Verdict:
        """OK where the false discovery rate holds for all cells, REFUSE where it does for none, else CAUTION."""
        return Verdict[self.results["verdict"]["verdict"]]

    @property
    def messages(self) -> list[str]:
        """What was found, and what can be relied on, in sentences."""
        return self.results["verdict"]["messages"]

    def novel(self) -> pandas.DataFrame:
        """The cells called novel, the surest first."""
        rows: Any = self.table[self.table["call"] == "novel"]
        return rows.sort_values("q_novel", kind="stable")

    def __str__(self) -> str:
        return "\n".join(self.messages)

    def to_obs(self, adata: Any) -> None:
        """Add the columns to ``adata.obs``, with the prefix ``vaerdict_``, and the components to ``adata.obsm``."""
        if list(map(str, adata.obs_names)) != self.table["cell"].tolist():
            raise DataError("these are not the cells that were annotated: names or their order differ.")
        for name, values in self._obs().items():
            adata.obs[name] = values
        adata.obsm[MAP] = self.features

    def save(self, path: str | Path) -> Path:
        """Write cells.csv, cells.parquet, annotated.h5ad, results.json and manifest.json to a folder."""
        settings, seconds = self.results["settings"], self.results["seconds"]
        out = prepare_save(path, "annotate", settings, self.data_sha256)
        out.mkdir(parents=True, exist_ok=True)
        write_table(out / TABLE, self.table)
        _write(out / PARQUET, lambda file: self.table.to_parquet(file, index=False))
        if self.source is not None:
            _write(out / ANNOTATED, self._write_annotated)
        write_json(out / "manifest.json", manifest(settings, seconds, data_sha256=self.data_sha256))
        write_json(out / "results.json", self.results)
        return out

    def report(self, path: str | Path) -> Path:
        """Write everything to a folder with one self-contained page, and return the page."""
        from vaerdict.annotation.page import from_run
        from vaerdict.report import write_page

        out = self.save(path)
        return write_page(from_run(out), out)

    def _obs(self) -> dict[str, Any]:
        pandas = require("pandas", "bio")
        texts = ("call", "label", "unit", "verdict")
        columns = {c.name: self.table[c.name].to_numpy() for c in CELLS if c.name != "cell"}
        return {
            f"{PREFIX}{name}": pandas.Categorical(values) if name in texts else values
            for name, values in columns.items()
        }

    def _write_annotated(self, file: Path) -> None:
        """A copy of the query with further columns of obs; a file is copied without reading its counts."""
        with isolated(0):
            backed = getattr(self.source, "isbacked", False)
            if not backed or self.source.is_view:
                copy = self.source.to_memory() if backed else self.source.copy()
                self.to_obs(copy)
                try:
                    copy.write_h5ad(file)
                except (TypeError, ValueError, NotImplementedError) as error:  # a column of mixed kinds, for example
                    reason = " ".join(" ".join([str(error), *getattr(error, "__notes__", [])]).split())
                    raise DataError(
                        f"the query cannot be written to {ANNOTATED} ({reason}); convert or remove what is named there."
                    ) from error
                return
            write_elem = require("anndata.io", "bio").write_elem
            shutil.copyfile(self.source.filename, file)
            obs = self.source.obs.copy()
            for name, values in self._obs().items():
                obs[name] = values
            with require("h5py", "bio").File(file, "r+") as stored:
                write_elem(stored, "obs", obs)
                write_elem(stored.require_group("obsm"), MAP, self.features)


def _write(path: Path, write: Callable[[Path], Any]) -> None:
    with replacing(path) as partial:
        write(partial)


def read_cells(path: str | Path) -> pandas.DataFrame:
    """The table of cells of a run directory."""
    file = Path(path) / TABLE
    if not file.is_file():
        raise SettingError(f"{path} holds no {TABLE}; name a folder that `vaerdict annotate` wrote.")
    return read_table(file, ("cell", "call", "label", "unit", "verdict"))


def read_features(path: str | Path) -> np.ndarray:
    """The principal components of the cells of a run directory. Shapes: ``-> (cells, d)``."""
    try:
        with require("h5py", "bio").File(Path(path) / ANNOTATED) as stored:
            return stored["obsm"][MAP][:]
    except (OSError, KeyError) as error:
        raise DataError(f"{path} does not hold a whole run ({error}); run `vaerdict annotate` again.") from error
