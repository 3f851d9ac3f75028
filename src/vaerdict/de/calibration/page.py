"""The page of a calibration: whether the false discovery rate holds on these data."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from vaerdict.core import DataError
from vaerdict.de.calibration.strata import EXPRESSION, MEASURES, SIZE
from vaerdict.de.calibration.summary import KIND_NAMES, changed_coverage
from vaerdict.de.calibration.task import MIXED, NULL, REPORTED, SPIKE
from vaerdict.de.effects import INTERVAL
from vaerdict.de.page.tables import settings_table
from vaerdict.report.document import Block, Document, Picture, Section
from vaerdict.report.figures import GREY, OKABE_ITO, blank, label
from vaerdict.report.records import Row, grouped, read_run, rows_of, well_formed
from vaerdict.report.tables import Column, Table, Value

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_MARKERS = "osD^v"
_PLANTING = (
    "Changes are planted by thinning: for a gene to be larger in one half, molecules are removed at random from the "
    "other half, so that counts remain counts and library sizes shrink accordingly. Of every twenty genes of similar "
    "expression thirteen are unchanged, two change by less than delta, which counts as unchanged, and five by 1.1 to 4 "
    "times delta."
)
_SAME = {
    NULL: (
        "Discoveries where nothing changed, at several targets.",
        "Cells of one group were split at random, so that every discovery is false and the share is the FDR.",
    ),
    MIXED: (
        "Discoveries between halves of groups mixed, at several targets.",
        "Cells of two groups were pooled and split at random, so that every discovery is false. The halves hold the "
        "groups in slightly different shares, by chance, and all genes that differ between the groups seem to move.",
    ),
}
_UNDOING = (
    "Two groups were compared, with as many cells as the halves of each have. Of the genes that clearly differ between "
    "all cells of the two, a random tenth was thinned on the higher side so that the expected rates agree; related "
    "genes still differ. Every call of such a gene is false. Calls of other genes cannot be judged, so that the share "
    "of all calls is a lower bound of the FDR."
)


def from_run(run_dir: Path) -> Document:
    """The report on a run directory of `vaerdict calibrate`."""
    with well_formed(run_dir):
        return document(*read_run(run_dir))


def document(results: Row, manifest: dict[str, Any] | None) -> Document:
    """The report on a calibration."""
    verdict = results.get("verdict")
    if not isinstance(verdict, dict) or not verdict.get("messages"):
        raise DataError("results.json holds no verdict as this version writes it; run `vaerdict calibrate` again.")
    scale, centred = results["settings"]["scale"], ", minus what all genes have in common: the change planted"
    truth = (
        f"The truth is on the {scale} scale: the fold change of rates, counts of a gene over those of all genes, if "
        f"all cells of the group were in both halves{centred if scale == 'centred' else ''}."
    )
    sections = [
        Section("Where nothing changed", _null(results, NULL)),
        Section("Where groups were mixed", _null(results, MIXED)),
        Section("Where changes were planted", _spikes(results)),
        Section("Where changes were undone", _undone(results)),
        Section("By size of the change", _strata(results, SIZE)),
        Section("By expression", _strata(results, EXPRESSION)),
        Section("Coverage of the intervals", _intervals(results)),
        Section("How the verdict is reached", [str(verdict["rule"]), _PLANTING, truth]),
        Section("Settings", [settings_table(results["settings"])]),
    ]
    groups = [str(group) for group in results["settings"]["groups"]]
    named = ", ".join(groups[:3]) + (f" and {len(groups) - 3} more" if len(groups) > 3 else "")
    return Document(
        f"Calibration: random halves of {named}",
        [*map(str, verdict["messages"]), *(f"Warning: {each}" for each in results.get("warnings") or ())],
        [section for section in sections if section.blocks],
        manifest,
    )


def _question(rows: Sequence[Row]) -> list[Column]:
    """A column for the question that a method answers, where several methods were asked."""
    return [Column("question", "question")] if len({row.get("question") for row in rows}) > 1 else []


def _series(row: Row) -> str:
    return f"{row['method']}, {row['replicates']}"


# ------------------------------------------------------------------------------------------------------ sections
def _null(results: Row, kind: str) -> list[Block]:
    rows = rows_of(results, kind, "method", "replicates", "level", "splits", "verdict")
    if not rows:
        return []
    body = [
        {
            **row,
            "series": _series(row),
            "share": Value(row["share"], None, f" [{100 * row['share_low']:.0f} to {100 * row['share_high']:.0f}]"),
            "discoveries": Value(row["discoveries"], row["discoveries_se"]),
        }
        for row in rows
    ]
    columns = [
        Column("series", "method, replicates"),
        *_question(rows),
        Column("level", "target FDR, %", 0, 100),
        Column("splits", "splits"),
        Column("splits_with_any", "with a discovery"),
        Column("share", "share, % [95 % interval]", 0, 100),
        Column("discoveries", "discoveries per split ± se"),
        Column("n_genes", "of genes"),
        Column("verdict", "verdict"),
    ]
    caption, note = _SAME[kind]
    return [_null_picture(results, kind), Table(kind, caption, columns, body, note)]


def _null_picture(results: Row, kind: str) -> Picture:
    level = results["settings"]["level"]
    rows = [r for r in rows_of(results, "rows", "kind", "n_called") if (r["kind"], r["level"]) == (kind, level)]
    counts = {
        _series(splits[0]): [row["n_called"] for row in splits]
        for splits in grouped(rows, "replicates", "method").values()
    }
    shares = "; ".join(f"{name}: {sum(map(bool, n))} of {len(n)} splits have any" for name, n in counts.items())
    return Picture(
        f"{kind}-discoveries",
        f"Genes called in each split, {KIND_NAMES[kind]}, at a target FDR of {level:.0%}; numbers count splits.",
        f"Genes called in each split, {KIND_NAMES[kind]}. {shares}.",
        lambda: _draw_null(counts),
    )


def _spikes(results: Row) -> list[Block]:
    rows = rows_of(results, "spikes", "method", "replicates", "level", "fdp", "verdict")
    if not rows:
        return []
    body = [
        {
            **row,
            "series": _series(row),
            "fdp": Value(row["fdp"], row["fdp_se"]),
            "tpr": None if row["tpr"] is None else Value(row["tpr"], row["tpr_se"]),
        }
        for row in rows
    ]
    columns = [
        Column("series", "method, replicates"),
        *_question(rows),
        Column("level", "target FDR, %", 0, 100),
        Column("fdp", "achieved FDR, % ± se", 1, 100),
        Column("expected_fdr", "stated FDR, %", 1, 100),
        Column("tpr", "changed genes found, % ± se", 1, 100),
        Column("called", "called per split", 1),
        Column("true", "changed", 1),
        Column("splits", "splits"),
        Column("verdict", "verdict"),
    ]
    mae = ", ".join(f"{r['method']} {r['fdr_mae']:.2f}" for r in rows_of(results, "fdr_mae", "method", "fdr_mae"))
    note = f"Mean distance between achieved and stated FDR of the first k genes, in % (FDR MAE): {mae}." if mae else ""
    return [
        _fdr_picture(rows),
        Table("spikes", "Achieved against target FDR where changes were planted.", columns, body, note),
    ]


def _fdr_picture(rows: Sequence[Row]) -> Picture:
    bands = {
        _series(levels[0]): _band([(100 * r["level"], r["fdp"], r["fdp_se"]) for r in levels])
        for levels in grouped(rows, "replicates", "method").values()
    }
    points = "; ".join(
        f"{name}: " + ", ".join(f"{y:.1f} % at {x:g} %" for x, y in zip(band.x, band.y, strict=True))
        for name, band in bands.items()
    )
    return Picture(
        "achieved-fdr",
        "Achieved against target FDR, with two standard errors over splits; above the dashed line too many are false.",
        f"Achieved against target false discovery rate. {points}.",
        lambda: _draw_fdr(bands),
    )


def _undone(results: Row) -> list[Block]:
    rows = rows_of(results, "undone", "method", "replicates", "level", "share_called", "share_of_calls", "verdict")
    if not rows:
        return []
    body = [
        {
            **row,
            "series": _series(row),
            "share_called": None if row["share_called"] is None else Value(row["share_called"], row["share_called_se"]),
            "share_of_calls": Value(row["share_of_calls"], row["share_of_calls_se"]),
        }
        for row in rows
    ]
    columns = [
        Column("series", "method, replicates"),
        *_question(rows),
        Column("level", "target FDR, %", 0, 100),
        Column("undone", "genes undone per comparison", 1),
        Column("share_called", "of them called, % ± se", 1, 100),
        Column("share_of_calls", "of all calls, % ± se", 1, 100),
        Column("called", "called per comparison", 1),
        Column("splits", "comparisons"),
        Column("verdict", "verdict"),
    ]
    return [Table("undone", "Calls of genes whose change was undone, at several targets.", columns, body, _UNDOING)]


class _Strata(NamedTuple):
    """How strata of one kind are shown: what they are by, the column and the axis of their values."""

    by: str
    column: Column
    axis: str
    log: bool


_SHOWN = {
    SIZE: _Strata("size of the change planted", Column("value", "planted |LFC|"), "planted |LFC|", False),
    EXPRESSION: _Strata(
        "expression of the gene",
        Column("value", "molecules in 10,000", 2, 1e4),
        "expression: molecules in 10,000",
        True,
    ),
}
_PARTS = (
    "The false calls of a stratum are shares of all calls and add up to the achieved FDR. A stratum in which all genes "
    "changed, or none, has no FDR of its own."
)


def _strata(results: Row, by: str) -> list[Block]:
    """What is called, false, found and covered in the strata of one kind, where changes were planted."""
    rows = rows_of(results, "strata", "kind", "by", "method", "value", "n_genes", *(c.name for c in MEASURES))
    rows = [row for row in rows if (row["kind"], row["by"]) == (SPIKE, by)]
    if not rows:
        return []
    body = [
        {**row, **{c.name: None if row[c.name] is None else Value(row[c.name], row[f"{c.name}_se"]) for c in MEASURES}}
        for row in rows
    ]
    columns = [
        Column("method", "method"),
        _SHOWN[by].column,
        Column("n_genes", "genes per split", 0),
        Column("n_true", "changed", 0),
        Column("called", "called, % ± se", 1, 100),
        Column("fdp", "achieved FDR, % ± se", 1, 100),
        Column("fdr_part", "false, % of all calls ± se", 1, 100),
        Column("tpr", "changed genes found, % ± se", 1, 100),
        Column("coverage", "intervals that cover, % ± se", 1, 100),
        Column("short", "estimate falls short by ± se", 3),
    ]
    columns = [column for column in columns if any(row[column.key] is not None for row in body)]
    caption = f"Calls and intervals by {_SHOWN[by].by}, at a target FDR of {results['settings']['level']:.0%}."
    return [_power_picture(rows, by), Table(f"by-{by}", caption, columns, body, _PARTS)]


def _power_picture(rows: Sequence[Row], by: str) -> Picture:
    shown = _SHOWN[by]
    found = {
        method: [(row["value"], row["tpr"], row["tpr_se"]) for row in parts if row["tpr"] is not None]
        for (method,), parts in grouped(rows, "method").items()
    }
    scale = shown.column.scale
    bands = {m: _band([(scale * x, y, se) for x, y, se in points]) for m, points in found.items() if points}
    shares = "; ".join(
        f"{name}: " + ", ".join(f"{y:.1f} % at {x:g}" for x, y in zip(band.x, band.y, strict=True))
        for name, band in bands.items()
    )
    return Picture(
        f"power-{by}",
        f"Share of the changed genes that is found, by {shown.by}, with two standard errors over splits.",
        f"Share of the changed genes that is found by each method. {shares}.",
        lambda: _draw_shares(bands, shown, "changed genes found, %"),
    )


def _intervals(results: Row) -> list[Block]:
    rows = rows_of(results, "intervals", "kind", "replicates", "coverage", "coverage_changed", "verdict")
    if not rows:
        return []
    body = [
        {
            **row,
            "series": _kind_series(row),
            "stated": INTERVAL,
            "coverage": Value(row["coverage"], row["coverage_se"]),
            "coverage_changed": None
            if row["coverage_changed"] is None
            else Value(row["coverage_changed"], row["coverage_changed_se"]),
        }
        for row in rows
    ]
    columns = [
        Column("series", "splits, replicates"),
        Column("stated", "stated, %", 0, 100),
        Column("coverage", "of all genes, % ± se", 1, 100),
        Column("n_genes", "all genes", 0),
        Column("verdict", "verdict"),
        Column("coverage_changed", "of changed genes, % ± se", 1, 100),
        Column("n_changed", "changed genes", 0),
        Column("splits", "splits"),
    ]
    strata = [r for r in rows_of(results, "strata") if (r["by"], r["method"]) == (EXPRESSION, REPORTED)]
    bands = {
        _kind_series(parts[0]): _band([(1e4 * r["value"], r["coverage"], r["coverage_se"]) for r in parts])
        for parts in grouped(strata, "kind", "replicates").values()
    }
    shares = "; ".join(f"{part['series']}: {100 * part['coverage'].value:.1f} %" for part in body)
    picture = Picture(
        "coverage",
        "Share of reported intervals that cover the true LFC, by expression of the gene, with two standard errors.",
        f"Share of the {INTERVAL:.0%} intervals reported that cover the true LFC. Overall, {shares}.",
        lambda: _draw_shares(bands, _SHOWN[EXPRESSION], "intervals that cover the LFC, %", 100 * INTERVAL),
    )
    delta, shrinkage = results["settings"]["delta"], results["settings"].get("shrinkage", True)
    note = next(filter(None, (changed_coverage(row, delta, shrinkage=shrinkage) for row in rows)), "").strip()
    return [picture, Table("coverage", "Coverage of the reported intervals.", columns, body, note)]


def _kind_series(row: Row) -> str:
    return f"{KIND_NAMES[row['kind']]}, {row['replicates']}"


def _band(points: Sequence[tuple[float, float, float | None]]) -> Band:
    """Shares as percent. Shapes: ``points`` of x, share and standard error."""
    return Band(*zip(*((x, 100 * y, 100 * (se or 0.0)) for x, y, se in points), strict=True))


# ------------------------------------------------------------------------------------------------------ figures
class Band(NamedTuple):
    """Points with two standard errors either way."""

    x: Sequence[float]
    y: Sequence[float]
    se: Sequence[float]


def _draw_fdr(methods: Mapping[str, Band]) -> Figure:
    """Achieved against target FDR in percent; on the dashed line they agree, above it too many are false."""
    figure, axes = blank(height=4.4)
    levels = sorted({x for band in methods.values() for x in band.x})
    top = max(levels, default=1.0)
    axes.plot([0, top], [0, top], color=GREY, linestyle="--", linewidth=1, zorder=0, label="as stated")
    _draw_bands(axes, methods)
    axes.set(xlabel="target FDR, %", ylabel="achieved FDR, %", xlim=(0, 1.05 * top))
    axes.set_ylim(bottom=0)
    axes.set_xticks(levels, [f"{x:g}" for x in levels])
    figure.legend(loc="outside lower center", ncols=2, fontsize=9)
    return figure


def _draw_shares(bands: Mapping[str, Band], strata: _Strata, up: str, stated: float | None = None) -> Figure:
    """Shares in percent against size or expression; the dashed line is the stated share."""
    figure, axes = blank(height=4.0)
    if stated is not None:
        axes.axhline(stated, color=GREY, linestyle="--", linewidth=1, zorder=0, label="as stated")
    _draw_bands(axes, bands)
    axes.set(xlabel=strata.axis, ylabel=up)
    if strata.log:
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter("{x:g}")
        axes.xaxis.set_minor_formatter("")
    axes.set_ylim(0 if stated is None else None, 101)
    figure.legend(loc="outside lower center", ncols=2, fontsize=9)
    return figure


def _draw_bands(axes: Axes, bands: Mapping[str, Band]) -> None:
    """A line with markers for each band, and its range of two standard errors."""
    for i, (name, band) in enumerate(bands.items()):
        colour, marker = OKABE_ITO[i % len(OKABE_ITO)], _MARKERS[i % len(_MARKERS)]
        low = [max(y - 2 * se, 0) for y, se in zip(band.y, band.se, strict=True)]
        high = [y + 2 * se for y, se in zip(band.y, band.se, strict=True)]
        axes.fill_between(band.x, low, high, color=colour, alpha=0.2, linewidth=0)
        axes.plot(band.x, band.y, color=colour, marker=marker, markersize=5, label=label(name, 44))


def _draw_null(methods: Mapping[str, Sequence[int]]) -> Figure:
    """Discoveries in each split where nothing changed: one mark per number, larger for more splits."""
    figure, axes = blank(height=1.2 + 0.6 * len(methods))
    most = max((n for counts in methods.values() for n in counts), default=0)
    for y, counts in enumerate(methods.values()):
        colour, marker = OKABE_ITO[y % len(OKABE_ITO)], _MARKERS[y % len(_MARKERS)]
        for n, times in sorted(Counter(counts).items()):
            axes.plot(n, y, marker=marker, color=colour, markersize=5 + 2 * times**0.5, alpha=0.8)
            if times > 1:
                axes.annotate(f"{times}", (n, y), (0, 11), textcoords="offset points", ha="center", fontsize=9)
    axes.set_yticks(range(len(methods)), [label(name, 36) for name in methods])
    axes.set(ylim=(len(methods) - 0.5, -0.8), xlim=(-0.4 - 0.03 * most, max(1.4, 1.05 * most)))
    axes.set_xlabel("genes called in a split, all of them false")
    axes.tick_params(axis="y", length=0)
    axes.locator_params(axis="x", integer=True, nbins=8)
    return figure
