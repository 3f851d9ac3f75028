"""The page of the audit: what the released code did, and what of its figures comes from that."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from vaerdict.report import figures
from vaerdict.report.claims import RULE, Claim, Evidence, tally
from vaerdict.report.document import Block, Document, Picture, Section
from vaerdict.report.summary import Row, by_seed, grouped, mean_of, number, rows_of, summarise, where
from vaerdict.report.tables import Column, Table, Value, cell
from vaerdict_paper.pages.ppca_tables import KHAT, MAE


def document(results: dict[str, Any], manifest: dict[str, Any] | None) -> Document:
    """The report on a finished audit."""
    derivatives = rows_of(results, "derivatives", "k", "loss", "derivative", "se", "exact")
    fits = rows_of(results, "fits", "k", "loss", "steps", "seed", "variance", "best_variance")
    collapse = rows_of(results, "collapse", "k_train", "loss", "seed")
    mixture = rows_of(results, "mixture", "setting", "against", "seed", "gain")
    claims = [_runs_away(fits), _costs(collapse), *_gains(mixture)]
    sections = [
        Section("What the audit finds", [f"{RULE} Here data sets and replicates stand for seeds.", claims]),
        Section("The sign of the chi loss", [*_derivatives(derivatives), *_figures(fits), *_fits(fits)]),
        Section("The chi model by either loss", _collapse(collapse)),
        Section("The mixture's budget", _mixture(mixture)),
        Section("The released figures, found again?", [*_comparison(results), *_patterns(results)]),
    ]
    words = [f"Of {len(claims)} statements on the released code, {tally(claims)}.", *_sign(derivatives)]
    return Document("Audit of the released code", words, [s for s in sections if s.blocks], manifest)


def _sign(derivatives: Sequence[Row]) -> list[str]:
    """The released derivative beside the exact one, at the most particles."""
    released = where(derivatives, loss="released")
    if not released:
        return []
    row = max(released, key=lambda r: r["k"])
    return [
        f"With {row['k']} particles the released chi loss has derivative {number(row['derivative'], 3, signed=True)} "
        f"(se {number(row['se'], 3)}) where that of the bound is {number(row['exact'], 3, signed=True)}."
    ]


def _runs_away(fits: Sequence[Row]) -> Claim:
    evidence = []
    for (k,), rows in grouped(where(fits, loss="released"), "k").items():
        last = where(rows, steps=max(row["steps"] for row in rows))
        best = math.log10(last[0]["best_variance"])  # in logarithms, so that a variance that ran away counts too
        gap = summarise(value - best for value in by_seed(last, "log10_variance").values())
        evidence.append(Evidence(f"log10 of variance over the best, {k} particles", gap, +1, 2, over="replicates"))
    return Claim("Descending the released chi loss fits a variance above the optimum.", evidence)


def _costs(collapse: Sequence[Row]) -> Claim:
    evidence = [
        Evidence(f"held-out log p lost, {k} particles", mean_of(rows, "behind"), +1, over="data sets")
        for (k,), rows in grouped(where(collapse, loss="released"), "k_train").items()
    ]
    return Claim("Trained by the released chi loss, the model is worse than by ours.", evidence)


def _gains(mixture: Sequence[Row]) -> list[Claim]:
    """The mixture's gain over single proposals in each setting of budgets."""
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


def _derivatives(rows: Sequence[Row]) -> list[Block]:
    if not rows:
        return []
    body = [{**row, "derivative": Value(row["derivative"], row["se"])} for row in sorted(rows, key=lambda r: r["k"])]
    columns = [
        Column("loss", "loss"),
        Column("k", "particles"),
        Column("derivative", "derivative (± se)", 3, signed=True),
        Column("exact", "of the bound", 3, signed=True),
    ]
    return [
        Table("derivatives", "Derivative of each chi loss in the log-scale of q, and the bound's own.", columns, body)
    ]


