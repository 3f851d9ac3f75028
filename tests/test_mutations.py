"""The list of planted bugs fits the sources, and the tool tells bugs that tests notice from those that none can."""

from __future__ import annotations

import json
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


@pytest.mark.parametrize(("variable", "value"), [("FORCE_COLOR", "1"), ("PYTEST_ADDOPTS", "--color=yes --deselect=x")])
def test_settings_of_the_shell_do_not_change_an_outcome(toy, monkeypatch, variable, value):
    monkeypatch.setenv(variable, value)
    assert mutations.check(PLANTED, toy) == Outcome(PLANTED, CAUGHT, "tests/test_signs.py::test_it")


def test_a_session_that_fails_though_no_test_does_is_an_error(toy):
    (toy / "conftest.py").write_text("def pytest_sessionfinish(session):\n    session.exitstatus = 1\n")
    missed = mutations.check(replace(PLANTED, old="a comment", new="another"), toy)
    assert (missed.result, "1 passed" in missed.shown) == (ERROR, True)


SKIPS = {
    "a mark": "import pytest\n\n\n@pytest.mark.skip\ndef test_it():\n    pass\n",
    "a module": "import pytest\n\npytest.importorskip('no_such_package')\n\n\ndef test_it():\n    pass\n",
}


@pytest.mark.parametrize("source", SKIPS.values(), ids=SKIPS)
def test_tests_that_are_skipped_are_named(toy, source):
    (toy / "tests" / "test_signs.py").write_text(source)
    assert re.search(r"^SKIPPED .*test_signs.py", mutations.unplanted([PLANTED], toy), re.MULTILINE)


# ----------------------------------------------------------------------------------------------- the command
MISSABLE = replace(PLANTED, name="comment", old="a comment", new="another")


def with_table(toy: Path, *planted: Mutation) -> None:
    """Write the table of the tree."""
    rows = ("".join(f"{key} = {json.dumps(value)}\n" for key, value in vars(m).items()) for m in planted)
    (toy / "tests" / "mutations.toml").write_text("".join(f"[[mutation]]\n{row}" for row in rows))


def test_the_status_is_zero_only_if_all_bugs_are_caught_and_names_choose_bugs(toy, capsys):
    with_table(toy, PLANTED, MISSABLE)
    assert mutations.main(["--jobs", "2"], toy) == 1
    assert capsys.readouterr().out.splitlines() == [
        "caught  sign: tests/test_signs.py::test_it",
        "MISSED  comment: ",
        "1 of 2 planted bugs are caught.",
    ]
    assert mutations.main(["sig"], toy) == 0
    assert capsys.readouterr().out.splitlines()[1:] == ["1 of 1 planted bugs are caught."]


@pytest.mark.parametrize(
    ("stale", "message"),
    [(replace(PLANTED, old="no such text"), "update the table"), (replace(PLANTED, file="gone.py"), "gone.py")],
)
def test_an_entry_that_no_longer_fits_is_an_error_and_others_are_still_checked(toy, capsys, stale, message):
    with_table(toy, replace(stale, name="stale"), PLANTED)
    assert mutations.main([], toy) == 1
    first, second, last = capsys.readouterr().out.splitlines()
    assert first.startswith("ERROR   stale: ")
    assert message in first
    assert second == "caught  sign: tests/test_signs.py::test_it"
    assert last == "1 of 2 planted bugs are caught."


def test_an_unknown_name_is_refused(toy, capsys):
    with_table(toy, PLANTED)
    with pytest.raises(SystemExit) as stop:
        mutations.main(["tan", "cos"], toy)
    assert stop.value.code == 2
    assert "no bug of mutations.toml has a name with tan or cos." in capsys.readouterr().err


def test_nothing_is_planted_where_tests_fail_without_a_bug(toy, capsys):
    with_table(toy, PLANTED)
    (toy / SOURCES / "signs.py").write_text("def minus(x):\n    return x\n")
    assert mutations.main([], toy) == 1
    shown = capsys.readouterr().out
    assert shown.startswith("the tests fail or are skipped without a planted bug:\n")
    assert "FAILED tests/test_signs.py::test_it" in shown
    assert "caught" not in shown
