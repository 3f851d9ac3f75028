from __future__ import annotations

import errno
import io
import json
import logging
import subprocess
import sys
import time

import numpy as np
import pytest
import torch
from rich.console import Console

from vaerdict.cli import app, progress


@pytest.fixture
def weights(tmp_path):
    def save(array: object, name: str = "w.npy") -> object:
        np.save(tmp_path / name, np.asarray(array))
        return tmp_path / name

    return save


@pytest.mark.parametrize("name", ["demo", "de", "calibrate", "audit", "diagnose", "report"])
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
    assert code == 1
    assert "refuse 2 of 2" in out
    assert command("diagnose", weights(np.log(heavy)), "--json")[0] == 1


def test_diagnose_suspects_a_transposed_array_and_shows_no_negative_threshold(command, weights):
    log_w = np.random.default_rng(0).normal(size=(5, 300))
    code, out, err = command("diagnose", weights(log_w))
    assert code == 1
    assert "5 draws of 300 observations; if it is the reverse, transpose the array." in " ".join(err.split())
    assert "5 draws; too few for any k-hat" in out
    _, out, err = command("diagnose", weights(log_w), "--json")
    assert json.loads(out)["khat_threshold"] is None
    assert "transpose" in err
    assert "transpose" not in command("diagnose", weights(np.random.default_rng(0).normal(size=(1000, 3))))[2]


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


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("demo", "--device", "tpu"), "choose auto, cpu or cuda"),
        (("report", "no-such-folder"), "no-such-folder"),
    ],
)
def test_bad_words_are_one_line_and_exit_two(command, tmp_path, monkeypatch, words, message):
    monkeypatch.chdir(tmp_path)
    code, _, err = command(*words)
    assert code == 2
    assert message in " ".join(err.split())
    assert "Traceback" not in err


def test_the_version_is_printed_without_heavy_imports():
    code = (
        "import sys, time; sys.argv = ['vaerdict', '--version']\n"
        "from vaerdict.cli import main\n"
        "try: main()\n"
        "except SystemExit: pass\n"
        "heavy = {'torch', 'numpy', 'scipy', 'pandas', 'anndata', 'matplotlib'} & sys.modules.keys()\n"
        "print(time.process_time(), sorted(heavy))"
    )
    done = [subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True) for _ in range(3)]
    assert all(each.stdout.splitlines()[0].startswith("vaerdict ") for each in done)
    assert all(each.stdout.splitlines()[1].endswith(" []") for each in done)
    assert min(float(each.stdout.splitlines()[1].split()[0]) for each in done) < 0.3


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (OSError(errno.ENOSPC, "No space left on device", "run/de.csv"), "run/de.csv: No space left on device; free"),
        (OSError(errno.EROFS, "Read-only file system", "run"), "run: Read-only file system; name a file or folder"),
        (OSError("truncated\nfile"), "truncated file."),
    ],
)
def test_errors_of_files_are_one_line_and_exit_two(command, monkeypatch, tmp_path, error, message):
    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr("vaerdict.demo.run", fail)
    code, out, err = command("demo", "--out", tmp_path / "run")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith(f"error: {message}")


@pytest.mark.parametrize("place", ["file/run", "/proc/run"])
def test_a_folder_that_cannot_be_made_is_refused_before_anything_is_computed(command, monkeypatch, tmp_path, place):
    (tmp_path / "file").write_text("")
    monkeypatch.setattr("vaerdict.de.analysis.read", None)
    code, out, err = command("demo", "--out", tmp_path / place)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert "name a file or folder that can be used" in err


def test_cuda_is_refused_where_there_is_none(command, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    code, _, err = command("demo", "--device", "cuda")
    assert (code, "no CUDA device" in err) == (2, True)


def written(monkeypatch, *, terminal: bool) -> str:
    """What is written about a long task that reports progress and logs a message."""
    text = io.StringIO()
    monkeypatch.setattr(progress, "messages", Console(file=text, force_terminal=terminal, width=120))
    with progress.progress_bar() as report:
        report(1, 4, "cells read")
        logging.getLogger("vaerdict.training.loop").info("training: [bold] models")
        report(2, 4, "cells read")
        time.sleep(0 if terminal else 1.2)
    assert not logging.getLogger("vaerdict").handlers
    return text.getvalue()


def test_a_terminal_shows_bars_with_the_remaining_time_and_messages(monkeypatch):
    shown = written(monkeypatch, terminal=True)
    assert "training: [bold] models" in shown
    assert "cells read" in shown
    assert "left" in shown


def test_without_a_terminal_lines_tell_elapsed_and_remaining_time(monkeypatch):
    monkeypatch.setattr(progress, "FIRST_S", 0.5)
    lines = written(monkeypatch, terminal=False).splitlines()
    assert lines[0] == "[0:00] training: [bold] models"
    assert lines[1].startswith("[0:01] cells read: 2 of 4, about ")
    assert lines[1].endswith(" left")


def test_lines_become_rarer_and_come_without_progress_too():
    now, lines = [0.0], list[tuple[float, str]]()
    log = progress.Lines(lambda text: lines.append((now[0], text)), clock=lambda: now[0])
    for second in range(1, 3601):
        now[0] = second
        log.tick()
        if second == 600:
            log.progress(0, 1, "components")
    times = [at for at, _ in lines]
    assert times[:3] == [10, 20, 30]
    assert times[-1] - times[-2] > 150
    assert lines[0][1] == "[0:10] at work"
    assert "components" in lines[-1][1]


def test_commands_of_the_paper_say_how_to_get_them_where_it_is_absent(command, monkeypatch):
    monkeypatch.setattr(app, "entry_points", lambda group: ())
    for name in app.PAPER:
        code, _, err = command(name, "ppca", "--preset", "quick")
        assert (code, err.count("\n")) == (2, 1)
        assert f"`vaerdict {name}` comes with the reproduction of the paper" in err
        assert "pip install ./paper" in err
    assert "reproduce" not in command("--help")[1]
