"""The verdict on an annotation, in sentences that carry their numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from vaerdict.diagnostics import Verdict
from vaerdict.selective.gate import MIN_ROWS

CLEAR = 0.5
"""Least share of an absent type's cells that are called novel in the audit, where the type counts as found."""

_SHOWN = 3

Record = Mapping[str, Any]


def verdict(results: Record, table: Any) -> dict[str, Any]:
    """The verdict and its messages; `results` as results.json holds them, `table` the cells."""
    batches = results["batches"]
    n_promised = sum(b["promised"] for b in batches)
    callable_ = any(b["promised"] and b["callable"] for b in batches)
    word = Verdict.REFUSE if not n_promised else Verdict.OK if n_promised == len(batches) else Verdict.CAUTION
    word = Verdict.CAUTION if word == Verdict.OK and not callable_ else word
    messages = [_calls(table), *(batch_message(b, results["settings"]) for b in batches), *_missed(results["types"])]
    return {"verdict": word.name, "messages": messages}


def _calls(table: Any) -> str:
    count = table["call"].value_counts()
    n = {call: int(count.get(call, 0)) for call in ("label", "novel", "undecided")}
    return (
        f"Of {len(table):,} cells {n['label']:,} have a label, {n['novel']:,} are novel, {n['undecided']:,} undecided."
    )


def batch_message(batch: Record, settings: Record) -> str:
    """Whether a rate is stated for the novel cells of a batch of the query, and why."""
    place = "" if batch["batch"] is None else f"Batch {batch['batch']}: "
    calibrating = "query cells of known type" if settings["calibration"] else "reference cells"
    if not batch["promised"]:
        remedy = (
            ""
            if settings["calibration"]
            else " With query cells of known type (calibration=COLUMN) a rate may be stated."
        )
        return (
            f"{place}No rate is stated for novel cells, and none is called: {comparison(batch, calibrating)}. Labels "
            f"are given with caution, because their probabilities were calibrated on the reference.{remedy}"
        )
    if not batch["callable"]:
        return (
            f"{place}No cell could have been called novel: with {batch['n_calibration']} calibration cells "
            f"{batch['fewest']:,} novel ones would be needed. More calibration cells make it possible."
        )
    return (
        f"{place}{counted(batch['n_novel'])} called novel at a false discovery rate of {settings['fdr']:.0%}: "
        f"{comparison(batch, calibrating)}. Fewer than {batch['fewest']:,} novel cells could not have been called."
    )


def counted(n: int) -> str:
    """Number of cells as the subject of a sentence."""
    return "No cell is" if n == 0 else "1 cell is" if n == 1 else f"{n:,} cells are"


def comparison(batch: Record, calibrating: str) -> str:
    """What the test of exchangeability found, and in which types the difference is largest."""
    tested = sorted((t for t in batch["types"] if _is_number(t["auroc"])), key=lambda t: -t["auroc"])
    if not tested:
        return (
            f"no type has {MIN_ROWS} cells among both the {calibrating} and the query, so that they cannot be compared"
        )
    largest = ", ".join(f"{t['type']} {t['auroc']:.2f}" for t in tested[:_SHOWN])
    numbers = f"median AUROC {batch['median_auroc']:.2f} over {len(tested)} types, p = {batch['p_value']:.2g}"
    if batch["promised"]:
        return f"{batch['n_calibration']:,} {calibrating} look like the query within types ({numbers})"
    return f"{calibrating} and query differ within types ({numbers}; largest: {largest})"


def _is_number(value: float | None) -> bool:
    return value is not None and value == value


def _missed(types: Sequence[Record]) -> list[str]:
    """Which types would not have been found had they been absent from the reference."""
    audited = [t for t in types if "found" in t]
    if not audited:
        return []
    missed = sorted((t for t in audited if t["found"] < CLEAR), key=lambda t: t["found"])
    share = f"{len(audited) - len(missed)} of {len(audited)} types of the reference would have been found"
    names = ", ".join(f"{t['type']} ({t['found']:.0%} of its {t['n_reference']:,} cells)" for t in missed[:_SHOWN])
    more = f" and {len(missed) - _SHOWN} more" if len(missed) > _SHOWN else ""
    return [f"{share} had they been absent{f'; not: {names}{more}' if missed else ''}."]
