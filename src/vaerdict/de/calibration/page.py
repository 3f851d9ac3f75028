"""The page of a calibration: whether the false discovery rate holds on these data."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from vaerdict.core import DataError
from vaerdict.de.calibration.summary import KIND_NAMES
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


def from_run(run_dir: Path) -> Document:
    """The report on a run directory of `vaerdict calibrate`."""
    with well_formed(run_dir):
        return document(*read_run(run_dir))


def document(results: Row, manifest: dict[str, Any] | None) -> Document:
    """The report on a calibration."""
    verdict = results.get("verdict")
    if not isinstance(verdict, dict) or not verdict.get("messages"):
        raise DataError("results.json holds no verdict as this version writes it; run `vaerdict calibrate` again.")
    scale, centred = results["settings"]["scale"], ", minus the median over genes"
    truth = (
        f"The truth is on the {scale} scale: the fold change of mean proportions if all cells of the group were in "
        f"both halves{centred if scale == 'centred' else ''}."
    )
    sections = [
        Section("Where nothing changed", _null(results)),
        Section("Where changes were planted", _spikes(results)),
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


def _method(row: Row) -> str:
    method = str(row["method"])
    return "naive bootstrap" if method == "naive" else method  # in results of earlier versions


def _question(rows: Sequence[Row]) -> list[Column]:
    """A column for the question that a method answers, where several methods were asked."""
    return [Column("question", "question")] if len({row.get("question") for row in rows}) > 1 else []


def _series(row: Row) -> str:
    return f"{_method(row)}, {row['replicates']}"


# ------------------------------------------------------------------------------------------------------ sections
def _null(results: Row) -> list[Block]:
    rows = rows_of(results, "null", "method", "replicates", "level", "splits", "verdict")
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
    note = "Cells of one group were split at random, so that every discovery is false and the share is the FDR."
    caption = "Discoveries where nothing changed, at several targets."
    return [_null_picture(results), Table("null", caption, columns, body, note)]


def _null_picture(results: Row) -> Picture:
    level = results["settings"]["level"]
    rows = [r for r in rows_of(results, "rows", "kind", "n_called") if (r["kind"], r["level"]) == ("null", level)]
    counts = {
        _series(splits[0]): [row["n_called"] for row in splits]
        for splits in grouped(rows, "replicates", "method").values()
    }
    shares = "; ".join(f"{name}: {sum(map(bool, n))} of {len(n)} splits have any" for name, n in counts.items())
    return Picture(
        "null-discoveries",
        f"Genes called in each split where nothing changed, at a target FDR of {level:.0%}; numbers count splits.",
        f"Genes called in each split where nothing changed. {shares}.",
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
    table = Table("spikes", "Achieved against target FDR where changes were planted.", columns, body)
    return [_fdr_picture(rows), table, *_effects(results)]


def _fdr_picture(rows: Sequence[Row]) -> Picture:
    bands = {
        _series(levels[0]): Band(*zip(*(_percent(r["level"], r["fdp"], r["fdp_se"]) for r in levels), strict=True))
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


def _effects(results: Row) -> list[Block]:
    rows = rows_of(results, "effects", "method", "size", "n", "called", "short")
    body = [
        {
            **row,
            "method": _method(row),
            "short": None if row["short"] is None else Value(row["short"], row["short_se"]),
        }
        for row in rows
    ]
    columns = [
        Column("method", "method"),
        Column("size", "planted |LFC|"),
        Column("n", "genes, all splits"),
        Column("called", "called, %", 1, 100),
        Column("short", "estimate falls short by ± se", 3),
    ]
    mae = rows_of(results, "fdr_mae", "method", "fdr_mae")
    values = ", ".join(f"{_method(row)} {row['fdr_mae']:.2f}" for row in mae)
    note = f"Mean distance between achieved and stated FDR of the first k genes, in % (FDR MAE): {values}."
    caption = f"Genes called by size of the change planted, at a target FDR of {results['settings']['level']:.0%}."
    return [Table("effects", caption, columns, body, note)] if body else []


def _intervals(results: Row) -> list[Block]:
    rows = rows_of(results, "intervals", "kind", "replicates", "coverage", "by_expression", "verdict")
    if not rows:
        return []
    body = [
        {
            "series": f"{KIND_NAMES[row['kind']]}, {row['replicates']}",
            "stated": INTERVAL,
            "coverage": Value(row["coverage"], row["coverage_se"]),
            "splits": row["splits"],
            "verdict": row["verdict"],
        }
        for row in rows
    ]
    columns = [
        Column("series", "splits, replicates"),
        Column("stated", "stated, %", 0, 100),
        Column("coverage", "achieved, % ± se", 1, 100),
        Column("splits", "splits"),
        Column("verdict", "verdict"),
    ]
    bands = {part["series"]: _coverage_band(row["by_expression"]) for part, row in zip(body, rows, strict=True)}
    shares = "; ".join(f"{part['series']}: {100 * part['coverage'].value:.1f} %" for part in body)
    picture = Picture(
        "coverage",
        "Share of reported intervals that cover the true LFC, by expression of the gene, with two standard errors.",
        f"Share of the {INTERVAL:.0%} intervals reported that cover the true LFC. Overall, {shares}.",
        lambda: _draw_coverage(bands, 100 * INTERVAL),
    )
    return [picture, Table("coverage", "Coverage of the reported intervals.", columns, body)]


def _coverage_band(rows: Sequence[Row]) -> Band:
    points = [_percent(100 * r["expression"], r["coverage"], r["coverage_se"]) for r in rows]
    return Band(*zip(*points, strict=True))


def _percent(x: float, y: float, se: float | None) -> tuple[float, float, float]:
    return 100 * x, 100 * y, 100 * (se or 0.0)


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


def _draw_coverage(kinds: Mapping[str, Band], target: float) -> Figure:
    """Percent of intervals that cover the truth, by expression; the dashed line is the stated share."""
    figure, axes = blank(height=4.0)
    axes.axhline(target, color=GREY, linestyle="--", linewidth=1, zorder=0, label="as stated")
    _draw_bands(axes, kinds)
    axes.set(xscale="log", xlabel="expression: molecules in 10,000", ylabel="intervals that cover the LFC, %")
    axes.xaxis.set_major_formatter("{x:g}")
    axes.xaxis.set_minor_formatter("")
    axes.set_ylim(top=101)
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
