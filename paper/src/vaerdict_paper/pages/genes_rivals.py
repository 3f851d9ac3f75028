"""Other methods beside ours: a table, who wins where, and claims against rivals.

Every method is scored by the truth of what it estimates, and compared with ours by the same truth.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from vaerdict.report.records import Row
from vaerdict.report.tables import Column, Table, number
from vaerdict_paper.pages.claims import Claim, Evidence
from vaerdict_paper.pages.genes_rows import (
    ESTIMANDS,
    FLOORS,
    RIVALS,
    SIZES,
    estimand_of,
    floor,
    refined,
    title_of,
    with_refits,
)
from vaerdict_paper.pages.genes_tables import (
    AP,
    BRIER,
    COVERAGE,
    DRAWS,
    FDP,
    FDR_NOTE,
    INTERVAL,
    MAE,
    TPR,
    named,
    size_text,
)
from vaerdict_paper.pages.seed_statistics import by_seed, cells, counts_of, difference, mean_of, seed_count, where

OURS, IMPORTANCE = "refined, all models", "scvi-importance"
OF_PAIRS = ("scvi-uniform", IMPORTANCE)
"""The rivals whose probabilities are of two random cells: as lists they are scored, as probabilities they are not."""

COMPARED = tuple(name for name in RIVALS if name != IMPORTANCE)
"""The rivals of our claims beside raw counts: all that compare few cells."""

LEVEL, LEAST_FOUND = 0.05, 0.01
"""The level of the FDR in the table of winners, and the smallest share of changed genes that a winner finds."""

_HIGH, _LOW = +1, -1

_MEASURED = (AP, FDP, TPR, MAE, BRIER, COVERAGE, INTERVAL)
_SECONDS = (Column("seconds", "seconds", 1), Column("seconds_train", "seconds of training", 0))

NOTE = (
    "Every method compares the same cells, and few of them in the same random subsets. Where few are compared, models "
    "are trained on more, ours on 80 % of the data set, scvi-tools on 90 %; the tests and vaerdict de see no others. "
    "Seconds of ours include its refits. vaerdict de measures changes from the largest "
    "set of genes with about the same change, which may be genes that go up or down where those that stay are no more. "
    "Methods that end in +lfc call the genes that changed at all whose estimated |LFC| exceeds 0.5; adjusted p-values "
    "are no estimates of the FDR, and have neither an FDR error nor a Brier score; nor have the probabilities of "
    "scvi-uniform and scvi-importance, which are of changes between two random cells. Scored by: the change of "
    "expression, relative to the median gene for intervals, or that of proportions. Draws: per cell for ours, "
    "resamples for raw counts and true rates."
)
SCVI_NOTE = (
    " Draws of scvi-tools are pairs or resamples of cells; its importance mode is asked about all cells of {n} data "
    "sets."
)


def rivals_table(cross: Sequence[Row], simulator: str, *, noted: bool = True) -> Table | None:
    """Other methods and ours on the same cells, each by its own truth, with draws and seconds.

    `noted` says whether the note that all simulators share is shown.
    """
    names = [name for name in RIVALS if where(cross, simulator=simulator, model=name)]
    if not names:
        return None
    body = []
    for n in SIZES:
        of_truth = {e: refined(cross, simulator, n, estimand=e) for e in ESTIMANDS}
        parts = [(_ours(rows), e, with_refits(rows)) for e, rows in of_truth.items() if rows]
        parts += [
            (named(m), e, floor(cross, simulator, m, n, e)) for m in FLOORS[:2] for e in ("centred", "proportion")
        ]
        by_name = [(m, estimand_of(cross, simulator, m)) for m in names]
        parts += [(m, e, floor(cross, simulator, m, n, e)) for m, e in by_name]
        body += [_row(size_text(n), *part) for part in parts if part[2]]
    columns = [
        Column("cells", "cells"),
        Column("method", "method"),
        Column("estimand", "scored by"),
        *_MEASURED,
        DRAWS,
        *_SECONDS,
    ]
    rows = where(cross, simulator=simulator, model=names[0])
    caption = f"Other methods on the same cells, {title_of(simulator)}: mean ± sd over {seed_count(rows)}."
    importance = where(cross, simulator=simulator, model=IMPORTANCE)
    more = SCVI_NOTE.format(n=len({row["seed"] for row in importance})) if importance else ""
    return Table(f"rivals-{simulator}", caption, columns, body, f"{NOTE}{more} {FDR_NOTE}" if noted else "")


def _ours(rows: Sequence[Row]) -> str:
    """The name of our rows, which are means over the models where there are several."""
    models = {row["model"] for row in rows}
    return OURS if len(models) > 1 else f"refined, {next(iter(models))}"


def _row(size: str, method: str, estimand: str, rows: Sequence[Row]) -> dict[str, Any]:
    draws = {DRAWS.key: counts_of(rows, DRAWS.key)}
    about = {"cells": size, "method": method, "estimand": ESTIMANDS[estimand]}
    measured = [column for column in _MEASURED if method not in OF_PAIRS or column not in (MAE, BRIER)]
    return {**about, **cells(rows, (*measured, *_SECONDS)), **draws}


# ----------------------------------------------------------------------------------------------------- who wins
def winners_table(cross: Sequence[Row], simulators: Sequence[str]) -> Table | None:
    """Which method ranks genes best and which finds most with a controlled FDP, by truth and cells, and ours."""
    body = [
        {"simulator": title_of(simulator), "estimand": ESTIMANDS[truth], "cells": size_text(n), **_winners(methods)}
        for simulator in simulators
        for truth in ("centred", "proportion")
        for n in SIZES
        if len(methods := _methods(cross, simulator, n, truth)) >= FEWEST_METHODS
    ]
    if not body:
        return None
    columns = [
        Column("simulator", "simulator"),
        Column("estimand", "scored by"),
        Column("cells", "cells"),
        Column("ranks", "ranks best"),
        Column("auprc", "AP", 3),
        Column("auprc_ours", "AP, ours", 3),
        Column("finds", "finds most, FDP at most 5 %"),
        Column("tpr", "found, %", 0, 100),
        Column("fdp", "its FDP, %", 1, 100),
        Column("tpr_ours", "found, ours, %", 0, 100),
        Column("fdp_ours", "FDP, ours, %", 1, 100),
    ]
    note = (
        "Means over these data sets, of which the best is picked, so that no verdict is given. Ours: refined, with all "
        "sources of uncertainty there are. Methods that print the same are counted. A method can find most if it finds "
        "at least 1 % and its mean FDP is at most 5 %."
    )
    return Table("winners", "Who ranks genes best, and who finds most of them.", columns, body, note)


FEWEST_METHODS = 3
"""Ours, raw counts and a rival."""


def _winners(methods: Mapping[str, Sequence[Row]]) -> dict[str, Any]:
    means = {key: {m: mean for m, rows in methods.items() if (mean := _mean(rows, key)) is not None} for key in _WON}
    found = {m: share for m, share in means["tpr"].items() if share >= LEAST_FOUND and _controlled(methods[m])}
    name = next((m for m in methods if m not in (*FLOORS, *RIVALS)), OURS)
    ours = {f"{key}_ours": values.get(name) for key, values in means.items()}
    ranks, finds = _best(means["auprc"], 1, 3), _best(found, 100, 0)
    return {
        "ranks": _listed(ranks),
        "auprc": max(means["auprc"].values()),
        "finds": _listed(finds),
        "tpr": max(found.values(), default=None),
        "fdp": means["fdp"][finds[0]] if finds else None,
        **ours,
    }


_WON = ("auprc", "tpr", "fdp")


def _controlled(rows: Sequence[Row]) -> bool:
    """Whether the mean FDP is at most the level."""
    fdp = _mean(rows, "fdp")
    return fdp is not None and fdp <= LEVEL


def _best(means: Mapping[str, float], scale: float, digits: int) -> list[str]:
    """The methods whose mean prints as the best, ours before others."""
    best = number(scale * max(means.values(), default=0.0), digits)
    return [m for m, mean in means.items() if number(scale * mean, digits) == best]


def _listed(tied: Sequence[str]) -> str:
    """The first of the methods, and the number of the others."""
    if not tied:
        return "none"
    others = len(tied) - 1
    return tied[0] if not others else f"{tied[0]} and {others} other{'s' if others > 1 else ''}"


def _methods(cross: Sequence[Row], simulator: str, n: int | str, truth: str) -> dict[str, list[Row]]:
    """Ours, raw counts, and every rival that is scored by this truth and was run on all data sets."""
    ours = refined(cross, simulator, n, estimand=truth)
    methods = {_ours(ours): ours} if ours else {}
    methods |= {FLOORS[0]: floor(cross, simulator, FLOORS[0], n, truth)}
    methods |= {m: floor(cross, simulator, m, n, truth) for m in COMPARED}
    return {name: rows for name, rows in methods.items() if rows}


def _mean(rows: Sequence[Row], key: str) -> float | None:
    summary = mean_of(rows, key)
    return None if summary is None else summary.mean


# ------------------------------------------------------------------------------------------------------- claims
def rival_claims(models: Sequence[Row], cross: Sequence[Row], simulator: str) -> list[Claim]:
    """Ours, with all sources of uncertainty, against every rival on 50 cells per group and against raw counts."""
    n = 50
    intervals = (FLOORS[0], "vaerdict de")
    return [
        Claim(
            "With 50 cells per group compared, by a model of all cells, genes are ranked better than by every rival.",
            [_against(cross, simulator, n, m, AP, _HIGH) for m in (FLOORS[0], *COMPARED)],
            f"{IMPORTANCE} is left out: it was run on fewer data sets, and on all cells only.",
        ),
        Claim(
            "With 50 cells per group compared, by a model of all cells, intervals are better than those of the counts "
            "alone.",
            [_against(cross, simulator, n, m, INTERVAL, _LOW) for m in intervals],
        ),
    ]


_NAMES = {AP.key: "AP", INTERVAL.key: "interval score"}


def _against(cross: Sequence[Row], simulator: str, n: int, name: str, column: Column, sign: int) -> Evidence:
    """Ours minus a rival, both by the rival's truth."""
    estimand = estimand_of(cross, simulator, name)
    theirs = by_seed(floor(cross, simulator, name, n, estimand), column.key)
    ours = by_seed(refined(cross, simulator, n, estimand=estimand), column.key)
    digits = 2 if column is INTERVAL else 3
    return Evidence(f"{_NAMES[column.key]}, refined minus {name}", difference(ours, theirs), sign, digits)
