"""Other tools on the same data: scvi-tools, scanpy's Wilcoxon test and DESeq2 on pseudobulk, with their defaults.

scvi-tools gives probabilities that |LFC| >= delta. The tests give adjusted p-values, which are no such probabilities:
the FDR that they state for their first k genes is the k-th adjusted p-value. DESeq2 tests |LFC| > delta. The Wilcoxon
test has no threshold; as is common practice, genes of an estimated |LFC| below delta are not called, however small
their p-value.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from vaerdict.core import SettingError
from vaerdict.datasets.genes import CountData
from vaerdict.de.metrics import measure, measure_tested
from vaerdict.optional import isolated, require
from vaerdict_paper.experiments.genes_contrasts import sample_cells


class ScviFit(NamedTuple):
    """A trained scvi-tools model and the seconds of its training."""

    model: Any
    seconds: float


def train_scvi(counts: Tensor, *, seed: int = 0, max_epochs: int | None = None, **settings: Any) -> ScviFit:
    """Train SCVI of scvi-tools on counts ``(cells, genes)``; epochs and `settings` are its defaults unless given."""
    scvi = require("scvi", "rivals", distribution="vaerdict-paper")
    anndata = require("anndata", "rivals", distribution="vaerdict-paper")
    with isolated(seed):
        adata = anndata.AnnData(counts.numpy())
        started = time.perf_counter()
        scvi.model.SCVI.setup_anndata(adata)
        model = scvi.model.SCVI(adata, **settings)
        # its default split, 90 % for training, is seeded by the operating system unless the cells are given
        split = np.split(np.random.permutation(len(counts)), [math.ceil(0.9 * len(counts))])  # noqa: NPY002
        model.train(
            max_epochs=max_epochs,
            accelerator="cpu",
            enable_progress_bar=False,
            logger=False,
            datasplitter_kwargs={"external_indexing": split},
        )
        return ScviFit(model, time.perf_counter() - started)


class RivalContrast(NamedTuple):
    """Cells of two groups, a over b, among all cells; `model` is a scvi-tools model of all cells.

    Shapes: ``counts (cells, genes)``, ``a (n_a,)`` and ``b (n_b,)`` indices of cells, ``donors (cells,)``.
    """

    counts: Tensor
    a: Tensor
    b: Tensor
    delta: float
    donors: Tensor | None = None
    model: Any = None

    def frame(self) -> tuple[np.ndarray, list[str]]:
        """Counts of the cells of both groups, group a first, and the group of each cell."""
        return self.counts[torch.cat([self.a, self.b])].numpy(), ["a"] * len(self.a) + ["b"] * len(self.b)


class RivalAnswer(NamedTuple):
    """Per gene the log2 fold change, and the probability of |LFC| >= delta or an adjusted p-value.

    Shapes: all ``(genes,)``.
    """

    lfc: Tensor
    prob: Tensor | None = None
    q: Tensor | None = None

    def measure(self, truth: Tensor, delta: float) -> dict[str, Any]:
        """The metrics of `vaerdict.de.metrics`."""
        if self.prob is not None:
            return measure(self.prob, self.lfc, truth, delta)
        assert self.q is not None
        return measure_tested(self.q, self.lfc, truth, delta)


# -------------------------------------------------------------------------------------------------- the rivals
def scvi_uniform(contrast: RivalContrast) -> RivalAnswer:
    """``differential_expression`` of scvi-tools in mode ``change``: pairs of random cells, latents from the encoder."""
    return _scvi(contrast, "uniform")


def scvi_importance(contrast: RivalContrast, **settings: Any) -> RivalAnswer:
    """The same with its importance weights, which take minutes instead of seconds.

    `settings` are those of its ``get_importance_weights``, with its defaults.
    """
    return _scvi(contrast, "importance", importance_weighting_kwargs=settings)


def _scvi(contrast: RivalContrast, weights: str, **settings: Any) -> RivalAnswer:
    a, b = contrast.a.numpy(), contrast.b.numpy()
    table = contrast.model.differential_expression(
        idx1=a,
        idx2=b,
        mode="change",
        delta=contrast.delta,
        weights=weights,
        all_stats=False,
        silent=True,
        **settings,
    ).loc[contrast.model.adata.var_names]
    return RivalAnswer(_column(table, "lfc_mean"), prob=_column(table, "proba_de"))


def wilcoxon(contrast: RivalContrast) -> RivalAnswer:
    """scanpy's Wilcoxon rank-sum test on log-normalised counts, Benjamini-Hochberg."""
    scanpy, anndata = (
        require("scanpy", "rivals", distribution="vaerdict-paper"),
        require("anndata", "rivals", distribution="vaerdict-paper"),
    )
    counts, group = contrast.frame()
    adata = anndata.AnnData(counts, obs={"group": group})
    scanpy.pp.normalize_total(adata)
    scanpy.pp.log1p(adata)
    scanpy.tl.rank_genes_groups(adata, "group", groups=["a"], reference="b", method="wilcoxon")
    table = scanpy.get.rank_genes_groups_df(adata, "a").set_index("names").loc[adata.var_names]
    lfc, q = _column(table, "logfoldchanges"), _column(table, "pvals_adj")
    return RivalAnswer(lfc, q=torch.where(lfc.abs() >= contrast.delta, q, 1))


