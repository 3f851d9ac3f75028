"""The report of the benchmarks: one table each, with the machine it was measured on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from vaerdict.report.document import Document, Section
from vaerdict.report.tables import Column, Table

_SPEED = (
    Column("case", "case"),
    Column("device", "device"),
    Column("dtype", "precision"),
    Column("ours_s", "ours, s", 3),
    Column("peer", "peer"),
    Column("peer_s", "peer, s", 3),
    Column("ratio", "peer / ours", 1),
)
_TITLES = {
    "psis": "Pareto smoothing and k-hat of many observations at once, against a loop over arviz",
    "ppca": "Training the pPCA grid as stacked members, against one model at a time",
    "samplers": "Evaluations and seconds an observation for a standard error of log p(x) of 0.05 nat",
    "ladder": "What each rung of the ladder is worth: 1,000 draws an observation",
    "counts": "An epoch of training a count model, batches of 128, 128 hidden units, 10 latents",
    "de": "Differential expression under one fitted scvi-tools model: ours against its importance mode",
}
_ON_GPU = ("psis", "samplers")
"""The benchmarks that use a GPU where there is one."""

_COLUMNS: dict[str, Sequence[Column]] = {
    "psis": _SPEED,
    "ppca": tuple(c for c in _SPEED if c.key not in ("device", "dtype")),
    "counts": tuple(c for c in _SPEED if c.key not in ("device", "dtype")),
    "de": (
        Column("method", "method"),
        Column("estimand", "estimand"),
        Column("seconds", "seconds", 2),
        Column("ratio", "importance mode / this", 1),
        Column("fdr_mae", "FDR MAE, x100", 2),
        Column("fdp", "FDP at 5 %", 3),
        Column("tpr", "TPR", 3),
        Column("auprc", "average precision", 3),
        Column("khat", "k-hat, median"),
        Column("ess_share", "ESS, % of draws", 1, 100),
    ),
    "samplers": (
        Column("case", "model"),
        Column("method", "method"),
        Column("schedule", "schedule"),
        Column("start", "start"),
        Column("gradients", "gradients", 0),
        Column("seconds", "seconds", 4),
        Column("gradients_ratio", "fewer gradients", 1),
        Column("seconds_ratio", "faster", 1),
        Column("bias", "bias, nat", 3, signed=True),
        Column("bias_se", "its se", 3),
    ),
    "ladder": (
        Column("model", "model"),
        Column("rung", "rung"),
        Column("share_ok", "k-hat in order, %", 0, 100),
        Column("khat", "k-hat, median"),
        Column("ess_share", "ESS, % of draws", 0, 100),
        Column("log_evidence", "log p(x)", 2),
        Column("evaluations", "evaluations", 0),
        Column("seconds", "seconds", 2),
    ),
}


def document(found: Sequence[dict[str, Any]]) -> Document:
    """The report of benchmark results, in the order of `_TITLES`."""
    known = sorted(
        (r for r in found if r.get("benchmark") in _TITLES), key=lambda r: list(_TITLES).index(r["benchmark"])
    )
    sections = [Section(_TITLES[r["benchmark"]], [_table(r)]) for r in known]
    summary = ["Where a peer is named, both were timed in the same run."]
    return Document("Benchmarks", summary, sections)


def _table(result: dict[str, Any]) -> Table:
    name, place = result["benchmark"], result["hardware"]
    gpu = f" and {place['accelerator']}" if place.get("accelerator") and name in _ON_GPU else ""
    where = f"{place['threads']} threads of {place['cores']} CPU cores{gpu}, torch {result['versions']['torch']}"
    return Table(name, f"{_TITLES[name]} ({where}).", _COLUMNS[name], [dict(row) for row in result["rows"]])
