"""Files are written completely or not at all, JSON is compact, and manifests record what really ran."""

from __future__ import annotations

import errno
import json
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from vaerdict import io


class Interrupted(Exception):
    pass


def git(folder: Path, *arguments: str) -> str:
    identity = ["-c", "user.name=Test", "-c", "user.email=test@example.org", "-c", "commit.gpgsign=false"]
    done = subprocess.run(
        ["git", *identity, "-C", str(folder), *arguments], capture_output=True, text=True, check=True, timeout=30
    )
    return done.stdout.strip()


# -------------------------------------------------------------------------------------------------------- writing
@pytest.mark.parametrize("existing", [True, False])
def test_a_writer_that_raises_leaves_the_old_file_and_nothing_else(tmp_path, existing):
    path = tmp_path / "x.csv"
    if existing:
        path.write_text("old")

    def write() -> None:
        with io.replacing(path) as partial:
            partial.write_text("half")
            raise Interrupted

    with pytest.raises(Interrupted):
        write()
    assert [p.read_text() for p in tmp_path.iterdir()] == (["old"] if existing else [])


def write_half(path: Path, error: Exception) -> None:
    with io.replacing(path) as partial:
        partial.write_text("half")
        raise error


def test_a_full_disk_is_an_error_of_files_whatever_the_writer_raises(tmp_path, monkeypatch):
    for message, free in (("I/O error: No space left on device (os error 28)", 10**9), ("cannot write", 0)):
        monkeypatch.setattr("shutil.disk_usage", lambda path, free=free: SimpleNamespace(free=free))
        with pytest.raises(OSError, match="No space left") as stop:
            write_half(tmp_path / "x", RuntimeError(message))
        assert (stop.value.errno, stop.value.filename) == (errno.ENOSPC, str(tmp_path / "x"))
        assert not list(tmp_path.iterdir())


def test_a_failed_replacement_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch):
    path = tmp_path / "x.json"
    io.write_json(path, {"a": 1})
    with pytest.raises(TypeError, match="not JSON serializable"):
        io.write_json(path, {"a": torch.ones(2)})

    def fail(source: Path, destination: Path) -> None:
        raise Interrupted

    monkeypatch.setattr("os.replace", fail)
    with pytest.raises(Interrupted):
        io.write_json(path, {"a": 2})
    assert json.loads(path.read_text()) == {"a": 1}
    assert list(tmp_path.iterdir()) == [path]


def test_the_temporary_file_keeps_the_suffix_and_is_recognised(tmp_path):
    with io.replacing(tmp_path / "deep" / "x.npy") as partial:
        np.save(partial, np.arange(3))  # appends a suffix to names without it
        assert partial.suffix == ".npy"
        assert io.is_partial(partial)
        assert not (tmp_path / "deep" / "x.npy").exists()
    assert np.load(tmp_path / "deep" / "x.npy").tolist() == [0, 1, 2]
    assert not io.is_partial(tmp_path / "deep" / "x.npy")


def test_text_and_bytes_are_written_unchanged(tmp_path):
    assert io.write_text(tmp_path / "a", "é\r\n").read_bytes() == "é\r\n".encode()
    assert io.write_text(tmp_path / "b", b"\x00\xff").read_bytes() == b"\x00\xff"


# ----------------------------------------------------------------------------------------------------------- JSON
def test_json_has_one_line_per_entry_and_per_row_of_a_table():
    value = {"seeds": list(range(100)), "settings": {"a": {"b": [1, 2]}}, "rows": [{"x": 1.5, "y": None}] * 7, "no": []}
    text = io.dumps(value)
    assert json.loads(text) == value
    assert len(text.splitlines()) == 2 + 4 + 8
    assert text.endswith("}\n")
    assert max(map(len, text.splitlines())) < 500


@pytest.mark.parametrize("value", [[], {}, [1, [2, {"a": "b"}]], "text", None, {"t": [{"a": 1}, 2]}, {"é": "ü\n"}])
def test_json_round_trips(value):
    assert json.loads(io.dumps(value)) == value


