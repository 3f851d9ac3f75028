"""Clusters as groups: false calls where nothing differs, and changes found, with and without splitting the counts.

Cells are clustered by k-means on principal components of the counts, of one part of them where they were split, and two
clusters are compared. Nothing differs in three kinds of data: simulated negative binomial cells of one kind; cells of
one kind among cells of two, clustered into four; and cells of one type whose counts were permuted between cells of
similar library size, each gene on its own, which leaves every gene its distribution and removes what genes have in
common. Cells of one type as they are may differ in truth (cycle, activation, donors), so that their calls need not be
false. Each seed has its own cells, of real data 80 %.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import Any, NamedTuple

import numpy as np
from scipy import sparse

from vaerdict.core import Progress, silent
from vaerdict.de import differential_expression, split_counts
from vaerdict.de.rivals import lfc_of_means
from vaerdict.de.splitting import CLUSTERING, TESTING, estimated_dispersions
from vaerdict.optional import isolated
from vaerdict_paper.benchmarks.timing import one_thread
from vaerdict_paper.mnist_data import find_data

PACKAGES = ("anndata", "scanpy", "sklearn")

SEEDS, QUICK_SEEDS = 20, 2
LEVEL, DELTA = 0.05, 0.5

_SHARE = 0.8  # of the real cells for each seed
_STRATUM = 20  # cells of similar library size that are permuted
_VARIABLE, _COMPONENTS = 1000, 10  # genes and principal components that cells are clustered by
_STARTS = 10
_CELLS, _DEPTH = 600, 4000  # of a simulated data set
_GENES = 2000  # simulated, and of real cells those with the most counts
_SEEN = 0.5  # least mean count of genes whose parts are correlated
_CLUSTERS = 4  # where cells are of one kind
_FEWEST, _MORE = 10, 10  # cells of a cluster, and how often one more cluster is made where there are fewer
_GROUP = "group"


class Case(NamedTuple):
    """Cells to cluster and compare.

    `kind` ``(cells,)`` are the true kinds, where there are several; `changed` are the genes that differ between kinds,
    None where that is unknown. Clusters are compared within the first kind if `within`.
    """

    adata: Any
    kind: np.ndarray | None = None
    changed: set[str] | None = None
    clusters: int = _CLUSTERS
    within: bool = False


class Calls(NamedTuple):
    """The genes called, the groups ``(cells,)`` compared, None for other cells, and the correlation of the parts."""

    called: set[str]
    groups: np.ndarray
    correlation: float | None = None


# --------------------------------------------------------------------------------------------------------- data
def simulated(seed: int, *, kinds: int = 1, clusters: int = _CLUSTERS) -> Case:
    """Negative binomial cells, of one kind or of two that differ in a tenth of the genes."""
    rng = np.random.default_rng([seed, kinds])
    mean = rng.lognormal(-1.5, 1.5, _GENES)
    dispersion = 0.3 * rng.lognormal(0, 0.7, _GENES)
    change = np.zeros((2, _GENES))
    changed = rng.choice(_GENES, _GENES // 10, replace=False)
    change[1, changed] = rng.choice([-1, 1], len(changed)) * rng.uniform(1, 3, len(changed))
    kind = rng.integers(0, kinds, _CELLS)
    depth = _DEPTH * rng.lognormal(0, 0.4, _CELLS)
    rate = depth[:, None] * (mean / mean.sum()) * np.exp2(change[kind])
    counts = rng.poisson(rate * rng.gamma(1 / dispersion, dispersion, rate.shape))
    adata = _anndata(sparse.csr_matrix(counts.astype(np.float32)), [f"g{i}" for i in range(_GENES)])
    return Case(adata, kind, {f"g{i}" for i in changed}, clusters, within=clusters > kinds > 1)


def real(seed: int, *, name: str, where: tuple[tuple[str, tuple[str, ...]], ...], permuted: bool = False) -> Case:
    """Cells of some labels of a file; their type is their kind where there are two."""
    cells, rng = _cells(name, where), np.random.default_rng([seed, 7])
    cells = cells[np.sort(rng.permutation(cells.n_obs)[: round(_SHARE * cells.n_obs)])]
    cells = cells[:, np.sort(np.argsort(-np.asarray(cells.X.sum(0)).ravel(), kind="stable")[:_GENES])]
    counts = sparse.csr_matrix(_permuted(cells.X, rng) if permuted else cells.X)
    kind = np.unique(cells.obs["cell_type"].astype(str), return_inverse=True)[1]
    several = {"kind": kind, "clusters": 2} if kind.any() else {}
    return Case(_anndata(counts, cells.var_names), **several)


@cache
def _cells(name: str, where: tuple[tuple[str, tuple[str, ...]], ...]) -> Any:
    import anndata

    with isolated(0):
        adata = anndata.read_h5ad(find_data(f"scrna/{name}.h5ad", source="the tutorials of scanpy and muscat"))
        adata.var_names_make_unique()
        mask = np.logical_and.reduce([adata.obs[column].isin(values) for column, values in where])
        return adata[mask].copy()


def _permuted(counts: Any, rng: np.random.Generator) -> Any:
    """Counts of each gene permuted between cells of similar library size. Shapes: ``(cells, genes)``, sparse."""
    dense, order = np.asarray(counts.todense()), np.argsort(np.asarray(counts.sum(1)).ravel())
    for start in range(0, len(order), _STRATUM):
        stratum = order[start : start + _STRATUM]
        dense[stratum] = rng.permuted(dense[stratum], axis=0)
    return sparse.csr_matrix(dense)


def _anndata(counts: Any, names: Any) -> Any:
    import anndata
    import pandas

    cells: Any = [f"c{i}" for i in range(counts.shape[0])]
    obs = pandas.DataFrame(index=cells)
    return anndata.AnnData(counts, obs=obs, var=pandas.DataFrame(index=names))


_NAIVE, _B, _MIXED, _MONO = (
    (("cell_type", types),)
    for types in (("Naive CD4 T",), ("B",), ("B", "Naive CD4 T"), ("CD14+ Mono", "FCGR3A+ Mono"))
)
_KANG = (("cell_type", ("CD14+ Monocytes",)), ("condition", ("ctrl",)))
_PBMC = partial(real, name="pbmc3k")

DATA: dict[str, tuple[str, Callable[[int], Case]]] = {
    "simulated, one kind": ("nothing", simulated),
    "simulated, within one kind of two": ("nothing", partial(simulated, kinds=2)),
    "PBMC naive CD4 T, permuted": ("nothing", partial(_PBMC, where=_NAIVE, permuted=True)),
    "PBMC B, permuted": ("nothing", partial(_PBMC, where=_B, permuted=True)),
    "PBMC naive CD4 T": ("unknown", partial(_PBMC, where=_NAIVE)),
    "PBMC B": ("unknown", partial(_PBMC, where=_B)),
    "Kang control CD14+ monocytes": ("unknown", partial(real, name="kang_muscat_example", where=_KANG)),
    "simulated, two kinds": ("kinds", partial(simulated, kinds=2, clusters=2)),
    "PBMC B and naive CD4 T": ("kinds", partial(_PBMC, where=_MIXED)),
    "PBMC CD14+ and FCGR3A+ monocytes": ("kinds", partial(_PBMC, where=_MONO)),
}
"""Data by name: what differs between the cells compared, and the cells of a seed."""


# ------------------------------------------------------------------------------------------------------ methods
def clusters(counts: Any, k: int, seed: int) -> np.ndarray:
    """Clusters of cells by k-means on principal components of log-normalised counts. Shapes: ``-> (cells,)``."""
    import scanpy
    from sklearn import cluster

    kmeans: Any = cluster.KMeans
    with isolated(seed):
        cells = _log_normalised(counts)
        scanpy.pp.highly_variable_genes(cells, n_top_genes=min(_VARIABLE, cells.n_vars))
        scanpy.pp.pca(cells, n_comps=_COMPONENTS, random_state=seed)
        return kmeans(k, n_init=_STARTS, random_state=seed).fit_predict(cells.obsm["X_pca"])


def _log_normalised(counts: Any) -> Any:
    import scanpy

    cells = _anndata(counts.copy(), [f"g{i}" for i in range(counts.shape[1])])
    scanpy.pp.normalize_total(cells)
    scanpy.pp.log1p(cells)
    return cells


def _plain(case: Case, seed: int) -> Calls:
    return _compared(case, _groups(case, case.adata.X, seed))


def _split(case: Case, seed: int, *, dispersion: Callable[[Any], Any] = lambda _: None) -> Calls:
    split_counts(case.adata, dispersion=dispersion(case.adata.X), seed=seed)
    groups = _groups(case, case.adata.layers[CLUSTERING], seed)
    return _compared(case, groups, clustered=True)._replace(correlation=_correlation(case))


def _known(case: Case, seed: int, *, split: bool) -> Calls:
    if split:
        split_counts(case.adata, seed=seed)
    return _compared(case, _named(case.kind), layer=TESTING if split else None)


def _wilcoxon(case: Case, seed: int) -> Calls:
    """scanpy's Wilcoxon test with ties corrected: Benjamini-Hochberg p below the level and |LFC| of at least delta."""
    import scanpy

    groups = _groups(case, case.adata.X, seed)
    mask = np.array([group is not None for group in groups])
    with isolated(seed):
        cells = _log_normalised(case.adata.X)[mask].copy()
        cells.var_names, cells.obs[_GROUP] = case.adata.var_names, groups[mask].astype(str)
        cells = cells[:, np.asarray((cells.X > 0).sum(0)).ravel() >= 3].copy()
        cells.obs[_GROUP] = cells.obs[_GROUP].astype("category")
        scanpy.tl.rank_genes_groups(cells, _GROUP, groups=["0"], reference="1", method="wilcoxon", tie_correct=True)
        table = scanpy.get.rank_genes_groups_df(cells, "0").set_index("names").loc[cells.var_names]
    lfc = lfc_of_means(cells.X, (cells.obs[_GROUP] == "0").to_numpy())
    called = (table["pvals_adj"].to_numpy() < LEVEL) & (np.abs(lfc) >= DELTA)
    return Calls(set(cells.var_names[called]), groups)


