"""Tables of the MNIST experiment: models beside the published ones, pairs, who rejects best, rules, seconds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from vaerdict.report.summary import Row, grouped, in_order, mean_of, seeds_of, where
from vaerdict.report.tables import Column, Table, Value, cell, cells, mark, mark_column
from vaerdict_paper.pages.mnist_rows import (
    Method,
    baselines,
    counts_of,
    crossed,
    methods,
    nearest,
    pair_means,
    title,
    weighted,
)
from vaerdict_paper.pages.ppca_tables import CROSSED

IWELBO, KHAT = Column("iwelbo", "IWELBO", 2), Column("khat", "k-hat, median", 2)
PRECISION, ACCURACY = Column("auprc", "AP", 3), Column("accuracy", "accuracy, %", 1, 100)
SHARE = Column("khat_share_ok", "k-hat in order, % of digits", 1, 100)
ENTROPY, ESS = Column("auprc_entropy", "AP by entropy", 3), Column("ess", "ESS, % of draws", 1, 100)
PRECISION_IS = Column("auprc_is", "AP with weights", 3)
ENTROPY_IS = Column("auprc_entropy_is", "AP by entropy with weights", 3)
ACCURACY_IS = Column("accuracy_is", "accuracy with weights, %", 1, 100)

PRECISION_NOTE = "AP: average precision of rejecting the nines."


def models_table(models: Sequence[Row], printed: Mapping[str, Any], released: Mapping[str, Any]) -> Table | None:
    """The paper's table: ours, as printed, and from its code run as it is."""
    rows = nearest(models)
    if not rows:
        return None
    columns = [IWELBO, *_beside(IWELBO), PRECISION, *_beside(PRECISION), ENTROPY, ACCURACY, *_beside(ACCURACY)[1:]]
    published = {
        f"{q.key}_{at}": source.get(q.key, {})
        for q in _COMPARED
        for at, source in (("paper", printed), ("released", released))
    }
    body = [
        {
            "model": name,
            **cells(where(rows, model=name), (*_COMPARED, ENTROPY)),
            **{key: numbers.get(name) for key, numbers in published.items()},
        }
        for name in in_order((row["model"] for row in rows), CROSSED)
    ]
    for column in (*_COMPARED, ENTROPY):
        body = mark_column(body, column.key, max)
    apart = title({**rows[0], "model": "M1+M2"})
    caption = (
        f"The paper's table: ours, {apart}, mean ± sd over {seeds_of(rows)}; as printed; and its released code run as "
        "it is. Each model with its own proposal, without weights."
    )
    notes = [source["note"] for source in (printed, released) if "note" in source]
    return Table("models", caption, [Column("model", "model"), *columns], body, " ".join([PRECISION_NOTE, *notes]))


_COMPARED = (IWELBO, PRECISION, ACCURACY)


def _beside(quantity: Column) -> list[Column]:
    """Where the published numbers of a quantity stand; the paper prints accuracies in its text alone."""
    ends = {"paper": "paper", "released": "released code"}
    return [replace(quantity, key=f"{quantity.key}_{at}", title=f"{quantity.title}, {who}") for at, who in ends.items()]


def weights_table(models: Sequence[Row], printed: Mapping[str, Any]) -> Table | None:
    """What the weights of each model's own proposal are worth, and what they decide, beside the paper's accuracy."""
    rows = nearest(models)
    measured = (KHAT, SHARE, ESS, PRECISION_IS, ENTROPY_IS, ACCURACY_IS)
    if not any(row.get(column.key) is not None for row in rows for column in measured):
        return None
    names = in_order((row["model"] for row in rows), CROSSED)
    paper = {"accuracy_paper": printed.get("accuracy_is")}
    body = [{"model": name, **cells(where(rows, model=name), measured), **paper} for name in names]
    for column in (PRECISION_IS, ENTROPY_IS, ACCURACY_IS):
        body = mark_column(body, column.key, max)
    draws = counts_of(rows, "n_draws")
    caption = (
        f"The weights of each model's own proposal{f', {draws} draws' if draws else ''}: k-hat, effective sample size, "
        f"and decisions with weights kept in log space; mean ± sd over {seeds_of(rows)}."
    )
    columns = [Column("model", "model"), *measured, Column("accuracy_paper", "the same, paper: about, %", 0, 100)]
    return Table("weights", caption, columns, body, PRECISION_NOTE)


CROSS = {
    PRECISION: "Average precision without weights",
    PRECISION_IS: "Average precision with weights",
    ACCURACY: "Accuracy (%) without weights",
    ACCURACY_IS: "Accuracy (%) with weights",
}
"""What is shown for every pair of model and proposal."""


