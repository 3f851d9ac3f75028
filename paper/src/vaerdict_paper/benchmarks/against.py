"""Two versions of this repository on the same benchmarks, to find what has become slower.

Each version runs its own benchmark in a separate process, the two in alternating order. The fastest of the repeats
counts, because other load on the machine can only slow a run down.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from shutil import which
from typing import Any

from vaerdict.core import Progress, SettingError, check_count, silent
from vaerdict_paper.benchmarks import BENCHMARKS, provenance

NAMES = ("psis", "ppca", "samplers", "escalation", "counts")
"""Benchmarks of single operations, which ``all`` stands for; the others take long or need a GPU."""

_TIMES = ("ours_s", "cpu_s", "seconds")  # keys of our own time in rows
_PROGRAM = (
    "import json, sys; from vaerdict_paper import benchmarks; print(json.dumps(benchmarks.run(sys.argv[1], quick={})))"
)

Row = dict[str, Any]


def shared_benchmarks(checkout: Path) -> list[str]:
    """Those of `NAMES` that the version in `checkout` has too."""
    return [name for name in NAMES if (_benchmarks(checkout) / f"{name}.py").is_file()]


def _benchmarks(checkout: Path) -> Path:
    folder = checkout / "paper" / "src" / "vaerdict_paper" / "benchmarks"
    if not folder.is_dir():
        raise SettingError(f"{checkout} has no paper/src/vaerdict_paper/benchmarks; name the root of another checkout.")
    return folder


def run(
    name: str, checkout: Path, *, repeats: int = 3, quick: bool = False, progress: Progress = silent
) -> dict[str, Any]:
    """Seconds of every case of a benchmark by the version in `checkout` and by this one.

    Parameters
    ----------
    name
        The benchmark.
    checkout
        The root folder of another checkout of this repository.
    repeats
        Runs of each version.
    quick
        Smaller sizes.
    progress
        Called after every run.

    Returns
    -------
    dict
        The rows, one per case that both versions have, with the machine and the commit of the other version.
    """
    check_count(repeats, name="repeats")
    checkout = Path(checkout).resolve()
    _benchmarks(checkout)
    if name not in BENCHMARKS:
        raise SettingError(f"no benchmark {name!r}; choose one of {', '.join(NAMES)}, or all.")
    before: list[Mapping[str, float]] = []
    now: list[Mapping[str, float]] = []
    for i in range(repeats):
        for times, tree in ((before, checkout), (now, None)) if i % 2 == 0 else ((now, None), (before, checkout)):
            progress(len(before) + len(now), 2 * repeats, f"{name}, both versions in turn")
            times.append(_timed(name, tree, quick))
    progress(2 * repeats, 2 * repeats, f"{name}, both versions in turn")
    about = {"benchmark": "against", "quick": quick, **provenance(), "complete": True}
    return {**about, "of": name, "before": _commit(checkout), "repeats": repeats, "rows": _compared(before, now)}


def _timed(name: str, checkout: Path | None, quick: bool) -> dict[str, float]:
    """Our own seconds of every case, by the version in `checkout` or by this one (None)."""
    trees = [] if checkout is None else [str(checkout / "src"), str(checkout / "paper" / "src")]
    path = os.pathsep.join(filter(None, [*trees, os.environ.get("PYTHONPATH")]))
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM.format(quick), name],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        last = done.stderr.strip().splitlines()[-1:]
        raise SettingError(f"benchmark {name} of {checkout or 'this version'} failed: {' '.join(last)}")
    return dict(_cases(json.loads(done.stdout.splitlines()[-1])["rows"]))


def _cases(rows: Sequence[Row]) -> Iterator[tuple[str, float]]:
    """The texts that identify each row, and its seconds."""
    for row in rows:
        seconds = next((row[key] for key in _TIMES if row.get(key) is not None), None)
        if seconds is not None:
            texts = [v for key, v in row.items() if isinstance(v, str) and key not in ("peer", "bound")]
            yield ", ".join(dict.fromkeys(texts)), float(seconds)


def _compared(before: Sequence[Mapping[str, float]], now: Sequence[Mapping[str, float]]) -> list[Row]:
    rows = []
    for case in now[0]:
        if all(case in times for times in (*before, *now)):
            old, new = (min(times[case] for times in runs) for runs in (before, now))
            rows.append({"case": case, "before_s": old, "now_s": new, "ratio": old / new})
    return rows


def _commit(checkout: Path) -> str:
    """The commit of a checkout; the name of its folder if it is not the root of a repository."""
    command = ["git", "-C", str(checkout), "rev-parse", "--show-toplevel", "--short", "HEAD"]
    done = subprocess.run(command, capture_output=True, text=True, check=False) if which("git") else None
    top, commit = done.stdout.splitlines() if done is not None and done.returncode == 0 else ("", "")
    return commit if Path(top) == checkout else checkout.name
