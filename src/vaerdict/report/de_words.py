"""The verdict on a differential expression in words: may it be trusted, what was found, what to do next."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from vaerdict.report.de_table import Genes, called
from vaerdict.report.summary import Row


class Answer(NamedTuple):
    """A question that every reader has, its answer, what that means, and whether it is good news."""

    question: str
    answer: str
    meaning: str
    tone: str


class _Said(NamedTuple):
    headline: str
    answer: str
    meaning: str
    tone: str
    remedy: str = ""


_UNKNOWN = _Said("not examined", "Not examined", "This run holds no verdict on it.", "open")

_INFERENCE = {
    "certified": _Said(
        "the inference is certified",
        "Certified",
        "The importance weights passed their checks (k-hat, effective draws) in every group.",
        "good",
    ),
    "caution": _Said(
        "the inference calls for caution",
        "With caution",
        "In some groups the importance weights are near the limit of what can be relied on.",
        "open",
        "Look at the groups with k-hat above 0.7, and run again with more draws or more refinement.",
    ),
    "refused": _Said(
        "the inference is refused",
        "Refused",
        "The importance weights failed their checks: the probabilities here may be far off.",
        "bad",
        "Do not use the list as it is: run again with more training, more refinement or more draws.",
    ),
}

_MODEL = {
    "fits": _Said("the model fits", "It fits", "Counts drawn from the model look like the counts observed.", "good"),
    "doubtful": _Said(
        "the fit of the model is doubtful",
        "Doubtful",
        "Some features of the counts are not reproduced by the model.",
        "open",
        "Compare with the raw-count columns, and see the checks below for what the model misses.",
    ),
    "wrong": _Said(
        "the model does not fit",
        "It does not fit",
        "Counts drawn from the model do not look like the counts observed.",
        "bad",
        "Check that the input holds raw counts and that the batch key is right, then train longer.",
    ),
}

_COUNTS = {
    "agree": _Said("", "Yes", "What the model says of the groups is what their counts show.", "good"),
    "disagree": _Said(
        "",
        "No",
        "The counts of some genes show other changes than the model: for these they decided.",
        "open",
        "The counts do not bear the model out: look at the genes where its fold changes and the raw ones differ.",
    ),
}

_REPLICATES = {
    "samples": _Said(
        "samples are the replicates",
        "Samples",
        "The rates hold for new samples from the same population.",
        "good",
    ),
    "cells": _Said(
        "cells are the replicates",
        "Cells",
        "The rates hold for more cells of these samples, not for new donors or new experiments.",
        "open",
        "If the cells come from several donors, name their column with --sample-key.",
    ),
}


def answers(verdict: Row, contrasts: Sequence[Row], genes: Mapping[str, Genes]) -> list[Answer]:
    """The questions and their answers."""
    inference, model, replicates = _said(verdict)
    n, total = _found(contrasts, genes)
    found = f"{n:,} of {total:,}" if len(contrasts) == 1 else f"{n:,} calls in {len(contrasts)} contrasts"
    counts = _COUNTS.get(str(verdict.get("counts")))
    rate, trusted = _expected(contrasts), inference.tone == model.tone == "good"
    return [
        Answer("Can the inference be trusted?", *inference[1:4]),
        Answer("Does the model fit?", *model[1:4]),
        *([Answer("Do the counts bear it out?", *counts[1:4])] if counts else []),
        Answer("What are the replicates?", *replicates[1:4]),
        Answer("How many genes were found?", found, rate, "good" if n and trusted else "open"),
    ]


def headline(verdict: Row, contrasts: Sequence[Row], genes: Mapping[str, Genes]) -> str:
    """Everything that matters in one sentence."""
    parts = [words.headline if words is not _UNKNOWN else "" for words in _said(verdict)]
    n, total = _found(contrasts, genes)
    found = f"{n:,} of {total:,} genes are called{_at(contrasts)}"
    if len(contrasts) > 1:
        found = f"{n:,} calls are made on {total:,} genes in {len(contrasts)} contrasts{_at(contrasts)}"
    sentence = "; ".join([*filter(None, parts), found])
    return sentence[0].upper() + sentence[1:] + "."


def next_steps(verdict: Row, refits: int | None = None) -> str:
    """What a reader should do now; `refits` of the model may have let its own error into the rates, None if unknown."""
    inference, model, replicates = _said(verdict)
    remedies = [words.remedy for words in (inference, model, replicates) if words.remedy]
    if _UNKNOWN in (inference, model, replicates):
        remedies.append("Something was not examined in this run: see the cards below before using the list.")
    if verdict.get("counts") == "disagree":
        remedies.append(_COUNTS["disagree"].remedy)
    if refits == 0:
        remedies.insert(0, "Run with --refits 3, so that the rates and intervals allow for the model's own error.")
    if inference.tone == model.tone == "good":
        remedies.insert(0, "The list can be used " + ("as a first look." if refits == 0 else "at its stated rate."))
    return "What to do next: " + " ".join(remedies)


def percent(share: float) -> str:
    """A share as a percentage without needless zeros."""
    return f"{100 * share:.3g}%"


def _said(verdict: Row) -> tuple[_Said, _Said, _Said]:
    return (
        _INFERENCE.get(str(verdict.get("inference")), _UNKNOWN),
        _MODEL.get(str(verdict.get("model")), _UNKNOWN),
        _REPLICATES.get(str(verdict.get("replicates")), _UNKNOWN),
    )


def _found(contrasts: Sequence[Row], genes: Mapping[str, Genes]) -> tuple[int, int]:
    """Calls over all contrasts, and how many genes there are in the largest."""
    calls = sum(sum(map(bool, genes[c["name"]]["is_de"])) for c in contrasts)
    return calls, max(len(genes[c["name"]]["gene"]) for c in contrasts)


def _at(contrasts: Sequence[Row]) -> str:
    levels = {contrast.get("level") for contrast in contrasts}
    level = levels.pop() if len(levels) == 1 else None
    return "" if level is None else f" at a false discovery rate of {percent(level)}"


def _expected(contrasts: Sequence[Row]) -> str:
    rates = [c["expected_fdr"] for c in contrasts if c.get("expected_fdr") is not None]
    if not rates:
        return f"Called{_at(contrasts)}."
    said = percent(rates[0]) if len(rates) == 1 else f"{percent(min(rates))} to {percent(max(rates))}"
    return f"Called{_at(contrasts)}; the posterior expects {said} of a list to be wrong."


def shared(genes: Genes) -> tuple[int, int] | None:
    """How many genes the raw counts alone call, and how many of those the model calls too."""
    if "raw_is_de" not in genes:
        return None
    raw = called(genes, "raw_is_de")
    return len(raw), len(raw & called(genes))
