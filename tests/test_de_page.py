"""The page of a differential expression from a made-up run whose right answers are known, also in a real browser."""

from __future__ import annotations

import base64
import csv
import hashlib
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from de_runs import COLUMNS, DELTA, HOSTILE, NAMES, contrast_record, groups_of, model_record, run_in
from outline import Outline
from outline import outline as document_outline
from vaerdict.core import DataError
from vaerdict.de.columns import DE
from vaerdict.de.page import genes as de_genes
from vaerdict.de.page.document import from_run
from vaerdict.de.page.figures import check_picture, khat_picture
from vaerdict.de.page.genes import read, script_safe
from vaerdict.de.page.truth import (
    OVERALL,
    KnownGenes,
    TruthCheck,
    truth_cards,
    truth_messages,
)
from vaerdict.report import document, markdown, render, text

SHOWN = [column for column in DE if column.title and column.name in COLUMNS]


def outline(folder: Path) -> Outline:
    return document_outline(from_run(folder))


def csv_rows(folder: Path) -> list[dict[str, str]]:
    with (folder / "de.csv").open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    """A rendered run of simulated data with a model that decides, shared by the tests that only read it."""
    folder = run_in(tmp_path_factory.mktemp("de"), simulated=True, model=model_record())
    render(folder)
    return folder


@pytest.fixture(scope="module")
def page(run) -> Outline:
    return Outline((run / "report.html").read_text(encoding="utf-8"))


# ------------------------------------------------------------------------------------------------------ the page
def test_page_is_one_file_that_loads_nothing(page, run):
    assert page.count("h1") == 1
    assert page.count("link", "img", "iframe", "object", "embed", "base") == 0
    assert not any("src" in attributes for _, attributes in page.attributes)
    hrefs = [a[key] for _, a in page.attributes for key in ("href", "xlink:href") if key in a]
    assert all(address.startswith(("#", "data:image/png")) for address in hrefs)
    source = (run / "report.html").read_text(encoding="utf-8")
    assert "https:" not in source
    assert "http:" not in source
    assert {p.name for p in (run / "figures").glob("*.svg")} == {
        "truth.svg", "rates.svg", "khat.svg", "check-zeros.svg", "check-variance.svg", "check-library.svg"
    }  # fmt: skip


def test_only_our_own_script_may_run(page):
    policy = next(a["content"] for tag, a in page.attributes if tag == "meta" and a.get("http-equiv"))
    kinds = [a.get("type") for tag, a in page.attributes if tag == "script"]
    assert kinds == ["application/json", None]
    digest = base64.b64encode(hashlib.sha256(page.scripts[1].encode()).digest()).decode()
    assert policy == f"default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"


def test_the_script_never_writes_markup(page):
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|new Function", page.scripts[1])


def test_verdict_comes_first(page):
    texts = (
        "calls are made in 3 contrasts at an expected FDR of 0.05 in each, with |LFC| at least 0.5.",
        "Genes tested: 2000 of 9999 genes: seen in at least 10 of the cells compared. Cells of both groups count alike",
        "intervals are shrunken towards no change",
        "What to do next: The list can be used at its stated FDR.",
        "Warning: 12 cells",
        "The model decides every gene",
        "Inference is certified",
        "The model fits",
        "Cells are the replicates",
        "Genes called in each contrast",
    )
    places = [page.text.index(part) for part in texts]
    assert places == sorted(places)
    for answer in ("Certified", "It fits", "Cells", "calls in 3 contrasts"):
        assert answer in page.text


def test_without_a_model_the_page_says_nothing_about_one(tmp_path):
    seen = outline(run_in(tmp_path, n_genes=40, names=NAMES[:1]))
    assert "Genes are called from the raw counts: a negative binomial likelihood per gene" in seen.text
    visible = seen.text.replace(seen.scripts[0], "").replace(seen.scripts[1], "")
    assert not re.search(r"\bmodel|inference|k-hat|predictive|refit", visible, re.IGNORECASE)


