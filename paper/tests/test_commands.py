"""The commands that the paper's package adds to `vaerdict`."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from vaerdict_paper.experiments import ppca


@pytest.mark.parametrize("name", ["reproduce", "bench"])
def test_every_command_has_help_with_an_example(command, name):
    code, out, _ = command(name, "--help")
    assert code == 0
    assert f"Example:  vaerdict {name}" in " ".join(out.replace("│", " ").split()).replace("Example: ", "Example:  ")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("reproduce", "nothing"), "no experiment 'nothing'"),
        (("reproduce", "ppca", "--preset", "huge"), "no preset 'huge'"),
        (("bench", "nothing"), "no benchmark 'nothing'"),
    ],
)
def test_unknown_names_are_one_line_and_exit_two(command, tmp_path, monkeypatch, words, message):
    monkeypatch.chdir(tmp_path)
    code, _, err = command(*words)
    assert (code, message in " ".join(err.split())) == (2, True)


def test_reproduce_resumes_and_refuses_to_mix(command, tmp_path, monkeypatch):
    tiny = replace(ppca.PRESETS["quick"], epochs=2, score_draws=50, khat_draws=100, beyond=False, curve=(16,))
    monkeypatch.setitem(ppca.PRESETS, "quick", tiny)
    words = ("reproduce", "ppca", "--out", tmp_path / "run", "--workers", 1)
    assert command(*words)[0] == 0
    first = json.loads((tmp_path / "run" / "results.json").read_text())
    code, _, err = command(*words)
    assert (code, "--resume" in err) == (2, True)
    next((tmp_path / "run" / "tasks").glob("grid*.json")).unlink()
    assert command(*words, "--resume")[0] == 0
    second = json.loads((tmp_path / "run" / "results.json").read_text())
    assert {**first, "seconds": 0} == {**second, "seconds": 0}


def test_bench_writes_ratios_with_the_machine_they_hold_for(command, tmp_path):
    code, _, _ = command("bench", "ppca", "--quick", "--out", tmp_path)
    result = json.loads((tmp_path / "ppca.json").read_text())
    assert code == 0
    assert result["hardware"]["threads"] >= 1
    assert result["versions"]["torch"]
    assert result["rows"][0]["ratio"] == pytest.approx(result["rows"][0]["peer_s"] / result["rows"][0]["ours_s"])


def test_bench_all_leaves_out_what_cannot_run_and_says_why(command, tmp_path, monkeypatch):
    monkeypatch.setattr("vaerdict_paper.benchmarks.BENCHMARKS", ("gpu", "ppca"))
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    code, out, err = command("bench", "all", "--quick", "--out", tmp_path)
    assert code == 0
    assert "gpu is skipped: it needs a CUDA device" in err
    assert "Every benchmark with a peer" in out
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ppca.json", "report.html", "results.json"]
