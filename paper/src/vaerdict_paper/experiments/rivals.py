"""What biologists use today on the same data: scvi-tools, scanpy's Wilcoxon test and DESeq2 on pseudobulk.

Each is run as it comes, with its defaults. scvi-tools states probabilities that |LFC| >= delta. The tests state
adjusted p-values, which are no such probabilities: the FDR they state of their first k genes is the k-th adjusted
p-value. DESeq2 tests |LFC| > delta. The Wilcoxon test only knows no change at all; as its users do, genes of an
estimated |LFC| under delta are therefore not called, however small their p-value.
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
from vaerdict.noise import seeded
from vaerdict.optional import isolated, require


class Fitted(NamedTuple):
    """A trained scvi-tools model and the seconds it took."""

    model: Any
    seconds: float


def train_scvi(counts: Tensor, *, seed: int = 0, max_epochs: int | None = None, **settings: Any) -> Fitted:
    """Train scvi-tools' SCVI on counts ``(cells, genes)``; epochs and `settings` are its defaults unless given."""
    scvi, anndata = require("scvi", "rivals"), require("anndata", "rivals")
    with isolated(seed):
        adata = anndata.AnnData(counts.numpy())
        started = time.perf_counter()
        scvi.model.SCVI.setup_anndata(adata)
        model = scvi.model.SCVI(adata, **settings)
        # its default split, 90 % to train on, draws from the operating system unless it is told the cells
        split = np.split(np.random.permutation(len(counts)), [math.ceil(0.9 * len(counts))])  # noqa: NPY002
        model.train(
            max_epochs=max_epochs,
            accelerator="cpu",
            enable_progress_bar=False,
            logger=False,
            datasplitter_kwargs={"external_indexing": split},
        )
        return Fitted(model, time.perf_counter() - started)


class Contrast(NamedTuple):
    """Cells of two groups, a over b, out of all cells; `model` is scvi-tools' of all of them.

    Shapes: ``counts (cells, genes)``, ``a (n_a,)`` and ``b (n_b,)`` indices of cells, ``donors (cells,)``.
    """

    counts: Tensor
    a: Tensor
    b: Tensor
    delta: float
    donors: Tensor | None = None
    model: Any = None

    def frame(self) -> tuple[np.ndarray, list[str]]:
        """Counts of the cells of both groups, those of a first, and the group of each."""
        return self.counts[torch.cat([self.a, self.b])].numpy(), ["a"] * len(self.a) + ["b"] * len(self.b)


class Found(NamedTuple):
    """What a rival says of each gene: a probability of |LFC| >= delta or an adjusted p-value, and the log2 fold change.

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
def scvi_uniform(contrast: Contrast) -> Found:
    """scvi-tools' ``differential_expression`` in mode ``change``: pairs of random cells, latents from the encoder."""
    return _scvi(contrast, "uniform")


def scvi_importance(contrast: Contrast, **settings: Any) -> Found:
    """The same with its importance weights, which take minutes where the uniform ones take seconds.

    `settings` are those of its ``get_importance_weights``, its defaults unless given.
    """
    return _scvi(contrast, "importance", importance_weighting_kwargs=settings)


def _scvi(contrast: Contrast, weights: str, **settings: Any) -> Found:
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
    return Found(_column(table, "lfc_mean"), prob=_column(table, "proba_de"))


def wilcoxon(contrast: Contrast) -> Found:
    """scanpy's Wilcoxon rank-sum test on log-normalised counts, Benjamini-Hochberg."""
    scanpy, anndata = require("scanpy", "rivals"), require("anndata", "rivals")
    counts, group = contrast.frame()
    adata = anndata.AnnData(counts, obs={"group": group})
    scanpy.pp.normalize_total(adata)
    scanpy.pp.log1p(adata)
    scanpy.tl.rank_genes_groups(adata, "group", groups=["a"], reference="b", method="wilcoxon")
    table = scanpy.get.rank_genes_groups_df(adata, "a").set_index("names").loc[adata.var_names]
    lfc, q = _column(table, "logfoldchanges"), _column(table, "pvals_adj")
    return Found(lfc, q=torch.where(lfc.abs() >= contrast.delta, q, 1))