def test_groups_have_their_own_names(tmp_path):
    """Also the rest of the cells; neither A nor B stands for a group."""
    one = from_run(run_in(tmp_path / "one", n_genes=40, names=NAMES[:1]))
    assert "higher in B cells" in text(one)
    assert "cells of B cells and CD14+ Monocytes" in text(one)
    assert "log2 fold change, B cells over CD14+ Monocytes" in text(one)
    rest = from_run(run_in(tmp_path / "rest", n_genes=40, names=NAMES[1:2]))
    assert "higher in the rest" in text(rest)
    several = from_run(run_in(tmp_path / "several", n_genes=40))
    assert "higher in the second group" in text(several)
    for report in (one, rest, several):
        assert not re.search(r"\b(up|down) in A\b|\bgroup [AB]\b|\bmean [AB]\b", text(report))
    data = json.loads(outline(tmp_path / "several").scripts[0])
    assert [(c["a"], c["b"]) for c in data["contrasts"]] == [
        ("B cells", "CD14+ Monocytes"), ("B cells", "the rest"), ("NK cells", "the rest")
    ]  # fmt: skip


def test_page_can_be_used_without_eyes_and_without_a_mouse(page):
    ids = [a["id"] for _, a in page.attributes if "id" in a]
    assert len(ids) == len(set(ids))
    canvases = [a for tag, a in page.attributes if tag == "canvas"]
    assert len(canvases) == 4
    assert all(a["tabindex"] == "0" and a["aria-describedby"] in ids for a in canvases)
    assert all(len(a["aria-label"] or "") > 40 for tag, a in page.attributes if tag == "svg")
    labelled = {a.get("for") for tag, a in page.attributes if tag == "label"}
    assert "de-contrast" in labelled


def test_numbers_of_the_page_are_those_of_the_file(page, run):
    data = json.loads(page.scripts[0])
    flags = {"True": True, "False": False}
    for contrast in data["contrasts"]:
        rows = [row for row in csv_rows(run) if row["contrast"] == contrast["name"]]
        assert contrast["values"]["gene"] == [row["gene"] for row in rows]
        assert contrast["values"]["is_de"] == [flags[row["is_de"]] for row in rows]
        for key in set(contrast["values"]) - {"gene", "is_de"}:
            np.testing.assert_allclose(contrast["values"][key], [float(row[key]) for row in rows], rtol=5e-6)
    assert set(COLUMNS) - {"contrast", "group_a", "group_b"} == set(data["contrasts"][0]["values"])


def test_counts_of_the_page_are_those_of_the_file(page, run):
    rows = csv_rows(run)
    called = {name: {r["gene"] for r in rows if r["contrast"] == name and r["is_de"] == "True"} for name in NAMES}
    total = sum(map(len, called.values()))
    assert f"{total:,} calls are made in 3 contrasts" in page.text
    assert f"{total:,} calls in 3 contrasts" in page.text
    table = next(b for b in section(run, "Verdict").blocks if isinstance(b, document.Table))
    for row in table.rows:
        assert row["n"] == len(called[row["name"]])
        assert row["n_up"] + row["n_down"] == row["n"]


def section(folder: Path, heading: str) -> document.Section:
    return next(s for s in from_run(folder).sections if s.heading == heading)


def test_truth_stands_beside_the_answer(run):
    """Counted anew from the files."""
    results = json.loads((run / "results.json").read_text())
    assert from_run(run).sections[0].heading == "Truth beside the answer"
    table = next(b for b in section(run, "Truth beside the answer").blocks if isinstance(b, document.Table))
    assert [row["name"] for row in table.rows] == [*NAMES, OVERALL]
    for row in table.rows:
        rows = [r for r in csv_rows(run) if row["name"] in (r["contrast"], OVERALL)]
        truth = np.array([results["truth"][r["contrast"]][r["gene"]] for r in rows])
        called, real = np.array([r["is_de"] == "True" for r in rows]), np.abs(truth) >= DELTA
        assert (row["called"], row["false"], row["found"]) == (
            called.sum(),
            (called & ~real).sum(),
            (called & real).sum(),
        )
        assert row["fdp"] == pytest.approx((called & ~real).sum() / called.sum())
        assert row["tpr"] == pytest.approx((called & real).sum() / real.sum())
        assert row["error"] == pytest.approx(
            np.mean([abs(float(r["lfc_mean"]) - t) for r, t in zip(rows, truth, strict=True)])
        )
        held = [float(r["lfc_low"]) <= t <= float(r["lfc_high"]) for r, t in zip(rows, truth, strict=True)]
        assert row["coverage"] == pytest.approx(np.mean(held))
        assert 0.01 < row["fdp"] < 0.1


def test_the_page_opens_with_the_truth(page, run):
    assert page.text.index("The data were simulated") < page.text.index("calls are made in 3 contrasts")
    assert "% where 5% was asked for: " in page.text
    assert "cover the truth for" in text(from_run(run))


