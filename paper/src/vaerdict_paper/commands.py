"""The commands `vaerdict reproduce` and `vaerdict bench`: parsing and printing only."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vaerdict.cli.common import (
    Address,
    Device,
    EngineName,
    Force,
    Json,
    Out,
    choose_device,
    choose_engine,
    print_json,
    print_text,
    screen,
)
from vaerdict.cli.progress import messages, progress_bar

if TYPE_CHECKING:
    from vaerdict.core import Progress


def reproduce(
    name: Annotated[str, typer.Argument(help="bivariate, ppca, mnist, genes, audit or all.")],
    preset: Annotated[
        str,
        typer.Option(help="quick (minutes) or paper (all); mnist also: sizes, printed, released, best; genes: rivals."),
    ] = "quick",
    seeds: Annotated[int | None, typer.Option(min=1, help="Number of seeds, if not that of the preset.")] = None,
    audit: Annotated[bool, typer.Option("--audit", help="With ppca: also audit the paper's released code.")] = False,
    workers: Annotated[
        int | None, typer.Option(min=1, help="Number of processes; one per core, or one per GPU.")
    ] = None,
    device: Device = "auto",
    engine: EngineName = "local",
    address: Address = None,
    out: Annotated[Path | None, typer.Option(help="Folder for the results; runs/NAME by default.")] = None,
    force: Force = False,
    as_json: Json = False,
) -> None:
    """Reproduce the paper's experiments, with the published numbers and statistical floors beside ours.

    After a stop the same command goes on.
    """
    from vaerdict.report import load, text, write_page
    from vaerdict_paper.experiments.reproduce import EXPERIMENTS, reproduce

    names = list(EXPERIMENTS) if name == "all" else [name, *(["audit"] if audit and name != "audit" else [])]
    for each in names:
        folder = Path("runs") / each if out is None else out if len(names) == 1 else out / each
        with progress_bar() as progress:
            results = reproduce(
                each,
                preset,
                folder,
                seeds=seeds,
                force=force,
                workers=workers,
                device="auto" if device == "auto" else choose_device(device),
                engine=choose_engine(engine, address, workers, choose_device(device)),
                progress=progress,
            )
        document = load(folder)
        page = write_page(document, folder)
        print_json(results) if as_json else print_text(text(document), page)


def bench(
    name: Annotated[
        str,
        typer.Argument(
            help="psis, ppca, samplers, escalation, verdicts, counts, de, de-scale, de-methods, centre, prior, "
            "clustered, novelty, novel-cells, scaling, gpu, million or all."
        ),
    ],
    quick: Annotated[bool, typer.Option("--quick", help="Smaller sizes, for a first look.")] = False,
    checkout: Annotated[
        Path | None, typer.Option("--against", help="Root of another checkout: time its version beside this one.")
    ] = None,
    repeats: Annotated[int, typer.Option(help="With --against: runs of each version.")] = 3,
    out: Out = Path("runs/bench"),
    force: Annotated[bool, typer.Option("--force", help="Measure again what --out holds already.")] = False,
    as_json: Json = False,
) -> None:
    """Measure speed beside peers timed in the same run, cost as a function of size, and verdicts by truth.

    What is finished in --out is shown and not measured again, so that after a stop the same command goes on.
    """
    from vaerdict.report import load, text, write_page
    from vaerdict.runs import RunFolder
    from vaerdict_paper.benchmarks import BENCHMARKS, against, finished, mark, unavailable, write_result

    RunFolder.of(out, "bench", force=force)
    from vaerdict_paper.pages.bench import text as tables

    def show(name: str, measure: Callable[[Progress], dict[str, Any]]) -> None:
        result = finished(out, name, quick=quick, force=force)
        if result is None:
            mark(out)
            with progress_bar() as progress:
                result = measure(progress)
            write_result(out, name, result)
        print_json(result) if as_json else screen.print(tables(result), markup=False, highlight=False, soft_wrap=True)

    if checkout is not None:
        for each in against.shared_benchmarks(checkout) if name == "all" else [name]:
            show(f"against-{each}", partial(_against, each, checkout, repeats, quick))
        return
    for each in BENCHMARKS if name == "all" else [name]:
        reason = unavailable(each) if name == "all" else None
        if reason is not None:
            messages.print(f"{each} is skipped: it {reason}.", markup=False)
            continue
        show(each, partial(_measure, each, quick, out))
    if name == "all":
        document = load(out)
        page = write_page(document, out)
        if not as_json:
            print_text(text(document, 1), page)


def _against(name: str, checkout: Path, repeats: int, quick: bool, progress: Progress) -> dict[str, Any]:
    from vaerdict_paper.benchmarks import against

    return against.run(name, checkout, repeats=repeats, quick=quick, progress=progress)


def _measure(name: str, quick: bool, out: Path, progress: Progress) -> dict[str, Any]:
    from vaerdict_paper.benchmarks import run, write_result

    return run(name, quick=quick, progress=progress, save=partial(write_result, out, name), folder=out)


reproduce.epilog = "Example:  vaerdict reproduce ppca --preset quick --out runs/ppca"  # type: ignore[attr-defined]
bench.epilog = "Example:  vaerdict bench psis --quick"  # type: ignore[attr-defined]
