"""Claims of the MNIST experiment: those of the paper, on better inference, on rejection, and the targets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from vaerdict.report.records import Row
from vaerdict.report.tables import number
from vaerdict_paper.experiments.mnist_measure import PAPER_DRAWS
from vaerdict_paper.pages.claims import (
    Claim,
    Evidence,
    Scores,
    paired_evidence,
    rival_evidence,
    selected_models,
    selection_counts,
)
from vaerdict_paper.pages.crossed import CROSSED
from vaerdict_paper.pages.mnist_rows import (
    AVERAGED,
    FREE,
    NINE,
    SIZES,
    Method,
    baselines,
    by_selection,
    ensembles,
    half_labelled,
    methods,
    model_scores,
    pairs,
    paper_variant,
    percent,
    variant,
    weighted,
)
from vaerdict_paper.pages.seed_statistics import BySeed, Summary, by_seed, difference, minus, ordered, where

Published = Mapping[str, Any]

SCALES = (
    "Average precision is that of rejecting the nines by one minus the largest probability without weights, unless "
    "stated otherwise; accuracy is of the digits 0 to 8, and its differences are in percentage points. All seeds use "
    "the same images, so a standard error does not cover another collection of digits."
)
_MEAN = ", mean over models"

SUPERVISED_SCORE = "max logit"
"""The usual score by which a supervised network rejects; one minus the largest probability rejects less well."""

MARGIN = 0.5
"""Accuracies count as equal down to this many points below the rival's."""


def paper_claims(models: Sequence[Row], cross: Sequence[Row], printed: Published) -> list[Claim]:
    """The paper's claims, on the models nearest to its own."""
    claims = [
        *_own_proposal_claims(models, printed),
        _chi_decides(cross),
        *_mixture_decides(cross),
        *_three_steps_win(models, cross),
    ]
    sizes = next((row.get("sizes") for row in paper_variant(models)), None)
    return [_of_sizes(claim, sizes) for claim in claims] if sizes in SIZES else claims


def paper_claims_by_sizes(models: Sequence[Row], printed: Published) -> list[Claim]:
    """The paper's claims on models with their own proposals, by networks as released and as printed."""
    return [
        _of_sizes(claim, name)
        for name, rows in _by_sizes(models).items()
        for claim in _own_proposal_claims(rows, printed)
    ]


def _of_sizes(claim: Claim, sizes: str) -> Claim:
    """The claim with the sizes of the networks that it is tested on."""
    return replace(claim, text=f"{claim.text.rstrip('.')} ({SIZES[sizes]}).")


def _own_proposal_claims(models: Sequence[Row], printed: Published) -> list[Claim]:
    """The claims on each model with its own proposal."""
    return [
        _best_models(models, printed.get("iwelbo", {})),
        _best_precision(models, printed.get("auprc", {})),
        _khat_above(models, printed.get("khat", 1.0)),
        _correction_fails(models, printed),
    ]


def _by_sizes(models: Sequence[Row]) -> dict[str, list[Row]]:
    """The models whose labelled images count by their share, by the sizes of their networks."""
    plain = [row for row in models if not half_labelled(row)]
    return {name: rows for name in SIZES if (rows := where(plain, sizes=name))}


def _best_models(models: Sequence[Row], printed: Mapping[str, float]) -> Claim:
    iwelbo = model_scores(models, "iwelbo")
    evidence = [paired_evidence("IWELBO", iwelbo, a, b, +1, 2, printed) for a in ("IWAE", "WW") for b in ("VAE", "CHI")]
    return Claim("IWAE and WW learn the best generative models by IWELBO.", evidence)


def _best_precision(models: Sequence[Row], printed: Mapping[str, float]) -> Claim:
    precision = model_scores(models, "auprc")
    evidence = [
        paired_evidence("average precision", precision, "IWAE", b, +1, 3, printed) for b in ("VAE", "WW", "CHI")
    ]
    return Claim("IWAE rejects the nines best, each model with its own proposal.", evidence)


def _khat_above(models: Sequence[Row], limit: float) -> Claim:
    evidence = [
        Evidence(f"median k-hat of {name} minus {limit:g}", minus(khat, limit), +1, 2)
        for name, khat in model_scores(models, "khat").items()
    ]
    return Claim(f"k-hat is above {limit:g} for every model with its own proposal.", evidence)


