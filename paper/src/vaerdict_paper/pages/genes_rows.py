"""Which rows of the gene experiment answer which question."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from vaerdict.report.summary import Row, by_seed, where

MODELS = ("VAE", "IWAE", "WW", "CHI")
SINGLES = ("VAE", "IWAE", "WW", "CHI", "IWAE-full")
PROPOSALS = (*SINGLES, "MIS", "REFINED")
FLOORS = ("raw counts", "oracle", "FDP floor")
RIVALS = ("scvi-uniform", "scvi-importance", "wilcoxon", "pseudobulk")
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


def of_simulator(name: str) -> str:
    """A simulator in words."""
    return SIMULATORS.get(name, name)


def simulators(rows: Iterable[Row]) -> list[str]:
    """Those that the rows are of, in order."""
    present = {row.get("simulator") for row in rows}
    return [name for name in SIMULATORS if name in present]


def crossed(cross: Sequence[Row], simulator: str, *, weights: str = "snis") -> list[Row]:
    """Every proposal on every fixed model with equal draws, all cells."""
    rows = where(cross, simulator=simulator, prior="model", weights=weights, n_cells="all")
    return [row for row in rows if "subsets" not in row]


def beside_ais(cross: Sequence[Row], simulator: str) -> list[Row]:
    """AIS, and refined proposals on the same cells."""
    return where(cross, simulator=simulator, beside_ais=True)


def ours(
    cross: Sequence[Row],
    simulator: str,
    n_cells: int | str,
    *,
    uncertainty: str = "z+cells",
    estimand: str = "centred",
    prior: str = "group",
) -> list[Row]:
    """Contrasts by refined proposals, of every model and every choice of cells."""
    rows = where(cross, simulator=simulator, n_cells=n_cells, uncertainty=uncertainty, estimand=estimand, prior=prior)
    return [row for row in rows if "subsets" in row]


def floor(cross: Sequence[Row], simulator: str, name: str, n_cells: int | str, estimand: str = "centred") -> list[Row]:
    """A baseline, a floor or a rival on the same cells."""
    return where(cross, simulator=simulator, model=name, n_cells=n_cells, estimand=estimand, proposal=None)


def scores(rows: Sequence[Row], names: Sequence[str], by: str, key: str) -> dict[str, dict[Any, float]]:
    """A quantity by name and seed, for the names that have any."""
    parts = {name: by_seed(where(rows, **{by: name}), key) for name in names}
    return {name: values for name, values in parts.items() if values}


def behind_best(models: Sequence[Row]) -> list[Row]:
    """The rows of models with how far their refined evidence is behind the best of the same data set."""
    best: dict[Any, float] = {}
    for row in models:
        value = row.get("iwelbo_refined")
        if value is not None:
            best[row["seed"]] = max(value, best.get(row["seed"], value))
    return [
        {**row, "behind": None if row.get("iwelbo_refined") is None else best[row["seed"]] - row["iwelbo_refined"]}
        for row in models
    ]
