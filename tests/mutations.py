"""Planted bugs that the tests must catch; as a script, plant each and run its tests (`make test-mutations`).

`mutations.toml` lists the bugs: a text of the sources, what a person might have written by mistake instead, and tests
of which at least one must fail. A bug is planted in a copy of the sources; the working tree is never changed.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

ROOT = Path(__file__).parent.parent
TABLE = Path(__file__).with_suffix(".toml")
SOURCES = "src/vaerdict"

CAUGHT, MISSED, ERROR = "caught", "MISSED", "ERROR"

_COPIED = ("src", "tests", "conftest.py", "pyproject.toml")
_PASSED, _FAILED = 0, 1  # exit statuses of pytest; others mean that the tests could not be run
_SHOWN = 2000  # characters of the output of tests that could not be run


@dataclass(frozen=True)
class Mutation:
    """A planted bug: `old` occurs once in `file`, below `src/vaerdict`, and becomes `new`.

    `tests` are files below `tests` or names of tests in them, as pytest takes them; one of them must fail.
    """

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]

    def applied(self, root: Path) -> str:
        """The text of the file with the bug; raises where the old text is not found exactly once."""
        text = (root / SOURCES / self.file).read_text()
        if (n := text.count(self.old)) != 1:
            raise ValueError(f"{self.name}: the old text occurs {n} times in {self.file}, not once; update the table.")
        return text.replace(self.old, self.new)


@dataclass(frozen=True)
class Outcome:
    """Whether the tests noticed a bug, and the first test that failed, or why none could be run."""

    mutation: Mutation
    result: str
    shown: str


def read_table(path: Path = TABLE) -> list[Mutation]:
    """The planted bugs."""
    with path.open("rb") as file:
        return [Mutation(**(row | {"tests": tuple(row["tests"])})) for row in tomllib.load(file)["mutation"]]


def check(mutation: Mutation, root: Path = ROOT) -> Outcome:
    """Plant the bug in a copy of the sources and run its tests there."""
    try:
        planted = mutation.applied(root)
    except (OSError, ValueError) as error:
        return Outcome(mutation, ERROR, str(error))
    with tempfile.TemporaryDirectory() as folder:
        copy = _copied(root, Path(folder))
        (copy / SOURCES / mutation.file).write_text(planted)
        done = _run(copy, mutation.tests)
    failed = _lines(done, "FAILED ", "ERROR ")
    if done.returncode == _FAILED and failed:
        return Outcome(mutation, CAUGHT, failed[0].partition(" ")[2].partition(" - ")[0])
    if done.returncode == _PASSED:
        return Outcome(mutation, MISSED, "")
    return Outcome(mutation, ERROR, (done.stdout + done.stderr)[-_SHOWN:])


def unplanted(mutations: Sequence[Mutation], root: Path = ROOT) -> str:
    """What the named tests print where some fail or are skipped without a bug; empty where all pass."""
    tests = dict.fromkeys(test for mutation in mutations for test in mutation.tests)
    with tempfile.TemporaryDirectory() as folder:
        done = _run(_copied(root, Path(folder)), list(tests))
    return "" if done.returncode == _PASSED and not _lines(done, "SKIPPED ") else (done.stdout + done.stderr)[-_SHOWN:]


def _copied(root: Path, folder: Path) -> Path:
    for name in _COPIED:
        if (root / name).is_dir():
            shutil.copytree(root / name, folder / name, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
        else:
            shutil.copy2(root / name, folder / name)
    return folder


def _lines(done: subprocess.CompletedProcess[str], *starts: str) -> list[str]:
    """The lines of the output that begin with one of these words."""
    return [line for line in done.stdout.splitlines() if line.startswith(starts)]


def _run(folder: Path, tests: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """The tests with the sources of a folder, up to the first that fails."""
    options = ["-x", "-q", "-rfEs", "--tb=no", "--no-header", "--color=no", "-p", "no:cacheprovider"]
    environment = os.environ | {
        "PYTHONPATH": str(folder / "src"),
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTEST_ADDOPTS": "",
        "COLUMNS": "400",
    }
    command = [sys.executable, "-m", "pytest", *options, *(f"tests/{test}" for test in tests)]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)


def main(arguments: Sequence[str] | None = None, root: Path = ROOT) -> int:
    """Check the bugs of the table of `root`; the exit status is 1 unless all are caught."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", help="bugs to plant, by parts of their names; all by default")
    parser.add_argument("--jobs", type=int, default=1, help="bugs to plant at a time")
    options = parser.parse_args(arguments)
    table = read_table(root / TABLE.relative_to(ROOT))
    mutations = [m for m in table if not options.names or any(part in m.name for part in options.names)]
    if not mutations:
        parser.error(f"no bug of {TABLE.name} has a name with {' or '.join(options.names)}.")
    if failed := unplanted(mutations, root):
        print(f"the tests fail or are skipped without a planted bug:\n{failed}")
        return 1
    n_caught = 0
    with ThreadPoolExecutor(options.jobs) as pool:
        for outcome in pool.map(partial(check, root=root), mutations):
            n_caught += outcome.result == CAUGHT
            print(f"{outcome.result:7} {outcome.mutation.name}: {outcome.shown}", flush=True)
    print(f"{n_caught} of {len(mutations)} planted bugs are caught.")
    return int(n_caught < len(mutations))


if __name__ == "__main__":
    sys.exit(main())
