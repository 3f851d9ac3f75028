"""The verdict on an annotation, in sentences that carry their numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from vaerdict.diagnostics import Verdict

_SHOWN = 3
_CLEAR = 0.5  # share of an absent type's cells that would be called: below, the type is not found reliably


def verdict(results: Mapping[str, Any], table: Any) -> dict[str, Any]:
    """The verdict and its messages; `results` as results.json holds them, `table` the cells."""
    batches = results["batches"]
    n_promised = sum(b["promised"] for b in batches)
    callable_ = any(b["promised"] and b["fewest"] <= b["n_cells"] for b in batches)
    word = Verdict.REFUSE if not n_promised else Verdict.OK if n_promised == len(batches) else Verdict.CAUTION
    word = Verdict.CAUTION if word == Verdict.OK and not callable_ else word
    messages = [_calls(table), *(_batch(b, results["settings"]) for b in batches), *_missed(results["types"])]
    return {"verdict": word.name, "messages": messages}


def _calls(table: Any) -> str:
    count = table["call"].value_counts()
    n = {call: int(count.get(call, 0)) for call in ("label", "novel", "undecided")}
    return (
        f"Of {len(table):,} cells {n['label']:,} have a label, {n['novel']:,} are novel, {n['undecided']:,} undecided."
    )


def _batch(batch: Mapping[str, Any], settings: Mapping[str, Any]) -> str:
    place = "" if batch["batch"] is None else f"Batch {batch['batch']}: "
    calibrated = "query cells of known type" if settings["calibration"] else "reference cells"
    if not batch["promised"]:
        return (
            f"{place}No rate can be stated for novel cells, and none is called: calibration cells ({calibrated}) and "
            f"query differ within types, or too few could be compared: {batch['message']} Labels are given with "
            "caution, because their probabilities were calibrated on the reference."
        )
    rate = f"an expected {settings['fdr']:.0%} of the cells called novel are false, at most"
    if batch["fewest"] > batch["n_cells"]:
        return (
            f"{place}No cell could have been called novel: with {batch['n_calibration']} calibration cells "
            f"{batch['fewest']:,} novel ones would be needed. More reference cells make it possible."
        )
    return (
        f"{place}{batch['n_novel']:,} cells are novel; {rate}, because {batch['n_calibration']:,} {calibrated} look "
        f"like the query within types ({batch['message'].rstrip('.')}). Fewer than {batch['fewest']:,} novel cells "
        "could not have been called."
    )


def _missed(types: Sequence[Mapping[str, Any]]) -> list[str]:
    """Which types would not have been found had they been absent from the reference."""
    audited = [t for t in types if "found" in t]
    if not audited:
        return []
    missed = sorted((t for t in audited if t["found"] < _CLEAR), key=lambda t: t["found"])
    share = f"{len(audited) - len(missed)} of {len(audited)} types of the reference would have been found"
    names = ", ".join(f"{t['type']} ({t['found']:.0%} of its {t['n_reference']:,} cells)" for t in missed[:_SHOWN])
    more = f" and {len(missed) - _SHOWN} more" if len(missed) > _SHOWN else ""
    return [f"{share} had they been absent{f'; not: {names}{more}' if missed else ''}."]
