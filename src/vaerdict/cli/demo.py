"""The command `vaerdict demo`."""

from __future__ import annotations

from pathlib import Path

from vaerdict.cli.common import Device, Force, Json, Out, Seed, choose_device, print_json, print_text
from vaerdict.cli.progress import progress_bar


def demo(
    out: Out = Path("vaerdict-demo"),
    force: Force = False,
    seed: Seed = 0,
    device: Device = "auto",
    as_json: Json = False,
) -> None:
    """Compare simulated cell types, few cells of which are labelled, and show the truth beside the answer."""
    from vaerdict import demo
    from vaerdict.de.page.document import from_run
    from vaerdict.report import text, write_page

    with progress_bar() as progress:
        result = demo.run(seed=seed, device=choose_device(device), progress=progress, out=out, force=force)
    document = from_run(out)
    page = write_page(document, out)
    if as_json:
        return print_json(result.results)
    print_text("\n\n".join([text(document, 2), *result.verdict["messages"][1:]]), page)
