"""Novel cells of a query: false calls and power with a type hidden, the test of exchangeability, and cost.

Ours is `vaerdict.annotation` with its defaults; where it refuses the rate nothing is called. The others judge the same
cells by the same principal components. A rule without a rate (a threshold on a probability) is judged as it is used.
"""

from __future__ import annotations

import resource
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from scipy import sparse

import vaerdict as vd
from vaerdict.core import DataError, Progress, silent
from vaerdict.de.components import principal_components
from vaerdict.optional import isolated, require
from vaerdict.selective import Learned, auroc, find_novel
from vaerdict.tasks import Skipped, Task, run_tasks
from vaerdict_paper.benchmarks.novel_cells import designs
from vaerdict_paper.benchmarks.novel_cells.designs import Cells, Design

PACKAGES = ("anndata", "sklearn")
RESUMABLE = True

FDR = 0.1
OURS, ADADETECT, LOGISTIC, VOTE, SCANVI = (
    "vaerdict",
    "AdaDetect, random forest",
    "logistic regression",
    "kNN vote",
    "scANVI",
)
HIDDEN, GATE, CALIBRATED, COST = "hidden", "gate", "calibrated", "cost"
SHARES, SEEDS, RIVAL_SEEDS, SCANVI_SEEDS = (0.0, 0.05, 0.25), 13, 3, 1
GATES = {
    designs.PBMC_TYPES: {"random": 40, "composition": 20},
    designs.KANG_STATES: {"random": 40, "composition": 20},
    designs.KANG_TYPES: {"101 to 107": 5, "107 to 101": 5, "control to stimulated": 5},
    designs.PATIENTS: {"patient to patient": 20},
}
"""Designs of the test of exchangeability, and their numbers of seeds."""

SIZES = ((3_000, 2_000), (100_000, 20_000))
"""Cells, half of them in the reference, and genes of the files whose annotation is timed."""

_LOGISTIC_LIMIT, _VOTE_LIMIT = 0.5, 0.2  # probability of an error above which cells are rejected
_NEIGHBOURS = 15
_EPOCHS = (60, 30)  # of SCVI, and of SCANVI


def run(*, quick: bool = False, progress: Progress = silent, out: Path | None = None) -> Iterator[dict[str, Any]]:
    """One row per data set, design, seed and method.

    ``fdp`` is the share of known cells among those called novel (0 where none is), ``power`` the share of novel cells
    that are called, ``auroc`` that of the score, ``refused`` whether the rate was refused.
    """
    with TemporaryDirectory() as temporary:
        folder = Path(temporary) if out is None else out
        done = run_tasks(work, tasks(quick=quick), folder, workers=1, progress=progress)
    for result in done.results:
        yield from result["rows"]


def tasks(*, quick: bool = False) -> list[Task]:
    """Every design and seed."""
    todo: list[Task] = []
    for data in (designs.PBMC_TYPES, designs.KANG_STATES):
        try:
            types = designs.hidden_types(data)
        except DataError as error:
            raise Skipped(str(error)) from error
        todo += [
            {"stage": HIDDEN, "data": data, "design": hidden, "share": share, "seed": seed}
            for hidden in types[: 1 if quick else None]
            for share in SHARES
            for seed in range(1 if quick else SEEDS)
        ]
    todo += [
        {"stage": GATE, "data": data, "design": design, "share": 0.0, "seed": seed}
        for data, each in GATES.items()
        for design, n in each.items()
        for seed in range(1 if quick else n)
    ]
    kang = designs.hidden_types(designs.KANG_TYPES)
    todo += [
        {"stage": CALIBRATED, "data": designs.KANG_TYPES, "design": hidden, "share": share, "part": part, "seed": seed}
        for hidden in kang[: 1 if quick else None]
        for share in SHARES
        for part in (0.1, 0.3)
        for seed in range(1 if quick else 6)
    ]
    sizes = SIZES[:1] if quick else SIZES
    todo += [
        {"stage": COST, "data": "simulated", "design": f"{n} x {p}", "share": 0.0, "seed": 0, "n": n, "genes": p}
        for n, p in sizes
    ]
    return todo


