"""Other tests of differential expression on the same counts: scanpy, DESeq2 (pydeseq2) and edgeR (edgepython).

Each is used as its authors recommend, and says which question it answers: whether a gene changed at all, or whether
its \\|log2 fold change\\| exceeds delta. Names that end in ``+lfc`` are the common practice of calling, among the genes
that changed at all, those whose estimate exceeds delta. The packages come with the extra ``rivals``; edgepython is
licensed under the GPL and is only imported.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import numpy as np
from scipy import sparse, stats

from vaerdict.core import DataError, SettingError
from vaerdict.optional import isolated, require

ANY_CHANGE, BEYOND_DELTA = "any change", "change beyond delta"
"""The questions that a rival can answer."""

FEWEST_REPLICATES = 2
"""Cells or samples that each group needs."""


class Comparison(NamedTuple):
    """The cells of two groups and their counts of the genes to test.

    Where `samples` are named, they are the replicates: counts are summed over the cells of each sample in a group.
    `pairs` are blocks within which the groups are compared; samples with cells in both groups are such blocks where
    none are named. DESeq2 and edgeR have them in their design, Wilcoxon's and the t-test ignore them. `totals` are the
    library sizes over all genes, by default those over the genes given.

    Shapes: ``counts (cells, genes)`` sparse or dense, ``first (cells,)`` true for the group that fold changes are of,
    ``samples (cells,)``, ``pairs (cells,)``, ``totals (cells,)``.
    """

    counts: Any
    first: np.ndarray
    delta: float = 0.5
    samples: np.ndarray | None = None
    pairs: np.ndarray | None = None
    totals: np.ndarray | None = None


class RivalAnswer(NamedTuple):
    """Per gene the log2 fold change, the p-value and the adjusted p-value; NaN for genes that are not tested.

    A gene whose `q` is NaN is never called, for instance because a filter on the fold change leaves it out. `seconds`
    are those of the fit and of the test. Shapes: ``lfc, p, q (genes,)``.
    """

    lfc: np.ndarray
    p: np.ndarray
    q: np.ndarray
    seconds: float = 0.0

    def called(self, level: float) -> np.ndarray:
        """The genes called at a false discovery rate. Shapes: ``-> (genes,)`` bool."""
        return self.q <= level  # false for NaN

    def ranking(self) -> np.ndarray:
        """Genes by evidence: by p, ties by \\|lfc\\|, genes that cannot be called last. Shapes: ``-> (genes,)``."""
        size = np.nan_to_num(np.abs(self.lfc), nan=0.0, posinf=np.inf)
        return np.lexsort([-size, np.nan_to_num(self.p, nan=np.inf), np.isnan(self.q)])


class Replicates(NamedTuple):
    """What is compared: cells or samples with their counts, group, library size and block.

    Shapes: ``counts (replicates, genes)`` sparse, ``first, totals, block (replicates,)``.
    """

    counts: Any
    first: np.ndarray
    totals: np.ndarray
    block: np.ndarray | None
    are_cells: bool


def replicates(comparison: Comparison) -> Replicates:
    """The cells that have counts, or the sums over the cells of each sample in a group."""
    counts, first = sparse.csr_matrix(comparison.counts), np.asarray(comparison.first, dtype=bool)
    totals = np.asarray(counts.sum(1)).ravel() if comparison.totals is None else np.asarray(comparison.totals)
    block = None if comparison.pairs is None else np.asarray(comparison.pairs).astype(str)
    if comparison.samples is not None:
        samples = np.asarray(comparison.samples).astype(str)
        if block is None and set(samples[first]) == set(samples[~first]):
            block = samples
        keys = np.char.add(np.where(first, "1\0", "0\0"), samples)
        _, cell, owner = np.unique(keys, return_index=True, return_inverse=True)
        sums = sparse.csr_matrix((np.ones(len(owner)), (owner, np.arange(len(owner)))))
        counts, totals, first = sparse.csr_matrix(sums @ counts), sums @ totals, first[cell]
        block = None if block is None else block[cell]
    kept = totals > 0
    block = None if block is None else block[kept]
    made = Replicates(counts[kept], first[kept], totals[kept], block, comparison.samples is None)
    _check(made)
    return made


def _check(made: Replicates) -> None:
    kind, sizes = "cells" if made.are_cells else "samples", (int(made.first.sum()), int((~made.first).sum()))
    if min(sizes) < FEWEST_REPLICATES:
        raise SettingError(
            f"the groups have {sizes[0]} and {sizes[1]} {kind} with counts; at least {FEWEST_REPLICATES} each are "
            "needed to test anything."
        )
    design = _design(made)
    if np.linalg.matrix_rank(design) < design.shape[1] or len(design) <= design.shape[1]:
        raise DataError(f"the pairs leave nothing to compare {kind} by: name blocks that hold {kind} of both groups.")


def _design(made: Replicates) -> np.ndarray:
    """An intercept, the blocks but one, and the group, which is last. Shapes: ``-> (replicates, coefficients)``."""
    columns = [np.ones(len(made.first))]
    if made.block is not None:
        columns += [(made.block == name).astype(float) for name in np.unique(made.block)[1:]]
    return np.column_stack([*columns, made.first.astype(float)])


# ------------------------------------------------------------------------------------------------------ scanpy
def _log_normalised(made: Replicates) -> Any:
    """Counts scaled to the median library size, as ``normalize_total`` does, and their log1p."""
    scanpy, anndata = require("scanpy", "rivals"), require("anndata", "rivals")
    scale = sparse.diags(np.median(made.totals) / made.totals)
    names = np.where(made.first, "first", "second")
    adata = anndata.AnnData(sparse.csr_matrix(scale @ made.counts, dtype=np.float32), obs={"group": names})
    adata.obs["group"] = adata.obs["group"].astype("category")
    scanpy.pp.log1p(adata)
    return adata


def _scanpy(method: str, **settings: Any) -> Callable[[Any, float], RivalAnswer]:
    def test(adata: Any, delta: float) -> RivalAnswer:
        scanpy = require("scanpy", "rivals")
        scanpy.tl.rank_genes_groups(adata, "group", groups=["first"], reference="second", method=method, **settings)
        table = scanpy.get.rank_genes_groups_df(adata, "first").set_index("names").loc[adata.var_names]
        return _adjusted(lfc_of_means(adata.X, (adata.obs["group"] == "first").to_numpy()), table["pvals"])

    return test


def lfc_of_means(log_scaled: Any, first: np.ndarray) -> np.ndarray:
    """log2 of the ratio of the means of scaled counts, of the cells `first` over the others; scanpy's pseudocount.

    scanpy's own fold change is that of the means of log1p, which depend on the spread of the counts too.

    Shapes: ``log_scaled (cells, genes)`` log1p of scaled counts, sparse, ``first (cells,) -> (genes,)``.
    """
    scaled = log_scaled.expm1()
    of_first, of_others = (np.asarray(scaled[side].mean(0)) for side in (first, ~first))
    return np.log2((of_first + 1e-9) / (of_others + 1e-9)).ravel()


# ------------------------------------------------------------------------------------------------------ DESeq2
def _deseq2(made: Replicates) -> Any:
    """The fit with its defaults; of cells with the settings recommended for single cells that pydeseq2 has.

    Those are size factors from positive counts, a small least mean and no replacement of outliers. The likelihood-ratio
    test and the t-distribution, which are recommended too, are not in pydeseq2.
    """
    pandas, dds = require("pandas", "rivals"), require("pydeseq2.dds", "rivals")
    rows = [str(i) for i in range(len(made.first))]
    factors = {"group": np.where(made.first, "first", "second")}
    if made.block is not None:
        numbers = np.unique(made.block, return_inverse=True)[1]
        factors["block"] = np.array([f"b{i}" for i in numbers])
    single: dict[str, Any] = {"size_factors_fit_type": "poscounts", "min_mu": 1e-6, "refit_cooks": False}
    fit = dds.DeseqDataSet(
        counts=pandas.DataFrame(made.counts.toarray().astype(np.int64), index=rows),
        metadata=pandas.DataFrame(factors, index=rows),
        design="~group" if made.block is None else "~block + group",
        inference=_one_process(),
        quiet=True,
        **single if made.are_cells else {},
    )
    fit.deseq2()
    return fit


def _wald(**null: Any) -> Callable[[Any, float], RivalAnswer]:
    def test(fit: Any, delta: float) -> RivalAnswer:
        threshold = {"lfc_null": delta, **null} if null else {}
        names, cooks = ["group", "first", "second"], bool(fit.refit_cooks)
        settings = {"cooks_filter": cooks, "inference": _one_process(), "quiet": True, **threshold}
        made = require("pydeseq2.ds", "rivals").DeseqStats(fit, contrast=names, **settings)
        made.summary()
        table = made.results_df
        return RivalAnswer(_floats(table["log2FoldChange"]), _floats(table["pvalue"]), _floats(table["padj"]))

    return test


def _one_process() -> Any:
    return require("pydeseq2.default_inference", "rivals").DefaultInference(n_cpus=1)


# ------------------------------------------------------------------------------------------------------ edgeR
def _quasi_likelihood(made: Replicates) -> Any:
    """TMM factors and the robust quasi-likelihood fit, whose dispersion is its own estimate (edgeR 4 and later)."""
    edger, design = require("edgepython", "rivals"), _design(made)
    counts = np.ascontiguousarray(made.counts.toarray().T, dtype=np.float64)
    y = edger.make_dgelist(counts, lib_size=made.totals.astype(np.float64), group=made.first.astype(int))
    y = edger.calc_norm_factors(y, method="TMM")
    return edger.glm_ql_fit(y, design, robust=True)


def _ql_test(fit: Any, delta: float) -> RivalAnswer:
    table = require("edgepython", "rivals").glm_ql_ftest(fit)["table"]
    return _adjusted(table["logFC"], table["PValue"])


def _treat(fit: Any, delta: float) -> RivalAnswer:
    """The test against delta; where its average over the null interval underflows, that against the interval's ends."""
    treat = require("edgepython", "rivals").glm_treat
    table = treat(fit, lfc=delta)["table"]
    p = table["PValue"]
    if p.isna().any():
        p = p.fillna(treat(fit, lfc=delta, null="worst.case")["table"]["PValue"])
    return _adjusted(table["logFC"], p)


