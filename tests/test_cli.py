from __future__ import annotations

import io
import json
import logging

import numpy as np
import pytest
import torch
from rich.console import Console

from vaerdict import cli


@pytest.fixture
def weights(tmp_path):
    def save(array: object, name: str = "w.npy") -> object:
        np.save(tmp_path / name, np.asarray(array))
        return tmp_path / name

    return save


@pytest.mark.parametrize("name", ["demo", "reproduce", "diagnose", "report", "bench"])
def test_every_command_has_help_with_an_example(command, name):
    code, out, _ = command(name, "--help")
    assert code == 0
    assert "Example:" in out
    assert f"vaerdict {name}" in out


def test_version_and_bare_call(command):
    assert command("--version")[1].startswith("vaerdict ")
    assert "Commands" in command()[1]


def test_diagnose_agrees_with_the_library(command, weights):
    log_w = np.random.default_rng(0).normal(size=(1000, 3))
    code, out, _ = command("diagnose", weights(log_w), "--json")
    from vaerdict import diagnostics

    report = json.loads(out)
    assert code == 0
    assert report["draws"] == 1000
    expected = diagnostics.khat(torch.from_numpy(log_w)).tolist()
    assert [row["khat"] for row in report["rows"]] == pytest.approx(expected)
    assert {row["verdict"] for row in report["rows"]} == {"ok"}


def test_diagnose_refuses_a_heavy_tail_and_says_so(command, weights):
    heavy = np.random.default_rng(0).pareto(0.7, size=(4000, 2))
    code, out, _ = command("diagnose", weights(np.log(heavy)))
    assert code == 0
    assert "refuse 2 of 2" in out


def test_diagnose_takes_the_draws_of_one_observation(command, weights):
    assert "ok 1," in command("diagnose", weights(np.random.default_rng(0).normal(size=500)))[1]


@pytest.mark.parametrize(
    ("array", "message"),
    [
        (np.zeros((500, 1)), "one column"),
        (np.zeros((1, 500)), "one column"),
        (np.zeros((5, 5, 5)), "draws x observations"),
        (np.zeros((0, 3)), "draws x observations"),
        (np.full((100, 2), np.nan), "200 of 200 log-weights are NaN"),
        (np.full((100, 2), -np.inf), "2 observations have no particle"),
        (np.array(["a", "b"]), "numeric array"),
    ],
)
def test_diagnose_names_what_is_wrong_with_an_array(command, weights, array, message):
    code, out, err = command("diagnose", weights(array))
    assert code == 2
    assert message in " ".join(err.split())
    assert not out


def test_diagnose_names_what_is_wrong_with_a_file(command, tmp_path, weights):
    text = tmp_path / "notes.txt"
    text.write_text("no weights here")
    cut = weights(np.zeros((100, 3)), "cut.npy")
    cut.write_bytes(cut.read_bytes()[:200])
    pickled = tmp_path / "object.npy"
    np.save(pickled, np.array([{}], dtype=object), allow_pickle=True)
    for path in (text, cut, pickled):
        code, _, err = command("diagnose", path)
        assert code == 2
        assert "is no whole .npy array" in " ".join(err.split())
    for name in ("absent.npy", "runs[old].npy", "a[/x].npy"):
        code, _, err = command("diagnose", tmp_path / name)
        assert (code, f"{name} does not exist" in " ".join(err.split())) == (2, True)


def test_demo_of_ppca_writes_a_run_directory_and_tells_the_truth(command, tmp_path):
    out_dir = tmp_path / "demo"
    code, out, _ = command("demo", "--which", "ppca", "--out", out_dir, "--device", "cpu")
    results = json.loads((out_dir / "results.json").read_text())
    assert code == 0
    assert results["decision"]["error"] < 0.03
    assert results["decision"]["n_different_flagged"] == results["decision"]["n_different"]
    assert "VAE" in out
    assert "<html" in (out_dir / "report.html").read_text()
    assert json.loads((out_dir / "manifest.json").read_text())["versions"]["torch"]
    assert list((out_dir / "figures").glob("*.svg"))
    assert command("report", out_dir)[0] == 0


def test_reproduce_resumes_and_refuses_to_mix(command, tmp_path, monkeypatch):
    from dataclasses import replace

    from vaerdict_paper.experiments import ppca

    tiny = replace(ppca.PRESETS["quick"], epochs=2, score_draws=50, khat_draws=100, beyond=False, curve=(16,))
    monkeypatch.setitem(ppca.PRESETS, "quick", tiny)
    words = ("reproduce", "ppca", "--out", tmp_path / "run", "--workers", 1)
    assert command(*words)[0] == 0
    first = json.loads((tmp_path / "run" / "results.json").read_text())
    code, _, err = command(*words)
    assert (code, "--resume" in err) == (2, True)
    next((tmp_path / "run" / "parts").glob("grid*.json")).unlink()
    assert command(*words, "--resume")[0] == 0
    second = json.loads((tmp_path / "run" / "results.json").read_text())
    assert {**first, "seconds": 0} == {**second, "seconds": 0}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("reproduce", "nothing"), "no experiment 'nothing'"),
        (("reproduce", "ppca", "--preset", "huge"), "no preset 'huge'"),
        (("bench", "nothing"), "no benchmark 'nothing'"),
        (("demo", "--device", "tpu"), "choose auto, cpu or cuda"),
        (("demo", "--which", "mnist"), "demo 'mnist'; choose genes or ppca"),
        (("report", "no-such-folder"), "no-such-folder"),
    ],
)
def test_bad_words_are_one_line_and_exit_two(command, tmp_path, monkeypatch, words, message):
    monkeypatch.chdir(tmp_path)
    code, _, err = command(*words)
    assert code == 2
    assert message in " ".join(err.split())
    assert "Traceback" not in err


def test_cuda_is_refused_where_there_is_none(command, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    code, _, err = command("demo", "--device", "cuda")
    assert (code, "no CUDA device" in err) == (2, True)


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
    assert "gpu is left out: it is about a CUDA device" in err
    assert "Every benchmark with a peer" in out
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ppca.json", "report.html"]


def test_a_terminal_hears_what_a_long_unit_is_doing_and_a_pipe_does_not(monkeypatch):
    logger = logging.getLogger("vaerdict_paper.experiments.mnist")
    for terminal in (True, False):
        written = io.StringIO()
        monkeypatch.setattr(cli, "messages", Console(file=written, force_terminal=terminal))
        with cli.progress_bar():
            logger.info("training: [bold] models")
        assert ("training: [bold] models" in written.getvalue()) is terminal
    assert not logging.getLogger("vaerdict").handlers
