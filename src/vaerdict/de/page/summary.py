"""The tables that a differential expression prints everywhere: contrasts, leading genes, groups and models."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from vaerdict.de.page.messages import shared
from vaerdict.de.page.table import Genes, leading
from vaerdict.de.verdict import BOTH, COUNTS, MODEL
from vaerdict.report.summary import Row
from vaerdict.report.tables import Column, Table

_DECIDED = {
    COUNTS: "Every gene is decided by the counts of both groups, shrunk by what all genes show.",
    BOTH: "A gene is decided by the model where it is narrower than the counts and they do not contradict it, else by "
    "the counts.",
    MODEL: "Every gene is decided by the model.",
}
_PLAIN = (
    "The plain bootstrap draws the replicates of the raw counts again, without a law of their dispersion and without "
    "shrinkage, and so calls genes of few counts too easily: it is there to compare with, not to be used."
)


def contrasts_table(contrasts: Sequence[Row], genes: Mapping[str, Genes], scale: str, decided: str) -> Table:
    """What was found in each contrast, as reported and by a plain bootstrap; `decided` says who decided the genes."""
    columns = [
        Column("name", "contrast"),
        Column("cells", "cells A, B"),
        Column("samples", "samples A, B"),
        Column("n", "genes called"),
        Column("n_up", "up in A"),
        Column("n_down", "down in A"),
        Column("expected_fdr", "expected FDR, %", 2, 100),
        *([] if decided == COUNTS else [Column("by_model", "decided by the model, %", 0, 100)]),
        Column("missed", "counts contradict the model, %", 0, 100),
        Column("raw", "called by a plain bootstrap"),
        Column("both", "called by both"),
    ]
    rows = [_contrast_row(contrast, genes[contrast["name"]]) for contrast in contrasts]
    columns = [c for c in columns if any(row.get(c.key) is not None for row in rows)]
    deltas = sorted({c["delta"] for c in contrasts if c.get("delta") is not None})
    note = f"{_DECIDED[decided]} {_PLAIN}"
    if deltas:
        sizes = " or ".join(f"{delta:g}" for delta in deltas)
        note = f"A gene counts as differential if its LFC is at least {sizes} either way. {note}"
    return Table("contrasts", "What was found", columns, rows, f"{scale} {note}")


def _contrast_row(contrast: Row, genes: Genes) -> dict[str, Any]:
    raw = shared(genes) or (None, None)
    up, down = _sides(genes)
    expected = contrast.get("expected_fdr")
    return {
        "name": contrast["name"], "cells": _pair(contrast, "n_cells"), "samples": _pair(contrast, "n_samples"),
        "n": up + down, "n_up": up, "n_down": down, "expected_fdr": None if expected is None else float(expected),
        "by_model": contrast.get("by_model"), "missed": contrast.get("missed"), "raw": raw[0], "both": raw[1],
    }  # fmt: skip


def _sides(genes: Genes) -> tuple[int, int]:
    down = sum(bool(flag) and (lfc or 0) < 0 for flag, lfc in zip(genes["is_de"], genes["lfc_mean"], strict=True))
    return sum(map(bool, genes["is_de"])) - down, down


def _pair(contrast: Row, name: str) -> str | None:
    a, b = contrast.get(f"{name}_a"), contrast.get(f"{name}_b")
    return None if a is None or b is None else f"{a:,}, {b:,}"


def top_table(contrast: Row, genes: Genes, n: int) -> Table:
    """The leading genes of a contrast."""
    columns = [
        Column("gene", "gene"), Column("lfc_mean", "LFC", 2, signed=True), Column("lfc_low", "low", 2, signed=True),
        Column("lfc_high", "high", 2, signed=True), Column("prob_de", "P(DE)", 3), Column("q_value", "q", 4),
        Column("raw_lfc", "raw LFC", 2, signed=True),
    ]  # fmt: skip
    rows = leading(genes, n)
    columns = [c for c in columns if c.key in genes]
    caption = f"Leading genes of {contrast['name']}" if rows else f"No gene is called in {contrast['name']}"
    return Table(f"top-{contrast['name']}", caption, columns, rows)


def diagnostics_table(rows: Sequence[Row]) -> Table:
    """k-hat and effective draws of each group."""
    columns = [
        Column("group", "group"),
        Column("n_cells", "cells"),
        Column("khat_encoder", "k-hat, encoder alone"),
        Column("khat", "k-hat, refined"),
        Column("share_ok", "cells in order, %", 1, 100),
        Column("ess", "effective share of draws, %", 1, 100),
    ]
    note = "k-hat measures how heavy the tail of the importance weights is; at most 0.7 is in order."
    return Table("diagnostics", "The importance weights, group by group", columns, [dict(row) for row in rows], note)


def selection_table(rows: Sequence[Row]) -> Table:
    """The models that were tried; the one kept is marked."""
    columns = [
        Column("model", "model"),
        Column("seed", "seed"),
        Column("evidence_own", "log evidence, own encoder"),
        Column("evidence_refined", "log evidence, refined"),
        Column("khat", "k-hat"),
        Column("epochs", "epochs"),
        Column("kept", "kept"),
    ]
    body = [{**row, "kept": "kept" if row.get("chosen") else ""} for row in rows]
    note = "The model with the largest refined evidence of held-out cells is kept." if len(rows) > 1 else ""
    return Table("selection", "The models that were fitted", columns, body, note)
