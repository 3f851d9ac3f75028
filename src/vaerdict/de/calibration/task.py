"""The task of one split: compare the halves as the user would, and count the false calls."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch

from vaerdict.de.calibration.halves import deal, kept_shares, planted, thinned, true_lfc
from vaerdict.de.calibration.strata import Intervals, by_stratum, counted, stratify
from vaerdict.de.calibration.undoing import undo_changes
from vaerdict.de.contrasts import FEWEST_CELLS
from vaerdict.de.data import column, gene_names
from vaerdict.de.metrics import measure
from vaerdict.de.pipeline import differential_expression
from vaerdict.de.rivals import ANY_CHANGE, BEYOND_DELTA, RIVALS, Comparison, RivalAnswer, rival_answers
from vaerdict.de.tables import LARGEST_LFSR
from vaerdict.optional import isolated, require
from vaerdict.tasks import Task

NULL, MIXED, SPIKE, UNDONE = "null", "mixed", "spike", "undone"
"""Kinds of splits, in the order in which they are made."""

LEVELS = (0.01, 0.05, 0.1, 0.2)
"""False discovery rates at which genes are called, besides the one asked for."""

REPORTED = "reported"
"""The method that is calibrated; other methods go by their names in `vaerdict.de.rivals`."""

HALF, FIRST, SECOND = "vaerdict half", "first half", "second half"
"""The column of obs that names the halves, and their names."""


class Compared(NamedTuple):
    """The table of genes of a comparison of the halves, its contrasts, and the answers of the rivals to its rows.

    `expression` is the share of all molecules that a gene has in both halves, before anything was planted. Shapes:
    ``genes (rows,)``, the gene of each row among all; ``expression (rows,)``; rivals have one value per row.
    """

    table: Any
    contrasts: Sequence[dict[str, Any]]
    genes: np.ndarray
    expression: np.ndarray
    rivals: dict[str, RivalAnswer]


def split_work(path: str, task: Task) -> dict[str, Any]:
    """Compare the halves of one split of the cells stored at `path`, unchanged or with changes planted or undone.

    `task` names the `groups` that are split or compared, the samples in the `first` half (None where cells are split),
    the `entropy` of the split, the `analysis_seed` and the `rivals`; `options` are those of `differential_expression`.
    """
    cells, rng = _stored(path, task["data"]), np.random.default_rng(task["entropy"])
    half = halves(cells, task, rng)
    if task["stage"] == SPIKE:
        return _spiked(cells, half, task, rng)
    return _undone(cells, half, task, rng) if task["stage"] == UNDONE else _unchanged(cells, half, task)


@lru_cache(maxsize=1)
def _stored(path: str, _digest: str) -> Any:
    with isolated(0):
        return require("anndata", "bio").read_h5ad(path)


def halves(cells: Any, task: Task, rng: np.random.Generator) -> np.ndarray:
    """0 for cells of the first half, 1 for the second, -1 for all others. Shapes: ``-> (cells,)``.

    Where changes are undone, the first half is of the first group and the second half of the second group, so that
    two groups are compared with as many cells as the halves of either have. Groups are pooled otherwise.
    """
    group, half = column(cells, task["groupby"], role="groupby"), np.full(cells.n_obs, -1)
    if task["first"] is not None:
        members = np.flatnonzero(np.isin(group, task["groups"]))
        owners = column(cells, task["options"]["sample_key"], role="sample_key")[members]
        half[members] = [-1 if owner is None else 0 if owner in task["first"] else 1 for owner in owners]
        return half
    apart = task["stage"] == UNDONE
    for number, groups in enumerate([[name] for name in task["groups"]] if apart else [task["groups"]]):
        members = np.flatnonzero(np.isin(group, groups))
        side = np.where(deal(_strata(cells, members, task), rng, task["share"]), 0, 1)
        half[members] = np.where(side == number, number, -1) if apart else side
    return half


def _strata(cells: Any, members: np.ndarray, task: Task) -> np.ndarray:
    """What both halves have in equal parts: types and what is to be balanced. Shapes: ``members (n,) -> (n,)``."""
    keys = {"within": task["options"]["within"], "balance": task["balance"]}
    labels = [column(cells, key, role=role)[members] for role, key in keys.items() if key is not None]
    strata = ["\0".join(map(str, cell)) for cell in zip(*labels, strict=True)] or [""] * len(members)
    return np.array(strata, dtype=object)


def _unchanged(cells: Any, half: np.ndarray, task: Task) -> dict[str, Any]:
    """No gene changed: all calls are false. Where samples were split, also with cells as replicates.

    In halves of several groups pooled the mix of groups differs by chance, as cell states do in a real comparison.
    """
    measures: dict[str, Any] = {}
    for replicates in ["samples", "cells"] if task["options"]["sample_key"] else ["cells"]:
        compared = _compared(cells.X, cells, half, task, samples=replicates == "samples")
        zero = np.zeros(len(compared.table))
        for key, rows in _measured(compared, zero, zero, task, replicates).items():
            measures[key] = measures.get(key, []) + rows
    return measures


def _spiked(cells: Any, half: np.ndarray, task: Task, rng: np.random.Generator) -> dict[str, Any]:
    """Changes are planted between the halves, which are the truth that calls are judged by."""
    members, samples = half >= 0, task["options"]["sample_key"] is not None
    lfc = planted(np.asarray(cells.X[members].mean(0)).ravel(), task["options"]["delta"], rng)
    shares = kept_shares(lfc)
    compared = _compared(thinned(cells.X, half, shares, rng), cells, half, task, samples=samples)
    truth = _truth(cells, members, shares, compared, task["options"])
    return _measured(compared, lfc[compared.genes], truth, task, "samples" if samples else "cells")


def _undone(cells: Any, half: np.ndarray, task: Task, rng: np.random.Generator) -> dict[str, Any]:
    """Two groups differ, but the change of some genes was undone: their calls are false, others are not judged."""
    counts, undone = undo_changes(cells, task, rng)
    compared = _compared(counts, cells, half, task, samples=False)
    false = np.zeros(len(compared.genes), dtype=bool)
    for row in compared.contrasts:
        inside = (compared.table["contrast"] == row["name"]).to_numpy()
        false[inside] = np.isin(compared.genes[inside], undone.get(row["within"], ()))
    rows = _calls(compared, {BEYOND_DELTA: ~false, ANY_CHANGE: ~false}, task, "cells")
    unknown = {"n_true": None, "tpr": None}
    return {"rows": [row | unknown for row in rows], "overall": [], "strata": []}


def _compared(counts: Any, cells: Any, half: np.ndarray, task: Task, *, samples: bool) -> Compared:
    """The comparison of the halves with the options of the analysis, and the rivals on the same cells and genes."""
    pandas, anndata = require("pandas", "bio"), require("anndata", "bio")
    labels = column(cells, task["groupby"], role="groupby")
    others = [None if label is None else f"of {label}" for label in labels]
    names = [other if h < 0 else (FIRST, SECOND)[h] for h, other in zip(half, others, strict=True)]
    obs = cells.obs.assign(**{HALF: pandas.Categorical(names)})
    # cells of the groups in neither half are no cells to learn from: the analysis itself would compare them
    there = (half >= 0) | ~np.isin(labels, task["groups"])
    read = counts[there]
    layers = {} if task["model_layer"] is None else {task["model_layer"]: read}
    options = task["options"] if samples else task["options"] | {"sample_key": None}
    result = differential_expression(
        anndata.AnnData(read, obs=obs[there], var=cells.var, layers=layers),
        HALF,
        FIRST,
        SECOND,
        model=task["model"],
        device=task["device"],
        **options | {"layer": None, "clustered": False, "seed": task["analysis_seed"]},
    )
    place = {name: i for i, name in enumerate(gene_names(cells, options["gene_symbols"], []))}
    genes = np.array([place[gene] for gene in result.table["gene"]])
    compared = Compared(result.table, result.results["contrasts"], genes, np.zeros(len(genes)), {})
    for rows, inside in _contrast_cells(cells, half >= 0, compared, options):
        molecules = np.asarray(cells.X[inside].sum(0), dtype=np.float64).ravel()
        compared.expression[rows] = molecules[genes[rows]] / max(molecules.sum(), 1.0)
    return compared._replace(rivals=_rivals(counts, cells, half, compared, task, options))


def _rivals(
    counts: Any, cells: Any, half: np.ndarray, compared: Compared, task: Task, options: dict[str, Any]
) -> dict[str, RivalAnswer]:
    """The answers of the rivals to all rows of the table. Batches are blocks of their design where cells are tested."""
    lfc, p, q = ({name: np.full(len(compared.table), np.nan) for name in task["rivals"]} for _ in range(3))
    samples, batches = (
        column(cells, options[key], role=key) if options[key] else None for key in ("sample_key", "batch_key")
    )
    for rows, inside in _contrast_cells(cells, half >= 0, compared, options) if task["rivals"] else ():
        if samples is not None:  # as in the analysis, samples of few cells are left out
            sizes = Counter(samples[inside])
            inside = inside & np.array([sizes[sample] >= FEWEST_CELLS for sample in samples])
        comparison = Comparison(
            counts[inside][:, compared.genes[rows]],
            half[inside] == 0,
            options["delta"],
            samples=None if samples is None else samples[inside],
            pairs=batches[inside] if batches is not None and samples is None else None,
            totals=np.asarray(counts[inside].sum(1)).ravel(),
        )
        for name, answer in rival_answers(comparison, task["rivals"], seed=task["analysis_seed"]).items():
            lfc[name][rows], p[name][rows], q[name][rows] = answer.lfc, answer.p, answer.q
    return {name: RivalAnswer(lfc[name], p[name], q[name]) for name in task["rivals"]}


def _contrast_cells(
    cells: Any, members: np.ndarray, compared: Compared, options: dict[str, Any]
) -> Iterable[tuple[np.ndarray, np.ndarray]]:
    """For each contrast the mask of its rows of the table, and that of its cells."""
    contrast = compared.table["contrast"].to_numpy()
    for row in compared.contrasts:
        inside = members
        if row["within"] is not None:
            inside = members & (column(cells, options["within"], role="within") == row["within"])
        yield contrast == row["name"], inside


def _truth(
    cells: Any, members: np.ndarray, shares: np.ndarray, compared: Compared, options: dict[str, Any]
) -> np.ndarray:
    """The true fold changes of the rows of the table, on its scale. Shapes: ``-> (rows,)``."""
    truth = np.zeros(len(compared.genes))
    for rows, inside in _contrast_cells(cells, members, compared, options):
        owners = column(cells, options["sample_key"], role="sample_key")[inside] if options["sample_key"] else None
        change = true_lfc(cells.X[inside], shares, owners, centred=options["scale"] == "centred")
        truth[rows] = change[compared.genes[rows]]
    return truth


# ------------------------------------------------------------------------------------------------------ measures
def _measured(compared: Compared, size: np.ndarray, truth: np.ndarray, task: Task, replicates: str) -> dict[str, Any]:
    """Everything that is measured of one comparison whose truth is known: a list of rows for each kind of measure.

    Shapes: ``size (rows,)`` the changes planted and ``truth (rows,)`` those that resulted.
    """
    delta, asked = task["options"]["delta"], task["options"]["level"]
    truths = {BEYOND_DELTA: np.abs(truth) >= delta, ANY_CHANGE: size != 0}
    columns = ("prob_de", "lfc_mean", "lfc_low", "lfc_high")
    prob, lfc, low, high = (compared.table[name].to_numpy(dtype=np.float64) for name in columns)
    intervals = Intervals((low <= truth) & (truth <= high), truth - lfc)
    mae = measure(torch.from_numpy(prob), torch.from_numpy(lfc), torch.from_numpy(truth), delta)["fdr_mae"]
    strata, parts = stratify(compared.expression, size, truth, delta), []
    for names, called_at in _methods(compared, task, replicates):
        own = intervals if names["method"] == REPORTED else None
        measured = by_stratum(strata, called_at(asked), truths[names["question"]], size, own)
        parts += [{**names, **row} for row in measured]
    overall = {**_names(task, replicates), "method": REPORTED, "fdr_mae": mae}
    return {"rows": _calls(compared, truths, task, replicates), "overall": [overall], "strata": parts}


def _names(task: Task, replicates: str) -> dict[str, Any]:
    return {"kind": task["stage"], "group": task["group"], "split": task["seed"], "replicates": replicates}


def _methods(
    compared: Compared, task: Task, replicates: str
) -> Iterable[tuple[dict[str, Any], Callable[[float], np.ndarray]]]:
    """The names of every method and of its question, and the genes that it calls at a level."""
    asked, names = task["options"]["level"], _names(task, replicates)
    is_de = compared.table["is_de"].to_numpy(dtype=bool)
    q, lfsr = (compared.table[name].to_numpy(dtype=np.float64) for name in ("q_value", "lfsr"))

    def reported(level: float) -> np.ndarray:
        return is_de if level == asked else (q <= level) & (lfsr < LARGEST_LFSR)

    yield {**names, "method": REPORTED, "question": BEYOND_DELTA}, reported
    for name, answer in compared.rivals.items():
        yield {**names, "method": name, "question": RIVALS[name].question}, answer.called


def _calls(compared: Compared, truths: Mapping[str, np.ndarray], task: Task, replicates: str) -> list[dict[str, Any]]:
    """What every method calls in each list at each level, judged by the question that it answers.

    Shapes: ``truths (rows,)`` bool, the genes that changed by delta, and at all.
    """
    levels = sorted({*LEVELS, task["options"]["level"]})
    lists = _lists(compared, joint=task["options"]["joint_fdr"])
    prob, rows = compared.table["prob_de"].to_numpy(dtype=np.float64), []
    for names, called_at in _methods(compared, task, replicates):
        own = prob if names["method"] == REPORTED else None
        rows += [{**names, **row} for row in calls(called_at, truths[names["question"]], levels, lists, own)]
    return rows


def _lists(compared: Compared, *, joint: bool) -> dict[str | None, np.ndarray]:
    """The rows of each list of genes that an FDR is about, by its cell type: one per contrast, or all together."""
    if joint:
        return {None: np.ones(len(compared.table), dtype=bool)}
    contrast = compared.table["contrast"].to_numpy()
    return {row["within"]: contrast == row["name"] for row in compared.contrasts}


def calls(
    called_at: Callable[[float], np.ndarray],
    changed: np.ndarray,
    levels: Sequence[float],
    lists: Mapping[str | None, np.ndarray],
    prob: np.ndarray | None = None,
) -> list[dict[str, Any]]:
    """The numbers of genes called in each list at each level and of the false ones among them.

    `prob` are the probabilities by which a method states the FDR of its list; adjusted p-values state none. Shapes:
    ``changed (genes,)`` bool, ``prob (genes,)``; `called_at` gives a mask ``(genes,)`` for a level, `lists` are masks.
    """
    rows = []
    for level in levels:
        called = called_at(level)
        for within, inside in lists.items():
            mine = called & inside
            stated = None if prob is None else float((1 - prob[mine]).mean()) if mine.any() else 0.0
            numbers = counted(called[inside], changed[inside])
            rows.append({"within": within, "level": level, **numbers, "expected_fdr": stated})
    return rows
