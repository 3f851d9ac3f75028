"""The list of planted bugs fits the sources, and the tool tells bugs that tests notice from those that none can."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

import mutations
from mutations import CAUGHT, ERROR, MISSED, ROOT, SOURCES, Mutation, Outcome

TABLE = mutations.read_table()

PLANTED = Mutation("sign", "signs.py", "return -x", "return x", ("test_signs.py::test_it",))


@pytest.fixture
def toy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A tree with one function and its test."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # a second each
    files = {
        f"{SOURCES}/__init__.py": "",
        f"{SOURCES}/signs.py": "def minus(x):  # a comment\n    return -x\n",
        "tests/test_signs.py": "from vaerdict.signs import minus\n\n\ndef test_it():\n    assert minus(1) == -1\n",
        "conftest.py": "",
        "pyproject.toml": "[tool.pytest.ini_options]\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


@pytest.mark.parametrize("mutation", TABLE, ids=lambda mutation: mutation.name)
def test_every_planted_bug_fits_the_sources_and_names_tests_that_exist(mutation):
    text = mutation.applied(ROOT)
    assert text != (ROOT / SOURCES / mutation.file).read_text()
    compile(text, mutation.file, "exec")
    assert mutation.tests
    for test in mutation.tests:
        file, _, name = test.partition("::")
        source = (ROOT / "tests" / file).read_text()
        assert not name or re.search(rf"^def {name.partition('[')[0]}\(", source, re.MULTILINE), test


def test_planted_bugs_have_names_of_their_own():
    assert len({mutation.name for mutation in TABLE}) == len(TABLE) >= 32


@pytest.mark.parametrize(("old", "n"), [("no such text", 0), ("m", 3)])
def test_a_text_that_is_not_there_once_is_refused(toy, old, n):
    with pytest.raises(ValueError, match=f"the old text occurs {n} times in signs.py, not once; update the table"):
        replace(PLANTED, old=old).applied(toy)


def test_a_bug_that_tests_notice_is_caught_and_one_that_none_can_see_is_missed(toy):
    before = {path: path.read_text() for path in toy.rglob("*.*") if path.is_file()}
    assert mutations.check(PLANTED, toy) == Outcome(PLANTED, CAUGHT, "tests/test_signs.py::test_it")
    assert mutations.check(replace(PLANTED, old="a comment", new="another"), toy).result == MISSED
    assert {path: path.read_text() for path in toy.rglob("*.*") if path.is_file()} == before


def test_tests_that_do_not_run_or_fail_by_themselves_are_named(toy):
    unknown = replace(PLANTED, tests=("test_signs.py::test_that",))
    assert mutations.check(unknown, toy).result == ERROR
    assert mutations.unplanted([PLANTED], toy) == ""
    (toy / SOURCES / "signs.py").write_text("def minus(x):\n    return x\n")
    assert "FAILED tests/test_signs.py::test_it" in mutations.unplanted([PLANTED], toy)
