"""The command `vaerdict calibrate`: what its options mean."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from vaerdict.cli import de
from vaerdict.cli.common import (
    Address,
    Device,
    EngineName,
    Json,
    Out,
    Seed,
    choose_device,
    choose_engine,
    print_json,
    print_text,
    progress_bar,
)
from vaerdict.de.calibration.pipeline import COLUMNS

EPILOG = (
    "[bold]Columns of calibrate.csv[/bold]\n\n"
    + "\n\n".join(f"{name}: {words}" for name, words in COLUMNS.items())
    + "\n\nExample:  vaerdict calibrate counts.h5ad --groupby cell_type --groups B --splits 20 --out runs/calibrate"
)

Groups = Annotated[
    list[str] | None, typer.Option(help="Groups whose cells are halved, each on its own; the largest by default.")
]
Splits = Annotated[int, typer.Option(min=0, help="Random halves in which nothing changed, of each group.")]
Share = Annotated[
    float, typer.Option(min=0.01, max=0.99, help="Share of the cells in the first half: 0.1 for groups of unlike size.")
]
Spikes = Annotated[int, typer.Option(min=0, help="Random halves between which changes are planted, of each group.")]
SampleKey = Annotated[
    str | None, typer.Option(help="Column of obs with samples: whole samples are split, and are the replicates.")
]
Balance = Annotated[
    str | None, typer.Option(help="Column of obs, such as the condition, that both halves share alike.")
]
Resume = Annotated[bool, typer.Option("--resume", help="Go on where a run into --out was stopped.")]
Workers = Annotated[int, typer.Option(min=1, help="Splits at a time.")]


def calibrate(
    more: typer.Context,
    data: de.Data,
    groupby: de.GroupBy,
    groups: Groups = None,
    within: de.Within = None,
    sample_key: SampleKey = None,
    balance: Balance = None,
    splits: Splits = 20,
    spikes: Spikes = 10,
    share: Share = 0.5,
    batch_key: de.BatchKey = None,
    layer: de.Layer = None,
    delta: de.Delta = 0.5,
    fdr: de.Fdr = 0.05,
    scale: de.Scale = "centred",
    genes: de.Genes = 2000,
    objectives: de.Objectives = None,
    refits: de.Refits = None,
    quick: de.Quick = False,
    resume: Resume = False,
    workers: Workers = 1,
    engine: EngineName = "local",
    address: Address = None,
    out: Out = Path("vaerdict-calibrate"),
    seed: Seed = 0,
    device: Device = "auto",
    as_json: Json = False,
) -> None:
    """Find out on your own data whether the FDR of `vaerdict de` means what it says."""
    from vaerdict.de.calibration.pipeline import calibrate
    from vaerdict.report import load, text, write_page

    place = choose_device(device)
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
            engine=choose_engine(engine, address, workers, place),
            progress=progress,
        )
    document = load(out)
    page = write_page(document, out)
    print_json(found.results) if as_json else print_text(text(document), page)
