"""The command line: parsing and printing only."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from vaerdict import __version__, core, diagnostics
from vaerdict import cli_calibrate as checking
from vaerdict import cli_de as words
from vaerdict.diagnostics import Verdict
from vaerdict.engines import Engine, Ray

app = typer.Typer(
    help="Decisions you can trust from variational autoencoders.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)
screen, messages = Console(), Console(stderr=True)

Out = Annotated[Path, typer.Option(help="Folder for the results.", file_okay=False)]
Seed = Annotated[int, typer.Option(min=0, help="Seed of everything random; the same seed gives the same answer.")]
Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON instead of tables.")]
Device = Annotated[str, typer.Option(help="Where to compute: auto, cpu or cuda.")]


def _version(wanted: bool) -> None:
    if wanted:
        screen.print(f"vaerdict {__version__}")
        raise typer.Exit


@app.callback()
def _main(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Decisions you can trust from variational autoencoders."""


@app.command(epilog="Example:  vaerdict demo --out demo && open demo/report.html")
def demo(
    which: Annotated[
        str, typer.Option(help="genes (differential expression), or ppca (decisions with an exact posterior).")
    ] = "genes",
    out: Out = Path("vaerdict-demo"),
    seed: Seed = 0,
    device: Device = "auto",
    as_json: Json = False,
) -> None:
    """Run the whole procedure on built-in data and put the truth beside the answer, in under a minute."""
    from vaerdict.report import render, text

    if which not in ("genes", "ppca"):
        raise core.SettingError(f"demo {which!r}; choose genes or ppca.")
    with progress_bar() as progress:
        results = (_demo_genes if which == "genes" else _demo_ppca)(out, seed, _device(device), progress)
    page = render(out)
    _print_json(results) if as_json else _print_text(text(out, 2 if which == "genes" else None), page)


def _demo_genes(out: Path, seed: int, device: str, progress: core.Progress) -> dict[str, Any]:
    from vaerdict.experiments import demo_genes

    found = demo_genes.run(seed=seed, device=device, progress=progress)
    found.save(out)
    return found.results


def _demo_ppca(out: Path, seed: int, device: str, progress: core.Progress) -> dict[str, Any]:
    from vaerdict.experiments import demo
    from vaerdict.experiments.runner import manifest, write_json

    results = demo.run(seed=seed, device=device, progress=progress)
    write_json(out / "results.json", results)
    write_json(out / "manifest.json", manifest(results["settings"], {}))
    return results


@app.command(epilog="Example:  vaerdict reproduce ppca --preset quick --out runs/ppca")
def reproduce(
    name: Annotated[str, typer.Argument(help="bivariate, ppca, mnist, genes, audit or all.")],
    preset: Annotated[
        str, typer.Option(help="quick (minutes) or paper (everything); mnist also has best, genes also has rivals.")
    ] = "quick",
    seeds: Annotated[int | None, typer.Option(min=1, help="How many seeds, if not the preset's.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on where a run into --out was stopped.")] = False,
    audit: Annotated[bool, typer.Option("--audit", help="With ppca: also show what the released code did.")] = False,
    workers: Annotated[int | None, typer.Option(min=1, help="Processes; one a core by default.")] = None,
    device: Device = "auto",
    engine: words.EngineName = "local",
    address: words.Address = None,
    out: Annotated[Path | None, typer.Option(help="Folder for the results; runs/NAME by default.")] = None,
    as_json: Json = False,
) -> None:
    """Reproduce the paper's experiments, beside the published numbers and the statistical floors."""
    from vaerdict.experiments.reproduce import EXPERIMENTS, reproduce
    from vaerdict.report import render, text

    names = list(EXPERIMENTS) if name == "all" else [name, *(["audit"] if audit and name != "audit" else [])]
    for each in names:
        folder = Path("runs") / each if out is None else out if len(names) == 1 else out / each
        with progress_bar() as progress:
            results = reproduce(
                each,
                preset,
                folder,
                seeds=seeds,
                resume=resume,
                workers=workers,
                device="auto" if device == "auto" else _device(device),
                engine=_engine(engine, address, workers, _device(device)),
                progress=progress,
            )
        page = render(folder)
        _print_json(results) if as_json else _print_text(text(folder), page)


