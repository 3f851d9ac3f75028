"""The commands `vaerdict reproduce` and `vaerdict bench`."""

from __future__ import annotations

import io
import json
from dataclasses import replace

import pytest
import torch
from rich.console import Console

from vaerdict.cli import progress
from vaerdict_paper import benchmarks
from vaerdict_paper.experiments import mnist, ppca


@pytest.mark.parametrize("name", ["reproduce", "bench"])
def test_every_command_has_help_with_an_example(command, name):
    code, out, _ = command(name, "--help")
    assert code == 0
    assert "Example:" in out
    assert f"vaerdict {name}" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("reproduce", "nothing"), "no experiment 'nothing'"),
        (("reproduce", "ppca", "--preset", "huge"), "no preset 'huge'"),
        (("bench", "nothing"), "no benchmark 'nothing'"),
        (("bench", "psis", "--against", "."), "name the root of another checkout"),
    ],
)
def test_bad_arguments_are_one_line_and_exit_two(command, tmp_path, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    code, _, err = command(*arguments)
    assert code == 2
    assert message in " ".join(err.split())
    assert "Traceback" not in err


def test_reproduce_resumes_and_refuses_to_mix(command, tmp_path, monkeypatch):
    tiny = replace(ppca.PRESETS["quick"], epochs=2, score_draws=50, khat_draws=100, beyond=False, curve=(16,))
    monkeypatch.setitem(ppca.PRESETS, "quick", tiny)
    arguments = ("reproduce", "ppca", "--out", tmp_path / "run", "--workers", 1)
    assert command(*arguments)[0] == 0
    first = json.loads((tmp_path / "run" / "results.json").read_text())
    next((tmp_path / "run" / "tasks").glob("grid*.json")).unlink()
    code, _, err = command(*arguments, "--seeds", 1)
    assert (code, "holds a finished run" in err, "--force" in err) == (2, True, True)
    assert command(*arguments)[0] == 0
    second = json.loads((tmp_path / "run" / "results.json").read_text())
    assert {**first, "seconds": 0} == {**second, "seconds": 0}


def test_bench_writes_ratios_with_their_machine(command, tmp_path):
    code, out, _ = command("bench", "ppca", "--quick", "--out", tmp_path)
    result = json.loads((tmp_path / "ppca.json").read_text())
    assert code == 0
    assert "our own code with one thing changed" in out
    assert result["hardware"]["threads"] >= 1
    assert result["versions"]["torch"]
    assert result["rows"][0]["ratio"] == pytest.approx(result["rows"][0]["peer_s"] / result["rows"][0]["ours_s"])


@pytest.mark.parametrize("options", [(), ("--json",)])
def test_all_benchmarks_write_a_folder_that_report_knows(command, tmp_path, monkeypatch, options):
    timed = {"kind": "ablation", "case": "grid", "differs": "stacking", "ours_s": 2.0, "peer": "eager", "peer_s": 10.0}
    timed["ratio"] = 5.0
    monkeypatch.setattr(benchmarks, "BENCHMARKS", ("gpu", "ppca"))
    monkeypatch.setattr("vaerdict_paper.benchmarks.ppca.run", lambda *, quick, progress: [timed])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    code, out, err = command("bench", "all", "--quick", "--out", tmp_path, *options)
    assert code == 0
    assert "gpu is skipped: it needs a CUDA device" in err
    assert options or "Both sides of a comparison were timed in the same run." in out
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ppca.json", "report.html", "results.json"]
    assert command("report", tmp_path)[0] == 0


def test_the_messages_of_a_long_task_are_shown(monkeypatch):
    written = io.StringIO()
    monkeypatch.setattr(progress, "messages", Console(file=written))
    with progress.progress_bar():
        mnist.log.info("training: [bold] models")
    assert written.getvalue() == "[0:00] training: [bold] models\n"
