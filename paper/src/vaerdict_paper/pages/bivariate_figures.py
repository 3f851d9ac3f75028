"""The figures of the bivariate example: panels A to D of the paper's Figure 1, and the same over random loadings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from vaerdict.report.figures import GREY, INK, OKABE_ITO, label
from vaerdict.report.records import Row
from vaerdict_paper.experiments.bivariate import PROPOSALS
from vaerdict_paper.pages.seed_statistics import where

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MEANS = {"exact": "means at the λ in question", "frozen": "means kept at λ = 0"}

_LOOKS = {
    "VAE": (OKABE_ITO[0], "-", "o"),
    "IWAE": (OKABE_ITO[1], "--", "s"),
    "WW": (OKABE_ITO[2], "-.", "D"),
    "CHI": (OKABE_ITO[3], ":", "^"),
    "EVIDENCE": (INK, "-", "*"),
}
_OTHER = (GREY, "-", "o")


def _two_panels(height: float = 3.3) -> tuple[Figure, Axes, Axes]:
    """A figure with two panels side by side."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.8, height), layout="constrained")
    left, right = figure.subplots(1, 2)
    return figure, left, right


def draw_approximation(row: Mapping[str, Any]) -> Figure:
    """Panels A and B: the posterior and its approximations as ellipses, and the norm of A of each."""
    figure, left, right = _two_panels()
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


def _ellipse(axes: Axes, normal: Mapping[str, Any], name: str, colour: str, style: str, *, fill: bool = False) -> None:
    """The contour of a normal distribution at two standard deviations."""
    import numpy as np

    angle = np.linspace(0, 2 * np.pi, 181)
    root = np.linalg.cholesky(np.asarray(normal["covariance"]))
    x, y = 2 * root @ np.stack([np.cos(angle), np.sin(angle)])
    if fill:
        axes.fill(x, y, color=GREY, alpha=0.25, linewidth=0)
    axes.plot(x, y, color=colour, linestyle=style, label=label(name))


def draw_selection(row: Mapping[str, Any]) -> Figure:
    """Panels C and D: every bound as a function of lambda, and a zoom at the maxima."""
    figure, left, right = _two_panels()
    _bounds(left, row["grid"], row["curves"])
    _bounds(right, row["zoom_grid"], row["zoom"])
    for choice in row["selection"]:
        colour, _, marker = _LOOKS.get(choice["proposal"], _OTHER)
        curve = row["zoom"].get(choice["proposal"], {"value": []})["value"]
        right.plot(choice["lambda"], max(curve, default=0), marker=marker, color=colour, markersize=6, clip_on=False)
    for axes, name in ((left, "C"), (right, "D")):
        axes.set(title=name, xlabel="λ")
        axes.title.set_fontweight("bold")
    left.set_ylabel("expected bound")
    figure.legend(*left.get_legend_handles_labels(), loc="outside lower center", ncols=5, fontsize=9, handlelength=1.8)
    return figure


def _bounds(axes: Axes, grid: Sequence[float], curves: Mapping[str, Mapping[str, Sequence[float]]]) -> None:
    for name, curve in curves.items():
        colour, style, _ = _LOOKS.get(name, _OTHER)
        axes.plot(
            grid, curve["value"], color=colour, linestyle=style, label="evidence" if name == "EVIDENCE" else label(name)
        )


