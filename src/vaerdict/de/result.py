"""What `differential_expression` returns, and the files it writes: each whole or not at all."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from vaerdict import csv_files
from vaerdict.core import DataError, SettingError
from vaerdict.csv_files import write_table
from vaerdict.io import manifest, replacing, write_json
from vaerdict.optional import isolated, require
from vaerdict.runs import prepare_save

if TYPE_CHECKING:
    import pandas

LATENT = "X_vaerdict"
"""Where the AnnData that is saved holds the posterior means of the cells' latents."""

NOT_TESTED = "not_tested.csv"
"""The file of the genes that were not tested."""

_LEAST_Q = 1e-300  # a smaller one has the score of this one
_CELLS = "latent.h5ad"
_ROWS = "rows"  # where that AnnData says which rows of the data its cells were


@dataclass(frozen=True, eq=False)
class DEResult:
    """Genes of every contrast with calibrated probabilities, and the evidence behind them.

    Attributes
    ----------
    table
        A row for each contrast and gene, with the columns of `vaerdict.de.columns`.
    results
        Everything else, as results.json holds it.
    not_tested
        The genes of each contrast that were not tested, and why.
    obs, cells
        Labels and rows of the cells compared; empty for a run without a model that was loaded from its folder.
    latent
        Posterior means of the latents, ``(cells, d)``; None where no model was used.
    """

    table: pandas.DataFrame
    results: dict[str, Any]
    not_tested: pandas.DataFrame = field(repr=False)
    obs: pandas.DataFrame = field(repr=False)
    cells: np.ndarray = field(repr=False)
    latent: np.ndarray | None = field(repr=False)
    data_sha256: str = field(repr=False)

    @classmethod
    def load(cls, path: str | Path) -> DEResult:
        """Read what `save`, or the command `vaerdict de`, wrote to a folder."""
        out = Path(path)
        table = read_table(out)
        try:
            results, noted = (json.loads((out / name).read_text()) for name in ("results.json", "manifest.json"))
            unwritten = results["model"] is None or any(w.startswith(_CELLS) for w in results["warnings"])
            cells = _no_cells() if unwritten else _read_latent(out / _CELLS)
            sha = noted["data_sha256"]
        except (OSError, ValueError, KeyError) as error:
            raise DataError(f"{out} does not hold a whole run ({error}); run `vaerdict de` again.") from error
        return cls(table, results, read_table(out, NOT_TESTED), *cells, sha)

    @property
    def verdict(self) -> dict[str, Any]:
        """Whether to trust the table: who decided, what the replicates are, and messages."""
        return self.results["verdict"]

    @property
    def warnings(self) -> list[str]:
        """What a reader should know of the data and of what was left out."""
        return self.results["warnings"]

    def discoveries(self, contrast: str | None = None) -> pandas.DataFrame:
        """The genes that are called, the surest and strongest first."""
        called: Any = self.table[self.table["is_de"]]
        called = called if contrast is None else called[called["contrast"] == contrast]
        order = np.lexsort((-called["lfc_mean"].abs().to_numpy(), called["q_value"].to_numpy()))
        return called.iloc[order]

    def with_truth(self, truth: Mapping[str, Mapping[str, float]]) -> DEResult:
        """The same with the true log2 fold changes of simulated data: a number for each contrast and gene.

        Its page then opens with the truth beside the answer.
        """
        lfc = {name: {str(gene): float(value) for gene, value in genes.items()} for name, genes in truth.items()}
        unknown = sorted(lfc.keys() - {c["name"] for c in self.results["contrasts"]})
        if unknown:
            raise SettingError(f"no contrast {', '.join(unknown)} was compared; give the truth of those that were.")
        return replace(self, results=self.results | {"truth": lfc})

    def to_scanpy(self, adata: Any, key: str = "rank_genes_groups") -> None:
        """Fill ``adata.uns[key]`` as scanpy's ``rank_genes_groups`` does, so that its plots work.

        Genes are ranked by certainty: scores are -log10 of the q-values with the sign of the LFC. ``pvals_adj`` are the
        q-values, ``pvals`` are 1 - prob_de. A gene that was tested in other contrasts only has a score of 0, an LFC of
        NaN and ``pvals`` of 1.
        """
        contrasts, settings = self.results["contrasts"], self.results["settings"]
        firsts = [c["group_a"] for c in contrasts]
        names = firsts if len(set(firsts)) == len(firsts) else [c["name"] for c in contrasts]
        references = {c["group_b"] for c in contrasts}
        columns: dict[str, list[np.ndarray]] = {}
        gene = "gene_id" if "gene_id" in self.table else "gene"
        every = self.table[gene].unique()
        for contrast in contrasts:
            rows: Any = self.table[self.table["contrast"] == contrast["name"]].set_index(gene).reindex(every)
            q, lfc = rows["q_value"].fillna(1.0).to_numpy(), rows["lfc_mean"].fillna(0.0).to_numpy()
            score = -np.sign(lfc) * np.log10(q.clip(_LEAST_Q, 1.0))
            order = np.lexsort((-lfc, -score))
            rows = rows.iloc[order]
            ranked = {
                "names": rows.index.to_numpy(dtype=object),
                "scores": score[order].astype(np.float32),
                "logfoldchanges": rows["lfc_mean"].to_numpy(np.float32),
                "pvals": 1 - rows["prob_de"].fillna(0.0).to_numpy(),
                "pvals_adj": q[order],
            }
            for name, values in ranked.items():
                columns.setdefault(name, []).append(values)
        params = {
            "groupby": settings["groupby"],
            "reference": references.pop() if len(references) == 1 else "rest",
            "method": "vaerdict",
            "use_raw": False,
            "layer": settings["layer"],
        }
        adata.uns[key] = {"params": params, **self._shares_seen(names, gene)} | {
            name: np.rec.fromarrays(values, dtype=[(n, v.dtype) for n, v in zip(names, values, strict=True)])
            for name, values in columns.items()
        }

    def _shares_seen(self, names: list[str], gene: str) -> dict[str, pandas.DataFrame]:
        """Shares of cells in which genes are seen, as scanpy has them."""
        pandas = require("pandas", "bio")
        parts = [rows.set_index(gene) for _, rows in self.table.groupby("contrast", sort=False)]
        return {
            key: pandas.DataFrame({name: rows[side] for name, rows in zip(names, parts, strict=True)})
            for key, side in {"pts": "seen_a", "pts_rest": "seen_b"}.items()
        }

    def save(self, path: str | Path) -> Path:
        """Write de.csv (de.parquet where pandas can), not_tested.csv, results.json, manifest.json and latent.h5ad."""
        settings, seconds = self.results["settings"], self.results["seconds"]
        out = prepare_save(path, "de", settings, self.data_sha256)
        write_table(out / "de.csv", self.table)
        write_table(out / NOT_TESTED, self.not_tested)
        write_json(out / "manifest.json", manifest(settings, seconds, data_sha256=self.data_sha256))
        missing = [*_parquet(self.table, out / "de.parquet"), *self._save_latent(out / _CELLS)]
        write_json(out / "results.json", self.results | {"warnings": [*self.warnings, *missing]})  # the run is finished
        return out

    def report(self, path: str | Path) -> Path:
        """Write everything to a folder with one self-contained page, and return the page."""
        from vaerdict.de.page.document import from_run
        from vaerdict.report import write_page

        out = self.save(path)
        return write_page(from_run(out), out)

    def _save_latent(self, path: Path) -> list[str]:
        """Write the cells, or say why not: labels may hold what such a file cannot."""
        if self.latent is None:
            path.unlink(missing_ok=True)
            return []
        try:
            _write(path, self._write_latent)
        except Exception as error:  # h5py and anndata raise many kinds
            if isinstance(error, OSError) and error.errno:
                raise
            path.unlink(missing_ok=True)
            return [f"{_CELLS} was not written ({type(error).__name__}: {str(error).splitlines()[0]})."]
        return []

    def _write_latent(self, file: Path) -> None:
        anndata = require("anndata", "bio")
        with isolated(0):
            anndata.AnnData(obs=self.obs, obsm={LATENT: self.latent}, uns={_ROWS: self.cells}).write_h5ad(file)


