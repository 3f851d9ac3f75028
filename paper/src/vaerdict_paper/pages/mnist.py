"""The page of the MNIST experiment: summary, claims, the paper's table, inference, rejection, pictures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from vaerdict.report.document import Block, Document, Picture, present
from vaerdict.report.records import Row, grouped, rows_of
from vaerdict.report.tables import number
from vaerdict_paper.experiments.ppca import published
from vaerdict_paper.pages import mnist_figures, mnist_tables
from vaerdict_paper.pages.claims import RULE, judged
from vaerdict_paper.pages.crossed import cross_blocks
from vaerdict_paper.pages.mnist_claims import (
    BOUNDS,
    SCALES,
    paper_claims,
    paper_claims_by_sizes,
    refinement_claims,
    rejection_claims,
    targets,
    third_step,
)
from vaerdict_paper.pages.mnist_rows import SIZES, best_model, crossed, half_labelled
from vaerdict_paper.pages.mnist_summary import summary
from vaerdict_paper.pages.mnist_tables import CROSS
from vaerdict_paper.pages.ppca_tables import PROPOSALS
from vaerdict_paper.pages.seed_statistics import counts_of, where

_NEEDED = {
    "models": ("model", "seed"),
    "cross": ("model", "seed"),
    "refined": ("model", "seed", "stage"),
    "agreement": ("model", "seed"),
    "decisions": ("model", "seed", "rule"),
    "stages": ("stage",),
    "curves": ("kind", "name", "x", "y"),
    "digits": ("kind",),
    "latent": ("x", "y", "label"),
}
_MOST_DIGITS, _MOST_POINTS = 24, 900
_UNSEEN = 9


def document(results: dict[str, Any], manifest: dict[str, Any] | None) -> Document:
    """The report on a finished MNIST run; stages that were not run are left out."""
    results = {key: value for key, value in results.items() if value is not None}
    parts = {name: rows_of(results, name, *needed) for name, needed in _NEEDED.items()}
    source = published()["mnist"]
    best, bounds = results.get("preset") == "best", results.get("preset") in BOUNDS
    every = parts["models"]  # with those that differ in the weight of labelled images, of which only bounds are shown
    if bounds:
        parts |= {name: [row for row in parts[name] if not half_labelled(row)] for name in ("models", "decisions")}
    models, cross, refined = parts["models"], parts["cross"], parts["refined"]
    printed = source["printed"]
    tested = paper_claims_by_sizes(models, printed) if bounds else paper_claims(models, cross, printed)
    claims, goals, rejection, inference = judged(
        [] if best else tested,
        targets(results.get("preset"), every, cross, refined, _total_seconds(parts["stages"]), printed),
        [*([] if best or bounds else rejection_claims(models, cross)), *third_step(cross)],
        refinement_claims(refined),
    )
    rule = f"{RULE} {SCALES}"
    methods = ("Rejecting the unlabelled digit", [rejection, mnist_tables.methods_table(models, cross)])
    parts_by_sizes = [where(models, sizes=name) for name in SIZES] if bounds else [models]
    by_sizes = [rows for rows in parts_by_sizes if rows]
    tables = [mnist_tables.models_table(rows, printed, source["released"]) for rows in by_sizes]
    sections: list[tuple[str, Sequence[Block | None]]] = [
        ("Claims of the paper", [rule, claims] if claims else []),
        ("Targets", [None if claims else rule, goals] if goals else []),
        *([methods] if best else []),
        (
            "Each model with its own proposal" if best else "The paper's table",
            [
                None if best else mnist_tables.iwelbo_table(every, printed, source["released"]),
                mnist_tables.labelled_table(every) if bounds else None,
                *([] if best else tables),
                *(mnist_tables.weights_table(rows, printed) for rows in by_sizes),
            ],
        ),
        ("Every model with every proposal", _cross(cross)),
        (
            "Better inference",
            [inference, mnist_tables.refinement_table(refined), mnist_tables.better_table(refined)],
        ),
        ("The sampler's error and the model's", [mnist_tables.agreement_table(parts["agreement"])]),
        *([] if best else [methods]),
        ("Decision rules", [*_rules(parts["decisions"], best_model(models)), *_curves(parts["curves"])]),
        ("Examples of digits", [*_digits(_shown(parts["digits"])), _latent(_shown(parts["latent"]))]),
        ("Cost", _cost(parts["stages"], source["released"])),
    ]
    return Document(
        "MNIST: decide, or reject", summary(results, parts, claims, goals, inference), present(sections), manifest
    )


def _cross(cross: Sequence[Row]) -> list[Block]:
    """Heat maps and tables of precision and accuracy, without and with weights."""
    blocks: list[Block] = []
    rows = crossed(cross)
    about = f"{counts_of(rows, 'n_draws') or 'equal'} draws"
    for quantity, title in CROSS.items():
        both = cross_blocks(rows, quantity, PROPOSALS, about=about, title=title, pick=max, draws="n_draws")
        if both:
            table, picture = both
            blocks += [picture, replace(table, note=_TOGETHER)]
    return blocks


_TOGETHER = (
    "MIS: three networks by IWAE, WW and CHI together, with weights also the prior; 3 IWAE: three networks by one "
    "objective, likewise. All networks of a pair share its draws."
)


def _rules(decisions: Sequence[Row], model: str | None) -> list[Block | None]:
    """The rules on the selected model and the supervised network; the others folded."""
    shown = [row for row in decisions if row["model"] == model or row.get("estimator") == "CNN"]
    rest = [row for row in decisions if row["model"] != model and row.get("estimator") != "CNN"]
    caption = f"Decision rules on {model} and the supervised network" if shown else "Decision rules"
    return [
        mnist_tables.decisions_table(shown or decisions, "decisions", caption),
        mnist_tables.decisions_table(
            rest if shown else [], "decisions-others", "Decision rules on the other models", detail=True
        ),
    ]


_AXES = {
    "risk-coverage": ("coverage: share of digits decided", "risk: share wrong among the decided"),
    "precision-recall": ("recall: share of the nines rejected", "precision: share of nines among the rejected"),
}


def _curves(curves: Sequence[Row]) -> list[Block]:
    return [_curve(str(kind), rows) for (kind,), rows in grouped(curves, "kind").items()]


def _curve(kind: str, rows: Sequence[Row]) -> Picture:
    x, y = _AXES.get(kind, ("x", "y"))
    names = list(dict.fromkeys(str(row["name"]) for row in rows))
    direction = {"risk-coverage": " Lower is better.", "precision-recall": " Higher is better."}.get(kind, "")
    return Picture(
        kind,
        f"{kind.capitalize()} curves on the test digits.{direction}",
        f"{kind.capitalize()} curves, {y} against {x}, of {', '.join(names)}.",
        lambda: mnist_figures.curves(rows, x, y),
    )


_KINDS = {
    "rejected": "Correctly rejected: nines.",
    "wrongly rejected": "Wrongly rejected: seen digits.",
    "wrongly accepted": "Wrongly accepted: nines classified as a seen digit.",
}


def _shown(rows: Sequence[Row]) -> list[Row]:
    """The rows of the variant that claims are about, all rows where it is not named."""
    name = next((name for name in SIZES if where(rows, variant=name)), None)
    return where(rows, variant=name) if name else list(rows)


def _digits(digits: Sequence[Row]) -> list[Block]:
    groups = grouped((row for row in digits if row.get("pixels") is not None), "kind")
    return [_gallery(str(kind), rows[:_MOST_DIGITS], len(rows)) for (kind,), rows in groups.items()]


def _gallery(kind: str, rows: Sequence[Row], total: int) -> Picture:
    share = f" {len(rows)} of {total}." if len(rows) < total else ""
    return Picture(
        f"digits-{kind}",
        f"{_KINDS.get(kind, kind)}{share} Under each: its label, the predicted digit, its reject score.",
        f"Pictures of digits {kind}: {'; '.join(map(mnist_figures.digit_text, rows))}.",
        lambda: mnist_figures.digits(rows),
    )


def _latent(latent: Sequence[Row]) -> Picture | None:
    complete = [row for row in latent if row["x"] is not None and row["y"] is not None]
    shown = mnist_figures.thinned(complete, _MOST_POINTS)
    if not shown:
        return None
    by_label = sorted(grouped(shown, "label").items(), key=lambda item: str(item[0]))
    points = {label: [(row["x"], row["y"]) for row in rows] for (label,), rows in by_label}
    counts = ", ".join(f"{label}: {len(xy)}" for label, xy in points.items())
    return Picture(
        "latent",
        f"Latent means of {len(shown)} test digits on a plane, drawn as numerals and coloured by class; the nines, "
        "never labelled, are large and in ink.",
        f"Scatter of latent means; points by digit: {counts}.",
        lambda: mnist_figures.latent(points, _UNSEEN),
    )


def _total_seconds(stages: Sequence[Row]) -> float | None:
    seconds = [row["seconds"] for row in stages if row.get("seconds") is not None]
    return float(sum(seconds)) if seconds else None


def _cost(stages: Sequence[Row], released: Mapping[str, Any]) -> list[Block | None]:
    seconds = _total_seconds(stages)
    if not seconds:
        return []
    ratio = 3600 * released["gpu_hours"] / seconds
    sentence = (
        f"All stages took {number(seconds / 60, 1)} minutes; the released code takes about {released['gpu_hours']} GPU "
        f"hours for its grid alone, {number(ratio, 0)} times as long, on a different machine."
    )
    return [sentence, mnist_tables.stages_table(stages, released)]
