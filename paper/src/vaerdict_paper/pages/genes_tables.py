"""Tables of the gene experiment: models, proposals, sources of uncertainty, estimands, AIS and donors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from vaerdict.report.records import Row
from vaerdict.report.tables import Column, Table, Value, mark_column
from vaerdict_paper.pages.genes_rows import (
    ESTIMANDS,
    FLOORS,
    IN_PAPER,
    MODELS,
    SIZES,
    TRUE_RATES,
    UNCERTAINTIES,
    behind_best,
    beside_ais,
    crossed,
    floor,
    fullest,
    refined,
    title_of,
    with_refits,
)
from vaerdict_paper.pages.seed_statistics import cell, cells, counts_of, mean_of, ordered, seed_count, where

Published = Mapping[str, Any]

_HUNDRED = "\N{MULTIPLICATION SIGN}100"
MAE, KHAT = Column("fdr_mae", f"FDR error {_HUNDRED}", 2), Column("khat", "k-hat", 2)
FDP, TPR = Column("fdp", "FDP at 5 %", 1, 100), Column("tpr", "found at 5 %", 1, 100)
AP, ESS = Column("auprc", "AP of the ranking", 3), Column("ess", "ESS, % of draws", 0, 100)
COVERAGE, WIDTH = Column("coverage", "90 % intervals cover, %", 0, 100), Column("width", "their width", 2)
INTERVAL, BRIER = (
    Column("interval_score", "their interval score", 2),
    Column("brier", f"Brier score {_HUNDRED}", 1, 100),
)
DRAWS = Column("n_draws", "draws")
FDR_NOTE = (
    "FDR error: mean over the first 1, 2, ... genes of |FDP - posterior expected FDR|, in hundredths. The FDP is "
    "random, so the error has a floor: that of the probabilities by the true rates of the compared cells, if these "
    "were exactly right. It hardly sees overconfidence where changes are nearly 0 or 1; the interval score (width, and "
    "twenty times the distance by which an interval misses) and the Brier score are proper: lower is better, and on "
    "average the right posterior is best."
)


def named(floor: str) -> str:
    """A baseline as it is shown."""
    return TRUE_RATES if floor == FLOORS[1] else floor


def summary_table(cross: Sequence[Row], simulator: str, *, noted: bool = True) -> Table | None:
    """Every model and baseline by cells per group, with all sources of uncertainty: coverage, errors, genes found.

    `noted` says whether the note on errors that all simulators share is shown.
    """
    body = []
    for n in SIZES:
        ours = refined(cross, simulator, n)
        methods = {f"{m}, refined": where(ours, model=m) for m in MODELS}
        methods |= {named(name): floor(cross, simulator, name, n) for name in FLOORS}
        body += [{"cells": size_text(n), "method": m, **_measured(rows)} for m, rows in methods.items() if rows]
    rows = refined(cross, simulator, SIZES[0])
    if not rows:
        return None
    columns = [Column("cells", "cells"), Column("method", "method"), *_MEASURED, DRAWS]
    caption = (
        f"Differential expression on {title_of(simulator)}, target FDR 5 %, |LFC| of at least 0.5, centred: mean "
        f"± sd over {seed_count(rows)}, each its own data set."
    )
    kind = fullest(rows) or ""
    note = (
        f"{FDR_NOTE} Models are trained on all training cells; only the cells that are compared are few. The true "
        "rates and raw counts have the uncertainty of the cells compared. Draws: per cell. "
        if noted
        else ""
    ) + f"Refined: group prior, uncertainty of {UNCERTAINTIES.get(kind, kind)}."
    return Table(f"summary-{simulator}", caption, columns, body, note)


_MEASURED = (COVERAGE, INTERVAL, MAE, BRIER, AP, FDP, TPR)


def _measured(rows: Sequence[Row]) -> dict[str, Any]:
    return {**cells(rows, _MEASURED), DRAWS.key: counts_of(rows, DRAWS.key)}


def size_text(n: int | str) -> str:
    """How many cells are compared, as text."""
    return "all cells" if n == "all" else f"{n} per group"


def models_table(models: Sequence[Row], cross: Sequence[Row], simulator: str, printed: Published) -> Table | None:
    """The paper's table: evidence, k-hat and FDR error of each model, with the published values."""
    rows = behind_best(where(models, simulator=simulator))
    if len(_models(rows)) < 2:
        return None
    printed = printed if simulator in IN_PAPER else {}
    body = [_model_row(name, where(rows, model=name), crossed(cross, simulator), printed) for name in _models(rows)]
    body = mark_column(mark_column(body, "iwelbo_refined", max), "fdr_mae")
    columns = [
        Column("model", "model"),
        Column("iwelbo_refined", "evidence, refined", 2),
        Column("iwelbo", "by its own encoder", 2),
        Column("behind", "behind best", 2),
        Column("behind_paper", "behind best, paper", 2),
        replace(KHAT, title="k-hat of its encoder"),
        Column("khat_paper", "k-hat, paper", 2),
        Column("khat_refined", "k-hat, refined", 2),
        Column("ess_refined", "ESS, refined, %", 0, 100),
        replace(MAE, title=f"{MAE.title}, own kind of encoder"),
        Column("fdr_mae_paper", "paper", 2),
        Column("khat_draws", "draws"),
    ]
    caption = f"Models on {title_of(simulator)}: held-out evidence per cell in nats, mean ± sd over {seed_count(rows)}."
    return Table(f"models-{simulator}", caption, columns, body, printed.get("note", ""))


