"""The table of genes where scanpy looks for that of ``sc.tl.rank_genes_groups``, complete enough for its plots."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from vaerdict.core import DataError
from vaerdict.de import data
from vaerdict.optional import require

if TYPE_CHECKING:
    import pandas

_OTHER = "not compared"
_LEAST_Q = 1e-300  # a smaller one has the score of this one


class Entry(NamedTuple):
    """A group of scanpy's ranking: the rows of its contrast by gene, and whether they are seen from the other side."""

    name: str
    rows: pandas.DataFrame
    mirrored: bool = False


def ranking(table: pandas.DataFrame, contrasts: Sequence[Mapping[str, Any]], adata: Any) -> dict[str, Any]:
    """Ranked genes of every entry, as scanpy stores them; genes that were not tested have a score and an LFC of 0."""
    key = "gene_id" if "gene_id" in table else "gene"
    genes = [str(name) for name in adata.var_names]
    unknown = sorted(set(table[key]) - set(genes))
    if unknown:
        raise DataError(f"{len(unknown)} genes that were tested are not in adata, such as {unknown[0]!r}.")
    every = list(dict.fromkeys(genes))
    by_contrast = {name: rows.set_index(key).reindex(every) for name, rows in table.groupby("contrast", sort=False)}
    entries = _entries(contrasts, by_contrast)
    ranked = [_ranked(entry) for entry in entries]
    names = [entry.name for entry in entries]
    columns = {
        column: np.rec.fromarrays(
            [each[column] for each in ranked],
            dtype=[(name, each[column].dtype) for name, each in zip(names, ranked, strict=True)],
        )
        for column in ranked[0]
    }
    shares = ("seen_a", "seen_b")
    seen = {
        stored: {entry.name: entry.rows[shares[side ^ entry.mirrored]].fillna(0.0) for entry in entries}
        for side, stored in enumerate(("pts", "pts_rest"))
    }
    pandas = require("pandas", "bio")
    return columns | {stored: pandas.DataFrame(values) for stored, values in seen.items()}


def _entries(contrasts: Sequence[Mapping[str, Any]], rows: Mapping[Any, Any]) -> list[Entry]:
    """The first group of every contrast, and of a single contrast the second one too."""
    firsts = [c["group_a"] for c in contrasts]
    names = firsts if len(set(firsts)) == len(firsts) else [c["name"] for c in contrasts]
    entries = [Entry(name, rows[c["name"]]) for name, c in zip(names, contrasts, strict=True)]
    if len(contrasts) > 1:
        return entries
    return [*entries, Entry(contrasts[0]["group_b"], rows[contrasts[0]["name"]], mirrored=True)]


def _ranked(entry: Entry) -> dict[str, np.ndarray]:
    """Genes by falling score: -log10 of the q-value with the sign of the LFC."""
    q = entry.rows["q_value"].fillna(1.0).to_numpy()
    lfc = entry.rows["lfc_mean"].fillna(0.0).to_numpy() * (-1.0 if entry.mirrored else 1.0)
    score = -np.sign(lfc) * np.log10(q.clip(_LEAST_Q, 1.0))
    order = np.lexsort((-lfc, -score))
    return {
        "names": entry.rows.index.to_numpy(dtype=object)[order],
        "scores": score[order].astype(np.float32),
        "logfoldchanges": lfc[order].astype(np.float32),
        "pvals": 1 - entry.rows["prob_de"].fillna(0.0).to_numpy()[order],
        "pvals_adj": q[order],
    }


def groups_of(adata: Any, settings: Mapping[str, Any], contrasts: Sequence[Mapping[str, Any]]) -> np.ndarray:
    """The entry that each cell belongs to, None for cells that were not compared. Shapes: ``-> (cells,)``."""
    if len(contrasts) == 1:
        a, b = sides(adata, settings, contrasts[0])
        groups = np.full(len(a), None, dtype=object)
        groups[a], groups[b] = contrasts[0]["group_a"], contrasts[0]["group_b"]
        return groups
    labels, firsts = data.column(adata, settings["groupby"], role="groupby"), {c["group_a"] for c in contrasts}
    return np.array([label if label in firsts else None for label in labels], dtype=object)


def categories(groups: np.ndarray, names: Sequence[str]) -> Any:
    """Groups as a column of obs, those of cells that were not compared last. Shapes: ``(cells,) -> (cells,)``."""
    other = _OTHER
    while other in names:
        other += "'"
    rest = np.array([group is None for group in groups], dtype=bool)
    every = [*names, other] if rest.any() else list(names)
    return require("pandas", "bio").Categorical(np.where(rest, other, groups), categories=every)


def sides(adata: Any, settings: Mapping[str, Any], contrast: Mapping[str, Any]) -> tuple[np.ndarray, np.ndarray]:
    """Which cells are on either side of a contrast. Shapes: ``-> (cells,), (cells,)``."""
    labels = data.column(adata, settings["groupby"], role="groupby")
    inside = np.ones(len(labels), dtype=bool)
    if contrast["within"] is not None:
        inside = data.column(adata, settings["within"], role="within") == contrast["within"]
    labelled = np.array([label is not None for label in labels], dtype=bool)
    a = labels == contrast["group_a"]
    b = labelled & ~a if contrast["against_rest"] else labels == contrast["group_b"]
    return a & inside, b & inside
