"""Rebuild the result tables of Markdown pages: ``python -m vaerdict_paper.pages README.md docs/*.md``."""

import sys
from pathlib import Path

from vaerdict_paper.pages.render import update_tables

RESULTS = Path(__file__).parents[3] / "results"

if __name__ == "__main__":
    for page in map(Path, sys.argv[1:]):
        if names := update_tables(page, RESULTS):
            print(f"{page}: {', '.join(names)}")