def known(*, real: int = 200, false: int = 0, inside: float = 0.9) -> TruthCheck:
    """A thousand genes of which some change by one and all are called, with so many false calls and such intervals."""
    truth = torch.zeros(1000, dtype=torch.float64)
    truth[:real] = 1.0
    called = torch.arange(1000) < real + false
    covered = torch.arange(1000) < 1000 * inside
    low = torch.where(covered, truth - 1, truth + 0.01)
    genes = KnownGenes(truth, truth + 0.1, low, truth + 1, called.double(), called)
    return TruthCheck({"A vs B": genes}, 0.5, 0.05, 0.9)


@pytest.mark.parametrize(
    ("check", "tones", "message"),
    [
        (known(), ["good", "good", "good"], "the FDR was kept"),
        (known(false=13), ["open", "good", "good"], "no more than chance explains"),
        (known(false=40), ["bad", "good", "good"], "40 of 240 calls are false, 16.7% where 5% was asked for"),
        (known(inside=0.8), ["good", "good", "open"], "for 80% of the genes: they are too narrow"),
        (known(inside=0.3), ["good", "good", "bad"], "for 30% of the genes: they are too narrow"),
        (known(real=0), ["good", "open", "good"], "No gene is called, so that no call is false. No true"),
        (known(inside=1.0), ["good", "good", "good"], "for 100% of the genes: they are wide"),
    ],
)
def test_cards_and_messages_follow_the_truth(check, tones, message):
    assert [card.tone for card in truth_cards(check)] == tones
    assert message in " ".join(truth_messages(check))


def test_truth_of_other_contrasts_or_of_no_change_is_no_trouble(tmp_path):
    other = run_in(tmp_path / "a", n_genes=40, truth={"X vs Y": {"GENE0": 1.0}})
    assert "simulated" not in text(from_run(other))
    null = run_in(tmp_path / "b", n_genes=40, names=NAMES[:1], truth={NAMES[0]: {f"GENE{i}": 0.0 for i in range(40)}})
    assert "No true change is as large as 0.5" in text(from_run(null))
    render(null)


def test_ranking_is_perfect_where_all_changed_genes_come_first():
    score = known(false=13).score("A vs B")
    assert (score.ranking, score.tpr, score.error) == (1.0, 1.0, pytest.approx(0.1))


def test_text_and_markdown_say_the_same(run):
    for output in (text(from_run(run)), markdown(from_run(run))):
        assert "calls are made in 3 contrasts" in output
        assert "What to do next" in output
        assert "Leading genes of B cells vs CD14+ Monocytes" in output
        assert "log2 fold change of mean expression" in output
        assert "Importance weights by group" in output
        assert "de-data" not in output
    short = document.brief(from_run(run))
    assert "The answer against the truth" in short
    assert "Leading genes" not in short


# ------------------------------------------------------------------------------------------------- hostile names
def hostile_run(folder: Path) -> Path:
    """Every string that a user controls is one that tries to escape."""
    bad = HOSTILE[1]
    group = {"n_cells": 3, "khat_encoder": 1.0, "khat": 0.2, "ess": 0.4, "share_ok": 0.5}
    model = model_record(
        diagnostics=[{"group": name, **group} for name in HOSTILE],
        selection=[{"model": name, "seed": 0, "khat": 0.1, "chosen": True} for name in HOSTILE],
        checks=[{"name": bad, "message": bad, "ok": False, "x": [1, 2], "observed": [1, 2]}],
    )
    return run_in(
        folder, n_genes=60, names=HOSTILE, extra=HOSTILE, warnings=list(HOSTILE), model=model, genes_tested=bad,
        settings={bad: bad, "list": list(HOSTILE)}, seconds={bad: 1.0}, scale=bad, scale_meaning=bad,
        contrast={"share_contradicted": 0.5, "n_cells_a_used": 3},
    )  # fmt: skip