@app.command(epilog=words.EPILOG, context_settings={"allow_extra_args": True})
def de(
    more: typer.Context,
    data: words.Data,
    groupby: words.GroupBy,
    groups: words.Groups = None,
    one_vs_rest: words.OneVsRest = False,
    within: words.Within = None,
    sample_key: words.SampleKey = None,
    batch_key: words.BatchKey = None,
    layer: words.Layer = None,
    delta: words.Delta = 0.5,
    fdr: words.Fdr = 0.05,
    scale: words.Scale = "centred",
    genes: words.Genes = 2000,
    keep_genes: words.KeepGenes = None,
    gene_symbols: words.GeneSymbols = None,
    borrow: words.Borrow = False,
    objectives: words.Objectives = None,
    refits: words.Refits = None,
    model: words.ModelDir = None,
    quick: words.Quick = False,
    engine: words.EngineName = "local",
    address: words.Address = None,
    workers: words.Workers = None,
    out: Out = Path("vaerdict-de"),
    seed: Seed = 0,
    device: Device = "auto",
    as_json: Json = False,
) -> None:
    """Find the genes that differ between groups of cells, with calibrated false discovery rates and a verdict.

    Memory is bounded however many cells there are: of a file the non-zero counts of the genes compared are kept up to
    128 MB and read again beyond; dense are 10,000 cells while models train, then 256 for each worker.
    """
    from vaerdict.report import render

    with progress_bar() as progress:
        result = words.compare_file(
            data,
            model,
            progress,
            groupby=groupby,
            pairs=words.pairs_of([*(groups or []), *more.args], one_vs_rest),
            within=within,
            sample_key=sample_key,
            batch_key=batch_key,
            layer=layer,
            delta=delta,
            level=fdr,
            scale=scale,
            n_top_genes=genes,
            keep_genes=words.names_of(keep_genes),
            gene_symbols=gene_symbols,
            borrow=borrow,
            objectives=objectives.split(",") if objectives else None,
            refits=refits,
            quick=quick,
            seed=seed,
            device=_device(device),
            engine=_engine(engine, address, workers, _device(device)) or words.threads(workers),
            out=out,
        )
    page = render(out)
    _print_json(result.results) if as_json else _print_text(words.summary(result), page)


@app.command(epilog=checking.EPILOG, context_settings={"allow_extra_args": True})
def calibrate(
    more: typer.Context,
    data: words.Data,
    groupby: words.GroupBy,
    groups: checking.Groups = None,
    within: words.Within = None,
    sample_key: checking.SampleKey = None,
    balance: checking.Balance = None,
    splits: checking.Splits = 20,
    spikes: checking.Spikes = 10,
    share: checking.Share = 0.5,
    batch_key: words.BatchKey = None,
    layer: words.Layer = None,
    delta: words.Delta = 0.5,
    fdr: words.Fdr = 0.05,
    scale: words.Scale = "centred",
    genes: words.Genes = 2000,
    objectives: words.Objectives = None,
    refits: words.Refits = None,
    quick: words.Quick = False,
    resume: checking.Resume = False,
    workers: checking.Workers = 1,
    engine: words.EngineName = "local",
    address: words.Address = None,
    out: Out = Path("vaerdict-calibrate"),
    seed: Seed = 0,
    device: Device = "auto",
    as_json: Json = False,
) -> None:
    """Find out on your own data whether the FDR of `vaerdict de` means what it says."""
    from vaerdict.de.calibration import calibrate
    from vaerdict.report import render, text

    place = _device(device)
    with progress_bar() as progress:
        found = calibrate(
            data,
            groupby,
            [*(groups or []), *more.args],
            splits=splits,
            spikes=spikes,
            share=share,
            within=within,
            sample_key=sample_key,
            balance=balance,
            batch_key=batch_key,
            layer=layer,
            delta=delta,
            level=fdr,
            scale=scale,
            n_top_genes=genes or None,
            objectives=objectives.split(",") if objectives else None,
            refits=refits,
            quick=quick,
            seed=seed,
            device=place,
            out=out,
            resume=resume,
            workers=workers,
            engine=_engine(engine, address, workers, place),
            progress=progress,
        )
    page = render(out)
    _print_json(found.results) if as_json else _print_text(text(out), page)


