r"""`vaerdict de` as users run it, beside other methods, from a file to the genes, for up to a million cells.

Cells of eight types are simulated into an .h5ad file of sparse counts. Two types, a quarter of the cells each, are
compared; ours learns its default prior from the others. Ours reads the file in blocks, and writes its run directory and
its page. The others get the cells compared in memory, whose reading is counted, and write nothing; scvi-tools learns
from all cells. Every method runs in a process of its own, on one thread, within limits of processor time and memory; a
method that reaches one has a row that says so. Imports and a first call on the smallest file, for compilation and
caches, are not counted.

A cell has a profile, the rates of its genes by type, state and depth, and negative binomial counts around it. An eighth
of the genes follow each of some programs, whose activities differ between types and, less, between states.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import resource
import signal
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import numpy as np
import torch
from scipy import sparse

import vaerdict as vd
from vaerdict.core import Progress, silent
from vaerdict.de.rivals import ANY_CHANGE, BEYOND_DELTA, Comparison, rival_answers
from vaerdict.optional import isolated, require
from vaerdict.report import load, write_page
from vaerdict_paper.benchmarks import is_installed
from vaerdict_paper.benchmarks.timing import peak_gib

PACKAGES = ("anndata", "scanpy")
PEERS = ("edgepython", "scvi")

DELTA, LEVEL = 0.5, 0.05
N_GENES = 2000
SIZES = (1000, 10_000, 100_000, 1_000_000)
LIMIT, MEMORY = 120, 8  # CPU seconds and GiB that a method may use
REPEATS, ENOUGH = 3, 10.0  # runs of a method, unless those made took so many CPU seconds
OURS, WITHOUT_PRIOR = "vaerdict de", "vaerdict de --prior none"
TOO_SLOW = 1.5  # times the limit: a method that would need more, by its seconds with fewer cells, is not tried

_ONE_THREAD: dict[str, str] = dict.fromkeys(
    ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMBA_NUM_THREADS"), "1"
)
_SMALL = 10_000  # cells up to which the seconds of an epoch are the difference of several epochs and one

_TYPES, _STATES, _PROGRAMS = 8, 3, 16
_LIBRARY, _DEPTHS = 500.0, (0.7, 1.0, 1.4)
_LEVELS, _LARGEST = 1024, 255  # quantiles of a count, and the largest
_ORDER = (0, 2, 1, 3, 0, 4, 1, 5, 0, 6, 1, 7)  # types of consecutive blocks of cells
_BLOCK = 1024
_KEY, _FIRST, _SECOND = "cell_type", "t0", "t1"


class Method(NamedTuple):
    """A method: its answer from the path of a file, the question that it answers, and the package that it needs."""

    answer: Callable[[Path], dict[str, Any]]
    question: str
    package: str


def run(*, quick: bool = False, progress: Progress = silent) -> Iterator[dict[str, Any]]:
    """One row per size and method: processor seconds, by the clock, peak memory and genes called.

    ``cpu_s`` are all processor seconds, of which ``reading_s`` are those before the comparison where these are apart.
    ``training_s`` of scvi-tools are not part of it: they are those of one epoch times the default number of epochs.
    ``stopped`` says why a method has no answer.
    """
    sizes, n_genes, limit = ((400, 1200), 100, 60) if quick else (SIZES, N_GENES, LIMIT)
    before: dict[str, tuple[int, float] | str] = {}
    with TemporaryDirectory() as folder:
        small = simulate(Path(folder) / "small.h5ad", sizes[0], n_genes, seed=1)
        for i, n_cells in enumerate(sizes):
            path = simulate(Path(folder) / "cells.h5ad", n_cells, n_genes, seed=0)
            for j, (name, method) in enumerate(_methods().items()):
                progress(i * len(_methods()) + j, len(sizes) * len(_methods()), f"{name}, {n_cells:,} cells")
                row = {"cells": n_cells, "genes": n_genes, "method": name, "question": method.question}
                reason = _missing(method.package) or _not_tried(n_cells, before.get(name), limit)
                if reason is not None:
                    yield row | {"stopped": reason}
                    continue
                answer = in_limits(name, (path, small), limit)
                before[name] = answer["stopped"] or (n_cells, answer.pop("needs_s"))
                yield row | answer
            path.unlink()
    progress(1, 1, "done")


def _missing(package: str) -> str | None:
    """Why a method cannot be tried, whatever the number of cells."""
    return None if is_installed(package) else f"{package} is not installed"


def _not_tried(n_cells: int, before: tuple[int, float] | str | None, limit: int) -> str | None:
    """Why a method is not tried: with fewer cells it was stopped, or too slow.

    `before` is what it did with fewer cells: their number and its seconds, or why it was stopped.
    """
    if before is None:
        return None
    if isinstance(before, str):
        return f"not tried: with fewer cells it {before}"
    n_before, seconds = before
    if seconds * n_cells / n_before <= TOO_SLOW * limit:
        return None
    return f"not tried in {limit} CPU s: {seconds:.0f} for {n_before:,} cells"


# ------------------------------------------------------------------------------------------------------ the methods
def _methods() -> dict[str, Method]:
    """The methods by name."""
    return {
        OURS: Method(_ours, BEYOND_DELTA, "vaerdict"),
        WITHOUT_PRIOR: Method(_without_prior, BEYOND_DELTA, "vaerdict"),
        "scanpy t-test": Method(_ttest, ANY_CHANGE, "scanpy"),
        "scanpy Wilcoxon": Method(_wilcoxon, ANY_CHANGE, "scanpy"),
        "edgepython QL": Method(_edger, ANY_CHANGE, "edgepython"),
        "scvi-tools": Method(_scvi, BEYOND_DELTA, "scvi"),
    }


def _ours(path: Path, **options: Any) -> dict[str, Any]:
    """All that the command does: the table, the other files of the run directory, and its page."""
    with TemporaryDirectory() as out:
        result = vd.differential_expression(path, _KEY, _FIRST, _SECOND, delta=DELTA, level=LEVEL, out=out, **options)
        write_page(load(Path(out)), Path(out))
    return {"n_called": int(result.table["is_de"].sum())}


def _without_prior(path: Path) -> dict[str, Any]:
    return _ours(path, prior="none")


def _ttest(path: Path) -> dict[str, Any]:
    return _rival(path, "ttest")


def _wilcoxon(path: Path) -> dict[str, Any]:
    return _rival(path, "wilcoxon")


def _edger(path: Path) -> dict[str, Any]:
    return _rival(path, "edger")


def _rival(path: Path, name: str) -> dict[str, Any]:
    """A test of the cells compared, which are read into memory."""
    began = time.process_time()
    with isolated(0):
        stored = require("anndata", "bio").read_h5ad(path, backed="r")
        labels = stored.obs[_KEY].to_numpy()
        compared = np.isin(labels, (_FIRST, _SECOND))
        counts = stored[compared].to_memory().X
        stored.file.close()
    reading = time.process_time() - began
    answer = rival_answers(Comparison(counts, labels[compared] == _FIRST, DELTA), [name])[name]
    return {"reading_s": reading, "n_called": int(answer.called(LEVEL).sum())}


def _scvi(path: Path) -> dict[str, Any]:
    """The default model, trained for a few epochs, and its comparison; the whole training is estimated.

    What it would call when it is trained is not known.
    """
    with isolated(0):
        scvi = require("scvi", "rivals", distribution="vaerdict-paper")
        anndata = require("anndata", "bio")
        # the default number of epochs
        heuristic = require("scvi.model._utils", "rivals", distribution="vaerdict-paper")
        began = time.process_time()
        adata = anndata.read_h5ad(path)
        scvi.model.SCVI.setup_anndata(adata)
        reading = time.process_time() - began
        model, more = scvi.model.SCVI(adata), 2 if adata.n_obs <= _SMALL else 0
        settings = {"accelerator": "cpu", "enable_progress_bar": False, "logger": False}
        epochs = []
        for n in (1, 1 + more) if more else (1,):
            began = time.process_time()
            model.train(n, **settings)
            epochs.append(time.process_time() - began)
        epoch = (epochs[1] - epochs[0]) / more if more else epochs[0]
        began = time.process_time()
        model.differential_expression(
            groupby=_KEY, group1=_FIRST, group2=_SECOND, mode="change", delta=DELTA, fdr_target=LEVEL, silent=True
        )
        training = epoch * int(heuristic.get_max_epochs_heuristic(adata.n_obs))
    return {"reading_s": reading, "training_s": training, "trained_s": sum(epochs), "epoch_s": epoch}


# ------------------------------------------------------------------------------------------------------ limits
def in_limits(name: str, files: tuple[Path, Path], limit: int = LIMIT, memory: float = MEMORY) -> dict[str, Any]:
    """The medians of some runs of a method in a process with limits; ``stopped`` says which one it reached.

    `files` are the cells, and others for a first call that is not counted.
    """
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_work, args=(theirs, name, files, limit, memory), daemon=True)
    with _environment(_ONE_THREAD):
        process.start()
    theirs.close()
    try:
        answer = ours.recv()
    except EOFError:
        answer = None
    process.join()
    if answer is not None:
        return answer
    if process.exitcode == -signal.SIGXCPU:
        return {"stopped": f"did not finish in {limit} CPU s"}
    return {"stopped": f"ended with exit code {process.exitcode}"}


@contextmanager
def _environment(values: dict[str, str]) -> Iterator[None]:
    """Set variables of the environment, which a process that is started inherits, and restore them."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _work(sender: Connection, name: str, files: tuple[Path, Path], limit: int, memory: float) -> None:
    """Run a method within limits and send what it measured."""
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    path, small = files
    answer = _methods()[name].answer
    try:
        answer(small)
        if sys.platform == "linux":  # elsewhere memory that is not used counts
            resource.setrlimit(resource.RLIMIT_DATA, (int(memory * 2**30), resource.RLIM_INFINITY))
        rows: list[dict[str, Any]] = []
        while len(rows) < REPEATS and sum(row["spent_s"] for row in rows) < ENOUGH:
            cpu, wall = time.process_time(), time.perf_counter()
            resource.setrlimit(resource.RLIMIT_CPU, (int(cpu) + limit + 1, resource.RLIM_INFINITY))
            row = answer(path)
            spent = time.process_time() - cpu
            cpu_s = spent - row.pop("trained_s", 0.0)
            times = {"cpu_s": cpu_s, "wall_s": time.perf_counter() - wall}
            rows.append({**row, **times, "spent_s": spent, "needs_s": cpu_s + row.pop("epoch_s", 0.0)})
        sender.send(_medians(rows) | {"peak_gb": peak_gib(), "repeats": len(rows), "stopped": None})
    except Exception as error:  # torch and HDF5 have errors of their own for it
        if not isinstance(error, MemoryError) and "memory" not in str(error):
            raise
        sender.send({"stopped": f"needs more than {memory:g} GiB"})


