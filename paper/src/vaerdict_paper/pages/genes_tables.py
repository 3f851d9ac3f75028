"""Tables of the gene experiment; the raw-count baseline, the oracle and the floor of the FDP stand in each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from vaerdict.report.summary import Row, Summary, in_order, mean_of, seeds_of, where
from vaerdict.report.tables import Column, Table, cell, cells, mark, mark_column
from vaerdict_paper.pages.genes_rows import (
    FLOORS,
    MODELS,
    PROPOSALS,
    RIVALS,
    SIZES,
    behind_best,
    beside_ais,
    crossed,
    floor,
    of_simulator,
    ours,
)

Published = Mapping[str, Any]

_HUNDRED = "\N{MULTIPLICATION SIGN}100"
MAE, KHAT = Column("fdr_mae", f"FDR error {_HUNDRED}", 2), Column("khat", "k-hat", 2)
FDP, TPR = Column("fdp", "FDP at 5 %", 1, 100), Column("tpr", "found at 5 %", 1, 100)
AP, ESS = Column("auprc", "AP of the ranking", 3), Column("ess", "ESS, % of draws", 0, 100)
COVERAGE, WIDTH = Column("coverage", "90 % intervals cover, %", 0, 100), Column("width", "their width", 2)
FDR_NOTE = (
    "FDR error: mean over the first 1, 2, ... genes of |FDP - posterior expected FDR|, in hundredths. Since the FDP is "
    "random it has a floor: what the oracle's probabilities would give if they were exactly right."
)


def summary_table(cross: Sequence[Row], simulator: str) -> Table | None:
    """Every method by cells a side: FDR error, FDP and share found at the target of 5 %."""
    sizes = [n for n in SIZES if ours(cross, simulator, n)]
    if not sizes:
        return None
    methods = {f"{m}, refined": {n: where(ours(cross, simulator, n), model=m) for n in sizes} for m in MODELS}
    methods |= {name: {n: floor(cross, simulator, name, n) for n in sizes} for name in (*FLOORS, *RIVALS)}
    measured = (MAE, FDP, TPR)
    body = [
        {"method": name, **{f"{c.key}-{n}": cell(mean_of(rows, c.key)) for n, rows in every.items() for c in measured}}
        for name, every in methods.items()
        if any(every.values())
    ]
    columns = [
        Column("method", "method"),
        *(replace(c, key=f"{c.key}-{n}", title=f"{c.title}, {size_words(n)}") for c in measured for n in sizes),
    ]
    caption = (
        f"Differential expression on {of_simulator(simulator)}, target FDR 5 %, |LFC| of at least 0.5, centred: mean "
        f"± sd over {seeds_of(ours(cross, simulator, sizes[0]))}, each its own data set."
    )
    note = (
        f"{FDR_NOTE} Models are trained on all training cells; what is few is the cells compared. Refined: group "
        "prior, uncertainty of latents and cells. Rivals are judged by the same truth."
    )
    return Table(f"summary-{simulator}", caption, columns, body, note)


def size_words(n: int | str) -> str:
    """How many cells are compared, in words."""
    return "all cells" if n == "all" else f"{n} a side"


def models_table(models: Sequence[Row], cross: Sequence[Row], simulator: str, printed: Published) -> Table | None:
    """The paper's table: evidence, k-hat and FDR error of each model, and the same as printed."""
    rows = behind_best(where(models, simulator=simulator))
    if not rows:
        return None
    body = [_model_row(name, where(rows, model=name), crossed(cross, simulator), printed) for name in _models(rows)]
    for key, pick in (("iwelbo_refined", max), ("fdr_mae", min)):
        body = mark_column(body, key, pick)
    paper = [Column("behind_paper", "behind best, paper", 2), Column("khat_paper", "k-hat, paper", 2)]
    columns = [
        Column("model", "model"),
        Column("iwelbo_refined", "evidence, refined", 2),
        Column("iwelbo", "by its own encoder", 2),
        Column("behind", "behind best", 2),
        paper[0],
        replace(KHAT, title="k-hat of its encoder"),
        paper[1],
        Column("khat_refined", "k-hat, refined", 2),
        Column("ess_refined", "ESS, refined, %", 0, 100),
        replace(MAE, title=f"{MAE.title}, own kind of encoder"),
        Column("fdr_mae_paper", "paper", 2),
    ]
    caption = (
        f"Models on {of_simulator(simulator)}: held-out evidence per cell in nats, mean ± sd over {seeds_of(rows)}."
    )
    return Table(f"models-{simulator}", caption, columns, body, printed.get("note", ""))


