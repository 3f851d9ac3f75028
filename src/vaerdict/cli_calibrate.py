"""The command `vaerdict calibrate`: what its options mean."""

from __future__ import annotations

from typing import Annotated

import typer

from vaerdict.de.calibration import COLUMNS

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
