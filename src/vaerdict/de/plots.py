"""Plots of a differential expression for notebooks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from vaerdict.core import DataError, SettingError
from vaerdict.de import data
from vaerdict.de.scanpy_export import sides
from vaerdict.notebook import BAD, GOOD, GREY, axes_or_new, short

if TYPE_CHECKING:
    import pandas
    from matplotlib.axes import Axes

_LEAST_Q = 1e-50  # smaller ones are drawn there
_SCALE = 1e4  # counts per so many are shown on a logarithmic scale


def volcano(rows: pandas.DataFrame, contrast: Mapping[str, Any], n_labels: int, ax: Axes | None) -> Axes:
    """Fold changes against q-values, the genes called in colour and the first ones by name."""
    ax = axes_or_new(ax)
    lfc, height = rows["lfc_mean"].to_numpy(), -np.log10(rows["q_value"].to_numpy().clip(_LEAST_Q, 1.0))
    called = rows["is_de"].to_numpy(dtype=bool)
    by_prior = rows["by_prior"].to_numpy(dtype=bool) if "by_prior" in rows else np.zeros(len(rows), dtype=bool)
    parts = (
        (~called, GREY, f"not called ({(~called).sum():,})"),
        (called & (lfc > 0), BAD, f"higher in {short(contrast['group_a'])} ({(called & (lfc > 0)).sum():,})"),
        (called & (lfc <= 0), GOOD, f"higher in {short(contrast['group_b'])} ({(called & (lfc <= 0)).sum():,})"),
    )
    for mask, colour, name in parts:
        filled, hollow = mask & ~by_prior, mask & by_prior
        ax.scatter(lfc[filled], height[filled], s=9, color=colour, linewidths=0, label=_plain(name), rasterized=True)
        ax.scatter(lfc[hollow], height[hollow], s=12, facecolors="none", edgecolors=colour, rasterized=True)
    for edge in (-contrast["delta"], contrast["delta"]):
        ax.axvline(edge, color=GREY, linestyle=":", linewidth=1, zorder=0)
    order = np.lexsort((-np.abs(lfc), -height))
    names = rows["gene"].to_numpy()
    for i in [i for i in order if called[i]][:n_labels]:
        ax.annotate(_plain(short(names[i])), (lfc[i], height[i]), (3, 3), textcoords="offset points", fontsize="small")
    ax.set(xlabel="log2 fold change", ylabel="-log10 q-value", title=_plain(short(contrast["name"])))
    ax.legend(fontsize="small")
    return ax


def gene(
    row: Mapping[str, Any], contrast: Mapping[str, Any], settings: Mapping[str, Any], adata: Any, ax: Axes | None
) -> Axes:
    """Expression of a gene in the cells of both groups, with the mean of each sample where samples are known."""
    ax = axes_or_new(ax)
    place = list(map(str, adata.var_names)).index(row.get("gene_id", row["gene"]))
    sample = None if settings["sample_key"] is None else data.column(adata, settings["sample_key"], role="sample_key")
    values, named = [], []
    for mask, name in zip(sides(adata, settings, contrast), ("group_a", "group_b"), strict=True):
        cells = np.flatnonzero(mask)
        if not len(cells):
            raise DataError(f"adata has no cells of {contrast[name]!r}; pass the data that were compared.")
        share = _share(adata, settings["layer"], cells, place)
        values.append(np.log2(1 + share))
        named.append(f"{_plain(short(contrast[name]))}\n{len(cells):,} cells, {(share > 0).mean():.0%} with counts")
        if sample is not None:
            owners = sample[cells]
            means = [values[-1][owners == s].mean() for s in sorted({s for s in owners if s is not None})]
            ax.scatter([len(values)] * len(means), means, color="black", s=12, zorder=3)
    drawn: Any = ax.violinplot(values, showmeans=True, showextrema=False)
    for body, colour in zip(drawn["bodies"], (BAD, GOOD), strict=True):
        body.set(facecolor=colour, alpha=0.5)
    ax.set_xticks([1, 2], named)
    change = f"LFC {row['lfc_mean']:+.2f} [{row['lfc_low']:+.2f}, {row['lfc_high']:+.2f}], q {row['q_value']:.2g}"
    ax.set(ylabel=f"log2(1 + counts per {_SCALE:,.0f})", title=_plain(f"{short(row['gene'])}: {change}"))
    return ax


def _share(adata: Any, layer: str | None, cells: np.ndarray, place: int) -> np.ndarray:
    """Counts of a gene per `_SCALE` counts of its cell. Shapes: ``cells (n,) -> (n,)``."""
    counts, total = [], []
    for block in data.count_blocks(adata, layer, cells):
        counts.append(np.asarray(block[:, [place]].todense()).ravel())
        total.append(np.asarray(block.sum(1)).ravel())
    every = np.concatenate(total)
    return _SCALE * np.concatenate(counts) / np.where(every > 0, every, 1)


def row_of(rows: pandas.DataFrame, name: str, contrast: str) -> dict[str, Any]:
    """The row of a gene, by its name or its id."""
    found = rows[rows["gene"] == name]
    if found.empty and "gene_id" in rows:
        found = rows[rows["gene_id"] == name]
    if found.empty:
        raise SettingError(f"gene {name!r} was not tested in {contrast}; `not_tested` says why.")
    return {str(key): value for key, value in found.iloc[0].items()}


def _plain(text: str) -> str:
    """Text that matplotlib prints literally."""
    return text.replace("$", r"\$")
