"""CSV files of tables whose texts come back as they were, and which no spreadsheet takes for formulas."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vaerdict.io import replacing
from vaerdict.optional import require

if TYPE_CHECKING:
    import pandas

_FORMULA = re.compile(r"'*[=+\-@\t\r]")  # a text that begins as a formula of a spreadsheet, or as one that is guarded


def guarded(text: str) -> str:
    """A text with an apostrophe before it if a spreadsheet would take it for a formula.

    >>> [guarded(text) for text in ("=1+1", "'=1+1", "-A", "CD19", "'t")]
    ["'=1+1", "''=1+1", "'-A", 'CD19', "'t"]
    """
    return f"'{text}" if _FORMULA.match(text) else text


def unguarded(text: str) -> str:
    """The text that `guarded` was given.

    >>> [unguarded(text) for text in ("'=1+1", "''=1+1", "'-A", "CD19", "'t")]
    ['=1+1', "'=1+1", '-A', 'CD19', "'t"]
    """
    return text[1:] if text.startswith("'") and _FORMULA.match(text[1:]) else text


def write_table(path: Path, table: pandas.DataFrame) -> None:
    """Write a table completely or not at all, the texts in it guarded."""
    texts = {
        str(name): [guarded(value) if isinstance(value, str) else value for value in column]
        for name, column in table.items()
        if column.dtype.kind not in "biuf"
    }
    with replacing(path) as partial:
        table.assign(**texts).to_csv(partial, index=False)


def read_table(path: Path, texts: Sequence[str]) -> pandas.DataFrame:
    """Read a table that `write_table` wrote; the columns `texts` are text whatever is in them (NA, nan, 007)."""
    options: dict[str, Any] = {"keep_default_na": False, "na_values": [""], "float_precision": "round_trip"}
    table = require("pandas", "bio").read_csv(path, dtype=dict.fromkeys(texts, str), **options)
    return table.assign(**{name: table[name].fillna("").map(unguarded) for name in texts if name in table})
