"""What is drawn of the MNIST experiment: plain curves, pictures of digits, the latent plane. Called in `svg.styled`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from vaerdict.core import DataError
from vaerdict.report.figures import WIDTH, blank, label
from vaerdict.report.summary import Row, grouped
from vaerdict.report.svg import GREY, INK, OKABE_ITO

if TYPE_CHECKING:
    import numpy as np
    from matplotlib.figure import Figure
    from matplotlib.path import Path

SIDE, ACROSS = 28, 6
"""Pixels along a digit, and digits along a row."""

_CELL = (44, 32)  # pixels that a digit takes down, with two lines of text, and across

MOST_POINTS = 200
"""Of a curve; more than a page can show."""

_STYLES = ("-", "--", "-.", ":")
_COLOURS = (*OKABE_ITO, GREY, "#7b3f00")
"""One for each digit that was labelled."""


def curves(rows: Sequence[Row], x: str, y: str) -> Figure:
    """Curves in the unit interval, each named by colour, dashes and legend; rows of one name share its look."""
    figure, axes = blank(height=4.2)
    for look, ((name,), part) in enumerate(grouped(rows, "name").items()):
        colour, dashes = OKABE_ITO[look % len(OKABE_ITO)], _STYLES[look % len(_STYLES)]
        for index, row in enumerate(part):
            known = [(a, b) for a, b in zip(row["x"], row["y"], strict=True) if a is not None and b is not None]
            axes.plot(
                *_columns(thinned(known)), color=colour, linestyle=dashes, label=None if index else label(name, 40)
            )
    axes.set(xlabel=x, ylabel=y, xlim=(0, 1.01))
    axes.set_ylim(bottom=0)
    axes.grid(color=GREY, alpha=0.25)
    figure.legend(loc="outside lower center", ncols=2, fontsize=9, handlelength=3)
    return figure


def thinned(points: Sequence[Any], most: int = MOST_POINTS) -> list[Any]:
    """At most so many of the points, evenly spaced, the first and the last among them."""
    if len(points) <= most:
        return list(points)
    return [points[round(i * (len(points) - 1) / (most - 1))] for i in range(most)]


def _columns(points: Sequence[tuple[float, float]]) -> tuple[list[float], list[float]]:
    return [x for x, _ in points], [y for _, y in points]


def digits(rows: Sequence[Row]) -> Figure:
    """Digits in rows of six, each over what it is, what it was taken for, and its score."""
    from matplotlib.figure import Figure

    image = mosaic([pixels(row["pixels"]) for row in rows])
    height, width = image.shape
    figure = Figure(figsize=(WIDTH, WIDTH * height / width))
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set_axis_off()
    axes.imshow(image, "gray", vmin=0, vmax=15, extent=(0, width, height, 0), interpolation="none")
    for index, row in enumerate(rows):
        x, y = (index % ACROSS + 0.5) * _CELL[1], index // ACROSS * _CELL[0] + SIDE + 3
        axes.text(x, y, words(row, "\n"), ha="center", va="top", fontsize=9, linespacing=1.1)
    return figure


def mosaic(images: Sequence[np.ndarray]) -> np.ma.MaskedArray:
    """Images in rows of six as one, with room under each; what lies between is masked.

    Shapes: ``n of (28, 28) -> (44 ceil(n / 6), 192)``.
    """
    import numpy as np

    down, (tall, wide) = math.ceil(len(images) / ACROSS), _CELL
    whole = np.full((down * tall, ACROSS * wide), -1)
    for index, image in enumerate(images):
        top, left = index // ACROSS * tall, index % ACROSS * wide + 1
        whole[top : top + SIDE + 2, left : left + SIDE + 2] = np.pad(image, 1)
    return np.ma.masked_less(whole, 0)


def words(row: Row, between: str = ", score ") -> str:
    """A digit in words: ``9 as 4``, then its score."""
    score = "" if row.get("score") is None else f"{between}{row['score']:.2f}"
    taken = "" if row.get("predicted") is None else f" as {label(row['predicted'], 8)}"
    return f"{label(row.get('label', '?'), 8)}{taken}{score}"


def pixels(text: str) -> np.ndarray:
    """A square image from one hexadecimal character a pixel.

    Shapes: ``784 characters -> (28, 28)``.
    """
    import numpy as np

    if not isinstance(text, str) or len(text) != SIDE**2 or set(text.lower()) - set("0123456789abcdef"):
        raise DataError(
            f"a digit in results.json has pixels {str(text)[:20]!r}, not {SIDE**2} hexadecimal characters; run the "
            "experiment again."
        )
    return np.array([int(character, 16) for character in text]).reshape(SIDE, SIDE)


def latent(points: Mapping[Any, Sequence[tuple[float, float]]], unseen: Any) -> Figure:
    """Digits as figures of themselves on a plane, coloured by class; the unseen class larger and in ink."""
    figure, axes = blank(height=4.8)
    seen = [name for name in points if name != unseen]
    for look, name in enumerate(seen):
        colour = _COLOURS[look % len(_COLOURS)]
        axes.scatter(*_columns(points[name]), marker=marker(name), color=colour, s=26, linewidths=0)
    if unseen in points:
        axes.scatter(*_columns(points[unseen]), marker=marker(unseen), color=INK, s=52, linewidths=0.4)
    axes.set(xticks=[], yticks=[], xlabel="first direction", ylabel="second direction")
    return figure


def marker(name: Any) -> Path | str:
    """A digit's own figure about its middle, a dot for anything else."""
    from matplotlib.path import Path
    from matplotlib.textpath import TextPath

    if not isinstance(name, int) or not 0 <= name <= 9:
        return "o"
    outline = TextPath((0, 0), str(name))
    return Path(outline.vertices - outline.get_extents().get_points().mean(0), outline.codes)
