"""The command `vaerdict demo`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vaerdict.cli.common import Device, Json, Out, Seed, choose_device, print_json, print_text, progress_bar

if TYPE_CHECKING:
    from vaerdict.core import Progress


def demo(
    which: Annotated[
        str, typer.Option(help="genes (differential expression), or ppca (decisions with an exact posterior).")
    ] = "genes",
    out: Out = Path("vaerdict-demo"),
    seed: Seed = 0,
    device: Device = "auto",
    as_json: Json = False,
) -> None:
    """Run an analysis of simulated data and show the truth beside the answer, in under a minute."""
    from vaerdict.core import SettingError
    from vaerdict.report import load, text, write_page

    if which not in ("genes", "ppca"):
        raise SettingError(f"demo {which!r}; choose genes or ppca.")
    with progress_bar() as progress:
        results = (_demo_genes if which == "genes" else _demo_ppca)(out, seed, choose_device(device), progress)
    document = load(out)
    page = write_page(document, out)
    if as_json:
        return print_json(results)
    messages = results["verdict"]["messages"][1:] if which == "genes" else []
    print_text("\n\n".join([text(document, 2 if which == "genes" else None), *messages]), page)


def _demo_genes(out: Path, seed: int, device: str, progress: Progress) -> dict[str, Any]:
    from vaerdict.demo import genes

    result = genes.run(seed=seed, device=device, progress=progress)
    result.save(out)
    return result.results


def _demo_ppca(out: Path, seed: int, device: str, progress: Progress) -> dict[str, Any]:
    from vaerdict.demo import ppca
    from vaerdict.io import manifest, write_json

    results = ppca.run(seed=seed, device=device, progress=progress)
    write_json(out / "results.json", results)
    write_json(out / "manifest.json", manifest(results["settings"], {}, data_sha256=None))
    return results
