"""The still pictures of differential expression: k-hat before and after refinement, and the predictive checks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from vaerdict.report.document import Picture
from vaerdict.report.summary import Row
from vaerdict.report.svg import GREY, INK, OKABE_ITO

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

KHAT_LIMIT = 0.7
"""Above it importance-weighted answers are not to be relied on (Vehtari et al., 2024)."""

MANY_POINTS = 300
"""More are drawn as an image inside the drawing, which stays small."""

MOST_GROUPS = 40
"""The picture of k-hat shows the worst of so many groups; its table shows all."""

_WIDE = 30.0
_BLUE, _ORANGE = OKABE_ITO[0], OKABE_ITO[3]
_AXES = {
    "zeros": ("mean count of a gene", "share of cells without the gene"),
    "variance": ("mean count of a gene", "log variance of its counts"),
    "library": ("counts of a cell", "log counts of a cell"),
}


def khat_picture(rows: Sequence[Row]) -> Picture:
    """Each group's k-hat from the encoder alone and after refinement, with the limit."""
    worst = sorted(rows, key=lambda row: -_or_zero(row.get("khat")))[:MOST_GROUPS]
    over = sum(_or_zero(row.get("khat")) > KHAT_LIMIT for row in rows)
    return Picture(
        "khat",
        "k-hat of each group: the encoder alone (hollow) and after refinement (filled); below 0.7 is in order.",
        f"k-hat of {len(rows)} groups of cells after refinement: {over} above the limit of {KHAT_LIMIT}; the values "
        "stand in the table of groups.",
        lambda: _draw_khat(worst),
    )


def _draw_khat(rows: Sequence[Row]) -> Figure:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4.2, 1.1 + 0.3 * len(rows)), layout="constrained")
    axes, heights = figure.subplots(), range(len(rows))[::-1]
    for y, row in zip(heights, rows, strict=True):
        before, after = row.get("khat_encoder"), row.get("khat")
        if before is not None and after is not None:
            axes.plot([before, after], [y, y], color=GREY, linewidth=1, zorder=1)
        if before is not None:
            axes.scatter(before, y, s=36, facecolors="none", edgecolors=_ORANGE, zorder=2)
        if after is not None:
            axes.scatter(after, y, s=36, color=_BLUE, marker="D", zorder=3)
    axes.axvline(KHAT_LIMIT, color=INK, linestyle="--", linewidth=1)
    axes.set_yticks(list(heights), [_clipped(row["group"]) for row in rows])
    axes.set(xlabel="k-hat", ylim=(-0.6, len(rows) - 0.4))
    return figure


def check_picture(check: Row) -> Picture:
    """One posterior predictive check: what was seen on what the model predicts."""
    name, words = str(check["name"]), str(check.get("words", ""))
    outside = _outside(check)
    said = "" if outside is None else f" {outside:.0%} of the observed values lie outside the predicted ranges."
    return Picture(
        f"check-{name}",
        f"{name.capitalize()}: {words}" if words else name.capitalize(),
        f"Observed values on the model's predicted ranges for the check of {name}: "
        f"{'in order' if check.get('ok') else 'not in order'}.{said}",
        lambda: _draw_check(check),
    )


def _outside(check: Row) -> float | None:
    """The share of observed values beyond the predicted range."""
    low, high = check.get("predicted_low"), check.get("predicted_high")
    if low is None or high is None:
        return None
    triples = zip(check["observed"], low, high, strict=True)
    known = [t for t in triples if all(v is not None and math.isfinite(v) for v in t)]
    return sum(not low <= seen <= high for seen, low, high in known) / len(known) if known else None


def _draw_check(check: Row) -> Figure:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4.2, 3.1), layout="constrained")
    axes = figure.subplots()
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
    if _wide(values["x"]):
        axes.set_xscale("log")
        _plain_ticks(axes.xaxis)
    axes.legend()
    return figure


def _plain_ticks(axis: Axis) -> None:
    """Powers of ten as plain numbers: the drawing carries text, not formulas."""
    axis.set_major_formatter("{x:g}")
    axis.set_minor_formatter("")


def _draw_predicted(axes: Axes, values: dict[str, list[float]], many: bool) -> None:
    """Each value's own range, since neighbours in x need not have like ranges."""
    if "predicted_low" in values and "predicted_high" in values:
        low, high = values["predicted_low"], values["predicted_high"]
        axes.vlines(values["x"], low, high, color=_BLUE, alpha=0.35, label="predicted range", rasterized=many)
    if "predicted" in values:
        axes.plot(values["x"], values["predicted"], "_", color=_BLUE, markersize=4, label="predicted", rasterized=many)


def _wide(values: Sequence[float]) -> bool:
    """Whether the values span so much that only a logarithmic axis shows them all."""
    finite = [value for value in values if math.isfinite(value)]
    return bool(finite) and min(finite) > 0 and max(finite) / min(finite) > _WIDE


def _or_nan(value: Any) -> float:
    return math.nan if value is None else float(value)


def _or_zero(value: Any) -> float:
    return 0.0 if value is None else float(value)


def _clipped(name: Any) -> str:
    return name if len(name := str(name)) <= 28 else name[:27] + "\N{HORIZONTAL ELLIPSIS}"
