"""Timing for the benchmarks."""

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
    """Seconds by the clock, and of the processor, which other load on the machine does not inflate."""

    wall: float = 0.0
    cpu: float = 0.0


@contextmanager
def watched() -> Iterator[Watch]:
    """Time the enclosed block."""
    watch, wall, cpu = Watch(), time.perf_counter(), time.process_time()
    yield watch
    watch.wall, watch.cpu = time.perf_counter() - wall, time.process_time() - cpu


@contextmanager
def one_thread() -> Iterator[None]:
    """Use one thread of torch, so that CPU seconds are comparable; the number is restored afterwards."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def median_seconds(work: Callable[[], Any], repeats: int, *, cpu: bool = False) -> float:
    """The median seconds of several calls, by the clock or (`cpu`) of the processor, after one warm-up call."""
    work()  # imports, allocation, kernels
    times = []
    for _ in range(repeats):
        with watched() as watch:
            work()
        times.append(watch.cpu if cpu else watch.wall)
    return statistics.median(times)
