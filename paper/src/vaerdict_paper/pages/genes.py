"""The page of the gene experiment: claims of the paper, targets, and comparisons with baselines and other tools."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from vaerdict.report.document import Block, Document, Picture, present
from vaerdict.report.figures import GREY, OKABE_ITO, blank, diagonal, label, look
from vaerdict.report.records import Row, rows_of
from vaerdict.report.tables import Table, number
from vaerdict_paper.experiments.ppca import published
from vaerdict_paper.pages import genes_tables
from vaerdict_paper.pages.claims import RULE, Judgement, judged, tally
from vaerdict_paper.pages.crossed import cross_blocks
from vaerdict_paper.pages.genes_claims import (
    SCALES,
    donor_claims,
    further_claims,
    graded_claims,
    on_each,
    paper_claims,
    reliability_target,
    targets,
)
from vaerdict_paper.pages.genes_rivals import rival_claims, rivals_table, winners_table
from vaerdict_paper.pages.genes_rows import (
    FLOORS,
    PROPOSALS,
    UNCERTAINTIES,
    crossed,
    floor,
    fullest,
    refined,
    simulators,
    title_of,
)
from vaerdict_paper.pages.genes_tables import AP, ESS, KHAT, MAE
from vaerdict_paper.pages.seed_statistics import counts_of, mean_of, where

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_CURVE_SIZES = {"all": "all cells", 50: "50 per group"}


def document(results: dict[str, Any], manifest: dict[str, Any] | None) -> Document:
    """The report on a finished run; stages that were not run are left out."""
    settings = results.get("settings", {})
    khat_draws = {"khat_draws": settings.get("khat_draws")}
    models = [{**row, **khat_draws} for row in rows_of(results, "models", "model", "seed", "simulator")]
    cross = rows_of(results, "cross", "model", "proposal", "seed", "simulator", "n_cells")
    curves = rows_of(results, "curves", "model", "simulator", "n_cells", "k", "fdp", "fdr")
    donors = rows_of(results, "donors", "model", "seed", "arm", "n_called_05")
    printed = published()["genes"]["printed"]
    names = simulators([*cross, *models])
    repaired = [name for name in names if name in ("appendix", "released")]  # with refits and AIS
    claims, goals, further, on_donors = judged(
        on_each(partial(paper_claims, printed=printed), models, cross, [name for name in names if name != "graded"]),
        [*on_each(targets, models, cross, repaired), reliability_target(cross, names)],
        [
            *on_each(further_claims, models, cross, repaired),
            *on_each(rival_claims, models, cross, repaired),
            *(graded_claims(cross) if "graded" in names else []),
        ],
        donor_claims(donors) if donors else [],
    )
    sections: list[tuple[str, list[Block | None]]] = [
        ("Claims of the paper", [f"{RULE} {SCALES}", claims]),
        ("Targets", [goals]),
        ("Further findings", [further, *(genes_tables.summary_table(cross, n, noted=n == names[0]) for n in names)]),
        ("Other methods", [winners_table(cross, names), *(rivals_table(cross, n, noted=n == names[0]) for n in names)]),
        ("Cells are not replicates", [on_donors or None, genes_tables.donors_table(donors)]),
        *((_heading(name), _of_simulator(name, models, cross, curves)) for name in names),
    ]
    title = "Genes: differential expression with a controlled false discovery rate"
    return Document(title, _summary(results, claims, goals, cross, names), present(sections), manifest)


def _heading(simulator: str) -> str:
    title = title_of(simulator)
    return title[0].upper() + title[1:]


def _summary(
    results: Row, claims: Sequence[Judgement], goals: Sequence[Judgement], cross: Sequence[Row], names: Sequence[str]
) -> list[str]:
    n = len(results.get("seeds", []))
    sets = f"{n} data sets of each simulator" if n != 1 else "one data set of each simulator"
    sentences = [
        f"Of {len(claims)} claims of the paper, tested with a correct library size, equal draws and one scale for "
        f"truth and estimate, {tally(claims)} ({sets}). Of {len(goals)} targets of our own, {tally(goals)}.",
        *(sentence for name in names if (sentence := _few_cells(cross, name))),
    ]
    if results.get("skipped"):
        sentences.append("The other tools were not installed, so their rows are missing.")
    if results.get("preset") != "paper":
        sentences.append(
            f"This is the {results.get('preset')} preset: fewer models, data sets and draws than a run to be cited."
        )
    return sentences


def _few_cells(cross: Sequence[Row], simulator: str) -> str:
    """Fifty cells per group, with a model and without."""
    keys, ours = ("coverage", "fdr_mae", "tpr"), refined(cross, simulator, 50)
    model = [mean_of(ours, key) for key in keys]
    raw = [mean_of(floor(cross, simulator, FLOORS[0], 50), key) for key in keys]
    (cover, error, power), (raw_cover, raw_error, raw_power) = (
        [None if summary is None else summary.mean for summary in part] for part in (model, raw)
    )
    if None in (cover, error, power, raw_cover, raw_error, raw_power):
        return ""
    kind = fullest(ours) or ""
    return (
        f"On {title_of(simulator)}, 50 cells per group, 90 % intervals cover {_percent(cover)} of the true changes "
        f"with a model (uncertainty of {UNCERTAINTIES.get(kind, kind)}) and {_percent(raw_cover)} with raw counts. "
        f"The FDR error is {number(error or 0.0, 2)} and {number(raw_error or 0.0, 2)} hundredths, and "
        f"{_percent(power)} and {_percent(raw_power)} of the changed genes are found at 5 %."
    )


def _percent(share: float | None) -> str:
    return f"{number(100 * (share or 0.0), 0)} %"


def _of_simulator(name: str, models: Sequence[Row], cross: Sequence[Row], curves: Sequence[Row]) -> list[Block | None]:
    printed = published()["genes"]["printed"]
    khat_draws = next((row["khat_draws"] for row in models), None)
    pairs = [{**row, "khat_draws": khat_draws} for row in crossed(cross, name)]
    crosses: list[Block | None] = []
    shown = ((MAE, min, "n_draws"), (AP, max, "n_draws"), (KHAT, min, "khat_draws"), (ESS, max, "khat_draws"))
    for quantity, pick, draws in shown:
        about = f"{title_of(name)}, {counts_of(pairs, draws) or 'equal'} draws per cell"
        blocks = cross_blocks(pairs, quantity, PROPOSALS, about=about, name=f"-{name}", pick=pick, draws=draws)
        if blocks:
            table, picture = blocks
            crosses += [genes_tables.with_baselines(table, cross, name) if quantity is MAE else table, picture]
    return [
        genes_tables.models_table(models, cross, name, printed),
        *crosses,
        _folded(genes_tables.plugin_table(cross, name)),
        genes_tables.annealing_table(models, cross, name),
        genes_tables.uncertainty_table(cross, name),
        _calibration(cross, name),
        _curves(where(curves, simulator=name), name),
        genes_tables.estimand_table(cross, name),
    ]


def _folded(table: Table | None) -> Table | None:
    return None if table is None else replace(table, detail=True)


# ------------------------------------------------------------------------------------------------------ figures
class Curve(NamedTuple):
    """Realised and stated FDR of the first k genes, means over data sets."""

    k: Sequence[int]
    fdp: Sequence[float]
    fdr: Sequence[float]


def _curves(rows: Sequence[Row], simulator: str) -> Picture | None:
    """FDR along the ranking, means over models and data sets."""
    methods = {"refined": {"uncertainty": fullest(rows)}, "raw counts": {"model": "raw counts"}}
    panels = {
        title: {name: curve for name, keys in methods.items() if (curve := _mean_curve(where(rows, n_cells=n, **keys)))}
        for n, title in _CURVE_SIZES.items()
    }
    panels = {title: curves for title, curves in panels.items() if curves}
    if not panels:
        return None
    return Picture(
        f"fdr-{simulator}",
        f"Realised (solid) and stated (dashed) FDR of the first genes of the ranking, {title_of(simulator)}; the "
        "line is the target of 5 %.",
        f"Curves of realised and stated FDR for {' and '.join(panels)}.",
        lambda: _draw_curves(panels),
    )


def _mean_curve(rows: Sequence[Row]) -> Curve | None:
    same = [row for row in rows if row["k"] == rows[0]["k"]]
    if not same:
        return None
    fdp, fdr = ([sum(c) / len(same) for c in zip(*(row[key] for row in same), strict=True)] for key in ("fdp", "fdr"))
    return Curve(same[0]["k"], fdp, fdr)


def _draw_curves(panels: Mapping[str, Mapping[str, Curve]]) -> Figure:
    """One panel per number of cells; for each method the realised FDP solid and the stated FDR dashed."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.8, 3.4), layout="constrained")
    all_axes = figure.subplots(1, len(panels), squeeze=False)[0]
    for axes, (title, curves) in zip(all_axes, panels.items(), strict=True):
        for i, (name, curve) in enumerate(curves.items()):
            colour = OKABE_ITO[i % len(OKABE_ITO)]
            axes.plot(curve.k, curve.fdp, color=colour, label=f"{label(name, 40)}, realised")
            axes.plot(curve.k, curve.fdr, color=colour, linestyle="--", label="stated")
        axes.axhline(0.05, color=GREY, linewidth=0.8)
        axes.set(title=title, xlabel="genes called", ylabel="false discovery rate", ylim=(-0.01, None))
    figure.legend(*all_axes[-1].get_legend_handles_labels(), loc="outside lower center", ncols=2, fontsize=9)
    return figure


