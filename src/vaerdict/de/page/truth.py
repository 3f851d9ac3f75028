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
from vaerdict.de.page.tables import NAIVE
from vaerdict.de.verdict import Decider
from vaerdict.report.document import Picture
from vaerdict.report.summary import Row
from vaerdict.report.tables import Column, Table

REPORTED, BOOTSTRAP = "reported", "naive bootstrap"
OVERALL = "all contrasts"

_CHANCE = 0.05  # more false calls than chance gives in one of twenty lists are too many
_MOST = 0.8  # a share of the changed genes that is most of them
_CLOSE, _FAR = 0.05, 0.15  # differences between stated and achieved coverage


class MethodCalls(NamedTuple):
    """Estimates and calls of a method. Shapes: all ``(genes,)``."""

    lfc: Tensor
    prob: Tensor
    called: Tensor


class KnownGenes(NamedTuple):
    """Genes whose true fold change is known, with what is reported of them and what a naive bootstrap gives.

    Shapes: all ``(genes,)``; `naive` is None where de.csv has no such columns.
    """

    truth: Tensor
    low: Tensor
    high: Tensor
    reported: MethodCalls
    naive: MethodCalls | None


class Score(NamedTuple):
    """Numbers of calls, of false calls, of changed genes and of those called; ranking, error of the LFC, coverage."""

    called: int
    false: int
    changed: int
    found: int
    ranking: float | None
    error: float
    coverage: float | None

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

    def score(self, name: str, method: str = REPORTED) -> Score | None:
        """The score of a method in a contrast; None where it has no answers."""
        genes = self.genes[name]
        calls = genes.reported if method == REPORTED else genes.naive
        if calls is None or not len(genes.truth):
            return None
        real = genes.truth.abs() >= self.delta
        return Score(
            int(calls.called.sum()),
            int((calls.called & ~real).sum()),
            int(real.sum()),
            int((calls.called & real).sum()),
            measure(calls.prob, calls.lfc, genes.truth, self.delta)["auprc"] if real.any() else None,
            (calls.lfc - genes.truth).abs().mean().item(),
            coverage(genes.low, genes.high, genes.truth) if method == REPORTED else None,
        )


def truth_check(
    contrasts: Sequence[Row], genes: Mapping[str, Genes], truth: Mapping[str, Any], interval: float
) -> TruthCheck | None:
    """The genes whose truth is known, None without any; `truth` maps contrasts to genes to true LFCs."""
    parts = {c["name"]: _known(genes[c["name"]], truth[c["name"]]) for c in contrasts if c["name"] in truth}
    if len(parts) > 1:
        parts[OVERALL] = _joined(list(parts.values()))
    return TruthCheck(parts, contrasts[0]["delta"], contrasts[0]["level"], interval) if parts else None


def _known(genes: Genes, truth: Mapping[str, float]) -> KnownGenes:
    has_naive = {"naive_lfc", "naive_prob_de", "naive_is_de"} <= genes.keys()
    numbers = ["lfc_mean", "lfc_low", "lfc_high", "prob_de", *(["naive_lfc", "naive_prob_de"] if has_naive else [])]
    rows = [
        i for i, gene in enumerate(genes["gene"]) if gene in truth and all(genes[k][i] is not None for k in numbers)
    ]

    def pick(key: str) -> Tensor:
        return torch.tensor([float(genes[key][i] or 0) for i in rows], dtype=torch.float64)

    exact = torch.tensor([truth[genes["gene"][i]] for i in rows], dtype=torch.float64)
    reported = MethodCalls(pick("lfc_mean"), pick("prob_de"), pick("is_de") > 0)
    naive = MethodCalls(pick("naive_lfc"), pick("naive_prob_de"), pick("naive_is_de") > 0) if has_naive else None
    return KnownGenes(exact, pick("lfc_low"), pick("lfc_high"), reported, naive)


def _joined(parts: Sequence[KnownGenes]) -> KnownGenes:
    def calls(chosen: Sequence[MethodCalls]) -> MethodCalls:
        return MethodCalls(*map(torch.cat, zip(*chosen, strict=True)))

    exact, low, high = (torch.cat(columns) for columns in zip(*(part[:3] for part in parts), strict=True))
    naive = [part.naive for part in parts if part.naive is not None]
    all_naive = calls(naive) if len(naive) == len(parts) else None
    return KnownGenes(exact, low, high, calls([part.reported for part in parts]), all_naive)


