"""Other methods on the gene experiment's data: the tests of `vaerdict.de.rivals`, scvi-tools, and `vaerdict de`.

scvi-tools is asked in its own mode, for the change between two random cells, and for the change of the group means of
its normalised expression. `vaerdict de` is `vaerdict.differential_expression` of the counts with its defaults, without
any model. Both give probabilities that |LFC| >= delta, which have an error as estimates of the FDR; the adjusted
p-values of the tests are no such estimates. Each rival is scored by the truth of what it estimates: scvi-tools and
scanpy by changes of proportions, centred group means, DESeq2, edgeR and `vaerdict de` by changes of expression. The
simulators change every gene at least a little, so that only tests of a change beyond delta are compared.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

import vaerdict as vd
from vaerdict.core import SettingError
from vaerdict.datasets.genes import appendix
from vaerdict.de import effects, rivals
from vaerdict.de.metrics import measure, measure_ranked
from vaerdict.de.rivals import BEYOND_DELTA, Comparison
from vaerdict.optional import isolated, require
from vaerdict_paper.experiments.genes_contrasts import Sides
from vaerdict_paper.experiments.genes_measure import measured_table

CENTRED, PROPORTION = "centred", "proportion"
"""Truths: the change of expression, and that of proportions."""

ON_CELLS = ", cells"
"""Ends the name of a test that takes the cells of donors as its replicates."""

IMPORTANCE, COUNTS = "scvi-importance", "vaerdict de"

PAIRS, LATENT_DRAWS, BOOTSTRAP = 5000, 25, 500
"""Random pairs of cells in scvi-tools' own mode (its default); draws of the latents, and resamples of the cells, behind
group means of its normalised expression."""


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


class ScviContrast(NamedTuple):
    """Cells of two groups, a over b, among all cells of a fitted scvi-tools model.

    Shapes: ``a (n_a,)`` and ``b (n_b,)`` indices of cells.
    """

    model: Any
    a: Tensor
    b: Tensor
    delta: float


class ScviAnswer(NamedTuple):
    """Per gene the log2 fold change, the probability of |LFC| >= delta, and the seconds. Shapes: ``(genes,)``."""

    lfc: Tensor
    prob: Tensor
    seconds: float = 0.0


# ---------------------------------------------------------------------------------------------------- scvi-tools
def scvi_mode(contrast: ScviContrast, weights: str = "uniform", **settings: Any) -> ScviAnswer:
    """``differential_expression`` of scvi-tools in mode ``change``: pairs of random cells, latents from the encoder.

    With ``weights="importance"`` outlying cells are left out first, as its documentation asks for, and `settings` are
    those of its ``get_importance_weights``, with its defaults.
    """
    more = {} if weights == "uniform" else {"importance_weighting_kwargs": settings, "filter_outlier_cells": True}
    table = contrast.model.differential_expression(
        idx1=contrast.a.numpy(),
        idx2=contrast.b.numpy(),
        mode="change",
        delta=contrast.delta,
        weights=weights,
        all_stats=False,
        silent=True,
        **more,
    ).loc[contrast.model.adata.var_names]
    lfc, prob = (torch.as_tensor(table[c].to_numpy(dtype=np.float64, copy=True)) for c in ("lfc_mean", "proba_de"))
    return ScviAnswer(lfc, prob)


def scvi_means(contrast: ScviContrast, *, centred: bool = False) -> ScviAnswer:
    """The change of the group means of normalised expression, with a bootstrap over cells.

    Each resample of the cells of a group (Bayesian bootstrap) is averaged under one draw of their latents. `centred`
    subtracts the median over genes from every draw of the fold changes.
    """
    log_means = [_log2_means(contrast.model, cells.numpy()) for cells in (contrast.a, contrast.b)]
    lfc = log_means[0] - log_means[1]
    if centred:
        lfc = effects.CENTRED.of(lfc)
    return ScviAnswer(lfc.mean(0), (lfc.abs() >= contrast.delta).double().mean(0))


def _log2_means(model: Any, cells: np.ndarray) -> Tensor:
    """log2 of resampled group means of normalised expression. Shapes: ``(cells,) -> (BOOTSTRAP, genes)``."""
    drawn = model.get_normalized_expression(
        indices=cells, n_samples=LATENT_DRAWS, return_mean=False, return_numpy=True, silent=True
    )
    drawn = torch.as_tensor(np.asarray(drawn, dtype=np.float64))  # (LATENT_DRAWS, cells, genes)
    # as `vaerdict.de.model.Bootstrap`: with as much spread as the usual standard error
    share = np.random.dirichlet(np.full(len(cells), 1 - 2 / len(cells)), BOOTSTRAP)  # noqa: NPY002
    weights = torch.as_tensor(share).reshape(LATENT_DRAWS, -1, len(cells))
    return (weights @ drawn).flatten(0, 1).log2()


SCVI: dict[str, tuple[Callable[[ScviContrast], ScviAnswer], str]] = {
    "scvi-uniform": (scvi_mode, PROPORTION),
    IMPORTANCE: (partial(scvi_mode, weights="importance"), PROPORTION),
    "scvi-means": (scvi_means, PROPORTION),
    "scvi-means-centred": (partial(scvi_means, centred=True), CENTRED),
}
"""The answers of scvi-tools by their names in tables, and the truth of each."""

TESTS = tuple(name for name, rival in rivals.RIVALS.items() if rival.question == BEYOND_DELTA)
NAMES = (*SCVI, *TESTS, COUNTS, *(name + ON_CELLS for name in TESTS))
"""All rivals. Tests are of donors where there are any, and of cells where their name says so or there are none."""


def packages(names: Sequence[str]) -> list[str]:
    """The packages that rivals need."""
    return list(dict.fromkeys(_package(name) for name in names))


def _package(name: str) -> str:
    others = {COUNTS: "anndata", **dict.fromkeys(SCVI, "scvi")}
    return others[name] if name in others else rivals.RIVALS[_test(name)].package


def _test(name: str) -> str:
    return name.removesuffix(ON_CELLS)


def timed_scvi(answer: Callable[[ScviContrast], ScviAnswer], contrast: ScviContrast, seed: int) -> ScviAnswer:
    """An answer of scvi-tools with its seconds."""
    with isolated(seed):
        started = time.perf_counter()
        return answer(contrast)._replace(seconds=time.perf_counter() - started)


# ---------------------------------------------------------------------------------------------------- vaerdict de
def counts_answer(sides: Sides, delta: float, *, seed: int = 0) -> dict[str, Tensor]:
    """The table of `vaerdict.differential_expression` with its defaults, and its ``seconds``.

    It sees the cells compared alone. Donors are the samples where there are any. Genes that it does not test have
    probability and fold change zero, and no interval.

    Shapes: ``prob_de``, ``lfc_mean``, ``lfc_low`` and ``lfc_high`` ``(genes,)``.
    """
    pandas, anndata = require("pandas", "bio"), require("anndata", "bio")
    columns: dict[str, Any] = {"group": np.where(sides.labels.numpy() == 0, "a", "b")}
    if sides.data.donors is not None:
        columns["donor"] = [f"donor {i}" for i in sides.data.donors[sides.cells].tolist()]
    counts = sides.data.counts[sides.cells].numpy()
    genes = [f"g{i}" for i in range(counts.shape[1])]
    with isolated(seed):
        rows = pandas.Index([f"c{i}" for i in range(len(counts))])
        adata = anndata.AnnData(counts, obs=pandas.DataFrame(columns, rows), var=pandas.DataFrame(index=genes))
        started = time.perf_counter()
        table = vd.differential_expression(
            adata, "group", "a", "b", sample_key="donor" if "donor" in columns else None, delta=delta, seed=seed
        ).table.set_index("gene")
        seconds = time.perf_counter() - started
    absent = {"lfc_low": np.nan, "lfc_high": np.nan}
    made = {
        name: torch.as_tensor(
            table[name].reindex(genes, fill_value=absent.get(name, 0.0)).to_numpy(np.float64, copy=True)
        )
        for name in ("prob_up", "prob_down", "lfc_mean", "lfc_low", "lfc_high")
    }
    prob = (made.pop("prob_up") + made.pop("prob_down")).clamp_max(1)  # of a change either way, as the others give it
    return {"prob_de": prob, **made, "seconds": torch.tensor(seconds)}


# ---------------------------------------------------------------------------------------------------- the rows
def rival_rows(
    contrasts: Sequence[tuple[int | str, int, Sides]],
    *,
    delta: float = 0.5,
    names: Sequence[str] = (*SCVI, *TESTS, COUNTS),
    seed: int = 0,
    max_epochs: int | None = None,
) -> list[dict[str, Any]]:
    """Metrics and seconds of rivals, one row per contrast and rival.

    scvi-tools is trained once, on all cells; ``seconds_train`` is not part of ``seconds``. Its importance mode, the
    slowest, compares all cells alone. ``estimand`` is the truth that a rival is scored by.

    Parameters
    ----------
    contrasts
        Contrasts of one data set, as `vaerdict_paper.experiments.genes_contrasts.contrasts` makes them.
    delta
        The threshold of |LFC|.
    names
        The rivals to run, of `NAMES`.
    seed
        The seed of training.
    max_epochs
        Epochs of scvi-tools; its default if None.
    """
    unknown = [name for name in names if name not in NAMES]
    if unknown:
        raise SettingError(f"no rival {', '.join(unknown)}; there are {', '.join(NAMES)}.")
    for package in packages(names):  # before anything is trained or timed
        require(package, "rivals", distribution="vaerdict-paper")
    data = contrasts[0][2].data
    fit = train_scvi(data.counts, seed=seed, max_epochs=max_epochs) if any(name in SCVI for name in names) else None
    _warm_up(names)
    rows = []
    for n_cells, _, sides in contrasts:
        shared = {"proposal": None, "seed": seed, "n_cells": n_cells}
        truth = {e: data.lfc(*sides.states, proportions=e == PROPORTION).double() for e in (CENTRED, PROPORTION)}
        tested = _tested(sides, delta, names, seed)
        for name in names:
            if name in SCVI and (name != IMPORTANCE or n_cells == "all"):
                assert fit is not None
                made = _scvi_row(name, ScviContrast(fit.model, sides.a, sides.b, delta), truth, seed)
                rows.append({"model": name, **shared, **made, "seconds_train": fit.seconds})
            elif name == COUNTS:
                rows.append({"model": name, **shared, **_counts_row(sides, truth[CENTRED], delta, seed)})
            elif name in tested:
                rows.append({"model": name, **shared, **_test_row(name, tested[name], truth, delta)})
    return rows


def _warm_up(names: Sequence[str]) -> None:
    """Ask every rival that is timed once about few cells: the first call imports and compiles."""
    tests = [name for name in names if name not in SCVI and name != COUNTS]
    sides = Sides.of(appendix(0, n_cells=40, n_genes=10), None, seed=0)
    if COUNTS in names:
        counts_answer(sides, 0.5)
    _tested(sides, 0.5, list(dict.fromkeys(map(_test, tests))), 0)


def _scvi_row(name: str, contrast: ScviContrast, truth: dict[str, Tensor], seed: int) -> dict[str, Any]:
    method, estimand = SCVI[name]
    answer = timed_scvi(method, contrast, seed)
    metrics = measure(answer.prob, answer.lfc, truth[estimand], contrast.delta)
    n_draws = BOOTSTRAP if name.startswith("scvi-means") else PAIRS
    return {"estimand": estimand, "seconds": answer.seconds, "n_draws": n_draws, **metrics}


def _counts_row(sides: Sides, truth: Tensor, delta: float, seed: int) -> dict[str, Any]:
    answer = counts_answer(sides, delta, seed=seed)
    metrics = measure(answer["prob_de"], answer["lfc_mean"], truth, delta)
    shared = {"estimand": CENTRED, "seconds": answer["seconds"].item(), "seconds_train": 0.0}
    return {**shared, **metrics, **measured_table(answer, truth, centred=True)}


def _test_row(name: str, answer: rivals.RivalAnswer, truth: dict[str, Tensor], delta: float) -> dict[str, Any]:
    estimand = PROPORTION if rivals.RIVALS[_test(name)].package == "scanpy" else CENTRED
    order = answer.ranking()
    metrics = measure_ranked(torch.from_numpy(order), torch.from_numpy(answer.q[order]), truth[estimand].abs() >= delta)
    return {"estimand": estimand, "seconds": answer.seconds, "seconds_train": 0.0, **metrics}


def _tested(sides: Sides, delta: float, names: Sequence[str], seed: int) -> dict[str, rivals.RivalAnswer]:
    """The answers of the tests, by donors and by cells."""
    counts, first = sides.data.counts[sides.cells].numpy(), sides.labels.numpy() == 0
    donors = None if sides.data.donors is None else sides.data.donors[sides.cells].numpy()
    tests = [name for name in names if name not in SCVI and name != COUNTS]
    answers: dict[str, rivals.RivalAnswer] = {}
    for samples, on_cells in ((donors, False), (None, True)):
        asked = [name for name in tests if name.endswith(ON_CELLS) == on_cells]
        if asked:
            made = Comparison(counts, first, delta, samples)
            tested = rivals.rival_answers(made, [_test(name) for name in asked], seed=seed)
            answers |= {name: tested[_test(name)] for name in asked}
    return answers
