"""The page of the demonstration on pPCA: whether the answers can be used, and whether they are right."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vaerdict.core import DataError
from vaerdict.report import figures
from vaerdict.report.document import Block, Document, Picture, Section
from vaerdict.report.render import read_run, well_formed
from vaerdict.report.summary import Row, number, rows_of
from vaerdict.report.tables import Column, Table, Value, mark_column

MOSTLY = 0.9
"""The share of observations from which on a verdict is about all of them."""


def from_run(run_dir: Path) -> Document:
    """The report on a run directory."""
    with well_formed(run_dir):
        return document(*read_run(run_dir))


def document(results: Row, manifest: dict[str, Any] | None) -> Document:
    """The report on a demonstration."""
    decision = results.get("decision")
    if not isinstance(decision, dict):
        raise DataError("results.json of the demo holds no 'decision'; run the demo again.")
    points = rows_of(results, "points", "exact", "estimate", "mcse", "verdict")
    selection = selection_table(rows_of(results, "selection", "model"))
    sections = [
        Section("Estimates against the truth", [_figure(points)] if points else []),
        Section("Model selection", [selection] if selection else []),
        Section("Proposals", _proposals(rows_of(results, "proposals", "proposal"))),
    ]
    return Document(
        "Demo: decisions from a fitted model, with a verdict",
        [_verdict(decision), *_errors(decision, points)],
        [section for section in sections if section.blocks],
        manifest,
    )


def _verdict(decision: Row) -> str:
    """Whether the answers can be used."""
    ok, caution, refuse = (float(decision.get(f"share_{name}") or 0) for name in ("ok", "caution", "refuse"))
    if ok >= MOSTLY:
        verdict = "These answers can be used."
    elif refuse > 1 - MOSTLY:
        verdict = "These answers should not be used as they are."
    else:
        verdict = "These answers can be used with care."
    return (
        f"{verdict} The importance weights are reliable for {ok:.0%} of the observations, need caution for "
        f"{caution:.0%} and are refused for {refuse:.0%}."
    )


def _errors(decision: Row, points: Sequence[Row]) -> list[str]:
    messages = []
    error, mcse = decision.get("error"), decision.get("mcse")
    if error is not None and mcse is not None:
        messages.append(
            f"The mean error of the estimated probabilities is {number(error, 4)}; the mean standard error reported "
            f"with them is {number(mcse, 4)}{_coverage(points)}."
        )
    different, total = decision.get("n_different"), decision.get("n_observations")
    if different is not None and total:
        flagged = decision.get("n_different_flagged", 0)
        tail = f", and {flagged} of those {'were' if flagged != 1 else 'was'} marked as unsure" if different else ""
        differ = "differ" if different != 1 else "differs"
        messages.append(f"Of {total} decisions, {different} {differ} from those by exact probabilities{tail}.")
    stages = decision.get("stages")
    if isinstance(stages, dict) and stages:
        answered = ", ".join(f"{n} by {name}" for name, n in stages.items() if n and name != "refused")
        messages.append(f"Each observation was answered by the cheapest stage that passed: {answered}.")
    return messages


def _coverage(points: Sequence[Row]) -> str:
    checked = [p for p in points if p["mcse"] and p["estimate"] is not None and p["exact"] is not None]
    if not checked:
        return ""
    inside = sum(abs(p["estimate"] - p["exact"]) <= 2 * p["mcse"] for p in checked) / len(checked)
    return f", and two of them cover the truth for {inside:.0%} of {len(checked)} observations (95% are expected)"


def _figure(points: Sequence[Row]) -> Picture:
    counts = {name: sum(p["verdict"] == name for p in points) for name in figures.VERDICT_LOOK}
    verdicts = ", ".join(f"{n} {name}" for name, n in counts.items())
    return Picture(
        "against-truth",
        "Estimated against exact probability of each observation, with two standard errors either way.",
        f"Scatter of {len(points)} estimated against exact probabilities along the diagonal; verdicts: {verdicts}.",
        lambda: figures.against_truth(points),
    )


def _proposals(rows: Sequence[Row]) -> list[Block]:
    if not rows:
        return []
    body = [{**row, "mae": None if row.get("mae") is None else Value(row["mae"])} for row in rows]
    columns = [
        Column("proposal", "proposal"),
        Column("khat", "k-hat"),
        Column("khat_share_ok", "observations with k-hat below the threshold, %", 0, 100),
        Column("ess", "ESS", 0),
        Column("mae", "MAE", 4),
        Column("mae_plugin", "MAE without weights", 4),
        Column("mcse", "reported standard error", 4),
    ]
    return [Table("proposals", "Each proposal on its own, with equal draws.", columns, mark_column(body, "mae"))]


def selection_table(selection: Sequence[Row]) -> Table | None:
    """Step one of the procedure: held-out evidence of every model, and how far it is behind the one used."""
    if not selection:
        return None
    body = [
        {
            **{key: row.get(key) for key in ("model", "seed", "best_by", "khat", "iwelbo_best", "gap")},
            "iwelbo": _with_error(row, "iwelbo"),
            "behind": _with_error(row, "behind"),
        }
        for row in selection
    ]
    columns = [
        Column("model", "model"),
        Column("seed", "seed"),
        Column("behind", "behind the model used (± se)", 3),
        Column("iwelbo_best", "held-out evidence", 3),
        Column("best_by", "measured by"),
        Column("iwelbo", "by its own encoder (± se)", 3),
        Column("gap", "hidden by its encoder", 3),
        Column("khat", "k-hat of its encoder"),
    ]
    return Table("selection", "Step one: the models by held-out evidence, the one used first.", columns, body)


def _with_error(row: Row, key: str) -> Value | None:
    value = row.get(key)
    return None if value is None else Value(value, row.get(f"{key}_se"))