def _models(rows: Sequence[Row]) -> list[str]:
    return in_order((row["model"] for row in rows), MODELS)


_OF_MODELS = ("iwelbo", "iwelbo_refined", "behind", "khat", "khat_refined", "ess_refined")


def _model_row(name: str, rows: Sequence[Row], cross: Sequence[Row], printed: Published) -> dict[str, Any]:
    levels: Mapping[str, float] = printed.get("iwelbo", {})
    own = where(cross, model=name, proposal=name)
    return {
        "model": name,
        **{
            key: cell(mean_of(rows, key)) for key in ("iwelbo", "iwelbo_refined", "khat", "khat_refined", "ess_refined")
        },
        "behind": cell(mean_of(rows, "behind")),
        "behind_paper": max(levels.values()) - levels[name] if name in levels else None,
        "khat_paper": printed.get("khat", {}).get(name),
        "fdr_mae": cell(mean_of(own, "fdr_mae")),
        "fdr_mae_paper": printed.get("fdr_mae", {}).get(name),
    }


def cross_means(cross: Sequence[Row], simulator: str, key: str) -> dict[str, dict[str, Summary | None]]:
    """A quantity over seeds by model, then by proposal."""
    rows = crossed(cross, simulator)
    proposals = in_order((row["proposal"] for row in rows), PROPOSALS)
    return {m: {q: mean_of(where(rows, model=m, proposal=q), key) for q in proposals} for m in _models(rows)}


def cross_table(
    cross: Sequence[Row], simulator: str, quantity: Column, pick: Any = min, draws: object = "equal"
) -> Table | None:
    """One quantity for every model (down) and proposal (across)."""
    means = cross_means(cross, simulator, quantity.key)
    if not means:
        return None
    body = [{"model": m, **mark({q: cell(mean) for q, mean in row.items()}, pick)} for m, row in means.items()]
    if quantity is MAE:
        body += [
            {
                "model": f"{name} (no proposal)",
                PROPOSALS[0]: cell(mean_of(floor(cross, simulator, name, "all"), MAE.key)),
            }
            for name in FLOORS
        ]
    columns = [Column("model", "model"), *(replace(quantity, key=q, title=q) for q in next(iter(means.values())))]
    rows = crossed(cross, simulator)
    caption = (
        f"{quantity.title} of each proposal (columns) on each fixed model (rows), {of_simulator(simulator)}, "
        f"{draws} draws a cell from every proposal: mean ± sd over {seeds_of(rows)}."
    )
    return Table(f"cross-{quantity.key}-{simulator}", caption, columns, body)


def plugin_table(cross: Sequence[Row], simulator: str) -> Table | None:
    """FDR error with and without weights, each model by its own kind of encoder."""
    rows = crossed(cross, simulator, weights="plugin")
    if not rows:
        return None
    body = []
    for name in _models(rows):
        own = {"snis": crossed(cross, simulator), "plugin": rows}
        parts = {kind: where(part, model=name, proposal=name) for kind, part in own.items()}
        body.append({"model": name, **{kind: cell(mean_of(part, MAE.key)) for kind, part in parts.items()}})
    columns = [
        Column("model", "model"),
        replace(MAE, key="snis", title=f"{MAE.title}, weighted"),
        replace(MAE, key="plugin", title="without weights"),
    ]
    return Table(
        f"plugin-{simulator}", f"The encoder in place of the posterior, {of_simulator(simulator)}.", columns, body
    )


def annealing_table(models: Sequence[Row], cross: Sequence[Row], simulator: str) -> Table | None:
    """AIS as the paper describes it beside refined proposals on the same cells, with its cost."""
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
        spent = cell(mean_of(pairs["REFINED"], "seconds"))
        body.append({"model": name, **cells(where(rows, model=name), measured), **errors, "seconds_refined": spent})
    columns = [
        Column("model", "model"),
        *measured,
        Column("seconds_refined", "seconds, refined", 2),
        *(replace(MAE, key=f"mae_{q}", title=f"{MAE.title}, {q}") for q in ("AIS", "REFINED")),
    ]
    n = next((row["n_cells"] for row in beside_ais(cross, simulator)), "few")
    caption = (
        f"AIS as printed, 500 temperatures and 100 chains from the prior, on {n} cells a side of "
        f"{of_simulator(simulator)}; mean ± sd over {seeds_of(rows)}."
    )
    return Table(f"ais-{simulator}", caption, columns, body)
