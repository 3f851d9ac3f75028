"""What `differential_expression` returns, and the files it writes: each whole or not at all."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any
from zipfile import BadZipFile

import numpy as np

from vaerdict.core import DataError, SettingError
from vaerdict.de.effects import Effect
from vaerdict.io import manifest, replacing, write_json
from vaerdict.optional import isolated, require

if TYPE_CHECKING:
    import pandas

LATENT = "X_vaerdict"
"""Where the AnnData that is saved holds the posterior means of the cells' latents."""

DRAWS = "draws.npz"
"""The file of the draws of fold changes."""

MOST_DRAWS, MOST_NUMBERS = 500, 2**25
"""Draws that are kept at most of each gene, and numbers over all contrasts: 128 MB in single precision."""

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
    obs, cells
        Labels and rows of the cells compared; empty for a run without a model that was loaded from its folder.
    latent
        Posterior means of the latents, ``(cells, d)``; None where no model was used.
    draws
        Draws of the log2 fold changes, gene by gene, ``(contrasts, draws, genes)`` in the order of `table`; fewer than
        were made where there are very many.
    """

    table: pandas.DataFrame
    results: dict[str, Any]
    obs: pandas.DataFrame = field(repr=False)
    cells: np.ndarray = field(repr=False)
    latent: np.ndarray | None = field(repr=False)
    data_sha256: str = field(repr=False)
    draws: np.ndarray = field(repr=False)

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
        return cls(table, results, *cells, sha, _read_draws(out / DRAWS))

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

    def to_arviz(self) -> Any:
        """An arviz ``InferenceData``: draws of `lfc` by contrast and gene, equally weighted, in one chain.

        Where a model was used, `importance_diagnostics` holds the median k-hat, the effective share of draws and the
        share of reliable cells by group.
        """
        arviz, xarray = require("arviz", "arviz"), require("xarray", "arviz")
        contrasts, genes = self._axes()
        inference_data = arviz.from_dict(
            posterior={"lfc": self.draws.swapaxes(0, 1)[None]},
            coords={"contrast": contrasts, "gene": genes},
            dims={"lfc": ["contrast", "gene"]},
        )
        if self.results["model"] is not None:
            groups = self.results["model"]["diagnostics"]
            columns = {key: ("group", [_or_nan(g[key]) for g in groups]) for key in ("khat", "ess", "share_ok")}
            diagnostics = xarray.Dataset(columns, coords={"group": [g["group"] for g in groups]})
            inference_data.add_groups(importance_diagnostics=diagnostics)
        return inference_data

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
            order = np.argsort(-score, kind="stable")
            rows = rows.iloc[order]
            ranked = {
                "names": rows[gene].to_numpy(dtype=object),
                "scores": score[order].astype(np.float32),
                "logfoldchanges": rows["lfc_mean"].to_numpy(np.float32),
                "pvals": 1 - rows["prob_de"].to_numpy(),
                "pvals_adj": rows["q_value"].to_numpy(),
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
        """Write de.csv (and de.parquet where pandas can), results.json, draws.npz, manifest.json and latent.h5ad."""
        out = Path(path)
        _write(out / "de.csv", lambda file: self.table.to_csv(file, index=False))
        _write(out / DRAWS, self._write_draws)
        settings, seconds = self.results["settings"], self.results["seconds"]
        write_json(out / "manifest.json", manifest(settings, seconds, data_sha256=self.data_sha256))
        write_json(out / "results.json", self.results)
        missing = [*_parquet(self.table, out / "de.parquet"), *self._save_latent(out / _CELLS)]
        if missing:
            write_json(out / "results.json", self.results | {"warnings": [*self.warnings, *missing]})
        return out

    def report(self, path: str | Path) -> Path:
        """Write everything to a folder with one self-contained page, and return the page."""
        from vaerdict.de.page.document import from_run
        from vaerdict.report import write_page

        out = self.save(path)
        return write_page(from_run(out), out)

    def _write_draws(self, path: Path) -> None:
        """Write the draws and the names of their axes as plain numpy arrays."""
        contrasts, genes = (np.array(names, dtype=str) for names in self._axes())
        with path.open("wb") as file:  # numpy would change the ending of a name
            np.savez(file, lfc=self.draws, contrast=contrasts, gene=genes)

    def _save_latent(self, path: Path) -> list[str]:
        """Write the cells, or say why not: labels may hold what such a file cannot."""
        if self.latent is None:
            path.unlink(missing_ok=True)
            return []
        try:
            _write(path, self._write_latent)
        except Exception as error:  # h5py and anndata raise many kinds
            path.unlink(missing_ok=True)
            return [f"{_CELLS} was not written ({type(error).__name__}: {str(error).splitlines()[0]})."]
        return []

    def _write_latent(self, file: Path) -> None:
        anndata = require("anndata", "bio")
        with isolated(0):
            anndata.AnnData(obs=self.obs, obsm={LATENT: self.latent}, uns={_ROWS: self.cells}).write_h5ad(file)


def kept_draws(effects: Sequence[Effect], most: int = MOST_NUMBERS) -> np.ndarray:
    """The first draws of every contrast in single precision, as many as `most` numbers allow but one at least.

    Draws are exchangeable. Genes and contrasts are drawn independently, except on the scale of single cells, where a
    draw of all genes is of one pair of cells. Shapes: ``-> (contrasts, draws, genes)``.
    """
    draws, genes = effects[0].lfc.shape
    n = min(draws, MOST_DRAWS, max(1, most // (len(effects) * genes)))
    return np.stack([effect.lfc[:n].float().cpu().numpy() for effect in effects])


def _read_draws(path: Path) -> np.ndarray:
    """The draws of a run. Shapes: ``-> (contrasts, draws, genes)``."""
    try:
        with path.open("rb") as raw, np.load(raw, allow_pickle=False) as file:
            return file["lfc"]
    except (OSError, ValueError, KeyError, EOFError, BadZipFile) as error:
        raise DataError(f"{path} is missing or damaged ({error}); run `vaerdict de` again.") from error


def _no_cells() -> tuple[pandas.DataFrame, np.ndarray, None]:
    return require("pandas", "bio").DataFrame(), np.zeros(0, dtype=int), None


def _read_latent(path: Path) -> tuple[pandas.DataFrame, np.ndarray, np.ndarray]:
    """Labels, rows and latents of the cells."""
    with isolated(0):
        latent = require("anndata", "bio").read_h5ad(path)
    return latent.obs, np.asarray(latent.uns[_ROWS]), np.asarray(latent.obsm[LATENT])


def _or_nan(value: float | None) -> float:
    return np.nan if value is None else value


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


def read_table(path: str | Path) -> pandas.DataFrame:
    """The table of genes of a run directory."""
    file = Path(path) / "de.csv"
    if not file.is_file():
        raise SettingError(f"{path} holds no de.csv; name a folder that `vaerdict de` wrote.")
    options = {"keep_default_na": False, "na_values": [""], "float_precision": "round_trip"}  # a gene may be called NA
    texts = dict.fromkeys(("contrast", "group_a", "group_b", "gene", "gene_id"), str)  # which may look like numbers
    return require("pandas", "bio").read_csv(file, dtype=texts, **options)
