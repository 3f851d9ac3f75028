"""In words: can the inference be trusted, does the model fit, and what are the replicates."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from vaerdict.de.anchored import MOST_MISSED
from vaerdict.de.compare import Support

_CERTIFIED, _CAUTION = 0.95, 0.8  # shares of a group's cells whose weights are in order

_LEFT_OUT = (
    "The model's own error is not in the intervals (no refits): read them as too narrow, the more so the more cells."
)
_WITH_REFITS = (
    "Intervals hold the uncertainty of the posterior, of the {units} and, by {n} refits, of the model; few refits show "
    "that last part roughly."
)
_BY_COUNTS = "Intervals hold the spread of the counts between {units}, and what all genes show together."
_FEW = 0.01  # share of genes the model may decide before its error matters

CELLS = (
    "Cells are treated as replicates: the FDR is about these individuals' cells, not about other individuals; name the "
    "column of samples (sample_key) to compare samples."
)


def verdict(
    supports: Mapping[str, Support],
    checks: Sequence[Mapping[str, Any]],
    contrasts: Sequence[Mapping[str, Any]],
    *,
    samples: bool,
    refits: int,
) -> dict[str, Any]:
    """The three verdicts and their words, the most important first."""
    inference, fit, counts = _inference(supports), _fit(checks), _borne_out(contrasts)
    return {
        "inference": inference[0],
        "model": fit[0],
        "counts": counts[0],
        "replicates": "samples" if samples else "cells",
        "words": [
            _found(contrasts),
            inference[1],
            fit[1],
            *counts[1],
            _error(contrasts, "samples" if samples else "cells", refits),
            "Samples are the replicates: the error is that between samples." if samples else CELLS,
        ],
    }


def _error(contrasts: Sequence[Mapping[str, Any]], units: str, refits: int) -> str:
    """What the intervals hold: where the counts decided it is no error of the model's."""
    decided = [c.get("by_model") for c in contrasts]
    if all(share is not None and share < _FEW for share in decided):
        return _BY_COUNTS.format(units=units)
    return _WITH_REFITS.format(units=units, n=refits) if refits else _LEFT_OUT


def _found(contrasts: Sequence[Mapping[str, Any]]) -> str:
    n, first = sum(c["n_discoveries"] for c in contrasts), contrasts[0]
    where = first["name"] if len(contrasts) == 1 else f"{len(contrasts)} contrasts"
    return (
        f"{n} genes are called in {where} at an expected FDR of {first['level']:g}, |LFC| at least {first['delta']:g}."
    )


def _borne_out(contrasts: Sequence[Mapping[str, Any]]) -> tuple[str | None, list[str]]:
    """Whether the counts show what the model says of the groups, in the contrast that it says least of."""
    known = [c for c in contrasts if c.get("missed") is not None]
    if not known:
        return None, []
    worst = max(known, key=lambda c: c["missed"])
    place = "" if len(contrasts) == 1 else f" (in {worst['name']}, the worst contrast)"
    decided = f"the model decided {worst['by_model']:.0%} of the genes, their counts the others"
    if worst["missed"] <= MOST_MISSED:
        return "agree", [f"The counts bear the model out{place}; {decided}."]
    return "disagree", [f"The counts of {worst['missed']:.0%} of the genes differ from the model{place}; {decided}."]


def _inference(supports: Mapping[str, Support]) -> tuple[str, str]:
    name, worst = min(supports.items(), key=lambda item: item[1].share_ok)
    share = f"{worst.share_ok:.0%} of the cells of the worst group ({name})"
    words = f"{share} were sampled well, median k-hat {worst.khat:.2f}"
    if worst.share_ok >= _CERTIFIED:
        return "certified", f"The inference is certified: {words}."
    if worst.share_ok >= _CAUTION:
        return "caution", f"The inference asks for caution: {words}."
    return "refused", f"The inference is not to be trusted: only {words}."


def _fit(checks: Sequence[Mapping[str, Any]]) -> tuple[str, str]:
    bad = [check["name"] for check in checks if not check["ok"]]
    if not bad:
        return "fits", "The model fits: it predicts the zeros, the variance and the libraries of the data."
    state = "doubtful" if len(bad) == 1 else "wrong"
    return state, f"The model is {state}: it does not predict the {' and the '.join(bad)} of the data."
