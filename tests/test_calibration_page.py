"""The page and the command of a calibration, from made-up results whose right answers are known."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from de_runs import HOSTILE
from outline import Outline, outline
from test_de_pipeline import simulated
from vaerdict.core import DataError
from vaerdict.de.calibration import summary
from vaerdict.de.calibration.cards import leading_cards
from vaerdict.de.calibration.page import from_run
from vaerdict.de.calibration.strata import Intervals, by_stratum, stratify
from vaerdict.de.columns import CALIBRATE, names
from vaerdict.de.options import CalibrateOptions, DEOptions
from vaerdict.options import options_of
from vaerdict.report import render, text

pytest.importorskip("anndata")
LEVELS = (0.01, 0.05, 0.1, 0.2)
N = 8


def split_row(
    kind: str, split: int, method: str, level: float, replicates: str, rng: np.random.Generator
) -> dict[str, Any]:
    """The analysis calls what it may, but with cells as replicates, as the rival, too much that is false."""
    loose = method == "edger" or (kind == "null" and replicates == "cells")
    called = int(rng.integers(40, 60)) if kind == "spike" or loose else 0
    false = called if kind == "null" else round(called * (4 * level if method == "edger" else level))
    return {
        "kind": kind, "group": "T", "split": split, "method": method, "replicates": replicates, "level": level,
        "n_genes": 500, "n_true": 0 if kind == "null" else 100, "n_called": called, "n_false": false,
        "fdp": false / max(called, 1), "tpr": None if kind == "null" else (called - false) / 100,
        "expected_fdr": None if method == "edger" else level,
        "question": "any change" if method == "edger" else "change beyond delta",
    }  # fmt: skip


def stratum_rows(kind: str, replicates: str, method: str, split: int) -> list[dict[str, Any]]:
    """The larger changes are called in every other split, and four in five intervals cover."""
    size = np.repeat([0.0, 0.6, 2.0], 100) * (kind == "spike")
    called, covering = size * (split % 2) > 1, np.arange(300) % 5 > 0
    strata = stratify(10.0 ** (np.arange(300) % 5 - 5), size, size, 0.5)
    intervals = Intervals(covering, 0.1 * np.sign(size)) if method == "reported" else None
    names = {"kind": kind, "replicates": replicates, "method": method, "split": split}
    return [{**names, **row} for row in by_stratum(strata, called, size > 0, size, intervals)]


def results(group: str = "T", splits: int = N) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    cases = [("null", "samples"), ("null", "cells"), ("spike", "samples")]
    each = [(k, r, m, s) for k, r in cases for m in ("reported", "edger") for s in range(splits)]
    rows = [split_row(k, s, m, level, r, rng) for k, r, m, s in each for level in LEVELS]
    overall = [{"kind": k, "replicates": r, "method": m, "fdr_mae": 3.0 + s} for k, r, m, s in each if m == "reported"]
    null, spikes = summary.null_summary(rows), summary.spike_summary(rows)
    strata = summary.strata_summary([row for k, r, m, s in each for row in stratum_rows(k, r, m, s)])
    settings = {"groupby": "type", "groups": [group], "sample_key": "donor", "level": 0.05, "delta": 0.5}
    settings |= {"scale": "centred"}
    return {
        "experiment": "calibrate",
        "settings": settings,
        "seed": 0,
        "seconds": {},
        "verdict": summary.verdict(null, spikes, strata, level=0.05, delta=0.5, replicates="samples"),
        "null": null,
        "spikes": spikes,
        "intervals": summary.interval_summary(strata),
        "fdr_mae": summary.mae_summary(overall),
        "strata": strata,
        "rows": rows,
        "warnings": [f"the samples of {group} can be halved in few ways"],
    }


def run_in(folder: Path, **changes: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "results.json").write_text(json.dumps(results() | changes))
    (folder / "manifest.json").write_text(json.dumps({"command": ["vaerdict", "calibrate"]}))
    return folder


# ------------------------------------------------------------------------------------------------------ the page
def test_page_is_one_file_with_its_figures(tmp_path):
    source = render(run_in(tmp_path)).read_text(encoding="utf-8")
    assert "http" not in source.replace("http-equiv", "")
    assert {p.stem for p in (tmp_path / "figures").glob("*.svg")} == {
        "achieved-fdr", "coverage", "null-discoveries", "power-expression", "power-size"
    }  # fmt: skip
    page = Outline(source)
    assert all(len(a["aria-label"] or "") > 40 for tag, a in page.attributes if tag == "svg")


def test_verdict_comes_first_and_cells_as_replicates_are_told_apart(tmp_path):
    page = outline(from_run(run_in(tmp_path)))
    order = [
        "Calibrated: an FDR of 5% means ",
        "false here, and 0 of 8 splits where nothing changed have a discovery. Of the genes that changed by 0.5 or",
        "are found: 0.0 % (se 0.00) of those that changed by 0.6 and 50.0 % (se 18.90) of those that changed by 2.",
        "Warning: the samples",
        "What does the FDR mean here?",
        "How many changed genes are found?",
        "And where nothing changed?",
        "reported, samples as replicates: 0 of 8 splits",
        "reported, samples as replicates: 90% intervals cover the true LFC",
        "reported, cells as replicates: 8 of 8 splits",
        "The other methods are tests of the same cells and genes, each judged by its own question. Any change: edger.",
        "Where nothing changed",
    ]
    places = [page.text.index(part) for part in order[:-1]] + [page.text.rindex(order[-1])]
    assert places == sorted(places)
    assert "edger, samples as replicates: 20" in page.text  # four times the target of five percent
    assert "the model" not in page.text
    assert summary.RULE in page.text
    assert "centred scale" in page.text


def test_rate_and_power_lead_and_only_judgements_have_a_symbol(tmp_path):
    rate, power, null = leading_cards(results())
    planted = next(r for r in results()["spikes"] if (r["method"], r["level"]) == ("reported", 0.05))
    assert rate.answer.startswith(f"{100 * planted['fdp']:.1f} ")
    assert (rate.tone, null.tone) == ("good", "good")
    assert (power.answer[:4], power.tone) == (f"{100 * planted['tpr']:.1f}", "plain")
    assert null.answer == f"0 of {N} splits have a call"
    cells = results()
    cells["verdict"]["replicates"] = "cells"
    assert [card.tone for card in leading_cards(cells)] == ["bad"]
    null_row = next(r for r in results()["null"] if r["level"] == 0.05)
    undone = {
        "method": "reported", "replicates": "samples", "level": 0.05, "share_called": 0.1, "share_of_calls": 0.02,
        "share_of_calls_se": None, "verdict": summary.TOO_MANY,
    }  # fmt: skip
    more = leading_cards(results() | {"mixed": [null_row], "undone": [undone]})
    assert [card.question[:7] for card in more[3:]] == ["And bet", "And whe"]
    assert (more[4].answer, more[4].tone) == ("2.0 % of the calls", "bad")
    none = results()
    next(r for r in none["spikes"] if (r["method"], r["level"]) == ("reported", 0.05))["called"] = 0.0
    assert leading_cards(none)[0].answer == "Nothing is called"


def test_tables_hold_the_numbers_and_verdicts(tmp_path):
    output = text(from_run(run_in(tmp_path)))
    null = [line for line in output.splitlines() if line.startswith("reported, cells ") and "[63 to 100]" in line]
    assert len(null) == len(LEVELS)
    assert all(line.endswith("too many false") for line in null)
    spikes = [
        line
        for line in output.splitlines()
        if line.startswith("edger, samples") and "any change" in line and "±" in line
    ]
    assert sum(line.endswith("too many false") for line in spikes) >= len(LEVELS)
    assert "FDR MAE): reported 6.50." in output
    assert "too narrow" in output


def test_strata_are_tables_of_the_page(tmp_path):
    output = text(from_run(run_in(tmp_path)))
    size, expression = output.partition("Calls and intervals by size")[2].split("Calls and intervals by expression")
    largest = [line for line in size.splitlines() if " 2.00 " in line]
    assert all(part in largest[0] for part in ("100", "50.0 ± 18.9", "80.0 ± 0.0", "0.100 ± 0.000"))
    assert [line.split()[0] for line in largest] == ["reported", "edger"]
    assert "80.0" not in largest[1]  # rivals have no intervals
    assert "achieved FDR, % ± se" not in size.partition("add up to")[0]
    assert "achieved FDR, % ± se" in expression
    assert "The intervals are shrunken towards no change" in output
    assert "cover the true LFC for 80.0 % (se 0.00) of the genes that changed by 0.5 or more." in output


def test_mixed_groups_and_undone_changes_have_their_own_sections(tmp_path):
    rng = np.random.default_rng(1)
    mixed = [split_row("mixed", s, "reported", level, "cells", rng) for s in range(N) for level in LEVELS]
    undone = [split_row("undone", s, "reported", level, "cells", rng) for s in range(N) for level in LEVELS]
    undone = [row | {"n_unchanged": 20, "n_called": 50, "n_false": 1, "fdp": 0.02} for row in undone]
    made = {"mixed": summary.null_summary(mixed, "mixed"), "undone": summary.undone_summary(undone)}
    folder = run_in(tmp_path, rows=[*results()["rows"], *mixed, *undone], **made)
    output = text(from_run(folder))
    section = output.partition("Calls of genes whose change was undone")[2].partition("Calls and intervals")[0]
    (line,) = (line for line in section.splitlines() if line.split()[2:3] == ["5"])
    assert all(part in line for part in ("20.0", "5.0 ± 0.0", "2.0 ± 0.0", "50.0", summary.COMPATIBLE))
    assert "lower bound of the FDR" in section
    assert "Discoveries between halves of groups mixed" in output
    render(folder)
    assert (folder / "figures" / "mixed-discoveries.svg").is_file()
    assert "change was undone" not in text(from_run(run_in(tmp_path / "without")))


def test_a_run_without_planted_changes_has_a_page_of_its_own(tmp_path):
    page = outline(from_run(run_in(tmp_path, spikes=[], strata=[], fdr_mae=[])))
    assert "Where nothing changed" in page.text
    assert "Where changes were planted" not in page.text


def test_one_split_alone_has_no_error_and_no_verdict(tmp_path):
    single = json.loads(json.dumps(results(splits=1)).replace("NaN", "null"))
    folder = run_in(tmp_path, **single)
    render(folder)
    assert single["verdict"]["fdr"] == summary.OPEN
    assert "Not resolved" in text(from_run(folder))


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_group_names_are_printed_and_not_obeyed(tmp_path, name):
    page = outline(from_run(run_in(tmp_path, **results(group=name))))
    assert page.tags["script"] == 1
    assert page.tags["img"] == 0
    assert "random halves of" in page.text


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"verdict": None}, "holds no verdict"),
        ({"verdict": {"words": ["of an earlier version"]}}, "holds no verdict"),
        ({"null": [{"method": "reported"}]}, "lacks"),
        ({"settings": {}}, "lacks"),
    ],
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
    assert all(name in out for name in names(CALIBRATE))
    flags = [option.flag for kind in (CalibrateOptions, DEOptions) for option in options_of(kind)]
    assert all(part in out for flag in flags for part in flag.split("/"))
    assert "--model" in out
    assert "vaerdict calibrate counts.h5ad" in out


def test_a_run_writes_its_folder_says_the_verdict_first_and_goes_on(command, data, tmp_path):
    out_dir = tmp_path / "run"
    options = (data, "--groupby", "group", "--groups", "A", "B", "--splits", 1, "--spikes", 1, "--quick")
    options += ("--mixed", 1, "--undone", 1)
    options += ("--device", "cpu", "--out", out_dir)
    code, out, err = command("calibrate", *options)
    assert (code, err) == (0, "")
    assert out.splitlines()[0] == "Calibration: random halves of A, B"
    assert out.splitlines()[2].startswith("Not resolved, because splits or calls are too few: an FDR of 5% means")
    assert {"calibrate.csv", "results.json", "manifest.json", "report.html", "figures"} <= {
        path.name for path in out_dir.iterdir()
    }
    with (out_dir / "calibrate.csv").open() as file:
        table = list(csv.DictReader(file))
    assert list(table[0]) == names(CALIBRATE)
    pairs = {("mixed", "A + B"), ("undone", "A vs B")}
    assert {(row["kind"], row["group"]) for row in table} == {(k, g) for k in ("null", "spike") for g in "AB"} | pairs
    code, out, _ = command("calibrate", *options, "--json")
    assert code == 0
    assert json.loads(out)["verdict"]["fdr"] == summary.OPEN


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (("--groupby", "grp"), "groupby='grp' is no column of obs"),
        (("--groupby", "group", "--groups", "Z"), "is no group of 'group'"),
        (("--groupby", "group", "--sample-key", "type"), "need at least 4"),
        (("--groupby", "group", "--engine", "magic"), "choose local or ray"),
        (("--groupby", "group", "--rivals", "edger,limma"), "no rival limma; there are wilcoxon"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_two(command, data, tmp_path, more, message):
    code, _, err = command("calibrate", data, *more, "--out", tmp_path / "bad")
    assert code == 2
    assert message in err
    assert len(err.strip().splitlines()) == 1