def _models(rows: Sequence[Row]) -> list[str]:
    return ordered((row["model"] for row in rows), MODELS)


def _model_row(name: str, rows: Sequence[Row], cross: Sequence[Row], printed: Published) -> dict[str, Any]:
    levels: Mapping[str, float] = printed.get("iwelbo", {})
    keys = ("iwelbo", "iwelbo_refined", "behind", "khat", "khat_refined", "ess_refined")
    return {
        "model": name,
        **{key: cell(mean_of(rows, key)) for key in keys},
        "behind_paper": max(levels.values()) - levels[name] if name in levels else None,
        "khat_paper": printed.get("khat", {}).get(name),
        "fdr_mae": cell(mean_of(where(cross, model=name, proposal=name), "fdr_mae")),
        "fdr_mae_paper": printed.get("fdr_mae", {}).get(name),
        "khat_draws": counts_of(rows, "khat_draws"),
    }


def with_baselines(table: Table, cross: Sequence[Row], simulator: str) -> Table:
    """The table of FDR errors of models and proposals with the baselines, which have neither, in their own column."""
    parts = {name: rows for name in FLOORS if (rows := floor(cross, simulator, name, "all"))}
    if not parts:
        return table
    baselines = [
        {
            "model": f"{named(name)} (baseline)",
            _BASELINE.key: cell(mean_of(rows, MAE.key)),
            DRAWS.key: counts_of(rows, DRAWS.key),
        }
        for name, rows in parts.items()
    ]
    model, *proposals, draws = table.columns
    columns = [replace(model, title="model or baseline"), *proposals, _BASELINE, replace(draws, title=DRAWS.title)]
    note = "Baselines have neither a model nor a proposal; their draws are resamples of the cells."
    return replace(table, columns=columns, rows=[*table.rows, *baselines], note=note)


_BASELINE = replace(MAE, key="baseline", title="without a proposal")


