"""Other methods beside ours: a table, who wins where, and claims against rivals that were fixed beforehand.

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
COMPARED = tuple(name for name in RIVALS if name != IMPORTANCE)
"""The rivals of our claims, fixed beforehand: all that compare few cells."""

LEVEL = 0.05
_HIGH, _LOW = +1, -1

_MEASURED = (AP, FDP, TPR, MAE, BRIER, COVERAGE, INTERVAL)
_SECONDS = (Column("seconds", "seconds", 1), Column("seconds_train", "seconds of training", 0))

NOTE = (
    "Every method compares the same cells, and few of them in the same random subsets. Where few are compared, models "
    "are trained on more, ours on 80 % of the data set, scvi-tools on 90 %; the tests and vaerdict de see no others. "
    "Seconds of ours include its refits. vaerdict de measures changes from the largest "
    "set of genes with about the same change, which may be genes that go up or down where those that stay are no more. "
    "Methods that end in +lfc call the genes that changed at all whose estimated |LFC| exceeds 0.5; adjusted p-values "
    "are no estimates of the FDR, and have neither an FDR error nor a Brier score. Scored by: the change of "
    "expression, relative to the median gene for intervals, or that of proportions. Draws: per cell for ours, "
    "resamples for raw counts and true rates."
)
SCVI_NOTE = (
    " Draws of scvi-tools are pairs or resamples of cells; its importance mode, which takes minutes, is asked about "
    "all cells of {n} data sets."
)


def rivals_table(cross: Sequence[Row], simulator: str) -> Table | None:
    """Other methods and ours on the same cells, each by its own truth, with draws and seconds."""
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
    return Table(f"rivals-{simulator}", caption, columns, body, f"{NOTE}{more} {FDR_NOTE}")


def _ours(rows: Sequence[Row]) -> str:
    """The name of our rows, which are means over the models where there are several."""
    models = {row["model"] for row in rows}
    return OURS if len(models) > 1 else f"refined, {next(iter(models))}"


def _row(size: str, method: str, estimand: str, rows: Sequence[Row]) -> dict[str, Any]:
    draws = {DRAWS.key: counts_of(rows, DRAWS.key)}
    about = {"cells": size, "method": method, "estimand": ESTIMANDS[estimand]}
    return {**about, **cells(rows, (*_MEASURED, *_SECONDS)), **draws}


# ----------------------------------------------------------------------------------------------------- who wins
def winners(cross: Sequence[Row], simulator: str) -> str:
    """Which method ranks genes best and which finds most at a realised FDP of at most 5 %, by truth and cells."""
    sentences = []
    for truth in ("centred", "proportion"):
        parts = [
            f"with {size_text(n)} {_best_ranking(methods)}, and {_most_found(methods)}"
            for n in SIZES
            if len(methods := _methods(cross, simulator, n, truth)) >= FEWEST_METHODS
        ]
        if parts:
            about = f"of the methods scored by {ESTIMANDS[truth]}, on the average of these data sets"
            sentences.append(f"On {title_of(simulator)}, {about}: {'; '.join(parts)}.")
    return " ".join(sentences)


FEWEST_METHODS = 3
"""Ours, raw counts and a rival."""


def _best_ranking(methods: Mapping[str, Sequence[Row]]) -> str:
    ap = {m: mean for m, rows in methods.items() if (mean := _mean(rows, "auprc")) is not None}
    best = number(max(ap.values()), 3)
    ours = f"; ours {number(ap[OURS], 3)}" if OURS in ap and number(ap[OURS], 3) != best else ""
    return f"the best ranking is that of {_named(ap, best, 1, 3)} (AP {best}{ours})"


def _most_found(methods: Mapping[str, Sequence[Row]]) -> str:
    """Among methods with a mean FDP of at most 5 %; ours beside them with its FDP."""
    fdp = {m: _mean(rows, "fdp") for m, rows in methods.items()}
    found = {m: mean for m, rows in methods.items() if (mean := _mean(rows, "tpr")) is not None}
    controlled = {m: mean for m, mean in found.items() if (fdp[m] or 0.0) <= LEVEL}
    ours = "" if OURS not in found else f"ours {_percent(found[OURS])} with {_percent(fdp[OURS] or 0.0)} false"
    if not controlled:
        return f"no method has a mean FDP of at most 5 %{ours and f' ({ours})'}"
    best = number(100 * max(controlled.values()), 0)
    names = _named(controlled, best, 100, 0)
    is_best = OURS in controlled and number(100 * controlled[OURS], 0) == best
    return (
        f"of the methods with a mean FDP of at most 5 % most genes are found by {names} "
        f"({best} %{'' if is_best or not ours else f'; {ours}'})"
    )


def _named(means: Mapping[str, float], best: str, scale: float, digits: int) -> str:
    """The methods whose mean prints as the best: the first, ours before others, and the number of the others."""
    tied = [m for m, mean in means.items() if number(scale * mean, digits) == best]
    others = len(tied) - 1
    return tied[0] if not others else f"{tied[0]} and {others} other{'s' if others > 1 else ''}"


def _percent(share: float) -> str:
    return f"{number(100 * share, 0)} %"


def _methods(cross: Sequence[Row], simulator: str, n: int | str, truth: str) -> dict[str, list[Row]]:
    """Ours, raw counts, and every rival that is scored by this truth and was run on all data sets."""
    methods = {
        OURS: refined(cross, simulator, n, estimand=truth),
        FLOORS[0]: floor(cross, simulator, FLOORS[0], n, truth),
    }
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
            "With 50 cells per group genes are ranked better than by every other method.",
            [_against(cross, simulator, n, m, AP, _HIGH) for m in COMPARED],
        ),
        Claim(
            "With 50 cells per group more of the changed genes are found at 5 % than by every other method.",
            [_against(cross, simulator, n, m, TPR, _HIGH) for m in COMPARED],
        ),
        Claim(
            "With 50 cells per group intervals are better than those of the counts alone.",
            [_against(cross, simulator, n, m, INTERVAL, _LOW) for m in intervals],
        ),
    ]


_NAMES = {AP.key: "AP", TPR.key: "share found", INTERVAL.key: "interval score"}


def _against(cross: Sequence[Row], simulator: str, n: int, name: str, column: Column, sign: int) -> Evidence:
    """Ours minus a rival, both by the rival's truth."""
    estimand = estimand_of(cross, simulator, name)
    theirs = by_seed(floor(cross, simulator, name, n, estimand), column.key)
    ours = by_seed(refined(cross, simulator, n, estimand=estimand), column.key)
    return Evidence(f"{_NAMES[column.key]}, refined minus {name}", difference(ours, theirs), sign, column.digits or 3)
