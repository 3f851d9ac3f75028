"""Where work is done: in threads of this process, in processes of this machine, or on the machines of a Ray cluster.

An engine maps a function over items and hands back every result as it comes. Results do not depend on the engine: each
item is done by one thread, and what it draws comes from seeds of its own.
"""

from __future__ import annotations

import os
import signal
import socket
import threading
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, ThreadPoolExecutor, as_completed, wait
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from itertools import count, islice
from multiprocessing import get_context, parent_process
from typing import Any, Protocol, TypeVar

import torch

from vaerdict.core import SettingError, check_count

T = TypeVar("T")
R = TypeVar("R")
K = TypeVar("K")

_NAMESPACE = "vaerdict"


class Engine(Protocol):
    """Anything that does many pieces of work."""

    def map(self, fn: Callable[[T], R], items: Sequence[T]) -> Generator[tuple[int, R], None, None]:
        """Each item's place and result, in the order they are finished; function, items and results must pickle.

        An error in `fn` is raised once; what had not begun by then is dropped, what had is first handed over. Closing
        the iterator cancels the rest.
        """
        ...


@dataclass(frozen=True)
class Local:
    """Processes of this machine, one a core by default; with one worker, or one item, this process itself."""

    workers: int | None = None

    def __post_init__(self) -> None:
        if self.workers is not None:
            check_count(self.workers, name="workers")

    def map(self, fn: Callable[[T], R], items: Sequence[T]) -> Generator[tuple[int, R], None, None]:
        """Each item's place and result, in the order they are finished."""
        workers = min(self.workers or os.cpu_count() or 1, len(items))
        if workers > 1:
            yield from _in_processes(fn, items, workers)
            return
        for place, item in enumerate(items):
            with one_thread():
                result = fn(item)
            yield place, result


@dataclass(frozen=True)
class Threads:
    """Threads of this process, one a core by default, for work that spends its time inside torch.

    Nothing is copied, and an item is asked for when a thread is free for it, so that items may be made as they go.
    """

    workers: int | None = None

    def __post_init__(self) -> None:
        if self.workers is not None:
            check_count(self.workers, name="workers")

    def map(self, fn: Callable[[T], R], items: Sequence[T]) -> Generator[tuple[int, R], None, None]:
        """Each item's place and result, in the order they are finished."""
        workers = min(self.workers or os.cpu_count() or 1, len(items))
        if workers <= 1:
            yield from Local(1).map(fn, items)
            return
        waiting, running = iter(enumerate(items)), dict[Future[R], int]()
        work = partial(_as_here, torch.is_grad_enabled(), fn)
        failure: BaseException | None = None
        with _restored_default(), ThreadPoolExecutor(workers, initializer=_enter_thread) as pool:
            while True:
                room = workers - len(running) if failure is None else 0
                running |= {pool.submit(work, item): place for place, item in islice(waiting, room)}
                if not running:
                    break
                for future in wait(running, return_when=FIRST_COMPLETED).done:
                    place, error = running.pop(future), future.exception()
                    if error is None:
                        yield place, future.result()
                    failure = failure or error
        if failure is not None:
            raise failure


def started(engine: Engine | None) -> AbstractContextManager[None]:
    """An engine that has to be started, started once for all its maps inside; of others nothing."""
    return engine.running() if isinstance(engine, Ray) else nullcontext()


class Made(Sequence[T]):
    """Items made from keys when they are asked for, and not kept."""

    def __init__(self, keys: Sequence[K], make: Callable[[K], T]) -> None:
        self.keys, self.make = keys, make

    def __len__(self) -> int:
        return len(self.keys)

    def __getitem__(self, at: Any) -> Any:
        """The item of the key at a place."""
        return self.make(self.keys[at])


def in_order(results: Iterator[tuple[int, R]]) -> Iterator[R]:
    """Results in the order of their items; those that come early wait."""
    early: dict[int, R] = {}
    for expected in count():
        while expected not in early:
            came = next(results, None)
            if came is None:
                return
            early[came[0]] = came[1]
        yield early.pop(expected)


