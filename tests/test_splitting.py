from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from scipy import sparse, stats

import vaerdict as vd
from checks import assert_mean
from outline import outline
from vaerdict.core import DataError, SettingError
from vaerdict.de.page.document import from_run
from vaerdict.de.splitting import (
    CLUSTERING,
    RECORD,
    TESTING,
    _factorial_moments,
    _sampling_variance,
    cluster_warnings,
    estimated_dispersions,
    split_counts,
)

ad = pytest.importorskip("anndata")
pd = pytest.importorskip("pandas")


class Simulated:
    """Negative binomial counts with known means and dispersions, of cells of one kind or of two."""

    def __init__(self, n: int = 1000, genes: int = 300, *, kinds: int = 1, seed: int = 0) -> None:
        rng = np.random.default_rng(seed)
        self.dispersion = 0.3 * rng.lognormal(0, 0.5, genes)
        self.kind = rng.integers(0, kinds, n)
        self.changed = np.arange(genes) < genes // 5
        change = np.zeros((2, genes))
        change[1, self.changed] = rng.choice([-1, 1], self.changed.sum())
        level = rng.uniform(1, 6, genes) * np.exp(change[self.kind])
        self.mean = rng.lognormal(0, 0.4, (n, 1)) * level
        noise = rng.gamma(1 / self.dispersion, self.dispersion, (n, genes))
        counts = sparse.csr_matrix(rng.poisson(self.mean * noise).astype(np.float32))
        self.adata = anndata(counts)

    def parts(self) -> list[np.ndarray]:
        """Both parts less their means."""
        layers = self.adata.layers
        return [layers[name].toarray() - self.mean / 2 for name in (CLUSTERING, TESTING)]

    def correlations(self, cells: np.ndarray, genes: np.ndarray) -> torch.Tensor:
        """The correlation of the parts of each gene, given the means."""
        a, b = (part[cells][:, genes] for part in self.parts())
        return torch.from_numpy((a * b).sum(0) / np.sqrt((a**2).sum(0) * (b**2).sum(0)))


def anndata(counts: Any) -> Any:
    n, genes = counts.shape
    obs, var = (pd.DataFrame(index=[f"{letter}{i}" for i in range(m)]) for letter, m in (("c", n), ("g", genes)))
    return ad.AnnData(counts, obs=obs, var=var)


def small() -> Any:
    adata = Simulated(120, 30, seed=5).adata
    adata.obs["group"] = ["A", "B"] * 60
    return adata


@pytest.fixture
def split() -> Any:
    adata = small()
    split_counts(adata)
    return adata


# ------------------------------------------------------------------------------------------------------------ parts
FORMS = {
    "rows": lambda adata, tmp_path: adata,
    "columns": lambda adata, tmp_path: anndata(adata.X.tocsc()),
    "dense": lambda adata, tmp_path: anndata(adata.X.toarray()),
    "whole numbers": lambda adata, tmp_path: anndata(adata.X.astype(np.int64)),
    "backed": lambda adata, tmp_path: written(adata, tmp_path, backed="r"),
}


def written(adata: Any, tmp_path: Any, **how: Any) -> Any:
    adata.write_h5ad(tmp_path / "cells.h5ad")
    return ad.read_h5ad(tmp_path / "cells.h5ad", **how)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dispersion", [None, 0.0])
def test_parts_add_up_and_are_the_same_in_every_form(form, dispersion, tmp_path):
    adata, expected = FORMS[form](Simulated(300, 20).adata, tmp_path), Simulated(300, 20).adata
    for cells in (adata, expected):
        split_counts(cells, share=0.3, dispersion=dispersion, seed=4)
    first, second = (adata.layers[name] for name in (CLUSTERING, TESTING))
    for part in (first, second):
        assert (part.format, part.dtype, part.has_canonical_format) == ("csr", np.float32, True)
        assert part.data.min() > 0
        assert (part.data == np.round(part.data)).all()
    assert abs(first + second - expected.X).max() == 0
    assert abs(first - expected.layers[CLUSTERING]).max() == 0
    assert adata.uns[RECORD] == expected.uns[RECORD]
    assert adata.uns[RECORD]["method"] == ("Poisson" if dispersion == 0 else "negative binomial")


