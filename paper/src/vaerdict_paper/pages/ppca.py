"""The page of the pPCA experiment: the paper's claims, its tables and figures, and extensions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from vaerdict import diagnostics
from vaerdict.report.document import Block, Document, Picture, present
from vaerdict.report.records import Row, grouped, rows_of
from vaerdict.report.tables import number
from vaerdict_paper.experiments.ppca import published
from vaerdict_paper.pages import ppca_tables
from vaerdict_paper.pages.claims import ADDED, RULE, Judgement, judged, tally
from vaerdict_paper.pages.crossed import cross_blocks
from vaerdict_paper.pages.figures import Range, line, log_curves, ranges
from vaerdict_paper.pages.ppca_claims import ERRORS, further_claims, paper_claims
from vaerdict_paper.pages.ppca_tables import KHAT, MAE, NOISES, PROPOSALS, beyond_rows, floor_means
from vaerdict_paper.pages.seed_statistics import counts_of, mean_of, where


def document(results: dict[str, Any], manifest: dict[str, Any] | None) -> Document:
    """The report on a finished pPCA run."""
    models = rows_of(results, "models", "model", "seed", "k_train", "training")
    cross = rows_of(results, "cross", "model", "proposal", "seed", "k_train", "training", "n_draws")
    curve = rows_of(results, "curve", "proposal", "noise", "n_draws")
    floors = rows_of(results, "floors", "floor")
    printed = published()["ppca"]
    particles = sorted({row["k_train"] for row in where(models, training="paper")})
    claims, further = judged(paper_claims(models, cross, printed), further_claims(models, cross))
    sections: list[tuple[str, list[Block | None]]] = [
        ("Claims of the paper", [f"{RULE} {ADDED} {ERRORS}", claims]),
        ("Beyond the paper", [further, ppca_tables.beyond_table(cross, floors), _curves(curve, floors)]),
        *((f"Trained with {k} particles", _at(k, models, cross, results, printed)) for k in particles),
        ("Reliability of the weights", [_khat(results, cross)]),
        ("Details", _details(results, models, cross, floors, printed)),
    ]
    title = "pPCA: decisions checked against exact answers"
    return Document(title, _summary(results, claims, cross, floors), present(sections), manifest)


def _summary(results: Row, claims: Sequence[Judgement], cross: Sequence[Row], floors: Sequence[Row]) -> list[str]:
    n = len(results.get("seeds", []))
    seeds = f"{n} seeds" if n != 1 else "one seed"
    sentences = [
        f"Of {len(claims)} claims of the paper, tested with equal draws and corrected losses, "
        f"{tally(claims)} ({seeds}).",
        *_mixtures(cross, floors),
    ]
    preset = results.get("preset")
    if preset != "paper":
        sentences.append(f"This is the {preset} preset: shorter training and fewer draws than a run to be cited.")
    return sentences


def _mixtures(cross: Sequence[Row], floors: Sequence[Row]) -> list[str]:
    """The errors of the full-rank and the paper's mixture with each kind of draws, and of exact sampling."""
    rows = where(beyond_rows(cross), estimator="snis")
    parts = []
    for noise, title in NOISES.items():
        full, paper = (mean_of(where(rows, noise=noise, proposal=q), "mae") for q in ("MIS-full", "MIS"))
        if full and paper:
            parts.append(
                f"{number(full.mean, 4)} with the full-rank mixture and {number(paper.mean, 4)} with the paper's, "
                f"both with {title} draws"
            )
    if not parts:
        return []
    n = rows[0]["n_draws"]
    exact = floor_means(floors, n)
    floor = ", ".join(f"{number(mean.mean, 4)} with {NOISES[kind]} ones" for kind, mean in exact.items())
    return [
        f"On a model trained to convergence, with {n} draws, a tail probability is off on average by "
        f"{'; by '.join(parts)}." + (f" As many draws from the true posterior itself give {floor}." if floor else "")
    ]


