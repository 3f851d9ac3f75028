"""Texts in CSV files come back as they were, and none begins like a formula of a spreadsheet."""

from __future__ import annotations

import csv
import random
from pathlib import Path

import pytest
import torch

from test_de_pipeline import FAST, simulated
from vaerdict import de
from vaerdict.auditing.result import Audit
from vaerdict.csv_files import guarded, read_table, unguarded, write_table
from vaerdict.de.page import genes
from vaerdict.report.tables import LONGEST_NAME, clipped, printable

pd = pytest.importorskip("pandas")
pytest.importorskip("anndata")

ODD = (
    "NaN",
    "None",
    "",
    "NA",
    "nan",
    "null",
    "007",
    "1e5",
    "True",
    "=1+1",
    "+x",
    "-x",
    "@x",
    "'=x",
    "'x",
    "a,b",
    'c"d',
)
FORMULA = ("=", "+", "-", "@", "\t", "\r")


def test_texts_come_back_as_they_were():
    choose = random.Random(0)
    texts = {"".join(choose.choices("'=+-@\t\ra", k=choose.randrange(5))) for _ in range(2000)} | set(ODD)
    assert len(texts) > 500
    for text in texts:
        assert not guarded(text).startswith(FORMULA)
        assert unguarded(guarded(text)) == text
    assert len(set(map(guarded, texts))) == len(texts)


def test_a_table_comes_back_with_its_texts_and_numbers(tmp_path):
    table = pd.DataFrame({"gene": ODD, "x": [-0.1 * i for i in range(len(ODD))], "n": range(len(ODD)), "k": False})
    table.loc[3, "x"] = float("nan")
    write_table(tmp_path / "t.csv", table)
    pd.testing.assert_frame_equal(read_table(tmp_path / "t.csv", ("gene", "absent")), table, check_exact=True)
    assert "\n'=1+1,-0.9" in (tmp_path / "t.csv").read_text()


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> tuple[Path, de.DEResult]:
    """A run whose genes, groups and cells have odd names, and some that are not tested."""
    adata = simulated(n=60)
    names = [*ODD, "=hidden", "N" * 5000, *(f"g{i}" for i in range(adata.n_vars - len(ODD) - 2))]
    adata.var_names = names
    adata.X[:, len(ODD)] = 0
    adata.obs["group"] = adata.obs["group"].map({"A": "=A", "B": "long " * 1000, "C": "NA"})
    result = de.differential_expression(adata, "group", pairs=[("=A", "NA"), ("=A", "long " * 1000)], **FAST)
    out = tmp_path_factory.mktemp("odd")
    result.report(out)
    return out, result


def test_odd_names_of_genes_and_groups_survive_saving(folder):
    out, result = folder
    loaded = de.DEResult.load(out)
    pd.testing.assert_frame_equal(loaded.table, result.table, check_exact=True)
    pd.testing.assert_frame_equal(loaded.not_tested, result.not_tested)
    assert set(ODD) <= set(loaded.table["gene"])
    with (out / "de.csv").open(newline="") as file:
        texts = [row[key] for row in csv.DictReader(file) for key in ("contrast", "group_a", "group_b", "gene")]
    assert not any(text.startswith(FORMULA) for text in texts)


def test_the_page_knows_odd_names_and_clips_endless_ones(folder):
    out, _ = folder
    read = genes.read(out / "de.csv")
    assert next(iter(read)) == "=A vs NA"
    assert set(ODD) <= set(read["=A vs NA"]["gene"])
    assert genes.read_not_tested(out / "not_tested.csv")["=A vs NA"]["not seen"] == [("=hidden", 0)]
    page = (out / "report.html").read_text()
    assert "N" * (LONGEST_NAME - 1) + "\\u2026" in page  # as JSON spells it
    assert "N" * (LONGEST_NAME + 1) not in page


def test_long_names_are_clipped_and_ordinary_texts_are_not():
    assert clipped("long " * 1000) == ("long " * 1000)[: LONGEST_NAME - 1] + "…"
    assert clipped("CD19") == "CD19"
    sentence = "word " * 500 + "/".join(["folder"] * 30)
    assert printable(sentence) == sentence
    assert len(printable("N" * 5000)) == LONGEST_NAME + 1


def test_names_of_an_audit_are_guarded():
    columns = {
        key: torch.zeros(2, dtype=torch.long if key.startswith("verdict") else torch.float64)
        for key in ("khat_encoder", "ess_encoder", "verdict_encoder", "khat", "ess", "verdict", "elbo", "iwelbo")
    }
    columns |= {key: torch.zeros(2) for key in ("lower", "upper")}
    lines = Audit({}, columns, ["=g", None], ["-cell", "c"])._table().splitlines()
    assert lines[1].startswith("'-cell,'=g,")
    assert lines[2].startswith("c,,")