def work(task: Task) -> dict[str, Any]:
    """Everything about one design."""
    names = {key: task[key] for key in ("stage", "data", "design", "share", "seed")}
    names |= {"part": task["part"]} if "part" in task else {}
    if task["stage"] == COST:
        return {"rows": [{**names, **cost(task["n"], task["genes"])}]}
    cells = designs.cells_of(task["data"])
    rng = np.random.default_rng([task["seed"], *"{stage} {data} {design} {share}".format(**names).encode()])
    design = _design(cells, task, rng)
    rows = [_ours(cells, design, task["seed"])]
    if task["stage"] == HIDDEN and task["seed"] < RIVAL_SEEDS:
        rows += _theirs(cells, design, task)
    return {"rows": [{**names, "n_query": len(design.query), "n_novel": int(design.novel.sum()), **r} for r in rows]}


def _design(cells: Cells, task: Task, rng: np.random.Generator) -> Design:
    if task["stage"] == HIDDEN:
        return designs.hide(cells, task["design"], task["share"], rng)
    if task["stage"] == CALIBRATED:
        return designs.calibrated(cells, task["design"], task["share"], task["part"], rng)
    if task["design"] == "random":
        return designs.hide(cells, "none", 0.0, rng)
    if task["design"] == "composition":
        return designs.compose(cells, rng)
    if task["design"] == "control to stimulated":
        return designs.between(cells.condition == "ctrl", cells.condition == "stim")
    if task["design"] == "patient to patient":
        patients = np.unique(cells.sample)
        first, second = (cells.sample == p for p in rng.choice(patients, 2, replace=False))
        return designs.between(first, second)
    first, second = (np.char.endswith(cells.sample.astype(str), donor) for donor in task["design"].split(" to "))
    control = cells.condition == "ctrl"
    return designs.between(first & control, second & control)


# ------------------------------------------------------------------------------------------------------ the methods
def _ours(cells: Cells, design: Design, seed: int) -> dict[str, Any]:
    query_columns, options = {}, {}
    if design.calibration is not None:
        known = cells.types[design.query].astype(object)
        query_columns["sorted"] = np.where(design.calibration, known, "")
        options["calibration"] = "sorted"
    reference = designs.as_anndata(cells, design.reference)
    query = designs.as_anndata(cells, design.query, **query_columns)
    if design.calibration is not None:
        query.obs["sorted"] = query.obs["sorted"].replace("", None)
    started = time.perf_counter()
    answer = vd.annotate(reference, query, "cell_type", fdr=FDR, audit=False, markers=False, seed=seed, **options)
    seconds = time.perf_counter() - started
    batch = answer.results["batches"][0]
    judged = np.ones(len(design.query), dtype=bool) if design.calibration is None else ~design.calibration
    novel = (answer.table["call"] == "novel").to_numpy()
    row = {
        "method": OURS,
        **_measured(novel[judged], -answer.table["p_novel"].to_numpy()[judged], design.novel[judged]),
    }
    label, known = answer.table["label"].to_numpy().astype(str), judged & ~design.novel
    return row | {
        "accuracy": float((label[known] == cells.types[design.query][known].astype(str)).mean()),
        "refused": not batch["promised"],
        "gate_p": batch["p_value"],
        "gate_auroc": batch["median_auroc"],
        "fewest": batch["fewest"],
        "n_calibration": batch["n_calibration"],
        "seconds": round(seconds, 2),
    }


def _theirs(cells: Cells, design: Design, task: Task) -> Iterator[dict[str, Any]]:
    """AdaDetect with the rate asked for, and rules on probabilities as they are used."""
    rows = np.concatenate([design.reference, design.query])
    counts = cells.counts[rows]
    counts = counts[:, np.asarray((counts > 0).sum(0)).ravel() >= 3]
    x = principal_components(_variable(counts), np.asarray(counts.sum(1)).ravel(), 30, seed=task["seed"])
    reference, query = np.split(x, [len(design.reference)])
    types = cells.types[design.reference].astype(str)
    half = np.random.default_rng(task["seed"]).permutation(len(types)) < len(types) // 2
    found = find_novel(Learned(), reference[half], types[half], reference[~half], query, fdr=FDR, seed=task["seed"])
    yield {"method": ADADETECT, **_measured(found.novel, found.score, design.novel)}
    linear, neighbours = require("sklearn.linear_model", "sklearn"), require("sklearn.neighbors", "sklearn")
    scale = reference[:, 0].std()
    with isolated(0):
        fitted = linear.LogisticRegression(max_iter=500).fit(reference / scale, types)
        error = 1 - fitted.predict_proba(query / scale).max(1)
        yield {"method": LOGISTIC, **_measured(error > _LOGISTIC_LIMIT, error, design.novel)}
        votes = neighbours.KNeighborsClassifier(_NEIGHBOURS).fit(reference, types).predict_proba(query)
    error = 1 - votes.max(1)
    yield {"method": VOTE, **_measured(error > _VOTE_LIMIT, error, design.novel)}
    if task["data"] == designs.PBMC_TYPES and task["seed"] < SCANVI_SEEDS and task["share"]:
        yield from _scanvi(cells, design, task["seed"])