def _at(k: int, models: Sequence[Row], cross: Sequence[Row], results: Row, printed: Row) -> list[Block | None]:
    """Tables and heat maps at one particle count."""
    blocks: list[Block | None] = [ppca_tables.models_table(models, k, printed.get(f"k{k}", {}))]
    khat_draws = results.get("settings", {}).get("khat_draws")
    rows = [{**row, "khat_draws": khat_draws} for row in where(cross, k_train=k, training="paper")]
    for quantity, key in ((MAE, "n_draws"), (KHAT, "khat_draws")):
        about = f"trained with {k} particles, {counts_of(rows, key) or 'equal'} draws"
        blocks += cross_blocks(rows, quantity, PROPOSALS, about=about, name=f"-k{k}", draws=key) or ()
    return blocks


def _curves(curve: Sequence[Row], floors: Sequence[Row]) -> Picture | None:
    lines = [
        line(f"{q}, {NOISES.get(noise, noise)}", part, "n_draws", "mae_inference")
        for (q, noise), part in grouped(curve, "proposal", "noise").items()
    ]
    exact = grouped((row for row in floors if row.get("n_draws") is not None), "floor")
    lines += [
        line(name, part, "n_draws", "mae_inference", floor=True)
        for (name,), part in exact.items()
        if not name.endswith(", Sobol")
    ]
    lines = [each for each in lines if each.x]
    if not curve or not lines:
        return None
    ends = [f"{each.name} {each.y[-1].mean:.2g} at {each.x[-1]:g}" for each in lines]
    caption = (
        "Error of the sampler against the number of draws on the converged model, mean ± sd over seeds; grey: the "
        "floor, draws from the exact posterior."
    )
    alt = f"Errors fall with draws. At the largest number of draws: {'; '.join(ends)}."
    return Picture("draws", caption, alt, lambda: log_curves(lines))


def _khat(results: Row, cross: Sequence[Row]) -> Block:
    paper = grouped(where(cross, training="paper"), "k_train", "proposal")
    items = [_range(f"{q}, K = {k}", part, 0) for (k, q), part in paper.items()]
    items += [
        _range(q, part, 2) for (q,), part in grouped(where(beyond_rows(cross), estimator="snis"), "proposal").items()
    ]
    stored = [item for item in items if item is not None]
    if not stored:
        return "No k-hat was stored in this run."
    n = int(results.get("settings", {}).get("khat_draws", 1000))
    limits = {f"{diagnostics.MAX_KHAT}: more draws hardly help": diagnostics.MAX_KHAT}
    limits |= {f"{diagnostics.khat_threshold(n):.2f}: enough for {n} draws": diagnostics.khat_threshold(n)}
    medians = "; ".join(f"{item.name} {item.quantiles[2]:.2f}" for item in stored)
    caption = (
        "k-hat over observations: 5 to 95 % thin, 25 to 75 % thick, median as a dot; averaged over models and seeds. "
        "With a K: on the paper's models; without: on the converged model. Values below -0.5 are drawn at the edge."
    )
    return Picture("khat", caption, f"Ranges of k-hat. Medians: {medians}.", lambda: ranges(stored, limits))


def _range(name: str, rows: Sequence[Row], group: int) -> Range | None:
    quantiles = [row["khat_quantiles"] for row in rows if row.get("khat_quantiles")]
    quantiles = [row for row in quantiles if None not in row]
    return (
        Range(name, [sum(column) / len(quantiles) for column in zip(*quantiles, strict=True)], group)
        if quantiles
        else None
    )


def _details(
    results: Row, models: Sequence[Row], cross: Sequence[Row], floors: Sequence[Row], printed: Row
) -> list[Block | None]:
    selection = ppca_tables.selection_table(rows_of(results, "selection", "model"))
    return [
        ppca_tables.three_ways_table(models, 5, printed["k5"], printed["released"]),
        ppca_tables.floors_table(floors),
        ppca_tables.parts_table(models, floors),
        ppca_tables.every_variant_table(cross),
        selection and replace(selection, detail=True),
    ]