def _correction_fails(models: Sequence[Row], printed: Published) -> Claim:
    """The paper reports 60 % with weights and 95 to 97 % without; whether ours is on the same side of the middle."""
    span = printed.get("accuracy", {})
    plugin, same, corrected = (_over_models(models, key) for key in ("accuracy", "accuracy_same", "accuracy_is"))
    floor = 100 * span.get("lowest", 0.95)
    middle = 50 * ((span.get("lowest", 0.95) + span.get("highest", 0.97)) / 2 + printed.get("accuracy_is", 0.6))
    change = difference(corrected, same)
    return Claim(
        "Accuracy is high without weights and poor with them.",
        [
            Evidence(f"accuracy without weights minus {floor:g} %, mean of the models", minus(plugin, floor), +1, 2),
            Evidence(
                f"accuracy with weights minus {middle:g} %, midway between the paper's two",
                minus(corrected, middle),
                -1,
                2,
            ),
        ],
        f"In log space, the weights change accuracy by {_with_error(change, 2)} points on the same digits."
        if change
        else "",
    )


def _chi_decides(cross: Sequence[Row]) -> Claim:
    evidence = rival_evidence(f"average precision{_MEAN}", pairs(cross, "auprc"), "CHI", CROSSED, +1)
    return Claim("For a fixed model the proposal CHI leads to better decisions than each other single one.", evidence)


def _mixture_decides(cross: Sequence[Row]) -> list[Claim]:
    """The mixture against single proposals and, because it has three networks, against three of each objective."""
    rivals = list(ensembles(cross).values())
    plain, corrected = pairs(cross, "auprc"), pairs(cross, "auprc_is")
    what, weighted = f"average precision{_MEAN}", f"average precision with weights{_MEAN}"
    return [
        Claim(
            "For a fixed model MIS, without weights an ensemble of three networks, decides better than each single "
            "proposal.",
            rival_evidence(what, plain, "MIS", CROSSED, +1),
        ),
        Claim(
            "Without weights MIS decides better than three networks of one objective.",
            rival_evidence(what, plain, "MIS", rivals, +1),
            _gain_of_one_objective(cross, plain) if rivals else "",
        ),
        Claim(
            "With weights MIS decides better than each single proposal with weights.",
            rival_evidence(weighted, corrected, "MIS", CROSSED, +1),
        ),
        Claim(
            "With weights MIS decides better than three networks of one objective and the prior do.",
            rival_evidence(weighted, corrected, "MIS", rivals, +1),
        ),
    ]


def _gain_of_one_objective(cross: Sequence[Row], plain: Mapping[str, Scores]) -> str:
    """What ensembles by one objective gain, and why that is little."""
    gains = [
        f"{q} {_with_error(evidence.difference, 3)}"
        for q, several in ensembles(cross).items()
        for evidence in rival_evidence("", plain, several, [q], +1)
        if evidence.difference
    ]
    return (
        "All proposals start from the network trained with the model: three of one objective differ by their batches "
        f"and noise alone, those of MIS by objective too. Three of one objective minus one: {', '.join(gains)}."
    )


def _three_steps_win(models: Sequence[Row], cross: Sequence[Row]) -> list[Claim]:
    """The best model of each seed with the mixture, against each objective's own model and proposal.

    Without weights the mixture is an ensemble, so that it is also compared with three networks of each objective.
    """
    selected = selected_models(paper_variant(models), "iwelbo_refined_held_out")
    note = f"The model of best held-out IWELBO was {selection_counts(selected)}." if selected else ""
    alone, several = {q: q for q in CROSSED}, ensembles(cross)
    plain, corrected = pairs(cross, "auprc"), pairs(cross, "auprc_is")
    what = "average precision"
    return [
        Claim(
            "The three steps, the best model with MIS, outperform every objective alone, without weights as in the "
            "paper.",
            _three_steps(what, plain, selected, alone),
            f"MIS is then an ensemble of three networks, compared with as many below. {note}".strip(),
        ),
        Claim(
            "Without weights the three steps outperform three networks of every objective on its own model.",
            _three_steps(what, plain, selected, several) if several else [],
        ),
        Claim(
            "With weights the three steps outperform every objective alone with weights.",
            _three_steps(f"{what} with weights", corrected, selected, alone),
        ),
    ]