# ------------------------------------------------------------------------------------------------------ all of them
class Rival(NamedTuple):
    """A rival: its question, the fit that it shares with others, its test, and the package that it needs.

    `least_lfc` says that genes whose estimated \\|LFC\\| is below delta are not called.
    """

    question: str
    fit: Callable[[Replicates], Any]
    test: Callable[[Any, float], RivalAnswer]
    package: str
    least_lfc: bool = False


_PLAIN = {
    "wilcoxon": Rival(ANY_CHANGE, _log_normalised, _scanpy("wilcoxon", tie_correct=True), "scanpy"),
    "ttest": Rival(ANY_CHANGE, _log_normalised, _scanpy("t-test"), "scanpy"),
    "deseq2": Rival(ANY_CHANGE, _deseq2, _wald(), "pydeseq2"),
    "edger": Rival(ANY_CHANGE, _quasi_likelihood, _ql_test, "edgepython"),
}

RIVALS: dict[str, Rival] = {
    **_PLAIN,
    **{f"{name}+lfc": rival._replace(question=BEYOND_DELTA, least_lfc=True) for name, rival in _PLAIN.items()},
    "deseq2-threshold": Rival(BEYOND_DELTA, _deseq2, _wald(alt_hypothesis="greaterAbs"), "pydeseq2"),
    "edger-treat": Rival(BEYOND_DELTA, _quasi_likelihood, _treat, "edgepython"),
}
"""The rivals by name: Wilcoxon's test and Welch's t-test of scanpy, DESeq2's Wald test, edgeR's quasi-likelihood test,
the same with a filter on the fold change, and the tests of DESeq2 and edgeR against delta."""


