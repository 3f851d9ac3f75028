"""Answers against a known truth: where the data were simulated, were the calls, the ranking and the intervals right?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from scipy import stats
from torch import Tensor

from vaerdict.de.metrics import coverage, fdr_curve, measure
from vaerdict.de.page import figures
from vaerdict.de.page.genes import Genes
from vaerdict.de.page.live import Card
from vaerdict.report.document import Picture
from vaerdict.report.records import Row
from vaerdict.report.tables import Column, Table

OVERALL = "all contrasts"

_CHANCE = 0.05  # more false calls than chance gives in one of twenty lists are too many
_MOST = 0.8  # a share of the changed genes that is most of them
_CLOSE, _FAR = 0.05, 0.15  # differences between stated and achieved coverage


class KnownGenes(NamedTuple):
    """Genes whose true fold change is known, with what is reported of them. Shapes: all ``(genes,)``."""

    truth: Tensor
    lfc: Tensor
    low: Tensor
    high: Tensor
    prob: Tensor
    called: Tensor


class Score(NamedTuple):
    """Numbers of calls, of false calls, of changed genes and of those called; ranking, error of the LFC, coverage."""

    called: int
    false: int
    changed: int
    found: int
    ranking: float | None
    error: float
    coverage: float

    @property
    def fdp(self) -> float:
        """The share of false calls, zero without calls."""
        return self.false / self.called if self.called else 0.0

    @property
    def tpr(self) -> float | None:
        """The share of the changed genes that is called."""
        return self.found / self.changed if self.changed else None


class TruthCheck(NamedTuple):
    """The known genes of every contrast, and of all together; at the delta, level and interval of the run."""

    genes: Mapping[str, KnownGenes]
    delta: float
    level: float
    interval: float

    @property
    def overall(self) -> str:
        """The name under which all genes are."""
        return OVERALL if OVERALL in self.genes else next(iter(self.genes))

    def score(self, name: str) -> Score | None:
        """The score of the answer in a contrast; None where no gene has an answer."""
        genes = self.genes[name]
        if not len(genes.truth):
            return None
        real = genes.truth.abs() >= self.delta
        return Score(
            int(genes.called.sum()),
            int((genes.called & ~real).sum()),
            int(real.sum()),
            int((genes.called & real).sum()),
            measure(genes.prob, genes.lfc, genes.truth, self.delta)["auprc"] if real.any() else None,
            (genes.lfc - genes.truth).abs().mean().item(),
            coverage(genes.low, genes.high, genes.truth),
        )


def truth_check(
    contrasts: Sequence[Row], genes: Mapping[str, Genes], truth: Mapping[str, Any], interval: float
) -> TruthCheck | None:
    """The genes whose truth is known, None without any; `truth` maps contrasts to genes to true LFCs."""
    parts = {c["name"]: _known(genes[c["name"]], truth[c["name"]]) for c in contrasts if c["name"] in truth}
    if len(parts) > 1:
        parts[OVERALL] = KnownGenes._make(map(torch.cat, zip(*parts.values(), strict=True)))
    return TruthCheck(parts, contrasts[0]["delta"], contrasts[0]["level"], interval) if parts else None


def _known(genes: Genes, truth: Mapping[str, float]) -> KnownGenes:
    numbers = ["lfc_mean", "lfc_low", "lfc_high", "prob_de"]
    rows = [
        i for i, gene in enumerate(genes["gene"]) if gene in truth and all(genes[k][i] is not None for k in numbers)
    ]

    def pick(key: str) -> Tensor:
        return torch.tensor([float(genes[key][i] or 0) for i in rows], dtype=torch.float64)

    exact = torch.tensor([truth[genes["gene"][i]] for i in rows], dtype=torch.float64)
    return KnownGenes._make([exact, *map(pick, numbers), pick("is_de") > 0])


# ------------------------------------------------------------------------------------------------------ messages
def truth_messages(check: TruthCheck) -> list[str]:
    """How right the answer is, the most important first."""
    first, *rest = [card.meaning for card in truth_cards(check)] or [""]
    opening = "The data were simulated, so that the answer can be checked."
    return [f"{opening} {first} {rest[0]}", " ".join(rest[1:])] if rest else []


def truth_cards(check: TruthCheck) -> list[Card]:
    """The questions that only the truth answers."""
    score = check.score(check.overall)
    return [] if score is None else [_fdr_card(check, score), _recall_card(check, score), _coverage_card(check, score)]


def _fdr_card(check: TruthCheck, score: Score) -> Card:
    """Calls are taken as independent, which understates chance where contrasts share a group."""
    question, answer = "Was the FDR kept?", f"{percent(score.fdp)} are false"
    if not score.called:
        return Card(question, answer, "No gene is called, so that no call is false.", "good")
    if score.fdp <= check.level:
        tone, outcome = "good", "the FDR was kept"
    elif stats.binom.sf(score.false - 1, score.called, check.level) >= _CHANCE:
        tone, outcome = "open", "more than was asked for, but no more than chance explains"
    else:
        tone, outcome = "bad", "more than chance explains"
    rate = f"{score.false:,} of {score.called:,} calls are false, {percent(score.fdp)} where {percent(check.level)} was"
    return Card(question, answer, f"{rate} asked for: {outcome}.", tone)


def _recall_card(check: TruthCheck, score: Score) -> Card:
    question = "Were the changed genes found?"
    if score.tpr is None:
        return Card(question, "There are none", f"No true change is as large as {check.delta:g}.", "open")
    meaning = f"{score.found:,} of the {score.changed:,} true changes of at least {check.delta:g} were found."
    return Card(question, f"{percent(score.tpr)} of them", meaning, "good" if score.tpr >= _MOST else "open")


def _coverage_card(check: TruthCheck, score: Score) -> Card:
    covered, lacking = score.coverage, check.interval - score.coverage
    outcome = "as stated" if abs(lacking) <= _CLOSE else "they are too narrow" if lacking > 0 else "they are wide"
    meaning = f"The {percent(check.interval)} intervals cover the truth for {percent(covered)} of the genes: {outcome}."
    tone = "good" if lacking <= _CLOSE else "open" if lacking <= _FAR else "bad"
    return Card("Do the intervals cover the truth?", f"{percent(covered)} do", meaning, tone)


def percent(share: float) -> str:
    """A share as a percentage without needless zeros."""
    return f"{100 * share:.3g}%"


# ------------------------------------------------------------------------------------------- table and figures
def truth_table(check: TruthCheck) -> Table:
    """How right the list was in every contrast."""
    columns = [
        Column("name", "contrast"),
        Column("called", "genes called"),
        Column("false", "false"),
        Column("fdp", "false, %", 1, 100),
        Column("tpr", "changed genes found, %", 1, 100),
        Column("ranking", "average precision", 3),
        Column("error", "mean error of LFC", 3),
        Column("coverage", "intervals that cover the truth, %", 1, 100),
    ]
    scores = {name: check.score(name) for name in check.genes}
    rows = [
        {"name": name, **score._asdict(), "fdp": score.fdp, "tpr": score.tpr}
        for name, score in scores.items()
        if score is not None
    ]
    note = (
        f"The FDR asked for was {percent(check.level)}. A gene is changed if its true LFC is at "
        f"least {check.delta:g} either way; average precision is 1 where all changed genes are ranked first."
    )
    return Table("truth", "The answer against the truth", columns, rows, note)


def truth_pictures(check: TruthCheck) -> list[Picture]:
    """Estimates with their intervals against the truth, and achieved against stated false discovery rates."""
    genes, score = check.genes[check.overall], check.score(check.overall)
    if score is None:
        return []
    curve = fdr_curve(genes.prob, genes.lfc, genes.truth, check.delta, points=200)
    where = f" ({check.overall})" if len(check.genes) > 1 else ""
    return [
        Picture(
            "truth",
            f"Estimated against true fold change of every gene{where}, with its interval. Dotted: delta.",
            f"Scatter of {len(genes.truth)} estimated against true fold changes along the diagonal: {score.false} "
            f"false calls, {score.changed - score.found} missed.",
            lambda: figures.against_truth(genes, check.delta),
        ),
        Picture(
            "rates",
            "Achieved against stated FDR of lists of increasing length.",
            f"Curve of achieved against stated FDR; the reported list has {percent(score.fdp)} false calls.",
            lambda: figures.achieved_fdr(curve, check.level),
        ),
    ]
