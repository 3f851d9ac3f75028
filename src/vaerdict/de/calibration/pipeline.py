"""Does the false discovery rate mean what it says on the user's own data: what users call."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import numpy as np

from vaerdict.core import Progress, SettingError, silent
from vaerdict.de import data as inputs
from vaerdict.de.calibration.compare import NULL, SPIKE, split_work
from vaerdict.de.calibration.splits import check_samples, sample_splits
from vaerdict.de.calibration.summary import (
    effect_summary,
    interval_summary,
    mae_summary,
    null_summary,
    spike_summary,
    verdict,
)
from vaerdict.de.contrasts import FEWEST_CELLS, FEWEST_SAMPLES
from vaerdict.engines import Engine
from vaerdict.io import manifest, replacing, write_json
from vaerdict.optional import isolated, require
from vaerdict.tasks import Run, Task, run_tasks

if TYPE_CHECKING:
    import pandas

OTHERS = 2000
"""Cells of other groups that are kept at most: the analysis trains on some of them too."""

COLUMNS = {
    "kind": "null (nothing changed) or spike (changes planted)",
    "group": "the group whose cells were split",
    "split": "number of the split",
    "method": "model: what `vaerdict de` reports; raw: a plain bootstrap of the raw counts",
    "replicates": "cells or samples",
    "level": "the FDR at which genes were called",
    "n_genes": "genes compared, over all contrasts",
    "n_true": "those of them that changed by at least delta",
    "n_called": "genes called",
    "n_false": "those of them that did not",
    "fdp": "their share, zero where none is called",
    "tpr": "share of the changed genes that were called",
    "expected_fdr": "the FDR stated of the genes called",
}
"""The columns of calibrate.csv, a row for each split, method and level, and what they hold."""

_SEEDS = {NULL: 61, SPIKE: 62}
_SPLITTING = 63


@dataclass(frozen=True)
class CalibrateOptions:
    """Everything that was asked for; `analysis` is what each comparison is given."""

    groupby: str
    groups: tuple[str, ...]
    within: str | None
    sample_key: str | None
    balance: str | None
    batch_key: str | None
    layer: str | None
    splits: int
    spikes: int
    share: float
    seed: int
    analysis: dict[str, Any]

    def __post_init__(self) -> None:
        if self.splits < 0 or self.spikes < 0 or not self.splits + self.spikes:
            raise SettingError(f"splits={self.splits} and spikes={self.spikes}: at least one split must be made.")
        if not 0 < self.share < 1:
            raise SettingError(f"share={self.share} of the cells for the first half must lie between 0 and 1.")
        if self.share != 0.5 and self.sample_key is not None:
            raise SettingError("whole samples are halved evenly; leave share or sample_key out.")
        if self.analysis["scale"] == "pair":
            raise SettingError(
                "scale='pair' is of two random cells, which differ even where nothing changed: there is no truth to "
                "calibrate against; choose centred or proportion."
            )


@dataclass(frozen=True, eq=False)
class Calibration:
    """What the splits gave: `table` has the columns of calibrate.csv, `results` is all that results.json holds."""

    table: pandas.DataFrame
    results: dict[str, Any]
    data_sha256: str

    @property
    def verdict(self) -> dict[str, Any]:
        """The word, and in sentences why."""
        return self.results["verdict"]

    def save(self, path: str | Path) -> Path:
        """Write calibrate.csv, results.json and manifest.json to a folder, each whole or not at all."""
        out = Path(path)
        out.mkdir(parents=True, exist_ok=True)
        with replacing(out / "calibrate.csv") as partial_file:
            self.table.to_csv(partial_file, index=False)
        write_json(out / "results.json", self.results)
        settings, seconds = self.results["settings"], self.results["seconds"]
        write_json(out / "manifest.json", manifest(settings, seconds, data_sha256=self.data_sha256))
        return out

    def report(self, path: str | Path) -> Path:
        """Write everything to a folder with one self-contained page, and return the page."""
        # the page stands on a layer above this one, so that it is asked for by name
        return import_module("vaerdict.report").render(self.save(path))


def calibrate(
    adata: Any,
    groupby: str,
    groups: Sequence[str] | None = None,
    *,
    splits: int = 20,
    spikes: int = 10,
    share: float = 0.5,
    within: str | None = None,
    sample_key: str | None = None,
    balance: str | None = None,
    batch_key: str | None = None,
    layer: str | None = None,
    delta: float = 0.5,
    level: float = 0.05,
    scale: str = "centred",
    min_cells: int = 3,
    n_top_genes: int | None = 2000,
    objectives: Sequence[str] | None = None,
    refits: int | None = None,
    n_draws: int | None = None,
    quick: bool = False,
    seed: int = 0,
    device: str = "cpu",
    out: str | Path | None = None,
    resume: bool = False,
    workers: int | None = 1,
    engine: Engine | None = None,
    progress: Progress = silent,
) -> Calibration:
    """Does the FDR of `differential_expression` mean what it says on these data?

    Cells of one group, the largest or each of `groups`, are split at random into halves that are compared with the
    settings given, which are those of `differential_expression`. In `splits` of them nothing changed, so that every
    discovery is false; in `spikes` more, known changes are planted by thinning counts (see `calibrate_halves`), so that
    achieved and nominal FDR, power and coverage of the intervals are known. With `sample_key` whole samples are split,
    at least two to a half, and where nothing changed the answer with cells as replicates stands beside. Both halves
    hold as many cells, or samples, of each value of `balance`, such as the condition. With a `share` of 0.1 one "half"
    gets a tenth of the cells, as where a rare type is compared with a common one.

    Splits are done by `engine`, by default in `workers` processes. With `out`, a folder, finished splits are stored:
    `resume` goes on there. The same seed gives the same table, however often it was stopped.
    """
    adata = inputs.open_data(adata) if isinstance(adata, (str, Path)) else adata
    columns = _columns(adata, groupby, within, sample_key, balance, batch_key)
    effort = {"objectives": objectives and list(objectives), "refits": refits, "n_draws": n_draws, "quick": quick}
    question = {"delta": delta, "level": level, "scale": scale, "min_cells": min_cells, "n_top_genes": n_top_genes}
    chosen = _chosen(columns["group"], groups, groupby)
    keys = (within, sample_key, balance, batch_key, layer)
    options = CalibrateOptions(
        groupby, chosen, *keys, splits, spikes, share, seed, analysis={**question, **effort, "device": device}
    )
    cells, warnings, sha = _cells(adata, columns, options)
    tasks = _tasks(cells.obs, options, sha, warnings)
    how = {"resume": resume, "workers": workers, "engine": engine, "progress": progress}
    with TemporaryDirectory() as unnamed:
        folder = Path(unnamed if out is None else out)
        run = run_tasks(partial(split_work, str(_write(cells, folder, sha))), tasks, folder, **how)
    found = _result(run, options, warnings, sha)
    if out is not None:
        found.save(out)
    return found


# ------------------------------------------------------------------------------------------------------ cells
def _columns(
    adata: Any, groupby: str, within: str | None, sample_key: str | None, balance: str | None, batch_key: str | None
) -> dict[str, np.ndarray]:
    """The labels that are needed, by what they are for; one value for all cells where none is asked for."""
    keys = {"within": within, "balance": balance, "sample": sample_key, "batch": batch_key}
    roles = {"sample": "sample_key", "batch": "batch_key"}
    every = np.full(adata.n_obs, "all", dtype=object)
    found = {
        name: every if key is None else inputs.column(adata, key, role=roles.get(name, name))
        for name, key in keys.items()
    }
    return {"group": inputs.column(adata, groupby, role="groupby"), **found}


def _chosen(labels: np.ndarray, groups: Sequence[str] | None, column: str) -> tuple[str, ...]:
    """The groups to split: those named, or the largest; each of cells enough for two halves."""
    known = [label for label in labels if label is not None]
    if not known:
        raise SettingError(f"column {column!r} holds no label; name another with groupby.")
    names, sizes = np.unique(known, return_counts=True)
    named = groups or [names[sizes.argmax()]]
    chosen = dict.fromkeys(inputs.check_group(name, labels, role="groups", column=column) for name in named)
    for group in chosen:
        n = int(sizes[names == group][0])
        if n < 2 * FEWEST_CELLS:
            raise SettingError(
                f"group {group!r} has {n} cells; two halves need at least {2 * FEWEST_CELLS}, and some hundred to tell "
                "anything: name a larger group."
            )
    return tuple(chosen)


def _cells(adata: Any, columns: dict[str, np.ndarray], options: CalibrateOptions) -> tuple[Any, list[str], str]:
    """Counts and labels of the groups' cells and of some others, in memory, what was odd about them, and their hash."""
    mine = np.array([label in options.groups for label in columns["group"]])
    others = np.random.default_rng([options.seed, _SPLITTING]).permutation(np.flatnonzero(~mine))[:OTHERS]
    rows = np.sort(np.concatenate([np.flatnonzero(mine), others]))
    counts = inputs.read_counts(
        adata, rows, np.zeros(len(rows), dtype=int), layer=options.layer, min_cells=1, n_top_genes=None
    )
    pandas, anndata = require("pandas", "bio"), require("anndata", "bio")
    obs = pandas.DataFrame({name: values[counts.cells] for name, values in columns.items()})
    obs.index = obs.index.astype(str)
    sha = hashlib.sha256("\0".join(obs.astype(str).to_numpy().ravel()).encode())
    for array in (counts.matrix.data, counts.matrix.indices, counts.matrix.indptr):
        sha.update(np.ascontiguousarray(array).tobytes())
    return anndata.AnnData(counts.matrix, obs=obs.astype("category")), list(counts.warnings), sha.hexdigest()