def test_hostile_names_stay_text(tmp_path):
    folder = hostile_run(tmp_path)
    seen = Outline(render(folder).read_text(encoding="utf-8"))
    assert seen.count("script") == 2
    assert seen.count("img", "b") == 0
    assert not any(key.startswith("on") for _, attributes in seen.attributes for key in attributes)
    assert not re.search("[<>&]", seen.scripts[0])
    data = json.loads(seen.scripts[0])
    assert [contrast["name"] for contrast in data["contrasts"]] == list(HOSTILE)
    assert [(contrast["a"], contrast["b"]) for contrast in data["contrasts"]] == list(map(groups_of, HOSTILE))
    assert set(HOSTILE) <= set(data["contrasts"][0]["values"]["gene"])
    for name in HOSTILE:
        assert name in seen.text
    assert "<script>" not in markdown(from_run(folder))


def test_hostile_groups_stay_text(tmp_path):
    record = contrast_record(f"{HOSTILE[1]} vs {HOSTILE[2]}")
    folder = run_in(tmp_path, n_genes=30, names=(record["name"],))
    seen = Outline(render(folder).read_text(encoding="utf-8"))
    assert (seen.count("script"), seen.count("img")) == (2, 0)
    assert f"higher in {HOSTILE[1]}" in seen.text


def test_json_for_a_script_element_cannot_close_it():
    nasty = {"a": ["</script>", "<!--", "\u2028", "\\", '"', "\ud800"]}
    written = script_safe(nasty)
    assert "<" not in written
    assert written.isascii()
    assert json.loads(written) == nasty


def test_control_characters_are_replaced(tmp_path):
    folder = run_in(tmp_path, n_genes=20, names=("a vs b",), extra=("bad\x07gene\x1b[31m",))
    rows = read(folder / "de.csv")["a vs b"]["gene"]
    assert rows[-1] == "bad\ufffdgene\ufffd[31m"
    assert "\x1b" not in text(from_run(folder))


# ---------------------------------------------------------------------------------------- parts that are not there
@pytest.mark.parametrize(
    "absent",
    ["diagnostics", "selection", "checks", "truth", "warnings", "settings", "seconds", "model"],
)
def test_page_does_without_optional_parts(tmp_path, absent):
    model = model_record()
    folder = run_in(tmp_path, n_genes=30, names=NAMES[:1], model=model, simulated=True)
    results = json.loads((folder / "results.json").read_text())
    if absent in model:
        results["model"][absent] = []
    else:
        del results[absent]
    (folder / "results.json").write_text(json.dumps(results))
    seen = outline(folder)
    assert "All genes" in seen.text
    assert ("Can the inference" in seen.text) == (absent not in ("diagnostics", "model"))
    assert ("Does the model fit?" in seen.text) == (absent not in ("checks", "model"))


def test_page_does_without_means_and_curves(tmp_path):
    folder = run_in(tmp_path, n_genes=30, names=NAMES[:1], contrast={"fdr_curve": None})
    rows = csv_rows(folder)
    keep = [key for key in COLUMNS if not key.startswith(("mean_", "group_"))]
    with (folder / "de.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, keep, extrasaction="ignore")
        writer.writeheader()
        writer.writerows({**row, "lfc_mean": "" if i == 3 else row["lfc_mean"]} for i, row in enumerate(rows))
    seen = outline(folder)
    data = json.loads(seen.scripts[0])
    assert set(data["contrasts"][0]["values"]) == set(keep) - {"contrast"}
    assert data["contrasts"][0]["values"]["lfc_mean"][3] is None
    assert data["contrasts"][0]["curve"] is None


def test_no_discovery_is_said(tmp_path):
    none = {"n_discoveries": 0, "n_up": 0, "n_down": 0, "expected_fdr": 0.0}
    folder = run_in(tmp_path, n_genes=20, names=NAMES[:1], contrast=none)
    (folder / "de.csv").write_text(changed(folder, "True", "False"))
    output = text(from_run(folder))
    assert f"0 genes are called in {NAMES[0]} at an expected FDR of 0.05, with |LFC| at least 0.5.\n" in output
    assert f"No gene is called in {NAMES[0]}" in output
    assert "0 of 20" in outline(folder).text


def changed(folder: Path, old: str, new: str) -> str:
    return (folder / "de.csv").read_text().replace(old, new)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda d: (d / "de.csv").unlink(), "de.csv does not exist"),
        (lambda d: (d / "de.csv").write_text("gene,lfc_mean\nA,1\n"), "lacks the columns contrast, lfc_low"),
        (lambda d: (d / "de.csv").write_bytes((d / "de.csv").read_bytes()[:-30]), r"line 21 of .* has .* under"),
        (
            lambda d: (d / "de.csv").write_text(changed(d, "True", "maybe")),
            "'maybe' under is_de",
        ),
        (lambda d: (d / "de.csv").write_bytes(b"\xff\xfe\x00"), "cannot be read as a table"),
        (lambda d: (d / "de.csv").write_text(",".join(COLUMNS) + "\n"), "has no genes of"),
    ],
)
def test_damaged_files_are_named(tmp_path, damage, message):
    folder = run_in(tmp_path, n_genes=20, names=NAMES[:1])
    damage(folder)
    with pytest.raises(DataError, match=message):
        render(folder)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"contrasts": []}, "no contrasts"),
        ({"contrasts": [{"name": NAMES[0]}]}, "lacks something"),
        ({"verdict": None}, "holds no verdict"),
        ({"verdict": {"words": ["of an earlier version"]}}, "holds no verdict"),
    ],
)
def test_damaged_results_are_named(tmp_path, changes, message):
    with pytest.raises(DataError, match=message):
        render(run_in(tmp_path, n_genes=20, names=NAMES[:1], **changes))