def test_the_share_and_the_seed_are_used():
    adata, other = Simulated().adata, Simulated().adata
    split_counts(adata, share=0.3, dispersion=0.0, seed=1)
    split_counts(other, share=0.3, dispersion=0.0, seed=2)
    assert abs(adata.layers[TESTING] - other.layers[TESTING]).max() > 0
    total = int(adata.X.sum())
    assert stats.binomtest(int(adata.layers[CLUSTERING].sum()), total, 0.3).pvalue > 1e-6


def test_a_layer_is_split():
    adata = small()
    adata.layers["raw"], adata.X = adata.X, sparse.csr_matrix(adata.shape, dtype=np.float32)
    split_counts(adata, layer="raw")
    assert abs(adata.layers[CLUSTERING] + adata.layers[TESTING] - adata.layers["raw"]).max() == 0


# ------------------------------------------------------------------------------------------------------ independence
def test_parts_are_uncorrelated_with_the_true_dispersion():
    """False-alarm rate 1e-6; binomial thinning of the same counts fails."""
    cells = Simulated()
    scale = torch.from_numpy(cells.mean + cells.dispersion * cells.mean**2)

    def products() -> torch.Tensor:
        a, b = cells.parts()
        return torch.from_numpy(a * b) / scale

    split_counts(cells.adata, dispersion=cells.dispersion)
    assert_mean(products(), 0.0, rate=1e-6)
    split_counts(cells.adata, dispersion=0.0)
    with pytest.raises(AssertionError, match="standard errors"):
        assert_mean(products(), 0.0, rate=1e-6)


BIAS = 0.01
"""Correlation that the error of estimated dispersions may leave; Poisson counts assumed, it is about 0.3."""


def assert_nearly_uncorrelated(correlation: torch.Tensor) -> None:
    """The mean correlation is within `BIAS` of none, at a false-alarm rate of 1e-6."""
    assert_mean(correlation - correlation.mean().clamp(-BIAS, BIAS), 0.0, rate=1e-6)


def test_parts_are_uncorrelated_with_estimated_dispersions():
    cells = Simulated()
    every = np.ones(1000, dtype=bool), np.ones(300, dtype=bool)
    split_counts(cells.adata)
    assert_nearly_uncorrelated(cells.correlations(*every))
    split_counts(cells.adata, dispersion=0.0)
    with pytest.raises(AssertionError, match="standard errors"):
        assert_nearly_uncorrelated(cells.correlations(*every))


def test_differences_between_kinds_are_no_dispersion():
    """Parts of genes that differ between kinds are uncorrelated within a kind; one dispersion of all cells fails."""
    cells = Simulated(kinds=2)
    inside, changed = cells.kind == 0, cells.changed
    split_counts(cells.adata)
    assert_nearly_uncorrelated(cells.correlations(inside, changed))
    split_counts(cells.adata, dispersion=estimated_dispersions(cells.adata.X, cells_together=1000))
    with pytest.raises(AssertionError, match="standard errors"):
        assert_nearly_uncorrelated(cells.correlations(inside, changed))


def test_dispersions_are_estimated():
    """Their error, of a standard deviation of about 0.1 in logarithms, leaves no bias of 10 %."""
    cells = Simulated()
    error = np.log(estimated_dispersions(cells.adata.X) / cells.dispersion)
    assert abs(np.median(error)) < 0.1
    assert error.std() < 0.3 < np.log(cells.dispersion).std()


