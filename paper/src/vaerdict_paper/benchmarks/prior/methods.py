"""The methods on the cells of a case: ours with each prior, and other tests, which see the cells compared alone."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import numpy as np

import vaerdict as vd
from vaerdict.core import SettingError
from vaerdict.de.rivals import RIVALS, Comparison, check_rivals, rival_answers
from vaerdict.optional import isolated, require
from vaerdict.tasks import Skipped
from vaerdict_paper.benchmarks.prior.designs import BATCHES, FIRST, OTHER, PAIRS, SAMPLES, SECOND, Cells
from vaerdict_paper.benchmarks.prior.measures import LEVEL, Answer, Truth

DELTA = 0.5
COUNTS, PROFILE, MODEL = "none", "profile", "model"
"""Priors of ours; the first are the counts alone."""

TESTS = ("wilcoxon", "edger", "edger-treat")
_TRUTH_CELLS = 3  # in which a gene must be seen


def ours(cells: Cells, prior: str, seed: int, **options: Any) -> tuple[Any, float]:
    """The result of `vaerdict.differential_expression` of all expressed genes, and its seconds."""
    pandas, anndata = require("pandas", "bio"), require("anndata", "bio")
    names = [f"g{i}" for i in range(cells.counts.shape[1])]
    columns = {"side": pandas.Categorical(cells.side)}
    if cells.role is not None:
        columns["unit"] = pandas.Categorical(cells.unit)
        options[cells.role] = "unit"
    obs = pandas.DataFrame(columns, index=[f"c{i}" for i in range(len(cells.side))])
    with isolated(seed):
        adata = anndata.AnnData(cells.counts, obs=obs, var=pandas.DataFrame(index=names))
        started = time.perf_counter()
        result = vd.differential_expression(
            adata, "side", FIRST, SECOND, prior=prior, delta=DELTA, level=LEVEL, n_top_genes=0, seed=seed, **options
        )
    return result, time.perf_counter() - started


def answer_of(result: Any) -> Answer:
    """Calls, ranking and intervals of ours."""
    table = result.table
    names = ("lfc_mean", "q_value", "prob_de", "lfc_low", "lfc_high")
    lfc, q, prob, low, high = (table[name].to_numpy(dtype=np.float64) for name in names)
    order = np.lexsort([-np.abs(lfc), -prob, q])
    return Answer(_places(table), table["is_de"].to_numpy(dtype=bool), lfc, q, order, (low, high))


def truth_of(cells: Cells, seed: int) -> Truth:
    """What cells tell by the counts alone: intervals without shrinkage, probabilities with it."""
    table = ours(cells, COUNTS, seed, shrinkage=False, min_cells=_TRUTH_CELLS)[0].table
    columns, genes = ("lfc_median", "lfc_low", "lfc_high", "prob_up", "prob_down"), _places(table)
    values = np.full((len(columns), cells.counts.shape[1]), np.nan)
    values[:, genes] = table[list(columns)].to_numpy(dtype=np.float64).T
    return Truth(*values)


def _places(table: Any) -> np.ndarray:
    return np.array([int(name[1:]) for name in table["gene"]])


def tested(cells: Cells, genes: np.ndarray, seed: int) -> Iterator[tuple[str, str, float, Answer]]:
    """Name, question, seconds and answer of each of `TESTS` on the same genes."""
    try:
        check_rivals(TESTS)
    except SettingError as error:
        raise Skipped(str(error)) from error
    compared = cells.side != OTHER
    counts, unit = cells.counts[compared], None if cells.unit is None else cells.unit[compared]
    samples = unit if cells.role in (SAMPLES, PAIRS) else None
    pairs = unit if cells.role == BATCHES else None
    totals = np.asarray(counts.sum(1)).ravel()
    made = Comparison(counts[:, genes], cells.side[compared] == FIRST, DELTA, samples, pairs, totals)
    for name, answer in rival_answers(made, TESTS, seed=seed).items():
        own = Answer(genes, answer.called(LEVEL), np.nan_to_num(answer.lfc), answer.q, answer.ranking())
        yield name, RIVALS[name].question, answer.seconds, own