@app.command(epilog="Example:  vaerdict diagnose log_weights.npy --json")
def diagnose(
    weights: Annotated[
        Path, typer.Argument(help="A .npy array of log-weights: draws x observations, or the draws of one.")
    ],
    as_json: Json = False,
) -> None:
    """Say whether log-weights from anywhere can be trusted: k-hat, effective sample size and verdict of each column."""
    log_w = _read_weights(weights)
    khat, ess = diagnostics.khat(log_w), diagnostics.ess(log_w)
    verdict = diagnostics.verdict(khat, ess, log_w.shape[0])
    rows = [
        {"observation": i, "khat": "inf" if k == float("inf") else k, "ess": e, "verdict": Verdict(v).name.lower()}
        for i, (k, e, v) in enumerate(zip(khat.tolist(), ess.tolist(), verdict.tolist(), strict=True))
    ]
    n, threshold = log_w.shape[0], diagnostics.khat_threshold(log_w.shape[0])
    if as_json:
        return _print_json({"draws": n, "khat_threshold": threshold, "rows": rows})
    _rows(f"{n} draws; k-hat must stay below {threshold:.2f}", rows[:50])
    if len(rows) > 50:
        screen.print(f"... and {len(rows) - 50} more observations (--json lists all)")
    counts = {v.name.lower(): int((verdict == v).sum()) for v in Verdict}
    screen.print(f"{', '.join(f'{name} {count}' for name, count in counts.items())} of {len(rows)} observations")


@app.command(epilog="Example:  vaerdict report runs/ppca")
def report(
    run_dir: Annotated[Path, typer.Argument(help="A run directory, or with --readme the folder of all results.")],
    readme: Annotated[
        Path | None, typer.Option(help="Rewrite the result tables of this README instead.", dir_okay=False)
    ] = None,
) -> None:
    """Rebuild tables, figures and page from the result files; trains nothing."""
    from vaerdict.report import render, update_readme

    if readme is not None:
        update_readme(readme, run_dir)
        return screen.print(f"Tables of {readme} rebuilt from {run_dir}", markup=False)
    screen.print(f"Page: {render(run_dir)}", markup=False)


@app.command(
    epilog="Example:  vaerdict bench psis;  with another checkout:  vaerdict bench ladder --against ../other/src"
)
def bench(
    name: Annotated[
        str, typer.Argument(help="psis, ppca, samplers, ladder, counts, de, borrow, scaling, gpu, million or all.")
    ],
    quick: Annotated[bool, typer.Option("--quick", help="Smaller sizes, for a first look.")] = False,
    source: Annotated[
        Path | None, typer.Option("--against", help="src of another checkout: time its version beside this one.")
    ] = None,
    repeats: Annotated[int, typer.Option(help="How often each version runs, with --against.")] = 3,
    out: Out = Path("runs/bench"),
    as_json: Json = False,
) -> None:
    """Measure speed as a ratio against a peer, both timed in this run, and how costs grow."""
    from vaerdict.benchmarks import BENCHMARKS, against, run, unfit
    from vaerdict.experiments.runner import write_json
    from vaerdict.report import render, text
    from vaerdict.report.bench import text as tables

    def show(result: dict[str, Any], name: str) -> None:
        write_json(out / f"{name}.json", result)
        _print_json(result) if as_json else screen.print(tables(result), markup=False, highlight=False, soft_wrap=True)

    every = name == "all"
    if source is not None:
        for each in against.known(source) if every else [name]:
            with progress_bar() as progress:
                result = against.run(each, source, repeats=repeats, quick=quick, progress=progress)
            show(result, f"against-{each}")
        return
    for each in BENCHMARKS if every else [name]:
        reason = unfit(each) if every else None
        if reason is not None:
            messages.print(f"{each} is left out: it {reason}.", markup=False)
            continue
        with progress_bar() as progress:
            result = run(each, quick=quick, progress=progress, keep=partial(write_json, out / f"{each}.json"))
        show(result, each)
    if every and not as_json:
        _print_text(text(out, most=1), render(out))


