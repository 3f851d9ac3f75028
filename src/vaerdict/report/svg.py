"""Figures without global state, saved as files and cleaned to stand inside a page in light and in dark."""

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
    from matplotlib.figure import Figure

INK = "#010203"
"""Nearly black on paper; inside a page it becomes the colour of the page's text."""

GREY = "#7f8a93"
"""Readable on white and on black."""

OKABE_ITO = ("#0072b2", "#e69f00", "#009e73", "#d55e00", "#cc79a7", "#56b4e9", "#b8a800")
"""Colours that colour-blind readers can tell apart, its yellow darkened to show on white."""

_STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "vaerdict",
    "text.parse_math": False,  # names are printed as they are, dollar signs and all
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


@contextmanager
def styled() -> Iterator[None]:
    """The look of our figures, for as long as one is being drawn."""
    try:
        import matplotlib
    except ImportError as error:
        raise SettingError("figures need matplotlib: pip install 'vaerdict[plot]'.") from error
    with matplotlib.rc_context(_STYLE), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing")  # the browser has fonts that we have not
        yield


def files(picture: Picture) -> dict[str, bytes]:
    """The picture as the bytes of an SVG and a PNG on white, by suffix, and inline for a page."""
    with styled():
        figure = picture.draw()
        png = _saved(figure, "png", facecolor="white", dpi=160)
        drawing = _saved(figure, "svg", transparent=True).decode()
    return {".svg": _on_white(drawing).encode(), ".png": png, "inline": inline(drawing, picture).encode()}


def _saved(figure: Figure, kind: str, **options: object) -> bytes:
    buffer = io.BytesIO()
    metadata = {"Date": None} if kind == "svg" else {"Software": None}
    figure.savefig(buffer, format=kind, metadata=metadata, **options)  # type: ignore[arg-type]
    return buffer.getvalue()


def _on_white(svg: str) -> str:
    start = svg.index(">", svg.index("<svg")) + 1
    return f'{svg[:start]}<rect width="100%" height="100%" fill="white"/>{svg[start:]}'


def inline(svg: str, picture: Picture) -> str:
    """An SVG file as an element of a page: without prologue and addresses, with its own ids and the page's ink."""
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg[svg.index("<svg") :], flags=re.DOTALL)
    head, body = svg.split(">", 1)
    view = re.search(r'viewBox="[^"]*"', head)
    prefix = slug(picture.name)
    body = re.sub(r'(\bid="|url\(#|href="#)', rf"\g<1>{prefix}-", body).replace(INK, "currentColor")
    return f'<svg {view[0] if view else ""} role="img" aria-label="{escape(printable(picture.alt))}">{body.strip()}'
