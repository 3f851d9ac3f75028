"""The page of the gene experiment: what holds of the paper, what was aimed at, and where a model does not pay."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from vaerdict.report.claims import RULE, Claim, tally
from vaerdict.report.document import Block, Document, Picture, Section
from vaerdict.report.summary import Row, mean_of, number, rows_of, where
from vaerdict.report.tables import Column, Table
from vaerdict_paper.experiments.ppca import published
from vaerdict_paper.pages import genes_contrasts, genes_figures, genes_tables
from vaerdict_paper.pages.crossed import Pick, cross_picture
from vaerdict_paper.pages.genes_claims import SCALES, aims, donor_claims, further_claims, on_each, paper_claims
from vaerdict_paper.pages.genes_rows import FLOORS, UNCERTAINTIES, floor, of_simulator, ours, simulators
from vaerdict_paper.pages.genes_tables import ESS, KHAT, MAE, cross_means

_SHOWN = {"all": "all cells", 50: "50 a side"}


def document(results: dict[str, Any], manifest: dict[str, Any] | None) -> Document:
    """The report on a finished run; what was not run is left out."""
    models = rows_of(results, "models", "model", "seed", "simulator")
    cross = rows_of(results, "cross", "model", "proposal", "seed", "simulator", "n_cells")
    curves = rows_of(results, "curves", "model", "simulator", "n_cells", "k", "fdp", "fdr")
    donors = rows_of(results, "donors", "model", "seed", "arm", "n_called_05")
    printed = published()["genes"]["printed"]
    names = simulators([*cross, *models])
    judged = [name for name in names if name in ("appendix", "released")]
    claims = on_each(partial(paper_claims, printed=printed), models, cross, judged)
    goals = on_each(aims, models, cross, judged)
    further = on_each(further_claims, models, cross, judged)
    sections = [
        ("What holds of the paper", [f"{RULE} {SCALES}", claims]),
        ("What was aimed at", [goals]),
        ("What it takes", [further, *(genes_tables.summary_table(cross, name) for name in names)]),
        ("Cells are no replicates", [donor_claims(donors) if donors else None, genes_contrasts.donors_table(donors)]),
        *((_heading(name), _of_simulator(name, models, cross, curves, results)) for name in names),
    ]
    title = "Genes: which are differentially expressed, and how sure that is"
    return Document(title, _summary(results, claims, goals, cross, names), _present(sections), manifest)


def _present(sections: Sequence[tuple[str, Sequence[Block | None]]]) -> list[Section]:
    kept = [(heading, [block for block in blocks if block]) for heading, blocks in sections]
    return [Section(heading, blocks) for heading, blocks in kept if blocks]


def _heading(simulator: str) -> str:
    words = of_simulator(simulator)
    return words[0].upper() + words[1:]


def _summary(
    results: Row, claims: Sequence[Claim], goals: Sequence[Claim], cross: Sequence[Row], names: Sequence[str]
) -> list[str]:
    n = len(results.get("seeds", []))
    sets = f"{n} data sets of each simulator" if n != 1 else "one data set of each simulator"
    words = [
        f"Of {len(claims)} claims of the paper, put to a fair test with a correct library size, equal draws and one "
        f"scale for truth and estimate, {tally(claims)} ({sets}). Of {len(goals)} aims of our own, {tally(goals)}.",
        *(sentence for name in names if (sentence := _few_cells(cross, name))),
    ]
    if results.get("skipped"):
        words.append("The tools in use were not installed where this ran, so that their rows are missing.")
    if results.get("preset") != "paper":
        words.append(
            f"This is the {results.get('preset')} preset: fewer models, data sets and draws than a run to be cited."
        )
    return words


def _few_cells(cross: Sequence[Row], simulator: str) -> str:
    """Fifty cells a side, with a model and without."""
    mine, raw = ours(cross, simulator, 50), floor(cross, simulator, FLOORS[0], 50)
    found = {key: (mean_of(mine, key), mean_of(raw, key)) for key in ("fdr_mae", "tpr")}
    if any(mean is None for pair in found.values() for mean in pair):
        return ""
    (error, raw_error), (share, raw_share) = ((a.mean, b.mean) for a, b in found.values() if a and b)
    shares = f"{number(100 * share, 0)} % and {number(100 * raw_share, 0)} %"
    return (
        f"On {of_simulator(simulator)}, 50 cells a side, the FDR error is {number(error, 2)} hundredths with a model "
        f"and {number(raw_error, 2)} with raw counts, and {shares} of the changed genes are found at 5 %."
    )


def _of_simulator(
    name: str, models: Sequence[Row], cross: Sequence[Row], curves: Sequence[Row], results: Row
) -> list[Block | None]:
    settings, printed = results.get("settings", {}), published()["genes"]["printed"]
    crosses: list[Block | None] = []
    for quantity, pick, draws in ((MAE, min, "n_draws"), (KHAT, min, "khat_draws"), (ESS, max, "khat_draws")):
        table = genes_tables.cross_table(cross, name, quantity, pick, settings.get(draws, "equal"))
        crosses += [table, _heat(cross, name, quantity, pick)] if table else []
    return [
        genes_tables.models_table(models, cross, name, printed),
        *crosses,
        _folded(genes_tables.plugin_table(cross, name)),
        genes_tables.annealing_table(models, cross, name),
        genes_contrasts.uncertainty_table(cross, name),
        _calibration(cross, name),
        _curves(where(curves, simulator=name), name),
        genes_contrasts.estimand_table(cross, name),
        genes_contrasts.rivals_table(cross, name),
        _folded(genes_contrasts.rivals_table(cross, name, "proportion")),
    ]


def _folded(table: Table | None) -> Table | None:
    return None if table is None else replace(table, detail=True)


def _heat(cross: Sequence[Row], simulator: str, quantity: Column, pick: Pick) -> Picture:
    means = cross_means(cross, simulator, quantity.key)
    return cross_picture(means, quantity, f"cross-{quantity.key}-{simulator}", pick=pick)


def _curves(rows: Sequence[Row], simulator: str) -> Picture | None:
    """FDR along the ranking, means over models and data sets."""
    methods = {"refined": {"uncertainty": "z+cells"}, "raw counts": {"model": "raw counts"}}
    panels = {
        words: {name: curve for name, keys in methods.items() if (curve := _mean_curve(where(rows, n_cells=n, **keys)))}
        for n, words in _SHOWN.items()
    }
    panels = {words: found for words, found in panels.items() if found}
    if not panels:
        return None
    return Picture(
        f"fdr-{simulator}",
        f"Realised (solid) and stated (dashed) FDR of the first genes of the ranking, {of_simulator(simulator)}; the "
        "line is the target of 5 %.",
        f"Curves of realised and stated FDR for {' and '.join(panels)}.",
        lambda: genes_figures.fdr_curves(panels),
    )


def _mean_curve(rows: Sequence[Row]) -> genes_figures.Curve | None:
    same = [row for row in rows if row["k"] == rows[0]["k"]]
    if not same:
        return None
    fdp, fdr = ([sum(c) / len(same) for c in zip(*(row[key] for row in same), strict=True)] for key in ("fdp", "fdr"))
    return genes_figures.Curve(same[0]["k"], fdp, fdr)


def _calibration(cross: Sequence[Row], simulator: str) -> Picture | None:
    """Stated probabilities at 50 cells a side against how many of the genes are changed."""
    methods = {words: ours(cross, simulator, 50, uncertainty=kind) for kind, words in UNCERTAINTIES.items()}
    methods["raw counts"] = floor(cross, simulator, "raw counts", 50)
    found = {name: binned for name, rows in methods.items() if (binned := _binned(rows))}
    if not found:
        return None
    points = {name: ", ".join(f"{p:.2f} {s:.2f}" for _, p, s in zip(*c, strict=True)) for name, c in found.items()}
    ends = "; ".join(f"{name}: {words}" for name, words in points.items())
    return Picture(
        f"calibration-{simulator}",
        f"Calibration at 50 cells a side, {of_simulator(simulator)}: genes in ten bins of the stated probability, over "
        "models and data sets; on the diagonal a probability means what it says.",
        f"Stated probability and share of changed genes in each bin. {ends}.",
        lambda: genes_figures.calibration(found),
    )


def _binned(rows: Sequence[Row]) -> genes_figures.Calibration | None:
    bins = [row["calibration"] for row in rows if row.get("calibration")]
    if not bins:
        return None
    total = [[sum(b[i][j] for b in bins) for j in range(3)] for i in range(len(bins[0]))]
    kept = [(n, p / n, t / n) for n, p, t in total if n > 0]
    return genes_figures.Calibration(*(list(column) for column in zip(*kept, strict=True)))
