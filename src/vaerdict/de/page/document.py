"""The page of a differential expression: the verdict first, then plots and a table of all genes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from vaerdict.core import DataError
from vaerdict.de.page.figures import check_picture, khat_picture
from vaerdict.de.page.genes import Genes, NotTested, called, packed, read, read_not_tested
from vaerdict.de.page.live import Card, cards, genes_view
from vaerdict.de.page.tables import contrasts_table, diagnostics_table, selection_table, settings_table, top_table
from vaerdict.de.page.truth import (
    TruthCheck,
    percent,
    truth_cards,
    truth_check,
    truth_messages,
    truth_pictures,
    truth_table,
)
from vaerdict.de.verdict import DECIDERS, Finding, advice, calls_message, findings
from vaerdict.report.document import Block, Document, Section
from vaerdict.report.records import Row, read_run, rows_of, well_formed
from vaerdict.report.tables import Column, Table

TOP_GENES, TOP_CONTRASTS = 10, 6
"""The number of leading genes that are listed, and of contrasts; the table that is searched holds all."""

_ALL_GENES = (
    "Cells of both groups count alike in this filter. Library sizes and the centre of fold changes are those of all "
    "genes, tested or not."
)


def from_run(run_dir: Path) -> Document:
    """The report on a run directory of `vaerdict de`: results.json, manifest.json and de.csv."""
    results, manifest = read_run(run_dir)
    with well_formed(run_dir):
        genes, not_tested = read(run_dir / "de.csv"), read_not_tested(run_dir / "not_tested.csv")
        return document(results, genes, manifest, not_tested)


def document(
    results: Row, genes: Mapping[str, Genes], manifest: dict[str, Any] | None, not_tested: Mapping[str, NotTested]
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

    Returns
    -------
    Document
        Summary and sections; those on a model and on a known truth only where there are any.
    """
    contrasts = _matched(rows_of(results, "contrasts", "name"), genes)
    model, truth = results.get("model"), results.get("truth")
    parts = findings(contrasts, replicates=_verdict(results)["replicates"], model=model)
    check = truth_check(contrasts, genes, truth, results["interval"]) if truth else None
    scale = f"LFC is on the {results['scale']} scale: {results['scale_meaning']}."
    summary_cards = [_calls_card(contrasts, genes), *(Card(p.question, p.answer, p.message, p.tone) for p in parts)]
    sections = [
        Section("Truth beside the answer", _truth(check) if check else []),
        Section("Verdict", [cards(summary_cards), contrasts_table(contrasts, genes, scale)]),
        Section("Genes", [genes_view(packed(contrasts, genes, truth, not_tested))]),
        Section("Leading genes", [top_table(c, genes[c["name"]], TOP_GENES) for c in contrasts[:TOP_CONTRASTS]]),
        *(_model_sections(model) if model else []),
        Section("Settings", _settings(results)),
    ]
    what = contrasts[0]["name"] if len(contrasts) == 1 else f"{len(contrasts)} contrasts"
    return Document(
        f"Differential expression: {what}",
        [*(truth_messages(check) if check else []), *_summary(results, contrasts, parts)],
        [section for section in sections if section.blocks],
        manifest,
        style=_asset("page.css"),
        script="(() => {\n" + _asset("draw.js") + _asset("page.js") + "})();",
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


def _summary(results: Row, contrasts: Sequence[Row], parts: Sequence[Finding]) -> list[str]:
    """The calls, the genes tested, what intervals are, what to do next and the warnings; cards hold the rest."""
    settings, model, verdict = results.get("settings") or {}, results.get("model"), _verdict(results)
    no_refits = model is not None and DECIDERS[parts[0].state].rests_on_model and not model["refits"]
    steps = advice(
        parts,
        first_look=no_refits or verdict["size"] == "few",
        within_batches=settings.get("batch_key") is not None or settings.get("model") is not None,
    )
    by_model = results["scale"] == "pair"
    scale = "Proportions are over these genes alone." if by_model else _ALL_GENES
    tested = f"Genes tested: {results['genes_tested']}. {scale}"
    intervals = [] if by_model else [_intervals(results)]
    warnings = [w for w in results.get("warnings") or () if not any(w in part.message for part in parts)]
    return [calls_message(contrasts), tested, *intervals, steps, *(f"Warning: {warning}" for warning in warnings)]


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


def _calls_card(contrasts: Sequence[Row], genes: Mapping[str, Genes]) -> Card:
    n = sum(len(called(genes[contrast["name"]])) for contrast in contrasts)
    total = max(len(genes[contrast["name"]]["gene"]) for contrast in contrasts)
    answer = f"{n:,} of {total:,}" if len(contrasts) == 1 else f"{n:,} calls in {len(contrasts)} contrasts"
    rates = sorted({contrast["expected_fdr"] for contrast in contrasts})
    expected = " to ".join(map(percent, (rates[0], rates[-1])[: len(rates)]))
    rate = f"Called at an FDR of {percent(contrasts[0]['level'])}"
    if len(contrasts) > 1:
        rate += " over all contrasts together" if contrasts[0].get("joint_fdr") else " in each contrast"
    meaning = f"{rate}; {expected} of {'a' if len(contrasts) > 1 else 'the'} list are expected to be false."
    return Card("How many genes are called?", answer, meaning, "good" if n else "open")


def _truth(check: TruthCheck) -> list[Block]:
    return [cards(truth_cards(check)), *truth_pictures(check), truth_table(check)]


def _model_sections(model: Row) -> list[Section]:
    """What was examined of the model, where one was trained or given."""
    diagnostics, selection = rows_of(model, "diagnostics", "group"), rows_of(model, "selection", "model")
    checks = rows_of(model, "checks", "name", "x", "observed")
    weights = [khat_picture(diagnostics), diagnostics_table(diagnostics)] if diagnostics else []
    return [
        Section("Importance weights", weights),
        Section("Model selection", [selection_table(selection)] if selection else []),
        Section("Posterior predictive checks", [check_picture(row) for row in checks]),
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
