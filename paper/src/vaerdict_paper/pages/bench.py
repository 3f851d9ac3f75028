"""The report of the benchmarks: all comparisons by kind, then the tables of each benchmark with its machine."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from vaerdict.core import DataError
from vaerdict.report import document as forms
from vaerdict.report.document import Block, Document, Section
from vaerdict.report.tables import Column, Table
from vaerdict_paper.benchmarks.samplers import changes
from vaerdict_paper.pages import centre, comparisons, de_methods, novel_cells, novelty, prior

Row = dict[str, Any]

_TITLES = {
    "psis": "Pareto smoothing and k-hat of many observations",
    "ppca": "Training the pPCA grid",
    "samplers": "Gradients and seconds per observation for a standard error of log p(x) of 0.05 nat",
    "escalation": "Proposals, from the encoder to sequential Monte Carlo, about 1,000 draws per observation",
    "verdicts": "How often a verdict is true: questions with known answers, 1,000 draws per stage",
    "counts": "Training a count model, batches of 128, 128 hidden units, 10 latents",
    "de": "Differential expression under one fitted scvi-tools model: the model stage and the modes of scvi-tools",
    "de-scale": "`vaerdict de` and other methods, from a file to the table of genes",
    "de-methods": "Methods of differential expression on the same cells: nothing changed, and changes planted",
    "centre": "Fold changes relative to genes that changed: how often they are, and whether the verdict says so",
    "prior": "The learned prior of differential expression: real cells, simulations, and cells that do not differ",
    "clustered": "Clusters as groups: genes called, with and without splitting the counts first",
    "novelty": "Hidden classes of tables: rows of a class that no label names, ranked and called novel",
    "novel-cells": "Novel cells of a query: types hidden from the reference, and shifts that must be refused",
    "scaling": "Cost as a function of size",
    "gpu": "The paper's grids as stacks on one device",
    "million": "Training and the model stage of differential expression on many simulated cells",
    "against": "This version and an earlier one in turn, the fastest run of each",
}
_PAGES = {
    "de-methods": de_methods,
    "centre": centre,
    "prior": prior,
    "novelty": novelty,
    "novel-cells": novel_cells,
}
"""The benchmarks whose tables have a module of their own."""

_ON_GPU = ("psis", "samplers", "gpu", "million")
"""The benchmarks that use a GPU if there is one."""

_NOTES = {
    "verdicts": "Answered: verdict OK. Wrong: of these, more than four stated errors from the truth. Beyond: of these, "
    "further from the truth than the tolerance. RMS z: root mean square of the error of answers in stated errors; the "
    "error of the truth is included. Every target has six observations and four questions: a mean, a second moment or "
    "product, a probability of about 0.3 and one of about 0.01. Targets are of kinds that the inference was developed "
    "on, drawn with a seed that was not used in building it. The group compared has three observations; NUTS, with its "
    "defaults and with steps adapted to an acceptance rate of 0.99, counts as OK with R-hat below 1.01, a bulk ESS "
    "above 400 and no divergence, nested sampling always unless it did not end within 5 minutes. Evaluations are of "
    "the model or its gradient, per question; those of NUTS and nested sampling serve all four questions.",
    "samplers": "Costs are scaled to 0.05 nat by the spread of "
    "repeated estimates (SE before scaling); where it is above 0.3 the cost is extrapolated from a few chains that "
    "dominate, and usually too low. The training of the encoder is not counted.",
    "escalation": "Evaluations are of the model or its gradient. Effective draws: the ESS, per 1,000 evaluations or "
    "per second of all observations together.",
    "de": "CPU seconds of one thread for everything after training. Fold changes: draws from which a gene's "
    "probability is computed. Latents drawn: per group. Fold changes between two random cells and between group means "
    "are scored by the changes of proportions, centred ones by those of expression. k-hat and ESS are of the encoder "
    "of scvi-tools, or our refinement of it. `vaerdict de` is the whole of its default path, without a model.",
    "de-scale": "CPU seconds of one thread from the file to the table, medians of three runs unless they are long. "
    "Half of the cells are compared. Reading is part of the seconds; ours reads in blocks while it computes. Training, "
    "of scvi-tools, is not part of them: seconds of an epoch times its default number of epochs.",
    "clustered": "Cells are clustered by k-means on principal components of the counts (4 clusters of one kind, the "
    "two largest of which are compared, and 2 of two kinds), or of one part of the counts where they are split. "
    "Permuted: each gene on its own, between cells of similar library size; every call is false, as in "
    "simulated cells of one kind. Cells of one type as they are may differ in truth, so that calls need not be false. "
    "Correlation: of the two parts of a gene's counts within a kind, of the changed genes where kinds differ. Found "
    "and other calls: against the simulated changes; of real types against the calls between these types with all "
    "counts, so that other calls need not be false. Wilcoxon: scanpy, adjusted p below 5 % and |LFC| at least 0.5.",
    "scaling": "CPU seconds of one thread, medians; exponents are least squares of log seconds on log size over sizes "
    "a factor of two apart, with their standard error.",
}
_CHANGES = (
    Column("case", "model"),
    Column("change", "what is changed"),
    Column("before", "from"),
    Column("after", "to"),
    Column("gradients_ratio", "fewer gradients", 1),
    Column("seconds_ratio", "faster", 1),
)
_COLUMNS: dict[str, Sequence[Column]] = {
    "de": (
        Column("method", "method"),
        Column("between", "compares"),
        Column("latents", "latents"),
        Column("lfc_draws", "fold changes"),
        Column("n_latents", "latents drawn"),
        Column("cpu_s", "CPU s", 2),
        Column("fdr_mae", "FDR MAE, x100", 2),
        Column("fdp", "FDP at 5 %", 3),
        Column("tpr", "TPR", 3),
        Column("auprc", "average precision", 3),
        Column("khat", "k-hat, median"),
        Column("ess_share", "ESS, % of draws", 1, 100),
    ),
    "de-scale": (
        Column("cells", "cells in the file"),
        Column("method", "method"),
        Column("question", "question"),
        Column("cpu_s", "CPU s", 2),
        Column("reading_s", "of which reading, s", 2),
        Column("training_s", "training, s", 0),
        Column("peak_gb", "peak memory, GiB", 1),
        Column("n_called", "genes called", 0),
        Column("stopped", "no answer"),
    ),
    "samplers": (
        Column("case", "model"),
        Column("method", "method"),
        Column("schedule", "schedule"),
        Column("start", "start"),
        Column("gradients", "gradients", 0),
        Column("seconds", "seconds", 4),
        Column("se_empirical", "SE before scaling", 3),
        Column("bias", "bias, nat", 3, signed=True),
        Column("bias_se", "its se", 3),
    ),
    "escalation": (
        Column("model", "model"),
        Column("stage", "stage"),
        Column("share_ok", "k-hat below threshold, %", 0, 100),
        Column("khat", "k-hat, median"),
        Column("ess_share", "ESS, % of draws", 0, 100),
        Column("log_evidence", "log p(x)", 2),
        Column("evaluations", "evaluations", 0),
        Column("per_evaluation", "effective draws per 1,000 evaluations", 0),
        Column("seconds", "seconds", 2),
        Column("per_second", "effective draws per second", 0),
    ),
    "verdicts": (
        Column("method", "method"),
        Column("group", "group"),
        Column("target", "posterior"),
        Column("questions", "questions"),
        Column("answered", "answered"),
        Column("wrong", "wrong"),
        Column("beyond", "beyond"),
        Column("caution", "caution"),
        Column("refused", "refused"),
        Column("evaluations", "evaluations", 0),
        Column("rms_z", "RMS z"),
    ),
    "clustered": (
        Column("data", "cells"),
        Column("differs", "what differs"),
        Column("method", "groups and counts tested"),
        Column("any", "runs with a call, %", 0, 100),
        Column("calls", "calls per run", 1),
        Column("calls_se", "its se", 1),
        Column("correlation", "correlation of parts", 3, signed=True),
        Column("purity", "cells of one kind, %", 0, 100),
        Column("tpr", "changes found, %", 0, 100),
        Column("fdp", "other calls, %", 0, 100),
        Column("seeds", "runs"),
    ),
    "scaling": (
        Column("case", "task"),
        Column("over", "grows"),
        Column("low", "from"),
        Column("high", "to"),
        Column("seconds_low", "s", 4),
        Column("seconds_high", "to s", 4),
        Column("exponent", "exponent"),
        Column("exponent_se", "its se"),
    ),
    "against": (
        Column("case", "case"),
        Column("before_s", "before, s", 4),
        Column("now_s", "now, s", 4),
        Column("ratio", "before / now"),
    ),
    "million": (
        Column("cells", "cells"),
        Column("genes", "genes"),
        Column("device", "device"),
        Column("epochs", "epochs"),
        Column("seconds_per_epoch", "s per epoch", 1),
        Column("seconds_training", "training, s", 1),
        Column("seconds_de", "differential expression, s", 1),
        Column("seconds_counts", "pass over counts, s", 1),
        Column("peak_host_gb", "peak memory, GiB", 1),
        Column("peak_device_gb", "of the device, GiB", 1),
        Column("share_ok", "reliable cells, %", 0, 100),
        Column("fdp", "FDP at 5 %", 3),
        Column("tpr", "TPR", 3),
    ),
}


def document(results: Sequence[Row], part: str | None = None) -> Document:
    """The report of benchmark results, in the order of `_TITLES`.

    `part` is the name of one benchmark, or "ratios" for the tables of all comparisons alone.
    """
    order = list(_TITLES)
    results = sorted((r for r in results if r.get("benchmark") in order), key=lambda r: order.index(r["benchmark"]))
    ratios = Section("All comparisons", _overview(results))
    if part == "ratios":
        return Document("Benchmarks", [], [ratios])
    if part:
        results = [r for r in results if r["benchmark"] == part]
        if not results:
            raise DataError(f"no result file is of the benchmark {part!r}.")
    sections = [*([] if part else [ratios]), *(_section(r) for r in results)]
    cut = [r["benchmark"] for r in results if not r.get("complete", True)]
    sentences = [f"Interrupted, with the rows measured until then: {', '.join(cut)}."] if cut else []
    told = [r for r in results if r["benchmark"] in _SENTENCES]
    sentences += [sentence for r in told for sentence in _SENTENCES[r["benchmark"]](r)]
    timed = [] if part else ["Both sides of a comparison were timed in the same run."]
    return Document("Benchmarks", [*timed, *sentences], sections)


def text(result: Row) -> str:
    """The tables of one benchmark, for a terminal."""
    return forms.text(Document(result["benchmark"], [], [_section(result)]))


def _section(result: Row) -> Section:
    name = result["benchmark"]
    if name in _PAGES:
        return Section(_TITLES[name], _PAGES[name].tables(result, _about(result)))
    if name == "gpu":
        return Section(_TITLES[name], gpu_tables(result))
    if name in comparisons.COMPARISONS:
        return Section(_TITLES[name], comparisons.tables(result["rows"], name, f" {_TITLES[name]} ({_about(result)})."))
    more = [_changed(result)] if name == "samplers" else []
    return Section(_TITLES[name], [_table(result), *more])


def _table(result: Row) -> Table:
    name = result["benchmark"]
    title = f"{_TITLES[name]}, {result['of']} since {result['before']}" if name == "against" else _TITLES[name]
    rows = [_with_worth(row) if name == "escalation" else dict(row) for row in result["rows"]]
    return Table(name, f"{title} ({_about(result)}).", _COLUMNS[name], rows, note=_NOTES.get(name, ""))


def _with_worth(row: Row) -> Row:
    """The row of a stage with the effective draws that an evaluation and a second give."""
    draws = row["ess_share"] * row.get("draws", 1000)
    worth = {"per_evaluation": 1000 * draws / row["evaluations"]}
    return {**row, **worth, "per_second": draws * row["observations"] / row["seconds"]}


def _changed(result: Row) -> Table:
    caption = f"The same costs, one change at a time ({_about(result)})."
    note = (
        "Between samplers the slower side is the annealing that needs the fewest gradients from the same start. "
        "Gradients do not depend on the sizes of batches, seconds do. The spread that costs are scaled by comes from "
        "few repetitions, so that ratios are known to about a third."
    )
    return Table("samplers-changes", caption, _CHANGES, list(changes(result["rows"])), note=note)


def _about(result: Row) -> str:
    """What produced a result: the machine, torch, and where they are known the commit and the date.

    Of an older result only the commit that it was ``stored`` with is known, or the version of the library.
    """
    commit, measured = result.get("commit"), result.get("measured")
    known = [f"torch {result['versions']['torch']}"]
    known += [f"commit {commit['sha'][:7]}{' with changes' if commit.get('dirty') else ''}"] if commit else []
    known += [f"stored with {result['stored']}"] if result.get("stored") else []
    known += [] if commit or result.get("stored") else [f"vaerdict {result['versions'].get('vaerdict', 'unknown')}"]
    known += [measured] if measured else []
    return ", ".join([_machine(result), *known])


def _machine(result: Row) -> str:
    hardware = result["hardware"]
    gpu = f" and {hardware['accelerator']}" if hardware.get("accelerator") and result["benchmark"] in _ON_GPU else ""
    threads = f"{hardware['threads']} thread{'' if hardware['threads'] == 1 else 's'}"
    return f"{threads} of {hardware['cores']} CPU cores{gpu}"


# ------------------------------------------------------------------------------------------------------- sentences
_SLOWER = 1.1  # equal runs on a shared machine differ by this factor


def _of_million(result: Row) -> Iterator[str]:
    for row in result["rows"]:
        on_gpu = row["peak_device_gb"] is not None
        memory = f"{row['peak_device_gb']:.1f} GiB of the GPU" if on_gpu else f"{row['peak_host_gb']:.1f} GiB"
        device = result["hardware"]["accelerator"] if on_gpu else f"{result['hardware']['threads']} CPU threads"
        yield (
            f"{row['cells']:,} cells of {row['genes']:,} genes on {device}: {row['seconds_per_epoch']:.1f} s per epoch "
            f"of training, {row['seconds_de']:.0f} s for the model stage of differential expression, at most {memory}."
        )


def _of_against(result: Row) -> Iterator[str]:
    rows = result["rows"]
    slow = [f"{row['case']} ({row['ratio']:.2f})" for row in rows if row["now_s"] > _SLOWER * row["before_s"]]
    share = f"{len(slow)} of {len(rows)} timings of {result['of']} are slower by more than {_SLOWER - 1:.0%}"
    yield f"Since {result['before']} {share}{': ' if slow else ''}{'; '.join(slow)}."


def _of_clustered(result: Row) -> Iterator[str]:
    """Runs with a false call where nothing differs, in which every call is false."""
    rows = [row for row in result["rows"] if row["differs"] == "nothing"]
    n = sum(row["seeds"] for row in rows if row["method"] == rows[0]["method"]) if rows else 0
    for method in dict.fromkeys(row["method"] for row in rows):
        own = [row for row in rows if row["method"] == method]
        wrong = round(sum(row["any"] * row["seeds"] for row in own))
        calls = sum(row["calls"] * row["seeds"] for row in own) / n
        yield (
            f"Clusters of cells that do not differ, {method}: a gene is called in {wrong} of {n} runs, {calls:.2f} per "
            "run."
        )


def _of_verdicts(result: Row) -> Iterator[str]:
    for row in result["rows"]:
        if row["target"] == "all":
            yield (
                f"{row['method']}, {row['group']} posteriors: {row['answered']} of {row['questions']} questions are "
                f"answered, {row['wrong']} of the answers are wrong and {row['beyond']} beyond the tolerance."
            )


def _of_scale(result: Row) -> Iterator[str]:
    """The largest file: our cost, and what the others did with it."""
    largest = max(row["cells"] for row in result["rows"])
    for row in result["rows"]:
        if row["cells"] == largest:
            answered = f"{row['cpu_s']:.0f} CPU s, at most {row['peak_gb']:.1f} GiB" if not row["stopped"] else None
            yield f"{largest:,} cells of {row['genes']:,} genes, {row['method']}: {answered or row['stopped']}."


_SENTENCES: dict[str, Callable[[Row], Iterator[str]]] = {
    "verdicts": _of_verdicts,
    "de-methods": de_methods.sentences,
    "centre": centre.sentences,
    "prior": prior.sentences,
    "clustered": _of_clustered,
    "novelty": novelty.sentences,
    "novel-cells": novel_cells.sentences,
    "million": _of_million,
    "de-scale": _of_scale,
    "against": _of_against,
}


# ------------------------------------------------------------------------------------------------ all comparisons
def _overview(results: Sequence[Row]) -> list[Block]:
    rows = []
    for result in results:
        versions = ", ".join(f"{name} {result['versions'][name]}" for name in _shown(result))
        about = {"benchmark": result["benchmark"], "machine": _machine(result), "versions": versions}
        rows += [{**about, **row} for row in comparisons.comparisons(result)]
    about = (Column("benchmark", "benchmark"), Column("machine", "machine"), Column("versions", "versions"))
    return list(comparisons.tables(rows, "ratios", about=about))


def _shown(result: Row) -> list[str]:
    """The packages whose versions are shown: torch and the peers."""
    return [name for name in result["versions"] if name not in ("python", "vaerdict", "numpy", "scipy", "anndata")]


# ------------------------------------------------------------------------------------------------------ on a GPU
_CEILINGS = (
    Column("device", "device"),
    Column("flops_tf32", "TF32, TFLOP/s", 1, 1e-12),
    Column("flops_fp32", "float32, TFLOP/s", 1, 1e-12),
    Column("bytes", "copy, GB/s", 0, 1e-9),
    Column("launches", "launches, thousand/s", 0, 1e-3),
    Column("launches_recorded", "in a CUDA graph, thousand/s", 0, 1e-3),
)
_STACKS = (
    Column("grid", "grid"),
    Column("case", "stack"),
    Column("members", "members"),
    Column("step_s", "step, ms", 2, 1e3),
    Column("eager_s", "launched one by one, ms", 2, 1e3),
    Column("epoch_s", "epoch, s", 3),
    Column("flops", "TFLOP/s", 1, 1e-12),
    Column("compute_share", "of ceiling, %", 0, 100),
    Column("bytes_per_s", "GB/s", 0, 1e-9),
    Column("memory_share", "of ceiling, %", 0, 100),
    Column("kernels", "kernels"),
    Column("launches_share", "launching, %", 0, 100),
    Column("busy", "kernel time, % of step", 0, 100),
    Column("bound", "bound by"),
)
_GRIDS = (
    Column("grid", "grid"),
    Column("what", "what"),
    Column("grid_s", "extrapolated, s", 1),
    Column("measured_s", "measured, s", 1),
    Column("device", "measured on"),
)
_RULE = (
    "FLOPs are those of matrix products and convolutions, counted on an eager step. Bytes are the sizes of all tensors "
    "that operators read and write, each counted once, as if nothing were fused or cached; a step that works in the "
    "cache can exceed the bandwidth of a copy. Training replays its steps from a CUDA graph; the next column has the "
    "time if the host launches kernel by kernel. Launching: the number of kernels times the shortest launch time in a "
    "graph. A step whose kernels fill less than half of its time is bound by the host, any other by the ceiling that "
    "it comes nearest to."
)


def _bound(row: Row) -> Row:
    """The row with what bounds it; kernels were timed one by one, so their sum can exceed the time of a graph."""
    busy = row.get("busy")
    return row if busy is None else {**row, "busy": min(1.0, busy), "bound": "host" if busy < 0.5 else row["bound"]}


def gpu_tables(result: Row) -> list[Block]:
    """The ceilings of the device, every stack relative to them, and the extrapolated and measured time of each grid."""
    rows = result["rows"]
    ceilings = [row for row in rows if row["kind"] == "ceilings"]
    stacks = [_bound(row) for row in rows if row["kind"] == "stack"]
    return [
        Table("gpu-ceilings", f"Ceilings, measured in the same run ({_about(result)}).", _CEILINGS, ceilings),
        Table("gpu-stacks", "A training step of each kind of stack.", _STACKS, stacks, note=_RULE),
        Table(
            "gpu-grids",
            "Training time of each grid: steps times the seconds of a step, with all epochs of the preset.",
            _GRIDS,
            _grid_rows(stacks),
            note="MNIST: a workload for timing, networks as printed, which is no preset. Measured: the training of the "
            "stacks of all seeds, including held-out checks and the recording of graphs.",
        ),
    ]


def _grid_rows(stacks: Sequence[Row]) -> list[Row]:
    rows: dict[tuple[str, str], Row] = {}
    for stack in stacks:
        kind = "models" if stack["case"].startswith("models") else "proposals"
        row = rows.setdefault((stack["grid"], kind), {"grid": stack["grid"], "what": kind, "grid_s": 0.0})
        row["grid_s"] += stack["grid_s"]
        if stack.get("trained_s") is not None:
            row |= {"measured_s": row.get("measured_s", 0.0) + stack["trained_s"], "device": stack["device"]}
    return list(rows.values())
