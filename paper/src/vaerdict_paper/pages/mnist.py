"""The page of the MNIST experiment: verdict, claims, the paper's table, what inference adds, rejection, pictures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from vaerdict.report import figures
from vaerdict.report.claims import RULE, Claim
from vaerdict.report.document import Block, Document, Picture, Section
from vaerdict.report.summary import Row, grouped, number, rows_of
from vaerdict.report.tables import Column
from vaerdict_paper.experiments.ppca import published
from vaerdict_paper.pages import mnist_figures, mnist_inference, mnist_tables
from vaerdict_paper.pages.mnist_claims import (
    SCALES,
    aims,
    paper_claims,
    refinement_claims,
    rejection_claims,
    third_step,
)
from vaerdict_paper.pages.mnist_rows import best_model, pair_means
from vaerdict_paper.pages.mnist_tables import ACCURACY, ACCURACY_IS, CROSS
from vaerdict_paper.pages.mnist_words import verdict

Parts = Mapping[str, Sequence[Row]]

_NEEDED = {
    "models": ("model", "seed"),
    "cross": ("model", "seed"),
    "refined": ("model", "seed", "rung"),
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
    models, cross, refined = parts["models"], parts["cross"], parts["refined"]
    best = results.get("preset") == "best"
    claims = [] if best else paper_claims(models, cross, source["printed"])
    goals = aims(results.get("preset"), models, cross, refined, _spent(parts["stages"]))
    rejection = [] if best else rejection_claims(models, cross)
    methods = (
        "Rejecting what was never labelled",
        [*_listed([*rejection, *third_step(cross)]), mnist_tables.methods_table(models, cross)],
    )
    sections = [
        ("What holds of the paper", [f"{RULE} {SCALES}", claims] if claims else []),
        ("What was aimed at", [*([] if claims else [f"{RULE} {SCALES}"]), goals] if goals else []),
        *([methods] if best else []),
        (
            "Each model with its own proposal" if best else "The paper's table",
            [
                None if best else mnist_tables.models_table(models, source["printed"], source["released"]),
                mnist_tables.weights_table(models, source["printed"]),
            ],
        ),
        ("Every model with every proposal", _cross(cross)),
        (
            "Better inference",
            [
                *_listed(refinement_claims(refined)),
                mnist_inference.refinement_table(refined),
                mnist_inference.better_table(refined),
            ],
        ),
        ("The sampler's error and the model's", [mnist_inference.agreement_table(parts["agreement"])]),
        *([] if best else [methods]),
        ("Rules that decide", [*_rules(parts["decisions"], best_model(models)), *_curves(parts["curves"])]),
        ("The digits themselves", [*_digits(parts["digits"]), *_latent(parts["latent"])]),
        ("What it cost", _cost(parts["stages"], source["released"])),
    ]
    return Document("MNIST: decide, or reject", verdict(results, parts, claims, goals), _present(sections), manifest)


def _present(sections: Sequence[tuple[str, Sequence[Block | None]]]) -> list[Section]:
    kept = [(heading, [block for block in blocks if block is not None]) for heading, blocks in sections]
    return [Section(heading, blocks) for heading, blocks in kept if blocks]


def _listed(claims: Sequence[Claim]) -> list[Block]:
    return [claims] if claims else []


def _cross(cross: Sequence[Row]) -> list[Block]:
    """Heat maps of precision and accuracy without and with weights; the tables of accuracy folded."""
    blocks: list[Block] = []
    for quantity in CROSS:
        table = mnist_tables.cross_table(cross, quantity)
        if table:
            blocks += [_heat(cross, quantity), replace(table, detail=quantity in (ACCURACY, ACCURACY_IS))]
    return blocks


def _heat(cross: Sequence[Row], quantity: Column) -> Picture:
    means = pair_means(cross, quantity.key)
    values = {m: {q: mean and mean.mean for q, mean in row.items()} for m, row in means.items()}
    rows = "; ".join(
        f"{m}: " + ", ".join(f"{q} {quantity.text(v)}" for q, v in row.items()) for m, row in values.items()
    )
    known = [v for row in values.values() for v in row.values() if v is not None]
    return Picture(
        f"cross-{quantity.key}",
        f"{CROSS[quantity]}: lighter is better, from {quantity.text(min(known))} to {quantity.text(max(known))}; the "
        "best proposal of each model is framed.",
        f"Heat map, models by proposals: {CROSS[quantity]}. {rows}.",
        lambda: figures.heat_map(values, quantity, max),
    )


def _rules(decisions: Sequence[Row], model: str | None) -> list[Block | None]:
    """The rules on the kept model and the plain network; the others folded."""
    shown = [row for row in decisions if row["model"] == model or row.get("estimator") == "CNN"]
    rest = [row for row in decisions if row["model"] != model and row.get("estimator") != "CNN"]
    caption = f"What each rule does, on {model} and the plain network" if shown else "What each rule does"
    return [
        mnist_tables.decisions_table(shown or decisions, "decisions", caption),
        mnist_tables.decisions_table(
            rest if shown else [], "decisions-others", "The rules on the other models", detail=True
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
    good = {"risk-coverage": " Lower is better.", "precision-recall": " Higher is better."}.get(kind, "")
    return Picture(
        kind,
        f"{kind.capitalize()} curves on the test digits.{good}",
        f"{kind.capitalize()} curves, {y} against {x}, of {', '.join(names)}.",
        lambda: mnist_figures.curves(rows, x, y),
    )


_KINDS = {
    "rejected": "Rightly rejected: nines that no labelled class was sure of.",
    "wrongly rejected": "Wrongly rejected: seen digits that were set aside.",
    "wrongly accepted": "Wrongly accepted: nines taken for a seen digit, or seen digits taken for another.",
}


def _digits(digits: Sequence[Row]) -> list[Block]:
    groups = grouped((row for row in digits if row.get("pixels") is not None), "kind")
    return [_gallery(str(kind), rows[:_MOST_DIGITS], len(rows)) for (kind,), rows in groups.items()]


def _gallery(kind: str, rows: Sequence[Row], total: int) -> Picture:
    some = f" {len(rows)} of {total}." if len(rows) < total else ""
    return Picture(
        f"digits-{kind}",
        f"{_KINDS.get(kind, kind)}{some} Under each: what it is, what it was taken for, its reject score.",
        f"Pictures of digits {kind}: {'; '.join(map(mnist_figures.words, rows))}.",
        lambda: mnist_figures.digits(rows),
    )


def _latent(latent: Sequence[Row]) -> list[Block]:
    known = [row for row in latent if row["x"] is not None and row["y"] is not None]
    shown = mnist_figures.thinned(known, _MOST_POINTS)
    if not shown:
        return []
    points = {
        label: [(row["x"], row["y"]) for row in rows]
        for (label,), rows in sorted(grouped(shown, "label").items(), key=lambda item: str(item[0]))
    }
    counts = ", ".join(f"{label}: {len(by)}" for label, by in points.items())
    return [
        Picture(
            "latent",
            f"Latent means of {len(shown)} test digits on a plane, each drawn as itself and coloured by class; the "
            "nines, never labelled, large and in ink.",
            f"Scatter of latent means; points by digit: {counts}.",
            lambda: mnist_figures.latent(points, _UNSEEN),
        )
    ]


def _spent(stages: Sequence[Row]) -> float | None:
    known = [row["seconds"] for row in stages if row.get("seconds") is not None]
    return float(sum(known)) if known else None


def _cost(stages: Sequence[Row], released: Mapping[str, Any]) -> list[Block | None]:
    spent = _spent(stages)
    if not spent:
        return []
    ratio = 3600 * released["gpu_hours"] / spent
    words = (
        f"All stages took {number(spent / 60, 1)} minutes; the released code takes about {released['gpu_hours']} hours "
        f"of a GPU for its grid alone, {number(ratio, 0)} times as long, not on the same machine."
    )
    return [words, mnist_tables.stages_table(stages, released)]
