"""From fold changes to the table of genes: summaries of every contrast, q-values and calls."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from vaerdict.de import columns
from vaerdict.de.analysis import Analysis, GeneChoice
from vaerdict.de.contrasts import Contrast
from vaerdict.de.effects import GeneTable
from vaerdict.de.options import DEOptions
from vaerdict.optional import require

LARGEST_LFSR = 0.05
"""A gene that is called has a smaller local false sign rate: the tail of a 90 % interval."""

_CURVE = 200  # points of a curve at most
_NORMAL_90 = 1.645


def gene_table(cells: Analysis, contrast: Contrast, summary: GeneTable, genes: np.ndarray) -> GeneTable:
    """The genes of a contrast: fold changes and probabilities, and what the counts of both sides are."""
    sides = {"a": cells.side(contrast.a), "b": cells.side(contrast.b)}
    chosen = torch.from_numpy(genes)
    means = {f"mean_{name}": side.rate[chosen] for name, side in sides.items()}
    return summary | means | {f"seen_{name}": side.seen[chosen] / side.n_cells for name, side in sides.items()}


def call_genes(tables: Sequence[GeneTable], options: DEOptions) -> list[GeneTable]:
    """The tables with q-values and calls, in each contrast or, with `joint_fdr`, over all of them together."""
    groups = [list(tables)] if options.joint_fdr else [[table] for table in tables]
    return [table for group in groups for table in _called(group, options.level)]


def _called(tables: Sequence[GeneTable], level: float) -> list[GeneTable]:
    sizes = [len(table["lfdr"]) for table in tables]
    lfdr, lfsr, lfc = (torch.cat([table[key] for table in tables]) for key in ("lfdr", "lfsr", "lfc_mean"))
    q = q_values(lfdr, lfsr, lfc.abs())
    called = (q <= level) & (lfsr < LARGEST_LFSR)
    both = zip(tables, q.split(sizes), called.split(sizes), strict=True)
    return [{**table, "q_value": own, "is_de": calls} for table, own, calls in both]


class ByPrior(NamedTuple):
    """What the counts alone say of the genes of a contrast, and their predicted fold changes. Shapes: ``(genes,)``."""

    counts: GeneTable
    predicted: Tensor


def with_prior(called: Sequence[GeneTable], priors: Sequence[ByPrior | None], options: DEOptions) -> list[GeneTable]:
    """The tables with what the counts alone say of each gene, and how far a prior moved it; as they are without any."""
    if not any(priors):
        return list(called)
    parts = list(zip(called, priors, strict=True))
    alone = call_genes([table if prior is None else prior.counts for table, prior in parts], options)
    return [
        {
            **table,
            "lfc_counts": counts["lfc_mean"],
            "lfsr_counts": counts["lfsr"],
            "lfc_predicted": torch.full_like(counts["lfc_mean"], torch.nan) if prior is None else prior.predicted,
            "prior_shift": table["lfc_mean"] - counts["lfc_mean"],
            "by_prior": table["is_de"] & ~counts["is_de"],
            "is_de_counts": counts["is_de"],
        }
        for (table, prior), counts in zip(parts, alone, strict=True)
    ]


def q_values(lfdr: Tensor, lfsr: Tensor, ties: Tensor) -> Tensor:
    """The mean lfdr of a gene and of all that have a smaller one, and at least its lfsr. Shapes: ``(genes,)``.

    The list at some level then has at most that expected FDR, and no gene of it has a more uncertain direction.
    """
    order = ranking_by(lfdr, ties)
    mean = torch.empty_like(lfdr)
    mean[order] = lfdr[order].cumsum(0) / torch.arange(1, len(lfdr) + 1)
    return torch.maximum(mean, lfsr)


def ranking_by(lfdr: Tensor, ties: Tensor) -> Tensor:
    """Genes by rising lfdr, equal ones by falling `ties`. Shapes: ``(genes,) -> (genes,)``."""
    return torch.from_numpy(np.lexsort((-ties.numpy(), lfdr.numpy())))


def prior_row(record: dict[str, Any] | None, table: GeneTable) -> dict[str, Any]:
    """The record of a contrast's prior with the numbers of genes called by the counts alone and thanks to the prior."""
    if record is None or not record["used"]:
        return {"prior": record}
    numbers = {"n_counts": int(table["is_de_counts"].sum()), "n_by_prior": int(table["by_prior"].sum())}
    return {"prior": record | numbers}


def contrast_row(contrast: Contrast, table: GeneTable, genes: GeneChoice, options: DEOptions) -> dict[str, Any]:
    """What results.json says of a contrast, except for what a model or a prior adds."""
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
        "n_tested": len(genes.tested),
        "n_expressed": len(genes.expressed),
        "least_cells": genes.least,
        "expected_fdr": table["lfdr"][called].mean().item() if n else 0.0,
        "level": options.level,
        "joint_fdr": options.joint_fdr,
        "delta": options.delta,
        "fdr_curve": fdr_curve(table),
    }


def fdr_curve(table: GeneTable) -> dict[str, list[float]]:
    """Expected FDR of the first k genes, and the range of the share of false ones with 90 % probability."""
    lfdr = table["lfdr"][ranking_by(table["lfdr"], table["lfc_mean"].abs())]
    n = len(lfdr)
    k = torch.linspace(1, n, min(n, _CURVE)).round().long().unique()
    expected, spread = lfdr.cumsum(0)[k - 1] / k, (lfdr * (1 - lfdr)).clamp_min(0).cumsum(0)[k - 1].sqrt() / k
    low, high = ((expected + sign * _NORMAL_90 * spread).clamp(0, 1) for sign in (-1, 1))
    return {"k": k.tolist(), "expected": expected.tolist(), "low": low.tolist(), "high": high.tolist()}


def not_tested(cells: Analysis, choices: Sequence[GeneChoice]) -> Any:
    """The genes of every contrast that were not tested, and why, as a pandas data frame."""
    pandas, names = require("pandas", "bio"), np.array(cells.source.names, dtype=object)
    frames = []
    for contrast, genes in zip(cells.contrasts, choices, strict=True):
        left = np.setdiff1d(np.arange(len(names)), genes.tested)
        seen = genes.seen[left].astype(int)
        rare = f"seen in fewer than {genes.least} of the cells compared"
        reason = np.where(seen == 0, "not seen", np.where(seen < genes.least, rare, "not among the most variable"))
        values = {"contrast": contrast.name, "gene": names[left], "cells_seen": seen, "reason": reason}
        frames.append(pandas.DataFrame(values))
    return pandas.concat(frames, ignore_index=True)


def frame(cells: Analysis, tables: Sequence[Mapping[str, Tensor]], choices: Sequence[GeneChoice]) -> Any:
    """The table of all contrasts as a pandas data frame with the columns of `vaerdict.de.columns`."""
    pandas, source = require("pandas", "bio"), cells.source
    frames = []
    for c, table, genes in zip(cells.contrasts, tables, choices, strict=True):
        named = {"gene": [source.names[g] for g in genes.tested]}
        named |= {} if source.ids is None else {"gene_id": [source.ids[g] for g in genes.tested]}
        values = {name: column.numpy() for name, column in table.items()}
        frames.append(
            pandas.DataFrame({"contrast": c.name, "group_a": c.group_a, "group_b": c.group_b, **named, **values})
        )
    table = pandas.concat(frames, ignore_index=True)
    return table[[column.name for column in columns.DE if column.name in table]]
