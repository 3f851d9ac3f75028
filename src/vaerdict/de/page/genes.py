"""The genes of a differential expression: read from de.csv and not_tested.csv, and packed for the script."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from vaerdict.core import DataError
from vaerdict.csv_files import unguarded
from vaerdict.de.columns import DE, TableColumn
from vaerdict.de.verdict import group_names
from vaerdict.report.tables import clipped, printable

Genes = dict[str, list[Any]]
"""The rows of one contrast, by column; missing or not finite values are None."""

NotTested = dict[str, list[tuple[str, int]]]
"""The genes of one contrast that were not tested, by the reason, and the cells that each is seen in."""

MOST_NOT_TESTED = 2_000_000
"""Genes that were not tested, over all contrasts, that a page holds at most (some 6 MB); otherwise it holds none."""

MOST_ROWS = 200_000
"""Rows that a page holds (some 30 MB); of larger results it shows the genes with the smallest q."""

_REQUIRED = ("contrast", "gene", "lfc_mean", "lfc_low", "lfc_high", "prob_de", "q_value", "is_de")
_FLAGS = {"true": True, "1": True, "false": False, "0": False, "": None}


def read(path: Path) -> dict[str, Genes]:
    """The genes of each contrast in a de.csv, in the order of the file."""
    try:
        with path.open(encoding="utf-8", newline="") as lines:
            return _by_contrast(csv.DictReader(lines), path)
    except FileNotFoundError as error:
        raise DataError(f"{path} does not exist; the page shows its genes: run `vaerdict de` again.") from error
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"{path} cannot be read as a table ({error}); run `vaerdict de` again.") from error


def _by_contrast(rows: csv.DictReader[str], path: Path) -> dict[str, Genes]:
    header = rows.fieldnames or ()
    absent = [name for name in _REQUIRED if name not in header]
    if absent:
        raise DataError(f"{path} lacks the columns {', '.join(absent)}; it was not written by `vaerdict de`.")
    columns, contrasts = shown_columns(header), dict[str, Genes]()
    for row in rows:
        genes = contrasts.setdefault(unguarded(row["contrast"]), {column.name: [] for column in columns})
        for column in columns:
            try:
                genes[column.name].append(_value(row[column.name], column.kind))
            except (KeyError, TypeError, ValueError, AttributeError) as error:
                raise DataError(
                    f"line {rows.line_num} of {path} has {row[column.name]!r} under {column.name}; the run was cut "
                    "short or the file edited: run `vaerdict de` again."
                ) from error
    return contrasts


def read_not_tested(path: Path) -> dict[str, NotTested]:
    """The genes of each contrast in a not_tested.csv; none where there is no such file."""
    contrasts: dict[str, NotTested] = {}
    try:
        with path.open(encoding="utf-8", newline="") as lines:
            for row in csv.DictReader(lines):
                reasons = contrasts.setdefault(unguarded(row["contrast"]), {})
                gene = clipped(unguarded(row["gene"]))
                reasons.setdefault(printable(row["reason"]), []).append((gene, int(row["cells_seen"])))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, KeyError, TypeError, csv.Error) as error:
        raise DataError(f"{path} cannot be read as a table ({error!r}); run `vaerdict de` again.") from error
    return contrasts


def shown_columns(names: Iterable[str]) -> list[TableColumn]:
    """Those of the columns that the page shows, in its order."""
    present = set(names)
    return [column for column in DE if column.title and column.name in present]


def _value(cell: str, kind: str) -> Any:
    if kind == "text":
        return clipped(unguarded(cell))
    if kind == "flag":
        return _FLAGS[cell.strip().lower()]
    number = float(cell) if cell.strip() else math.nan
    return number if math.isfinite(number) else None


def called(genes: Genes) -> set[str]:
    """The names of the genes called."""
    return {gene for gene, flag in zip(genes["gene"], genes["is_de"], strict=True) if flag}


def leading(genes: Genes, n: int) -> list[dict[str, Any]]:
    """The n called genes of smallest q, ties by the size of the fold change."""
    rows = [dict(zip(genes, row, strict=True)) for row in zip(*genes.values(), strict=True)]
    return sorted((row for row in rows if row["is_de"]), key=_rank)[:n]


def _rank(row: Mapping[str, Any]) -> tuple[float, float]:
    q, lfc = row["q_value"], row["lfc_mean"]
    return (math.inf if q is None else q, -abs(lfc or 0.0))


def packed(
    contrasts: Sequence[Mapping[str, Any]],
    genes: Mapping[str, Genes],
    truth: Mapping[str, Any] | None,
    not_tested: Mapping[str, NotTested],
) -> str:
    """Everything that the script of the page reads, as JSON that may stand inside a script element.

    Names of genes that were not tested are listed once. Each contrast has, for each reason, the steps from one of its
    genes to the next in that list, and the cells that they are seen in, nothing where they are seen in none.
    """
    names = {name for columns in genes.values() for name in columns}
    most = MOST_ROWS // len(contrasts)
    counts = {name: sum(map(len, reasons.values())) for name, reasons in not_tested.items()}
    shown = not_tested if sum(counts.values()) <= MOST_NOT_TESTED else {}
    untested = sorted({gene for reasons in shown.values() for part in reasons.values() for gene, _ in part})
    place = {gene: i for i, gene in enumerate(untested)}
    left_out = {name: [_steps(reason, part, place) for reason, part in rs.items()] for name, rs in shown.items()}
    return script_safe(
        {
            "columns": [column._asdict() for column in shown_columns(names)],
            "untested": untested,
            "contrasts": [
                _packed(c, genes[c["name"]], (truth or {}).get(c["name"]), most)
                | {"n_untested": counts.get(c["name"], 0), "untested": left_out.get(c["name"], [])}
                for c in contrasts
            ],
        }
    )


def _steps(reason: str, genes: Sequence[tuple[str, int]], place: Mapping[str, int]) -> list[Any]:
    ordered = sorted((place[gene], seen) for gene, seen in genes)
    at = [-1, *(i for i, _ in ordered)]
    steps, seen = [after - before for before, after in pairwise(at)], [seen for _, seen in ordered]
    return [reason, steps, seen if any(seen) else []]


def _packed(contrast: Mapping[str, Any], genes: Genes, truth: Mapping[str, float] | None, most: int) -> dict[str, Any]:
    curve, n_called, n_genes = contrast.get("fdr_curve") or {}, sum(map(bool, genes["is_de"])), len(genes["gene"])
    genes = smallest_q(genes, most)
    a, b = map(clipped, group_names(contrast))
    return {
        **{key: clipped(str(contrast.get(key, ""))) for key in ("name", "group_a", "group_b")},
        **{key: contrast.get(key) for key in ("level", "delta", "n_discoveries", "joint_fdr", "expected_fdr")},
        "a": a,
        "b": b,
        "n_called": n_called,
        "n_genes": n_genes,
        "curve": {key: _rounded(values) for key, values in curve.items()} or None,
        "truth": None if truth is None else _rounded(truth.get(gene) for gene in genes["gene"]),
        "values": {name: _rounded(values) for name, values in genes.items()},
    }


def smallest_q(genes: Genes, most: int) -> Genes:
    """The genes with the smallest q, at most so many, in the order of the file."""
    n = len(genes["gene"])
    if n <= most:
        return genes
    q = [math.inf if value is None else value for value in genes["q_value"]]
    places = sorted(sorted(range(n), key=q.__getitem__)[:most])
    return {name: [values[i] for i in places] for name, values in genes.items()}


def _rounded(values: Iterable[Any]) -> list[Any]:
    """Numbers to six significant digits, more than any plot or cell shows; None where not finite."""
    return [
        (float(f"{value:.6g}") if math.isfinite(value) else None) if isinstance(value, float) else value
        for value in values
    ]


def script_safe(payload: Any) -> str:
    """JSON in which no string can close the element around it."""
    text = json.dumps(payload, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
