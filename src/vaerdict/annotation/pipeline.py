"""Annotation from two AnnData to a call for every cell: what users call."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from vaerdict.annotation import data, groups
from vaerdict.annotation.labels import LabelProbabilities, label_probabilities
from vaerdict.annotation.novelty import Novelty, at_most, audit_types, find_novel_cells
from vaerdict.annotation.options import AnnotateOptions
from vaerdict.annotation.result import Annotation
from vaerdict.annotation.verdict import verdict
from vaerdict.core import DataError, Progress, silent
from vaerdict.de.components import principal_components
from vaerdict.de.data import column
from vaerdict.diagnostics import Verdict
from vaerdict.io import sha256
from vaerdict.optional import require
from vaerdict.options import accepts
from vaerdict.runs import RunFolder

if TYPE_CHECKING:
    from vaerdict.annotation.scanvi import ScanviClasses

LABEL, NOVEL, UNDECIDED = "label", "novel", "undecided"
"""The calls."""

FEWEST_CALIBRATION = 20
"""Least number of query cells of known type that can calibrate."""

Batches = list[tuple[str | None, np.ndarray, Novelty]]
"""Name, query cells and findings of each batch."""

_RATES = (0.01, 0.05, 0.1, 0.2, 0.3, 0.5)  # at which numbers of calls are reported

_FEWEST_OF_BATCH = 100  # reference cells of a batch that judge the query cells of the same batch alone


@accepts(AnnotateOptions)
def annotate(
    reference: Any,
    query: Any,
    labels: str,
    *,
    model: Any = None,
    progress: Progress = silent,
    out: str | Path | None = None,
    force: bool = False,
    **options: Any,
) -> Annotation:
    """Give every cell of a query the type of a labelled reference, or call it novel, or leave it undecided.

    Labels are by logistic regression with calibrated probabilities, or by a given SCANVI model. Cells are called novel
    with an expected share of false calls of at most `fdr`, which is promised if known cells of reference and query are
    exchangeable: drawn and measured alike, up to the shares of types. A test within types checks this. If it fails, no
    cell is called novel; labels are still given, with a ranking of the clusters that the reference explains least.

    Parameters
    ----------
    reference
        AnnData of raw counts with types, in memory or backed, or the path of an .h5ad file.
    query
        AnnData of raw counts of the cells to annotate, or the path of an .h5ad file.
    labels
        Column of obs of the reference that holds the types.
    model
        A fitted SCANVI of scvi-tools that knows the query's cells, or the folder it was saved to: labels are by it.
    progress
        Called with the work done, the total and its name.
    out
        A folder for the results; one that holds another run or other files is refused.
    force
        Whether to replace the run that `out` holds, or to write beside the files there.
    {options}

    Returns
    -------
    Annotation
        The table of cells, its verdict, and how to save and export them.

    Raises
    ------
    SettingError, DataError
        If an option, a name or the data cannot be used; the message says what to do.

    Examples
    --------
    >>> annotation = annotate("atlas.h5ad", "patient.h5ad", "cell_type")  # doctest: +SKIP
    >>> annotation.table["call"].value_counts()  # doctest: +SKIP
    >>> annotation.report("annotation")  # doctest: +SKIP
    """
    settings = AnnotateOptions(labels=labels, **options)
    folder = RunFolder.of(out, "annotate", force=force)
    run = _Run(data.opened(reference), data.opened(query), settings, progress, folder)
    annotation = run.annotated(model)
    if out is not None:
        annotation.save(out)
    return annotation


@dataclass(eq=False)
class _Run:
    """One annotation: both files, the options, and what is recorded on the way."""

    reference: Any
    query: Any
    options: AnnotateOptions
    progress: Progress
    folder: RunFolder
    warnings: list[str] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def _timed(self, stage: str) -> Iterator[None]:
        begin = time.perf_counter()
        self.progress(0, 1, stage)
        yield
        self.progress(1, 1, stage)
        self.seconds[stage] = round(time.perf_counter() - begin, 2)

    def annotated(self, model: Any) -> Annotation:
        """Read, label, judge, and put everything together."""
        options = self.options
        types = data.types_of(self.reference, options.labels, self.warnings)
        given = self._known_types(set(types) - {None})
        with self._timed("reading"):
            labelled = np.flatnonzero([t is not None for t in types])
            genes = data.shared_genes(self.reference, self.query, options.gene_symbols)
            cells = data.read(self.reference, self.query, labelled, genes, options, self.progress)
        self.folder.claim({"settings": asdict(options), "data": cells.digest, "model": _named(model)})
        names = np.unique(types[labelled].astype(str))
        types, known = types[cells.reference.rows].astype(str), given[cells.query.rows]
        data.check_sizes(types, names, "reference cells with counts")
        with self._timed("components"):
            features, query = self._features(cells)
        with self._timed("labels"):
            probabilities = label_probabilities(features, types, query, seed=options.seed)
            scanvi = None if model is None else self._scanvi(model, given)
        with self._timed("novelty"):
            batches, unit_names = self._judged(features, types, query, known, cells)
        with self._timed("audit"):
            audited = (
                audit_types(features, types, fdr=options.fdr, seed=options.seed, progress=self.progress)
                if options.audit
                else []
            )
        table = self._table(cells, probabilities, scanvi, batches, unit_names, known)
        with self._timed("groups"):
            records, ranking = self._groups(cells, features, types, query, batches, unit_names)
        results = {
            "experiment": "annotate",
            "n_cells": int(self.query.n_obs),
            "n_reference": len(types),
            "n_without_counts": int(self.query.n_obs) - len(query),
            "n_genes_shared": cells.n_shared,
            "n_genes": cells.n_genes,
            "types": _type_records(types, table, audited),
            "labels": _label_record(probabilities, scanvi),
            "confusion": {"types": probabilities.types.tolist(), "counts": probabilities.confusion.tolist()},
            "batches": [_batch_record(name, rows, found) for name, rows, found in batches],
            "novel": records,
            "rates": [{"fdr": rate, "n_cells": int(at_most(table["q_novel"], rate).sum())} for rate in _RATES],
            "ranking": ranking,
            "warnings": self.warnings,
            "settings": asdict(options),
            "seconds": self.seconds,
        }
        results = {"verdict": verdict(results, table)} | results
        stored = np.full((self.query.n_obs, query.shape[1]), np.nan, dtype=np.float32)
        stored[cells.query.rows] = query
        return Annotation(table, results, stored, cells.digest, self.query)

    # ------------------------------------------------------------------------------------------------- input
    def _known_types(self, types: set[Any]) -> np.ndarray:
        """The types of the query cells that calibrate, None elsewhere. Shapes: ``-> (all cells of the query,)``."""
        if self.options.calibration is None:
            return np.full(self.query.n_obs, None, dtype=object)
        given = data.types_in(self.query, self.options.calibration, role="calibration")
        known = np.array([t in types for t in given])
        unknown = sorted({str(t) for t in given if t is not None} - {str(t) for t in types})
        if unknown:
            self.warnings.append(
                f"calibration={self.options.calibration!r} has types that the reference lacks, whose cells were judged "
                f"like others: {', '.join(unknown[:5])}."
            )
        if known.sum() < FEWEST_CALIBRATION:
            raise DataError(
                f"calibration={self.options.calibration!r} names the type of {int(known.sum())} cells of the query; at "
                f"least {FEWEST_CALIBRATION} of types of the reference are needed."
            )
        given[~known] = None
        return given

    def _features(self, cells: data.Pair) -> tuple[np.ndarray, np.ndarray]:
        from scipy import sparse

        counts = sparse.vstack([cells.reference.counts, cells.query.counts], format="csr")
        totals = np.concatenate([cells.reference.totals, cells.query.totals])
        components = principal_components(counts, totals, self.options.n_components, seed=self.options.seed)
        return components[: len(cells.reference.rows)], components[len(cells.reference.rows) :]

    def _scanvi(self, model: Any, given: np.ndarray) -> ScanviClasses:
        """Class probabilities of all cells of the query by a given SCANVI model."""
        from vaerdict.annotation.scanvi import class_probabilities
        from vaerdict.models.scvi.saved import load_scvi

        query = self.query.to_memory() if getattr(self.query, "isbacked", False) else self.query
        fitted = load_scvi(model, query) if isinstance(model, (str, Path)) else model
        known = given.tolist() if self.options.calibration is not None else None
        return class_probabilities(fitted, query, known, seed=self.options.seed, progress=self.progress)

    # ----------------------------------------------------------------------------------------------- judging
    def _judged(
        self, features: np.ndarray, types: np.ndarray, query: np.ndarray, given: np.ndarray, cells: data.Pair
    ) -> tuple[Batches, np.ndarray]:
        """What was found in every batch of the query, and the name of each cell's unit."""
        key, options = self.options.batch_key, self.options
        batches = [(None, np.arange(len(query)), np.arange(len(features)))]
        if key is not None:
            theirs = column(self.reference, key, role="batch_key")[cells.reference.rows].astype(str)
            ours = column(self.query, key, role="batch_key")[cells.query.rows]
            if any(b is None for b in ours):
                raise DataError(f"{sum(b is None for b in ours)} cells of the query have no {key!r}; name their batch.")
            batches = [
                (str(name), np.flatnonzero(ours == name), _of_batch(theirs, str(name), types))
                for name in sorted(set(ours))
            ]
        found, units = [], np.full(len(query), "", dtype=object)
        known = np.array([t is not None for t in given])
        for number, (name, rows, judges) in enumerate(batches):
            calibration = known[rows] if options.calibration is not None else None
            place = "" if name is None else f" in batch {name!r}"
            if calibration is not None and calibration.sum() < FEWEST_CALIBRATION:
                raise DataError(
                    f"{int(calibration.sum())} cells with counts have a known type in {options.calibration!r}"
                    f"{place}; at least {FEWEST_CALIBRATION} are needed."
                )
            if calibration is not None and calibration.all():
                raise DataError(
                    f"all cells have a known type in {options.calibration!r}{place}; none is left to annotate."
                )
            novelty = find_novel_cells(
                features[judges],
                types[judges],
                query[rows],
                calibration=calibration,
                fdr=options.fdr,
                level=options.level,
                seed=options.seed,
            )
            prefix = "" if name is None else f"{name}:"
            units[rows] = [f"{prefix}{u}" if u >= 0 else "" for u in novelty.unit]
            found.append((name, rows, novelty))
            self.progress(number + 1, len(batches), "batches judged")
        return found, units

    def _table(
        self,
        cells: data.Pair,
        probabilities: LabelProbabilities,
        scanvi: ScanviClasses | None,
        batches: Batches,
        units: np.ndarray,
        given: np.ndarray,
    ) -> Any:
        """A row for each cell of the query; cells without counts are undecided."""
        n, rows = self.query.n_obs, cells.query.rows
        types, prob = probabilities.types, probabilities.prob
        if scanvi is not None:
            types, prob = scanvi.classes, scanvi.prob[rows]
        label, best = types[prob.argmax(1)].astype(object), prob.max(1)
        known = np.array([t is not None for t in given])
        label[known], best[known] = given[known], 1.0
        p, q, novel = (_of_cells(batches, key, len(rows)) for key in ("p", "q", "novel"))
        promised, callable_ = (_of_cells(batches, key, len(rows)) for key in ("promised", "callable"))
        judged = np.where(promised, np.where(callable_, int(Verdict.OK), int(Verdict.CAUTION)), int(Verdict.REFUSE))
        call = np.where(novel, NOVEL, np.where(1 - best <= self.options.max_error, LABEL, UNDECIDED)).astype(object)
        judged = np.where((judged == Verdict.REFUSE) & (call == LABEL), int(Verdict.CAUTION), judged)
        judged[known] = Verdict.OK
        columns = {"call": call, "label": label, "prob": best, "p_novel": p, "q_novel": q, "unit": units}
        words = np.array([v.name.lower() for v in sorted(Verdict)], dtype=object)
        columns["verdict"] = words[judged]
        empty = {"call": UNDECIDED, "label": "", "unit": "", "verdict": "refuse"}
        table: dict[str, Any] = {"cell": [str(name) for name in self.query.obs_names]}
        for name, values in columns.items():
            table[name] = np.full(n, empty.get(name, np.nan), dtype=values.dtype)
            table[name][rows] = values
        return require("pandas", "bio").DataFrame(table)

    def _groups(
        self,
        cells: data.Pair,
        features: np.ndarray,
        types: np.ndarray,
        query: np.ndarray,
        batches: Batches,
        units: np.ndarray,
    ) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        """Groups of novel cells, and the least explained units of batches whose rate is refused."""
        novel, p, q = (_of_cells(batches, key, len(query)) for key in ("novel", "p", "q"))
        score, predicted = (_of_cells(batches, key, len(query)) for key in ("score", "predicted"))
        group = np.zeros(len(query), dtype=int)
        if novel.any():
            centers = np.stack([features[types == name].mean(0) for name in np.unique(types)])
            group[novel] = groups.group_cells(query[novel], units[novel].astype(str), centers)
        records = groups.group_records(group, predicted, p, q)
        if records and self.options.markers:
            everyone = np.full(self.query.n_obs, None, dtype=object)
            everyone[cells.query.rows] = group
            groups.add_markers(records, self.query, everyone, self.options, self.warnings)
        judged = ~_of_cells(batches, "promised", len(query)) & (units != "")
        return records, groups.ranked_units(units[judged], score[judged], predicted[judged])


