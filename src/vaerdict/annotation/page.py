"""The page of an annotation: the verdict first, then the cells, novel groups, and what the calls rest on."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from vaerdict.annotation.figures import (
    MOST_TYPES,
    CellMap,
    audit_picture,
    confusion_picture,
    gate_picture,
    reliability_picture,
)
from vaerdict.annotation.groups import FEWEST
from vaerdict.annotation.result import ANNOTATED, read_cells, read_features
from vaerdict.annotation.verdict import CLEAR, batch_message
from vaerdict.auditing.verdict import percent
from vaerdict.report.document import TONES, Block, Document, Finding, present
from vaerdict.report.page import flat
from vaerdict.report.records import Row, read_run, rows_of, well_formed
from vaerdict.report.tables import Column, Table
from vaerdict.selective.gate import MIN_ROWS

_GATES = 4  # batches whose test is drawn
_CONFUSIONS = 20  # kinds of wrong labels listed
_ACCURATE = 0.9  # share of right labels from which labels are shown as good
_WORDS = (
    ("type", "A value of the column of labels of the reference."),
    ("label", "The most probable type. It is given where the probability that it is wrong is at most max_error."),
    ("novel", "Of none of the types of the reference, at the false discovery rate fdr."),
    ("undecided", "Not called novel, and no type is probable enough."),
    ("false discovery rate", "Expected share of cells of known types among the cells called novel."),
    ("calibration cells", "Cells of known types that are judged like query cells: a random half of the reference."),
    ("p, q", "Share of calibration cells that look as novel; smallest false discovery rate at which a cell is called."),
    ("unit", "A cluster of cells of reference and query in which cells were judged together."),
    ("exchangeable", "Known cells of reference and query are drawn and measured alike, up to the shares of types."),
    ("AUROC", "Probability that a classifier ranks a query cell above a calibration cell; 0.5 without any difference."),
    ("LFC", "Log2 fold change of a gene, cells of the group over all other cells of the query."),
)

_STYLE = """
.picture { display: inline-block; width: min(100%, 33rem); margin-right: 1rem; vertical-align: top; }
tbody th { min-width: 8rem; overflow-wrap: break-word; }
"""


def from_run(run_dir: Path) -> Document:
    """The report on a run directory of `vaerdict annotate`: results.json, manifest.json, cells.csv, annotated.h5ad."""
    run_dir = Path(run_dir)
    results, manifest = read_run(run_dir)
    with well_formed(run_dir):
        table = read_cells(run_dir)
        drawn = (run_dir / ANNOTATED).is_file()
        cells = CellMap(table, read_features(run_dir), results["settings"]["seed"]) if drawn else None
        return document(results, manifest, cells)


def document(results: Row, manifest: dict[str, Any] | None, cells: CellMap | None = None) -> Document:
    """The report on an annotation.

    `results` is what results.json holds, `manifest` what manifest.json holds; without `cells` there is no map.
    """
    types, batches = rows_of(results, "types", "type", "n_reference"), rows_of(results, "batches", "batch", "promised")
    novel, ranking = rows_of(results, "novel", "group", "n_cells"), rows_of(results, "ranking", "unit", "score")
    labels, fdr = results["labels"], results["settings"]["fdr"]
    sections = [
        ("Verdict", [findings(results)]),
        ("Cells", [*(cells.pictures() if cells else []), types_table(types)]),
        ("Novel groups", [*_novel(novel, batches), _rates_table(rows_of(results, "rates", "fdr", "n_cells"), batches)]),
        ("Least explained clusters", _ranking(ranking)),
        ("Do reference and query look alike?", _gates(batches)),
        ("What could have been found", [*_audit(types, fdr, batches)]),
        ("Labels", [*_labels(labels, results["confusion"])]),
        ("Words and settings", [_words_table(), *_settings(results)]),
    ]
    return Document(
        f"Annotation of {results['n_cells']:,} cells by {len(types)} types",
        _summary(results),
        present(sections),
        manifest,
        _STYLE,
    )


# ----------------------------------------------------------------------------------------------------- sentences
def _summary(results: Row) -> list[str]:
    """At most three sentences: the calls, the rate, and what would have been missed."""
    calls, *messages = results["verdict"]["messages"]
    batches = results["batches"]
    audit = messages[len(batches) :]
    rate = messages[0] if len(batches) == 1 else _rates(batches, results["settings"])
    return [f"{results['verdict']['verdict']}. {calls}", rate, *audit[:1]]


def _rates(batches: Sequence[Row], settings: Row) -> str:
    """The rate of several batches of the query."""
    refused = [str(b["batch"]) for b in batches if not b["promised"]]
    stated = f"An expected {settings['fdr']:.0%} at most of the novel cells of each batch are false"
    if not refused:
        return f"{stated}, in all {len(batches)} batches."
    names = ", ".join(refused[:5]) + (f" and {len(refused) - 5} more" if len(refused) > 5 else "")
    if len(refused) == len(batches):
        return f"No rate is stated for any of the {len(batches)} batches, and no cell is called novel: {names}."
    return f"{stated}, in {len(batches) - len(refused)} of {len(batches)} batches. No rate is stated for: {names}."


def findings(results: Row) -> list[Finding]:
    """The parts of the verdict, each with its evidence."""
    batches, settings = results["batches"], results["settings"]
    return [_rate_finding(results["verdict"]["verdict"], batches, settings), _label_finding(results), *_found(results)]


def _rate_finding(word: str, batches: Sequence[Row], settings: Row) -> Finding:
    """Whether the rate is stated. What was found in a single batch is in the summary."""
    lines = [batch_message(b, settings) for b in batches[:_GATES]] if len(batches) > 1 else []
    if any(b["promised"] for b in batches):
        where = " in each batch" if len(batches) > 1 else ""
        text = f"Novel cells: an expected {settings['fdr']:.0%} at most of the calls{where} are false."
        lines.append(
            "This holds if known cells of reference and query are exchangeable, on average over repetitions: a single "
            "list may have more false calls."
        )
    else:
        text = "Novel cells: none is called, because no false discovery rate can be stated."
        lines.append("Clusters are ranked by how little the reference explains them, without a rate.")
    return Finding(text, word.lower(), TONES[word], lines)


def _label_finding(results: Row) -> Finding:
    labels, alike = results["labels"], all(b["promised"] for b in results["batches"])
    name, quality = _by_method(labels)
    good = quality["accuracy"] >= _ACCURATE and alike
    shift = [] if alike else ["They were not checked on the query, which differs from the reference."]
    return Finding(
        f"Labels by {labels['method']}: {percent(quality['accuracy'])} are right on cells whose label was not used.",
        "ok" if good else "caution",
        "good" if good else "open",
        [
            f"{name}, {quality['n']:,} cells: calibration error {quality['calibration_error']:.3f}, Brier score "
            f"{quality['brier']:.3f}, log loss {quality['log_loss']:.3f}.",
            *shift,
            *filter(None, [labels["message"]]),
        ],
    )


def _by_method(labels: Row) -> tuple[str, Row]:
    """The calibration of the method that gives the labels, that of the regression where it was not measured."""
    calibration: Mapping[str, Row] = labels["calibration"]
    name = labels["method"] if labels["method"] in calibration else next(iter(calibration))
    return name, calibration[name]


def _found(results: Row) -> list[Finding]:
    audited = [t for t in results["types"] if t.get("found") is not None]
    if not audited:
        return []
    found, alike = sum(t["found"] >= CLEAR for t in audited), all(b["promised"] for b in results["batches"])
    word = "ok" if found == len(audited) and alike else "caution"
    return [
        Finding(
            f"What could have been found: {found} of {len(audited)} types of the reference, had they been absent.",
            word,
            "good" if word == "ok" else "open",
            [
                f"A type counts as found if at least {CLEAR:.0%} of its cells are called novel.",
                *([] if alike else ["This is about a query that looks like the reference, which this one does not."]),
            ],
        )
    ]


# -------------------------------------------------------------------------------------------------------- tables
def types_table(types: Sequence[Row]) -> Table:
    """Every type: its cells in the reference, labels in the query, and whether it would have been found."""
    audited = any(t.get("found") is not None for t in types)
    columns = [
        Column("type", "type"),
        Column("n_reference", "reference cells"),
        Column("n_query", "query cells labelled"),
        Column("prob", "mean probability"),
        *([Column("would", "found if absent"), Column("found", "cells found, %", 0, 100)] if audited else []),
    ]
    rows = [{**t, "prob": _known(t["prob"]), "would": _would(t.get("found"))} for t in types]
    return Table("types", "Types", columns, rows)


def _would(found: float | None) -> str | None:
    return None if found is None else "yes" if found >= CLEAR else "no"


def _known(value: float | None) -> float | None:
    return None if value is None or value != value else value


def _novel(novel: Sequence[Row], batches: Sequence[Row]) -> list[Block]:
    if not novel:
        return ["No cell is called novel."] if any(b["promised"] for b in batches) else []
    columns = (
        Column("group", "group"),
        Column("n_cells", "cells"),
        Column("nearest", "nearest types"),
        Column("markers", "marker genes (LFC)"),
        Column("p_max", "largest p", None),
        Column("q_max", "largest q", None),
    )
    rows = [
        {
            **group,
            "nearest": ", ".join(f"{n['type']} {n['share']:.0%}" for n in group["nearest"]),
            "markers": _markers(group),
        }
        for group in novel
    ]
    note = (
        "Nearest types: those that the cells would be taken for. Marker genes are higher in the group than in all "
        "other cells of the query at a false discovery rate of 5 %. The groups were found in the same counts, so that "
        "markers describe a group and do not prove it."
    )
    groups = Table("novel", "Groups of novel cells", columns, rows, note)
    return [groups, *(_markers_table(group) for group in novel if group.get("markers"))]


def _rates_table(rates: Sequence[Row], batches: Sequence[Row]) -> Table | None:
    if not rates or not any(b["promised"] for b in batches):
        return None
    columns = (Column("rate", "false discovery rate"), Column("n_cells", "novel cells"))
    rows = [{"rate": f"{row['fdr']:.0%}", "n_cells": row["n_cells"]} for row in rates]
    note = "A rate that was chosen after looking at this table does not hold."
    return Table("rates", "Cells that would be called novel at other rates", columns, rows, note)


def _markers(group: Row) -> str:
    if group["n_cells"] < FEWEST or "markers" not in group:
        return "too few cells" if group["n_cells"] < FEWEST else "not sought"
    return ", ".join(f"{m['gene']} {m['lfc']:+.1f}" for m in group["markers"][:8]) or "none found"


def _markers_table(group: Row) -> Table:
    columns = (
        Column("gene", "gene"),
        Column("lfc", "LFC", 2, signed=True),
        Column("seen", "seen in the group, %", 0, 100),
        Column("seen_others", "seen in other cells, %", 0, 100),
    )
    caption = f"Marker genes of novel group {group['group']} ({group['n_cells']:,} cells)"
    return Table(f"markers-{group['group']}", caption, columns, group["markers"], detail=True)


def ranking_table(ranking: Sequence[Row]) -> Table | None:
    """The clusters of the query that the reference explains least; None without any."""
    if not ranking:
        return None
    columns = (
        Column("unit", "unit"),
        Column("n_cells", "cells"),
        Column("type", "nearest type"),
        Column("score", "log ratio of query to reference cells", signed=True),
    )
    note = "No error rate is stated for this list. A large score may be novel cells, or a shift of known ones."
    return Table("ranking", "Clusters that the reference explains least", columns, [dict(row) for row in ranking], note)


def _ranking(ranking: Sequence[Row]) -> list[Block | None]:
    table = ranking_table(ranking)
    return [table] if table else []


def _gates(batches: Sequence[Row]) -> list[Block | None]:
    intro = (
        "The rate holds if known cells of reference and query are exchangeable. Calibration and query cells of the "
        "same predicted type are therefore compared by a permutation test of the AUROC in the half of the types that "
        "differ least. Cells called novel are left out. A test that passes does not prove that the cells are alike: "
        "with few cells only a large shift is seen."
    )
    pictures = [gate_picture(batch, f"gate-{i}") for i, batch in enumerate(batches[:_GATES])]
    return [intro, *pictures, *([_batches_table(batches)] if len(batches) > 1 else []), _gate_table(batches)]


def _batches_table(batches: Sequence[Row]) -> Table:
    columns = (
        Column("batch", "batch"),
        Column("n_cells", "query cells"),
        Column("n_calibration", "calibration cells"),
        Column("rate", "rate stated"),
        Column("n_novel", "novel cells"),
        Column("fewest", "fewest that could be called"),
        Column("median_auroc", "median AUROC"),
        Column("p_value", "p", None),
    )
    return Table("batches", "Batches of the query", columns, [{**b, "rate": _yes(b["promised"])} for b in batches])


def _yes(value: bool) -> str:
    return "yes" if value else "no"


def _gate_table(batches: Sequence[Row]) -> Table:
    many = len(batches) > 1
    columns = (
        Column("type", "predicted type"),
        *([Column("batch", "batch")] if many else []),
        Column("n_reference", "calibration cells"),
        Column("n_query", "query cells"),
        Column("auroc", "AUROC"),
    )
    rows = [{**t, "batch": b["batch"]} for b in batches for t in b["types"]]
    numbers = [b for b in batches if b["p_value"] is not None]
    shown = f" p = {numbers[0]['p_value']:.2g}, level {numbers[0]['level']:g}." if numbers and not many else ""
    note = f"Types with fewer than {MIN_ROWS} cells on either side are not compared.{shown}"
    return Table("gate", "Difference of query from calibration cells, by predicted type", columns, rows, note)


def _audit(types: Sequence[Row], fdr: float, batches: Sequence[Row]) -> Iterable[Block | None]:
    picture = audit_picture(types, fdr)
    if picture is None:
        return []
    columns = (
        Column("type", "type left out"),
        Column("n_reference", "reference cells"),
        Column("found", "found, %", 0, 100),
        Column("false", "false calls, %", 0, 100),
        Column("fewest", "fewest cells that could be called"),
    )
    rows = sorted(map(dict, types), key=lambda t: t["found"])
    fewest = ", ".join(f"{b['fewest']:,}" + (f" ({b['batch']})" if b["batch"] is not None else "") for b in batches[:8])
    return [
        "Every type was left out of the reference in turn; the other cells were cut into known, calibration and query "
        "cells, and the cells of the type added to the query. A type that is not found here would be given the label "
        "of another type if it were new in the query. Of the query itself, the fewest cells that could have been "
        f"called novel are {fewest}.",
        picture,
        Table("audit", "Each type left out of the reference", columns, rows, detail=True),
    ]


def _labels(labels: Row, confusion: Row) -> Iterable[Block | None]:
    return [
        confusion_picture(confusion),
        reliability_picture(labels["calibration"]),
        *_confusions(confusion),
        _calibration_table(labels),
    ]


def _confusions(confusion: Row) -> list[Table]:
    """The most frequent wrong labels."""
    names, counts = confusion["types"], confusion["counts"]
    rows = [
        {"type": names[i], "label": names[j], "n": n, "share": n / sum(row)}
        for i, row in enumerate(counts)
        for j, n in enumerate(row)
        if i != j and n
    ]
    if not rows:
        return []
    columns = (
        Column("type", "type"),
        Column("label", "label given"),
        Column("n", "cells"),
        Column("share", "of the type, %", 1, 100),
    )
    rows = sorted(rows, key=lambda row: -row["n"])[:_CONFUSIONS]
    small = len(names) <= MOST_TYPES
    return [Table("confusions", "The most frequent wrong labels in cross-validation", columns, rows, detail=small)]


def _calibration_table(labels: Row) -> Table:
    columns = (
        Column("method", "method"),
        Column("n", "cells"),
        Column("accuracy", "right, %", 1, 100),
        Column("calibration_error", "calibration error", 3),
        Column("brier", "Brier score", 3),
        Column("log_loss", "log loss", 3),
    )
    rows = [{"method": name, **quality} for name, quality in labels["calibration"].items()]
    return Table("calibration", "Probabilities of labels on cells whose label was not used", columns, rows)


def _words_table() -> Table:
    columns = (Column("word", "word"), Column("meaning", "meaning"))
    return Table(
        "words", "What the words mean", columns, [dict(zip(("word", "meaning"), w, strict=True)) for w in _WORDS]
    )


def _settings(results: Row) -> list[Block]:
    counted = {
        "query cells": results["n_cells"],
        "query cells without counts": results["n_without_counts"],
        "reference cells": results["n_reference"],
        "shared genes": results["n_genes_shared"],
        "genes used": results["n_genes"],
    }
    entries: dict[str, Any] = {**results["settings"], **counted, "seconds": results["seconds"]}
    rows = [{"what": key, "value": flat(value)} for key, value in entries.items()]
    columns = (Column("what", "setting"), Column("value", "value"))
    notes = [f"Note: {warning}" for warning in results["warnings"]]
    return [*notes, Table("settings", "Settings, data and seconds of each stage", columns, rows, detail=True)]
