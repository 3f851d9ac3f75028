"""From fold changes to the table of genes: summaries of every contrast, q-values and calls over all of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from vaerdict.de import columns
from vaerdict.de.analysis import SideCounts
from vaerdict.de.contrasts import Contrast
from vaerdict.de.effects import ESTIMANDS, Effect, comparison
from vaerdict.de.options import DEOptions
from vaerdict.decisions import discoveries, expected_fdr, q_values, ranking
from vaerdict.optional import require

GeneTable = dict[str, Tensor]
"""The columns of one contrast. Shapes: ``(genes,)`` each."""

_CURVE = 200  # points of a curve at most


def gene_table(contrast: Contrast, effect: Effect, counts: SideCounts, options: DEOptions) -> GeneTable:
    """The genes of a contrast: fold changes and probabilities, and what the counts of both sides are."""
    a, b = counts.side(contrast.a), counts.side(contrast.b)
    estimand = ESTIMANDS[options.scale]
    table = comparison(effect, a.mean, b.mean, estimand=estimand, delta=options.delta, level=options.level).table
    assert a.seen is not None
    assert b.seen is not None
    return table | {"seen_a": a.seen, "seen_b": b.seen}


def call_genes(tables: Sequence[GeneTable], level: float) -> list[GeneTable]:
    """The tables of all contrasts with q-values and calls over all of them, and those of each alone beside."""
    sizes = [len(table["prob_de"]) for table in tables]
    prob, lfc = (torch.cat([table[key] for table in tables]) for key in ("prob_de", "lfc_mean"))
    q, called = q_values(prob, ties=lfc.abs()).split(sizes), discoveries(prob, level, ties=lfc.abs()).split(sizes)
    return [
        {**table, "q_value_contrast": table["q_value"], "q_value": q[i], "is_de": called[i]}
        for i, table in enumerate(tables)
    ]


def contrast_row(contrast: Contrast, effect: Effect, table: GeneTable, options: DEOptions) -> dict[str, Any]:
    """What results.json says of a contrast, except for what a model adds."""
    called, up = table["is_de"], table["lfc_mean"] > 0
    n = int(called.sum())
    return {
        "name": contrast.name,
        "group_a": contrast.group_a,
        "group_b": contrast.group_b,
        "against_rest": contrast.rest,
        "within": contrast.within,
        "n_cells_a": len(contrast.a.cells),
        "n_cells_b": len(contrast.b.cells),
        "n_cells_a_used": contrast.used[0],
        "n_cells_b_used": contrast.used[1],
        "n_samples_a": len(contrast.a.samples) or None,
        "n_samples_b": len(contrast.b.samples) or None,
        "paired": contrast.paired,
        "n_discoveries": n,
        "n_up": int((called & up).sum()),
        "n_down": int((called & ~up).sum()),
        "expected_fdr": (1 - table["prob_de"][called]).mean().item() if n else 0.0,
        "level": options.level,
        "delta": options.delta,
        "fdr_curve": fdr_curve(effect, options.delta),
    }


def fdr_curve(effect: Effect, delta: float) -> dict[str, list[float]]:
    """Expected FDR of the first k genes, and the range of the share of false ones with 90 % probability."""
    null = (effect.lfc.abs() < delta).double()
    prob = 1 - null.mean(0)
    order = ranking(prob, effect.lfc.mean(0).abs())
    n = len(prob)
    k = torch.linspace(1, n, min(n, _CURVE)).round().long().unique()
    shares = null[:, order].cumsum(1)[:, k - 1] / k
    low, high = shares.quantile(torch.tensor([0.05, 0.95]).to(shares), 0)
    expected = expected_fdr(prob)[k - 1]
    return {"k": k.tolist(), "expected": expected.tolist(), "low": low.tolist(), "high": high.tolist()}


def frame(
    contrasts: Sequence[Contrast], tables: Sequence[Mapping[str, Tensor]], genes: list[str], ids: list[str] | None
) -> Any:
    """The table of all contrasts as a pandas data frame with the columns of `vaerdict.de.columns`."""
    pandas = require("pandas", "bio")
    names = {"gene": genes} | ({} if ids is None else {"gene_id": ids})
    frames = [
        pandas.DataFrame(
            {"contrast": c.name, "group_a": c.group_a, "group_b": c.group_b, **names}
            | {name: values.numpy() for name, values in table.items()}
        )
        for c, table in zip(contrasts, tables, strict=True)
    ]
    table = pandas.concat(frames, ignore_index=True)
    return table[[column.name for column in columns.DE if column.name in table]]
