"""The summary of an MNIST run in sentences: claims, models, pairs, inference, agreement with labels, rejection."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from vaerdict.classify.agreement import ADVICE
from vaerdict.report.records import Row
from vaerdict.report.tables import number
from vaerdict_paper.pages.claims import ClaimVerdict, Judgement, best_of, tally
from vaerdict_paper.pages.mnist_claims import accuracy_gain, last_stage, precision_gain
from vaerdict_paper.pages.mnist_rows import (
    FREE,
    NINE,
    SIZES,
    SUPERVISED,
    Method,
    baselines,
    best_model,
    by_selection,
    crossed,
    methods,
    model_scores,
    most_precise,
    of_model,
    pairs,
)
from vaerdict_paper.pages.mnist_tables import most_common
from vaerdict_paper.pages.seed_statistics import Summary, difference, mean_of, where

Rows = Sequence[Row]


def summary(
    results: Mapping[str, Any],
    parts: Mapping[str, Rows],
    claims: Sequence[Judgement],
    goals: Sequence[Judgement],
    inference: Sequence[Judgement],
) -> list[str]:
    """The sentences at the top of the page; `inference` are the judgements on refinement."""
    models, cross, refined = parts["models"], parts["cross"], parts["refined"]
    name, n = best_model(models), len(results.get("seeds", []))
    return [
        sentence
        for sentence in (
            _tally(claims, "claims of the paper, tested with equal draws and corrected losses", n),
            _tally(goals, "targets of this run", n),
            *(_best_model(rows) for rows in _by_sizes(models)),
            _best_pair(cross),
            *_better_inference(of_model(refined, name)),
            effect_on_decisions(inference, of_model(refined, name)),
            _agreement(of_model(parts["agreement"], name)),
            _rejection(models, cross),
            _preset(results.get("preset")),
        )
        if sentence
    ]


def _tally(claims: Sequence[Judgement], what: str, n: int) -> str:
    if all(claim.verdict is ClaimVerdict.NOT_RUN for claim in claims):
        return ""
    return f"Of {len(claims)} {what}, {tally(claims)} ({f'{n} seeds' if n != 1 else 'one seed'})."


def _preset(preset: Any) -> str:
    if preset == "quick":
        return "This is the quick preset: few digits and short training, not a run to be cited."
    return "" if preset in ("paper", "sizes", "printed", "released", "best") else f"This is the {preset} preset."


def _by_sizes(models: Rows) -> list[Rows]:
    """The rows of each size of the networks that models of the paper's variant have."""
    sizes = dict.fromkeys(row.get("sizes") for row in models)
    return [where(models, sizes=name) for name in sizes]


def _best_model(models: Rows) -> str:
    scores = model_scores(models, "iwelbo")
    name = best_of(scores, max)
    second = best_of({other: values for other, values in scores.items() if other != name}, max)
    mean = mean_of(of_model(models, name), "iwelbo")
    if name is None or mean is None:
        return ""
    sizes = {SIZES[row["sizes"]] for row in models if row.get("sizes") in SIZES}
    networks = f" ({' or '.join(sizes)})" if sizes else ""
    lead = f"By IWELBO the best generative model{networks} is that of {name} ({number(mean.mean, 2)})"
    return f"{lead}{_ahead(difference(scores[name], scores[second]), second, 'nats', 2)}." if second else f"{lead}."


def _ahead(gap: Summary | None, second: str, unit: str, digits: int) -> str:
    """How far the best is ahead of the second; both are picked from these seeds, so that no verdict is given."""
    if gap is None:
        return ""
    return f", {number(gap.mean, digits)}{f' {unit}' if unit else ''}{_error(gap, digits)} ahead of {second}"


def _error(gap: Summary, digits: int) -> str:
    return "" if gap.se is None else f" (se {number(gap.se, digits)})"