def _figures(fits: Sequence[Row]) -> list[Block]:
    return [_figure(k, rows) for (k,), rows in sorted(grouped(fits, "k").items())]


def _figure(k: int, rows: Sequence[Row]) -> Picture:
    lines = [_line(name, part, "variance") for (name,), part in grouped(rows, "loss").items()]
    lines.append(_line("optimum", rows, "best_variance", floor=True))
    ends = "; ".join(f"{line.name} {line.y[-1].mean:.3g}" for line in lines if line.y)
    return Picture(
        f"variance-k{k}",
        f"Variance that each chi loss fits as training goes on, {k} particles, mean ± sd over replicates.",
        f"Variance against steps with {k} particles. At the end: {ends}.",
        lambda: figures.log_curves(lines, x="steps", y="fitted variance"),
    )


def _line(name: str, rows: Sequence[Row], key: str, *, floor: bool = False) -> figures.Line:
    means = {n: mean_of(where(rows, steps=n), key) for n in sorted({row["steps"] for row in rows})}
    kept = {n: mean for n, mean in means.items() if mean is not None and mean.mean > 0}
    return figures.Line(name, list(kept), list(kept.values()), floor)


def _fits(fits: Sequence[Row]) -> list[Block]:
    if not fits:
        return []
    last = where(fits, steps=max(row["steps"] for row in fits))
    measured = (
        Column("variance", "variance", 2),
        Column("best_variance", "best variance", 2),
        Column("chi_square", "chi-square", 2),
        Column("best_chi_square", "best chi-square", 2),
    )
    body = [
        {"loss": name, "k": k, **{c.key: cell(mean_of(rows, c.key)) for c in measured}}
        for (k, name), rows in grouped(sorted(last, key=lambda row: row["k"]), "k", "loss").items()
    ]
    caption = f"Where each chi loss ends after {last[0]['steps']} steps: mean ± sd over replicates."
    columns = [Column("loss", "loss"), Column("k", "particles"), *measured]
    note = "A dash stands where the chi-square is infinite."
    return [Table("fits", caption, columns, body, note)]


def _collapse(rows: Sequence[Row]) -> list[Block]:
    if not rows:
        return []
    measured = (Column("behind", "log p behind ours", 3), Column("a_norm", "‖A‖₂"), KHAT, MAE)
    told = [Column(f"published_{c.key}", f"{c.title}, paper", c.digits, c.scale) for c in measured[1:]]
    body = [
        {"loss": name, "k": k, **{c.key: cell(mean_of(part, c.key)) for c in measured}}
        | {c.key: part[0].get(c.key) for c in told}
        for (k, name), part in grouped(sorted(rows, key=lambda row: row["k_train"]), "k_train", "loss").items()
    ]
    columns = [Column("loss", "loss"), Column("k", "particles"), *measured, *told]
    return [
        Table("collapse", "The chi model by the released loss and by ours: mean ± sd over data sets.", columns, body)
    ]


def _mixture(rows: Sequence[Row]) -> list[Block]:
    if not rows:
        return []
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
    return [Table("mixture", "The mixture beside single proposals: mean ± sd over data sets.", columns, body)]


def _comparison(results: Row) -> list[Block]:
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
    caption = "The released settings run by us, mean ± sd over data sets, beside what the released code reports."
    return [Table("comparison", caption, columns, body)] if rows else []


_METRICS = {"behind": "log p behind the best", "khat": "k-hat", "mae": "MAE"}


def _measured(row: Row) -> Value | None:
    return None if row["measured"] is None else Value(row["measured"], row.get("spread"))


def _patterns(results: Row) -> list[Block]:
    rows = rows_of(results, "patterns", "pattern", "found_in", "data_sets")
    body = [{"pattern": row["pattern"], "found": f"{row['found_in']} of {row['data_sets']}"} for row in rows]
    columns = [Column("pattern", "pattern of the released figures"), Column("found", "data sets that show it")]
    return (
        [Table("patterns", "What the released figures say of the order of the models.", columns, body)] if rows else []
    )
