"""The page of a differential expression: a verdict in words, then plots and a table of genes to look around in."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from vaerdict.core import DataError
from vaerdict.de.page.live import cards, genes_view
from vaerdict.de.page.messages import answers, headline, next_steps
from vaerdict.de.page.plots import check_picture, khat_picture
from vaerdict.de.page.summary import contrasts_table, diagnostics_table, selection_table, top_table
from vaerdict.de.page.table import Genes, beside, packed
from vaerdict.de.page.truth import Checked, checked, pictures, sentences, truth_answers, truth_table
from vaerdict.de.verdict import COUNTS, decided_by
from vaerdict.report.document import Block, Document, Section
from vaerdict.report.page import flat
from vaerdict.report.render import read_run, well_formed
from vaerdict.report.summary import Row, rows_of
from vaerdict.report.tables import Column, Table

TOP_GENES, TOP_CONTRASTS = 10, 6
"""How many leading genes are listed, and of how many contrasts; the table that is searched holds all."""

_ASIDE = (
    "The counts decided every gene, so that the list does not rest on what follows: it says whether the latents and "
    "fold changes of the model can be used."
)


def document(results: dict[str, Any], manifest: dict[str, Any] | None) -> Document:
    """The report on a differential expression; `results` carries the rows of de.csv as `genes`."""
    genes: Mapping[str, Genes] = results["genes"]
    contrasts = _matched(rows_of(results, "contrasts", "name"), genes)
    verdict = _record(results, "verdict")
    truth = results.get("truth")
    decided = decided_by(contrasts, results.get("model_role"))
    known = checked(contrasts, genes, truth, results.get("interval"), decided) if truth else None
    found = contrasts_table(contrasts, genes, _scale(results), decided)
    sections = [
        Section("Truth beside the answer", _truth(known) if known else []),
        Section("Verdict", [cards(answers(verdict, contrasts, genes, decided)), found]),
        Section("Genes", [genes_view(packed(contrasts, genes, truth))]),
        Section("Leading genes", [top_table(c, genes[c["name"]], TOP_GENES) for c in contrasts[:TOP_CONTRASTS]]),
        Section("Can the inference be trusted?", _inference(rows_of(results, "diagnostics", "group"), decided)),
        Section("Which model was kept", _selection(rows_of(results, "selection", "model"))),
        Section("Does the model fit the counts?", _checks(rows_of(results, "checks", "name", "x", "observed"))),
        Section("Settings", _settings(results)),
    ]
    return Document(
        _title(contrasts),
        [*(sentences(known) if known else []), *_summary(results, verdict, contrasts, genes, decided)],
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


def _record(results: Row, name: str) -> Row:
    value = results.get(name) or {}
    if not isinstance(value, dict):
        raise DataError(f"{name!r} in results.json is a {type(value).__name__}, not a record; run `vaerdict de` again.")
    return value


def _title(contrasts: Sequence[Row]) -> str:
    what = contrasts[0]["name"] if len(contrasts) == 1 else f"{len(contrasts)} contrasts"
    return f"Differential expression: {what}"


def _summary(
    results: Row, verdict: Row, contrasts: Sequence[Row], genes: Mapping[str, Genes], decided: str
) -> list[str]:  # fmt: skip
    said = [str(words) for words in verdict.get("words") or ()]
    warnings = [f"Warning: {words}" for words in results.get("warnings") or () if str(words) not in said]
    settings = _record(results, "settings")
    refits = {**settings, **_record(settings, "effort")}.get("refits")
    steps = next_steps(verdict, decided, refits=refits, batches=_batches(settings))
    # the first words count the calls, as the headline does
    return [headline(verdict, contrasts, genes, decided), *_tested(results), *said[1:], steps, *warnings]


def _batches(settings: Row) -> bool:
    """Whether the groups were compared within batches, those named or those of a model that was given."""
    return settings.get("batch_key") is not None or settings.get("model") is not None


def _tested(results: Row) -> list[str]:
    """Which genes there are in the table, since proportions are of these alone."""
    words = results.get("genes_words")
    median = " and the median that centres them" if results.get("scale") == "centred" else ""
    return [f"Tested were {words}. Proportions{median} are over these genes alone."] if words else []


def _scale(results: Row) -> str:
    words = results.get("scale_words")
    return f"LFC is on the {results.get('scale', 'model')} scale{f': {words}' if words else ''}."


def _truth(known: Checked) -> list[Block]:
    return [cards(truth_answers(known)), *pictures(known), truth_table(known)]


def _inference(rows: Sequence[Row], decided: str) -> list[Block]:
    aside = [_ASIDE] if decided == COUNTS else []
    return [*aside, khat_picture(rows), diagnostics_table(rows)] if rows else []


def _selection(rows: Sequence[Row]) -> list[Block]:
    return [selection_table(rows)] if rows else []


def _checks(rows: Sequence[Row]) -> list[Block]:
    return [check_picture(row) for row in rows]


def _settings(results: Row) -> list[Block]:
    settings = {"seed": results.get("seed"), "scale": results.get("scale"), **_record(results, "settings")}
    rows = [{"what": str(key), "value": flat(value)} for key, value in settings.items()]
    stages = [{"what": str(key), "value": float(value)} for key, value in _record(results, "seconds").items()]
    columns = (Column("what", "setting"), Column("value", "value"))
    times = (Column("what", "stage"), Column("value", "seconds", 1))
    return [
        Table("settings", "Every option of this run", columns, rows, detail=True),
        *([Table("seconds", "Where the time went", times, stages, detail=True)] if stages else []),
    ]


def _asset(name: str) -> str:
    return (files("vaerdict.de.page") / name).read_text(encoding="utf-8")


def from_run(run_dir: Path) -> Document:
    """The report on a run directory of `vaerdict de`."""
    results, manifest = read_run(run_dir)
    with well_formed(run_dir):
        return document(results | beside(run_dir), manifest)
