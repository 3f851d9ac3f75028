"""Seconds and peak memory for the benchmarks, and the rows that compare two ways of doing the same.

A comparison is of one of three kinds. `LIKE` is a peer that does the same task on the same data and device. `OTHER` is
a peer as it is commonly used, which does something else as well or instead; ``differs`` says what. `ABLATION` is our
own code with one thing changed, which ``differs`` names; its slower side is no peer.
"""

from __future__ import annotations

import resource
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from vaerdict.core import SettingError

LIKE, OTHER, ABLATION = "like for like", "peer", "ablation"


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
    return statistics.median(interleaved({"work": work}, repeats, cpu=cpu)["work"])


def interleaved(
    works: Mapping[str, Callable[[], Any]],
    repeats: int,
    *,
    cpu: bool = False,
    warm: bool = True,
    measured: bool = False,
) -> dict[str, list[float]]:
    """Seconds of several pieces of work, which take turns so that other load on the machine meets all of them.

    The order is reversed in every second round.

    Parameters
    ----------
    works
        What is timed, by name.
    repeats
        Number of rounds.
    cpu
        Whether seconds are those of the processor.
    warm
        Whether each is called once before, for imports, allocation and kernels.
    measured
        Whether a call returns its own seconds, which are then those of the round.
    """
    for work in works.values() if warm else ():
        work()
    seconds: dict[str, list[float]] = {name: [] for name in works}
    for i in range(repeats):
        for name in list(works)[:: 1 if i % 2 == 0 else -1]:
            with watched() as watch:
                returned = works[name]()
            seconds[name].append(returned if measured else watch.cpu if cpu else watch.wall)
    return seconds


def peak_gib() -> float:
    """The peak memory of this process in GiB."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / 2**30 if sys.platform == "darwin" else peak / 2**20


def comparison(
    kind: str, case: str, peer: str, ours_s: Sequence[float], peer_s: Sequence[float], *, differs: str | None = None
) -> dict[str, Any]:
    """A row that compares two pieces of work: median seconds, and the ratio with its range over the rounds.

    Parameters
    ----------
    kind
        `LIKE`, `OTHER` or `ABLATION`.
    case
        What is timed.
    peer
        The peer with its setting, or of an ablation the slower path.
    ours_s, peer_s
        Seconds of each round.
    differs
        What differs beyond the implementation; of an ablation the one thing that is changed.
    """
    if kind != LIKE and not differs:
        raise SettingError(f"a comparison of the kind {kind!r} needs differs=, what is not the same on both sides.")
    ratios = [theirs / ours for ours, theirs in zip(ours_s, peer_s, strict=True)]
    return {
        "kind": kind,
        "case": case,
        "differs": differs,
        "ours_s": statistics.median(ours_s),
        "peer": peer,
        "peer_s": statistics.median(peer_s),
        "ratio": statistics.median(ratios),
        "ratio_low": min(ratios),
        "ratio_high": max(ratios),
        "repeats": len(ratios),
    }
