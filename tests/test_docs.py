"""The reference says what the code says."""

from __future__ import annotations

import runpy
from pathlib import Path

import vaerdict as vd

DOCS = Path(__file__).parent.parent / "docs"


def test_the_reference_is_current_and_whole():
    made = runpy.run_path(str(DOCS / "reference.py"))
    assert {name for names in made["GROUPS"].values() for name in names} == set(vd.__all__)
    page = made["reference"]()
    assert " at 0x" not in page  # an address says nothing to a reader, and changes
    assert page == (DOCS / "api.md").read_text(encoding="utf-8"), "run `make docs`"
