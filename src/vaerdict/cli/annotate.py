"""The command `vaerdict annotate`: parsing and printing only."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vaerdict.annotation.columns import CELLS
from vaerdict.annotation.options import AnnotateOptions
from vaerdict.cli.common import Force, Json, Out, print_json, print_text
from vaerdict.cli.options import option_names, parsed, with_options
from vaerdict.cli.progress import progress_bar
from vaerdict.de.columns import column_help

if TYPE_CHECKING:
    from vaerdict.annotation import Annotation

EPILOG = (
    column_help(CELLS, "cells.csv")
    + "\n\nExample:  vaerdict annotate atlas.h5ad patient.h5ad --labels cell_type --out runs/annotate"
)

_SHOWN = 10  # units printed of the ranking
_MARKERS = 8  # genes printed of each group


@with_options(AnnotateOptions, after="labels")
def annotate(
    reference: Annotated[Path, typer.Argument(help="An .h5ad file of raw counts of cells whose types are known.")],
    query: Annotated[Path, typer.Argument(help="An .h5ad file of raw counts of the cells to annotate.")],
    labels: Annotated[str, typer.Option(help="Column of obs of the reference that holds the types.")],
    model: Annotated[
        Path | None,
        typer.Option(help="Folder of a fitted SCANVI of scvi-tools that knows the query's cells: labels are by it."),
    ] = None,
    out: Out = Path("vaerdict-annotate"),
    force: Force = False,
    as_json: Json = False,
    **options: Any,
) -> None:
    """Give every cell of a query the type of a labelled reference, or call it novel, or leave it undecided.

    Cells are called novel at a false discovery rate, which is stated only if reference and query cells look alike
    within types. Otherwise none is called, clusters are ranked by how little the reference explains them, and the exit
    code is 0 all the same: "verdict" in results.json says REFUSE.
    """
    from vaerdict.annotation import annotate as run
    from vaerdict.annotation.page import from_run
    from vaerdict.report import write_page

    with progress_bar() as progress:
        result = run(
            reference,
            query,
            labels,
            model=model,
            progress=progress,
            out=out,
            force=force,
            **parsed(options, AnnotateOptions),
        )
        page = write_page(from_run(out), out)
    print_json(result.results) if as_json else print_text(summary(result), page)


def summary(result: Annotation) -> str:
    """The verdict, the types, the novel groups or the least explained units, and the warnings, as text."""
    from vaerdict.annotation.page import ranking_table, types_table
    from vaerdict.report.tables import plain, printable

    results = result.results
    messages = [*result.messages, *filter(None, [results["labels"]["message"]])]
    groups = [_group(record) for record in results["novel"]]
    ranking = ranking_table(results["ranking"][:_SHOWN])
    parts = [
        "\n".join(messages),
        plain(types_table(results["types"])),
        "\n".join(groups),
        plain(ranking) if ranking else "",
        "\n".join(f"note: {warning}" for warning in results["warnings"]),
    ]
    return option_names(printable("\n\n".join(filter(None, parts))), annotate)


def _group(record: dict[str, Any]) -> str:
    nearest = ", ".join(f"{n['type']} ({n['share']:.0%})" for n in record["nearest"])
    genes = ", ".join(f"{m['gene']} {m['lfc']:+.1f}" for m in record.get("markers", [])[:_MARKERS])
    markers = f"; higher than in other cells (LFC): {genes}" if genes else ""
    cells = "1 cell" if record["n_cells"] == 1 else f"{record['n_cells']:,} cells"
    return f"Novel group {record['group']}: {cells}, q at most {record['q_max']:.2g}; nearest to {nearest}{markers}"
