"""From a run directory to its page, its figures and the tables of the README."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from vaerdict.core import DataError, VaerdictError
from vaerdict.report import audit, bench, bivariate, calibrate, de, de_table, demo, document, genes, mnist, ppca, svg
from vaerdict.report.document import Document, slug
from vaerdict.report.page import page, write_whole

Maker = Callable[[dict[str, Any], dict[str, Any] | None], Document]

MAKERS: dict[str, Maker] = {
    "ppca": ppca.document,
    "bivariate": bivariate.document,
    "audit": audit.document,
    "demo": demo.document,
    "mnist": mnist.document,
    "genes": genes.document,
    "de": de.document,
    "calibrate": calibrate.document,
}
"""What writes the report of each experiment."""

BESIDE: dict[str, Callable[[Path], dict[str, Any]]] = {"de": de_table.beside}
"""What the report of an experiment reads from its run besides results.json."""


def render(run_dir: Path) -> Path:
    """Draw the figures of a finished run and write its page; returns the page's path."""
    report = load(run_dir)
    drawings = {}
    for picture in report.pictures():
        with _well_formed(run_dir):
            forms = svg.files(picture)
        drawings[picture.name] = forms.pop("inline").decode()
        for suffix, content in forms.items():
            write_whole(run_dir / "figures" / f"{slug(picture.name)}{suffix}", content)
    return write_whole(run_dir / "report.html", page(report, drawings))


def markdown(run_dir: Path) -> str:
    """The summary, claims and tables of a finished run in Markdown."""
    return document.markdown(load(run_dir))


def text(run_dir: Path, most: int | None = None) -> str:
    """The summary, claims and tables of a finished run as plain text; of at `most` so many sections."""
    report = load(run_dir)
    return document.text(replace(report, sections=report.sections[:most]))


def load(run_dir: Path) -> Document:
    """The report of a finished run, or of a folder of benchmark results, still to be drawn."""
    if not (run_dir / "results.json").exists():
        found = [r for r in map(_read, sorted(run_dir.glob("*.json"))) if "benchmark" in r]
        if found:
            whole = run_dir.parent / "mnist" / "results.json"
            with _well_formed(run_dir):
                return bench.document(found, _read(whole).get("stages", ()) if whole.exists() else ())
    results = _read(run_dir / "results.json")
    experiment = results.get("experiment")
    if not isinstance(experiment, str) or experiment not in MAKERS:
        raise DataError(
            f"{run_dir / 'results.json'} is of experiment {experiment!r}; reports exist for {', '.join(MAKERS)}."
        )
    manifest = run_dir / "manifest.json"
    if experiment in BESIDE:
        results |= BESIDE[experiment](run_dir)
    with _well_formed(run_dir):
        return MAKERS[experiment](results, _read(manifest) if manifest.exists() else None)


@contextmanager
def _well_formed(run_dir: Path) -> Iterator[None]:
    """Records that lack what a report needs are the file's fault, and are reported as such."""
    try:
        yield
    except VaerdictError:
        raise
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        path = run_dir / "results.json"
        raise DataError(
            f"{path} lacks something that its report needs ({error!r}); run the experiment again."
        ) from error


def _read(path: Path) -> dict[str, Any]:
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


def update_readme(readme: Path, results_root: Path) -> list[str]:
    """Replace the text between each pair of results markers by the rendered tables; returns the experiments' names.

    The markers are ``<!-- results:NAME -->`` and ``<!-- /results:NAME -->``, for the run in ``results_root/NAME``; with
    NAME/brief only its summary, verdicts and first table.
    """
    if not readme.is_file():
        raise DataError(f"{readme} does not exist; give the README whose tables to rebuild.")
    content = readme.read_text(encoding="utf-8")
    names = re.findall(r"<!-- results:([\w-]+(?:/brief)?) -->", content)
    for name in names:
        folder, short = results_root / name.removesuffix("/brief"), name.endswith("/brief")
        content = _between(content, name, document.brief(load(folder)) if short else markdown(folder), readme)
    write_whole(readme, content)
    return names


def _between(content: str, name: str, tables: str, readme: Path) -> str:
    """The content with what stands between the markers of `name` replaced."""
    opening, closing = f"<!-- results:{name} -->", f"<!-- /results:{name} -->"
    counts = (content.count(opening), content.count(closing))
    if counts != (1, 1) or content.index(closing) < content.index(opening):
        raise DataError(f"{readme} needs exactly one '{opening}' followed by one '{closing}'.")
    before, rest = content.split(opening)
    return f"{before}{opening}\n\n{tables}\n\n{closing}{rest.split(closing)[1]}"
