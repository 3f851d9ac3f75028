from __future__ import annotations

import hashlib
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from vaerdict.core import SettingError
from vaerdict.io import finite, manifest, write_json
from vaerdict.noise import seeded
from vaerdict.tasks import run_tasks, task_name


class Killed(Exception):
    pass


def work(task: dict[str, Any]) -> dict[str, Any]:
    """Numbers that depend on the task alone, and a line in its log; fails where the log's folder says so."""
    folder = Path(task["folder"])
    if (folder / f"fail-{task['seed']}").exists():
        raise Killed(f"task {task['seed']}")
    time.sleep(task.get("sleep", 0))
    with (folder / f"did-{task['seed']}").open("a") as file:
        file.write("once\n")
    matrix = torch.randn(40, 40, generator=seeded(task["seed"]))
    return {"seed": task["seed"], "value": (matrix @ matrix).sum().item(), "nothing": float("nan")}


def tasks(folder: Path, n: int = 5) -> list[dict[str, Any]]:
    return [{"stage": "grid", "seed": seed, "folder": str(folder)} for seed in reversed(range(n))]


def done(folder: Path) -> dict[str, int]:
    return {p.name.removeprefix("did-"): p.read_text().count("once") for p in folder.glob("did-*")}


def forget(folder: Path) -> None:
    for file in folder.glob("did-*"):
        file.unlink()


def test_results_come_in_the_order_given(tmp_path):
    heard: list[tuple[int, int]] = []
    run = run_tasks(
        work, tasks(tmp_path), tmp_path / "out", resume=False, workers=1, progress=lambda a, b, _: heard.append((a, b))
    )
    assert [r["seed"] for r in run.results] == [4, 3, 2, 1, 0]
    assert [r["value"] for r in run.results] == [work(u)["value"] for u in tasks(tmp_path)]
    assert run.results[0]["nothing"] is None
    assert list(run.seconds) == [task_name(u) for u in tasks(tmp_path)]
    assert all(s >= 0 for s in run.seconds.values())
    assert heard == [(i, 5) for i in range(6)]


def test_a_folder_with_parts_is_refused_unless_resumed(tmp_path):
    run_tasks(work, tasks(tmp_path, 2), tmp_path / "out", resume=False, workers=1)
    with pytest.raises(SettingError, match="out already holds parts of a run; continue it with --resume, or choose"):
        run_tasks(work, tasks(tmp_path, 2), tmp_path / "out", resume=False, workers=1)
    with pytest.raises(SettingError, match="already holds parts"):  # other tasks, but the same folder
        run_tasks(work, tasks(tmp_path, 7)[:1], tmp_path / "out", resume=False, workers=1)
    assert done(tmp_path) == {"0": 1, "1": 1}


def test_resuming_keeps_what_is_finished(tmp_path):
    first = run_tasks(work, tasks(tmp_path, 3), tmp_path / "out", resume=False, workers=1)
    heard: list[int] = []
    more = run_tasks(
        work, tasks(tmp_path, 5), tmp_path / "out", resume=True, workers=1, progress=lambda a, b, _: heard.append(a)
    )
    assert more.results[2:] == first.results
    assert done(tmp_path) == {str(s): 1 for s in range(5)}
    assert heard == [3, 4, 5]


def test_parts_of_other_settings_are_not_taken_for_these(tmp_path):
    run_tasks(work, tasks(tmp_path, 2), tmp_path / "out", resume=False, workers=1)
    other = [{**u, "epochs": 7} for u in tasks(tmp_path, 2)]
    run_tasks(work, other, tmp_path / "out", resume=True, workers=1)
    assert done(tmp_path) == {"0": 2, "1": 2}


