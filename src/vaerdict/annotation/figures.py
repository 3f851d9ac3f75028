"""The figures of an annotation: maps of cells, the test of exchangeability, the audit, confusion and reliability."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from vaerdict.annotation.verdict import CLEAR
from vaerdict.auditing.verdict import percent
from vaerdict.optional import isolated, require
from vaerdict.report.document import Picture
from vaerdict.report.figures import GREY, INK, MARKERS, OKABE_ITO, blank, diagonal, label, look
from vaerdict.report.records import Row

if TYPE_CHECKING:
    import pandas
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MAP_CELLS = 2000
"""Most cells of a map: t-SNE of so many takes a few seconds."""

MOST_TYPES = 40
"""Figures show so many types at most; tables show all."""

_NOVEL_CELLS = 500  # novel cells that are on the map before others are drawn
_ITERATIONS = 400
_PERPLEXITY = 30.0
_BLUE, _RED = OKABE_ITO[0], OKABE_ITO[3]
_PALE = "#a9b4bd"
_BELOW: dict[str, Any] = {"loc": "upper left", "bbox_to_anchor": (0, -0.02), "borderaxespad": 0, "fontsize": 8}
_ABOVE: dict[str, Any] = {"loc": "lower left", "bbox_to_anchor": (0, 1.0), "ncols": 2, "borderaxespad": 0.2}


# ---------------------------------------------------------------------------------------------------------- map
class CellMap:
    """Cells of the query in the plane, by t-SNE of their principal components; all or a random part.

    Novel cells are on the map before others, so that a small group is seen. Shapes: ``features (cells, d)``.
    """

    def __init__(self, table: pandas.DataFrame, features: np.ndarray, seed: int) -> None:
        rng, usable = np.random.default_rng([seed, 2]), np.isfinite(features).all(1)
        order = rng.permutation(np.flatnonzero(usable))
        novel = table["call"].to_numpy()[order] == "novel"
        first, rest = np.split(order[novel], [_NOVEL_CELLS])
        others = rng.permutation(np.concatenate([rest, order[~novel]]))
        rows = np.concatenate([first, others])[:MAP_CELLS]
        self.cells: Any = table.iloc[rows]
        self.n_cells, self._features, self._seed = int(usable.sum()), features[rows], seed

    @cached_property
    def place(self) -> np.ndarray:
        """Coordinates of the cells shown. Shapes: ``-> (n, 2)``."""
        if len(self.cells) < 10:
            return self._features[:, :2]
        tsne = require("sklearn.manifold", "sklearn").TSNE(
            perplexity=min(_PERPLEXITY, len(self.cells) / 4), max_iter=_ITERATIONS, init="pca", random_state=self._seed
        )
        with isolated(self._seed):
            return tsne.fit_transform(self._features.astype(np.float32))

    def pictures(self) -> list[Picture]:
        """The map by call, and by label."""
        n = len(self.cells)
        part = "" if n == self.n_cells else f" {n:,} of {self.n_cells:,} cells are shown, novel ones first."
        count = self.cells["call"].value_counts()
        calls = ", ".join(f"{count.get(call, 0)} {call}" for call in ("label", "novel", "undecided"))
        return [
            Picture(
                "map-calls",
                f"Cells of the query by call, in a plane by t-SNE of their principal components.{part}",
                f"Map of cells by call: {calls}.",
                self._draw_calls,
            ),
            Picture(
                "map-labels",
                "The same cells by label. Cells without one are grey.",
                f"Map of cells by label, {self.cells['label'].nunique()} types.",
                self._draw_labels,
            ),
        ]

    def _draw_calls(self) -> Figure:
        figure, axes = _map_axes(1)
        for call, colour, size in (("label", _PALE, 6), ("undecided", OKABE_ITO[1], 9), ("novel", _RED, 9)):
            rows = (self.cells["call"] == call).to_numpy()
            if rows.any():
                _scatter(axes, self.place[rows], f"{call} ({rows.sum():,})", colour, "o", size)
        axes.legend(ncols=3, markerscale=1.6, **_BELOW)
        return figure

    def _draw_labels(self) -> Figure:
        labelled = (self.cells["call"] == "label").to_numpy()
        names, count = np.unique(self.cells["label"][labelled].to_numpy(dtype=str), return_counts=True)
        shown = names[np.argsort(-count, kind="stable")][:MOST_TYPES]
        figure, axes = _map_axes(len(shown) / 2)
        _scatter(axes, self.place[~labelled], None, _PALE, "o", 5)
        for index, name in enumerate(shown):
            rows = labelled & (self.cells["label"] == name).to_numpy()
            marker = MARKERS[index // len(OKABE_ITO) % len(MARKERS)]
            _scatter(axes, self.place[rows], label(name, 24), OKABE_ITO[index % len(OKABE_ITO)], marker, 8)
        if len(shown):
            axes.legend(ncols=2, markerscale=1.6, **_BELOW)
        return figure


def _map_axes(legend_rows: float) -> tuple[Figure, Axes]:
    """Axes without ticks, above a legend of so many rows."""
    figure, axes = blank(height=4.0 + 0.18 * legend_rows)
    axes.set(xticks=[], yticks=[])
    axes.spines[:].set_visible(False)
    return figure, axes


def _scatter(axes: Axes, place: np.ndarray, name: str | None, colour: str, marker: str, size: float) -> None:
    axes.scatter(*place.T, s=size, c=colour, marker=marker, linewidths=0, label=name, rasterized=True)


# ------------------------------------------------------------------------------------------- exchangeability, audit
def gate_picture(batch: Row, name: str) -> Picture | None:
    """The AUROC of query against calibration cells in every type."""
    tested = [t for t in batch["types"] if t["auroc"] is not None]
    if not tested:
        return None
    rows = sorted(tested, key=lambda t: -t["auroc"])[:MOST_TYPES]
    place = "" if batch["batch"] is None else f" Batch {batch['batch']}."
    return Picture(
        name,
        "How well query cells can be told from calibration cells of the same predicted type: 0.5 is not at all, 1 is "
        f"always. The line is the median; numbers of calibration and query cells are in brackets.{place}",
        "AUROC by type: " + ", ".join(f"{t['type']} {t['auroc']:.2f}" for t in rows) + ".",
        lambda: _draw_gate(rows, batch),
    )


def _draw_gate(rows: Sequence[Row], batch: Row) -> Figure:
    figure, axes = blank(height=1.2 + 0.27 * len(rows))
    heights = range(len(rows))[::-1]
    axes.axvline(0.5, color=GREY, linestyle="--", linewidth=1, zorder=0)
    axes.axvline(batch["median_auroc"], color=_BLUE if batch["promised"] else _RED, linewidth=1.2, zorder=0)
    axes.plot([t["auroc"] for t in rows], list(heights), "o", color=INK, markersize=5)
    names = [f"{label(t['type'], 24)} ({t['n_reference']:,}, {t['n_query']:,})" for t in rows]
    axes.set_yticks(list(heights), names)
    low = min(0.4, *(t["auroc"] - 0.03 for t in rows), 0.4)
    axes.set(xlim=(low, 1.03), ylim=(-0.6, len(rows) - 0.4), xlabel="AUROC")
    return figure


def audit_picture(types: Sequence[Row], fdr: float) -> Picture | None:
    """The share of each type's cells that would have been called novel had the type been absent."""
    rows = sorted((t for t in types if t.get("found") is not None), key=lambda t: t["found"])[:MOST_TYPES]
    if not rows:
        return None
    return Picture(
        "audit",
        f"Cells of each type that would be called novel at a rate of {fdr:.0%} had the type been absent from the "
        f"reference. Left of the dashed line most would be missed.",
        "Share found: " + ", ".join(f"{t['type']} {percent(t['found'])}" for t in rows) + ".",
        lambda: _draw_audit(rows),
    )


