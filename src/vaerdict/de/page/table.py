"""The gene table of a differential expression: read from de.csv, explained, and packed for the page's script."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from vaerdict.core import DataError
from vaerdict.report.tables import printable

Genes = dict[str, list[Any]]
"""The rows of one contrast, by column; what is missing or not finite is None."""


class Measure(NamedTuple):
    """A column of de.csv: its heading, what it means, how it prints, and whether the page shows it only on demand."""

    key: str
    title: str
    about: str
    kind: str
    extra: bool = False


MEASURES = (
    Measure("gene", "gene", "Name of the gene.", "text"),
    Measure("is_de", "called", "Whether the gene is in the list at the chosen rate, and on which side.", "flag"),
    Measure("lfc_mean", "LFC", "Posterior mean of the log2 fold change, group A over group B.", "lfc"),
    Measure("lfc_median", "LFC median", "Posterior median of the log2 fold change.", "lfc", extra=True),
    Measure("lfc_low", "LFC low", "Lower end of the credible interval of the log2 fold change.", "lfc"),
    Measure("lfc_high", "LFC high", "Upper end of the credible interval of the log2 fold change.", "lfc"),
    Measure("prob_de", "P(DE)", "Posterior probability that the log2 fold change exceeds delta either way.", "prob"),
    Measure("prob_up", "P(up)", "Posterior probability that it lies above delta.", "prob", extra=True),
    Measure("prob_down", "P(down)", "Posterior probability that it lies below minus delta.", "prob", extra=True),
    Measure("q_value", "q", "Expected false discovery rate of the list, over all contrasts, that ends here.", "small"),
    Measure("q_value_contrast", "q within", "The same of the list of this contrast alone.", "small", extra=True),
    Measure("mcse", "MCSE", "Monte Carlo standard error of P(DE).", "small", extra=True),
    Measure("mean_a", "mean A", "Mean proportion of the gene in the cells of group A.", "small"),
    Measure("mean_b", "mean B", "Mean proportion of the gene in the cells of group B.", "small"),
    Measure("seen_a", "seen A", "Share of the cells of group A in which the gene is seen.", "prob"),
    Measure("seen_b", "seen B", "Share of the cells of group B in which the gene is seen.", "prob"),
    Measure("model_lfc", "model LFC", "Log2 fold change by the model alone.", "lfc", extra=True),
    Measure("model_mean_a", "model mean A", "Mean proportion in group A by the model alone.", "small", extra=True),
    Measure("model_mean_b", "model mean B", "Mean proportion in group B by the model alone.", "small", extra=True),
    Measure("raw_lfc", "raw LFC", "Log2 fold change by a plain bootstrap of the raw counts.", "lfc"),
    Measure("raw_prob_de", "raw P(DE)", "Its probability that the change exceeds delta either way.", "prob"),
    Measure("raw_is_de", "raw called", "Whether the plain bootstrap would call the gene.", "flag"),
)
"""The columns of de.csv that the page shows, in its order."""

MOST_ROWS = 200_000
"""What a page can hold (some 30 MB) before a phone gives up; of larger results it shows the surest genes."""

REQUIRED = ("contrast", "gene", "lfc_mean", "lfc_low", "lfc_high", "prob_de", "q_value", "is_de")
_FLAGS = {"true": True, "1": True, "false": False, "0": False, "": None}


def beside(run_dir: Path) -> dict[str, Any]:
    """What a report on differential expression needs besides results.json."""
    return {"genes": read(run_dir / "de.csv")}


def read(path: Path) -> dict[str, Genes]:
    """The genes of each contrast in a de.csv, in the file's order."""
    try:
        with path.open(encoding="utf-8", newline="") as lines:
            return _contrasts(csv.DictReader(lines), path)
    except FileNotFoundError as error:
        raise DataError(f"{path} does not exist; the page shows its genes: run `vaerdict de` again.") from error
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"{path} cannot be read as a table ({error}); run `vaerdict de` again.") from error