def test_a_run_that_broke_goes_on_to_the_same_results(tmp_path):
    whole = run_tasks(work, tasks(tmp_path), tmp_path / "whole", resume=False, workers=1)
    forget(tmp_path)
    (tmp_path / "fail-1").touch()  # the fourth of five
    with pytest.raises(Killed, match="task 1"):
        run_tasks(work, tasks(tmp_path), tmp_path / "out", resume=False, workers=1)
    assert done(tmp_path) == {"4": 1, "3": 1, "2": 1}
    (tmp_path / "fail-1").unlink()
    rest = run_tasks(work, tasks(tmp_path), tmp_path / "out", resume=True, workers=1)
    assert rest.results == whole.results
    assert done(tmp_path) == {str(s): 1 for s in range(5)}


def test_two_workers_do_what_one_does_and_drop_what_has_not_begun_when_a_unit_fails(tmp_path):
    many = tasks(tmp_path, 60)
    whole = run_tasks(work, many, tmp_path / "whole", resume=False, workers=1)
    forget(tmp_path)
    (tmp_path / "fail-40").touch()
    slowly = [{**u, "sleep": 0.05} for u in many]
    with pytest.raises(Killed, match="task 40"):
        run_tasks(work, slowly, tmp_path / "out", resume=False, workers=2)
    assert 15 <= len(done(tmp_path)) < 40
    (tmp_path / "fail-40").unlink()
    rest = run_tasks(work, slowly, tmp_path / "out", resume=True, workers=1)
    assert rest.results == whole.results
    assert done(tmp_path) == {str(s): 1 for s in range(60)}


def test_names_tell_units_apart_and_do_not_depend_on_the_order_of_keys():
    task = {"stage": "grid", "k": 5, "seed": 3, "curve": (1, 2)}
    assert task_name(task).startswith("grid-5-3-")
    assert task_name(task) == task_name(dict(reversed(task.items())))
    assert task_name(task) == task_name({**task, "curve": [1, 2]})  # as it comes back from JSON
    assert task_name(task) != task_name({**task, "curve": (1, 3)})
    assert task_name({"seed": 1}) != task_name({"k": 1})


# ------------------------------------------------------------------------------------------------------- JSON
def test_numbers_that_are_not_finite_become_null(tmp_path):
    value = {
        "a": float("nan"),
        2: [float("inf"), -float("inf"), 1.5],
        "t": (1, None, True, "x"),
        "n": np.float64("nan"),
    }
    write_json(tmp_path / "deep" / "x.json", value)
    assert json.loads((tmp_path / "deep" / "x.json").read_text()) == {
        "a": None,
        "2": [None, None, 1.5],
        "t": [1, None, True, "x"],
        "n": None,
    }
    assert finite({"a": [float("nan"), 0.0]}) == {"a": [None, 0.0]}


def test_json_is_written_whole_or_not_at_all(tmp_path, monkeypatch):
    path = tmp_path / "x.json"
    write_json(path, {"a": 1})
    with pytest.raises(TypeError, match="not JSON serializable"):
        write_json(path, {"a": torch.ones(2)})

    def dies(source, destination) -> None:
        raise Killed

    monkeypatch.setattr("os.replace", dies)
    with pytest.raises(Killed):
        write_json(path, {"a": 2})
    assert json.loads(path.read_text()) == {"a": 1}
    assert not [p for p in tmp_path.glob("*.json") if p != path]  # what is half done bears another ending


def test_a_half_written_part_is_done_again(tmp_path):
    parts = tmp_path / "out" / "parts"
    parts.mkdir(parents=True)
    (parts / f"{task_name(tasks(tmp_path, 1)[0])}.json.partial").write_text('{"task"')
    run = run_tasks(work, tasks(tmp_path, 1), tmp_path / "out", resume=False, workers=1)
    assert run.results[0]["seed"] == 0


def test_the_manifest_says_what_made_the_result():
    data = torch.arange(4.0)
    said = manifest({"preset": "quick"}, {"grid": 1.0}, data=data)
    assert set(said) == {"command", "settings", "versions", "hardware", "data_sha256", "seconds"}
    assert torch.__version__.startswith(said["versions"]["torch"].partition("+")[0])
    assert said["data_sha256"] == hashlib.sha256(data.numpy().tobytes()).hexdigest()
    assert manifest({}, {})["data_sha256"] is None
    json.dumps(said)
