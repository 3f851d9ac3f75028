"""Engines give the same results, lose none when a worker dies, and stop when told to."""

from __future__ import annotations

import importlib.util
import os
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from vaerdict.cli import _engine, app
from vaerdict.core import SettingError
from vaerdict.engines import Engine, Local, Made, Ray, Threads, in_order
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


def slow_unit(unit: dict[str, Any]) -> dict[str, Any]:
    """Takes its time, says who did it, and where the unit asks for it takes its process down the first time."""
    (Path(unit["folder"]) / f"began-{unit['seed']}").touch()
    time.sleep(unit.get("sleep", 0.0))
    marker = Path(unit["folder"]) / f"died-{unit['seed']}"
    if unit.get("dies") and not marker.exists():
        marker.write_text(str(os.getpid()))
        os._exit(1)
    value, _ = product(unit["seed"])
    return {"seed": unit["seed"], "value": value, "pid": os.getpid()}


def breaks_at_two(item: int) -> int:
    if item == 2:
        raise Broken(f"item {item}")
    return item


def leaves_a_mark(path: str) -> None:
    time.sleep(0.2)
    Path(path).touch()


@pytest.fixture(scope="module")
def cluster():
    """A Ray runtime of two workers, for the engines of this file to find and to leave alone."""
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

    assert not ray.is_initialized()  # before the other tests: they share a runtime that stays
    words = ["reproduce", "bivariate", "--engine", "ray", "--workers", "2", "--out", str(tmp_path), "--json"]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output
    assert (tmp_path / "results.json").exists()
    assert not ray.is_initialized()


@needs_ray
@quiet
@pytest.mark.slow
def test_a_lost_machine_is_made_up_for_and_the_cluster_is_left_running(tmp_path, monkeypatch):
    """Three machines of one worker each, simulated on this one; one is taken away while it works."""
    import ray
    from ray.cluster_utils import Cluster

    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent), prepend=os.pathsep)
    alone = {"num_cpus": 1, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args=alone)
    _, doomed = cluster.add_node(num_cpus=1), cluster.add_node(num_cpus=1)
    cluster.wait_for_nodes()
    units = [{"seed": s, "folder": str(tmp_path), "sleep": 1.0} for s in range(9)]
    try:
        with closing(Ray(cluster.address).map(slow_unit, units)) as finished:
            came = [next(finished)]
            cluster.remove_node(doomed, allow_graceful=False)
            came += finished
        assert not ray.is_initialized()
        again = dict(Ray(cluster.address).map(slow_unit, units[:1]))  # it still answers
    finally:
        cluster.shutdown()
    local = [slow_unit({**unit, "sleep": 0})["value"] for unit in units]
    assert [result["value"] for _, result in sorted(came, key=lambda pair: pair[0])] == local
    assert len({result["pid"] for _, result in came}) >= 2
    assert again[0]["value"] == local[0]


