"""Figures of the MNIST experiment: curves, pictures of digits, the latent plane."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from vaerdict.core import DataError
from vaerdict.report.figures import GREY, INK, OKABE_ITO, WIDTH, blank, label
from vaerdict.report.records import Row, grouped

if TYPE_CHECKING:
    import numpy as np
    from matplotlib.figure import Figure
    from matplotlib.path import Path

SIDE, ACROSS = 28, 6
"""Pixels along a digit, and digits along a row."""

_CELL = (44, 32)  # height and width in pixels of a digit with two lines of text

MOST_POINTS = 200
"""Points drawn of a curve; more cannot be seen on a page."""

_STYLES = ("-", "--", "-.", ":")
_COLOURS = (*OKABE_ITO, GREY, "#7b3f00")
"""One for each labelled digit."""


def curves(rows: Sequence[Row], x: str, y: str) -> Figure:
    """Curves in the unit interval, told apart by colour, dashes and legend; rows of one name look the same."""
    figure, axes = blank(height=4.2)
    for i, ((name,), part) in enumerate(grouped(rows, "name").items()):
        colour, dashes = OKABE_ITO[i % len(OKABE_ITO)], _STYLES[i % len(_STYLES)]
        for index, row in enumerate(part):
            points = [(a, b) for a, b in zip(row["x"], row["y"], strict=True) if a is not None and b is not None]
            axes.plot(
                *_columns(thinned(points)), color=colour, linestyle=dashes, label=None if index else label(name, 40)
            )
    axes.set(xlabel=x, ylabel=y, xlim=(0, 1.01))
    axes.set_ylim(bottom=0)
    axes.grid(color=GREY, alpha=0.25)
    figure.legend(loc="outside lower center", ncols=2, fontsize=9, handlelength=3)
    return figure


def thinned(points: Sequence[Any], most: int = MOST_POINTS) -> list[Any]:
    """At most `most` of the points, evenly spaced, including the first and the last."""
    if len(points) <= most:
        return list(points)
    return [points[round(i * (len(points) - 1) / (most - 1))] for i in range(most)]


def _columns(points: Sequence[tuple[float, float]]) -> tuple[list[float], list[float]]:
    return [x for x, _ in points], [y for _, y in points]


def digits(rows: Sequence[Row]) -> Figure:
    """Digits in rows of six; under each its label, the predicted digit and its score."""
    from matplotlib.figure import Figure

    image = mosaic([pixels(row["pixels"]) for row in rows])
    height, width = image.shape
    figure = Figure(figsize=(WIDTH, WIDTH * height / width))
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set_axis_off()
    axes.imshow(image, "gray", vmin=0, vmax=15, extent=(0, width, height, 0), interpolation="none")
    for index, row in enumerate(rows):
        x, y = (index % ACROSS + 0.5) * _CELL[1], index // ACROSS * _CELL[0] + SIDE + 3
        axes.text(x, y, digit_text(row, "\n"), ha="center", va="top", fontsize=9, linespacing=1.1)
    return figure


def mosaic(images: Sequence[np.ndarray]) -> np.ma.MaskedArray:
    """One image of all images in rows of six, with room under each; the space between is masked.

    Shapes: ``n of (28, 28) -> (44 ceil(n / 6), 192)``.
    """
    import numpy as np

    down, (tall, wide) = math.ceil(len(images) / ACROSS), _CELL
    canvas = np.full((down * tall, ACROSS * wide), -1)
    for index, image in enumerate(images):
        top, left = index // ACROSS * tall, index % ACROSS * wide + 1
        canvas[top : top + SIDE + 2, left : left + SIDE + 2] = np.pad(image, 1)
    return np.ma.masked_less(canvas, 0)


def digit_text(row: Row, separator: str = ", score ") -> str:
    """A digit as text: ``9 as 4``, then its score."""
    score = "" if row.get("score") is None else f"{separator}{row['score']:.2f}"
    predicted = "" if row.get("predicted") is None else f" as {label(row['predicted'], 8)}"
    return f"{label(row.get('label', '?'), 8)}{predicted}{score}"


def pixels(text: str) -> np.ndarray:
    """A square image from one hexadecimal character per pixel.

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
    """Digits on a plane, drawn as numerals and coloured by class; the unseen class larger and in ink."""
    figure, axes = blank(height=4.8)
    seen = [name for name in points if name != unseen]
    for i, name in enumerate(seen):
        colour = _COLOURS[i % len(_COLOURS)]
        axes.scatter(*_columns(points[name]), marker=marker(name), color=colour, s=26, linewidths=0)
    if unseen in points:
        axes.scatter(*_columns(points[unseen]), marker=marker(unseen), color=INK, s=52, linewidths=0.4)
    axes.set(xticks=[], yticks=[], xlabel="first direction", ylabel="second direction")
    return figure


def marker(name: Any) -> Path | str:
    """The centred outline of a digit, a dot for anything else."""
    from matplotlib.path import Path
    from matplotlib.textpath import TextPath

    if not isinstance(name, int) or not 0 <= name <= 9:
        return "o"
    outline = TextPath((0, 0), str(name))
    return Path(outline.vertices - outline.get_extents().get_points().mean(0), outline.codes)
