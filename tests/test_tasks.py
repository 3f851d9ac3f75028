from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch

from vaerdict.noise import seeded
from vaerdict.tasks import run_tasks, task_name


class Killed(Exception):
    pass


def work(task: dict[str, Any]) -> dict[str, Any]:
    """Return numbers that depend on the task alone and append to its log; fail if the folder has a file fail-SEED."""
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


def times_done(folder: Path) -> dict[str, int]:
    return {p.name.removeprefix("did-"): p.read_text().count("once") for p in folder.glob("did-*")}


def clear_logs(folder: Path) -> None:
    for file in folder.glob("did-*"):
        file.unlink()


def test_results_are_in_the_order_of_the_tasks(tmp_path):
    reports: list[tuple[int, int]] = []
    run = run_tasks(
        work,
        tasks(tmp_path),
        tmp_path / "out",
        workers=1,
        progress=lambda a, b, _: reports.append((a, b)),
    )
    assert [r["seed"] for r in run.results] == [4, 3, 2, 1, 0]
    assert [r["value"] for r in run.results] == [work(task)["value"] for task in tasks(tmp_path)]
    assert run.results[0]["nothing"] is None
    assert list(run.seconds) == [task_name(task) for task in tasks(tmp_path)]
    assert all(s >= 0 for s in run.seconds.values())
    assert reports == [(i, 5) for i in range(6)]


def test_resuming_uses_stored_results(tmp_path):
    first = run_tasks(work, tasks(tmp_path, 3), tmp_path / "out", workers=1)
    reports: list[int] = []
    resumed = run_tasks(
        work, tasks(tmp_path, 5), tmp_path / "out", workers=1, progress=lambda a, b, _: reports.append(a)
    )
    assert resumed.results[2:] == first.results
    assert times_done(tmp_path) == {str(s): 1 for s in range(5)}
    assert reports == [3, 4, 5]


def test_a_run_lists_the_commits_whose_code_did_its_tasks(tmp_path, monkeypatch):
    before, after = {"sha": "before", "dirty": False}, {"sha": "after", "dirty": True}
    monkeypatch.setattr("vaerdict.tasks.commit", lambda: before)
    assert run_tasks(work, tasks(tmp_path, 3), tmp_path / "out", workers=1).commits == [before]
    monkeypatch.setattr("vaerdict.tasks.commit", lambda: after)
    assert run_tasks(work, tasks(tmp_path, 4), tmp_path / "out", workers=1).commits == [after, before]


def test_a_run_lists_the_machines_that_did_its_tasks(tmp_path, monkeypatch):
    for n_tasks, accelerator in ((3, None), (4, "a GPU")):
        monkeypatch.setattr("vaerdict.tasks.hardware", lambda accelerator=accelerator: {"accelerator": accelerator})
        run = run_tasks(work, tasks(tmp_path, n_tasks), tmp_path / "out", workers=1)
    assert {machine["hardware"]["accelerator"] for machine in run.machines} == {None, "a GPU"}
    assert len(run.machines) == 2


def test_results_of_other_settings_are_not_used(tmp_path):
    run_tasks(work, tasks(tmp_path, 2), tmp_path / "out", workers=1)
    other = [{**task, "epochs": 7} for task in tasks(tmp_path, 2)]
    run_tasks(work, other, tmp_path / "out", workers=1)
    assert times_done(tmp_path) == {"0": 2, "1": 2}


def test_a_failed_run_resumes_to_the_same_results(tmp_path):
    uninterrupted = run_tasks(work, tasks(tmp_path), tmp_path / "whole", workers=1)
    clear_logs(tmp_path)
    (tmp_path / "fail-1").touch()  # the fourth of five
    with pytest.raises(Killed, match="task 1"):
        run_tasks(work, tasks(tmp_path), tmp_path / "out", workers=1)
    assert times_done(tmp_path) == {"4": 1, "3": 1, "2": 1}
    (tmp_path / "fail-1").unlink()
    resumed = run_tasks(work, tasks(tmp_path), tmp_path / "out", workers=1)
    assert resumed.results == uninterrupted.results
    assert times_done(tmp_path) == {str(s): 1 for s in range(5)}


def test_two_workers_give_the_results_of_one_and_drop_pending_tasks_when_one_fails(tmp_path):
    many = tasks(tmp_path, 60)
    uninterrupted = run_tasks(work, many, tmp_path / "whole", workers=1)
    clear_logs(tmp_path)
    (tmp_path / "fail-40").touch()
    slow = [{**task, "sleep": 0.05} for task in many]
    with pytest.raises(Killed, match="task 40"):
        run_tasks(work, slow, tmp_path / "out", workers=2)
    assert 15 <= len(times_done(tmp_path)) < 40
    (tmp_path / "fail-40").unlink()
    resumed = run_tasks(work, slow, tmp_path / "out", workers=1)
    assert resumed.results == uninterrupted.results
    assert times_done(tmp_path) == {str(s): 1 for s in range(60)}


def test_names_are_unique_and_do_not_depend_on_the_order_of_keys():
    task = {"stage": "grid", "k": 5, "seed": 3, "curve": (1, 2)}
    assert task_name(task).startswith("grid-5-3-")
    assert task_name(task) == task_name(dict(reversed(task.items())))
    assert task_name(task) == task_name({**task, "curve": [1, 2]})  # as JSON stores it
    assert task_name(task) != task_name({**task, "curve": (1, 3)})
    assert task_name({"seed": 1}) != task_name({"k": 1})


def test_a_partially_written_result_is_ignored(tmp_path):
    folder = tmp_path / "out" / "tasks"
    folder.mkdir(parents=True)
    (folder / f"partial-{task_name(tasks(tmp_path, 1)[0])}.json").write_text('{"task"')
    run = run_tasks(work, tasks(tmp_path, 1), tmp_path / "out", workers=1)
    assert run.results[0]["seed"] == 0
    assert [path.name for path in folder.iterdir()] == [f"{task_name(tasks(tmp_path, 1)[0])}.json"]