def plugin_table(cross: Sequence[Row], simulator: str) -> Table | None:
    """FDR error with and without weights, each model by its own kind of encoder."""
    rows = crossed(cross, simulator, weights="plugin")
    if not rows:
        return None
    body = []
    for name in _models(rows):
        kinds = {"snis": crossed(cross, simulator), "plugin": rows}
        parts = {kind: where(part, model=name, proposal=name) for kind, part in kinds.items()}
        errors = {kind: cell(mean_of(part, MAE.key)) for kind, part in parts.items()}
        body.append({"model": name, **errors, DRAWS.key: counts_of(parts["snis"], DRAWS.key)})
    columns = [
        Column("model", "model"),
        replace(MAE, key="snis", title=f"{MAE.title}, weighted"),
        replace(MAE, key="plugin", title="without weights"),
        DRAWS,
    ]
    return Table(f"plugin-{simulator}", f"With and without importance weights, {title_of(simulator)}.", columns, body)


def annealing_table(models: Sequence[Row], cross: Sequence[Row], simulator: str) -> Table | None:
    """AIS as the paper describes it and refined proposals on the same cells, with their cost."""
    rows = [row for row in where(models, simulator=simulator) if row.get("ais") is not None]
    if not rows:
        return None
    measured = (
        Column("ais", "evidence by AIS", 2),
        Column("iwelbo_refined_ais_cells", "by refined proposals", 2),
        Column("seconds_ais", "seconds of AIS", 0),
        Column("gradients_ais", "gradients, millions", 1, 1e-6),
    )
    body = []
    for name in _models(rows):
        pairs = {q: where(beside_ais(cross, simulator), model=name, proposal=q) for q in ("AIS", "REFINED")}
        errors = {f"mae_{q}": cell(mean_of(part, MAE.key)) for q, part in pairs.items()}
        seconds = cell(mean_of(pairs["REFINED"], "seconds"))
        costs = {"seconds_refined": seconds, DRAWS.key: counts_of([*pairs["AIS"], *pairs["REFINED"]], DRAWS.key)}
        body.append({"model": name, **cells(where(rows, model=name), measured), **errors, **costs})
    columns = [
        Column("model", "model"),
        *measured,
        Column("seconds_refined", "seconds, refined", 2),
        *(replace(MAE, key=f"mae_{q}", title=f"{MAE.title}, {q}") for q in ("AIS", "REFINED")),
        DRAWS,
    ]
    n = next((row["n_cells"] for row in beside_ais(cross, simulator)), "few")
    caption = (
        f"AIS as printed, 500 temperatures and 100 chains from the prior, on {n} cells per group of "
        f"{title_of(simulator)}; mean ± sd over {seed_count(rows)}."
    )
    note = (
        "The two times are of different work. Seconds of AIS: the annealing of all chains of these cells, with their "
        "evidence. Seconds, refined: refining the proposals of these cells, the draws, and the averages of expression "
        "of the contrast; the evidence by refined proposals, from more draws, is not timed. Neither includes training "
        "of the model and its encoder, from which refinement starts."
    )
    return Table(f"ais-{simulator}", caption, columns, body, note)


# ---------------------------------------------------------------------------------------------------- contrasts
def uncertainty_table(cross: Sequence[Row], simulator: str) -> Table | None:
    """Coverage, errors and cost of each kind of uncertainty, by cells per group, over all models."""
    body = []
    for n in SIZES:
        sources = {title: refined(cross, simulator, n, uncertainty=kind) for kind, title in UNCERTAINTIES.items()}
        sources["latents and cells, common prior"] = refined(cross, simulator, n, prior="model")
        sources |= {f"{named(name)}, cells": floor(cross, simulator, name, n) for name in FLOORS[:2]}
        for title, rows in sources.items():
            if rows:
                seconds = {"seconds": _seconds(rows)} if title in UNCERTAINTIES.values() else {}
                draws = {DRAWS.key: counts_of(rows, DRAWS.key)}
                body.append({"cells": size_text(n), "what": title, **seconds, **draws, **cells(rows, _UNCERTAIN)})
    if not body:
        return None
    columns = [
        Column("cells", "cells"),
        Column("what", "uncertainty of"),
        *_UNCERTAIN,
        DRAWS,
        Column("seconds", "seconds after training", 1),
    ]
    caption = f"Sources of uncertainty, {title_of(simulator)}: mean over models, ± sd over data sets."
    note = (
        "Intervals are of the change relative to that of the median gene, which is what proportions show. The model's "
        "uncertainty comes from refits to bootstrap resamples, started from the fit. Common prior: one standard normal "
        "for all cells, which shrinks the groups towards each other."
    )
    return Table(f"uncertainty-{simulator}", caption, columns, body, note)


