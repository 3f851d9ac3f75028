"""The figures of an audit: k-hat, reliability by group, and movement of the quantities."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from vaerdict.auditing.verdict import NEAR, percent
from vaerdict.report.document import Picture
from vaerdict.report.figures import GREY, INK, OKABE_ITO, blank, label
from vaerdict.report.records import Row

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MOST_GROUPS = 40
"""Figures show the groups with the fewest reliable observations, at most so many; the table shows all."""

_BLUE, _ORANGE = OKABE_ITO[0], OKABE_ITO[3]
_LEGEND = {"loc": "lower left", "bbox_to_anchor": (0, 1.0), "ncols": 2, "borderaxespad": 0.2, "fontsize": 9}


def khat_picture(results: Row) -> Picture:
    """Numbers of observations by the k-hat of the encoder and of refined inference, with both thresholds."""
    noun, encoder, refined = results["noun"], results["encoder"], results["refined"]
    return Picture(
        "khat",
        f"k-hat of the {noun}, by the encoder and by refined inference. Importance weights are reliable to the left of "
        "the dashed line of the same colour.",
        f"Histogram of k-hat. The encoder is reliable for {percent(encoder['share_reliable'])} of the {noun}, refined "
        f"inference for {percent(refined['share_reliable'])}.",
        lambda: _draw_khat(results),
    )


def _draw_khat(results: Row) -> Figure:
    figure, axes = blank(height=3.0)
    edges = results["histogram"]["edges"]
    series = {"encoder": ("encoder", _ORANGE), "refined": ("refined inference", _BLUE)}
    for key, (name, colour) in series.items():
        axes.stairs(results["histogram"][key], edges, color=colour, fill=True, alpha=0.35)
        axes.stairs(results["histogram"][key], edges, color=colour, linewidth=1.4, label=name)
        axes.axvline(results[key]["khat_threshold"], color=colour, linestyle="--", linewidth=1.2)
    axes.set(xlabel="k-hat (the outer bars hold what is beyond)", ylabel=results["noun"], xlim=(edges[0], edges[-1]))
    axes.legend(**_LEGEND)
    return figure


def groups_picture(groups: Sequence[Row], noun: str) -> Picture:
    """The share of reliable observations of every group."""
    worst = sorted(groups, key=lambda row: (row["share_reliable"], row["share_answered"]))[:MOST_GROUPS]
    return Picture(
        "groups",
        f"Share of the {noun} of each group with reliable importance weights, by the encoder and by refined inference.",
        f"Share of reliable {noun} in {len(groups)} groups; the table below has the numbers.",
        lambda: _draw_groups(worst, noun),
    )


def _draw_groups(rows: Sequence[Row], noun: str) -> Figure:
    figure, axes = blank(height=1.2 + 0.3 * len(rows))
    heights = range(len(rows))[::-1]
    for y, row in zip(heights, rows, strict=True):
        encoder, refined = 100 * row["share_reliable"], 100 * row["share_answered"]
        axes.plot([encoder, refined], [y, y], color=GREY, linewidth=1, zorder=1)
        axes.plot(encoder, y, "o", color=_ORANGE, markerfacecolor="none", label="encoder" if y == 0 else None)
        axes.plot(refined, y, "o", color=_BLUE, label="refined inference" if y == 0 else None)
    axes.set_yticks(list(heights), [f"{label(row['group'], 24)} ({row['n']:,})" for row in rows])
    axes.set(xlim=(-3, 103), xlabel=f"reliable {noun}, % (number of {noun} in brackets)")
    axes.margins(y=0.5 / max(1, len(rows)) + 0.05)
    axes.legend(**_LEGEND)
    return figure


def movement_picture(quantities: Sequence[Row], groups: Sequence[Row]) -> Picture:
    """The movement of every quantity, over all observations and by group."""
    by_group = " Small points are groups." if groups else ""
    return Picture(
        "movement",
        "Movement of each quantity from the average of the encoder to refined inference, in posterior standard "
        f"deviations (medians).{by_group} Near is to the left of the dashed line.",
        "Movement of " + ", ".join(f"{row['name']} {row['median_sd'] or 0:.2f}" for row in quantities) + ".",
        lambda: _draw_movement(quantities, groups),
    )


def _draw_movement(quantities: Sequence[Row], groups: Sequence[Row]) -> Figure:
    figure, axes = blank(height=1.0 + 0.42 * len(quantities))
    heights = range(len(quantities))[::-1]
    largest = NEAR
    for y, row in zip(heights, quantities, strict=True):
        inside = [group["median_sd"][row["name"]] for group in groups]
        inside = [value for value in inside if value is not None]
        axes.plot(inside, [y] * len(inside), "o", color=GREY, markersize=4, alpha=0.7, zorder=1)
        axes.plot([row["median_sd"]], [y], "D", color=INK, markersize=7)
        largest = max([largest, row["median_sd"] or 0, *inside])
    axes.axvline(NEAR, color=GREY, linestyle="--", linewidth=1.2, zorder=0)
    axes.set_yticks(list(heights), [label(row["name"], 24) for row in quantities])
    axes.set(xlim=(0, 1.1 * largest), ylim=(-0.6, len(quantities) - 0.4), xlabel="posterior standard deviations")
    return figure