def _groups(case: Case, counts: Any, seed: int) -> np.ndarray:
    """The two clusters to compare: the largest, among the cells of the first kind if `within`.

    More clusters are made if the smaller one holds next to no cells.
    """
    inside = case.kind == 0 if case.within and case.kind is not None else np.ones(counts.shape[0], dtype=bool)
    labels = first = np.zeros(0, dtype=int)
    for k in range(case.clusters, case.clusters + _MORE):
        labels = clusters(counts, k, seed)
        sizes = np.bincount(labels[inside], minlength=k)
        first = np.argsort(-sizes, kind="stable")[:2]
        if sizes[first].min() >= _FEWEST:
            break
    return _named(np.where(inside & (labels == first[0]), 0, np.where(inside & (labels == first[1]), 1, -1)))


def _named(numbers: Any) -> np.ndarray:
    return np.array([None if number < 0 else str(number) for number in numbers], dtype=object)


def _compared(case: Case, groups: np.ndarray, **options: Any) -> Calls:
    case.adata.obs[_GROUP] = groups
    result = differential_expression(
        case.adata, _GROUP, "0", "1", delta=DELTA, level=LEVEL, n_top_genes=None, **options
    )
    return Calls(set(result.discoveries()["gene"]), groups)


def _correlation(case: Case) -> float:
    """Mean correlation of both parts, over the library, of genes with enough counts and in cells of the first kind.

    Of the genes that differ between kinds, where kinds differ.
    """
    inside = np.ones(case.adata.n_obs, dtype=bool) if case.kind is None else case.kind == 0
    several = case.changed is not None and not inside.all()
    genes = [not several or name in (case.changed or ()) for name in case.adata.var_names]
    library = np.asarray(case.adata.X.sum(1))[inside]
    parts = [np.asarray(case.adata.layers[name][inside].todense()) / library for name in (CLUSTERING, TESTING)]
    chosen = (np.asarray(case.adata.X[inside].mean(0)).ravel() >= _SEEN) & np.array(genes)
    a, b = ((part - part.mean(0))[:, chosen] for part in parts)
    return float(np.mean((a * b).sum(0) / np.sqrt((a**2).sum(0) * (b**2).sum(0))))