def _best_pair(cross: Rows) -> str:
    scores = pairs(cross, "auprc")
    names = {f"{m} with {q}": (m, q) for m, by in scores.items() for q in by}
    precision = {name: scores[m][q] for name, (m, q) in names.items()}
    best = best_of(precision, max)
    if best is None:
        return ""
    second = best_of({name: values for name, values in precision.items() if name != best}, max)
    model, proposal = names[best]
    weighted = mean_of(where(crossed(cross), model=model, proposal=proposal), "auprc_is")
    mean = sum(precision[best].values()) / len(precision[best])
    return (
        f"The pair of model and proposal that rejects the nines best is {best}: average precision {number(mean, 3)}"
        + (f", {number(weighted.mean, 3)} with weights" if weighted else "")
        + (_ahead(difference(precision[best], precision[second]), second, "", 3) if second else "")
        + "."
    )


def _better_inference(rows: Rows) -> list[str]:
    """The share of reliable weights before and after refinement, then its effect on the decisions."""
    stage = last_stage(rows)
    if stage is None:
        return []
    last, first = where(rows, stage=stage), where(rows, stage="encoder")
    shares = {name: mean_of(part, "khat_share_ok") for name, part in (("encoder", first), (stage, last))}
    parts = [f"for {number(100 * share.mean, 1)}% by {name}" for name, share in shares.items() if share]
    gold = mean_of(last, "gold_distance")
    near = f"; p(c|x) then differs by {number(gold.mean, 4)} in total variation from a long SMC run" if gold else ""
    return [
        f"On {next(iter(by_selection(rows)))} the k-hat of digits is below the threshold {' and '.join(parts)}{near}.",
    ]


def effect_on_decisions(inference: Sequence[Judgement], rows: Rows) -> str:
    """The verdict on the claim that better inference gives better decisions, with the differences on these rows."""
    last = where(rows, stage=last_stage(rows))
    gains = (("accuracy", accuracy_gain(last), " points", 2), ("average precision", precision_gain(last), "", 3))
    parts = [
        f"{name} {number(gain.mean, digits, signed=True)}{unit}{_error(gain, digits)}"
        for name, gain, unit, digits in gains
        if gain is not None
    ]
    if not parts or not inference:
        return ""
    return (
        f"Better inference gives better decisions: {inference[-1].verdict.value}. With weights minus without, on the "
        f"same digits: {' and '.join(parts)}."
    )


def _agreement(rows: Rows) -> str:
    inference, verdict = most_common(rows, "inference"), most_common(rows, "model_verdict")
    if inference is None or verdict is None:
        return ""
    confidence, accuracy = mean_of(rows, "confidence"), mean_of(rows, "accuracy")
    numbers = (
        f" (expected accuracy {number(100 * confidence.mean, 1)}%, actual {number(100 * accuracy.mean, 1)}%)"
        if confidence and accuracy
        else ""
    )
    advice = ADVICE[inference.startswith("certified"), verdict.startswith("agrees")]
    name = next(iter(by_selection(rows)))
    return f"On {name} the inference is {inference}, and the model {verdict} with held-out labels{numbers}: {advice}."


def _rejection(models: Rows, cross: Rows) -> str:
    candidates = methods(models, cross)
    best = {
        "nine classes": most_precise(candidates, NINE),
        "a free class": most_precise(candidates, FREE),
        "a supervised network": most_precise(baselines(cross), SUPERVISED),
    }
    parts = [f"{_at(method)} with {name}" for name, method in best.items() if method]
    text = "Highest average precision of rejecting nines, among methods and scores picked on these digits"
    return f"{text}: {'; '.join(parts)}." if len(parts) > 1 else ""


def _at(method: Method) -> str:
    precision, accuracy = mean_of(method.rows, method.key), mean_of(method.rows, method.accuracy)
    seen = f" at {number(100 * accuracy.mean, 1)}% accuracy" if accuracy else ""
    return f"{number(precision.mean, 3)}{seen}" if precision else ""
