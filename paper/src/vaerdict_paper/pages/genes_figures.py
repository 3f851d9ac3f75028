"""What is drawn of the gene experiment: FDR along the ranking, and probabilities against frequencies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from vaerdict.report.figures import label
from vaerdict.report.svg import GREY, OKABE_ITO

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_MARKERS = "osD^v"


class Curve(NamedTuple):
    """Realised and stated FDR of the first k genes, means over data sets."""

    k: Sequence[int]
    fdp: Sequence[float]
    fdr: Sequence[float]


def fdr_curves(panels: Mapping[str, Mapping[str, Curve]]) -> Figure:
    """One panel a number of cells; for each method the realised FDP solid and the stated FDR dashed, in one colour."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.8, 3.4), layout="constrained")
    every = figure.subplots(1, len(panels), squeeze=False)[0]
    for axes, (title, curves) in zip(every, panels.items(), strict=True):
        for i, (name, curve) in enumerate(curves.items()):
            colour = OKABE_ITO[i % len(OKABE_ITO)]
            axes.plot(curve.k, curve.fdp, color=colour, label=f"{label(name, 40)}, realised")
            axes.plot(curve.k, curve.fdr, color=colour, linestyle="--", label="stated")
        axes.axhline(0.05, color=GREY, linewidth=0.8)
        axes.set(title=title, xlabel="genes called", ylabel="false discovery rate", ylim=(-0.01, None))
    figure.legend(*every[-1].get_legend_handles_labels(), loc="outside lower center", ncols=2, fontsize=9)
    return figure


class Calibration(NamedTuple):
    """For bins of the stated probability: how many genes, their mean probability, the share of them changed."""

    n: Sequence[float]
    prob: Sequence[float]
    share: Sequence[float]


def calibration(methods: Mapping[str, Calibration]) -> Figure:
    """Shares of changed genes against stated probabilities; larger points stand for more genes."""
    from vaerdict.report.figures import blank

    figure, axes = blank(height=4.6)
    axes.plot([0, 1], [0, 1], color=GREY, linestyle="--", linewidth=1, zorder=0)
    for i, (name, found) in enumerate(methods.items()):
        colour, marker = OKABE_ITO[i % len(OKABE_ITO)], _MARKERS[i % len(_MARKERS)]
        most = max(found.n)
        axes.plot(found.prob, found.share, color=colour, linewidth=1, alpha=0.6)
        sizes = [12 + 60 * (n / most) ** 0.5 for n in found.n]
        axes.scatter(found.prob, found.share, s=sizes, color=colour, marker=marker, label=label(name, 40))
    axes.set(
        xlim=(-0.03, 1.03),
        ylim=(-0.03, 1.03),
        aspect="equal",
        xlabel="stated probability of a change",
        ylabel="share of genes that are changed",
    )
    axes.legend(loc="upper left", fontsize=9)
    return figure