def test_non_finite_numbers_become_null(tmp_path):
    value = {
        "a": float("nan"),
        2: [float("inf"), -float("inf"), 1.5],
        "t": (1, None, True, "x"),
        "n": np.float64("nan"),
        "rows": [{"khat": float("inf")}],
    }
    io.write_json(tmp_path / "deep" / "x.json", value)
    assert json.loads((tmp_path / "deep" / "x.json").read_text()) == {
        "a": None,
        "2": [None, None, 1.5],
        "t": [1, None, True, "x"],
        "n": None,
        "rows": [{"khat": None}],
    }
    assert io.finite({"a": [float("nan"), 0.0]}) == {"a": [None, 0.0]}


# ------------------------------------------------------------------------------------------------------- manifest
def test_the_manifest_records_what_produced_the_result():
    manifest = io.manifest({"preset": "quick"}, {"grid": 1.0}, data_sha256="abc")
    assert set(manifest) == {"command", "commit", "settings", "versions", "hardware", "data_sha256", "seconds"}
    assert torch.__version__.startswith(manifest["versions"]["torch"].partition("+")[0])
    assert (manifest["settings"], manifest["data_sha256"]) == ({"preset": "quick"}, "abc")
    assert json.loads(io.dumps(manifest)) == manifest


def test_the_hash_is_that_of_the_content(tmp_path):
    (tmp_path / "x").write_bytes(b"abc")
    assert io.sha256(tmp_path / "x") == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"


@pytest.mark.parametrize(
    ("argv", "command"),
    [
        (["/home/me/.venv/bin/vaerdict", "de", "x.h5ad", "--fdr", "0.05"], "vaerdict de x.h5ad --fdr 0.05"),
        (["/lib/vaerdict/__main__.py", "demo"], "python -m vaerdict demo"),
        (["/lib/pytest/__main__.py", "-q"], "python -m pytest -q"),
        (["/home/me/analysis.py", "--quick"], "python analysis.py --quick"),
        (["/home/me/vaerdict.py"], "python vaerdict.py"),
        (["-c", "1"], "python -c ... 1"),
        ([""], "python"),
        ([], "python"),
        (["/lib/ipykernel_launcher.py", "-f", "/home/me/kernel-1.json"], "jupyter"),
    ],
)
def test_the_command_is_that_of_the_process(argv, command, monkeypatch):
    monkeypatch.setattr(sys, "argv", argv)
    assert " ".join(io.command()) == command


@pytest.mark.parametrize(
    ("arguments", "command"),
    [
        (["script.py", "a", "b c"], ["python", "script.py", "a", "b c"]),
        (["-c", "CODE", "a"], ["python", "-c", "...", "a"]),
    ],
)
def test_a_script_is_not_recorded_as_the_command_vaerdict(arguments, command, tmp_path):
    code = "import json, vaerdict.io; print(json.dumps(vaerdict.io.command()))"
    (tmp_path / "script.py").write_text(code)
    arguments = [code if argument == "CODE" else argument for argument in arguments]
    done = subprocess.run([sys.executable, *arguments], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == command


@pytest.mark.skipif(shutil.which("git") is None, reason="needs git")
def test_the_commit_is_that_of_the_repository_of_the_source(tmp_path):
    source = tmp_path / "package" / "module.py"
    source.parent.mkdir()
    source.write_text("x = 1\n")
    assert io.commit(source) is None  # not in a repository
    git(tmp_path, "init", "--quiet")
    assert io.commit(source) is None  # not tracked, as a package installed below some repository
    git(tmp_path, "add", "package")
    git(tmp_path, "commit", "--quiet", "--message", "first")
    clean = {"sha": git(tmp_path, "rev-parse", "HEAD"), "dirty": False}
    assert io.commit(source) == clean
    (tmp_path / "results.json").write_text("{}")  # not a source
    assert io.commit(source) == clean
    (tmp_path / "other.py").touch()
    assert io.commit(source) == {**clean, "dirty": True}
    (tmp_path / "other.py").unlink()
    source.write_text("x = 2\n")
    assert io.commit(source) == {**clean, "dirty": True}


def test_without_git_there_is_no_commit(monkeypatch):
    monkeypatch.setenv("PATH", "")
    assert io.commit() is None
