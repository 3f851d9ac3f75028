"""What is drawn of a calibration: achieved against nominal FDR, discoveries where nothing changed, and coverage.

Each function is called inside `svg.styled`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from vaerdict.report.figures import blank, label
from vaerdict.report.svg import GREY, OKABE_ITO

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_MARKERS = "osD^v"


class Band(NamedTuple):
    """Points with two standard errors either way."""

    x: Sequence[float]
    y: Sequence[float]
    se: Sequence[float]


def fdr_bands(methods: Mapping[str, Band]) -> Figure:
    """Achieved against nominal FDR in percent; on the dashed line they agree, above it too many are false."""
    figure, axes = blank(height=4.4)
    levels = sorted({x for band in methods.values() for x in band.x})
    top = max(levels, default=1.0)
    axes.plot([0, top], [0, top], color=GREY, linestyle="--", linewidth=1, zorder=0, label="as stated")
    _bands(axes, methods)
    axes.set(xlabel="nominal FDR, %", ylabel="achieved FDR, %", xlim=(0, 1.05 * top))
    axes.set_ylim(bottom=0)
    axes.set_xticks(levels, [f"{x:g}" for x in levels])
    figure.legend(loc="outside lower center", ncols=2, fontsize=9)
    return figure


def coverage_bands(kinds: Mapping[str, Band], target: float) -> Figure:
    """Percent of intervals that hold the truth, by expression; on the dashed line it is what they say."""
    from matplotlib.ticker import FuncFormatter, NullFormatter

    figure, axes = blank(height=4.0)
    axes.axhline(target, color=GREY, linestyle="--", linewidth=1, zorder=0, label="as stated")
    _bands(axes, kinds)
    axes.set(xscale="log", xlabel="expression: molecules in 10,000", ylabel="intervals that hold the LFC, %")
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_ylim(top=101)
    figure.legend(loc="outside lower center", ncols=2, fontsize=9)
    return figure


def _bands(axes: Axes, bands: Mapping[str, Band]) -> None:
    """A line with markers for each, and its band of two standard errors."""
    for i, (name, band) in enumerate(bands.items()):
        colour, marker = OKABE_ITO[i % len(OKABE_ITO)], _MARKERS[i % len(_MARKERS)]
        low = [max(y - 2 * se, 0) for y, se in zip(band.y, band.se, strict=True)]
        high = [y + 2 * se for y, se in zip(band.y, band.se, strict=True)]
        axes.fill_between(band.x, low, high, color=colour, alpha=0.2, linewidth=0)
        axes.plot(band.x, band.y, color=colour, marker=marker, markersize=5, label=label(name, 44))


def null_counts(methods: Mapping[str, Sequence[int]]) -> Figure:
    """Discoveries in each split where nothing changed: a mark a number, larger for more splits."""
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
