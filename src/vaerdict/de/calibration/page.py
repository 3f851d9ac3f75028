"""The page of a calibration: does the false discovery rate mean what it says on these data?"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vaerdict.core import DataError
from vaerdict.de.calibration import figures
from vaerdict.de.calibration.summary import INTERVAL, METHODS
from vaerdict.report.document import Block, Document, Picture, Section
from vaerdict.report.page import flat
from vaerdict.report.render import read_run, well_formed
from vaerdict.report.summary import Row, grouped, rows_of
from vaerdict.report.tables import Column, Table, Value

_KINDS = {"null": "nothing changed", "spike": "changes planted"}


def document(results: dict[str, Any], manifest: dict[str, Any] | None) -> Document:
    """The report on a calibration."""
    verdict = results.get("verdict")
    if not isinstance(verdict, dict) or not verdict.get("words"):
        raise DataError("results.json of the calibration holds no verdict; run `vaerdict calibrate` again.")
    headline, *said = map(str, verdict["words"])
    warnings = [f"Warning: {words}" for words in results.get("warnings") or ()]
    sections = [
        Section("Where nothing changed", _null(results)),
        Section("Where changes were planted", _spikes(results)),
        Section("Do the intervals hold the truth?", _intervals(results)),
        Section("How the word is found", [str(verdict.get("rule", "")), *_about(results)]),
        Section("Settings", [_settings(results)]),
    ]
    return Document(
        f"Calibration: {_title(results)}",
        [headline, *said, *warnings],
        [section for section in sections if section.blocks],
        manifest,
    )


def _title(results: Row) -> str:
    groups = list(results["settings"]["groups"])
    named = ", ".join(map(str, groups[:3])) + (f" and {len(groups) - 3} more" if len(groups) > 3 else "")
    return f"random halves of {named}"


def _who(row: Row) -> str:
    return f"{METHODS.get(row['method'], row['method'])}, {row['replicates']}"


# ------------------------------------------------------------------------------------------------------ sections
def _null(results: Row) -> list[Block]:
    rows = rows_of(results, "null", "method", "replicates", "level", "splits", "word")
    if not rows:
        return []
    body = [
        {
            **row,
            "who": _who(row),
            "allowed": row["level"],
            "share": Value(row["share"], None, f" [{100 * row['share_low']:.0f} to {100 * row['share_high']:.0f}]"),
            "discoveries": Value(row["discoveries"], row["discoveries_se"]),
        }
        for row in rows
    ]
    columns = [
        Column("who", "called by, replicates"),
        Column("allowed", "target FDR, %", 0, 100),
        Column("splits", "splits"),
        Column("splits_with_any", "with a discovery"),
        Column("share", "share, % [95 % interval]", 0, 100),
        Column("discoveries", "discoveries a split ± se"),
        Column("n_genes", "of genes"),
        Column("word", "word"),
    ]
    note = "Cells of one group were halved at random, so that every discovery is false and the share is the FDR."
    caption = "Discoveries where nothing changed, at several targets."
    return [_null_picture(results), Table("null", caption, columns, body, note)]


def _null_picture(results: Row) -> Picture:
    level = results["settings"]["analysis"]["level"]
    rows = [r for r in rows_of(results, "rows", "kind", "n_called") if (r["kind"], r["level"]) == ("null", level)]
    counts = {
        _who(some[0]): [row["n_called"] for row in some] for some in grouped(rows, "replicates", "method").values()
    }
    said = "; ".join(f"{name}: {sum(map(bool, n))} of {len(n)} splits have any" for name, n in counts.items())
    return Picture(
        "null-discoveries",
        f"Genes called in each split where nothing changed, at a target FDR of {level:.0%}; numbers count splits.",
        f"Genes called in each split where nothing changed. {said}.",
        lambda: figures.null_counts(counts),
    )


def _spikes(results: Row) -> list[Block]:
    rows = rows_of(results, "spikes", "method", "replicates", "level", "fdp", "word")
    if not rows:
        return []
    body = [
        {
            **row,
            "who": _who(row),
            "fdp": Value(row["fdp"], row["fdp_se"]),
            "tpr": None if row["tpr"] is None else Value(row["tpr"], row["tpr_se"]),
        }
        for row in rows
    ]
    columns = [
        Column("who", "called by, replicates"),
        Column("level", "target FDR, %", 0, 100),
        Column("fdp", "achieved FDR, % ± se", 1, 100),
        Column("expected_fdr", "stated of the genes called, %", 1, 100),
        Column("tpr", "changed genes found, % ± se", 1, 100),
        Column("called", "called a split", 1),
        Column("true", "changed", 1),
        Column("splits", "splits"),
        Column("word", "word"),
    ]
    table = Table("spikes", "Achieved against nominal FDR where changes were planted.", columns, body)
    return [_fdr_picture(rows), table, *_effects(results)]


def _fdr_picture(rows: Sequence[Row]) -> Picture:
    bands = {
        _who(some[0]): figures.Band(*zip(*(_percent(r["level"], r["fdp"], r["fdp_se"]) for r in some), strict=True))
        for some in grouped(rows, "replicates", "method").values()
    }
    said = "; ".join(
        f"{name}: " + ", ".join(f"{y:.1f} % at {x:g} %" for x, y in zip(band.x, band.y, strict=True))
        for name, band in bands.items()
    )
    return Picture(
        "achieved-fdr",
        "Achieved against nominal FDR, with two standard errors over splits; above the dashed line too many are false.",
        f"Achieved against nominal false discovery rate. {said}.",
        lambda: figures.fdr_bands(bands),
    )


def _effects(results: Row) -> list[Block]:
    mae = {row["method"]: row for row in rows_of(results, "fdr_mae", "method", "fdr_mae")}
    rows = rows_of(results, "effects", "method", "size", "n", "called", "short")
    body = [
        {**row, "method": METHODS.get(row["method"], row["method"]), "short": Value(row["short"], row["short_se"])}
        for row in rows
    ]
    columns = [
        Column("method", "called by"),
        Column("size", "planted |LFC|"),
        Column("n", "genes, all splits"),
        Column("called", "called, %", 1, 100),
        Column("short", "estimate falls short by ± se", 3),
    ]
    said = ", ".join(f"{METHODS.get(m, m)} {row['fdr_mae']:.2f}" for m, row in mae.items())
    note = f"Mean distance of the false share of the first k genes from the one stated, in % (FDR MAE): {said}."
    level = results["settings"]["analysis"]["level"]
    caption = f"Genes called by size of the change planted, at a target FDR of {level:.0%}."
    return [Table("effects", caption, columns, body, note)] if body else []


def _intervals(results: Row) -> list[Block]:
    rows = rows_of(results, "intervals", "kind", "replicates", "coverage", "by_expression", "word")
    if not rows:
        return []
    body = [
        {
            "who": f"{_KINDS.get(row['kind'], row['kind'])}, {row['replicates']}",
            "stated": INTERVAL,
            "coverage": Value(row["coverage"], row["coverage_se"]),
            "splits": row["splits"],
            "word": row["word"],
        }
        for row in rows
    ]
    columns = [
        Column("who", "splits, replicates"),
        Column("stated", "stated, %", 0, 100),
        Column("coverage", "held, % ± se", 1, 100),
        Column("splits", "splits"),
        Column("word", "word"),
    ]
    bands = {name["who"]: _coverage_band(row["by_expression"]) for name, row in zip(body, rows, strict=True)}
    said = "; ".join(f"{row['who']}: {100 * row['coverage'].value:.1f} %" for row in body)
    picture = Picture(
        "coverage",
        "Intervals reported that hold the true LFC, by expression of the gene, with two standard errors.",
        f"Share of the 90 % intervals reported that hold the true LFC. In all, {said}.",
        lambda: figures.coverage_bands(bands, 100 * INTERVAL),
    )
    return [picture, Table("coverage", "Coverage of the intervals reported.", columns, body)]


def _coverage_band(rows: Sequence[Row]) -> figures.Band:
    points = [_percent(100 * r["expression"], r["coverage"], r["coverage_se"]) for r in rows]
    return figures.Band(*zip(*points, strict=True))


def _percent(x: float, y: float, se: float | None) -> tuple[float, float, float]:
    return 100 * x, 100 * y, 100 * (se or 0.0)


def _about(results: Row) -> list[Block]:
    scale = results["settings"]["analysis"]["scale"]
    return [
        "Changes are planted by thinning: for a gene to be larger in one half, molecules of the other are taken out at "
        "random, so that counts remain counts and libraries shrink with them. Of every twenty genes of like expression "
        "fourteen are unchanged, two changed by half of delta, which counts as unchanged, and four by 1.5 to 4 "
        "times delta.",
        f"The truth is that of the {scale} scale which the analysis reports: the fold change of mean proportions over "
        "all cells of the group, had every one been in both halves"
        + (", less the median over genes." if scale == "centred" else "."),
        "Intervals of the plain bootstrap are not in the table of genes, so that their coverage is not assessed.",
    ]


def _settings(results: Row) -> Table:
    settings = {**results["settings"], **results["settings"]["analysis"]}
    settings.pop("analysis")
    rows = [{"what": str(key), "value": flat(value)} for key, value in settings.items()]
    columns = (Column("what", "setting"), Column("value", "value"))
    return Table("settings", "Every option of this run", columns, rows, detail=True)


def from_run(run_dir: Path) -> Document:
    """The report on a run directory."""
    with well_formed(run_dir):
        return document(*read_run(run_dir))