_UNCERTAIN = (
    COVERAGE,
    WIDTH,
    INTERVAL,
    Column("coverage_absolute", "cover the absolute change, %", 0, 100),
    Column("lfc_slope", "slope on the truth", 2),
    MAE,
    BRIER,
    FDP,
    TPR,
)


def _seconds(rows: Sequence[Row]) -> Value | None:
    """Mean seconds of a contrast (see `with_refits`)."""
    contrast = mean_of(with_refits(rows), "seconds")
    return None if contrast is None else Value(contrast.mean)


def estimand_table(cross: Sequence[Row], simulator: str) -> Table | None:
    """Three log-fold changes, each against its own true value, with all sources of uncertainty."""
    titles = {
        "centred": "change of expression",
        "proportion": "change of proportions",
        "pair": "one random cell of each group",
    }
    body = []
    for n in SIZES:
        parts = [(title, name, refined(cross, simulator, n, estimand=name)) for name, title in titles.items()]
        parts += [("raw counts", e, floor(cross, simulator, "raw counts", n, e)) for e in ("centred", "proportion")]
        body += [
            {"cells": size_text(n), "what": what, "estimand": estimand, **_measured(rows)}
            for what, estimand, rows in parts
            if rows
        ]
    if not body:
        return None
    columns = [
        Column("cells", "cells"),
        Column("estimand", "estimand"),
        Column("what", "log-fold change of"),
        *_MEASURED,
        DRAWS,
    ]
    caption = f"By estimand, {title_of(simulator)}: mean over models, ± sd over data sets."
    note = "Pairs of cells are scored by the change of proportions between the groups, as scvi-tools uses them."
    return Table(f"estimands-{simulator}", caption, columns, body, note)


def donors_table(donors: Sequence[Row]) -> Table | None:
    """Cells or donors as replicates: genes called if nothing differs between the groups, and if something does."""
    body = []
    for model, kind in dict.fromkeys((row["model"], row.get("replicates")) for row in donors):
        rows = where(donors, model=model, replicates=kind)
        null, effect = where(rows, arm="null"), where(rows, arm="effect")
        called = [float(row["n_called_05"] > 0) for row in null]
        body.append(
            {
                "method": model,
                "replicates": kind or ("cells" if model.endswith("cells") else "donors"),
                "estimand": ESTIMANDS[rows[0].get("estimand") or "centred"],
                "any": Value(sum(called) / len(called)) if called else None,
                "number": cell(mean_of(null, "n_called_05")),
                **cells(effect, (FDP, TPR, AP, MAE, COVERAGE)),
                DRAWS.key: counts_of(effect, DRAWS.key),
            }
        )
    if not body:
        return None
    n = len({row["seed"] for row in where(donors, arm="null")})
    columns = [
        Column("method", "method"),
        Column("replicates", "replicates"),
        Column("estimand", "scored by"),
        Column("any", f"any discovery in {n} null data sets, %", 0, 100),
        Column("number", "genes called there", 1),
        *(replace(c, title=f"{c.title}, with changes") for c in (FDP, TPR, AP, MAE, COVERAGE)),
        DRAWS,
    ]
    caption = (
        "Four donors per group, target FDR 5 %: no gene differs between the groups; then a third is up, a third down."
    )
    note = (
        "Scored by: the change of expression or that of proportions. Adjusted p-values are no estimates of the FDR and "
        "have no FDR error. vaerdict de measures changes from the largest set of genes with about the same change; "
        "where a third is up and a third down, that can be either."
    )
    return Table("donors", caption, columns, body, note)