def pseudobulk(contrast: RivalContrast) -> RivalAnswer:
    """DESeq2 (pydeseq2) on the summed counts of every donor, Wald test of |LFC| > delta, Benjamini-Hochberg."""
    pydeseq2, pandas = (
        require("pydeseq2.dds", "rivals", distribution="vaerdict-paper"),
        require("pandas", "rivals", distribution="vaerdict-paper"),
    )
    ds, inference = (
        require("pydeseq2.ds", "rivals", distribution="vaerdict-paper"),
        require("pydeseq2.default_inference", "rivals", distribution="vaerdict-paper").DefaultInference(n_cpus=1),
    )
    counts, group = _sums(contrast)
    rows = [str(i) for i in range(len(counts))]
    data = pydeseq2.DeseqDataSet(
        counts=pandas.DataFrame(counts, index=rows, columns=[str(g) for g in range(counts.shape[1])]),
        metadata=pandas.DataFrame({"group": group}, index=rows),
        design="~group",
        inference=inference,
        quiet=True,
    )
    data.deseq2()
    test = ds.DeseqStats(
        data,
        contrast=["group", "a", "b"],
        lfc_null=contrast.delta,
        alt_hypothesis="greaterAbs",
        inference=inference,
        quiet=True,
    )
    test.summary()
    # NaN for genes that it does not test: without counts, outliers, or too few counts
    q = _column(test.results_df, "padj").nan_to_num(1.0)
    return RivalAnswer(_column(test.results_df, "log2FoldChange").nan_to_num(0.0), q=q)


def _sums(contrast: RivalContrast) -> tuple[np.ndarray, list[str]]:
    """Counts summed over the cells of each donor in the contrast, and the group of each donor."""
    assert contrast.donors is not None
    counts, group = [], []
    for name, side in (("a", contrast.a), ("b", contrast.b)):
        donors = contrast.donors[side]
        for donor in donors.unique():
            counts.append(contrast.counts[side[donors == donor]].sum(0))
            group.append(name)
    if min(group.count("a"), group.count("b")) < 2:
        raise SettingError(f"{len(group)} donors leave a group with fewer than two; pseudobulk needs replicates.")
    return torch.stack(counts).long().numpy(), group


class Rival(NamedTuple):
    """A rival's method, and the packages that it needs."""

    answer: Callable[[RivalContrast], RivalAnswer]
    packages: tuple[str, ...]


RIVALS: dict[str, Rival] = {
    "scvi-uniform": Rival(scvi_uniform, ("scvi", "anndata")),
    "scvi-importance": Rival(scvi_importance, ("scvi", "anndata")),
    "wilcoxon": Rival(wilcoxon, ("scanpy", "anndata")),
    "pseudobulk": Rival(pseudobulk, ("pydeseq2.dds", "pydeseq2.ds", "pydeseq2.default_inference", "pandas")),
}
"""The rivals by their names in tables."""


# ---------------------------------------------------------------------------------------------------- the rows
def rival_rows(
    data: CountData,
    *,
    group_a: int = 0,
    group_b: int = 1,
    delta: float = 0.5,
    names: Sequence[str] = tuple(RIVALS),
    seed: int = 0,
    n_cells: Sequence[int | None] = (None,),
    max_epochs: int | None = None,
) -> list[dict[str, Any]]:
    """Metrics and seconds of rivals, one row per number of cells, rival and truth.

    scvi-tools is trained once, on all cells; ``seconds_train`` is not part of ``seconds``. Every rival is scored
    against two truths: ``estimand`` is ``proportion`` for changes of proportions, which normalised expression shows,
    and ``centred`` for changes of expression. Pseudobulk is left out if there are no donors.

    Parameters
    ----------
    data
        The simulated counts.
    group_a, group_b
        The states that are compared.
    delta
        The threshold of |LFC|.
    names
        The rivals to run.
    seed
        The seed of training and of the choice of cells.
    n_cells
        Numbers of cells per group (None: all).
    max_epochs
        Epochs of scvi-tools; its default if None.
    """
    unknown = [name for name in names if name not in RIVALS]
    if unknown:
        raise SettingError(f"no rival {', '.join(unknown)}; there are {', '.join(RIVALS)}.")
    names = [name for name in names if name != "pseudobulk" or data.donors is not None]
    for package in dict.fromkeys(package for name in names for package in RIVALS[name].packages):
        require(package, "rivals", distribution="vaerdict-paper")  # before anything is trained or timed
    scvi = [name for name in names if name.startswith("scvi")]
    fit = train_scvi(data.counts, seed=seed, max_epochs=max_epochs) if scvi else None
    rows = []
    for n in n_cells:
        a, b = (sample_cells(data.labels, group, n, seed=seed) for group in (group_a, group_b))
        contrast = RivalContrast(data.counts, a, b, delta, data.donors, fit.model if fit else None)
        shared = {"proposal": None, "seed": seed, "n_cells": n or "all"}
        for name in names:
            answer, seconds = timed_answer(RIVALS[name], contrast, seed)
            times = {"seconds": seconds, "seconds_train": fit.seconds if fit and name in scvi else 0.0}
            for estimand in ("centred", "proportion"):
                truth = data.lfc(group_a, group_b, proportions=estimand == "proportion")
                row = {"model": name, **shared, "estimand": estimand, **times}
                rows.append(row | answer.measure(truth, delta))
    return rows


def timed_answer(rival: Rival, contrast: RivalContrast, seed: int) -> tuple[RivalAnswer, float]:
    """A rival's answer and its seconds."""
    with isolated(seed):
        started = time.perf_counter()
        return rival.answer(contrast), time.perf_counter() - started


def _column(table: Any, name: str) -> Tensor:
    return torch.as_tensor(table[name].to_numpy(dtype=np.float64, copy=True))
