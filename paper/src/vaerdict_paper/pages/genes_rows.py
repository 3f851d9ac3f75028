"""Selecting rows of the gene experiment: grids, contrasts by refined proposals, baselines."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from vaerdict.report.records import Row
from vaerdict_paper.pages.seed_statistics import by_seed, where

MODELS = ("VAE", "IWAE", "WW", "CHI")
SINGLES = ("VAE", "IWAE", "WW", "CHI", "IWAE-full")
PROPOSALS = (*SINGLES, "MIS", "REFINED")
FLOORS = ("raw counts", "oracle", "FDP floor")
RIVALS = (
    "scvi-uniform",
    "scvi-importance",
    "scvi-means",
    "scvi-means-centred",
    *("wilcoxon", "pseudobulk"),  # in older results: with a filter on the fold change, and DESeq2's threshold test
    *("wilcoxon+lfc", "ttest+lfc", "deseq2+lfc", "edger+lfc", "deseq2-threshold", "edger-treat"),
)
SIZES: tuple[int | str, ...] = ("all", 50, 20)
SIMULATORS = {
    "appendix": "the appendix's simulator",
    "released": "the released code's simulator",
    "section5": "section 5's five types",
}
UNCERTAINTIES = {
    "z": "the latents",
    "z+cells": "latents and cells",
    "z+cells+model": "latents, cells and model",
}


def title_of(name: str) -> str:
    """A simulator's name in captions."""
    return SIMULATORS.get(name, name)


def simulators(rows: Iterable[Row]) -> list[str]:
    """The simulators that the rows are of, in the order of `SIMULATORS`."""
    present = {row.get("simulator") for row in rows}
    return [name for name in SIMULATORS if name in present]


def crossed(cross: Sequence[Row], simulator: str, *, weights: str = "snis") -> list[Row]:
    """Rows of every proposal on every fixed model with equal draws, all cells."""
    rows = where(cross, simulator=simulator, prior="model", weights=weights, n_cells="all")
    return [row for row in rows if "subsets" not in row]


def beside_ais(cross: Sequence[Row], simulator: str) -> list[Row]:
    """Rows of AIS and of refined proposals on the same cells."""
    return where(cross, simulator=simulator, beside_ais=True)


def refined(
    cross: Sequence[Row],
    simulator: str,
    n_cells: int | str,
    *,
    uncertainty: str = "z+cells",
    estimand: str = "centred",
    prior: str = "group",
) -> list[Row]:
    """Rows of contrasts by refined proposals, for every model and subset of cells."""
    rows = where(cross, simulator=simulator, n_cells=n_cells, uncertainty=uncertainty, estimand=estimand, prior=prior)
    return [row for row in rows if "subsets" in row]


def floor(cross: Sequence[Row], simulator: str, name: str, n_cells: int | str, estimand: str = "centred") -> list[Row]:
    """Rows of a baseline, a floor or a rival on the same cells."""
    return where(cross, simulator=simulator, model=name, n_cells=n_cells, estimand=estimand, proposal=None)


def rival(cross: Sequence[Row], simulator: str, name: str, n_cells: int | str) -> list[Row]:
    """Rows of a rival by the change of expression, or by that of proportions where that is what it estimates."""
    return floor(cross, simulator, name, n_cells) or floor(cross, simulator, name, n_cells, "proportion")


def scores(rows: Sequence[Row], names: Sequence[str], by: str, key: str) -> dict[str, dict[Any, float]]:
    """A quantity by the name under key `by`, then by seed, for the names that have any."""
    return {name: values for name in names if (values := by_seed(where(rows, **{by: name}), key))}


def behind_best(models: Sequence[Row]) -> list[Row]:
    """The rows with the distance of their refined evidence from the best of the same data set as ``behind``."""
    best: dict[Any, float] = {}
    for row in models:
        value = row.get("iwelbo_refined")
        if value is not None:
            best[row["seed"]] = max(value, best.get(row["seed"], value))
    return [
        {**row, "behind": None if row.get("iwelbo_refined") is None else best[row["seed"]] - row["iwelbo_refined"]}
        for row in models
    ]