_THREE_STEPS = "three steps"


def _three_steps(
    what: str, by_model: Mapping[str, Scores], selected: Mapping[Any, str], rivals: Mapping[str, str]
) -> list[Evidence]:
    """The selected models with MIS minus each objective's model with its rival proposal."""
    mixed = {model: scores.get("MIS", {}) for model, scores in by_model.items()}
    combined = {seed: mixed[model][seed] for seed, model in selected.items() if seed in mixed.get(model, {})}
    scores: dict[str, BySeed] = {
        f"{q} on {m}" if q != m else m: by_model.get(m, {}).get(q, {}) for m, q in rivals.items()
    }
    names = list(scores)
    return [paired_evidence(what, {**scores, _THREE_STEPS: combined}, _THREE_STEPS, name, +1) for name in names]


def refinement_claims(refined: Sequence[Row]) -> list[Claim]:
    """The effect on weights and on decisions of refining the proposal of every digit and class."""
    if not refined:
        return []
    shares, accuracy, precision = [], [], []
    for name, rows in by_selection(refined).items():
        stage = last_stage(rows)
        last, first = where(rows, stage=stage), where(rows, stage="encoder")
        gain = difference(percent(last, "khat_share_ok"), percent(first, "khat_share_ok"))
        shares.append(Evidence(f"{name}, {stage} minus encoder", gain, +1, 1))
        accuracy.append(Evidence(f"accuracy, {name}", accuracy_gain(last), +1, 2))
        precision.append(Evidence(f"average precision, {name}", precision_gain(last), +1, 3))
    return [
        Claim("Refinement brings more digits below the k-hat threshold (per cent of digits).", shares),
        Claim(
            "Better inference gives better decisions: refined minus no weights on the same digits.",
            accuracy + precision,
        ),
    ]


STAGES = ("encoder", "MIS", "REFINED", "IMPROVED", "ESCALATED", "SMC")
"""The stages of inference, in the order of their cost."""


def last_stage(rows: Sequence[Row]) -> str | None:
    """The most thorough stage of inference that was run."""
    return next(iter(ordered((str(row["stage"]) for row in rows), STAGES[::-1])), None)


def accuracy_gain(rows: Sequence[Row]) -> Summary | None:
    """Accuracy with weights minus without on the same digits, in points."""
    return difference(percent(rows, "accuracy_is"), percent(rows, "accuracy"))


def precision_gain(rows: Sequence[Row]) -> Summary | None:
    """Average precision with weights minus without on the same digits."""
    return difference(by_seed(rows, "auprc_is"), by_seed(rows, "auprc"))


def rejection_claims(models: Sequence[Row], cross: Sequence[Row]) -> list[Claim]:
    """Fixed methods against fixed rivals: one network against one, several together against as many.

    Nine classes are judged by IWAE, the paper's best, and the paper's score; a free class by its own score; a
    supervised network by its largest logit.
    """
    candidates, supervised = methods(models, cross), baselines(cross)
    nine, free = _fixed(candidates, NINE), _fixed(candidates, FREE)
    pairs = [
        (f, m)
        for f in _of_score(candidates, FREE)
        for m in _of_score(candidates, NINE)
        if f.proposal is None and _same_but_free(m, f)
    ]
    claims = [
        Claim(
            "A free class fed by unlabelled digits rejects the nines better than nine classes do, all else equal.",
            [_precision(*pair) for pair in pairs],
        ),
        _at_equal_accuracy(
            "Nine classes reject the nines better than a supervised network does, at equal accuracy.", nine, supervised
        ),
        _at_equal_accuracy(
            "A free class rejects the nines better than a supervised network does, at equal accuracy.", free, supervised
        ),
    ]
    return [claim for claim in claims if claim.evidence]


