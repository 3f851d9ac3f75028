"""The page of the pPCA experiment: what holds of the paper's claims, its tables and figures, and what goes beyond."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from vaerdict import diagnostics
from vaerdict.experiments.ppca import published
from vaerdict.report import figures, ppca_tables
from vaerdict.report.claims import RULE, Claim, tally
from vaerdict.report.document import Block, Document, Picture, Section
from vaerdict.report.ppca_claims import further_claims, paper_claims
from vaerdict.report.ppca_tables import CROSSED, NOISES, PROPOSALS, beyond_rows
from vaerdict.report.summary import Row, Summary, grouped, in_order, mean_of, number, rows_of, where


def document(results: dict[str, Any], manifest: dict[str, Any] | None) -> Document:
    """The report on a finished pPCA run."""
    models = rows_of(results, "models", "model", "seed", "k_train", "training")
    cross = rows_of(results, "cross", "model", "proposal", "seed", "k_train", "training", "n_draws")
    curve = rows_of(results, "curve", "proposal", "noise", "n_draws")
    floors = rows_of(results, "floors", "floor")
    printed = published()["ppca"]
    particles = sorted({row["k_train"] for row in where(models, training="paper")})
    claims, further = paper_claims(models, cross, particles, printed), further_claims(models, cross, particles)
    sections = [
        Section("What holds of the paper", [RULE, claims]),
        Section(
            "What goes beyond it",
            [further, *_present(ppca_tables.beyond_table(cross, floors)), *_curves(curve, floors)],
        ),
        *(_at(k, models, cross, printed) for k in particles),
        Section("How far the weights can be trusted", _khat(results, cross)),
        Section("Details", _details(results, models, cross, floors, particles, printed)),
    ]
    return Document(
        "pPCA: decisions checked against exact answers", _summary(results, claims, cross, floors), sections, manifest
    )


def _present(*blocks: Block | None) -> list[Block]:
    return [block for block in blocks if block is not None]


def _summary(results: Row, claims: Sequence[Claim], cross: Sequence[Row], floors: Sequence[Row]) -> list[str]:
    seeds = len(results.get("seeds", []))
    words = [
        f"Of {len(claims)} claims of the paper examined with equal draws and corrected losses, {tally(claims)} ({seeds} {'seeds' if seeds != 1 else 'seed'})."
    ]
    rows = where(beyond_rows(cross), estimator="snis")
    best = min(
        (
            (mean, q, noise)
            for (q, noise), part in grouped(rows, "proposal", "noise").items()
            if (mean := mean_of(part, "mae"))
        ),
        default=None,
    )
    paper = mean_of(where(rows, proposal="MIS", noise="iid"), "mae")
    if best and paper:
        mean, q, noise = best
        n = rows[0]["n_draws"]
        words.append(
            f"On a model trained to convergence, with {n} draws, the mean absolute error of a tail probability is "
            f"{_hundredths(mean)} hundredths for {q} with {NOISES[noise]} draws against {_hundredths(paper)} for the paper's mixture"
            f"{_floor(floors, n)}."
        )
    if results.get("preset") != "paper":
        words.append(f"This is the {results.get('preset')} preset: it shows that everything runs, and settles nothing.")
    return words


def _hundredths(mean: Summary) -> str:
    return number(100 * mean.mean, 2)


def _floor(floors: Sequence[Row], n: int) -> str:
    exact = {
        noise: mean_of(where(floors, floor=f"exact posterior, {title}", n_draws=n), "mae")
        for noise, title in NOISES.items()
    }
    iid, aligned = exact["iid"], exact["aligned"]
    if iid is None or aligned is None:
        return ""
    return f"; sampling the true posterior itself gives {_hundredths(iid)} with independent draws and {_hundredths(aligned)} with aligned ones"


def _at(k: int, models: Sequence[Row], cross: Sequence[Row], printed: Row) -> Section:
    """Tables and heat maps at one particle count."""
    return Section(
        f"Trained with {k} particles",
        _present(
            ppca_tables.models_table(models, k, printed.get(f"k{k}", {})),
            ppca_tables.cross_table(cross, k, "mae", "MAE ×100", scale=100),
            _heat(cross, k, "mae", "MAE ×100", 100),
            ppca_tables.cross_table(cross, k, "khat", "Median k-hat"),
            _heat(cross, k, "khat", "Median k-hat", 1),
        ),
    )


def _heat(cross: Sequence[Row], k: int, key: str, title: str, scale: float) -> Picture | None:
    rows = where(cross, k_train=k, training="paper")
    if not rows:
        return None
    models, proposals = (
        in_order((r[name] for r in rows), order) for name, order in (("model", CROSSED), ("proposal", PROPOSALS))
    )
    means = {pair: mean_of(part, key) for pair, part in grouped(rows, "model", "proposal").items()}
    values = {(model, q): None if mean is None else mean.mean for (model, q), mean in means.items()}
    known = {pair: value for pair, value in values.items() if value is not None}
    low, high = (pick(known, key=known.__getitem__, default=None) for pick in (min, max))
    extremes = (
        f" Lowest {known[low] * scale:.2f} for {low[1]} on {low[0]}, highest {known[high] * scale:.2f} for {high[1]} on {high[0]}."
        if low and high
        else ""
    )
    return Picture(
        f"cross-{key}-k{k}",
        f"{title} on each fixed model; lighter is better, the best proposal of each model is framed.",
        f"Heat map of {title}, models by proposals, {k} particles.{extremes}",
        lambda: figures.heat_map(values, models, proposals, digits=2, scale=scale),
    )


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
    caption = "Error of the sampler against the number of draws, mean ± sd over seeds, with the floor of exact sampling dashed."
    return [
        Picture(
            "draws",
            caption,
            f"Errors fall with draws. At the most draws: {'; '.join(ends)}.",
            lambda: figures.error_curves(lines),
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
    limits = {f"{diagnostics.MAX_KHAT}: no number of draws helps": diagnostics.MAX_KHAT}
    limits |= {f"{diagnostics.khat_threshold(n):.2f}: enough for {n} draws": diagnostics.khat_threshold(n)}
    medians = "; ".join(f"{item.name} {item.quantiles[2]:.2f}" for item in known)
    caption = (
        "k-hat over observations: 5 to 95 % thin, 25 to 75 % thick, median as a dot; averaged over models and seeds. With a K: on the "
        "paper's models; without: on the converged model. Below −0.5 drawn at the edge."
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
    particles: Sequence[int],
    printed: Row,
) -> list[Block]:
    few = particles[0] if particles else 5
    selection = ppca_tables.selection_table(rows_of(results, "selection", "model"))
    return _present(
        ppca_tables.three_ways_table(models, few, printed.get(f"k{few}", {}), printed.get("released", {})),
        ppca_tables.floors_table(floors),
        ppca_tables.parts_table(models, floors),
        ppca_tables.every_variant_table(cross),
        selection,
    )
