"""The page and the command of a calibration, from made-up results whose right answers are known."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_de_analysis import simulated

import test_report
from de_toys import HOSTILE
from vaerdict.core import DataError
from vaerdict.de.calibration import summary as words
from vaerdict.de.calibration.pipeline import COLUMNS
from vaerdict.report import render, text
from vaerdict.report.page import page as html_page
from vaerdict.report.render import load

pytest.importorskip("anndata")
LEVELS = (0.01, 0.05, 0.1, 0.2)
N = 8


def made(kind: str, split: int, method: str, level: float, replicates: str, rng: np.random.Generator) -> dict[str, Any]:
    """The model calls what it may, but with cells as replicates, as raw counts do, too much that is false."""
    loose = method == "raw" or (kind == "null" and replicates == "cells")
    called = int(rng.integers(40, 60)) if kind == "spike" or loose else 0
    false = called if kind == "null" else round(called * (4 * level if method == "raw" else level))
    return {
        "kind": kind, "group": "T", "split": split, "method": method, "replicates": replicates, "level": level,
        "n_genes": 500, "n_true": 0 if kind == "null" else 100, "n_called": called, "n_false": false,
        "fdp": false / max(called, 1), "tpr": None if kind == "null" else (called - false) / 100, "expected_fdr": level,
    }  # fmt: skip


def results(group: str = "T", splits: int = N) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    cases = [("null", "samples"), ("null", "cells"), ("spike", "samples")]
    each = [(k, r, m, s) for k, r in cases for m in ("model", "raw") for s in range(splits)]
    rows = [made(k, s, m, level, r, rng) for k, r, m, s in each for level in LEVELS]
    wholes = [{"kind": k, "replicates": r, "method": m, "fdr_mae": 3.0 + s} for k, r, m, s in each]
    wholes = [w | ({"coverage": 0.8} if w["method"] == "model" else {}) for w in wholes]
    bins = [
        {"kind": k, "replicates": r, "split": s, "bin": b, "expression": 10.0 ** (b - 5), "coverage": 0.8, "n": 100}
        for k, r, m, s in each
        for b in range(5)
        if m == "model"
    ]
    effects = [
        {"kind": k, "method": m, "size": size, "n": 10, "called": 5, "short": 0.1}
        for k, _, m, _ in each
        for size in (0.0, 1.0)
    ]
    null, spikes, intervals = words.null_summary(rows), words.spike_summary(rows), words.interval_summary(wholes, bins)
    analysis = {"level": 0.05, "delta": 0.5, "scale": "centred", "objectives": None, "quick": False}
    return {
        "experiment": "calibrate",
        "settings": {"groupby": "type", "groups": [group], "sample_key": "donor", "analysis": analysis},
        "seed": 0,
        "seconds": {},
        "verdict": words.verdict(null, spikes, intervals, level=0.05, replicates="samples"),
        "null": null,
        "spikes": spikes,
        "intervals": intervals,
        "fdr_mae": words.mae_summary(wholes),
        "effects": words.effect_summary(effects),
        "rows": rows,
        "warnings": [f"the samples of {group} can be halved in few ways"],
    }


def run_in(folder: Path, **changes: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "results.json").write_text(json.dumps(results() | changes))
    (folder / "manifest.json").write_text(json.dumps({"command": ["vaerdict", "calibrate"]}))
    return folder


def outline(folder: Path) -> Any:
    report = load(folder)
    return test_report.Outline(html_page(report, {picture.name: "" for picture in report.pictures()}))


# ------------------------------------------------------------------------------------------------------ the page
def test_page_is_one_file_with_its_three_figures(tmp_path):
    source = render(run_in(tmp_path)).read_text(encoding="utf-8")
    assert "http" not in source.replace("http-equiv", "")
    assert {p.stem for p in (tmp_path / "figures").glob("*.svg")} == {"achieved-fdr", "coverage", "null-discoveries"}
    page = test_report.Outline(source)
    assert all(len(a["aria-label"] or "") > 40 for tag, a in page.attributes if tag == "svg")


def test_verdict_comes_first_and_cells_as_replicates_are_told_apart(tmp_path):
    page = outline(run_in(tmp_path))
    order = [
        "Calibrated: on these data an FDR of 5%",
        "reported, samples as replicates: 0 of 8 splits",
        "reported, samples as replicates: 90% intervals hold the true LFC",
        "reported, cells as replicates: 8 of 8 splits",
        "the plain bootstrap draws the replicates of the raw counts again, without a law of their dispersion",
        "Warning: the samples",
        "Where nothing changed",
    ]
    places = [page.text.index(part) for part in order]
    assert places == sorted(places)
    assert "plain bootstrap, samples as replicates: 20" in page.text  # four times the target of five percent
    assert "the model" not in page.text
    assert words.RULE in page.text
    assert "centred scale" in page.text


def test_tables_hold_the_numbers_and_their_words(tmp_path):
    said = text(run_in(tmp_path))
    null = [line for line in said.splitlines() if line.startswith("reported, cells ") and "[63 to 100]" in line]
    assert len(null) == len(LEVELS)
    assert all(line.endswith("too many false") for line in null)
    spikes = [line for line in said.splitlines() if line.startswith("plain bootstrap, samples") and "±" in line]
    assert sum(line.endswith("too many false") for line in spikes) >= len(LEVELS)
    assert "FDR MAE): reported 6.50, plain bootstrap 6.50" in said
    assert "too narrow" in said


def test_a_run_without_planted_changes_has_a_page_of_its_own(tmp_path):
    page = outline(run_in(tmp_path, spikes=[], effects=[], fdr_mae=[]))
    assert "Where nothing changed" in page.text
    assert "Where changes were planted" not in page.text


def test_one_split_alone_has_no_error_and_no_word(tmp_path):
    single = json.loads(json.dumps(results(splits=1)).replace("NaN", "null"))
    folder = run_in(tmp_path, **single)
    render(folder)
    assert single["verdict"]["word"] == words.OPEN
    assert "Not resolved" in text(folder)


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_group_names_are_printed_and_not_obeyed(tmp_path, name):
    page = outline(run_in(tmp_path, **results(group=name)))
    assert page.tags["script"] == 1
    assert page.tags["img"] == 0
    assert "random halves of" in page.text


@pytest.mark.parametrize(
    ("changes", "message"),
    [({"verdict": None}, "holds no verdict"), ({"null": [{"method": "model"}]}, "lacks"), ({"settings": {}}, "lacks")],
)
def test_damaged_results_are_reported_as_such(tmp_path, changes, message):
    with pytest.raises(DataError, match=message):
        render(run_in(tmp_path, **changes))


# ------------------------------------------------------------------------------------------------------ the command
@pytest.fixture
def data(tmp_path) -> Path:
    simulated(n=120, null=True).write_h5ad(tmp_path / "data.h5ad")
    return tmp_path / "data.h5ad"


def test_help_documents_every_column_and_has_an_example(command):
    code, out, _ = command("calibrate", "--help")
    assert code == 0
    assert all(name in out for name in COLUMNS)
    assert "vaerdict calibrate counts.h5ad" in out


def test_a_run_writes_its_folder_says_the_verdict_first_and_goes_on(command, data, tmp_path):
    out_dir = tmp_path / "run"
    options = (data, "--groupby", "group", "--groups", "A", "B", "--splits", 1, "--spikes", 1, "--quick")
    options += ("--device", "cpu", "--out", out_dir)
    code, out, err = command("calibrate", *options)
    assert (code, err) == (0, "")
    assert out.splitlines()[0] == "Calibration: random halves of A, B"
    assert out.splitlines()[2].startswith("Not resolved: ")
    assert {"calibrate.csv", "results.json", "manifest.json", "report.html", "figures"} <= {
        path.name for path in out_dir.iterdir()
    }
    with (out_dir / "calibrate.csv").open() as file:
        table = list(csv.DictReader(file))
    assert list(table[0]) == list(COLUMNS)
    assert {(row["kind"], row["group"]) for row in table} == {(k, g) for k in ("null", "spike") for g in "AB"}
    assert "--resume" in command("calibrate", *options)[2]
    code, out, _ = command("calibrate", *options, "--resume", "--json")
    assert code == 0
    assert json.loads(out)["verdict"]["word"] == words.OPEN


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (("--groupby", "grp"), "groupby='grp' is no column of obs"),
        (("--groupby", "group", "--groups", "Z"), "is no group of 'group'"),
        (("--groupby", "group", "--sample-key", "type"), "need at least 4"),
        (("--groupby", "group", "--engine", "magic"), "choose local or ray"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_two(command, data, tmp_path, more, message):
    code, _, err = command("calibrate", data, *more, "--out", tmp_path / "bad")
    assert code == 2
    assert message in err
    assert len(err.strip().splitlines()) == 1
