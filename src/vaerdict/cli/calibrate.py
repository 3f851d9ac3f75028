"""The command `vaerdict calibrate`: parsing and printing only."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from vaerdict.cli.common import (
    RUNNING,
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
)
from vaerdict.cli.de import Data, GroupBy, ModelDir, check_order
from vaerdict.cli.options import parsed, with_options
from vaerdict.cli.progress import progress_bar
from vaerdict.de import columns
from vaerdict.de.options import CalibrateOptions, DEOptions

EPILOG = (
    columns.column_help(columns.CALIBRATE, "calibrate.csv")
    + "\n\nExample:  vaerdict calibrate counts.h5ad --groupby cell_type --groups B --splits 20 --out runs/calibrate"
)


@with_options(CalibrateOptions, DEOptions, after="groups")
def calibrate(
    more: typer.Context,
    data: Data,
    groupby: GroupBy,
    groups: Annotated[
        list[str] | None,
        typer.Option(help="Groups whose cells are split, each on its own, and pairs of them; the largest by default."),
    ] = None,
    model: ModelDir = None,
    workers: Annotated[int, typer.Option(min=1, help="Number of splits at a time.", rich_help_panel=RUNNING)] = 1,
    engine: EngineName = "local",
    address: Address = None,
    device: Device = "auto",
    out: Out = Path("vaerdict-calibrate"),
    force: Force = False,
    as_json: Json = False,
    **options: Any,
) -> None:
    """Measure on your own data whether the FDR of `vaerdict de` holds, with the same options.

    Cells of one group are split at random and compared: every discovery is false, or is checked against planted
    changes. Two groups are also mixed, and compared with the change of some genes undone. After a stop the same
    command goes on.
    """
    from vaerdict.de.calibration import calibrate
    from vaerdict.de.calibration.page import from_run
    from vaerdict.report import text, write_page

    check_order(data, more.args)
    place = choose_device(device)
    with progress_bar() as progress:
        result = calibrate(
            data,
            groupby,
            [*(groups or []), *more.args],
            model=model,
            device=place,
            out=out,
            force=force,
            workers=workers,
            engine=choose_engine(engine, address, workers, place),
            progress=progress,
            **parsed(options, CalibrateOptions, DEOptions),
        )
    document = from_run(out)
    page = write_page(document, out)
    print_json(result.results) if as_json else print_text(text(document), page)
