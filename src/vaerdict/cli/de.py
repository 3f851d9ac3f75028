"""The command `vaerdict de`: parsing and printing only."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

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
from vaerdict.cli.options import parsed, with_options
from vaerdict.cli.progress import progress_bar
from vaerdict.de import columns
from vaerdict.de.options import MODEL, DEOptions

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vaerdict.de.options import Pair
    from vaerdict.de.result import DEResult

EPILOG = (
    columns.column_help(columns.DE, "de.csv")
    + "\n\nExample:  vaerdict de counts.h5ad --groupby cell_type --groups B 'CD14+ Mono' --out runs/de"
)

Data = Annotated[Path, typer.Argument(help="An .h5ad file of raw counts; name it before --groups.")]
GroupBy = Annotated[str, typer.Option(help="Column of obs that holds the groups.")]
ModelDir = Annotated[
    Path | None,
    typer.Option(
        help="Folder of a fitted scvi-tools model (SCVI or LinearSCVI) to compare with the counts; with --prior model "
        "it also predicts.",
        rich_help_panel=MODEL,
    ),
]
Workers = Annotated[
    int | None,
    typer.Option(min=1, help="Blocks of cells at a time; one per core by default.", rich_help_panel=RUNNING),
]

_SHOWN = 8  # genes printed of each direction
_MARK = "*"  # follows the name of a gene that is called only thanks to the prior


@with_options(DEOptions, after="one_vs_rest")
def de(
    more: typer.Context,
    data: Data,
    groupby: GroupBy,
    groups: Annotated[
        list[str] | None,
        typer.Option(
            help="One group: against all other cells. Two: the first over the second. More: every pair.",
        ),
    ] = None,
    one_vs_rest: Annotated[
        bool, typer.Option("--one-vs-rest", help="Each of --groups, or every group, against all other cells.")
    ] = False,
    model: ModelDir = None,
    engine: EngineName = "local",
    address: Address = None,
    workers: Workers = None,
    device: Device = "auto",
    out: Out = Path("vaerdict-de"),
    force: Force = False,
    as_json: Json = False,
    **options: Any,
) -> None:
    """Find the genes that differ between groups of cells, with a calibrated false discovery rate and a verdict.

    Genes are called from the raw counts, in seconds, with a prior learned from cells that are not compared where there
    are any (--prior). A model is trained only where one is asked for: --prior model, --check-model or --scale pair.
    After a stop the same command starts again; with a model it continues where it stopped.
    """
    from vaerdict.de import differential_expression
    from vaerdict.de.page.document import from_run
    from vaerdict.engines import Threads
    from vaerdict.report import write_page

    check_order(data, more.args)
    place = choose_device(device)
    chosen = choose_engine(engine, address, workers, place)
    with progress_bar() as progress:
        result = differential_expression(
            data,
            groupby,
            pairs=pairs_of([*(groups or []), *more.args], one_vs_rest),
            model=model,
            device=place,
            engine=chosen or (None if workers is None else Threads(workers)),
            progress=progress,
            out=out,
            force=force,
            **parsed(options, DEOptions),
        )
    page = write_page(from_run(out), out)
    print_json(result.results) if as_json else print_text(summary(result), page)


def check_order(data: Path, groups: Sequence[str]) -> None:
    """Refuse a file that was named after --groups, where it is taken for a group and a group for the file."""
    from vaerdict.core import SettingError

    if data.is_file():
        return
    files = [name for name in groups if Path(name).suffix == ".h5ad" or Path(name).is_file()]
    if files:
        raise SettingError(
            f"{files[0]!r} stands after --groups, whose names end only at the next option; name it first: "
            f"{files[0]} --groups ..."
        )


def pairs_of(groups: list[str], one_vs_rest: bool) -> list[Pair] | None:
    """The pairs that the groups named on the command line ask for; None for every group against the rest."""
    from vaerdict.core import SettingError
    from vaerdict.de import all_pairs

    if one_vs_rest:
        return [(group, None) for group in groups] or None
    if not groups:
        raise SettingError("no groups to compare; name two with --groups, or ask for --one-vs-rest.")
    return all_pairs(groups)


def summary(result: DEResult) -> str:
    """The verdict, the first genes and the warnings, as text."""
    messages, model = result.verdict["messages"], result.results["model"]
    groups = [
        f"{group['group']}: {group['n_cells']} cells, k-hat {group['khat']:.2f} "
        f"(encoder alone {group['khat_encoder']:.2f}), {group['share_ok']:.0%} below the threshold"
        for group in (model["diagnostics"] if model else ())
    ]
    genes = [line for contrast in result.results["contrasts"] for line in _contrast(result, contrast)]
    notes = [f"note: {warning}" for warning in result.warnings if warning not in messages]
    tested = f"Tested: {result.results['genes_tested']}."
    marked = any(_marks(result.discoveries()))
    legend = [f"{_MARK} called only thanks to the prior: not called by its counts alone"] if marked else []
    return "\n".join(
        [messages[0], tested, *messages[1:], *(["", *groups] if groups else []), *genes, *legend, "", *notes]
    ).rstrip()


def _marks(rows: Any) -> list[str]:
    """The mark of each row that is called only thanks to the prior, otherwise nothing."""
    flags = rows["by_prior"].tolist() if "by_prior" in rows else [False] * len(rows)
    return [_MARK if flag == 1 else "" for flag in flags]


def _contrast(result: DEResult, contrast: dict[str, Any]) -> list[str]:
    called = result.discoveries(contrast["name"])
    shrunken = "shrunken " if result.results["shrinkage"] and result.results["scale"] != "pair" else ""
    rate = f", {contrast['expected_fdr']:.2%} expected to be false" if contrast["joint_fdr"] else ""
    lines = ["", f"{contrast['name']}: LFC with its {shrunken}{result.results['interval']:.0%} interval{rate}"]
    directions = {"group_a": called[called["lfc_mean"] > 0], "group_b": called[called["lfc_mean"] < 0]}
    for side, rows in directions.items():
        first = rows.head(_SHOWN)
        columns = zip(_marks(first), *(first[c] for c in ("gene", "lfc_mean", "lfc_low", "lfc_high")), strict=True)
        genes = ", ".join(f"{g}{mark} {x:+.1f} [{low:+.1f}, {high:+.1f}]" for mark, g, x, low, high in columns)
        lines.append(f"  {len(rows)} higher in {contrast[side]}{': ' + genes if genes else ''}")
    return lines