def _medians(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    return {key: statistics.median(row[key] for row in rows) for key in rows[0]}


# ------------------------------------------------------------------------------------------------------ the cells
def simulate(path: Path, n_cells: int, n_genes: int, *, seed: int) -> Path:
    """Write an .h5ad file of simulated cells, a block at a time; blocks of cells have the same profile."""
    h5py, pandas = require("h5py", "bio"), require("pandas", "bio")
    with isolated(seed):
        stored = require("anndata.io", "bio")
        rng = np.random.default_rng(seed)
        tables = _tables(_rates(n_genes, np.random.default_rng(0)), np.random.default_rng(0))
        size = max(4, min(_BLOCK, n_cells // (2 * len(_ORDER))))
        types, columns = [], np.arange(n_genes) * _LEVELS
        with h5py.File(path, "w") as file:
            file.attrs.update({"encoding-type": "anndata", "encoding-version": "0.1.0"})
            for number, first in enumerate(range(0, n_cells, size)):
                kind, n = _ORDER[number % len(_ORDER)], min(size, n_cells - first)
                profile = tables[kind, rng.integers(tables.shape[1])].ravel()
                drawn = profile[columns + rng.integers(0, _LEVELS, (n, n_genes), dtype=np.uint16)]
                drawn[:, 0] += drawn.sum(1) == 0
                block = sparse.csr_matrix(drawn).astype(np.float32)
                stored.sparse_dataset(file["X"]).append(block) if number else stored.write_elem(file, "X", block)
                types += [f"t{kind}"] * n
            obs = pandas.DataFrame({_KEY: pandas.Categorical(types)}, index=[f"c{i}" for i in range(n_cells)])
            stored.write_elem(file, "obs", obs)
            stored.write_elem(file, "var", pandas.DataFrame(index=[f"g{i}" for i in range(n_genes)]))
    return path


def _rates(n_genes: int, rng: np.random.Generator) -> np.ndarray:
    """Expected counts of the genes. Shapes: ``-> (types, states x depths, genes)``."""
    level = rng.normal(0.0, 1.6, n_genes)
    loading = rng.normal(1.0, 0.3, (_PROGRAMS, n_genes)) * (rng.random((_PROGRAMS, n_genes)) < 1 / 8)
    active = rng.normal(0.0, 1.0, (_TYPES, 1, _PROGRAMS)) * (rng.random((_TYPES, 1, _PROGRAMS)) < 0.25)
    rate = np.exp(level + 0.7 * (active + 0.3 * rng.normal(size=(1, _STATES, _PROGRAMS))) @ loading)
    rate /= rate.sum(-1, keepdims=True)
    return (_LIBRARY * rate[:, :, None] * np.array(_DEPTHS)[:, None]).reshape(_TYPES, -1, n_genes)


def _tables(rates: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Equally likely counts of every gene in every profile, by which draws need no more than a lookup.

    Shapes: ``(types, profiles, genes) -> (types, profiles, genes, _LEVELS)``.
    """
    shape = 2 * np.exp(0.5 * rng.normal(size=rates.shape[-1]))
    quantiles = (np.arange(_LEVELS) + 0.5) / _LEVELS
    tables = np.empty((*rates.shape, _LEVELS), dtype=np.uint8)
    for place in np.ndindex(rates.shape[:2]):
        failure = rates[place] / (shape + rates[place])
        pmf = np.empty((_LARGEST + 1, len(shape)))
        pmf[0] = (1 - failure) ** shape
        for x in range(1, _LARGEST + 1):
            pmf[x] = pmf[x - 1] * failure * (x - 1 + shape) / x
        for gene, cdf in enumerate(pmf.cumsum(0).T):
            tables[place][gene] = np.minimum(np.searchsorted(cdf, quantiles), _LARGEST)
    return tables
