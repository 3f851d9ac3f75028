"""From a run directory to its page and figures; the experiment named in the results selects the report."""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import entry_points
from pathlib import Path

from vaerdict.core import DataError
from vaerdict.io import write_text
from vaerdict.report.document import Document, slug
from vaerdict.report.figures import image_files
from vaerdict.report.page import page
from vaerdict.report.records import read_record, well_formed

PAGES = "vaerdict.pages"
"""The group of entry points that name, for each experiment, the function from a run directory to its `Document`."""


def load(run_dir: Path) -> Document:
    """The report of a finished run, its figures not yet drawn."""
    experiment = read_record(run_dir / "results.json").get("experiment")
    pages = {entry.name: entry for entry in entry_points(group=PAGES)}
    if not isinstance(experiment, str) or experiment not in pages:
        raise DataError(
            f"{run_dir / 'results.json'} is of experiment {experiment!r}; reports exist for {', '.join(sorted(pages))}."
        )
    make: Callable[[Path], Document] = pages[experiment].load()
    return make(run_dir)


def render(run_dir: Path) -> Path:
    """Draw the figures of a finished run and write its page; returns the path of the page."""
    return write_page(load(run_dir), run_dir)


def write_page(report: Document, run_dir: Path) -> Path:
    """Draw the figures of a report into ``run_dir/figures`` and write its page; returns the path of the page."""
    drawings = {}
    for picture in report.pictures():
        with well_formed(run_dir):
            images = image_files(picture)
        drawings[picture.name] = images.pop("inline").decode()
        for suffix, content in images.items():
            write_text(run_dir / "figures" / f"{slug(picture.name)}{suffix}", content)
    return write_text(run_dir / "report.html", page(report, drawings))
