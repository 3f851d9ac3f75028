from __future__ import annotations

import sys

import pytest
import torch

from vaerdict import cli
from vaerdict.noise import seeded


@pytest.fixture
def generator() -> torch.Generator:
    return seeded(20200429)


@pytest.fixture(autouse=True)
def global_state_is_left_alone():
    """Fail a test whose code changed torch's global random state, default type or thread-wide grad mode."""
    state, dtype = torch.random.get_rng_state().clone(), torch.get_default_dtype()
    yield
    assert torch.equal(torch.random.get_rng_state(), state), "the global random state was used"
    assert torch.get_default_dtype() == dtype
    assert torch.is_grad_enabled()


@pytest.fixture
def command(monkeypatch, capsys):
    """Run `vaerdict ...` in this process; returns exit code, stdout, stderr."""

    def run(*words: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["vaerdict", *map(str, words)])
        with pytest.raises(SystemExit) as stop:
            cli.main()
        out, err = capsys.readouterr()
        return int(stop.value.code or 0), out, err

    return run
