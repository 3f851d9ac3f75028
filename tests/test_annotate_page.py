"""The page of an annotation: result first, every name printed literally, refusals and batches."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from annotate_toys import pair
from page_checks import NASTY, outline
from vaerdict.annotation import Annotation, annotate
from vaerdict.annotation import figures as figures_module
from vaerdict.annotation.figures import CellMap
from vaerdict.annotation.page import document, from_run, types_table
from vaerdict.core import DataError
from vaerdict.report import text, write_page
from vaerdict.report.document import Document
from vaerdict.report.tables import Table

ad, pd = pytest.importorskip("anndata"), pytest.importorskip("pandas")
pytest.importorskip("sklearn")
pytest.importorskip("matplotlib")

HEADINGS = [
    "Verdict",
    "Cells",
    "Novel groups",
    "Do reference and query look alike?",
    "What could have been found",
    "Labels",
    "Words and settings",
]


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    """The run directory of an annotation with a hidden type."""
    folder = tmp_path_factory.mktemp("annotate")
    annotate(*pair(), "cell_type", out=folder)
    return folder


@pytest.fixture(scope="module")
def refused(tmp_path_factory) -> Path:
    """A run directory with two batches; the second one of the query is shifted."""
    reference, query = pair(400)
    for adata in (reference, query):
        adata.obs["donor"] = np.where(np.arange(400) % 2, "<two>", "one")
    query.X[1::2, :40] *= 4
    folder = tmp_path_factory.mktemp("batches")
    annotate(reference, query, "cell_type", batch_key="donor", markers=False, out=folder)
    return folder


def changed(run: Path, folder: Path, **changes: Any) -> Path:
    """A copy of a run directory with changes to its results."""
    folder.mkdir(exist_ok=True)
    for path in run.iterdir():
        if path.is_file():
            (folder / path.name).write_bytes(path.read_bytes())
    results = json.loads((run / "results.json").read_text())
    (folder / "results.json").write_text(json.dumps(results | changes))
    return folder


def report_rows(report: Document, name: str) -> list[dict[str, Any]]:
    """The rows of a table of the report."""
    blocks = [block for section in report.sections for block in section.blocks]
    return next(list(block.rows) for block in blocks if isinstance(block, Table) and block.name == name)


def test_the_result_comes_first(run):
    report = from_run(run)
    assert [section.heading for section in report.sections] == HEADINGS
    counts = pd.read_csv(run / "cells.csv")["call"].value_counts()
    assert len(report.summary) <= 3
    assert report.summary[0].startswith(f"OK. Of 300 cells {counts['label']} have a label, {counts['novel']} are novel")
    assert f"{counts['novel']} cells are called novel at a false discovery rate of 10%" in report.summary[1]
    assert "3 of 3 types of the reference would have been found" in report.summary[2]
    printed = text(report)
    assert "OK: Novel cells" in printed
    assert [row for row in report_rows(report, "rates") if row["rate"] == "10%"] == [
        {"rate": "10%", "n_cells": counts["novel"]}
    ]


def test_the_page_is_whole_and_offline(run):
    page = write_page(from_run(run), run)
    seen, source = outline(page)
    assert len(re.findall("<svg ", source)) == len(from_run(run).pictures()) == 6
    assert "nearest types" in source
    assert seen.tags["h2"] == len(HEADINGS)
    assert not re.findall(r'(?:src|href)="https?:', source)
    assert {path.stem for path in (run / "figures").glob("*.svg")} == {
        "map-calls", "map-labels", "gate-0", "audit", "confusion", "reliability",
    }  # fmt: skip


def test_every_name_is_printed_literally(tmp_path):
    reference, query = pair(200)
    for adata in (reference, query):
        adata.obs["cell_type"] = adata.obs["cell_type"].replace({"alpha": NASTY, "beta": "<b>beta</b>"})
        adata.var_names = [f"<i>{name}</i>" for name in adata.var_names]
    query.obs_names = [f"{NASTY}{i}" for i in range(query.n_obs)]
    page = annotate(reference, query, "cell_type").report(tmp_path)
    source = page.read_text(encoding="utf-8")
    body = source[: source.rindex("<script>")]
    assert "<script>" not in body
    assert "<b>" not in body
    assert "<i>" not in body
    assert "&lt;b&gt;beta" in body
    assert "&lt;script&gt;" in body
    assert "\x07" not in body
    assert pd.read_csv(tmp_path / "cells.csv")["cell"].tolist() == query.obs_names.tolist()


def test_batches_without_a_rate_are_ranked(refused):
    report = from_run(refused)
    assert report.summary[0].startswith("CAUTION. ")
    assert "in 1 of 2 batches. No rate is stated for: <two>." in report.summary[1]
    assert [s.heading for s in report.sections] == [*HEADINGS[:3], "Least explained clusters", *HEADINGS[3:]]
    printed = text(report)
    assert "No error rate is stated for this list" in printed
    assert "Batches of the query" in printed
    assert {"gate-0", "gate-1"} <= {picture.name for picture in report.pictures()}
    source = write_page(report, refused).read_text()
    assert "<two>" not in source
    assert "not sought" in source  # markers of novel groups


def test_without_audit_map_and_calls_the_page_is_shorter(run, tmp_path):
    results = json.loads((run / "results.json").read_text())
    types = [{k: v for k, v in t.items() if k not in ("found", "false", "fewest")} for t in results["types"]]
    folder = changed(run, tmp_path / "run", types=types, novel=[])
    (folder / "annotated.h5ad").unlink()
    report = from_run(folder)
    assert [picture.name for picture in report.pictures()] == ["gate-0", "confusion", "reliability"]
    assert "What could have been found" not in [section.heading for section in report.sections]
    assert "No cell is called novel." in [block for section in report.sections for block in section.blocks]
    assert "found" not in [column.key for column in types_table(types).columns]
    write_page(report, folder)


def test_types_too_small_to_be_compared_are_shown_without_a_number(run):
    results = json.loads((run / "results.json").read_text())
    (batch,) = results["batches"]
    rows = [{**t, "auroc": None} for t in batch["types"]]
    lone = results | {"batches": [batch | {"types": rows, "p_value": None, "median_auroc": None, "promised": False}]}
    report = document(lone, None)
    assert "gate-0" not in {picture.name for picture in report.pictures()}
    assert "Difference of query from calibration cells" in text(report)


def test_labels_by_a_model_are_shown_beside_the_regression(run, tmp_path):
    results = json.loads((run / "results.json").read_text())
    (regression,) = results["labels"]["calibration"].values()
    both = {"logistic regression": regression, "SCANVI, classifier": regression | {"accuracy": 0.5}}
    labels = {"method": "SCANVI, classifier", "message": "The classifier is used.", "calibration": both}
    report = from_run(changed(run, tmp_path / "run", labels=labels))
    printed = text(report)
    assert "CAUTION: Labels by SCANVI, classifier: 50 % are right" in printed
    assert "The classifier is used." in printed
    assert [row["method"] for row in report_rows(report, "calibration")] == list(both)


@pytest.mark.parametrize("missing", ["types", "labels", "settings", "confusion"])
def test_results_that_lack_something_are_refused(run, tmp_path, missing):
    folder = changed(run, tmp_path / "run")
    results = json.loads((folder / "results.json").read_text())
    (folder / "results.json").write_text(json.dumps({**results, missing: {} if missing != "types" else [{}]}))
    with pytest.raises(DataError, match=r"results\.json"):
        from_run(folder)


def test_the_map_holds_novel_cells_first(monkeypatch):
    monkeypatch.setattr(figures_module, "MAP_CELLS", 50)
    rng = np.random.default_rng(0)
    call = np.where(np.arange(1000) < 20, "novel", "label")
    table = pd.DataFrame({"call": call, "label": "alpha"})
    features = rng.normal(size=(1000, 5)).astype(np.float32)
    features[999] = np.nan  # a cell without counts
    cells = CellMap(table, features, seed=0)
    assert (cells.cells["call"] == "novel").sum() == 20
    assert cells.place.shape == (50, 2)
    assert cells.n_cells == 999
    assert "50 of 999 cells" in cells.pictures()[0].caption
    np.testing.assert_array_equal(cells.place, CellMap(table, features, seed=0).place)


def test_a_run_can_be_read_again(run, tmp_path):
    loaded = Annotation.load(run)
    assert loaded.results == json.loads((run / "results.json").read_text())
    assert loaded.features.shape == (300, 30)
    page = loaded.report(tmp_path / "again")  # without the query there is no map
    assert "Cells of the query by call" not in page.read_text()
    (tmp_path / "again" / "manifest.json").unlink()
    with pytest.raises(DataError, match="does not hold a whole run"):
        Annotation.load(tmp_path / "again")
