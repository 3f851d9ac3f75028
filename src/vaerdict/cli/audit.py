"""The command `vaerdict audit`: parsing and printing only."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from vaerdict.cli.common import (
    RUNNING,
    Device,
    Force,
    Json,
    Out,
    Seed,
    choose_device,
    print_json,
    print_text,
)
from vaerdict.cli.progress import progress_bar

EPILOG = "Example:  vaerdict audit scvi-model counts.h5ad --groupby cell_type --out runs/audit"


def audit(
    model: Annotated[Path, typer.Argument(help="Folder of a fitted scvi-tools model, written by its save().")],
    data: Annotated[Path, typer.Argument(help="An .h5ad file of raw counts, with the fields that the model uses.")],
    groupby: Annotated[str | None, typer.Option(help="Column of obs by which results are listed.")] = None,
    n_cells: Annotated[int, typer.Option(min=2, help="Cells audited at most, chosen at random.")] = 10_000,
    seed: Seed = 0,
    workers: Annotated[
        int | None,
        typer.Option(min=1, help="Blocks of cells at a time; one per core by default.", rich_help_panel=RUNNING),
    ] = None,
    device: Device = "auto",
    out: Out = Path("vaerdict-audit"),
    force: Force = False,
    as_json: Json = False,
) -> None:
    """Say whether the encoder of a fitted model may be trusted, for which cells and which quantities.

    Latents, neighbours, normalised expression and class probabilities by the encoder are compared with inference
    refined for each cell. Writes a page, results.json, a table of cells and audit.md for a model card.
    """
    from vaerdict.auditing.saved import audit_saved
    from vaerdict.engines import Threads
    from vaerdict.io import sha256

    place = choose_device(device)
    with progress_bar() as progress:
        result = audit_saved(
            model,
            data,
            groupby=groupby,
            n_cells=n_cells,
            seed=seed,
            device=place,
            engine=None if workers is None else Threads(workers),
            progress=progress,
            out=out,
            force=force,
        )
    page = result.report(out, data_sha256=sha256(data))
    print_json(result.results) if as_json else print_text(str(result), page)