def test_a_page_too_large_for_a_phone_holds_the_genes_of_smallest_q(tmp_path, monkeypatch):
    monkeypatch.setattr(de_genes, "MOST_ROWS", 60)
    folder = run_in(tmp_path, n_genes=50)
    for contrast in json.loads(outline(folder).scripts[0])["contrasts"]:
        rows = [row for row in csv_rows(folder) if row["contrast"] == contrast["name"]]
        first = sorted(rows, key=lambda row: float(row["q_value"]))[:20]
        assert contrast["values"]["gene"] == [row["gene"] for row in rows if row in first]
        assert contrast["n_genes"] == 50
        assert contrast["n_called"] == sum(row["is_de"] == "True" for row in rows)


def test_pictures_say_what_they_show():
    check = {"name": "zeros", "message": "w", "ok": False, "x": [1, 2], "observed": [0.5, 0.9],
             "predicted_low": [0.4, 0.4], "predicted_high": [0.6, 0.6]}  # fmt: skip
    assert "which fails. 50% of the observed values lie outside" in check_picture(check).alt
    groups = [{"group": "a", "khat": 0.9, "khat_encoder": None}, {"group": "b", "khat": None}]
    assert "2 groups of cells after refinement: 1 above the limit of 0.7" in khat_picture(groups).alt
    khat_picture(groups).draw()


# --------------------------------------------------------------------------------- genes not tested, rates, intervals
FEW = "seen in fewer than 10 of the cells compared"
UNTESTED = (
    (NAMES[0], "CD19", 3, FEW), (NAMES[0], "CD190", 9, FEW), (NAMES[0], "INS", 0, "not seen"),
    (NAMES[1], "INS", 0, "not seen"), *((NAMES[1], name, 1, FEW) for name in HOSTILE),
)  # fmt: skip


def test_genes_that_were_not_tested_are_packed_with_the_reason(tmp_path):
    data = json.loads(outline(run_in(tmp_path, n_genes=20, untested=UNTESTED)).scripts[0])
    assert data["untested"] == sorted({"CD19", "CD190", "INS", *HOSTILE})
    rows = []
    for contrast in data["contrasts"]:
        for reason, steps, seen in contrast["untested"]:
            genes = [data["untested"][i] for i in np.cumsum(steps) - 1]
            rows += [(contrast["name"], g, n, reason) for g, n in zip(genes, seen or [0] * len(genes), strict=True)]
    assert sorted(rows) == sorted(UNTESTED)
    assert [contrast["n_untested"] for contrast in data["contrasts"]] == [3, 1 + len(HOSTILE), 0]


def test_a_run_without_a_list_of_genes_not_tested_has_a_page(tmp_path, monkeypatch):
    assert "All genes" in outline(run_in(tmp_path / "a", n_genes=20, untested=None)).text
    monkeypatch.setattr(de_genes, "MOST_NOT_TESTED", 5)
    data = json.loads(outline(run_in(tmp_path / "b", n_genes=20, untested=UNTESTED)).scripts[0])
    assert (data["untested"], data["contrasts"][0]["untested"], data["contrasts"][0]["n_untested"]) == ([], [], 3)
    (tmp_path / "b" / "not_tested.csv").write_text("contrast,gene,cells_seen,reason\nA,B,many,x\n")
    with pytest.raises(DataError, match=r"not_tested.csv cannot be read as a table"):
        render(tmp_path / "b")