def _contrasts(rows: csv.DictReader[str], path: Path) -> dict[str, Genes]:
    header = rows.fieldnames or ()
    absent = [key for key in REQUIRED if key not in header]
    if absent:
        raise DataError(f"{path} lacks the columns {', '.join(absent)}; it was not written by `vaerdict de`.")
    measures = [measure for measure in MEASURES if measure.key in header]
    found: dict[str, Genes] = {}
    for row in rows:
        genes = found.setdefault(row["contrast"], {measure.key: [] for measure in measures})
        for measure in measures:
            try:
                genes[measure.key].append(_value(row[measure.key], measure.kind))
            except (KeyError, TypeError, ValueError, AttributeError) as error:
                raise DataError(
                    f"line {rows.line_num} of {path} has {row[measure.key]!r} under {measure.key}; the run was cut "
                    "short or the file edited: run `vaerdict de` again."
                ) from error
    return found


def _value(cell: str, kind: str) -> Any:
    if kind == "text":
        return printable(cell)
    if kind == "flag":
        return _FLAGS[cell.strip().lower()]
    number = float(cell) if cell.strip() else math.nan
    return number if math.isfinite(number) else None


def called(genes: Genes, key: str = "is_de") -> set[str]:
    """The names of the genes in the list reported, or with `raw_is_de` in that of the plain bootstrap."""
    return {gene for gene, flag in zip(genes["gene"], genes.get(key, ()), strict=False) if flag}


def leading(genes: Genes, n: int) -> list[dict[str, Any]]:
    """The n called genes of smallest q, ties by the size of the fold change."""
    rows = [dict(zip(genes, row, strict=True)) for row in zip(*genes.values(), strict=True)]
    return sorted((row for row in rows if row["is_de"]), key=_rank)[:n]


def _rank(row: Mapping[str, Any]) -> tuple[float, float]:
    q, lfc = row["q_value"], row["lfc_mean"]
    return (math.inf if q is None else q, -abs(lfc or 0.0))


def packed(contrasts: Sequence[Mapping[str, Any]], genes: Mapping[str, Genes], truth: Mapping[str, Any] | None) -> str:
    """Everything that the page's script reads, as JSON that may stand inside a script element."""
    keys = {key for columns in genes.values() for key in columns}
    payload = {
        "measures": [measure._asdict() for measure in MEASURES if measure.key in keys],
        "contrasts": [
            _packed_contrast(c, genes[c["name"]], (truth or {}).get(c["name"]), MOST_ROWS // len(contrasts))
            for c in contrasts
        ],
    }
    return script_safe(payload)


def _packed_contrast(
    contrast: Mapping[str, Any], genes: Genes, truth: Mapping[str, float] | None, most: int
) -> dict[str, Any]:
    curve, n_called, n_genes = contrast.get("fdr_curve") or {}, sum(map(bool, genes["is_de"])), len(genes["gene"])
    genes = surest(genes, most)
    return {
        **{key: printable(str(contrast.get(key, ""))) for key in ("name", "group_a", "group_b")},
        **{key: contrast.get(key) for key in ("level", "delta", "n_discoveries")},
        "n_called": n_called,
        "n_genes": n_genes,
        "curve": {key: _short(values) for key, values in curve.items()} or None,
        "truth": None if truth is None else _short(truth.get(gene) for gene in genes["gene"]),
        "columns": {key: _short(values) for key, values in genes.items()},
    }


def surest(genes: Genes, most: int) -> Genes:
    """At most so many genes, those of smallest q, in the order of the file."""
    n = len(genes["gene"])
    if n <= most:
        return genes
    q = [math.inf if value is None else value for value in genes["q_value"]]
    kept = sorted(sorted(range(n), key=q.__getitem__)[:most])
    return {key: [values[i] for i in kept] for key, values in genes.items()}


def _short(values: Iterable[Any]) -> list[Any]:
    """Numbers to six significant digits, which no plot and no cell exceeds."""
    return [_rounded(value) if isinstance(value, float) else value for value in values]


def _rounded(value: float) -> float | None:
    return float(f"{value:.6g}") if math.isfinite(value) else None


def script_safe(payload: Any) -> str:
    """JSON in which no string can close the element around it."""
    text = json.dumps(payload, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
