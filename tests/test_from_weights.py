"""Weighted draws from elsewhere: arrays of NumPy, torch and JAX, and the log-weights of a NumPyro guide."""

from __future__ import annotations

import runpy
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributions as td

import vaerdict as vd
from checks import assert_within
from vaerdict import diagnostics, estimators
from vaerdict.core import DataError, ShapeError, WeightError
from vaerdict.noise import seeded
from vaerdict.optional import isolated

EXAMPLES = Path(__file__).parent.parent / "examples"


def test_arrays_give_what_the_estimators_give():
    rng = np.random.default_rng(0)
    z, log_w = rng.normal(size=(500, 3)), rng.normal(size=(500, 3))
    answer = vd.from_weights(log_w.astype(np.float32), z)
    weights = torch.from_numpy(log_w.astype(np.float32)).double()
    assert torch.equal(answer.khat, diagnostics.khat(weights))
    assert torch.equal(answer.ess, diagnostics.ess(weights))
    assert torch.equal(answer.verdict, diagnostics.verdict(answer.khat, answer.ess, 500))
    value, mcse, _, _ = estimators.psis(torch.from_numpy(z), weights)
    assert torch.equal(answer.expect(lambda z: z).value, value)
    assert torch.equal(answer.expect(lambda z: z).mcse, mcse)
    assert answer.log_evidence.shape == (3,)
    assert torch.equal(vd.from_weights(weights).khat, answer.khat)  # without draws


def test_draws_of_one_posterior_by_name():
    rng = np.random.default_rng(1)
    draws = {"layer.weight": rng.normal(size=(200, 4, 2)), "_shift": rng.normal(size=200) > 0}
    answer = vd.from_weights(np.zeros(200), draws)
    assert answer.khat.isnan()
    assert vd.Verdict(int(answer.verdict)) == vd.Verdict.OK  # equal weights
    value = answer.expect(lambda z: z.shift).value
    assert value.item() == pytest.approx(draws["_shift"].mean())
    assert answer.expect(lambda z: z.layer_weight).value.shape == (4, 2)
    assert answer.resample(10, generator=seeded(0)).layer_weight.shape == (10, 4, 2)
    bad = vd.from_weights(3 * np.random.default_rng(2).standard_cauchy(200), draws)
    assert vd.Verdict(int(bad.verdict)) == vd.Verdict.REFUSE


@pytest.mark.parametrize(
    ("log_w", "z", "error", "message"),
    [
        (["a"], None, DataError, "log_w is no array of numbers"),
        ([[1.0], [1.0, 2.0]], None, DataError, "log_w is no array of numbers"),
        ([0.0, 1.0], [0.0], ShapeError, r"z has shape \(1,\), the log-weights \(2,\)"),
        ([0.0, 1.0], {"a": [[0.0, 1.0]]}, ShapeError, r"z\['a'\] has shape \(1, 2\)"),
        ([0.0, np.nan], None, WeightError, "1 of 2 log-weights are NaN"),
        ([], None, ShapeError, "no particle"),
    ],
)
def test_what_cannot_be_used_is_refused(log_w, z, error, message):
    with pytest.raises(error, match=message):
        vd.from_weights(log_w, z)


def test_log_weights_of_a_numpyro_guide(capsys):
    pytest.importorskip("numpyro")
    with isolated(0):
        names = runpy.run_path(str(EXAMPLES / "numpyro_guide.py"))
    assert "REFUSE" in capsys.readouterr().out
    draws = names["answer"].z.line
    loc, scale = (torch.from_numpy(np.array(names["fit"].params[f"line_auto_{part}"])) for part in ("loc", "scale"))
    dose, died = (torch.from_numpy(np.array(t)).double() for t in names["data"])
    lines = torch.cartesian_prod(torch.linspace(-20, 30, 500).double(), torch.linspace(-20, 50, 700).double())

    def log_joint(line: torch.Tensor) -> torch.Tensor:
        logits = line[..., :1] + line[..., 1:] * dose
        return td.Bernoulli(logits=logits).log_prob(died).sum(-1) + td.Normal(0.0, 5.0).log_prob(line).sum(-1)

    by_hand = log_joint(draws) - td.Normal(loc, scale).log_prob(draws).sum(-1)
    torch.testing.assert_close(names["answer"].log_w, by_hand, rtol=1e-4, atol=1e-4)  # JAX computes in float32
    exact = log_joint(lines).softmax(0) @ lines[:, 1]
    assert exact.item() == pytest.approx(6.88, abs=0.005)
    assert_within(names["slope"].value, exact, names["slope"].mcse, rate=1e-6)
    with pytest.raises(AssertionError, match="standard errors"):
        assert_within(names["z"]["line"][:, 1].mean().item() + 0 * exact, exact, names["slope"].mcse / 3, rate=1e-2)