class Bins(NamedTuple):
    """Per bin of the stated probability: number of genes, their mean probability, the share of them changed."""

    n: Sequence[float]
    prob: Sequence[float]
    share: Sequence[float]


def _calibration(cross: Sequence[Row], simulator: str) -> Picture | None:
    """Stated probabilities at 50 cells per group against the share of changed genes."""
    methods = {title: refined(cross, simulator, 50, uncertainty=kind) for kind, title in UNCERTAINTIES.items()}
    methods["raw counts"] = floor(cross, simulator, "raw counts", 50)
    binned = {name: bins for name, rows in methods.items() if (bins := _binned(rows))}
    if not binned:
        return None
    points = {name: ", ".join(f"{p:.2f} {s:.2f}" for _, p, s in zip(*b, strict=True)) for name, b in binned.items()}
    alt = "; ".join(f"{name}: {text}" for name, text in points.items())
    return Picture(
        f"calibration-{simulator}",
        f"Calibration at 50 cells per group, {title_of(simulator)}: genes in ten bins of the stated probability, "
        "over models and data sets; calibrated probabilities lie on the diagonal.",
        f"Stated probability and share of changed genes in each bin. {alt}.",
        lambda: _draw_calibration(binned),
    )


def _binned(rows: Sequence[Row]) -> Bins | None:
    tables = [row["calibration"] for row in rows if row.get("calibration")]
    if not tables:
        return None
    total = [[sum(table[i][j] for table in tables) for j in range(3)] for i in range(len(tables[0]))]
    nonempty = [(n, p / n, t / n) for n, p, t in total if n > 0]
    return Bins(*(list(column) for column in zip(*nonempty, strict=True)))


def _draw_calibration(methods: Mapping[str, Bins]) -> Figure:
    """Shares of changed genes against stated probabilities; larger points are bins of more genes."""
    figure, axes = blank(height=4.6)
    diagonal(axes, "stated probability of a change", "share of genes that are changed")
    for i, (name, bins) in enumerate(methods.items()):
        colour, marker = look(i)
        axes.plot(bins.prob, bins.share, color=colour, linewidth=1, alpha=0.6)
        sizes = [12 + 60 * (n / max(bins.n)) ** 0.5 for n in bins.n]
        axes.scatter(bins.prob, bins.share, s=sizes, color=colour, marker=marker, label=label(name, 40))
    axes.legend(loc="upper left", fontsize=9)
    return figure