def test_the_rate_is_stated_as_it_holds(tmp_path):
    each = outline(run_in(tmp_path / "each", n_genes=200)).text
    assert "Called at an FDR of 5% in each contrast;" in each
    joint = {"joint_fdr": True, "expected_fdr": 0.0847}
    together = outline(run_in(tmp_path / "joint", n_genes=200, contrast=joint)).text
    assert "Called at an FDR of 5% over all contrasts together; 8.47% of a list are expected to be false." in together
    assert "at an expected FDR of 0.05 over all of them together" in together
    one = outline(run_in(tmp_path / "one", n_genes=200, names=NAMES[:1])).text
    assert "contrast together" not in one
    assert "in each contrast;" not in one


def test_intervals_that_are_not_shrunken_are_said_to_be(tmp_path):
    plain = text(from_run(run_in(tmp_path / "a", n_genes=20, shrinkage=False)))
    assert "not shrunken (--no-shrinkage)" in plain
    assert "shrunken towards no change" not in plain
    pairs = text(from_run(run_in(tmp_path / "b", n_genes=20, scale="pair", model=model_record())))
    assert "shrunken" not in pairs


def test_leading_genes_have_their_q_in_print(tmp_path):
    folder = run_in(tmp_path, n_genes=20, names=NAMES[:1])
    rows = csv_rows(folder)
    with (folder / "de.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        writer.writerows({**row, "is_de": True, "q_value": f"1.2345e-{300 - i}"} for i, row in enumerate(rows))
    assert "1.2e\N{MINUS SIGN}300" in text(from_run(folder))


# -------------------------------------------------------------------------------------------- in a real browser
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
in_a_browser = pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium on the path")


def dom(page: Path, address: str = "") -> Outline:
    """The page as it stands after its script ran."""
    assert CHROMIUM is not None
    command = [
        CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={page.parent / 'profile'}",
        "--virtual-time-budget=4000", "--dump-dom", page.as_uri() + address,
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, timeout=120, check=True)
    return Outline(done.stdout.decode())


def driven(run: Path, driver: str) -> dict[str, Any]:
    """What a script finds that uses the page as a reader would: in a copy, whose policy lets it run."""
    source = (run / "report.html").read_text(encoding="utf-8")
    source = re.sub(r'<meta http-equiv="Content-Security-Policy"[^>]*>', "", source)
    inserted = f"<pre id='found'></pre><script>(async () => {{{driver}}})();</script></body>"
    page = run / "driven.html"
    page.write_text(source.replace("</body>", inserted), encoding="utf-8")
    seen = dom(page)
    return json.loads(seen.text[seen.text.rindex("FOUND") + 5 :])


def view(seen: Outline) -> dict[str, str | None]:
    return next(a for _, a in seen.attributes if a.get("id") == "de")


def printed(row: dict[str, str], name: str, kind: str) -> str:
    """A cell of de.csv as the page prints it."""
    if kind == "text":
        return row[name]
    if kind == "flag":
        called = "▲ up" if float(row["lfc_mean"]) > 0 else "▼ down"
        return "no" if row[name] == "False" else called if name == "is_de" else "yes"
    number = float(row[name])
    if kind == "lfc":
        return f"{number:+.2f}".replace("-", "\N{MINUS SIGN}")
    if kind == "prob":
        return f"{number:.3f}"
    if number == 0:
        return "0"
    return re.sub(r"e-0?(\d+)", "e\N{MINUS SIGN}\\1", f"{number:.2e}") if number < 1e-3 else f"{number:#.3g}"


@in_a_browser
def test_table_follows_the_address(run):
    """Sorted by LFC downwards among genes with GENE1 in their name, in the second contrast: as the csv has it."""
    seen = dom(run / "report.html", "#contrast=1&sort=lfc_mean&dir=desc&search=gene1&extra=1")
    rows = [r for r in csv_rows(run) if r["contrast"] == NAMES[1] and "GENE1" in r["gene"]]
    rows.sort(key=lambda r: -float(r["lfc_mean"]))
    state = view(seen)
    assert (state["data-ready"], state["data-sort"], state["data-dir"]) == ("yes", "lfc_mean", "desc")
    assert state["data-rows"] == str(len(rows))
    assert [a.get("aria-sort") for tag, a in seen.attributes if tag == "th" and a.get("aria-sort")] == ["descending"]
    for row in rows[:25]:
        assert "".join(printed(row, column.name, column.kind) for column in SHOWN) in seen.text
    for title in ("mean in B cells", "mean in the rest"):
        assert title in seen.text
    assert "1\N{EN DASH}25 of " in seen.text
    points = {a["id"]: a.get("data-points") for tag, a in seen.attributes if tag == "canvas"}
    assert points == {"de-volcano": "2000", "de-ma": "2000", "de-truth": "2000", "de-fdr": None}


DRIVER = """
const get = name => document.getElementById("de-" + name), rows = () => [...get("table").tBodies[0].rows];
const genes = () => rows().map(row => row.cells[0].textContent), found = {};
const head = key => document.querySelector(`#de-table thead button[data-key="${key}"]`);
head("gene").click(); found.up = genes().slice(0, 3);
head("gene").click(); found.down = genes().slice(0, 3); found.kept = document.activeElement.dataset.key;
get("next").click(); found.page = get("where").textContent;
get("search").value = "GENE77, gene1234"; get("search").dispatchEvent(new Event("input"));
found.search = genes().sort(); found.address = location.hash;
let blob; URL.createObjectURL = given => { blob = given; return "#"; };
get("save").click(); found.csv = await blob.text();
get("search").value = ""; get("search").dispatchEvent(new Event("input"));
get("only").click(); found.only = new Set(rows().map(row => row.cells[1].textContent)).has("no");
const press = key => get("volcano").dispatchEvent(new KeyboardEvent("keydown", { key, bubbles: true }));
get("volcano").focus(); press("ArrowRight"); found.tip = get("tip").innerText;
press("Enter"); found.lookedUp = genes(); found.alt = get("volcano").getAttribute("aria-label");
const box = get("ma").getBoundingClientRect();
for (let x = 60; x < box.width && (get("tip").hidden || x === 60); x += 3) get("ma").dispatchEvent(
  new PointerEvent("pointermove", { clientX: box.left + x, clientY: box.top + box.height * 0.45 }));
found.hover = get("tip").innerText;
const heads = () => [...get("table").tHead.rows[0].cells].map(cell => cell.textContent);
found.heads = heads(); found.legend = get("up").textContent; found.meanings = get("meanings").textContent;
get("contrast").value = "2"; get("contrast").dispatchEvent(new Event("change")); found.now = get("now").textContent;
found.otherHeads = heads(); found.otherLegend = get("down").textContent;
found.otherAlt = get("volcano").getAttribute("aria-label");
found.wide = document.documentElement.scrollWidth <= document.documentElement.clientWidth;
document.getElementById("found").textContent = "FOUND" + JSON.stringify(found);
"""


@pytest.fixture(scope="module")
def found(run) -> dict[str, Any]:
    return driven(run, DRIVER)


@in_a_browser
def test_page_answers_to_mouse_and_keys(run, found):
    assert found["up"] == ["GENE0", "GENE1", "GENE2"]
    assert found["down"] == ["GENE1999", "GENE1998", "GENE1997"]
    assert found["kept"] == "gene"
    assert found["page"] == "26\N{EN DASH}50 of 2,000 genes"
    assert found["search"] == sorted(f"GENE{i}" for i in (77, *range(770, 780), 1234))
    assert "search=GENE77" in found["address"]
    assert found["only"] is False
    rows = [r for r in csv_rows(run) if r["contrast"] == NAMES[0]]
    first = min(
        (r for r in rows if r["is_de"] == "True"), key=lambda r: (float(r["q_value"]), -abs(float(r["lfc_mean"])))
    )
    name, effect, *_ = found["tip"].split("\n")
    low, mean, high = (printed(first, f"lfc_{key}", "lfc") for key in ("low", "mean", "high"))
    assert (name, effect) == (first["gene"], f"LFC {mean} [{low}, {high}]")
    assert all(first["gene"] in gene for gene in found["lookedUp"])
    up = sum(r["is_de"] == "True" and float(r["lfc_mean"]) > 0 for r in rows)
    assert f"{up} called, higher in B cells" in found["alt"]
    assert "log2 fold change, B cells over CD14+ Monocytes" in found["alt"]
    assert re.match(r"GENE\d+\nLFC .+\nq .+\ntrue LFC .+\n(not called|called, higher in )", found["hover"])
    assert found["now"].startswith(NAMES[2])
    assert {"mean in B cells", "mean in CD14+ Monocytes"} <= set(found["heads"])
    assert found["legend"] == "called, higher in B cells"
    assert (
        "mean in CD14+ Monocytes (mean_b)share of the counts of CD14+ Monocytes that are of the gene"
        in found["meanings"]
    )
    for column in SHOWN:
        assert f"({column.name})" in found["meanings"]
    assert {"mean in NK cells", "mean in the rest"} <= set(found["otherHeads"])
    assert found["otherLegend"] == "called, higher in the rest"
    assert "log2 fold change, NK cells over the rest" in found["otherAlt"]
    assert found["wide"]


@in_a_browser
def test_downloaded_table_is_that_of_the_file(run, found):
    given = list(csv.DictReader(found["csv"].splitlines()))
    rows = {r["gene"]: r for r in csv_rows(run) if r["contrast"] == NAMES[0]}
    assert len(given) == 12
    assert set(given[0]) == set(COLUMNS)
    for row in given:
        truth = rows[row["gene"]]
        assert (row["contrast"], row["is_de"]) == (NAMES[0], truth["is_de"])
        assert float(row["lfc_mean"]) == pytest.approx(float(truth["lfc_mean"]), rel=5e-6)


@in_a_browser
def test_hostile_names_do_nothing_in_a_browser(tmp_path):
    folder = hostile_run(tmp_path)
    page = render(folder)
    source = page.read_text(encoding="utf-8")
    trap = "<script>window.alert = window.confirm = window.prompt = () => { document.title = 'TRAPPED'; };</script>"
    unguarded = re.sub(r'<meta http-equiv="Content-Security-Policy"[^>]*>', trap, source)  # escaping alone must do
    (folder / "open.html").write_text(unguarded, encoding="utf-8")
    seen = dom(folder / "open.html", "#contrast=1&sort=gene&search=%3Cscript%3E")
    assert view(seen)["data-ready"] == "yes"
    assert view(seen)["data-rows"] == str(sum("<script>" in name for name in HOSTILE))
    assert "TRAPPED" not in seen.text
    assert seen.count("script") == 3
    assert seen.count("img") == 0
    for name in HOSTILE:
        assert name in seen.text


SEARCHES = """
const get = name => document.getElementById("de-" + name), found = {};
const search = text => { get("search").value = text; get("search").dispatchEvent(new Event("input"));
  return [get("untested").hidden, get("untested").textContent, get("where").textContent]; };
found.none = search(""); found.tested = search("GENE1"); found.rare = search("cd19");
found.unseen = search("INS, GENE0"); found.now = get("now").textContent; found.points = get("volcano").dataset.points;
found.axis = get("volcano").getAttribute("aria-label").split(" against ")[0];
get("contrast").value = "1"; get("contrast").dispatchEvent(new Event("change"));
found.other = search("script"); found.children = get("untested").children.length; found.joint = get("now").textContent;
found.otherAxis = get("volcano").getAttribute("aria-label").split(" against ")[0];
document.getElementById("found").textContent = "FOUND" + JSON.stringify(found);
"""


@in_a_browser
def test_a_search_says_which_genes_were_not_tested_and_small_q_values_are_drawn(tmp_path):
    joint = {"joint_fdr": True, "expected_fdr": 0.0847}
    folder = run_in(tmp_path, n_genes=60, untested=UNTESTED, contrast=joint)
    rows = csv_rows(folder)
    with (folder / "de.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        small = {0: "0.0", 1: "1e-310", 2: "3e-290", 3: "1e-40"}
        writer.writerows({**row, "q_value": small.get(i, row["q_value"])} for i, row in enumerate(rows))
    render(folder)
    found = driven(folder, SEARCHES)
    assert found["none"][:1] == found["tested"][:1] == [True]
    few = f"CD19 (seen in 3 cells; {FEW}), CD190 (seen in 9 cells; {FEW})."
    assert found["rare"] == [False, f"Not tested in this contrast: {few}", "No gene that was tested matches."]
    assert found["unseen"][:2] == [False, "Not tested in this contrast: INS (not seen)."]
    assert "3 other genes were not tested" in found["now"]
    assert "over all contrasts; 8.47% of this list are expected to be false." in found["joint"]
    assert (found["points"], found["axis"]) == ("60", "\N{MINUS SIGN}log10 q, compressed")
    assert found["otherAxis"] == "\N{MINUS SIGN}log10 q"
    assert found["other"][0] is False
    assert HOSTILE[0] in found["other"][1]
    assert found["children"] == 0
