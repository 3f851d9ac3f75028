"""Tables of the MNIST experiment: models, pairs with proposals, inference, rejection, decision rules, seconds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from vaerdict.report.records import Row, grouped
from vaerdict.report.tables import Column, Table, Value, mark_column
from vaerdict_paper.experiments.mnist_measure import PAPER_DRAWS
from vaerdict_paper.pages.crossed import CROSSED
from vaerdict_paper.pages.mnist_claims import STAGES
from vaerdict_paper.pages.mnist_rows import (
    HALF_LABELLED,
    SIZES,
    Method,
    baselines,
    by_selection,
    half_labelled,
    is_ensemble,
    methods,
    paper_variant,
    title,
    weighted,
)
from vaerdict_paper.pages.seed_statistics import cell, cells, counts_of, mean_of, ordered, seed_count, where

IWELBO, KHAT = Column("iwelbo", "IWELBO", 2), Column("khat", "k-hat, median", 2)
PRECISION, ACCURACY = Column("auprc", "AP", 3), Column("accuracy", "accuracy, %", 1, 100)
SHARE = Column("khat_share_ok", "k-hat below threshold, % of digits", 1, 100)
ENTROPY, ESS = Column("auprc_entropy", "AP by entropy", 3), Column("ess", "ESS, % of draws", 1, 100)
PRECISION_IS = Column("auprc_is", "AP with weights", 3)
ENTROPY_IS = Column("auprc_entropy_is", "AP by entropy with weights", 3)
ACCURACY_IS = Column("accuracy_is", "accuracy with weights, %", 1, 100)

PRECISION_NOTE = "AP: average precision of rejecting the nines."


def models_table(models: Sequence[Row], printed: Mapping[str, Any], released: Mapping[str, Any]) -> Table | None:
    """The paper's table: our numbers by networks of one size, as printed, and from the released code run unchanged."""
    rows = paper_variant(models)
    if not rows:
        return None
    columns = [IWELBO, *_published(IWELBO), PRECISION, *_published(PRECISION), ENTROPY, ACCURACY]
    columns += _published(ACCURACY)[1:]  # the paper gives accuracies only in its text
    sources = {"paper": printed, "released": released}
    published = {f"{q.key}_{name}": source.get(q.key, {}) for q in _COMPARED for name, source in sources.items()}
    body = [
        {
            "model": name,
            **cells(where(rows, model=name), (*_COMPARED, ENTROPY)),
            **{key: numbers.get(name) for key, numbers in published.items()},
        }
        for name in ordered((row["model"] for row in rows), CROSSED)
    ]
    for column in (*_COMPARED, ENTROPY):
        body = mark_column(body, column.key, max)
    variant = title({**rows[0], "model": "M1+M2"})
    caption = (
        f"The paper's table: ours, {variant}, mean ± sd over {seed_count(rows)}; as printed; and the released code run "
        "unchanged. Each model with its own proposal, without weights."
    )
    notes = [source["note"] for source in sources.values() if "note" in source]
    return Table(
        _named("models", rows), caption, [Column("model", "model"), *columns], body, " ".join([PRECISION_NOTE, *notes])
    )


_COMPARED = (IWELBO, PRECISION, ACCURACY)


def _published(quantity: Column) -> list[Column]:
    """The columns of the published numbers of a quantity."""
    sources = {"paper": "paper", "released": "released code"}
    return [replace(quantity, key=f"{quantity.key}_{k}", title=f"{quantity.title}, {s}") for k, s in sources.items()]


def weights_table(models: Sequence[Row], printed: Mapping[str, Any]) -> Table | None:
    """Diagnostics of the weights of each model's own proposal, and the decisions with them."""
    rows = paper_variant(models)
    measured = (KHAT, SHARE, ESS, PRECISION_IS, ENTROPY_IS, ACCURACY_IS)
    if not any(row.get(column.key) is not None for row in rows for column in measured):
        return None
    names = ordered((row["model"] for row in rows), CROSSED)
    paper = {"accuracy_paper": printed.get("accuracy_is")}
    body = [{"model": name, **cells(where(rows, model=name), measured), **paper} for name in names]
    for column in (PRECISION_IS, ENTROPY_IS, ACCURACY_IS):
        body = mark_column(body, column.key, max)
    sizes = f" ({SIZES[rows[0]['sizes']]})" if rows[0].get("sizes") in SIZES else ""
    caption = (
        f"The weights of each model's own proposal{_drawn(rows)}{sizes}: k-hat, effective sample size, "
        f"and decisions with weights in log space; mean ± sd over {seed_count(rows)}."
    )
    columns = [Column("model", "model"), *measured, Column("accuracy_paper", "the same, paper: about, %", 0, 100)]
    return Table(_named("weights", rows), caption, columns, body, PRECISION_NOTE)