@pytest.mark.parametrize(("mean", "dispersion"), [(0.5, 0.0), (2.0, 0.3), (8.0, 0.8)])
def test_the_sampling_variance_is_that_of_simulated_counts(mean, dispersion):
    """Of 1,000 genes of one mean and dispersion; their variance has a relative error of about 6 %, four of it pass."""
    rng, n, genes = np.random.default_rng(1), 400, 1000
    noise = rng.gamma(1 / dispersion, dispersion, (n, genes)) if dispersion else 1.0
    counts = sparse.csr_matrix(rng.poisson(mean * noise, (n, genes)).astype(np.float64))
    depth = np.full(n, 1e6)  # known
    pairs, squares = _factorial_moments(counts, depth, np.zeros(n, dtype=int))
    ratio, expected = pairs / squares - 1, _sampling_variance(np.array([dispersion]), np.array([mean]), n)
    assert abs(ratio.mean() - dispersion) < 5 * np.sqrt(expected / genes)
    assert ratio.var() == pytest.approx(expected[0], rel=0.25)


def test_poisson_counts_have_next_to_no_dispersion():
    rng = np.random.default_rng(0)
    counts = sparse.csr_matrix(rng.poisson(rng.uniform(1, 6, 200), (800, 200)).astype(np.float64))
    assert np.median(estimated_dispersions(counts)) < 0.01


@pytest.mark.parametrize("genes", [1, 2, 3])
def test_few_cells_and_genes_can_be_split(genes):
    adata = anndata(sparse.csr_matrix(np.array([[0, 3, 1], [0, 0, 0], [0, 2, 5]], dtype=np.float32)[:, :genes]))
    split_counts(adata)
    assert abs(adata.layers[CLUSTERING] + adata.layers[TESTING] - adata.X).max() == 0


# ---------------------------------------------------------------------------------------------------------- the test
def test_a_gene_is_not_called_between_groups_found_by_it():
    """Cells are grouped by each of ten genes. False alarm if split counts call three or more: 1 %, at 5 % per gene."""
    cells = Simulated(300, 60, seed=3).adata
    options = {"delta": 0.3, "n_top_genes": None}

    def called(name: str | None, gene: int, **more: Any) -> bool:
        counts = np.asarray((cells.X if name is None else cells.layers[name])[:, gene].todense()).ravel()
        cells.obs["found"] = np.where(counts > np.median(counts), "high", "low")
        table = vd.differential_expression(cells, "found", "high", "low", **options, **more).table
        return bool(table.set_index("gene").loc[f"g{gene}", "is_de"])

    assert all(called(None, gene) for gene in range(10))
    split_counts(cells)
    assert sum(called(CLUSTERING, gene, clustered=True) for gene in range(10)) < 3
    split_counts(cells, dispersion=0.0)
    assert sum(called(CLUSTERING, gene, clustered=True) for gene in range(10)) >= 3  # the check can fail


def test_clustered_tests_the_other_part(split):
    result = vd.differential_expression(split, "group", "A", "B", clustered=True)
    same = vd.differential_expression(split, "group", "A", "B", layer=TESTING)
    pd.testing.assert_frame_equal(result.table, same.table)


def test_calibration_splits_the_part_that_is_tested(split):
    options = {"splits": 2, "spikes": 0}
    result = vd.calibrate(split, "group", ["A"], clustered=True, **options)
    same = vd.calibrate(split, "group", ["A"], layer=TESTING, **options)
    pd.testing.assert_frame_equal(result.table, same.table)


def test_files_and_subsets_of_split_counts_are_accepted(split, tmp_path):
    read = written(split, tmp_path)
    for cells in (read, tmp_path / "cells.h5ad", read[:100].copy(), read[:, :20].copy()):
        assert vd.differential_expression(cells, "group", "A", "B", clustered=True).results["settings"]["clustered"]


