"""The picture of every model with every proposal."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from vaerdict.report import figures
from vaerdict.report.document import Picture
from vaerdict.report.summary import Summary
from vaerdict.report.tables import Column

Pick = Callable[[Iterable[float]], float]
"""`min` or `max`: which value is the best."""


def cross_picture(
    means: Mapping[str, Mapping[str, Summary | None]], quantity: Column, name: str, *, aside: str = "", pick: Pick = min
) -> Picture:
    """The heat map of a quantity over models and proposals; `aside` follows in its text alternative."""
    values = {m: {q: mean and mean.mean for q, mean in row.items()} for m, row in means.items()}
    rows = "; ".join(
        f"{m}: " + ", ".join(f"{q} {quantity.text(v)}" for q, v in row.items()) for m, row in values.items()
    )
    return Picture(
        name,
        f"{quantity.title} on each fixed model; lighter is better, the best proposal of each model is framed.",
        f"Heat map of {quantity.title}, models by proposals{aside}. {rows}.",
        lambda: figures.heat_map(values, quantity, pick),
    )