@dataclass(frozen=True)
class Ray:
    """Tasks of a Ray cluster: that at `address`, or one on this machine started for the purpose and stopped afterwards.

    Where the process already runs Ray, that runtime is used and left running. Each task takes one CPU and `gpus` GPUs;
    `workers` is how many run at a time, all the cluster has room for by default. A task whose worker or machine was
    lost is run again, up to `retries` times. Every machine needs this package, and whatever data `fn` reads.
    """

    address: str | None = None
    workers: int | None = None
    gpus: float = 0.0
    retries: int = 3

    def __post_init__(self) -> None:
        if self.workers is not None:
            check_count(self.workers, name="workers")

    def map(self, fn: Callable[[T], R], items: Sequence[T]) -> Generator[tuple[int, R], None, None]:
        """Each item's place and result, in the order they are finished."""
        ray = _ray()
        with self._runtime(ray):
            task = ray.remote(num_cpus=1, num_gpus=self.gpus, max_retries=self.retries)(_as_task)
            shared = ray.put(fn)  # sent to a machine once, however many of the items it does
            waiting = iter(enumerate(items))
            places: dict[Any, int] = {}
            failure: Exception | None = None
            try:
                while True:
                    room = self._room(places) if failure is None else 0
                    places |= {task.remote(shared, item): place for place, item in islice(waiting, room)}
                    if not places:
                        break
                    for ref in ray.wait(list(places))[0]:
                        place, result, error = places.pop(ref), *_outcome(ray, ref)
                        if error is None:
                            yield place, result
                        elif failure is None:  # later errors are of tasks cancelled here
                            failure = error
                            _cancel(ray, places, force=False)
            finally:
                _cancel(ray, places, force=True)
        if failure is not None:
            raise failure

    def running(self) -> AbstractContextManager[None]:
        """The cluster, joined or started once for all maps inside."""
        return self._runtime(_ray())

    def _room(self, running: dict[Any, int]) -> int | None:
        """How many more tasks may be handed over; None for any number."""
        return None if self.workers is None else self.workers - len(running)

    @contextmanager
    def _runtime(self, ray: Any) -> Iterator[None]:
        if ray.is_initialized():
            yield
            return
        if self.address is None:
            cpus = self.workers or os.cpu_count() or 1
            ray.init("local", num_cpus=cpus, include_dashboard=False, namespace=_NAMESPACE, log_to_driver=False)
        else:
            _connect(ray, self.address)
        try:
            yield
        finally:
            ray.shutdown()


def _connect(ray: Any, address: str) -> None:
    """Join a running cluster; an address where nobody answers is refused at once, for Ray itself would try for long."""
    host, _, port = address.rpartition("://")[2].rpartition(":")
    try:
        if address != "auto":
            socket.create_connection((host, int(port)), timeout=5).close()
        ray.init(address, namespace=_NAMESPACE, log_to_driver=False)
    except (OSError, ValueError) as error:
        raise SettingError(
            f"no Ray cluster can be reached at {address!r} ({error}); start one with `ray start --head`, pass the "
            "address it prints (host:port), or none for workers of this machine."
        ) from error


def _ray() -> Any:
    try:
        return import_module("ray")
    except ImportError as error:
        raise SettingError("the ray engine needs Ray; install it with `pip install 'vaerdict[ray]'`.") from error


def _outcome(ray: Any, ref: Any) -> tuple[Any, Exception | None]:
    """What a task returned, and the error instead if it raised one, as `fn` raised it."""
    try:
        return ray.get(ref), None
    except ray.exceptions.RayTaskError as error:
        return None, error.cause or error
    except ray.exceptions.RayError as error:
        return None, error


def _cancel(ray: Any, refs: Iterable[Any], *, force: bool) -> None:
    """Drop tasks that have not begun; by force those that run, too, which otherwise do not hear of it."""
    for ref in refs:
        ray.cancel(ref, force=force)


def _in_processes(fn: Callable[[T], R], items: Sequence[T], workers: int) -> Generator[tuple[int, R], None, None]:
    failure: BaseException | None = None
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn"), initializer=_enter_worker) as pool:
        try:
            places = {pool.submit(fn, item): place for place, item in enumerate(items)}
            for future in as_completed(places):
                if future.cancelled():
                    continue
                error = future.exception()
                if error is None:
                    yield places[future], future.result()
                elif failure is None:  # what runs by now is finished and handed over, the rest dropped
                    failure = error
                    for other in places:
                        other.cancel()
        except BaseException:
            pool.shutdown(cancel_futures=True)  # or leaving the pool would first do all that is left
            raise
    if failure is not None:
        raise failure


@contextmanager
def one_thread() -> Iterator[None]:
    """As in a worker: how sums are split over threads must not change a result."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _as_here(grad: bool, fn: Callable[[T], R], item: T) -> R:
    """In a thread, which starts with gradients enabled whatever its maker had."""
    with torch.set_grad_enabled(grad):
        return fn(item)


def _as_task(fn: Callable[[T], R], item: T) -> R:
    """On one thread, and to the end: Ray cancels a task that runs by an interrupt."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with one_thread():
            return fn(item)
    finally:
        signal.signal(signal.SIGINT, before)


def _enter_thread() -> None:
    """One thread for its work; a new thread takes the process's default when first asked, so let that be before."""
    torch.get_num_threads()
    torch.set_num_threads(1)


@contextmanager
def _restored_default() -> Iterator[None]:
    """What `_enter_thread` sets is a default, too, for threads that start later; those of others find it as it was."""
    try:
        yield
    finally:
        torch.set_num_threads(torch.get_num_threads())


def _enter_worker() -> None:
    """One thread a worker; and a worker whose parent was killed goes too, instead of working on for nobody."""
    torch.set_num_threads(1)
    threading.Thread(target=_leave_with_parent, daemon=True).start()


def _leave_with_parent() -> None:
    parent = parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