def pseudobulk(contrast: Contrast) -> Found:
    """DESeq2 (pydeseq2) on the summed counts of every donor, Wald test of |LFC| > delta, Benjamini-Hochberg."""
    pydeseq2, pandas = require("pydeseq2.dds", "rivals"), require("pandas", "rivals")
    ds, inference = (
        require("pydeseq2.ds", "rivals"),
        require("pydeseq2.default_inference", "rivals").DefaultInference(n_cpus=1),
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
    # genes it has no opinion on: never counted, outliers, or too few counts to be worth a test
    q = _column(test.results_df, "padj").nan_to_num(1.0)
    return Found(_column(test.results_df, "log2FoldChange").nan_to_num(0.0), q=q)


def _sums(contrast: Contrast) -> tuple[np.ndarray, list[str]]:
    """Counts of every donor summed over its cells in the contrast, and the donor's group."""
    assert contrast.donors is not None
    counts, group = [], []
    for name, side in (("a", contrast.a), ("b", contrast.b)):
        owner = contrast.donors[side]
        for donor in owner.unique():
            counts.append(contrast.counts[side[owner == donor]].sum(0))
            group.append(name)
    if min(group.count("a"), group.count("b")) < 2:
        raise SettingError(f"{len(group)} donors leave a group with fewer than two; pseudobulk needs replicates.")
    return torch.stack(counts).long().numpy(), group


class Rival(NamedTuple):
    """What a rival does, and the packages it needs."""

    answer: Callable[[Contrast], Found]
    packages: tuple[str, ...]


RIVALS: dict[str, Rival] = {
    "scvi-uniform": Rival(scvi_uniform, ("scvi", "anndata")),
    "scvi-importance": Rival(scvi_importance, ("scvi", "anndata")),
    "wilcoxon": Rival(wilcoxon, ("scanpy", "anndata")),
    "pseudobulk": Rival(pseudobulk, ("pydeseq2.dds", "pydeseq2.ds", "pydeseq2.default_inference", "pandas")),
}
"""The rivals by the name they have in tables."""


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
    """Rows of metrics and seconds of the named rivals, for every number of cells a side (None: all).

    scvi-tools is trained once, on all cells, and asked about the cells of the contrast; ``seconds_train`` is apart from
    ``seconds``. Every rival is held against both truths: ``estimand`` is ``proportion`` for changes of proportions,
    which normalised expression shows, and ``centred`` for changes of expression itself. Pseudobulk is left out where
    there are no donors.
    """
    unknown = [name for name in names if name not in RIVALS]
    if unknown:
        raise SettingError(f"no rival {', '.join(unknown)}; there are {', '.join(RIVALS)}.")
    names = [name for name in names if name != "pseudobulk" or data.donors is not None]
    for package in dict.fromkeys(package for name in names for package in RIVALS[name].packages):
        require(package, "rivals")  # before anything is trained or timed
    scvi = [name for name in names if name.startswith("scvi")]
    fit = train_scvi(data.counts, seed=seed, max_epochs=max_epochs) if scvi else None
    rows = []
    for n in n_cells:
        a, b = (side_cells(data.labels, group, n, seed=seed) for group in (group_a, group_b))
        contrast = Contrast(data.counts, a, b, delta, data.donors, fit.model if fit else None)
        shared = {"proposal": None, "seed": seed, "n_cells": n or "all"}
        for name in names:
            found, seconds = ask(RIVALS[name], contrast, seed)
            spent = {"seconds": seconds, "seconds_train": fit.seconds if fit and name in scvi else 0.0}
            for estimand in ("centred", "proportion"):
                truth = data.lfc(group_a, group_b, proportions=estimand == "proportion")
                row = {"model": name, **shared, "estimand": estimand, **spent}
                rows.append(row | found.measure(truth, delta))
    return rows


def side_cells(labels: Tensor, group: int, n_cells: int | None, *, seed: int) -> Tensor:
    """The cells of a group that take part in a contrast: all, or `n_cells` of them at random."""
    cells = (labels == group).nonzero().flatten()
    if n_cells is None:
        return cells
    if n_cells > len(cells):
        raise SettingError(f"n_cells={n_cells} of group {group} were asked for, it has {len(cells)}.")
    return cells[torch.randperm(len(cells), generator=seeded(seed))[:n_cells]].sort().values


def ask(rival: Rival, contrast: Contrast, seed: int) -> tuple[Found, float]:
    """A rival's answer and the seconds it took."""
    with isolated(seed):
        started = time.perf_counter()
        return rival.answer(contrast), time.perf_counter() - started


def _column(table: Any, name: str) -> Tensor:
    return torch.as_tensor(table[name].to_numpy(dtype=np.float64, copy=True))
