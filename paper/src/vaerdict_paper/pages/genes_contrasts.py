"""Tables of contrasts: kinds of uncertainty, estimands, tools in use, and donors, the baselines in each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from vaerdict.report.summary import Row, mean_of, where
from vaerdict.report.tables import Column, Table, Value, cell, cells
from vaerdict_paper.pages.genes_rows import FLOORS, RIVALS, SIZES, UNCERTAINTIES, floor, of_simulator, ours
from vaerdict_paper.pages.genes_tables import (
    AP,
    COVERAGE,
    FDP,
    FDR_NOTE,
    MAE,
    TPR,
    WIDTH,
    size_words,
)


def uncertainty_table(cross: Sequence[Row], simulator: str) -> Table | None:
    """What each kind of uncertainty gives and costs, by cells a side, over all models."""
    body = []
    for n in SIZES:
        for kind, words in UNCERTAINTIES.items():
            rows = ours(cross, simulator, n, uncertainty=kind)
            if rows:
                body.append({"cells": size_words(n), "what": words, **_seconds(rows, kind), **cells(rows, _UNCERTAIN)})
        plain = ours(cross, simulator, n, prior="model")
        if plain:
            body.append({"cells": size_words(n), "what": "latents and cells, common prior", **cells(plain, _UNCERTAIN)})
        for name in FLOORS[:2]:
            rows = floor(cross, simulator, name, n)
            if rows:
                body.append({"cells": size_words(n), "what": f"{name}, cells", **cells(rows, _UNCERTAIN)})
    if not body:
        return None
    columns = [
        Column("cells", "cells"),
        Column("what", "uncertainty of"),
        *_UNCERTAIN,
        Column("seconds", "seconds beyond the model's training", 1),
    ]
    caption = f"Where uncertainty comes from, {of_simulator(simulator)}: mean over models, ± sd over data sets."
    note = (
        "Intervals are of the change relative to the median gene's, which is what proportions show. The model's own "
        "uncertainty comes from refits to bootstrap resamples, started from the fit. Common prior: one standard normal "
        "for all cells, which draws the groups together."
    )
    return Table(f"uncertainty-{simulator}", caption, columns, body, note)


_UNCERTAIN = (
    COVERAGE,
    WIDTH,
    Column("coverage_absolute", "cover the absolute change, %", 0, 100),
    Column("lfc_slope", "slope on the truth", 2),
    MAE,
    FDP,
    TPR,
)


def _seconds(rows: Sequence[Row], kind: str) -> dict[str, Value | None]:
    """Seconds of the answer and, with refits, of those."""
    refits = mean_of(rows, "seconds_refits") if kind == "z+cells+model" else None
    spent = mean_of(rows, "seconds")
    return {"seconds": None if spent is None else Value(spent.mean + (refits.mean if refits else 0.0))}


def estimand_table(cross: Sequence[Row], simulator: str) -> Table | None:
    """Three log-fold changes, each against the truth it is after."""
    targets = {
        "centred": ("change of expression", "z+cells"),
        "proportion": ("change of proportions", "z+cells"),
        "pair": ("one random cell of each group", "z"),
    }
    body = [
        {"what": words, "estimand": name, **cells(rows, (MAE, AP, FDP, TPR, COVERAGE))}
        for name, (words, kind) in targets.items()
        if (rows := ours(cross, simulator, "all", uncertainty=kind, estimand=name))
    ]
    for estimand in ("centred", "proportion"):
        rows = floor(cross, simulator, "raw counts", "all", estimand)
        if rows:
            body.append({"what": "raw counts", "estimand": estimand, **cells(rows, (MAE, AP, FDP, TPR, COVERAGE))})
    if not body:
        return None
    columns = [Column("estimand", "estimand"), Column("what", "log-fold change of"), MAE, AP, FDP, TPR, COVERAGE]
    caption = f"What is estimated decides, {of_simulator(simulator)}, all cells: mean over models, ± sd over data sets."
    return Table(f"estimands-{simulator}", caption, columns, body)


def rivals_table(cross: Sequence[Row], simulator: str, estimand: str = "centred") -> Table | None:
    """Tools in use beside ours on the same data, with their seconds, judged by one of the two truths."""
    names = [name for name in RIVALS if where(cross, simulator=simulator, model=name)]
    if not names:
        return None
    measured = (MAE, AP, FDP, TPR, Column("seconds", "seconds", 1), Column("seconds_train", "seconds of training", 0))
    body = []
    for n in SIZES:
        methods = {"refined, all models": ours(cross, simulator, n, estimand=estimand)}
        methods |= {name: floor(cross, simulator, name, n, estimand) for name in (*FLOORS, *names)}
        body += [{"cells": size_words(n), "method": m, **cells(rows, measured)} for m, rows in methods.items() if rows]
    columns = [Column("cells", "cells"), Column("method", "method"), *measured]
    truth = {"centred": "change of expression", "proportion": "change of proportions"}[estimand]
    caption = f"Tools in use on the same cells, {of_simulator(simulator)}, judged by the {truth}."
    return Table(f"rivals-{estimand}-{simulator}", caption, columns, body, FDR_NOTE)


def donors_table(donors: Sequence[Row]) -> Table | None:
    """Cells or donors as replicates: what is called where nothing differs, and where something does."""
    kinds = list(dict.fromkeys((row["model"], row.get("replicates")) for row in donors))
    body = []
    for model, kind in kinds:
        rows = where(donors, model=model, replicates=kind)
        null, effect = where(rows, arm="null"), where(rows, arm="effect")
        called = [float(row["n_called_05"] > 0) for row in null]
        body.append(
            {
                "method": model,
                "replicates": kind or ("donors" if model == "pseudobulk" else "cells"),
                "any": Value(sum(called) / len(called)) if called else None,
                "number": cell(mean_of(null, "n_called_05")),
                **cells(effect, (FDP, TPR, MAE, COVERAGE)),
            }
        )
    if not body:
        return None
    n = len({row["seed"] for row in where(donors, arm="null")})
    columns = [
        Column("method", "method"),
        Column("replicates", "replicates"),
        Column("any", f"any discovery in {n} null data sets, %", 0, 100),
        Column("number", "genes called there", 1),
        *(replace(c, title=f"{c.title}, with changes") for c in (FDP, TPR, MAE, COVERAGE)),
    ]
    caption = (
        "Four donors a group, a target FDR of 5 %: nothing differs between the groups, then a third up, a third down."
    )
    return Table("donors", caption, columns, body)
