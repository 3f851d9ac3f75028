"""The verdict on a differential expression: who decided the genes, what the calls rest on, and what to do next."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

Record = Mapping[str, Any]

FEW = {"cells": 20, "samples": 3}
"""With fewer replicates in a group their spread is estimated too roughly for more than a first look."""

MOST_CONTRADICTED = 0.1
"""The share of genes whose counts may contradict a model that still agrees with them."""

CERTIFIED, CAUTION = 0.95, 0.8
"""Least shares of reliable cells in the worst group for certified inference, and for inference with caution."""


@dataclass(frozen=True, kw_only=True)
class Decider:
    """Who decided the genes, and every text that depends on it; the defaults are those of a model that decides.

    `message` may name the `{replicates}`. `aside` ends the messages on a model that fails, and `caution` to `disagree`
    are what to do or to know then.
    """

    answer: str
    message: str
    tone: str = "open"
    advice: str = ""
    rests_on_model: bool = True
    aside: str = ""
    caution: str = "Look at the groups with k-hat above 0.7, and run again with more draws."
    refused: str = "Do not use the list: run again with more training or more draws."
    doubtful: str = "See the checks below before using what the model decided."
    wrong: str = "Check that the input holds raw counts and that the batch key is right, then train longer."
    disagree: str = ": there the counts decide every gene"


DECIDERS = {
    "counts": Decider(
        answer="The counts",
        message="Genes are called from the raw counts: a negative binomial likelihood per gene, with dispersions "
        "between {replicates} moderated across genes, and adaptive shrinkage of fold changes.",
        tone="good",
        advice="`vaerdict calibrate` measures whether the FDR holds on these data.",
        rests_on_model=False,
        aside=" The calls do not rest on it.",
        caution="Use the latents and fold changes of the model with care in groups with k-hat above 0.7.",
        refused="Do not use the latents and fold changes (model_lfc) of the model.",
        doubtful="See the checks below before using the latents of the model.",
        wrong="Check that the input holds raw counts and that the batch key is right, because the calls need both.",
        disagree=": its latents and fold changes miss differences between these groups",
    ),
    "model": Decider(
        answer="The model",
        message="The model decides every gene: the calls rest on its inference and on its fit.",
    ),
}
"""Who decided the genes: the counts, or the model."""

PREDICTED_BY = {"profile": "clusters of {n:,} other cells", "model": "a model of {n:,} other cells"}
"""What a prior predicts fold changes by."""

GOOD_PREDICTION = 0.5
"""The correlation with the fold changes of the counts from which a prediction is called good."""


def most_shift(delta: float) -> float:
    """How far from the centre of fold changes these may balance, in log2 units."""
    return max(delta, 0.5) / 2


class Finding(NamedTuple):
    """One part of the verdict: its key and state, and the question that it answers a reader.

    `tone` is good, open or bad; `advice` says what to do, empty where nothing is to be done.
    """

    key: str
    state: str
    question: str
    answer: str
    message: str
    tone: str
    advice: str = ""


def verdict(contrasts: Sequence[Record], *, replicates: str, model: Record | None) -> dict[str, Any]:
    """The verdict as results.json holds it.

    Parameters
    ----------
    contrasts : sequence of records
        The rows `contrasts` of results.json.
    replicates : {"cells", "samples"}
        What the replicates are.
    model : record or None
        The record `model` of results.json; without one nothing is stated about inference, fit or agreement.

    Returns
    -------
    dict
        The state of each part (`decided_by`, `size`, `replicates`, `centre`, `prior`, `inference`, `fit`,
        `agreement`), None where it was not examined, and `messages`, of which the first counts the calls.
    """
    parts = findings(contrasts, replicates=replicates, model=model)
    states = {part.key: part.state for part in parts}
    balances = [balance for contrast in contrasts if (balance := contrast.get("balance"))]
    if "centre" not in states and balances:
        states["centre"] = "balanced" if all(balance["near"] for balance in balances) else "unknown"
    return {
        "decided_by": states["decided_by"],
        "size": "few" if _fewest(contrasts, replicates)[0] < FEW[replicates] else "enough",
        "replicates": replicates,
        **{key: states.get(key) for key in ("centre", "prior", "inference", "fit", "agreement")},
        "messages": [calls_message(contrasts), *(part.message for part in parts)],
    }


def findings(contrasts: Sequence[Record], *, replicates: str, model: Record | None) -> list[Finding]:
    """The parts of the verdict, those that the calls rest on first; parameters as for `verdict`."""
    name = decided_by(model)
    decider = DECIDERS[name]
    on_model = [] if model is None else [*_inference(model, decider), *_fit(model, decider)]
    on_model += _agreement(contrasts, decider)
    on_replicates = _replicates(contrasts, replicates)
    by_counts = [*_centre(contrasts), on_replicates, *_prior(contrasts)]
    rest = [*on_model, on_replicates] if decider.rests_on_model else [*by_counts, *on_model]
    return [_decision(name, replicates, model), *rest]


def decided_by(model: Record | None) -> str:
    """Who decided the genes of all contrasts: a key of `DECIDERS`."""
    return "counts" if model is None or model["role"] == "checks" else "model"


def advice(parts: Sequence[Finding], *, first_look: bool, within_batches: bool) -> str:
    """What to do next; `first_look` where replicates are few or the error of a deciding model is unknown."""
    rests_on_model = DECIDERS[parts[0].state].rests_on_model
    sound = not rests_on_model or all(part.tone == "good" for part in parts if part.key in ("inference", "fit"))
    sound = sound and not any(part.key == "centre" for part in parts)
    use = "The list can be used as a first look." if first_look else "The list can be used at its stated FDR."
    batches = "If the groups were measured in different batches, name their column with --batch-key."
    steps = [use if sound else "", *(part.advice for part in parts), "" if within_batches else batches]
    return "What to do next: " + " ".join(filter(None, steps))


def group_names(contrast: Record) -> tuple[str, str]:
    """The names of both groups as a reader sees them."""
    return str(contrast["group_a"]), "the rest" if contrast["against_rest"] else str(contrast["group_b"])


def calls_message(contrasts: Sequence[Record], *, sides: bool = True) -> str:
    """How many genes are called, and where `sides` in which direction."""
    n, first = sum(contrast["n_discoveries"] for contrast in contrasts), contrasts[0]
    rate, size = f"at an expected FDR of {first['level']:g}", f"with |LFC| at least {first['delta']:g}"
    if len(contrasts) > 1:
        of = "over all of them together" if first.get("joint_fdr") else "in each"
        return f"{n:,} calls are made in {len(contrasts)} contrasts {rate} {of}, {size}."
    rate = f"{rate}, {size}"
    a, b = group_names(first)
    which = f": {first['n_up']:,} higher in {a}, {first['n_down']:,} higher in {b}" if n and sides else ""
    return f"{n:,} genes are called in {first['name']} {rate}{which}."


# ------------------------------------------------------------------------------------------------------ its parts
def _decision(name: str, replicates: str, model: Record | None) -> Finding:
    decider = DECIDERS[name]
    message, steps = decider.message.format(replicates=replicates), decider.advice
    if decider.rests_on_model and model is not None and model["refits"]:
        message += f" Intervals include the error of the model, estimated from {model['refits']} refits."
    elif decider.rests_on_model:
        message += " Intervals leave out the error of the model (no refits) and are too narrow."
        steps = f"A model trained with --refits 3 includes its error in the intervals. {steps}".strip()
    return Finding("decided_by", name, "Who decided the genes?", decider.answer, message, decider.tone, steps)


def _centre(contrasts: Sequence[Record]) -> list[Finding]:
    """A warning where changes do not balance about the centre: where they do, nothing is known for certain."""
    unsure = [
        (contrast, balance)
        for contrast in contrasts
        if (balance := contrast.get("balance")) and abs(balance["shift"]) > most_shift(contrast["delta"])
    ]
    if not unsure:
        return []
    worst, balance = max(unsure, key=lambda pair: abs(pair[1]["shift"]))
    shift = balance["shift"]
    place = "" if len(contrasts) == 1 else f"In {len(unsure)} of {len(contrasts)} contrasts{_others(unsure, worst)}: "
    message = (
        f"{place}It is not certain which genes do not change. Fold changes are relative to a set of genes with about "
        f"the same change ({balance['n_about_centre']:,} of {balance['n_genes']:,} well-measured ones), but ups and "
        f"downs balance {abs(shift):.2f} log2 units {'above' if shift > 0 else 'below'} it, where "
        f"{balance['n_about']:,} lie. If that is where genes do not change, every fold change is {abs(shift):.2f} "
        f"{'lower' if shift > 0 else 'higher'}: {'upward' if shift > 0 else 'downward'} calls that do not exceed delta "
        f"by as much are false, and changes {'downward' if shift > 0 else 'upward'} are missed."
    )
    lists = "the list" if len(contrasts) == 1 else "the lists of these contrasts"
    steps = (
        f"Find out which genes do not change before using {lists}. --scale proportion needs no such genes: it compares "
        "proportions of all counts."
    )
    return [Finding("centre", "unsure", "What are fold changes relative to?", "Not certain", message, "bad", steps)]


_MOST_NAMES = 5


def _others(unsure: Sequence[tuple[Record, Record]], worst: Record) -> str:
    """The names of the contrasts that are unsure, the worst one first; of many, the number of the others."""
    names = [worst["name"], *(contrast["name"] for contrast, _ in unsure if contrast is not worst)]
    more = len(names) - _MOST_NAMES
    shown = [*names[:_MOST_NAMES], f"{more} more"] if more > 0 else names
    return f" ({', '.join(shown)}), most in {worst['name']}" if len(names) > 1 else f" ({worst['name']})"


def _prior(contrasts: Sequence[Record]) -> list[Finding]:
    """What cells that are not compared added: how good their prediction was, in the contrast where it was best."""
    question, records = "What did other cells add?", [contrast.get("prior") for contrast in contrasts]
    used = [record for record in records if record is not None and record["used"]]
    if not used:
        unused = next((record for record in records if record is not None), None)
        if unused is None:
            return []
        message = f"The counts of each gene stand alone: {unused['reason']} to learn a prior for fold changes."
        return [Finding("prior", "none", question, "Nothing", message, "open")]
    best = max(used, key=lambda record: record["correlation"])
    source = PREDICTED_BY[best["kind"]].format(n=best["n_other"])
    added, n = (sum(record[key] for record in used) for key in ("n_by_prior", "n_counts"))
    place = "" if len(contrasts) == 1 else f" in the best of {len(used)} contrasts"
    message = (
        f"Fold changes were predicted from other genes by {source}; the correlation with those of the counts is "
        f"{best['correlation']:.2f}{place}. {n:,} genes are called by the counts alone, {added:,} only with this prior "
        "(by_prior)."
    )
    state, answer = ("good", "A good prediction") if best["correlation"] >= GOOD_PREDICTION else ("weak", "Little")
    steps = "--prior none leaves the prior out." if added else ""
    return [Finding("prior", state, question, answer, message, "good" if state == "good" else "open", steps)]


CELLS = "Cells are the replicates: the FDR holds for more cells of these samples, not for new donors or experiments."


def _replicates(contrasts: Sequence[Record], replicates: str) -> Finding:
    n, name = _fewest(contrasts, replicates)
    few = n < FEW[replicates]
    more = f" Only {n} {replicates} are of {name}: their spread is estimated roughly." if few else ""
    question, answer = "What are the replicates?", f"{replicates.capitalize()}{', and few' if few else ''}"
    if replicates == "samples":
        paired = all(contrast.get("paired") for contrast in contrasts)
        which = "Samples with cells in both groups are the replicates, compared within themselves" if paired else ""
        message = (
            f"{which or 'Samples are the replicates'}: the FDR holds for new samples from the same population.{more}"
        )
        return Finding("replicates", replicates, question, answer, message, "open" if few else "good")
    steps = "If the cells come from several donors, name their column with --sample-key."
    return Finding("replicates", replicates, question, answer, f"{CELLS}{more}", "open", steps)


def _fewest(contrasts: Sequence[Record], replicates: str) -> tuple[int, str]:
    """The smallest number of replicates of any group, and its name."""
    sides = [
        (contrast.get(f"n_{replicates}_{side}_used", contrast[f"n_{replicates}_{side}"]), name)
        for contrast in contrasts
        for side, name in zip("ab", group_names(contrast), strict=True)
    ]
    return min(sides)


def _inference(model: Record, decider: Decider) -> list[Finding]:
    if not model["diagnostics"]:
        return []
    worst = min(model["diagnostics"], key=lambda group: group["share_ok"])
    share, question = worst["share_ok"], "Can the inference of the model be trusted?"
    evidence = (
        f"the importance weights are reliable for {share:.0%} of the cells of the worst group ({worst['group']}), with "
        f"a median k-hat of {worst['khat']:.2f}."
    )
    if share >= CERTIFIED:
        message = f"Inference is certified: {evidence}"
        return [Finding("inference", "certified", question, "Certified", message, "good")]
    if share >= CAUTION:
        message = f"Inference needs caution: {evidence}{decider.aside}"
        return [Finding("inference", "caution", question, "With caution", message, "open", decider.caution)]
    message = f"Inference is refused: {evidence}{decider.aside}"
    return [Finding("inference", "refused", question, "Refused", message, "bad", decider.refused)]


def _fit(model: Record, decider: Decider) -> list[Finding]:
    if not model["checks"]:
        return []
    failed, question = [check["name"] for check in model["checks"] if not check["ok"]], "Does the model fit?"
    if not failed:
        message = "The model fits: it reproduces the zeros, the variance and the library sizes of the counts."
        return [Finding("fit", "fits", question, "It fits", message, "good")]
    missed = f"it does not reproduce the {' and the '.join(failed)} of the counts.{decider.aside}"
    if len(failed) == 1:
        message = f"The fit of the model is doubtful: {missed}"
        return [Finding("fit", "doubtful", question, "Doubtful", message, "open", decider.doubtful)]
    return [Finding("fit", "wrong", question, "No", f"The model does not fit: {missed}", "bad", decider.wrong)]


def _agreement(contrasts: Sequence[Record], decider: Decider) -> list[Finding]:
    """Whether the counts contradict the model, in the contrast where they do most."""
    compared = [contrast for contrast in contrasts if contrast["share_contradicted"] is not None]
    if not compared:
        return []
    worst = max(compared, key=lambda contrast: contrast["share_contradicted"])
    place = "" if len(contrasts) == 1 else f" in {worst['name']}, the worst contrast"
    message = f"The counts of {worst['share_contradicted']:.0%} of the genes contradict the model{place}"
    question = "Do the counts and the model agree?"
    if worst["share_contradicted"] <= MOST_CONTRADICTED:
        return [Finding("agreement", "agree", question, "Yes", f"{message}.", "good")]
    steps = "Look at the genes whose lfc_mean and model_lfc differ."
    return [Finding("agreement", "disagree", question, "No", f"{message}{decider.disagree}.", "open", steps)]
