"""A learned prior on the page and in the terminal: how good it was, and which genes are called only thanks to it."""

from __future__ import annotations

import json

import pytest

from browsers import in_a_browser
from de_runs import NAMES, PRIOR_COLUMNS, run_in
from outline import outline
from test_de_page import driven
from vaerdict.cli import de as cli_de
from vaerdict.de import columns
from vaerdict.de.columns import TableColumn
from vaerdict.de.page import genes as de_genes
from vaerdict.de.page.document import from_run
from vaerdict.de.result import DEResult
from vaerdict.report import render, text

KINDS = ("lfc", "small", "lfc", "lfc", "flag")


@pytest.fixture(autouse=True)
def columns_of_a_prior(monkeypatch):
    """The columns of a prior are among those that the page shows."""
    known = {column.name for column in columns.DE}
    more = [TableColumn(n, n, n, k, extra=True) for n, k in zip(PRIOR_COLUMNS, KINDS, strict=True) if n not in known]
    monkeypatch.setattr(de_genes, "DE", (*columns.DE, *more))


def test_the_page_says_how_good_the_prior_was_and_marks_its_genes(tmp_path):
    folder = run_in(tmp_path, n_genes=200, prior=True)
    report = from_run(folder)
    plain = text(report)
    for part in ("How good the predicted fold changes were", "only 12 other cells", "+0.62", "by_prior"):
        assert part in plain
    data = json.loads(outline(report).scripts[0])
    first, last = data["contrasts"][0]["values"], data["contrasts"][-1]["values"]
    record = json.loads((folder / "results.json").read_text())["contrasts"][0]["prior"]
    assert sum(first["by_prior"]) == record["n_by_prior"] > 0
    assert not any(last["by_prior"])
    assert set(last["lfc_predicted"]) == {None}
    assert set(PRIOR_COLUMNS) <= {column["name"] for column in data["columns"]}


def test_without_a_prior_the_page_says_nothing_of_one(tmp_path):
    plain = text(from_run(run_in(tmp_path, n_genes=40, contrast={"prior": None})))
    assert "prior" not in plain.lower()


def test_the_terminal_marks_the_genes_called_only_thanks_to_the_prior(tmp_path):
    result = DEResult.load(run_in(tmp_path, n_genes=200, names=NAMES[:2], prior=True))
    result.table["is_de"] = result.table["is_de"].astype(bool)
    printed = cli_de.summary(result)
    first = result.discoveries(NAMES[0])
    for _, row in first[first["lfc_mean"] > 0].head(8).iterrows():
        assert f"{row['gene']}{'*' if row['by_prior'] else ''} {row['lfc_mean']:+.1f} [" in printed
    assert "* called only thanks to the prior: not called by its counts alone" in printed
    plain = DEResult.load(run_in(tmp_path / "none", n_genes=200, names=NAMES[:2]))
    assert "*" not in cli_de.summary(plain)


FILTER = """
const get = name => document.getElementById("de-" + name), found = {};
const root = document.getElementById("de");
found.hidden = [get("prior").parentElement.hidden, get("hollow").hidden];
get("prior").click(); found.rows = root.dataset.rows; found.address = location.hash;
get("volcano").focus();
get("volcano").dispatchEvent(new KeyboardEvent("keydown", { key: "ArrowRight", bubbles: true }));
found.tip = get("tip").innerText;
get("contrast").value = "2"; get("contrast").dispatchEvent(new Event("change"));
found.none = [get("prior").parentElement.hidden, get("hollow").hidden, root.dataset.rows];
document.getElementById("found").textContent = "FOUND" + JSON.stringify(found);
"""


@in_a_browser
def test_genes_called_only_thanks_to_the_prior_are_a_filter(tmp_path):
    folder = run_in(tmp_path, n_genes=200, prior=True)
    render(folder)
    found = driven(folder, FILTER)
    record = json.loads((folder / "results.json").read_text())["contrasts"][0]["prior"]
    assert found["hidden"] == [False, False]
    assert found["rows"] == str(record["n_by_prior"])
    assert "prior=1" in found["address"]
    assert "counts alone" in found["tip"]
    assert found["none"] == [True, True, "200"]
