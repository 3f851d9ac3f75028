"""Calibration of the false discovery rate on the user's own data: what users call."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from itertools import combinations
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import numpy as np

from vaerdict.core import Progress, SettingError, silent
from vaerdict.csv_files import write_table
from vaerdict.de import columns, data
from vaerdict.de.calibration import inputs, shown, summary
from vaerdict.de.calibration.halves import sample_splits
from vaerdict.de.calibration.inputs import SPLITTING, Cells
from vaerdict.de.calibration.page import from_run
from vaerdict.de.calibration.task import MIXED, NULL, SPIKE, UNDONE, split_work
from vaerdict.de.contrasts import FEWEST_CELLS, FEWEST_SAMPLES
from vaerdict.de.options import MIXED_SPLITS, UNDONE_SPLITS, CalibrateOptions, DEOptions
from vaerdict.de.rivals import check_rivals
from vaerdict.de.splitting import with_testing_layer
from vaerdict.engines import Engine
from vaerdict.io import manifest, write_json
from vaerdict.optional import require
from vaerdict.options import accepts
from vaerdict.report import write_page
from vaerdict.runs import RunFolder, prepare_save
from vaerdict.tasks import Task, TaskResults, run_tasks

if TYPE_CHECKING:
    import pandas
    from matplotlib.axes import Axes

_SEEDS = {NULL: 61, SPIKE: 62, MIXED: 64, UNDONE: 65}
_JOINED = {MIXED: " + ", UNDONE: " vs "}


@dataclass(frozen=True, eq=False, repr=False)
class Calibration:
    """The results of all splits.

    Attributes
    ----------
    table
        One row for each split, method and level, with the columns of calibrate.csv.
    results
        Everything that results.json holds, the summaries over splits and the verdict included.
    data_sha256
        A hash of the counts and labels that were used.
    """

    table: pandas.DataFrame
    results: dict[str, Any]
    data_sha256: str

    def __repr__(self) -> str:
        return shown.text(self.results)

    def _repr_html_(self) -> str:
        return shown.as_html(self.results)

    def plot(self, *, ax: Axes | None = None) -> Axes:
        """Achieved against target FDR of every method, with two standard errors; returns matplotlib axes."""
        return shown.plot(self.results, ax)

    @property
    def verdict(self) -> dict[str, Any]:
        """Whether the FDR is calibrated (``fdr``), and the messages that explain it."""
        return self.results["verdict"]

    def save(self, path: str | Path) -> Path:
        """Write calibrate.csv, results.json and manifest.json to a folder, each whole or not at all."""
        settings, seconds = self.results["settings"], self.results["seconds"]
        out = prepare_save(path, "calibrate", settings, self.data_sha256)
        write_table(out / "calibrate.csv", self.table)
        write_json(out / "manifest.json", manifest(settings, seconds, data_sha256=self.data_sha256))
        write_json(out / "results.json", self.results)
        return out

    def report(self, path: str | Path) -> Path:
        """Write everything to a folder with one self-contained page, and return the path of the page."""
        out = self.save(path)
        return write_page(from_run(out), out)


@accepts(CalibrateOptions, DEOptions)
def calibrate(
    adata: Any,
    groupby: str,
    groups: Sequence[str] | None = None,
    *,
    model: Any = None,
    device: str = "cpu",
    out: str | Path | None = None,
    force: bool = False,
    workers: int | None = 1,
    engine: Engine | None = None,
    progress: Progress = silent,
    **options: Any,
) -> Calibration:
    """Measure whether the FDR of `differential_expression` holds on these data.

    The cells of a group are split at random into halves, which are compared with the options of
    `differential_expression`. In `splits` of them nothing changed, so that every discovery is false. In `spikes` more
    splits, known changes are planted by thinning counts (`vaerdict.de.calibration.halves`), so that achieved FDR, power
    and coverage of the intervals are known. With two groups or more, `mixed` splits are of two groups pooled, and in
    `undone` comparisons of two groups the change of some genes is undone (`vaerdict.de.calibration.undoing`): both show
    whether a prior learned from other cells calls genes that did not change. With `sample_key` whole samples are
    split, at least two per half; where nothing changed, the comparison with cells as replicates is made as well.
    `rivals` are other tests (`vaerdict.de.rivals`) that are asked about the same cells and genes, each judged by the
    question that it answers.

    Parameters
    ----------
    adata
        AnnData of raw counts, in memory or backed, or the path of an .h5ad file.
    groupby
        Column of obs that holds the groups.
    groups
        The groups whose cells are split, each on its own, and of two or more also every pair of them; the largest
        group by default.
    model
        A fitted scvi-tools model, or the folder it was saved to, which every comparison uses.
    device
        Where a model is trained and used: ``"cpu"`` or ``"cuda"``.
    out
        A folder for the results. Finished splits are stored there too, and a run that was stopped goes on.
        A folder that holds another run or other files is refused.
    force
        Whether to replace the run that `out` holds, or to write beside the files there.
    workers
        Number of splits at a time.
    engine
        What runs the splits, any of `vaerdict.engines`; `workers` processes by default.
    progress
        Called with the work done, the total and its name.
    {options}

    Returns
    -------
    Calibration
        The table of all splits, their summaries and the verdict.

    Raises
    ------
    SettingError, DataError
        If an option, a name or the data cannot be used; the message says what to do.

    Examples
    --------
    Two splits of sixty cells are too few for a verdict; twenty splits and ten with planted changes are the default.

    >>> import anndata
    >>> adata = anndata.AnnData(np.random.default_rng(0).poisson(3.0, size=(60, 20)).astype(np.float32))
    >>> adata.obs["cell_type"] = "B"
    >>> calibration = calibrate(adata, "cell_type", ["B"], splits=2, spikes=0)
    >>> calibration.verdict["fdr"]
    'not resolved'
    """
    adata = data.open_data(adata) if isinstance(adata, (str, Path)) else adata
    names = {field.name for field in fields(CalibrateOptions)}
    how = CalibrateOptions(**{name: value for name, value in options.items() if name in names})
    analysis = DEOptions(groupby=groupby, **{name: value for name, value in options.items() if name not in names})
    _check(how, analysis)
    analysis.check_training(has_model=model is not None)
    analysis = with_testing_layer(adata, analysis)
    named = None if model is None else Path(model).name if isinstance(model, (str, Path)) else type(model).__name__
    run_folder = RunFolder.of(out, "calibrate", force=force)
    labels = inputs.labels(adata, how, analysis)
    chosen = inputs.groups_to_split(labels[groupby], groups, groupby)
    with TemporaryDirectory() as temporary:
        folder = run_folder.path or Path(temporary) / "run"
        saved = inputs.model_folder(model, folder / "inputs", Path(temporary))
        how = _with_pairs(how, analysis, chosen)
        cells = inputs.read_cells(adata, labels, chosen, analysis, saved)
        settings = {"groupby": groupby, "groups": list(chosen), **asdict(how) | {"rivals": list(how.rivals)}}
        settings |= {**_settings(analysis), "model": named}
        run_folder.claim({"settings": settings, "data": cells.sha256})
        path = inputs.keep_model(saved, folder / "inputs", Path(temporary))
        tasks = _tasks(cells, chosen, how, analysis, {"device": device, "model": path and str(path)})
        work = partial(split_work, str(cells.store(folder / "inputs").resolve()))
        run = run_tasks(work, tasks, folder, workers=workers, engine=engine, progress=progress)
    result = _result(run, settings, cells)
    if out is not None:
        result.save(out)
    return result


def _check(how: CalibrateOptions, analysis: DEOptions) -> None:
    if how.share != 0.5 and analysis.sample_key is not None:
        raise SettingError("whole samples are split into even halves; leave share or sample_key out.")
    check_rivals(how.rivals)
    if analysis.scale == "pair":
        raise SettingError(
            "scale='pair' is about two random cells, which differ even where nothing changed: there is no truth to "
            "calibrate against; choose centred or proportion."
        )


def _with_pairs(how: CalibrateOptions, analysis: DEOptions, groups: Sequence[str]) -> CalibrateOptions:
    """The options with the numbers of comparisons of two groups decided."""
    asked = {"mixed": how.mixed, "undone": how.undone}
    cells = analysis.sample_key is None and analysis.pair_by is None
    for name in (name for name, n in asked.items() if n):
        if len(groups) < 2:
            raise SettingError(f"{name}={asked[name]} is about pairs of groups; name two or more with groups.")
        if not cells:
            raise SettingError(f"{name}={asked[name]} splits cells; leave it out, or sample_key and pair_by.")
    centred = analysis.scale == "centred"
    if how.undone and not centred:
        raise SettingError(
            f"undone={how.undone} with scale={analysis.scale!r}: changes are undone relative to the genes that do not "
            "change; choose centred, or leave undone out."
        )
    learns = len(groups) > 1 and cells and analysis.prior != "none"
    mixed, undone = (n * learns for n in (MIXED_SPLITS, UNDONE_SPLITS * centred))
    return replace(
        how,
        mixed=mixed if how.mixed is None else how.mixed,
        undone=undone if how.undone is None else how.undone,
    )


def _settings(analysis: DEOptions) -> dict[str, Any]:
    """The options of every comparison, as JSON has them."""
    options = {name: value for name, value in asdict(analysis).items() if name not in ("groupby", "pairs")}
    return {name: list(value) if isinstance(value, tuple) else value for name, value in options.items()}


# ------------------------------------------------------------------------------------------------------ splits
def _tasks(
    cells: Cells, groups: Sequence[str], how: CalibrateOptions, analysis: DEOptions, shared: dict[str, Any]
) -> list[Task]:
    """Every split of every group and the comparisons of pairs of groups, by kind."""
    options = {name: value for name, value in _settings(analysis).items() if name != "seed"}
    shared = {"data": cells.sha256, "groupby": analysis.groupby, "options": options, **shared}
    shared |= {"balance": how.balance, "share": how.share, "model_layer": cells.model_layer}
    shared["rivals"] = list(dict.fromkeys(how.rivals))
    firsts = {group: _sample_splits(cells, group, how, analysis) for group in groups}

    def task(stage: str, place: int, i: int, *names: str) -> Task:
        ways = firsts[names[0]]
        return {
            "stage": stage,
            "seed": i,
            "group": _JOINED.get(stage, "").join(names),
            "groups": list(names),
            "first": ways[i % len(ways)] if ways else None,
            "entropy": [analysis.seed, _SEEDS[stage], place, i],
            "analysis_seed": analysis.seed + i,
            **shared,
        }

    def of_groups(stage: str, n: int) -> list[Task]:
        numbers = {group: min(n, len(firsts[group])) if firsts[group] and stage == NULL else n for group in groups}
        return [task(stage, place, i, group) for place, group in enumerate(groups) for i in range(numbers[group])]

    def of_pairs(stage: str, n: int | None) -> list[Task]:
        pairs = list(combinations(groups, 2))
        return [task(stage, i % len(pairs), i, *pairs[i % len(pairs)]) for i in range(n or 0)]

    null, spikes = of_groups(NULL, how.splits), of_groups(SPIKE, how.spikes)
    return [*null, *of_pairs(MIXED, how.mixed), *spikes, *of_pairs(UNDONE, how.undone)]


def _sample_splits(cells: Cells, group: str, how: CalibrateOptions, analysis: DEOptions) -> list[list[str]]:
    """The halves of whole samples, where samples are split; fewer than asked for where there are no more."""
    if analysis.sample_key is None:
        return []
    members = data.column(cells.adata, analysis.groupby, role="groupby") == group
    owners = data.column(cells.adata, analysis.sample_key, role="sample_key")[members]
    names, sizes = np.unique([owner for owner in owners if owner is not None], return_counts=True)
    balance = np.full(len(owners), "all")
    if how.balance is not None:
        balance = data.column(cells.adata, how.balance, role="balance")[members].astype(str)
    values = {str(name): np.unique(balance[owners == name]) for name in names[sizes >= FEWEST_CELLS]}
    mixed = [sample for sample, parts in values.items() if len(parts) > 1]
    if mixed:
        raise SettingError(
            f"sample {mixed[0]!r} holds several values of {how.balance!r}; whole samples can be balanced only by "
            "what is the same in all cells of one: leave balance out."
        )
    if len(values) < 2 * FEWEST_SAMPLES:
        raise SettingError(
            f"group {group!r} has {len(values)} samples of enough cells; halves of whole samples need at least "
            f"{2 * FEWEST_SAMPLES}: leave sample_key out, or choose a groupby whose groups hold more samples."
        )
    strata = {sample: str(parts[0]) for sample, parts in values.items()}
    splits = sample_splits(strata, max(how.splits, how.spikes), np.random.default_rng([analysis.seed, SPLITTING]))
    if len(splits) < how.splits:
        cells.warnings.append(
            f"the {len(strata)} samples of {group} can be halved in {len(splits)} ways only; each is compared once."
        )
    return splits


def _result(run: TaskResults, settings: dict[str, Any], cells: Cells) -> Calibration:
    rows, overall, parts = (
        [row for result in run.results for row in result[key]] for key in ("rows", "overall", "strata")
    )
    null, mixed = (summary.null_summary(rows, kind) for kind in (NULL, MIXED))
    spikes, undone = summary.spike_summary(rows), summary.undone_summary(rows)
    strata = summary.strata_summary(parts)
    asked = {name: settings[name] for name in ("level", "delta", "shrinkage")}
    asked["replicates"] = "cells" if settings["sample_key"] is None else "samples"
    results = {
        "experiment": "calibrate",
        "settings": settings,
        "seed": settings["seed"],
        "seconds": run.seconds,
        "verdict": summary.verdict(null, spikes, strata, mixed=mixed, undone=undone, **asked),
        "null": null,
        "mixed": mixed,
        "spikes": spikes,
        "undone": undone,
        "intervals": summary.interval_summary(strata),
        "fdr_mae": summary.mae_summary(overall),
        "strata": strata,
        "rows": rows,
        "warnings": cells.warnings,
    }
    table = require("pandas", "bio").DataFrame(rows, columns=columns.names(columns.CALIBRATE))
    return Calibration(table, results, cells.sha256)
