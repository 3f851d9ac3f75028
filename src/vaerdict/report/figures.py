"""Drawing without global state: axes, labels, colours, and figures as SVG and PNG files or inline in a page."""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from html import escape
from typing import TYPE_CHECKING, Any

from vaerdict.core import SettingError
from vaerdict.report.document import Picture, slug
from vaerdict.report.tables import printable

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDTH = 4.8
"""Inches: text stays readable at the width of a phone."""

INK = "#010203"
"""Nearly black in files; inside a page it becomes the colour of the page's text."""

GREY = "#7f8a93"
"""Readable on white and on black."""

OKABE_ITO = ("#0072b2", "#e69f00", "#009e73", "#d55e00", "#cc79a7", "#56b4e9", "#b8a800")
"""Colours that colour-blind readers can tell apart; the yellow is darkened to show on white."""

MARKERS = "osD^vPX"

_STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "vaerdict",
    "text.parse_math": False,  # names are printed literally, dollar signs included
    "font.family": "sans-serif",
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
    "lines.linewidth": 1.6,
    "hatch.linewidth": 0.6,
    **dict.fromkeys(
        ("text.color", "axes.edgecolor", "axes.labelcolor", "axes.titlecolor", "xtick.color", "ytick.color"), INK
    ),
}


# ------------------------------------------------------------------------------------------------------- drawing
def blank(width: float = WIDTH, height: float = 3.6) -> tuple[Figure, Axes]:
    """A figure with one pair of axes, outside of pyplot's registry."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.add_subplot()


def label(name: object, longest: int = 28) -> str:
    """A name fit for a figure: printable, and cut to `longest` characters."""
    text = "".join(c if c.isprintable() else "\ufffd" for c in str(name))
    return text if len(text) <= longest else text[: longest - 1] + "…"


def look(index: int) -> tuple[str, str]:
    """Colour and marker of the series with this index."""
    return OKABE_ITO[index % len(OKABE_ITO)], MARKERS[index % len(MARKERS)]


def diagonal(axes: Axes, xlabel: str, ylabel: str) -> None:
    """Set up square axes of two probabilities with the line of equality."""
    axes.plot([0, 1], [0, 1], color=GREY, linestyle="--", linewidth=1, zorder=0)
    axes.set(xlim=(-0.03, 1.03), ylim=(-0.03, 1.03), aspect="equal", xlabel=xlabel, ylabel=ylabel)


# --------------------------------------------------------------------------------------------------------- files
@contextmanager
def styled() -> Iterator[None]:
    """The style of all figures, active while one is drawn; matplotlib's own settings are restored afterwards."""
    try:
        import matplotlib
    except ImportError as error:
        raise SettingError("figures need matplotlib: pip install 'vaerdict[plot]'.") from error
    with matplotlib.rc_context(_STYLE), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing")  # browsers have the fonts
        yield


def image_files(picture: Picture) -> dict[str, bytes]:
    """The picture as an SVG and a PNG file on white, by suffix, and ``inline`` for a page."""
    with styled():
        figure = picture.draw()
        png = _saved(figure, "png", facecolor="white", dpi=160)
        svg = _saved(figure, "svg", transparent=True).decode()
    return {".svg": _on_white(svg).encode(), ".png": png, "inline": inline(svg, picture).encode()}


def _saved(figure: Figure, kind: str, **options: object) -> bytes:
    buffer = io.BytesIO()
    metadata = {"Date": None} if kind == "svg" else {"Software": None}
    figure.savefig(buffer, format=kind, metadata=metadata, **options)  # type: ignore[arg-type]
    return buffer.getvalue()


def _on_white(svg: str) -> str:
    start = svg.index(">", svg.index("<svg")) + 1
    return f'{svg[:start]}<rect width="100%" height="100%" fill="white"/>{svg[start:]}'


def inline(svg: str, picture: Picture) -> str:
    """An SVG file as an element of a page: no prologue or addresses, ids of its own, the page's text colour."""
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg[svg.index("<svg") :], flags=re.DOTALL)
    head, body = svg.split(">", 1)
    view = re.search(r'viewBox="[^"]*"', head)
    prefix = slug(picture.name)
    body = re.sub(r'(\bid="|url\(#|href="#)', rf"\g<1>{prefix}-", body).replace(INK, "currentColor")
    return f'<svg {view[0] if view else ""} role="img" aria-label="{escape(printable(picture.alt))}">{body.strip()}'