def _named(table: str, rows: Sequence[Row]) -> str:
    """The name of a table of models with networks of one size."""
    return "-".join([table, *({row["sizes"] for row in rows if row.get("sizes")})])


def iwelbo_table(models: Sequence[Row], printed: Mapping[str, Any], released: Mapping[str, Any]) -> Table | None:
    """The IWELBO of every objective: the paper's, that of the released code, and ours by sizes, draws and digits."""
    rows = [row for row in models if not row.get("free") and not row.get("shifts")]
    if not rows:
        return None
    halved = [row for row in rows if half_labelled(row)]
    plain = [row for row in rows if not half_labelled(row)]
    sources = (("the paper", printed), ("released code, run unchanged", released))
    body = [
        {"networks": what, "digits": "all", "draws": PAPER_DRAWS, **source.get("iwelbo", {})}
        for what, source in sources
    ]
    parts = {
        SIZES.get(sizes or "", "as printed, an older run"): where(plain, sizes=sizes)
        for sizes in ("printed", "released", "ours", None)
    }
    for networks, part in {**parts, HALF_LABELLED: halved}.items():
        for key, draws in ((f"iwelbo_{PAPER_DRAWS}", PAPER_DRAWS), ("iwelbo", counts_of(part, "n_draws"))):
            for suffix, digits in (("", "all"), ("_known", "0 to 8")):
                means = {name: cell(mean_of(where(part, model=name), f"{key}{suffix}")) for name in CROSSED}
                if any(means.values()):
                    body.append({"networks": networks, "digits": digits, "draws": draws, **means})
    columns = [Column("networks", "networks"), Column("digits", "test digits"), Column("draws", "draws")]
    caption = f"IWELBO of each model with its own proposal: mean ± sd over {seed_count(rows)}."
    note = (
        "As printed: one hidden layer of 128 units in every network. As released: 784 units decode x, nine classify z, "
        "the unpadded convolutions have 32, 64 and 128 channels. Ours: 784 units, 128 that classify, padded "
        "convolutions, and a learning rate that falls at the end. All are trained with corrected losses; the class "
        "is summed over exactly in the bound."
    )
    return Table("iwelbo", caption, [*columns, *(replace(IWELBO, key=q, title=q) for q in CROSSED)], body, note)


def labelled_table(models: Sequence[Row]) -> Table | None:
    """What the weight of labelled images changes, all else equal: the bound, the weights and the decisions."""
    halved = [row for row in models if half_labelled(row)]
    if not halved:
        return None
    plain = [row for row in models if not half_labelled(row) and row.get("sizes") == halved[0].get("sizes")]
    bound = replace(IWELBO, key=f"iwelbo_{PAPER_DRAWS}", title=f"IWELBO, {PAPER_DRAWS} draws")
    measured = (bound, KHAT, PRECISION, ENTROPY, ACCURACY, PRECISION_IS, ACCURACY_IS)
    body = [
        {"model": name, "labelled": labelled, **cells(where(rows, model=name), measured)}
        for name in ordered((row["model"] for row in halved), CROSSED)
        for labelled, rows in (("by their share", plain), ("half of the objective", halved))
    ]
    columns = [Column("model", "model"), Column("labelled", "labelled images"), *measured]
    caption = f"The weight of labelled images in the bound, networks as printed: mean ± sd over {seed_count(halved)}."
    return Table("labelled", caption, columns, body, PRECISION_NOTE)


CROSS = {
    PRECISION: "Average precision without weights",
    PRECISION_IS: "Average precision with weights",
    ACCURACY: "Accuracy (%) without weights",
    ACCURACY_IS: "Accuracy (%) with weights",
}
"""Quantities shown for every pair of model and proposal, with their titles."""


# -------------------------------------------------------------------------------------------------- inference
def refinement_table(refined: Sequence[Row]) -> Table | None:
    """Every stage of inference for every model: the weights, the distance to a reference run, the cost."""
    if not refined:
        return None
    gold = counts_of(refined, "gold_images")
    near = (
        f" Distance to reference: total variation between p(c|x) and that of a long SMC run, mean of {gold} digits."
        if gold
        else ""
    )
    note = (
        "encoder: the model's own proposal; MIS: the mixture; REFINED: a proposal of full covariance fitted for each "
        f"digit and class; IMPROVED: the same after gradient steps on its bound; ESCALATED: twice the steps and more "
        f"draws for the digits that IMPROVED leaves unreliable.{near}"
    )
    measured = (
        SHARE, KHAT, ESS, Column("draws_mean", "draws, mean", 0), Column("gold_distance", "distance to reference", 4),
        Column("seconds", "seconds", 0),
    )  # fmt: skip
    return _by_stage(refined, "refinement", "Stages of inference", measured, note)