def _write(cells: Any, folder: Path, sha: str) -> Path:
    """Store the cells where every worker finds them, whole or not at all."""
    path = folder / "parts" / f"cells-{sha[:8]}.h5ad"
    if path.exists():
        return path
    with isolated(0), replacing(path) as partial_file:
        cells.write_h5ad(partial_file)
    return path


# ------------------------------------------------------------------------------------------------------ splits
def _tasks(obs: Any, options: CalibrateOptions, sha: str, warnings: list[str]) -> list[Task]:
    """Every split of every group, the unchanged ones first."""
    settings = asdict(options) | {"groups": list(options.groups), "splits": None, "spikes": None}
    tasks: list[Task] = []
    for place, group in enumerate(options.groups):
        firsts = _sample_splits(obs, group, options, warnings)
        for stage, n in ((NULL, options.splits), (SPIKE, options.spikes)):
            n = min(n, len(firsts)) if firsts and stage == NULL else n
            tasks += [
                {
                    "stage": stage,
                    "seed": i,
                    "group": group,
                    "first": firsts[i % len(firsts)] if firsts else None,
                    "entropy": [options.seed, _SEEDS[stage], place, i],
                    "analysis_seed": options.seed + i,
                    "data": sha,
                    "settings": settings,
                }
                for i in range(n)
            ]
    return sorted(tasks, key=lambda task: task["stage"] != NULL)


