"""Helpers for tests of reports: a run directory from a record, and the outline of a page."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from outline import Outline

NASTY = "<script>alert('x')</script> \"&\" $\\frac$ 名前 a|b `c` \x07"
"""A name that must be printed literally."""


def run_in(folder: Path, results: Any, manifest: Any = None) -> Path:
    """A run directory with these results."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "results.json").write_text(json.dumps(results))
    if manifest is not None:
        (folder / "manifest.json").write_text(json.dumps(manifest))
    return folder


def outline(page: Path) -> tuple[Outline, str]:
    """The outline and the source of a page."""
    source = page.read_text(encoding="utf-8")
    return Outline(source), source
