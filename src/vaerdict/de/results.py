"""What `differential_expression` returns, and the files it writes: each whole or not at all."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from vaerdict.core import SettingError
from vaerdict.files import manifest, write_json
from vaerdict.foreign import contained, needed

if TYPE_CHECKING:
    import pandas

LATENT = "X_vaerdict"
"""Where the AnnData that is saved holds the posterior means of the cells' latents."""


@dataclass(frozen=True, eq=False)
class DEResult:
    """Genes of every contrast with calibrated probabilities, and the evidence behind them.

    `table` has a row for each contrast and gene, with the columns of `vaerdict.de.COLUMNS`; `results` is everything
    else that was found, as results.json holds it. `cells` are the rows of the data that were compared or trained on and
    `latent` the posterior means of their latents, ``(cells, d)``.
    """

    table: pandas.DataFrame
    results: dict[str, Any]
    obs: pandas.DataFrame = field(repr=False)
    cells: np.ndarray = field(repr=False)
    latent: np.ndarray = field(repr=False)
    data_sha256: str = field(repr=False)

    @property
    def verdict(self) -> dict[str, Any]:
        """Whether to trust the table: of the inference, of the model, what the replicates are, and in words."""
        return self.results["verdict"]

    @property
    def warnings(self) -> list[str]:
        """What a reader should know of the data and of what was left out."""
        return self.results["warnings"]

    def discoveries(self, contrast: str | None = None) -> pandas.DataFrame:
        """The genes that are called, the surest and strongest first."""
        found: Any = self.table[self.table["is_de"]]
        found = found if contrast is None else found[found["contrast"] == contrast]
        order = np.lexsort((-found["lfc_mean"].abs().to_numpy(), found["q_value"].to_numpy()))
        return found.iloc[order]

    def to_scanpy(self, adata: Any, key: str = "rank_genes_groups") -> None:
        """Fill ``adata.uns[key]`` as scanpy's ``rank_genes_groups`` does, so that its plots work.

        Genes are ranked by LFC times its probability; ``pvals_adj`` are the q-values, ``pvals`` are 1 - prob_de.
        """
        contrasts, settings = self.results["contrasts"], self.results["settings"]
        firsts = [c["group_a"] for c in contrasts]
        names = firsts if len(set(firsts)) == len(firsts) else [c["name"] for c in contrasts]
        references = {c["group_b"] for c in contrasts}
        columns: dict[str, list[np.ndarray]] = {}
        for contrast in contrasts:
            rows: Any = self.table[self.table["contrast"] == contrast["name"]]
            score = (rows["lfc_mean"] * rows["prob_de"]).to_numpy()
            rows, order = rows.iloc[np.argsort(-score, kind="stable")], np.argsort(-score, kind="stable")
            found = {
                "names": rows["gene"].to_numpy(dtype=object),
                "scores": score[order].astype(np.float32),
                "logfoldchanges": rows["lfc_mean"].to_numpy(np.float32),
                "pvals": 1 - rows["prob_de"].to_numpy(),
                "pvals_adj": rows["q_value"].to_numpy(),
            }
            for name, values in found.items():
                columns.setdefault(name, []).append(values)
        params = {
            "groupby": settings["groupby"],
            "reference": references.pop() if len(references) == 1 else "rest",
            "method": "vaerdict",
            "use_raw": False,
            "layer": settings["layer"],
        }
        adata.uns[key] = {"params": params} | {
            name: np.rec.fromarrays(values, dtype=[(n, v.dtype) for n, v in zip(names, values, strict=True)])
            for name, values in columns.items()
        }

    def save(self, path: str | Path) -> Path:
        """Write de.csv (and de.parquet where pandas can), results.json, latent.h5ad and manifest.json to a folder."""
        out = Path(path)
        out.mkdir(parents=True, exist_ok=True)
        _whole(out / "de.csv", lambda file: self.table.to_csv(file, index=False))
        results = dict(self.results)
        if not _parquet(self.table, out / "de.parquet"):
            results["warnings"] = [
                *self.warnings,
                "de.parquet was not written: it needs pyarrow (pip install pyarrow).",
            ]
        _whole(out / "latent.h5ad", self._write_latent)
        write_json(out / "results.json", results)
        noted = manifest(results["settings"], results["seconds"])
        write_json(out / "manifest.json", noted | {"data_sha256": self.data_sha256})
        return out

    def report(self, path: str | Path) -> Path:
        """Write everything to a folder with one self-contained page, and return the page."""
        out = self.save(path)
        # the page stands on a layer above this one, so that it is asked for by name
        return import_module("vaerdict.report").render(out)

    def _write_latent(self, file: Path) -> None:
        anndata = needed("anndata", "bio")
        with contained(0):
            anndata.AnnData(obs=self.obs, obsm={LATENT: self.latent}).write_h5ad(file)


def _whole(path: Path, write: Callable[[Path], Any]) -> None:
    """Write a file beside its place, then move it there in one stroke."""
    partial = path.with_name(f"partial-{path.name}")
    write(partial)
    os.replace(partial, path)


def _parquet(table: pandas.DataFrame, path: Path) -> bool:
    try:
        _whole(path, lambda file: table.to_parquet(file, index=False))
    except ImportError:
        return False
    return True


def read_table(path: str | Path) -> pandas.DataFrame:
    """The table of genes of a run directory."""
    file = Path(path) / "de.csv"
    if not file.is_file():
        raise SettingError(f"{path} holds no de.csv; name a folder that `vaerdict de` wrote.")
    return needed("pandas", "bio").read_csv(file, keep_default_na=False, na_values=[""])
