from __future__ import annotations

import pytest
import torch

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
