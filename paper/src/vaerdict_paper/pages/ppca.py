"""The page of the pPCA experiment: what holds of the paper's claims, its tables and figures, and what goes beyond."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from vaerdict.demo.page import selection_table

from vaerdict import diagnostics
from vaerdict.report import figures
from vaerdict.report.claims import RULE, Claim, tally
from vaerdict.report.document import Block, Document, Picture, Section
from vaerdict.report.summary import Row, grouped, mean_of, number, rows_of, where
from vaerdict.report.tables import Column
from vaerdict_paper.experiments.ppca import published
from vaerdict_paper.pages import ppca_tables
from vaerdict_paper.pages.crossed import cross_picture
from vaerdict_paper.pages.ppca_claims import ERRORS, further_claims, paper_claims
from vaerdict_paper.pages.ppca_tables import KHAT, MAE, NOISES, beyond_rows, cross_means, floor_means


def document(results: dict[str, Any], manifest: dict[str, Any] | None) -> Document:
    """The report on a finished pPCA run."""
    models = rows_of(results, "models", "model", "seed", "k_train", "training")
    cross = rows_of(results, "cross", "model", "proposal", "seed", "k_train", "training", "n_draws")
    curve = rows_of(results, "curve", "proposal", "noise", "n_draws")
    floors = rows_of(results, "floors", "floor")
    printed = published()["ppca"]
    particles = sorted({row["k_train"] for row in where(models, training="paper")})
    claims, further = paper_claims(models, cross, printed), further_claims(models, cross)
    sections = [
        Section("What holds of the paper", [f"{RULE} {ERRORS}", claims]),
        Section(
            "What goes beyond it",
            [further, *_present(ppca_tables.beyond_table(cross, floors)), *_curves(curve, floors)],
        ),
        *(_at(k, models, cross, results, printed) for k in particles),
        Section("How far the weights can be trusted", _khat(results, cross)),
        Section("Details", _details(results, models, cross, floors, printed)),
    ]
    return Document(
        "pPCA: decisions checked against exact answers", _summary(results, claims, cross, floors), sections, manifest
    )


def _present(*blocks: Block | None) -> list[Block]:
    return [block for block in blocks if block is not None]


def _summary(results: Row, claims: Sequence[Claim], cross: Sequence[Row], floors: Sequence[Row]) -> list[str]:
    n = len(results.get("seeds", []))
    seeds = f"{n} seeds" if n != 1 else "one seed"
    words = [
        f"Of {len(claims)} claims of the paper, put to a fair test with equal draws and corrected losses, "
        f"{tally(claims)} ({seeds}).",
        *_best(cross, floors),
    ]
    preset = results.get("preset")
    if preset != "paper":
        words.append(f"This is the {preset} preset: shorter training and fewer draws than a run to be cited.")
    return words


def _best(cross: Sequence[Row], floors: Sequence[Row]) -> list[str]:
    """The best pair of proposal and draws beside the paper's mixture and the floor."""
    rows = where(beyond_rows(cross), estimator="snis")
    groups = grouped(rows, "proposal", "noise")
    means = {pair: mean for pair, part in groups.items() if (mean := mean_of(part, "mae"))}
    fitted = {pair: mean for pair, mean in means.items() if not pair[0].startswith("REFINED")}
    n = rows[0]["n_draws"] if rows else 0
    words = []
    for noise, title in NOISES.items():
        among = {q: mean.mean for (q, kind), mean in fitted.items() if kind == noise}
        if len(among) > 1 and "MIS" in among:
            best = min(among, key=lambda q: among[q])
            words.append(
                f"{number(among[best], 4)} with the best fitted proposal ({best}) and {number(among['MIS'], 4)} with "
                f"the paper's mixture, both with {title} draws"
            )
    if not words:
        return []
    exact = floor_means(floors, n)
    floor = ", ".join(f"{number(mean.mean, 4)} with {NOISES[kind]} ones" for kind, mean in exact.items())
    return [
        f"On a model trained to convergence, with {n} draws, a tail probability is off on average by "
        f"{'; by '.join(words)}."
        + (f" Draws from the true posterior itself give {floor}." if floor else "")
        + " REFINED-normal is the exact posterior of the fitted model here, since pPCA's is Gaussian."
    ]


