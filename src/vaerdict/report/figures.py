"""What is drawn: heat maps, errors against draws, ranges of k-hat, estimates against the truth. Plain numbers in, figures out.

Each function is called inside `svg.styled`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from vaerdict.report.summary import Summary, number
from vaerdict.report.svg import GREY, INK, OKABE_ITO

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDTH = 5.6
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
    values: Mapping[tuple[str, str], float | None],
    rows: Sequence[str],
    columns: Sequence[str],
    *,
    digits: int,
    scale: float = 1,
) -> Figure:
    """Models down, proposals across, the best of each row framed. Lower is better, and lighter."""
    from matplotlib import colormaps
    from matplotlib.colors import Normalize

    figure, axes = blank(height=0.9 + 0.52 * len(rows))
    numbers = [v * scale for v in values.values() if v is not None]
    norm, cmap = Normalize(min(numbers, default=0), max(numbers, default=1)), colormaps["viridis_r"]
    for i, model in enumerate(rows):
        known = [v for q in columns if (v := values.get((model, q))) is not None]
        for j, proposal in enumerate(columns):
            value = values.get((model, proposal))
            colour = "none" if value is None else cmap(norm(value * scale))
            _tile(
                axes,
                j,
                i,
                colour,
                None if value is None else number(value * scale, digits),
                best=value == min(known, default=0),
            )
    axes.set(xlim=(-0.5, len(columns) - 0.5), ylim=(len(rows) - 0.5, -0.5), xlabel="proposal", ylabel="model")
    axes.set_xticks(range(len(columns)), [label(c) for c in columns])
    axes.set_yticks(range(len(rows)), [label(r) for r in rows])
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    return figure


def _tile(axes: Axes, x: int, y: int, colour: Any, text: str | None, *, best: bool) -> None:
    from matplotlib.patches import Rectangle

    if text is None:
        axes.text(x, y, "–", ha="center", va="center")
        return
    red, green, blue, _ = colour
    ink = "white" if 0.299 * red + 0.587 * green + 0.114 * blue < 0.5 else "black"
    axes.add_patch(Rectangle((x - 0.48, y - 0.46), 0.96, 0.92, facecolor=colour, edgecolor="none"))
    if best:
        axes.add_patch(Rectangle((x - 0.43, y - 0.4), 0.86, 0.8, facecolor="none", edgecolor=ink, linewidth=1.6))
    axes.text(x, y, text, ha="center", va="center", color=ink, fontweight="bold" if best else "normal")


def error_curves(lines: Sequence[Line]) -> Figure:
    """Errors against number of draws, both logarithmic, each line named by colour, marker and legend."""
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
    axes.set(
        xscale="log", yscale="log", xlabel="draws for each observation", ylabel="mean absolute error of the sampler"
    )
    _plain_ticks(axes, sorted({x for line in lines for x in line.x}))
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
    """Horizontal ranges: thin from 5 to 95 %, thick from 25 to 75 %, a dot at the median; the limits as vertical lines."""
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
