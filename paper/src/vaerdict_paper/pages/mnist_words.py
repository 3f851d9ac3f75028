"""The verdict on an MNIST run in words: models, pairs, the corrected estimator, the model's own error, rejection."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from vaerdict.classify.agreement import ADVICE
from vaerdict.report.claims import Claim, Evidence, Word, tally
from vaerdict.report.summary import Row, Summary, difference, mean_of, number, where
from vaerdict_paper.pages.mnist_claims import accuracy_gain, precision_gain, surest
from vaerdict_paper.pages.mnist_inference import said_of
from vaerdict_paper.pages.mnist_rows import (
    FREE,
    NINE,
    PLAIN,
    Method,
    baselines,
    best_model,
    kept,
    levels,
    methods,
    most_precise,
    of_model,
    pair_means,
    pairs,
)
from vaerdict_paper.pages.rivals import best_of

Rows = Sequence[Row]


def verdict(
    results: Mapping[str, Any], parts: Mapping[str, Rows], claims: Sequence[Claim], goals: Sequence[Claim]
) -> list[str]:
    """The sentences over the page."""
    models, cross, refined = parts["models"], parts["cross"], parts["refined"]
    name, n = best_model(models), len(results.get("seeds", []))
    return [
        sentence
        for sentence in (
            _tally(claims, "claims of the paper, put to a fair test with equal draws and corrected losses", n),
            _tally(goals, "aims of this run", n),
            _best_model(models),
            _best_pair(cross),
            *_better_inference(of_model(refined, name)),
            _agreement(of_model(parts["agreement"], name)),
            _rejection(models, cross),
            _preset(results.get("preset")),
        )
        if sentence
    ]


def _tally(claims: Sequence[Claim], what: str, n: int) -> str:
    if all(claim.word is Word.ABSENT for claim in claims):
        return ""
    return f"Of {len(claims)} {what}, {tally(claims)} ({f'{n} seeds' if n != 1 else 'one seed'})."


def _preset(preset: Any) -> str:
    if preset == "quick":
        return "This is the quick preset: few digits and short training, not a run to be cited."
    return "" if preset in ("paper", "best") else f"This is the {preset} preset."


def _best_model(models: Rows) -> str:
    found = levels(models, "iwelbo")
    name = best_of(found, max)
    second = best_of({other: by for other, by in found.items() if other != name}, max)
    mean = mean_of(of_model(models, name), "iwelbo")
    if name is None or mean is None:
        return ""
    lead = f"By IWELBO the best generative model is that of {name} ({number(mean.mean, 2)})"
    return f"{lead}{_ahead(difference(found[name], found[second]), second, 'nats', 2)}." if second else f"{lead}."


def _ahead(gap: Summary | None, second: str, unit: str, digits: int) -> str:
    if gap is None:
        return ""
    told = Evidence("", gap, +1).word is Word.HOLDS
    said = f"{number(gap.mean, digits)}{f' {unit}' if unit else ''}{_error(gap, digits)}"
    return f", {said} ahead of {second}" + ("" if told else ", which is not told apart from it")


def _error(gap: Summary, digits: int) -> str:
    return "" if gap.se is None else f" (se {number(gap.se, digits)})"


def _best_pair(cross: Rows) -> str:
    scores = pairs(cross, "auprc")
    every = {f"{m} with {q}": (m, q) for m, by in scores.items() for q in by}
    found = {name: scores[m][q] for name, (m, q) in every.items()}
    best = best_of(found, max)
    if best is None:
        return ""
    second = best_of({name: by for name, by in found.items() if name != best}, max)
    model, proposal = every[best]
    weighed = pair_means(cross, "auprc_is").get(model, {}).get(proposal)
    mean = sum(found[best].values()) / len(found[best])
    return (
        f"The pair of model and proposal that rejects the nines best is {best}: average precision {number(mean, 3)}"
        + (f", {number(weighed.mean, 3)} with weights" if weighed else "")
        + (_ahead(difference(found[best], found[second]), second, "", 3) if second else "")
        + "."
    )


def _better_inference(rows: Rows) -> list[str]:
    """How far the weights can be trusted before and after refinement, then what that did to the decisions."""
    rung = surest(rows)
    if rung is None:
        return []
    last, first = where(rows, rung=rung), where(rows, rung="encoder")
    shares = {name: mean_of(part, "khat_share_ok") for name, part in (("encoder", first), (rung, last))}
    said = [f"for {number(100 * share.mean, 1)}% by {name}" for name, share in shares.items() if share]
    gold = mean_of(last, "gold_distance")
    near = f"; p(c|x) is then {number(gold.mean, 4)} from a gold run in total variation" if gold else ""
    return [
        f"On {next(iter(kept(rows)))} the weights of digits are under the k-hat limit {' and '.join(said)}{near}.",
        decided(last),
    ]


def decided(rows: Rows) -> str:
    """Plainly, by the rule of two standard errors: did better inference decide better than no weights?"""
    gains = (("accuracy", accuracy_gain(rows), " points", 2), ("average precision", precision_gain(rows), "", 3))
    known = [(name, gain, unit, digits) for name, gain, unit, digits in gains if gain is not None]
    if not known:
        return ""
    words = frozenset(Evidence(name, gain, +1).word for name, gain, _, _ in known)
    said = [f"{name} {number(g.mean, digits, signed=True)}{unit}{_error(g, digits)}" for name, g, unit, digits in known]
    return f"Better inference {_DECIDED[words]}: with weights minus without, on the same digits, {' and '.join(said)}."


_DECIDED = {
    frozenset({Word.HOLDS}): "gave better decisions",
    frozenset({Word.FAILS}): "gave worse decisions",
    frozenset({Word.OPEN}): "gave decisions that are not told apart from those without weights",
    frozenset({Word.HOLDS, Word.FAILS}): "gave better decisions by one measure and worse by the other",
    frozenset({Word.HOLDS, Word.OPEN}): "gave better decisions by one measure, and the other does not tell",
    frozenset({Word.FAILS, Word.OPEN}): "gave worse decisions by one measure, and the other does not tell",
}
"""By what the rule of two standard errors says of accuracy and of average precision."""


def _agreement(rows: Rows) -> str:
    inference, word = said_of(rows, "inference"), said_of(rows, "model_word")
    if inference is None or word is None:
        return ""
    confidence, accuracy = mean_of(rows, "confidence"), mean_of(rows, "accuracy")
    numbers = (
        f" ({number(100 * confidence.mean, 1)}% sure, {number(100 * accuracy.mean, 1)}% right)"
        if confidence and accuracy
        else ""
    )
    advice = ADVICE[inference.startswith("certified"), word.startswith("agrees")]
    lead = f"On {next(iter(kept(rows)))} the inference is {inference}, and the model {word} with held-out labels"
    return f"{lead}{numbers}: {advice}."


def _rejection(models: Rows, cross: Rows) -> str:
    every = methods(models, cross)
    named = {
        "nine classes": most_precise(every, NINE),
        "a free class": most_precise(every, FREE),
        "a plain network on the labels": most_precise(baselines(cross), PLAIN),
    }
    said = [f"{_at(method)} with {name}" for name, method in named.items() if method]
    return f"Rejecting nines, best scores: average precision {'; '.join(said)}." if len(said) > 1 else ""


def _at(method: Method) -> str:
    precision, accuracy = mean_of(method.rows, method.key), mean_of(method.rows, "accuracy")
    seen = f" at {number(100 * accuracy.mean, 1)}% accuracy" if accuracy else ""
    return f"{number(precision.mean, 3)}{seen}" if precision else ""
