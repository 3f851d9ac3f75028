"""Print the table of the battery: ``python -m vaerdict_paper.benchmarks.verdicts --seed 0 --group benign``."""

from __future__ import annotations

import argparse
from pathlib import Path

from vaerdict.io import write_json
from vaerdict_paper.benchmarks.verdicts import GROUPS, answers, conjugate_defaults, rival_answers, rivals, table


def main() -> None:
    """Ask, print one line per target and group, and write the records if asked to."""
    parser = argparse.ArgumentParser(description="How often a verdict of vaerdict.expect is true.")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--group", action="append", choices=[*GROUPS, "defaults"])
    parser.add_argument("--target", action="append")
    parser.add_argument("--rivals", action="store_true", help="only the comparison with NUTS and nested sampling")
    parser.add_argument("--out", type=Path, help="JSON file for the records")
    options = parser.parse_args()
    groups = [group for group in options.group or GROUPS if group != "defaults"]
    if options.rivals:
        records = rival_answers(options.seed, options.target or rivals.COMPARED)
    else:
        records = answers(options.seed, groups, options.target) if groups else []
        if not options.target and (not options.group or "defaults" in options.group):
            records += conjugate_defaults(options.seed)
    rows = table(records)
    widths = {key: max(len(key), *(len(_text(row[key])) for row in rows)) for key in rows[0]}
    for cells in ({key: key for key in widths}, *rows):
        print("  ".join(_text(cells[key]).ljust(width) for key, width in widths.items()).rstrip())
    if options.out:
        write_json(options.out, {"rows": rows, "records": records})


def _text(value: object) -> str:
    return f"{value:,.2f}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    main()