@pytest.fixture(
    params=[
        pytest.param(Local(1), id="here"),
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


def test_every_engine_gives_every_result_once_and_the_same_by_one_thread(engine: Engine):
    came = list(engine.map(product, range(5)))
    assert sorted(place for place, _ in came) == list(range(5))
    assert dict(came) == dict(Local(1).map(product, range(5)))
    assert {threads for _, (_, threads) in came} == {1}
    assert list(engine.map(product, [])) == []


def test_an_error_of_the_function_is_raised_as_it_is(engine: Engine):
    with pytest.raises(Broken, match=r"^item 2$"):
        list(engine.map(breaks_at_two, range(4)))


def breaks_early(unit: tuple[str, int]) -> int:
    """The first item breaks once the second has begun; the others take their time."""
    folder, item = Path(unit[0]), unit[1]
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
def test_what_runs_when_another_breaks_is_handed_over(engine: Engine, request, tmp_path):
    if isinstance(engine, Ray):
        request.getfixturevalue("cluster")
    came: list[int] = []
    with pytest.raises(Broken, match=r"^item 0$"):
        came.extend(result for _, result in engine.map(breaks_early, [(str(tmp_path), i) for i in range(20)]))
    assert sorted(came) == sorted(int(mark.name[6:]) for mark in tmp_path.glob("began-*") if mark.name != "began-0")
    assert 1 in came
    assert len(came) < 10


def test_closing_drops_what_has_not_begun(engine: Engine, tmp_path):
    marks = [str(tmp_path / f"mark-{i}") for i in range(30)]
    with closing(engine.map(leaves_a_mark, marks)) as results:
        place, _ = next(results)
    assert Path(marks[place]).exists()
    time.sleep(0.5)
    assert len(list(tmp_path.glob("mark-*"))) < 15


def test_threads_leave_torch_as_it_was_and_ask_for_items_when_they_are_free():
    made: list[int] = []
    items = Made(range(6), lambda key: made.append(key) or key)
    before = torch.get_num_threads()
    with torch.no_grad(), closing(Threads(2).map(grad_enabled, items)) as results:
        assert next(results)[1] is False  # as where they were asked from
        assert len(made) == 2
        assert [enabled for _, enabled in results] == [False] * 5
    assert made == list(range(6))
    assert torch.get_num_threads() == before


@pytest.fixture
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("two_threads")
def test_threads_keep_to_one_of_torch_and_leave_the_others_to_who_takes_the_results():
    with closing(Threads(2).map(product, range(6))) as results:
        for _, (_, inside) in results:
            assert (inside, torch.get_num_threads()) == (1, 2)
            torch.set_num_threads(2)  # what the taker sets is his alone
    found: list[int] = []
    other = threading.Thread(target=lambda: found.append(torch.get_num_threads()))
    other.start()
    other.join()
    assert found == [2]  # what a thread finds that is no worker


def grad_enabled(_: int) -> bool:
    return torch.is_grad_enabled()


def test_results_are_put_in_order_as_soon_as_they_can_be():
    seen: list[int] = []

    def come() -> Iterator[tuple[int, str]]:
        for place in (1, 2, 0, 3):
            seen.append(place)
            yield place, "abcd"[place]

    results = in_order(come())
    assert next(results) == "a"
    assert seen == [1, 2, 0]
    assert list(results) == ["b", "c", "d"]
    assert list(in_order(iter([]))) == []


@needs_ray
@quiet
def test_two_ray_workers_do_what_one_process_does_though_one_of_them_is_killed(cluster, tmp_path):
    units = [{"seed": s, "folder": str(tmp_path), "sleep": 0.3, "dies": s == 1} for s in range(6)]
    heard: list[tuple[int, int]] = []
    run = run_tasks(
        slow_unit, units, tmp_path / "ray", resume=False, engine=Ray(), progress=lambda a, b, _: heard.append((a, b))
    )
    dead, alive = int((tmp_path / "died-1").read_text()), {result["pid"] for result in run.results}
    assert heard == [(i, 6) for i in range(7)]
    assert os.getpid() not in {dead, *alive}
    assert alive - {dead}
    local = run_tasks(slow_unit, units, tmp_path / "local", resume=False, workers=1)  # no marker is missing by now
    assert [r["value"] for r in run.results] == [r["value"] for r in local.results]
    assert cluster.is_initialized()


@needs_ray
@quiet
def test_an_interrupted_run_by_ray_keeps_what_came_and_drops_the_rest(cluster, tmp_path):
    units = [{"seed": s, "folder": str(tmp_path), "sleep": 0.4} for s in range(20)]

    def interrupt(done: int, total: int, what: str) -> None:
        if done == 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_tasks(slow_unit, units, tmp_path / "out", resume=False, engine=Ray(), progress=interrupt)
    assert len(list((tmp_path / "out" / "parts").glob("*.json"))) == 1
    time.sleep(1.0)  # cancelling takes a moment
    begun = len(list(tmp_path.glob("began-*")))
    time.sleep(1.0)
    assert len(list(tmp_path.glob("began-*"))) == begun < 20


@needs_ray
@quiet
def test_a_worker_that_always_dies_is_given_up(cluster, tmp_path):
    (unit,) = [{"seed": 1, "folder": str(tmp_path), "dies": True}]
    with pytest.raises(cluster.exceptions.WorkerCrashedError):
        list(Ray(retries=0).map(slow_unit, [unit]))


@needs_ray
@quiet
def test_an_experiment_is_the_same_by_ray(cluster, tmp_path):
    by_ray = reproduce("bivariate", "quick", tmp_path / "ray", engine=Ray())
    local = reproduce("bivariate", "quick", tmp_path / "local", workers=1)
    assert {**by_ray, "seconds": 0} == {**local, "seconds": 0}
    assert by_ray["seconds"].keys() == local["seconds"].keys()


def test_ray_that_is_not_installed_is_named(monkeypatch):
    def missing(name: str) -> None:
        raise ImportError(name)

    monkeypatch.setattr("vaerdict.engines.import_module", missing)
    with pytest.raises(SettingError, match=r"install it with `pip install 'vaerdict\[ray\]'`"):
        list(Ray().map(product, [0]))


@needs_ray
@pytest.mark.parametrize("address", ["127.0.0.1:9", "ray://127.0.0.1:9", "nonsense"])
def test_an_address_where_nobody_answers_is_refused(address, monkeypatch):
    monkeypatch.setattr("ray.is_initialized", lambda: False)
    with pytest.raises(SettingError, match=f"no Ray cluster can be reached at '{address}'"):
        list(Ray(address).map(product, [0]))


def test_engines_of_the_command_line():
    assert _engine("local", None, 2, "cpu") is None
    assert _engine("ray", "10.0.0.1:6379", 3, "cuda") == Ray("10.0.0.1:6379", 3, gpus=1.0)
    with pytest.raises(SettingError, match="engine 'dask'; choose local or ray"):
        _engine("dask", None, None, "cpu")
    with pytest.raises(SettingError, match="say --engine ray too"):
        _engine("local", "10.0.0.1:6379", None, "cpu")