# ------------------------------------------------------------------------------------------------ random loadings
def draw_widths(random: Sequence[Row], panels: Sequence[Row]) -> Figure:
    """The width of each proposal by the posterior's correlation, and the distribution of that correlation."""
    figure, left, right = _two_panels()
    by_correlation = sorted(random, key=lambda row: abs(row["correlation"]))
    rho = [abs(row["correlation"]) for row in by_correlation]
    for index, name in enumerate(PROPOSALS):
        colour, style, _ = _LOOKS[name]
        left.plot(rho, [row["variance_ratio"][index] for row in by_correlation], color=colour, linestyle=style)
        left.plot([], [], color=colour, linestyle=style, label=name)
    left.set(xlabel="|correlation| of the posterior", ylabel="variance over the posterior's", xlim=(0, 1))
    for variance, style in zip(_variances(random), ("-", "--", ":"), strict=False):
        part = sorted(abs(row["correlation"]) for row in where(random, variance=variance))
        right.step([0, *part, 1], [*_shares(len(part)), 1], where="post", color=GREY, linestyle=style)
        right.plot([], [], color=GREY, linestyle=style, label=f"N(0, {variance:g})")
    right.set(xlabel="|correlation| of the posterior", ylabel="share of loadings", xlim=(0, 1), ylim=(0, 1))
    left.set_title("E", loc="left", fontweight="bold")
    right.set_title("F", loc="left", fontweight="bold")
    for row in where(panels, stage="approximation"):
        rho = abs(row["posterior"]["correlation"])
        left.axvline(rho, color=INK, linewidth=0.8, zorder=0)
        above = left.get_xaxis_transform()
        left.text(rho - 0.04, 1.02, label(row["loading"], 14), rotation=30, fontsize=8, transform=above)
        right.axvline(rho, ymin=0.4, color=INK, linewidth=0.8, zorder=0)  # above the legend
    figure.legend(*left.get_legend_handles_labels(), loc="outside lower center", ncols=4, fontsize=9, handlelength=1.8)
    right.legend(fontsize=8, loc="lower right", handlelength=1.8, title="entries of the loadings", title_fontsize=8)
    return figure


_RATIOS = (1 / 4, 1 / 2, 1, 2, 4, 8)


def draw_errors(random: Sequence[Row], panels: Sequence[Row]) -> Figure:
    """The distribution of each proposal's error of lambda over the VAE's, for each reading of the means.

    The chosen loadings are points on the curves; ratios beyond the axis are drawn at its end.
    """
    figure, *both = _two_panels()
    for axes, means, title in zip(both, MEANS, "GH", strict=True):
        chosen = [
            {r["proposal"]: abs(r["bias"]) for r in row["selection"]}
            for row in where(panels, stage="selection", means=means)
        ]
        axes.axvline(1, color=GREY, linewidth=1, zorder=0)
        for index, name in enumerate(PROPOSALS[1:], 1):
            colour, style, marker = _LOOKS[name]
            ratios = sorted(row[means]["bias"][index] / row[means]["bias"][0] for row in random)
            axes.step(ratios, _shares(len(ratios))[1:], where="post", color=colour, linestyle=style)
            axes.plot([], [], color=colour, linestyle=style, marker=marker, markersize=5, label=name)
            for errors in chosen:
                ratio = errors[name] / errors["VAE"]
                at = min(max(ratio, _RATIOS[0]), _RATIOS[-1])
                share = sum(r <= ratio for r in ratios) / len(ratios)
                axes.plot(at, share, color=colour, marker=marker, markersize=6, markeredgecolor="white", clip_on=False)
        axes.set(title=f"{title}: {MEANS[means]}", xlabel="error of λ over the VAE's", xscale="log", ylim=(0, 1))
        axes.set(xlim=(_RATIOS[0], _RATIOS[-1]))
        axes.set_xticks(_RATIOS, ["¼", "½", "1", "2", "4", "8"])
        axes.set_xticks([], minor=True)
        axes.title.set_fontsize(10)
    both[0].set_ylabel("share of loadings")
    figure.legend(*both[0].get_legend_handles_labels(), loc="outside lower center", ncols=3, fontsize=9)
    return figure


def _variances(random: Sequence[Row]) -> list[float]:
    return list(dict.fromkeys(row["variance"] for row in random))


def _shares(n: int) -> list[float]:
    """The heights of the distribution function of n values: 0, 1/n, ... 1."""
    return [i / n for i in range(n + 1)]