def _variable(counts: Any, n: int = 2000) -> Any:
    """The genes of largest ratio of variance to mean among those expressed."""
    mean = np.asarray(counts.mean(0)).ravel()
    squares = np.asarray(counts.multiply(counts).mean(0)).ravel()
    return counts[:, np.argsort(-(squares - mean**2) / mean)[:n]]


def _scanvi(cells: Cells, design: Design, seed: int) -> Iterator[dict[str, Any]]:
    """Reference and query trained together, query cells unlabelled; nothing where scvi-tools is not installed."""
    try:
        scvi = require("scvi", "scvi")
    except vd.SettingError:
        return
    rows = np.concatenate([design.reference, design.query])
    adata = designs.as_anndata(cells._replace(counts=_variable(cells.counts)), rows)
    adata.obs["given"] = np.where(np.arange(len(rows)) < len(design.reference), adata.obs["cell_type"], "unknown")
    with isolated(seed):
        scvi.model.SCVI.setup_anndata(adata, labels_key="given")
        base = scvi.model.SCVI(adata, n_latent=10)
        quiet: dict[str, Any] = {"enable_progress_bar": False, "accelerator": "cpu"}
        base.train(_EPOCHS[0], **quiet)
        model = scvi.model.SCANVI.from_scvi_model(base, "unknown", labels_key="given")
        model.train(_EPOCHS[1], **quiet)
        error = 1 - model.predict(soft=True).to_numpy()[len(design.reference) :].max(1)
    yield {"method": SCANVI, **_measured(error > _VOTE_LIMIT, error, design.novel)}


def _measured(called: np.ndarray, score: np.ndarray, novel: np.ndarray) -> dict[str, Any]:
    n, both = int(called.sum()), novel.any() and not novel.all() and not np.isnan(score).any()
    return {
        "n_called": n,
        "fdp": round(int((called & ~novel).sum()) / max(n, 1), 5),
        "power": round(int((called & novel).sum()) / int(novel.sum()), 5) if novel.any() else None,
        "auroc": round(auroc(torch.from_numpy(score.copy()), torch.from_numpy(novel)), 5) if both else None,
    }


# ------------------------------------------------------------------------------------------------------------- cost
def cost(n: int, n_genes: int) -> dict[str, Any]:
    """Seconds and peak memory of the command on simulated files, half of the cells in the reference."""
    with TemporaryDirectory() as temporary:
        files = _simulated(n, n_genes, Path(temporary))
        command = [sys.executable, "-m", "vaerdict", "annotate", *map(str, files), "--labels", "cell_type"]
        started = time.perf_counter()
        subprocess.run([*command, "--out", str(Path(temporary) / "out")], check=True, capture_output=True)
        seconds = time.perf_counter() - started
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    return {"method": OURS, "seconds": round(seconds, 1), "peak_gb": round(peak / 2**20, 2)}


def _simulated(n: int, n_genes: int, folder: Path, n_types: int = 8) -> list[Path]:
    """Reference and query of Poisson counts, about 1,100 genes seen per cell where there are 20,000."""
    rng = np.random.default_rng(0)
    base = rng.gamma(0.3, 1.0, n_genes)
    profile = base * np.exp(rng.normal(0, 1, (n_types, n_genes)) * (rng.random((n_types, n_genes)) < 0.1))
    profile /= profile.sum(1, keepdims=True)
    files = []
    for name in ("reference", "query"):
        types = rng.integers(0, n_types, n // 2)
        blocks = [
            sparse.csr_matrix(rng.poisson(profile[part] * 0.09 * n_genes), dtype=np.float32)
            for part in np.array_split(types, max(1, n // 4000))
        ]
        whole = np.array([f"type {t}" for t in types])
        none = np.full(len(types), "all")
        made = designs.as_anndata(Cells(sparse.vstack(blocks, format="csr"), whole, none, none), np.arange(len(types)))
        files.append(folder / f"{name}.h5ad")
        made.write_h5ad(files[-1])
    return files
