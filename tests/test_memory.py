"""Stated memory bounds hold, measured in a separate process."""

from __future__ import annotations

import subprocess
import sys

import pytest

SCRIPT = """
import resource, torch
from vaerdict.models import PPCA
from vaerdict.noise import seeded
from vaerdict.inference import posterior
from vaerdict.proposals import Normal

generator = seeded(0)
model = PPCA(torch.randn(10, 6, generator=generator) / 6**0.5, 0.7)
x, _ = model.simulate(10_000, generator=generator)
proposals = {str(full): Normal(full).make(x, 6, hidden=(64,), generator=generator) for full in (False, True)}
sample = posterior(model, x, proposals, 5_000, seed=0)
estimate = sample.expect(lambda z: (z[..., 0] >= 0.5).double())
assert estimate.value.shape == sample.khat.shape == (10_000,)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20)
"""


@pytest.mark.slow
def test_ten_thousand_observations_by_five_thousand_draws_stay_under_four_gib():
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True)
    assert float(done.stdout) < 4