Method = Callable[[Case, int], Calls]

METHODS: dict[str, Method] = {
    "all counts": _plain,
    "all counts, Wilcoxon": _wilcoxon,
    "split, Poisson": partial(_split, dispersion=lambda _: 0.0),
    "split, dispersion over all cells": partial(
        _split, dispersion=lambda counts: estimated_dispersions(counts, cells_together=counts.shape[0])
    ),
    "split, default": _split,
}
KNOWN: dict[str, Method] = {
    "true kinds, all counts": partial(_known, split=False),
    "true kinds, testing part": partial(_known, split=True),
}


# ------------------------------------------------------------------------------------------------------ results
def run(*, quick: bool = False, progress: Progress = silent) -> Iterator[dict[str, Any]]:
    """One row per data set and method: means over seeds.

    ``any`` is the share of seeds with a call, ``calls`` their mean number with its standard error, ``correlation`` that
    of the parts of a gene's counts within a kind. Where kinds differ, ``tpr`` is the share of changes called and
    ``fdp`` the share of calls that are none; on real cells a change is what is called between the true types with all
    counts. ``purity`` is the share of the cells compared that are of the kind that prevails in their group.
    """
    n = QUICK_SEEDS if quick else SEEDS
    for done, (name, (differs, make)) in enumerate(DATA.items()):
        methods = METHODS | (KNOWN if differs == "kinds" else {})
        runs: dict[str, list[dict[str, float]]] = {method: [] for method in methods}
        for seed in range(n):
            progress(done * n + seed, len(DATA) * n, "data sets")
            with one_thread():
                for method, result in _measured(make(seed), methods, seed).items():
                    runs[method].append(result)
        for method, results in runs.items():
            yield {"data": name, "differs": differs, "method": method, "seeds": n, **_averaged(results)}
    progress(len(DATA) * n, len(DATA) * n, "data sets")


