"""The three steps for conditions and several latents: structured observations, proposals level by level."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.distributions import Categorical, Independent, Normal

import vaerdict as vd
from checks import assert_mean, assert_within
from vaerdict.core import SettingError
from vaerdict.inference.packing import Packing
from vaerdict.noise import as_source
from vaerdict.proposals import Levels

RATE = 1e-6
QUICK = vd.Settings(n_particles=10, epochs=40, batch_size=50, patience=None, lr_phi=1e-2)


class TwoLevels(nn.Module):
    """b ~ N(0, 1), a ~ N((b, -b) + c, I), x ~ N(a, 0.5^2 I): the posterior given x and c is normal."""

    def __init__(self) -> None:
        super().__init__()
        self.slope = nn.Parameter(torch.tensor([[0.5, -0.5]]))

    @property
    def prior(self) -> vd.JointPrior:
        top = Independent(Normal(torch.zeros(1), torch.ones(1)), 1)
        return vd.JointPrior(b=top, a=lambda b, x: Independent(Normal(b * self.slope + x[1], 1.0), 1))

    def log_joint(self, x: tuple[Tensor, Tensor], z) -> Tensor:
        return Normal(z.a, 0.5).log_prob(x[0]).sum(-1) + self.prior.log_prob(z, x)

    def exact(self, x: tuple[Tensor, Tensor]) -> Tensor:
        """E[b | x, c]."""
        slope = self.slope.detach()[0]
        precision = 1 + slope.square().sum() / 1.25
        return ((x[0] - x[1]) * slope).sum(-1) / 1.25 / precision


def simulated(n: int, seed: int) -> tuple[Tensor, Tensor]:
    b, e, f, c = torch.randn(4, n, 2, generator=vd.seeded(seed))
    slope = torch.tensor([1.0, -1.0])
    return b[:, :1] * slope + c[:, :1] + e + 0.5 * f, c[:, :1]


@pytest.fixture(scope="module")
def steps() -> vd.ThreeStep:
    fit = vd.ThreeStep(TwoLevels(), objectives=[vd.IWAE], proposals=[vd.WW], settings=QUICK, hidden=(16,))
    return fit.fit(simulated(400, 0), simulated(100, 1))


def test_a_fit_of_structured_observations_answers_for_the_users_model(steps):
    x = simulated(40, 2)
    assert isinstance(steps.model, TwoLevels)
    assert steps.model.slope[0, 0] > 0.7  # it was trained: from 0.5 towards 1
    for options in ({"n": 2000}, {"n": 500, "tolerance": 0.1}):
        answer = steps.posterior(x, seed=0, **options)
        estimate = answer.expect(lambda z: z.b[..., 0])
        assert (answer.verdict == vd.Verdict.OK).double().mean() > 0.9
        assert_within(estimate.value, steps.model.exact(x).double(), estimate.mcse, rate=RATE)


def test_it_is_saved_and_loaded(steps, tmp_path):
    path, x = steps.save(tmp_path / "levels"), simulated(5, 2)
    settings = {"objectives": [vd.IWAE], "proposals": [vd.WW]}
    again = vd.ThreeStep.load(path, TwoLevels(), like=x, **settings)
    first, second = (s.posterior(x, 100, seed=0).log_w for s in (steps, again))
    assert torch.equal(first, second)
    with pytest.raises(SettingError, match="pass `load` some of them as like="):
        vd.ThreeStep.load(path, TwoLevels(), **settings)
    with pytest.raises(SettingError, match="like= has the parts"):
        vd.ThreeStep.load(path, TwoLevels(), like=x[::-1], **settings)


def test_levels_are_given_those_before_them(generator):
    """The density integrates to one, drives the second level by the first, and its gradient passes through the path."""
    x = torch.randn(3, 2, generator=generator, dtype=torch.double)
    q = Levels((1, 1), vd.Student(df=4.0)).make(x, 2, hidden=(8,), generator=generator).double()
    z, log_q = q.draw(x, 20_000, generator=generator)
    torch.testing.assert_close(q.log_prob(z, x), log_q)
    other = torch.distributions.Independent(torch.distributions.StudentT(4.0, torch.zeros(2).double(), 0.8), 1)
    assert_mean((other.log_prob(z) - log_q).exp().clamp_max(50), 1.0, rate=RATE)
    shifted = torch.stack([z[:50, :, 0] + 1, z[:50, :, 1]], -1)
    first = q.map.levels[0](x).log_prob(shifted[..., :1]) - q.map.levels[0](x).log_prob(z[:50, :, :1])
    assert ((q.log_prob(shifted, x) - log_q[:50]) - first).abs().max() > 1e-3  # the second level moved too
    conditional = q(x)
    noise = conditional.noise(4, as_source(generator))
    path = conditional.transform(noise)
    stopped = conditional.detach().log_prob(path)
    names = [name for name, p in q.named_parameters() if p.requires_grad]
    through = torch.autograd.grad(stopped.sum(), [p for p in q.parameters() if p.requires_grad], allow_unused=True)
    assert any(g is not None and g.abs().sum() > 0 for g in through), names
    assert not conditional.detach().log_prob(path.detach()).requires_grad


def test_observations_are_packed_and_unpacked():
    ages = torch.arange(4.0).unsqueeze(-1)
    x = {"image": torch.arange(16.0).reshape(4, 1, 2, 2), "kind": torch.tensor([0, 3, 1, 2]), "age": ages}
    packing = Packing.of(x)
    matrix = packing.pack(x)
    assert matrix.shape == (4, 6)
    again = packing.unpack(matrix)
    assert all(torch.equal(again[name], x[name]) and again[name].dtype == x[name].dtype for name in x)


def test_closures_that_would_not_be_trained_are_refused():
    class Closed(TwoLevels):
        prior = None

        def __init__(self) -> None:
            super().__init__()
            top = Independent(Normal(torch.zeros(1), torch.ones(1)), 1)
            self.prior = vd.JointPrior(b=top, a=lambda b: Independent(Normal(b * self.slope, 1.0), 1))

    with pytest.raises(SettingError, match="make `prior` a property of the model"):
        vd.ThreeStep(Closed(), settings=QUICK).fit(simulated(20, 0), simulated(20, 1))

    class States(nn.Module):
        prior = Categorical(torch.ones(3))

        def log_joint(self, x: Tensor, c: Tensor) -> Tensor:
            return self.prior.log_prob(c) + x.sum(-1)

    with pytest.raises(SettingError, match="all latents of the model are discrete"):
        vd.ThreeStep(States(), settings=QUICK).fit(simulated(20, 0)[0], simulated(20, 1)[0])
