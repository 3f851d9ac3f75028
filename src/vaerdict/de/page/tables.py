"""The tables of the page: contrasts, leading genes, groups, models and settings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from vaerdict.de.page.genes import Genes, called, leading
from vaerdict.de.verdict import group_names
from vaerdict.report.page import flat
from vaerdict.report.records import Row
from vaerdict.report.tables import Column, Table


def contrasts_table(contrasts: Sequence[Row], genes: Mapping[str, Genes], scale: str) -> Table:
    """What was found in each contrast; `scale` describes the fold change."""
    a, b = group_names(contrasts[0]) if len(contrasts) == 1 else ("the first group", "the second group")
    columns = [
        Column("name", "contrast"),
        Column("cells", f"cells of {a} and {b}"),
        Column("samples", f"samples of {a} and {b}"),
        Column("n_tested", "genes tested"),
        Column("n", "genes called"),
        Column("n_up", f"higher in {a}"),
        Column("n_down", f"higher in {b}"),
        Column("expected_fdr", "expected FDR, %", 2, 100),
        Column("share_contradicted", "counts contradict the model, %", 0, 100),
    ]
    rows = [_contrast_row(contrast, genes[contrast["name"]]) for contrast in contrasts]
    columns = [column for column in columns if any(row[column.key] is not None for row in rows)]
    note = (
        f"{scale} A gene is differentially expressed if its LFC is at least {contrasts[0]['delta']:g} either way. It "
        "is called if its q-value is at most the FDR asked for and its local false sign rate is below 5 %."
    )
    return Table("contrasts", "Genes called in each contrast", columns, rows, note)


def _contrast_row(contrast: Row, genes: Genes) -> dict[str, Any]:
    n = len(called(genes))
    down = sum(bool(flag) and (lfc or 0) < 0 for flag, lfc in zip(genes["is_de"], genes["lfc_mean"], strict=True))
    return {
        **{key: contrast[key] for key in ("name", "expected_fdr", "share_contradicted")},
        "cells": _pair(contrast, "n_cells"),
        "samples": _pair(contrast, "n_samples"),
        "n_tested": len(genes["gene"]),
        "n": n,
        "n_up": n - down,
        "n_down": down,
    }


def _pair(contrast: Row, key: str) -> str | None:
    a, b = contrast[f"{key}_a"], contrast[f"{key}_b"]
    return None if a is None or b is None else f"{a:,}, {b:,}"


def top_table(contrast: Row, genes: Genes, n: int) -> Table:
    """The leading genes of a contrast."""
    columns = [
        Column("gene", "gene"),
        Column("lfc_mean", "LFC", 2, signed=True),
        Column("lfc_low", "low", 2, signed=True),
        Column("lfc_high", "high", 2, signed=True),
        Column("prob_de", "P(DE)", 3),
        Column("q_value", "q", None),
    ]
    rows, (a, b) = leading(genes, n), group_names(contrast)
    caption = f"Leading genes of {contrast['name']}" if rows else f"No gene is called in {contrast['name']}"
    note = f"LFC: log2 fold change, {a} over {b}, with its credible interval." if rows else ""
    return Table(f"top-{contrast['name']}", caption, columns, rows, note)


def diagnostics_table(rows: Sequence[Row]) -> Table:
    """k-hat and effective draws of each group."""
    columns = [
        Column("group", "group"),
        Column("n_cells", "cells"),
        Column("khat_encoder", "k-hat, encoder alone"),
        Column("khat", "k-hat, refined"),
        Column("share_ok", "reliable cells, %", 1, 100),
        Column("ess", "effective share of draws, %", 1, 100),
    ]
    note = "k-hat measures how heavy the tail of the importance weights is; weights are reliable up to 0.7."
    return Table("diagnostics", "Importance weights by group", columns, [dict(row) for row in rows], note)


def selection_table(rows: Sequence[Row]) -> Table:
    """The models that were fitted; the one used is marked."""
    columns = [
        Column("model", "model"),
        Column("seed", "seed"),
        Column("evidence_own", "log evidence, own encoder"),
        Column("evidence_refined", "log evidence, refined"),
        Column("khat", "k-hat"),
        Column("epochs", "epochs"),
        Column("used", "used"),
    ]
    body = [{**row, "used": "yes" if row.get("chosen") else ""} for row in rows]
    note = "The model with the largest refined log evidence of held-out cells is used." if len(rows) > 1 else ""
    return Table("selection", "The models that were fitted", columns, body, note)


def settings_table(settings: Row) -> Table:
    """Every option of a run, folded."""
    rows = [{"what": str(key), "value": flat(value)} for key, value in settings.items()]
    columns = (Column("what", "setting"), Column("value", "value"))
    return Table("settings", "Every option of this run", columns, rows, detail=True)
