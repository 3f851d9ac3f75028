"""Truth beside the answer: where the data were simulated, were the calls, the ranking and the intervals right?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from scipy import stats
from torch import Tensor

from vaerdict.de.metrics import coverage, fdr_curve, measure
from vaerdict.de.page import truth_plots as de_truth_plots
from vaerdict.de.page.messages import Answer, percent
from vaerdict.de.page.table import Genes
from vaerdict.de.verdict import BOTH, COUNTS, MODEL
from vaerdict.report.document import Picture
from vaerdict.report.summary import Row
from vaerdict.report.tables import Column, Table

REPORTED, PLAIN = "reported", "plain bootstrap"
OVERALL = "all contrasts"

_ADDED = {
    COUNTS: "What do dispersion and shrinkage add?",
    BOTH: "What do shrinkage and the model add?",
    MODEL: "What does the model add?",
}
_CHANCE = 0.05  # more false calls than chance gives in one of twenty lists are too many
_MOST = 0.8  # a share of the changed genes that is most of them
_CLOSE, _FAR = 0.05, 0.15  # shares by which intervals may miss their stated coverage: hardly, and by far


class Known(NamedTuple):
    """Genes whose true fold change is known, with what is reported of them and what a plain bootstrap says.

    Shapes: all ``(genes,)``; `raw` is missing where de.csv has no such columns.
    """

    truth: Tensor
    low: Tensor
    high: Tensor
    said: Said
    raw: Said | None


class Said(NamedTuple):
    """What a method says of the genes. Shapes: all ``(genes,)``."""

    lfc: Tensor
    prob: Tensor
    called: Tensor


class Score(NamedTuple):
    """How right a method was: calls, false ones, genes that do change, those found; ranking, error, coverage."""

    called: int
    false: int
    real: int
    found: int
    ranking: float | None
    error: float
    coverage: float | None

    @property
    def fdp(self) -> float:
        """The share of the calls that is false; of none, none."""
        return self.false / self.called if self.called else 0.0

    @property
    def tpr(self) -> float | None:
        """The share of the changed genes that is found."""
        return self.found / self.real if self.real else None


class Checked(NamedTuple):
    """The known genes of every contrast and of all together, at the delta, rate and interval that were asked for.

    `decided` says who decided the genes.
    """

    known: Mapping[str, Known]
    delta: float
    level: float | None
    interval: float | None
    decided: str = MODEL

    def score(self, name: str, method: str = REPORTED) -> Score | None:
        """The score of a method in a contrast; None where it said nothing."""
        known = self.known[name]
        said = known.said if method == REPORTED else known.raw
        if said is None or not len(known.truth):
            return None
        real = known.truth.abs() >= self.delta
        held = coverage(known.low, known.high, known.truth) if method == REPORTED else None
        return Score(
            int(said.called.sum()),
            int((said.called & ~real).sum()),
            int(real.sum()),
            int((said.called & real).sum()),
            measure(said.prob, said.lfc, known.truth, self.delta)["auprc"] if real.any() else None,
            (said.lfc - known.truth).abs().mean().item(),
            held,
        )


def checked(
    contrasts: Sequence[Row],
    genes: Mapping[str, Genes],
    truth: Mapping[str, Any],
    interval: float | None,
    decided: str,
) -> Checked | None:
    """Everything of which the truth is known, None without any; `truth` maps contrasts to genes to true LFCs."""
    known = {c["name"]: _known(genes[c["name"]], truth[c["name"]]) for c in contrasts if c["name"] in truth}
    if len(known) > 1:
        known[OVERALL] = _together(list(known.values()))
    first = contrasts[0]
    return Checked(known, first.get("delta") or 0.0, first.get("level"), interval, decided) if known else None


def _known(genes: Genes, truth: Mapping[str, float]) -> Known:
    has_raw = {"raw_lfc", "raw_prob_de", "raw_is_de"} <= genes.keys()
    numbers = ["lfc_mean", "lfc_low", "lfc_high", "prob_de", *(["raw_lfc", "raw_prob_de"] if has_raw else [])]
    place = [
        i for i, gene in enumerate(genes["gene"]) if gene in truth and all(genes[k][i] is not None for k in numbers)
    ]

    def pick(key: str) -> Tensor:
        return torch.tensor([float(genes[key][i] or 0) for i in place], dtype=torch.float64)

    def said(prefix: str, lfc: str) -> Said:
        return Said(pick(lfc), pick(f"{prefix}prob_de"), pick(f"{prefix}is_de") > 0)

    exact = torch.tensor([truth[genes["gene"][i]] for i in place], dtype=torch.float64)
    raw = said("raw_", "raw_lfc") if has_raw else None
    return Known(exact, pick("lfc_low"), pick("lfc_high"), said("", "lfc_mean"), raw)


def _together(parts: Sequence[Known]) -> Known:
    raws = [part.raw for part in parts if part.raw is not None]
    exact, low, high = (torch.cat(columns) for columns in zip(*(part[:3] for part in parts), strict=True))
    raw = _joined(raws) if len(raws) == len(parts) else None
    return Known(exact, low, high, _joined([part.said for part in parts]), raw)


def _joined(parts: Sequence[Said]) -> Said:
    return Said(*map(torch.cat, zip(*parts, strict=True)))


# ------------------------------------------------------------------------------------------------------ in words
def whole(found: Checked) -> str:
    """The name under which all genes stand."""
    return OVERALL if OVERALL in found.known else next(iter(found.known))


def sentences(found: Checked) -> list[str]:
    """What the truth says of the answer, the most important first."""
    score, raw = found.score(whole(found)), found.score(whole(found), PLAIN)
    if score is None:
        return []
    return [
        f"The data were simulated, so that the answer can be checked. {_rate(found, score)} {_recall(found, score)}",
        f"{_held(found, score)}{_beside(score, raw) if raw else ''}",
    ]


def truth_answers(found: Checked) -> list[Answer]:
    """The questions that only the truth answers."""
    score, raw = found.score(whole(found)), found.score(whole(found), PLAIN)
    if score is None:
        return []
    share = "There are none" if score.tpr is None else f"{percent(score.tpr)} of them"
    found_tone = "good" if (score.tpr or 0.0) >= _MOST else "open"
    cards = [
        Answer("Was the rate kept?", f"{percent(score.fdp)} are false", _rate(found, score), _rate_tone(found, score)),
        Answer("Were the changed genes found?", share, _recall(found, score), found_tone),
        Answer("Do the intervals hold the truth?", *_held_card(found, score)),
    ]
    if raw is not None:
        cards.append(Answer(_ADDED[found.decided], _gain(score, raw), _beside(score, raw).strip(), "open"))
    return cards


def _rate(found: Checked, score: Score) -> str:
    if not score.called:
        return "No gene is called, so that no call is false."
    said = f"{score.false:,} of {score.called:,} calls are false"
    if found.level is None:
        return f"{said}, {percent(score.fdp)}."
    tone = _rate_tone(found, score)
    judged = {
        "good": "the rate was kept",
        "open": "more than was asked for, but no more than chance explains",
        "bad": "more than chance explains",
    }[tone]
    return f"{said}, {percent(score.fdp)} where {percent(found.level)} was asked for: {judged}."


def _rate_tone(found: Checked, score: Score) -> str:
    """Calls are taken as independent, which makes chance look smaller than it is where contrasts share a group."""
    if found.level is None:
        return "open"
    if score.fdp <= found.level:
        return "good"
    return "open" if stats.binom.sf(score.false - 1, score.called, found.level) >= _CHANCE else "bad"


def _recall(found: Checked, score: Score) -> str:
    if not score.real:
        return f"No true change is as large as {found.delta:g}."
    return f"{score.found:,} of the {score.real:,} true changes of at least {found.delta:g} were found."


def _held_card(found: Checked, score: Score) -> tuple[str, str, str]:
    held, words = score.coverage or 0.0, _held(found, score)
    if found.interval is None:
        return f"{percent(held)} do", words, "open"
    lacking = found.interval - held
    return f"{percent(held)} do", words, "good" if lacking <= _CLOSE else "open" if lacking <= _FAR else "bad"


def _held(found: Checked, score: Score) -> str:
    held = score.coverage or 0.0
    if found.interval is None:
        return f"The intervals hold the truth for {percent(held)} of the genes."
    close = abs(held - found.interval) <= _CLOSE
    judged = "as stated" if close else "they are too narrow" if held < found.interval else "they are wide"
    return f"The {percent(found.interval)} intervals hold the truth for {percent(held)} of the genes: {judged}."


def _gain(score: Score, raw: Score) -> str:
    ratio = score.error / raw.error if raw.error else 1.0
    return "Smaller errors" if ratio < 0.95 else "Larger errors" if ratio > 1.05 else "As large errors"


def _beside(score: Score, raw: Score) -> str:
    return (
        f" Fold changes are off by {score.error:.3f} on average, those of a plain bootstrap of the raw counts by "
        f"{raw.error:.3f}; it calls {raw.called:,} genes, {percent(raw.fdp)} of them false, and finds {raw.found:,} of "
        "the true changes."
    )


# ------------------------------------------------------------------------------------------- tables and pictures
def truth_table(found: Checked) -> Table:
    """How right the list and a plain bootstrap were in every contrast."""
    columns = [
        Column("name", "contrast"),
        Column("method", "by"),
        Column("called", "genes called"),
        Column("false", "false"),
        Column("fdp", "false, %", 1, 100),
        Column("tpr", "found of the changed, %", 1, 100),
        Column("ranking", "average precision", 3),
        Column("error", "mean error of LFC", 3),
        Column("coverage", "intervals that hold the truth, %", 1, 100),
    ]
    scores = [(name, method, found.score(name, method)) for name in found.known for method in (REPORTED, PLAIN)]
    rows = [
        {"name": name, "method": method, **score._asdict(), "fdp": score.fdp, "tpr": score.tpr}
        for name, method, score in scores
        if score is not None
    ]
    asked = "" if found.level is None else f"The rate asked for was {percent(found.level)}, over all contrasts. "
    note = (
        f"{asked}A gene is changed if its true LFC is at least {found.delta:g} either way; average precision is 1 "
        "where all changed genes are ranked before all others. The plain bootstrap is one of the raw counts, without a "
        "law of their dispersion and without shrinkage."
    )
    return Table("truth", "The answer against the truth", columns, rows, note)


def pictures(found: Checked) -> list[Picture]:
    """Estimates with their intervals against the truth, and the rates achieved against the rates stated."""
    name = whole(found)
    known, score = found.known[name], found.score(name)
    if score is None:
        return []
    curves = {
        method: fdr_curve(said.prob, said.lfc, known.truth, found.delta, points=200)
        for method, said in ((REPORTED, known.said), (PLAIN, known.raw))
        if said is not None
    }
    where = f" ({name})" if len(found.known) > 1 else ""
    return [
        Picture(
            "truth",
            f"Estimated against true fold change of every gene{where}, with its interval. Dotted: delta.",
            f"Scatter of {len(known.truth)} estimated against true fold changes along the diagonal: {score.false} "
            f"false calls, {score.real - score.found} missed.",
            lambda: de_truth_plots.against_truth(known, found.delta),
        ),
        Picture(
            "rates",
            "False discovery rate achieved by the longer and longer lists, against the rate stated of them.",
            f"Curves of achieved against stated rates; the list at hand has {percent(score.fdp)} false calls.",
            lambda: de_truth_plots.rates(curves, found.level),
        ),
    ]
