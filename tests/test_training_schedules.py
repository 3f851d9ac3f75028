"""Annealing of the KL term, and lagging inference networks."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from scipy import stats
from torch import Tensor, nn

from training_toys import SHORT, X, member, short_train, stack_of
from vaerdict.distributions import StandardNormal
from vaerdict.models.ppca import PPCA
from vaerdict.proposals import Amortised
from vaerdict.training import AGG, CONSTANT, CYCLIC, VAE, Lagging, Member, Settings, constant, cyclical, warm_up
from vaerdict.training.convergence import TrainingState
from vaerdict.training.data import SharedRows
from vaerdict.training.loop import _beta, _lagging_steps
from vaerdict.training.stacks import Stack


# ------------------------------------------------------------------------------------------------- schedules
def test_schedules():
    rise = warm_up(0.5)
    assert [rise(t) for t in (0, 0.25, 0.5, 0.75, 1)] == [0, 0.5, 1, 1, 1]
    cycle = cyclical(2, 0.5)
    assert [cycle(t) for t in (0, 0.125, 0.25, 0.375, 0.5, 0.625, 0.75, 1)] == [0, 0.5, 1, 1, 0, 0.5, 1, 1]
    assert {constant(0.3)(t) for t in (0, 0.5, 1)} == {0.3}


def test_constant_annealing_has_the_mean_weight_of_cyclical():
    times = [(i + 0.5) / 10_000 for i in range(10_000)]
    weights = [sum(map(recipe.annealing, times)) / len(times) for recipe in (CONSTANT, CYCLIC)]
    assert weights[0] == pytest.approx(weights[1], abs=1e-3)


@pytest.mark.parametrize("stacked", [False, True])
def test_beta_multiplies_the_kl_term(stacked):
    half, none = replace(VAE, name="half", annealing=lambda done: 0.5), replace(VAE, name="none", annealing=warm_up())
    members = [member(none, 0), member(half, 1), member(VAE, 2)]
    groups = [members] if stacked else [[m] for m in members]
    losses = torch.cat([_first_losses(group) for group in groups])
    for m, beta, loss in zip(members, (0.0, 0.5, 1.0), losses, strict=True):
        stack = stack_of(m)
        z = (q := m.proposal(X[:9])).transform(stack.proposal.noise(X[:9], 4, stack.source))
        kl = q.log_prob(z) - StandardNormal(2).log_prob(z)
        log_lik = m.model.log_joint(X[:9], z) - StandardNormal(2).log_prob(z)
        torch.testing.assert_close(loss, (beta * kl - log_lik).mean().detach())


def _first_losses(members: list[Member]) -> Tensor:
    stack = stack_of(*members)
    x = X[:9].expand(len(members), 9, 5) if len(members) > 1 else X[:9]
    return stack.phi_loss(x, stack.proposal.noise(x, 4, stack.source), _beta(stack, 0.0)).detach()


def test_annealing_is_a_function_of_the_fraction_of_training_done():
    fractions: list[float] = []

    def annealing(done: float) -> float:
        fractions.append(done)
        return 1.0

    short_train([member(replace(VAE, annealing=annealing), 0)], replace(SHORT, epochs=4))
    assert fractions == [0, 0.25, 0.5, 0.75]


# --------------------------------------------------------------------------------------------------- lagging
class Identity(nn.Module):
    """An encoder whose q(z | x) is N(x, sd^2)."""

    stackable = True

    def __init__(self, sd: float) -> None:
        super().__init__()
        raw = math.log(math.expm1(sd - 1e-6)) - math.log(math.e - 1)
        self.raw = nn.Parameter(torch.tensor([raw], dtype=torch.double))

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([x, self.raw.unsqueeze(-2).expand_as(x)], -1)


def information(sd: float, x: Tensor, n_members: int) -> Tensor:
    q = Amortised(Identity(sd), 1, full=False)
    model = PPCA(torch.ones(1, 1).double(), 1.0)
    return stack_of(*(Member(model, q, AGG, seed) for seed in range(n_members))).mutual_information(SharedRows(x))


def test_mutual_information_of_a_gaussian_channel():
    """For x ~ N(0, 1) and z = x + sd e it is log(1 + 1/sd^2) / 2; x by quantiles, so that only z is random."""
    x = torch.as_tensor(stats.norm.ppf((torch.arange(400) + 0.5) / 400)).unsqueeze(-1)
    for sd in (0.5, 1.0, 2.0):
        estimates = information(sd, x, 30)
        assert estimates.shape == (30,)
        assert estimates.std() > 0  # members have their own noise
        assert estimates.mean().item() == pytest.approx(0.5 * math.log(1 + sd**-2), abs=0.015)
    assert information(0.9, x, 30).mean().item() != pytest.approx(0.5 * math.log(2), abs=0.015)  # the check can fail


def test_mutual_information_is_at_most_the_log_of_the_number_of_observations():
    x = torch.arange(10, dtype=torch.double).unsqueeze(-1)
    torch.testing.assert_close(information(0.01, x, 1), torch.tensor([math.log(10)]).double())
    torch.testing.assert_close(information(1.0, torch.zeros(10, 1).double(), 1), torch.zeros(1).double())


def test_only_members_in_their_lagging_phase_take_additional_steps():
    aggressive = replace(AGG, lagging=Lagging(inner=2))
    stack = stack_of(*(member(aggressive, seed) for seed in range(3)))
    stack.phi_step(X[:50].expand(3, 50, 5), 5, None)  # so that the moments are not zero
    state = TrainingState.start(stack)
    state.lagging = [True, False, True]
    before, noise = [t.clone() for t in stack.phi.tensors()], [g.get_state() for g in stack.generators]
    _lagging_steps(stack, SharedRows(X[:200]), 50, SHORT, state, None)
    for old, new in zip(before, stack.phi.tensors(), strict=True):
        assert torch.equal(old[1], new[1])
        assert not torch.equal(old[0], new[0])
        assert not torch.equal(old[2], new[2])
    assert stack.phi.steps.flatten().tolist() == [3, 1, 3]
    unchanged = [torch.equal(a, g.get_state()) for a, g in zip(noise, stack.generators, strict=True)]
    assert unchanged == [False, True, False]


def test_lagging_ends_when_information_stops_rising_or_its_epochs_are_over(monkeypatch):
    calls: list[list[bool]] = []
    original = Stack.phi_step

    def phi_step(self, x, k, beta, mask=None):
        calls.append([] if mask is None else mask.tolist())
        return original(self, x, k, beta, mask)

    scripted = iter([[1.0, 1.0, 1.0], [2.0, 0.5, 2.0], [1.5, 9.0, 3.0], [0.0, 9.9, 4.0]])
    monkeypatch.setattr(Stack, "phi_step", phi_step)
    monkeypatch.setattr(Stack, "mutual_information", lambda self, x, most: torch.tensor(next(scripted)))
    members = [member(replace(AGG, lagging=Lagging(inner=1, epochs=4)), seed) for seed in range(3)]
    short_train(members, replace(SHORT, epochs=6, batch_size=200, check_every=1))
    masks = [m for m in calls if m]
    # epochs 1 and 2: all members; epoch 3: not the second; epoch 4: only the third; then the phase is over
    assert masks == [[True] * 3, [True] * 3, [True, False, True], [False, False, True]]
    assert len(calls) == len(masks) + 6


def test_information_is_checked_every_epoch_whatever_check_every(monkeypatch):
    n_lagging_steps = 0
    original = Stack.phi_step

    def phi_step(self, x, k, beta, mask=None):
        nonlocal n_lagging_steps
        n_lagging_steps += mask is not None
        return original(self, x, k, beta, mask)

    rising = iter(range(100))
    monkeypatch.setattr(Stack, "phi_step", phi_step)
    monkeypatch.setattr(Stack, "mutual_information", lambda self, x, most: torch.tensor([float(next(rising))]))
    agg = replace(AGG, lagging=Lagging(inner=1, epochs=3))
    short_train([member(agg, 0)], replace(SHORT, epochs=8, batch_size=200, check_every=8, patience=None))
    assert n_lagging_steps == 3


def test_an_annealing_schedule_is_followed_to_its_end():
    settings = Settings(n_particles=2, epochs=12, patience=1, drops=0, check_every=1, min_gain=10.0)
    constant, annealed = short_train([member(VAE, 0), member(replace(CYCLIC, annealing=warm_up(0.9)), 0)], settings)
    assert (constant.converged, constant.epochs < 6) == (True, True)
    assert (annealed.converged, annealed.epochs) == (False, 12)
