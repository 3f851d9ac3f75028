"""The table of what computed the committed results."""

from __future__ import annotations

import json

import pytest

from vaerdict_paper.pages.provenance import provenance
from vaerdict_paper.pages.render import update_tables

MANIFEST = {
    "command": ["vaerdict", "reproduce", "ppca", "--preset", "paper", "--out", "runs/ppca"],
    "commit": {"sha": "f" * 40, "dirty": False},
    "task_commits": [{"sha": "a" * 40, "dirty": False}, {"sha": "b" * 40, "dirty": True}],
    "versions": {"python": "3.11.7", "vaerdict": "0.2.0", "torch": "2.13.0"},
    "hardware": {"cores": 2, "accelerator": None},
    "data_sha256": "c" * 64,
    "seconds": {"grid-0": 30.0, "grid-1": 60.0},
}


def test_a_row_says_what_computed_a_run(tmp_path):
    (tmp_path / "ppca").mkdir()
    (tmp_path / "ppca" / "manifest.json").write_text(json.dumps(MANIFEST))
    (tmp_path / "unfinished").mkdir()
    (row,) = provenance(tmp_path).rows
    assert row == {
        "run": "ppca",
        "command": "vaerdict reproduce ppca --preset paper",
        "commit": "aaaaaaaa, bbbbbbbb+",
        "data": "cccccccc",
        "device": "2 CPU cores",
        "versions": "vaerdict 0.2.0, torch 2.13.0",
        "minutes": 1.5,
    }


@pytest.mark.parametrize("out", [["--out", "/a/path"], ["--out=/a/path"]])
def test_the_folder_of_a_run_is_left_out_of_its_command(out, tmp_path):
    (tmp_path / "ppca").mkdir()
    command = ["vaerdict", "reproduce", "ppca", *out, "--preset=paper"]
    (tmp_path / "ppca" / "manifest.json").write_text(json.dumps({**MANIFEST, "command": command}))
    assert provenance(tmp_path).rows[0]["command"] == "vaerdict reproduce ppca --preset=paper"


def test_every_machine_that_did_a_task_is_named(tmp_path):
    (tmp_path / "genes").mkdir()
    gpu = {
        "hardware": {"cores": 16, "accelerator": "NVIDIA H200"},
        "versions": {"vaerdict": "0.2.0", "torch": "2.11.0"},
    }
    cpu = {"hardware": {"cores": 2, "accelerator": None}, "versions": {"vaerdict": "0.2.0", "torch": "2.13.0"}}
    one_thread = {**cpu, "hardware": {**cpu["hardware"], "threads": 1}}
    (tmp_path / "genes" / "manifest.json").write_text(json.dumps({**MANIFEST, "task_machines": [gpu, cpu, one_thread]}))
    (row,) = provenance(tmp_path).rows
    assert row["device"] == "NVIDIA H200; 2 CPU cores"
    assert row["versions"] == "vaerdict 0.2.0, torch 2.11.0; vaerdict 0.2.0, torch 2.13.0"


def test_older_manifests_have_blanks(tmp_path):
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "manifest.json").write_text(json.dumps({"commit": None, "data_sha256": None, "seconds": {}}))
    (row,) = provenance(tmp_path).rows
    assert row["commit"] == row["command"] == row["data"] == "\N{EN DASH}"


def test_a_page_can_show_the_table(tmp_path):
    (tmp_path / "ppca").mkdir()
    (tmp_path / "ppca" / "manifest.json").write_text(json.dumps(MANIFEST))
    page = tmp_path / "page.md"
    page.write_text("<!-- results:provenance -->\n<!-- /results:provenance -->\n")
    assert update_tables(page, tmp_path) == ["provenance"]
    assert "| ppca | vaerdict reproduce ppca --preset paper | aaaaaaaa, bbbbbbbb+ |" in page.read_text()
