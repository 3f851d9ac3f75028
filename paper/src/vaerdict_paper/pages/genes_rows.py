"""Selecting rows of the gene experiment: grids, contrasts by refined proposals, baselines."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from vaerdict.report.records import Row
from vaerdict_paper.pages.seed_statistics import by_seed, where

MODELS = ("VAE", "IWAE", "WW", "CHI")
SINGLES = ("VAE", "IWAE", "WW", "CHI", "IWAE-full")
PROPOSALS = (*SINGLES, "MIS", "REFINED")
FLOORS = ("raw counts", "true rates", "FDP floor")
TRUE_RATES = "true rates of the compared cells"
RIVALS = (
    "vaerdict de",
    *("scvi-uniform", "scvi-importance", "scvi-means", "scvi-means-centred"),
    *("wilcoxon+lfc", "ttest+lfc", "deseq2+lfc", "edger+lfc", "deseq2-threshold", "edger-treat"),
)
SIZES: tuple[int | str, ...] = ("all", 50, 20)
SIMULATORS = {
    "appendix": "the appendix's simulator",
    "released": "the released code's simulator",
    "section5": "section 5's five types",
    "graded": "the simulator with graded changes",
}
IN_PAPER = ("appendix", "released", "section5")
"""The simulators of the paper and of its code, beside which published values are shown."""

UNCERTAINTIES = {
    "z": "the latents",
    "z+cells": "latents and cells",
    "z+cells+model": "latents, cells and model",
}
ESTIMANDS = {"centred": "expression", "proportion": "proportions", "pair": "proportions, by random pairs"}
"""The truth that fold changes are scored by."""


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
    uncertainty: str | None = None,
    estimand: str = "centred",
    prior: str = "group",
) -> list[Row]:
    """Rows of contrasts by refined proposals, for every model; by default with all sources of uncertainty there are."""
    rows = where(cross, simulator=simulator, n_cells=n_cells, estimand=estimand, prior=prior, proposal="REFINED")
    rows = [row for row in rows if "subsets" in row]
    return where(rows, uncertainty=fullest(rows) if uncertainty is None else uncertainty)


def fullest(rows: Sequence[Row]) -> str | None:
    """The largest set of sources of uncertainty that any row has."""
    return next((kind for kind in reversed(UNCERTAINTIES) if where(rows, uncertainty=kind)), None)


def with_refits(rows: Sequence[Row]) -> list[Row]:
    """The rows with the seconds of training and asking refits among theirs, where these are a source of uncertainty."""
    return [
        {**row, "seconds": row["seconds"] + (row.get("seconds_refits") or 0.0)}
        if row.get("uncertainty") == "z+cells+model" and row.get("seconds") is not None
        else row
        for row in rows
    ]


def floor(cross: Sequence[Row], simulator: str, name: str, n_cells: int | str, estimand: str = "centred") -> list[Row]:
    """Rows of a baseline, a floor or a rival on the same cells."""
    return where(cross, simulator=simulator, model=name, n_cells=n_cells, estimand=estimand, proposal=None)


def estimand_of(cross: Sequence[Row], simulator: str, name: str) -> str:
    """The truth that a rival is scored by."""
    return next((row["estimand"] for row in where(cross, simulator=simulator, model=name, proposal=None)), "centred")


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
