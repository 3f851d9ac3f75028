"""Two versions of this package on the same benchmarks: has anything become slower?

Each version runs its own benchmark in a process of its own, the two in turn and in changing order, and the fastest of
the repeats counts: what else a machine does can only slow a run down.
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
from vaerdict.io import hardware, versions
from vaerdict_paper.benchmarks import BENCHMARKS

NAMES = ("psis", "ppca", "samplers", "ladder", "counts")
"""Benchmarks of single operations, which `all` stands for: the others take long, or are about a GPU."""

_HERE = Path(__file__).resolve().parents[2]  # the folder this version is in
_TIMES = ("ours_s", "cpu_s", "seconds")  # what rows call our own time
_PROGRAM = "import json, sys; from vaerdict import benchmarks as b; print(json.dumps(b.run(sys.argv[1], quick={})))"

Row = dict[str, Any]


def known(source: Path) -> list[str]:
    """Those of `NAMES` that the version in `source` has too."""
    return [name for name in NAMES if (_package(source) / "benchmarks" / f"{name}.py").is_file()]


def _package(source: Path) -> Path:
    package = Path(source).resolve() / "vaerdict"
    if not (package / "__init__.py").is_file():
        raise SettingError(f"{source} holds no vaerdict package; name the src folder of another checkout.")
    return package


def run(
    name: str, source: Path, *, repeats: int = 3, quick: bool = False, progress: Progress = silent
) -> dict[str, Any]:
    """Seconds of every case of a benchmark by the version in `source` and by this one.

    `source` is the folder that holds its ``vaerdict`` package, ``src`` of a checkout. Cases that only one of the two
    versions knows are left out.
    """
    check_count(repeats, name="repeats")
    source = _package(source).parent
    if name not in BENCHMARKS:
        raise SettingError(f"no benchmark {name!r}; choose one of {', '.join(NAMES)}, or all.")
    runs: dict[Path, list[Mapping[str, float]]] = {source: [], _HERE: []}
    for i in range(repeats):
        for tree in (source, _HERE) if i % 2 == 0 else (_HERE, source):
            progress(sum(map(len, runs.values())), 2 * repeats, f"{name}, both versions in turn")
            runs[tree].append(_timed(name, tree, quick))
    progress(2 * repeats, 2 * repeats, f"{name}, both versions in turn")
    about = {"benchmark": "against", "quick": quick, "hardware": hardware(), "versions": versions(), "complete": True}
    rows = _compared(runs[source], runs[_HERE])
    return {**about, "of": name, "before": _commit(source), "repeats": repeats, "rows": rows}


def _timed(name: str, tree: Path, quick: bool) -> dict[str, float]:
    """Our own seconds of every case, by one version."""
    words = [sys.executable, "-c", _PROGRAM.format(quick), name]
    path = os.pathsep.join(filter(None, [str(tree), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "PYTHONPATH": path}
    done = subprocess.run(words, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        last = done.stderr.strip().splitlines()[-1:]
        raise SettingError(f"benchmark {name} of {tree} failed: {' '.join(last)}")
    return dict(_cases(json.loads(done.stdout.splitlines()[-1])["rows"]))


def _cases(rows: Sequence[Row]) -> Iterator[tuple[str, float]]:
    """What each row is about, by its words, and its seconds."""
    for row in rows:
        seconds = next((row[key] for key in _TIMES if row.get(key) is not None), None)
        if seconds is not None:
            words = [v for key, v in row.items() if isinstance(v, str) and key not in ("peer", "bound")]
            yield ", ".join(dict.fromkeys(words)), float(seconds)


def _compared(before: Sequence[Mapping[str, float]], now: Sequence[Mapping[str, float]]) -> list[Row]:
    rows = []
    for case in now[0]:
        if all(case in one for one in (*before, *now)):
            old, new = (min(one[case] for one in runs) for runs in (before, now))
            rows.append({"case": case, "before_s": old, "now_s": new, "ratio": old / new})
    return rows


def _commit(source: Path) -> str:
    """The commit of a checkout; its folder's name where `source` is not in one of its own."""
    asked = ["git", "-C", str(source), "rev-parse", "--show-toplevel", "--short", "HEAD"]
    done = subprocess.run(asked, capture_output=True, text=True, check=False) if which("git") else None
    top, commit = done.stdout.splitlines() if done is not None and done.returncode == 0 else ("", "")
    return commit if Path(top) == source.parent else source.parent.name
