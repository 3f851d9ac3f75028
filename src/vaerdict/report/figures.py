"""What is drawn: heat maps, errors against draws, ranges of k-hat, estimates against the truth; from plain numbers.

Each function is called inside `svg.styled`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from vaerdict.report.summary import Summary
from vaerdict.report.svg import GREY, INK, OKABE_ITO
from vaerdict.report.tables import Column

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDTH = 4.8
"""Inches: at the width of a phone the text is still readable."""

_MARKERS = "osD^vPX"
VERDICT_LOOK = {"ok": (OKABE_ITO[0], "o"), "caution": (OKABE_ITO[1], "^"), "refuse": (OKABE_ITO[3], "X")}


class Line(NamedTuple):
    """A curve with its name; a floor is drawn dashed and grey."""

    name: str
    x: Sequence[float]
    y: Sequence[Summary]
    floor: bool = False


class Range(NamedTuple):
    """Five quantiles (5, 25, 50, 75, 95 %) under a name."""

    name: str
    quantiles: Sequence[float]
    group: int = 0


def blank(width: float = WIDTH, height: float = 3.6) -> tuple[Figure, Axes]:
    """A figure with one pair of axes, known to nobody else."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.add_subplot()


def label(name: object, longest: int = 28) -> str:
    """A name that can stand in a figure: printable and not too long."""
    printable = "".join(c if c.isprintable() else "\ufffd" for c in str(name))
    return printable if len(printable) <= longest else printable[: longest - 1] + "…"


def heat_map(
    values: Mapping[str, Mapping[str, float | None]], quantity: Column, pick: Callable[..., Any] = min
) -> Figure:
    """Models down, proposals across, the best of each row framed. Better is lighter; `pick` says which end that is."""
    from matplotlib import colormaps
    from matplotlib.colors import Normalize

    columns = list(next(iter(values.values())))
    known = [v for row in values.values() for v in row.values() if v is not None]
    norm, cmap = (
        Normalize(min(known, default=0), max(known, default=1)),
        colormaps["viridis_r" if pick is min else "viridis"],
    )
    figure, axes = blank(height=0.9 + 0.52 * len(values))
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
    """A cell in its colour with its number, black or white by which is easier to read; framed if it is the best."""
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


def log_curves(
    lines: Sequence[Line], *, x: str = "draws for each observation", y: str = "mean absolute error of the sampler"
) -> Figure:
    """Curves against counts, both logarithmic, each named by colour, marker and legend; floors dashed and grey."""
    figure, axes = blank(height=4.6)
    looks = iter(range(len(lines)))
    for line in lines:
        means = [point.mean for point in line.y]
        spread = [point.sd or 0.0 for point in line.y]
        if line.floor:
            axes.plot(
                line.x, means, color=GREY, linestyle=("--", ":")["Sobol" in line.name], label=label(line.name, 60)
            )
            continue
        look = next(looks)
        colour, marker = OKABE_ITO[look % len(OKABE_ITO)], _MARKERS[look % len(_MARKERS)]
        axes.errorbar(
            line.x, means, spread, color=colour, marker=marker, markersize=4.5, capsize=2, label=label(line.name, 60)
        )
    axes.set(xscale="log", yscale="log", xlabel=x, ylabel=y)
    _plain_ticks(axes, sorted({x for line in lines if not line.floor for x in line.x}))
    axes.grid(which="major", color=GREY, alpha=0.25)
    figure.legend(loc="outside lower center", ncols=2, fontsize=9)
    return figure


def _plain_ticks(axes: Axes, draws: Sequence[float]) -> None:
    """Numbers as they are said: 0.01 and not a power of ten."""
    from matplotlib.ticker import FuncFormatter, NullFormatter

    axes.set_xticks(draws[:: max(1, math.ceil(len(draws) / 8))])
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axis.set_minor_formatter(NullFormatter())
    axes.minorticks_off()


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


def against_truth(points: Sequence[Mapping[str, Any]]) -> Figure:
    """Estimated against exact probabilities with two standard errors either way, coloured and shaped by verdict."""
    figure, axes = blank(height=5.0)
    axes.plot([0, 1], [0, 1], color=GREY, linestyle="--", linewidth=1, zorder=0)
    for verdict, (colour, marker) in VERDICT_LOOK.items():
        some = [
            p
            for p in points
            if p.get("verdict") == verdict and p.get("exact") is not None and p.get("estimate") is not None
        ]
        if some:
            x, y = [p["exact"] for p in some], [p["estimate"] for p in some]
            error = [2 * (p.get("mcse") or 0.0) for p in some]
            axes.errorbar(
                x,
                y,
                error,
                fmt=marker,
                color=colour,
                markersize=4.5,
                elinewidth=1,
                alpha=0.8,
                label=f"{verdict} ({len(some)})",
            )
    axes.set(
        xlim=(-0.03, 1.03),
        ylim=(-0.03, 1.03),
        aspect="equal",
        xlabel="exact probability",
        ylabel="estimated probability",
    )
    if axes.get_legend_handles_labels()[0]:
        axes.legend(title="verdict", loc="upper left")
    return figure
