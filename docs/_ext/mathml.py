"""Formulas as MathML, which browsers show without a script: nothing is fetched, and no LaTeX is needed."""

from __future__ import annotations

from typing import Any

from docutils import nodes
from docutils.utils.math import MathError
from docutils.utils.math.latex2mathml import tex2mathml
from sphinx.application import Sphinx
from sphinx.util import logging

logger = logging.getLogger(__name__)


def formula(node: nodes.math | nodes.math_block, *, block: bool) -> str:
    """The MathML of a formula; one that cannot be converted is a warning."""
    tex = node.astext().replace(r"\texttt", r"\text").replace(r"\textstyle", "")
    try:
        return tex2mathml(tex, as_block=block)
    except MathError as error:
        logger.warning("%s: %s", error, node.astext(), location=node)
        return ""


def inline(writer: Any, node: nodes.math) -> None:
    """Write a formula within a line."""
    writer.body.append(formula(node, block=False))
    raise nodes.SkipNode


def displayed(writer: Any, node: nodes.math_block) -> None:
    """Write a formula that stands alone."""
    writer.body.append(f'<div class="math">{formula(node, block=True)}</div>')
    raise nodes.SkipNode


def setup(app: Sphinx) -> dict[str, bool]:
    """Register the renderer as `mathml`."""
    app.add_html_math_renderer("mathml", (inline, None), (displayed, None))
    return {"parallel_read_safe": True, "parallel_write_safe": True}
