"""The four panels of the bivariate figure. Called inside `svg.styled`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from vaerdict.report.figures import label
from vaerdict.report.svg import GREY, INK, OKABE_ITO

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_LOOKS = {
    "VAE": (OKABE_ITO[0], "-", "o"),
    "IWAE": (OKABE_ITO[1], "--", "s"),
    "WW": (OKABE_ITO[2], "-.", "D"),
    "CHI": (OKABE_ITO[3], ":", "^"),
    "EVIDENCE": (INK, "-", "*"),
}
_OTHER = (GREY, "-", "o")


def pair(height: float = 3.3) -> tuple[Figure, Axes, Axes]:
    """A figure with two panels side by side."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.8, height), layout="constrained")
    left, right = figure.subplots(1, 2)
    return figure, left, right


def approximation(row: Mapping[str, Any]) -> Figure:
    """Panels A and B: the posterior and its approximations as ellipses, and the norm of A of each."""
    figure, left, right = pair()
    _ellipse(left, row["posterior"], "posterior", INK, "-", fill=True)
    for q in row["proposals"]:
        colour, style, _ = _LOOKS.get(q["proposal"], _OTHER)
        _ellipse(left, q, q["proposal"], colour, style)
    left.autoscale_view()
    left.set(title="A", xlabel="z₁", ylabel="z₂", aspect="equal")
    left.title.set_fontweight("bold")
    names = [q["proposal"] for q in row["proposals"]]
    right.bar(
        range(len(names)), [q["a_norm"] for q in row["proposals"]], color=[_LOOKS.get(n, _OTHER)[0] for n in names]
    )
    right.set_xticks(range(len(names)), [label(name, 10) for name in names])
    right.set(title="B", ylabel="‖A‖₂")
    right.title.set_fontweight("bold")
    figure.legend(*left.get_legend_handles_labels(), loc="outside lower center", ncols=5, fontsize=9, handlelength=1.8)
    return figure


def _ellipse(axes: Axes, law: Mapping[str, Any], name: str, colour: str, style: str, *, fill: bool = False) -> None:
    """The contour of a normal law at two standard deviations."""
    import numpy as np

    angle = np.linspace(0, 2 * np.pi, 181)
    root = np.linalg.cholesky(np.asarray(law["covariance"]))
    x, y = np.asarray(law["mean"])[:, None] + 2 * root @ np.stack([np.cos(angle), np.sin(angle)])
    if fill:
        axes.fill(x, y, color=GREY, alpha=0.25, linewidth=0)
    axes.plot(x, y, color=colour, linestyle=style, label=label(name))


def selection(row: Mapping[str, Any]) -> Figure:
    """Panels C and D: every bound as a function of lambda, and a closer look at the maxima."""
    figure, left, right = pair()
    _bounds(left, row["grid"], row["curves"])
    _bounds(right, row["zoom_grid"], row["zoom"])
    for found in row["selection"]:
        colour, _, marker = _LOOKS.get(found["proposal"], _OTHER)
        curve = row["zoom"].get(found["proposal"], {"value": []})["value"]
        right.plot(found["lambda"], max(curve, default=0), marker=marker, color=colour, markersize=6, clip_on=False)
    for axes, name in ((left, "C"), (right, "D")):
        axes.set(title=name, xlabel="λ")
        axes.title.set_fontweight("bold")
    left.set_ylabel("bound, mean over observations")
    figure.legend(*left.get_legend_handles_labels(), loc="outside lower center", ncols=5, fontsize=9, handlelength=1.8)
    return figure


def _bounds(axes: Axes, grid: Sequence[float], curves: Mapping[str, Mapping[str, Sequence[float]]]) -> None:
    for name, curve in curves.items():
        colour, style, _ = _LOOKS.get(name, _OTHER)
        axes.plot(
            grid, curve["value"], color=colour, linestyle=style, label="evidence" if name == "EVIDENCE" else label(name)
        )
