"""Engines that map a function over items: threads of this process, processes of this machine, or a Ray cluster.

An engine yields every result as soon as it is finished. Results do not depend on the engine, because each item is
computed by one thread with its own seeds.
"""

from __future__ import annotations

import os
import signal
import socket
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, ThreadPoolExecutor, as_completed, wait
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import count, islice
from multiprocessing import get_context, parent_process
from typing import Any, Protocol, TypeVar

import torch

from vaerdict.core import SettingError, check_count
from vaerdict.optional import require

T = TypeVar("T")
R = TypeVar("R")
K = TypeVar("K")

_NAMESPACE = "vaerdict"


class Engine(Protocol):
    """Anything that maps a function over items."""

    def map(self, fn: Callable[[T], R], items: Sequence[T]) -> Generator[tuple[int, R], None, None]:
        """Yield the index and result of each item in the order of completion; all arguments and results must pickle.

        If `fn` raises, items that have begun are finished and yielded, the others are dropped, and the first error is
        raised. Closing the generator cancels what has not begun.
        """
        ...


@dataclass(frozen=True)
class _Pool(ABC):
    """Workers of this machine, one per core by default; with one worker or one item, the calling thread."""

    workers: int | None = None

    def __post_init__(self) -> None:
        _check_workers(self.workers)

    def map(self, fn: Callable[[T], R], items: Sequence[T]) -> Generator[tuple[int, R], None, None]:
        """Yield the index and result of each item in the order of completion."""
        workers = min(self.workers or os.cpu_count() or 1, len(items))
        if workers > 1:
            yield from self._map(fn, items, workers)
            return
        for i, item in enumerate(items):
            with one_thread():
                result = fn(item)
            yield i, result

    @abstractmethod
    def _map(self, fn: Callable[[T], R], items: Sequence[T], workers: int) -> Generator[tuple[int, R], None, None]:
        """As `map`, by more than one worker."""


def _check_workers(workers: int | None) -> None:
    if workers is not None:
        check_count(workers, name="workers")


class Local(_Pool):
    """Processes of this machine, one per core by default; with one worker or one item, this process.

    >>> dict(Local(1).map(abs, [-1, -2]))
    {0: 1, 1: 2}
    """

    def _map(self, fn: Callable[[T], R], items: Sequence[T], workers: int) -> Generator[tuple[int, R], None, None]:
        failure: BaseException | None = None
        with ProcessPoolExecutor(workers, mp_context=get_context("spawn"), initializer=_enter_process) as pool:
            try:
                indices = {pool.submit(fn, item): i for i, item in enumerate(items)}
                for future in as_completed(indices):
                    if future.cancelled():
                        continue
                    error = future.exception()
                    if error is None:
                        yield indices[future], future.result()
                    elif failure is None:  # running items are finished and yielded, the others dropped
                        failure = error
                        for other in indices:
                            other.cancel()
            except BaseException:
                pool.shutdown(cancel_futures=True)  # otherwise leaving the pool would first do all remaining items
                raise
        if failure is not None:
            raise failure


class Threads(_Pool):
    """Threads of this process, one per core by default, for work that spends its time inside torch.

    Nothing is copied, and an item is accessed when a thread is free for it, so that items may be created on demand.
    """

    def _map(self, fn: Callable[[T], R], items: Sequence[T], workers: int) -> Generator[tuple[int, R], None, None]:
        pending, running = iter(enumerate(items)), dict[Future[R], int]()
        work = partial(_with_grad_mode, torch.is_grad_enabled(), fn)
        failure: BaseException | None = None
        with _restored_default(), ThreadPoolExecutor(workers, initializer=_enter_thread) as pool:
            while True:
                n_free = workers - len(running) if failure is None else 0
                running |= {pool.submit(work, item): i for i, item in islice(pending, n_free)}
                if not running:
                    break
                for future in wait(running, return_when=FIRST_COMPLETED).done:
                    i, error = running.pop(future), future.exception()
                    if error is None:
                        yield i, future.result()
                    failure = failure or error
        if failure is not None:
            raise failure


def started(engine: Engine | None) -> AbstractContextManager[None]:
    """Start an engine that needs it once for all calls of ``map`` inside the context."""
    return engine.running() if isinstance(engine, Ray) else nullcontext()


class LazySequence(Sequence[T]):
    """Items that are created from keys when they are accessed, and not stored."""

    def __init__(self, keys: Sequence[K], make: Callable[[K], T]) -> None:
        self.keys, self.make = keys, make

    def __len__(self) -> int:
        return len(self.keys)

    def __getitem__(self, index: Any) -> Any:
        """The item of the key at `index`."""
        return self.make(self.keys[index])