def better_table(refined: Sequence[Row]) -> Table | None:
    """Decisions at every stage of inference, and without weights on the same digits."""
    if not refined:
        return None
    without = (replace(ACCURACY, title="accuracy without weights, %"), replace(PRECISION, title="AP without weights"))
    measured = (without[0], ACCURACY_IS, without[1], PRECISION_IS, ENTROPY_IS)
    note = f"{PRECISION_NOTE} Without weights: by the encoder alone."
    return _by_stage(refined, "better", "Decisions", measured, note)


def _by_stage(refined: Sequence[Row], name: str, caption: str, measured: Sequence[Column], note: str) -> Table:
    body = [
        {"model": name, "stage": stage, **cells(where(rows, stage=stage), measured)}
        for name, rows in by_selection(refined).items()
        for stage in ordered((str(row["stage"]) for row in rows), STAGES)
    ]
    n = counts_of(refined, "n_images")
    caption = f"{caption} on the same {n or 'test'} digits{_drawn(refined)}: mean ± sd over {seed_count(refined)}."
    return Table(name, caption, [Column("model", "model"), Column("stage", "inference"), *measured], body, note)


def _drawn(rows: Sequence[Row]) -> str:
    draws = counts_of(rows, "n_draws")
    return f", {draws} draws" if draws else ""


def agreement_table(agreement: Sequence[Row]) -> Table | None:
    """Whether the inference is certified, and whether the model agrees with held-out labels."""
    if not agreement:
        return None
    measured = (
        Column("certified_share", "certified, % of digits", 1, 100),
        Column("confidence", "expected accuracy, %", 1, 100),
        replace(ACCURACY, title="accuracy, %"),
        Column("log_score", "log score", 3),
        Column("log_score_plugin", "log score without weights", 3),
        Column("ece", "calibration error, %", 1, 100),
    )
    body = [
        {
            "model": name,
            **{key: most_common(rows, key) for key in ("inference", "model_verdict")},
            **cells(rows, measured),
        }
        for name, rows in by_selection(agreement).items()
    ]
    names = {"model": "model", "inference": "inference", "model_verdict": "model and labels"}
    n_labels = counts_of(agreement, "n_held_out")
    return Table(
        "agreement",
        f"Inference and model assessed separately: is p(c|x) accurate, and does it agree with labels? On "
        f"{n_labels or 'the'} held-out labels, mean ± sd over {seed_count(agreement)}.",
        [*(Column(key, heading) for key, heading in names.items()), *measured],
        body,
        f"{_gaps(agreement)}The model agrees if accuracy and log score are consistent with labels drawn from its own "
        "p(c|x), by a test with simulated labels.",
    )


def _gaps(agreement: Sequence[Row]) -> str:
    """Expected minus actual accuracy of each model, with the standard error over digits."""
    gap = Column("gap", "", 2, 100, signed=True)
    gaps = [
        f"{name} {gap.text(cell(mean))} points"
        + (f" (se {replace(gap, signed=False).text(error.mean)} over digits)" if error else "")
        for name, rows in by_selection(agreement).items()
        for mean, error in [(mean_of(rows, "gap"), mean_of(rows, "gap_se"))]
        if mean
    ]
    return f"Expected minus actual accuracy: {'; '.join(gaps)}. " if gaps else ""


def most_common(rows: Sequence[Row], key: str) -> str | None:
    """The most common value over seeds, with its count if the seeds differ."""
    values = Counter(str(row[key]) for row in rows if row.get(key) is not None)
    if not values:
        return None
    (value, n), total = values.most_common(1)[0], values.total()
    return value if n == total else f"{value} ({n} of {total} seeds)"


