"""What `differential_expression` returns, and the files it writes: each whole or not at all."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from vaerdict.core import DataError, SettingError
from vaerdict.de.draws import read_draws, write_draws
from vaerdict.io import manifest, replacing, write_json
from vaerdict.optional import isolated, require

if TYPE_CHECKING:
    import pandas

LATENT = "X_vaerdict"
"""Where the AnnData that is saved holds the posterior means of the cells' latents."""

DRAWS = "draws.npz"
"""The file of the draws of fold changes."""

_CELLS = "latent.h5ad"
_ROWS = "rows"  # where that AnnData says which rows of the data its cells were


@dataclass(frozen=True, eq=False)
class DEResult:
    """Genes of every contrast with calibrated probabilities, and the evidence behind them.

    `table` has a row for each contrast and gene, with the columns of `vaerdict.de.COLUMNS`; `results` is everything
    else that was found, as results.json holds it. `cells` are the rows of the data that were compared, `obs` the labels
    used of them, and `latent` the posterior means of their latents, ``(cells, d)``. `draws` are draws of the log2 fold
    changes, gene by gene, ``(contrasts, draws, genes)`` in the order of `table`, fewer than were made where there are
    very many.
    """

    table: pandas.DataFrame
    results: dict[str, Any]
    obs: pandas.DataFrame = field(repr=False)
    cells: np.ndarray = field(repr=False)
    latent: np.ndarray = field(repr=False)
    data_sha256: str = field(repr=False)
    draws: np.ndarray = field(repr=False)

    @classmethod
    def load(cls, path: str | Path) -> DEResult:
        """What `save`, or the command `vaerdict de`, wrote to a folder; no cells where latent.h5ad was not written."""
        out = Path(path)
        table = read_table(out)
        try:
            results, noted = (json.loads((out / name).read_text()) for name in ("results.json", "manifest.json"))
            cells = _read_latent(out / _CELLS, written=not any(w.startswith(_CELLS) for w in results["warnings"]))
            sha = noted["data_sha256"]
        except (OSError, ValueError, KeyError) as error:
            raise DataError(f"{out} does not hold a whole run ({error}); run `vaerdict de` again.") from error
        return cls(table, results, *cells, sha, read_draws(out / DRAWS))

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

    def with_truth(self, truth: Mapping[str, Mapping[str, float]]) -> DEResult:
        """The same with true log2 fold changes beside, of simulated data: a number for each contrast and gene.

        Its page then opens with the truth beside the answer.
        """
        known = {name: {str(gene): float(lfc) for gene, lfc in genes.items()} for name, genes in truth.items()}
        unknown = sorted(known.keys() - {c["name"] for c in self.results["contrasts"]})
        if unknown:
            raise SettingError(f"no contrast {', '.join(unknown)} was compared; give the truth of those that were.")
        return replace(self, results=self.results | {"truth": known})

    def to_arviz(self) -> Any:
        """An arviz ``InferenceData``: draws of `lfc` by contrast and gene, and how well each group was sampled.

        The draws are equally weighted and independent, in one chain; `importance_diagnostics` holds the median k-hat,
        the effective share of draws and the share of cells in order, by group.
        """
        arviz, xarray = require("arviz", "arviz"), require("xarray", "arviz")
        contrasts, genes = self._axes()
        data = arviz.from_dict(
            posterior={"lfc": self.draws.swapaxes(0, 1)[None]},
            coords={"contrast": contrasts, "gene": genes},
            dims={"lfc": ["contrast", "gene"]},
        )
        groups = self.results["diagnostics"]
        columns = {key: ("group", [_or_nan(g[key]) for g in groups]) for key in ("khat", "ess", "share_ok")}
        sampled = xarray.Dataset(columns, coords={"group": [g["group"] for g in groups]})
        data.add_groups(importance_diagnostics=sampled)
        return data

    def _axes(self) -> tuple[list[str], list[str]]:
        """The names of contrasts and genes, in the order of the draws."""
        contrasts = [c["name"] for c in self.results["contrasts"]]
        return contrasts, self.table["gene"].head(self.draws.shape[-1]).tolist()

    def to_scanpy(self, adata: Any, key: str = "rank_genes_groups") -> None:
        """Fill ``adata.uns[key]`` as scanpy's ``rank_genes_groups`` does, so that its plots work.

        Genes are ranked by LFC times its probability; ``pvals_adj`` are the q-values, ``pvals`` are 1 - prob_de.
        """
        contrasts, settings = self.results["contrasts"], self.results["settings"]
        firsts = [c["group_a"] for c in contrasts]
        names = firsts if len(set(firsts)) == len(firsts) else [c["name"] for c in contrasts]
        references = {c["group_b"] for c in contrasts}
        columns: dict[str, list[np.ndarray]] = {}
        gene = "gene_id" if "gene_id" in self.table else "gene"
        for contrast in contrasts:
            rows: Any = self.table[self.table["contrast"] == contrast["name"]]
            score = (rows["lfc_mean"] * rows["prob_de"]).to_numpy()
            rows, order = rows.iloc[np.argsort(-score, kind="stable")], np.argsort(-score, kind="stable")
            found = {
                "names": rows[gene].to_numpy(dtype=object),
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
        adata.uns[key] = {"params": params, **self._seen(names, gene)} | {
            name: np.rec.fromarrays(values, dtype=[(n, v.dtype) for n, v in zip(names, values, strict=True)])
            for name, values in columns.items()
        }

    def _seen(self, names: list[str], gene: str) -> dict[str, pandas.DataFrame]:
        """Shares of cells in which genes are seen, as scanpy has them; none in tables that were written without."""
        pandas, wanted = require("pandas", "bio"), {"pts": "seen_a", "pts_rest": "seen_b"}
        parts = [rows.set_index(gene) for _, rows in self.table.groupby("contrast", sort=False)]
        return {
            key: pandas.DataFrame({name: rows[side] for name, rows in zip(names, parts, strict=True)})
            for key, side in wanted.items()
            if side in self.table
        }

    def save(self, path: str | Path) -> Path:
        """Write de.csv (and de.parquet where pandas can), results.json, latent.h5ad, draws.npz and manifest.json."""
        out = Path(path)
        out.mkdir(parents=True, exist_ok=True)
        _whole(out / "de.csv", lambda file: self.table.to_csv(file, index=False))
        _whole(out / DRAWS, lambda file: write_draws(file, self.draws, *self._axes()))
        settings, seconds = self.results["settings"], self.results["seconds"]
        write_json(out / "manifest.json", manifest(settings, seconds, data_sha256=self.data_sha256))
        write_json(out / "results.json", self.results)
        missing = [*_parquet(self.table, out / "de.parquet"), *self._latent(out / _CELLS)]
        if missing:
            write_json(out / "results.json", self.results | {"warnings": [*self.warnings, *missing]})
        return out

    def report(self, path: str | Path) -> Path:
        """Write everything to a folder with one self-contained page, and return the page."""
        out = self.save(path)
        # the page stands on a layer above this one, so that it is asked for by name
        return import_module("vaerdict.report").render(out)

    def _latent(self, path: Path) -> list[str]:
        """Write the cells, or say why not: labels may hold what such a file cannot, and the genes are worth more."""
        try:
            _whole(path, self._write_latent)
        except Exception as error:  # h5py and anndata raise many kinds
            path.unlink(missing_ok=True)
            return [f"{_CELLS} was not written ({type(error).__name__}: {str(error).splitlines()[0]})."]
        return []

    def _write_latent(self, file: Path) -> None:
        anndata = require("anndata", "bio")
        with isolated(0):
            anndata.AnnData(obs=self.obs, obsm={LATENT: self.latent}, uns={_ROWS: self.cells}).write_h5ad(file)


def _read_latent(path: Path, *, written: bool) -> tuple[pandas.DataFrame, np.ndarray, np.ndarray]:
    """Labels, rows and latents of the cells, none of which there are where they could not be written."""
    if not written:
        return require("pandas", "bio").DataFrame(), np.zeros(0, dtype=int), np.zeros((0, 0), dtype=np.float32)
    with isolated(0):
        latent = require("anndata", "bio").read_h5ad(path)
    return latent.obs, np.asarray(latent.uns[_ROWS]), np.asarray(latent.obsm[LATENT])


def _or_nan(value: float | None) -> float:
    return np.nan if value is None else value


def _whole(path: Path, write: Callable[[Path], Any]) -> None:
    """Write a file whole or not at all."""
    with replacing(path) as partial:
        write(partial)


def _parquet(table: pandas.DataFrame, path: Path) -> list[str]:
    """Write the table, or say why not."""
    try:
        _whole(path, lambda file: table.to_parquet(file, index=False))
    except ImportError:
        return ["de.parquet was not written: it needs pyarrow (pip install vaerdict[bio])."]
    return []


def read_table(path: str | Path) -> pandas.DataFrame:
    """The table of genes of a run directory."""
    file = Path(path) / "de.csv"
    if not file.is_file():
        raise SettingError(f"{path} holds no de.csv; name a folder that `vaerdict de` wrote.")
    options = {"keep_default_na": False, "na_values": [""], "float_precision": "round_trip"}  # a gene may be called NA
    names = dict.fromkeys(("contrast", "gene", "gene_id"), str)  # which may look like numbers
    return require("pandas", "bio").read_csv(file, dtype=names, **options)
