"""What `differential_expression` returns, and the files it writes: each whole or not at all."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from vaerdict import csv_files
from vaerdict.core import DataError, SettingError, VaerdictError
from vaerdict.csv_files import write_table
from vaerdict.de import cells as shown_cells
from vaerdict.de import plots, scanpy_export
from vaerdict.de.data import listed
from vaerdict.io import manifest, replacing, write_json
from vaerdict.notebook import counted, html, short
from vaerdict.optional import isolated, require
from vaerdict.runs import prepare_save

if TYPE_CHECKING:
    import pandas
    from matplotlib.axes import Axes

LATENT = "X_vaerdict"
"""Where the AnnData that is saved holds the posterior means of the cells' latents."""

NOT_TESTED = "not_tested.csv"
"""The file of the genes that were not tested."""

_CELLS = "latent.h5ad"
_SHOWN, _GENES = 5, 8  # contrasts, and genes of each direction, that are shown
_ROWS = "rows"  # where that AnnData says which rows of the data its cells were


@dataclass(frozen=True, eq=False, repr=False)
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
    shown
        Makes what the page shows of cells; they are read when the result is saved.
    """

    table: pandas.DataFrame
    results: dict[str, Any]
    not_tested: pandas.DataFrame
    obs: pandas.DataFrame
    cells: np.ndarray
    latent: np.ndarray | None
    data_sha256: str
    shown: Callable[[], shown_cells.ShownCells | None] = lambda: None

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
        shown = shown_cells.ShownCells.load(out / shown_cells.FILE)
        return cls(table, results, read_table(out, NOT_TESTED), *cells, sha, lambda: shown)

    def __repr__(self) -> str:
        contrasts = self.results["contrasts"]
        lines = [f"DEResult: {counted(len(contrasts), 'contrast')}, {self.results['genes_tested']}"]
        lines += [f"  {short(c['name'])}: {_called(c)}" for c in contrasts[:_SHOWN]]
        lines += [f"  and {len(contrasts) - _SHOWN:,} more"] if len(contrasts) > _SHOWN else []
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        rows = []
        for c in self.results["contrasts"]:
            genes = self.discoveries(c["name"])
            up, down = genes[genes["lfc_mean"] > 0]["gene"], genes[genes["lfc_mean"] <= 0]["gene"]
            named = {
                f"higher in {side}": ", ".join(map(short, part[:_GENES]))
                for side, part in (("the first", up), ("the second", down))
            }
            rows.append({"contrast": short(c["name"]), "tested": c["n_tested"], "called": c["n_discoveries"], **named})
        messages = self.verdict["messages"]
        title = f"Differential expression: {counted(len(rows), 'contrast')}"
        return html(title, messages[:1], rows, [*messages[1:], *self.warnings])

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

    def plot_volcano(self, contrast: str | None = None, *, n_labels: int = 10, ax: Axes | None = None) -> Axes:
        """Fold changes against q-values of a contrast, the first by default; genes called thanks to a prior are hollow.

        The first `n_labels` genes are named. Returns the matplotlib axes.
        """
        chosen = self.contrast(contrast)
        return plots.volcano(self._rows(chosen["name"]), chosen, n_labels, ax)

    def plot_gene(self, gene: str, adata: Any, contrast: str | None = None, *, ax: Axes | None = None) -> Axes:
        """Expression of a gene in the cells of both groups, with the means of samples where these are the replicates.

        `adata` are the data that were compared. Returns the matplotlib axes.
        """
        chosen = self.contrast(contrast)
        row = plots.row_of(self._rows(chosen["name"]), gene, chosen["name"])
        return plots.gene(row, chosen, self.results["settings"], adata, ax)

    def with_truth(self, truth: Mapping[str, Mapping[str, float]]) -> DEResult:
        """The same with the true log2 fold changes of simulated data: a number for each contrast and gene.

        Its page then opens with the truth beside the answer.
        """
        lfc = {name: {str(gene): float(value) for gene, value in genes.items()} for name, genes in truth.items()}
        unknown = sorted(lfc.keys() - {c["name"] for c in self.results["contrasts"]})
        if unknown:
            raise SettingError(f"no contrast {', '.join(unknown)} was compared; give the truth of those that were.")
        return replace(self, results=self.results | {"truth": lfc})

    def contrast(self, name: str | None = None) -> dict[str, Any]:
        """What results.json says of a contrast; of the first one without a name."""
        contrasts = self.results["contrasts"]
        chosen = [c for c in contrasts if name is None or c["name"] == name]
        if not chosen:
            raise SettingError(
                f"no contrast {name!r} was compared; there are {listed([c['name'] for c in contrasts])}."
            )
        return chosen[0]

    def _rows(self, contrast: str) -> pandas.DataFrame:
        rows: Any = self.table[self.table["contrast"] == contrast]
        return rows

    def to_scanpy(
        self, adata: Any, key: str = "rank_genes_groups", *, contrast: str | None = None, copy: bool = False
    ) -> Any:
        """Fill ``adata.uns[key]`` as scanpy's ``rank_genes_groups`` does, so that its plots work.

        Genes are ranked by certainty: scores are -log10 of the q-values with the sign of the LFC. ``pvals_adj`` are the
        q-values, ``pvals`` are 1 - prob_de. A gene that was not tested has a score and an LFC of 0 and ``pvals`` of 1.

        Parameters
        ----------
        adata
            The data that were compared, or any with the same genes and groups.
        key
            The entry of ``adata.uns``, and the column of obs by which plots group cells.
        contrast
            The contrast, whose groups are both ranked; by default all contrasts, the first group of each.
        copy
            Whether a copy of the cells compared is filled and returned. With ``values_to_plot`` scanpy draws no cells
            of groups that were not compared.

        Returns
        -------
        The copy, or None.

        Notes
        -----
        Latents of a model are in ``adata.obsm["X_vaerdict"]``, ready for ``sc.pp.neighbors(adata,
        use_rep="X_vaerdict")`` and ``sc.tl.umap``, if all cells of adata were compared.
        """
        settings, chosen = self.results["settings"], self.results["contrasts"]
        chosen = chosen if contrast is None else [self.contrast(contrast)]
        groups = scanpy_export.groups_of(adata, settings, chosen)
        if copy:
            adata, groups = adata[groups != None].copy(), groups[groups != None]  # noqa: E711
        columns = scanpy_export.ranking(self.table, chosen, adata)
        names, groupby = columns["names"].dtype.names, settings["groupby"]
        if not {c["group_a"] for c in chosen} <= set(names):  # the entries are contrasts
            if copy:
                raise SettingError("contrasts share their first group; name one of them with contrast=.")
        else:
            groupby, adata.obs[key] = key, scanpy_export.categories(groups, names)
        references = {c["group_b"] for c in chosen}
        params = {
            "groupby": groupby,
            "reference": references.pop() if len(references) == 1 else "rest",
            "method": "vaerdict",
            "use_raw": False,
            "layer": settings["layer"],
        }
        adata.uns[key] = {"params": params, **columns}
        if self.latent is not None and adata.obs_names.isin(self.obs.index).all():
            adata.obsm[LATENT] = self.latent[self.obs.index.get_indexer(adata.obs_names)]
        return adata if copy else None

    def save(self, path: str | Path) -> Path:
        """Write de.csv (de.parquet where pandas can), not_tested.csv, results.json, manifest.json and the cells."""
        settings, seconds = self.results["settings"], self.results["seconds"]
        out = prepare_save(path, "de", settings, self.data_sha256)
        write_table(out / "de.csv", self.table)
        write_table(out / NOT_TESTED, self.not_tested)
        write_json(out / "manifest.json", manifest(settings, seconds, data_sha256=self.data_sha256))
        missing = [*_parquet(self.table, out / "de.parquet"), *self._save_latent(out / _CELLS)]
        missing += self._save_shown(out / shown_cells.FILE)
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

    def _save_shown(self, path: Path) -> list[str]:
        """Write the cells that the page shows, or say why not: the data may be gone since they were compared."""
        path.unlink(missing_ok=True)
        try:
            shown = self.shown()
        except (OSError, VaerdictError) as error:
            return [f"{path.name} was not written, so that the page shows no cells ({error})."]
        if shown is not None:
            shown.save(path)
        return []

    def _write_latent(self, file: Path) -> None:
        anndata = require("anndata", "bio")
        with isolated(0):
            anndata.AnnData(obs=self.obs, obsm={LATENT: self.latent}, uns={_ROWS: self.cells}).write_h5ad(file)


def _called(contrast: Mapping[str, Any]) -> str:
    """The genes called of a contrast, in words."""
    n, up = contrast["n_discoveries"], contrast["n_up"]
    return (
        f"{counted(n, 'gene')} called at an FDR of {contrast['level']:g}, {up:,} higher in "
        f"{short(contrast['group_a'])}, {n - up:,} in {short(contrast['group_b'])}"
    )


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
