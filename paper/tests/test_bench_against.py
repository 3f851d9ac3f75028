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


def version(folder: Path, *rows: dict) -> Path:
    """A checkout whose benchmarks take the seconds they are told to."""
    package = folder / "vaerdict"
    (package / "benchmarks").mkdir(parents=True)
    (package / "__init__.py").write_text("")
    body = ", ".join(map(repr, rows))
    (package / "benchmarks" / "__init__.py").write_text(VERSION.format(rows=body))
    for name in ("psis", "ladder"):
        (package / "benchmarks" / f"{name}.py").write_text("")
    return folder


@pytest.fixture
def found(tmp_path, monkeypatch):
    old = version(tmp_path / "old" / "src", {"case": "a", "ours_s": 3.0}, {"case": "gone", "ours_s": 1.0})
    new = version(tmp_path / "new", {"case": "a", "peer": "x", "ours_s": 2.0}, {"case": "fresh", "ours_s": 1.0})
    monkeypatch.setattr(against, "_HERE", new)
    return against.run("psis", old, repeats=2)


def test_cases_both_versions_know_are_compared(found):
    assert found["rows"] == [{"case": "a", "before_s": 3.0, "now_s": 2.0, "ratio": 1.5}]
    assert (found["of"], found["before"]) == ("psis", "old")
    assert found["repeats"] == 2
    assert "before / now" in text(found)
    json.dumps(found)


def test_the_fastest_run_counts():
    before, now = [{"a": 4.0}, {"a": 3.0}], [{"a": 1.0}, {"a": 6.0}]
    (row,) = against._compared(before, now)
    assert (row["before_s"], row["now_s"], row["ratio"]) == (3.0, 1.0, 3.0)


def test_all_are_those_the_other_version_has(tmp_path):
    assert against.known(version(tmp_path / "old")) == ["psis", "ladder"]


def test_rows_are_told_apart_by_their_words():
    rows = [
        {"case": "m", "method": "SMC", "seconds": 1.0, "bias": 0.1},
        {"case": "m", "method": "AIS", "seconds": 2.0},
        {"kind": "ceilings"},
    ]
    assert dict(against._cases(rows)) == {"m, SMC": 1.0, "m, AIS": 2.0}


def test_what_cannot_be_compared_is_said(tmp_path):
    with pytest.raises(SettingError, match="holds no vaerdict package"):
        against.run("psis", tmp_path)
    with pytest.raises(SettingError, match="no benchmark 'haste'"):
        against.run("haste", version(tmp_path / "old"))
    broken = version(tmp_path / "broken")
    (broken / "vaerdict" / "benchmarks" / "__init__.py").write_text("raise RuntimeError('out of order')")
    with pytest.raises(SettingError, match="out of order"):
        against.run("psis", broken, repeats=1)