def _read_weights(path: Path) -> torch.Tensor:
    if not path.is_file():
        raise core.DataError(f"{path} does not exist or is no file.")
    try:
        array = np.load(path, allow_pickle=False)
    except (ValueError, OSError, EOFError) as error:
        raise core.DataError(f"{path} is no whole .npy array of numbers; save log-weights with numpy.save.") from error
    if not isinstance(array, np.ndarray) or array.dtype.kind not in "fiu":
        raise core.DataError(f"{path} holds no plain numeric array; save one array of log-weights with numpy.save.")
    if array.ndim not in (1, 2) or array.size == 0:
        raise core.ShapeError(f"{path} has shape {array.shape}; expected draws x observations.")
    if array.ndim == 2 and 1 in array.shape:
        raise core.ShapeError(
            f"{path} has shape {array.shape}: one column of draws, or one draw of many observations? "
            "For a single observation save a one-dimensional array of its draws."
        )
    log_w = torch.from_numpy(array.astype(np.float64))
    return core.check_log_weights(log_w.unsqueeze(1) if array.ndim == 1 else log_w)


def _device(name: str) -> str:
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if name not in ("cpu", "cuda"):
        raise core.SettingError(f"device {name!r}; choose auto, cpu or cuda.")
    if name == "cuda" and not torch.cuda.is_available():
        raise core.SettingError("device cuda was asked for, but torch sees no CUDA device; use auto or cpu.")
    return name


def _engine(name: str, address: str | None, workers: int | None, device: str) -> Engine | None:
    """None stands for processes of this machine, whose number depends on the device each experiment uses."""
    if name not in ("local", "ray"):
        raise core.SettingError(f"engine {name!r}; choose local or ray.")
    if name == "ray":
        return Ray(address, workers, gpus=float(device == "cuda"))
    if address is not None:
        raise core.SettingError(f"address {address!r} is that of a Ray cluster; say --engine ray too.")
    return None


@contextmanager
def progress_bar() -> Iterator[core.Progress]:
    """A bar on stderr where that is a terminal, silence elsewhere."""
    if not messages.is_terminal:
        yield core.silent
        return
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
    with Progress(*columns, console=messages, transient=True) as bar:
        tasks: dict[str, Any] = {}
        heard = _Listener(bar)
        logger = logging.getLogger("vaerdict")

        def progress(done: int, total: int, what: str, /) -> None:
            if what not in tasks:
                tasks[what] = bar.add_task(what, total=total)
            bar.update(tasks[what], completed=done, total=total)

        before = logger.level
        logger.setLevel(logging.INFO)
        logger.addHandler(heard)
        try:
            yield progress
        finally:
            logger.removeHandler(heard)
            logger.setLevel(before)


class _Listener(logging.Handler):
    """Shows what a long unit says it is doing."""

    def __init__(self, bar: Progress) -> None:
        super().__init__(logging.INFO)
        self.bar = bar

    def emit(self, record: logging.LogRecord) -> None:
        """Print above the bars, which stay where they are."""
        self.bar.console.print(record.getMessage(), style="dim", markup=False, highlight=False)


def _rows(title: str, rows: list[dict[str, Any]]) -> None:
    table = Table(title=title, title_justify="left")
    columns = list(dict.fromkeys(key for row in rows for key in row))
    for column in columns:
        table.add_column(column, justify="right" if rows and isinstance(rows[0].get(column), (int, float)) else "left")
    for row in rows:
        table.add_row(*(escape(_cell(row.get(column))) for column in columns))
    screen.print(table)


def _cell(value: Any) -> str:
    if value is None or value != value:
        return "not assessed"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _print_text(body: str, page: Path) -> None:
    screen.print(body, markup=False, highlight=False, soft_wrap=True)
    screen.print(f"Page: {page}", markup=False, highlight=False, soft_wrap=True)


def _print_json(value: Any) -> None:
    from vaerdict.experiments.runner import finite

    sys.stdout.write(json.dumps(finite(value), indent=1, allow_nan=False) + "\n")


def main() -> None:
    """Entry point: errors we foresaw are one line and exit code 2."""
    try:
        app()
    except core.VaerdictError as error:
        messages.print("error: ", style="bold red", end="")
        messages.print(str(error), markup=False, highlight=False, soft_wrap=True)  # paths may look like markup
        sys.exit(2)
