"""Figures that several experiments share: heat maps, logarithmic curves, ranges of k-hat."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from vaerdict.report.figures import GREY, INK, OKABE_ITO, WIDTH, blank, label, look
from vaerdict.report.records import Row
from vaerdict.report.tables import Column, Pick
from vaerdict_paper.pages.seed_statistics import Summary, mean_of, where

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def heat_map(values: Mapping[str, Mapping[str, float | None]], quantity: Column, pick: Pick = min) -> Figure:
    """Models down, proposals across, the best of each row framed; better is lighter, as `pick` says."""
    from matplotlib import colormaps
    from matplotlib.colors import Normalize

    columns = list(next(iter(values.values())))
    numbers = [v for row in values.values() for v in row.values() if v is not None]
    norm = Normalize(min(numbers, default=0), max(numbers, default=1))
    cmap = colormaps["viridis_r" if pick is min else "viridis"]
    figure, axes = blank(max(WIDTH, 0.9 + 0.68 * len(columns)), 0.9 + 0.52 * len(values))
    for y, row in enumerate(values.values()):
        best = pick((v for v in row.values() if v is not None), default=None)
        for x, value in enumerate(row.values()):
            colour = None if value is None else cmap(norm(value))
            _tile(axes, x, y, colour, quantity.text(value), best=value is not None and value == best)
    axes.set(xlim=(-0.5, len(columns) - 0.5), ylim=(len(values) - 0.5, -0.5), xlabel="proposal", ylabel="model")
    axes.set_xticks(range(len(columns)), [label(name, 12) for name in columns])
    axes.set_yticks(range(len(values)), [label(name) for name in values])
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    return figure


def _tile(axes: Axes, x: int, y: int, colour: Any, text: str, *, best: bool) -> None:
    """A coloured cell with its number in black or white, whichever is easier to read; framed if it is the best."""
    from matplotlib.patches import Rectangle

    if colour is None:
        axes.text(x, y, text, ha="center", va="center")
        return
    ink = "white" if _luminance(*colour[:3]) < 0.179 else "black"  # equal contrast with both
    axes.add_patch(Rectangle((x - 0.48, y - 0.46), 0.96, 0.92, facecolor=colour, edgecolor="none"))
    if best:
        axes.add_patch(Rectangle((x - 0.43, y - 0.4), 0.86, 0.8, facecolor="none", edgecolor=ink, linewidth=1.6))
    axes.text(x, y, text, ha="center", va="center", color=ink, fontweight="bold" if best else "normal")


def _luminance(red: float, green: float, blue: float) -> float:
    """Relative luminance of an sRGB colour (WCAG 2)."""
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in (red, green, blue)]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


class Line(NamedTuple):
    """A named curve; a floor is drawn grey and without markers."""

    name: str
    x: Sequence[float]
    y: Sequence[Summary]
    floor: bool = False


def line(name: str, rows: Sequence[Row], x: str, y: str, *, floor: bool = False) -> Line:
    """The means of key `y` over seeds by key `x`, where they are positive."""
    means = {at: mean_of(where(rows, **{x: at}), y) for at in sorted({row[x] for row in rows})}
    positive = {at: mean for at, mean in means.items() if mean is not None and mean.mean > 0}
    return Line(name, list(positive), list(positive.values()), floor)


def log_curves(
    lines: Sequence[Line], *, x: str = "draws for each observation", y: str = "mean absolute error of the sampler"
) -> Figure:
    """Curves with error bars on logarithmic axes, told apart by colour, marker and legend; floors are grey."""
    figure, axes = blank(height=4.6)
    index = 0
    for curve in lines:
        means, name = [point.mean for point in curve.y], label(curve.name, 60)
        if curve.floor:
            axes.plot(curve.x, means, color=GREY, linestyle=("--", ":")["Sobol" in curve.name], label=name)
            continue
        colour, marker = look(index)
        spread = [point.sd or 0.0 for point in curve.y]
        axes.errorbar(curve.x, means, spread, color=colour, marker=marker, markersize=4.5, capsize=2, label=name)
        index += 1
    axes.set(xscale="log", yscale="log", xlabel=x, ylabel=y)
    _plain_ticks(axes, sorted({x for curve in lines if not curve.floor for x in curve.x}))
    axes.grid(which="major", color=GREY, alpha=0.25)
    figure.legend(loc="outside lower center", ncols=2, fontsize=9)
    return figure


def _plain_ticks(axes: Axes, ticks: Sequence[float]) -> None:
    """Print tick labels as decimal numbers instead of powers of ten."""
    from matplotlib.ticker import FuncFormatter, NullFormatter

    axes.set_xticks(ticks[:: max(1, math.ceil(len(ticks) / 8))])
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axis.set_minor_formatter(NullFormatter())
    axes.minorticks_off()


class Range(NamedTuple):
    """Five quantiles (5, 25, 50, 75, 95 %) under a name; ranges of one `group` have the same colour."""

    name: str
    quantiles: Sequence[float]
    group: int = 0


def ranges(items: Sequence[Range], limits: Mapping[str, float], *, lowest: float = -0.5) -> Figure:
    """Horizontal ranges: thin from 5 to 95 %, thick from 25 to 75 %, a dot at the median; limits as vertical lines."""
    figure, axes = blank(height=1.1 + 0.3 * len(items))
    for y, item in enumerate(items):
        low, lower, median, upper, high = (max(q, lowest) for q in item.quantiles)
        colour = OKABE_ITO[item.group % len(OKABE_ITO)]
        axes.plot([low, high], [y, y], color=colour, linewidth=1.4)
        axes.plot([lower, upper], [y, y], color=colour, linewidth=6, solid_capstyle="butt", alpha=0.75)
        axes.plot(median, y, marker="<" if median <= lowest else "o", color=INK, markersize=4.5)
    for (name, limit), style in zip(limits.items(), ("--", ":"), strict=False):
        axes.axvline(limit, color=GREY, linestyle=style, label=label(name, 60))
    axes.set_yticks(range(len(items)), [label(item.name) for item in items])
    axes.set(ylim=(len(items) - 0.4, -0.6), xlabel="k-hat of an observation's weights")
    axes.tick_params(axis="y", length=0)
    figure.legend(loc="outside upper right", ncols=2, fontsize=9)
    return figure
