"""Progress of a command on stderr: bars on a terminal, lines with elapsed and remaining time elsewhere."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple

from rich.console import Console

if TYPE_CHECKING:
    from vaerdict.core import Progress

messages = Console(stderr=True)

FIRST_S, MORE = 10.0, 0.05
"""Seconds between lines: at least the first number, and at least this share of the time elapsed."""


@contextmanager
def progress_bar() -> Iterator[Progress]:
    """Report progress, and the log messages of the package, until the block ends."""
    with _bars() if messages.is_terminal else _lines() as (progress, write):
        listener, logger = _Listener(write), logging.getLogger("vaerdict")
        level = logger.level
        logger.setLevel(logging.INFO)
        logger.addHandler(listener)
        try:
            yield progress
        finally:
            logger.removeHandler(listener)
            logger.setLevel(level)


Write = Callable[[str], None]
"""Writes a message."""


class _Listener(logging.Handler):
    """Writes the log messages of a long task."""

    def __init__(self, write: Write) -> None:
        super().__init__(logging.INFO)
        self.write = write

    def emit(self, record: logging.LogRecord) -> None:
        """Write a message."""
        self.write(record.getMessage())


@contextmanager
def _bars() -> Iterator[tuple[Progress, Write]]:
    """A bar for each step, and messages above the bars."""
    from rich import progress as rich

    columns = (rich.TextColumn("{task.description}"), rich.BarColumn(), rich.TaskProgressColumn())
    columns += (rich.TimeElapsedColumn(), rich.TimeRemainingColumn(), rich.TextColumn("left"))
    with rich.Progress(*columns, console=messages, transient=True) as bars:
        tasks: dict[str, rich.TaskID] = {}

        def progress(done: int, total: int, what: str, /) -> None:
            if what not in tasks:
                tasks[what] = bars.add_task(what, total=total)
            bars.update(tasks[what], completed=done, total=total)

        yield progress, lambda text: bars.console.print(text, style="dim", markup=False, highlight=False)


@contextmanager
def _lines() -> Iterator[tuple[Progress, Write]]:
    """A line now and then, also while nothing reports progress."""
    lines, finished = Lines(_print), threading.Event()

    def watch() -> None:
        while not finished.wait(1.0):
            lines.tick()

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield lines.progress, lines.message
    finally:
        finished.set()
        thread.join()


def _print(text: str) -> None:
    messages.print(text, markup=False, highlight=False, soft_wrap=True)


class _Step(NamedTuple):
    """The step that was reported last; `since` and `first` are time and work done at its first report."""

    what: str
    done: int
    total: int
    since: float
    first: int


class Lines:
    """Lines about the step that was reported last.

    >>> lines = Lines(print, clock=iter([0.0, 2.0, 22.0, 22.0]).__next__)
    >>> lines.progress(0, 80, "cells read")
    >>> lines.progress(20, 80, "cells read")
    >>> lines.tick()
    [0:22] cells read: 20 of 80, about 1:00 left
    """

    def __init__(self, write: Write, clock: Callable[[], float] = time.monotonic) -> None:
        self._write, self._clock = write, clock
        self._begin = self._last = clock()
        self._step: _Step | None = None

    def progress(self, done: int, total: int, what: str, /) -> None:
        """Remember how far a step is."""
        step, now = self._step, self._clock()
        same = step is not None and step.what == what and done >= step.done
        since, first = (step.since, step.first) if step is not None and same else (now, done)
        self._step = _Step(what, done, total, since, first)

    def message(self, text: str) -> None:
        """Write a message with the time elapsed."""
        self._write(f"[{_clock_time(self._clock() - self._begin)}] {text}")

    def tick(self) -> None:
        """Write a line if the last one is some time ago."""
        now = self._clock()
        if now - self._last < max(FIRST_S, MORE * (now - self._begin)):
            return
        self._last = now
        self._write(f"[{_clock_time(now - self._begin)}] {self._about(now)}")

    def _about(self, now: float) -> str:
        step = self._step
        if step is None:
            return "at work"
        if step.total <= 1:
            return step.what
        done = step.done - step.first
        left = (now - step.since) / done * (step.total - step.done) if done > 0 else None
        remaining = "" if left is None or step.done >= step.total else f", about {_clock_time(left)} left"
        return f"{step.what}: {step.done:,} of {step.total:,}{remaining}"


def _clock_time(seconds: float) -> str:
    """Minutes and seconds, with hours where there are any.

    >>> _clock_time(75), _clock_time(3675)
    ('1:15', '1:01:15')
    """
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
