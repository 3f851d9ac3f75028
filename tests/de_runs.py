"""A made-up run directory of a differential expression, calibrated by construction, whose right answers are known."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np

from vaerdict.de.verdict import verdict

LEVEL, DELTA = 0.05, 0.5
COLUMNS = [
    "contrast", "group_a", "group_b", "gene", "lfc_mean", "lfc_median", "lfc_low", "lfc_high", "prob_de", "prob_up",
    "prob_down", "lfsr", "q_value", "is_de", "mcse", "mean_a", "mean_b",
]  # fmt: skip
Rows = list[dict[str, Any]]
NAMES = ("B cells vs CD14+ Monocytes", "B cells vs rest", "NK cells vs rest")
HOSTILE = (
    "<script>alert(1)</script>", "</script><script>alert(2)</script>", "<img src=x onerror=alert(3)>", "a\"b'c\\d",
    "名前🧬", "<!-- <script>", "x,y\u2028z", "${alert(4)}", "&lt;b&gt;", "$& {b} group_b",
)  # fmt: skip


def groups_of(contrast: str) -> tuple[str, str]:
    """Names of the groups; a hostile contrast has hostile groups."""
    a, _, b = contrast.partition(" vs ")
    return a, b or a


def gene_rows(contrast: str, genes: list[str], rng: np.random.Generator) -> tuple[Rows, dict[str, float]]:
    """Rows of de.csv as a calibrated analysis would write them, and the true fold changes."""
    n = len(genes)
    error = rng.gamma(4, 0.06, n)
    mean = np.where(rng.random(n) < 0.2, rng.normal(0, 2, n), rng.normal(0, 0.1, n))
    truth = mean + error * rng.normal(size=n)  # drawn from the posterior, so that the made-up answers are calibrated
    draws = mean + error * rng.normal(size=(400, n))
    up, down = (draws > DELTA).mean(0), (draws < -DELTA).mean(0)
    prob, base = np.maximum(up, down), 10 ** rng.normal(-4, 0.8, n)
    order = np.argsort(-prob, kind="stable")
    q, lfsr = np.empty(n), np.minimum((draws <= 0).mean(0), (draws >= 0).mean(0))
    q[order] = np.cumsum(1 - prob[order]) / np.arange(1, n + 1)
    q = np.maximum(q, lfsr)
    low, median, high = np.quantile(draws, [0.025, 0.5, 0.975], axis=0)
    columns = (
        mean, median, low, high, prob, up, down, lfsr, q, (q <= LEVEL) & (lfsr < 0.05),
        np.sqrt(prob * (1 - prob) / 400), base * 2 ** (mean / 2), base * 2 ** (-mean / 2),
    )  # fmt: skip
    rows = [
        dict(zip(COLUMNS, (contrast, *groups_of(contrast), gene, *values), strict=True))
        for gene, *values in zip(genes, *(c.tolist() for c in columns), strict=True)
    ]
    return rows, dict(zip(genes, truth.tolist(), strict=True))


def contrast_record(name: str, rows: Rows | None = None, **changes: Any) -> dict[str, Any]:
    """The record of a contrast in results.json, by the rows of its genes."""
    rows = rows or []
    q = np.sort([row["q_value"] for row in rows])
    k = np.unique(np.geomspace(1, max(len(q), 1), min(len(q), 120)).astype(int))
    called = [row for row in rows if row["is_de"]]
    a, b = groups_of(name)
    return {
        "name": name, "group_a": a, "group_b": b, "against_rest": b == "rest", "within": None,
        "n_cells_a": 340, "n_cells_b": 1480, "n_cells_a_used": 340, "n_cells_b_used": 1480,
        "n_samples_a": None, "n_samples_b": None, "paired": None, "n_discoveries": len(called),
        "n_up": sum(r["lfc_mean"] > 0 for r in called), "n_down": sum(r["lfc_mean"] <= 0 for r in called),
        "expected_fdr": max((r["q_value"] for r in called), default=0.0), "level": LEVEL, "delta": DELTA,
        "joint_fdr": False, "n_tested": len(rows), "n_expressed": len(rows), "least_cells": 10,
        "share_contradicted": None, "prior": None,
        "fdr_curve": {
            "k": k.tolist(), "expected": q[k - 1].tolist(), "low": (0.8 * q[k - 1]).tolist(),
            "high": (1.25 * q[k - 1]).tolist(),
        },
    } | changes  # fmt: skip


def checks(rng: np.random.Generator) -> Rows:
    x = np.sort(10 ** rng.normal(-0.5, 0.7, 400))
    counts = 2000 * np.exp(0.4 * np.linspace(-2, 2, 50))
    zeros, variance, library = (1 + x / 2) ** -2, np.log(x + x**2 / 2), np.log(counts)
    axes = {"zeros": (x, zeros), "variance": (x, variance), "library": (counts, library)}
    return [
        {
            "name": name, "message": "91% lie in the predicted range", "ok": True, "x": at.tolist(),
            "predicted": y.tolist(), "observed": (y + 0.05 * rng.normal(size=len(y))).tolist(),
            "predicted_low": (y - 0.09).tolist(), "predicted_high": (y + 0.09).tolist(),
        }
        for name, (at, y) in axes.items()
    ]  # fmt: skip


def model_record(**changes: Any) -> dict[str, Any]:
    """The record of a model in results.json: it decides every gene, its inference is certified and it fits."""
    return {
        "role": "decides", "refits": 3,
        "diagnostics": [
            {"group": g, "n_cells": 340, "khat_encoder": 1.1, "khat": 0.31, "share_ok": 0.99, "ess": 0.41}
            for g in ("B cells", "CD14+ Monocytes", "NK cells")
        ],
        "selection": [
            {"model": m, "seed": s, "evidence_own": -812.1 - s, "evidence_refined": -805.2 - s, "khat": 0.3,
             "epochs": 200, "chosen": (m, s) == ("IWAE", 0)} for m in ("VAE", "IWAE") for s in (0, 1)
        ],
        "checks": checks(np.random.default_rng(8)),
    } | changes  # fmt: skip


def results_of(contrasts: Rows, truth: dict[str, Any] | None, model: dict[str, Any] | None) -> dict[str, Any]:
    settings = {"groupby": "cell_type", "n_top_genes": 2000, "batch_key": None, "pairs": [["B cells", None]]}
    return {
        "experiment": "de", "settings": settings, "seed": 0, "seconds": {"reading": 101.2, "comparing": 41.0},
        "scale": "centred", "scale_meaning": "log2 fold change of mean expression", "interval": 0.95,
        "shrinkage": True, "genes_tested": "2000 of 9999 genes: seen in at least 10 of the cells compared",
        "verdict": verdict(contrasts, replicates="cells", model=model),
        "contrasts": contrasts, "model": model, "truth": truth, "warnings": ["12 cells have no label."],
    }  # fmt: skip


def run_in(
    folder: Path,
    *,
    n_genes: int = 2000,
    names: tuple[str, ...] = NAMES,
    extra: tuple[str, ...] = (),
    model: dict[str, Any] | None = None,
    simulated: bool = False,
    contrast: dict[str, Any] | None = None,
    untested: tuple[tuple[str, str, int, str], ...] | None = (),
    **changes: Any,
) -> Path:
    """A run directory with made-up contrasts.

    `extra` are further genes, `contrast` replaces parts of the records of contrasts and `changes` parts of the results;
    where `simulated` the truth is in the results. `untested` are the rows of not_tested.csv, None for no such file.
    """
    rng = np.random.default_rng(7)
    genes = [f"GENE{i}" for i in range(n_genes - len(extra))] + list(extra)
    parts = [gene_rows(name, genes, rng) for name in names]
    contrasts = [contrast_record(name, rows, **contrast or {}) for name, (rows, _) in zip(names, parts, strict=True)]
    truth = {name: lfc for name, (_, lfc) in zip(names, parts, strict=True)} if simulated else None
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "de.csv").open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        writer.writerows(row for rows, _ in parts for row in rows)
    if untested is not None:
        with (folder / "not_tested.csv").open("w", encoding="utf-8", newline="") as file:
            csv.writer(file).writerows([("contrast", "gene", "cells_seen", "reason"), *untested])
    (folder / "results.json").write_text(json.dumps(results_of(contrasts, truth, model) | changes))
    (folder / "manifest.json").write_text(json.dumps({"command": "vaerdict de x.h5ad", "versions": {"torch": "2.6"}}))
    return folder