def ordered_results(results: Iterator[tuple[int, R]]) -> Iterator[R]:
    """Results in the order of their items; results that come early are held back.

    >>> list(ordered_results(iter([(1, "b"), (0, "a")])))
    ['a', 'b']
    """
    early: dict[int, R] = {}
    for expected in count():
        while expected not in early:
            result = next(results, None)
            if result is None:
                return
            early[result[0]] = result[1]
        yield early.pop(expected)


@dataclass(frozen=True)
class Ray:
    """Tasks of a Ray cluster; every machine needs this package and whatever data `fn` reads.

    A Ray runtime that this process has already started is used and left running.

    Parameters
    ----------
    address
        Address of a running cluster. By default a cluster on this machine is started and stopped afterwards.
    workers
        Number of tasks at a time, by default as many as the cluster has room for.
    gpus
        GPUs per task. Each task also takes one CPU.
    retries
        How often a task is repeated when its worker or machine is lost.
    """

    address: str | None = None
    workers: int | None = None
    gpus: float = 0.0
    retries: int = 3

    def __post_init__(self) -> None:
        _check_workers(self.workers)

    def map(self, fn: Callable[[T], R], items: Sequence[T]) -> Generator[tuple[int, R], None, None]:
        """Yield the index and result of each item in the order of completion."""
        ray = require("ray", "ray")
        with self._runtime(ray):
            task = ray.remote(num_cpus=1, num_gpus=self.gpus, max_retries=self.retries)(_as_task)
            shared = ray.put(fn)  # sent once to each machine
            pending = iter(enumerate(items))
            running: dict[Any, int] = {}
            failure: Exception | None = None
            try:
                while True:
                    n_free = self._n_free(running) if failure is None else 0
                    running |= {task.remote(shared, item): i for i, item in islice(pending, n_free)}
                    if not running:
                        break
                    for ref in ray.wait(list(running))[0]:
                        i, result, error = running.pop(ref), *_outcome(ray, ref)
                        if error is None:
                            yield i, result
                        elif failure is None:  # later errors come from tasks that are cancelled here
                            failure = error
                            _cancel(ray, running, force=False)
            finally:
                _cancel(ray, running, force=True)
        if failure is not None:
            raise failure

    def running(self) -> AbstractContextManager[None]:
        """Connect to or start the cluster once for all calls of `map` inside the context."""
        return self._runtime(require("ray", "ray"))

    def _n_free(self, running: dict[Any, int]) -> int | None:
        """The number of tasks that may be submitted; None for any number."""
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
    """Connect to a running cluster. The address is tried first, because Ray itself would retry for minutes."""
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


def _outcome(ray: Any, ref: Any) -> tuple[Any, Exception | None]:
    """The result of a task, and the error if it raised one."""
    try:
        return ray.get(ref), None
    except ray.exceptions.RayTaskError as error:
        return None, error.cause or error
    except ray.exceptions.RayError as error:
        return None, error


def _cancel(ray: Any, refs: Iterable[Any], *, force: bool) -> None:
    """Cancel tasks that have not begun; with `force` also those that are running."""
    for ref in refs:
        ray.cancel(ref, force=force)


@contextmanager
def one_thread() -> Iterator[None]:
    """Use one torch thread, as workers do, because the number of threads changes the rounding of sums."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _with_grad_mode(enabled: bool, fn: Callable[[T], R], item: T) -> R:
    """Call `fn` in a thread, which would otherwise start with gradients enabled."""
    with torch.set_grad_enabled(enabled):
        return fn(item)


def _as_task(fn: Callable[[T], R], item: T) -> R:
    """Call `fn` with one torch thread and without the interrupts by which Ray cancels a running task."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with one_thread():
            return fn(item)
    finally:
        signal.signal(signal.SIGINT, before)


def _enter_thread() -> None:
    """Set one torch thread, after a first query, at which a new thread adopts the default of the process."""
    torch.get_num_threads()
    torch.set_num_threads(1)


@contextmanager
def _restored_default() -> Iterator[None]:
    """Restore the default number of torch threads, which `_enter_thread` changes for threads that start later."""
    try:
        yield
    finally:
        torch.set_num_threads(torch.get_num_threads())


def _enter_process() -> None:
    """Set one torch thread, and exit when the parent process is killed."""
    torch.set_num_threads(1)
    threading.Thread(target=_exit_with_parent, daemon=True).start()


def _exit_with_parent() -> None:
    parent = parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
