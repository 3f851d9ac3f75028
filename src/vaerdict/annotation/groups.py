"""Groups of novel cells with their marker genes, and the clusters that the reference explains least."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
from scipy.cluster import hierarchy

from vaerdict.annotation.options import AnnotateOptions
from vaerdict.core import VaerdictError
from vaerdict.de import differential_expression
from vaerdict.optional import require

GROUP = "vaerdict_novel_group"
"""The column of obs by which groups of novel cells are compared with all other cells."""

N_MARKERS = 15
FEWEST = 3
"""Least number of cells of a group whose markers are sought, as `vaerdict de` needs."""

_N_RANKED = 20


def group_cells(features: np.ndarray, unit: np.ndarray, centers: np.ndarray) -> np.ndarray:
    """Groups of novel cells, 1, 2, ... by falling size: their units, joined where they are nearer than types are.

    Means of units are joined by average linkage, up to the median distance of a type to the nearest other one.

    Shapes: ``features (n, d)``, ``unit (n,)``, ``centers (types, d)``, ``-> (n,)``.
    """
    _, unit = np.unique(unit, return_inverse=True)
    joined = np.zeros(1, dtype=int)
    if unit.max() > 0:
        means = np.stack([features[unit == u].mean(0) for u in range(unit.max() + 1)])
        apart = np.linalg.norm(centers[:, None] - centers, axis=-1)
        np.fill_diagonal(apart, np.inf)
        joined = hierarchy.fcluster(hierarchy.linkage(means, "average"), np.median(apart.min(1)), "distance")
    _, code, size = np.unique(joined[unit], return_inverse=True, return_counts=True)
    rank = np.empty(len(size), dtype=int)
    rank[np.argsort(-size, kind="stable")] = np.arange(1, len(size) + 1)
    return rank[code]


def group_records(group: np.ndarray, predicted: np.ndarray, p: np.ndarray, q: np.ndarray) -> list[dict[str, Any]]:
    """Size, nearest types, largest p and q of every group of novel cells; group 0 are the other cells.

    Shapes: ``(cells,)`` each.
    """
    records = []
    for number in range(1, int(group.max(initial=0)) + 1):
        rows = group == number
        names, count = np.unique(predicted[rows].astype(str), return_counts=True)
        most = np.argsort(-count, kind="stable")[:3]
        nearest = [{"type": str(names[i]), "share": float(count[i] / rows.sum())} for i in most]
        largest = {"p_max": float(p[rows].max()), "q_max": float(q[rows].max())}
        records.append({"group": number, "n_cells": int(rows.sum()), "nearest": nearest, **largest})
    return records


def add_markers(
    records: list[dict[str, Any]], query: Any, group: np.ndarray, options: AnnotateOptions, warnings: list[str]
) -> None:
    """Add to each record the genes that are higher in the group than in all other cells of the query.

    Shapes: ``group (all cells of the query,)``, None for cells that were not read.
    """
    names = {record["group"]: f"novel {record['group']}" for record in records if record["n_cells"] >= FEWEST}
    for record in records:
        record["markers"] = []
    if not names:
        return
    labels = np.array([names.get(g, "other") if g is not None else None for g in group], dtype=object)
    pairs: Sequence[Any] = [(name, None) for name in names.values()]
    try:
        symbols = options.gene_symbols if options.gene_symbols in query.var else None
        with _grouped(query, labels, options.layer) as (adata, layer):
            result = differential_expression(
                adata, GROUP, pairs=pairs, layer=layer, gene_symbols=symbols, seed=options.seed
            )
    except VaerdictError as error:
        warnings.append(f"marker genes were not sought: {error}")
        return
    for record in records:
        called = result.discoveries(f"{names.get(record['group'])} vs rest") if record["group"] in names else None
        if called is not None:
            higher = called[called["lfc_mean"] > 0].head(N_MARKERS)
            record["markers"] = [
                {"gene": str(g), "lfc": float(lfc), "seen": float(a), "seen_others": float(b)}
                for g, lfc, a, b in zip(*(higher[c] for c in ("gene", "lfc_mean", "seen_a", "seen_b")), strict=True)
            ]


@contextmanager
def _grouped(query: Any, labels: np.ndarray, layer: str | None) -> Iterator[tuple[Any, str | None]]:
    """The query with a column of groups, its counts not copied, and the layer of the counts there."""
    if getattr(query, "isbacked", False) and not query.is_view:
        obs = query.obs
        query.obs = obs.assign(**{GROUP: labels})
        try:
            yield query, layer
        finally:
            query.obs = obs
        return
    obs = require("pandas", "bio").DataFrame({GROUP: labels}, index=query.obs_names)
    counts = query.X if layer is None else query.layers[layer]
    yield require("anndata", "bio").AnnData(counts, obs=obs, var=query.var), None


def ranked_units(unit: np.ndarray, score: np.ndarray, predicted: np.ndarray) -> list[dict[str, Any]]:
    """The units with the largest scores, first those that the reference explains least. Shapes: ``(cells,)`` each."""
    units = [u for u in np.unique(unit.astype(str)) if u]
    records = []
    for name in units:
        rows = unit == name
        types, count = np.unique(predicted[rows].astype(str), return_counts=True)
        records.append(
            {
                "unit": str(name),
                "n_cells": int(rows.sum()),
                "score": float(score[rows].mean()),
                "type": str(types[count.argmax()]),
            }
        )
    return sorted(records, key=lambda record: -record["score"])[:_N_RANKED]
