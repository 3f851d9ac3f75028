"""The figures of the page that are drawn ahead: k-hat, predictive checks, and answers against a known truth."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from vaerdict.report.document import Picture
from vaerdict.report.figures import GREY, INK, OKABE_ITO, blank, label
from vaerdict.report.records import Row

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from vaerdict.de.page.truth import KnownGenes

KHAT_LIMIT = 0.7
"""Above it importance-weighted answers are not reliable (Vehtari et al., 2024)."""

MANY_POINTS = 300
"""More points are drawn as an image inside the drawing, which keeps it small."""

MOST_GROUPS = 40
"""The figure of k-hat shows the worst of so many groups; its table shows all."""

_WIDTH = 4.2
_WIDE = 30.0  # values that span such a factor are drawn on a logarithmic axis
_HIGHEST_FDR = 0.3
_BLUE, _YELLOW, _ORANGE = OKABE_ITO[0], OKABE_ITO[1], OKABE_ITO[3]
_AXES = {
    "zeros": ("mean count of a gene", "share of cells without the gene"),
    "variance": ("mean count of a gene", "log variance of its counts"),
    "library": ("counts of a cell", "log counts of a cell"),
}


# ------------------------------------------------------------------------------------------------------ the model
def khat_picture(rows: Sequence[Row]) -> Picture:
    """The k-hat of each group from the encoder alone and after refinement, with the limit."""
    worst = sorted(rows, key=lambda row: -(row.get("khat") or 0.0))[:MOST_GROUPS]
    over = sum((row.get("khat") or 0.0) > KHAT_LIMIT for row in rows)
    return Picture(
        "khat",
        f"k-hat of each group: the encoder alone (hollow) and after refinement (filled). Reliable up to {KHAT_LIMIT}.",
        f"k-hat of {len(rows)} groups of cells after refinement: {over} above the limit of {KHAT_LIMIT}. The table of "
        "groups has the values.",
        lambda: _draw_khat(worst),
    )


def _draw_khat(rows: Sequence[Row]) -> Figure:
    figure, axes = blank(_WIDTH, 1.1 + 0.3 * len(rows))
    heights = range(len(rows))[::-1]
    for y, row in zip(heights, rows, strict=True):
        before, after = row.get("khat_encoder"), row.get("khat")
        if before is not None and after is not None:
            axes.plot([before, after], [y, y], color=GREY, linewidth=1, zorder=1)
        if before is not None:
            axes.scatter(before, y, s=36, facecolors="none", edgecolors=_ORANGE, zorder=2)
        if after is not None:
            axes.scatter(after, y, s=36, color=_BLUE, marker="D", zorder=3)
    axes.axvline(KHAT_LIMIT, color=INK, linestyle="--", linewidth=1)
    axes.set_yticks(list(heights), [label(row["group"]) for row in rows])
    axes.set(xlabel="k-hat", ylim=(-0.6, len(rows) - 0.4))
    return figure


def check_picture(check: Row) -> Picture:
    """One posterior predictive check: observed values on the ranges that the model predicts."""
    name, message = str(check["name"]), str(check.get("message", ""))
    outside = _outside(check)
    share = "" if outside is None else f" {outside:.0%} of the observed values lie outside the predicted ranges."
    return Picture(
        f"check-{name}",
        f"{name.capitalize()}: {message}" if message else name.capitalize(),
        f"Observed values on the ranges that the model predicts for the check of {name}, which "
        f"{'passes' if check.get('ok') else 'fails'}.{share}",
        lambda: _draw_check(check),
    )


def _outside(check: Row) -> float | None:
    """The share of observed values beyond the predicted range."""
    low, high = check.get("predicted_low"), check.get("predicted_high")
    if low is None or high is None:
        return None
    triples = zip(check["observed"], low, high, strict=True)
    finite = [t for t in triples if all(v is not None and math.isfinite(v) for v in t)]
    return sum(not low <= seen <= high for seen, low, high in finite) / len(finite) if finite else None


def _draw_check(check: Row) -> Figure:
    figure, axes = blank(_WIDTH, 3.1)
    order = sorted(range(len(check["x"])), key=lambda i: check["x"][i])
    values = {
        key: [_or_nan(check[key][i]) for i in order]
        for key in ("x", "observed", "predicted_low", "predicted", "predicted_high")
        if check.get(key) is not None
    }
    many = len(order) > MANY_POINTS
    _draw_predicted(axes, values, many)
    axes.plot(values["x"], values["observed"], "o", markersize=3, color=_ORANGE, label="observed", rasterized=many)
    across, up = _AXES.get(str(check["name"]), ("x", str(check["name"])))
    axes.set(xlabel=across, ylabel=up)
    positive = [value for value in values["x"] if math.isfinite(value)]
    if positive and min(positive) > 0 and max(positive) / min(positive) > _WIDE:
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter("{x:g}")
        axes.xaxis.set_minor_formatter("")
    figure.legend(loc="outside lower center", ncols=3, fontsize=9)
    return figure


def _draw_predicted(axes: Axes, values: dict[str, list[float]], many: bool) -> None:
    """The range of each value by itself, because neighbours in x need not have similar ranges."""
    if "predicted_low" in values and "predicted_high" in values:
        low, high = values["predicted_low"], values["predicted_high"]
        axes.vlines(values["x"], low, high, color=_BLUE, alpha=0.35, label="predicted range", rasterized=many)
    if "predicted" in values:
        axes.plot(values["x"], values["predicted"], "_", color=_BLUE, markersize=4, label="predicted", rasterized=many)


def _or_nan(value: Any) -> float:
    return math.nan if value is None else float(value)


# ------------------------------------------------------------------------------------------------------ the truth
def against_truth(genes: KnownGenes, delta: float) -> Figure:
    """Estimated against true fold changes with intervals, marked by whether the call was right."""
    figure, axes = blank(height=5.0)
    real, called = genes.truth.abs() >= delta, genes.called
    kinds = {
        "rightly not called": (~real & ~called, GREY, "o", 9),
        "rightly called": (real & called, _BLUE, "o", 9),
        "missed": (real & ~called, _YELLOW, "^", 30),
        "falsely called": (~real & called, _ORANGE, "X", 30),
    }
    many = len(real) > MANY_POINTS
    for name, (mask, colour, marker, size) in kinds.items():
        x, low, high = (column[mask].numpy() for column in (genes.truth, genes.low, genes.high))
        axes.vlines(x, low, high, color=colour, alpha=0.25, linewidth=1, rasterized=many)
        look = {"s": size, "color": colour, "marker": marker, "label": f"{name} ({int(mask.sum())})"}
        axes.scatter(x, genes.lfc[mask].numpy(), zorder=2, rasterized=many, **look)
    axes.axline((0, 0), slope=1, color=INK, linestyle="--", linewidth=1, zorder=3)
    for edge in (-delta, delta):
        axes.axvline(edge, color=GREY, linestyle=":", linewidth=1, zorder=0)
    axes.set(xlabel="true LFC", ylabel="estimated LFC")
    figure.legend(loc="outside lower center", ncols=2, fontsize=9)
    return figure


def achieved_fdr(curve: Mapping[str, Sequence[float]], level: float) -> Figure:
    """Achieved against stated false discovery rates of the first 1, 2, ... genes."""
    figure, axes = blank(height=5.0)
    axes.plot(curve["fdr"], curve["fdp"], color=_BLUE, label="reported")
    axes.axline((0, 0), slope=1, color=GREY, linewidth=1, zorder=0)
    axes.axvline(level, color=INK, linestyle=":", linewidth=1, label="FDR asked for")
    axes.set(xlim=(0, _HIGHEST_FDR), ylim=(0, _HIGHEST_FDR), xlabel="stated FDR", ylabel="achieved FDR")
    figure.legend(loc="outside lower center", ncols=3, fontsize=9)
    return figure
