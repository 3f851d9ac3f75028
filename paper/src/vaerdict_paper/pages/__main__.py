"""Rebuild the result tables of Markdown pages: ``python -m vaerdict_paper.pages README.md docs/benchmarks.md``."""

import sys
from pathlib import Path

from vaerdict_paper.pages.headline import RESULTS, update_headline
from vaerdict_paper.pages.render import update_tables

if __name__ == "__main__":
    for page in map(Path, sys.argv[1:]):
        names = ["headline"] if update_headline(page) else []
        print(f"{page}: {', '.join([*names, *update_tables(page, RESULTS)])}")
