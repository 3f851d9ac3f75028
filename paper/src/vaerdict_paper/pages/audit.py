"""The page of the audit: what the released code did, and which of its figures come from that."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from vaerdict.report.document import Block, Document, Picture, present
from vaerdict.report.records import Row, grouped, rows_of
from vaerdict.report.tables import Column, Table, Value, number
from vaerdict_paper.pages.claims import ADDED, RULE, Claim, Evidence, judged, tally
from vaerdict_paper.pages.figures import line, log_curves
from vaerdict_paper.pages.ppca_tables import KHAT, MAE
from vaerdict_paper.pages.seed_statistics import by_seed, cell, cells, counts_of, mean_of, minus, summarise, where


def document(results: dict[str, Any], manifest: dict[str, Any] | None) -> Document:
    """The report on a finished audit."""
    derivatives = rows_of(results, "derivatives", "k", "loss", "derivative", "se", "exact")
    fits = rows_of(results, "fits", "k", "loss", "steps", "seed", "variance", "best_variance")
    collapse = rows_of(results, "collapse", "k_train", "loss", "seed")
    mixture = rows_of(results, "mixture", "setting", "against", "seed", "gain")
    (claims,) = judged([_variance_claim(fits), _cost_claim(collapse), *_mixture_claims(mixture)])
    sections: list[tuple[str, list[Block | None]]] = [
        (
            "Claims on the released code",
            [f"{RULE} Here data sets and replicates take the place of seeds. {ADDED}", claims],
        ),
        ("The sign of the chi loss", [_derivatives(derivatives), *_figures(fits), _fits(fits)]),
        ("The chi model by either loss", [_collapse(collapse)]),
        ("The number of draws of the mixture", [_mixture(mixture)]),
        ("Reproducing the released figures", [_comparison(results), _patterns(results)]),
    ]
    summary = [f"Of {len(claims)} claims on the released code, {tally(claims)}.", *_sign(derivatives)]
    return Document("Audit of the released code", summary, present(sections), manifest)


def _sign(derivatives: Sequence[Row]) -> list[str]:
    """The released derivative and the exact one, at the largest number of particles."""
    released = where(derivatives, loss="released")
    if not released:
        return []
    row = max(released, key=lambda r: r["k"])
    return [
        f"With {row['k']} particles the released chi loss has derivative {number(row['derivative'], 3, signed=True)} "
        f"(se {number(row['se'], 3)}) where that of the bound is {number(row['exact'], 3, signed=True)}."
    ]


def _variance_claim(fits: Sequence[Row]) -> Claim:
    evidence = []
    for (k,), rows in grouped(where(fits, loss="released"), "k").items():
        last = where(rows, steps=max(row["steps"] for row in rows))
        # in logarithms, so that a variance that diverged counts too
        gap = minus(by_seed(last, "log10_variance"), math.log10(last[0]["best_variance"]))
        evidence.append(Evidence(f"log10 of variance over the best, {k} particles", gap, +1, 2, over="replicates"))
    return Claim("Minimising the released chi loss fits a variance above the optimum.", evidence)


def _cost_claim(collapse: Sequence[Row]) -> Claim:
    evidence = [
        Evidence(f"held-out log p lost, {k} particles", mean_of(rows, "behind"), +1, over="data sets")
        for (k,), rows in grouped(where(collapse, loss="released"), "k_train").items()
    ]
    return Claim("The model trained by the released chi loss is worse than that by ours.", evidence)


def _mixture_claims(mixture: Sequence[Row]) -> list[Claim]:
    """The gain of the mixture over single proposals, for each pair of numbers of draws."""
    return [
        Claim(
            f"The mixture beats single proposals: {setting}.",
            [
                Evidence(
                    f"{rival} minus MIS, hundredths of MAE",
                    summarise(100 * gain for gain in by_seed(part, "gain").values()),
                    +1,
                    over="data sets",
                )
                for (rival,), part in grouped(rows, "against").items()
            ],
        )
        for (setting,), rows in grouped(mixture, "setting").items()
    ]


def _derivatives(rows: Sequence[Row]) -> Table | None:
    if not rows:
        return None
    body = [{**row, "derivative": Value(row["derivative"], row["se"])} for row in sorted(rows, key=lambda r: r["k"])]
    columns = [
        Column("loss", "loss"),
        Column("k", "particles"),
        Column("derivative", "derivative (± se)", 3, signed=True),
        Column("exact", "of the bound", 3, signed=True),
    ]
    caption = "Derivative of each chi loss in the log-scale of q, and that of the bound."
    return Table("derivatives", caption, columns, body)


def _figures(fits: Sequence[Row]) -> list[Block]:
    return [_figure(k, rows) for (k,), rows in sorted(grouped(fits, "k").items())]


def _figure(k: int, rows: Sequence[Row]) -> Picture:
    lines = [line(name, part, "steps", "variance") for (name,), part in grouped(rows, "loss").items()]
    lines.append(line("optimum", rows, "steps", "best_variance", floor=True))
    ends = "; ".join(f"{each.name} {each.y[-1].mean:.3g}" for each in lines if each.y)
    return Picture(
        f"variance-k{k}",
        f"Variance that each chi loss fits as training proceeds, {k} particles, mean ± sd over replicates.",
        f"Variance against steps with {k} particles. At the end: {ends}.",
        lambda: log_curves(lines, x="steps", y="fitted variance"),
    )


def _fits(fits: Sequence[Row]) -> Table | None:
    if not fits:
        return None
    last = where(fits, steps=max(row["steps"] for row in fits))
    measured = (
        Column("variance", "variance", 2),
        Column("best_variance", "best variance", 2),
        Column("chi_square", "chi-square", 2),
        Column("best_chi_square", "best chi-square", 2),
    )
    body = [
        {"loss": name, "k": k, **cells(rows, measured)}
        for (k, name), rows in grouped(sorted(last, key=lambda row: row["k"]), "k", "loss").items()
    ]
    caption = f"Where each chi loss ends after {last[0]['steps']} steps: mean ± sd over replicates."
    columns = [Column("loss", "loss"), Column("k", "particles"), *measured]
    return Table("fits", caption, columns, body, "A dash: the chi-square is infinite.")


def _collapse(rows: Sequence[Row]) -> Table | None:
    if not rows:
        return None
    measured = (Column("behind", "log p behind ours", 3), Column("a_norm", "‖A‖₂"), KHAT, MAE)
    published = [Column(f"published_{c.key}", f"{c.title}, paper", c.digits, c.scale) for c in measured[1:]]
    body = [
        {"loss": name, "k": k, **cells(part, measured), **{c.key: part[0].get(c.key) for c in published}}
        | {"n_draws": counts_of(part, "n_draws")}
        for (k, name), part in grouped(sorted(rows, key=lambda row: row["k_train"]), "k_train", "loss").items()
    ]
    columns = [Column("loss", "loss"), Column("k", "particles"), *measured, *published, Column("n_draws", "draws")]
    caption = "The chi model by the released loss and by ours: mean ± sd over data sets."
    return Table("collapse", caption, columns, body)


def _mixture(rows: Sequence[Row]) -> Table | None:
    if not rows:
        return None
    body = [
        {"setting": setting, "against": rival, "n_mixture": ours, "n_rival": theirs}
        | {key: cell(mean_of(part, key)) for key in ("mae_mixture", "mae_rival", "gain")}
        for (setting, rival, ours, theirs), part in grouped(rows, "setting", "against", "n_mixture", "n_rival").items()
    ]
    columns = [
        Column("setting", "setting"),
        Column("against", "against"),
        Column("n_mixture", "draws of MIS"),
        Column("n_rival", "draws of the rival"),
        Column("mae_mixture", f"{MAE.title} of MIS", 2, 100),
        Column("mae_rival", f"{MAE.title} of the rival", 2, 100),
        Column("gain", "gain", 3, 100, signed=True),
    ]
    return Table("mixture", "The mixture and single proposals: mean ± sd over data sets.", columns, body)


def _comparison(results: Row) -> Table | None:
    rows = rows_of(results, "comparison", "model", "metric", "measured", "released")
    body = [
        {
            "what": f"{_METRICS.get(row['metric'], row['metric'])}, {row['model']}",
            "measured": _measured(row),
            "released": row["released"],
        }
        | {"within": "yes" if row.get("within") else "no"}
        for row in rows
    ]
    columns = [
        Column("what", "quantity"),
        Column("measured", "ours, released settings", 3),
        Column("released", "released", 3),
        Column("within", "within two sd"),
    ]
    caption = "Our code with the released settings, mean ± sd over data sets, and what the released code reports."
    return Table("comparison", caption, columns, body) if rows else None


_METRICS = {"behind": "log p behind the best", "khat": "k-hat", "mae": "MAE"}


def _measured(row: Row) -> Value | None:
    return None if row["measured"] is None else Value(row["measured"], row.get("spread"))


def _patterns(results: Row) -> Table | None:
    rows = rows_of(results, "patterns", "pattern", "found_in", "data_sets")
    body = [{"pattern": row["pattern"], "found": f"{row['found_in']} of {row['data_sets']}"} for row in rows]
    columns = [Column("pattern", "pattern of the released figures"), Column("found", "data sets that show it")]
    caption = "Orders of the models in the released figures, and the data sets that reproduce them."
    return Table("patterns", caption, columns, body) if rows else None