def _sample_splits(obs: Any, group: str, options: CalibrateOptions, warnings: list[str]) -> list[list[str]]:
    """The halves of whole samples, where samples are split; fewer than asked for where there are no more."""
    if options.sample_key is None:
        return []
    mine = obs[obs["group"] == group]
    sizes = mine.groupby("sample", observed=True).size()
    known = mine[mine["sample"].isin(sizes.index[sizes >= FEWEST_CELLS])].astype(str)
    strata = known.groupby("sample")["balance"].agg(lambda values: "\0".join(sorted(set(values)))).to_dict()
    mixed = [sample for sample, values in strata.items() if "\0" in values]
    if mixed:
        raise SettingError(
            f"sample {mixed[0]!r} holds several values of {options.balance!r}; whole samples can be balanced only by "
            "what is the same in all cells of one: leave balance out."
        )
    check_samples(strata, group, FEWEST_SAMPLES)
    found = sample_splits(
        strata, max(options.splits, options.spikes), np.random.default_rng([options.seed, _SPLITTING])
    )
    if len(found) < options.splits:
        warnings.append(
            f"the {len(strata)} samples of {group} can be halved in {len(found)} ways only; each is compared once."
        )
    return found


def _result(run: Run, options: CalibrateOptions, warnings: list[str], sha: str) -> Calibration:
    rows, wholes, effects, bins = (
        [row for result in run.results for row in result[key]] for key in ("rows", "wholes", "effects", "bins")
    )
    null, spikes, intervals = null_summary(rows), spike_summary(rows), interval_summary(wholes, bins)
    replicates = "cells" if options.sample_key is None else "samples"
    results = {
        "experiment": "calibrate",
        "settings": asdict(options),
        "seed": options.seed,
        "seconds": run.seconds,
        "verdict": verdict(null, spikes, intervals, level=options.analysis["level"], replicates=replicates),
        "null": null,
        "spikes": spikes,
        "intervals": intervals,
        "fdr_mae": mae_summary(wholes),
        "effects": effect_summary(effects),
        "rows": rows,
        "warnings": warnings,
    }
    table = require("pandas", "bio").DataFrame(rows, columns=list(COLUMNS))
    return Calibration(table, results, sha)