def check_rivals(names: Iterable[str]) -> list[str]:
    """The names, each once, if all are known and their packages are installed; otherwise a `SettingError`."""
    names = list(dict.fromkeys(names))
    unknown = [name for name in names if name not in RIVALS]
    if unknown:
        raise SettingError(f"no rival {', '.join(unknown)}; there are {', '.join(RIVALS)}.")
    for package in dict.fromkeys(RIVALS[name].package for name in names):
        with isolated(0):
            require(package, "rivals")
    return names


def rival_answers(comparison: Comparison, names: Iterable[str] = tuple(RIVALS), *, seed: int = 0) -> dict[str, Any]:
    """The answers of rivals on the same counts. Rivals that share a fit share it.

    Parameters
    ----------
    comparison
        The counts, groups, samples and delta.
    names
        The rivals to ask, of `RIVALS`.
    seed
        The seed of anything random in them.

    Returns
    -------
    dict
        A `RivalAnswer` by name, in the order of `names`.

    Raises
    ------
    SettingError
        If a name is unknown, a package is missing, or a group has fewer than two replicates.
    DataError
        If no comparison is possible within the pairs.

    Examples
    --------
    >>> rng = np.random.default_rng(0)
    >>> counts = rng.poisson(np.where(np.arange(80) < 40, 6.0, 2.0)[:, None] * [1, 0.5, 0] + [0, 3, 4])
    >>> answer = rival_answers(Comparison(counts, np.arange(80) < 40), ["ttest"])["ttest"]
    >>> answer.lfc.shape, int(answer.q.argmin())
    ((3,), 0)
    """
    names = check_rivals(names)
    made = replicates(comparison)
    seen = np.asarray(made.counts.sum(0)).ravel() > 0
    made = made._replace(counts=made.counts[:, seen])
    fits: dict[Any, tuple[Any, float]] = {}
    answers = {}
    for name in names:
        rival = RIVALS[name]
        with isolated(seed):
            if rival.fit not in fits:
                fits[rival.fit] = _timed(lambda fit=rival.fit: fit(made))
            fit, seconds = fits[rival.fit]
            answer, more = _timed(lambda rival=rival, fit=fit: rival.test(fit, comparison.delta))
        if rival.least_lfc:
            answer = answer._replace(q=np.where(np.abs(answer.lfc) >= comparison.delta, answer.q, np.nan))
        lfc, p, q = (_spread(values, seen) for values in answer[:3])
        answers[name] = RivalAnswer(lfc, p, q, seconds + more)
    return answers


def _timed(work: Callable[[], Any]) -> tuple[Any, float]:
    started = time.perf_counter()
    return work(), time.perf_counter() - started


def _adjusted(lfc: Any, p: Any) -> RivalAnswer:
    """An answer with the adjusted p-values of Benjamini and Hochberg over the genes that have a p-value."""
    p = np.minimum(_floats(p), 1.0)  # edgepython's threshold test can exceed one by its interpolation
    tested = np.isfinite(p)
    q = np.full(len(p), np.nan)
    if tested.any():
        q[tested] = stats.false_discovery_control(p[tested])
    return RivalAnswer(_floats(lfc), p, q)


def _floats(values: Any) -> np.ndarray:
    return np.array(values, dtype=np.float64)


def _spread(values: np.ndarray, place: np.ndarray) -> np.ndarray:
    """Values of the genes of a mask, NaN for the others. Shapes: ``(tested,), (genes,) -> (genes,)``."""
    out = np.full(len(place), np.nan)
    out[place] = values
    return out