def _draw_audit(rows: Sequence[Row]) -> Figure:
    figure, axes = blank(height=1.2 + 0.27 * len(rows))
    heights = range(len(rows))
    colours = [_BLUE if t["found"] >= CLEAR else _RED for t in rows]
    axes.barh(list(heights), [100 * t["found"] for t in rows], color=colours, height=0.6)
    axes.axvline(100 * CLEAR, color=GREY, linestyle="--", linewidth=1)
    axes.set_yticks(list(heights), [f"{label(t['type'], 24)} ({t['n_reference']:,})" for t in rows])
    axes.set(xlim=(0, 102), ylim=(-0.6, len(rows) - 0.4), xlabel="found, % (reference cells in brackets)")
    return figure


# ------------------------------------------------------------------------------------------------------- labels
def confusion_picture(confusion: Row) -> Picture | None:
    """Shares of labels of each type, in cross-validation on the reference."""
    names, counts = confusion["types"], np.array(confusion["counts"])
    if len(names) > MOST_TYPES:
        return None
    share = counts / np.maximum(counts.sum(1, keepdims=True), 1)
    return Picture(
        "confusion",
        "Labels of reference cells that were left out in cross-validation, in per cent of each type.",
        "Confusion of types: " + ", ".join(f"{n} {s:.0%} right" for n, s in zip(names, share.diagonal(), strict=True)),
        lambda: _draw_confusion(names, share),
    )


def _draw_confusion(names: Sequence[str], share: np.ndarray) -> Figure:
    side = max(3.4, 1.7 + 0.33 * len(names))
    figure, axes = blank(width=max(4.8, side + 0.4), height=side)
    axes.imshow(share, cmap="Blues", vmin=0, vmax=1.25, interpolation="none", aspect="auto")
    for (row, column), value in np.ndenumerate(share):
        if value >= 0.005 and len(names) <= 25:
            colour = "#ffffff" if value > 0.6 else "#1b1f24"
            axes.text(column, row, f"{100 * value:.0f}", ha="center", va="center", fontsize=8, color=colour)
    ticks = list(range(len(names)))
    shown = [label(name, 18) for name in names]
    axes.set_xticks(ticks, shown, rotation=90)
    axes.set_yticks(ticks, shown)
    axes.set(xlabel="label given", ylabel="type in the reference")
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    return figure


def reliability_picture(calibration: dict[str, Row]) -> Picture:
    """Accuracy against probability of the most probable type, for each method."""
    errors = ", ".join(f"{name} {each['calibration_error']:.3f}" for name, each in calibration.items())
    return Picture(
        "reliability",
        "Share of labels that are right against their probability, on cells whose label was not used. On the line "
        "probabilities are calibrated.",
        f"Reliability curve; calibration error: {errors}.",
        lambda: _draw_reliability(calibration),
    )


def _draw_reliability(calibration: dict[str, Row]) -> Figure:
    figure, axes = blank(height=4.0)
    diagonal(axes, "probability of the label", "share of right labels")
    for index, (name, each) in enumerate(calibration.items()):
        colour, marker = look(index)
        bins = each["bins"]
        x, y = ([b[key] for b in bins] for key in ("confidence", "accuracy"))
        error = [np.sqrt(max(b["accuracy"] * (1 - b["accuracy"]), 0.01) / b["n"]) for b in bins]
        axes.errorbar(x, y, error, color=colour, marker=marker, markersize=5, linewidth=1.2, label=label(name))
    axes.legend(**(_ABOVE | {"ncols": 1}))
    return figure
