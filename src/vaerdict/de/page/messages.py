"""The verdict on a differential expression in words: what does the list rest on, what was found, what to do next."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from vaerdict.de.page.table import Genes, called
from vaerdict.de.verdict import BOTH, COUNTS, FEW, MODEL
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

_DECIDED = {
    COUNTS: _Said(
        "the counts decided every gene",
        "The counts",
        "Every gene is judged by the counts of both groups and their spread, shrunk by what all genes show. The model "
        "is a second opinion.",
        "good",
    ),
    BOTH: _Said(
        "the model decided {share} of the genes, their counts the others",
        "The model for {share}",
        "The model, which learned from cells without a label too, decided where it is narrower than the counts and "
        "they do not contradict it; the counts decided the others.",
        "open",
        "What the model decided holds if the cells without a label are of the kinds compared; without --borrow the "
        "counts decide every gene.",
    ),
    MODEL: _Said(
        "",
        "The model",
        "Every gene is judged by the model alone: the list rests on its inference and on its fit.",
        "open",
    ),
}

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
        "The importance weights failed their checks: what the model says of the genes may be far off.",
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
        "See the checks below for what the model misses before using what it decided.",
    ),
    "wrong": _Said(
        "the model does not fit",
        "It does not fit",
        "Counts drawn from the model do not look like the counts observed.",
        "bad",
        "Check that the input holds raw counts and that the batch key is right, then train longer.",
    ),
}

# Where the counts decided every gene these two are said of the second opinion and of the latents alone.
_ASIDE_INFERENCE = {
    "certified": _INFERENCE["certified"]._replace(
        meaning="The model's importance weights passed their checks: its latents and fold changes are what it says. "
        "The list does not rest on it."
    ),
    "caution": _INFERENCE["caution"]._replace(
        meaning="In some groups the model's importance weights are near the limit. The list does not rest on them.",
        remedy="Take the model's latents and fold changes with care in groups with k-hat above 0.7.",
    ),
    "refused": _INFERENCE["refused"]._replace(
        meaning="The model's importance weights failed their checks: its latents and fold changes may be far off. The "
        "list does not rest on them.",
        remedy="Do not use the model's latents and fold changes (model_lfc): run again with more training or more "
        "draws to have them. The list stands without them.",
    ),
}
_ASIDE_MODEL = {
    "fits": _MODEL["fits"],
    "doubtful": _MODEL["doubtful"]._replace(
        meaning="Some features of the counts are not reproduced by the model. The list does not rest on it.",
        remedy="See the checks below for what the model misses before using its latents.",
    ),
    "wrong": _MODEL["wrong"]._replace(
        meaning="Counts drawn from the model do not look like the counts observed. The list does not rest on it.",
        remedy="The model does not fit, which counts that are not raw may cause, and these would spoil the list too: "
        "check that the input holds raw counts and that the batch key is right.",
    ),
}

_AGREE = {
    COUNTS: _Said("", "Yes", "The model, a second opinion, says of the groups what their counts show.", "good"),
    BOTH: _Said("", "Yes", "What the model says of the groups is what their counts show.", "good"),
}
_DISAGREE = {
    COUNTS: _Said(
        "",
        "No",
        "In some contrast the counts of more than a tenth of the genes contradict the model. The list follows the "
        "counts.",
        "open",
        "Look at the genes whose lfc_mean and model_lfc differ: do not read such changes off the model's latents.",
    ),
    BOTH: _Said(
        "",
        "No",
        "In some contrast the counts of more than a tenth of the genes contradict the model: there the counts decided "
        "all.",
        "open",
        "The counts do not bear the model out: look at the genes whose lfc_mean and model_lfc differ.",
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

_USE, _FIRST_LOOK = "The list can be used at its stated rate.", "The list can be used as a first look."
_SEE = "Something was not examined in this run: see the cards below before using the list."
_REFITS = "Run with --refits 3, so that what the model decided allows for its own error."
_BATCHES = "If the groups were measured in different batches, name their column with --batch-key."
_CALIBRATE = "How far the rates hold on these data is what `vaerdict calibrate` measures."


def answers(verdict: Row, contrasts: Sequence[Row], genes: Mapping[str, Genes], decided: str = MODEL) -> list[Answer]:
    """The questions and their answers, what the list rests on first; `decided` says who decided the genes."""
    inference, model, replicates = _said(verdict, decided)
    n, total = _found(contrasts, genes)
    found = f"{n:,} of {total:,}" if len(contrasts) == 1 else f"{n:,} calls in {len(contrasts)} contrasts"
    tone = "good" if n and _sound(verdict, decided) and verdict.get("size") != "few" else "open"
    who, agrees = _who(contrasts, decided), _agrees(verdict, decided)
    list_cards = [
        Answer("What are the replicates?", *_replicates(verdict, replicates)[1:4]),
        Answer("How many genes were found?", found, _expected(contrasts), tone),
    ]
    its = "the model's" if decided == COUNTS else "the"
    model_cards = [
        Answer(f"Can {its} inference be trusted?", *inference[1:4]),
        Answer("Does the model fit?", *model[1:4]),
        *([Answer("Do the counts bear the model out?", *agrees[1:4])] if agrees else []),
    ]
    order = [*list_cards, *reversed(model_cards)] if decided == COUNTS else [*model_cards, *list_cards]
    return [Answer("Who decided the genes?", *who[1:4]), *order]


def headline(verdict: Row, contrasts: Sequence[Row], genes: Mapping[str, Genes], decided: str = MODEL) -> str:
    """Everything that the list rests on in one sentence."""
    inference, model, replicates = _said(verdict, decided)
    on_model = [] if decided == COUNTS else [inference, model]
    rests = [_who(contrasts, decided), *on_model, replicates]
    parts = [words.headline for words in rests if words is not _UNKNOWN]
    n, total = _found(contrasts, genes)
    found = f"{n:,} of {total:,} genes are called{_at(contrasts)}"
    if len(contrasts) > 1:
        found = f"{n:,} calls are made on {total:,} genes in {len(contrasts)} contrasts{_at(contrasts)}"
    sentence = "; ".join([*filter(None, parts), found])
    return sentence[0].upper() + sentence[1:] + "."


def next_steps(verdict: Row, decided: str = MODEL, *, refits: int | None = None, batches: bool = True) -> str:
    """What a reader should do now.

    `refits` of the model may have let its own error into what it decided, None if unknown; `batches` says whether the
    counts were compared within batches.
    """
    inference, model, replicates = said = _said(verdict, decided)
    agrees, sound, unfit = _agrees(verdict, decided), _sound(verdict, decided), decided != COUNTS and refits == 0
    on_list = [replicates.remedy, "" if batches else _BATCHES, _CALIBRATE if decided == COUNTS else ""]
    on_model = [
        _REFITS if unfit else "",
        inference.remedy,
        model.remedy,
        _DECIDED[decided].remedy,
        agrees.remedy if agrees else "",
    ]
    use = _FIRST_LOOK if unfit or verdict.get("size") == "few" else _USE
    steps = [use if sound else "", *([*on_list, *on_model] if decided == COUNTS else [*on_model, *on_list])]
    steps.append(_SEE if _UNKNOWN in said else "")
    return "What to do next: " + " ".join(filter(None, steps))


def percent(share: float) -> str:
    """A share as a percentage without needless zeros."""
    return f"{100 * share:.3g}%"


def _said(verdict: Row, decided: str) -> tuple[_Said, _Said, _Said]:
    inference, model = (_ASIDE_INFERENCE, _ASIDE_MODEL) if decided == COUNTS else (_INFERENCE, _MODEL)
    return (
        inference.get(str(verdict.get("inference")), _UNKNOWN),
        model.get(str(verdict.get("model")), _UNKNOWN),
        _REPLICATES.get(str(verdict.get("replicates")), _UNKNOWN),
    )


def _who(contrasts: Sequence[Row], decided: str) -> _Said:
    """Who decided, with the largest share of the model's."""
    share = max((c.get("by_model") or 0.0 for c in contrasts), default=0.0)
    words = f"{'up to ' if len(contrasts) > 1 else ''}{share:.0%}"
    said = _DECIDED[decided]
    return said._replace(headline=said.headline.format(share=words), answer=said.answer.format(share=words))


def _agrees(verdict: Row, decided: str) -> _Said | None:
    """Whether counts and model agree, where that was looked at."""
    word = verdict.get("counts")
    return _AGREE.get(decided) if word == "agree" else _DISAGREE.get(decided) if word == "disagree" else None


def _replicates(verdict: Row, said: _Said) -> _Said:
    """The replicates, with a warning where they are few."""
    units = str(verdict.get("replicates"))
    if verdict.get("size") != "few" or units not in FEW:
        return said
    few = f"A group has fewer than {FEW[units]}: their spread is known roughly."
    return said._replace(answer=f"{said.answer}, and few", meaning=f"{said.meaning} {few}", tone="open")


def _sound(verdict: Row, decided: str) -> bool:
    """Whether what the list rests on is in order: the model where it decided any gene, else nothing that is checked."""
    inference, model, replicates = _said(verdict, decided)
    return replicates is not _UNKNOWN if decided == COUNTS else inference.tone == model.tone == "good"


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
    """How many genes a plain bootstrap of the raw counts calls, and how many of those are reported too."""
    if "raw_is_de" not in genes:
        return None
    raw = called(genes, "raw_is_de")
    return len(raw), len(raw & called(genes))
