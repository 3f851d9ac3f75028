"""Every model with every proposal: means over seeds, as a table and as a heat map."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from vaerdict.report.document import Picture
from vaerdict.report.records import Row
from vaerdict.report.tables import Column, Pick, Table, mark
from vaerdict_paper.pages.figures import heat_map
from vaerdict_paper.pages.seed_statistics import Summary, cell, counts_of, mean_of, ordered, seed_count, where

CROSSED = ("VAE", "IWAE", "WW", "CHI")
"""The models to which every proposal is fitted."""

Means = Mapping[str, Mapping[str, Summary | None]]
"""Means over seeds by model, then by proposal."""


def cross_means(rows: Sequence[Row], key: str, proposals: Sequence[str]) -> Means:
    """The means of `key` over seeds by model and proposal, in the paper's order; empty if no row has it."""
    rows = [row for row in rows if row.get(key) is not None]
    names = ordered((row["proposal"] for row in rows), proposals)
    models = ordered((row["model"] for row in rows), CROSSED)
    return {m: {q: mean_of(where(rows, model=m, proposal=q), key) for q in names} for m in models}


def cross_blocks(
    rows: Sequence[Row],
    quantity: Column,
    proposals: Sequence[str],
    *,
    about: str,
    name: str = "",
    title: str = "",
    pick: Pick = min,
    draws: str | None = None,
) -> tuple[Table, Picture] | None:
    """The table and the heat map of a quantity for every model (rows) and proposal (columns); None if it is absent.

    Parameters
    ----------
    rows
        Rows with a model, a proposal and a seed.
    quantity, title
        The quantity, and its title in captions if that is not the column's.
    proposals
        The order of the proposals.
    about
        What the caption says about the rows.
    name
        What names the rows in the names of table and picture.
    pick
        Whether low (`min`) or high (`max`) is best.
    draws
        The key of the number of draws of every pair, for a column of the table.
    """
    means = cross_means(rows, quantity.key, proposals)
    if not means:
        return None
    title, name = title or quantity.title, f"cross-{quantity.key}{name}"
    columns = [Column("model", "model"), *(replace(quantity, key=q, title=q) for q in next(iter(means.values())))]
    body = [{"model": m, **mark({q: cell(mean) for q, mean in row.items()}, pick)} for m, row in means.items()]
    if draws is not None:
        columns.append(Column(draws, "draws of each"))
        body = [{**row, draws: counts_of(where(rows, model=row["model"]), draws)} for row in body]
    caption = (
        f"{title} of each proposal (columns) on each fixed model (rows), {about} from every proposal: mean ± sd over "
        f"{seed_count(rows)}."
    )
    values = {m: {q: mean and mean.mean for q, mean in row.items()} for m, row in means.items()}
    numbers = "; ".join(
        f"{m}: " + ", ".join(f"{q} {quantity.text(v)}" for q, v in row.items()) for m, row in values.items()
    )
    picture = Picture(
        name,
        f"{title} on each fixed model, {about}; lighter is better, the best proposal of each model is framed.",
        f"Heat map of {title}, models by proposals, {about}. {numbers}.",
        lambda: heat_map(values, quantity, pick),
    )
    return Table(name, caption, columns, body), picture
