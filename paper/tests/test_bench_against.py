from __future__ import annotations

import json
from pathlib import Path

import pytest

from vaerdict.core import SettingError
from vaerdict_paper.benchmarks import against
from vaerdict_paper.pages.bench import text

VERSION = """
def run(name, quick=False):
    return {{"rows": [{rows}]}}
"""


def version(checkout: Path, *rows: dict) -> Path:
    """A checkout whose benchmarks report these rows."""
    package = checkout / "paper" / "src" / "vaerdict_paper"
    (package / "benchmarks").mkdir(parents=True)
    (package / "__init__.py").write_text("")
    body = ", ".join(map(repr, rows))
    (package / "benchmarks" / "__init__.py").write_text(VERSION.format(rows=body))
    for name in ("psis", "escalation"):
        (package / "benchmarks" / f"{name}.py").write_text("")
    return checkout


def test_cases_of_both_versions_are_compared(tmp_path, monkeypatch):
    old = version(tmp_path / "old", {"case": "a", "ours_s": 3.0}, {"case": "gone", "ours_s": 1.0})
    new = version(tmp_path / "new", {"case": "a", "peer": "x", "ours_s": 2.0}, {"case": "fresh", "ours_s": 1.0})
    monkeypatch.setenv("PYTHONPATH", str(new / "paper" / "src"))
    result = against.run("psis", old, repeats=2)
    assert result["rows"] == [{"case": "a", "before_s": 3.0, "now_s": 2.0, "ratio": 1.5}]
    assert (result["of"], result["before"]) == ("psis", "old")
    assert result["repeats"] == 2
    assert "before / now" in text(result)
    json.dumps(result)


def test_the_fastest_run_counts():
    before, now = [{"a": 4.0}, {"a": 3.0}], [{"a": 1.0}, {"a": 6.0}]
    (row,) = against._compared(before, now)
    assert (row["before_s"], row["now_s"], row["ratio"]) == (3.0, 1.0, 3.0)


def test_all_are_those_that_the_other_version_has(tmp_path):
    assert against.shared_benchmarks(version(tmp_path / "old")) == ["psis", "escalation"]


def test_rows_are_identified_by_their_texts():
    rows = [
        {"case": "m", "method": "SMC", "seconds": 1.0, "bias": 0.1},
        {"case": "m", "method": "AIS", "seconds": 2.0},
        {"kind": "ceilings"},
    ]
    assert dict(against._cases(rows)) == {"m, SMC": 1.0, "m, AIS": 2.0}


def test_versions_that_cannot_be_compared_are_refused(tmp_path):
    with pytest.raises(SettingError, match="name the root of another checkout"):
        against.run("psis", tmp_path)
    with pytest.raises(SettingError, match="no benchmark 'haste'"):
        against.run("haste", version(tmp_path / "old"))
    broken = version(tmp_path / "broken")
    (broken / "paper/src/vaerdict_paper/benchmarks/__init__.py").write_text("raise RuntimeError('broken')")
    with pytest.raises(SettingError, match="failed: RuntimeError: broken"):
        against.run("psis", broken, repeats=1)
