"""The still pictures of answers whose truth is known. Called inside `svg.styled`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from vaerdict.de.page.plots import MANY_POINTS
from vaerdict.report.figures import blank
from vaerdict.report.svg import GREY, INK, OKABE_ITO

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from vaerdict.de.page.truth import Known

_WIDEST = 0.3  # rates above are of no use to anyone


def against_truth(known: Known, delta: float) -> Figure:
    """Estimated against true fold changes with intervals, marked by whether the call was right."""
    figure, axes = blank(height=5.0)
    real, called = known.truth.abs() >= delta, known.said.called
    kinds = {
        "rightly not called": (~real & ~called, GREY, "o", 9),
        "rightly called": (real & called, OKABE_ITO[0], "o", 9),
        "missed": (real & ~called, OKABE_ITO[1], "^", 30),
        "falsely called": (~real & called, OKABE_ITO[3], "X", 30),
    }
    many = len(real) > MANY_POINTS
    for name, (mask, colour, marker, size) in kinds.items():
        x, low, high = (column[mask].numpy() for column in (known.truth, known.low, known.high))
        axes.vlines(x, low, high, color=colour, alpha=0.25, linewidth=1, rasterized=many)
        look = {"s": size, "color": colour, "marker": marker, "label": f"{name} ({int(mask.sum())})"}
        axes.scatter(x, known.said.lfc[mask].numpy(), zorder=2, rasterized=many, **look)
    axes.axline((0, 0), slope=1, color=INK, linestyle="--", linewidth=1, zorder=3)
    for edge in (-delta, delta):
        axes.axvline(edge, color=GREY, linestyle=":", linewidth=1, zorder=0)
    axes.set(xlabel="true LFC", ylabel="estimated LFC")
    figure.legend(loc="outside lower center", ncols=2, fontsize=9)
    return figure


def rates(curves: Mapping[str, Mapping[str, Sequence[float]]], level: float | None) -> Figure:
    """Achieved against stated false discovery rates of the first 1, 2, ... genes of each method."""
    figure, axes = blank(height=5.0)
    for (name, curve), colour, style in zip(curves.items(), OKABE_ITO, ("-", "--"), strict=False):
        axes.plot(curve["fdr"], curve["fdp"], color=colour, linestyle=style, label=name)
    axes.axline((0, 0), slope=1, color=GREY, linewidth=1, zorder=0)
    if level is not None:
        axes.axvline(level, color=INK, linestyle=":", linewidth=1, label="rate asked for")
    axes.set(xlim=(0, _WIDEST), ylim=(0, _WIDEST), xlabel="stated rate", ylabel="achieved rate")
    figure.legend(loc="outside lower center", ncols=3, fontsize=9)
    return figure
