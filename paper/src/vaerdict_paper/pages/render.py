"""The reports of the experiments and benchmarks, and the tables that README and docs show of them."""

from __future__ import annotations

import re
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

from vaerdict.core import DataError
from vaerdict.io import write_text
from vaerdict.report import brief, load, markdown, read_record, read_run, well_formed
from vaerdict.report import tables as table_formats
from vaerdict.report.document import Document
from vaerdict_paper.pages.provenance import provenance

Maker = Callable[[dict[str, Any], dict[str, Any] | None], Document]


def _page(name: str) -> Callable[[Path], Document]:
    """The function from a run directory of an experiment to its report."""

    def from_run(run_dir: Path) -> Document:
        make: Maker = import_module(f"vaerdict_paper.pages.{name}").document
        with well_formed(run_dir):
            return make(*read_run(run_dir))

    return from_run


ppca, bivariate, audit, mnist, genes = map(_page, ("ppca", "bivariate", "audit", "mnist", "genes"))


def bench(run_dir: Path, part: str | None = None) -> Document:
    """The report on a folder of benchmark results.

    `part` is the name of one benchmark, or "ratios" for the table of all ratios alone.
    """
    from vaerdict_paper.pages.bench import document

    results = [r for r in map(read_record, sorted(run_dir.glob("*.json"))) if "benchmark" in r]
    with well_formed(run_dir):
        return document(results, part)


def update_tables(page: Path, results_root: Path) -> list[str]:
    """Replace the text between each pair of results markers by the rendered tables; returns the names in the markers.

    The markers are ``<!-- results:NAME -->`` and ``<!-- /results:NAME -->``, for the run in ``results_root/NAME``. For
    ``NAME/brief`` only the summary, the verdicts and the first table are rendered, for ``bench/PART`` one benchmark,
    and for ``provenance`` what computed all runs.
    """
    if not page.is_file():
        raise DataError(f"{page} does not exist; give the page whose tables to rebuild.")
    content = page.read_text(encoding="utf-8")
    names = re.findall(r"<!-- results:([\w-]+(?:/[\w-]+)?) -->", content)
    for name in names:
        content = _replaced(content, name, _rendered(results_root, *name.split("/")), page)
    if names:
        write_text(page, content)
    return names


def _rendered(results_root: Path, run: str, part: str | None = None) -> str:
    """The tables of a run, of a part of the benchmarks, the brief form, or where all results come from."""
    if run == "provenance":
        return table_formats.markdown(provenance(results_root))
    if run == "bench" and part:
        return markdown(bench(results_root / run, part))
    report = load(results_root / run)
    return brief(report) if part else markdown(report)


def _replaced(content: str, name: str, tables: str, page: Path) -> str:
    """The content with the text between the markers of `name` replaced by `tables`."""
    opening, closing = f"<!-- results:{name} -->", f"<!-- /results:{name} -->"
    counts = (content.count(opening), content.count(closing))
    if counts != (1, 1) or content.index(closing) < content.index(opening):
        raise DataError(f"{page} needs exactly one '{opening}' followed by one '{closing}'.")
    before, rest = content.split(opening)
    return f"{before}{opening}\n\n{tables}\n\n{closing}{rest.split(closing)[1]}"