def _named(model: Any) -> str | None:
    """What tells given models apart: a hash of the file, the class of one in memory."""
    if model is None or not isinstance(model, (str, Path)):
        return None if model is None else type(model).__name__
    file = Path(model) / "model.pt"
    return sha256(file) if file.is_file() else str(model)


def _of_cells(batches: Batches, name: str, n: int) -> np.ndarray:
    """A field of what was found in all batches, for each of n query cells. Shapes: ``-> (n,)``."""
    values = [np.broadcast_to(getattr(found, name), rows.shape) for _, rows, found in batches]
    out = np.empty(n, dtype=np.result_type(*values))
    for (_, rows, _), part in zip(batches, values, strict=True):
        out[rows] = part
    return out


def _of_batch(batch: np.ndarray, name: str, types: np.ndarray) -> np.ndarray:
    """Reference cells that judge a batch: those of the same batch where they are many, of all types, else all."""
    same = np.flatnonzero(batch == name)
    if len(same) < _FEWEST_OF_BATCH or len(np.unique(types[same])) < len(np.unique(types)):
        return np.arange(len(batch))
    return same


def _batch_record(name: str | None, rows: np.ndarray, found: Novelty) -> dict[str, Any]:
    gate = found.gate
    return {
        "batch": name,
        "n_cells": len(rows),
        "n_calibration": found.n_calibration,
        "n_novel": int(found.novel.sum()),
        "fewest": found.fewest,
        "callable": found.callable,
        "promised": found.promised,
        "weighted": found.weighted,
        "p_value": gate.p_value,
        "median_auroc": gate.median_auroc,
        "level": gate.level,
        "message": gate.message,
        "types": [
            {"type": str(g.group), "n_reference": g.n_reference, "n_query": g.n_query, "auroc": g.auroc}
            for g in gate.groups
        ],
    }


def _label_record(probabilities: LabelProbabilities, scanvi: ScanviClasses | None) -> dict[str, Any]:
    """How good the probabilities of types are on cells that were left out, by every method there is."""
    record: dict[str, Any] = {
        "method": "logistic regression",
        "message": "",
        "calibration": {"logistic regression": probabilities.calibration.record()},
    }
    if scanvi is None:
        return record
    record["method"], record["message"] = f"SCANVI, {scanvi.chosen}", scanvi.message
    record["calibration"] |= {f"SCANVI, {name}": each.record() for name, each in scanvi.calibration.items()}
    return record


def _type_records(types: np.ndarray, table: Any, audited: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Per type: cells in the reference, labels and mean probability in the query, and what the audit found."""
    audit = {record["type"]: record for record in audited}
    called = table[table["call"] == LABEL]
    records = []
    for name, count in zip(*np.unique(types, return_counts=True), strict=True):
        rows = called[called["label"] == name]
        prob = float(rows["prob"].mean()) if len(rows) else float("nan")
        record = {"type": str(name), "n_reference": int(count), "n_query": len(rows), "prob": prob}
        found = {key: audit[name][key] for key in ("found", "false", "fewest")} if name in audit else {}
        records.append(record | found)
    return records
