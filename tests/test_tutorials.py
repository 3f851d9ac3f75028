"""The tutorials run from top to bottom, show what their text says, and are stored with current outputs."""

from __future__ import annotations

import os
import re
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("nbclient")
pytest.importorskip("ipykernel")

import nbformat

from notebooks import NOTEBOOKS, TUTORIALS, executed

PBMC = Path(os.environ.get("VAERDICT_DATA", "nowhere")) / "scrna" / "pbmc3k.h5ad"
MOST_BYTES = 400_000
# a path that begins at the root of a file system, or of installed packages
MACHINE_PATHS = re.compile(r"(?:/(?:home|root|Users|tmp|work|mnt|opt|var|usr)/|[A-Z]:\\\\Users|site-packages)")


def output_types(notebook: Any) -> list[list[tuple[str, ...]]]:
    """The types of the outputs of each code cell."""
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    types = ([(out.output_type, *sorted(out.get("data", {}))) for out in cell.outputs] for cell in code)
    return [[kind for kind, _ in groupby(own)] for own in types]  # a stream may come in several parts


def text_of(output: Any) -> str:
    """The text of an output, tables included."""
    data = output.get("data", {})
    return "\n".join([output.get("text", ""), *(data[kind] for kind in data if kind.startswith("text/"))])


def printed(notebook: Any) -> str:
    """The text of all outputs."""
    return "\n".join(text_of(out) for cell in notebook.cells if cell.cell_type == "code" for out in cell.outputs)


