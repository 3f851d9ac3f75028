"""Engines give the same results, lose none when a worker dies, and stop when closed."""

from __future__ import annotations

import importlib.util
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from vaerdict.cli.app import build
from vaerdict.cli.common import choose_engine
from vaerdict.core import SettingError
from vaerdict.engines import Engine, LazySequence, Local, Ray, Threads, one_thread, ordered_results
from vaerdict.noise import seeded
from vaerdict.tasks import run_tasks
from vaerdict_paper.experiments.reproduce import reproduce

needs_ray = pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="needs Ray: pip install 'vaerdict[ray]'")
quiet = pytest.mark.filterwarnings(
    "ignore:.*will no longer override accelerator visible devices:FutureWarning",
    "ignore:unclosed:ResourceWarning",
    "ignore:subprocess .* is still running:ResourceWarning",
)


class Broken(Exception):
    pass


def product(seed: int) -> tuple[float, int]:
    """A sum whose rounding depends on the number of threads, and that number."""
    matrix = torch.randn(300, 300, generator=seeded(seed))
    return (matrix @ matrix).sum().item(), torch.get_num_threads()


def slow_work(task: dict[str, Any]) -> dict[str, Any]:
    """Sleep, and return the process id; a task with "dies" kills its process the first time."""
    (Path(task["folder"]) / f"began-{task['seed']}").touch()
    time.sleep(task.get("sleep", 0.0))
    marker = Path(task["folder"]) / f"died-{task['seed']}"
    if task.get("dies") and not marker.exists():
        marker.write_text(str(os.getpid()))
        os._exit(1)
    value, _ = product(task["seed"])
    return {"seed": task["seed"], "value": value, "pid": os.getpid()}


def breaks_at_two(item: int) -> int:
    if item == 2:
        raise Broken(f"item {item}")
    return item


def create_file(path: str) -> None:
    time.sleep(0.2)
    Path(path).touch()


@pytest.fixture(scope="module")
def cluster():
    """A Ray runtime of two workers, which the engines of this file use and leave running."""
    ray = pytest.importorskip("ray")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(Path(__file__).parent), prepend=os.pathsep)  # workers import this file
        ray.init("local", num_cpus=2, include_dashboard=False, log_to_driver=False)
        yield ray
        ray.shutdown()


@needs_ray
@quiet
def test_the_command_starts_ray_and_stops_it(tmp_path):
    import ray

    assert not ray.is_initialized()  # this test must run before those that share a runtime
    arguments = ["reproduce", "bivariate", "--engine", "ray", "--workers", "2", "--out", str(tmp_path), "--json"]
    done = CliRunner().invoke(build(), arguments)
    assert done.exit_code == 0, done.output
    assert (tmp_path / "results.json").exists()
    assert not ray.is_initialized()