# -------------------------------------------------------------------------------------------------- decisions
def methods_table(models: Sequence[Row], cross: Sequence[Row]) -> Table | None:
    """Nine-class models, free-class models and supervised networks, most precise first.

    Several networks by one objective are left out: they stand beside the mixture in the tables of all pairs.
    """
    shown = [row for row in cross if not is_ensemble(row)]
    candidates = [*methods(models, shown), *weighted(shown), *baselines(shown)]
    if not candidates:
        return None
    body = sorted(map(_method_row, candidates), key=lambda row: row["auprc"].value, reverse=True)
    for column in (PRECISION, ACCURACY, _AUROC):
        body = mark_column(body, column.key, max)
    columns = [
        Column("name", "model"), Column("kind", "classes"), Column("score", "reject score"),
        Column("networks", "networks"), Column("n_draws", "draws"), PRECISION,
    ]  # fmt: skip
    seeds = seed_count(row for method in candidates for row in method.rows)
    caption = f"Rejection of nines and accuracy, most precise first: mean ± sd over {seeds}."
    note = (
        f"{PRECISION_NOTE} Without weights unless stated. Proposals averaged: the mean of the probabilities of three "
        "recognition networks fitted to one model, by different objectives, which share the draws of a row. These "
        "networks are also trained on unlabelled digits, including nines, which the supervised networks never see. "
        "With a free class the task is a different one."
    )
    return Table("methods", caption, [*columns, _AUROC, ACCURACY], body, note)


_AUROC = Column("auroc", "AUROC", 3)


def _method_row(method: Method) -> dict[str, Any]:
    return {
        "name": method.name,
        "kind": method.kind,
        "score": method.score,
        "networks": counts_of(method.rows, "networks"),
        "n_draws": counts_of(method.rows, "n_draws"),
        "auprc": cell(mean_of(method.rows, method.key)),
        "auroc": cell(mean_of(method.rows, method.key.replace("auprc", "auroc"))),
        "accuracy": cell(mean_of(method.rows, method.accuracy)),
    }


def decisions_table(decisions: Sequence[Row], name: str, caption: str, *, detail: bool = False) -> Table | None:
    """Rejections, accuracy and coverage of each decision rule on seen and unseen digits."""
    if not decisions:
        return None
    measured = (
        Column("rejected_known", "seen rejected, %", 1, 100), Column("rejected_unseen", "nines rejected, %", 1, 100),
        Column("accuracy_accepted", "accuracy of the accepted, %", 1, 100), Column("coverage", "coverage, %", 1, 100),
        Column("threshold", "threshold", 3),
    )  # fmt: skip
    rows = [{**row, "title": title(row)} for row in decisions]
    body = [
        {
            "rule": rule,
            "title": model,
            "estimator": _ESTIMATORS.get(kind, kind),
            "score": score,
            **cells(part, measured),
        }
        for (rule,), of_rule in grouped(rows, "rule").items()
        for (model, kind, score), part in grouped(of_rule, "title", "estimator", "score").items()
    ]
    names = {"title": "model", "rule": "rule", "estimator": "probabilities", "score": "reject score"}
    columns = [*(Column(key, heading) for key, heading in names.items()), *measured]
    note = (
        "The conformal rule takes its threshold from held-out labels and guarantees to reject at most its share of "
        "seen digits, on average over such labels; it guarantees nothing for unseen digits."
    )
    return Table(name, f"{caption}: mean ± sd over {seed_count(decisions)}.", columns, body, note, detail)


_ESTIMATORS = {"plugin": "without weights"}


def stages_table(stages: Sequence[Row], released: Mapping[str, Any]) -> Table | None:
    """Seconds of every stage, their sum, and the hours of the released code."""
    timed = [row for row in stages if row.get("seconds") is not None]
    if not timed:
        return None
    body = [
        {"stage": stage, "what": _joined(part, "what"), "device": _joined(part, "device"), "seconds": _total(part)}
        for (stage,), part in grouped(timed, "stage").items()
    ]
    body.append({"stage": "all", "what": "", "device": _joined(timed, "device"), "seconds": _total(timed)})
    if "gpu_hours" in released:
        seconds = Value(3600.0 * released["gpu_hours"], None, " (about)")
        body.append(
            {"stage": "released code", "what": "the paper's grid, run unchanged", "device": "a GPU", "seconds": seconds}
        )
    columns = [
        Column("stage", "stage"),
        Column("seconds", "seconds", 0),
        Column("what", "what"),
        Column("device", "on"),
    ]
    note = "Of processes that share a GPU each counts in full."
    return Table("stages", "Seconds of every stage, all seeds together.", columns, body, note)


def _joined(rows: Sequence[Row], key: str) -> str:
    return "; ".join(dict.fromkeys(str(row[key]) for row in rows if row.get(key)))


def _total(rows: Sequence[Row]) -> Value:
    return Value(float(sum(row["seconds"] for row in rows)))
