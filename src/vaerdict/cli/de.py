"""The command `vaerdict de`: parsing and printing only."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

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
from vaerdict.core import DataError, Progress, SettingError
from vaerdict.de.contrasts import Pair, all_pairs
from vaerdict.de.tables import COLUMNS
from vaerdict.engines import Engine, Threads

EPILOG = (
    "[bold]Columns of de.csv[/bold]\n\n"
    + "\n\n".join(f"{name}: {words}" for name, words in COLUMNS.items())
    + "\n\nExample:  vaerdict de counts.h5ad --groupby cell_type --groups B 'CD14+ Mono' --out runs/de"
)

Data = Annotated[Path, typer.Argument(help="An .h5ad file of raw counts; name it before --groups.")]
GroupBy = Annotated[str, typer.Option(help="Column of obs that holds the groups.")]
Groups = Annotated[
    list[str] | None,
    typer.Option(help="Two groups, a over b; of more every pair is compared, a single one with the rest."),
]
OneVsRest = Annotated[bool, typer.Option("--one-vs-rest", help="Each of --groups, or every group, against the rest.")]
Layer = Annotated[str | None, typer.Option(help="Layer of raw counts; X by default.")]
BatchKey = Annotated[str | None, typer.Option(help="Column of obs with batches that the model accounts for.")]
SampleKey = Annotated[str | None, typer.Option(help="Column of obs with samples: they, not cells, are replicates.")]
Within = Annotated[str | None, typer.Option(help="Column of obs with types: compare within each of them.")]
Delta = Annotated[float, typer.Option(help="Least |log2 fold change| of a differentially expressed gene.")]
Fdr = Annotated[float, typer.Option(help="Expected share of false discoveries, over all contrasts.")]
Scale = Annotated[str, typer.Option(help="centred (to the median gene), proportion, or pair (single cells).")]
Genes = Annotated[int, typer.Option(min=0, help="Most variable genes to keep; 0 for all.")]
Borrow = Annotated[
    bool,
    typer.Option(
        "--borrow",
        help="Cells without a label are of the kinds compared: where the model, which learns from them, knows more of "
        "a gene than its counts, let it decide.",
    ),
]
KeepGenes = Annotated[
    str | None, typer.Option(help="Genes to compare whether or not they are among the most variable: NAME,NAME,...")
]
GeneSymbols = Annotated[str | None, typer.Option(help="Column of var with the names that genes have in the table.")]
Refits = Annotated[
    int | None, typer.Option(min=0, help="Bootstrap refits where the model may decide: 3, or 0 with --quick.")
]
Objectives = Annotated[str | None, typer.Option(help="Objectives to train by: VAE,IWAE by default; also WW, CHI.")]
ModelDir = Annotated[
    Path | None, typer.Option(help="Folder of a fitted scvi-tools model (SCVI or LinearSCVI) to use, with its batches.")
]
Quick = Annotated[bool, typer.Option("--quick", help="One model, few epochs, no refits: a first look.")]

Workers = Annotated[int | None, typer.Option(min=1, help="Blocks of cells at a time; one a core by default.")]

_SHOWN = 8  # genes printed of each direction


def pairs_of(groups: list[str], one_vs_rest: bool) -> list[Pair] | None:
    """What the groups named on the command line ask for; None for every group against the rest."""
    if one_vs_rest:
        return [(group, None) for group in groups] or None
    if not groups:
        raise SettingError("no groups to compare; name two with --groups A B, or ask for --one-vs-rest.")
    return all_pairs(groups)


def names_of(words: str | None) -> list[str]:
    """Names that commas part."""
    return [name.strip() for name in (words or "").split(",") if name.strip()]


def threads(workers: int | None) -> Engine | None:
    """So many threads of this process, None for as many as suit the device."""
    return None if workers is None else Threads(workers)


def compare_file(data: Path, model: Path | None, progress: Progress, **options: Any) -> Any:
    """Run the comparison on a file, under a model of scvi-tools where one is named."""
    from vaerdict.de import differential_expression
    from vaerdict.de.data import open_data

    adata = open_data(data)
    if model is None:
        return differential_expression(adata, progress=progress, **options)
    adata = adata.to_memory()
    return differential_expression(adata, progress=progress, model=_load(model, adata), **options)


def _load(folder: Path, adata: Any) -> Any:
    from vaerdict.optional import isolated, require

    if not (folder / "model.pt").is_file():
        raise DataError(f"{folder} holds no model.pt; name a folder written by scvi-tools' model.save().")
    scvi = require("scvi", "scvi")
    try:
        with isolated(0):
            kind = scvi.model.SCVI.load_registry(str(folder))["model_name"]
            return getattr(scvi.model, kind).load(str(folder), adata=adata)
    except Exception as error:  # scvi-tools raises many kinds for data that do not fit
        raise DataError(f"{folder} cannot be loaded with these data ({str(error).splitlines()[0]}).") from error


def summary(result: Any) -> str:
    """The verdict, the warnings and the first genes, as text."""
    groups = [
        f"{group['group']}: {group['n_cells']} cells, k-hat {group['khat']:.2f} "
        f"(encoder alone {group['khat_encoder']:.2f}), {group['share_ok']:.0%} in order"
        for group in result.results["diagnostics"]
    ]
    genes = [line for contrast in result.results["contrasts"] for line in _contrast(result, contrast)]
    repeated = set(result.verdict["words"])
    notes = [f"note: {words}" for words in result.warnings if words not in repeated]
    found, *rest = result.verdict["words"]
    tested = f"Compared were {result.results['genes_words']}."
    return "\n".join([found, tested, *rest, "", *groups, *genes, "", *notes]).rstrip()


def _contrast(result: Any, contrast: dict[str, Any]) -> list[str]:
    found = result.discoveries(contrast["name"])
    lines = ["", f"{contrast['name']}: {contrast['n_up']} genes up, {contrast['n_down']} down (LFC with its interval)"]
    for word, rows in (("up", found[found["lfc_mean"] > 0]), ("down", found[found["lfc_mean"] < 0])):
        first = rows.head(_SHOWN)
        columns = zip(*(first[c] for c in ("gene", "lfc_mean", "lfc_low", "lfc_high")), strict=True)
        genes = ", ".join(f"{g} {x:+.1f} [{low:+.1f}, {high:+.1f}]" for g, x, low, high in columns)
        lines += [f"  {word}: {genes}"] if genes else []
    return lines


def de(
    more: typer.Context,
    data: Data,
    groupby: GroupBy,
    groups: Groups = None,
    one_vs_rest: OneVsRest = False,
    within: Within = None,
    sample_key: SampleKey = None,
    batch_key: BatchKey = None,
    layer: Layer = None,
    delta: Delta = 0.5,
    fdr: Fdr = 0.05,
    scale: Scale = "centred",
    genes: Genes = 2000,
    keep_genes: KeepGenes = None,
    gene_symbols: GeneSymbols = None,
    borrow: Borrow = False,
    objectives: Objectives = None,
    refits: Refits = None,
    model: ModelDir = None,
    quick: Quick = False,
    engine: EngineName = "local",
    address: Address = None,
    workers: Workers = None,
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
        result = compare_file(
            data,
            model,
            progress,
            groupby=groupby,
            pairs=pairs_of([*(groups or []), *more.args], one_vs_rest),
            within=within,
            sample_key=sample_key,
            batch_key=batch_key,
            layer=layer,
            delta=delta,
            level=fdr,
            scale=scale,
            n_top_genes=genes,
            keep_genes=names_of(keep_genes),
            gene_symbols=gene_symbols,
            borrow=borrow,
            objectives=objectives.split(",") if objectives else None,
            refits=refits,
            quick=quick,
            seed=seed,
            device=choose_device(device),
            engine=choose_engine(engine, address, workers, choose_device(device)) or threads(workers),
            out=out,
        )
    page = render(out)
    print_json(result.results) if as_json else print_text(summary(result), page)
