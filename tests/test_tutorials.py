"""The tutorials run from top to bottom, say what they claim, and are stored with outputs of the code they show."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from vaerdict_paper.mnist_data import data_folder

pytest.importorskip("nbclient")
pytest.importorskip("ipykernel")

import nbformat

from notebooks import EXAMPLES, NOTEBOOKS, executed

PBMC = data_folder() / "scrna" / "pbmc3k.h5ad"
MOST_BYTES = 400_000
# folders of a machine; a path that begins at the root of a file system
PLACES = re.compile(r"(?:/(?:home|root|Users|tmp|work|mnt|opt|var|usr)/|[A-Z]:\\\\Users|site-packages)")


def shape(notebook: Any) -> list[list[tuple[str, ...]]]:
    """What kinds of output each cell of code has."""
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    return [[(out.output_type, *sorted(out.get("data", {}))) for out in cell.outputs] for cell in code]


def words_of(output: Any) -> str:
    """What an output says, as text and as a table, but not as a picture."""
    data = output.get("data", {})
    return "\n".join([output.get("text", ""), *(data[kind] for kind in data if kind.startswith("text/"))])


def printed(notebook: Any) -> str:
    """Everything the cells of code say."""
    return "\n".join(words_of(out) for cell in notebook.cells if cell.cell_type == "code" for out in cell.outputs)


def complaints(notebook: Any) -> list[str]:
    """What is wrong with the stored outputs of a notebook."""
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    counts = [cell.execution_count for cell in code]
    found = [] if counts == [*range(1, len(code) + 1)] else [f"cells were not run in order: {counts}"]
    outputs = [out for cell in code for out in cell.outputs]
    found += ["a cell failed" for out in outputs if out.output_type == "error"]
    found += ["a cell warns" for out in outputs if out.get("name") == "stderr"]
    text = "\n".join([*(cell.source for cell in notebook.cells), *map(words_of, outputs)])
    found += [f"a path of some machine: {place}" for place in PLACES.findall(text)]
    return found


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.name)
def test_the_stored_outputs_are_whole_and_clean(path):
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    assert complaints(notebook) == []
    assert "png" in path.read_text()
    assert path.stat().st_size < MOST_BYTES


def test_stale_or_dirty_outputs_are_noticed():
    ran = nbformat.v4.new_code_cell("1", execution_count=2)
    ran.outputs = [
        nbformat.v4.new_output("stream", name="stderr", text="/home/someone/lib.py: DeprecationWarning"),
        nbformat.v4.new_output("error", ename="ValueError", evalue="", traceback=[]),
    ]
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell("0"), ran])
    found = complaints(notebook)
    assert [words.split(":")[0] for words in found] == [
        "cells were not run in order",
        "a cell failed",
        "a cell warns",
        "a path of some machine",
    ]


OWN_FACTS = """{
    "ok": int((posterior.verdict == vd.Verdict.OK).sum()),
    "ok_poor": int(ok.sum()),
    "alone_poor": alone.mean().item(),
    "weighted_poor": off.mean().item(),
    "escalated_ok": int((escalated.verdict == vd.Verdict.OK).sum()),
    "escalated_off": (escalated.value - exact(pump, x_test, hot)).abs().mean().item(),
    "rungs": sorted(set(escalated.rung)),
    "kept": steps.selection[0].model,
    "three_steps_off": (answer.value - truth).abs().mean().item(),
    "three_steps_ok": int((combined.verdict == vd.Verdict.OK).sum()),
    "model_off": (truth - right).abs().mean().item(),
    "cost": {name: c.mean().item() for name, c in cost.items()},
    "draws": int(data.posterior.sizes["draw"]),
}"""


def test_a_model_of_your_own(tmp_path):
    path = EXAMPLES / "own_model.ipynb"
    notebook, facts = executed(path, tmp_path, OWN_FACTS)
    assert complaints(notebook) == []
    assert shape(notebook) == shape(nbformat.read(path, as_version=4))
    assert "Monte-Carlo error" in printed(notebook)
    # the weights mend a poor encoder, escalation and the three steps give nearly all pumps an answer
    assert facts["ok_poor"] < facts["ok"]
    assert facts["weighted_poor"] < facts["alone_poor"] / 3
    assert facts["escalated_ok"] >= 190
    assert facts["escalated_off"] < 0.02
    assert {"PSIS", "REFINED"} <= set(facts["rungs"])
    assert facts["kept"] in {"VAE", "IWAE"}
    assert facts["three_steps_ok"] >= 160
    assert facts["three_steps_off"] < 0.02
    # as the text says: what is left is the model's error, and expected loss beats treating all pumps alike
    assert facts["model_off"] > facts["three_steps_off"]
    assert facts["cost"]["least expected loss"] < min(facts["cost"]["stop all"], facts["cost"]["stop none"])
    assert facts["draws"] == 500


PBMC_FACTS = """{
    "up": up["gene"].tolist(),
    "down": down["gene"].tolist(),
    "leading": leading["gene"].tolist(),
    "share_ok": [row["share_ok"] for row in result.results["diagnostics"]],
    "khat": [(row["khat"], row["khat_encoder"]) for row in result.results["diagnostics"]],
    "agreement": float(table["lfc_mean"].corr(table["raw_lfc"])),
    "null_calls": int(null.table["is_de"].sum()),
    "null_raw_calls": int(null.table["raw_is_de"].sum()),
    "first": first,
    "page": page.read_text()[:15],
    "scvi_khat": [alone.khat.median().item(), refined.khat.median().item()],
}"""


@pytest.mark.skipif(not PBMC.is_file(), reason=f"needs {PBMC.name} in the scrna folder of VAERDICT_DATA")
def test_pbmc3k(tmp_path):
    pytest.importorskip("scvi")
    path = EXAMPLES / "pbmc3k.ipynb"
    notebook, facts = executed(path, tmp_path, PBMC_FACTS)
    assert complaints(notebook) == []
    assert shape(notebook) == shape(nbformat.read(path, as_version=4))
    assert "The inference " in printed(notebook)
    assert "Cells are treated as replicates" in printed(notebook)
    # the known markers lead, each on its side
    assert {"CD79A", "MS4A1"} <= set(facts["up"][:20])
    assert {"S100A8", "S100A9"} <= set(facts["down"][:20])
    assert {"CD79A", "CD79B", "CD74", "MS4A1"} <= set(facts["up"])
    assert {"LYZ", "CST3", "FCN1"} <= set(facts["down"])
    assert {"CD79A", "S100A8", "S100A9"} <= set(facts["leading"])
    assert "CD79A" in facts["first"]
    # sound weights after refinement, far better than the encoder's own, ours and scvi-tools'
    assert min(facts["share_ok"]) > 0.8
    assert all(khat < 0.7 < encoder for khat, encoder in facts["khat"])
    assert facts["scvi_khat"][1] < facts["scvi_khat"][0]
    assert facts["agreement"] > 0.9
    # a coin toss: every call is false
    assert facts["null_calls"] == 0 < facts["null_raw_calls"]
    assert facts["page"].lower() == "<!doctype html>"
    assert not Path("pbmc3k-de").exists()
