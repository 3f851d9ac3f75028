"""Tables of the benchmark of hidden classes."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

from vaerdict.report.document import Block
from vaerdict.report.records import Row, grouped
from vaerdict.report.tables import Column, Table, Value

DEFAULT = "diffusion"
_BY_CLASS = (
    DEFAULT,
    "M1+M2: ambiguity",
    "AdaDetect, random forest",
    "IsolationForest",
    "1-NN distance",
    "LOF",
    "logistic regression",
    "self-training",
)
"""The methods whose AUROC is shown for each hidden class."""

_MEASURES = (
    Column("auroc", "AUROC", 3),
    Column("average_precision", "average precision", 3),
    Column("fdp", "FDP, %", 1, 100),
    Column("power", "hidden rows called, %", 1, 100),
)
_NOTE = (
    "Every class is hidden in turn: labels are of the other classes, the unlabelled rows of training contain it, and "
    "the query rows are new. Training and query rows: digits 1,197 and 600, wine 119 and 59, breast cancer 379 and "
    "190, PBMC 1,758 and 880, MNIST 3,000 and 1,000. All methods have the same rows, standardised unless all features "
    "lie in [0, 1]. Means over classes and seeds ± standard error. FDP: share of known rows among those called, zero "
    "if there are none. Diffusion uses all labels, which also calibrate (full conformal e-values), unless said "
    "otherwise; the other methods with an FDR of 10 % are split conformal: half of the labels are known rows, half "
    "calibrate. Methods with another rule use all labels and call by their customary rule. M1+M2: one objective, "
    "first seeds only; with a single known class it has a free class and no ambiguity, and classifiers of known "
    "classes do not apply. Settings of diffusion were chosen on digits and breast cancer."
)


def tables(result: Row, machine: str) -> list[Block]:
    """The means over classes and seeds by method, and the AUROC for each hidden class."""
    return [_by_method(result["rows"], machine), _by_class(result["rows"], machine)]


def _by_method(rows: Sequence[Row], machine: str) -> Table:
    body = []
    for (data, labels, method), part in grouped(rows, "data", "labels", "method").items():
        about = {"data": data, "labels": labels, "method": method, "rule": part[0]["rule"]}
        about |= {"runs": sum(row["seeds"] for row in part), "seconds": _mean(part, "seconds")}
        body.append(about | {column.key: _value(part, column.key) for column in _MEASURES})
    body.sort(key=lambda row: (_place(rows, row), -row["auroc"].value))
    columns = [
        *(Column("data", "table"), Column("labels", "labels"), Column("method", "method"), *_MEASURES),
        *(Column("rule", "rule of calls"), Column("runs", "runs"), Column("seconds", "seconds", 2)),
    ]
    return Table("novelty", f"Hidden classes, best AUROC first ({machine}).", columns, body, _NOTE)


def _by_class(rows: Sequence[Row], machine: str) -> Table:
    body = []
    for (data, labels, hidden), part in grouped(rows, "data", "labels", "hidden").items():
        by_method = {row["method"]: row["auroc"] for row in part if row["method"] in _BY_CLASS}
        about = {"data": data, "labels": labels, "hidden": hidden, "n_hidden": part[0]["n_hidden"]}
        body.append({**about, **by_method})
    body.sort(key=lambda row: _place(rows, row))
    columns = [
        *(Column("data", "table"), Column("labels", "labels"), Column("hidden", "hidden class")),
        *(Column("n_hidden", "hidden rows", 0), *(Column(name, name, 3) for name in _BY_CLASS)),
    ]
    return Table("novelty-classes", f"AUROC for each hidden class, means over seeds ({machine}).", columns, body)


def sentences(result: Row) -> Iterator[str]:
    """The default beside the best of the others in `_BY_CLASS`, for each table and number of labels."""
    for (data, labels), part in grouped(result["rows"], "data", "labels").items():
        by_method = {method: rows for (method,), rows in grouped(part, "method").items()}
        if DEFAULT not in by_method:
            continue
        rivals = [name for name in by_method if name in _BY_CLASS and name != DEFAULT]
        others = sorted(rivals, key=lambda name: -(_mean(by_method[name], "auroc") or 0))[:1]
        ours = by_method[DEFAULT]
        best = "".join(f" ({name} {_mean(by_method[name], 'auroc'):.3f})" for name in others)
        yield (
            f"Hidden classes of {data}, {labels} labels: diffusion has an AUROC of {_mean(ours, 'auroc'):.3f}{best}; "
            f"at an FDR of 10% it calls {_mean(ours, 'power'):.0%} of the hidden rows with an FDP of "
            f"{_mean(ours, 'fdp'):.1%}."
        )


def _place(rows: Sequence[Row], row: Row) -> int:
    """The position of a table and its number of labels among all."""
    pairs = sorted({(each["data"], each["labels"]) for each in rows}, key=lambda pair: (pair[0].lower(), pair[1]))
    return pairs.index((row["data"], row["labels"]))


def _mean(rows: Sequence[Row], key: str) -> Any:
    values = [row[key] for row in rows if row.get(key) is not None]
    return math.fsum(values) / len(values) if values else None


def _value(rows: Sequence[Row], key: str) -> Value | None:
    """The mean over classes with its standard error, from those of each class."""
    mean, errors = _mean(rows, key), [row[f"{key}_se"] for row in rows]
    if mean is None:
        return None
    whole = all(error is not None for error in errors)
    return Value(mean, math.sqrt(math.fsum(error**2 for error in errors)) / len(errors) if whole else None)