@needs_ray
@quiet
@pytest.mark.slow
def test_tasks_of_a_lost_machine_are_repeated_and_the_cluster_is_left_running(tmp_path, monkeypatch):
    """Three simulated machines of one worker each; one is removed while it works."""
    import ray
    from ray.cluster_utils import Cluster

    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent), prepend=os.pathsep)
    head = {"num_cpus": 1, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    _, removed = cluster.add_node(num_cpus=1), cluster.add_node(num_cpus=1)
    cluster.wait_for_nodes()
    tasks = [{"seed": s, "folder": str(tmp_path), "sleep": 1.0} for s in range(9)]
    try:
        with closing(Ray(cluster.address).map(slow_work, tasks)) as finished:
            results = [next(finished)]
            cluster.remove_node(removed, allow_graceful=False)
            results += finished
        assert not ray.is_initialized()
        repeated = dict(Ray(cluster.address).map(slow_work, tasks[:1]))  # the cluster is still running
    finally:
        cluster.shutdown()
    with one_thread():  # as in a worker: another number of threads sums in another order
        local = [slow_work({**task, "sleep": 0})["value"] for task in tasks]
    assert [result["value"] for _, result in sorted(results, key=lambda pair: pair[0])] == local
    assert len({result["pid"] for _, result in results}) >= 2
    assert repeated[0]["value"] == local[0]


@pytest.fixture(
    params=[
        pytest.param(Local(1), id="this process"),
        pytest.param(Local(2), id="processes"),
        pytest.param(Threads(1), id="a thread"),
        pytest.param(Threads(3), id="threads"),
        pytest.param(Ray(), id="ray", marks=[needs_ray, quiet]),
        pytest.param(Ray(workers=1), id="ray, one at a time", marks=[needs_ray, quiet]),
    ]
)
def engine(request) -> Engine:
    if isinstance(request.param, Ray):
        request.getfixturevalue("cluster")
    return request.param


def test_every_engine_gives_every_result_once_computed_by_one_thread(engine: Engine):
    results = list(engine.map(product, range(5)))
    assert sorted(i for i, _ in results) == list(range(5))
    assert dict(results) == dict(Local(1).map(product, range(5)))
    assert {threads for _, (_, threads) in results} == {1}
    assert list(engine.map(product, [])) == []


def test_an_error_of_the_function_is_raised_unchanged(engine: Engine):
    with pytest.raises(Broken, match=r"^item 2$"):
        list(engine.map(breaks_at_two, range(4)))


def breaks_early(argument: tuple[str, int]) -> int:
    """The first item raises once the second has begun; the others take 0.3 seconds."""
    folder, item = Path(argument[0]), argument[1]
    (folder / f"began-{item}").touch()
    if item == 0:
        while not (folder / "began-1").exists():
            time.sleep(0.01)
        raise Broken("item 0")
    time.sleep(0.3)
    return item


@pytest.mark.parametrize(
    "engine",
    [
        pytest.param(Local(2), id="processes"),
        pytest.param(Threads(2), id="threads"),
        pytest.param(Ray(), id="ray", marks=[needs_ray, quiet]),
        pytest.param(Ray(workers=2), id="ray, two at a time", marks=[needs_ray, quiet]),
    ],
)
def test_running_items_are_finished_and_yielded_when_another_raises(engine: Engine, request, tmp_path):
    if isinstance(engine, Ray):
        request.getfixturevalue("cluster")
    results: list[int] = []
    with pytest.raises(Broken, match=r"^item 0$"):
        results.extend(result for _, result in engine.map(breaks_early, [(str(tmp_path), i) for i in range(20)]))
    begun = {int(path.name.removeprefix("began-")) for path in tmp_path.glob("began-*")}
    assert sorted(results) == sorted(begun - {0})
    assert 1 in results
    assert len(results) < 10


def test_closing_drops_items_that_have_not_begun(engine: Engine, tmp_path):
    paths = [str(tmp_path / f"item-{i}") for i in range(30)]
    with closing(engine.map(create_file, paths)) as results:
        i, _ = next(results)
    assert Path(paths[i]).exists()
    time.sleep(0.5)
    assert len(list(tmp_path.glob("item-*"))) < 15


def test_threads_inherit_the_gradient_mode_and_access_items_on_demand():
    accessed: list[int] = []
    items = LazySequence(range(6), lambda key: accessed.append(key) or key)
    before = torch.get_num_threads()
    with torch.no_grad(), closing(Threads(2).map(grad_enabled, items)) as results:
        assert next(results)[1] is False
        assert len(accessed) == 2
        assert [enabled for _, enabled in results] == [False] * 5
    assert accessed == list(range(6))
    assert torch.get_num_threads() == before


@pytest.mark.parametrize("engine", [Local, Threads, lambda workers: Ray(workers=workers)])
def test_the_number_of_workers_is_checked(engine):
    with pytest.raises(SettingError, match="workers=0 must be a whole number of at least 1"):
        engine(0)


@pytest.fixture
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("two_threads")
def test_threads_use_one_torch_thread_and_do_not_change_that_of_the_caller():
    with closing(Threads(2).map(product, range(6))) as results:
        for _, (_, inside) in results:
            assert (inside, torch.get_num_threads()) == (1, 2)
            torch.set_num_threads(2)  # of the caller only
    n_threads: list[int] = []
    other = threading.Thread(target=lambda: n_threads.append(torch.get_num_threads()))
    other.start()
    other.join()
    assert n_threads == [2]  # in a thread that is not a worker


def grad_enabled(_: int) -> bool:
    return torch.is_grad_enabled()


def test_ordered_results_are_yielded_as_early_as_possible():
    finished: list[int] = []

    def unordered() -> Iterator[tuple[int, str]]:
        for i in (1, 2, 0, 3):
            finished.append(i)
            yield i, "abcd"[i]

    results = ordered_results(unordered())
    assert next(results) == "a"
    assert finished == [1, 2, 0]
    assert list(results) == ["b", "c", "d"]
    assert list(ordered_results(iter([]))) == []


@needs_ray
@quiet
def test_two_ray_workers_give_the_results_of_one_process_though_one_is_killed(cluster, tmp_path):
    tasks = [{"seed": s, "folder": str(tmp_path), "sleep": 0.3, "dies": s == 1} for s in range(6)]
    reports: list[tuple[int, int]] = []
    run = run_tasks(slow_work, tasks, tmp_path / "ray", engine=Ray(), progress=lambda a, b, _: reports.append((a, b)))
    dead, alive = int((tmp_path / "died-1").read_text()), {result["pid"] for result in run.results}
    assert reports == [(i, 6) for i in range(7)]
    assert os.getpid() not in {dead, *alive}
    assert alive - {dead}
    local = run_tasks(slow_work, tasks, tmp_path / "local", workers=1)  # the marker exists now
    assert [r["value"] for r in run.results] == [r["value"] for r in local.results]
    assert cluster.is_initialized()


@needs_ray
@quiet
def test_an_interrupted_ray_run_stores_finished_tasks_and_drops_the_others(cluster, tmp_path):
    tasks = [{"seed": s, "folder": str(tmp_path), "sleep": 0.4} for s in range(20)]

    def interrupt(done: int, total: int, what: str) -> None:
        if done == 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_tasks(slow_work, tasks, tmp_path / "out", engine=Ray(), progress=interrupt)
    assert len(list((tmp_path / "out" / "tasks").glob("*.json"))) == 1
    begun, quiet_since = -1, time.monotonic()
    while time.monotonic() - quiet_since < 2:  # a worker on its way may still begin one
        if (n := len(list(tmp_path.glob("began-*")))) != begun:
            begun, quiet_since = n, time.monotonic()
        time.sleep(0.1)
    assert begun < 20


@needs_ray
@quiet
def test_a_task_that_kills_its_worker_raises_after_the_last_retry(cluster, tmp_path):
    task = {"seed": 1, "folder": str(tmp_path), "dies": True}
    with pytest.raises(cluster.exceptions.WorkerCrashedError):
        list(Ray(retries=0).map(slow_work, [task]))


@needs_ray
@quiet
def test_an_experiment_has_the_same_results_with_ray(cluster, tmp_path):
    by_ray = reproduce("bivariate", "quick", tmp_path / "ray", engine=Ray())
    local = reproduce("bivariate", "quick", tmp_path / "local", workers=1)
    assert {**by_ray, "seconds": 0} == {**local, "seconds": 0}
    assert by_ray["seconds"].keys() == local["seconds"].keys()


def test_the_error_without_ray_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(SettingError, match=r"install it with `pip install 'vaerdict\[ray\]'`"):
        list(Ray().map(product, [0]))


@needs_ray
@pytest.mark.parametrize("address", ["127.0.0.1:9", "ray://127.0.0.1:9", "nonsense"])
def test_an_address_without_a_cluster_raises(address, monkeypatch):
    monkeypatch.setattr("ray.is_initialized", lambda: False)
    with pytest.raises(SettingError, match=f"no Ray cluster can be reached at '{address}'"):
        list(Ray(address).map(product, [0]))


def test_engines_of_the_command_line():
    assert choose_engine("local", None, 2, "cpu") is None
    assert choose_engine("ray", "10.0.0.1:6379", 3, "cuda") == Ray("10.0.0.1:6379", 3, gpus=1.0)
    with pytest.raises(SettingError, match="engine 'dask'; choose local or ray"):
        choose_engine("dask", None, None, "cpu")
    with pytest.raises(SettingError, match="--engine ray"):
        choose_engine("local", "10.0.0.1:6379", None, "cpu")