def complaints(notebook: Any) -> list[str]:
    """What is wrong with the stored outputs of a notebook."""
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    counts = [cell.execution_count for cell in code]
    problems = [] if counts == [*range(1, len(code) + 1)] else [f"cells were not run in order: {counts}"]
    outputs = [out for cell in code for out in cell.outputs]
    problems += ["a cell failed" for out in outputs if out.output_type == "error"]
    problems += ["a cell warns" for out in outputs if out.get("name") == "stderr"]
    text = "\n".join([*(cell.source for cell in notebook.cells), *map(text_of, outputs)])
    problems += [f"a path of some machine: {path}" for path in MACHINE_PATHS.findall(text)]
    return problems


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.name)
def test_the_stored_outputs_are_complete_and_clean(path):
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
    assert [problem.split(":")[0] for problem in complaints(notebook)] == [
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
    "stages": sorted(set(escalated.stage)),
    "selected": steps.selection[0].model,
    "three_steps_off": (answer.value - truth).abs().mean().item(),
    "three_steps_ok": int((combined.verdict == vd.Verdict.OK).sum()),
    "model_off": (truth - right).abs().mean().item(),
    "cost": {name: c.mean().item() for name, c in cost.items()},
    "draws": int(data.posterior.sizes["draw"]),
}"""


def test_a_model_of_your_own(tmp_path):
    path = TUTORIALS / "own_model.ipynb"
    notebook, facts = executed(path, tmp_path, OWN_FACTS)
    assert complaints(notebook) == []
    assert output_types(notebook) == output_types(nbformat.read(path, as_version=4))
    assert "twice the error is" in printed(notebook)
    # weights correct a poor encoder; escalation and the three steps answer for nearly all pumps
    assert facts["ok_poor"] < facts["ok"]
    assert facts["weighted_poor"] < facts["alone_poor"] / 3
    assert facts["escalated_ok"] >= 190
    assert facts["escalated_off"] < 0.02
    assert "REFINED" in facts["stages"]
    assert facts["selected"] in {"VAE", "IWAE"}
    assert facts["three_steps_ok"] >= 160
    assert facts["three_steps_off"] < 0.02
    # what is left is the error of the model, and expected loss beats treating all pumps alike
    assert facts["model_off"] > facts["three_steps_off"]
    assert facts["cost"]["least expected loss"] < min(facts["cost"]["stop all"], facts["cost"]["stop none"])
    assert facts["draws"] == 500


REJECT_FACTS = """{
    "correct": float((label == truth)[~nine].mean()),
    "rejected": [float(rejected[~nine].mean()), float(rejected[nine].mean())],
    "novel": [int(found.novel.sum()), int(nine[found.novel].sum()), int(nine.sum())],
    "cost": {name: float(cost(rule).mean()) for name, rule in rules.items()},
    "ok": int((np.asarray(evidence.verdict) == int(vd.Verdict.OK)).sum()),
    "gate": gate.passed,
}"""


def test_decide_or_reject(tmp_path):
    pytest.importorskip("sklearn")
    path = TUTORIALS / "reject.ipynb"
    notebook, facts = executed(path, tmp_path, REJECT_FACTS)
    assert complaints(notebook) == []
    assert output_types(notebook) == output_types(nbformat.read(path, as_version=4))
    assert "model disagrees with labels" in printed(notebook)
    assert facts["correct"] > 0.95
    # few rows of labelled classes are rejected, most nines are, and most are found with few false calls
    assert facts["rejected"][0] < 0.13
    assert facts["rejected"][1] > 0.85
    called, right, nines = facts["novel"]
    assert right > 0.7 * nines
    assert called - right <= 0.15 * called
    # both rules together cost least, and the error left is that of the model, whose inference is reliable
    assert min(facts["cost"], key=facts["cost"].get) == "reject both"
    assert facts["ok"] >= 50
    assert not facts["gate"]


PBMC_FACTS = """{
    "seconds": seconds,
    "up": up["gene"].tolist(),
    "down": down["gene"].tolist(),
    "leading": leading["gene"].tolist(),
    "model": result.results["model"],
    "share_ok": [row["share_ok"] for row in checked.results["model"]["diagnostics"]],
    "khat": [(row["khat"], row["khat_encoder"]) for row in checked.results["model"]["diagnostics"]],
    "correlation": float(np.corrcoef(table["lfc_mean"], plain)[0, 1]),
    "null_calls": int(null.table["is_de"].sum()),
    "calibration": calibration.verdict["fdr"],
    "few": rows,
    "first": first,
    "page": page.read_text()[:15],
    "scvi_khat": [alone.khat.median().item(), refined.khat.median().item()],
}"""


@pytest.mark.timeout(1800)  # minutes where the machine is busy
@pytest.mark.skipif(not PBMC.is_file(), reason=f"needs {PBMC.name} in the scrna folder of VAERDICT_DATA")
def test_pbmc3k(tmp_path):
    pytest.importorskip("scvi")
    path = TUTORIALS / "pbmc3k.ipynb"
    notebook, facts = executed(path, tmp_path, PBMC_FACTS)
    assert complaints(notebook) == []
    assert output_types(notebook) == output_types(nbformat.read(path, as_version=4))
    assert "Cells are the replicates" in printed(notebook)
    assert "Inference is certified" in printed(notebook)
    # no model is trained by default
    assert facts["model"] is None
    assert facts["seconds"] < 60
    # the known markers lead, each on its side
    assert {"CD79A", "MS4A1"} <= set(facts["up"][:20])
    assert {"S100A8", "S100A9"} <= set(facts["down"][:20])
    assert {"CD79A", "CD79B", "CD74", "MS4A1"} <= set(facts["up"])
    assert {"LYZ", "CST3", "FCN1"} <= set(facts["down"])
    assert {"CD79A", "MS4A1", "LYZ", "CST3"} <= set(facts["leading"])
    assert "CD79A" in facts["first"]
    # weights are reliable after refinement, those of the encoders are not: ours and scvi-tools'
    assert min(facts["share_ok"]) > 0.8
    assert all(khat < 0.7 < encoder for khat, encoder in facts["khat"])
    assert facts["scvi_khat"][1] < facts["scvi_khat"][0]
    assert facts["correlation"] > 0.9
    # a random split: every call is false
    assert facts["null_calls"] == 0
    assert facts["calibration"] in ("calibrated", "conservative")
    # few labels: a prior from other cells finds more of what all labels show, and few calls are wrong
    counts, *priors = facts["few"].values()
    assert [*facts["few"]] == ["none", "profile, both types", "profile, other types", "model, both types"]
    for answer, gain in zip(priors, (1.5, 1.2, 1.5), strict=True):
        assert answer["called with all labels too"] > gain * counts["called with all labels too"]
        assert answer["|LFC| below 0.5 with all labels"] < 0.1 * answer["called"]
        assert answer["correlation of the prediction"] > 0.5
    assert facts["page"].lower() == "<!doctype html>"
    assert not Path("pbmc3k-de").exists()
