"""In words: who decided the genes, can that be relied on, and what does the model say to it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from vaerdict.de.compare import Support
from vaerdict.de.shrinkage import MOST_MISSED

COUNTS, BOTH, MODEL = "counts", "both", "model"
"""Who decided the genes: the counts all of them, the model all of them, or each of both some."""

FEW = {"cells": 20, "samples": 3}
"""With fewer replicates in a group their spread is known too roughly for more than a first look."""

_CERTIFIED, _CAUTION = 0.95, 0.8  # shares of a group's cells whose weights are in order

_BY_COUNTS = (
    "The counts decided every gene: intervals hold their spread between {units}, and are shrunk by what all genes show."
)
_LEFT_OUT = "The model's own error is not in the intervals{of} (no refits): read them as too narrow."
_WITH_REFITS = (
    "Intervals{of} hold the uncertainty of the posterior, of the {units} and, by {n} refits, of the model; few refits "
    "show that last part roughly."
)
_TAKEN = "Cells without a label, from which the model learned too, are taken to be of the kinds compared (borrow)."
_OF_MODEL = " of the genes that the model decided"

CELLS = (
    "Cells are treated as replicates: the FDR is about these individuals' cells, not about other individuals; name the "
    "column of samples (sample_key) to compare samples."
)
_SAMPLES = "Samples are the replicates: the error is that between samples."


def decided_by(contrasts: Sequence[Mapping[str, Any]], role: str | None = None) -> str:
    """Who decided the genes of all contrasts, by the share of the model's; without one the model decided all.

    `role` is what the model was for, None where a run does not say: one that only checks decided none.
    """
    shares = [contrast.get("by_model") for contrast in contrasts]
    if role == "checks":
        return COUNTS
    return MODEL if None in shares else BOTH if any(shares) else COUNTS


def verdict(
    supports: Mapping[str, Support],
    checks: Sequence[Mapping[str, Any]],
    contrasts: Sequence[Mapping[str, Any]],
    *,
    samples: bool,
    refits: int,
) -> dict[str, Any]:
    """The verdicts and their words, those the list rests on first."""
    decided, units = decided_by(contrasts), "samples" if samples else "cells"
    inference, fit, counts = _inference(supports, decided), _fit(checks, decided), _borne_out(contrasts, decided)
    size = _size(contrasts, units)
    replicates = _SAMPLES if samples else CELLS
    if decided == COUNTS:
        said = [_BY_COUNTS.format(units=units), *size[1], replicates, *counts[1], inference[1], fit[1]]
    else:
        taken = [_TAKEN] if decided == BOTH else []
        said = [inference[1], fit[1], *counts[1], *taken, _error(decided, units, refits), *size[1], replicates]
    return {
        "decided_by": decided,
        "size": size[0],
        "inference": inference[0],
        "model": fit[0],
        "counts": counts[0],
        "replicates": units,
        "words": [_found(contrasts), *said],
    }


def _found(contrasts: Sequence[Mapping[str, Any]]) -> str:
    n, first = sum(c["n_discoveries"] for c in contrasts), contrasts[0]
    several = f"{n} calls are made in {len(contrasts)} contrasts"
    what = f"{n} genes are called in {first['name']}" if len(contrasts) == 1 else several
    return f"{what} at an expected FDR of {first['level']:g}, |LFC| at least {first['delta']:g}."


def _size(contrasts: Sequence[Mapping[str, Any]], units: str) -> tuple[str, list[str]]:
    """Whether every group has replicates enough to know their spread."""
    keys = [(c, side, f"n_{units}_{side}") for c in contrasts for side in "ab"]
    n, name = min((c.get(f"{key}_used", c[key]), c[f"group_{side}"]) for c, side, key in keys)
    if n >= FEW[units]:
        return "enough", []
    return "few", [f"Only {n} {units} are of {name}: their spread is known roughly, and the rates are a first look."]


def _error(decided: str, units: str, refits: int) -> str:
    """What the intervals of the model hold."""
    of = _OF_MODEL if decided == BOTH else ""
    return _WITH_REFITS.format(of=of, units=units, n=refits) if refits else _LEFT_OUT.format(of=of)


def _borne_out(contrasts: Sequence[Mapping[str, Any]], decided: str) -> tuple[str | None, list[str]]:
    """Whether the counts show what the model says of the groups, in the contrast where they do least."""
    known = [c for c in contrasts if c.get("missed") is not None]
    if not known:
        return None, []
    worst = max(known, key=lambda c: c["missed"])
    agree = worst["missed"] <= MOST_MISSED
    place = "" if len(contrasts) == 1 else f" (in {worst['name']}, the worst contrast)"
    said = f"The counts of {worst['missed']:.0%} of the genes contradict the model{place}"
    if decided == COUNTS:
        meant = "as a second opinion it agrees" if agree else "its latents and fold changes miss what differs there"
    else:
        meant = f"it decided {worst['by_model']:.0%} of the genes, their counts the others"
    return "agree" if agree else "disagree", [f"{said}; {meant}."]


def _inference(supports: Mapping[str, Support], decided: str) -> tuple[str, str]:
    name, worst = min(supports.items(), key=lambda item: item[1].share_ok)
    share = f"{worst.share_ok:.0%} of the cells of the worst group ({name})"
    words = f"{share} were sampled well, median k-hat {worst.khat:.2f}"
    what = "The inference of the model" if decided == COUNTS else "The inference"
    if worst.share_ok >= _CERTIFIED:
        return "certified", f"{what} is certified: {words}."
    if worst.share_ok >= _CAUTION:
        return "caution", f"{what} asks for caution: {words}."
    return "refused", f"{what} is not to be trusted: only {words}{_aside(decided)}."


def _aside(decided: str) -> str:
    return "; the list does not rest on it" if decided == COUNTS else ""


def _fit(checks: Sequence[Mapping[str, Any]], decided: str) -> tuple[str, str]:
    bad = [check["name"] for check in checks if not check["ok"]]
    if not bad:
        return "fits", "The model fits: it predicts the zeros, the variance and the libraries of the data."
    state = "doubtful" if len(bad) == 1 else "wrong"
    return state, f"The model is {state}: it does not predict the {' and the '.join(bad)} of the data{_aside(decided)}."
