"""How the benchmarks take the time of something."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch


@dataclass
class Watch:
    """What `watched` found: seconds by the clock, and of the processor, which a busy machine does not inflate."""

    wall: float = 0.0
    cpu: float = 0.0


@contextmanager
def watched() -> Iterator[Watch]:
    """Take the time of what stands inside."""
    watch, wall, cpu = Watch(), time.perf_counter(), time.process_time()
    yield watch
    watch.wall, watch.cpu = time.perf_counter() - wall, time.process_time() - cpu


@contextmanager
def one_thread() -> Iterator[None]:
    """One thread for torch, and as many as before afterwards: what CPU seconds can be compared by."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def median_seconds(work: Callable[[], Any], repeats: int, *, cpu: bool = False) -> float:
    """The median of several, by the clock or with `cpu` of the processor, after one that is not counted."""
    work()  # the first call pays for imports, allocation and kernels
    found = []
    for _ in range(repeats):
        with watched() as watch:
            work()
        found.append(watch.cpu if cpu else watch.wall)
    return statistics.median(found)
