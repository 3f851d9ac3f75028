"""From a run directory to its page and figures; which report a run has is found by the experiment it names."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from vaerdict.core import DataError, VaerdictError
from vaerdict.io import write_text
from vaerdict.report import svg
from vaerdict.report.document import Document, slug
from vaerdict.report.page import page

PAGES = "vaerdict.pages"
"""The group of entry points that name, for each experiment, the function from a run directory to its `Document`."""


def load(run_dir: Path) -> Document:
    """The report of a finished run, its figures still to be drawn."""
    experiment = read_record(run_dir / "results.json").get("experiment")
    pages = {entry.name: entry for entry in entry_points(group=PAGES)}
    if not isinstance(experiment, str) or experiment not in pages:
        raise DataError(
            f"{run_dir / 'results.json'} is of experiment {experiment!r}; reports exist for {', '.join(sorted(pages))}."
        )
    make: Callable[[Path], Document] = pages[experiment].load()
    return make(run_dir)


def render(run_dir: Path) -> Path:
    """Draw the figures of a finished run and write its page; returns the page's path."""
    return write_page(load(run_dir), run_dir)


def write_page(report: Document, run_dir: Path) -> Path:
    """Draw the figures of a report into ``run_dir/figures`` and write its page; returns the page's path."""
    drawings = {}
    for picture in report.pictures():
        with well_formed(run_dir):
            forms = svg.files(picture)
        drawings[picture.name] = forms.pop("inline").decode()
        for suffix, content in forms.items():
            write_text(run_dir / "figures" / f"{slug(picture.name)}{suffix}", content)
    return write_text(run_dir / "report.html", page(report, drawings))


def read_run(run_dir: Path) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """The results of a run directory, and its manifest where there is one."""
    manifest = run_dir / "manifest.json"
    return read_record(run_dir / "results.json"), read_record(manifest) if manifest.exists() else None


@contextmanager
def well_formed(run_dir: Path) -> Iterator[None]:
    """Report records that lack what a page needs as the file's fault."""
    try:
        yield
    except VaerdictError:
        raise
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        path = run_dir / "results.json"
        raise DataError(
            f"{path} lacks something that its report needs ({error!r}); run the experiment again."
        ) from error


def read_record(path: Path) -> dict[str, Any]:
    """A JSON record, or an error that says what is wrong with the file."""
    try:
        value = json.loads(path.read_bytes())
    except FileNotFoundError as error:
        raise DataError(f"{path} does not exist; give the directory of a finished run.") from error
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}.") from error
    except ValueError as error:  # not JSON, or not UTF-8
        raise DataError(
            f"{path} is not whole JSON ({error}); the run was cut short or the file damaged: run it again."
        ) from error
    if not isinstance(value, dict):
        raise DataError(f"{path} holds a {type(value).__name__}, not a record; it was not written by this program.")
    return value