def third_step(cross: Sequence[Row]) -> list[Claim]:
    """The mixture with its weights against as many supervised networks together."""
    mixture = next(
        (m for m in _of_score(weighted(cross), NINE) if (m.model, m.proposal) == (PAPERS_BEST, "MIS")),
        None,
    )
    rival = mixture and _rival(mixture, baselines(cross), several=True)
    if mixture is None or rival is None:
        return []
    text = "The mixture with weights rejects better than as many supervised networks."
    return [Claim(text, [_precision(mixture, rival)])]


PAPERS_BEST = "IWAE"
"""The paper's best model for rejecting the nines."""


def _fixed(candidates: Sequence[Method], kind: str) -> list[Method]:
    """The method that stands for its kind, by its own network and by those of the mixture together.

    Models with shifts come first: they are the ones that compete with the supervised network.
    """
    of_kind = [m for m in _of_score(candidates, kind) if kind == FREE or m.model == PAPERS_BEST]
    of_kind.sort(key=lambda m: (not m.rows[0].get("shifts"), variant(m.rows[0])))
    own = [m for m in of_kind if m.proposal is None]
    mixed = [m for m in of_kind if m.proposal == "MIS"]
    return [*own[:1], *(m for m in mixed[:1] if own and m.name == f"{own[0].name}{AVERAGED}")]


def _of_score(candidates: Sequence[Method], kind: str) -> list[Method]:
    """The methods of a kind by the score that is judged."""
    key = "auprc_free" if kind == FREE else "auprc"
    return [m for m in candidates if m.kind == kind and m.key.removesuffix("_is") == key]


def _same_but_free(nine: Method, free: Method) -> bool:
    """Whether a model has nine classes and is otherwise built and trained as one with a free class, on its own."""
    keys = ("model", "shifts", "relaxed", "sizes")
    return nine.proposal is None and all(nine.rows[0].get(k) == free.rows[0].get(k) for k in keys)


def _rival(method: Method, supervised: Sequence[Method], *, several: bool) -> Method | None:
    """The supervised network, or as many as in the mixture, with the method's shifts and its best usual score."""
    return next(
        (
            m
            for m in supervised
            if (m.model != "CNN") == several
            and bool(m.rows[0].get("shifts")) == bool(method.rows[0].get("shifts"))
            and m.score == SUPERVISED_SCORE
        ),
        None,
    )


def _precision(method: Method, rival: Method) -> Evidence:
    return Evidence(f"average precision, {method} minus {rival}", difference(method.precision, rival.precision), +1, 3)


def _at_equal_accuracy(text: str, judged: Sequence[Method], supervised: Sequence[Method]) -> Claim:
    """More precise, and not less accurate by more than a margin: one network, and several together."""
    evidence = []
    for method in judged:
        rival = _rival(method, supervised, several=method.proposal == "MIS")
        if rival:
            gap = {s: v - rival.points[s] for s, v in method.points.items() if s in rival.points}
            what = f"accuracy, {method} minus {rival}, plus a margin of {MARGIN:g}"
            evidence += [_precision(method, rival), Evidence(what, minus(gap, -MARGIN), +1, 2)]
    return Claim(text, evidence)


# -------------------------------------------------------------------------------------------------------- targets
def targets(
    preset: Any,
    models: Sequence[Row],
    cross: Sequence[Row],
    refined: Sequence[Row],
    seconds: float | None,
    printed: Mapping[str, Any],
) -> list[Claim]:
    """The targets of a run of this preset."""
    if preset == "best":
        return [*_best_targets(methods(models, cross)), *rejection_claims(models, cross)]
    if preset in BOUNDS:
        return _bound_targets(models, printed.get("iwelbo", {}))
    return _paper_targets(models, cross, refined, seconds, printed) if preset == "paper" else []


BOUNDS = ("sizes", "printed", "released")
"""Presets of models with their own proposals alone, for their bounds."""


def _bound_targets(models: Sequence[Row], printed: Mapping[str, float]) -> list[Claim]:
    """The paper's bounds, by networks as released and as printed."""
    by_sizes = _by_sizes(models)
    claims = [
        _of_sizes(Claim("The IWELBO of every objective is at least the paper's.", _ahead(rows, printed)), name)
        for name, rows in by_sizes.items()
    ]
    return claims + _labelled_by_share(by_sizes.get("printed", []), [row for row in models if half_labelled(row)])


