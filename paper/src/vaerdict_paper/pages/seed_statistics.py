"""Means and paired differences over seeds, from result rows."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from vaerdict.report.records import Row, grouped
from vaerdict.report.tables import Column, Value

BySeed = Mapping[Any, float]
"""A number for each seed."""


_ROUNDING = 1e-9  # values closer than this are equal: their difference is that of their last digits


class Summary(NamedTuple):
    """Mean and standard deviation of n values; `missing` counts those that were None or not finite."""

    mean: float
    sd: float | None
    n: int
    missing: int = 0

    @property
    def se(self) -> float | None:
        """Standard error of the mean, None for a single value."""
        return None if self.sd is None else self.sd / math.sqrt(self.n)


def summarise(values: Iterable[float | None]) -> Summary | None:
    """Summarise the finite ones among the values; None if there are none."""
    values = list(values)
    finite = [float(v) for v in values if v is not None and math.isfinite(v)]
    if not finite:
        return None
    n, missing = len(finite), len(values) - len(finite)
    if n > 1 and max(finite) - min(finite) <= _ROUNDING * max(1.0, *map(abs, finite)):
        return Summary(finite[0], 0.0, n, missing)
    mean = math.fsum(finite) / n
    sd = math.sqrt(math.fsum((v - mean) ** 2 for v in finite) / (n - 1)) if n > 1 else None
    return Summary(mean, sd, n, missing)


def where(rows: Iterable[Row], **values: Any) -> list[Row]:
    """The rows that have all of these values; a tuple matches any of its members."""
    return [row for row in rows if all(_matches(row.get(key), value) for key, value in values.items())]


def _matches(value: Any, wanted: Any) -> bool:
    return value in wanted if isinstance(wanted, tuple) else value == wanted


def by_seed(rows: Iterable[Row], key: str) -> dict[Any, float]:
    """The mean of `key` within each seed that has it, NaN where a value is not finite: claims are then left undecided.

    Files store numbers that are not finite as None.
    """
    means = _within_seeds(rows, key)
    return {seed: math.nan if mean is None or mean.missing else mean.mean for seed, mean in means.items()}


def _within_seeds(rows: Iterable[Row], key: str) -> dict[Any, Summary | None]:
    """A summary of the values of `key` within each seed that has any."""
    by = {seed: [row[key] for row in part if key in row] for (seed,), part in grouped(rows, "seed").items()}
    return {seed: summarise(values) for seed, values in by.items() if values}


def mean_of(rows: Iterable[Row], key: str) -> Summary | None:
    """The mean of finite values of `key`: first within each seed, then over the seeds; `missing` counts rows."""
    rows = [row for row in rows if key in row]
    missing = sum(row[key] is None or not math.isfinite(row[key]) for row in rows)
    summary = summarise(mean and mean.mean for mean in _within_seeds(rows, key).values())
    return None if summary is None else summary._replace(missing=missing)


def difference(a: BySeed, b: BySeed) -> Summary | None:
    """The paired difference a - b over the seeds that both have."""
    return summarise(a[seed] - b[seed] for seed in a if seed in b)


def minus(values: BySeed, level: float) -> Summary | None:
    """The difference of values from a fixed level."""
    return summarise(value - level for value in values.values())


def counts_of(rows: Iterable[Row], key: str) -> int | str | None:
    """The number that all rows share, or the distinct ones as text; None if no row has any."""
    counts = sorted({int(row[key]) for row in rows if row.get(key) is not None})
    return " or ".join(map(str, counts)) if len(counts) > 1 else next(iter(counts), None)


def seed_count(rows: Iterable[Row]) -> str:
    """The number of seeds that the rows have, as text."""
    n = len({row["seed"] for row in rows})
    return f"{n} seeds" if n > 1 else "one seed"


def ordered(names: Iterable[str], order: Sequence[str]) -> list[str]:
    """Distinct names in the given order, then any others as they come."""
    present = list(dict.fromkeys(names))
    return [name for name in order if name in present] + [name for name in present if name not in order]


def cell(summary: Summary | None) -> Value | None:
    """Mean ± standard deviation as a table cell, with the count where some values were missing."""
    if summary is None:
        return None
    remark = f" ({summary.missing} missing)" if summary.missing else ""
    return Value(summary.mean, summary.sd, remark)


def cells(rows: Sequence[Row], columns: Iterable[Column]) -> dict[str, Value | None]:
    """The means over seeds of every column's key, as cells of one table row."""
    return {column.key: cell(mean_of(rows, column.key)) for column in columns}
