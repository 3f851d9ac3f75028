"""The page of the demonstration: may these answers be used, and were they right?"""

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
"""The share of observations above which a verdict speaks for the whole."""


def document(results: dict[str, Any], manifest: dict[str, Any] | None) -> Document:
    """The report on a demonstration."""
    decision = results.get("decision")
    if not isinstance(decision, dict):
        raise DataError("results.json of the demo holds no 'decision'; run the demo again.")
    points = rows_of(results, "points", "exact", "estimate", "mcse", "verdict")
    selection = selection_table(rows_of(results, "selection", "model"))
    sections = [
        Section("Estimates against the truth", [_figure(points)] if points else []),
        Section("Which model was kept", [selection] if selection else []),
        Section("Which proposals were combined", _proposals(rows_of(results, "proposals", "proposal"))),
    ]
    sections = [section for section in sections if section.blocks]
    return Document(
        "Demo: decisions from a fitted model, with a verdict",
        [*verdict(decision), *_words(decision, points)],
        sections,
        manifest,
    )


def verdict(decision: Row) -> list[str]:
    """May the answers be used, in words."""
    ok, caution, refuse = (float(decision.get(f"share_{word}") or 0) for word in ("ok", "caution", "refuse"))
    if ok >= MOSTLY:
        word = "These answers can be used."
    elif refuse > 1 - MOSTLY:
        word = "These answers should not be used as they are."
    else:
        word = "These answers can be used with care."
    shares = (
        f"The weights are in order for {ok:.0%} of the observations, call for caution in {caution:.0%} and for refusal "
        f"in {refuse:.0%}."
    )
    return [f"{word} {shares}"]


def _words(decision: Row, points: Sequence[Row]) -> list[str]:
    words = []
    error, mcse = decision.get("error"), decision.get("mcse")
    if error is not None and mcse is not None:
        words.append(
            f"The estimated probabilities miss the exact ones by {number(error, 4)} on average; the standard error "
            f"reported with them averages {number(mcse, 4)}{_coverage(points)}."
        )
    different, total = decision.get("n_different"), decision.get("n_observations")
    if different is not None and total:
        flagged = decision.get("n_different_flagged", 0)
        tail = f", and {flagged} of those {'were' if flagged != 1 else 'was'} marked as unsure" if different else ""
        differ = "differ" if different != 1 else "differs"
        words.append(f"Of {total} decisions, {different} {differ} from what exact probabilities would give{tail}.")
    rungs = decision.get("rungs")
    if isinstance(rungs, dict) and rungs:
        climbed = ", ".join(f"{n} at {name}" for name, n in rungs.items() if n and name != "refused")
        words.append(f"Each observation was answered by the cheapest rung that passed: {climbed}.")
    return words


def _coverage(points: Sequence[Row]) -> str:
    known = [p for p in points if p["mcse"] and p["estimate"] is not None and p["exact"] is not None]
    if not known:
        return ""
    inside = sum(abs(p["estimate"] - p["exact"]) <= 2 * p["mcse"] for p in known) / len(known)
    return f", and two of them cover the truth in {inside:.0%} of {len(known)} observations (95% would be expected)"


def _figure(points: Sequence[Row]) -> Block:
    counts = {word: sum(p["verdict"] == word for p in points) for word in figures.VERDICT_LOOK}
    said = ", ".join(f"{n} {word}" for word, n in counts.items())
    return Picture(
        "against-truth",
        "Each observation's estimated probability against the exact one, with two standard errors either way.",
        f"Scatter of {len(points)} estimated against exact probabilities along the diagonal; verdicts: {said}.",
        lambda: figures.against_truth(points),
    )


def _proposals(rows: Sequence[Row]) -> list[Block]:
    if not rows:
        return []
    body = [{**row, "mae": None if row.get("mae") is None else Value(row["mae"])} for row in rows]
    columns = [
        Column("proposal", "proposal"),
        Column("khat", "k-hat"),
        Column("khat_share_ok", "observations with k-hat in order, %", 0, 100),
        Column("ess", "ESS", 0),
        Column("mae", "MAE", 4),
        Column("mae_plugin", "MAE without weights", 4),
        Column("mcse", "reported standard error", 4),
    ]
    return [Table("proposals", "Each proposal on its own, with equal draws.", columns, mark_column(body, "mae"))]


def from_run(run_dir: Path) -> Document:
    """The report on a run directory."""
    with well_formed(run_dir):
        return document(*read_run(run_dir))


def selection_table(selection: Sequence[Row]) -> Table | None:
    """Step one of the procedure: held-out evidence of every model, and how far it is behind the one kept."""
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
        Column("behind", "behind the kept model (± se)", 3),
        Column("iwelbo_best", "held-out evidence", 3),
        Column("best_by", "measured by"),
        Column("iwelbo", "by its own encoder (± se)", 3),
        Column("gap", "hidden by its encoder", 3),
        Column("khat", "k-hat of its encoder"),
    ]
    return Table("selection", "Step one: the models by held-out evidence, the one kept first.", columns, body)


def _with_error(row: Row, key: str) -> Value | None:
    value = row.get(key)
    return None if value is None else Value(value, row.get(f"{key}_se"))