def _labelled_by_share(plain: Sequence[Row], halved: Sequence[Row]) -> list[Claim]:
    """The weight of labelled images: nothing else differs between the two."""
    bound = f"iwelbo_{PAPER_DRAWS}"
    evidence = [
        Evidence(
            f"IWELBO of {name}, {PAPER_DRAWS} draws, labelled images by their share minus half of the objective",
            difference(model_scores(plain, bound).get(name, {}), scores),
            +1,
            2,
        )
        for name, scores in model_scores(halved, bound).items()
    ]
    return (
        [Claim("Weighing labelled images by their share raises the IWELBO (as printed).", evidence)] if evidence else []
    )


def _ahead(models: Sequence[Row], printed: Mapping[str, float]) -> list[Evidence]:
    """Bounds with the paper's draws minus the paper's own."""
    bounds = model_scores(models, f"iwelbo_{PAPER_DRAWS}")
    what = f"{PAPER_DRAWS} draws, minus the paper's"
    return [
        Evidence(f"IWELBO of {name}, {what}", minus(bounds.get(name, {}), level), +1, 2)
        for name, level in printed.items()
    ]


def _best_targets(candidates: Sequence[Method]) -> list[Claim]:
    """Nine classes by the proposals together and the entropy, a free class by the proposals together."""
    nine = _averaged([m for m in candidates if m.kind == NINE and m.key == "auprc_entropy"])
    free = _averaged(_of_score(candidates, FREE))
    return [
        _reaches("Accuracy of at least 97.2% with nine classes.", nine, nine and nine.points, 97.2, 2),
        _reaches("Average precision of at least 0.62 with nine classes.", nine, nine and nine.precision, 0.62, 3),
        _reaches("Average precision of at least 0.95 with a free class.", free, free and free.precision, 0.95, 3),
    ]


def _averaged(candidates: Sequence[Method]) -> Method | None:
    """The mixture without weights, with our sizes if there are several."""
    mixed = [m for m in candidates if m.proposal == "MIS"]
    return min(mixed, key=lambda m: variant(m.rows[0])[-1], default=None)


def _paper_targets(
    models: Sequence[Row],
    cross: Sequence[Row],
    refined: Sequence[Row],
    seconds: float | None,
    printed: Mapping[str, Any],
) -> list[Claim]:
    nine = _averaged([m for m in _of_score(methods(paper_variant(models), cross), NINE) if m.model == PAPERS_BEST])
    corrected = minus(_over_models(models, "accuracy_is"), 95.5)
    shares = []
    for name, rows in by_selection(refined).items():
        stage = last_stage(rows)
        share = percent(where(rows, stage=stage), "khat_share_ok")
        shares.append(Evidence(f"{name}, {stage}, minus 98%", minus(share, 98), +1, 1))
    minutes = None if seconds is None else Summary(seconds / 60 - 15, None, 1)
    return [
        Claim("The IWELBO of every objective is at least the paper's.", _ahead(models, printed.get("iwelbo", {}))),
        _reaches("Average precision of at least 0.45 with nine classes.", nine, nine and nine.precision, 0.45, 3),
        Claim(
            "Accuracy of at least 95.5% with weights.", [Evidence("mean of the models, minus 95.5%", corrected, +1, 2)]
        ),
        Claim("At least 98% of the digits below the k-hat threshold after refinement.", shares),
        Claim(
            "The whole run in a quarter of an hour.",
            [Evidence("minutes minus 15", minutes, -1, 1, over="")],
            "Of processes that share a GPU each counts in full.",
        ),
    ]


def _reaches(text: str, method: Method | None, scores: BySeed | None, target: float, digits: int) -> Claim:
    gap = None if scores is None else minus(scores, target)
    return Claim(text, [Evidence(f"{method or 'the method'}, minus {target:g}", gap, +1, digits)])


def _over_models(models: Sequence[Row], key: str) -> dict[Any, float]:
    """Per cent in each seed, averaged over its models."""
    return percent(paper_variant(models), key)


def _with_error(summary: Summary, digits: int) -> str:
    """A difference with its standard error."""
    error = "" if summary.se is None else f" (se {number(summary.se, digits)})"
    return f"{number(summary.mean, digits, signed=True)}{error}"
