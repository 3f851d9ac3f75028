"""Means and paired differences over seeds, from result rows."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from vaerdict.core import DataError

Row = Mapping[str, Any]
"""One record of a result file."""


class Summary(NamedTuple):
    """Mean and standard deviation of n values; `missing` counts those that were not finite."""

    mean: float
    sd: float | None
    n: int
    missing: int = 0

    @property
    def se(self) -> float | None:
        """Standard error of the mean, none for a single value."""
        return None if self.sd is None else self.sd / math.sqrt(self.n)


def summarise(values: Iterable[float | None]) -> Summary | None:
    """Summarise what is finite of some values; None if nothing is."""
    every = list(values)
    finite = [float(v) for v in every if v is not None and math.isfinite(v)]
    if not finite:
        return None
    n, mean = len(finite), math.fsum(finite) / len(finite)
    sd = math.sqrt(math.fsum((v - mean) ** 2 for v in finite) / (n - 1)) if n > 1 else None
    return Summary(mean, sd, n, len(every) - n)


def where(rows: Iterable[Row], **values: Any) -> list[Row]:
    """The rows that have all of these values; a tuple allows any of its members."""
    return [row for row in rows if all(_matches(row.get(key), value) for key, value in values.items())]


def _matches(found: Any, wanted: Any) -> bool:
    return found in wanted if isinstance(wanted, tuple) else found == wanted


def grouped(rows: Iterable[Row], *keys: str) -> dict[tuple[Any, ...], list[Row]]:
    """Rows by their values of `keys`, in order of first appearance."""
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault(tuple(row.get(key) for key in keys), []).append(row)
    return groups


def mean_of(rows: Iterable[Row], key: str) -> Summary | None:
    """`key` over seeds: first the mean within each seed, then the summary of those means."""
    rows = list(rows)
    missing = sum(row.get(key) is None for row in rows)
    summary = summarise(by_seed(rows, key).values())
    return None if summary is None else summary._replace(missing=missing)


def by_seed(rows: Iterable[Row], key: str) -> dict[Any, float]:
    """The mean of `key` within each seed, for seeds that have any."""
    means = {seed: summarise(row.get(key) for row in part) for (seed,), part in grouped(rows, "seed").items()}
    return {seed: mean.mean for seed, mean in means.items() if mean is not None}


def difference(a: Mapping[Any, float], b: Mapping[Any, float]) -> Summary | None:
    """The paired difference a - b over the seeds that both have."""
    return summarise(a[seed] - b[seed] for seed in a if seed in b)


def rows_of(results: Row, name: str, *required: str) -> list[Row]:
    """The list of rows called `name`, empty where there is none, each with the required keys."""
    rows = results.get(name, [])
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise DataError(f"{name!r} in results.json is not a list of records; the file was not written by this program.")
    for index, row in enumerate(rows):
        absent = [key for key in required if key not in row]
        if absent:
            raise DataError(
                f"record {index} of {name!r} in results.json lacks {', '.join(absent)}; run the experiment again."
            )
    return rows


def seeds_of(rows: Iterable[Row]) -> str:
    """How many seeds the rows have, in words."""
    n = len({row["seed"] for row in rows})
    return f"{n} seeds" if n > 1 else "one seed"


def in_order(names: Iterable[str], order: Sequence[str]) -> list[str]:
    """The names in the given order, then any others as they come."""
    present = list(dict.fromkeys(names))
    return [name for name in order if name in present] + [name for name in present if name not in order]


def number(value: float, digits: int, *, signed: bool = False) -> str:
    """A number in print, with a true minus sign."""
    return f"{value:{'+' if signed else ''}.{digits}f}".replace("-", "\N{MINUS SIGN}")