# ---------------------------------------------------------------------------------------------------------- refusals
def log_normalised(adata: Any) -> None:
    counts = adata.X.toarray()
    adata.X = np.log1p(1e4 * counts / counts.sum(1, keepdims=True))


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"share": 1.0}, SettingError, "share=1.0 .* strictly between 0 and 1"),
        ({"share": float("nan")}, SettingError, "share=nan"),
        ({"layer": "counts"}, SettingError, "layer='counts' is not there"),
        ({"dispersion": [0.1, 0.2]}, SettingError, "shape \\(2,\\); give one number or one for each of 30 genes"),
        ({"dispersion": -0.1}, SettingError, "negative or not finite"),
    ],
)
def test_options_that_cannot_be_used_are_refused(options, error, match):
    with pytest.raises(error, match=match):
        split_counts(small(), **options)


def test_values_that_are_no_counts_are_refused():
    adata = small()
    log_normalised(adata)
    with pytest.raises(DataError, match=r"log-normalised values .* start from the raw counts"):
        split_counts(adata)
    assert TESTING not in adata.layers
    assert RECORD not in adata.uns
    with pytest.raises(DataError, match="1 cells and 30 genes"):
        split_counts(small()[:1].copy())


def test_clusters_of_counts_that_were_not_split_are_refused():
    for run in (vd.differential_expression, vd.calibrate):
        with pytest.raises(SettingError, match=r"call vd.split_counts") as refusal:
            run(small(), "group", clustered=True)
        assert "\n" not in str(refusal.value)


def test_other_layers_and_models_are_refused(split):
    split.layers["raw"] = split.X
    with pytest.raises(SettingError, match="tests layer 'testing'; leave layer='raw' out"):
        vd.differential_expression(split, "group", "A", "B", clustered=True, layer="raw")
    with pytest.raises(SettingError, match="leave the model out"):
        vd.differential_expression(split, "group", "A", "B", clustered=True, model="scvi")


def test_a_layer_that_was_changed_is_refused(split):
    split.layers[TESTING] = split.X
    with pytest.raises(DataError, match=r"not the one that vd.split_counts wrote"):
        vd.differential_expression(split, "group", "A", "B", clustered=True)
    both = ad.concat([small(), small()], index_unique="-")
    both.layers[TESTING], both.uns[RECORD] = both.X, split.uns[RECORD]
    with pytest.raises(DataError, match=r"not the one that vd.split_counts wrote"):
        vd.differential_expression(both, "group", "A", "B", clustered=True)


# --------------------------------------------------------------------------------------------------------- a warning
NAMES = ["leiden", "Louvain_r1.2", "seurat_clusters", "cluster", "KMeans", "k-means", "PhenoGraph", "RNA_snn_res.0.8"]


@pytest.mark.parametrize("column", NAMES)
def test_columns_named_like_clusters_are_warned_about(column):
    (warning,) = cluster_warnings(column, np.array(["A", "B", None], dtype=object))
    assert repr(column) in warning
    assert warning.endswith(".")
    assert warning.count(". ") == 0


@pytest.mark.parametrize(
    ("labels", "warned"),
    [("012", True), ("123", True), ("0121", True), ("01", False), ("12", False), ("234", False), ("01a", False)],
)
def test_numbered_groups_are_warned_about(labels, warned):
    assert bool(cluster_warnings("cell_type", np.array([*labels, None], dtype=object))) == warned


def test_the_warning_is_in_the_result_and_on_the_page(split, tmp_path):
    split.obs["leiden"] = split.obs["group"]
    result = vd.differential_expression(split, "leiden", "A", "B", out=tmp_path)
    (warning,) = cluster_warnings("leiden", split.obs["leiden"].to_numpy(dtype=object))
    assert result.warnings.count(warning) == 1
    page = from_run(tmp_path)
    assert "1 warning" in page.summary[-1]
    assert f"Warning: {warning}" in outline(page).text
    assert not vd.differential_expression(split, "leiden", "A", "B", clustered=True).warnings
    assert not vd.differential_expression(split, "group", "A", "B").warnings
