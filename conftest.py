from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from vaerdict import cli
from vaerdict.cli import progress
from vaerdict.inference import blocks
from vaerdict.noise import seeded

STATUS = pytest.StashKey[set[str] | None]()
CHANGED = pytest.StashKey[list[str]]()


def git_status() -> set[str] | None:
    """Changed and untracked files below this folder; None without git or a repository."""
    command = ["git", "-C", str(Path(__file__).parent), "status", "--porcelain", "--untracked-files=all", "--", "."]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    except (OSError, subprocess.SubprocessError):
        return None
    return set(done.stdout.splitlines())


def pytest_sessionstart(session: pytest.Session) -> None:
    session.config.stash[STATUS] = git_status()


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fail a session that changed the working tree."""
    before, after = session.config.stash.get(STATUS, None), git_status()
    if before is not None and after is not None and before != after:
        session.config.stash[CHANGED] = sorted(before ^ after)
        if session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter) -> None:
    changed = terminalreporter.config.stash.get(CHANGED, [])
    if changed:
        terminalreporter.section("the tests changed the working tree", red=True)
        terminalreporter.write_line("\n".join(changed))


@pytest.fixture
def generator() -> torch.Generator:
    return seeded(20200429)


@pytest.fixture(autouse=True)
def seeds_are_fixed(monkeypatch):
    """Calls without ``seed=`` are repeatable in the tests; one test checks that they differ elsewhere."""
    for module in (blocks, sys.modules["vaerdict.inference.check"]):
        monkeypatch.setattr(module, "fresh_seed", lambda: 20200429)


@pytest.fixture(autouse=True)
def global_state_is_left_alone():
    """Fail a test whose code changed torch's global random state, default dtype or gradient mode."""
    state, dtype = torch.random.get_rng_state().clone(), torch.get_default_dtype()
    yield
    assert torch.equal(torch.random.get_rng_state(), state), "the global random state was used"
    assert torch.get_default_dtype() == dtype
    assert torch.is_grad_enabled()


@pytest.fixture
def command(monkeypatch, capsys):
    """Run `vaerdict ...` in this process; returns exit code, stdout, stderr."""

    monkeypatch.setattr(progress, "FIRST_S", float("inf"))  # no lines about progress, however slow the machine

    def run(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["vaerdict", *map(str, arguments)])
        with pytest.raises(SystemExit) as stop:
            cli.main()
        out, err = capsys.readouterr()
        return int(stop.value.code or 0), out, err

    return run