def _no_cells() -> tuple[pandas.DataFrame, np.ndarray, None]:
    return require("pandas", "bio").DataFrame(), np.zeros(0, dtype=int), None


def _read_latent(path: Path) -> tuple[pandas.DataFrame, np.ndarray, np.ndarray]:
    """Labels, rows and latents of the cells."""
    with isolated(0):
        latent = require("anndata", "bio").read_h5ad(path)
    return latent.obs, np.asarray(latent.uns[_ROWS]), np.asarray(latent.obsm[LATENT])


def _write(path: Path, write: Callable[[Path], Any]) -> None:
    with replacing(path) as partial:
        write(partial)


def _parquet(table: pandas.DataFrame, path: Path) -> list[str]:
    """Write the table, or say why not."""
    try:
        _write(path, lambda file: table.to_parquet(file, index=False))
    except ImportError:
        return ["de.parquet was not written: it needs pyarrow (pip install vaerdict[bio])."]
    return []


def read_table(path: str | Path, name: str = "de.csv") -> pandas.DataFrame:
    """The table of genes of a run directory, or that of the genes that were not tested."""
    file = Path(path) / name
    if not file.is_file():
        raise SettingError(f"{path} holds no {name}; name a folder that `vaerdict de` wrote.")
    return csv_files.read_table(file, ("contrast", "group_a", "group_b", "gene", "gene_id", "reason"))
