"""Run the benchmark without the command: ``python -m vaerdict_paper.benchmarks.novelty --out runs/bench``."""

from __future__ import annotations

import argparse
from pathlib import Path

from vaerdict.tasks import run_tasks
from vaerdict_paper import benchmarks
from vaerdict_paper.benchmarks import novelty


def main() -> None:
    """Do the tasks with a number of processes, then write the result."""
    parser = argparse.ArgumentParser(description="Hidden classes of tables.")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--workers", type=int)
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    todo = novelty.tasks(quick=options.quick)
    run_tasks(novelty.work, todo, options.out / "novelty", workers=options.workers, progress=_print)
    result = benchmarks.run("novelty", quick=options.quick, folder=options.out)
    benchmarks.write_result(options.out, "novelty", result)


def _print(done: int, total: int, what: str) -> None:
    if done % 50 == 0 or done == total:
        print(f"{done} of {total} {what}", flush=True)


if __name__ == "__main__":
    main()