# ------------------------------------------------------------------------------------------------------ messages
def truth_messages(check: TruthCheck, decider: Decider) -> list[str]:
    """How right the answer is, the most important first."""
    first, *rest = [card.meaning for card in truth_cards(check, decider)] or [""]
    opening = "The data were simulated, so that the answer can be checked."
    return [f"{opening} {first} {rest[0]}", " ".join(rest[1:])] if rest else []


def truth_cards(check: TruthCheck, decider: Decider) -> list[Card]:
    """The questions that only the truth answers."""
    score, naive = check.score(check.overall), check.score(check.overall, BOOTSTRAP)
    if score is None:
        return []
    answers = [_fdr_card(check, score), _recall_card(check, score), _coverage_card(check, score)]
    return [*answers, *([] if naive is None else [_comparison_card(score, naive, decider)])]


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
    covered = score.coverage or 0.0
    lacking = check.interval - covered
    outcome = "as stated" if abs(lacking) <= _CLOSE else "they are too narrow" if lacking > 0 else "they are wide"
    meaning = f"The {percent(check.interval)} intervals cover the truth for {percent(covered)} of the genes: {outcome}."
    tone = "good" if lacking <= _CLOSE else "open" if lacking <= _FAR else "bad"
    return Card("Do the intervals cover the truth?", f"{percent(covered)} do", meaning, tone)


def _comparison_card(score: Score, naive: Score, decider: Decider) -> Card:
    ratio = score.error / naive.error if naive.error else 1.0
    gain = "Smaller errors" if ratio < 0.95 else "Larger errors" if ratio > 1.05 else "As large errors"
    meaning = (
        f"The mean error of the LFC is {score.error:.3f}, that of a naive bootstrap {naive.error:.3f}; the bootstrap "
        f"calls {naive.called:,} genes, of which {percent(naive.fdp)} are false, and finds {naive.found:,} of the true "
        "changes."
    )
    return Card(decider.comparison, gain, meaning, "open")


def percent(share: float) -> str:
    """A share as a percentage without needless zeros."""
    return f"{100 * share:.3g}%"


# ------------------------------------------------------------------------------------------- table and figures
def truth_table(check: TruthCheck) -> Table:
    """How right the list and a naive bootstrap were in every contrast."""
    columns = [
        Column("name", "contrast"),
        Column("method", "method"),
        Column("called", "genes called"),
        Column("false", "false"),
        Column("fdp", "false, %", 1, 100),
        Column("tpr", "changed genes found, %", 1, 100),
        Column("ranking", "average precision", 3),
        Column("error", "mean error of LFC", 3),
        Column("coverage", "intervals that cover the truth, %", 1, 100),
    ]
    scores = [(name, method, check.score(name, method)) for name in check.genes for method in (REPORTED, BOOTSTRAP)]
    rows = [
        {"name": name, "method": method, **score._asdict(), "fdp": score.fdp, "tpr": score.tpr}
        for name, method, score in scores
        if score is not None
    ]
    naive = any(row["method"] == BOOTSTRAP for row in rows)
    note = (
        f"The FDR asked for was {percent(check.level)}, over all contrasts. A gene is changed if its true LFC is at "
        f"least {check.delta:g} either way; average precision is 1 where all changed genes are ranked first."
    )
    return Table("truth", "The answer against the truth", columns, rows, f"{note} {NAIVE}" if naive else note)


def truth_pictures(check: TruthCheck) -> list[Picture]:
    """Estimates with their intervals against the truth, and achieved against stated false discovery rates."""
    genes, score = check.genes[check.overall], check.score(check.overall)
    if score is None:
        return []
    curves = {
        method: fdr_curve(calls.prob, calls.lfc, genes.truth, check.delta, points=200)
        for method, calls in ((REPORTED, genes.reported), (BOOTSTRAP, genes.naive))
        if calls is not None
    }
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
            f"Curves of achieved against stated FDR; the reported list has {percent(score.fdp)} false calls.",
            lambda: figures.achieved_fdr(curves, check.level),
        ),
    ]