def _at(k: int, models: Sequence[Row], cross: Sequence[Row], results: Row, printed: Row) -> Section:
    """Tables and heat maps at one particle count."""
    draws = {"mae": _setting(results, "n_draws"), "khat": _setting(results, "khat_draws")}
    pairs = ((quantity, ppca_tables.cross_table(cross, k, quantity, draws[quantity.key])) for quantity in (MAE, KHAT))
    crossed = [block for quantity, table in pairs if table for block in (table, _heat(cross, k, quantity))]
    table = ppca_tables.models_table(models, k, printed.get(f"k{k}", {}))
    return Section(f"Trained with {k} particles", [*_present(table), *crossed])


def _setting(results: Row, name: str) -> Any:
    return results.get("settings", {}).get(name, "equal")


def _heat(cross: Sequence[Row], k: int, quantity: Column) -> Picture:
    means = cross_means(cross, k, quantity.key)
    return cross_picture(means, quantity, f"cross-{quantity.key}-k{k}", aside=f", {k} particles")


def _curves(curve: Sequence[Row], floors: Sequence[Row]) -> list[Block]:
    lines = [
        _line(f"{q}, {NOISES.get(noise, noise)}", part)
        for (q, noise), part in grouped(curve, "proposal", "noise").items()
    ]
    exact = grouped((row for row in floors if row.get("n_draws") is not None), "floor")
    lines += [_line(name, part, floor=True) for (name,), part in exact.items() if not name.endswith(", Sobol")]
    lines = [line for line in lines if line.x]
    if not curve or not lines:
        return []
    ends = [f"{line.name} {line.y[-1].mean:.2g} at {line.x[-1]:g}" for line in lines]
    caption = (
        "Error of the sampler against the number of draws on the converged model, mean ± sd over seeds; grey: the "
        "floor, draws from the exact posterior itself."
    )
    return [
        Picture(
            "draws",
            caption,
            f"Errors fall with draws. At the most draws: {'; '.join(ends)}.",
            lambda: figures.log_curves(lines),
        )
    ]


def _line(name: str, rows: Sequence[Row], *, floor: bool = False) -> figures.Line:
    points = {n: mean_of(where(rows, n_draws=n), "mae_inference") for n in sorted({row["n_draws"] for row in rows})}
    kept = {n: mean for n, mean in points.items() if mean is not None and mean.mean > 0}
    return figures.Line(name, list(kept), list(kept.values()), floor)


def _khat(results: Row, cross: Sequence[Row]) -> list[Block]:
    paper = grouped(where(cross, training="paper"), "k_train", "proposal")
    items = [_range(f"{q}, K = {k}", part, 0) for (k, q), part in paper.items()]
    items += [
        _range(q, part, 2) for (q,), part in grouped(where(beyond_rows(cross), estimator="snis"), "proposal").items()
    ]
    known = [item for item in items if item is not None]
    if not known:
        return ["No k-hat was stored in this run."]
    n = int(results.get("settings", {}).get("khat_draws", 1000))
    limits = {f"{diagnostics.MAX_KHAT}: more draws hardly help": diagnostics.MAX_KHAT}
    limits |= {f"{diagnostics.khat_threshold(n):.2f}: enough for {n} draws": diagnostics.khat_threshold(n)}
    medians = "; ".join(f"{item.name} {item.quantiles[2]:.2f}" for item in known)
    caption = (
        "k-hat over observations: 5 to 95 % thin, 25 to 75 % thick, median as a dot; averaged over models and seeds. "
        "With a K: on the paper's models; without: on the converged model. Below -0.5 drawn at the edge."
    )
    return [Picture("khat", caption, f"Ranges of k-hat. Medians: {medians}.", lambda: figures.ranges(known, limits))]


def _range(name: str, rows: Sequence[Row], group: int) -> figures.Range | None:
    every = [row["khat_quantiles"] for row in rows if row.get("khat_quantiles") and None not in row["khat_quantiles"]]
    return (
        figures.Range(name, [sum(column) / len(every) for column in zip(*every, strict=True)], group) if every else None
    )


def _details(
    results: Row,
    models: Sequence[Row],
    cross: Sequence[Row],
    floors: Sequence[Row],
    printed: Row,
) -> list[Block]:
    selection = selection_table(rows_of(results, "selection", "model"))
    return _present(
        ppca_tables.three_ways_table(models, 5, printed["k5"], printed["released"]),
        ppca_tables.floors_table(floors),
        ppca_tables.parts_table(models, floors),
        ppca_tables.every_variant_table(cross),
        selection and replace(selection, detail=True),
    )