def cross_table(cross: Sequence[Row], quantity: Column) -> Table | None:
    """One quantity for every model (down) and proposal (across), the highest of each model marked."""
    means = pair_means(cross, quantity.key)
    if not means:
        return None
    body = [{"model": m, **mark({q: cell(mean) for q, mean in row.items()}, max)} for m, row in means.items()]
    columns = [Column("model", "model"), *(replace(quantity, key=q, title=q) for q in next(iter(means.values())))]
    rows = crossed(cross)
    draws = counts_of(rows, "n_draws") or "equal"
    caption = f"{CROSS[quantity]}, {draws} draws from every proposal: mean ± sd over {seeds_of(rows)}."
    return Table(f"cross-{quantity.key}", caption, columns, body)


def methods_table(models: Sequence[Row], cross: Sequence[Row]) -> Table | None:
    """Nine-class models, free-class models and plain networks, most precise first."""
    every = [*methods(models, cross), *weighted(cross), *baselines(cross)]
    if not every:
        return None
    body = sorted(map(_method_row, every), key=lambda row: row["auprc"].value, reverse=True)
    for column in (PRECISION, ACCURACY, _AUROC):
        body = mark_column(body, column.key, max)
    columns = [Column("name", "who decides"), Column("kind", "classes"), Column("score", "reject score"), PRECISION]
    seeds = seeds_of(row for method in every for row in method.rows)
    caption = f"Who rejects nines best, and at what accuracy: mean ± sd over {seeds}."
    note = (
        f"{PRECISION_NOTE} No weights, where nothing else is said. Proposals averaged: the mean of the probabilities "
        "of three recognition networks fitted to one model. These networks are trained on unlabelled digits too, nines "
        "among them, which the plain networks never see. A free class is another task."
    )
    return Table("methods", caption, [*columns, _AUROC, ACCURACY], body, note)


_AUROC = Column("auroc", "AUROC", 3)


def _method_row(method: Method) -> dict[str, Any]:
    return {
        "name": method.name,
        "kind": method.kind,
        "score": method.score,
        "auprc": cell(mean_of(method.rows, method.key)),
        "auroc": cell(mean_of(method.rows, method.key.replace("auprc", "auroc"))),
        "accuracy": cell(mean_of(method.rows, "accuracy_is" if method.key.endswith("_is") else "accuracy")),
    }


def decisions_table(decisions: Sequence[Row], name: str, caption: str, *, detail: bool = False) -> Table | None:
    """What each rule does to seen and unseen digits."""
    if not decisions:
        return None
    measured = (
        Column("rejected_known", "seen rejected, %", 1, 100), Column("rejected_unseen", "nines rejected, %", 1, 100),
        Column("accuracy_accepted", "accuracy of the accepted, %", 1, 100), Column("coverage", "coverage, %", 1, 100),
        Column("threshold", "threshold", 3),
    )  # fmt: skip
    rows = [{**row, "title": title(row)} for row in decisions]
    body = [
        {"rule": rule, "title": who, "estimator": _ESTIMATORS.get(how, how), "score": score, **cells(part, measured)}
        for (rule,), ruled in grouped(rows, "rule").items()
        for (who, how, score), part in grouped(ruled, "title", "estimator", "score").items()
    ]
    names = {"title": "model", "rule": "rule", "estimator": "probabilities", "score": "reject score"}
    columns = [*(Column(key, words) for key, words in names.items()), *measured]
    note = (
        "The conformal rule takes its threshold from held-out labels and promises to reject at most its share of seen "
        "digits, on average over such labels, and nothing about unseen ones; the cost rule rejects where deciding "
        "would cost more."
    )
    return Table(name, f"{caption}: mean ± sd over {seeds_of(decisions)}.", columns, body, note, detail)


_ESTIMATORS = {"plugin": "without weights", "corrected": "with weights"}


def stages_table(stages: Sequence[Row], released: Mapping[str, Any]) -> Table | None:
    """Seconds of every stage, and the released code's hours under their sum."""
    spent = [row for row in stages if row.get("seconds") is not None]
    if not spent:
        return None
    body = [
        {"stage": stage, "what": _joined(part, "what"), "device": _joined(part, "device"), "seconds": _total(part)}
        for (stage,), part in grouped(spent, "stage").items()
    ]
    body.append({"stage": "all", "what": "", "device": _joined(spent, "device"), "seconds": _total(spent)})
    if "gpu_hours" in released:
        seconds = Value(3600.0 * released["gpu_hours"], None, " (about)")
        body.append(
            {"stage": "released code", "what": "the paper's grid, run as it is", "device": "a GPU", "seconds": seconds}
        )
    columns = [
        Column("stage", "stage"),
        Column("seconds", "seconds", 0),
        Column("what", "what"),
        Column("device", "on"),
    ]
    return Table("stages", "Seconds of every stage, all seeds together.", columns, body)


def _joined(rows: Sequence[Row], key: str) -> str:
    return "; ".join(dict.fromkeys(str(row[key]) for row in rows if row.get(key)))


def _total(rows: Sequence[Row]) -> Value:
    return Value(float(sum(row["seconds"] for row in rows)))
