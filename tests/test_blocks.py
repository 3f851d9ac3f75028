"""Answers in blocks: what is asked together, the size of blocks and the engine do not matter; seeds repeat."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.distributions import Gamma, Independent

import vaerdict as vd
from checks import assert_within
from inference_toys import MODEL, Folded, Modes, Near
from vaerdict import noise
from vaerdict.core import SettingError
from vaerdict.engines import Local, Ray, Threads
from vaerdict.inference import Answer, blocks
from vaerdict.models.ppca import PPCA
from vaerdict.noise import row_keys

X, _ = MODEL.simulate(60, generator=vd.seeded(1))


def positive(z: Tensor) -> Tensor:
    return (z[..., 0] > 0).double()


class Ring:
    """The posterior is a ring whose radius is x: it takes adaptation or sequential Monte Carlo."""

    prior = Independent(torch.distributions.Normal(torch.zeros(2).double(), 2 * torch.ones(2).double()), 1)

    def log_joint(self, x: Tensor, z: Tensor) -> Tensor:
        return self.prior.log_prob(z) - 0.5 * ((z.norm(dim=-1) - x[..., 0]) / 0.05).square()


class Waiting:
    """z ~ Gamma(2, 1), x ~ Poisson(z): a prior without a known transform of noise."""

    prior = Independent(Gamma(torch.full((1,), 2.0).double(), torch.ones(1).double()), 1)

    def log_joint(self, x: Tensor, z: Tensor) -> Tensor:
        return self.prior.log_prob(z) + torch.distributions.Poisson(z[..., 0]).log_prob(x[..., 0])


CASES = {
    "easy": (MODEL, X[:30], Near(1.3), 0.05),
    "without proposals": (MODEL, X[:30], None, 0.05),
    "rare": (MODEL, X[:30] + 4, None, 0.005),
    "folded": (Folded(), Folded().simulate(20), None, 0.1),
    "modes": (Modes(torch.tensor([[-3.0], [3.0], [1.0]]).double(), 0.3), X[:10, :1], None, 0.1),
    "ring": (Ring(), torch.linspace(1, 3, 6).double().unsqueeze(-1), None, 0.1),
    "waiting": (Waiting(), torch.arange(8.0).double().unsqueeze(-1), None, 0.05),
}


def assert_same(a: Answer, b: Answer, rows: slice | list[int]) -> None:
    """B is the answer to some of the rows of a; rounding differs with the shape of a batch."""
    index = torch.arange(len(a.value))[rows]
    torch.testing.assert_close(a.value[index], b.value, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(a.mcse[index], b.mcse, rtol=1e-6, atol=1e-9)
    assert torch.equal(a.verdict[index], b.verdict)
    assert torch.equal(a.draws[index], b.draws)
    assert torch.equal(a.cost[index], b.cost)
    assert [a.stage[i] for i in index] == b.stage
    assert torch.equal(a.scope.searches[index], b.scope.searches)


@pytest.mark.parametrize("name", CASES)
def test_an_answer_does_not_depend_on_the_other_observations(name):
    model, x, q, tolerance = CASES[name]
    whole = vd.expect(model, x, positive, q, 256, tolerance=tolerance, seed=3)
    if name == "ring":
        assert {"ADAPTED", "SMC"} & set(whole.stage)
    alone = vd.expect(model, x[2:3], positive, q, 256, tolerance=tolerance, seed=3)
    assert_same(whole, alone, slice(2, 3))
    order = [4, 0, 3]
    assert_same(whole, vd.expect(model, x[order], positive, q, 256, tolerance=tolerance, seed=3), order)
    in_blocks = vd.expect(model, x, positive, q, 256, tolerance=tolerance, seed=3, block=4)
    assert_same(whole, in_blocks, slice(None))


def test_seeds_repeat_and_calls_without_one_differ(monkeypatch):
    first, again, other = (vd.expect(MODEL, X, positive, n=256, tolerance=0.1, seed=s).value for s in (5, 5, 6))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    monkeypatch.setattr(blocks, "fresh_seed", noise.fresh_seed)
    values = [vd.expect(MODEL, X, positive, n=256, tolerance=0.1).value for _ in range(2)]
    assert not torch.equal(*values)
    draws = [vd.posterior(MODEL, X, Near(), 50).z for _ in range(2)]
    assert not torch.equal(*draws)


def test_equal_observations_have_noise_of_their_own():
    x = X[:1].expand(40, 5)
    answer = vd.expect(MODEL, x, lambda z: z[..., 0], n=256, tolerance=0.1, seed=0)
    assert len(answer.value.unique()) == 40
    keys = row_keys(torch.cat([X, X[:3]]))
    assert torch.equal(keys[:60], row_keys(X))
    assert len(keys.unique()) == 63
    parts = row_keys({"a": X, "b": torch.arange(60)})
    assert not torch.equal(parts, keys[:60])
    assert torch.equal(parts[5:], row_keys({"a": X[5:], "b": torch.arange(5, 60)}))


def test_particles_in_blocks_are_those_of_one_block():
    """Rounding, which differs with the shape of a batch, may lead one observation in ten to other kernels."""
    whole, cut = (
        vd.posterior(MODEL, X, Near(1.3), 256, tolerance=0.1, query=positive, seed=0, block=b) for b in (1000, 7)
    )
    k = min(len(whole.z), len(cut.z))
    same = (whole.z[:k] - cut.z[:k]).abs().amax((0, 2)) < 1e-5
    assert same.double().mean() > 0.9
    first, second = whole.expect(positive), cut.expect(positive)
    torch.testing.assert_close(first.value[same], second.value[same], rtol=1e-6, atol=1e-6)
    assert_within(first.value - second.value, torch.zeros(60), torch.hypot(first.mcse, second.mcse), rate=1e-6)
    assert whole.record is not None
    assert cut.record is not None
    assert all(a == b for a, b, s in zip(whole.record.reason, cut.record.reason, same.tolist(), strict=True) if s)


@pytest.mark.parametrize("engine", [Threads(2), Local(2), pytest.param(Ray(workers=2), id="ray")])
def test_engines_give_the_same_answers(engine):
    if isinstance(engine, Ray):
        pytest.importorskip("ray")
    model = PPCA(MODEL.weight.detach().float(), 0.8)
    x = X.float()
    done: list[int] = []
    settings = {"n": 128, "tolerance": 0.2, "seed": 0, "block": 30}
    here = vd.expect(model, x, torch.sigmoid, **settings)
    there = vd.expect(model, x, torch.sigmoid, engine=engine, progress=lambda d, n, w: done.append(d), **settings)
    torch.testing.assert_close(here.value, there.value, rtol=1e-4, atol=1e-4)
    assert done == [30, 60]


def test_settings_that_cannot_be_used_are_refused():
    with pytest.raises(SettingError, match="give seed= a whole number"):
        vd.expect(MODEL, X, positive, engine=Threads(2), seed=vd.seeded(0))
    with pytest.raises(SettingError, match=r"cannot be sent to other processes .* use vaerdict.engines.Threads"):
        vd.expect(MODEL, X, lambda z: z, engine=Local(2), block=10)
    with pytest.raises(SettingError, match="block=0 must be a whole number of at least 1"):
        vd.expect(MODEL, X, positive, block=0)


def test_seeds_may_be_numpy_integers():
    numpy = pytest.importorskip("numpy")
    first, again = (vd.expect(MODEL, X[:5], positive, n=128, tolerance=0.2, seed=s).value for s in (7, numpy.int64(7)))
    assert torch.equal(first, again)
