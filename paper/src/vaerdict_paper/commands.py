"""The commands `vaerdict reproduce` and `vaerdict bench`: parsing and printing only."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from vaerdict.cli.common import (
    Address,
    Device,
    EngineName,
    Json,
    Out,
    choose_device,
    choose_engine,
    messages,
    print_json,
    print_text,
    progress_bar,
    screen,
)


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
    engine: EngineName = "local",
    address: Address = None,
    out: Annotated[Path | None, typer.Option(help="Folder for the results; runs/NAME by default.")] = None,
    as_json: Json = False,
) -> None:
    """Reproduce the paper's experiments, beside the published numbers and the statistical floors."""
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
                resume=resume,
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
    from vaerdict.io import write_json
    from vaerdict.report import load, text, write_page
    from vaerdict_paper.benchmarks import BENCHMARKS, against, run, unfit
    from vaerdict_paper.pages.bench import text as tables

    def show(result: dict[str, Any], name: str) -> None:
        write_json(out / f"{name}.json", result)
        print_json(result) if as_json else screen.print(tables(result), markup=False, highlight=False, soft_wrap=True)

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
        write_json(out / "results.json", {"experiment": "bench"})
        document = load(out)
        print_text(text(document, most=1), write_page(document, out))