def _measured(case: Case, methods: dict[str, Method], seed: int) -> dict[str, dict[str, float]]:
    calls = {name: method(case, seed) for name, method in methods.items()}
    truth = case.changed
    if truth is None and "true kinds, all counts" in calls:
        truth = calls["true kinds, all counts"].called
    several = case.kind is not None and case.kind.any() and not case.within
    return {name: _scores(answer, (truth or set()) if several else None, case.kind) for name, answer in calls.items()}


def _scores(answer: Calls, truth: set[str] | None, kind: np.ndarray | None) -> dict[str, float]:
    n = len(answer.called)
    scores = {"calls": float(n), "any": float(n > 0)}
    scores |= {} if answer.correlation is None else {"correlation": answer.correlation}
    if truth is not None and kind is not None:
        scores |= {
            "tpr": len(answer.called & truth) / max(len(truth), 1),
            "fdp": len(answer.called - truth) / max(n, 1),
            "purity": _purity(answer.groups, kind),
        }
    return scores


def _purity(groups: np.ndarray, kind: np.ndarray) -> float:
    table = np.array([[((groups == group) & (kind == k)).sum() for k in (0, 1)] for group in ("0", "1")])
    return float(table.max(1).sum() / table.sum())


def _averaged(results: list[dict[str, float]]) -> dict[str, float]:
    means = {key: float(np.mean([result[key] for result in results])) for key in results[0]}
    return means | {"calls_se": float(np.std([result["calls"] for result in results], ddof=1) / len(results) ** 0.5)}
