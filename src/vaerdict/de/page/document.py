"""The page of a differential expression: the verdict first, then plots and a table of all genes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from vaerdict.core import DataError
from vaerdict.de.cells import FILE, ShownCells
from vaerdict.de.page.cells import packed_cells
from vaerdict.de.page.figures import check_picture, khat_picture
from vaerdict.de.page.genes import Genes, NotTested, packed, read, read_not_tested
from vaerdict.de.page.live import GENE, HEAT, MENU, MORE_PLOTS, TABLE, Card, cards, cells_view, result_view
from vaerdict.de.page.tables import (
    contrasts_table,
    diagnostics_table,
    prior_tables,
    selection_table,
    settings_table,
)
from vaerdict.de.page.truth import (
    TruthCheck,
    percent,
    truth_cards,
    truth_check,
    truth_messages,
    truth_pictures,
    truth_table,
)
from vaerdict.de.verdict import DECIDERS, Decider, Finding, advice, calls_message, findings
from vaerdict.report.document import Block, Document, Live, Section
from vaerdict.report.records import Row, read_run, rows_of, well_formed
from vaerdict.report.tables import Column, Table

SCRIPTS = ("draw", "state", "table", "plots", "result", "cells", "gene", "start")
"""The script of the page, in order."""

_ALL_GENES = (
    "Cells of both groups count alike in this filter. Library sizes and the centre of fold changes are those of all "
    "genes, tested or not."
)


def from_run(run_dir: Path) -> Document:
    """The report on a run directory of `vaerdict de`: results.json, manifest.json, de.csv and cells.npz."""
    results, manifest = read_run(run_dir)
    with well_formed(run_dir):
        genes, not_tested = read(run_dir / "de.csv"), read_not_tested(run_dir / "not_tested.csv")
        return document(results, genes, manifest, not_tested, ShownCells.load(run_dir / FILE))


def document(
    results: Row,
    genes: Mapping[str, Genes],
    manifest: dict[str, Any] | None,
    not_tested: Mapping[str, NotTested],
    cells: ShownCells | None = None,
) -> Document:
    """The report on a differential expression.

    Parameters
    ----------
    results : dict
        What results.json holds.
    genes : mapping of str to dict
        The rows of de.csv by contrast and column, as `vaerdict.de.page.genes.read` returns them.
    manifest : dict or None
        What manifest.json holds.
    not_tested : mapping of str to dict
        The rows of not_tested.csv by contrast and reason, as `vaerdict.de.page.genes.read_not_tested` returns them.
    cells : ShownCells or None
        The cells to show; without them the page has no distributions and no map.

    Returns
    -------
    Document
        A short verdict and the genes first, details folded; on a model, a prior and a known truth where there are any.
    """
    contrasts = _matched(rows_of(results, "contrasts", "name"), genes)
    model, truth, names = results.get("model"), results.get("truth"), [contrast["name"] for contrast in contrasts]
    parts = findings(contrasts, replicates=_verdict(results)["replicates"], model=model)
    check = truth_check(contrasts, genes, truth, results["interval"]) if truth else None
    data = packed(contrasts, genes, truth, not_tested, packed_cells(cells, names), results["interval"])
    sections = [
        Section("Leading genes", [result_view(data)]),
        Section("Truth beside the answer", _truth(check) if check else []),
        Section("How far to trust the list", _trust(results, contrasts, genes, parts), folded=True),
        Section("One gene", [GENE]),
        Section("All genes", [TABLE]),
        Section("All contrasts", [HEAT] if len(contrasts) > 1 else []),
        Section("Map of the cells", _map(cells)),
        Section("Prior from other cells", [*prior_tables(contrasts)]),
        Section("Expression and length of the list", [MORE_PLOTS], folded=True),
        *(_model_sections(model) if model else []),
        Section("Settings", _settings(results)),
    ]
    what = names[0] if len(contrasts) == 1 else f"{len(contrasts)} contrasts"
    return Document(
        f"Differential expression: {what}",
        [
            *(truth_messages(check)[:1] if check else []),
            calls_message(contrasts, sides=False),
            _use(results, parts, model),
        ],
        [section for section in sections if section.blocks],
        manifest,
        style=_asset("page.css"),
        script="(() => {\n" + "".join(_asset(f"{name}.js") for name in SCRIPTS) + "})();",
        menu=MENU if len(contrasts) > 1 else Live(""),
        tone="bad" if _wrong(parts) else "",
    )


def _matched(contrasts: Sequence[Row], genes: Mapping[str, Genes]) -> Sequence[Row]:
    """The contrasts, each of which must have its genes."""
    if not contrasts:
        raise DataError("results.json holds no contrasts; run `vaerdict de` again.")
    absent = [str(contrast["name"]) for contrast in contrasts if contrast["name"] not in genes]
    if absent:
        raise DataError(f"de.csv has no genes of {', '.join(absent)}, named in results.json; run `vaerdict de` again.")
    return contrasts


def _verdict(results: Row) -> Row:
    verdict = results.get("verdict")
    if not isinstance(verdict, dict) or "messages" not in verdict:
        raise DataError("results.json holds no verdict as this version writes it; run `vaerdict de` again.")
    return verdict


def _use(results: Row, parts: Sequence[Finding], model: Row | None) -> str:
    """What the list can be used for, in a line: what is wrong with it, or of whom it speaks; and how many warnings."""
    wrong = [part.message for part in _wrong(parts)]
    whom = [part.message for part in parts if part.key == "replicates"]
    plain = [part._replace(advice="") for part in parts]
    use = advice(plain, first_look=_first_look(results, parts, model), within_batches=True)
    warnings = len(_warnings(results, parts))
    more = f"{warnings} warning{'s' if warnings > 1 else ''} and what to do next: How far to trust the list."
    return " ".join(filter(None, [*(wrong or whom), use.removeprefix("What to do next: "), more if warnings else ""]))


def _wrong(parts: Sequence[Finding]) -> list[Finding]:
    """The parts of the verdict because of which the list is not to be used."""
    rests_on_model = DECIDERS[parts[0].state].rests_on_model
    return [part for part in parts if part.tone == "bad" and (rests_on_model or part.key == "centre")]


def _first_look(results: Row, parts: Sequence[Finding], model: Row | None) -> bool:
    no_refits = model is not None and DECIDERS[parts[0].state].rests_on_model and not model["refits"]
    return no_refits or _verdict(results)["size"] == "few"


def _warnings(results: Row, parts: Sequence[Finding]) -> list[str]:
    """The warnings that no part of the verdict repeats."""
    return [w for w in results.get("warnings") or () if not any(w in part.message for part in parts)]


def _trust(results: Row, contrasts: Sequence[Row], genes: Mapping[str, Genes], parts: Sequence[Finding]) -> list[Block]:
    """What to do next, the warnings, what the calls rest on, and the size of every contrast."""
    settings, model, decider = results.get("settings") or {}, results.get("model"), DECIDERS[parts[0].state]
    steps = advice(
        parts,
        first_look=_first_look(results, parts, model),
        within_batches=settings.get("batch_key") is not None or settings.get("model") is not None,
    )
    by_model = results["scale"] == "pair"
    tested = f"Genes tested: {results['genes_tested']}. "
    tested += "Proportions are over these genes alone." if by_model else _ALL_GENES
    scale = f"LFC is on the {results['scale']} scale: {results['scale_meaning']}."
    return [
        steps,
        *(f"Warning: {warning}" for warning in _warnings(results, parts)),
        cards([Card(p.question, p.answer, p.message, _tone(p, decider)) for p in parts]),
        contrasts_table(contrasts, genes, scale),
        tested,
        *([] if by_model else [_intervals(results)]),
    ]


def _tone(part: Finding, decider: Decider) -> str:
    """Who decided the genes is neither good nor bad, unless they rest on a model."""
    return "plain" if part.key == "decided_by" and not decider.rests_on_model else part.tone


def _map(cells: ShownCells | None) -> list[Block]:
    """The map of cells, where there is one."""
    if cells is None or cells.place is None:
        return []
    return [cells_view(cells.map_name, len(cells.rows), cells.n_compared)]


def _intervals(results: Row) -> str:
    """What the intervals mean for genes that changed."""
    if results.get("shrinkage", True):
        return (
            f"Fold changes and their {percent(results['interval'])} intervals are shrunken towards no change: the "
            "stated coverage is meant over all genes. Of genes that did change, fewer intervals cover the true fold "
            "change, which tends to be larger than its estimate. --no-shrinkage shows both unshrunken."
        )
    return (
        "Fold changes and their intervals are not shrunken (--no-shrinkage): among the genes called, fold changes tend "
        "to be too large, because errors help a gene to be called. Probabilities, q-values and calls are shrunken."
    )


def _truth(check: TruthCheck) -> list[Block]:
    return [*truth_messages(check)[1:], cards(truth_cards(check)), *truth_pictures(check), truth_table(check)]


def _model_sections(model: Row) -> list[Section]:
    """What was examined of the model, where one was trained or given."""
    diagnostics, selection = rows_of(model, "diagnostics", "group"), rows_of(model, "selection", "model")
    checks = rows_of(model, "checks", "name", "x", "observed")
    weights = [khat_picture(diagnostics), diagnostics_table(diagnostics)] if diagnostics else []
    return [
        Section("Importance weights", weights, folded=True),
        Section("Model selection", [selection_table(selection)] if selection else [], folded=True),
        Section("Posterior predictive checks", [check_picture(row) for row in checks], folded=True),
    ]


def _settings(results: Row) -> list[Block]:
    stages = [{"what": str(key), "value": float(value)} for key, value in (results.get("seconds") or {}).items()]
    times = (Column("what", "stage"), Column("value", "seconds", 1))
    return [
        settings_table(results.get("settings") or {}),
        *([Table("seconds", "Seconds of each stage", times, stages, detail=True)] if stages else []),
    ]


def _asset(name: str) -> str:
    return (files("vaerdict.de.page") / name).read_text(encoding="utf-8")
