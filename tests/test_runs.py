"""What may be written into a folder: nothing that is not ours, and no run of other data or settings."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from test_de_pipeline import simulated
from vaerdict import de, demo
from vaerdict.core import SettingError
from vaerdict.runs import RUN, RunFolder

pytest.importorskip("anndata")

SAME = {"data": "a", "settings": {"delta": 0.5, "groupby": "type"}}


def claim(out: Path, experiment: str = "de", *, force: bool = False, **changes: Any) -> None:
    RunFolder.of(out, experiment, force=force).claim({**SAME, **changes})


def finish(out: Path, experiment: str = "de") -> None:
    (out / "results.json").write_text(json.dumps({"experiment": experiment}))


# ------------------------------------------------------------------------------------------------------- the folder
@pytest.mark.parametrize("exists", [False, True])
def test_a_new_or_empty_folder_is_taken_and_the_same_run_goes_on(tmp_path, exists):
    out = tmp_path / "a" / "run"
    if exists:
        out.mkdir(parents=True)
    claim(out)
    claim(out)
    finish(out)
    claim(out)
    assert json.loads((out / RUN).read_text()) == {"experiment": "de", **SAME}


@pytest.mark.parametrize("finished", [False, True])
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"data": "b"}, "run of other data; choose another out=, or replace it with force=True"),
        ({"settings": {"delta": 1.0, "groupby": "type"}}, r"run with other settings \(delta=0.5\); choose"),
        ({"settings": {"delta": 0.5, "groupby": "type", "new": 1}}, "run with other settings; choose"),
        ({"model": "m", "data": "b"}, "run of other data and of other model; choose"),
    ],
)
def test_a_run_of_other_data_or_settings_is_refused_and_replaced_by_force(tmp_path, changes, message, finished):
    claim(tmp_path)
    (tmp_path / "stages").mkdir()
    (tmp_path / "de.csv").write_text("old")
    if finished:
        finish(tmp_path)
    state = "a finished" if finished else "an unfinished"
    with pytest.raises(SettingError, match=f"holds {state} {message}"):
        claim(tmp_path, **changes)
    assert (tmp_path / "de.csv").read_text() == "old"
    (tmp_path / "notes.txt").write_text("mine")
    claim(tmp_path, force=True, **changes)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["notes.txt", RUN]


def test_a_run_that_does_not_say_its_settings_is_refused(tmp_path):
    finish(tmp_path)
    with pytest.raises(SettingError, match="holds a finished run that does not say of which data and settings"):
        claim(tmp_path)


def test_a_run_of_another_experiment_is_refused_and_replaced_by_force(tmp_path):
    claim(tmp_path, "calibrate")
    with pytest.raises(SettingError, match=r"holds results of 'calibrate', not of 'de'; .* force=True"):
        claim(tmp_path)
    claim(tmp_path, force=True)
    assert json.loads((tmp_path / RUN).read_text())["experiment"] == "de"


def test_files_of_others_are_refused_and_never_removed(tmp_path):
    for name in ("a.txt", "b.txt", "c.txt", "de.csv", "tasks"):
        (tmp_path / name).write_text("mine")
    (tmp_path / "results.json").write_text('["of another program"]')
    with pytest.raises(SettingError, match=r"files of no run \(a.txt, b.txt, c.txt, ...\); .* beside them with force"):
        claim(tmp_path)
    claim(tmp_path, force=True)
    assert sum(path.read_text() == "mine" for path in tmp_path.iterdir()) == 5


def test_a_file_that_a_killed_process_left_is_no_file_of_others(tmp_path):
    (tmp_path / f"partial-{RUN}").write_text("{")
    claim(tmp_path)


def test_a_file_in_place_of_the_folder_is_an_error_of_files(tmp_path):
    (tmp_path / "run").write_text("")
    for out in (tmp_path / "run", tmp_path / "run" / "below"):
        with pytest.raises(NotADirectoryError):
            RunFolder.of(out, "de")


# ------------------------------------------------------------------------------------------------------- functions
def test_functions_refuse_what_is_finished_and_replace_it_by_force(tmp_path):
    adata, other = simulated(n=60), simulated(n=60, seed=5)
    first = de.differential_expression(adata, "group", "A", "B", out=tmp_path)
    written = (tmp_path / "de.csv").read_bytes()
    for data, options in ((adata, {"delta": 1.0}), (other, {}), (adata, {"pairs": [("A", None)]})):
        sides = () if "pairs" in options else ("A", "B")
        with pytest.raises(SettingError, match=r"holds a finished run .* replace it with force=True"):
            de.differential_expression(data, "group", *sides, out=tmp_path, **options)
    assert (tmp_path / "de.csv").read_bytes() == written
    de.differential_expression(adata, "group", "A", "B", out=tmp_path)
    assert (tmp_path / "de.csv").read_bytes() == written
    de.differential_expression(adata, "group", "A", "B", out=tmp_path, delta=1.0, force=True)
    assert de.DEResult.load(tmp_path).results["settings"]["delta"] == 1.0
    first.save(tmp_path)  # by hand: the folder no longer says that it holds the run with delta=1
    with pytest.raises(SettingError, match="does not say of which data"):
        de.differential_expression(adata, "group", "A", "B", out=tmp_path, delta=1.0)


# -------------------------------------------------------------------------------------------------------- commands
@pytest.fixture
def data(tmp_path):
    """Two files of cells."""
    for name, seed in (("one.h5ad", 0), ("two.h5ad", 5)):
        simulated(n=60, seed=seed).write_h5ad(tmp_path / name)
    return tmp_path


@pytest.fixture
def small_demo(monkeypatch):
    for name, value in {"N_CELLS": 150, "N_GENES": 30, "TYPES": {"x": 3, "y": 2, "z": 2}}.items():
        monkeypatch.setattr(demo, name, value)


DE = ("--groupby", "group", "--groups", "A", "B", "--device", "cpu")
CALIBRATE = ("--groupby", "group", "--groups", "A", "--splits", 1, "--spikes", 0, "--device", "cpu")


@pytest.mark.parametrize(("name", "words"), [("de", DE), ("calibrate", CALIBRATE)])
def test_commands_go_on_with_the_same_words_and_refuse_others(command, data, name, words):
    out, one, two = data / "run", data / "one.h5ad", data / "two.h5ad"
    assert command(name, one, *words, "--out", out)[0] == 0
    before = {path: path.read_bytes() for path in out.rglob("*.csv")}
    assert command(name, one, *words, "--out", out)[0] == 0
    for file, more in ((two, ()), (one, ("--delta", 1.0)), (one, ("--seed", 3))):
        code, _, err = command(name, file, *words, *more, "--out", out)
        assert (code, err.count("\n")) == (2, 1)
        assert "holds a finished run" in err
        assert "choose another --out, or replace it with --force." in err
    assert {path: path.read_bytes() for path in out.rglob("*.csv")} == before
    assert command(name, one, *words, "--delta", 1.0, "--out", out, "--force")[0] == 0
    assert json.loads((out / "results.json").read_text())["settings"]["delta"] == 1.0


@pytest.mark.parametrize("name", ["de", "calibrate", "demo", "annotate", "audit", "reproduce", "bench"])
def test_every_command_refuses_files_of_others(command, data, small_demo, name):
    out, file = data / "mine", data / "one.h5ad"
    out.mkdir()
    (out / "thesis.tex").write_text("years of work")
    words = {
        "de": (file, *DE),
        "calibrate": (file, *CALIBRATE),
        "demo": ("--device", "cpu"),
        "annotate": (file, file, "--labels", "group"),
        "audit": (data, file),
        "reproduce": ("bivariate",),
        "bench": ("psis", "--quick"),
    }[name]
    code, _, err = command(name, *words, "--out", out)
    assert (code, err.count("\n")) == (2, 1)
    assert "holds files of no run (thesis.tex); choose another --out, or write beside them with --force." in err
    assert [path.name for path in out.iterdir()] == ["thesis.tex"]


def test_the_demo_does_not_replace_a_run(command, data, small_demo):
    out = data / "run"
    assert command("de", data / "one.h5ad", *DE, "--out", out)[0] == 0
    before = (out / "de.csv").read_bytes()
    code, _, err = command("demo", "--device", "cpu", "--out", out)
    assert (code, "holds a finished run" in err, "--force" in err) == (2, True, True)
    assert (out / "de.csv").read_bytes() == before
    assert command("demo", "--device", "cpu", "--out", out, "--force")[0] == 0
    assert json.loads((out / "results.json").read_text())["truth"]


def test_a_benchmark_that_is_finished_is_shown_and_measured_again_by_force(command, tmp_path, monkeypatch):
    pytest.importorskip("vaerdict_paper")
    measured: list[float] = []

    def run(*, quick: bool, progress: object) -> Any:
        measured.append(1.0)
        times = {"ours_s": 2.0, "peer": "eager", "peer_s": 10.0, "ratio": 5.0}
        yield {"kind": "ablation", "case": "grid", "differs": "stacking", **times}
        if len(measured) == 1:
            raise KeyboardInterrupt

    monkeypatch.setattr("vaerdict_paper.benchmarks.ppca.run", run)
    words = ("bench", "ppca", "--out", tmp_path, "--quick")
    assert command(*words)[0] != 0
    assert not json.loads((tmp_path / "ppca.json").read_text())["complete"]
    for expected in (2, 2):  # what was stopped is measured again, what is finished is not
        assert command(*words)[0] == 0
        assert len(measured) == expected
    code, _, err = command("bench", "ppca", "--out", tmp_path)
    assert (code, "was measured at smaller sizes (--quick)" in err) == (2, True)
    assert command(*words, "--force")[0] == 0
    assert len(measured) == 3


# -------------------------------------------------------------------------------------------------------- messages
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--groupby", "group", "--groups", "A", "B", "FILE"), "'FILE' stands after --groups, whose names end only at"),
        (("FILE", "--groupby", "group", "--groups", "A", "A"), "group 'A' is compared with itself"),
        (("FILE", *DE, "--batch-key", "batch", "--pair-by", "type"), "leave --batch-key out"),
        (("FILE", *DE, "--min-cells", 1000), "at least 2 are needed: choose --min-cells below 1000, or compare"),
        (("FILE", *DE, "--fdr", 1.5), "--fdr=1.5 strictly between 0 and 1"),
        (("FILE", *DE, "--refits", 2), "add --scale='pair' or leave them out"),
    ],
)
def test_messages_of_the_command_name_its_options(command, data, words, message):
    words = [str(data / "one.h5ad") if word == "FILE" else word for word in words]
    code, out, err = command("de", *words, "--out", data / "run")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert message.replace("FILE", str(data / "one.h5ad")) in err
    assert not (data / "run").exists()


def test_cells_without_counts_are_said_to_have_none(command, data):
    adata = simulated(n=60)
    adata.X[(adata.obs["group"] == "A").to_numpy()] = 0
    adata.write_h5ad(data / "empty.h5ad")
    code, _, err = command("de", data / "empty.h5ad", *DE, "--out", data / "run")
    assert (code, "group A has 0 cells with counts; at least 3 are needed" in err) == (2, True)


def test_a_stopped_run_leaves_no_half_written_file(command, data, monkeypatch):
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device", "de.parquet")

    monkeypatch.setattr("pandas.DataFrame.to_parquet", full)
    out = data / "run"
    code, _, err = command("de", data / "one.h5ad", *DE, "--out", out)
    assert (code, err.count("\n"), "No space left on device; free some space" in err) == (2, 1, True)
    assert not list(out.glob("partial-*"))
    assert not (out / "results.json").exists()
    monkeypatch.undo()
    assert np.isfinite(de.DEResult.load(_again(command, data)).table["lfc_mean"]).all()


def _again(command, data: Path) -> Path:
    words = (data / "one.h5ad", *DE, "--out", data / "run")
    assert command("de", *words)[0] == 0
    return data / "run"
